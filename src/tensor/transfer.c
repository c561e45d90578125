/* Copies of elements between tensors of any two devices. Bytes move between contiguous tensors; strides are resolved on
 * the device that has them. */
#include "base/fail.h"
#include "tensor/deferred.h"

static td_status move_bytes(const char *call, const td_tensor *to, const td_tensor *from,
                            bool async)
{
    struct td__place target = td__place_of(to), source = td__place_of(from);
    return td__copy_between(call, &target, &source, td_tensor_nbytes(from), async);
}

static td_status copy_on_device(const td_tensor *to, const td_tensor *from)
{
    if (td__on_host(to)) {
        td__layout_copy(&to->layout, td_tensor_data(to), &from->layout, td_tensor_data(from));
        return TD_OK;
    }
    if (td_tensor_is_contiguous(to) && td_tensor_is_contiguous(from))
        return move_bytes("td_tensor_copy", to, from, true);
    return td__kernels_of(to)->copy((td_tensor *)to, from);
}

/* A contiguous tensor like `tensor`, on its device: itself, a copy (`filled`), or uninitialised. */
static td_tensor *dense_of(const td_tensor *tensor, bool filled)
{
    if (td_tensor_is_contiguous(tensor))
        return td_tensor_retain((td_tensor *)tensor);
    td_tensor *dense = td__empty_like(tensor);
    if (dense && filled && copy_on_device(dense, tensor)) {
        td_tensor_release(dense);
        return NULL;
    }
    return dense;
}

td_status td__transfer(const char *call, const td_tensor *to, const td_tensor *from, bool async)
{
    const td_device *target = to->storage->device, *source = from->storage->device;
    if (from->layout.numel == 0)
        return TD_OK;
    if (td__is_meta(target))
        return td__deferred_add_copy(to, from);
    if (td__is_meta(source))
        return td__fail_meta(call, source);
    if (target == source || (target->is_host && source->is_host))
        return copy_on_device(to, from);
    td_tensor *dense_from = dense_of(from, true);
    td_tensor *dense_to = dense_from ? dense_of(to, false) : NULL;
    bool direct = dense_to == to;
    td_status status = dense_to ? move_bytes(call, dense_to, dense_from, async && direct)
                                : td__error_status();
    if (!status && !direct)
        status = copy_on_device(to, dense_to);
    td_tensor_release(dense_to);
    td_tensor_release(dense_from);
    return status;
}

td_tensor *td__to_host(const char *call, td_tensor *tensor)
{
    if (!tensor)
        return td__null(call);
    if (td__on_host(tensor))
        return td__contiguous(tensor);
    td_tensor *copy = td__empty(call, tensor->layout.shape, tensor->layout.ndim,
                                tensor->layout.dtype, td__host_device());
    if (copy && td__transfer(call, copy, tensor, false)) {
        td_tensor_release(copy);
        return NULL;
    }
    return copy;
}

/* ---- Pinned memory -------------------------------------------------------------------------------- */

bool td_tensor_is_pinned(const td_tensor *tensor)
{
    return tensor && tensor->storage->free_fn == td__pinned_free;
}

td_tensor *td__empty_pinned(td_device *device, const struct td__layout *layout)
{
    struct td__layout dense = *layout;
    td__layout_set_contiguous(&dense);
    struct td__storage *storage = td__storage_create_pinned(device, td__layout_extent(&dense));
    td_tensor *tensor = storage ? td__tensor_over(storage, 0, &dense) : NULL;
    if (storage)
        td__storage_release(storage);
    return tensor;
}

td_tensor *td_tensor_pin(td_tensor *tensor, td_device *device)
{
    if (!tensor)
        return td__null("td_tensor_pin");
    device = td__use_device("td_tensor_pin", device);
    if (!device)
        return NULL;
    if (!td__on_host(tensor)) {
        td_fail(TD_ERR_INVALID, "td_tensor_pin: the tensor is on %s; only host memory is pinned",
                tensor->storage->device->name);
        return NULL;
    }
    if (td_tensor_is_pinned(tensor))
        return td__adopt(td_tensor_retain(tensor));
    td_tensor *pinned = td__empty_pinned(device, &tensor->layout);
    if (pinned && td__transfer("td_tensor_pin", pinned, tensor, false)) {
        td_tensor_release(pinned);
        return NULL;
    }
    return td__adopt(pinned);
}

void td_tensor_record_stream(td_tensor *tensor, td_stream *stream)
{
    if (!tensor || !stream || td__on_host(tensor))
        return;
    struct td__place place = td__place_of(tensor);
    td__block_use(place.block, stream);
}
