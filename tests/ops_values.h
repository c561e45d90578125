/* Small tensors with given elements, and checks of all elements of a result. */
#ifndef TANDEM_TESTS_OPS_VALUES_H
#define TANDEM_TESTS_OPS_VALUES_H

#include "gradcheck.h"
#include "runner.h"

/** A contiguous tensor of the dtype, with the numbers in order: MAKE(TD_F32, SHAPE(2, 2), 1, 2, 3, 4). */
#define MAKE(dtype, shape, ...) make_tensor(dtype, shape, (const double[]){__VA_ARGS__})

td_tensor *make_tensor(td_dtype dtype, const int64_t *shape, int ndim, const double *numbers);

/** The tensor has this dtype, shape and these elements, give or take a few units in the last place. */
#define CHECK_TENSOR(tensor, dtype, shape, ...)                                                    \
    check_tensor(__FILE__, __LINE__, tensor, dtype, shape, (const double[]){__VA_ARGS__})

void check_tensor(const char *file, int line, const td_tensor *tensor, td_dtype dtype,
                  const int64_t *shape, int ndim, const double *numbers);

/** The shape and its length where there are no dimensions. */
#define NO_DIMS NULL, 0

/** The call yields no tensor, and the message contains `part`. */
#define CHECK_NULL(call, part)                                                                     \
    do {                                                                                           \
        CHECK(!(call));                                                                            \
        CHECK_CONTAINS(td_last_error(), part);                                                     \
    } while (0)

#endif
