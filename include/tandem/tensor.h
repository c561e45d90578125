/* Tensors: memory that is seen as an array of up to TD_MAX_DIMS dimensions.
 *
 *     td_tensor *x = td_zeros(TD_SHAPE(2, 3), TD_F32);
 *     float *data = td_tensor_data(x);
 *     td_tensor_release(x);
 *
 * A tensor is a dtype, a shape, strides and an offset over a storage, the memory itself. Strides
 * are counted in elements: element (i, j) is at offset + i * stride(0) + j * stride(1). Several
 * tensors may look at one storage: a view costs no copy, and a write through one is seen through
 * all of them.
 *
 * Ownership. Both are counted; the storage is freed with its last tensor. A tensor that a function
 * returns belongs to the innermost TD_SCOPE that the thread is in, and is released when that ends;
 * where there is none, it belongs to the caller, who returns his reference with td_tensor_release().
 * Functions never take over a reference of the tensors that they are given.
 *
 * Errors. A function that returns a tensor returns NULL where it fails; td_last_error() says why, and
 * td_last_status() of which kind it is. A NULL input gives a NULL result. Where it is the result of a call
 * that failed, that failure stays the last error, so that an expression of several calls needs one check
 * at its end; where this thread has had no failure, or the program has read it by one of these two
 * functions, the NULL itself is TD_ERR_INVALID.
 *
 * A tensor of no dimensions has one element; one with a size of 0 has none, and is no error
 * anywhere. Where a function takes a dimension, a negative one counts from the end: -1 is the last.
 *
 * What is computed with tensors, views of them included, is in ops.h; gradients are in autograd.h.
 *
 * Threads. What a tensor is does not change, so any number of threads may use one; who writes its
 * elements takes care that nobody reads them meanwhile. */
#ifndef TANDEM_TENSOR_H
#define TANDEM_TENSOR_H

#include <tandem/device.h>
#include <tandem/dtype.h>

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_tensor td_tensor;

#define TD_MAX_DIMS 8

/** Options that are 0 have PyTorch's defaults, in all option structures. This is a real 0 for a number
 *  whose default is another one: {.weight_decay = TD_ZERO}. (It is a negative 0, and counts as 0 in
 *  every computation.) For integers with another default than 0, a negative number does that. */
#define TD_ZERO (-0.0)

/* ---- Lists -----------------------------------------------------------------------------------
 *
 * A list is always two arguments: a pointer and, right behind it, the number of its elements. These
 * macros write both, so that the number cannot be wrong. The list lives until the end of the
 * statement; one without elements is fine.
 *
 *     td_zeros(TD_SHAPE(2, 3), TD_F32)                 sizes        const int64_t *, int
 *     td_permute(x, TD_DIMS(1, 0))                     dimensions   const int *, int
 *     td_cat(TD_TENSORS(a, b), 0)                      tensors      td_tensor *const *, int
 */
#define TD_SHAPE(...) TD_LIST(int64_t, __VA_ARGS__)
#define TD_DIMS(...) TD_LIST(int, __VA_ARGS__)
#define TD_TENSORS(...) TD_LIST(td_tensor *, __VA_ARGS__)

#ifndef __cplusplus /* C++ has its own at the end of this header */
#define TD_LIST(type, ...)                                                                         \
    ((type const[]){0, __VA_ARGS__} + 1),                                                          \
        (int)(sizeof((type const[]){0, __VA_ARGS__}) / sizeof(type) - 1)
#endif

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

/** A contiguous tensor with a copy of the elements of a C array, in the order of their indices:
 *
 *     td_from_array((float[]){1, 2, 3, 4, 5, 6}, TD_SHAPE(2, 3), TD_F32)
 *
 *  The array has as many elements as the shape, each of the C type of the dtype. */
TD_API td_tensor *td_from_array(const void *array, const int64_t *shape, int ndim, td_dtype dtype);

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

/** One more reference, which is the caller's whatever scope he is in; one less. Both take NULL. */
TD_API td_tensor *td_tensor_retain(td_tensor *tensor);
TD_API void td_tensor_release(td_tensor *tensor);

/* ---- Scopes -----------------------------------------------------------------------------------
 *
 *     for (int i = 0; i < 10; i++) {
 *         TD_SCOPE;
 *         td_tensor *loss = td_mse_loss(td_matmul(x, w), y);
 *         printf("%g\n", td_item(loss));
 *     }                                       both results are released here, in each turn
 *
 * TD_SCOPE is a declaration, and its scope ends with the block that it stands in, however that is
 * left: at its end, by `break`, `continue`, `return` or `goto`, or by an exception in C++. Scopes
 * belong to a thread and may be nested. */

/** One begun scope; its members are the library's. */
typedef struct td_scope {
    size_t depth;
} td_scope;

/** What TD_SCOPE calls at its beginning and at its end. A second end is fine. */
TD_API td_scope td_scope_begin(void);
TD_API void td_scope_end(td_scope *scope);

#define TD_SCOPE TD_SCOPE_NAMED(TD_UNIQUE(td_scope_))
#define TD_SCOPE_NAMED(name)                                                                       \
    td_scope name __attribute__((cleanup(td_scope_end), unused)) = td_scope_begin()

/** Lets a tensor outlive the innermost scope: from then on it belongs to the scope around that one,
 *  or to the caller where there is none. For a function that works in a scope of its own:
 *
 *     TD_SCOPE;
 *     return td_scope_return(td_add(td_mul(a, b), c));
 */
TD_API td_tensor *td_scope_return(td_tensor *tensor);

/* ---- What it is ------------------------------------------------------------------------------
 *
 * None of these fails for a tensor and a dimension that it has. */

/** The first element. NULL for NULL; for a tensor without elements it may be NULL too. */
TD_API void *td_tensor_data(const td_tensor *tensor);

/** The dtype of its elements; (td_dtype)-1 for NULL. */
TD_API td_dtype td_tensor_dtype(const td_tensor *tensor);

/** The number of dimensions; -1 for NULL. */
TD_API int td_tensor_ndim(const td_tensor *tensor);

/** The size and the stride of a dimension; -1 for NULL, or where there is no such dimension. */
TD_API int64_t td_tensor_size(const td_tensor *tensor, int dim);
TD_API int64_t td_tensor_stride(const td_tensor *tensor, int dim);

/** All sizes, td_tensor_ndim() of them, which belong to the tensor; NULL for NULL. */
TD_API const int64_t *td_tensor_shape(const td_tensor *tensor);

/** The number of elements, and the bytes that they would take one after another; 0 for NULL. */
TD_API int64_t td_tensor_numel(const td_tensor *tensor);
TD_API size_t td_tensor_nbytes(const td_tensor *tensor);

/** Where its memory is: "cpu", "cpu:1" …; NULL for NULL. */
TD_API const char *td_tensor_device(const td_tensor *tensor);

/** True where the elements stand one after another in the order of their indices, the last one
 *  running fastest. */
TD_API bool td_tensor_is_contiguous(const td_tensor *tensor);

/* ---- Threads of a computation ----------------------------------------------------------------
 *
 * How many threads of the processor one operation on large tensors may use, the calling one included:
 * what OMP_NUM_THREADS says, and without it as many as the process has processors. It counts for all
 * threads of the program. Threads are started by the first operation that is worth it, sleep when there
 * is nothing to do, and take no signals. Results do not depend on their number. */

/** Errors: TD_ERR_INVALID for less than 1. */
TD_API td_status td_set_num_threads(int number);
TD_API int td_get_num_threads(void);

/* ---- Text ------------------------------------------------------------------------------------ */

/**
 * The elements as PyTorch prints them: 4 digits, or a scientific notation where the numbers ask for it,
 * nested brackets, lines of 80 characters, and of more than 1,000 elements only the first and last
 * three of each dimension. Behind them the device where it is not "cpu", a dtype that the elements
 * do not show, in the names of td_dtype_name(), and requires_grad.
 *
 *     tensor([[1.0000, 2.5000],
 *             [   nan,   -inf]], dtype=f64)
 *
 * For td_bytes_free(). Empty for NULL, and without memory.
 */
TD_API td_bytes td_tensor_text(const td_tensor *tensor);

/** Writes this text and the end of a line. Errors: TD_ERR_INVALID for NULL, TD_ERR_SYSTEM where the stream fails, and TD_ERR_NOMEM. */
TD_API td_status td_tensor_print(const td_tensor *tensor, FILE *stream);

#ifdef __cplusplus
}

/* A list is a temporary object here, since C++ has no temporary arrays. */
template <typename type, int number> struct td_list {
    static constexpr int count = number;
    type elements[number + 1];
    const type *data() const
    {
        return elements;
    }
};

template <typename type, typename... arguments>
td_list<type, (int)sizeof...(arguments)> td_list_of(arguments... elements)
{
    return {{static_cast<type>(elements)..., type()}};
}

#define TD_LIST(type, ...)                                                                         \
    td_list_of<type>(__VA_ARGS__).data(), decltype(td_list_of<type>(__VA_ARGS__))::count
#endif

#endif
