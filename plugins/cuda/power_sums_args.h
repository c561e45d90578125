/* Arguments of the kernels in power_sums.cu: lists of tensors, as those of updates_args.h. */
#ifndef POWER_SUMS_ARGS_H
#define POWER_SUMS_ARGS_H

#include "cuda/updates_args.h"

enum {
    SUM_BLOCK = 1024,           /* elements that a warp adds at once */
    SUM_CHUNK = 16 * SUM_BLOCK, /* … and a block of SUM_THREADS; a power of two of the former */
    SUM_THREADS = 256,
    TREE_THREADS = 1024 /* one for each sum of a tile */
};

struct power_sums_args {
    double *chunks; /* the sums of the chunks, one for each block */
    double *sums;   /* those of the tensors, one for each entry */
    double power;   /* INFINITY: the greatest */
    int32_t entries;
    struct list_entry entry[LIST_ENTRIES];
};

/* The same for a tensor that is not contiguous. */
struct strided_sums_args {
    struct cuda_space space;
    struct power_sums_args list; /* with one entry */
};

/* The norm, from the sums of all tensors. */
struct norm_args {
    const double *sums;
    int64_t count;
    double power;
    void *out;
    int32_t wide; /* `out` is f64 */
};

#endif
