/* Pooling against naive loops. */
#include "kernel_values.h"

struct pool_case {
    int64_t n, c, h, w, oh, ow;
    td_window window; /* kernel 0: adaptive */
};

/* Whether input (y, x) belongs to output (oy, ox). */
static bool covers(const struct pool_case *p, int64_t oy, int64_t ox, int64_t y, int64_t x)
{
    const int64_t at[2] = {y, x}, out[2] = {oy, ox}, in[2] = {p->h, p->w}, made[2] = {p->oh, p->ow};
    for (int d = 0; d < 2; d++) {
        if (p->window.kernel[0] == 0) {
            double low = floor((double)(out[d] * in[d]) / (double)made[d]);
            double high = ceil((double)((out[d] + 1) * in[d]) / (double)made[d]);
            if ((double)at[d] < low || (double)at[d] >= high)
                return false;
            continue;
        }
        int64_t tap = at[d] - out[d] * p->window.stride[d] + p->window.padding[d];
        if (tap < 0 || tap % p->window.dilation[d] ||
            tap / p->window.dilation[d] >= p->window.kernel[d])
            return false;
    }
    return true;
}

/* How many places a mean is over, those in the padding included. */
static int64_t places(const struct pool_case *p, int64_t oy, int64_t ox)
{
    const td_window *w = &p->window;
    int64_t count = 0;
    for (int64_t ky = 0; ky < w->kernel[0]; ky++)
        for (int64_t kx = 0; kx < w->kernel[1]; kx++)
            count += oy * w->stride[0] + ky < p->h + 2 * w->padding[0] &&
                     ox * w->stride[1] + kx < p->w + 2 * w->padding[1];
    return count;
}

static void check_max(const struct pool_case *p, td_dtype dtype)
{
    td_tensor *x = filled(SHAPE(p->n, p->c, p->h, p->w), dtype), *grad_x = td_clone(x);
    td_tensor *out = filled(SHAPE(p->n, p->c, p->oh, p->ow), dtype), *other = td_clone(out);
    td_tensor *indices = td_zeros(SHAPE(p->n, p->c, p->oh, p->ow), TD_I32, NULL);
    double *values = values_of(x), *greatest = doubles(td_tensor_numel(out)),
           *where = doubles(td_tensor_numel(out));
    double *gradient = doubles(td_tensor_numel(x));
    for (int64_t i = 0; i < td_tensor_numel(out); i++) {
        int64_t picture = i / (p->oh * p->ow) * p->h * p->w;
        greatest[i] = -INFINITY;
        for (int64_t at = 0; at < p->h * p->w; at++)
            if (covers(p, i / p->ow % p->oh, i % p->ow, at / p->w, at % p->w) &&
                values[picture + at] > greatest[i]) {
                greatest[i] = values[picture + at];
                where[i] = (double)at;
            }
        gradient[picture + (int64_t)where[i]] += get(out, i);
    }
    td_tensor *grad_y = td_clone(out);
    if (p->window.kernel[0] == 0) {
        CHECK_OK(KERNELS->adaptive_max_pool2d(out, indices, x));
        CHECK_OK(KERNELS->adaptive_max_pool2d(other, NULL, x));
    } else {
        CHECK_OK(KERNELS->max_pool2d(out, indices, x, &p->window));
        CHECK_OK(KERNELS->max_pool2d(other, NULL, x, &p->window));
    }
    check_close("max_pool2d", out, greatest);
    check_close("max_pool2d without indices", other, greatest);
    for (int64_t i = 0; i < td_tensor_numel(out); i++)
        CHECK_EQ(get(indices, i), where[i]);
    CHECK_OK(KERNELS->max_pool2d_grad(grad_x, grad_y, indices, &p->window));
    check_close("max_pool2d_grad", grad_x, gradient);
    free(values);
    free(greatest);
    free(where);
    free(gradient);
    RELEASE(x, grad_x, out, other, indices, grad_y);
}

static void check_average(const struct pool_case *p, td_dtype dtype)
{
    const bool adaptive = p->window.kernel[0] == 0;
    td_tensor *x = filled(SHAPE(p->n, p->c, p->h, p->w), dtype), *grad_x = td_clone(x);
    td_tensor *out = filled(SHAPE(p->n, p->c, p->oh, p->ow), dtype), *grad_y = td_clone(out);
    double *values = values_of(x), *mean = doubles(td_tensor_numel(out)),
           *gradient = doubles(td_tensor_numel(x));
    for (int64_t i = 0; i < td_tensor_numel(out); i++) {
        int64_t picture = i / (p->oh * p->ow) * p->h * p->w, oy = i / p->ow % p->oh, ox = i % p->ow;
        int64_t count = 0;
        for (int64_t at = 0; at < p->h * p->w; at++)
            if (covers(p, oy, ox, at / p->w, at % p->w)) {
                mean[i] += values[picture + at];
                count++;
            }
        int64_t divisor = !adaptive && p->window.count_include_pad && count ? places(p, oy, ox)
                                                                            : count;
        mean[i] = count ? mean[i] / (double)divisor : 0;
        for (int64_t at = 0; at < p->h * p->w; at++)
            if (covers(p, oy, ox, at / p->w, at % p->w))
                gradient[picture + at] += get(grad_y, i) / (double)divisor;
    }
    if (adaptive) {
        CHECK_OK(KERNELS->adaptive_avg_pool2d(out, x));
        CHECK_OK(KERNELS->adaptive_avg_pool2d_grad(grad_x, grad_y));
    } else {
        CHECK_OK(KERNELS->avg_pool2d(out, x, &p->window));
        CHECK_OK(KERNELS->avg_pool2d_grad(grad_x, grad_y, &p->window));
    }
    check_close("avg_pool2d", out, mean);
    check_close("avg_pool2d_grad", grad_x, gradient);
    free(values);
    free(mean);
    free(gradient);
    RELEASE(x, grad_x, out, grad_y);
}

TEST(windows, .deadline_s = 60)
{
    static const struct pool_case cases[] = {
        {2, 3, 24, 24, 12, 12, {.kernel = {2, 2}, .stride = {2, 2}}},
        {2, 3, 9, 7, 4, 3, {.kernel = {2, 2}, .stride = {2, 2}}},
        {2, 3, 9, 7, 5, 4, {.kernel = {2, 2}, .stride = {2, 2}}}, /* the last one is cut off */
        {1, 2, 38, 80, 19, 40, {.kernel = {2, 2}, .stride = {2, 2}}},
        {2, 2, 8, 9, 8, 9, {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}}},
        {2, 2, 8, 9, 4, 5, {.kernel = {3, 3}, .stride = {2, 2}, .padding = {1, 1}}},
        {1, 2, 8, 9, 3, 4, {.kernel = {3, 2}, .stride = {2, 2}}},
        {1, 1, 5, 6, 1, 1, {.kernel = {5, 6}, .stride = {1, 1}}},
        {1, 1, 1, 1, 1, 1, {.kernel = {1, 1}, .stride = {1, 1}}},
        {0, 2, 4, 4, 2, 2, {.kernel = {2, 2}, .stride = {2, 2}}},
        {2, 0, 4, 4, 2, 2, {.kernel = {2, 2}, .stride = {2, 2}}},
        {2, 2, 1, 4, 0, 2, {.kernel = {2, 2}, .stride = {2, 2}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int d = 0; d < 8; d++) {
            struct pool_case p = cases[i];
            p.window.dilation[0] = p.window.dilation[1] = 1;
            p.window.count_include_pad = d / 4;
            check_max(&p, floats[d % 4]);
            check_average(&p, floats[d % 4]);
        }
    struct pool_case dilated = {2, 2, 9, 11, 5, 3, {.kernel = {3, 3}, .stride = {1, 2}}};
    dilated.window.dilation[0] = 2;
    dilated.window.dilation[1] = 3;
    check_max(&dilated, TD_F32);
    dilated.window.padding[0] = 1;
    dilated.oh = 7;
    check_max(&dilated, TD_F64);
}

TEST(adaptive_windows, .deadline_s = 60)
{
    static const struct pool_case cases[] = {
        {2, 3, 7, 7, 1, 1, {.kernel = {0}}},  {2, 3, 8, 8, 2, 4, {.kernel = {0}}},
        {1, 2, 7, 5, 3, 2, {.kernel = {0}}},  {1, 2, 3, 4, 5, 7, {.kernel = {0}}},
        {1, 1, 1, 1, 3, 3, {.kernel = {0}}},  {0, 2, 4, 4, 2, 2, {.kernel = {0}}},
        {2, 2, 10, 9, 4, 9, {.kernel = {0}}}, {2, 2, 5, 5, 0, 2, {.kernel = {0}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int d = 0; d < 4; d++) {
            check_max(&cases[i], floats[d]);
            check_average(&cases[i], floats[d]);
        }
}

/* In windows of 2 x 2, with values that are NaN, infinite and equal, in every arrangement. */
TEST(the_greatest_of_four)
{
    static const double values[] = {0, 1, -INFINITY, INFINITY, NAN};
    td_window w = {.kernel = {2, 2}, .stride = {2, 2}, .dilation = {1, 1}};
    td_tensor *x = td_zeros(SHAPE(625, 1, 2, 2), TD_F32, NULL),
              *out = td_zeros(SHAPE(625, 1, 1, 1), TD_F32, NULL);
    td_tensor *other = td_clone(out), *indices = td_zeros(SHAPE(625, 1, 1, 1), TD_I32, NULL);
    td_tensor *row = td_zeros(SHAPE(1, 1, 2, 1250), TD_F32, NULL);
    td_tensor *row_out = td_zeros(SHAPE(1, 1, 1, 625), TD_F32, NULL);
    td_tensor *row_indices = td_zeros(SHAPE(1, 1, 1, 625), TD_I32, NULL);
    for (int64_t i = 0; i < 625; i++) {
        double four[4] = {values[i % 5], values[i / 5 % 5], values[i / 25 % 5], values[i / 125]};
        for (int64_t j = 0; j < 4; j++) {
            set(x, 4 * i + j, four[j]);
            set(row, j / 2 * 1250 + 2 * i + j % 2, four[j]);
        }
    }
    CHECK_OK(KERNELS->max_pool2d(out, indices, x, &w));
    CHECK_OK(KERNELS->max_pool2d(other, NULL, x, &w));
    CHECK_OK(KERNELS->max_pool2d(row_out, row_indices, row, &w));
    for (int64_t i = 0; i < 625; i++) {
        int64_t best = 0;
        for (int64_t j = 1; j < 4; j++) {
            double value = get(x, 4 * i + j), greatest = get(x, 4 * i + best);
            if (value > greatest || (isnan(value) && !isnan(greatest)))
                best = j;
        }
        double greatest = get(x, 4 * i + best);
        CHECK_EQ(get(indices, i), best);
        CHECK_EQ(get(row_indices, i), best / 2 * 1250 + 2 * i + best % 2);
        CHECK(isnan(greatest) ? isnan(get(out, i)) : get(out, i) == greatest);
        CHECK(isnan(greatest) ? isnan(get(other, i)) : get(other, i) == greatest);
        CHECK(isnan(greatest) ? isnan(get(row_out, i)) : get(row_out, i) == greatest);
    }
    RELEASE(x, out, other, indices, row, row_out, row_indices);
}
