/* The table of the processor's kernels; see kernels.h for what each does. */
#include "tensor/kernels.h"

#include "tensor/cpu_convert.h"
#include "tensor/cpu_elementwise.h"
#include "tensor/cpu_reduce.h"

const struct td__kernels td__cpu_kernels = {
    .fill = td__cpu_fill,
    .copy = td__cpu_copy,
    .unary = td__cpu_unary,
    .binary = td__cpu_binary,
    .binary_scalar = td__cpu_binary_scalar,
    .add_scaled = td__cpu_add_scaled,
    .where = td__cpu_where,
    .clamp = td__cpu_clamp,
    .reduce = td__cpu_reduce,
};
