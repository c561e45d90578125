/* Tensors of regular numbers: constants, ranges, and triangles. */
#include "autograd/op.h"
#include "base/fail.h"
#include "device/device_graph.h"
#include "tensor/cpu_range.h"

#include <inttypes.h>
#include <math.h>

/* ---- Constants ------------------------------------------------------------------------------------- */

td_tensor *td_ones(const int64_t *shape, int ndim, td_dtype dtype, td_device *device)
{
    device = td__use_device("td_ones", device);
    td_tensor *ones = device ? td__empty("td_ones", shape, ndim, dtype, device) : NULL;
    return ones ? td__adopt(td__kept(ones, td__kernels_of(ones)->fill(ones, 1))) : NULL;
}

td_tensor *td_zeros_like(td_tensor *tensor)
{
    return td__adopt(td__zeros_like(tensor));
}

td_tensor *td_ones_like(td_tensor *tensor)
{
    td_tensor *ones = td__empty_like(tensor);
    return ones ? td__adopt(td__kept(ones, td__kernels_of(ones)->fill(ones, 1))) : NULL;
}

td_tensor *td_empty_like(td_tensor *tensor)
{
    return td__adopt(td__empty_like(tensor));
}

/* ---- Ranges ---------------------------------------------------------------------------------------- */

static bool is_integer(td_dtype dtype)
{
    return dtype != TD_F32 && dtype != TD_F64 && dtype != TD_F16 && dtype != TD_BF16 &&
           dtype != TD_COMPLEX64 && dtype != TD_COMPLEX128;
}

/* td__empty() rejects a value that is no dtype. */
static td_status check_range(const char *call, double start, double end, td_dtype dtype)
{
    if (!isfinite(start) || !isfinite(end))
        return td_fail(TD_ERR_INVALID, "%s: from %g to %g is no range", call, start, end);
    if (dtype == TD_BOOL)
        return td_fail(TD_ERR_INVALID, "%s: it is not defined for bool", call);
    return TD_OK;
}

/* An uninitialised tensor for a range. Fails if the dtype cannot hold both ends; then it holds all
 * between them. */
static td_tensor *make_list(const char *call, int64_t count, td_dtype dtype, double first,
                            double last)
{
    td_tensor *list = td__empty(call, &count, 1, dtype, td__host_device());
    for (int i = 0; list && count > 0 && i < 2; i++) {
        td_tensor *number = td__number(call, i ? last : first, list);
        if (!number)
            list = td__kept(list, TD_ERR_INVALID);
        td_tensor_release(number);
    }
    return list;
}

/* The dtype that an arange is computed in: integers in 64 bits, complex numbers as their real parts. */
static td_dtype dtype_of_range(td_dtype dtype)
{
    if (dtype == TD_COMPLEX64)
        return TD_F32;
    if (dtype == TD_COMPLEX128)
        return TD_F64;
    return is_integer(dtype) && dtype != TD_U64 ? TD_I64 : dtype;
}

/* A tensor of the host, on another device, in the scope. Releases it. */
static td_tensor *placed(td_tensor *tensor, td_device *device)
{
    TD_STREAM_SCOPE(td__constants_stream(device));
    td_tensor *there = NULL;
    if (td__is_meta(device)) { /* td_tensor_to() would drop the values */
        there = td__empty("td_arange", tensor->layout.shape, tensor->layout.ndim,
                          tensor->layout.dtype, device);
        there = td__adopt(there ? td__kept(there, td__transfer("td_arange", there, tensor, false))
                                : NULL);
    } else {
        there = td_tensor_to(tensor, device);
    }
    td_tensor_release(tensor);
    return there;
}

/* Fills `list`, computed in another dtype if necessary. */
static td_tensor *filled_range(td_tensor *list, td_dtype computed, bool linspace, double start,
                               double other)
{
    bool direct = list->layout.dtype == computed;
    td_tensor *numbers = direct ? td_tensor_retain(list) : td__empty_like_as(list, computed);
    if (!numbers)
        return td__kept(list, TD_ERR_NOMEM);
    int64_t count = list->layout.numel;
    if (linspace)
        td__cpu_linspace(td_tensor_data(numbers), computed, count, start, other);
    else
        td__cpu_arange(td_tensor_data(numbers), computed, count, start, other);
    td_status status = direct ? TD_OK : td__kernels_of(list)->copy(list, numbers);
    td_tensor_release(numbers);
    return td__kept(list, status);
}

/* The number of elements; negative or not finite if `step` does not lead to `end`. For i64 it
 * follows from the truncated arguments, for other integers from the original ones, as in
 * PyTorch. */
static double length_of(double start, double end, double step, td_dtype dtype)
{
    if (dtype == TD_I64) {
        start = trunc(start);
        end = trunc(end);
        step = trunc(step);
    }
    return ceil((end - start) / step);
}

td_tensor *td_arange(double start, double end, double step, td_dtype dtype, td_device *device)
{
    const char *call = "td_arange";
    device = td__use_device(call, device);
    if (!device || check_range(call, start, end, dtype))
        return NULL;
    double length = length_of(start, end, step, dtype);
    if (is_integer(dtype)) {
        start = trunc(start);
        step = trunc(step);
    }
    if (!isfinite(step) || step == 0 || !(length >= 0 && length < 0x1p60)) {
        td_fail(TD_ERR_INVALID, "td_arange: a step of %g does not lead from %g to %g%s", step,
                start, end, is_integer(dtype) ? " in whole numbers" : "");
        return NULL;
    }
    td_tensor *list = make_list(call, (int64_t)length, dtype, start, start + step * (length - 1));
    if (list)
        list = filled_range(list, dtype_of_range(dtype), false, start, step);
    return list ? placed(list, device) : NULL;
}

td_tensor *td_linspace(double start, double end, int64_t count, td_dtype dtype, td_device *device)
{
    const char *call = "td_linspace";
    device = td__use_device(call, device);
    if (!device || check_range(call, start, end, dtype))
        return NULL;
    if (count < 0) {
        td_fail(TD_ERR_INVALID, "td_linspace: there cannot be %" PRId64 " numbers", count);
        return NULL;
    }
    td_dtype computed = is_integer(dtype) ? dtype : dtype_of_range(dtype);
    td_tensor *list = make_list(call, count, dtype, start, end);
    if (list)
        list = filled_range(list, computed, true, start, end);
    return list ? placed(list, device) : NULL;
}

/* ---- Triangles ------------------------------------------------------------------------------------- */

struct triangle {
    int64_t diagonal;
    bool upper;
};

/* The mask of the elements that stay, bool [M, N]: column - row <= diagonal, or >= for the upper
 * triangle. In the scope. */
static td_tensor *triangle_of(const td_tensor *x, const struct triangle *triangle)
{
    const struct td__layout *layout = &x->layout;
    int64_t height = layout->shape[layout->ndim - 2], width = layout->shape[layout->ndim - 1];
    int64_t diagonal = triangle->diagonal;
    diagonal = diagonal < -height ? -height : diagonal > width ? width : diagonal;
    td_tensor *rows = td_arange(0, (double)height, 1, TD_I64, x->storage->device);
    td_tensor *columns = td_arange(0, (double)width, 1, TD_I64, x->storage->device);
    td_tensor *ends = td_unsqueeze(td_add_scalar(rows, (double)diagonal), 1);
    return triangle->upper ? td_ge(columns, ends) : td_le(columns, ends);
}

static td_tensor *cut(const char *call, td_tensor *x, const struct triangle *triangle)
{
    td_tensor *y = NULL;
    {
        TD_SCOPE;
        TD_NO_GRAD;
        y = td__apply_where(call, triangle_of(x, triangle), x, td__adopt(td__number(call, 0, x)));
    }
    return y;
}

static td_status triangle_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td__adopt(cut(node->function->name, grad_y[0], td_node_data(node)));
    return td__done(grad_x[0]);
}

static td_tensor *triangular(const td_function *function, td_tensor *x, struct triangle triangle)
{
    if (!x)
        return td__null(function->name);
    if (td__check_dims(function->name, "x", x, 2, TD_MAX_DIMS))
        return NULL;
    return td__result(
        function, cut(function->name, x, &triangle),
        &(td_node_spec){
            .inputs = {x}, .input_count = 1, .data = &triangle, .data_size = sizeof triangle});
}

td_tensor *td_tril(td_tensor *x, int64_t diagonal)
{
    static const td_function function = {.name = "td_tril", .backward = triangle_backward};
    return triangular(&function, x, (struct triangle){diagonal, false});
}

td_tensor *td_triu(td_tensor *x, int64_t diagonal)
{
    static const td_function function = {.name = "td_triu", .backward = triangle_backward};
    return triangular(&function, x, (struct triangle){diagonal, true});
}
