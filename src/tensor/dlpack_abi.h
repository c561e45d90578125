/* The ABI of DLPack, as its specification has it, and how its dtypes and devices map to ours. Only the tags of the two
 * managed structs are public (dlpack.h). */
#ifndef TD_TENSOR_DLPACK_ABI_H
#define TD_TENSOR_DLPACK_ABI_H

#include "tensor/tensor_internal.h"

#include <tandem/dlpack.h>

enum { TD__DLPACK_MAJOR = 1, TD__DLPACK_MINOR = 0 };

struct td__dl_device {
    int32_t type;
    int32_t id;
};

struct td__dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct td__dl_tensor {
    void *data;
    struct td__dl_device device;
    int32_t ndim;
    struct td__dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: contiguous */
    uint64_t byte_offset;
};

struct DLManagedTensor {
    struct td__dl_tensor tensor;
    void *context; /* of the producer */
    void (*deleter)(struct DLManagedTensor *self);
};

struct DLManagedTensorVersioned {
    struct {
        uint32_t major, minor;
    } version; /* this, `context` and `deleter` stay where they are in all versions */
    void *context;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    struct td__dl_tensor tensor;
};

_Static_assert(sizeof(void *) != 8 ||
                   (sizeof(struct td__dl_tensor) == 48 && sizeof(struct DLManagedTensor) == 64 &&
                    sizeof(struct DLManagedTensorVersioned) == 80),
               "the layout of DLPack");

/* ---- Types (dlpack_types.c) ---------------------------------------------------------------------- */

/** The dtype of DLPack's; TD_ERR_UNSUPPORTED where there is none. */
td_status td__dlpack_dtype(const char *call, struct td__dl_dtype from, td_dtype *dtype);
struct td__dl_dtype td__dlpack_dtype_of(td_dtype dtype);

/** The device of DLPack's, open. `wanted` is the caller's, or NULL. NULL, with the last error set, on failure. */
td_device *td__dlpack_device(const char *call, struct td__dl_device from, td_device *wanted);
td_status td__dlpack_device_of(const char *call, const td_device *device,
                               struct td__dl_device *type);

#endif
