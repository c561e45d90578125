/* Training that goes on when ranks die or join, with the same bits whatever happens.
 *
 *     static td_status slice(td_elastic_slice *slice, void *arg)
 *     {
 *         td_tensor *loss = td_nll_loss(td_forward(slice->model, slice->batch.input), slice->batch.target);
 *         slice->loss = td_item(loss);
 *         return td_backward(loss);
 *     }
 *     …
 *     td_elastic *elastic = td_elastic_create(&(td_elastic_options){
 *         .training = {.model = net, .optimizer = sgd}, .dataset = train, .slices = 8, .slice_size = 32});
 *     td_elastic_run(elastic, 1000, slice, NULL);              1000 steps, whoever dies meanwhile
 *     td_elastic_destroy(elastic);
 *
 * The batch of a step is cut into slices, as for td_slices_begin(), and each rank computes some of them. When a rank dies, the
 * others compute its slices and go on: no sample is lost or used twice, and the weights are those of a run in which nobody
 * died, to the bit. Nothing is copied or written for that; a checkpoint is only needed when all ranks die.
 *
 * docs/elastic.md has the protocol and its limits.
 *
 * Threads. A td_elastic is used by one thread at a time; td_elastic_step(), td_elastic_stopped(), td_elastic_check() and
 * td_elastic_get_stats() by any thread. Its events come on the thread that runs it. */
#ifndef TANDEM_ELASTIC_H
#define TANDEM_ELASTIC_H

#include <tandem/checkpoint.h>
#include <tandem/data.h>
#include <tandem/fsdp.h>
#include <tandem/parallel.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_elastic td_elastic;

/* ---- Events ---------------------------------------------------------------------------------------------- */

typedef enum td_elastic_kind {
    TD_ELASTIC_DIED, /* a rank has died or left, or was excluded: `rank`, and `text` says how */
    TD_ELASTIC_RECOVERED, /* the others go on: `ms` since the failure was noticed */
    TD_ELASTIC_JOINED, /* a newcomer has the state of the others, and computes from the next step on: `rank`, `ms` */
    TD_ELASTIC_STRAGGLER, /* `rank` has been slower than the others for long; `text` has the numbers */
    TD_ELASTIC_DIFFERS,   /* `rank` has other bits than the others */
    TD_ELASTIC_COMMITTED, /* a step: `loss` is the mean of its slices */
} td_elastic_kind;

typedef struct td_elastic_event {
    td_elastic_kind kind;
    int64_t step; /* how many steps are committed */
    int ranks;    /* how many there are now */
    int rank;     /* of the world; -1: none */
    double ms, loss;
    const char *text; /* until the function returns */
    void *reserved[4];
} td_elastic_event;

/** Must not make calls on groups. */
typedef void (*td_elastic_event_fn)(const td_elastic_event *event, void *arg);

/* ---- What is trained ------------------------------------------------------------------------------------- */

/** Gradients and state of a program that has no td_module: memory of its own. */
typedef struct td_elastic_memory {
    const td_reducer_buffer
        *gradients; /* their memory is the caller's; as for td_reducer_create() */
    int gradient_count;
    const td_reducer_buffer *state; /* all that an update reads and writes: what newcomers get */
    int state_count;
    void *reserved[4];
} td_elastic_memory;

/** One slice of a step, for a td_elastic_slice_fn. */
typedef struct td_elastic_slice {
    int64_t step, epoch;
    int slice; /* its number in the step; on every rank the same slice is the same computation */
    td_batch batch;   /* its samples; zero without a dataset */
    td_module *model; /* call this one, not the module inside; NULL for plain memory */
    uint64_t seed;    /* of this slice, for random numbers of one's own */
    double loss;      /* set by the function, for statistics and events */
    void *reserved[4];
} td_elastic_slice;

/**
 * Computes one slice: a forward and a backward pass of slice->model, or all gradients of plain memory. What it does must depend
 * on the slice alone, not on the rank: it may be called again for the same slice, on any rank. It draws random numbers from
 * the default generators, which are seeded for the slice, or by `seed`. It runs in a TD_SCOPE.
 *
 * A failure of its own ends the training on this rank, and the others go on. One that another rank has caused (a call of the
 * model on a group) is passed on like any other; td_elastic_run() finds out.
 */
typedef td_status (*td_elastic_slice_fn)(td_elastic_slice *slice, void *arg);

typedef enum td_elastic_policy {
    TD_ELASTIC_REPORT,  /* an event and a line in the log */
    TD_ELASTIC_EXCLUDE, /* and the rank is excluded, where it is known which one it is */
} td_elastic_policy;

typedef struct td_elastic_options {
    /* The model as it is, not in td_ddp(), which td_elastic_create() does; its optimizer and schedule. The schedule makes a
     * step after each step of the optimizer, the scaler is used where there is one. sampler, epoch and step must be 0. */
    td_training training;
    /* Instead of a model; it is copied. Then `update` is required. */
    const td_elastic_memory *memory;
    /* Of a model whose shards the ranks divide among them, as td_fsdp() does, which td_elastic_create() calls; NULL: every rank
     * has the whole model. `group` and `slices` of it must be 0. Where the hosts have uneven numbers of ranks, TD_HYBRID_SHARD is as
     * TD_FULL_SHARD, until they are even again. The training needs an optimizer, made before, of the module. What it points to
     * need not outlive the call. */
    const td_fsdp_options *fsdp;
    /* Instead of the steps of scaler, optimizer and schedule, when the gradients are the averages over all slices: the same
     * deterministic change on every rank, all or nothing. NULL: those steps. */
    td_status (*update)(int64_t step, void *arg);
    void *update_arg;
    double clip_norm; /* td_clip_grad_norm_() before the optimizer's step; 0: none */
    /* As in td_ddp_options. */
    bool find_unused_parameters;
    double bucket_cap_mb;

    /* The ranks at the start; NULL: the world. Only a training of the whole world admits newcomers. */
    td_group *group;
    /* Of a step, a power of two; 0: the smallest one that is at least the number of ranks at the start (in a newcomer that of
     * the others). There are never more ranks than slices. */
    int slices;
    td_dataset *dataset; /* NULL: slice_fn finds its data by the numbers of step and slice */
    int64_t slice_size;  /* samples of a slice; required with a dataset */
    /* The order of samples: 0, 1, 2, …; else at random, by `seed` and epoch, as td_distributed_sampler(). */
    bool no_shuffle;
    bool drop_last; /* drop the last, incomplete batch of an epoch; else samples are repeated */
    int workers;    /* threads that read ahead, as for td_loader_create() */
    uint64_t seed;  /* of that order, and of all random numbers; the same on all ranks */

    /* With fewer ranks it is TD_ERR_PEER; 0: 1. With need_majority, also unless more than half of the ranks before a failure are
     * left. Without it, hosts of which nothing is heard any more must be fewer than those that are left, or as many and not the
     * lowest. */
    int min_ranks;
    bool need_majority;
    /* A directory, for td_training_save_numbered(): it goes on from the newest checkpoint, and writes one when it cannot go on,
     * is stopped, or is done, and after so many steps (0: not). So many are kept (0: 2). NULL: none. */
    const char *checkpoint;
    int64_t checkpoint_every;
    int checkpoint_keep;

    /* Each step compares 256 KiB of the weights of all ranks, and of the reduced gradients, other ones in the next step. After so
     * many steps it compares all weights; 0: never. TANDEM_FLIP has a bit flipped, to see it found: docs/elastic.md. */
    int64_t check_every;
    /* What follows where weights or gradients differ. TD_ELASTIC_REPORT: TD_ERR_MISMATCH on all ranks. */
    td_elastic_policy mismatch;
    int64_t
        heartbeat_ms; /* of a process: one that is silent for so long is excluded; 0: 10 s, below 0: none */
    /* A rank for which the others have waited for so long in a step is excluded. 0: ten times the median of the last steps, and at
     * least 2 s (300 s in the first 8 steps); below 0: none. */
    int64_t step_timeout_ms;
    /* A rank that takes so many times as long for a slice as the median of the ranks, for 20 steps, is reported; 0: 2, below 0:
     * none. And what then follows. */
    double straggler_factor;
    td_elastic_policy straggler;
    /* A file, which all ranks share, with a line for each slice of each committed step: step, slice, the rank that has computed
     * it, epoch, and the indices of its samples. NULL: none. */
    const char *audit;
    td_elastic_event_fn on_event;
    void *event_arg;
    void *reserved[8];
} td_elastic_options;

/* ---- Training ---------------------------------------------------------------------------------------------- */

/**
 * Prepares this rank. Every rank, also a newcomer, passes the same options and an equal model; where the initial weights are
 * not the same, those of the first rank are taken, in td_elastic_run(). It takes the module over (training.model), not
 * the rest, which must outlive it: the optimizer, of this module, is made before. Not collective.
 *
 * NULL on failure: options that make no sense; no process group. The module is then destroyed, too, as by td_ddp().
 */
TD_API td_elastic *td_elastic_create(const td_elastic_options *options);

/**
 * Trains until `steps` steps are committed, counted from the first one ever (or from that of a checkpoint), and returns TD_OK
 * on all ranks that are left; also when it was stopped, or left in order (td_elastic_stopped()). Collective. It may be
 * called again for more steps; in a newcomer, calls for steps that were made before it came return at once.
 *
 * Errors: TD_ERR_PEER: too few ranks are left, or no majority. TD_ERR_STATE: the others have excluded this one, and the text
 * says who and why. TD_ERR_MISMATCH: the ranks have different models or options, or other bits. Otherwise a failure of this rank: of slice_fn,
 * of the update, of memory. After any of them this rank has left the world, as by
 * td_destroy_process_group(), and the others go on without it.
 */
TD_API td_status td_elastic_run(td_elastic *elastic, int64_t steps, td_elastic_slice_fn slice_fn,
                                void *arg);

/** Frees it, with the module. NULL is fine. */
TD_API void td_elastic_destroy(td_elastic *elastic);

/** How many steps are committed. */
TD_API int64_t td_elastic_step(const td_elastic *elastic);
/** How many ranks train now, this one's number among them, and the group of all (for the time until the next failure;
 *  td_elastic_run() destroys it). */
TD_API int td_elastic_world(const td_elastic *elastic);
TD_API int td_elastic_rank(const td_elastic *elastic);
TD_API td_group *td_elastic_group(const td_elastic *elastic);
/** Whether the training has ended before its last step: by a signal (td_stop_on_signals()) on all ranks, or on this one
 *  since its launcher wants it to leave (tdrun drain). The others go on without it then: it makes no more calls with
 *  them, and ends. */
TD_API bool td_elastic_stopped(const td_elastic *elastic);
/** The model that slices are computed with: for evaluation between two runs. NULL for plain memory. */
TD_API td_module *td_elastic_model(const td_elastic *elastic);
/** Compares all weights after the next step, whatever check_every is. To be called on any rank, also in slice_fn. */
TD_API void td_elastic_check(td_elastic *elastic);

typedef struct td_elastic_stats {
    int64_t steps;          /* committed by this process */
    int64_t repeated;       /* begun, and begun again because of a failure */
    int64_t rolled_forward; /* committed after a failure, since another rank had committed them */
    int64_t deaths, recoveries, joined;
    double recovery_ms,
        slowest_recovery_ms; /* the last one, and the slowest: from the failure to the next attempt */
    double step_ms, agreement_ms; /* on average: a step; of it the agreement, with hashes */
    double catch_up_ms;           /* in a newcomer: how long it took to get the state */
    double loss; /* of the last step: the mean of its slices, with the same bits on all ranks */
    void *reserved[4];
} td_elastic_stats;

/** The numbers so far. TD_ERR_INVALID where an argument is NULL. */
TD_API td_status td_elastic_get_stats(const td_elastic *elastic, td_elastic_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
