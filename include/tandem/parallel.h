/* Training on several processes and devices at once.
 *
 *     td_module *model = td_ddp(net, NULL);               the same weights everywhere
 *     …
 *         td_backward(td_nll_loss(td_forward(model, x), y));     gradients are averaged on the way
 *         td_optimizer_step(sgd);                         the same step everywhere
 *
 * Data-parallel training: each process has the whole model and its part of the data. Gradients are
 * collected in buckets, and each bucket is averaged over all ranks while the backward pass still
 * computes those of the next one.
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

/* ---- Buckets, and what is done with them --------------------------------------------------------- */

/** Gradients of one dtype, one after another in memory that the other ranks of the host can map. */
typedef struct td_bucket td_bucket;

/** Its number; they are reduced in this order. */
TD_API int td_bucket_index(const td_bucket *bucket);
/** All its gradients as one tensor of one dimension. A hook writes its result there. */
TD_API td_tensor *td_bucket_buffer(td_bucket *bucket);
/** Whether it is the last one of the pass. */
TD_API bool td_bucket_is_last(const td_bucket *bucket);
TD_API td_group *td_bucket_group(const td_bucket *bucket);
/** The gradients in it, each a view of the buffer with the shape of its parameter. They belong to
 *  the bucket. */
TD_API int td_bucket_gradient_count(const td_bucket *bucket);
TD_API td_tensor *td_bucket_gradient(td_bucket *bucket, int index);
/** A place where a hook keeps what it needs between start and finish, and from pass to pass; NULL at
 *  first. When the buckets are made anew, or end, free_fn(data) is called, where it is not NULL. */
TD_API void td_bucket_set_data(td_bucket *bucket, void *data, void (*free_fn)(void *data));
TD_API void *td_bucket_data(const td_bucket *bucket);
/** For a hook that sends: counts bytes for the statistics. */
TD_API void td_bucket_count_sent(td_bucket *bucket, size_t bytes);

/**
 * What is done with a full bucket instead of averaging it. A hook does its own division.
 *
 * start: the bucket is full; begins what can run beside the backward pass (asynchronous calls).
 * Called in the order of the buckets on every rank, on the thread that computed the last gradient.
 * finish: the backward pass is over; waits, and leaves the result in the buffer. Called in the same
 * order. Either may be NULL.
 */
typedef struct td_comm_hook {
    const char *name;
    td_status (*start)(td_bucket *bucket, void *arg);
    td_status (*finish)(td_bucket *bucket, void *arg);
    void *arg;
    void *reserved[4];
} td_comm_hook;

/** Averages in f32 or whatever the gradients are: what is done without a hook. */
TD_API td_comm_hook td_hook_all_reduce(void);
/** Averages in half precision: half of the bytes. */
TD_API td_comm_hook td_hook_fp16(void);
TD_API td_comm_hook td_hook_bf16(void);

/* PowerSGD: gradients that are matrices [n, m] are sent as two thin ones, [n, rank] and [m, rank]. What
 * is lost is added to the next gradient. Vectors, and what would not become smaller, go as they are. */
typedef struct td_powersgd td_powersgd;

typedef struct td_powersgd_options {
    int rank;           /* 0: 1 */
    int64_t start_step; /* so many passes are plain averages first; 0: 1000, below 0: none */
    double min_compression_rate; /* compress what becomes smaller by more than this; 0: 2 */
    bool no_error_feedback;      /* what is lost is lost */
    bool no_warm_start;          /* begin each pass at random, not where the last one ended */
    uint64_t seed;               /* of the random numbers; the same on all ranks */
    void *reserved[4];
} td_powersgd_options;

/** The state of PowerSGD for one model; every rank passes the same options. f32 and f64 are compressed.
 *  NULL for options that make no sense, and without memory. */
TD_API td_powersgd *td_powersgd_create(const td_powersgd_options *options);
/** The hook, for one model or reducer, which must end before the state does. */
TD_API td_comm_hook td_powersgd_hook(td_powersgd *powersgd);
TD_API void td_powersgd_destroy(td_powersgd *powersgd);

/* Post-local SGD: averages over the whole group at first, later inside a subgroup only, while a
 * td_periodic_averager brings the ranks together from time to time. */
typedef struct td_post_local td_post_local;

typedef struct td_post_local_options {
    td_group *subgroup;       /* for the passes after the first ones; NULL: the ranks of one host */
    bool no_local_all_reduce; /* each rank by itself then */
    int64_t start_step;       /* so many passes are averaged over the whole group */
    void *reserved[4];
} td_post_local_options;

/** The state for one model; every rank passes the same start_step. The subgroups of hosts are made when
 *  they are needed first, and stay until the group's world ends. NULL without memory. */
TD_API td_post_local *td_post_local_create(const td_post_local_options *options);
/** The hook, for one model or reducer, which must end before the state does. */
TD_API td_comm_hook td_post_local_hook(td_post_local *post_local);
TD_API void td_post_local_destroy(td_post_local *post_local);

typedef struct td_periodic_averager td_periodic_averager;

typedef struct td_periodic_averager_options {
    td_group *group;      /* NULL: the world */
    int64_t period;       /* at least 1 */
    int64_t warmup_steps; /* so many steps at first without an average */
    void *reserved[4];
} td_periodic_averager_options;

/** Averages the parameters of a module, those that it has now, over the ranks of the group every
 *  `period` steps. NULL for options that make no sense, and without memory. */
TD_API td_periodic_averager *
td_periodic_averager_create(td_module *module, const td_periodic_averager_options *options);
/** To be called behind each step of the optimizer, on every rank: averages behind step warmup_steps
 *  (counted from 0), and every `period` steps after it. Collective then. */
TD_API td_status td_periodic_averager_step(td_periodic_averager *averager);
TD_API void td_periodic_averager_destroy(td_periodic_averager *averager);

/* ---- A reducer for gradients of one's own ---------------------------------------------------------
 *
 *     td_reducer *reducer = td_reducer_create(buffers, count, NULL);
 *     for each step:
 *         … compute the gradients of the last layer …;  td_reducer_ready(reducer, count - 1);
 *         … and so on down to the first …;              td_reducer_ready(reducer, 0);
 *         td_reducer_wait(reducer);                     now they are averages
 */

typedef struct td_reducer td_reducer;

typedef struct td_reducer_buffer {
    void *data; /* the gradient; NULL: memory of the reducer's, see td_reducer_data() */
    size_t count;
    td_dtype dtype;
    void *reserved[4];
} td_reducer_buffer;

typedef struct td_reducer_options {
    td_group *group;           /* NULL: the world */
    size_t bucket_bytes;       /* 0: 25 MiB */
    size_t first_bucket_bytes; /* 0: 1 MiB */
    td_comm_hook hook;         /* all zero: the average */
    void *reserved[4];
} td_reducer_options;

/** A reducer for these buffers, listed in the order of the layers; the last are expected to be ready
 *  first. Every rank passes the same counts and dtypes; a difference is TD_ERR_MISMATCH. Collective.
 *  NULL where it fails. */
TD_API td_reducer *td_reducer_create(const td_reducer_buffer *buffers, int count,
                                     const td_reducer_options *options);

/** Where gradient `index` is to be written: the caller's own memory, or the reducer's, which saves
 *  two copies. */
TD_API void *td_reducer_data(td_reducer *reducer, int index);

/** The gradient `index` of this step is complete. It must not be touched until td_reducer_wait(). */
TD_API td_status td_reducer_ready(td_reducer *reducer, int index);

/** Waits until all gradients are averages. TD_ERR_STATE names those that were not said to be
 *  ready. */
TD_API td_status td_reducer_wait(td_reducer *reducer);

/** Frees it. NULL is fine. */
TD_API void td_reducer_destroy(td_reducer *reducer);

/* ---- DistributedDataParallel ----------------------------------------------------------------------- */

typedef struct td_ddp_options {
    td_group *group;             /* NULL: the world */
    double bucket_cap_mb;        /* 0: 25 */
    bool find_unused_parameters; /* parameters may take no part in a loss */
    bool static_graph;           /* the same parameters take part each time */
    bool no_broadcast_buffers;   /* buffers are each rank's own */
    const char *const *ignore;   /* names of parameters and buffers that are left alone */
    int ignore_count;
    td_comm_hook hook;  /* all zero: the average */
    const char *device; /* inputs of forward are moved there; NULL: they stay where they are */
    void *reserved[4];
} td_ddp_options;

/**
 * `module` as a module whose gradients are averaged over the ranks of the group. It takes the module
 * over (destroying it destroys both), under the name "module".
 *
 * Collective. Every rank passes a model with the same parameters: a difference is TD_ERR_MISMATCH and
 * names both ranks and the parameter. Rank 0's parameters and buffers become everybody's.
 *
 * After td_backward() every rank has the same gradients. They are views into the buckets: keep a
 * td_clone() where a value is needed beyond the next pass. A parameter that took no part in the loss is
 * an error that names it, unless find_unused_parameters is set: then one that was used nowhere keeps
 * its gradient, and one that was used elsewhere gets the average, where this rank counts as 0.
 *
 * A module is moved and converted before: td_module_to() puts other tensors in the place of the
 * parameters that this one knows, and forward is then TD_ERR_STATE.
 *
 * NULL where it fails; `module` is then destroyed too.
 */
TD_API td_module *td_ddp(td_module *module, const td_ddp_options *options);

/** Gradients of passes whose forward runs while this is false are only added up here; the next
 *  synchronised pass averages the sums. Returns what it was. */
TD_API bool td_ddp_set_sync(td_module *ddp, bool sync);

/** Turns synchronisation off from here to the end of the block, a declaration as TD_SCOPE is. */
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
    bool
        divide_by_active; /* gradients are averages over the ranks that still have input; without it
                              they are sums divided by the size of the group, where those that have
                              joined count as 0 */
    bool throw_on_early_termination; /* fail on all ranks as soon as one has run out of input */
    void *reserved[4];
} td_ddp_join_options;

/**
 * Ranks may have different numbers of batches from now on:
 *
 *     td_ddp_join_begin(model, NULL);
 *     while (td_loader_next(loader, &batch)) { … forward, backward, step … }
 *     td_ddp_join_end(model);
 *
 * A rank that has reached td_ddp_join_end() makes the calls of the others there, with gradients of 0,
 * until all have reached it. Then the model of one that had input to the end, parameters and buffers
 * (these not with no_broadcast_buffers), becomes everybody's; the states of optimizers stay each rank's
 * own. In between, every rank that has input runs the same kinds of forward: recorded or not, synchronised or not; one that is recorded and
 * synchronised is followed by its backward pass. Other calls on the group that a model makes (those of
 * td_sync_batch_norm()) are not shadowed. Each rank passes the same options; a difference is
 * TD_ERR_MISMATCH.
 *
 * Every forward in between costs one exchange of 4 bytes a rank. A scale other than that of the average
 * is applied behind a hook, which should average over the group, as those of this page do.
 *
 * Errors of begin: TD_ERR_STATE where it was called before. With throw_on_early_termination the forward
 * of those that have input is NULL, and td_ddp_join_end() is TD_ERR_STATE on all ranks, with a sentence
 * that names the rank. td_ddp_join_end() ends it in any case.
 */
TD_API td_status td_ddp_join_begin(td_module *ddp, const td_ddp_join_options *options);
TD_API td_status td_ddp_join_end(td_module *ddp);

/** Another hook, before the first forward only. */
TD_API td_status td_ddp_set_hook(td_module *ddp, td_comm_hook hook);

typedef struct td_ddp_stats {
    int64_t passes;           /* synchronised backward passes */
    int64_t communication_ns; /* from the start of each reduction to its end, summed up */
    int64_t exposed_ns;       /* of these, what the training thread waited at the end of passes */
    size_t bytes;             /* of gradients, as they were sent */
    int buckets;
    bool rebuilt;
} td_ddp_stats;

/** What the passes so far have cost. */
TD_API td_status td_ddp_get_stats(td_module *ddp, td_ddp_stats *stats);

/* ---- Batch norm over all ranks ----------------------------------------------------------------------- */

/**
 * Batch norm whose statistics, while training, are those of the batches of all ranks of the group
 * together (NULL: the world; without one, this process alone). x [N, C, …], f32 or f64, where N and what
 * follows C may differ by rank, and may be 0. A forward in training, and its backward pass, are
 * collective: all ranks of the group run the same ones in the same order. The gradients of weight and bias
 * are those of this rank's part, for td_ddp() to average. `options` as for td_batch_norm1d_with().
 */
TD_API td_module *td_sync_batch_norm(int64_t features, const td_batch_norm_options *options,
                                     td_group *group);

/** Puts such a module in the place of each batch norm inside `module`, with the same parameters, buffers
 *  and names. Takes the module over, and returns it, or its replacement where it is a batch norm itself;
 *  NULL where that fails, and `module` is destroyed. */
TD_API td_module *td_convert_sync_batch_norm(td_module *module, td_group *group);

/* ---- DataParallel: several devices of one process ---------------------------------------------------
 *
 *     td_module *model = td_data_parallel(net, &(td_data_parallel_options){
 *         .device_ids = (const char *[]){"cpu:0", "cpu:1"}, .device_count = 2});
 *     td_module_to(model, "cpu:0");                       before or after
 *     td_tensor *y = td_forward(model, x);
 *
 * Each forward divides the batch among the devices, copies the module to them, runs all copies at the
 * same time, each on the worker of its device, and puts the results together. Gradients find their way
 * back to the module itself, and what the first copy has made of its buffers does, too.
 *
 * Inputs. The first one that has dimension `dim` says how large the batch is. Inputs of that size along `dim` are divided: equal parts, the last one smaller, and fewer parts
 * than devices where the batch is small. All others (numbers without dimensions, [1, …] that broadcast,
 * a mask of another size) are given whole to each device. Inputs may be on any device.
 *
 * Results. A module may give several (td_forward_list()): each is put together by itself. Those that have
 * no dimension, a loss for instance, become a vector of one for each part, unless there is one device
 * only. */

typedef struct td_data_parallel_options {
    const char *const *device_ids; /* NULL: cpu:0, cpu:1, … */
    int device_count;              /* of device_ids; without these, 0 is one for each processor */
    const char *output_device;     /* NULL: device_ids[0]; without these, that of the module */
    int dim;                       /* along which inputs are divided and outputs put together */
    void *reserved[4];
} td_data_parallel_options;

/** `module` as one that runs on all of the devices; it is taken over, under the name "module". It may be
 *  on any device, and may be moved there later: td_module_to(). NULL where it fails; `module` is then
 *  destroyed too. */
TD_API td_module *td_data_parallel(td_module *module, const td_data_parallel_options *options);

/** Copies of a module, one on each device, in replicas[0 … count - 1]; they are the caller's. Their
 *  parameters are results of the module's own, so that gradients reach those; on the device where a
 *  tensor is already, it is the tensor itself. */
TD_API td_status td_replicate(td_module *module, const char *const *devices, int count,
                              td_module **replicas);

/** `tensor` in as many equal parts as there are devices (the last may be smaller, or missing), one on
 *  each; *parts_count tells how many there are. */
TD_API td_status td_scatter_to_devices(td_tensor *tensor, const char *const *devices, int count,
                                       int dim, td_tensor **parts, int *parts_count);

/** results[i] = modules[i](inputs[i]) as by td_forward_list(), all at the same time, each on the worker of
 *  the device where its first input is. The first failure is reported, and all results are then empty. */
TD_API td_status td_parallel_apply(td_module *const *modules, const td_tensor_list *inputs,
                                   int count, td_tensor_list *results);

/** Tensors of several devices one after another along `dim`, on one device; those without dimensions
 *  as a vector. */
TD_API td_tensor *td_gather_from_devices(td_tensor *const *tensors, int count, const char *device,
                                         int dim);

#ifdef __cplusplus
}
#endif

#endif
