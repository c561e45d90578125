/* Socket communicators: collectives over sockets, by the schedules of src/collective.
 *
 * A comm has all ranks of a group as members, or one of each host. The members call the same operations in the
 * same order, one at a time, on any thread. A comm opens a link when a schedule first needs it; a link is used by
 * one comm only. */
#ifndef TD_TCP_TCP_COMM_H
#define TD_TCP_TCP_COMM_H

#include "call/operation.h"
#include "peer/endpoint.h"

struct td__tcp_comm;
struct td__shm_comm;

/**
 * `world_ranks` are the members in order, this rank at `index`. `key` identifies the comm when links are opened;
 * every comm has another. `algorithm`, if not NULL, is used for all operations that have an algorithm of that
 * name. Opens no links, and waits for no rank.
 */
td_status td__tcp_comm_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                              int size, int index, const char *algorithm,
                              struct td__tcp_comm **comm);

void td__tcp_comm_destroy(struct td__tcp_comm *comm);

/** Runs `operation`; its root is an index in the comm. */
td_status td__tcp_comm_run(struct td__tcp_comm *comm, const struct td__operation *operation);

/**
 * For a hierarchical reduction: the output of `operation` has accumulators (td__reduction_accumulator()). Combines
 * those of all members along the tree, in place: on every member (all_reduce), or on the root (reduce; on the
 * others they are undefined afterwards). For a reduce_scatter the input has accumulators, too, and the output gets this
 * member's. The caller loads, stores and divides.
 */
td_status td__tcp_comm_combine(struct td__tcp_comm *comm, const struct td__operation *operation);

/** Wakes the thread that sleeps in a call; if none does, the next sleep ends at once. From any thread. */
void td__tcp_comm_wake(struct td__tcp_comm *comm);

/* The following functions of a comm do nothing if it is NULL. */

/** Whether a call has failed, so that all later ones do. */
bool td__tcp_comm_is_broken(const struct td__tcp_comm *comm);

/** `operation` has failed on this member outside the comm: fails the comm with `status` and the last error, and
 *  sends both to the other members. */
void td__tcp_comm_fail(struct td__tcp_comm *comm, const struct td__operation *operation,
                       td_status status);

/** What the owner of a comm implements. */
struct td__comm_callbacks {
    /** Called when a waiting thread is woken, and during long waits: a failure ends the call with the same
     *  status. May set *next to an earlier time for the next call. */
    td_status (*check)(void *arg, const struct td__operation *operation, td__deadline *next);

    /** `world_rank` made other calls before `operation` than this rank: returns TD_ERR_MISMATCH with the first
     *  two that differ, or TD_OK if they are not recorded any more. */
    td_status (*compare_calls)(void *arg, int world_rank, const struct td__operation *operation);

    /** The last error is a timeout: appends the progress of the other ranks to its text. */
    void (*explain)(void *arg, const struct td__operation *operation);
    void *arg;
};

void td__tcp_comm_set_callbacks(struct td__tcp_comm *comm,
                                const struct td__comm_callbacks *callbacks);

/** Wakes the waiters of the endpoint, once, when a link becomes readable: for a thread that waits for ranks of
 *  its host, and then calls td__tcp_comm_check(). */
void td__tcp_comm_watch_links(struct td__tcp_comm *comm);

/** Between calls: returns the failure that another member has sent, or TD_OK. */
td_status td__tcp_comm_check(struct td__tcp_comm *comm, const struct td__operation *operation);

/* ---- Hierarchies -----------------------------------------------------------------------------
 *
 * Collectives of a group that has several ranks on several hosts: shared memory inside each host, sockets
 * between hosts.
 *
 *     rail 0    rank 0 of host A ── rank 0 of host B ── …
 *     rail 1    rank 1 of host A ── rank 1 of host B ── …
 *
 * A rail is a socket comm with one rank of each host, all with the same index on their hosts. There are as many
 * rails as the host with the fewest members has. The vector is cut into one slice for each rail, and the rails
 * move their slices at the same time, each over its own connections. */

struct td__hierarchy;

/** `world_ranks` are the members in order, this rank at `rank`. `comm` has the members on this host; NULL if
 *  this rank is the only one. The caller keeps it, and attaches to it before the first call. */
td_status td__hierarchy_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                               int size, int rank, struct td__shm_comm *comm, const char *algorithm,
                               struct td__hierarchy **hierarchy);

void td__hierarchy_destroy(struct td__hierarchy *hierarchy);

/** The rail of this rank; NULL if it is in none. */
struct td__tcp_comm *td__hierarchy_rail(const struct td__hierarchy *hierarchy);

/** Whether td__hierarchy_run() implements `kind`: all but scatter, gather and all_to_all. */
bool td__hierarchy_has(td_op_kind kind);

td_status td__hierarchy_run(struct td__hierarchy *hierarchy, struct td__operation *operation);

#endif
