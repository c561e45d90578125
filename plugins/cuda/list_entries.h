/* For CUDA sources: kernels over lists of tensors, of which each block takes a chunk of one. */
#ifndef CUDA_LIST_ENTRIES_H
#define CUDA_LIST_ENTRIES_H

#include "cuda/device_code.h"
#include "cuda/updates_args.h"

/* The entry of this block: the last one that does not begin after it. */
template <typename Entry> __device__ inline const Entry &entry_of(const Entry *entry, int entries)
{
    int low = 0, high = entries - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (entry[middle].first_block <= (int32_t)blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    return entry[low];
}

/* Calls function<T>(…) for the dtype of `entry`. */
#define BY_DTYPE(function, ...)                                                                    \
    switch (entry.dtype) {                                                                         \
    case CUDA_F32:                                                                                 \
        function<float>(__VA_ARGS__);                                                              \
        break;                                                                                     \
    case CUDA_F64:                                                                                 \
        function<double>(__VA_ARGS__);                                                             \
        break;                                                                                     \
    case CUDA_F16:                                                                                 \
        function<f16>(__VA_ARGS__);                                                                \
        break;                                                                                     \
    default:                                                                                       \
        function<bf16>(__VA_ARGS__);                                                               \
    }

#endif
