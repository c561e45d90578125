/* The matrix product behind all of «Products» in kernels.h: C = A B.
 *
 * Operands have any strides, since they are packed first. B need not exist in memory: a convolution packs
 * parts of the images instead, in the order that the product needs. gemm_loops.h has the loops; they are
 * compiled for each instruction set. */
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

/** Writes a part of B to `packed`, a row every `width` elements, padded with zeros up to `width`. */
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
    td__gemm_pack_fn pack_b; /* or NULL; if set, it reads B through `b` */
    void *c;                 /* [m, n], the columns side by side */
    int64_t c_row;
    /* A batch of products with the same A, which is packed once: b_item and c_item elements from the B and C
     * of one to the next. A batch of 0 is 1. */
    int64_t batch, b_item, c_item;
    /* Called when a product of the batch is complete; only if td__gemm_keeps_a(). */
    void (*item_done)(const struct td__gemm *gemm, int64_t item);
    void *done_arg;          /* for item_done */
    const void *row_bias;    /* [m] or NULL: added to each column */
    const void *column_bias; /* [n] or NULL: added to each row */
    double alpha;
    bool accumulate; /* add the product to C */
    bool c_half;     /* C is of halves, too, rounded once; item_done is NULL */

    /* Set by td__gemm() for A and B of halves, which are converted when they are packed: their dtype and
     * their k. k is then the number of steps. */
    td_dtype half;
    int64_t half_k; /* 0: no halves */

    const void *packed_a; /* all of A, packed by pack_a() of the loops; or NULL */
};

/**
 * Computes the product: dtype is TD_F32 or TD_F64, or TD_F16 or TD_BF16 for halves in A and B; alpha is 1 for
 * bf16. Threads share large products.
 *
 * Each element of C begins with the bias or the former C, and then adds one step after the other along k, in f32 or
 * f64. So it has the same bits for all m and n, for any number of threads, and for each instruction set with FMA.
 * Each two steps of bf16 are swapped, and subnormal bf16 count as 0: as in the processors' own products.
 *
 * Fails with TD_ERR_NOMEM only.
 */
td_status td__gemm(td_dtype dtype, const struct td__gemm *gemm);

/** The greatest size of A that is packed at once, in elements. */
#define TD__GEMM_KEPT (2 * 1024 * 1024)

static inline bool td__gemm_keeps_a(int64_t m, int64_t k)
{
    return m <= TD__GEMM_KEPT && k <= TD__GEMM_KEPT && m * k <= TD__GEMM_KEPT;
}

/* One set of loops, for one instruction set and one dtype. */
struct td__gemm_loops {
    /** The bytes of workspace, aligned to 64, that `run` needs for this product. */
    size_t (*work_bytes)(const struct td__gemm *gemm);
    void (*run)(const struct td__gemm *gemm, void *work);
    /** Whether a product has so few steps that `run` writes C row by row. */
    bool (*is_flat)(const struct td__gemm *gemm);

    /** If td__gemm_keeps_a(), A can be packed beforehand, panel by panel, and shared by products with the
     *  same A: the number of panels, the bytes of all of them, and packing some. */
    int64_t (*a_panels)(const struct td__gemm *gemm);
    size_t (*a_bytes)(const struct td__gemm *gemm);
    void (*pack_a)(const struct td__gemm *gemm, int64_t begin, int64_t end, void *packed);
};

extern const struct td__gemm_loops td__gemm_generic_f32, td__gemm_generic_f64;
extern const struct td__gemm_loops td__gemm_avx2_f32, td__gemm_avx2_f64;
extern const struct td__gemm_loops td__gemm_avx512_f32, td__gemm_avx512_f64;
extern const struct td__gemm_loops td__gemm_avx512_bf16; /* needs AVX512_BF16; steps are pairs */

#endif
