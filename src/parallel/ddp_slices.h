/* What a step over slices keeps until it has ended; see ddp_slices.c and ddp_repeat.c. */
#ifndef TD_PARALLEL_DDP_SLICES_H
#define TD_PARALLEL_DDP_SLICES_H

#include "parallel/ddp.h"
#include "parallel/slice_state.h"

struct td__ddp_slices {
    bool active; /* between td_slices_begin() and the end of the step */
    bool passed; /* the slice has had its backward pass */
    bool holds;  /* the buffers after slice 0 wait for td__ddp_commit() */
    int64_t step;
    struct td__slice_state state;
};

#endif
