/* What accelerators lack, computed on the host (TANDEM_FALLBACK=cpu). */
#ifndef TD_TENSOR_FALLBACK_H
#define TD_TENSOR_FALLBACK_H

#include "tensor/tensor_internal.h"

enum { TD__OPERANDS_MOST = 16 };

/* The operands of a kernel: the addresses of the wrapper's variables. Those before `written` are written. */
struct td__operands {
    td_device *device;
    const char *slot;
    const char *detail; /* such as the operation; or NULL */
    const td_tensor ***at;
    int written, count;
};

struct td__host_copy;

/** Replaces all operands by copies on the host, so that the host's kernel can compute with them; tensors that share
 *  memory share it in the copies. TD_ERR_UNSUPPORTED, with a sentence that names kernel and device, unless the program
 *  wants this. */
td_status td__fallback_begin(struct td__operands *operands, struct td__host_copy **copies);

/** Copies what was written back, if `status` is TD_OK, and frees the copies. Returns `status`, or a failure of its own,
 *  which leaves all operands as they were. */
td_status td__fallback_end(struct td__operands *operands, struct td__host_copy *copies,
                           td_status status);

/** After a kernel was enqueued: the memory of its operands is in use on the current stream. */
void td__note_uses(const struct td__operands *operands);

/** Reports each call of a kernel of an accelerator, by any thread, with the name of the slot and what the device's own
 *  kernel returned (TD_ERR_UNSUPPORTED where it has none); NULL ends this. For tools that list what was covered. */
void td__watch_kernels(void (*watch)(const char *slot, td_status status));

/** What RUN_LIST() calls; costs one load where nothing watches. */
void td__note_kernel(const char *slot, td_status status);

#endif
