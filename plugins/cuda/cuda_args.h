/* What the host hands to kernels: included by the plug-in's C files and by CUDA sources. A kernel has one argument, a
 * struct, whose names and members stand in a header that both sides include. */
#ifndef CUDA_ARGS_H
#define CUDA_ARGS_H

#include <stdint.h>

enum { CUDA_MAX_DIMS = 8, CUDA_MAX_OPERANDS = 4 };

/** Elements of up to four tensors of one shape, with their strides: dimension 0 is the fastest. Dimensions that belong
 *  together are merged, so that contiguous tensors have one. */
struct cuda_space {
    int64_t count; /* of elements */
    int32_t ndim;  /* 0: one element */
    int32_t plain; /* all operands are contiguous: the offset is the index */
    int64_t size[CUDA_MAX_DIMS];
    int64_t stride[CUDA_MAX_OPERANDS][CUDA_MAX_DIMS]; /* in elements */
};

/** Elements of a space for kernels that take `width` neighbours of dimension 0 at once: then the space is that of the
 *  groups, with offsets in elements still, and `tail` elements follow the last one. A width of 1: each on its own. */
struct cuda_each {
    struct cuda_space space;
    int32_t width;
    uint32_t repeated; /* bit t: operand t is broadcast along dimension 0 */
    int64_t tail;      /* only where there is one dimension */
};

/** An index that is out of range, reported by the first kernel that meets one. */
struct cuda_fault {
    int32_t code;     /* 0: none; set last */
    int32_t kernel;   /* which slot: enum cuda_fault_kernel */
    int64_t position; /* of the index in its tensor */
    int64_t index;
    int64_t limit; /* 0 to limit - 1 was allowed */
};

enum cuda_fault_kernel {
    CUDA_FAULT_INDEX_SELECT,
    CUDA_FAULT_INDEX_ADD,
    CUDA_FAULT_GATHER,
    CUDA_FAULT_SCATTER_ADD,
    CUDA_FAULT_NLL_LOSS,
    CUDA_FAULT_CROSS_ENTROPY
};

#endif
