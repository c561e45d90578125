/* The internals of fully sharded modules.
 *
 *     td__fsdp            what td_fsdp() attaches to the outermost module: its units in the order of their passes
 *     td__fsdp_unit       a module, and its parameters in no inner unit, as flats
 *     td__fsdp_flat       parameters of one dtype and device, one after another, as if in one buffer that is cut into shards:
 *
 *         | weight          |pad| bias |pad| weight        |     the whole, of `numel` elements
 *         cuts[0]        cuts[1]            cuts[2]      cuts[3]
 *
 *     td__fsdp_param      a parameter: its place in the whole, and the part of it in this rank's shard
 *
 * A parameter's tensor has either the memory and layout of its shard, or, in passes of its unit, those of the whole
 * (td__flat_swap_in, td__flat_swap_out). The storage of the whole lives as long as the flat, since graphs hold views of it;
 * its memory comes and goes, or is a mapping of the shards of all ranks of the host (td__fsdp_region). */
#ifndef TD_PARALLEL_FSDP_INTERNAL_H
#define TD_PARALLEL_FSDP_INTERNAL_H

#include "autograd/graph.h"
#include "nn/module.h"
#include "tensor/tensor_internal.h"

#include <tandem/fsdp.h>
#include <tandem/parallel.h>

#include <pthread.h>

/* The ranks of a unit: those that have its shards, and those that have the same shard. */
struct td__fsdp_ranks {
    int owners;
    td_group *group;    /* all of them */
    td_group *shards;   /* NULL: one rank has all */
    td_group *replicas; /* NULL: there are none */
    bool owns_shards, owns_replicas;
    int rank, size; /* in `shards` */
    struct td__sharding sharding;
    int32_t *
        places; /* of each rank of the group, with slices: its number in `shards`, and in `replicas` */
};

/* Memory of the ranks of one host (fsdp_ranks.c): the wholes of several flats. */
struct td__fsdp_region {
    int owners;
    void *all;  /* read-only */
    void *mine; /* the same memory, which may be written */
    size_t bytes;
};

struct td__fsdp_param {
    struct td__fsdp_flat *flat;
    td_tensor *tensor; /* retained */
    char *name;
    struct td__layout whole; /* in the dtype of passes */
    int64_t offset;          /* in the flat */
    int64_t first, count;    /* the part in this rank's shard: elements of the parameter */
    int64_t at;              /* where it begins in the shard */
    struct td__deferred
        *deferred; /* rank 0's initial values, until they are in the shards; or NULL */
    uint64_t observer;
    struct td__in_backward *stepper; /* which steps it when its gradient is reduced; NULL: none */
    int step_index;                  /* there */
    bool ready;                      /* its gradient of this pass is final */
    td_tensor *shard_grad;           /* of the last reduced pass: a view of the flat's */
};

struct td__fsdp_flat {
    struct td__fsdp_unit *unit;
    td_device *device;                /* of passes */
    td_device *home;                  /* of the shard: the same, or the host */
    bool in_file;                     /* so are the gradients and the optimizer state */
    struct td__flat_offload *offload; /* NULL: it is at home on the device */
    td_dtype dtype;                   /* of the shard */
    td_dtype compute;                 /* of passes */
    td_dtype reduce;
    bool requires_grad;
    bool is_deferred; /* on one rank at least a parameter has no memory yet; the same on all */
    bool has_values;  /* deferred parameters get their initial values */
    bool is_remade;   /* the shard is filled by td__fsdp_reshard() */
    bool is_whole;    /* always: one rank has all, and passes use the same dtype */
    struct td__fsdp_param *params;
    int count;
    int64_t numel; /* with padding */
    int64_t *cuts; /* of ranks->size + 1 */
    struct td__storage *shard;
    struct td__fsdp_region *region; /* NULL: not shared */
    size_t region_at;               /* of the shards; in bytes */
    size_t compute_at;              /* of the whole in the dtype of passes */

    struct td__storage *whole; /* without memory unless it is gathered */
    struct td__write_lock lock; /* of the whole, outside of td_fsdp_gather_begin() */
    bool has_memory;
    bool is_in; /* the tensors are whole */
    struct td__storage
        *scope; /* between td_fsdp_gather_begin() and td_fsdp_gather_end(): a whole of its own */
    td_work *gathering;
    td_tensor **gather_parts; /* of the whole, while it is gathered */
    unsigned published; /* the version of the shard that the region has in the dtype of passes */
    bool is_published;

    struct td__storage
        *grads; /* whole, of this pass or of passes that were not reduced; NULL: none */
    struct td__storage *reduce_from; /* grads in another dtype, while they are reduced */
    td_tensor *shard_grads;          /* the result; NULL: none yet */
    td_tensor *reduced;              /* in the dtype of the reduction, where it is another one */
    bool adds;                       /* the result is added to the former gradients */
    td_work *reducing;
    td_tensor **reduce_parts;   /* of the gradients, while they are reduced */
    struct td__flat_sums *sums; /* over slices; NULL: none yet */
    int pending;                /* gradients that are not final */
    bool in_pass;
};

struct td__fsdp_unit {
    struct td__fsdp *all;
    td_module *module;
    char *name; /* "" for the outermost */
    int number;
    struct td__fsdp_ranks *ranks;
    struct td__fsdp_flat *flats;
    int flat_count;
    bool keep; /* gathered from forward to backward */
    bool mixed;
    td_dtype param_dtype;
    bool prefetch;
    int calls; /* forward passes of the module that run */
    bool ran;  /* in this backward pass */
    uint64_t hooks;
};

struct td__fsdp {
    struct td__fsdp_unit **units; /* units[0] is the outermost */
    int count;
    td_module *module;
    td_tensor **buffers; /* retained */
    int buffer_count;
    bool broadcasts, buffers_changed;
    bool sync;
    int stepped_count; /* parameters that are stepped in the backward pass */
    bool shares;       /* at least one flat is in shared memory */
    bool scope, scope_writes;
    int depth;  /* forward passes that run */
    int *order; /* units in the order of the last forward pass */
    int order_count, order_capacity;
    int at;            /* in `order`: the next unit expected */
    uint64_t sequence; /* a hash of the units that ran since the ranks agreed */
    int *ran;          /* their numbers; backward passes as ~number */
    int ran_count, ran_capacity;
    bool unsettled;          /* a pass has failed, and its calls may not be complete */
    int back;                /* in `order`: the unit of the last backward pass */
    bool ending;             /* the end of the backward pass calls */
    size_t limit;            /* bytes of gathered parameters and whole gradients, see set_limit() */
    int64_t trimmed;         /* stats.passes when free pages were last returned */
    size_t exchanged;        /* bytes of gathers and reductions since td__fsdp_exchanged() has dropped pages */
    td_fsdp_options options; /* of the call; what they point to may be gone */
    struct td__fsdp_slices *slices;       /* NULL: none (fsdp_slices.h) */
    struct td__fsdp_flat *reductions[64]; /* that were started, oldest first */
    int reduction_count;
    struct td__offloader *offloader; /* NULL: none yet */
    td_fsdp_stats stats;
};

struct td__fsdp *td__fsdp_of(const td_module *module);
/** Makes other shards for the ranks of a group, whose elements the caller fills in. Of the passes before nothing stays.
 *  Collective. */
td_status td__fsdp_remake(struct td__fsdp *fsdp, td_group *group);
/** Frees it without its units, which another one has adopted. */
void td__fsdp_dissolve(struct td__fsdp *fsdp);

/* ---- Units (fsdp_units.c) ---------------------------------------------------------------------- */

/** Makes the units of a module, without memory; inner ones of former calls are adopted. */
td_status td__fsdp_make_units(struct td__fsdp *fsdp, const td_fsdp_options *options,
                              struct td__fsdp_ranks *ranks);
void td__fsdp_unit_free(struct td__fsdp_unit *unit);

/* ---- Ranks (fsdp_ranks.c) ---------------------------------------------------------------------- */

td_status td__fsdp_ranks_make(const td_fsdp_options *options, struct td__fsdp_ranks **ranks);
void td__fsdp_ranks_release(struct td__fsdp_ranks *ranks);

/** Whether TD_HYBRID_SHARD can divide a model among the ranks of a group: as many are on each host, or shard_size divides
 *  their number. The same on all of them. */
bool td__fsdp_is_even(const td_fsdp_options *options, const td_group *group);

/** TD_OK, or what has broken one of the groups of a module's ranks. */
td_status td__fsdp_group_state(const struct td__fsdp *fsdp);
/** Where the group of all ranks is broken: aborts those of some of them, which may wait for one that does not come any more. */
void td__fsdp_abort(struct td__fsdp *fsdp);
/** Waits until the devices have run what is enqueued. An error where a group has broken meanwhile: what was reduced is worth
 *  nothing then. */
td_status td__fsdp_await(const struct td__fsdp *fsdp);

/** Whether all ranks of a unit can share memory; the same on all of them. Collective. */
td_status td__fsdp_can_share(const struct td__fsdp_ranks *ranks, bool *shares);

/** Memory of `bytes` bytes that all ranks have, zeroed. Collective. */
td_status td__fsdp_region_make(const struct td__fsdp_ranks *ranks, size_t bytes,
                               struct td__fsdp_region **region);
void td__fsdp_region_release(struct td__fsdp_region *region);

/* ---- Flats (fsdp_flat.c) ----------------------------------------------------------------------- */

/** Offsets, cuts and shards of a flat whose parameters are known. */
td_status td__flat_lay_out(struct td__fsdp_flat *flat);
/** Bytes of a region that it needs. */
size_t td__flat_region_bytes(const struct td__fsdp_flat *flat);
/** Allocates the shard, or takes it from the region, or makes a file of the directory, fills it from the parameters, and makes these shards. */
td_status td__flat_begin(struct td__fsdp_flat *flat, struct td__fsdp_region *region, size_t at,
                         const char *directory);
/** Where the shards of `size` ranks begin, and the end. The caller frees it. */
td_status td__flat_cut_for(const struct td__fsdp_flat *flat, int size, int64_t **cuts);
/** Frees its memory and gradients, for other shards in td__flat_begin(). Calls that are under way have failed, or end. */
void td__flat_end(struct td__fsdp_flat *flat);
/** The parameters keep their shards. */
void td__flat_free(struct td__fsdp_flat *flat);

/** Where part `part` of `parts` of `count` elements begins; with part = parts, `count`. */
static inline int64_t td__part_begin(int64_t count, int part, int parts)
{
    enum { MULTIPLE = 16 };
    return part == parts ? count : count / parts * part / MULTIPLE * MULTIPLE;
}

/** A tensor of `count` elements of a storage, from element `first` on. */
td_tensor *td__flat_view(struct td__storage *storage, td_dtype dtype, int64_t first, int64_t count);
/** Copies, with conversion; both may have no elements. */
td_status td__flat_copy(td_tensor *to, td_tensor *from);
void td__flat_swap_in(struct td__fsdp_flat *flat);
td_status td__flat_swap_out(struct td__fsdp_flat *flat);
static inline int64_t td__flat_shard_count(const struct td__fsdp_flat *flat)
{
    return flat->cuts[flat->unit->ranks->rank + 1] - flat->cuts[flat->unit->ranks->rank];
}
static inline size_t td__flat_bytes(const struct td__fsdp_flat *flat)
{
    return (size_t)flat->numel * td_dtype_size(flat->compute);
}

/* ---- Deferred initialisation (fsdp_deferred.c) ----------------------------------------------------- */

/** Whether a parameter of a flat has no memory on any rank; all ranks get rank 0's record of its initial values. Without
 *  one the parameters are broadcast at once. Collective. */
td_status td__flat_share_values(struct td__fsdp_flat *flat, bool has_values);
/** The whole initial values of a parameter of a deferred flat, one reference: rank 0's. *whole is NULL where this rank's
 *  shard needs none. Collective. */
td_status td__fsdp_initial(struct td__fsdp_param *param, td_tensor **whole);

/* ---- Gathers (fsdp_gather.c) --------------------------------------------------------------------- */

/** Starts to gather a unit, if it is not gathered. Collective. */
td_status td__unit_gather(struct td__fsdp_unit *unit);
/** Waits for it, and makes its parameters whole. */
td_status td__unit_enter(struct td__fsdp_unit *unit);
/** All ranks get rank 0's buffers, if they have changed since. Collective. */
td_status td__fsdp_broadcast_buffers(struct td__fsdp *fsdp);
/** The parameters become shards; with `drop` the memory is freed. */
td_status td__unit_leave(struct td__fsdp_unit *unit, bool drop);
/** Where passes of the ranks may use each other's memory: casts, and waits for all. Collective. */
td_status td__fsdp_publish(struct td__fsdp *fsdp);
/** After a gather or a reduction of so many bytes. */
void td__fsdp_exchanged(struct td__fsdp_flat *flat, size_t bytes);
/** Waits for all ranks that share memory. */
td_status td__fsdp_meet(struct td__fsdp *fsdp);
td_status td__flat_leave(struct td__fsdp_flat *flat, bool drop);
/** Views of the shards of all ranks, until td__flat_drop_cut(). */
td_status td__flat_cut(struct td__fsdp_flat *flat, struct td__storage *storage, td_dtype dtype,
                       td_tensor ***parts);
void td__flat_drop_cut(struct td__fsdp_flat *flat, td_tensor ***parts);
/** Bytes that gathering it allocates. */
size_t td__unit_bytes(const struct td__fsdp_unit *unit);
void td__fsdp_count(struct td__fsdp *fsdp, ptrdiff_t bytes);
/** Allocates memory for `storage`, which has none; NOMEM names the unit. */
td_status td__fsdp_allocate(struct td__fsdp_flat *flat, struct td__storage **storage,
                            td_dtype dtype);

/* ---- Passes (fsdp_pass.c, fsdp_reduce.c) ------------------------------------------------------------ */

td_status td__fsdp_forward_pre(td_module *module, td_tensor_list *inputs, void *unit);
td_status td__fsdp_forward(td_module *module, const td_tensor_list *inputs, td_tensor_list *results,
                           void *unit);
td_status td__fsdp_backward_pre(td_module *module, td_tensor_list *grads, void *unit);
td_status td__fsdp_on_accumulated(td_tensor *tensor, const struct td__grad_place *place,
                                  void *param);

/** At the end of a backward pass, and instead of that after a failure; `fsdp` is a struct td__fsdp. */
td_status td__fsdp_end_pass(void *fsdp);
void td__fsdp_drop_pass(void *fsdp);

/** td_slices_begin() and td_slices_next() for a sharded module (fsdp_slices.c). */
td_status td__fsdp_slices_begin(struct td__fsdp *fsdp, td_slices *step);
td_status td__fsdp_slices_next(struct td__fsdp *fsdp, td_slices *step, bool *more);

/** Before the backward pass of a flat: a place for its whole gradients. */
td_status td__flat_begin_grads(struct td__fsdp_flat *flat);
/** Before a forward pass: gradients that count as 0 have no memory while activations have. Not those on the host or in a
 *  file for a device, which stay. */
void td__flat_free_zero_grads(struct td__fsdp_flat *flat);
/** After a pass that failed: its parameters have no gradients, also of passes before. */
void td__flat_drop_grads(struct td__fsdp_flat *flat);
/** All its gradients are final, or missing ones are 0: starts the reduction. */
td_status td__flat_reduce(struct td__fsdp_flat *flat);
/** The gradients of the shard become flat->reduced, or more by it, and are stepped; there are none if `status` is not
 *  TD_OK. Returns that, or what fails. */
td_status td__flat_take_grads(struct td__fsdp_flat *flat, td_status status);
/** A parameter is stepped when its gradient is reduced; NULL: no more. */
void td__fsdp_set_stepper(struct td__fsdp_param *param, struct td__in_backward *stepper, int index);
/** Waits for all reductions but the last `left`. */
td_status td__fsdp_wait_reductions(struct td__fsdp *fsdp, int left);
/** The ranks compare which units have run. Collective. */
td_status td__fsdp_agree(struct td__fsdp *fsdp);
void td__fsdp_note(struct td__fsdp_unit *unit, bool backward);
/** After TD_ERR_MISMATCH: the last error becomes one that names the first unit that one of two ranks did not run. False:
 *  none was found, or a rank did not answer. Called by all ranks. (fsdp_difference.c) */
bool td__fsdp_name_difference(struct td__fsdp *fsdp);
/** The name of its first parameter, or "none". */
static inline const char *td__fsdp_first_name(const struct td__fsdp_unit *unit)
{
    return unit->flat_count ? unit->flats[0].params[0].name : "none";
}
/** Puts the unit before the last error. */
td_status td__fsdp_fail(const struct td__fsdp_unit *unit, const char *what, td_status status);

#endif
