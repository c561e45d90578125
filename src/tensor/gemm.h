/* The product of two matrices that everything in «Products» of kernels.h comes down to: C = A B.
 *
 * Operands have any strides, since they are packed before they are used. B need not even exist: a
 * convolution packs parts of the pictures instead, in the order in which the product wants them.
 * gemm_loops.h has the loops; they are compiled for each instruction set. */
#ifndef TD_TENSOR_GEMM_H
#define TD_TENSOR_GEMM_H

#include "tensor/tensor_internal.h"

struct td__gemm;

/* A part of B: rows k0 … k0 + rows - 1, of each the columns n0 … n0 + columns - 1. */
struct td__gemm_part {
    int64_t item; /* of the batch */
    int64_t k0, rows;
    int64_t n0, columns;
};

/** Writes a part of B to `packed`, a row every `width` elements. What is between the columns of the
 *  part and `width` becomes 0. */
typedef void (*td__gemm_pack_fn)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                                 int64_t width, void *packed);

/* All strides are in elements. The elements are f32, or all f64; or those of A, B and perhaps C are halves,
 * and the others f32. */
struct td__gemm {
    int64_t m, n, k;
    const void *a; /* [m, k] */
    int64_t a_row, a_col;
    const void *b; /* [k, n] */
    int64_t b_row, b_col;
    td__gemm_pack_fn pack_b; /* where it is not NULL: it knows B, by way of `b` */
    void *c;                 /* [m, n], the columns side by side */
    int64_t c_row;
    /* Several products with the same A, which is packed once: B and C of the next one are so much
     * further. 0 is 1. */
    int64_t batch, b_item, c_item;
    /* Called when a product of the batch is there; only where td__gemm_keeps_a(). */
    void (*item_done)(const struct td__gemm *gemm, int64_t item);
    void *done_arg;          /* for item_done */
    const void *row_bias;    /* [m] or NULL: added to each column */
    const void *column_bias; /* [n] or NULL: added to each row */
    double alpha;
    bool accumulate; /* add to C what is computed */
    bool c_half;     /* C is of halves, too, and no item_done is set: it is rounded once */

    /* Set by td__gemm() for A and B of halves, which are converted when they are packed: their dtype and
     * their k. k is then the number of steps. */
    td_dtype half;
    int64_t half_k; /* 0: no halves */

    const void *packed_a; /* all of A, packed by pack_a() of the loops; or NULL */
};

/**
 * Computes it: dtype is TD_F32 or TD_F64, or TD_F16 or TD_BF16 for halves in A and B; alpha is 1 for
 * bf16. Large products are shared by threads.
 *
 * Each element of C begins with what is added to the product, and then takes one step after the other
 * along k, in f32 or f64. So it has the same bits for all sizes of the rest, for any number of threads,
 * and for each instruction set that multiplies and adds with one rounding. Two steps of bf16 are taken in
 * the other order, and subnormal numbers count as 0 in them: as the processors' own products do it.
 *
 * Fails with TD_ERR_NOMEM only.
 */
td_status td__gemm(td_dtype dtype, const struct td__gemm *gemm);

/** How many elements A may have so that all of it is packed at once. */
#define TD__GEMM_KEPT (2 * 1024 * 1024)

static inline bool td__gemm_keeps_a(int64_t m, int64_t k)
{
    return m <= TD__GEMM_KEPT && k <= TD__GEMM_KEPT && m * k <= TD__GEMM_KEPT;
}

/* One set of loops, for one instruction set and one dtype. */
struct td__gemm_loops {
    /** How many bytes of memory, aligned to 64, `run` needs for this product. */
    size_t (*work_bytes)(const struct td__gemm *gemm);
    void (*run)(const struct td__gemm *gemm, void *work);
    /** Whether a product has so few steps that `run` writes C row by row. */
    bool (*is_flat)(const struct td__gemm *gemm);

    /** Where td__gemm_keeps_a(), A can be packed beforehand, panel by panel, to be shared by products
     *  with the same A: how many panels there are, the bytes of all of them, and packing some. */
    int64_t (*a_panels)(const struct td__gemm *gemm);
    size_t (*a_bytes)(const struct td__gemm *gemm);
    void (*pack_a)(const struct td__gemm *gemm, int64_t begin, int64_t end, void *packed);
};

extern const struct td__gemm_loops td__gemm_generic_f32, td__gemm_generic_f64;
extern const struct td__gemm_loops td__gemm_avx2_f32, td__gemm_avx2_f64;
extern const struct td__gemm_loops td__gemm_avx512_f32, td__gemm_avx512_f64;
extern const struct td__gemm_loops td__gemm_avx512_bf16; /* needs AVX512_BF16; steps are pairs */

#endif
