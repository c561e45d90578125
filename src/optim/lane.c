/* Lanes: most tensors are f32, contiguous, and used as they are. Others are copied aside, and what was
 * written is copied back; halves are f32 meanwhile. */
#include "optim/optimizer.h"

#include "base/fail.h"

td_status td__lane_open(struct td__lane *lane, td_tensor *tensor, bool wide)
{
    *lane = (struct td__lane){.tensor = tensor};
    if (!tensor)
        return TD_OK;
    if (!tensor->storage->device->kind->is_host_memory)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "td_optimizer_step: a parameter is on %s, whose memory the host cannot use",
                       tensor->storage->device->name);
    td_dtype dtype = wide ? TD_F64 : TD_F32;
    if (tensor->layout.dtype == dtype && td__layout_is_contiguous(&tensor->layout)) {
        lane->data = td_tensor_data(tensor);
        return TD_OK;
    }
    td_tensor *copy = td__empty_like_as(tensor, dtype);
    td_status status = copy ? td__kernels_of(tensor)->copy(copy, tensor) : TD_ERR_NOMEM;
    if (status) {
        td_tensor_release(copy);
        return status;
    }
    lane->copy = copy;
    lane->data = td_tensor_data(copy);
    return TD_OK;
}

td_status td__lane_close(struct td__lane *lane, bool write)
{
    td_status status = TD_OK;
    if (lane->copy && write)
        status = td__kernels_of(lane->tensor)->copy(lane->tensor, lane->copy);
    if (lane->tensor && write)
        td__tensor_touch(lane->tensor);
    td_tensor_release(lane->copy);
    *lane = (struct td__lane){0};
    return status;
}
