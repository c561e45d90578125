/* Kernels of losses on the processor, against slow formulas in double, and what bad targets get. */
#include "kernel_numbers.h"

#include <tandem/ops.h>

#include <math.h>
#include <string.h>

static const td_kernels *const cpu = &td__cpu_kernels;

enum { IGNORE = -100 };

/* ---- Classes --------------------------------------------------------------------------------- */

static td_tensor *any_targets(int64_t n, int64_t s, int64_t classes)
{
    td_tensor *target = td_empty(SHAPE(n, s), TD_I64, NULL);
    int64_t *data = td_tensor_data(target);
    for (int64_t i = 0; i < n * s; i++)
        data[i] = any_integer(5) ? any_integer(classes) : IGNORE;
    return target;
}

struct classes {
    int64_t n, c, s;
    td_tensor *x, *target, *weight, *grad_y, *out, *grad_x;
    td_tensor *factor;
};

/* The gradient of target i's loss, as the kernels are to use it. */
static double grad_of(const struct classes *k, int64_t i)
{
    int64_t t = ((int64_t *)td_tensor_data(k->target))[i];
    if (t == IGNORE)
        return 0;
    double g = number_at(k->grad_y, td_tensor_numel(k->grad_y) == k->n * k->s ? i : 0);
    return g * number_at(k->factor, 0) * (k->weight ? number_at(k->weight, t) : 1);
}

static void check_gradients(const struct classes *k)
{
    double *nll = numbers_of(k->x);
    for (int64_t i = 0; i < k->n * k->c * k->s; i++) {
        int64_t place = i / (k->c * k->s) * k->s + i % k->s, c = i / k->s % k->c;
        double hit = ((int64_t *)td_tensor_data(k->target))[place] == c;
        nll[i] = -hit * grad_of(k, place);
    }
    CHECK_OK(cpu->nll_loss_grad(k->grad_x, k->grad_y, k->factor, k->target, k->weight, IGNORE));
    check_numbers("nll_loss_grad", k->grad_x, nll, 2);
    free(nll);
}

static void check_classes(const int64_t shape[3], td_dtype dtype, bool weighted, bool each)
{
    int64_t n = shape[0], c = shape[1], s = shape[2];
    struct classes k = {
        .n = n,
        .c = c,
        .s = s,
        .x = any_tensor(shape, 3, dtype, 2),
        .target = any_targets(n, s, c),
        .weight = weighted ? any_tensor(SHAPE(c), dtype, 2) : NULL,
        .grad_y = each ? any_tensor(SHAPE(n, s), dtype, 1) : any_tensor(NULL, 0, dtype, 1),
        .out = any_tensor(SHAPE(n, s), dtype, 1),
        .grad_x = any_tensor(shape, 3, dtype, 1),
        .factor = td_full(NULL, 0, 0.125, TD_F64, NULL),
    };
    double *expected = numbers_of(k.out), sum = 0;
    td_tensor *factor = td_full(NULL, 0, -1, TD_F64, NULL);
    for (int64_t i = 0; i < n * s; i++) {
        int64_t t = ((int64_t *)td_tensor_data(k.target))[i];
        double w = t == IGNORE ? 0 : weighted ? number_at(k.weight, t) : 1;
        expected[i] = t == IGNORE ? 0 : -w * number_at(k.x, (i / s * c + t) * s + i % s);
        sum += w;
    }
    CHECK_OK(cpu->nll_loss(k.out, factor, k.x, k.target, k.weight, IGNORE));
    check_numbers("nll_loss", k.out, expected, 2);
    CHECK(sum == 0 || fabs(1 / td_item(factor) - sum) < 1e-6 * (double)(n * s + 1));
    td_tensor_release(factor);
    check_gradients(&k);
    free(expected);
    td_tensor_release(k.weight);
    release_all(k.x, k.target, k.grad_y, k.out, k.grad_x, k.factor, NULL);
}

TEST(classes_of_many_shapes)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {64, 10, 1}, {3, 33, 1}, {2, 1000, 1},
                                        {2, 5, 7}, {2, 3, 200}, {0, 5, 1},  {2, 5, 0}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int t = 0; t < FLOAT_DTYPES; t++)
            for (int way = 0; way < 4; way++)
                check_classes(shapes[s], float_dtypes[t], way & 1, way & 2);
}

TEST(bad_targets_are_named)
{
    td_tensor *x = any_tensor(SHAPE(3, 10, 2), TD_F32, 1),
              *target = td_zeros(SHAPE(3, 2), TD_I64, NULL);
    td_tensor *out = td_zeros(SHAPE(3, 2), TD_F32, NULL), *gx = td_clone(x);
    td_tensor *one = td_full(NULL, 0, 1, TD_F32, NULL);
    td_tensor *factor = td_full(NULL, 0, 77, TD_F64, NULL);
    td_tensor *statistics = td_zeros(SHAPE(3, 2, 2), TD_F32, NULL);
    static const int64_t bad[] = {10, -1, INT64_MAX, INT64_MIN};
    static const char *const text[] = {
        ("at [2, 1] is 10, but there are 10 classes: targets go from 0 "
         "to 9, or are ignore_index, -100"),
        "at [2, 1] is -1,", "at [2, 1] is 9223372036854775807",
        "at [2, 1] is -9223372036854775808"};
    for (int i = 0; i < 4; i++) {
        CHECK_OK(td_fill_(factor, 77));
        ((int64_t *)td_tensor_data(target))[5] = bad[i];
        CHECK_FAILS(cpu->nll_loss(out, factor, x, target, NULL, IGNORE), TD_ERR_INVALID, text[i]);
        CHECK_EQ(td_item(factor), 77);
        CHECK_FAILS(cpu->nll_loss_grad(gx, one, NULL, target, NULL, IGNORE), TD_ERR_INVALID,
                    text[i]);
        CHECK_FAILS(cpu->cross_entropy(out, statistics, factor, x, target, NULL, IGNORE),
                    TD_ERR_INVALID, text[i]);
        CHECK_EQ(td_item(factor), 77);
        CHECK_FAILS(cpu->cross_entropy_grad(gx, one, NULL, x, statistics, target, NULL, IGNORE),
                    TD_ERR_INVALID, text[i]);
    }
    /* ignore_index may be any number, a class too. */
    CHECK_OK(cpu->nll_loss(out, factor, x, target, NULL, INT64_MIN));
    CHECK(td_item(factor) == 1 / 5.0);
    ((int64_t *)td_tensor_data(target))[5] = 3;
    CHECK_OK(cpu->nll_loss(out, factor, x, target, NULL, 3));
    CHECK(td_item(factor) == 1 / 5.0 && number_at(out, 5) == 0);
    release_all(x, target, out, gx, one, factor, statistics, NULL);
}

TEST(integers_are_refused)
{
    td_tensor *x = td_zeros(SHAPE(1, 2, 1), TD_I32, NULL),
              *y = td_zeros(SHAPE(1, 2, 1), TD_I32, NULL);
    CHECK_FAILS(cpu->softmax(y, x, false), TD_ERR_UNSUPPORTED, "not supported for i32");
    CHECK_FAILS(cpu->pair_loss(TD_PAIR_LOSS_MSE, y, x, x, 1), TD_ERR_UNSUPPORTED,
                "not supported for i32");
    release_all(x, y, NULL);
}

/* ---- Pairs ----------------------------------------------------------------------------------- */

static double pair_of(td_pair_loss loss, double x, double y)
{
    if (loss == TD_PAIR_LOSS_MSE)
        return (x - y) * (x - y);
    if (loss == TD_PAIR_LOSS_L1)
        return fabs(x - y);
    return fmax(x, 0) - x * y + log1p(exp(-fabs(x)));
}

static double pair_slope(td_pair_loss loss, double x, double y)
{
    if (loss == TD_PAIR_LOSS_MSE)
        return 2 * (x - y);
    if (loss == TD_PAIR_LOSS_L1)
        return (x > y) - (x < y);
    return 1 / (1 + exp(-x)) - y;
}

static void check_pair(td_pair_loss loss, int64_t n, td_dtype dtype)
{
    td_tensor *x = any_tensor(SHAPE(n), dtype, 4), *y = any_tensor(SHAPE(n), dtype, 1);
    td_tensor *out = any_tensor(SHAPE(n), dtype, 1), *sum = any_tensor(NULL, 0, dtype, 1);
    td_tensor *gy = any_tensor(SHAPE(n), dtype, 1), *gx = any_tensor(SHAPE(n), dtype, 1);
    if (n > 3) /* equal ones, where |x - y| has no slope */
        put_number(x, 3, number_at(y, 3));
    double *each = numbers_of(x), *slopes = numbers_of(x), *shared = numbers_of(x), total = 0;
    for (int64_t i = 0; i < n; i++) {
        double a = number_at(x, i), b = number_at(y, i);
        each[i] = pair_of(loss, a, b) * 0.75;
        total += each[i];
        slopes[i] = pair_slope(loss, a, b) * 0.75 * number_at(gy, i);
        shared[i] = pair_slope(loss, a, b) * 0.75 * number_at(sum, 0);
    }
    CHECK_OK(cpu->pair_loss(loss, out, x, y, 0.75));
    check_numbers("pair_loss", out, each, 4);
    CHECK_OK(cpu->pair_loss_grad(loss, gx, gy, x, y, 0.75));
    check_numbers("pair_loss_grad", gx, slopes, 4);
    CHECK_OK(cpu->pair_loss_grad(loss, gx, sum, x, y, 0.75));
    check_numbers("pair_loss_grad of the sum", gx, shared, 4);
    CHECK_OK(cpu->pair_loss(loss, sum, x, y, 0.75));
    check_numbers("pair_loss summed", sum, &total, 32);
    free(each), free(slopes), free(shared);
    release_all(x, y, out, sum, gy, gx, NULL);
}

TEST(pairs_of_many_sizes)
{
    static const int64_t sizes[] = {0, 1, 2, 15, 17, 100, 1023, 1024, 1025, 5000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int t = 0; t < FLOAT_DTYPES; t++)
            for (int loss = TD_PAIR_LOSS_MSE; loss <= TD_PAIR_LOSS_BCE_LOGITS; loss++)
                check_pair((td_pair_loss)loss, sizes[s], float_dtypes[t]);
}

TEST(large_logits_do_not_overflow)
{
    td_tensor *x = td_full(SHAPE(2), 1000, TD_F32, NULL), *y = td_zeros(SHAPE(2), TD_F32, NULL);
    td_tensor *out = td_clone(x), *one = td_full(NULL, 0, 1, TD_F32, NULL);
    put_number(x, 1, -1000);
    CHECK_OK(cpu->pair_loss(TD_PAIR_LOSS_BCE_LOGITS, out, x, y, 1));
    CHECK(number_at(out, 0) == 1000 && number_at(out, 1) == 0);
    CHECK_OK(cpu->pair_loss_grad(TD_PAIR_LOSS_BCE_LOGITS, out, one, x, y, 1));
    CHECK(number_at(out, 0) == 1 && number_at(out, 1) == 0);
    release_all(x, y, out, one, NULL);
}
