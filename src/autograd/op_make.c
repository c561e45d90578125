/* Tensors of regular numbers: constants, ranges, and triangles. */
#include "autograd/op.h"
#include "base/fail.h"

#include <inttypes.h>
#include <math.h>

/* ---- Constants ------------------------------------------------------------------------------------- */

td_tensor *td_ones(const int64_t *shape, int ndim, td_dtype dtype)
{
    td_tensor *ones = td__empty("td_ones", shape, ndim, dtype, td__host_device());
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

/* Whether both ends of a range can be elements of the dtype; then all between them can. */
static td_status check_ends(const char *call, const td_tensor *list, double first, double last)
{
    for (int i = 0; i < 2; i++) {
        td_tensor *number = td__number(call, i ? last : first, list);
        if (!number)
            return TD_ERR_INVALID;
        td_tensor_release(number);
    }
    return TD_OK;
}

/* The numbers in another dtype; takes over the reference. */
static td_tensor *converted(const char *call, td_tensor *numbers, td_dtype dtype)
{
    if (!numbers || dtype == TD_F64)
        return numbers;
    td_tensor *list = td__empty_like_as(numbers, dtype);
    int64_t count = numbers->layout.numel;
    const double *data = td_tensor_data(numbers);
    if (list && count > 0) {
        td_status status = check_ends(call, list, data[0], data[count - 1]);
        if (!status)
            status = td__kernels_of(list)->copy(list, numbers);
        list = td__kept(list, status);
    }
    td_tensor_release(numbers);
    return list;
}

/* Ranges of bool make no sense, and a dtype that is none is told by td__empty(). */
static td_status check_range(const char *call, double start, double end, td_dtype dtype)
{
    if (!isfinite(start) || !isfinite(end))
        return td__fail(TD_ERR_INVALID, "%s: from %g to %g is no range", call, start, end);
    if (dtype == TD_BOOL)
        return td__fail(TD_ERR_INVALID, "%s: it is not defined for bool", call);
    return TD_OK;
}

td_tensor *td_arange(double start, double end, double step, td_dtype dtype)
{
    const char *call = "td_arange";
    if (check_range(call, start, end, dtype))
        return NULL;
    double length = ceil((end - start) / step);
    if (!isfinite(step) || step == 0 || !(length >= 0 && length < 0x1p60)) {
        td__fail(TD_ERR_INVALID, "td_arange: steps of %g do not lead from %g to %g", step, start,
                 end);
        return NULL;
    }
    int64_t count = (int64_t)length;
    td_tensor *numbers = td__empty(call, &count, 1, TD_F64, td__host_device());
    double *data = td_tensor_data(numbers);
    for (int64_t i = 0; numbers && i < count; i++)
        data[i] = start + step * (double)i;
    return td__adopt(converted(call, numbers, dtype));
}

/* From both ends towards the middle, and in f32 for f32, as PyTorch does. */
td_tensor *td_linspace(double start, double end, int64_t count, td_dtype dtype)
{
    const char *call = "td_linspace";
    if (check_range(call, start, end, dtype))
        return NULL;
    if (count < 0) {
        td__fail(TD_ERR_INVALID, "td_linspace: there cannot be %" PRId64 " numbers", count);
        return NULL;
    }
    td_tensor *numbers = td__empty(call, &count, 1, TD_F64, td__host_device());
    double *data = td_tensor_data(numbers);
    double step = (end - start) / (double)(count > 1 ? count - 1 : 1);
    float step_f32 = ((float)end - (float)start) / (float)(count > 1 ? count - 1 : 1);
    for (int64_t i = 0; numbers && i < count; i++) {
        int64_t left = count - 1 - i;
        bool first_half = i < count / 2 || count == 1;
        if (dtype == TD_F32)
            data[i] = first_half ? (float)start + step_f32 * (float)i
                                 : (float)end - step_f32 * (float)left;
        else
            data[i] = first_half ? start + step * (double)i : end - step * (double)left;
    }
    return td__adopt(converted(call, numbers, dtype));
}

/* ---- Triangles ------------------------------------------------------------------------------------- */

struct triangle {
    int64_t diagonal;
    bool upper;
};

/* Where x stays: bool [M, N], true for column - row <= diagonal, or >= for the upper one. Belongs to
 * the scope. */
static td_tensor *triangle_of(const td_tensor *x, const struct triangle *triangle)
{
    const struct td__layout *layout = &x->layout;
    int64_t height = layout->shape[layout->ndim - 2], width = layout->shape[layout->ndim - 1];
    int64_t diagonal = triangle->diagonal;
    diagonal = diagonal < -height ? -height : diagonal > width ? width : diagonal;
    td_tensor *rows = td_arange(0, (double)height, 1, TD_I64);
    td_tensor *columns = td_arange(0, (double)width, 1, TD_I64);
    td_tensor *ends = td_unsqueeze(td_add_scalar(rows, (double)diagonal), 1);
    td_tensor *stays = triangle->upper ? td_ge(columns, ends) : td_le(columns, ends);
    return td_tensor_to(stays, x->storage->device->name);
}

static td_tensor *cut(const char *call, td_tensor *x, const struct triangle *triangle)
{
    td_tensor *y = NULL;
    TD_SCOPE TD_NO_GRAD y = td__apply_where(call, triangle_of(x, triangle), x,
                                            td__adopt(td__number(call, 0, x)));
    return y;
}

static td_status triangle_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td__adopt(cut(node->function->name, grad_y[0], td_node_data(node)));
    return td__done(grad_x[0]);
}

static td_tensor *triangular(const td_function *function, td_tensor *x, struct triangle triangle)
{
    if (!x || td__check_dims(function->name, "x", x, 2, TD_MAX_DIMS))
        return NULL;
    return td__result(
        function, cut(function->name, x, &triangle),
        &(td_recipe){
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
