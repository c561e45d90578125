/* Tensors: arrays of up to TD_MAX_DIMS dimensions.
 *
 *     td_tensor *x = td_zeros(TD_SHAPE(2, 3), TD_F32, NULL);
 *     float *data = td_tensor_data(x);
 *     td_tensor_release(x);
 *
 * A tensor is a dtype, a shape, strides and an offset in a storage, the memory itself. Strides are
 * counted in elements: element (i, j) is at offset + i * stride(0) + j * stride(1). Several tensors
 * may share a storage: a view costs no copy, and a write through one is seen by all.
 *
 * Ownership. Tensors and storages are reference-counted. A tensor that a function returns belongs
 * to the thread's innermost TD_SCOPE, which releases it at its end; without one it belongs to the
 * caller, which calls td_tensor_release(). Functions never take over a reference of their arguments.
 *
 * Errors. A function that returns a tensor returns NULL on failure; td_last_error() says why, and
 * td_last_status() is the status. A NULL input gives a NULL result, and the last error stays that
 * of the call that failed first, so that an expression of several calls needs one check at its end.
 * If this thread has had no failure, or the program has read it by one of these two functions, the
 * NULL itself is TD_ERR_INVALID.
 *
 * A tensor of no dimensions has one element; one with a size of 0 has none, and is valid
 * everywhere. A negative dimension counts from the end: -1 is the last.
 *
 * Operators and views are in ops.h, gradients in autograd.h.
 *
 * Threads. Any number of threads may use a tensor; a write of its elements must not be concurrent
 * with other accesses. */
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

/** Options that are 0 have PyTorch's defaults, in all option structures. This is a real 0 for a
 *  number whose default is another one: {.weight_decay = TD_ZERO}. (It is a negative 0, which
 *  computes as 0.) For integers whose default is not 0, a negative number does that. */
#define TD_ZERO (-0.0)

/* ---- Lists -----------------------------------------------------------------------------------
 *
 * A list is always two arguments: a pointer and its length. These macros write both. The list lives
 * until the end of the statement; it may be empty.
 *
 *     td_zeros(TD_SHAPE(2, 3), TD_F32, NULL)                 sizes        const int64_t *, int
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

/* ---- Creation --------------------------------------------------------------------------------
 *
 * `shape` has `ndim` sizes, and may be NULL if that is 0. `device` is where the tensor is made; NULL: the thread's
 * current device, which is the host unless td_set_device() says otherwise. Host memory of more than a few KiB comes
 * from td_alloc(), so that the other ranks of the host can map it. */

/** A contiguous, uninitialised tensor. */
TD_API td_tensor *td_empty(const int64_t *shape, int ndim, td_dtype dtype, td_device *device);

/** A contiguous tensor of zeros. */
TD_API td_tensor *td_zeros(const int64_t *shape, int ndim, td_dtype dtype, td_device *device);

/** A contiguous tensor with `value` in each element: rounded for a floating-point dtype, truncated
 * for an integer (out of range is an error), x != 0 for bool, the real part for complex. */
TD_API td_tensor *td_full(const int64_t *shape, int ndim, double value, td_dtype dtype,
                          td_device *device);

/** A contiguous tensor with a copy of the elements of a C array, in the order of their indices:
 *
 *     td_from_array((float[]){1, 2, 3, 4, 5, 6}, TD_SHAPE(2, 3), TD_F32, NULL)
 *
 *  The array has as many elements as the shape, each of the C type of the dtype. */
TD_API td_tensor *td_from_array(const void *array, const int64_t *shape, int ndim, td_dtype dtype,
                                td_device *device);

/** Frees memory of td_from_blob(). Called once, by the thread that releases it last. */
typedef void (*td_blob_free_fn)(void *data, void *arg);

/**
 * A tensor over the caller's memory, which is memory of `device`, without a copy. `strides` has `ndim` entries, none negative;
 * NULL: contiguous. The memory must stay until the last tensor over it is released; then
 * free_fn(data, arg) is called, unless it is NULL. It is not called if this fails. On an accelerator the host first waits
 * until all streams of the device have run what was enqueued; without a free_fn the program does that, by
 * td_device_synchronize(), before it frees or reuses the memory.
 */
TD_API td_tensor *td_from_blob(void *data, const int64_t *shape, int ndim, const int64_t *strides,
                               td_dtype dtype, td_device *device, td_blob_free_fn free_fn,
                               void *arg);

/** Adds a reference, which is the caller's in any scope; drops one. NULL is fine. */
TD_API td_tensor *td_tensor_retain(td_tensor *tensor);
TD_API void td_tensor_release(td_tensor *tensor);

/* ---- Memory for copies while the host goes on ---------------------------------------------------- */

/** A copy of a tensor of the host in host memory that `device` can copy from while the host goes on: for
 *  td_tensor_to_async(). The tensor itself if it is pinned. Memory that is given back is kept for the next tensor. */
TD_API td_tensor *td_tensor_pin(td_tensor *tensor, td_device *device);
TD_API bool td_tensor_is_pinned(const td_tensor *tensor);

/** A stream uses the tensor by calls that the library does not see: its memory is not reused before the stream has run
 *  what is enqueued now. The library's own operators do this by themselves. */
TD_API void td_tensor_record_stream(td_tensor *tensor, td_stream *stream);

/* ---- Scopes -----------------------------------------------------------------------------------
 *
 *     for (int i = 0; i < 10; i++) {
 *         TD_SCOPE;
 *         td_tensor *loss = td_mse_loss(td_matmul(x, w), y);
 *         printf("%g\n", td_item(loss));
 *     }                                       both results are released here, in each turn
 *
 * TD_SCOPE is a declaration; the scope ends with its block, however that is left: at its end, by
 * `break`, `continue`, `return` or `goto`, or by an exception in C++. Scopes belong to a thread and
 * may be nested. */

/** State of TD_SCOPE; its members are private. */
typedef struct td_scope {
    size_t depth;
} td_scope;

/** What TD_SCOPE calls at its beginning and at its end. A second end is fine. */
TD_API td_scope td_scope_begin(void);
TD_API void td_scope_end(td_scope *scope);

#define TD_SCOPE TD_SCOPE_NAMED(TD_UNIQUE(td_scope_))
#define TD_SCOPE_NAMED(name)                                                                       \
    td_scope name __attribute__((cleanup(td_scope_end), unused)) = td_scope_begin()

/** Moves a tensor from the innermost scope to the one around it, or to the caller if there is
 *  none. For a function that works in a scope of its own:
 *
 *     TD_SCOPE;
 *     return td_scope_return(td_add(td_mul(a, b), c));
 */
TD_API td_tensor *td_scope_return(td_tensor *tensor);

/* ---- Properties ------------------------------------------------------------------------------
 *
 * None of these fails for a valid tensor and dimension. */

/** The first element; on an accelerator its address there, which the host must not access. NULL for NULL; for a tensor
 *  without elements it may be NULL too. The memory may be lent to a
 *  reader, such as another process, which sees what is written through this pointer; every function of the library
 *  that writes to such a tensor first moves it, and the pointer, to a copy. */
TD_API void *td_tensor_data(const td_tensor *tensor);

/** The dtype of its elements; (td_dtype)-1 for NULL. */
TD_API td_dtype td_tensor_dtype(const td_tensor *tensor);

/** The number of dimensions; -1 for NULL. */
TD_API int td_tensor_ndim(const td_tensor *tensor);

/** The size and the stride of a dimension; -1 for NULL, or if there is no such dimension. */
TD_API int64_t td_tensor_size(const td_tensor *tensor, int dim);
TD_API int64_t td_tensor_stride(const td_tensor *tensor, int dim);

/** All sizes, td_tensor_ndim() of them, which belong to the tensor; NULL for NULL. */
TD_API const int64_t *td_tensor_shape(const td_tensor *tensor);

/** The number of elements, and their size in bytes; 0 for NULL. */
TD_API int64_t td_tensor_numel(const td_tensor *tensor);
TD_API size_t td_tensor_nbytes(const td_tensor *tensor);

/** Its device; NULL for NULL. */
TD_API td_device *td_tensor_device(const td_tensor *tensor);

/** Whether it is on a meta device: it has no memory (td_device_meta()). */
TD_API bool td_tensor_is_meta(const td_tensor *tensor);

/** Whether it is contiguous in row-major order. */
TD_API bool td_tensor_is_contiguous(const td_tensor *tensor);

/* ---- Threads of a computation ----------------------------------------------------------------
 *
 * The number of threads that one operator on large tensors may use, the calling one included:
 * OMP_NUM_THREADS, or else the number of processors of the process. It is one setting for the
 * process. The first operator that is large enough starts the threads; they block all signals.
 * Results do not depend on their number. */

/** Errors: TD_ERR_INVALID for less than 1. */
TD_API td_status td_set_num_threads(int number);
TD_API int td_get_num_threads(void);

/* ---- Shards ---------------------------------------------------------------------------------- */

/** The whole of which a tensor is a shard: some consecutive elements, in row-major order, that this rank has of a tensor
 *  which is distributed over ranks. */
typedef struct td_shard {
    int ndim;
    int64_t shape[TD_MAX_DIMS]; /* of the whole */
    int64_t offset;             /* of the shard's first element in the whole */
} td_shard;

/** Marks a tensor, which has one dimension, as a shard; NULL: it is whole. An optimizer marks its state like its parameters;
 *  clones and results of operators are not marked. TD_ERR_INVALID if the elements do not fit the whole. */
TD_API td_status td_tensor_set_shard(td_tensor *tensor, const td_shard *shard);

/** The whole of which it is a shard, until the mark or the tensor goes; NULL if it is whole. */
TD_API const td_shard *td_tensor_shard(const td_tensor *tensor);

/* ---- Text ------------------------------------------------------------------------------------ */

/**
 * The elements as PyTorch prints them: 4 digits, or scientific notation if needed, nested brackets,
 * lines of 80 characters, and of more than 1,000 elements only the first and last three of each
 * dimension. After them the device if it is not "cpu", the td_dtype_name() if the elements do not
 * show it, and requires_grad.
 *
 *     tensor([[1.0000, 2.5000],
 *             [   nan,   -inf]], dtype=f64)
 *
 * Empty for NULL, and without memory.
 */
TD_API td_bytes td_tensor_text(const td_tensor *tensor);

/** Writes this text and a newline. Errors: TD_ERR_INVALID for NULL, TD_ERR_SYSTEM if the stream
 * fails, TD_ERR_NOMEM. */
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
