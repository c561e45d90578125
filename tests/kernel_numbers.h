/* Numbers for tests of kernels: tensors of any float dtype, read and written as doubles. */
#ifndef TANDEM_TESTS_KERNEL_NUMBERS_H
#define TANDEM_TESTS_KERNEL_NUMBERS_H

#include "runner.h"

#include "tensor/tensor_internal.h"

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

/** The floats, for loops over them. */
static const td_dtype float_dtypes[] = {TD_F32, TD_F64, TD_F16, TD_BF16};
enum { FLOAT_DTYPES = 4 };

/** The dtype of statistics: f64 for f64, f32 otherwise. */
td_dtype statistics_of(td_dtype dtype);

/** A number of [-1, 1), from a generator of the tests' own. */
double any_number(void);
int64_t any_integer(int64_t below);

/** Contiguous, with numbers of [-size, size). */
td_tensor *any_tensor(const int64_t *shape, int ndim, td_dtype dtype, double size);

/** Element `i` of a contiguous tensor of a float dtype. */
double number_at(const td_tensor *tensor, int64_t i);
void put_number(td_tensor *tensor, int64_t i, double value);

/** All elements of a contiguous tensor, for free(). */
double *numbers_of(const td_tensor *tensor);

/** Each element is expected[i], up to `factor` times what its dtype can do at the size of the
 *  greatest of them, or at `size` where that is greater: what has cancelled out on the way. */
void check_sized(const char *what, const td_tensor *tensor, const double *expected, double factor,
                 double size);
void check_numbers(const char *what, const td_tensor *tensor, const double *expected,
                   double factor);

/** grad is what finite differences say of loss(arg), a function of the elements of x; both are f64. */
void check_slopes(const char *what, td_tensor *x, const td_tensor *grad,
                  double (*loss)(const void *arg), const void *arg);

/** The sum of a[i] b[i]: with b = grad_y the loss whose gradient a kernel is asked for. */
double sum_of_products(const td_tensor *a, const td_tensor *b);

/** Releases tensors up to a NULL. */
void release_all(td_tensor *first, ...);

#endif
