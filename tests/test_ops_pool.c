/* Pooling: gradients by finite differences, values by slices of the picture, and what is refused. */
#include "ops_checks.h"

#include <math.h>

/* ---- Pooling --------------------------------------------------------------------------------------- */

struct pool {
    int64_t x[4], kernel[2];
    td_pool2d_options options;
};

static const struct pool pools[] = {
    {{2, 3, 6, 6}, {2, 2}, {.exclude_padding = false}},
    {{1, 2, 7, 5}, {3, 2}, {.stride = {2, 1}, .padding = {1, 1}}},
    {{1, 1, 5, 5}, {5, 5}, {.exclude_padding = false}},
    {{2, 1, 4, 4}, {1, 1}, {.exclude_padding = false}},
    {{1, 2, 6, 6}, {3, 3}, {.stride = {1, 1}, .padding = {1, 1}, .exclude_padding = true}},
};

static td_tensor *max_pool(td_tensor *const *x, const void *arg)
{
    const struct pool *pool = arg;
    return td_f_max_pool2d(x[0], pool->kernel[0], pool->kernel[1], &pool->options);
}

static td_tensor *avg_pool(td_tensor *const *x, const void *arg)
{
    const struct pool *pool = arg;
    return td_f_avg_pool2d(x[0], pool->kernel[0], pool->kernel[1], &pool->options);
}

/* Different numbers, far enough from each other for finite differences. */
static td_tensor *distinct(const int64_t *shape, int ndim)
{
    TD_SCOPE;
    td_tensor *x = td_empty(shape, ndim, TD_F64, td_device_get("cpu"));
    double *data = td_tensor_data(x);
    int64_t count = td_tensor_numel(x);
    for (int64_t i = 0; i < count; i++)
        data[i] = (double)(i * 7919 % 10007) / 1000 - 5;
    return td_scope_return(td_tensor_to(x, NULL));
}

/* The windows as slices of a padded picture, one element of each window at a time. */
static td_tensor *slow_pool(td_tensor *x, const struct pool *pool, bool greatest)
{
    const int64_t *s = pool->options.stride, *k = pool->kernel, *p = pool->options.padding;
    int64_t step[2] = {s[0] ? s[0] : k[0], s[1] ? s[1] : k[1]};
    int64_t height = pool->x[2] + 2 * p[0], width = pool->x[3] + 2 * p[1];
    td_tensor *padded = td_full((int64_t[]){pool->x[0], pool->x[1], height, width}, 4,
                                greatest ? -INFINITY : 0, TD_F64, NULL);
    td_tensor *counts = td_zeros((int64_t[]){pool->x[0], pool->x[1], height, width}, 4, TD_F64,
                                 NULL);
    td_tensor *inside = td_narrow(td_narrow(padded, 2, p[0], pool->x[2]), 3, p[1], pool->x[3]);
    CHECK_OK(td_tensor_copy(inside, x));
    CHECK_OK(td_fill_(pool->options.exclude_padding
                          ? td_narrow(td_narrow(counts, 2, p[0], pool->x[2]), 3, p[1], pool->x[3])
                          : counts,
                      1));
    td_tensor *best = NULL, *number = NULL;
    int64_t rows = (height - k[0]) / step[0], columns = (width - k[1]) / step[1];
    for (int64_t a = 0; a < k[0]; a++)
        for (int64_t b = 0; b < k[1]; b++) {
            td_tensor *part = td_slice(td_slice(padded, 2, a, a + rows * step[0] + 1, step[0]), 3,
                                       b, b + columns * step[1] + 1, step[1]);
            td_tensor *one = td_slice(td_slice(counts, 2, a, a + rows * step[0] + 1, step[0]), 3, b,
                                      b + columns * step[1] + 1, step[1]);
            best = !best ? part : greatest ? td_maximum(best, part) : td_add(best, part);
            number = !number ? one : td_add(number, one);
        }
    return greatest ? best : td_div(best, number);
}

TEST(pooling)
{
    for (size_t i = 0; i < sizeof pools / sizeof pools[0]; i++) {
        TD_SCOPE;
        const struct pool *pool = &pools[i];
        td_tensor *x = distinct(pool->x, 4);
        check_near(max_pool(&x, pool), slow_pool(x, pool, true), 0);
        check_near(avg_pool(&x, pool), slow_pool(x, pool, false), 1e-12);
        gradcheck_distinct("td_f_max_pool2d", max_pool, pool, &x, 1);
        gradcheck("td_f_avg_pool2d", avg_pool, pool, &x, 1);
        td_tensor *single = td_select(x, 0, 0);
        check_near(max_pool(&single, pool), td_select(max_pool(&x, pool), 0, 0), 0);
        gradcheck_distinct("td_f_max_pool2d", max_pool, pool, &single, 1);
    }
    {
        TD_SCOPE;
        const struct pool dilated = {{1, 2, 7, 7}, {2, 3}, {.dilation = {2, 3}, .stride = {1, 1}}};
        td_tensor *x = distinct(dilated.x, 4);
        CHECK_EQ(td_tensor_size(max_pool(&x, &dilated), 3), 1);
        gradcheck_distinct("td_f_max_pool2d", max_pool, &dilated, &x, 1);
    }
}

static td_tensor *adaptive_avg(td_tensor *const *x, const void *arg)
{
    const int64_t *size = arg;
    return td_f_adaptive_avg_pool2d(x[0], size[0], size[1]);
}

static td_tensor *adaptive_max(td_tensor *const *x, const void *arg)
{
    const int64_t *size = arg;
    return td_f_adaptive_max_pool2d(x[0], size[0], size[1]);
}

TEST(adaptive_pooling)
{
    static const int64_t sizes[][2] = {{1, 1}, {2, 3}, {5, 7}, {7, 4}};
    for (int i = 0; i < 4; i++) {
        TD_SCOPE;
        td_tensor *x = distinct(SHAPE(2, 2, 5, 7));
        td_tensor *mean = adaptive_avg(&x, sizes[i]), *most = adaptive_max(&x, sizes[i]);
        for (int64_t h = 0; h < sizes[i][0]; h++)
            for (int64_t w = 0; w < sizes[i][1]; w++) {
                int64_t top = h * 5 / sizes[i][0], left = w * 7 / sizes[i][1];
                int64_t end = ((h + 1) * 5 + sizes[i][0] - 1) / sizes[i][0];
                int64_t right = ((w + 1) * 7 + sizes[i][1] - 1) / sizes[i][1];
                td_tensor *part = td_narrow(
                    td_narrow(td_select(td_select(x, 0, 1), 0, 1), 0, top, end - top), 1, left,
                    right - left);
                td_tensor *m = td_select(td_select(td_select(td_select(mean, 0, 1), 0, 1), 0, h), 0,
                                         w);
                td_tensor *g = td_select(td_select(td_select(td_select(most, 0, 1), 0, 1), 0, h), 0,
                                         w);
                CHECK(fabs(td_item(m) - td_item(td_mean(part))) < 1e-12);
                CHECK(td_item(g) == td_item(td_max(part)));
            }
        gradcheck("td_f_adaptive_avg_pool2d", adaptive_avg, sizes[i], &x, 1);
        gradcheck_distinct("td_f_adaptive_max_pool2d", adaptive_max, sizes[i], &x, 1);
    }
}

TEST(pooling_refuses)
{
    {
        TD_SCOPE;
        td_tensor *x = td_zeros(SHAPE(1, 2, 4, 4), TD_F32, NULL);
        CHECK_NULL(td_f_max_pool2d(x, 5, 1, NULL), "td_f_max_pool2d: a kernel of height 5");
        CHECK_NULL(td_f_max_pool2d(x, 0, 2, NULL), "kernel 0");
        CHECK_NULL(td_f_max_pool2d(x, 2, 2, &(td_pool2d_options){.padding = {0, 2}}),
                   "a padding of 2 for a kernel of 2");
        CHECK_NULL(td_f_avg_pool2d(x, 2, 2, &(td_pool2d_options){.dilation = {2, 1}}), "dilation");
        CHECK_NULL(td_f_avg_pool2d(td_zeros(SHAPE(4, 4), TD_F32, NULL), 2, 2, NULL), "[4, 4]");
        CHECK_NULL(td_f_avg_pool2d(td_zeros(SHAPE(1, 2, 4, 4), TD_I32, NULL), 2, 2, NULL), "i32");
        CHECK_NULL(td_f_adaptive_avg_pool2d(x, -1, 2), "-1 by 2");
        CHECK_NULL(td_f_adaptive_max_pool2d(td_zeros(SHAPE(1, 1, 0, 4), TD_F32, NULL), 1, 1),
                   "1 by 1");
        CHECK(!td_f_max_pool2d(NULL, 2, 2, NULL) && !td_f_adaptive_max_pool2d(NULL, 2, 2));
        CHECK_EQ(
            td_tensor_numel(td_f_max_pool2d(td_zeros(SHAPE(0, 2, 4, 4), TD_F32, NULL), 2, 2, NULL)),
            0);
    }
}
