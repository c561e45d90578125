/* Import of DLPack tensors. Everything that the producer says is checked before anything is kept; that the memory is
 * there cannot be. */
#include "base/fail.h"
#include "tensor/dlpack_abi.h"

#include <inttypes.h>
#include <stdlib.h>

/* What the storage of an imported tensor owns. One of the two is NULL. */
struct import {
    struct DLManagedTensor *managed;
    struct DLManagedTensorVersioned *versioned;
};

/* A td_blob_free_fn. */
static void end_import(void *data, void *arg)
{
    (void)data;
    struct import *import = arg;
    if (import->managed && import->managed->deleter)
        import->managed->deleter(import->managed);
    if (import->versioned && import->versioned->deleter)
        import->versioned->deleter(import->versioned);
    free(import);
}

/* The bytes to which a dtype is aligned. */
static uintptr_t alignment_of(td_dtype dtype)
{
    bool is_complex = dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
    return td_dtype_size(dtype) / (is_complex ? 2 : 1);
}

/* A dimension of one index, or of none, may have any stride. */
static const int64_t *usable_strides(const struct td__dl_tensor *from, int64_t strides[TD_MAX_DIMS])
{
    bool is_empty = false;
    for (int d = 0; d < from->ndim; d++)
        is_empty = is_empty || from->shape[d] == 0;
    if (!from->strides || is_empty)
        return NULL;
    for (int d = 0; d < from->ndim; d++)
        strides[d] = from->shape[d] == 1 && from->strides[d] < 0 ? 1 : from->strides[d];
    return strides;
}

static td_status read_layout(const char *call, const struct td__dl_tensor *from,
                             struct td__layout *layout)
{
    td_dtype dtype;
    int64_t strides[TD_MAX_DIMS];
    TD_TRY(td__dlpack_dtype(call, from->dtype, &dtype));
    if (from->ndim > TD_MAX_DIMS)
        return td_fail(TD_ERR_UNSUPPORTED, "%s: the tensor has %d dimensions, and %d are the most",
                       call, from->ndim, TD_MAX_DIMS);
    if (from->ndim < 0 || (from->ndim > 0 && !from->shape))
        return td_fail(TD_ERR_INVALID, "%s: the tensor has %d dimensions%s", call, from->ndim,
                       from->ndim < 0 ? "" : ", and its shape is NULL");
    const int64_t *chosen = usable_strides(from, strides);
    for (int d = 0; chosen && d < from->ndim; d++)
        if (chosen[d] < 0)
            return td_fail(TD_ERR_INVALID,
                           "%s: the stride of dimension %d is negative in %s; make the tensor "
                           "contiguous in the producer",
                           call, d, td__shape_text(chosen, from->ndim));
    return td__layout_init(layout, call, from->shape, from->ndim, chosen, dtype);
}

/* The address of the first element; NULL for a tensor without elements may be one. */
static td_status find_data(const char *call, const struct td__dl_tensor *from,
                           const struct td__layout *layout, void **data)
{
    uintptr_t at = (uintptr_t)from->data, last;
    if (layout->numel == 0) {
        *data = NULL;
        return TD_OK;
    }
    if (!from->data)
        return td_fail(TD_ERR_INVALID, "%s: data is NULL for a tensor of shape %s", call,
                       td__shape_text(layout->shape, layout->ndim));
    if (__builtin_add_overflow(at, from->byte_offset, &at) ||
        __builtin_add_overflow(at, td__layout_extent(layout), &last))
        return td_fail(TD_ERR_INVALID,
                       "%s: byte_offset %" PRIu64 " and the shape %s go past the end of memory",
                       call, from->byte_offset, td__shape_text(layout->shape, layout->ndim));
    if (at % alignment_of(layout->dtype))
        return td_fail(TD_ERR_INVALID,
                       "%s: the first element is at %#" PRIxPTR ", and %s needs an alignment of "
                       "%zu bytes; copy the tensor in the producer",
                       call, at, td_dtype_name(layout->dtype), (size_t)alignment_of(layout->dtype));
    *data = (void *)at;
    return TD_OK;
}

static td_tensor *import_tensor(const char *call, const struct td__dl_tensor *from,
                                td_device *wanted, bool read_only, struct import owner)
{
    struct td__layout layout;
    void *data = NULL;
    if (read_layout(call, from, &layout) || find_data(call, from, &layout, &data))
        return NULL;
    td_device *device = td__dlpack_device(call, from->device, wanted);
    if (!device)
        return NULL;
    struct import *import = malloc(sizeof *import);
    if (!import) {
        td__fail_nomem(call);
        return NULL;
    }
    *import = owner;
    size_t bytes = td__layout_extent(&layout);
    struct td__storage *storage = read_only ? td__storage_borrow(device, data, bytes, NULL, NULL)
                                            : td__storage_of(device, data, bytes, NULL, NULL);
    td_tensor *tensor = storage ? td__adopt(td__tensor_over(storage, 0, &layout)) : NULL;
    if (tensor) { /* otherwise the producer keeps it */
        storage->free_fn = end_import;
        storage->arg = import;
        atomic_store(&storage->foreign, !read_only); /* the producer, to the end */
    } else {
        free(import);
    }
    if (storage)
        td__storage_release(storage);
    return tensor;
}

td_tensor *td_from_dlpack(struct DLManagedTensor *managed, td_device *device)
{
    if (managed)
        return import_tensor("td_from_dlpack", &managed->tensor, device, false,
                             (struct import){.managed = managed});
    td_fail(TD_ERR_INVALID, "td_from_dlpack: the DLManagedTensor is NULL");
    return NULL;
}

td_tensor *td_from_dlpack_versioned(struct DLManagedTensorVersioned *managed, td_device *device)
{
    static const char call[] = "td_from_dlpack_versioned";
    if (!managed) {
        td_fail(TD_ERR_INVALID, "%s: the DLManagedTensorVersioned is NULL", call);
        return NULL;
    }
    if (managed->version.major != TD__DLPACK_MAJOR) {
        td_fail(TD_ERR_UNSUPPORTED,
                "%s: the tensor is of version %u.%u of DLPack, and this library knows version %d; "
                "export it as that, in Python by __dlpack__(max_version=(%d, 0))",
                call, managed->version.major, managed->version.minor, TD__DLPACK_MAJOR,
                TD__DLPACK_MAJOR);
        return NULL;
    }
    return import_tensor(call, &managed->tensor, device, managed->flags & TD_DLPACK_READ_ONLY,
                         (struct import){.versioned = managed});
}
