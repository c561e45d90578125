/* The communicator of the ranks of a group that share a host, and the memory that they share.
 *
 *     control memory (a memfd, created by rank 0 of the comm, mapped by all)
 *     | head | cell 0 | cell 1 | …   | slots: DEPTH × size | stages: size | extra |
 *
 *     cell    the state of a rank: its announcements, its wait event, its claim counter
 *     slot    the arguments of one call of one rank (where its buffers are) and the data of a small call
 *     stage   a bounce buffer for large data in memory that other ranks cannot map
 *
 * A rank announces a call: it writes its slot, then its announcement. Other ranks poll the announcement and
 * then read the slot. Call n + DEPTH reuses the slot of call n, so a rank announces call n + DEPTH only after
 * all ranks have begun call n + 1. A call whose data fit into the announcement uses no slot, and a rank may be
 * further ahead with such calls (TD__SHM_INLINE_DEPTH). No call waits for more than that: a rank that has done
 * its part of a call returns.
 *
 * There is one such memory for each group and host. A rank maps it on its first call. */
#ifndef TD_SHM_SHM_COMM_H
#define TD_SHM_SHM_COMM_H

#include "call/operation.h"
#include "peer/wait_event.h"
#include "peer/endpoint.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    TD__SHM_DEPTH = 4,         /* slots of a rank: how many calls it may be ahead */
    TD__SHM_INLINE_DEPTH = 32, /* the same for calls that do not use their slot */
    /* Announcements of a rank: td__shm_compare() reads them after the slot of the call is reused. */
    TD__SHM_ANNOUNCEMENTS = 2 * TD__SHM_INLINE_DEPTH,
    TD__PHASE_BITS = 24,
    TD__INLINE_BYTES = 48,
    TD__SLOT_BYTES = 32 << 10,
    TD__PIECE_BYTES = 256 << 10,
    TD__PIECES = 3, /* of a stage */
};

/* What a rank announces about one call. It is one cache line, so that one transfer brings all of it. */
struct td__announcement {
    _Alignas(64) _Atomic uint64_t progress; /* call << 24 | phase: td__shm_progress() */
    uint64_t fingerprint;                   /* of the call; see shm_compare.c */
    char data[TD__INLINE_BYTES];            /* of a call that has no more than that */
};

struct td__shm_cell {
    struct td__announcement announcements[TD__SHM_ANNOUNCEMENTS];
    /* Valid if the fingerprint of the call has the bit DETAILED. */
    _Alignas(64) uint64_t details[TD__SHM_ANNOUNCEMENTS];
    /* The first counts of a call with uneven parts, for error texts. */
    size_t counts[TD__SHM_ANNOUNCEMENTS][TD__NAMED_COUNTS];
    /* call << 32 | how many pieces of this rank's share have been claimed */
    _Alignas(64) _Atomic uint64_t claims;
    _Alignas(64) struct td__wait_event event;
    _Alignas(
        64) _Atomic uint32_t writing; /* between td__shm_write_begin() and td__shm_write_end() */
    _Atomic uint32_t attached;        /* the rank has mapped this memory */
    uint64_t nonce, nonce_address; /* the address of a copy of `nonce` in the rank's own memory */
    _Atomic uint32_t leaving;      /* the rank makes no more calls and maps no more memory */
};

/* The arguments of a rank's call that other ranks need: of a large call, or of one with a factor. Offsets are
 * in the rank's arena, plus one; 0: the buffer is not in the arena. */
struct td__shm_args {
    uint64_t input, output;
    double factor;                          /* premul_sum */
    uint64_t input_address, output_address; /* in the rank's own process */
    uint64_t can_copy;                      /* td__shm_can_copy() */
    uint64_t methods; /* of rank 0 of the comm, in an in-place all_reduce: see reduce_method.h */
};

struct td__shm_slot {
    _Alignas(64) struct td__shm_args args;
    _Alignas(64) char data[TD__SLOT_BYTES];
};

struct td__shm_head {
    uint32_t oversubscribed;                           /* as in struct td__shm_comm */
    _Alignas(64) _Atomic uint32_t sleepers;            /* ranks that sleep or are about to */
    _Alignas(64) _Atomic uint64_t done[TD__SHM_DEPTH]; /* call << 32 | completed pieces */
    /* 0: no failure; 1: a rank is writing `reason`; 2: `reason`, `status` and `breaker` are valid */
    _Alignas(64) _Atomic uint32_t broken;
    uint32_t status;
    uint32_t breaker; /* the index of the rank that failed first */
    char reason[TD__REASON_TEXT];
};

/* The buffers of another rank in its last large call: the offsets of its td__shm_args, and the addresses in
 * this process, which are valid as long as the endpoint. */
struct td__shm_views {
    uint64_t input, output; /* 0: none */
    size_t input_bytes, output_bytes;
    void *source, *target;
};

struct td__shm_comm {
    struct td__endpoint *endpoint;
    uint64_t key;
    int size, index;
    int *world_ranks;
    unsigned oversubscribed; /* how many other ranks share a processor with a rank; 0: none */
    unsigned pauses;         /* before the first poll of an announcement; see shm_comm.c */

    pthread_mutex_t attach_lock; /* held by td__shm_comm_attach() */
    atomic_bool attached;
    atomic_bool given_up; /* td_group_abort() was called, perhaps before td__shm_comm_attach() */
    int fd;               /* of the memory; other ranks fetch it from here; -1: not attached */
    size_t bytes;
    struct td__shm_head *head;
    struct td__shm_cell *cells;
    struct td__shm_slot *slots;
    char *stages;
    void *extra; /* memory for point-to-point messages, behind the stages */
    size_t extra_bytes;
    /* NULL, or called before a waiting thread sleeps; `sleeps` counts its sleeps in this wait. Fails if the
     * call cannot complete any more, and may set *next, which is TD__NEVER before, to the time of the next
     * check. */
    td_status (*check)(void *arg, const struct td__operation *operation, unsigned sleeps,
                       td__deadline *next);
    void *callback_arg;
    /* NULL, or called after a timeout: adds to the last error what the other ranks are doing. */
    void (*explain)(void *arg, const struct td__operation *operation);
    uint64_t call;         /* the number of the current call in the comm, from 1 */
    uint64_t sequence;     /* its number in the group, which also counts rejected calls */
    td__deadline deadline; /* of the current call; 0: the call has not waited yet */
    uint64_t agreed;       /* all members have begun this call, and their calls up to it match */
    void **buffers;        /* the memory of the following four */
    const void **sources;  /* the inputs of all members in the current call */
    void **targets;        /* their outputs */
    const void **inputs;   /* the parts of `sources` and `targets` of the current task */
    void **outputs;
    struct td__shm_views *views; /* of each member */
    double *factors;
    uint64_t nonce;
    int can_copy;       /* result of td__shm_can_copy(): 0: not known yet; 1: yes; -1: no */
    bool streaming;     /* the current call writes more than the caches hold: streaming stores */
    uint32_t methods;   /* of the current call: see reduce_method.h */
    bool fills_host;    /* the comm has all ranks of this host */
    bool spread;        /* oversubscribed: this rank has moved to its assigned processor once */
    int64_t next_check; /* the time of the next check of the ranks' processors; see shm_spread.c */
    unsigned losses;    /* td__endpoint_losses() when a waiting thread last checked */
    /* A member has left during a call: fails if that is the consequence of another failure. NULL: no check. */
    td_status (*find_cause)(void *arg, const struct td__operation *operation);
    struct td__endpoint_waiter waiter;
    struct td__shm_comm *next; /* in the list of comms that wait for ranks to attach; see leave.c */
};

/** `world_ranks` are the members in order; this rank is at `index`. Rank 0 of the comm creates the memory.
 *  Does not wait for other ranks. */
td_status td__shm_comm_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                              int size, int index, size_t extra_bytes, struct td__shm_comm **comm);
void td__shm_comm_destroy(struct td__shm_comm *comm);

/** The number of ranks of the world on this host. */
int td__shm_local_size(struct td__endpoint *endpoint);

/** Marks this rank as left: a member that waits for it gets TD_ERR_PEER. */
void td__shm_comm_leave(struct td__shm_comm *comm);

/** Maps the memory, unless it is mapped. Required before the first call. */
td_status td__shm_comm_attach(struct td__shm_comm *comm, td__deadline deadline);

/** Whether all members have mapped the memory. The others may still fetch its fd from this rank. */
bool td__shm_all_attached(struct td__shm_comm *comm);

/** Runs `operation` among the members; its root is an index in the comm. */
td_status td__shm_run(struct td__shm_comm *comm, const struct td__operation *operation);

/** Before this rank leaves: compares those calls with the other members' that were not compared yet. Waits
 *  until `deadline` at most for members that have not made them. TD_ERR_MISMATCH, on all members, if
 *  two calls differ. */
td_status td__shm_verify(struct td__shm_comm *comm, const char *group, td__deadline deadline);

/** Announces a call that another transport runs, so that members detect a mismatch. */
td_status td__shm_publish(struct td__shm_comm *comm, const struct td__operation *operation);

/* ---- For the algorithms ---------------------------------------------------------------------- */

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

/** The announcement of `index` for `call`, and for the current call. */
static inline struct td__announcement *td__shm_announcement_of(const struct td__shm_comm *comm,
                                                               int index, uint64_t call)
{
    return &comm->cells[index].announcements[call % TD__SHM_ANNOUNCEMENTS];
}

static inline struct td__announcement *td__shm_announcement(const struct td__shm_comm *comm,
                                                            int index)
{
    return td__shm_announcement_of(comm, index, comm->call);
}

/** The value of td__announcement.progress of a rank that has reached `phase` of `call`. */
static inline uint64_t td__shm_progress(uint64_t call, unsigned phase)
{
    return call << TD__PHASE_BITS | phase;
}

/** Writes the fingerprint of the current call to this rank's cell. */
void td__shm_record_call(struct td__shm_comm *comm, const struct td__operation *operation);

/** Compares the calls of `index` after comm->agreed, up to `call`, which `index` has begun, with this rank's.
 *  TD_ERR_MISMATCH, on all members, if two differ. */
td_status td__shm_compare(struct td__shm_comm *comm, const struct td__operation *operation,
                          int index, uint64_t call);

/** Returns `index`, or with -1 any member, if it has ended or left; else -1. */
int td__shm_find_lost(struct td__shm_comm *comm, int index);

/** Begins the next call: waits until this rank may write its slot for it (`depth`: TD__SHM_DEPTH), or its announcement
 *  if the call does not use the slot (TD__SHM_INLINE_DEPTH), and records its fingerprint. */
td_status td__shm_begin(struct td__shm_comm *comm, const struct td__operation *operation,
                        uint64_t depth);

/** Announces that this rank has reached `phase` (from 1) of the call. */
void td__shm_reach(struct td__shm_comm *comm, unsigned phase);

/** Waits until `index` has reached `phase`. In phase 1 it also compares the calls; later calls compare those
 *  of members that this call did not wait for. */
td_status td__shm_await(struct td__shm_comm *comm, const struct td__operation *operation, int index,
                        unsigned phase);

/** td__shm_await() for all other members. */
td_status td__shm_await_all(struct td__shm_comm *comm, const struct td__operation *operation,
                            unsigned phase);

/** Waits until all members have reached phase 1; rank 0 of the comm returns first. */
td_status td__shm_await_release(struct td__shm_comm *comm, const struct td__operation *operation);

/** Claims the next piece of the share of `owner` in the current call. Returns its number, from 0. */
int td__shm_claim(struct td__shm_comm *comm, int owner);

/** Adds `done` to the completed pieces of the call, and waits until there are `total`. */
td_status td__shm_complete(struct td__shm_comm *comm, const struct td__operation *operation,
                           uint32_t done, uint32_t total);

/** As td_fail(), on all members: the others fail with the same status and text. */
td_status td__shm_fail(struct td__shm_comm *comm, td_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Enclose every access to the buffers of other members, reads too. td__shm_write_begin() fails if the comm
 *  has failed: the buffers then belong to their owners again. A rank that fails waits until no member is
 *  between the two (td__shm_await_writers()). */
td_status td__shm_write_begin(struct td__shm_comm *comm);
void td__shm_write_end(struct td__shm_comm *comm);

/** After a failure of the comm: waits until no member accesses this rank's buffers, so that the caller may
 *  reuse them. Waits 2 s at most, for the case that a member is stopped between td__shm_write_begin() and
 *  td__shm_write_end(). */
void td__shm_await_writers(struct td__shm_comm *comm);

/** Whether the comm has failed. The comm must be attached. */
static inline bool td__shm_is_broken(const struct td__shm_comm *comm)
{
    return atomic_load_explicit(&comm->head->broken, memory_order_acquire) == 2;
}

/** Whether this rank was the first to fail. */
bool td__shm_failed_first(struct td__shm_comm *comm);

/** TD_OK, or the failure of the comm. */
td_status td__shm_state(struct td__shm_comm *comm);

/** Marks the comm as failed with the last error, unless it has failed: the other members fail with it. */
void td__shm_break(struct td__shm_comm *comm, td_status status);

/** The reduction of `operation`, with the factor of each member for premul_sum. */
struct td__reduction td__shm_reduction(struct td__shm_comm *comm,
                                       const struct td__operation *operation);

/** During a wait: moves this rank if the ranks are spread unevenly over the processors. */
void td__shm_spread(struct td__shm_comm *comm, int64_t now);

/** The offset of `memory` in this process's arena, plus one; 0: it cannot be shared; another value if it is not
 *  `needed`. */
uint64_t td__shm_arena_offset(const void *memory, bool needed);

/** Publishes this rank's buffers and finds those of the others: comm->sources and comm->targets. *shared is
 *  false if one of them is not in shareable memory. `extents`: the elements of each member's input and output, two
 *  numbers each; NULL: those of a call among the members alone (td__shm_extents()). */
td_status td__shm_exchange_buffers(struct td__shm_comm *comm, const struct td__operation *operation,
                                   const size_t *extents, bool *shared);

/** Large calls: directly between the buffers if all can be mapped, else td__shm_kernel_copy() or
 *  td__shm_staged(). */
td_status td__shm_large(struct td__shm_comm *comm, const struct td__operation *operation);

/** Whether process_vm_readv() works from this rank to all other members. False until all are attached. */
bool td__shm_can_copy(struct td__shm_comm *comm);

/** On attaching: writes what other members need for td__shm_can_copy(). */
void td__shm_publish_nonce(struct td__shm_comm *comm);

/** Calls that only move data, by process_vm_readv() and process_vm_writev(). All members have reached
 *  phase 1. */
td_status td__shm_kernel_copy(struct td__shm_comm *comm, const struct td__operation *operation);

/** The last step of an all_reduce: reads the slices that other members have reduced from their outputs, by
 *  process_vm_readv(). They have done that when they reach `phase`. */
td_status td__shm_fetch_slices(struct td__shm_comm *comm, const struct td__operation *operation,
                               unsigned phase);

/** Copies everything through the stages, piece by piece. All members have reached phase 1. `can_copy`:
 *  td__shm_can_copy() is true on all members. */
td_status td__shm_staged(struct td__shm_comm *comm, const struct td__operation *operation,
                         bool can_copy);

/** Whether the call is an all_to_all with uneven parts: its counts differ between ranks. */
static inline bool td__shm_exchanges_counts(const struct td__operation *operation)
{
    return operation->call.input_counts && operation->call.kind == TD_OP_ALL_TO_ALL;
}

/** The counts of such a call of `index`, in its slot: input counts, then output counts. */
static inline size_t *td__shm_counts(const struct td__shm_comm *comm, int index)
{
    return (size_t *)(void *)td__shm_slot(comm, index)->data;
}

/** The elements of the largest part that a rank has for another one. */
size_t td__shm_largest_part(const struct td__shm_comm *comm, const struct td__operation *operation);

/** The elements of the input and the output of `index`. */
void td__shm_extents(const struct td__shm_comm *comm, const struct td__operation *operation,
                     int index, size_t *input, size_t *output);

/** What rank `from` has for rank `to`, in bytes: the size, and the offsets in the input of `from` and in the output of
 *  `to`. Not for all_reduce and reduce. */
struct td__shm_span {
    size_t size, input, output;
};
struct td__shm_span td__shm_span(const struct td__shm_comm *comm,
                                 const struct td__operation *operation, int from, int to);

/** The first element of part `index` if `count` elements are divided into `parts`; `index` may be `parts`.
 *  Parts begin at cache lines if there are enough elements. */
size_t td__part(size_t count, int parts, int index);

#endif
