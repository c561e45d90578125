/* Initial values that are recorded, and computed later: what a storage on a meta device has instead of memory.
 *
 *     td_linear() on "meta"     ->  uniform(weight, state of the generator), uniform(bias, …)       a list of steps each
 *     td_module_materialize()   ->  the steps of each storage, one after another, on its target
 *
 * A step that draws has the state that the generator had, and the generator skips what it would have drawn. So storages
 * can be filled in any order, or not at all, with the bits that they would have had, and with generators of any kind. */
#ifndef TD_TENSOR_DEFERRED_H
#define TD_TENSOR_DEFERRED_H

#include "base/buffer.h"
#include "tensor/random_internal.h"
#include "tensor/tensor_internal.h"

enum td__deferred_kind {
    TD__DEFERRED_FILL,         /* a */
    TD__DEFERRED_UNIFORM,      /* a to b */
    TD__DEFERRED_NORMAL,       /* mean a, standard deviation b */
    TD__DEFERRED_BERNOULLI,    /* probability a */
    TD__DEFERRED_INTEGERS,     /* from, range */
    TD__DEFERRED_VALUES,       /* values */
    TD__DEFERRED_COPY,         /* a view of another storage's values, converted */
    TD__DEFERRED_TRUNC_NORMAL, /* of uniform numbers: trunc */
    TD__DEFERRED_SCALAR,       /* x op a, reversed */
    TD__DEFERRED_CLAMP,        /* a to b */
    TD__DEFERRED_UNARY,        /* op */
    TD__DEFERRED_LOST,         /* moved from a device with memory */
    TD__DEFERRED_KINDS,
};

/* The state of a generator before a draw. */
struct td__draws {
    atomic_int owners;
    bool counts;
    struct td__mt19937 engine;
    bool has_normal;
    double normal;
    uint64_t seed, offset;
};

/* td_init_trunc_normal() after its uniform numbers. */
struct td__trunc_normal {
    double scale, mean, low, high;
};

struct td__deferred_step {
    enum td__deferred_kind kind;
    int64_t offset; /* of the tensor that it changes, in its storage */
    struct td__layout layout;
    double a, b;
    int64_t from;
    uint64_t range;
    int op;
    bool reversed;
    struct td__trunc_normal trunc;
    struct td__draws *draws;   /* NULL: it draws nothing */
    td_tensor *values;         /* on the host, contiguous; or NULL */
    struct td__deferred *copy; /* of TD__DEFERRED_COPY; or NULL */
    int64_t copy_offset;
    struct td__layout copy_layout;
};

struct td__deferred {
    td_device *device; /* the target */
    size_t bytes;
    struct td__deferred_step *steps;
    int count, capacity;
};

/* ---- Records (deferred.c) ------------------------------------------------------------------------ */

/** Of a storage of `bytes` bytes, without steps. */
struct td__deferred *td__deferred_create(td_device *target, size_t bytes);
/** The same steps. */
struct td__deferred *td__deferred_copy(const struct td__deferred *deferred);
void td__deferred_destroy(struct td__deferred *deferred);

/** What a storage has recorded; NULL for one with memory, and for one of no bytes. */
struct td__deferred *td__deferred_of(const struct td__storage *storage);

/** Records a step for the tensor, which is on a meta device; takes what the step refers to, also on failure. */
td_status td__deferred_add(td_tensor *tensor, struct td__deferred_step *step);
/** Records a copy from a tensor of any device; values of one with memory are kept on the host. */
td_status td__deferred_add_copy(const td_tensor *to, const td_tensor *from);
td_status td__deferred_add_trunc_normal(td_tensor *tensor, const struct td__trunc_normal *normal);
/** That the values of the tensor are not known. */
td_status td__deferred_add_lost(td_tensor *tensor);

/* ---- Values (deferred_values.c) ------------------------------------------------------------------- */

/** A storage on the target; uninitialised where the steps write nothing. NULL: the last error. */
struct td__storage *td__deferred_make(const struct td__deferred *deferred);
/** A tensor on the target that has the values of `tensor`, which is on a meta device. One reference. */
td_tensor *td__deferred_tensor(const td_tensor *tensor);
/** Gives the storage of a tensor on a meta device memory on its target: with its values, or uninitialised. */
td_status td__deferred_end(const td_tensor *tensor, bool values);

/** Uniform numbers become those of td_init_trunc_normal(), in place. */
td_status td__trunc_normal_from_uniform(td_tensor *tensor, const struct td__trunc_normal *normal);

/* ---- For other processes (deferred_bytes.c) --------------------------------------------------------- */

void td__deferred_put(struct td__buffer *buffer, const struct td__deferred *deferred);
/** Its steps, for the storage of `bytes` bytes on `target`. NULL: it is malformed. */
struct td__deferred *td__deferred_get(struct td__reader *reader, td_device *target, size_t bytes);

/* ---- Skipping (random_fill.c) -------------------------------------------------------------------------- */

/** Draws as the kernel of a step would, without the numbers. */
void td__skip_draws(const struct td__deferred_step *step, td_generator *generator);

#endif
