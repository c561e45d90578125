/* The inner loops of reductions, compiled for each instruction set, and the choice at run time.
 *
 * reduce_loops.h has the loops in plain C; reduce_generic.c, reduce_avx2.c and reduce_avx512.c
 * include it, and are compiled for different processors. The first use chooses the best that this processor
 * supports, unless TANDEM_SIMD names another: generic, avx2 or avx512. All give the same bits. */
#ifndef TD_REDUCE_REDUCE_KERNELS_H
#define TD_REDUCE_REDUCE_KERNELS_H

#include <tandem/dtype.h>

enum {
    TD__DTYPES = TD_COMPLEX128 + 1,
    TD__REDUCE_OPS = TD_PREMUL_SUM + 1,
};

/**
 * Combines 2, 4 or 8 accumulators of `bytes` bytes each along the tree, ((0 1) (2 3)) ((4 5) (6
 * 7)), into `out`, or if that is NULL into all of them. `out` may be one of them; otherwise none overlap.
 */
typedef void td__fold_fn(void *out, void *const *from, int n, size_t bytes);

struct td__reduce_kernels {
    const char *name; /* "avx2" */

    /** By dtype of the accumulators and operation; NULL for undefined operations. */
    td__fold_fn *fold[TD__DTYPES][TD__REDUCE_OPS];

    /* Fused load, combine and store: from elements to elements. */
    td__fold_fn *bf16_sum_elements;
    td__fold_fn *f32_average; /* over n buffers: 1 / n is exact */
    td__fold_fn *f64_average;

    /* Conversions; `to` does not overlap `from`. */
    void (*f16_to_f32)(float *to, const uint16_t *from, size_t count);
    void (*f32_to_f16)(uint16_t *to, const float *from, size_t count);
    void (*bf16_to_f32)(float *to, const uint16_t *from, size_t count);
    void (*f32_to_bf16)(uint16_t *to, const float *from, size_t count);

    /* In place. */
    void (*scale_f32)(float *values, double factor, size_t count);
    void (*scale_f64)(double *values, double factor, size_t count);
    void (*divide_f32)(float *values, int divisor, size_t count);
    void (*divide_f64)(double *values, int divisor, size_t count);
    void (*normalise_bool)(uint8_t *values, size_t count); /* to 0 or 1 */
};

/** The kernels in use. */
const struct td__reduce_kernels *td__kernels(void);

/** Switches to the kernels of that name; false if this processor or this build does not have them. For tests
 *  and benchmarks, while no reduction runs. */
bool td__kernels_use(const char *name);

extern const struct td__reduce_kernels td__kernels_generic;
extern const struct td__reduce_kernels td__kernels_avx2;   /* x86-64 only */
extern const struct td__reduce_kernels td__kernels_avx512; /* x86-64 only */

#endif
