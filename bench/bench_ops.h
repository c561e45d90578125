/* The rows of bench_ops: what is timed, and how a row is run. */
#ifndef TD_BENCH_OPS_H
#define TD_BENCH_OPS_H

#include "measure.h"

#include "tensor/tensor_internal.h"

#include <tandem/ops.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

/* One row: its tensors, and what is timed with them. */
struct ops_row {
    const char *what, *pass;
    td_tensor *out, *a, *b, *c;
    td_window window;
    void (*call)(const struct ops_row *row);
    const void *arg;
};

/** Times the row and prints its line. */
void ops_row(const struct ops_row *row);

/** Whether the command line selects the row `what`. */
bool bench_is_wanted(const char *what);

/** A tensor of numbers between -1 and 1. */
td_tensor *bench_filled(const int64_t *shape, int ndim);

/** Returns `tensor`; ends the program if it is NULL. */
td_tensor *bench_made(td_tensor *tensor);

/** The rows. */
void bench_kernels(void);
void bench_public(void);

#endif
