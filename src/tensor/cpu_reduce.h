/* Reductions over dimensions, and the loops that they are made of. */
#ifndef TD_TENSOR_CPU_REDUCE_H
#define TD_TENSOR_CPU_REDUCE_H

#include "tensor/tensor_internal.h"

/* The greatest numbers of rows and columns that the loops over columns take at a time. */
#define TD__REDUCE_ROWS 8
#define TD__REDUCE_COLUMNS 512

/** How elements of one type are reduced. The loops have SUM, PROD, MAX, MIN and SQUARES; the other kinds are
 *  one of these with a conversion before or after. */
struct td__reducer {
    td_dtype dtype; /* of the elements in the loops */
    td_dtype total; /* of the totals */
    /** *total = *total op x[0] op … op x[count - 1]. */
    void (*row)(td_reduce_kind kind, void *total, const void *x, int64_t count);
    /** total[i] = total[i] op rows[0][i] op … op rows[n - 1][i], for `count` columns. */
    void (*columns)(td_reduce_kind kind, void *total, const void *const rows[], int n,
                    int64_t count);
};

extern const struct td__reducer td__reducer_f32, td__reducer_f64, td__reducer_i64,
    td__reducer_complex128;

td_status td__cpu_reduce(td_reduce_kind kind, td_tensor *out, const td_tensor *x,
                         unsigned dims);
td_status td__cpu_arg_reduce(bool least, td_tensor *out, const td_tensor *x, int dim);

#endif
