/* Tensors: memory that is seen as an array of up to TD_MAX_DIMS dimensions.
 *
 *     td_tensor *x = td_zeros((int64_t[]){2, 3}, 2, TD_F32);
 *     float *data = td_tensor_data(x);
 *     td_tensor_release(x);
 *
 * A tensor is a dtype, a shape, strides and an offset over a storage, the memory itself. Strides
 * are counted in elements: element (i, j) is at offset + i * stride(0) + j * stride(1). Several
 * tensors may look at one storage: a view costs no copy, and a write through one is seen through
 * all of them.
 *
 * Ownership. Both are counted. A function that returns a tensor gives the caller one reference,
 * which td_tensor_release() returns; the storage is freed with its last tensor. Functions never
 * take over a reference of the tensors that they are given.
 *
 * Errors. A function that returns a tensor returns NULL where it fails, and td_last_error() says
 * why. It hands a NULL input on as a NULL result and leaves td_last_error() alone then, so that an
 * expression of several calls needs one check at its end.
 *
 * A tensor of no dimensions has one element; one with a size of 0 has none, and is no error
 * anywhere. Where a function takes a dimension, a negative one counts from the end: -1 is the last.
 *
 * Threads. What a tensor is does not change, so any number of threads may use one; who writes its
 * elements takes care that nobody reads them meanwhile. */
#ifndef TANDEM_TENSOR_H
#define TANDEM_TENSOR_H

#include <tandem/dtype.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_tensor td_tensor;

#define TD_MAX_DIMS 8

/* ---- Making one ------------------------------------------------------------------------------
 *
 * `shape` holds `ndim` sizes, and may be NULL where that is 0. Memory of more than a few KiB comes
 * from td_alloc(), so that the other ranks of the host can map it. */

/** A contiguous tensor whose elements are not set. */
TD_API td_tensor *td_empty(const int64_t *shape, int ndim, td_dtype dtype);

/** A contiguous tensor of zeros. */
TD_API td_tensor *td_zeros(const int64_t *shape, int ndim, td_dtype dtype);

/** A contiguous tensor with `value` in each element: rounded for a floating-point dtype, without
 * its fraction for an integer (out of its range is an error), not 0 for bool, the real part of a
 * complex number. */
TD_API td_tensor *td_full(const int64_t *shape, int ndim, double value, td_dtype dtype);

/** Frees memory that was lent to a tensor. Called once, by the thread that releases it last. */
typedef void (*td_blob_free_fn)(void *data, void *arg);

/**
 * A tensor over memory of the caller's, which is not copied. `strides` holds `ndim` of them, none
 * negative; NULL: contiguous. The memory must stay until the last tensor that looks at it is
 * released; free_fn(data, arg), where it is not NULL, is called then. It is not called where this
 * fails.
 */
TD_API td_tensor *td_from_blob(void *data, const int64_t *shape, int ndim, const int64_t *strides,
                               td_dtype dtype, td_blob_free_fn free_fn, void *arg);

/** One more reference; one less. Both take NULL. */
TD_API td_tensor *td_tensor_retain(td_tensor *tensor);
TD_API void td_tensor_release(td_tensor *tensor);

/* ---- What it is ------------------------------------------------------------------------------
 *
 * None of these fails for a tensor and a dimension that it has. */

/** The first element. NULL for NULL; for a tensor without elements it may be NULL too. */
TD_API void *td_tensor_data(const td_tensor *tensor);

TD_API td_dtype td_tensor_dtype(const td_tensor *tensor);

/** The number of dimensions; -1 for NULL. */
TD_API int td_tensor_ndim(const td_tensor *tensor);

/** The size and the stride of a dimension; -1 for NULL, or where there is no such dimension. */
TD_API int64_t td_tensor_size(const td_tensor *tensor, int dim);
TD_API int64_t td_tensor_stride(const td_tensor *tensor, int dim);

/** The number of elements, and the bytes that they would take one after another; 0 for NULL. */
TD_API int64_t td_tensor_numel(const td_tensor *tensor);
TD_API size_t td_tensor_nbytes(const td_tensor *tensor);

/** True where the elements stand one after another in the order of their indices, the last one
 *  running fastest. */
TD_API bool td_tensor_is_contiguous(const td_tensor *tensor);

/* ---- Copies ---------------------------------------------------------------------------------- */

/** A contiguous tensor with the same elements, in memory of its own. */
TD_API td_tensor *td_clone(td_tensor *tensor);

/** The tensor itself, with one more reference, where it is contiguous; td_clone() otherwise. */
TD_API td_tensor *td_contiguous(td_tensor *tensor);

/** Copies the elements of `src` to `dst`, which has the same shape and dtype; the strides may be
 * any. They may overlap. TD_ERR_INVALID where shape or dtype differ, or where elements of `dst`
 * share memory (a stride of 0). */
TD_API td_status td_tensor_copy(td_tensor *dst, td_tensor *src);

/* ---- Views -----------------------------------------------------------------------------------
 *
 * Each shares the storage of `tensor`, and keeps it. */

/** The same elements with dimensions `a` and `b` exchanged. */
TD_API td_tensor *td_transpose(td_tensor *tensor, int a, int b);

/** The part of `length` indices from `start` on in dimension `dim`. A negative start counts from
 * the end. The part must be inside the tensor. */
TD_API td_tensor *td_narrow(td_tensor *tensor, int dim, int64_t start, int64_t length);

/** The part at `index` of dimension `dim`, which goes away. A negative index counts from the end.
 */
TD_API td_tensor *td_select(td_tensor *tensor, int dim, int64_t index);

/** Every `step`-th index of dimension `dim` from `start` on, below `end`. As in Python, negative
 * ones count from the end, and what is outside is cut off; INT64_MAX is the end. `step` is above 0.
 */
TD_API td_tensor *td_slice(td_tensor *tensor, int dim, int64_t start, int64_t end, int64_t step);

/** The same elements, in the order of their indices, in another shape with as many of them. One
 * size may be -1: what is left for it. A view where the strides allow it, a contiguous copy
 * otherwise. */
TD_API td_tensor *td_reshape(td_tensor *tensor, const int64_t *shape, int ndim);

#ifdef __cplusplus
}
#endif

#endif
