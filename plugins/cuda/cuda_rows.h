/* How the threads of a GPU share rows, for the launches of softmax.cu and layer_norm.cu. */
#ifndef CUDA_ROWS_H
#define CUDA_ROWS_H

#include "cuda/cuda_launch.h"
#include "cuda/norms_args.h"

/** Threads of a row, and kernels: those of rows in registers, 2, 4, 6 and 8 groups a thread, are numbers 0 to 3. */
struct cuda_rows {
    int32_t threads; /* of a row: a warp, or a block */
    int variant;     /* -1: the row does not fit, or is not aligned */
    unsigned block;  /* threads of a block */
    int64_t at_once; /* rows of a block */
};

/** For rows of `size` elements of these contiguous tensors, of which some may be NULL. */
struct cuda_rows td__cuda_rows(int64_t size, const td_tensor *const *tensors, int count);

/** Launches a kernel with `blocks` blocks; none where that is 0. */
td_status td__cuda_launch_rows(struct cuda_kernel *kernel, const td_tensor *tensor,
                               const struct cuda_rows *rows, int64_t blocks, const void *args);

/** The kernels of rows in registers, as a table. */
#define TD__CUDA_ROW_KERNELS(image, name)                                                          \
    {                                                                                              \
        TD__CUDA_KERNEL(image, name "_2"), TD__CUDA_KERNEL(image, name "_4"),                      \
            TD__CUDA_KERNEL(image, name "_6"), TD__CUDA_KERNEL(image, name "_8"),                  \
    }

/** A tensor as a kernel's vector; NULL: none. */
struct norm_vector td__cuda_vector(const td_tensor *tensor);

#endif
