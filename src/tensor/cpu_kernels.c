/* The table of the processor's kernels; see kernels.h for what each does. */
#include "tensor/kernels.h"

const struct td__kernels td__cpu_kernels = {
    .fill = NULL,
};
