/* The numbers of td_arange() and td_linspace(), bit for bit those of PyTorch 1.13 with AVX2 and one
 * thread.
 *
 * It fills two vectors of 32 bytes at a time: the first number of a vector is computed and rounded to
 * the dtype, the others are that one plus multiples of the step. What is left at the end is computed
 * one by one. So a number depends on how many there are. First numbers, and all of an arange, are
 * multiplied and added with one rounding (FMA); here always, so that every machine gives the same. */
#ifndef TD_TENSOR_CPU_RANGE_H
#define TD_TENSOR_CPU_RANGE_H

#include <tandem/dtype.h>

/** start, start + step, … as `dtype`: floating point, or i64 or u64. */
void td__cpu_arange(void *out, td_dtype dtype, int64_t count, double start, double step);

/** From start to end, as `dtype`: floating point, or an integer that both can be. */
void td__cpu_linspace(void *out, td_dtype dtype, int64_t count, double start, double end);

#endif
