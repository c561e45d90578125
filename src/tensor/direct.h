/* A matrix product that reads A in place, without packing: C = A B, written transposed.
 *
 *     C (i, j) = bias (j) + sum over p of a[rows[i] + steps[p]] B (p, j)
 *
 * Any matrix whose elements are at the sum of an offset for the row and one for the column can be A. The
 * three products of a convolution have this form: rows are output pixels and steps the taps, or rows are
 * taps and steps the pixels. B has channels as columns and is packed; vectors are vectors of channels, so
 * that the end of a row of pixels leaves no lanes unused, for any stride and dilation.
 *
 * Each element is summed along p in order, with one rounding a step if the instruction set has FMA,
 * independent of the other elements. direct_loops.h has the loops; they are compiled for each instruction
 * set. */
#ifndef TD_TENSOR_DIRECT_H
#define TD_TENSOR_DIRECT_H

#include <tandem/dtype.h>

#include <stdbool.h>
#include <stdint.h>

struct td__direct {
    int64_t m, n, k;
    const void *a;
    const int64_t *rows;  /* [m] offsets in elements */
    const int64_t *steps; /* [k] */
    /* Of every `period` steps only those from `begin` to `end` - 1 are taken: A has 0 in the others. */
    int64_t period, begin, end;
    const void *b;    /* aligned to 64 bytes: strips of columns, see td__direct_loops */
    const void *bias; /* [n] or NULL: what the sums begin with instead of 0 */
    void *c;          /* element (i, j) is c[j * c_column + i] */
    int64_t c_column;
    bool add; /* to C; otherwise it is overwritten */
};

/* One set of loops, for one instruction set and one dtype. */
struct td__direct_loops {
    int64_t strip; /* columns of a strip: B is packed as [strips, k, strip] */

    /** How many elements B has when it is packed, with what may be written and read beyond its end. */
    int64_t (*packed_size)(int64_t k, int64_t n);

    /** Packs B out of columns of k elements side by side, the next column `column` elements further. */
    void (*pack)(const void *b, int64_t column, int64_t k, int64_t n, void *packed);

    void (*run)(const struct td__direct *direct);
};

/** The loops for this processor: dtype is TD_F32 or TD_F64. */
const struct td__direct_loops *td__direct_loops(td_dtype dtype);

extern const struct td__direct_loops td__direct_generic_f32, td__direct_generic_f64;
extern const struct td__direct_loops td__direct_avx2_f32, td__direct_avx2_f64;
extern const struct td__direct_loops td__direct_avx512_f32, td__direct_avx512_f64;

#endif
