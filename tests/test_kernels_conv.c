/* Convolutions and their gradients against naive loops in double. */
#include "kernel_values.h"

struct shape {
    int64_t n, c, h, w, o;
    td_window window;
};

/* groups 0 is 1; stride and dilation 0 are 1. */
static td_window window_of(td_window w)
{
    for (int d = 0; d < 2; d++) {
        w.stride[d] = w.stride[d] ? w.stride[d] : 1;
        w.dilation[d] = w.dilation[d] ? w.dilation[d] : 1;
    }
    w.groups = w.groups ? w.groups : 1;
    return w;
}

static int64_t out_size(int64_t size, const td_window *w, int d)
{
    int64_t reach = w->dilation[d] * (w->kernel[d] - 1) + 1;
    int64_t room = size + 2 * w->padding[d] - reach;
    return room < 0 ? 0 : room / w->stride[d] + 1;
}

struct conv_case {
    const struct shape *shape;
    td_window w;
    int64_t oh, ow;
    td_tensor *x, *weight, *bias, *out;
    double *x_values, *weight_values, *out_values; /* of `out` as a gradient */
};

static struct conv_case make_case(const struct shape *shape, td_dtype dtype)
{
    struct conv_case c = {.shape = shape, .w = window_of(shape->window)};
    c.oh = out_size(shape->h, &c.w, 0);
    c.ow = out_size(shape->w, &c.w, 1);
    c.x = filled(SHAPE(shape->n, shape->c, shape->h, shape->w), dtype);
    c.weight = filled(SHAPE(shape->o, shape->c / c.w.groups, c.w.kernel[0], c.w.kernel[1]), dtype);
    c.bias = filled(SHAPE(shape->o), dtype);
    c.out = filled(SHAPE(shape->n, shape->o, c.oh, c.ow), dtype);
    c.x_values = values_of(c.x);
    c.weight_values = values_of(c.weight);
    c.out_values = values_of(c.out);
    return c;
}

static void free_case(const struct conv_case *c)
{
    free(c->x_values);
    free(c->weight_values);
    free(c->out_values);
    RELEASE(c->x, c->weight, c->bias, c->out);
}

/* Calls `visit` with the numbers of the elements of out, x and weight that are multiplied with each
 * other, for all such triples. */
static void walk(const struct conv_case *c,
                 void (*visit)(const struct conv_case *c, int64_t out, int64_t x, int64_t w,
                               double *result),
                 double *result)
{
    const struct shape *s = c->shape;
    const td_window *w = &c->w;
    int64_t group_in = s->c / w->groups, group_out = s->o / w->groups;
    for (int64_t out = 0; out < s->n * s->o * c->oh * c->ow; out++) {
        int64_t ox = out % c->ow, oy = out / c->ow % c->oh, o = out / (c->ow * c->oh) % s->o;
        int64_t n = out / (c->ow * c->oh * s->o);
        for (int64_t tap = 0; tap < group_in * w->kernel[0] * w->kernel[1]; tap++) {
            int64_t kx = tap % w->kernel[1], ky = tap / w->kernel[1] % w->kernel[0];
            int64_t ci = o / group_out * group_in + tap / (w->kernel[1] * w->kernel[0]);
            int64_t y = oy * w->stride[0] - w->padding[0] + ky * w->dilation[0];
            int64_t x = ox * w->stride[1] - w->padding[1] + kx * w->dilation[1];
            if (y >= 0 && y < s->h && x >= 0 && x < s->w)
                visit(c, out, ((n * s->c + ci) * s->h + y) * s->w + x,
                      o * group_in * w->kernel[0] * w->kernel[1] + tap, result);
        }
    }
}

static void visit_forward(const struct conv_case *c, int64_t out, int64_t x, int64_t w,
                          double *result)
{
    result[out] += c->x_values[x] * c->weight_values[w];
}

/* In the gradients `out` has the gradient of the result. */
static void visit_input(const struct conv_case *c, int64_t out, int64_t x, int64_t w,
                        double *result)
{
    result[x] += c->out_values[out] * c->weight_values[w];
}

static void visit_weight(const struct conv_case *c, int64_t out, int64_t x, int64_t w,
                         double *result)
{
    result[w] += c->out_values[out] * c->x_values[x];
}

static void check_forward(const struct conv_case *c)
{
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        double *expected = doubles(td_tensor_numel(c->out));
        walk(c, visit_forward, expected);
        for (int64_t i = 0; i < td_tensor_numel(c->out) && with_bias; i++)
            expected[i] += get(c->bias, i / (c->oh * c->ow) % c->shape->o);
        CHECK_OK(KERNELS->conv2d(c->out, c->x, c->weight, with_bias ? c->bias : NULL, &c->w));
        check_close("conv2d", c->out, expected);
        free(expected);
    }
}

static void check_grad_input(const struct conv_case *c)
{
    td_tensor *grad_x = td_clone(c->x);
    double *expected = doubles(td_tensor_numel(c->x));
    walk(c, visit_input, expected);
    CHECK_OK(KERNELS->conv2d_grad_input(grad_x, c->out, c->weight, &c->w));
    check_close("conv2d_grad_input", grad_x, expected);
    free(expected);
    td_tensor_release(grad_x);
}

static void check_grad_weight(const struct conv_case *c)
{
    for (int kind = 0; kind < 4; kind++) {
        bool accumulate = kind % 2, with_bias = kind / 2;
        td_tensor *grad_w = td_clone(c->weight), *grad_bias = td_clone(c->bias);
        double *expected = doubles(td_tensor_numel(grad_w));
        double *expected_bias = doubles(td_tensor_numel(grad_bias));
        walk(c, visit_weight, expected);
        for (int64_t i = 0; i < td_tensor_numel(grad_w) && accumulate; i++)
            expected[i] += get(c->weight, i);
        for (int64_t i = 0; i < c->shape->o && (accumulate || !with_bias); i++)
            expected_bias[i] = get(c->bias, i);
        for (int64_t i = 0; i < td_tensor_numel(c->out) && with_bias; i++)
            expected_bias[i / (c->oh * c->ow) % c->shape->o] += get(c->out, i);
        CHECK_OK(KERNELS->conv2d_grad_weight(grad_w, with_bias ? grad_bias : NULL, c->out, c->x,
                                             &c->w, accumulate));
        check_close("conv2d_grad_weight", grad_w, expected);
        check_close("conv2d_grad_weight (bias)", grad_bias, expected_bias);
        free(expected);
        free(expected_bias);
        RELEASE(grad_w, grad_bias);
    }
}

static void check_shape(const struct shape *shape, td_dtype dtype)
{
    struct conv_case c = make_case(shape, dtype);
    check_grad_input(&c);
    check_grad_weight(&c);
    check_forward(&c);
    free_case(&c);
}

TEST(conv2d, .deadline_s = 100)
{
    static const struct shape shapes[] = {
        {2, 1, 28, 28, 10, {.kernel = {5, 5}}},
        {2, 10, 12, 12, 20, {.kernel = {5, 5}}},
        {1, 1, 1, 1, 1, {.kernel = {1, 1}}},
        {3, 4, 7, 9, 6, {.kernel = {3, 3}, .padding = {1, 1}}},
        {2, 3, 8, 8, 5, {.kernel = {3, 3}, .stride = {2, 2}}},
        {2, 3, 9, 8, 5, {.kernel = {2, 3}, .stride = {2, 3}, .padding = {1, 2}}},
        {1, 2, 11, 13, 3, {.kernel = {3, 3}, .dilation = {2, 3}}},
        {2,
         2,
         10,
         10,
         3,
         {.kernel = {3, 2}, .dilation = {2, 2}, .padding = {3, 4}, .stride = {2, 1}}},
        {2, 6, 5, 6, 9, {.kernel = {3, 3}, .padding = {1, 1}, .groups = 3}},
        {2, 8, 6, 6, 8, {.kernel = {3, 3}, .padding = {1, 1}, .groups = 8}},
        {2, 4, 6, 6, 8, {.kernel = {3, 1}, .padding = {1, 0}, .groups = 4}},
        {2, 5, 6, 7, 7, {.kernel = {1, 1}}},
        {2, 5, 6, 7, 7, {.kernel = {1, 1}, .stride = {2, 2}}},
        {2, 5, 6, 7, 7, {.kernel = {1, 1}, .padding = {2, 1}}},
        {2, 3, 6, 7, 4, {.kernel = {6, 7}}},                    /* as large as the picture */
        {2, 3, 4, 4, 4, {.kernel = {3, 3}, .padding = {5, 6}}}, /* windows beside the picture */
        {1, 2, 5, 5, 3, {.kernel = {7, 7}, .padding = {3, 3}}}, /* larger than the picture */
        {1, 3, 5, 5, 3, {.kernel = {2, 2}, .stride = {5, 4}}},  /* pixels that nothing sees */
        {0, 3, 5, 5, 3, {.kernel = {2, 2}}},
        {2, 0, 5, 5, 3, {.kernel = {2, 2}}},
        {2, 3, 5, 5, 0, {.kernel = {2, 2}}},
        {2, 3, 4, 5, 3, {.kernel = {5, 5}}}, /* no output pixels */
        {1, 40, 6, 6, 33, {.kernel = {3, 3}, .padding = {1, 1}}},
        {1, 3, 3, 70, 17, {.kernel = {3, 3}, .padding = {1, 1}}},
        {1, 1, 40, 3, 15, {.kernel = {3, 3}, .padding = {1, 1}, .stride = {1, 2}}},
        {5, 2, 4, 4, 2, {.kernel = {3, 3}, .padding = {1, 1}}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = 0; d < 4; d++)
            check_shape(&shapes[i], floats[d]);
}

/* Enough channels for products that read the pictures in place, with and without frames. */
TEST(conv2d_of_many_channels, .deadline_s = 100)
{
    static const struct shape shapes[] = {
        {2, 16, 9, 8, 16, {.kernel = {3, 3}, .padding = {1, 1}}},
        {2, 12, 9, 8, 13, {.kernel = {3, 3}}},
        {3, 14, 7, 15, 30, {.kernel = {3, 3}, .padding = {1, 1}, .stride = {2, 2}}},
        {1, 16, 10, 11, 47, {.kernel = {3, 2}, .padding = {2, 0}, .stride = {3, 2}}},
        {1, 16, 11, 10, 16, {.kernel = {3, 3}, .stride = {1, 3}, .dilation = {2, 1}}},
        {2, 13, 12, 9, 32, {.kernel = {3, 3}, .padding = {2, 2}, .dilation = {2, 2}}},
        {1, 16, 4, 4, 16, {.kernel = {3, 3}, .padding = {5, 6}}},
        {1, 16, 5, 5, 16, {.kernel = {7, 7}, .padding = {3, 3}}},
        {1, 16, 9, 9, 16, {.kernel = {2, 2}, .stride = {5, 4}}},
        {2, 52, 6, 7, 64, {.kernel = {1, 1}}},
        {2, 60, 7, 6, 48, {.kernel = {1, 1}, .stride = {2, 2}}},
        {2, 50, 5, 6, 12, {.kernel = {1, 1}, .padding = {2, 1}}},
        {2, 32, 6, 9, 28, {.kernel = {3, 3}, .padding = {1, 1}, .groups = 2}},
        {1, 40, 37, 3, 15, {.kernel = {3, 3}, .padding = {1, 1}, .stride = {2, 1}}},
        {4, 1, 33, 35, 14, {.kernel = {7, 7}, .padding = {3, 3}, .stride = {2, 2}}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = 0; d < 4; d++)
            check_shape(&shapes[i], floats[d]);
}

/* Groups of few channels, which go plane by plane. */
TEST(conv2d_depthwise, .deadline_s = 100)
{
    static const struct shape shapes[] = {
        {2, 5, 9, 35, 5, {.kernel = {3, 3}, .padding = {1, 1}, .groups = 5}},
        {2, 3, 12, 16, 6, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}, .groups = 3}},
        {1, 4, 13, 11, 4, {.kernel = {5, 4}, .stride = {1, 3}, .padding = {2, 5}, .groups = 2}},
        {2, 6, 10, 70, 6, {.kernel = {3, 3}, .dilation = {2, 3}, .padding = {1, 0}, .groups = 6}},
        {1, 2, 6, 6, 2, {.kernel = {1, 1}, .stride = {2, 2}, .groups = 2}},
        {2, 16, 7, 7, 16, {.kernel = {7, 7}, .padding = {3, 3}, .groups = 2}},
        {1, 2, 5, 5, 2, {.kernel = {2, 2}, .stride = {5, 4}, .groups = 2}},
        /* Kernels of 3 and 5 rows, with more and fewer rows and columns than are made at a time. */
        {2, 6, 14, 14, 6, {.kernel = {5, 5}, .padding = {2, 2}, .groups = 6}},
        {1, 4, 9, 37, 4, {.kernel = {5, 3}, .padding = {2, 1}, .groups = 4}},
        {1, 4, 3, 70, 4, {.kernel = {3, 5}, .padding = {1, 2}, .groups = 4}},
        {2, 6, 6, 20, 4, {.kernel = {3, 3}, .padding = {1, 1}, .groups = 2}},
        {1, 4, 11, 19, 4, {.kernel = {5, 5}, .padding = {4, 4}, .dilation = {2, 2}, .groups = 4}},
        {2, 4, 15, 31, 4, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}, .groups = 4}},
        {1, 2, 16, 34, 4, {.kernel = {5, 5}, .stride = {1, 2}, .padding = {2, 1}, .groups = 2}},
        {1, 3, 13, 29, 3, {.kernel = {3, 3}, .stride = {2, 3}, .padding = {2, 2}, .groups = 3}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = 0; d < 4; d++)
            check_shape(&shapes[i], floats[d]);
}

/* Kernels of one place are plain products; few channels of the output, gradients of weights that are not. */
TEST(conv2d_of_1x1_kernels_or_few_channels, .deadline_s = 100)
{
    static const struct shape shapes[] = {
        {3, 20, 7, 9, 30, {.kernel = {1, 1}}},
        {1, 5, 16, 16, 70, {.kernel = {1, 1}}},
        {5, 12, 8, 10, 20, {.kernel = {1, 1}, .groups = 2}},
        {2, 9, 1, 5, 11, {.kernel = {1, 1}}},
        {6, 1, 20, 20, 10, {.kernel = {5, 5}}},
        {3, 10, 12, 12, 20, {.kernel = {5, 5}, .padding = {1, 1}}},
        {2, 3, 11, 15, 8, {.kernel = {3, 3}, .stride = {2, 1}, .padding = {1, 1}}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = 0; d < 4; d++)
            check_shape(&shapes[i], floats[d]);
}

/* Larger than one block of weights, and than one piece of what the gradient is added up from. */
TEST(conv2d_in_pieces, .deadline_s = 100)
{
    static const struct shape shapes[] = {
        {2, 130, 5, 5, 130, {.kernel = {3, 3}, .padding = {1, 1}}},
        {2, 1, 5, 60, 2, {.kernel = {3, 50}, .padding = {1, 25}}},
        {2, 2, 300, 70, 2, {.kernel = {5, 5}, .padding = {2, 2}}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(&shapes[i], TD_F64);
}

/* Too large to be copied with their padding. */
TEST(conv2d_of_large_pictures, .deadline_s = 100)
{
    static const struct shape shapes[] = {
        {1, 1, 1030, 1030, 2, {.kernel = {2, 3}, .stride = {7, 6}, .padding = {1, 2}}},
        {1, 2, 40, 30000, 1, {.kernel = {3, 2}, .stride = {13, 1}, .padding = {2, 1}}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(&shapes[i], TD_F32);
}

TEST(conv2d_of_random_shapes, .deadline_s = 100)
{
    for (int i = 0; i < 340; i++) {
        int64_t groups = 1 + below(3);
        const bool wide = i >= 300; /* direct products */
        struct shape shape = {
            .n = 1 + below(3),
            .c = groups * (wide ? 9 + below(12) : 1 + below(4)),
            .h = 1 + below(12),
            .w = 1 + below(40),
            .o = groups * (wide ? 9 + below(30) : 1 + below(9)),
            .window = {.kernel = {1 + below(4), 1 + below(5)},
                       .stride = {1 + below(3), 1 + below(3)},
                       .padding = {below(4), below(4)},
                       .dilation = {1 + below(2), 1 + below(3)},
                       .groups = groups},
        };
        check_shape(&shape, i % 3 ? TD_F32 : TD_F64);
    }
}

/* An infinite weight times the padding is NaN, on all sides; no output pixel is missing from a gradient. */
static void check_infinite_weight(const struct shape *shape, td_dtype dtype, int64_t tap)
{
    struct conv_case c = make_case(shape, dtype);
    const int64_t kernel = c.w.kernel[0] * c.w.kernel[1], group_in = shape->c / c.w.groups;
    td_tensor *grad_x = td_clone(c.x);
    for (int64_t i = 0; i < shape->o * group_in; i++)
        set(c.weight, i * kernel + tap, INFINITY);
    for (int64_t i = 0; i < td_tensor_numel(c.x); i++)
        set(c.x, i, 1);
    for (int64_t i = 0; i < td_tensor_numel(c.out); i++)
        set(c.out, i, 1);
    CHECK_OK(KERNELS->conv2d_grad_input(grad_x, c.out, c.weight, &c.w));
    CHECK_OK(KERNELS->conv2d(c.out, c.x, c.weight, c.bias, &c.w));

    const int64_t down = tap / c.w.kernel[1] * c.w.dilation[0] - c.w.padding[0];
    const int64_t right = tap % c.w.kernel[1] * c.w.dilation[1] - c.w.padding[1];
    for (int64_t i = 0; i < td_tensor_numel(c.out); i++) {
        const int64_t y = i / c.ow % c.oh * c.w.stride[0] + down;
        const int64_t x = i % c.ow * c.w.stride[1] + right;
        const bool inside = y >= 0 && y < shape->h && x >= 0 && x < shape->w;
        CHECK(inside ? get(c.out, i) == INFINITY : isnan(get(c.out, i)));
    }
    for (int64_t i = 0; i < td_tensor_numel(grad_x); i++) {
        const int64_t y = i / shape->w % shape->h - down, x = i % shape->w - right;
        const bool met = y >= 0 && y % c.w.stride[0] == 0 && y / c.w.stride[0] < c.oh && x >= 0 &&
                         x % c.w.stride[1] == 0 && x / c.w.stride[1] < c.ow;
        CHECK(met ? get(grad_x, i) == INFINITY : isfinite(get(grad_x, i)));
    }
    td_tensor_release(grad_x);
    free_case(&c);
}

TEST(conv2d_of_infinite_weights)
{
    static const struct shape shapes[] = {
        {2, 16, 9, 14, 16, {.kernel = {3, 3}, .padding = {1, 1}}}, /* direct, if they were finite */
        {1, 16, 15, 17, 32, {.kernel = {3, 3}, .padding = {1, 1}, .stride = {2, 2}}},
        {1, 13, 16, 15, 16, {.kernel = {3, 3}, .padding = {2, 2}, .dilation = {2, 2}}},
        {2, 4, 9, 35, 4, {.kernel = {3, 3}, .padding = {1, 1}, .groups = 4}}, /* by planes */
        {2, 10, 12, 12, 20, {.kernel = {5, 5}, .padding = {2, 2}}},
        {1, 4, 7, 9, 6, {.kernel = {3, 3}, .padding = {1, 1}}}, /* by columns */
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int d = 0; d < 2; d++)
            for (int64_t tap = 0; tap < 9; tap += 4)
                check_infinite_weight(&shapes[i], floats[d], tap);
}

TEST(nan_passes_through_a_convolution)
{
    struct shape shape = {1, 2, 8, 8, 3, {.kernel = {3, 3}}};
    struct conv_case c = make_case(&shape, TD_F32);
    set(c.x, 64 + 3 * 8 + 4, NAN); /* channel 1, row 3, column 4 */
    CHECK_OK(KERNELS->conv2d(c.out, c.x, c.weight, NULL, &c.w));
    for (int64_t i = 0; i < 3 * 36; i++) {
        int64_t y = i / 6 % 6, x = i % 6;
        CHECK_EQ(isnan(get(c.out, i)), y >= 1 && y <= 3 && x >= 2 && x <= 4);
    }
    free_case(&c);
}
