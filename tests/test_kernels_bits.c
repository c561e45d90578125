/* Products, convolutions and pooling give the same bits for any number of threads, and for each
 * instruction set that multiplies and adds with one rounding. */
#include "kernel_values.h"

#include "base/simd.h"
#include "tensor/conv.h"

enum { MOST_RESULTS = 3 };

/* What a case makes of its operands: results that are compared bit by bit. */
struct bits_case {
    td_tensor *operands[4];
    td_tensor *results[MOST_RESULTS];
    td_window window;
    bool accumulate;
    void (*run)(const struct bits_case *c);
};

/* A tensor of numbers with all their bits, some of them subnormal. */
static td_tensor *noise(const int64_t *shape, int ndim, td_dtype dtype)
{
    td_tensor *tensor = td_empty(shape, ndim, dtype, NULL);
    CHECK(tensor);
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++) {
        double value = (double)(below(1 << 30) + 1) / (1 << 29) - 1;
        set(tensor, i, below(50) ? value : below(2) ? value * 0x1p-130 : value * 0x1p-70);
    }
    return tensor;
}

static void run_case(const struct bits_case *c, td_tensor **results)
{
    struct bits_case copy = *c;
    for (int i = 0; i < MOST_RESULTS; i++)
        copy.results[i] = results[i] = c->results[i] ? td_clone(c->results[i]) : NULL;
    c->run(&copy);
}

static void compare(const char *what, td_tensor **expected, td_tensor **results)
{
    for (int i = 0; i < MOST_RESULTS && expected[i]; i++) {
        if (memcmp(td_tensor_data(expected[i]), td_tensor_data(results[i]),
                   td_tensor_nbytes(expected[i])))
            td_test_fail(__FILE__, __LINE__, "%s: other bits in result %d", what, i);
        td_tensor_release(results[i]);
    }
}

/* Runs a case on one thread, then on others and with other instruction sets, and takes it apart. */
static void check_bits(struct bits_case *c)
{
    static const int threads[] = {2, 3, 5};
    td_tensor *expected[MOST_RESULTS], *results[MOST_RESULTS];
    const td__simd_level best = td__simd();
    CHECK_OK(td_set_num_threads(1));
    run_case(c, expected);
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        CHECK_OK(td_set_num_threads(threads[i]));
        run_case(c, results);
        compare("more threads", expected, results);
    }
    for (int level = TD__SIMD_AVX2; level < (int)best; level++) {
        CHECK(td__simd_use((td__simd_level)level));
        run_case(c, results);
        CHECK(td__simd_use(best));
        compare(td__simd_name((td__simd_level)level), expected, results);
    }
    for (int i = 0; i < MOST_RESULTS; i++)
        if (expected[i])
            RELEASE(expected[i], c->results[i]);
    for (int i = 0; i < 4; i++)
        if (c->operands[i])
            td_tensor_release(c->operands[i]);
}

/* ---- Products --------------------------------------------------------------------------------- */

static void run_matmul(const struct bits_case *c)
{
    CHECK_OK(KERNELS->matmul(c->results[0], c->operands[0], c->operands[1], 1, c->accumulate));
}

static void run_linear(const struct bits_case *c)
{
    CHECK_OK(KERNELS->linear(c->results[0], c->operands[0], c->operands[1], c->operands[2]));
}

/* [batch, m, k] or transposed in memory. */
static td_tensor *matrices(int64_t batch, int64_t m, int64_t k, td_dtype dtype, bool turned)
{
    if (!turned)
        return noise(SHAPE(batch, m, k), dtype);
    td_tensor *made = noise(SHAPE(batch, k, m), dtype), *seen = td_transpose(made, 1, 2);
    CHECK(seen);
    td_tensor_release(made);
    return seen;
}

TEST(bits_of_products, .deadline_s = 100)
{
    static const int64_t sizes[][4] = {
        {1, 150, 131, 170}, {1, 65, 300, 200}, {1, 300, 513, 33}, {1, 200, 600, 7},
        {1, 3, 700, 512},   {6, 70, 33, 65},   {3, 130, 770, 90}, {1, 600, 64, 300},
        {1, 64, 1024, 10},  {1, 64, 10, 1024}, {1, 700, 1, 600},  {1, 64, 50, 320},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 16; kind++) {
            const int64_t batch = sizes[i][0], m = sizes[i][1], k = sizes[i][2], n = sizes[i][3];
            const td_dtype dtype = floats[kind % 4];
            struct bits_case c = {
                .operands = {matrices(batch, m, k, dtype, kind / 4 % 2),
                             matrices(batch, k, n, dtype, kind / 8)},
                .results = {noise(SHAPE(batch, m, n), dtype)},
                .accumulate = (kind + i) % 3 == 0,
                .run = run_matmul,
            };
            check_bits(&c);
        }
}

TEST(bits_of_linear_layers, .deadline_s = 60)
{
    for (int d = 0; d < 4; d++) {
        struct bits_case c = {
            .operands = {noise(SHAPE(90, 257), floats[d]), noise(SHAPE(190, 257), floats[d]),
                         noise(SHAPE(190), floats[d])},
            .results = {noise(SHAPE(90, 190), floats[d])},
            .run = run_linear,
        };
        check_bits(&c);
    }
}

/* ---- Convolutions ----------------------------------------------------------------------------- */

static void run_conv(const struct bits_case *c)
{
    CHECK_OK(
        KERNELS->conv2d(c->results[0], c->operands[0], c->operands[1], c->operands[2], &c->window));
}

static void run_grad_input(const struct bits_case *c)
{
    CHECK_OK(KERNELS->conv2d_grad_input(c->results[0], c->operands[3], c->operands[1], &c->window));
}

static void run_grad_weight(const struct bits_case *c)
{
    CHECK_OK(KERNELS->conv2d_grad_weight(c->results[0], c->results[1], c->operands[3],
                                         c->operands[0], &c->window, c->accumulate));
}

struct conv_shape {
    int64_t n, c, h, w, o, kernel, stride, padding, dilation, groups;
};

static void check_conv_bits(const struct conv_shape *s, td_dtype dtype, int pass)
{
    static void (*const passes[])(const struct bits_case *) = {run_conv, run_grad_input,
                                                               run_grad_weight};
    const int64_t reach = s->dilation * (s->kernel - 1) + 1;
    const int64_t oh = (s->h + 2 * s->padding - reach) / s->stride + 1;
    const int64_t ow = (s->w + 2 * s->padding - reach) / s->stride + 1;
    struct bits_case c = {
        .operands = {noise(SHAPE(s->n, s->c, s->h, s->w), dtype),
                     noise(SHAPE(s->o, s->c / s->groups, s->kernel, s->kernel), dtype),
                     noise(SHAPE(s->o), dtype), noise(SHAPE(s->n, s->o, oh, ow), dtype)},
        .window = {{s->kernel, s->kernel},
                   {s->stride, s->stride},
                   {s->padding, s->padding},
                   {s->dilation, s->dilation},
                   .groups = s->groups},
        .accumulate = s->n % 2,
        .run = passes[pass],
    };
    c.results[0] = td_clone(c.operands[pass == 0 ? 3 : pass == 1 ? 0 : 1]);
    if (pass == 2)
        c.results[1] = td_clone(c.operands[2]);
    check_bits(&c);
}

TEST(bits_of_convolutions, .deadline_s = 200)
{
    static const struct conv_shape shapes[] = {
        {5, 16, 14, 13, 16, 3, 1, 1, 1, 1},  {4, 20, 15, 17, 31, 3, 2, 1, 1, 1},
        {3, 32, 12, 12, 24, 3, 1, 2, 2, 1},  {2, 12, 11, 9, 48, 5, 1, 2, 1, 1},
        {7, 64, 8, 8, 30, 1, 1, 0, 1, 1},    {3, 64, 9, 9, 64, 1, 2, 0, 1, 1},
        {2, 32, 10, 12, 64, 3, 1, 1, 1, 2},  {1, 16, 30, 30, 16, 3, 3, 1, 1, 1},
        {9, 3, 20, 20, 40, 3, 1, 1, 1, 1},   {5, 10, 18, 18, 6, 5, 1, 0, 1, 1},
        {6, 24, 17, 19, 24, 3, 1, 1, 1, 24}, {4, 10, 16, 16, 20, 3, 2, 1, 1, 10},
        {3, 24, 13, 33, 16, 5, 1, 2, 1, 4},  {2, 160, 6, 6, 176, 3, 1, 1, 1, 1},
        {6, 30, 14, 14, 30, 5, 1, 2, 1, 30}, {1, 40, 12, 12, 90, 1, 1, 0, 1, 1},
        {9, 1, 28, 28, 10, 5, 1, 0, 1, 1},   {8, 36, 10, 10, 50, 1, 1, 0, 1, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = 0; kind < 6; kind++)
            check_conv_bits(&shapes[i], kind / 3 ? floats[1 + i % 3] : TD_F32, kind % 3);
}

/* ---- Pooling ---------------------------------------------------------------------------------- */

static void run_max_pool(const struct bits_case *c)
{
    CHECK_OK(KERNELS->max_pool2d(c->results[0], c->results[1], c->operands[0], &c->window));
    CHECK_OK(KERNELS->max_pool2d_grad(c->results[2], c->results[0], c->results[1], &c->window));
}

static void run_avg_pool(const struct bits_case *c)
{
    CHECK_OK(KERNELS->avg_pool2d(c->results[0], c->operands[0], &c->window));
    CHECK_OK(KERNELS->avg_pool2d_grad(c->results[1], c->results[0], &c->window));
}

TEST(bits_of_pooling, .deadline_s = 60)
{
    for (int kind = 0; kind < 16; kind++) {
        const int64_t kernel = 2 + kind / 4 % 2, stride = 1 + kind / 8, padding = kernel / 3;
        const int64_t size = (40 + 2 * padding - kernel) / stride + 1;
        const td_dtype dtype = floats[kind % 4];
        struct bits_case c = {
            .operands = {noise(SHAPE(5, 30, 40, 40), dtype)},
            .window = {{kernel, kernel}, {stride, stride}, {padding, padding}, {1, 1}, .groups = 1},
        };
        c.results[0] = noise(SHAPE(5, 30, size, size), dtype);
        c.results[1] = td_zeros(SHAPE(5, 30, size, size), TD_I32, NULL);
        c.results[2] = td_clone(c.operands[0]);
        c.run = run_max_pool;
        struct bits_case average = c;
        average.operands[0] = td_clone(c.operands[0]);
        average.results[0] = td_clone(c.results[0]);
        average.results[1] = td_clone(c.results[2]);
        average.results[2] = NULL;
        average.run = run_avg_pool;
        check_bits(&c);
        check_bits(&average);
    }
}

/* The cases above are of every kind. */
TEST(sizes_choose_the_loops)
{
    struct td__conv depthwise = {.groups = 24, .channels = 1, .out_channels = 1};
    struct td__conv whole = {.groups = 1, .channels = 1, .out_channels = 1};
    CHECK(td__conv_fits_planes(&depthwise));
    CHECK(!td__conv_fits_planes(&whole));
    CHECK(td__conv_fits_direct(16, 144));
    CHECK(td__conv_fits_direct(31, 180));
    CHECK(!td__conv_fits_direct(6, 250));
    CHECK(!td__conv_fits_direct(40, 27));
    struct td__conv plain = {
        .groups = 1, .pixels = 64, .window = {.kernel = {1, 1}, .stride = {1, 1}}};
    CHECK(td__conv_fits_plain(&plain));
    plain.pixels = 4;
    CHECK(!td__conv_fits_plain(&plain));
    plain = (struct td__conv){
        .groups = 1, .pixels = 64, .window = {.kernel = {1, 1}, .stride = {2, 2}}};
    CHECK(!td__conv_fits_plain(&plain));
}
