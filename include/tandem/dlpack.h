/* DLPack: tensors of other libraries in the same process, and tensors for them, without a copy.
 *
 *     td_tensor *x = td_from_dlpack(managed, NULL);          the capsule's pointer, from x.__dlpack__() in Python
 *     struct DLManagedTensor *managed = td_to_dlpack(y);     for a capsule "dltensor"; torch.from_dlpack() takes it
 *
 * The structs are those of DLPack's own header, which this one neither needs nor includes: a program that has it passes
 * its types as they are, whichever is included first.
 *
 * Both sides share the memory: a write of one is seen by the other. Neither autograd nor the check for tensors that were
 * changed after they were saved notices a write of the other library.
 *
 * Dtypes are those of dtype.h, all of them in both directions; a bool is a byte, and what is neither 0 nor 1 in it is
 * true here, but may confuse the other library. Host memory, pinned or not, is of "cpu"; a tensor of any "cpu:N" is
 * exported as host memory. Devices of other kinds are found by td_device_ops.dlpack_type.
 *
 * Streams. On an accelerator both functions belong to the thread's td_current_stream() of the device. The producer has
 * made the elements ready for that stream before an import; in Python it is the `stream` of __dlpack__(). The consumer
 * of an export begins after what is enqueued on it: its own stream waits for td_stream_self(td_current_stream(device)),
 * or the host calls td_stream_synchronize(). The deleter of an export makes the memory free for that stream at once: the
 * consumer calls it when its own streams have finished, or this stream waits for them. Before the library calls the
 * deleter of an import, the host waits for the device.
 *
 * Threads. All functions, and the deleters of exports, may be called from any thread at any time. */
#ifndef TANDEM_DLPACK_H
#define TANDEM_DLPACK_H

#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

struct DLManagedTensor;
struct DLManagedTensorVersioned;

/* ---- Import ------------------------------------------------------------------------------------- */

/**
 * A tensor over the memory of a DLPack tensor. `device` is where it counts as being: NULL, the device that DLPack
 * names, "cpu" for host memory; or "cpu:1" for host memory; or a device with the type and the number that DLPack has,
 * where several kinds of devices have that type.
 *
 * On success the tensor owns `managed`: its deleter is called once, after the last release of a tensor over the memory.
 * On failure it stays the caller's, and was not called.
 *
 * Errors: TD_ERR_INVALID, a member is out of range, a stride is negative, the elements are not aligned to their size, or
 * there is no such device; TD_ERR_UNSUPPORTED, a dtype or a type of device that the library lacks, lanes other than 1,
 * or more than TD_MAX_DIMS dimensions; TD_ERR_NOMEM.
 */
TD_API td_tensor *td_from_dlpack(struct DLManagedTensor *managed, td_device *device);

/** The same for the struct of DLPack 1.x; a later major version is TD_ERR_UNSUPPORTED.
 *
 *  Memory with the flag for read-only is not written to: before the first in-place operation on it, the library moves
 *  the tensor, with all others over the memory, to a copy, and calls the deleter. The program must not write through
 *  td_tensor_data() before. */
TD_API td_tensor *td_from_dlpack_versioned(struct DLManagedTensorVersioned *managed,
                                           td_device *device);

/* ---- Export ------------------------------------------------------------------------------------- */

/**
 * A DLPack tensor over the memory of a tensor, of any strides. It holds the memory until the consumer calls its deleter,
 * once, also after the tensor was released. Memory that is lent to another process, or was imported as read-only, first
 * moves to a copy, with all tensors over it. NULL on failure.
 *
 * Errors: TD_ERR_INVALID, the tensor is NULL, or requires grad: export td_detach() of it; TD_ERR_UNSUPPORTED, its device
 * has no type in DLPack; TD_ERR_NOMEM.
 */
TD_API struct DLManagedTensor *td_to_dlpack(td_tensor *tensor);

/* Flags of td_to_dlpack_versioned(), which are those of DLPack. */
#define TD_DLPACK_READ_ONLY UINT64_C(1) /* the consumer must not write */
#define TD_DLPACK_COPIED UINT64_C(2) /* export a contiguous copy, which is the consumer's alone */

/** The same as the struct of DLPack 1.0, with these flags; others are TD_ERR_INVALID. */
TD_API struct DLManagedTensorVersioned *td_to_dlpack_versioned(td_tensor *tensor, uint64_t flags);

#ifdef __cplusplus
}
#endif

#endif
