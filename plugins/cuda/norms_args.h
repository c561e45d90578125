/* What the arguments of softmax.cu and layer_norm.cu have in common. */
#ifndef NORMS_ARGS_H
#define NORMS_ARGS_H

#include "cuda/cuda_args.h"

/** A vector of any float dtype; data NULL: there is none. */
struct norm_vector {
    void *data;
    int32_t dtype; /* td_dtype */
};

/** A row that stays in registers: the threads that share it have groups of ROW_WIDTH neighbours, up to ROW_GROUPS each,
 *  and are at most ROW_THREADS. A kernel stands for each even number of groups. */
enum { NORM_THREADS = 256, ROW_WIDTH = 4, ROW_GROUPS = 8, ROW_THREADS = 256 };

#endif
