/* What a tensor is made of: a counted storage, and a layout over it. */
#ifndef TD_TENSOR_TENSOR_H
#define TD_TENSOR_TENSOR_H

#include <tandem/tensor.h>

#include <stdatomic.h>

/* ---- Storage (storage.c) --------------------------------------------------------------------- */

/** From how many bytes on memory is of td_alloc(). Below, what another rank would save by mapping
 * it is less than what an allocation costs here. */
#define TD__STORAGE_SHARED_FROM 4096

struct td__storage {
    atomic_int owners;
    void *data;
    size_t bytes;
    td_blob_free_fn free_fn; /* how `data` goes back; NULL: not at all */
    void *arg;
};

/** Memory for `bytes` bytes, aligned to 64, with one owner. NULL (with the last error set) without
 *  memory. */
struct td__storage *td__storage_create(size_t bytes);

/** A storage over `data`, as td_from_blob() has it. */
struct td__storage *td__storage_of(void *data, size_t bytes, td_blob_free_fn free_fn, void *arg);

void td__storage_retain(struct td__storage *storage);
void td__storage_release(struct td__storage *storage);

/* ---- Layout (layout.c) -----------------------------------------------------------------------
 *
 * Numbers of elements and bytes of a layout that was made here fit an int64_t, also that of the
 * bytes from its first element to the end of its last one. */

struct td__layout {
    td_dtype dtype;
    int ndim;
    int64_t numel;
    int64_t shape[TD_MAX_DIMS];
    int64_t strides[TD_MAX_DIMS]; /* in elements, none negative */
};

/** Checks the arguments of `call`, such as "td_empty", and fills in a layout. NULL for `strides`:
 *  contiguous ones. */
td_status td__layout_init(struct td__layout *layout, const char *call, const int64_t *shape,
                          int ndim, const int64_t *strides, td_dtype dtype);

/** "[2, 3]", into a buffer of the thread's own; two calls may stand in one sentence. */
const char *td__shape_text(const int64_t *shape, int ndim);

/** Gives it the strides of a contiguous tensor. */
void td__layout_set_contiguous(struct td__layout *layout);

bool td__layout_is_contiguous(const struct td__layout *layout);

/** The bytes from the first element to the end of the last one in memory; 0 without elements. */
size_t td__layout_extent(const struct td__layout *layout);

/** True where some elements certainly share memory: a stride of 0 over more than one index. */
bool td__layout_repeats(const struct td__layout *layout);

/** Copies all elements from `src` to `dst`: the same shape and dtype, memory that does not overlap.
 */
void td__layout_copy(const struct td__layout *dst_layout, void *dst,
                     const struct td__layout *src_layout, const void *src);

/* ---- Tensor (tensor.c) ----------------------------------------------------------------------- */

struct td_tensor {
    atomic_int owners;
    struct td__storage *storage;
    int64_t offset; /* of the first element in the storage, in elements */
    struct td__layout layout;
};

/** A tensor over `storage`, of which it becomes one more owner. NULL (with the last error set)
 * without memory. */
td_tensor *td__tensor_over(struct td__storage *storage, int64_t offset,
                           const struct td__layout *layout);

#endif
