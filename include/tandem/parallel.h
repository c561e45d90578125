/* Training on several processes and devices at once.
 *
 *     td_module *model = td_ddp(net, NULL);               the same weights everywhere
 *     …
 *         td_backward(td_nll_loss(td_forward(model, x), y));     gradients are averaged on the way
 *         td_optimizer_step(sgd);                         the same step everywhere
 *
 * Data-parallel training: each process has the whole model and its part of the data. Gradients are
 * collected in buckets, and each bucket is averaged over all ranks while the backward pass computes
 * the next one.
 *
 * Threads. A wrapped model, a reducer, an averager and the state of a hook are used by one thread at a time, and
 * on all ranks in the same order. Hooks run on the threads of the backward pass. */
#ifndef TANDEM_PARALLEL_H
#define TANDEM_PARALLEL_H

#include <tandem/dist.h>
#include <tandem/optim.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Buckets and communication hooks ------------------------------------------------------------- */

/** Gradients of one dtype, contiguous in memory that the other ranks of the host can map. */
typedef struct td_bucket td_bucket;

/** Its number; buckets are reduced in this order. */
TD_API int td_bucket_index(const td_bucket *bucket);
/** All its gradients as one tensor of one dimension. A hook writes its result there. */
TD_API td_tensor *td_bucket_buffer(td_bucket *bucket);
/** Whether it is the last bucket of the pass. */
TD_API bool td_bucket_is_last(const td_bucket *bucket);
TD_API td_group *td_bucket_group(const td_bucket *bucket);
/** The gradients in it, each a view of the buffer with the shape of its parameter. They belong to
 *  the bucket. */
TD_API int td_bucket_gradient_count(const td_bucket *bucket);
TD_API td_tensor *td_bucket_gradient(td_bucket *bucket, int index);
/** Data of a hook, kept between start and finish and between passes; NULL at first. When the
 *  bucket is rebuilt or freed, free_fn(data) is called unless it is NULL. */
TD_API void td_bucket_set_data(td_bucket *bucket, void *data, void (*free_fn)(void *data));
TD_API void *td_bucket_data(const td_bucket *bucket);
/** For hooks: adds sent bytes to the statistics. */
TD_API void td_bucket_count_sent(td_bucket *bucket, size_t bytes);

/**
 * A communication hook replaces the average of a full bucket. It does its own division.
 *
 * start: the bucket is full; starts asynchronous calls that overlap with the backward pass. Called
 * in the order of the buckets on every rank, on the thread that computed the last gradient. finish:
 * the backward pass is over; waits, and leaves the result in the buffer. Called in the same order.
 * Either may be NULL.
 */
typedef struct td_comm_hook {
    const char *name;
    td_status (*start)(td_bucket *bucket, void *arg);
    td_status (*finish)(td_bucket *bucket, void *arg);
    void *arg;
    void *reserved[4];
} td_comm_hook;

/** Averages in the dtype of the gradients, as without a hook. */
TD_API td_comm_hook td_hook_all_reduce(void);
/** Averages in half precision: half of the bytes. */
TD_API td_comm_hook td_hook_fp16(void);
TD_API td_comm_hook td_hook_bf16(void);

/* PowerSGD: gradients that are matrices [n, m] are sent as two low-rank factors, [n, rank] and [m,
 * rank]. The error is added to the next gradient. Vectors, and matrices that would not become
 * smaller, are not compressed. */
typedef struct td_powersgd td_powersgd;

typedef struct td_powersgd_options {
    int rank;                    /* 0: 1 */
    int64_t start_step;          /* passes without compression at first; 0: 1000, below 0: none */
    double min_compression_rate; /* compress only if the ratio exceeds this; 0: 2 */
    bool no_error_feedback;      /* do not add the error to the next gradient */
    bool no_warm_start;          /* begin each pass at random, not with the last Q */
    uint64_t seed;               /* of the random numbers; the same on all ranks */
    void *reserved[4];
} td_powersgd_options;

/** The state of PowerSGD for one model; every rank passes the same options. f32 and f64 are
 *  compressed. NULL for invalid options, and without memory. */
TD_API td_powersgd *td_powersgd_create(const td_powersgd_options *options);
/** The hook, for one model or reducer, which must be destroyed before the state. */
TD_API td_comm_hook td_powersgd_hook(td_powersgd *powersgd);
TD_API void td_powersgd_destroy(td_powersgd *powersgd);

/* Post-local SGD: gradients are averaged over the whole group at first, later in a subgroup only,
 * while a td_periodic_averager averages the parameters of all ranks. */
typedef struct td_post_local td_post_local;

typedef struct td_post_local_options {
    td_group *subgroup;       /* for the passes after the first ones; NULL: the ranks of one host */
    bool no_local_all_reduce; /* no averaging after the first passes */
    int64_t start_step;       /* passes that are averaged over the whole group */
    void *reserved[4];
} td_post_local_options;

/** The state for one model; every rank passes the same start_step. The subgroups of hosts are
 *  created when they are first needed, and stay until the world is destroyed. NULL without
 *  memory. */
TD_API td_post_local *td_post_local_create(const td_post_local_options *options);
/** The hook, for one model or reducer, which must end before the state does. */
TD_API td_comm_hook td_post_local_hook(td_post_local *post_local);
TD_API void td_post_local_destroy(td_post_local *post_local);

typedef struct td_periodic_averager td_periodic_averager;

typedef struct td_periodic_averager_options {
    td_group *group;      /* NULL: the world */
    int64_t period;       /* at least 1 */
    int64_t warmup_steps; /* steps without an average at first */
    void *reserved[4];
} td_periodic_averager_options;

/** Averages the parameters that the module has now over the ranks of the group every `period`
 *  steps. NULL for options that make no sense, and without memory. */
TD_API td_periodic_averager *
td_periodic_averager_create(td_module *module, const td_periodic_averager_options *options);
/** To be called after each step of the optimizer, on every rank: averages after step warmup_steps
 *  (counted from 0), and every `period` steps after it. Collective in these steps. */
TD_API td_status td_periodic_averager_step(td_periodic_averager *averager);
TD_API void td_periodic_averager_destroy(td_periodic_averager *averager);

/* ---- A reducer for gradients in plain memory--------------------------------------------------------
 *
 *     td_reducer *reducer = td_reducer_create(buffers, count, NULL);
 *     for each step:
 *         … compute the gradients of the last layer …;  td_reducer_ready(reducer, count - 1);
 *         … and so on down to the first …;              td_reducer_ready(reducer, 0);
 *         td_reducer_wait(reducer);                     now they are averages
 */

typedef struct td_reducer td_reducer;

typedef struct td_reducer_buffer {
    void *data; /* the gradient; NULL: the reducer allocates it, see td_reducer_data() */
    size_t count;
    td_dtype dtype;
    void *reserved[4];
} td_reducer_buffer;

typedef struct td_reducer_options {
    td_group *group;           /* NULL: the world */
    size_t bucket_bytes;       /* 0: 25 MiB */
    size_t first_bucket_bytes; /* 0: 1 MiB */
    td_comm_hook hook;         /* all zero: the average */
    int slices;                /* of a batch, see td_reducer_wait(); 0: none. Not with a hook */
    void *reserved[4];
} td_reducer_options;

/** A reducer for these buffers, in the order of the layers; the last are expected to be ready
 *  first. Every rank passes the same counts and dtypes; a difference is TD_ERR_MISMATCH.
 *  Collective. NULL on failure. */
TD_API td_reducer *td_reducer_create(const td_reducer_buffer *buffers, int count,
                                     const td_reducer_options *options);

/** The memory of gradient `index`: the caller's, or the reducer's, which saves two copies. */
TD_API void *td_reducer_data(td_reducer *reducer, int index);

/** Marks gradient `index` of this step as complete. It must not be accessed until
 * td_reducer_wait(). */
TD_API td_status td_reducer_ready(td_reducer *reducer, int index);

/** Waits until all gradients are averaged. TD_ERR_STATE names those that are not ready.
 *
 *  With `slices` it ends one slice: all gradients are marked, and it is called, for each of this rank's (td_slice_range()),
 *  in their order. After the last one the gradients are the averages over the slices of all ranks, with the same bits for
 *  any number of ranks (see td_slices_begin()); before, they have any elements. */
TD_API td_status td_reducer_wait(td_reducer *reducer);

/** Frees it. NULL is fine. */
TD_API void td_reducer_destroy(td_reducer *reducer);

/* ---- DistributedDataParallel ----------------------------------------------------------------------- */

typedef struct td_ddp_options {
    td_group *group;             /* NULL: the world */
    double bucket_cap_mb;        /* 0: 25 */
    bool find_unused_parameters; /* parameters may be unused in a loss */
    bool static_graph;           /* the same parameters are used in every pass */
    bool no_broadcast_buffers;   /* do not broadcast buffers before forward */
    const char *const *ignore;   /* names of parameters and buffers to ignore */
    int ignore_count;
    td_comm_hook hook; /* all zero: the average */
    td_device *const *
        device_ids; /* at most one: inputs of forward are moved there; NULL: they stay where they are */
    int device_count; /* length of device_ids */
    td_device
        *output_device; /* outputs of forward are moved there; NULL: they stay where they are */
    int slices;         /* of a batch, each with passes of its own: td_slices_begin(); 0: none */
    void *reserved[4];
} td_ddp_options;

/**
 * Wraps `module` so that its gradients are averaged over the ranks of the group. The result owns
 * the module, its child "module".
 *
 * Collective. Every rank passes a model with the same parameters: a difference is TD_ERR_MISMATCH
 * and names both ranks and the parameter. Rank 0 broadcasts its parameters and buffers.
 *
 * After td_backward() every rank has the same gradients. They are views of the buckets: td_clone()
 * a value that is needed beyond the next pass. An unused parameter is an error that names it,
 * unless find_unused_parameters is set: then a parameter that no rank has used keeps its gradient,
 * and one that other ranks have used gets the average, in which this rank counts as 0.
 *
 * In a context of distributed autograd (dist_autograd.h), td_dist_backward() averages the gradients in the context of each
 * rank, and td_tensor_grad() stays as it was. The forward runs inside the context, and one context at a time uses the
 * module: else TD_ERR_STATE. A pass that fails on one rank, or whose context ends before it, fails on all ranks (with
 * TD_ERR_ABORTED, which names the rank), and the next pass works.
 *
 * Move and convert a module before wrapping it: td_module_to() replaces its parameters, and forward
 * is then TD_ERR_STATE.
 *
 * NULL on failure; `module` is then destroyed, too.
 */
TD_API td_module *td_ddp(td_module *module, const td_ddp_options *options);

/** Without sync, passes accumulate gradients locally (no_sync() in PyTorch); the next pass whose
 *  forward runs with sync averages the sums. Returns what it was. */
TD_API bool td_ddp_set_sync(td_module *ddp, bool sync);

/** Turns synchronisation off to the end of the block; a declaration, like TD_SCOPE. */
#define TD_NO_SYNC(ddp) TD_NO_SYNC_NAMED(TD_UNIQUE(td_no_sync_), ddp)
#define TD_NO_SYNC_NAMED(name, ddp)                                                                \
    td_no_sync name __attribute__((cleanup(td_no_sync_end), unused)) = td_no_sync_begin(ddp)

typedef struct td_no_sync {
    td_module *ddp;
    bool before;
    bool open;
} td_no_sync;
/** What TD_NO_SYNC calls at its beginning and at its end. A second end is fine. */
TD_API td_no_sync td_no_sync_begin(td_module *ddp);
TD_API void td_no_sync_end(td_no_sync *no_sync);

typedef struct td_ddp_join_options {
    bool divide_by_active; /* average over the ranks that still have input; otherwise divide the sum
                             by the size of the group */
    bool throw_on_early_termination; /* fail on all ranks when one has run out of input */
    void *reserved[4];
} td_ddp_join_options;

/**
 * Lets ranks have different numbers of batches:
 *
 *     td_ddp_join_begin(model, NULL);
 *     while (td_loader_next(loader, &batch)) { … forward, backward, step … }
 *     td_ddp_join_end(model);
 *
 * In td_ddp_join_end(), a rank shadows the collectives of the others, with gradients of 0, until
 * all have called it. Then a rank that had input to the end broadcasts its parameters and buffers
 * (the latter not with no_broadcast_buffers); the states of optimizers are not synchronised. In
 * between, all ranks with input run the same kind of forward: in grad mode or not, with sync or
 * not; one with both is followed by its backward pass. Other collectives of a model (those of
 * td_sync_batch_norm()) are not shadowed. Each rank passes the same options; a difference is
 * TD_ERR_MISMATCH.
 *
 * Every forward in between costs one all-gather of 4 bytes a rank. divide_by_active scales after
 * the hook, which should average over the group, as those of this header do.
 *
 * Errors of begin: TD_ERR_STATE if it was called before. With throw_on_early_termination the
 * forward of ranks with input returns NULL, and td_ddp_join_end() is TD_ERR_STATE on all ranks and
 * names the rank. td_ddp_join_end() leaves the mode in any case.
 */
TD_API td_status td_ddp_join_begin(td_module *ddp, const td_ddp_join_options *options);
TD_API td_status td_ddp_join_end(td_module *ddp);

/** Sets the communication hook; before the first forward only. */
TD_API td_status td_ddp_set_hook(td_module *ddp, td_comm_hook hook);

typedef struct td_ddp_stats {
    int64_t passes;           /* synchronised backward passes */
    int64_t communication_ns; /* from the start of each reduction to its end, summed up */
    int64_t exposed_ns;       /* of these, the time that the training thread waited at the end of
                                 passes */
    size_t bytes;             /* of gradients, as they were sent */
    int buckets;
    bool rebuilt;
} td_ddp_stats;

/** Statistics of the passes so far. */
TD_API td_status td_ddp_get_stats(td_module *ddp, td_ddp_stats *stats);

/* ---- The same bits for any number of ranks ------------------------------------------------------------
 *
 *     td_module *model = td_ddp(net, &(td_ddp_options){.slices = 8});
 *     for (int64_t step = 0; …; step++) {
 *         td_slices slices = td_slices_begin(model, step);
 *         while (td_slices_next(&slices)) {                     8 times on one rank, 3, 3 and 2 times on three
 *             td_loader_next(loader, &b);                       the samples of slices.slice
 *             td_backward(td_nll_loss(td_forward(model, b.input), b.target));
 *         }
 *         if (td_slices_status(&slices)) …
 *         td_optimizer_step(sgd);
 *     }
 *
 * The batch of a step is cut into logical slices, always as many, and each rank computes some of them. Gradients are summed
 * along one tree over the slices, not over ranks, and divided by the number of slices. So the weights after each step have
 * the same bits on 1, 2, 3 or more ranks, over every transport and backend, on processors of one kind (or with TANDEM_SIMD
 * set). As many slices as ranks, a power of two, cost nothing; otherwise a rank adds up its slices, and needs memory for up
 * to log2(slices) copies of the gradients.
 *
 * td_fsdp() has the same option, and the same bits (<tandem/fsdp.h>). There the slices of a rank are `stride` apart, 0, 3 and 6
 * of 8 on rank 0 of three, and the memory is that of log2(slices) shards of the gradients. */

/** The slices of this rank with td_ddp() and td_reducer: *first … *first + *count - 1 of `slices`, a power of two, at least the number of ranks. Group
 *  NULL is the world. */
TD_API td_status td_slice_range(int slices, td_group *group, int *first, int *count);

/* A step of this rank over its slices. */
typedef struct td_slices {
    int slice;        /* the one that is computed now */
    int first, count; /* those of this rank: first, first + stride, … */
    int stride;       /* from one to the next: 1, and with td_fsdp() the number of ranks */
    int total;        /* of all ranks */
    int64_t step;
    td_module *module;
    td_status status;
    void *reserved[4];
} td_slices;

/**
 * Begins a step of a module of td_ddp() or td_fsdp() with `slices`; all ranks give the same `step`, which need not be the next one.
 * Gradients of the parameters are replaced, not added to. td_slices_next() begins the next slice; false after the last one,
 * or on failure. For each slice there is one forward and one backward pass; the gradients are complete after the last.
 *
 * Random numbers of the default generators are drawn by slice, from a seed that depends on the last seed of rank 0's before
 * td_ddp() or td_fsdp(), the step and the slice; after the last slice the generators go on as if the step had drawn nothing. Buffers of
 * the module (statistics of batch norm) are those of the first slice. What computes with other ranks in a forward pass
 * (td_sync_batch_norm()) does not work with slices.
 *
 * Errors, by td_slices_status() and td_last_error(): TD_ERR_INVALID for another module; TD_ERR_STATE for a slice without a
 * backward pass, passes without sync, in td_ddp_join_begin(), or in a context of distributed autograd; TD_ERR_UNSUPPORTED
 * with td_optimizer_in_backward(). A loop that is left early leaves the step undone on this rank only, as every pass of
 * td_ddp() that is. In the last td_slices_next() of a module of td_fsdp() a rank with fewer slices repeats the gathers and
 * reductions of its last pass, since those of other ranks wait for them.
 */
TD_API td_slices td_slices_begin(td_module *module, int64_t step);
TD_API bool td_slices_next(td_slices *slices);
/** TD_OK, or what ended the loop. */
TD_API td_status td_slices_status(const td_slices *slices);

/* ---- An optimizer whose state is divided among the ranks (ZeRO) ---------------------------------------
 *
 *     static td_optimizer *make(td_tensor *const *parameters, int count, void *arg)
 *     {
 *         return td_adamw_of(parameters, count, arg);
 *     }
 *     …
 *     td_adam_options options = {.lr = 1e-3};
 *     td_optimizer *adam = td_zero_optimizer(model, make, &options, NULL);
 */

/** Makes an optimizer of these parameters; NULL on failure. */
typedef td_optimizer *(*td_optimizer_maker)(td_tensor *const *parameters, int count, void *arg);

typedef struct td_zero_options {
    td_group *group; /* NULL: that of td_ddp(), if the model is of it, or else the world */
    void *reserved[4];
} td_zero_options;

/**
 * The optimizer that make() makes, for a model that all ranks of the group have, with its state divided among them: each
 * rank steps a share of the parameters, about 1/size of their bytes, and has the state of this share only. Then the ranks
 * gather the parameters. The results have the same bits as those of the optimizer without it (ZeRO stage 1, as
 * ZeroRedundancyOptimizer of PyTorch).
 *
 * make() gets the shares as parameters of one dimension, one for each of the model, in its order; some have no elements. It
 * may make groups of them and leave some out, the same on every rank. All functions of optim.h work, as do schedules and
 * the gradient scaler: td_optimizer_add_group() takes whole parameters, and td_optimizer_zero_grad() zeroes the gradients
 * of the model. Clip the gradients of the model, too.
 *
 * Collective: all ranks create it, and make the same steps, with gradients that are the same on every rank, as td_ddp()
 * makes them. A parameter with a gradient on one rank and without one on another is TD_ERR_MISMATCH, which names it and both
 * ranks. Where a rank fails before it changes anything, no rank makes the step: TD_ERR_ABORTED on the others names it. A
 * failure later, for instance of a peer, leaves parameters of different steps, and aborts the group.
 *
 * td_optimizer_state() has this rank's shards, and td_optimizer_load_state() takes such shards, or the whole tensors of the
 * state of another optimizer. Parameters are contiguous, and stay where they are in memory (no td_module_to()).
 * Steps cannot be captured in graphs.
 *
 * NULL on failure, on all ranks. The optimizer retains the parameters, not the model; destroy it before its group.
 */
TD_API td_optimizer *td_zero_optimizer(td_module *model, td_optimizer_maker make, void *arg,
                                       const td_zero_options *options);

/** The state as it is without the division, on every rank: a copy, for td_optimizer_load_state() with any number of ranks or
 *  of the plain optimizer. Collective. NULL on failure. */
TD_API td_state *td_zero_whole_state(td_optimizer *optimizer);

/* ---- Steps in the backward pass -----------------------------------------------------------------------
 *
 *     td_optimizer_in_backward(model, sgd);
 *     …
 *         td_backward(td_nll_loss(td_forward(model, x), y));     the whole iteration
 */

/**
 * From now on td_backward() steps each parameter of the optimizer as soon as its gradient is final, while the pass goes
 * on, and frees the gradient: gradients of a few layers at a time are in memory. The results have the same bits as those
 * of td_backward() and td_optimizer_step(). As _apply_optimizer_in_backward() of PyTorch.
 *
 * `module` has all parameters of the optimizer. Parameters of td_ddp(), which may be `module` or inside it, are stepped when
 * their bucket is reduced, and the memory of the bucket is freed; with a communication hook, at the end of the pass, and
 * the memory stays. Passes without sync accumulate, and the next pass with sync steps the sums. A parameter without a
 * gradient, or that no rank has used, is not stepped. Without td_ddp() every backward pass is a step.
 *
 * Learning rates, schedules and the state are as before. td_optimizer_step() and td_optimizer_zero_grad() find no gradients
 * after a pass, and do nothing: a training loop can keep them. What needs all gradients at once is not possible:
 * td_grad_scaler_step() is TD_ERR_STATE, and clipping finds nothing to clip. Accumulated hooks that were added later
 * see no gradient. In contexts of distributed autograd nothing is stepped.
 *
 * A step that fails fails td_backward(), and names the parameter; others may have been stepped. So does a weight that is
 * used in the pass after its step: by td_detach() of it, in two checkpointed segments, or by a second pass through a
 * retained graph.
 *
 * It lasts until the optimizer is destroyed, before or after the module. TD_ERR_INVALID for a parameter that the module
 * does not have; TD_ERR_STATE for a second call, or if another optimizer steps a parameter so; TD_ERR_UNSUPPORTED for an
 * optimizer of td_zero_optimizer().
 */
TD_API td_status td_optimizer_in_backward(td_module *module, td_optimizer *optimizer);

/* ---- Batch norm over all ranks ----------------------------------------------------------------------- */

/**
 * Batch norm whose statistics, in train mode, are those of the batches of all ranks of the group
 * (NULL: the world; without one, this process alone). x [N, C, …], f32 or f64, where N and what
 * follows C may differ by rank, and may be 0. A forward in training, and its backward pass, are
 * collective: all ranks of the group run the same ones in the same order. The gradients of weight
 * and bias are local, for td_ddp() to average. `options` as for td_batch_norm1d_with().
 */
TD_API td_module *td_sync_batch_norm(int64_t features, const td_batch_norm_options *options,
                                     td_group *group);

/** Replaces each batch norm in `module` by a synchronised one with the same parameters, buffers
 *  and names. Takes the module over, and returns it, or its replacement if it is a batch norm
 *  itself; NULL on failure, and `module` is destroyed. */
TD_API td_module *td_convert_sync_batch_norm(td_module *module, td_group *group);

/* ---- DataParallel: several devices of one process ---------------------------------------------------
 *
 *     td_module *model = td_data_parallel(net, NULL);
 *     td_module_to(model, td_device_get("cuda:0"));       before or after
 *     td_tensor *y = td_forward(model, x);                on all accelerators
 *
 * Each forward scatters the batch over the devices, replicates the module, runs all replicas at the
 * same time, each on the worker of its device, and gathers the results. Gradients are accumulated
 * in the module itself, and the buffers of the first replica are copied back.
 *
 * Inputs. The first one that has dimension `dim` determines the size of the batch. Inputs of that
 * size along `dim` are scattered: equal parts, the last one smaller, and fewer parts than devices
 * if the batch is small. All others (tensors of no dimensions, [1, …] that broadcast, a mask of
 * another size) are copied to each device. Inputs may be on any device.
 *
 * Results. A module may return several (td_forward_list()): each is gathered by itself. Tensors of
 * no dimensions, such as a loss, become a vector with one element for each part, unless there is
 * only one device. */

typedef struct td_data_parallel_options {
    td_device *const
        *device_ids;  /* NULL: those of the module's kind ("cuda:0", "cuda:1", …), which is looked
                                     at in each forward; a module without tensors: of the input's */
    int device_count; /* length of device_ids; without these, how many of the kind. 0: all; on the
                                     host one for each processor */
    td_device *output_device; /* NULL: device_ids[0]; without these, that of the module */
    int dim;                  /* of the batch in inputs and outputs */
    void *reserved[4];
} td_data_parallel_options;

/** Wraps `module`, which it owns as its child "module", to run on all of the devices. It may be on
 *  any device, also by a later td_module_to(). NULL on failure; `module` is then destroyed, too. */
TD_API td_module *td_data_parallel(td_module *module, const td_data_parallel_options *options);

/** Replicas of a module, one on each device, in replicas[0 … count - 1]; they are the caller's.
 *  Their parameters are results of the module's, so that gradients reach those; on its own device a
 *  tensor is used as it is. */
TD_API td_status td_replicate(td_module *module, td_device *const *devices, int count,
                              td_module **replicas);

/** Splits `tensor` into equal parts (the last may be smaller, or missing), one on each device;
 *  *parts_count is their number. */
TD_API td_status td_scatter_to_devices(td_tensor *tensor, td_device *const *devices, int count,
                                       int dim, td_tensor **parts, int *parts_count);

/** results[i] = modules[i](inputs[i]) as by td_forward_list(), all at the same time, each on the
 *  worker of the device where its first input is. On failure all results are empty, and the first
 *  error is reported. */
TD_API td_status td_parallel_apply(td_module *const *modules, const td_tensor_list *inputs,
                                   int count, td_tensor_list *results);

/** Concatenates tensors of several devices along `dim` on one device; those of no dimensions
 *  become a vector. */
TD_API td_tensor *td_gather_from_devices(td_tensor *const *tensors, int count, td_device *device,
                                         int dim);

#ifdef __cplusplus
}
#endif

#endif
