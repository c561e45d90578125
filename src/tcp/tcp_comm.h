/* Ranks that carry out collectives over sockets, by the schedules of src/collective.
 *
 * A comm is a list of ranks of one group: all of them, or one of each host. Its members call the same
 * operations in the same order, one at a time, in any thread. Links are opened when a schedule first
 * needs them, and carry nothing else. */
#ifndef TD_TCP_TCP_COMM_H
#define TD_TCP_TCP_COMM_H

#include "call/operation.h"
#include "peer/endpoint.h"

struct td__tcp_comm;

/**
 * `world_ranks` are the members in order, this rank at `index`; `key` is the number under which
 * its links are opened, different for every comm. `algorithm` is the name of one to be used where an
 * operation has it, or NULL. Opens nothing, and waits for no rank.
 */
td_status td__tcp_comm_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                              int size, int index, const char *algorithm,
                              struct td__tcp_comm **comm);

void td__tcp_comm_destroy(struct td__tcp_comm *comm);

/** Carries out `operation`; its root is an index in the comm. */
td_status td__tcp_comm_run(struct td__tcp_comm *comm, const struct td__operation *operation);

/**
 * The inner part of a reduction, for a comm that is one of several levels. `data` are `count`
 * accumulators (td__reduction_accumulator) of this member; they are combined along the tree over the
 * comm, in place, on every member (all_reduce), or on the root only (reduce; the others' are left in
 * any state). Neither loaded nor stored, nor divided.
 */
td_status td__tcp_comm_combine(struct td__tcp_comm *comm, const struct td__operation *operation,
                               void *data, size_t count);

/** Whether a call has failed, so that all later ones do. */
bool td__tcp_comm_is_broken(const struct td__tcp_comm *comm);

/** `operation` has failed on this member for a reason outside the comm: sends the last error to the
 *  other members, as a failure inside it would be sent. */
void td__tcp_comm_fall_out(struct td__tcp_comm *comm, const struct td__operation *operation,
                           td_status status);

/** What the owner of a comm provides for it. */
struct td__outside {
    /** In a wait that was woken, and during long waits, whether there is still a point: where it fails, the
     *  call fails like that. May set *next to an earlier time for the next look. */
    td_status (*look)(void *arg, const struct td__operation *operation, td__deadline *next);

    /** A rank has made other calls before `operation` than this one: TD_ERR_MISMATCH with both, or TD_OK
     *  where they are not known any more. */
    td_status (*recall)(void *arg, int world_rank, const struct td__operation *operation);

    /** Adds to the last error, that a call was not done in time, where the others are. */
    void (*explain)(void *arg, const struct td__operation *operation);
    void *arg;
};

void td__tcp_comm_watch(struct td__tcp_comm *comm, const struct td__outside *outside);

/** Wakes the thread that sleeps in a call, or will sleep next. On any thread. */
void td__tcp_comm_wake(struct td__tcp_comm *comm);

/** Wakes the waiters of the endpoint when there is something on a link, once: for a thread that waits for ranks
 *  of its host meanwhile, and then calls td__tcp_comm_hear(). */
void td__tcp_comm_watch_links(struct td__tcp_comm *comm);

/** Between calls: fails like another member that has failed and sent the reason. */
td_status td__tcp_comm_hear(struct td__tcp_comm *comm, const struct td__operation *operation);

#endif
