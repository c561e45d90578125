/* matmul and linear: from tensors to matrix products.
 *
 * Halves are copied to f32 first, contiguous; everything else is used where it is, whatever its
 * strides. A batch is one product after another, except where all of it is one: a batch of A against
 * a single B, with the rows of A and of the result at equal distances. */
#include "base/fail.h"
#include "tensor/cpu_products.h"
#include "tensor/gemm.h"
#include "tensor/widen.h"

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

/* Makes one product of a batch of them with the same B, where rows follow each other at the same
 * distance all through the batch. */
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

static td_status multiply(td_dtype dtype, const struct batch *batch, struct td__gemm gemm)
{
    int64_t count = count_of(batch);
    if (count == 0)
        return TD_OK;
    if (merge(batch, &gemm))
        return td__gemm(dtype, &gemm);

    const int64_t size = (int64_t)td_dtype_size(dtype);
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i, out = 0, a = 0, b = 0;
        for (int d = batch->ndim; d-- > 0;) {
            int64_t index = rest % batch->shape[d];
            rest /= batch->shape[d];
            out += index * batch->out[d];
            a += index * batch->a[d];
            b += index * batch->b[d];
        }
        struct td__gemm one = gemm;
        one.a = (const char *)gemm.a + a * size;
        one.b = (const char *)gemm.b + b * size;
        one.c = (char *)gemm.c + out * size;
        TD_TRY(td__gemm(dtype, &one));
    }
    return TD_OK;
}

/* Where the elements of a product are, and how they are laid out. */
struct side {
    const void *data;
    struct td__layout layout;
};

static td_status multiply_sides(void *out, const struct td__layout *z, const struct side *a,
                                const struct side *b, double alpha, bool accumulate)
{
    const int last = z->ndim - 1;
    const struct td__layout *x = &a->layout, *y = &b->layout;
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
        .c = out,
        .c_row = z->strides[last - 1],
        .alpha = alpha,
        .accumulate = accumulate,
    };
    struct batch batch = {
        .ndim = last - 1, .shape = z->shape, .out = z->strides, .a = x->strides, .b = y->strides};
    return multiply(z->dtype == TD_F64 ? TD_F64 : TD_F32, &batch, gemm);
}

static td_status multiply_views(td_tensor *out, const td_tensor *a, const td_tensor *b,
                                double alpha, bool accumulate)
{
    struct side x = {td_tensor_data(a), a->layout}, y = {td_tensor_data(b), b->layout};
    return multiply_sides(td_tensor_data(out), &out->layout, &x, &y, alpha, accumulate);
}

static td_status multiply_halves(td_tensor *out, const td_tensor *a, const td_tensor *b,
                                 double alpha, bool accumulate)
{
    struct td__wide wide = {0};
    struct side x = {td__widen(&wide, a), a->layout}, y = {td__widen(&wide, b), b->layout};
    void *result = td__widen_out(&wide, out, accumulate);
    struct td__layout z = out->layout;
    td__layout_set_contiguous(&x.layout);
    td__layout_set_contiguous(&y.layout);
    td__layout_set_contiguous(&z);
    if (wide.status == TD_OK)
        wide.status = multiply_sides(result, &z, &x, &y, alpha, accumulate);
    return td__widen_end(&wide);
}

td_status td__cpu_matmul(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                         bool accumulate)
{
    switch (out->layout.dtype) {
    case TD_F32:
    case TD_F64:
        return multiply_views(out, a, b, alpha, accumulate);
    case TD_F16:
    case TD_BF16:
        return multiply_halves(out, a, b, alpha, accumulate);
    default:
        return td__fail(TD_ERR_UNSUPPORTED, "matmul: no product of %s; of floats only",
                        td_dtype_name(out->layout.dtype));
    }
}

td_status td__cpu_linear(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias)
{
    struct td__wide wide = {0};
    const int64_t inputs = x->layout.shape[1];
    struct td__gemm gemm = {
        .m = out->layout.shape[0],
        .n = out->layout.shape[1],
        .k = inputs,
        .a = td__widen(&wide, x),
        .a_row = inputs,
        .a_col = 1,
        .b = td__widen(&wide, w),
        .b_row = 1,
        .b_col = inputs,
        .c = td__widen_out(&wide, out, false),
        .c_row = out->layout.shape[1],
        .column_bias = td__widen(&wide, bias),
        .alpha = 1,
    };
    if (wide.status == TD_OK)
        wide.status = td__gemm(td__wide_dtype(out), &gemm);
    return td__widen_end(&wide);
}
