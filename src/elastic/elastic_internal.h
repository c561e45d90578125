/* The internals of elastic training; elastic.c has the protocol. */
#ifndef TD_ELASTIC_ELASTIC_INTERNAL_H
#define TD_ELASTIC_ELASTIC_INTERNAL_H

#include "base/buffer.h"
#include "base/clock.h"
#include "base/slice_range.h"

#include <tandem/elastic.h>

#include <pthread.h>
#include <stdatomic.h>

enum { TD__ELASTIC_MOST_SLICES = 4096, TD__ELASTIC_PARTS = 2 };

/* ---- What is trained: a replica (elastic_module.c, elastic_memory.c), or shards (elastic_sharded.c) ------------- */

/* Memory that other ranks get: a tensor of any device, or plain memory of the host. */
struct td__elastic_replica_piece {
    td_tensor *tensor; /* contiguous; NULL: plain memory */
    void *data;
    size_t bytes;
    bool
        moves; /* a buffer: a pass changes it, and sets it back; so it is copied before the step for others */
};

struct td__elastic_replica_pieces {
    struct td__elastic_replica_piece *pieces;
    int count, room;
};

enum td__elastic_replica_part {
    TD__PIECES_STATE,   /* all that a step reads and its commit writes */
    TD__PIECES_WEIGHTS, /* of these what is the same in every program: parameters, then buffers */
    TD__PIECES_OUTCOME, /* what a commit needs of the step: reduced gradients, then buffers for after it */
};

/* A replica has the state of the training, and at the end of a step what the next state is made of. Between the two nothing
 * of the state is written.
 *
 * Where each rank has a part of one state, no rank can roll forward for another one: the ranks go back to the newest state of
 * which copies are left. Such a kind has `keep`, `kept` and `restore`, and needs no bind, list, put of other parts than
 * TD__PIECES_WEIGHTS, take and filled. */
struct td__elastic_replica {
    const struct td__elastic_replica_ops *ops;
};

/* From where a divided state comes. */
struct td__elastic_source {
    int first; /* the first rank of elastic->all that has a part, or, in the beginning, all of it */
    bool begins;        /* no rank has trained yet */
    int64_t generation; /* the newest of all ranks */
};

struct td__elastic_replica_ops {
    /** Steps are of this group from now on, whose ranks have the same state. No call of the former one is under way. */
    td_status (*bind)(struct td__elastic_replica *replica, td_group *group, int slices);
    /** Computes the slices of this rank by td__elastic_slice(), and reduces. Collective on the bound group. */
    td_status (*compute)(struct td__elastic_replica *replica, td_elastic *elastic);
    /** Waits for the calls of a step that has failed, and forgets it. */
    td_status (*undo)(struct td__elastic_replica *replica);
    /** The step that was computed, or received, becomes part of the state. All or nothing. */
    td_status (*commit)(struct td__elastic_replica *replica, td_elastic *elastic);
    /** Adds the pieces of a kind, in the same order on all ranks. They are the replica's, until the next call but undo(). */
    td_status (*list)(struct td__elastic_replica *replica, enum td__elastic_replica_part kind,
                      struct td__elastic_replica_pieces *list);
    /** Describes the pieces of a kind, so that a rank which has none knows them … */
    td_status (*put)(struct td__elastic_replica *replica, enum td__elastic_replica_part kind,
                     struct td__buffer *text);
    /** … makes them there … */
    td_status (*take)(struct td__elastic_replica *replica, enum td__elastic_replica_part kind,
                      struct td__reader *text);
    /** … and is called when they are filled in. */
    td_status (*filled)(struct td__elastic_replica *replica, enum td__elastic_replica_part kind);
    void (*free)(struct td__elastic_replica *replica);

    /* Of a kind whose ranks have a part of one state each; NULL in others. */

    /** After a commit: starts to copy what this rank has of the state. Collective. */
    td_status (*keep)(struct td__elastic_replica *replica, td_elastic *elastic);
    /** Waits until copies of this rank's part are where they outlive it. */
    td_status (*kept)(struct td__elastic_replica *replica);
    /** Ends the copies, before groups are freed that they use. */
    void (*end_copies)(struct td__elastic_replica *replica);
    /** Divides the newest state that is whole among elastic->all, and copies it. No call is under way. Can be called again when
     *  it has failed. TD_ERR_PEER on a group that works: a part is lost. Collective. */
    td_status (*restore)(struct td__elastic_replica *replica, td_elastic *elastic,
                         const struct td__elastic_source *source, int64_t *committed);
    /** Counts the divisions that this rank has a whole state of; 0: none. */
    int64_t (*generation)(const struct td__elastic_replica *replica);
};

td_status td__pieces_add(struct td__elastic_replica_pieces *list,
                         struct td__elastic_replica_piece piece);
td_status td__pieces_add_tensor(struct td__elastic_replica_pieces *list, td_tensor *tensor);
void td__pieces_free(struct td__elastic_replica_pieces *list);

/** Replicas of a module (which it takes over on success) and of plain memory. */
td_status td__module_replica(td_elastic *elastic, struct td__elastic_replica **replica);
td_status td__memory_replica(td_elastic *elastic, struct td__elastic_replica **replica);
/** Shards, of td_fsdp(), which take the module over, too. */
td_status td__sharded_replica(td_elastic *elastic, struct td__elastic_replica **replica);
/** Describes tensors: names, dtypes, shapes. And makes such a state from that, with elements to be filled in. */
void td__put_state(struct td__buffer *text, const td_state *state);
td_status td__take_state(struct td__reader *text, td_state **state);
/** The steps of scaler, optimizer and schedule, or the program's own update. */
td_status td__elastic_update(td_elastic *elastic, const td_training *parts, td_module *module);
/** What the program trains beside the model and the optimizer. */
td_status td__elastic_load_schedule(const td_training *parts, const td_state *rest);
td_status td__elastic_add_schedule(const td_training *parts, td_state *rest);
/** A number of the options that decide on the division, and on the bits. */
uint64_t td__sharded_plan(const struct td__elastic_replica *replica);
/** The model of shards; NULL: it is of another kind. */
td_module *td__sharded_model(struct td__elastic_replica *replica);
/** The model that slices call; NULL: none. */
td_module *td__elastic_replica_model(struct td__elastic_replica *replica);

/* ---- The training -------------------------------------------------------------------------------------------- */

struct td__samples;
struct td__catch_up;
struct td__elastic_watch;
struct td__audit;

/* A bit that is to be flipped (elastic_inject.c). */
enum td__flip_kind { TD__FLIP_NONE, TD__FLIP_PARAMETER, TD__FLIP_GRADIENT };

struct td__flip {
    enum td__flip_kind kind;
    int rank;          /* of the world */
    int64_t step, bit; /* -1: the one in the middle */
};

/* How one rank has fared lately. */
struct td__pace {
    double ms; /* for a slice */
    int slow;  /* steps in a row in which it was slower than straggler_factor allows */
    bool reported;
};

struct td_elastic {
    td_elastic_options options; /* with copies of the texts */
    struct td__elastic_replica *replica;
    struct td__samples *samples;   /* NULL: no dataset */
    struct td__audit *audit;       /* NULL: none */
    struct td__catch_up *catch_up; /* of this step; NULL: there are no newcomers */
    struct td__elastic_watch *watch;
    td_elastic_slice_fn slice_fn;
    void *slice_arg;
    td_batch batch; /* of the slice that is computed */

    /* Groups of the training's own: all its ranks, and those that compute, which is the same one unless there are newcomers. */
    td_group *all, *active;
    td_group **former; /* that a divided state still refers to */
    int former_count;
    int *ranks; /* of the world, those of `all` */
    bool *active_ranks;
    int size, rank, active_size, active_rank; /* the latter -1 in a newcomer */

    /* Of each rank of `all`: keys of groups of some of the ranks in which it calls, too, in each step as often as the others in
     * theirs; 0: none. */
    uint64_t (*part_keys)[TD__ELASTIC_PARTS];

    int slices;
    atomic_llong committed; /* steps that are in the state of this rank */
    atomic_llong settled;   /* of these, those that are told: no failure can take them back */
    int64_t steps;          /* how many the program asks for */
    bool entered;           /* the ranks of `all` have compared where they stand */
    bool established;       /* this rank has the state of `committed` steps */
    bool bound;             /* the replica's steps are of `active` */
    bool ready;             /* the outcome of the next step is complete here */
    bool resumed;           /* checkpoints were looked for */
    bool took_model;        /* it was destroyed, or is the replica's */
    bool gave_up;           /* this rank has left */
    bool hopeless;          /* a part of the state is lost */
    atomic_bool stopped, check_wanted;
    bool checkpoint_due;
    int64_t saved;              /* the step of the last checkpoint; -1: none */
    bool admits;                /* newcomers: it is the training of the whole world */
    atomic_bool leaves;         /* this rank does, when the step is committed */
    atomic_bool newcomers_wait; /* on the first rank: its watching thread has seen some */
    bool admit_due;             /* they are admitted before the next step; the same on all ranks */
    bool check_due; /* the weights are compared in the next step; the same on all ranks */

    struct td__lost_host *lost_hosts; /* elastic_network.c */
    int lost_host_count;
    int64_t failed_ns;         /* when the failure that is being repaired was noticed; 0: none */
    int64_t step_ns, slice_ns; /* when the step began; how long a slice of this rank took */
    double *losses;            /* of the slices of this rank */
    double loss;               /* the mean of all slices of the step … */
    double committed_loss;     /* … and of the last one that was committed */
    struct td__pace *paces;    /* by rank in `all` */
    struct td__flip flip;
    td_elastic_stats stats;
    int64_t step_total_ns, timed_steps, agreement_total_ns, hash_total_ns, agreements;
    pthread_mutex_t lock; /* guards stats */
};

/** Where tests step in: called, unless it is NULL, with the name of a moment. What it returns counts at "agreed", as if the
 *  result of the agreement had not arrived. */
extern td_status (*td__elastic_probe)(const char *moment, td_elastic *elastic);

static inline td_status td__elastic_at(const char *moment, td_elastic *elastic)
{
    return __builtin_expect(td__elastic_probe != NULL, 0) ? td__elastic_probe(moment, elastic)
                                                          : TD_OK;
}

/** Ranks were lost: those of `before` that are not in `all`. Notes the hosts of which nobody has been heard. */
void td__network_note(td_elastic *elastic, const int *before, int before_size);

/** Whether this part of the network may go on: TD_ERR_PEER where the other one may. The same on all ranks of it. */
td_status td__network_check(const td_elastic *elastic);

/** Whether a failure of a call on the training's groups is one that the ranks which are left can repair. */
static inline bool td__elastic_is_loss(td_status status)
{
    return status == TD_ERR_PEER || status == TD_ERR_TIMEOUT || status == TD_ERR_ABORTED;
}

static inline int64_t td__elastic_committed(const td_elastic *elastic)
{
    return atomic_load_explicit(&((td_elastic *)elastic)->committed, memory_order_relaxed);
}

/** Whether each rank has a part of one state. */
static inline bool td__elastic_is_divided(const td_elastic *elastic)
{
    return elastic->replica->ops->restore != NULL;
}

/* The slices of a rank: first, first + stride, … */
struct td__elastic_share {
    int first, count, stride;
};

/** Of a rank that computes. */
static inline struct td__elastic_share td__elastic_share(const td_elastic *elastic, int active_rank)
{
    int size = elastic->active_size;
    if (elastic->options.fsdp)
        return (struct td__elastic_share){
            active_rank, td__slices_apart(elastic->slices, size, active_rank), size};
    struct td__slice_range range = td__slices_of(elastic->slices, size, active_rank);
    return (struct td__elastic_share){range.first, range.count, 1};
}

static inline void td__elastic_count(td_elastic *elastic, int64_t *number)
{
    pthread_mutex_lock(&elastic->lock);
    *number += 1;
    pthread_mutex_unlock(&elastic->lock);
}

/** Tells the program. */
void td__elastic_tell(td_elastic *elastic, td_elastic_event event);

/* ---- A step (elastic_step.c) ------------------------------------------------------------------------------ */

/** Reads the samples of a slice, before generators are seeded for it; computes it. For replicas. */
td_status td__elastic_fetch(td_elastic *elastic, int slice);
td_status td__elastic_slice(td_elastic *elastic, td_module *model, int slice);

/** One step, or an attempt at it. A loss (td__elastic_is_loss()) leaves the state as it was, or committed. */
td_status td__elastic_attempt(td_elastic *elastic);
/** Makes the outcome part of the state. */
td_status td__elastic_commit(td_elastic *elastic);
/** No failure can take the steps so far back: they are told, and recorded. */
td_status td__elastic_settle(td_elastic *elastic);
/** Writes a checkpoint. Collective. */
td_status td__elastic_save(td_elastic *elastic);

/* ---- Who takes part (elastic_members.c) --------------------------------------------------------------------- */

/** The ranks of `group`, which becomes elastic->all on success. */
td_status td__elastic_adopt(td_elastic *elastic, td_group *group);
/** The ranks of elastic->all compare where they stand, those that are behind commit, and the next step is bound to those
 *  that have the state. Collective. */
td_status td__elastic_enter(td_elastic *elastic);
/** Newcomers that wait become members of elastic->all, which is to be entered anew then. Collective. */
td_status td__elastic_admit(td_elastic *elastic);
/** After a loss: the ranks that are left go on without the others. */
td_status td__elastic_regroup(td_elastic *elastic);
/** Frees the groups. */
void td__elastic_leave_groups(td_elastic *elastic);

/* ---- The agreement (elastic_agreement.c) -------------------------------------------------------------------- */

/** When the outcome is complete here: that it is complete everywhere. TD_ERR_MISMATCH where ranks have other bits. */
td_status td__elastic_agree(td_elastic *elastic);

/* ---- Ranks that stand still (elastic_watch.c) ------------------------------------------------------------------- */

/** A thread watches the other ranks until td__watch_end(). */
td_status td__watch_begin(td_elastic *elastic);
void td__watch_end(td_elastic *elastic);
void td__watch_free(td_elastic *elastic);
/** The training's thread begins something that takes no longer than a step does: a step, or td_group_shrink(). */
void td__watch_now(td_elastic *elastic, bool in_shrink);
/** How long a step has taken. */
void td__watch_note_step(td_elastic *elastic, double ms);

/* ---- Newcomers (elastic_catch_up.c) --------------------------------------------------------------------------- */

/** Before a step that has newcomers: begins to send the state to them, or receives it. */
td_status td__catch_up_begin(td_elastic *elastic);
/** When the members have computed the step: all have its outcome. */
td_status td__catch_up_finish(td_elastic *elastic);
/** Ends what is under way; its group has failed, or is done. */
void td__catch_up_end(td_elastic *elastic);

/* ---- Samples (elastic_samples.c) -------------------------------------------------------------------------------- */

td_status td__samples_make(td_elastic *elastic, struct td__samples **samples);
/** The batch of a slice of this rank, valid until the next call. */
td_status td__samples_get(td_elastic *elastic, int64_t step, int slice, td_batch *batch);
int64_t td__samples_epoch(const td_elastic *elastic, int64_t step);
/** The indices of the samples of a step, in the order of its slices; NULL on failure. */
const int64_t *td__samples_of_step(td_elastic *elastic, int64_t step);
void td__samples_free(struct td__samples *samples);

/* ---- The record of samples (elastic_audit.c) ---------------------------------------------------------------------- */

td_status td__audit_open(const char *path, struct td__audit **audit);
/** The outcome of a step is complete: by these ranks. */
td_status td__audit_computed(td_elastic *elastic, int64_t step);
/** After a commit: the first of the ranks that compute writes what is settled, unless the file has it already. */
td_status td__audit_committed(td_elastic *elastic);
/** The ranks have changed: another one may write now, and the last step may be missing. */
td_status td__audit_regroup(td_elastic *elastic);
void td__audit_close(struct td__audit *audit);

/* ---- Hashes (bit_hash.c, elastic_hash.c) ------------------------------------------------------------------------- */

/** A hash of bytes, which differs where a bit does; equal hashes of other bytes are a matter of 2^-64. */
uint64_t td__bit_hash(const void *data, size_t bytes, uint64_t seed);

/** Of all that there is of a kind. */
td_status td__elastic_hash_all(td_elastic *elastic, enum td__elastic_replica_part kind,
                               uint64_t *hash);
/** Of a part of it, which is another one in each step. */
td_status td__elastic_hash_part(td_elastic *elastic, enum td__elastic_replica_part kind,
                                uint64_t *hash);

/* ---- Flipped bits (elastic_inject.c) ------------------------------------------------------------------------------- */

/** Reads TANDEM_FLIP. */
td_status td__flip_read(td_elastic *elastic);
/** Flips the bit, if this is its rank and step; the gradients of the step are complete, or it is not begun yet. */
td_status td__flip_at(td_elastic *elastic, enum td__flip_kind moment);

#endif
