/* The kernels of the cross entropy on the processor: against slow formulas in double, against finite differences, and
 * bit for bit against softmax and nll_loss. */
#include "kernel_numbers.h"

#include <tandem/ops.h>

#include <math.h>
#include <string.h>

static const td_kernels *const cpu = &td__cpu_kernels;

enum { IGNORE = -100 };

/* One call, forward and backward. */
struct entropy {
    int64_t n, c, s;
    td_tensor *x, *target, *weight, *grad_y, *out, *statistics, *factor, *grad_x;
};

static int64_t target_of(const struct entropy *k, int64_t i)
{
    return ((int64_t *)td_tensor_data(k->target))[i];
}

/* out and grad_y, weight are of `loss`, the rest of `dtype`. One target in five is ignored. */
static struct entropy new_entropy(const int64_t shape[3], td_dtype dtype, td_dtype loss,
                                  bool weighted, bool each)
{
    int64_t n = shape[0], c = shape[1], s = shape[2];
    struct entropy k = {
        .n = n,
        .c = c,
        .s = s,
        .x = any_tensor(shape, 3, dtype, 5),
        .target = td_empty(SHAPE(n, s), TD_I64, NULL),
        .weight = weighted ? any_tensor(SHAPE(c), loss, 2) : NULL,
        .grad_y = each ? any_tensor(SHAPE(n, s), loss, 1) : any_tensor(NULL, 0, loss, 1),
        .out = any_tensor(SHAPE(n, s), loss, 1),
        .statistics = any_tensor(SHAPE(n, s, 2), statistics_of(dtype), 1),
        .factor = td_full(NULL, 0, -1, TD_F64, NULL),
        .grad_x = any_tensor(shape, 3, dtype, 1),
    };
    for (int64_t i = 0; i < n * s; i++)
        ((int64_t *)td_tensor_data(k.target))[i] = any_integer(5) ? any_integer(c) : IGNORE;
    return k;
}

static void release_entropy(struct entropy *k)
{
    td_tensor_release(k->weight);
    release_all(k->x, k->target, k->grad_y, k->out, k->statistics, k->factor, k->grad_x, NULL);
}

static void run_forward(const struct entropy *k)
{
    CHECK_OK(
        cpu->cross_entropy(k->out, k->statistics, k->factor, k->x, k->target, k->weight, IGNORE));
}

static void run_backward(const struct entropy *k)
{
    CHECK_OK(cpu->cross_entropy_grad(k->grad_x, k->grad_y, k->factor, k->x, k->statistics,
                                     k->target, k->weight, IGNORE));
}

/* Element (n, c, s), where i is s of n. */
static int64_t place_of(const struct entropy *k, int64_t i, int64_t c)
{
    return (i / k->s * k->c + c) * k->s + i % k->s;
}

/* The slow formulas: the greatest and log_sum of target i. */
static void reference_statistics(const struct entropy *k, int64_t i, double statistics[2])
{
    double most = -INFINITY, sum = 0;
    for (int64_t c = 0; c < k->c; c++)
        most = fmax(most, number_at(k->x, place_of(k, i, c)));
    for (int64_t c = 0; c < k->c; c++)
        sum += exp(number_at(k->x, place_of(k, i, c)) - most);
    statistics[0] = most;
    statistics[1] = log(sum);
}

static void check_entropy(const int64_t shape[3], td_dtype dtype, td_dtype loss, bool weighted,
                          bool each)
{
    struct entropy k = new_entropy(shape, dtype, loss, weighted, each);
    double *losses = numbers_of(k.out), *statistics = numbers_of(k.statistics);
    double *grads = numbers_of(k.grad_x), sum = 0;
    run_forward(&k);
    double factor = td_item(k.factor);
    for (int64_t i = 0; i < k.n * k.s; i++) {
        int64_t t = target_of(&k, i);
        bool ignored = t == IGNORE;
        double weight = ignored ? 0 : weighted ? number_at(k.weight, t) : 1;
        double grad = number_at(k.grad_y, each ? i : 0) * factor * weight;
        reference_statistics(&k, i, statistics + 2 * i);
        for (int64_t c = 0; c < k.c; c++) {
            double logarithm = number_at(k.x, place_of(&k, i, c)) - statistics[2 * i] -
                               statistics[2 * i + 1];
            losses[i] = c == t ? -weight * logarithm : losses[i];
            grads[place_of(&k, i, c)] = ignored ? 0 : grad * (exp(logarithm) - (c == t));
        }
        sum += weight;
        for (int part = 0; ignored && part < 2; part++)
            statistics[2 * i + part] = 0;
        losses[i] = ignored ? 0 : losses[i];
    }
    CHECK(sum == 0 || fabs(1 / factor - sum) < 1e-6 * (double)(k.n * k.s + 1));
    check_numbers("cross_entropy", k.out, losses, 4);
    check_numbers("the statistics", k.statistics, statistics, 4);
    if (isfinite(factor)) {
        run_backward(&k);
        check_numbers("cross_entropy_grad", k.grad_x, grads, dtype == TD_F32 ? 16 : 4);
    }
    free(losses), free(statistics), free(grads);
    release_entropy(&k);
}

/* More than a chunk of a row, more than a block of columns, and no multiple of either. */
static const int64_t shapes[][3] = {{1, 1, 1}, {64, 10, 1}, {3, 33, 1},  {5, 1024, 1}, {3, 2500, 1},
                                    {2, 5, 7}, {2, 3, 200}, {2, 130, 3}, {0, 5, 1},    {2, 5, 0}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

TEST(cross_entropy_of_many_shapes)
{
    for (int i = 0; i < SHAPES; i++)
        for (int t = 0; t < FLOAT_DTYPES; t++)
            for (int way = 0; way < 4; way++) {
                td_dtype dtype = float_dtypes[t];
                check_entropy(shapes[i], dtype, dtype, way & 1, way & 2);
                if (dtype == TD_F16 || dtype == TD_BF16)
                    check_entropy(shapes[i], dtype, TD_F32, way & 1, way & 2);
            }
}

static bool same_bits(const td_tensor *a, const td_tensor *b)
{
    size_t bytes = (size_t)td_tensor_numel(a) * td_dtype_size(td_tensor_dtype(a));
    return td_tensor_numel(a) == td_tensor_numel(b) &&
           (!bytes || !memcmp(td_tensor_data(a), td_tensor_data(b), bytes));
}

/* The losses are those of softmax and nll_loss; and those of halves with an f32 result are those of the same numbers in
 * f32, as their gradients are once they are rounded. */
TEST(cross_entropy_has_the_bits_of_its_parts)
{
    for (int i = 0; i < SHAPES; i++)
        for (int t = 0; t < FLOAT_DTYPES; t++) {
            td_dtype dtype = float_dtypes[t], wide = statistics_of(dtype);
            struct entropy k = new_entropy(shapes[i], dtype, wide, true, true);
            run_forward(&k);
            run_backward(&k);
            struct entropy same = k;
            td_tensor *logs = td_empty(shapes[i], 3, wide, NULL), *out = td_clone(k.out);
            td_tensor *rounded = td_empty(shapes[i], 3, dtype, NULL);
            same.x = td_clone(logs);
            CHECK_OK(cpu->copy(same.x, k.x));
            CHECK_OK(cpu->softmax(logs, same.x, true));
            CHECK_OK(cpu->nll_loss(out, NULL, logs, k.target, k.weight, IGNORE));
            CHECK(same_bits(k.out, out));
            same.grad_x = td_clone(logs);
            run_backward(&same);
            CHECK_OK(cpu->copy(rounded, same.grad_x));
            CHECK(same_bits(k.grad_x, rounded));
            release_all(logs, out, rounded, same.x, same.grad_x, NULL);
            release_entropy(&k);
        }
}

static double weighted_losses(const void *arg)
{
    const struct entropy *k = arg;
    run_forward(k);
    return sum_of_products(k->out, k->grad_y) * td_item(k->factor);
}

TEST(cross_entropy_grad_agrees_with_finite_differences)
{
    static const int64_t small[][3] = {{5, 7, 1}, {2, 3, 4}};
    for (int i = 0; i < 2; i++) {
        struct entropy k = new_entropy(small[i], TD_F64, TD_F64, true, true);
        run_forward(&k);
        run_backward(&k);
        check_slopes("cross_entropy", k.x, k.grad_x, weighted_losses, &k);
        release_entropy(&k);
    }
}

/* Whatever the logits are: an ignored target has no part in the loss. */
TEST(ignored_targets_hide_their_logits)
{
    static const int64_t small[][3] = {{2, 5, 1}, {1, 5, 2}};
    static const double bad[] = {NAN, INFINITY, -INFINITY, 1000};
    for (int i = 0; i < 2; i++)
        for (int t = 0; t < FLOAT_DTYPES; t++)
            for (int b = 0; b < 4; b++) {
                struct entropy k = new_entropy(small[i], float_dtypes[t], float_dtypes[t], true,
                                               true);
                int64_t *target = td_tensor_data(k.target);
                target[0] = IGNORE, target[1] = 2;
                for (int64_t c = 0; c < k.c; c++)
                    put_number(k.x, place_of(&k, 0, c), bad[b]);
                run_forward(&k);
                run_backward(&k);
                CHECK(number_at(k.out, 0) == 0 && isfinite(number_at(k.out, 1)));
                for (int64_t c = 0; c < k.c; c++) {
                    CHECK(number_at(k.grad_x, place_of(&k, 0, c)) == 0);
                    CHECK(isfinite(number_at(k.grad_x, place_of(&k, 1, c))));
                }
                release_entropy(&k);
            }
}

/* Large logits neither overflow nor lose the loss; NaN and infinity are not hidden; -infinity is a probability of 0. */
TEST(cross_entropy_of_extreme_logits)
{
    static const float rows[][3] = {{10000, 9999, -10000},
                                    {-10000, -9999, -10002},
                                    {1, NAN, 2},
                                    {1, INFINITY, 2},
                                    {0, -INFINITY, 0}};
    struct entropy k = new_entropy((int64_t[]){5, 3, 1}, TD_F32, TD_F32, false, false);
    memcpy(td_tensor_data(k.x), rows, sizeof rows);
    put_number(k.grad_y, 0, 1);
    for (int i = 0; i < 5; i++)
        ((int64_t *)td_tensor_data(k.target))[i] = 0;
    run_forward(&k);
    CHECK(fabs(number_at(k.out, 0) - log1p(exp(-1))) < 1e-6);
    CHECK(fabs(number_at(k.out, 1) - 1 - log1p(exp(-1) + exp(-3))) < 1e-6);
    CHECK(isnan(number_at(k.out, 2)) && isnan(number_at(k.out, 3)));
    CHECK(fabs(number_at(k.out, 4) - log(2)) < 1e-6);
    run_backward(&k);
    CHECK(isnan(number_at(k.grad_x, 6)) && isnan(number_at(k.grad_x, 10)));
    CHECK(fabs(number_at(k.grad_x, 12) + 0.1) < 1e-6 && number_at(k.grad_x, 13) == 0);
    release_entropy(&k);
}
