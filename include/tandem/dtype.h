/* The types of elements, and the operations that reduce them.
 *
 * Threads. All functions may be called from any thread at any time. */
#ifndef TANDEM_DTYPE_H
#define TANDEM_DTYPE_H

#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Types of elements ----------------------------------------------------------------------- */

typedef enum td_dtype {
    TD_F32,
    TD_F64,
    TD_F16,  /* IEEE 754 binary16, in a uint16_t */
    TD_BF16, /* the upper half of an f32, in a uint16_t */
    TD_I8,
    TD_U8,
    TD_I16,
    TD_I32,
    TD_I64,
    TD_U32,
    TD_U64,
    TD_BOOL,       /* one byte: 0 is false, all others are true */
    TD_COMPLEX64,  /* two f32: real, imaginary */
    TD_COMPLEX128, /* two f64 */
} td_dtype;

/** The bytes of one element; 0 for a number that is no dtype. */
TD_API size_t td_dtype_size(td_dtype dtype);

/** "f32", "bf16", "complex64" …; "unknown" for a number that is no dtype. */
TD_API const char *td_dtype_name(td_dtype dtype);

/**
 * Finds the dtype of a name: one of td_dtype_name(), or what PyTorch calls it ("float32", "float",
 * "long", "half", "bfloat16", "cfloat" …), also with "torch." in front. False for any other text,
 * and *dtype is then left as it was.
 */
TD_API bool td_dtype_parse(const char *name, td_dtype *dtype);

/* ---- Reductions ------------------------------------------------------------------------------
 *
 *                            sum  product  min max  avg  premul_sum  band bor bxor
 *     f32 f64 f16 bf16       yes  yes      yes      yes  yes         -
 *     complex64 complex128   yes  yes      -        yes  yes         -
 *     integers               yes  yes      yes      -    -           yes
 *     bool                   or   and      and or   -    -           and or xor
 *
 * Sums and products of f16 and bf16 are formed in f32 and rounded once, at the end; those of
 * integers wrap around. MIN and MAX yield NaN where any operand is NaN, and take -0 for less than
 * 0. A NaN result is always the positive quiet NaN without a payload, so that it does not depend on
 * the order of the operands. A bool comes out as 0 or 1. */

typedef enum td_reduce_op {
    TD_SUM,
    TD_PRODUCT,
    TD_MIN,
    TD_MAX,
    TD_AVG, /* the sum, divided by the number of ranks */
    TD_BAND,
    TD_BOR,
    TD_BXOR,
    TD_PREMUL_SUM,              /* the sum of each rank's elements times a factor */
    TD_REDUCE_OP_OWN = 0x10000, /* custom ones of td_reduce_op_create() (group.h) from here on */
    TD_REDUCE_OP_LAST = 0x7fffffff,
} td_reduce_op;

/** "sum", "product", "premul_sum" …; "unknown" for a number that is no operation. */
TD_API const char *td_reduce_op_name(td_reduce_op op);

/**
 * A custom reduction: acc[i] = acc[i] op other[i] for `count` elements of `dtype`, which do not
 * overlap. It must be commutative. It is called for parts of the data, by any thread, in an order
 * that depends only on the number of ranks.
 */
typedef void (*td_reduce_fn)(void *acc, const void *other, size_t count, td_dtype dtype, void *arg);

/* ---- Halves ----------------------------------------------------------------------------------
 *
 * Rounded to nearest, ties to even; overflow gives infinity. A NaN keeps its sign and the upper
 * bits of its payload. */

/** One number, between f32 and the bits of an IEEE half (f16) or of a brain float (bf16). */
TD_API float td_f16_to_f32(uint16_t half);
TD_API uint16_t td_f32_to_f16(float value);
TD_API float td_bf16_to_f32(uint16_t half);
TD_API uint16_t td_f32_to_bf16(float value);

#ifdef __cplusplus
}
#endif

#endif
