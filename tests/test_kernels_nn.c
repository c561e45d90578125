/* Kernels of networks on the processor: softmax, normalisation, dropout. Results are compared with slow
 * formulas in double, gradients with theirs, and those of f64 also with finite differences. */
#include "kernel_numbers.h"

#include <tandem/ops.h>

#include <tandem/random.h>

#include <math.h>
#include <string.h>

static const td_kernels *const cpu = &td__cpu_kernels;

/* ---- Softmax --------------------------------------------------------------------------------- */

static double *softmax_reference(const double *x, int64_t a, int64_t d, int64_t b, bool logarithm)
{
    double *y = malloc((size_t)(a * d * b) * sizeof *y + 1);
    CHECK(y);
    for (int64_t i = 0; i < a; i++)
        for (int64_t j = 0; j < b; j++) {
            double most = -INFINITY, sum = 0;
            for (int64_t k = 0; k < d; k++)
                most = fmax(most, x[(i * d + k) * b + j]);
            for (int64_t k = 0; k < d; k++)
                sum += exp(x[(i * d + k) * b + j] - most);
            for (int64_t k = 0; k < d; k++) {
                double v = x[(i * d + k) * b + j] - most;
                y[(i * d + k) * b + j] = logarithm ? v - log(sum) : exp(v) / sum;
            }
        }
    return y;
}

static void check_softmax(int64_t a, int64_t d, int64_t b, td_dtype dtype, bool logarithm)
{
    td_tensor *x = any_tensor(SHAPE(a, d, b), dtype, 6), *y = any_tensor(SHAPE(a, d, b), dtype, 1);
    td_tensor *gy = any_tensor(SHAPE(a, d, b), dtype, 1), *gx = td_clone(gy);
    CHECK_OK(cpu->softmax(y, x, logarithm));
    double *from = numbers_of(x), *expected = softmax_reference(from, a, d, b, logarithm);
    check_numbers("softmax", y, expected, 8);

    /* The gradient is taken from the y that is there, which is rounded. */
    double *g = numbers_of(gy), *r = numbers_of(y), *e = numbers_of(y);
    for (int64_t i = 0; i < a; i++)
        for (int64_t j = 0; j < b; j++) {
            double sum = 0;
            for (int64_t k = 0; k < d; k++)
                sum += g[(i * d + k) * b + j] * (logarithm ? 1 : r[(i * d + k) * b + j]);
            for (int64_t k = 0; k < d; k++) {
                int64_t at = (i * d + k) * b + j;
                e[at] = logarithm ? g[at] - exp(r[at]) * sum : r[at] * (g[at] - sum);
            }
        }
    CHECK_OK(cpu->softmax_grad(gx, gy, y, logarithm));
    check_numbers("softmax_grad", gx, e, 8);
    CHECK_OK(cpu->softmax_grad(gy, gy, y, logarithm));
    CHECK_MEM(td_tensor_data(gx), td_tensor_data(gy), td_tensor_nbytes(gx));
    free(from), free(expected), free(g), free(r), free(e);
    release_all(x, y, gy, gx, NULL);
}

TEST(softmax_of_many_shapes)
{
    static const int64_t shapes[][3] = {
        {1, 1, 1},   {3, 10, 1}, {2, 16, 1}, {2, 33, 1}, {5, 128, 1}, {1, 1000, 1}, {2, 3, 5},
        {1, 7, 130}, {3, 1, 2},  {0, 4, 1},  {2, 0, 1},  {2, 5, 0},   {4, 31, 1},   {2, 17, 300}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int t = 0; t < FLOAT_DTYPES; t++)
            for (int logarithm = 0; logarithm < 2; logarithm++)
                check_softmax(shapes[s][0], shapes[s][1], shapes[s][2], float_dtypes[t], logarithm);
}

/* Every 97th f32, against the C library. */
TEST(exponential_is_good_to_one_unit)
{
    enum { N = 4096 };
    td_tensor *x = td_empty(SHAPE(1, N, 1), TD_F32, NULL), *y = td_empty(SHAPE(1, N, 1), TD_F32, NULL);
    td_tensor *one = td_full(SHAPE(1, N, 1), 0, TD_F32, NULL);
    float *in = td_tensor_data(x), *out = td_tensor_data(y), worst = 0;
    uint32_t bits = 0;
    for (uint64_t start = 0; start < UINT64_C(1) << 32; start += (uint64_t)N * 9973) {
        for (int i = 0; i < N; i++) {
            bits = (uint32_t)(start + (uint64_t)i * 9973);
            memcpy(&in[i], &bits, sizeof bits);
        }
        /* With the gradients 0, … , 0, -1 of a logarithm: gx = 0 + e^y. */
        memset(td_tensor_data(one), 0, td_tensor_nbytes(one));
        ((float *)td_tensor_data(one))[N - 1] = -1;
        CHECK_OK(cpu->softmax_grad(y, one, x, true));
        for (int i = 0; i < N - 1; i++) {
            double e = exp((double)in[i]);
            float expected = (float)e;
            if (isnan(in[i]) || isinf(expected)) {
                CHECK(isnan(in[i]) ? isnan(out[i]) : out[i] == expected);
                continue;
            }
            double unit = (double)nextafterf(expected, INFINITY) - (double)expected;
            float error = (float)(fabs((double)out[i] - e) / unit);
            if (!(error <= 1.0f))
                FAIL("e^%a is %a, expected %a", (double)in[i], (double)out[i], e);
            worst = error > worst ? error : worst;
        }
    }
    CHECK(worst > 0);
    release_all(x, y, one, NULL);
}

TEST(softmax_of_special_values)
{
    for (int inner = 1; inner < 3; inner++)
        for (int t = 0; t < FLOAT_DTYPES; t++) {
            td_tensor *x = td_full(SHAPE(1, 20, inner), -INFINITY, float_dtypes[t], NULL);
            td_tensor *y = td_full(SHAPE(1, 20, inner), 0, float_dtypes[t], NULL);
            CHECK_OK(cpu->softmax(y, x, false));
            CHECK(isnan(number_at(y, 0)));
            put_number(x, 3 * inner, 5);
            put_number(x, 7 * inner, 5);
            CHECK_OK(cpu->softmax(y, x, false));
            CHECK(number_at(y, 0) == 0 && number_at(y, 3 * inner) == 0.5);
            CHECK_OK(cpu->softmax(y, x, true));
            CHECK(number_at(y, 0) == -INFINITY);
            put_number(x, 19 * inner, NAN);
            CHECK_OK(cpu->softmax(y, x, false));
            CHECK(isnan(number_at(y, 0)) && isnan(number_at(y, 3 * inner)));
            release_all(x, y, NULL);
        }
    /* Large numbers do not overflow, and lose nothing. */
    td_tensor *x = td_full(SHAPE(1, 2, 1), 1e30, TD_F32, NULL), *y = td_clone(x);
    CHECK_OK(cpu->softmax(y, x, true));
    CHECK(fabs(number_at(y, 0) + log(2)) < 1e-7);
    release_all(x, y, NULL);
}

/* ---- Layer norm ------------------------------------------------------------------------------ */

static void check_layer_norm(int64_t rows, int64_t n, td_dtype dtype, bool affine)
{
    td_dtype exact = statistics_of(dtype);
    td_tensor *x = any_tensor(SHAPE(rows, n), dtype, 3), *y = any_tensor(SHAPE(rows, n), dtype, 1);
    td_tensor *w = affine ? any_tensor(SHAPE(n), dtype, 2) : NULL;
    td_tensor *b = affine ? any_tensor(SHAPE(n), dtype, 2) : NULL;
    td_tensor *mean = any_tensor(SHAPE(rows), exact, 1), *rstd = any_tensor(SHAPE(rows), exact, 1);
    td_tensor *gy = any_tensor(SHAPE(rows, n), dtype, 1), *gx = td_clone(gy);
    td_tensor *gw = any_tensor(SHAPE(n), dtype, 1), *gb = any_tensor(SHAPE(n), dtype, 1);
    double *xs = numbers_of(x), *g = numbers_of(gy), *ey = numbers_of(y), *egx = numbers_of(y);
    double *egw = calloc((size_t)n + 1, sizeof *egw), *egb = calloc((size_t)n + 1, sizeof *egb);
    double *em = numbers_of(mean), *er = numbers_of(rstd);
    for (int64_t r = 0; r < rows; r++) {
        double m = 0, v = 0, s = 0, p = 0;
        for (int64_t i = 0; i < n; i++)
            m += xs[r * n + i] / (double)n;
        for (int64_t i = 0; i < n; i++)
            v += (xs[r * n + i] - m) * (xs[r * n + i] - m) / (double)n;
        em[r] = m;
        er[r] = 1 / sqrt(v + 1e-5);
        for (int64_t i = 0; i < n; i++) {
            double z = (xs[r * n + i] - m) * er[r], weight = w ? number_at(w, i) : 1;
            ey[r * n + i] = z * weight + (b ? number_at(b, i) : 0);
            egw[i] += g[r * n + i] * z;
            egb[i] += g[r * n + i];
            s += g[r * n + i] * weight / (double)n;
            p += g[r * n + i] * weight * z / (double)n;
        }
        for (int64_t i = 0; i < n; i++)
            egx[r * n + i] = er[r] * (g[r * n + i] * (w ? number_at(w, i) : 1) - s -
                                      (xs[r * n + i] - m) * er[r] * p);
    }
    CHECK_OK(cpu->layer_norm(y, NULL, NULL, x, w, b, 1e-5));
    check_numbers("layer_norm", y, ey, 8);
    CHECK_OK(cpu->layer_norm(y, mean, rstd, x, w, b, 1e-5));
    if (n) {
        check_sized("layer_norm mean", mean, em, 4, 3);
        check_numbers("layer_norm rstd", rstd, er, 8);
        CHECK_OK(cpu->layer_norm_grad(gx, gw, gb, gy, x, w, mean, rstd));
        double most = 1;
        for (int64_t r = 0; r < rows; r++)
            most = fmax(most, er[r] * er[r]); /* x - mean cancels, too */
        check_sized("layer_norm_grad", gx, egx, 16, most);
        check_sized("layer_norm_grad weight", gw, egw, 16, most);
        check_sized("layer_norm_grad bias", gb, egb, 16, 1);
        CHECK_OK(cpu->layer_norm_grad(NULL, gw, NULL, gy, x, w, mean, rstd));
        check_sized("layer_norm_grad weight only", gw, egw, 16, most);
    }
    free(xs), free(g), free(ey), free(egx), free(egw), free(egb), free(em), free(er);
    td_tensor_release(w);
    td_tensor_release(b);
    release_all(x, y, mean, rstd, gy, gx, gw, gb, NULL);
}

TEST(layer_norm_of_many_shapes)
{
    static const int64_t shapes[][2] = {{1, 1},   {3, 2},   {2, 16},   {5, 17}, {70, 64}, {7, 65},
                                        {3, 256}, {200, 9}, {2, 1000}, {0, 5},  {3, 0}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int t = 0; t < FLOAT_DTYPES; t++)
            for (int affine = 0; affine < 2; affine++)
                check_layer_norm(shapes[s][0], shapes[s][1], float_dtypes[t], affine);
}

/* A large mean does not swallow the variance. */
TEST(statistics_around_a_large_mean)
{
    enum { N = 1001 };
    td_tensor *x = td_empty(SHAPE(1, N), TD_F32, NULL), *y = td_clone(x);
    td_tensor *mean = td_empty(SHAPE(1), TD_F32, NULL), *rstd = td_clone(mean);
    double m = 0, v = 0;
    for (int i = 0; i < N; i++) {
        put_number(x, i, 10000.5 + any_number());
        m += number_at(x, i) / N;
    }
    for (int i = 0; i < N; i++)
        v += (number_at(x, i) - m) * (number_at(x, i) - m) / N;
    CHECK_OK(cpu->layer_norm(y, mean, rstd, x, NULL, NULL, 0));
    CHECK(fabs(number_at(rstd, 0) * sqrt(v) - 1) < 1e-6);
    for (int i = 0; i < N; i++)
        CHECK(fabs(number_at(y, i) - (number_at(x, i) - m) / sqrt(v)) < 1e-5);

    td_tensor *image = td_reshape(x, SHAPE(1, 1, N)), *out = td_reshape(y, SHAPE(1, 1, N));
    td_tensor *vectors = td_reshape(x, SHAPE(N, 1, 1)), *outs = td_reshape(y, SHAPE(N, 1, 1));
    for (int way = 0; way < 2; way++) {
        memset(td_tensor_data(y), 0, td_tensor_nbytes(y));
        CHECK_OK(cpu->batch_norm(way ? out : outs, mean, rstd, way ? image : vectors, NULL, NULL,
                                 NULL, NULL, true, 0.1, 0));
        CHECK(fabs(number_at(rstd, 0) * sqrt(v) - 1) < 1e-6);
        for (int i = 0; i < N; i++)
            CHECK(fabs(number_at(y, i) - (number_at(x, i) - m) / sqrt(v)) < 1e-5);
    }
    release_all(x, y, mean, rstd, image, out, vectors, outs, NULL);
}

/* ---- Batch norm ------------------------------------------------------------------------------ */

struct batch {
    int64_t n, c, s;
    td_tensor *x, *y, *w, *b, *mean, *rstd, *running_mean, *running_var, *gy, *gx, *gw, *gb;
};

static struct batch batch_of(const int64_t shape[3], td_dtype dtype, bool affine)
{
    int64_t c = shape[1];
    td_dtype exact = statistics_of(dtype);
    struct batch k = {
        .n = shape[0],
        .c = c,
        .s = shape[2],
        .x = any_tensor(shape, 3, dtype, 3),
        .y = any_tensor(shape, 3, dtype, 1),
        .w = affine ? any_tensor(SHAPE(c), dtype, 2) : NULL,
        .b = affine ? any_tensor(SHAPE(c), dtype, 2) : NULL,
        .mean = any_tensor(SHAPE(c), exact, 1),
        .rstd = any_tensor(SHAPE(c), exact, 1),
        .running_mean = any_tensor(SHAPE(c), dtype, 1),
        .running_var = td_full(SHAPE(c), 1.5, dtype, NULL),
        .gy = any_tensor(shape, 3, dtype, 1),
        .gx = any_tensor(shape, 3, dtype, 1),
        .gw = any_tensor(SHAPE(c), dtype, 1),
        .gb = any_tensor(SHAPE(c), dtype, 1),
    };
    return k;
}

static void release_batch(struct batch *k)
{
    td_tensor_release(k->w);
    td_tensor_release(k->b);
    release_all(k->x, k->y, k->mean, k->rstd, k->running_mean, k->running_var, k->gy, k->gx, k->gw,
                k->gb, NULL);
}

static void check_batch_norm(const int64_t shape[3], td_dtype dtype, bool affine, bool training)
{
    struct batch k = batch_of(shape, dtype, affine);
    double count = (double)(k.n * k.s), eps = 1e-5, most = 1;
    double *ey = numbers_of(k.y), *egx = numbers_of(k.y), *rm = numbers_of(k.running_mean);
    double *rv = numbers_of(k.running_var), *egw = numbers_of(k.gw), *egb = numbers_of(k.gb);
    for (int64_t c = 0; c < k.c; c++) {
        double m = 0, v = 0, s = 0, p = 0, w = affine ? number_at(k.w, c) : 1;
#define EACH                                                                                       \
    for (int64_t n = 0; n < k.n; n++)                                                              \
        for (int64_t i = (n * k.c + c) * k.s; i < (n * k.c + c + 1) * k.s; i++)
        EACH m += number_at(k.x, i) / count;
        EACH v += (number_at(k.x, i) - m) * (number_at(k.x, i) - m) / count;
        if (training) {
            rm[c] = 0.3 * m + 0.7 * rm[c];
            rv[c] = 0.3 * v * count / (count - 1) + 0.7 * rv[c];
        } else {
            m = rm[c];
            v = rv[c];
        }
        double r = 1 / sqrt(v + eps);
        most = fmax(most, r * r + count / 20); /* x - mean cancels, too */
        if (!training) {                       /* what the operator passes on for the gradient */
            put_number(k.mean, c, m);
            put_number(k.rstd, c, r);
        }
        EACH s += number_at(k.gy, i);
        EACH p += number_at(k.gy, i) * (number_at(k.x, i) - m) * r;
        EACH ey[i] = (number_at(k.x, i) - m) * r * w + (affine ? number_at(k.b, c) : 0);
        EACH egx[i] = w * r *
                      (number_at(k.gy, i) -
                       (training ? s / count + (number_at(k.x, i) - m) * r * p / count : 0));
#undef EACH
        egw[c] = p;
        egb[c] = s;
    }
    CHECK_OK(cpu->batch_norm(k.y, training ? k.mean : NULL, training ? k.rstd : NULL, k.x, k.w, k.b,
                             k.running_mean, k.running_var, training, 0.3, eps));
    check_numbers("batch_norm", k.y, ey, 16);
    check_sized("batch_norm running_mean", k.running_mean, rm, 4, 3);
    check_sized("batch_norm running_var", k.running_var, rv, 16, 3);
    CHECK_OK(cpu->batch_norm_grad(k.gx, k.gw, k.gb, k.gy, k.x, k.w, k.mean, k.rstd, training));
    check_sized("batch_norm_grad", k.gx, egx, 32, most);
    check_sized("batch_norm_grad weight", k.gw, egw, 32, most);
    check_sized("batch_norm_grad bias", k.gb, egb, 32, 1 + count / 20);
    CHECK_OK(cpu->batch_norm_grad(k.gx, NULL, NULL, k.gy, k.x, k.w, k.mean, k.rstd, training));
    check_sized("batch_norm_grad alone", k.gx, egx, 32, most);
    free(ey), free(egx), free(rm), free(rv), free(egw), free(egb);
    release_batch(&k);
}

TEST(batch_norm_of_many_shapes)
{
    static const int64_t shapes[][3] = {{2, 1, 1},  {8, 3, 1},    {5, 20, 1},
                                        {3, 2, 7},  {2, 3, 8},    {4, 5, 16},
                                        {2, 4, 33}, {64, 10, 36}, {1, 2, 5000}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int t = 0; t < FLOAT_DTYPES; t++)
            for (int way = 0; way < 4; way++)
                check_batch_norm(shapes[s], float_dtypes[t], way & 1, way & 2);
}

TEST(batch_norm_of_nothing)
{
    static const int64_t shapes[][3] = {{0, 3, 4}, {2, 0, 4}, {2, 3, 0}};
    for (int s = 0; s < 3; s++)
        for (int training = 0; training < 2; training++) {
            struct batch k = batch_of(shapes[s], TD_F32, true);
            CHECK_OK(cpu->batch_norm(k.y, k.mean, k.rstd, k.x, k.w, k.b, k.running_mean,
                                     k.running_var, training, 0.1, 1e-5));
            CHECK_OK(
                cpu->batch_norm_grad(k.gx, k.gw, k.gb, k.gy, k.x, k.w, k.mean, k.rstd, training));
            for (int64_t c = 0; c < k.c; c++) {
                CHECK(number_at(k.gw, c) == 0 && number_at(k.gb, c) == 0);
                CHECK(number_at(k.running_var, c) == 1.5);
                if (training)
                    CHECK(number_at(k.mean, c) == 0 && number_at(k.rstd, c) == 0);
            }
            release_batch(&k);
        }
}

/* ---- Slopes ---------------------------------------------------------------------------------- */

struct slopes {
    struct batch k;
    enum { SOFTMAX, LOG_SOFTMAX, LAYER_NORM, BATCH_NORM } kernel;
};

static double slope_loss(const void *arg)
{
    const struct slopes *s = arg;
    const struct batch *k = &s->k;
    if (s->kernel == SOFTMAX || s->kernel == LOG_SOFTMAX)
        CHECK_OK(cpu->softmax(k->y, k->x, s->kernel == LOG_SOFTMAX));
    else if (s->kernel == LAYER_NORM)
        CHECK_OK(cpu->layer_norm(k->y, NULL, NULL, k->x, k->w, k->b, 1e-3));
    else
        CHECK_OK(
            cpu->batch_norm(k->y, k->mean, k->rstd, k->x, k->w, k->b, NULL, NULL, true, 0, 1e-3));
    return sum_of_products(k->y, k->gy);
}

static void check_all_slopes(const char *what, const struct slopes *s)
{
    check_slopes(what, s->k.x, s->k.gx, slope_loss, s);
    if (s->kernel == LAYER_NORM || s->kernel == BATCH_NORM) {
        check_slopes(what, s->k.w, s->k.gw, slope_loss, s);
        check_slopes(what, s->k.b, s->k.gb, slope_loss, s);
    }
}

TEST(gradients_are_slopes)
{
    struct slopes s = {.k = batch_of((const int64_t[]){3, 4, 5}, TD_F64, true)};
    struct batch *k = &s.k;
    slope_loss(&s);
    CHECK_OK(cpu->softmax_grad(k->gx, k->gy, k->y, false));
    check_all_slopes("softmax", &s);
    s.kernel = LOG_SOFTMAX;
    slope_loss(&s);
    CHECK_OK(cpu->softmax_grad(k->gx, k->gy, k->y, true));
    check_all_slopes("log_softmax", &s);
    s.kernel = BATCH_NORM;
    slope_loss(&s);
    CHECK_OK(cpu->batch_norm_grad(k->gx, k->gw, k->gb, k->gy, k->x, k->w, k->mean, k->rstd, true));
    check_all_slopes("batch_norm", &s);
    release_batch(k);

    /* Rows of 4, as the batch has 4 channels. */
    *k = batch_of((const int64_t[]){15, 4, 1}, TD_F64, true);
    s.kernel = LAYER_NORM;
    td_tensor *x = td_reshape(k->x, SHAPE(15, 4)), *mean = any_tensor(SHAPE(15), TD_F64, 1);
    td_tensor *rstd = td_clone(mean);
    td_tensor_release(k->x);
    k->x = x;
    CHECK_OK(cpu->layer_norm(k->y, mean, rstd, x, k->w, k->b, 1e-3));
    CHECK_OK(cpu->layer_norm_grad(k->gx, k->gw, k->gb, k->gy, x, k->w, mean, rstd));
    check_all_slopes("layer_norm", &s);
    release_all(mean, rstd, NULL);
    release_batch(k);
}

/* ---- Dropout --------------------------------------------------------------------------------- */

static void check_dropout(td_dtype dtype, int64_t blocks, int64_t block, double p)
{
    td_tensor *x = any_tensor(SHAPE(blocks, block), dtype, 3), *y = td_clone(x);
    td_tensor *keep = td_full(SHAPE(blocks), 1, TD_BOOL, NULL);
    td_generator *generator = td_generator_create(5, NULL);
    CHECK_OK(cpu->dropout(y, keep, x, p, block, generator));
    const unsigned char *kept = td_tensor_data(keep);
    int64_t count = 0;
    double *expected = numbers_of(x);
    /* In halves 1 - p and 1 / (1 - p) are rounded too. */
    double factor = 0;
    {
        TD_SCOPE;
        factor = td_item(td_div(td_full(NULL, 0, 1, dtype, NULL), td_full(NULL, 0, 1 - p, dtype, NULL)));
    }
    for (int64_t i = 0; i < blocks * block; i++) {
        CHECK(kept[i / block] <= 1);
        count += kept[i / block];
        expected[i] = kept[i / block] ? expected[i] * factor : 0;
    }
    check_numbers("dropout", y, expected, 1);
    if (blocks >= 1000)
        CHECK(fabs((double)count / (double)(blocks * block) - (1 - p)) < 0.1);
    if (td_tensor_nbytes(y))
        memset(td_tensor_data(y), 0xff, td_tensor_nbytes(y));
    CHECK_OK(cpu->dropout_grad(y, x, keep, p, block));
    check_numbers("dropout_grad", y, expected, 1);
    td_generator_destroy(generator);
    free(expected);
    release_all(x, y, keep, NULL);
}

TEST(dropout_of_elements_and_blocks)
{
    static const double chances[] = {0, 0.1, 0.5, 1};
    for (int t = 0; t < FLOAT_DTYPES; t++)
        for (int c = 0; c < 4; c++) {
            check_dropout(float_dtypes[t], 1000, 1, chances[c]);
            check_dropout(float_dtypes[t], 1000, 25, chances[c]);
            check_dropout(float_dtypes[t], 1, 1, chances[c]);
            check_dropout(float_dtypes[t], 0, 3, chances[c]);
        }
}

/* What torch.manual_seed(7) and F.dropout(torch.ones(16), 0.3) or F.dropout2d(torch.ones(2, 6, 2, 2),
 * 0.3) give, and the next torch.rand(1). */
TEST(dropout_draws_as_pytorch)
{
    static const unsigned char kept[] = {1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0};
    static const float next[] = {0x1.40d858p-1f, 0x1.0ab758p-1f};
    td_generator *generator = td_generator_create(0, NULL);
    for (int planes = 0; planes < 2; planes++) {
        int64_t n = planes ? 12 : 16, block = planes ? 4 : 1;
        td_tensor *x = td_full(SHAPE(n, block), 1, TD_F32, NULL), *y = td_clone(x);
        td_tensor *keep = td_empty(SHAPE(n), TD_BOOL, NULL), *after = td_empty(SHAPE(1), TD_F32, NULL);
        td_generator_manual_seed(generator, 7);
        CHECK_OK(cpu->dropout(y, keep, x, 0.3, block, generator));
        CHECK_MEM(td_tensor_data(keep), kept, (size_t)n);
        for (int64_t i = 0; i < n * block; i++)
            CHECK(((float *)td_tensor_data(y))[i] == (kept[i / block] ? 1.4285714626312256f : 0));
        CHECK_OK(td_uniform_(after, 0, 1, generator));
        CHECK(((float *)td_tensor_data(after))[0] == next[planes]);
        release_all(x, y, keep, after, NULL);
    }
    td_generator_destroy(generator);
}

/* The same seed, p and factor in bf16: x = ((torch.arange(16) - 7.5) * 0.37).bfloat16(), and the gradient
 * of its dropout for torch.full((16,), 1.1015625). Zeros have the sign of x. */
TEST(dropout_in_bf16_rounds_as_pytorch)
{
    static const uint16_t xs[] = {0xc032, 0xc01a, 0xc002, 0xbfd5, 0xbfa6, 0xbf6d, 0xbf0e, 0xbe3d,
                                  0x3e3d, 0x3f0e, 0x3f6d, 0x3fa6, 0x3fd5, 0x4002, 0x401a, 0x4032};
    static const uint16_t ys[] = {0xc07e, 0xc05c, 0x8000, 0xc018, 0x8000, 0x8000, 0xbf4b, 0xbe87,
                                  0x0000, 0x0000, 0x3fa9, 0x3fed, 0x4018, 0x403a, 0x405c, 0x0000};
    td_generator *generator = td_generator_create(7, NULL);
    td_tensor *x = td_empty(SHAPE(16, 1), TD_BF16, NULL), *y = td_clone(x);
    td_tensor *keep = td_empty(SHAPE(16), TD_BOOL, NULL);
    td_tensor *gy = td_full(SHAPE(16, 1), 1.1015625, TD_BF16, NULL), *gx = td_clone(gy);
    memcpy(td_tensor_data(x), xs, sizeof xs);
    CHECK_OK(cpu->dropout(y, keep, x, 0.3, 1, generator));
    CHECK_MEM(td_tensor_data(y), ys, sizeof ys);
    CHECK_OK(cpu->dropout_grad(gx, gy, keep, 0.3, 1));
    for (int i = 0; i < 16; i++)
        CHECK_EQ(((uint16_t *)td_tensor_data(gx))[i], (ys[i] & 0x7fff) ? 0x3fca : 0);
    td_generator_destroy(generator);
    release_all(x, y, keep, gx, gy, NULL);
}
