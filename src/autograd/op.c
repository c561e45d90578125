/* Helpers of operators; see op.h. */
#include "autograd/op.h"

#include "base/fail.h"

#include <string.h>

td_status td__done(const td_tensor *tensor)
{
    if (tensor)
        return TD_OK;
    td_status status = td__error_status();
    return status ? status : TD_ERR_STATE;
}

td_tensor *td__kept(td_tensor *tensor, td_status status)
{
    if (!status)
        return tensor;
    td_tensor_release(tensor);
    return NULL;
}

/* ---- Checks -------------------------------------------------------------------------------------- */

td_status td__check_same(const char *call, const td_tensor *a, const td_tensor *b)
{
    if (a->layout.dtype != b->layout.dtype)
        return td_fail(TD_ERR_INVALID,
                       "%s: the operands are %s and %s; td_to_dtype() makes them the same", call,
                       td_dtype_name(a->layout.dtype), td_dtype_name(b->layout.dtype));
    if (a->storage->device != b->storage->device && (td_tensor_is_meta(a) || td_tensor_is_meta(b)))
        return td__fail_meta(call, td_tensor_is_meta(a) ? a->storage->device : b->storage->device);
    if (a->storage->device != b->storage->device)
        return td_fail(TD_ERR_INVALID,
                       "%s: the operands are on %s and on %s; td_tensor_to() moves one", call,
                       a->storage->device->name, b->storage->device->name);
    return TD_OK;
}

td_status td__check_float(const char *call, const td_tensor *x)
{
    td_dtype dtype = x->layout.dtype;
    if (dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: it needs floating-point elements, not %s of shape %s", call,
                   td_dtype_name(dtype), td__shape_of(x));
}

td_status td__check_dims(const char *call, const char *what, const td_tensor *x, int least,
                         int most)
{
    if (x->layout.ndim >= least && x->layout.ndim <= most)
        return TD_OK;
    TD_TRY(td__check_whole(x, call));
    if (least == most)
        return td_fail(TD_ERR_INVALID, "%s: %s has the shape %s; it must have %d dimensions", call,
                       what, td__shape_of(x), least);
    return td_fail(TD_ERR_INVALID, "%s: %s has the shape %s; it must have %d to %d dimensions",
                   call, what, td__shape_of(x), least, most);
}

/* ---- Broadcasting --------------------------------------------------------------------------------- */

int td__broadcast(const char *call, const td_tensor *a, const td_tensor *b, int64_t *shape)
{
    const struct td__layout *x = &a->layout, *y = &b->layout;
    int ndim = x->ndim > y->ndim ? x->ndim : y->ndim;
    for (int d = 0; d < ndim; d++) {
        int64_t of_x = d < ndim - x->ndim ? 1 : x->shape[d - (ndim - x->ndim)];
        int64_t of_y = d < ndim - y->ndim ? 1 : y->shape[d - (ndim - y->ndim)];
        if (of_x != of_y && of_x != 1 && of_y != 1) {
            if (td__check_whole(a, call) || td__check_whole(b, call))
                return -1;
            td_fail(TD_ERR_INVALID, "%s: the shapes %s and %s do not broadcast", call,
                    td__shape_of(a), td__shape_of(b));
            return -1;
        }
        shape[d] = of_x == 1 ? of_y : of_x;
    }
    return ndim;
}

td_status td__pair_init(struct td__pair *pair, const char *call, td_tensor *a, td_tensor *b)
{
    TD_TRY(td__check_same(call, a, b));
    if (td__same_shape(a, b)) {
        memcpy(pair->shape, a->layout.shape, sizeof pair->shape);
        pair->ndim = a->layout.ndim;
        pair->a = td_tensor_retain(a);
        pair->b = td_tensor_retain(b);
        return TD_OK;
    }
    pair->ndim = td__broadcast(call, a, b, pair->shape);
    if (pair->ndim < 0)
        return TD_ERR_INVALID;
    pair->a = td__expand(call, a, pair->shape, pair->ndim);
    pair->b = pair->a ? td__expand(call, b, pair->shape, pair->ndim) : NULL;
    if (pair->b)
        return TD_OK;
    td_tensor_release(pair->a);
    return TD_ERR_NOMEM;
}

void td__pair_free(struct td__pair *pair)
{
    td_tensor_release(pair->a);
    td_tensor_release(pair->b);
}

/* ---- One kernel ------------------------------------------------------------------------------------ */

td_status td__kernel_status(const char *call, const td_tensor *x, td_status status)
{
    const td_device *device = x->storage->device;
    if (status && !device->is_host && strstr(td__error_text(), device->name))
        return status; /* of the device: the sentence names it, and the kernel; others are about the arguments */
    if (status == TD_ERR_UNSUPPORTED)
        return td_fail(TD_ERR_INVALID, "%s: it is not defined for %s", call,
                       td_dtype_name(x->layout.dtype));
    if (status == TD_ERR_INVALID) {
        const char *sentence = strstr(td__error_text(), ": "); /* after the kernel's name */
        return td_fail(status, "%s%s", call, sentence ? sentence : "");
    }
    return status;
}

td_tensor *td__apply_unary(const char *call, td_unary op, td_tensor *x)
{
    if (!x)
        return td__null(call);
    td_tensor *out = op == TD_UNARY_NOT || op == TD_UNARY_ISNAN ? td__empty_like_as(x, TD_BOOL)
                                                                : td__empty_like(x);
    if (!out)
        return NULL;
    td_status status = td__kernels_of(x)->unary(op, out, x);
    return td__kept(out, td__kernel_status(call, x, status));
}

td_tensor *td__apply_binary(const char *call, td_binary op, td_tensor *a, td_tensor *b)
{
    struct td__pair pair;
    if (!a || !b)
        return td__null(call);
    if (td__pair_init(&pair, call, a, b))
        return NULL;
    td_tensor *out = td__empty(call, pair.shape, pair.ndim,
                               op >= TD_BINARY_EQ ? TD_BOOL : a->layout.dtype, a->storage->device);
    if (out) {
        td_status status = td__kernels_of(a)->binary(op, out, pair.a, pair.b);
        out = td__kept(out, td__kernel_status(call, a, status));
    }
    td__pair_free(&pair);
    return out;
}

td_tensor *td__apply_scalar(const char *call, td_binary op, td_tensor *a, double b, bool reversed)
{
    if (!a)
        return td__null(call);
    td_tensor *out = td__empty_like_as(a, op >= TD_BINARY_EQ ? TD_BOOL : a->layout.dtype);
    if (!out)
        return NULL;
    td_status status = td__kernels_of(a)->binary_scalar(op, out, a, b, reversed);
    return td__kept(out, td__kernel_status(call, a, status));
}

/* ---- Constants ------------------------------------------------------------------------------------- */

static td_tensor *filled(const char *call, const int64_t *shape, int ndim, double value,
                         const td_tensor *like)
{
    td_tensor *tensor = td__empty(call, shape, ndim, like->layout.dtype, like->storage->device);
    if (!tensor)
        return NULL;
    td_status status = td__kernels_of(tensor)->fill(tensor, value);
    return td__kept(tensor, td__kernel_status(call, like, status));
}

td_tensor *td__number(const char *call, double value, const td_tensor *like)
{
    return filled(call, NULL, 0, value, like);
}

td_tensor *td__zeros(const char *call, const int64_t *shape, int ndim, const td_tensor *like)
{
    return filled(call, shape, ndim, 0, like);
}
