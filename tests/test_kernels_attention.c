/* Attention on the processor, against the plain formulas in double, for shapes around the sizes of its
 * blocks, layouts as projections of several heads have them, masks of all kinds. The gradients of f64
 * are compared with finite differences, too. */
#include "kernel_numbers.h"

#include <tandem/ops.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static const td_kernels *const cpu = &td__cpu_kernels;

enum mask { NO_MASK, FULL_MASK, ROW_MASK, COLUMN_MASK, HOLES };

struct attention {
    td_dtype dtype;
    int64_t n, b, l, s, d, e; /* b: items, n batches (0: 1) of b / n heads */
    bool causal;
    enum mask mask_kind;
    double scale;
    td_tensor *q, *k, *v, *y, *lse, *mask, *gy, *gq, *gk, *gv;
};

static const char *name_of(const struct attention *a)
{
    static char text[160];
    snprintf(text, sizeof text,
             "attention %s n %lld b %lld l %lld s %lld d %lld e %lld causal %d mask %d",
             td_dtype_name(a->dtype), (long long)a->n, (long long)a->b, (long long)a->l,
             (long long)a->s, (long long)a->d, (long long)a->e, a->causal, a->mask_kind);
    return text;
}

/* [n, heads, rows, columns]: contiguous, or with the heads between the rows, [n, rows, heads, columns]. */
static td_tensor *make(const struct attention *a, int64_t rows, int64_t columns, bool between)
{
    int64_t heads = a->b / a->n;
    if (!between)
        return any_tensor(SHAPE(a->n, heads, rows, columns), a->dtype, 1);
    td_tensor *base = any_tensor(SHAPE(a->n, rows, heads, columns), a->dtype, 1);
    td_tensor *view = td_transpose(base, 1, 2);
    td_tensor_release(base);
    return view;
}

static void release_base(void *data, void *base)
{
    (void)data;
    td_tensor_release(base);
}

/* Added numbers; of HOLES a third is -infinity, and in the last item's first rows all are. */
static td_tensor *make_mask(const struct attention *a)
{
    int64_t b = a->b, l = a->l, s = a->s;
    td_tensor *base = a->mask_kind == ROW_MASK      ? any_tensor(SHAPE(s), a->dtype, 2)
                      : a->mask_kind == COLUMN_MASK ? any_tensor(SHAPE(l), a->dtype, 2)
                                                    : any_tensor(SHAPE(b, l, s), a->dtype, 2);
    for (int64_t i = 0; a->mask_kind == HOLES && i < b * l * s; i++)
        if (any_integer(3) == 0 || (i / s / l == b - 1 && i / s % l < 3))
            put_number(base, i, -INFINITY);
    int64_t heads = b / a->n, strides[] = {heads * l * s, l * s, s, 1};
    if (a->mask_kind == ROW_MASK)
        strides[0] = strides[1] = strides[2] = 0;
    if (a->mask_kind == COLUMN_MASK)
        strides[0] = strides[1] = strides[3] = 0, strides[2] = 1;
    td_tensor *mask = td_from_blob(td_tensor_data(base), SHAPE(a->n, heads, l, s), strides,
                                   a->dtype, NULL, release_base, base);
    CHECK(mask);
    return mask;
}

static void make_all(struct attention *a, bool between)
{
    a->n = a->n ? a->n : 1;
    a->scale = a->d ? 1 / sqrt((double)a->d) * 2 : 1;
    a->q = make(a, a->l, a->d, between);
    a->k = make(a, a->s, a->d, between);
    a->v = make(a, a->s, a->e, between);
    a->y = make(a, a->l, a->e, between);
    a->gy = make(a, a->l, a->e, between);
    a->gq = make(a, a->l, a->d, between);
    a->gk = make(a, a->s, a->d, between);
    a->gv = make(a, a->s, a->e, between);
    a->lse = any_tensor(SHAPE(a->n, a->b / a->n, a->l), statistics_of(a->dtype), 1);
    a->mask = a->mask_kind ? make_mask(a) : NULL;
}

static void release_attention(struct attention *a)
{
    td_tensor_release(a->mask);
    release_all(a->q, a->k, a->v, a->y, a->lse, a->gy, a->gq, a->gk, a->gv, NULL);
}

static double at(const td_tensor *t, int64_t i, int64_t j, int64_t k)
{
    int64_t heads = td_tensor_size(t, 1);
    return number_at(t, i / heads * td_tensor_stride(t, 0) + i % heads * td_tensor_stride(t, 1) +
                            j * td_tensor_stride(t, 2) + k * td_tensor_stride(t, 3));
}

/* The softmax of a row; returns the logarithm of its sum. Without a finite score all is 0. */
static double weights_of(const struct attention *a, int64_t b, int64_t i, double *p)
{
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < a->s; j++) {
        p[j] = 0;
        for (int64_t d = 0; d < a->d; d++)
            p[j] += at(a->q, b, i, d) * at(a->k, b, j, d);
        p[j] = p[j] * a->scale + (a->mask ? at(a->mask, b, i, j) : 0);
        if (a->causal && j > i)
            p[j] = -INFINITY;
        most = fmax(most, p[j]);
    }
    if (most == -INFINITY) {
        memset(p, 0, (size_t)a->s * sizeof *p);
        return -INFINITY;
    }
    for (int64_t j = 0; j < a->s; j++)
        sum += p[j] = exp(p[j] - most);
    for (int64_t j = 0; j < a->s; j++)
        p[j] /= sum;
    return most + log(sum);
}

struct expected {
    double *y, *lse, *gq, *gk, *gv;
};

/* The result of row i of item b. */
static void expect_row(const struct attention *a, struct expected *x, int64_t b, int64_t i)
{
    double *p = calloc((size_t)a->s + 1, sizeof *p), total = 0;
    double *dp = calloc((size_t)a->s + 1, sizeof *dp);
    x->lse[b * a->l + i] = weights_of(a, b, i, p);
    for (int64_t j = 0; j < a->s; j++)
        for (int64_t e = 0; e < a->e; e++) {
            x->y[(b * a->l + i) * a->e + e] += p[j] * at(a->v, b, j, e);
            x->gv[(b * a->s + j) * a->e + e] += p[j] * at(a->gy, b, i, e);
            dp[j] += at(a->gy, b, i, e) * at(a->v, b, j, e);
        }
    for (int64_t j = 0; j < a->s; j++)
        total += p[j] * dp[j];
    for (int64_t j = 0; j < a->s; j++)
        for (int64_t d = 0; d < a->d; d++) {
            double ds = p[j] * (dp[j] - total) * a->scale;
            x->gq[(b * a->l + i) * a->d + d] += ds * at(a->k, b, j, d);
            x->gk[(b * a->s + j) * a->d + d] += ds * at(a->q, b, i, d);
        }
    free(p), free(dp);
}

static double *zeros(int64_t n)
{
    double *numbers = calloc((size_t)n + 1, sizeof *numbers);
    CHECK(numbers);
    return numbers;
}

/* A contiguous copy is compared, since check_sized() wants one. */
static void check_strided(const char *what, const struct attention *a, td_tensor *tensor,
                          const double *expected, double factor)
{
    char text[256];
    snprintf(text, sizeof text, "%s: %s", name_of(a), what);
    td_tensor *copy = td_contiguous(tensor);
    check_sized(text, copy, expected, factor, 1);
    td_tensor_release(copy);
}

static void check_attention(struct attention a, bool between)
{
    make_all(&a, between);
    struct expected x = {zeros(a.b * a.l * a.e), zeros(a.b * a.l), zeros(a.b * a.l * a.d),
                         zeros(a.b * a.s * a.d), zeros(a.b * a.s * a.e)};
    for (int64_t i = 0; i < a.b * a.l; i++)
        expect_row(&a, &x, i / a.l, i % a.l);
    CHECK_OK(cpu->attention(a.y, NULL, a.q, a.k, a.v, a.mask, a.causal, a.scale));
    check_strided("y", &a, a.y, x.y, 8);
    CHECK_OK(cpu->attention(a.y, a.lse, a.q, a.k, a.v, a.mask, a.causal, a.scale));
    check_strided("y", &a, a.y, x.y, 8);
    check_strided("lse", &a, a.lse, x.lse, a.dtype == TD_F64 ? 16 : 8);
    CHECK_OK(cpu->attention_grad(a.gq, a.gk, a.gv, a.gy, a.q, a.k, a.v, a.y, a.lse, a.mask,
                                 a.causal, a.scale));
    check_strided("grad_q", &a, a.gq, x.gq, 32);
    check_strided("grad_k", &a, a.gk, x.gk, 32);
    check_strided("grad_v", &a, a.gv, x.gv, 32);
    free(x.y), free(x.lse), free(x.gq), free(x.gk), free(x.gv);
    release_attention(&a);
}

static const int64_t shapes[][5] = {
    {1, 1, 1, 1, 1},     {2, 3, 5, 4, 6},    {1, 128, 128, 16, 8}, {2, 130, 70, 16, 8},
    {1, 70, 300, 9, 5},  {1, 5, 600, 3, 33}, {1, 300, 2, 3, 4},    {2, 0, 4, 3, 2},
    {2, 4, 0, 3, 2},     {0, 4, 4, 3, 2},    {1, 4, 4, 0, 2},      {1, 4, 4, 3, 0},
    {1, 257, 257, 2, 1}, {6, 3, 5, 4, 6},
};

TEST(attention_of_many_shapes, .deadline_s = 60)
{
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int way = 0; way < 20; way++) {
            const int64_t *n = shapes[s];
            struct attention a = {.dtype = TD_F32,
                                  .n = n[0] % 2 ? 1 : n[0] / 2,
                                  .b = n[0],
                                  .l = n[1],
                                  .s = n[2],
                                  .d = n[3],
                                  .e = n[4],
                                  .causal = way % 2,
                                  .mask_kind = (enum mask)(way / 4)};
            check_attention(a, way / 2 % 2);
        }
}

TEST(attention_of_each_dtype, .deadline_s = 60)
{
    for (int t = 0; t < FLOAT_DTYPES; t++)
        for (int way = 0; way < 20; way++) {
            struct attention a = {.dtype = float_dtypes[t],
                                  .n = 2,
                                  .b = way < 10 ? 2 : 4,
                                  .l = 67,
                                  .s = 261,
                                  .d = 5,
                                  .e = 3,
                                  .causal = way % 2,
                                  .mask_kind = (enum mask)(way / 4)};
            check_attention(a, way / 2 % 2);
        }
}

static double loss_of(const void *arg)
{
    const struct attention *a = arg;
    CHECK_OK(cpu->attention(a->y, NULL, a->q, a->k, a->v, a->mask, a->causal, a->scale));
    return sum_of_products(a->y, a->gy);
}

TEST(attention_gradients_are_slopes)
{
    for (int way = 0; way < 10; way++) {
        struct attention a = {.dtype = TD_F64,
                              .b = 2,
                              .l = 7,
                              .s = 6,
                              .d = 3,
                              .e = 4,
                              .causal = way % 2,
                              .mask_kind = (enum mask)(way / 2)};
        make_all(&a, false);
        CHECK_OK(cpu->attention(a.y, a.lse, a.q, a.k, a.v, a.mask, a.causal, a.scale));
        CHECK_OK(cpu->attention_grad(a.gq, a.gk, a.gv, a.gy, a.q, a.k, a.v, a.y, a.lse, a.mask,
                                     a.causal, a.scale));
        check_slopes(name_of(&a), a.q, a.gq, loss_of, &a);
        check_slopes(name_of(&a), a.k, a.gk, loss_of, &a);
        check_slopes(name_of(&a), a.v, a.gv, loss_of, &a);
        release_attention(&a);
    }
}

TEST(some_gradients_only)
{
    struct attention a = {.dtype = TD_BF16, .b = 1, .l = 3, .s = 4, .d = 2, .e = 2};
    make_all(&a, false);
    CHECK_OK(cpu->attention(a.y, a.lse, a.q, a.k, a.v, NULL, false, a.scale));
    td_tensor *all[] = {a.gq, a.gk, a.gv};
    CHECK_OK(cpu->attention_grad(a.gq, a.gk, a.gv, a.gy, a.q, a.k, a.v, a.y, a.lse, NULL, false,
                                 a.scale));
    for (int i = 0; i < 3; i++) {
        td_tensor *only = td_clone(all[i]);
        memset(td_tensor_data(only), 0xff, td_tensor_nbytes(only));
        CHECK_OK(cpu->attention_grad(i == 0 ? only : NULL, i == 1 ? only : NULL,
                                     i == 2 ? only : NULL, a.gy, a.q, a.k, a.v, a.y, a.lse, NULL,
                                     false, a.scale));
        CHECK_MEM(td_tensor_data(only), td_tensor_data(all[i]), td_tensor_nbytes(only));
        td_tensor_release(only);
    }
    release_attention(&a);
}

/* One NaN in q makes its row NaN, and no other; one in k all rows that see it. */
TEST(nan_goes_where_it_is_seen)
{
    struct attention a = {.dtype = TD_F32, .b = 1, .l = 4, .s = 4, .d = 2, .e = 2, .causal = true};
    make_all(&a, false);
    put_number(a.q, 2 * 2, NAN);
    CHECK_OK(cpu->attention(a.y, a.lse, a.q, a.k, a.v, NULL, true, 1));
    for (int64_t i = 0; i < 4; i++)
        CHECK(isnan(number_at(a.y, i * 2)) == (i == 2));
    put_number(a.q, 2 * 2, 1);
    put_number(a.k, 2 * 2, NAN);
    CHECK_OK(cpu->attention(a.y, a.lse, a.q, a.k, a.v, NULL, true, 1));
    for (int64_t i = 0; i < 4; i++)
        CHECK(isnan(number_at(a.y, i * 2)) == (i >= 2));
    release_attention(&a);
}
