/* Launching kernels. A file of kernels NAME.cu has its launches in launch_NAME.c; a kernel is found by its name in the image
 * NAME when it is launched first. */
#ifndef CUDA_LAUNCH_H
#define CUDA_LAUNCH_H

#include "cuda/cuda_device.h"

#include <tandem/kernels.h>
#include <tandem/tensor.h>

#include <stdatomic.h>

/* The files of kernels; plugins/cuda/CMakeLists.txt lists them too. */
#define TD__CUDA_IMAGES(F)                                                                         \
    F(attention)                                                                                   \
    F(batch_norm)                                                                                  \
    F(binary)                                                                                      \
    F(convolution)                                                                                 \
    F(cross_entropy)                                                                               \
    F(elements)                                                                                    \
    F(flash_attention)                                                                             \
    F(flash_attention_grad)                                                                        \
    F(indices)                                                                                     \
    F(layer_norm)                                                                                  \
    F(losses)                                                                                      \
    F(pooling)                                                                                     \
    F(power_sums)                                                                                  \
    F(products)                                                                                    \
    F(random)                                                                                      \
    F(reductions)                                                                                  \
    F(softmax)                                                                                     \
    F(sums)                                                                                        \
    F(unary)                                                                                       \
    F(updates)

struct cuda_image {
    const char *name;
    const void *data;
    _Atomic(CUlibrary) library;
};

extern struct cuda_image td__cuda_images[];

enum cuda_image_number {
#define TD__CUDA_NUMBER(name) CUDA_IMAGE_##name,
    TD__CUDA_IMAGES(TD__CUDA_NUMBER)
#undef TD__CUDA_NUMBER
};

/** A kernel. Launches keep them in static tables: {"unary_exp_f32", CUDA_IMAGE_elements}. */
struct cuda_kernel {
    const char *name;
    enum cuda_image_number image;
    _Atomic(struct cuda_functions *) functions; /* NULL: it was not launched yet */
};

/** An entry of such a table: TD__CUDA_KERNEL(elements, "fill_4"). */
#define TD__CUDA_KERNEL(image_, name_)                                                             \
    {                                                                                              \
        .name = name_, .image = CUDA_IMAGE_##image_                                                \
    }

/** How many threads, and bytes of dynamic shared memory. */
struct cuda_grid {
    unsigned blocks[3]; /* 0 counts as 1 */
    unsigned threads;   /* of a block */
    size_t shared;
};

/** Enqueues a kernel on the current stream of the device of `tensor`. `args` is its argument. */
td_status td__cuda_launch(struct cuda_kernel *kernel, const td_tensor *tensor,
                          struct cuda_grid grid, const void *args);

/** The two halves of it, for several launches of which all run, or none: everything that a program can get wrong, or
 *  memory, makes the first one fail. The second is for a prepared kernel, in the same thread. */
td_status td__cuda_prepare(struct cuda_kernel *kernel, const td_tensor *tensor, size_t shared);
td_status td__cuda_enqueue(struct cuda_kernel *kernel, const td_tensor *tensor,
                           struct cuda_grid grid, const void *args);

/** The device of a tensor, and its current stream, for libraries that enqueue by themselves. */
struct cuda_device *td__cuda_device_of(const td_tensor *tensor);
CUstream td__cuda_stream_of(const td_tensor *tensor);

/** Where kernels on the device of a tensor report an index that is out of range. */
struct cuda_fault *td__cuda_fault_of(const td_tensor *tensor);

/** A grid for a loop over `count` elements, in which each thread takes `each` at a time and goes on by the size of the
 *  grid: enough blocks to fill the device a few times. */
struct cuda_grid td__cuda_grid_for(const td_tensor *tensor, int64_t count, int each);

/** Memory for a kernel's intermediate results, on the device of `tensor`; NULL with TD_ERR_NOMEM. It belongs to the
 *  scope: the caller has a TD_SCOPE, which ends when all that uses the memory is enqueued. */
td_tensor *td__cuda_workspace(const td_tensor *tensor, size_t bytes);

/** The space of `count` tensors of one shape, dimensions merged. They are sorted by the strides of the first one, so
 *  that neighbours in memory are neighbours in the order of elements; `in_order`: they stay in the order of indices. */
struct cuda_space td__cuda_space(const td_tensor *const *tensors, int count, bool in_order);

/** The same, in groups of `width` where strides, sizes and the alignment of all tensors allow it. */
struct cuda_each td__cuda_each(const td_tensor *const *tensors, int count, int width);

/** Launches a kernel over elements, a group each thread; nothing is launched where there are none. */
td_status td__cuda_launch_each(struct cuda_kernel *kernel, const td_tensor *tensor,
                               const struct cuda_each *each, const void *args);

/** Converts a number to an element of `dtype`, at most 16 bytes; TD_ERR_INVALID, with the name of the operator, if it
 *  is not in its range. */
td_status td__cuda_element(void *element, td_dtype dtype, double value, const char *name);

/** TD_ERR_UNSUPPORTED: the library reports it with the names of operator and device, or computes on the host. */
td_status td__cuda_unsupported(void);

#endif
