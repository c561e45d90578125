/* Collectives of a group that has several ranks on several hosts: shared memory inside each host, sockets
 * between hosts.
 *
 *     rail 0    rank 0 of host A ── rank 0 of host B ── …
 *     rail 1    rank 1 of host A ── rank 1 of host B ── …
 *
 * A rail is a socket comm with one rank of each host, all with the same index on their hosts. There are as many
 * rails as the host with the fewest members has. The vector is cut into one slice for each rail, and the rails
 * move their slices at the same time, each over its own connections. */
#ifndef TD_TCP_HIERARCHY_H
#define TD_TCP_HIERARCHY_H

#include "call/operation.h"
#include "shm/shm_comm.h"

struct td__hierarchy;

/** `world_ranks` are the members in order, this rank at `rank`. `comm` has the members on this host; NULL if
 *  this rank is the only one. The caller keeps it, and attaches to it before the first call. */
td_status td__hierarchy_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                               int size, int rank, struct td__shm_comm *comm, const char *algorithm,
                               struct td__hierarchy **hierarchy);

void td__hierarchy_destroy(struct td__hierarchy *hierarchy);

/** As td__tcp_comm_fail(), on the rail of this rank. */
void td__hierarchy_fail(struct td__hierarchy *hierarchy, const struct td__operation *operation,
                        td_status status);

/** Whether a call over the rail of this rank has failed. */
bool td__hierarchy_is_broken(const struct td__hierarchy *hierarchy);

/** As td__tcp_comm_set_callbacks(), td__tcp_comm_watch_links() and td__tcp_comm_check(), on the rail of this
 *  rank. */
struct td__comm_callbacks;
void td__hierarchy_set_callbacks(struct td__hierarchy *hierarchy,
                                 const struct td__comm_callbacks *callbacks);
void td__hierarchy_watch_links(struct td__hierarchy *hierarchy);
td_status td__hierarchy_check(struct td__hierarchy *hierarchy,
                              const struct td__operation *operation);

/** Whether td__hierarchy_run() implements `kind`: all_reduce, reduce, broadcast and barrier. */
bool td__hierarchy_has(td_op_kind kind);

td_status td__hierarchy_run(struct td__hierarchy *hierarchy, const struct td__operation *operation);

#endif
