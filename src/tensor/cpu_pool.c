/* Pooling: each output pixel stands for a window of the picture, of which it has the greatest
 * element or the mean. The windows of one dimension follow from those of the other by nothing, so a
 * window is two ranges. Pictures and channels are all alike: one picture after another. */
#include "base/fail.h"
#include "tensor/cpu_products.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <math.h>
#include <string.h>

struct pool {
    int64_t pictures;
    int64_t in[2], out[2];
    const struct td__window *window; /* NULL: adaptive */
};

/* Indices from `start` on, below `end`, every `step`-th. */
struct range {
    int64_t start, end, step;
    int64_t divisor; /* of a mean */
};

/* What output index i of a dimension covers. */
static inline struct range range_at(const struct pool *pool, int dim, int64_t i)
{
    const struct td__window *w = pool->window;
    const int64_t size = pool->in[dim];
    struct range range = {.step = 1};
    if (!w) {
        range.start = i * size / pool->out[dim];
        range.end = ((i + 1) * size + pool->out[dim] - 1) / pool->out[dim];
        range.divisor = range.end - range.start;
        return range;
    }
    range.step = w->dilation[dim];
    range.start = i * w->stride[dim] - w->padding[dim];
    range.end = range.start + (w->kernel[dim] - 1) * range.step + 1;
    /* The padding counts, but not what a last window reaches beyond it. */
    int64_t limit = size + w->padding[dim];
    range.divisor = (range.end < limit ? range.end : limit) - range.start;
    if (range.start < 0)
        range.start += (-range.start + range.step - 1) / range.step * range.step;
    if (range.end > size)
        range.end = size;
    if (!w->count_include_pad)
        range.divisor = range.end - range.start;
    return range;
}

#define REAL float
#define NAMED(name) name##_f32
#include "tensor/pool_loops.h"

#define REAL double
#define NAMED(name) name##_f64
#include "tensor/pool_loops.h"

static struct pool pool_of(const td_tensor *in, const td_tensor *out,
                           const struct td__window *window)
{
    return (struct pool){
        .pictures = in->layout.shape[0] * in->layout.shape[1],
        .in = {in->layout.shape[2], in->layout.shape[3]},
        .out = {out->layout.shape[2], out->layout.shape[3]},
        .window = window,
    };
}

/* Windows of 2 x 2, side by side, all inside, and of a picture that is not too large. */
static bool is_pairs(const struct pool *pool)
{
    const struct td__window *w = pool->window;
    for (int d = 0; d < 2; d++)
        if (!w || w->kernel[d] != 2 || w->stride[d] != 2 || w->padding[d] != 0 ||
            w->dilation[d] != 1 || 2 * pool->out[d] > pool->in[d] || pool->out[d] > 512)
            return false;
    return true;
}

static td_status max_pool(td_tensor *out, td_tensor *indices, const td_tensor *x,
                          const struct td__window *window)
{
    struct pool pool = pool_of(x, out, window);
    const int64_t in = pool.in[0] * pool.in[1], made = pool.out[0] * pool.out[1];
    if (in > INT32_MAX)
        return td__fail(TD_ERR_UNSUPPORTED,
                        "max_pool2d: a picture of %lld pixels; the greatest one's index is i32",
                        (long long)in);
    struct td__wide wide = {0};
    const void *from = td__widen(&wide, x);
    void *to = td__widen_out(&wide, out, false);
    int32_t *where = indices ? td_tensor_data(indices) : NULL;
    const bool pairs = where && is_pairs(&pool);
    const bool is_f32 = td__wide_dtype(out) == TD_F32;
    for (int64_t i = 0; i < pool.pictures && wide.status == TD_OK && made > 0; i++) {
        int32_t *places = where ? where + i * made : NULL;
        if (is_f32)
            (pairs ? max_pairs_f32 : max_any_f32)(&pool, (const float *)from + i * in,
                                                  (float *)to + i * made, places);
        else
            (pairs ? max_pairs_f64 : max_any_f64)(&pool, (const double *)from + i * in,
                                                  (double *)to + i * made, places);
    }
    return td__widen_end(&wide);
}

td_status td__cpu_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x,
                             const struct td__window *window)
{
    return max_pool(out, indices, x, window);
}

td_status td__cpu_adaptive_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x)
{
    return max_pool(out, indices, x, NULL);
}

td_status td__cpu_max_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_tensor *indices)
{
    struct pool pool = pool_of(grad_x, grad_y, NULL);
    const int64_t in = pool.in[0] * pool.in[1], made = pool.out[0] * pool.out[1];
    struct td__wide wide = {0};
    const void *from = td__widen(&wide, grad_y);
    void *to = td__widen_out(&wide, grad_x, false);
    const int32_t *where = td_tensor_data(indices);
    for (int64_t i = 0; i < pool.pictures && wide.status == TD_OK && in > 0; i++) {
        if (td__wide_dtype(grad_x) == TD_F32)
            max_grad_f32(&pool, (const float *)from + i * made, where + i * made,
                         (float *)to + i * in);
        else
            max_grad_f64(&pool, (const double *)from + i * made, where + i * made,
                         (double *)to + i * in);
    }
    return td__widen_end(&wide);
}

static td_status average_pool(td_tensor *out, const td_tensor *x, const struct td__window *window)
{
    struct pool pool = pool_of(x, out, window);
    const int64_t in = pool.in[0] * pool.in[1], made = pool.out[0] * pool.out[1];
    struct td__wide wide = {0};
    const void *from = td__widen(&wide, x);
    void *to = td__widen_out(&wide, out, false);
    for (int64_t i = 0; i < pool.pictures && wide.status == TD_OK && made > 0; i++) {
        if (td__wide_dtype(out) == TD_F32)
            average_f32(&pool, (const float *)from + i * in, (float *)to + i * made);
        else
            average_f64(&pool, (const double *)from + i * in, (double *)to + i * made);
    }
    return td__widen_end(&wide);
}

static td_status average_pool_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                   const struct td__window *window)
{
    struct pool pool = pool_of(grad_x, grad_y, window);
    const int64_t in = pool.in[0] * pool.in[1], made = pool.out[0] * pool.out[1];
    struct td__wide wide = {0};
    const void *from = td__widen(&wide, grad_y);
    void *to = td__widen_out(&wide, grad_x, false);
    for (int64_t i = 0; i < pool.pictures && wide.status == TD_OK && in > 0; i++) {
        if (td__wide_dtype(grad_x) == TD_F32)
            average_grad_f32(&pool, (const float *)from + i * made, (float *)to + i * in);
        else
            average_grad_f64(&pool, (const double *)from + i * made, (double *)to + i * in);
    }
    return td__widen_end(&wide);
}

td_status td__cpu_avg_pool2d(td_tensor *out, const td_tensor *x, const struct td__window *window)
{
    return average_pool(out, x, window);
}

td_status td__cpu_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const struct td__window *window)
{
    return average_pool_grad(grad_x, grad_y, window);
}

td_status td__cpu_adaptive_avg_pool2d(td_tensor *out, const td_tensor *x)
{
    return average_pool(out, x, NULL);
}

td_status td__cpu_adaptive_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y)
{
    return average_pool_grad(grad_x, grad_y, NULL);
}
