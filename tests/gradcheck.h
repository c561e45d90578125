/* Gradients against finite differences.
 *
 *     static td_tensor *product(td_tensor *const *x, const void *arg)
 *     {
 *         return td_mul(x[0], x[1]);
 *     }
 *     …
 *     gradcheck("td_mul", product, NULL, (td_tensor *[]){a, b}, 2);
 *
 * The function is any expression of its inputs. Its gradients are compared with (f(x + h) - f(x - h)) / 2h,
 * element by element, for a random gradient of the result: with inputs as they are, transposed in memory, every
 * second element of something larger, and expanded from size 1; with each input alone requiring grad;
 * with a gradient of the result that has strides; and twice over one graph. The first difference fails the
 * test. On accelerators a few of the elements are compared. */
#ifndef TANDEM_TESTS_GRADCHECK_H
#define TANDEM_TESTS_GRADCHECK_H

#include <tandem/ops.h>

/** Returns a result of the inputs of dtype f64; it belongs to the scope that this runs in. The same
 * inputs must always give the same result. */
typedef td_tensor *(*gradcheck_fn)(td_tensor *const *inputs, const void *arg);

enum { GRADCHECK_MOST = 8 }; /* inputs */

/** Inputs of dtype f64 require grad, others (indices, masks) are passed as they are. The inputs are
 *  not changed. Their values must be away from where the function has a kink or a step. */
void gradcheck(const char *name, gradcheck_fn fn, const void *arg, td_tensor *const *inputs,
               int count);

/** The same without expanded inputs: where equal elements are a kink (a maximum). */
void gradcheck_distinct(const char *name, gradcheck_fn fn, const void *arg,
                        td_tensor *const *inputs, int count);

/** f64 numbers between low and high; other ones with each call, the same in each run. */
td_tensor *gradcheck_random(const int64_t *shape, int ndim, double low, double high);

/** The shape and its length, as arguments. */
#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

#endif
