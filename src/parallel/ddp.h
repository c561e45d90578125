/* The insides of a DistributedDataParallel module; ddp.c has the picture. */
#ifndef TD_PARALLEL_DDP_H
#define TD_PARALLEL_DDP_H

#include "parallel/buckets.h"

#include <stdatomic.h>

struct td__ddp_parameter {
    struct td__ddp *ddp;
    int number;
    td_tensor *tensor; /* retained */
    char *name;
    uint64_t hook;
    bool unused;       /* in this pass, on this rank */
    td_tensor *before; /* its gradient before the pass, where it is unused */
};

struct td__ddp {
    td_group *group;
    td_ddp_options options;
    char device[24]; /* where inputs are moved; "": nowhere */
    struct td__ddp_parameter *parameters;
    int count;
    td_tensor **buffers; /* retained */
    int buffer_count;

    struct td__buckets buckets;
    size_t bucket_bytes;
    bool sync;          /* passes are synchronised: td_ddp_set_sync() */
    bool expecting;     /* a synchronised forward has run, and its backward pass has not ended */
    atomic_bool ending; /* the end of the pass has been asked for, by whichever worker came first */
    bool rebuild; /* the first synchronised pass is over: buckets are made anew before the next */
    bool buffers_are_old; /* a training forward has changed them since they were broadcast */
    int32_t *used;        /* for find_unused_parameters: which parameters any rank has used */
    bool first_static_pass_done;
    bool *static_unused; /* static_graph: what the first pass did not use */

    int source;                /* whose buffers and order of gradients count: a rank of the group */
    struct td__ddp_join *join; /* NULL outside of td_ddp_join_begin() and td_ddp_join_end() */
};

/** The insides of a module that td_ddp() made; NULL and the last error for another. */
struct td__ddp *td__ddp_of(const td_module *module, const char *call);

/** What comes before a synchronised forward: broadcasts the buffers, and where it records, makes the
 *  buckets anew if that is due, and begins a pass. Collective. */
td_status td__ddp_prepare(struct td__ddp *ddp, bool records);
/** The parameters and buffers of the rank `source` become everybody's. Collective. */
td_status td__ddp_synchronise(struct td__ddp *ddp);

/** Uneven inputs (ddp_join.c): the ranks tell each other, before each forward, what comes next. */
td_status td__ddp_join_turn(struct td__ddp *ddp, bool records);

/* Unused parameters (ddp_unused.c). */

/** After forward: walks the record from the outputs, and says that those parameters are ready that
 *  are not behind them. */
td_status td__ddp_mark_unused(struct td__ddp *ddp, const td_tensor_list *outputs);
/** At the end of a pass, before waiting: the ranks agree on what was used. */
td_status td__ddp_agree_on_used(struct td__ddp *ddp);
/** Behind the reduction: what was used nowhere gets back the gradient that it had. */
td_status td__ddp_restore_unused(struct td__ddp *ddp);

/** Fails with the names of the parameters that were not ready. */
td_status td__ddp_fail_missing(const struct td__ddp *ddp);

/* Making buckets anew (ddp_rebuild.c). */

/** Collective. */
td_status td__ddp_rebuild(struct td__ddp *ddp);
/** After a synchronised pass, also one that was only shadowed: whether it is due before the next. */
void td__ddp_plan_rebuild(struct td__ddp *ddp);

#endif
