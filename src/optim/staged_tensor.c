/* Staged tensors: contiguous f32 and f64 tensors are used as they are. Others are copied to a
 * contiguous tensor, and written back; f16 and bf16 are staged as f32. */
#include "optim/optimizer.h"

#include "base/fail.h"

td_status td__staged_open(struct td__staged_tensor *staged, td_tensor *tensor, bool wide)
{
    *staged = (struct td__staged_tensor){.tensor = tensor};
    if (!tensor)
        return TD_OK;
    if (!td__on_host(tensor))
        return td_fail(TD_ERR_UNSUPPORTED,
                       "td_optimizer_step: a parameter is on %s, whose memory the host cannot "
                       "access",
                       tensor->storage->device->name);
    td_dtype dtype = wide ? TD_F64 : TD_F32;
    if (tensor->layout.dtype == dtype && td__layout_is_contiguous(&tensor->layout)) {
        staged->data = td_tensor_data(tensor);
        return TD_OK;
    }
    td_tensor *copy = td__empty_like_as(tensor, dtype);
    td_status status = copy ? td__kernels_of(tensor)->copy(copy, tensor) : TD_ERR_NOMEM;
    if (status) {
        td_tensor_release(copy);
        return status;
    }
    staged->copy = copy;
    staged->data = td_tensor_data(copy);
    return TD_OK;
}

td_status td__staged_close(struct td__staged_tensor *staged, bool write)
{
    td_status status = TD_OK;
    if (staged->copy && write)
        status = td__kernels_of(staged->tensor)->copy(staged->tensor, staged->copy);
    if (staged->tensor && write)
        td__tensor_bump_version(staged->tensor);
    td_tensor_release(staged->copy);
    *staged = (struct td__staged_tensor){0};
    return status;
}
