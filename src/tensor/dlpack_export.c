/* Export of tensors by DLPack. An export holds the storage, not the tensor, so that its deleter, which any thread of
 * another library calls, ends no graph. */
#include "base/fail.h"
#include "tensor/dlpack_abi.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What `context` of a managed tensor is. */
struct export
{
    struct td__storage *storage;
    int64_t shape[TD_MAX_DIMS], strides[TD_MAX_DIMS];
    struct DLManagedTensor managed; /* one of the two is used */
    struct DLManagedTensorVersioned versioned;
};

static void end_export(struct export *export)
{
    td__storage_end_share(export->storage);
    free(export);
}

static void delete_managed(struct DLManagedTensor *self)
{
    if (self)
        end_export(self->context);
}

static void delete_versioned(struct DLManagedTensorVersioned *self)
{
    if (self)
        end_export(self->context);
}

static td_status check_export(const char *call, const td_tensor *tensor, struct td__dl_device *type)
{
    if (!tensor)
        return td__fail_null(call);
    /* As td_tensor_requires_grad(), which is above this component. */
    if (tensor->node || atomic_load(&tensor->history) != atomic_load(&tensor->storage->history))
        return td_fail(TD_ERR_INVALID,
                       "%s: the tensor requires grad, and autograd would not see what the other "
                       "library does with it; export td_detach() of it",
                       call);
    return td__dlpack_device_of(call, tensor->storage->device, type);
}

/* DLPack asks for data that is aligned to 256 bytes, and an offset in byte_offset. Consumers that ignore the offset are
 * more frequent than those that need the alignment: it is 0. */
static struct td__dl_tensor describe(const td_tensor *tensor, struct td__dl_device type,
                                     struct export *export)
{
    const struct td__layout *layout = &tensor->layout;
    memcpy(export->shape, layout->shape, sizeof export->shape);
    memcpy(export->strides, layout->strides, sizeof export->strides);
    return (struct td__dl_tensor){
        .data = td_tensor_data(tensor),
        .device = type,
        .ndim = layout->ndim,
        .dtype = td__dlpack_dtype_of(layout->dtype),
        .shape = export->shape,
        .strides = export->strides,
    };
}

static struct export *export_tensor(const char *call, td_tensor *tensor,
                                    struct td__dl_tensor *described)
{
    struct td__dl_device type;
    if (check_export(call, tensor, &type))
        return NULL;
    struct export *export = calloc(1, sizeof *export);
    if (!export) {
        td__fail_nomem(call);
        return NULL;
    }
    export->storage = tensor->storage;
    if (td__storage_share(export->storage)) { /* the memory stays where it is from here on */
        free(export);
        return NULL;
    }
    if (!td__on_host(tensor))
        td_tensor_record_stream(tensor, td__stream_of(tensor->storage->device));
    *described = describe(tensor, type, export);
    return export;
}

struct DLManagedTensor *td_to_dlpack(td_tensor *tensor)
{
    struct td__dl_tensor described;
    struct export *export = export_tensor("td_to_dlpack", tensor, &described);
    if (!export)
        return NULL;
    export->managed = (struct DLManagedTensor){
        .tensor = described, .context = export, .deleter = delete_managed};
    return &export->managed;
}

struct DLManagedTensorVersioned *td_to_dlpack_versioned(td_tensor *tensor, uint64_t flags)
{
    static const char call[] = "td_to_dlpack_versioned";
    struct td__dl_device type;
    struct td__dl_tensor described;
    if (flags & ~(TD_DLPACK_READ_ONLY | TD_DLPACK_COPIED)) {
        td_fail(TD_ERR_INVALID,
                "%s: the flags are %#" PRIx64 "; there are TD_DLPACK_READ_ONLY and "
                "TD_DLPACK_COPIED",
                call, flags);
        return NULL;
    }
    if (check_export(call, tensor, &type))
        return NULL;
    td_tensor *chosen = flags & TD_DLPACK_COPIED ? td__clone(tensor) : td_tensor_retain(tensor);
    struct export *export = chosen ? export_tensor(call, chosen, &described) : NULL;
    td_tensor_release(chosen);
    if (!export)
        return NULL;
    export->versioned = (struct DLManagedTensorVersioned){
        .version = {TD__DLPACK_MAJOR, TD__DLPACK_MINOR},
        .context = export,
        .deleter = delete_versioned,
        .flags = flags,
        .tensor = described,
    };
    return &export->versioned;
}
