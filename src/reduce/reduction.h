/* Reductions on plain memory.
 *
 *     data (dtype) --load--> accumulator --combine--> … --combine--> accumulator --store--> data
 *
 * The accumulator is f32 for sums and products of f16 and bf16, which are rounded once, in the store;
 * otherwise it has the dtype itself. Between load and store any rank may combine any two accumulators; the
 * tree of collective/tree.h defines which. td__reduce_many() does all three for several ranks' buffers in
 * one pass, with the same bits.
 *
 * The bits depend on the values and the tree only: not on the instruction set, the alignment, the offset of
 * an element in its buffer, or the order of two operands.
 *
 * Buffers are aligned to their elements (complex ones to the parts). Nothing here can fail: the code that
 * creates a reduction checks it once, with td__reduction_check(). */
#ifndef TD_REDUCE_REDUCTION_H
#define TD_REDUCE_REDUCTION_H

#include <tandem/dtype.h>

struct td__reduction {
    td_dtype dtype;
    td_reduce_op op; /* ignored with a user's function */
    double factor;   /* TD_PREMUL_SUM */
    const double
        *factors;      /* NULL, or one for each source of the functions that take several sources */
    td_reduce_fn user; /* instead of `op`, or NULL */
    void *user_arg;
    uint32_t methods; /* of in-place reductions: reduce_method.h */
    uint32_t number;  /* of the user's function, from 1, in the order of creation */
};

/** TD_ERR_INVALID, with a text that names both, if the operation is undefined for the dtype. */
td_status td__reduction_check(const struct td__reduction *reduction);

/** The type in which values are combined. */
td_dtype td__reduction_accumulator(const struct td__reduction *reduction);

/** Converts `count` elements to accumulators: for TD_PREMUL_SUM times the factor; for bool 0 or 1. `acc` may be
 *  `src` if they have the same type, and must not overlap it otherwise. */
void td__reduce_load(const struct td__reduction *reduction, void *acc, const void *src,
                     size_t count);

/** acc = acc op other. They must not overlap. */
void td__reduce_combine(const struct td__reduction *reduction, void *acc, const void *other,
                        size_t count);

/** Converts accumulators over `size` ranks, by which TD_AVG divides, to elements. `dst` may be `acc` if they
 *  have the same type, and must not overlap it otherwise. */
void td__reduce_store(const struct td__reduction *reduction, void *dst, const void *acc,
                      size_t count, int size);

/**
 * Reduces `count` elements of each of `src_count` (at least 1) buffers along the tree, in the order
 * in which `src` lists them, and writes the result to each of the `dst_count` buffers of `dst`.
 * A buffer may be in both lists; otherwise none may overlap.
 */
void td__reduce_many(const struct td__reduction *reduction, void *const *dst, int dst_count,
                     const void *const *src, int src_count, size_t count);

/** The same without the store: reduces all sources along the tree into `acc`, as accumulators, for
 *  td__reduce_combine() and td__reduce_store(). `acc` must not overlap any source. */
void td__reduce_accumulate(const struct td__reduction *reduction, void *acc, const void *const *src,
                           int src_count, size_t count);

#endif
