/* What the tests of operators have in common. */
#ifndef TANDEM_TESTS_OPS_CHECKS_H
#define TANDEM_TESTS_OPS_CHECKS_H

#include "gradcheck.h"
#include "runner.h"

#include "tensor/tensor_internal.h"

/* The call yields no tensor, and the message contains `part`. */
#define CHECK_NULL(call, part)                                                                     \
    do {                                                                                           \
        CHECK(!(call));                                                                            \
        CHECK_CONTAINS(td_last_error(), part);                                                     \
    } while (0)

/** f64 numbers between -1 and 1. */
static inline td_tensor *random_of(const int64_t *shape, int ndim)
{
    return gradcheck_random(shape, ndim, -1, 1);
}

/** Of one shape, and no element further apart than `tolerance`. */
static inline void check_near(td_tensor *a, td_tensor *b, double tolerance)
{
    CHECK(a && b);
    CHECK(td__same_shape(a, b));
    CHECK(td_allclose(a, b, 0, tolerance));
}

#endif
