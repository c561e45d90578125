/* A tensor: a reference-counted storage, and a layout over it. */
#ifndef TD_TENSOR_TENSOR_INTERNAL_H
#define TD_TENSOR_TENSOR_INTERNAL_H

#include "device/device_internal.h"

#include <tandem/tensor.h>

#include <stdatomic.h>

/* ---- Storage (storage.c) --------------------------------------------------------------------- */

/** From this size on memory is of td_alloc(). Below, an allocation costs more than another rank saves by
 *  mapping it. */
#define TD__STORAGE_SHARED_FROM 4096

/* Memory that is lent (storage.c). */
struct td__lease;

/* Elements that must not be written: a write fails with what refuse() says. `offset` is that of the tensor that was to be
 * written; -1: the storage was to be moved. */
struct td__write_lock {
    td_status (*refuse)(const struct td__write_lock *lock, int64_t offset);
};

struct td__storage {
    atomic_int owners;
    atomic_uint version; /* the number of td__tensor_bump_version() calls */
    atomic_uint history; /* how many of those changes autograd has recorded */
    td_device *device;
    void *data;
    _Atomic(struct td__lease *) lease; /* NULL: `data` is not lent */
    size_t bytes;
    td_blob_free_fn free_fn; /* frees `data`; or NULL */
    void *arg;
    atomic_int foreign; /* how many other libraries share `data` (DLPack): it does not move */
    const struct td__write_lock *locked; /* NULL: the elements may be written */
};

/** Allocates `bytes` bytes on `device`, which is open, aligned to 64, with one reference; `call` is for errors, and for
 *  the lists of holders of memory. NULL (with the last error set) without memory. */
struct td__storage *td__storage_create(td_device *device, const char *call, size_t bytes);

/** The same in host memory that `device` copies from and to while the host goes on; the storage is the host's. */
struct td__storage *td__storage_create_pinned(td_device *device, size_t bytes);

/** A storage over `data` of a device, as td_from_blob() has it. */
struct td__storage *td__storage_of(td_device *device, void *data, size_t bytes,
                                   td_blob_free_fn free_fn, void *arg);

/** `offset` bytes into a storage, for td__copy_between(). */
struct td__place td__storage_place(const struct td__storage *storage, int64_t offset);

void td__storage_retain(struct td__storage *storage);
void td__storage_release(struct td__storage *storage);

/* Leases. Memory can be lent by reference to a reader that does not copy it, such as another process.
 * While it is lent its elements do not change: td__prepare_write() moves the storage, with all tensors
 * over it, to a copy, and the former memory stays with its leases until the last one is returned, also
 * after the end of the storage. Writes through td_tensor_data() are not noticed.
 *
 * The calls may be made by any thread at once. A lease that is taken while the elements are being
 * written is the caller's mistake, as any read at that time would be. */

/** Lends the memory of a storage: td__lease_data() does not change until td__lease_return(). The same
 *  memory may be lent many times, and has one lease then. TD_ERR_INVALID for memory of the program's
 *  that the library does not free (td_from_blob()), which could go away, and for memory that another library shares
 *  (td__storage_share()), from which the storage could not move: lend a copy of it. */
td_status td__storage_lend(struct td__storage *storage, struct td__lease **lease);

/** Takes a lease once more. */
void td__lease_retain(struct td__lease *lease);

/** Returns a lease once; once for each td__storage_lend(), in any order. */
void td__lease_return(struct td__lease *lease);

/** The memory that is lent; NULL for a storage of no bytes. */
const void *td__lease_data(const struct td__lease *lease);

/** A storage over memory of `device` that is only to be read, since another process or library lends it:
 *  free_fn(data, arg) returns it, after the last release, or before the first write, which moves the storage to a
 *  copy. */
struct td__storage *td__storage_borrow(td_device *device, void *data, size_t bytes,
                                       td_blob_free_fn free_fn, void *arg);

/** Gives another library a reference to the storage and its memory, which does not move from now on; if it is lent or
 *  borrowed, the storage first moves to a copy. td__storage_end_share() drops both. */
td_status td__storage_share(struct td__storage *storage);
void td__storage_end_share(struct td__storage *storage);

/** Whether memory of the host is the library's, or was handed to it, so that td__storage_lend() works. */
static inline bool td__storage_is_lendable(const struct td__storage *storage)
{
    return storage->free_fn && atomic_load_explicit(&storage->foreign, memory_order_relaxed) == 0;
}

static inline bool td__storage_is_lent(const struct td__storage *storage)
{
    return atomic_load_explicit(&storage->lease, memory_order_acquire) != NULL;
}

/** The `arg` of a storage of td__storage_borrow() with this free_fn; NULL if it is none, or has moved. */
void *td__storage_borrowed_arg(const struct td__storage *storage, td_blob_free_fn free_fn);

/** Whether it is of td__storage_borrow(), and has not moved. */
bool td__storage_is_borrowed(const struct td__storage *storage);

/** Frees the memory of a storage, or gives it other memory of the same device, under the tensors over it: the two
 *  storages swap their memory. Neither is lent or shared. */
void td__storage_swap_memory(struct td__storage *storage, struct td__storage *other);

/** Moves a storage that is lent; TD_ERR_NOMEM if that is not possible, TD_ERR_STATE if it is locked. */
td_status td__storage_unshare(struct td__storage *storage);

/** The same for memory of the host, which copy(arg, to, from, bytes) copies; it must not lend or release tensors. */
typedef void td__copy_fn(void *arg, void *to, const void *from, size_t bytes);
td_status td__storage_unshare_by(struct td__storage *storage, td__copy_fn *copy, void *arg);

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

/** "[2, 3]", in a thread-local buffer; the results of two calls can be used together. */
const char *td__shape_text(const int64_t *shape, int ndim);

/** The index of element `number`, "[1, 2]"; as td__shape_text(). */
const char *td__index_text(const struct td__layout *layout, int64_t number);

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

struct td_node;       /* autograd/graph.h */
struct td__view_base; /* autograd/view_base.h */
struct td__shard;     /* below */

struct td_tensor {
    atomic_int owners;
    struct td__storage *storage;
    int64_t offset; /* of the first element in the storage, in elements */
    struct td__layout layout;

    /* Used by autograd: the node that computed this tensor, the number of this result, and the storage's
     * history that it includes. NULL if the tensor does not require grad. Call td__refresh_node() before
     * reading the node. */
    struct td_node *node;
    int output_nr;
    atomic_uint history;
    _Atomic(struct td__view_base *) base; /* shared with its views; NULL: has none */
    struct td_node *idle;    /* of a leaf that does not require grad at present: keeps its grad */
    struct td__shard *shard; /* NULL: the tensor is whole */
};

/* ---- Shards (shard.c) ------------------------------------------------------------------------- */

/** The ranks among which tensors are divided. Every element of a whole is in the shard of exactly one rank. */
struct td__sharding {
    int rank, size;
    /** `bytes` bytes of each rank, in the order of the ranks, get to `all`. Collective. */
    td_status (*all_gather)(const struct td__sharding *sharding, const void *mine, size_t bytes,
                            void *all);
};

/** Shards begin and end at a multiple of this many elements of the whole, or at its end, so that what is computed from
 *  blocks of a tensor does not depend on how it is divided. */
#define TD__SHARD_BLOCK 1024

struct td__shard {
    td_shard info;
    const struct td__sharding *sharding; /* its owner clears it at its end; NULL: unknown */
    const char *
        name; /* of a parameter that is whole in passes only: used elsewhere, it is an error; or NULL */
};

/** Marks a tensor as td_tensor_set_shard() does, with the ranks that have the other shards. */
td_status td__tensor_set_shard(td_tensor *tensor, const td_shard *shard,
                               const struct td__sharding *sharding);

/** Marks `to` like `from`, of which it has the shape; the ranks with the other shards are not known. */
td_status td__tensor_copy_shard(td_tensor *to, const td_tensor *from);

/** Whether `tensor`, of a state, has the elements of `target`: the whole or the same part of it. */
bool td__tensor_fits(const td_tensor *tensor, const td_tensor *target);

/** The elements of `tensor`, which fits, that `target` has: the caller's. NULL (with the last error set) on failure. */
td_tensor *td__tensor_part_for(td_tensor *tensor, const td_tensor *target);

/** Called when a tensor with autograd state is destroyed; set by autograd. */
extern void (*td__tensor_on_destroy)(td_tensor *tensor);

/** A tensor over `storage`, which gets one more reference. NULL (with the last error set) without memory. */
td_tensor *td__tensor_over(struct td__storage *storage, int64_t offset,
                           const struct td__layout *layout);

/** Called after an in-place change of the elements: tensors that were saved for backward before are then
 *  detected as changed. */
static inline void td__tensor_bump_version(td_tensor *tensor)
{
    atomic_fetch_add_explicit(&tensor->storage->version, 1, memory_order_relaxed);
}

static inline bool td__same_shape(const td_tensor *a, const td_tensor *b)
{
    if (a->layout.ndim != b->layout.ndim)
        return false;
    for (int d = 0; d < a->layout.ndim; d++)
        if (a->layout.shape[d] != b->layout.shape[d])
            return false;
    return true;
}

/** Whether the caller's reference is the only one to the tensor and to its memory, which the library
 *  owns: it may then be changed without anyone else noticing. */
static inline bool td__is_unshared(const td_tensor *tensor)
{
    return atomic_load(&tensor->owners) == 1 && atomic_load(&tensor->storage->owners) == 1 &&
           td__storage_is_lendable(tensor->storage) && !td__storage_is_lent(tensor->storage);
}

/** Before the elements of an existing tensor are written, and before td_tensor_data() is read for it:
 *  if its memory is lent, the storage moves to a copy. td__tensor_bump_version() afterwards. NULL does
 *  nothing. */
static inline td_status td__prepare_write(const td_tensor *tensor)
{
    if (tensor && tensor->storage->locked)
        return tensor->storage->locked->refuse(tensor->storage->locked, tensor->offset);
    return tensor && td__storage_is_lent(tensor->storage) ? td__storage_unshare(tensor->storage)
                                                          : TD_OK;
}

/** "[2, 3]", as td__shape_text(). */
static inline const char *td__shape_of(const td_tensor *tensor)
{
    return td__shape_text(tensor->layout.shape, tensor->layout.ndim);
}

/** Whether the host can read and write the elements itself. */
static inline bool td__on_host(const td_tensor *tensor)
{
    return tensor->storage->device->is_host;
}

/** Its first element, for td__copy_between(). */
static inline struct td__place td__place_of(const td_tensor *tensor)
{
    return td__storage_place(tensor->storage,
                             tensor->offset * (int64_t)td_dtype_size(tensor->layout.dtype));
}

/** Copies all elements of one shape and dtype between two tensors, of any devices and strides, that do not overlap. Where
 *  the host's memory takes part, it is complete on return; with `async` see td__copy_between(). */
td_status td__transfer(const char *call, const td_tensor *to, const td_tensor *from, bool async);

/** Uninitialised, contiguous, in host memory that is pinned for an open device. */
td_tensor *td__empty_pinned(td_device *device, const struct td__layout *layout);

/** A contiguous copy in host memory, or the tensor itself if it is that; one reference. Waits for the device. */
td_tensor *td__to_host(const char *call, td_tensor *tensor);

static inline const td_kernels *td__kernels_of(const td_tensor *tensor)
{
    return tensor->storage->device->kernels;
}

/* Raw functions: as the public ones without the second underscore, but without autograd and scopes: the
 * caller always gets one reference. A NULL tensor gives NULL. `call` is the name for error texts. */

td_tensor *td__empty(const char *call, const int64_t *shape, int ndim, td_dtype dtype,
                     td_device *device);
/** Uninitialised, contiguous, on the same device; td__zeros_like: zeros. */
td_tensor *td__empty_like(const td_tensor *tensor);
td_tensor *td__empty_like_as(const td_tensor *tensor, td_dtype dtype);
td_tensor *td__zeros_like(const td_tensor *tensor);
td_tensor *td__clone(td_tensor *tensor);
td_tensor *td__contiguous(td_tensor *tensor);
td_status td__tensor_copy(td_tensor *dst, td_tensor *src);
/** `async`: see td__copy_between(). */
td_status td__tensor_copy_as(td_tensor *dst, td_tensor *src, bool async);
/** Another tensor over the same elements, without gradient. */
td_tensor *td__alias(td_tensor *tensor);

/** The number of a dimension that may be negative, or -1 and the last error. */
int td__find_dim(const td_tensor *tensor, const char *call, int dim);
/** The same where a tensor of no dimensions counts as one of one. */
int td__wrap_dim(const td_tensor *tensor, const char *call, int dim);

/* Views (views.c). */
td_tensor *td__transpose(td_tensor *tensor, int a, int b);
td_tensor *td__permute(td_tensor *tensor, const int *dims, int ndim);
td_tensor *td__narrow(td_tensor *tensor, int dim, int64_t start, int64_t length);
td_tensor *td__select_index(td_tensor *tensor, int dim, int64_t index);
td_tensor *td__slice(td_tensor *tensor, int dim, int64_t start, int64_t end, int64_t step);
/** *viewed, where not NULL: whether it is a view rather than a copy. */
td_tensor *td__reshape(td_tensor *tensor, const int64_t *shape, int ndim, bool *viewed);
/** Dimensions of size 1 repeated, and new ones in front, by strides of 0. */
td_tensor *td__expand(const char *call, td_tensor *tensor, const int64_t *shape, int ndim);
td_tensor *td__unsqueeze(td_tensor *tensor, int dim);
td_tensor *td__squeeze(td_tensor *tensor, int dim);

/* ---- Scopes (scope.c) ------------------------------------------------------------------------ */

/** Gives a result to the thread's innermost scope; without a scope the caller owns it. NULL stays NULL; without
 * memory the tensor is released, and NULL returned. */
td_tensor *td__adopt(td_tensor *tensor);

/** The same for any object, which `release` releases; and td_scope_return() for an object with a reference more, which
 *  goes to the outer scope, or to the caller. */
typedef void (*td__release_fn)(void *object);
void *td__scope_adopt(void *object, td__release_fn release);
void *td__scope_return(void *object, td__release_fn release);

#endif
