/* Pooling: each output pixel is the maximum or the mean of a window of the image. A window is two independent
 * ranges, of rows and of columns. Images and channels are treated alike, as planes, which threads share. */
#include "base/fail.h"
#include "tensor/aligned.h"
#include "tensor/cpu_kernels.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

struct pool {
    int64_t images;
    int64_t in[2], out[2];
    const td_window *window; /* NULL: adaptive */
};

/* Indices from `start` on, below `end`, every `step`-th. */
struct range {
    int64_t start, end, step;
    int64_t divisor; /* of a mean */
};

/* The input range of output index i of a dimension. */
static inline struct range range_at(const struct pool *pool, int dim, int64_t i)
{
    const td_window *w = pool->window;
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
    /* The padding counts, but not what the last window covers beyond it. */
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

/* Columns of a row with its padding, up to the end of the last window. */
static int64_t padded_width(const struct pool *pool)
{
    const td_window *w = pool->window;
    const int64_t last = (pool->out[1] - 1) * w->stride[1] + (w->kernel[1] - 1) * w->dilation[1] +
                         1;
    const int64_t width = pool->in[1] + w->padding[1];
    return last > width ? last : width;
}

#define REAL float
#define NAMED(name) name##_f32
#include "tensor/pool_rows.h"
#include "tensor/pool_loops.h"

#define REAL double
#define NAMED(name) name##_f64
#include "tensor/pool_rows.h"
#include "tensor/pool_loops.h"

static struct pool pool_of(const td_tensor *in, const td_tensor *out,
                           const td_window *window)
{
    return (struct pool){
        .images = in->layout.shape[0] * in->layout.shape[1],
        .in = {in->layout.shape[2], in->layout.shape[3]},
        .out = {out->layout.shape[2], out->layout.shape[3]},
        .window = window,
    };
}

/* Windows of 2 x 2 with stride 2, all inside an image that is not too large. */
static bool is_pairs(const struct pool *pool)
{
    const td_window *w = pool->window;
    for (int d = 0; d < 2; d++)
        if (!w || w->kernel[d] != 2 || w->stride[d] != 2 || w->padding[d] != 0 ||
            w->dilation[d] != 1 || 2 * pool->out[d] > pool->in[d] || pool->out[d] > 512)
            return false;
    return true;
}

/* ---- Planes ------------------------------------------------------------------------------------ */

enum { PLANE_WORK = 32 * 1024 }; /* elements that pay for a thread */

/* What threads do with each of some planes: from `in` to `made` elements, or back. */
struct pool_job {
    struct pool pool;
    bool is_f32, pairs;
    int64_t in, made; /* elements of a plane */
    const void *from;
    void *to;
    int32_t *indices;
    atomic_int failed;
};

static td_status run_pool(struct pool_job *job, td__range_fn *fn)
{
    const int64_t each = job->in + job->made + 1;
    td__parallel_for(job->pool.images, PLANE_WORK / each + 1, fn, job);
    return job->failed ? td__fail_nomem("pooling") : TD_OK;
}

static struct pool_job job_of(const td_tensor *in, const td_tensor *out,
                              const td_window *window)
{
    struct pool pool = pool_of(in, out, window);
    return (struct pool_job){
        .pool = pool,
        .is_f32 = td__wide_dtype(in) == TD_F32,
        .in = pool.in[0] * pool.in[1],
        .made = pool.out[0] * pool.out[1],
    };
}

/* Allocates the rows for windows of a fixed size. */
static struct td__aligned alloc_scratch(struct pool_job *job)
{
    struct td__aligned scratch = {0};
    if (job->pool.window) {
        const int64_t count = 2 * padded_width(&job->pool) + 2 * job->pool.out[1];
        const int64_t spare = job->pairs ? job->made : 0; /* for indices that are not returned */
        scratch = td__aligned_alloc((size_t)(count + spare) * sizeof(double));
        if (!scratch.data)
            job->failed = 1;
    }
    return scratch;
}

static void max_planes(void *arg, int64_t begin, int64_t end)
{
    struct pool_job *job = arg;
    const struct pool *pool = &job->pool;
    struct td__aligned scratch = alloc_scratch(job);
    for (int64_t i = begin; i < end && !job->failed; i++) {
        int32_t *argmax = job->indices ? job->indices + i * job->made : NULL;
        const float *x = (const float *)job->from + i * job->in;
        float *out = (float *)job->to + i * job->made;
        const double *x64 = (const double *)job->from + i * job->in;
        double *out64 = (double *)job->to + i * job->made;
        if (!pool->window && job->is_f32)
            max_any_f32(pool, x, out, argmax);
        else if (!pool->window)
            max_any_f64(pool, x64, out64, argmax);
        else if (job->is_f32 && job->pairs)
            max_pairs_f32(pool, x, out, argmax ? argmax : scratch.data);
        else if (job->is_f32)
            max_rows_f32(pool, x, out, argmax, scratch.data);
        else if (job->pairs)
            max_pairs_f64(pool, x64, out64, argmax ? argmax : scratch.data);
        else
            max_rows_f64(pool, x64, out64, argmax, scratch.data);
    }
    td__aligned_free(&scratch);
}

static td_status max_pool(td_tensor *out, td_tensor *indices, const td_tensor *x,
                          const td_window *window)
{
    struct pool_job job = job_of(x, out, window);
    if (job.in > INT32_MAX)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "max_pool2d: an image has %lld pixels, but its indices are i32",
                       (long long)job.in);
    struct td__wide wide = {0};
    job.from = td__widen(&wide, x);
    job.to = td__widen_out(&wide, out, false);
    job.indices = indices ? td_tensor_data(indices) : NULL;
    job.pairs = is_pairs(&job.pool);
    if (wide.status == TD_OK && job.made > 0)
        wide.status = run_pool(&job, max_planes);
    return td__widen_end(&wide);
}

td_status td__cpu_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x,
                             const td_window *window)
{
    return max_pool(out, indices, x, window);
}

td_status td__cpu_adaptive_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x)
{
    return max_pool(out, indices, x, NULL);
}

static void max_grad_planes(void *arg, int64_t begin, int64_t end)
{
    const struct pool_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        const int32_t *where = job->indices + i * job->made;
        if (job->is_f32)
            max_grad_f32(&job->pool, (const float *)job->from + i * job->made, where,
                         (float *)job->to + i * job->in);
        else
            max_grad_f64(&job->pool, (const double *)job->from + i * job->made, where,
                         (double *)job->to + i * job->in);
    }
}

td_status td__cpu_max_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_tensor *indices, const td_window *window)
{
    (void)window; /* the indices suffice where a plane is written by one thread */
    struct pool_job job = job_of(grad_x, grad_y, NULL);
    struct td__wide wide = {0};
    job.from = td__widen(&wide, grad_y);
    job.to = td__widen_out(&wide, grad_x, false);
    job.indices = td_tensor_data(indices);
    if (wide.status == TD_OK && job.in > 0)
        wide.status = run_pool(&job, max_grad_planes);
    return td__widen_end(&wide);
}

static void average_planes(void *arg, int64_t begin, int64_t end)
{
    struct pool_job *job = arg;
    const struct pool *pool = &job->pool;
    struct td__aligned scratch = alloc_scratch(job);
    for (int64_t i = begin; i < end && !job->failed; i++) {
        const float *x = (const float *)job->from + i * job->in;
        float *out = (float *)job->to + i * job->made;
        const double *x64 = (const double *)job->from + i * job->in;
        double *out64 = (double *)job->to + i * job->made;
        if (job->is_f32 && pool->window)
            average_rows_f32(pool, x, out, scratch.data);
        else if (job->is_f32)
            average_f32(pool, x, out);
        else if (pool->window)
            average_rows_f64(pool, x64, out64, scratch.data);
        else
            average_f64(pool, x64, out64);
    }
    td__aligned_free(&scratch);
}

static td_status average_pool(td_tensor *out, const td_tensor *x, const td_window *window)
{
    struct pool_job job = job_of(x, out, window);
    struct td__wide wide = {0};
    job.from = td__widen(&wide, x);
    job.to = td__widen_out(&wide, out, false);
    if (wide.status == TD_OK && job.made > 0)
        wide.status = run_pool(&job, average_planes);
    return td__widen_end(&wide);
}

static void average_grad_planes(void *arg, int64_t begin, int64_t end)
{
    struct pool_job *job = arg;
    const struct pool *pool = &job->pool;
    struct td__aligned scratch = alloc_scratch(job);
    for (int64_t i = begin; i < end && !job->failed; i++) {
        const float *grad_y = (const float *)job->from + i * job->made;
        float *grad_x = (float *)job->to + i * job->in;
        const double *grad_y64 = (const double *)job->from + i * job->made;
        double *grad_x64 = (double *)job->to + i * job->in;
        if (job->is_f32 && pool->window)
            average_rows_grad_f32(pool, grad_y, grad_x, scratch.data);
        else if (job->is_f32)
            average_grad_f32(pool, grad_y, grad_x);
        else if (pool->window)
            average_rows_grad_f64(pool, grad_y64, grad_x64, scratch.data);
        else
            average_grad_f64(pool, grad_y64, grad_x64);
    }
    td__aligned_free(&scratch);
}

static td_status average_pool_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                   const td_window *window)
{
    struct pool_job job = job_of(grad_x, grad_y, window);
    struct td__wide wide = {0};
    job.from = td__widen(&wide, grad_y);
    job.to = td__widen_out(&wide, grad_x, false);
    if (wide.status == TD_OK && job.in > 0)
        wide.status = run_pool(&job, average_grad_planes);
    return td__widen_end(&wide);
}

td_status td__cpu_avg_pool2d(td_tensor *out, const td_tensor *x, const td_window *window)
{
    return average_pool(out, x, window);
}

td_status td__cpu_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_window *window)
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
