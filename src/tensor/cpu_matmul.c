/* matmul and linear, by matrix products.
 *
 * Operands are used in place, with any strides. A batch is one product after another, unless it can be
 * merged into one: a batch of A with a single B, with the rows of A and of the result at equal distances.
 * Threads share the products of a large batch, and otherwise each product. */
#include "base/fail.h"
#include "tensor/cpu_kernels.h"
#include "tensor/gemm.h"
#include "tensor/parallel_for.h"
#include "tensor/widen.h"

#include <stdatomic.h>

/* Multiplications that pay for a thread. */
#define ENOUGH (1 << 19)

/* The dimensions before the last two, all of one shape. */
struct batch {
    int ndim;
    const int64_t *shape;
    const int64_t *out, *a, *b; /* strides */
};

static int64_t count_of(const struct batch *batch)
{
    int64_t count = 1;
    for (int d = 0; d < batch->ndim; d++)
        count *= batch->shape[d];
    return count;
}

/* Merges a batch with the same B into one product, if the rows are at equal distances across the batch. */
static bool merge(const struct batch *batch, struct td__gemm *gemm)
{
    int64_t rows = gemm->m;
    for (int d = batch->ndim; d-- > 0;) {
        if (batch->shape[d] == 1)
            continue;
        if (batch->b[d] != 0 || batch->a[d] != gemm->a_row * rows ||
            batch->out[d] != gemm->c_row * rows)
            return false;
        rows *= batch->shape[d];
    }
    gemm->m = rows;
    return true;
}

/* Products of a batch that threads share. */
struct batch_job {
    const struct batch *batch;
    td_dtype dtype;
    const struct td__gemm *gemm;
    atomic_int failed;
};

static void multiply_some(void *arg, int64_t begin, int64_t end)
{
    struct batch_job *job = arg;
    const struct batch *batch = job->batch;
    const int64_t in = (int64_t)td_dtype_size(job->dtype);
    const int64_t wide = job->dtype == TD_F64 ? sizeof(double) : sizeof(float);
    const int64_t out_size = job->gemm->c_half ? in : wide;
    for (int64_t i = begin; i < end; i++) {
        int64_t rest = i, out = 0, a = 0, b = 0;
        for (int d = batch->ndim; d-- > 0;) {
            int64_t index = rest % batch->shape[d];
            rest /= batch->shape[d];
            out += index * batch->out[d];
            a += index * batch->a[d];
            b += index * batch->b[d];
        }
        struct td__gemm one = *job->gemm;
        one.a = (const char *)job->gemm->a + a * in;
        one.b = (const char *)job->gemm->b + b * in;
        one.c = (char *)job->gemm->c + out * out_size;
        if (td__gemm(job->dtype, &one))
            job->failed = 1;
    }
}

static td_status multiply(td_dtype dtype, const struct batch *batch, struct td__gemm gemm)
{
    int64_t count = count_of(batch);
    if (count == 0)
        return TD_OK;
    if (merge(batch, &gemm))
        return td__gemm(dtype, &gemm);

    struct batch_job job = {.batch = batch, .dtype = dtype, .gemm = &gemm};
    if (count < td_get_num_threads()) {
        multiply_some(&job, 0, count);
    } else {
        const double each = (double)gemm.m * (double)gemm.n * (double)gemm.k;
        td__parallel_for(count, each >= ENOUGH ? 1 : (int64_t)(ENOUGH / (each + 1)) + 1,
                         multiply_some, &job);
    }
    return job.failed ? td__fail_nomem("matrix product") : TD_OK;
}

/* The elements of one side of a product, and their layout. */
struct side {
    const void *data;
    struct td__layout layout;
};

/* `dtype` is that of a and b. */
static td_status multiply_sides(td_dtype dtype, const struct side *out, const struct side *a,
                                const struct side *b, double alpha, bool accumulate, bool c_half)
{
    const struct td__layout *x = &a->layout, *y = &b->layout, *z = &out->layout;
    const int last = z->ndim - 1;
    struct td__gemm gemm = {
        .m = z->shape[last - 1],
        .n = z->shape[last],
        .k = x->shape[last],
        .a = a->data,
        .a_row = x->strides[last - 1],
        .a_col = x->strides[last],
        .b = b->data,
        .b_row = y->strides[last - 1],
        .b_col = y->strides[last],
        .c = (void *)out->data,
        .c_row = z->strides[last - 1],
        .alpha = alpha,
        .accumulate = accumulate,
        .c_half = c_half,
    };
    struct batch batch = {
        .ndim = last - 1, .shape = z->shape, .out = z->strides, .a = x->strides, .b = y->strides};
    return multiply(dtype, &batch, gemm);
}

static td_status multiply_views(td_tensor *out, const td_tensor *a, const td_tensor *b,
                                double alpha, bool accumulate)
{
    struct side x = {td_tensor_data(a), a->layout}, y = {td_tensor_data(b), b->layout};
    struct side z = {td_tensor_data(out), out->layout};
    const td_dtype dtype = out->layout.dtype;
    return multiply_sides(dtype, &z, &x, &y, alpha, accumulate,
                          dtype == TD_F16 || dtype == TD_BF16);
}

/* Products of halves that need f32 copies: scaled bf16, and results without contiguous columns. */
static td_status multiply_wide(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                               bool accumulate)
{
    struct td__wide wide = {0};
    struct side x = {td_tensor_data(a), a->layout}, y = {td_tensor_data(b), b->layout};
    struct side z = {td__widen_out(&wide, out, accumulate), out->layout};
    td_dtype dtype = out->layout.dtype;
    if (alpha != 1) {
        x.data = td__widen(&wide, a);
        y.data = td__widen(&wide, b);
        td__layout_set_contiguous(&x.layout);
        td__layout_set_contiguous(&y.layout);
        dtype = TD_F32;
    }
    td__layout_set_contiguous(&z.layout);
    if (wide.status == TD_OK)
        wide.status = multiply_sides(dtype, &z, &x, &y, alpha, accumulate, false);
    return td__widen_end(&wide);
}

static td_status refuse(const char *what, td_dtype dtype)
{
    return td_fail(TD_ERR_UNSUPPORTED, "%s: not supported for %s, only for f32, f64, f16 and bf16",
                   what, td_dtype_name(dtype));
}

td_status td__cpu_matmul(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                         bool accumulate)
{
    const struct td__layout *z = &out->layout;
    switch (z->dtype) {
    case TD_F16:
    case TD_BF16:
        if (alpha != 1 || (z->strides[z->ndim - 1] != 1 && z->shape[z->ndim - 1] > 1))
            return multiply_wide(out, a, b, alpha, accumulate);
        /* fall through */
    case TD_F32:
    case TD_F64:
        return multiply_views(out, a, b, alpha, accumulate);
    default:
        return refuse("matmul", z->dtype);
    }
}

td_status td__cpu_linear(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias)
{
    struct td__wide wide = {0};
    const td_dtype dtype = out->layout.dtype;
    const bool halves = dtype == TD_F16 || dtype == TD_BF16;
    if (dtype != TD_F32 && dtype != TD_F64 && !halves)
        return refuse("linear", dtype);
    const int64_t inputs = x->layout.shape[1];
    struct td__gemm gemm = {
        .m = out->layout.shape[0],
        .n = out->layout.shape[1],
        .k = inputs,
        .a = td_tensor_data(x),
        .a_row = inputs,
        .a_col = 1,
        .b = td_tensor_data(w),
        .b_row = 1,
        .b_col = inputs,
        .c = td_tensor_data(out),
        .c_half = halves,
        .c_row = out->layout.shape[1],
        .column_bias = td__widen(&wide, bias),
        .alpha = 1,
    };
    if (wide.status == TD_OK)
        wide.status = td__gemm(dtype, &gemm);
    return td__widen_end(&wide);
}
