/* Copies to another dtype or another device, and td_item(). */
#include "autograd/op.h"
#include "base/fail.h"
#include "tensor/deferred.h"

#include <inttypes.h>
#include <math.h>

/* ---- Another dtype --------------------------------------------------------------------------------- */

static bool is_float(td_dtype dtype)
{
    return dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
}

static td_status to_dtype_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    grad_x[0] = td_to_dtype(grad_y[0], *(const td_dtype *)td_node_data(node));
    return td__done(grad_x[0]);
}

/* Conversions to dtypes that are not floating-point are not recorded. */
td_tensor *td_to_dtype(td_tensor *tensor, td_dtype dtype)
{
    static const td_function function = {.name = "td_to_dtype", .backward = to_dtype_backward};
    if (!tensor)
        return td__null(__func__);
    td_dtype before = tensor->layout.dtype;
    if (before == dtype)
        return td__adopt(td_tensor_retain(tensor));
    td_tensor *y = td__empty(function.name, tensor->layout.shape, tensor->layout.ndim, dtype,
                             tensor->storage->device);
    if (y)
        y = td__kept(y,
                     td__kernel_status(function.name, tensor, td__kernels_of(y)->copy(y, tensor)));
    if (!is_float(dtype))
        return td__adopt(y);
    return td__result(
        &function, y,
        &(td_node_spec){
            .inputs = {tensor}, .input_count = 1, .data = &before, .data_size = sizeof before});
}

/* ---- Another device -------------------------------------------------------------------------------- */

static td_tensor *moved(td_tensor *tensor, td_device *device, bool async);

/* The values of a tensor on a meta device, on one with memory. */
static td_tensor *made(td_tensor *tensor, td_device *device)
{
    td_tensor *values = td__deferred_tensor(tensor);
    if (!values || values->storage->device == device)
        return values;
    td_tensor *to = moved(values, device, false);
    td_tensor_release(values);
    return to;
}

static td_tensor *moved(td_tensor *tensor, td_device *device, bool async)
{
    if (td_tensor_is_meta(tensor) && !td__is_meta(device))
        return made(tensor, device);
    bool to_host = async && device->is_host && !td__on_host(tensor);
    td_tensor *to = to_host ? td__empty_pinned(tensor->storage->device, &tensor->layout)
                            : td__empty("td_tensor_to", tensor->layout.shape, tensor->layout.ndim,
                                        tensor->layout.dtype, device);
    if (!to)
        return NULL;
    bool is_lost = td__is_meta(device) && !td_tensor_is_meta(tensor);
    return td__kept(to, is_lost ? td__deferred_add_lost(to)
                                : td__transfer("td_tensor_to", to, tensor, async));
}

static td_status to_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_device *const *device = td_node_data(node);
    grad_x[0] = td__adopt(moved(grad_y[0], *device, false));
    return td__done(grad_x[0]);
}

static td_tensor *to_device(td_tensor *tensor, td_device *device, bool async)
{
    static const td_function function = {.name = "td_tensor_to", .backward = to_backward};
    if (!tensor)
        return td__null(function.name);
    td_device *target = td__use_device(function.name, device);
    td_device *source = tensor->storage->device;
    if (!target)
        return NULL;
    if (target == source)
        return td__adopt(td_tensor_retain(tensor));
    return td__result(
        &function, moved(tensor, target, async),
        &(td_node_spec){
            .inputs = {tensor}, .input_count = 1, .data = &source, .data_size = sizeof source});
}

td_tensor *td_tensor_to(td_tensor *tensor, td_device *device)
{
    return to_device(tensor, device, false);
}

td_tensor *td_tensor_to_async(td_tensor *tensor, td_device *device)
{
    return to_device(tensor, device, true);
}

/* ---- One number ------------------------------------------------------------------------------------ */

double td_item(td_tensor *tensor)
{
    double value = NAN;
    if (!tensor) {
        td__fail_null(__func__);
        return value;
    }
    if (tensor->layout.numel != 1) {
        td_fail(TD_ERR_INVALID, "td_item: a tensor of shape %s has %" PRId64 " elements, not one",
                td__shape_of(tensor), tensor->layout.numel);
        return value;
    }
    if (td__on_host(tensor) && tensor->layout.dtype == TD_F32)
        return *(const float *)td_tensor_data(tensor);
    td_tensor *here = td__to_host("td_item", tensor);
    td_tensor *wide = here ? td__empty_like_as(here, TD_F64) : NULL;
    if (wide && !td__cpu_kernels.copy(wide, here))
        value = *(const double *)td_tensor_data(wide);
    td_tensor_release(wide);
    td_tensor_release(here);
    return value;
}
