/* Fully sharded data parallelism: each rank keeps a shard of the parameters, gradients and optimizer state.
 *
 *     td_module *model = td_fsdp(net, &(td_fsdp_options){.min_parameters = 100000});
 *     td_optimizer *adam = td_adam(…td_module_parameters(model)…);       of the shards
 *     …
 *         td_backward(td_nll_loss(td_forward(model, x), y));             gathers, and reduces, unit by unit
 *         td_clip_grad_norm(…);                                          the norm of the whole model
 *         td_optimizer_step(adam);                                       each rank its shard
 *
 * A model is divided into units: modules whose parameters are gathered together before their forward and backward pass,
 * and are freed after it. Between the passes of its unit a parameter, which stays the same td_tensor under the same name,
 * is a tensor of one dimension: this rank's shard, which may be empty. td_tensor_shard() tells of which whole.
 *
 * On one host nothing is gathered: the shards of all ranks are one memory, which each of them can read.
 *
 * Threads: as in <tandem/parallel.h>. */
#ifndef TANDEM_FSDP_H
#define TANDEM_FSDP_H

#include <tandem/dist.h>
#include <tandem/nn.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum td_fsdp_strategy {
    TD_FULL_SHARD,    /* parameters are freed after forward, and gathered again for backward */
    TD_SHARD_GRAD_OP, /* parameters stay gathered from forward to the end of backward */
    TD_NO_SHARD,      /* every rank has all of them, as with td_ddp() */
    TD_HYBRID_SHARD,  /* shards inside of a host, replicas between hosts */
} td_fsdp_strategy;

/* Parameters and optimizer state have the bits that td_ddp() on the same ranks gives them, with all of these but
 * TD_HYBRID_SHARD: that averages over the ranks of each replica first and rounds, and then over the replicas, where td_ddp()
 * adds all ranks in one order. The two differ by last bits. */

/** Where shards live with their gradients and optimizer state, the same on all ranks. Units fill the memory of the device
 *  first, in the order of the model, then that of the host, then files. Passes compute on the parameters' device: other
 *  shards are copied there, in the dtype of passes, for each of them, while the unit before computes, and their reduced
 *  gradients come back while backward goes on. With td_optimizer_in_backward() a thread steps them there and then.
 *  Results have the bits that they have without this.
 *
 *  What is counted is an element of a shard, with all that belongs to it, by `element_bytes`. Beside that the device has
 *  what it needs for a pass: gathered units, whole gradients, activations. The host has pinned memory for staging, which
 *  does not depend on the number of units: 3 times the largest shard of a unit in the dtype of passes and 4 times in that
 *  of reductions, each rounded up to a power of 2; and, with td_optimizer_in_backward(), the gradients of one unit. */
typedef struct td_fsdp_offload {
    bool enabled;        /* false: on the device of the parameters */
    size_t device_bytes; /* of an accelerator, for each rank; 0: all shards leave it */
    size_t host_bytes;   /* for each rank; 0: no limit */
    /** Of files for the rest, which have no names, and blocks on the disk before they are used. NULL: it is an error if
     *  there is a rest. */
    const char *directory;
    /** 0: as with Adam, four times the parameter: itself, its gradient, and two numbers of state. With
     *  td_optimizer_in_backward() gradients do not stay, and three times is enough: 12 in f32. A parameter that requires
     *  no gradient counts once. */
    size_t element_bytes;
    void *reserved[4];
} td_fsdp_offload;

typedef struct td_fsdp_options {
    td_group *group; /* NULL: the world */
    td_fsdp_strategy strategy;
    /** Which modules become units, beside `module` itself, which takes the other parameters; any that applies. A module
     *  without a forward of its own is none. */
    int64_t
        min_parameters; /* modules with at least so many in no unit yet, inner ones first; 0: none */
    const char *const *kinds; /* modules of these kinds, as td_module_ops.name has them */
    int kind_count;
    bool (*is_unit)(td_module *module, const char *name,
                    void *arg); /* modules for which it is true */
    void *arg;
    /** Names of modules and parameters that stay whole, and are not averaged; a shared parameter under any of its names. */
    const char *const *ignore;
    int ignore_count;
    /** Units that stay gathered from forward to backward, by name: as TD_SHARD_GRAD_OP does it for all. */
    const char *const *keep;
    int keep_count;
    /** Passes compute with parameters of param_dtype, and gradients are reduced in reduce_dtype: TD_F32, TD_F16 or
     *  TD_BF16. Shards and the optimizer keep the dtype of the model. Floating-point inputs of `module` are converted. */
    bool mixed_precision;
    td_dtype param_dtype, reduce_dtype;
    int shard_size;   /* TD_HYBRID_SHARD: ranks that share one replica; 0: those of a host */
    bool no_prefetch; /* a unit is gathered when it is needed, not while the one before computes */
    bool
        no_shared_memory; /* gather also where the ranks of one host could read each other's shards */
    td_fsdp_offload offload;
    bool no_broadcast_buffers; /* do not broadcast buffers before forward */
    bool
        no_init; /* parameters without memory get zeros, not their initial values: a checkpoint is loaded next */
    /** Of a batch, each with passes of its own, see td_slices_begin() in <tandem/parallel.h>; 0: none. Weights have the bits
     *  that td_ddp() with as many slices gives them, on any number of ranks and with every strategy; with mixed precision,
     *  those that one rank gives them. All passes of a step run the same units in the same order. */
    int slices;
    void *reserved[4];
} td_fsdp_options;

/**
 * Shards `module` over the ranks of the group, in place, and returns it; its modules that were sharded by calls before
 * become its inner units. Collective. Every rank passes a model with the same parameters: a difference is TD_ERR_MISMATCH
 * and names both ranks and the parameter. Rank 0's parameters and buffers are taken. On failure NULL, and the module is
 * destroyed.
 *
 * A model on a meta device (td_device_meta()) gets its memory here, one parameter after another: a rank computes the initial
 * values of the parameters that its shards overlap, and keeps those of its shards. They are the bits of the whole model, of
 * rank 0's seed. Where rank 0's parameters have memory and others' do not, they are broadcast one by one.
 *
 * Every rank runs the same units in the same order: otherwise td_forward() or td_backward() fails, and the error names the
 * unit, a parameter and the rank. A parameter that a pass does not use gets a gradient of 0.
 *
 * A parameter must be used in passes of its unit only: TD_ERR_STATE names it. A whole parameter must not be written:
 * TD_ERR_STATE, except inside of td_fsdp_gather_begin(). A write through td_tensor_data() is not noticed; where the ranks of
 * a host share memory (td_fsdp_stats) it is a SIGSEGV, since gathered parameters are mapped for reading only, and else it is
 * lost. No other rank ever sees it. A parameter that several modules share goes to the innermost unit that contains all of
 * them.
 *
 * td_checkpoint() may be used in units, and around some or all of them. After a forward or backward pass that has failed on
 * all ranks the model can be used on; what that pass has not reduced are no gradients, also of passes before. A rank that dies
 * is named by the calls of the others: destroy the model, td_group_shrink(), and make it again from a sharded checkpoint.
 */
TD_API td_module *td_fsdp(td_module *module, const td_fsdp_options *options);

/** Whether td_fsdp() has sharded the module itself. */
TD_API bool td_is_fsdp(const td_module *module);

/** Backward passes reduce gradients (the default), or add them up on this rank, whole, until one that does. Returns what
 *  was set before; td_no_sync_begin() takes a module of td_fsdp(), too. */
TD_API bool td_fsdp_set_sync(td_module *module, bool sync);

/**
 * Makes the parameters of all units of the module whole, until td_fsdp_gather_end(). Collective. With `write` changes are
 * kept, which all ranks make alike: each takes its shard from its own copy. Without it they are lost. Passes in between
 * are forward passes, without gradients. Gradients are not gathered.
 */
TD_API td_status td_fsdp_gather_begin(td_module *module, bool write);
TD_API td_status td_fsdp_gather_end(td_module *module);

typedef struct td_fsdp_stats {
    int units;
    int64_t passes;         /* synchronised backward passes */
    int64_t parameters;     /* of the whole model, without ignored ones */
    int64_t shard_elements; /* of this rank */
    int64_t
        gathered_bytes; /* that gathers got from other ranks; 0 where the ranks of a host share memory */
    int64_t reduced_bytes; /* that reductions sent to other ranks */
    size_t whole_bytes; /* of gathered parameters and whole gradients that are allocated now … */
    size_t whole_bytes_peak; /* … and at most so far */
    int64_t wait_ns;         /* that passes have waited for gathers and reductions */
    bool shared_memory;      /* the ranks of the host read each other's shards */
    int64_t host_elements; /* of this rank's shards that live on the host, not on the device … */
    int64_t file_elements; /* … and in files */
    int64_t offload_bytes; /* copied between host and device for them */
    int64_t offload_copy_ns; /* that these copies took, on streams of their own … */
    int64_t
        offload_stall_ns; /* … and that the device has waited for them in a pass: what was not hidden */
    int64_t offload_convert_ns; /* that a thread has converted parameters for copies … */
    int64_t offload_step_ns; /* … and that one has added up and stepped gradients on the host … */
    int64_t
        offload_wait_ns; /* … and that the program's thread has waited for the two in passes; a device that computes
                                meanwhile does not wait */
    void *reserved[4];
} td_fsdp_stats;

/** What the units of this rank have done and hold; `module` is one that td_fsdp() returned. */
TD_API td_status td_fsdp_get_stats(td_module *module, td_fsdp_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
