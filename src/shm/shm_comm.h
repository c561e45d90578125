/* The ranks of a group that are on one host, and the memory that they share.
 *
 *     control memory (a memfd, made by the comm's first rank, mapped by all)
 *     | head | cell 0 | cell 1 | …   | slots: DEPTH × size | stages: size | messages |
 *
 *     cell    what a rank has reached in its last calls, and what they were
 *     slot    a rank's notice of one call (where its buffers are) and, for a small
 *             call, its data
 *     stage   room for data that pass through in pieces, because they are not in shareable memory
 *
 * A rank announces a call by writing its slot and then its announcement in its cell; others wait for that and
 * read the slot. The slot of call n is used again by call n + DEPTH, so a rank may not announce that
 * before all have begun call n + 1. A call whose data fit into the announcement uses no slot, and there are more
 * of those. Nobody ever waits for more than that: a rank whose part is done goes on.
 *
 * The memory exists once for each group and host. Ranks attach to it on their first call. */
#ifndef TD_SHM_SHM_COMM_H
#define TD_SHM_SHM_COMM_H

#include "call/operation.h"
#include "peer/wait_event.h"
#include "peer/endpoint.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    TD__SHM_DEPTH = 4,
    TD__SHM_AHEAD = 32,                /* the same for calls that do not use their slot */
    TD__SHM_POSTS = 2 * TD__SHM_AHEAD, /* they are looked at later than slots */
    TD__PHASE_BITS = 24,
    TD__TINY_BYTES = 48,
    TD__SLOT_BYTES = 32 << 10,   /* of data */
    TD__PIECE_BYTES = 256 << 10, /* of a stage, which has three */
    TD__PIECES = 3,
};

/* What a rank announces about one call, in one cache line, so that one who waits for it has it all when
 * the line comes. */
struct td__announcement {
    _Alignas(64) _Atomic uint64_t stage; /* call << 24 | phase */
    uint64_t fingerprint;                /* what was called, in one word: see shm_comm.c */
    char tiny[TD__TINY_BYTES];           /* the data of a call that has no more */
};

struct td__shm_cell {
    struct td__announcement announcements[TD__SHM_POSTS];
    _Alignas(
        64) uint64_t details[TD__SHM_POSTS]; /* of calls whose fingerprint says that there are */
    size_t counts[TD__SHM_POSTS][TD__NAMED_COUNTS]; /* the first of uneven ones, for error texts */
    /* call << 32 | how many pieces of this rank's share are taken */
    _Alignas(64) _Atomic uint64_t claims;
    _Alignas(64) struct td__wait_event event;
    _Alignas(64) _Atomic uint32_t writing; /* it may be writing to the memory of others */
    _Atomic uint32_t attached;             /* the rank has mapped the memory */
    uint64_t nonce, nonce_address;         /* what stands where in the rank's own memory */
    _Atomic uint32_t leaving; /* it takes no part any more, and will not ask for other memory */
};

/* What a rank tells about its call, where it is large or has a factor. Offsets are in its arena, plus
 * one; 0 for memory that cannot be shared. */
struct td__shm_notice {
    uint64_t input, output;
    uint64_t largest;                       /* uneven all_to_all: the largest part, in elements */
    double factor;                          /* premul_sum */
    uint64_t input_address, output_address; /* in its own process */
    uint64_t copies;                        /* the kernel may copy between it and all others */
    uint64_t ways; /* of the first rank, in an all_reduce in place: see reduce_method.h */
};

struct td__shm_slot {
    _Alignas(64) struct td__shm_notice notice;
    char data[TD__SLOT_BYTES];
};

struct td__shm_head {
    uint32_t size;
    uint32_t oversubscribed;                           /* as in the comm */
    _Alignas(64) _Atomic uint32_t sleepers;            /* how many may sleep */
    _Alignas(64) _Atomic uint64_t done[TD__SHM_DEPTH]; /* call << 32 | pieces that are done */
    _Alignas(64) _Atomic uint32_t broken; /* 0, 1: a rank is writing `reason`, 2: it is there */
    uint32_t status;
    uint32_t breaker; /* the index of that rank */
    char reason[TD__REASON_TEXT];
};

/* Where the buffers of another rank were in its last large call: places as in its notice, and the addresses here,
 * which are good as long as the endpoint. */
struct td__shm_views {
    uint64_t input, output; /* 0: none yet */
    size_t input_bytes, output_bytes;
    void *source, *target;
};

struct td__shm_comm {
    struct td__endpoint *endpoint;
    uint64_t key;
    int size, index;
    int *world_ranks;
    unsigned oversubscribed; /* with how many others each rank of this host shares a processor */
    unsigned pauses;         /* before the first look at what is waited for; see shm_comm.c */

    pthread_mutex_t attach_lock; /* guards attaching */
    atomic_bool attached;
    atomic_bool given_up; /* by td_group_abort(), perhaps before it is attached */
    int fd;               /* of the memory, for those who ask for it; -1: not attached */
    size_t bytes;
    struct td__shm_head *head;
    struct td__shm_cell *cells;
    struct td__shm_slot *slots;
    char *stages;
    void *extra; /* memory of others in it: point-to-point messages */
    size_t extra_bytes;
    /* Called before a waiting thread sleeps, which it has done `sleeps` times in this wait: fails where the
     * call has become pointless, and may set *next, TD__NEVER before, to the time of the next look. Or
     * NULL. */
    td_status (*outside)(void *arg, const struct td__operation *operation, unsigned sleeps,
                         td__deadline *next);
    void *outside_arg;
    /* Adds to the last error, that a call was not done in time, where the others are; or NULL. */
    void (*explain)(void *arg, const struct td__operation *operation);
    uint64_t call;         /* the number of the call at hand, from 1 */
    uint64_t sequence;     /* the same in the group, where calls that were refused count, too */
    td__deadline deadline; /* of the call at hand; 0: nobody had to wait yet */
    uint64_t floor;        /* all have begun this call, and the same up to here */
    const void **sources;  /* the buffers of all, for the call at hand */
    void **targets;
    struct td__shm_views *views; /* of each member */
    const void **inputs;         /* parts of them, for the piece of work at hand */
    void **outputs;
    double *factors;
    uint64_t nonce;
    int copies;        /* whether the kernel copies between all members: 0 not known yet, 1 or -1 */
    bool past_caches;  /* the call at hand writes more than they hold */
    uint32_t ways;     /* in which the call at hand is reduced in place */
    bool fills_host;   /* it has all ranks of this host */
    bool spread;       /* in an oversubscribed one: this rank has gone to its processor once */
    int64_t next_look; /* when to look whether the ranks are still even; see shm_spread.c */
    unsigned losses;   /* of the endpoint, as a waiting thread last looked at them */
    /* A member has left in the middle of a call: fails where that is the consequence of something else; or NULL. */
    td_status (*find_cause)(void *arg, const struct td__operation *operation);
    struct td__endpoint_waiter waiter;
    struct td__shm_comm *next; /* among those that are left behind */
};

/** `world_ranks` are the members in order, this rank at `index`. The first one makes the memory; nobody
 *  is waited for. */
td_status td__shm_comm_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                              int size, int index, size_t extra_bytes, struct td__shm_comm **comm);
void td__shm_comm_destroy(struct td__shm_comm *comm);

/** How many ranks of the world this host has. */
int td__shm_neighbours(struct td__endpoint *endpoint);

/** Tells the others that this rank will not take part any more; whoever waits for it fails. */
void td__shm_comm_leave(struct td__shm_comm *comm);

/** Maps the memory, at the latest now, before the first call. */
td_status td__shm_comm_attach(struct td__shm_comm *comm, td__deadline deadline);

/** Whether all have; those who have not may still ask the first one for it. */
bool td__shm_all_attached(struct td__shm_comm *comm);

/** Carries out `operation` among the members; its root is an index in the comm. */
td_status td__shm_run(struct td__shm_comm *comm, const struct td__operation *operation);

/** Before this rank leaves: compares its calls with those of the others, as far as that was not done. Waits
 *  until `deadline` at most for members that have not made them yet. TD_ERR_MISMATCH, for everybody,
 *  where one differs. */
td_status td__shm_verify(struct td__shm_comm *comm, const char *group, td__deadline deadline);

/** Announces a call that is carried out elsewhere, so that members who call something else notice. */
td_status td__shm_publish(struct td__shm_comm *comm, const struct td__operation *operation);

/* ---- For the ways to carry out a call -------------------------------------------------------- */

static inline struct td__shm_slot *td__shm_slot(const struct td__shm_comm *comm, int index)
{
    return &comm->slots[(size_t)(comm->call % TD__SHM_DEPTH) * (size_t)comm->size + (size_t)index];
}

/** Piece `number` of the stage of `index`. */
static inline char *td__shm_piece(const struct td__shm_comm *comm, int index, uint64_t number)
{
    return comm->stages +
           ((size_t)index * TD__PIECES + (size_t)(number % TD__PIECES)) * TD__PIECE_BYTES;
}

/** The announcement of `index` for a call, and that for the call at hand. */
static inline struct td__announcement *td__shm_announcement_of(const struct td__shm_comm *comm,
                                                               int index, uint64_t call)
{
    return &comm->cells[index].announcements[call % TD__SHM_POSTS];
}

static inline struct td__announcement *td__shm_announcement(const struct td__shm_comm *comm,
                                                            int index)
{
    return td__shm_announcement_of(comm, index, comm->call);
}

/** What the announcement says of a rank that has reached `phase` of `call`. */
static inline uint64_t td__shm_stage(uint64_t call, unsigned phase)
{
    return call << TD__PHASE_BITS | phase;
}

/** Notes in this rank's cell what it calls; on beginning it. */
void td__shm_note(struct td__shm_comm *comm, const struct td__operation *operation);

/** Compares all calls since the last comparison up to `call`, which `index` has begun, with this rank's:
 *  TD_ERR_MISMATCH, for everybody, where one differs. */
td_status td__shm_compare(struct td__shm_comm *comm, const struct td__operation *operation,
                          int index, uint64_t call);

/** A member that has ended or left: `index`, or with -1 any of them. -1 where there is none. */
int td__shm_find_lost(struct td__shm_comm *comm, int index);

/** Begins the next call: waits until this rank's slot for it may be written, and notes what is called. */
td_status td__shm_begin(struct td__shm_comm *comm, const struct td__operation *operation);

/** The same for a call that does not use its slot. */
td_status td__shm_begin_tiny(struct td__shm_comm *comm, const struct td__operation *operation);

/** Announces that this rank has reached `phase` (from 1) of the call. */
void td__shm_reach(struct td__shm_comm *comm, unsigned phase);

/** Waits until `index` has reached it; in phase 1 also checks that it made the same call. What a rank
 *  that was not waited for has called is looked at by later calls. */
td_status td__shm_await(struct td__shm_comm *comm, const struct td__operation *operation, int index,
                        unsigned phase);

/** Waits for all the others. */
td_status td__shm_await_all(struct td__shm_comm *comm, const struct td__operation *operation,
                            unsigned phase);

/** Waits for all the others, and leaves after the first member: the first goes on before the others do. */
td_status td__shm_await_release(struct td__shm_comm *comm, const struct td__operation *operation);

/** Takes the next piece of the share of `owner` in the call at hand: its number, from 0. */
int td__shm_claim(struct td__shm_comm *comm, int owner);

/** Adds `done` to the pieces that are done, and waits until all `total` are. */
td_status td__shm_complete(struct td__shm_comm *comm, const struct td__operation *operation,
                           uint32_t done, uint32_t total);

/** As td_fail(), for everybody: the others fail in the same way. */
td_status td__shm_fail(struct td__shm_comm *comm, td_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Around all use of the buffers of other members, reading too: a failure where the call has failed already, and
 *  then they are the others' again. Whoever fails waits until nobody is in between. */
td_status td__shm_write_begin(struct td__shm_comm *comm);
void td__shm_write_end(struct td__shm_comm *comm);

/** After a failure, which is everybody's by now: waits until nobody writes to this rank's memory any more,
 *  so that it can be given back. A member that is stopped in the middle of it is not waited for
 *  for long. */
void td__shm_await_quiet(struct td__shm_comm *comm);

/** Whether the comm, which is attached, has failed. */
static inline bool td__shm_is_broken(const struct td__shm_comm *comm)
{
    return atomic_load_explicit(&comm->head->broken, memory_order_acquire) == 2;
}

/** Whether this rank was the first one to fail. */
bool td__shm_broke(struct td__shm_comm *comm);

/** TD_OK, or how the comm has failed. */
td_status td__shm_state(struct td__shm_comm *comm);

/** Marks the comm as failed, with the last error, where it is not yet: the others fail in the same way. */
void td__shm_break(struct td__shm_comm *comm, td_status status);

/** The operation's reduction over all members' buffers, each with its own factor. */
struct td__reduction td__shm_reduction(struct td__shm_comm *comm,
                                       const struct td__operation *operation);

/** During a wait: moves this rank where the ranks are not even over the processors. */
void td__shm_spread(struct td__shm_comm *comm, int64_t now);

/** Small calls, which need one synchronisation at most: data in the slots, up to `slot_bytes` of each rank. */
size_t td__shm_small_limit(const struct td__shm_comm *comm);
td_status td__shm_small(struct td__shm_comm *comm, const struct td__operation *operation,
                        size_t slot_bytes);

/** Tells where this rank's buffers are, and finds those of the others: comm->sources and targets. Where
 *  one is not in shareable memory *shared is false; `largest` as for td__shm_staged(). */
td_status td__shm_exchange_buffers(struct td__shm_comm *comm, const struct td__operation *operation,
                                   bool *shared, size_t *largest);

/** Large calls: straight from memory to memory where all buffers can be shared, else staged. */
td_status td__shm_large(struct td__shm_comm *comm, const struct td__operation *operation);

/** Whether the kernel may copy between this rank's memory and that of all others. */
bool td__shm_can_copy(struct td__shm_comm *comm);

/** Makes it possible for others to find that out; on attaching. */
void td__shm_show_nonce(struct td__shm_comm *comm);

/** The kernel copies, for calls that only move data. All have reached phase 1. */
td_status td__shm_copied(struct td__shm_comm *comm, const struct td__operation *operation);

/** Fetches the slices of the output that the others have reduced, each from the output of its rank, where
 *  they are by now. */
td_status td__shm_fetch_slices(struct td__shm_comm *comm, const struct td__operation *operation);

/** Everything goes through the stages, piece by piece. All have reached phase 1, `largest` is the largest
 *  part where parts are uneven, and `copies` tells whether the kernel copies between all members. */
td_status td__shm_staged(struct td__shm_comm *comm, const struct td__operation *operation,
                         size_t largest, bool copies);

/** Where the counts of an uneven all_to_all stand in the slot: input counts, then output counts. */
static inline uint64_t *td__shm_counts(const struct td__shm_comm *comm, int index)
{
    return (uint64_t *)(void *)td__shm_slot(comm, index)->data;
}

/** The first element of part `index` of `parts` of `count` elements; `index` may be `parts`. Parts
 *  begin at whole cache lines where there is enough. */
size_t td__part(size_t count, int parts, int index);

#endif
