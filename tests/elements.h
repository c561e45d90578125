/* Tensors of many layouts, and their elements one by one, for tests of kernels. */
#ifndef TANDEM_TESTS_ELEMENTS_H
#define TANDEM_TESTS_ELEMENTS_H

#include "tensor/tensor_internal.h"

/** A shape, and how the result and two operands lie in memory. */
struct layout_case {
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    const char *operands[2]; /* a letter for each: 'c' contiguous, 't' transposed, 's' sliced with
                                steps; further letters: 'b' and a digit, broadcast in that dimension */
    char result;             /* 'c', 't' or 's' */
};

extern const struct layout_case layout_cases[];
extern const int layout_cases_count;

/** Operand 0 or 1 of a case, with numbers that depend on `seed`. */
td_tensor *make_case(const struct layout_case *layout, int operand, td_dtype dtype, unsigned seed);
/** A tensor for the result, not set. */
td_tensor *make_result(const struct layout_case *layout, td_dtype dtype);

/** Numbers that every dtype has, and whose sums and products u8 and i8 have, too. */
void fill_numbers(td_tensor *tensor, unsigned seed);

/** The element with this number, in the order of the indices. */
double element(const td_tensor *tensor, int64_t number);
/** Of a tensor on the host. */
void set_element(td_tensor *tensor, int64_t number, double value);

/** `value` is what `right` is when it is rounded to the dtype of `tensor`, give or take some units in
 *  its last place, and wrapped around for integers. */
void check_units(double value, double right, double units, const td_tensor *tensor, int64_t number);

/** The same with 3 units. */
void check_close(double value, double right, const td_tensor *tensor, int64_t number);

#endif
