/* Copies to another dtype or another device, and td_item(). */
#include "autograd/op.h"
#include "base/fail.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

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

/* Copies between two devices whose memory the host cannot access, through a buffer on the host. */
static td_status carry(td_tensor *to, td_tensor *from, size_t bytes)
{
    struct td__device *source = from->storage->device, *target = to->storage->device;
    void *host = malloc(bytes);
    if (!host)
        return td__fail_nomem("td_tensor_to");
    td_status status = source->kind->to_host(source, host, td_tensor_data(from), bytes);
    if (!status)
        status = target->kind->from_host(target, td_tensor_data(to), host, bytes);
    free(host);
    return status;
}

/* Both are contiguous; if both are in host memory, only `to` must be. */
static td_status move(td_tensor *to, td_tensor *from)
{
    struct td__device *source = from->storage->device, *target = to->storage->device;
    size_t bytes = td_tensor_nbytes(from);
    if (bytes == 0)
        return TD_OK;
    if (source->kind->is_host_memory && target->kind->is_host_memory) {
        td__layout_copy(&to->layout, td_tensor_data(to), &from->layout, td_tensor_data(from));
        return TD_OK;
    }
    if (source->kind->is_host_memory)
        return target->kind->from_host(target, td_tensor_data(to), td_tensor_data(from), bytes);
    if (target->kind->is_host_memory)
        return source->kind->to_host(source, td_tensor_data(to), td_tensor_data(from), bytes);
    return carry(to, from, bytes);
}

static td_tensor *moved(td_tensor *tensor, struct td__device *device)
{
    bool as_it_is = tensor->storage->device->kind->is_host_memory && device->kind->is_host_memory;
    td_tensor *from = as_it_is ? td_tensor_retain(tensor) : td__contiguous(tensor);
    td_tensor *to = from ? td__empty("td_tensor_to", tensor->layout.shape, tensor->layout.ndim,
                                     tensor->layout.dtype, device)
                         : NULL;
    if (to)
        to = td__kept(to, move(to, from));
    td_tensor_release(from);
    return to;
}

static td_status to_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    struct td__device *const *device = td_node_data(node);
    grad_x[0] = td__adopt(moved(grad_y[0], *device));
    return td__done(grad_x[0]);
}

td_tensor *td_tensor_to(td_tensor *tensor, const char *device)
{
    static const td_function function = {.name = "td_tensor_to", .backward = to_backward};
    if (!tensor)
        return td__null(__func__);
    struct td__device *target = td__find_device(function.name, device);
    struct td__device *source = tensor->storage->device;
    if (!target)
        return NULL;
    if (target == source)
        return td__adopt(td_tensor_retain(tensor));
    return td__result(
        &function, moved(tensor, target),
        &(td_node_spec){
            .inputs = {tensor}, .input_count = 1, .data = &source, .data_size = sizeof source});
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
    struct td__device *device = tensor->storage->device;
    if (device->kind->is_host_memory && tensor->layout.dtype == TD_F32)
        return *(const float *)td_tensor_data(tensor);
    td_tensor *wide = td__empty_like_as(tensor, TD_F64);
    if (!wide)
        return value;
    td_status status = td__kernels_of(wide)->copy(wide, tensor);
    if (!status && device->kind->is_host_memory)
        value = *(const double *)td_tensor_data(wide);
    else if (!status && device->kind->to_host(device, &value, td_tensor_data(wide), sizeof value))
        value = NAN;
    td_tensor_release(wide);
    return value;
}
