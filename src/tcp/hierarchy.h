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

#include "shm/shm_comm.h"
#include "tcp/tcp_comm.h"

struct td__hierarchy;

/** `world_ranks` are the members in order, this rank at `rank`. `comm` has the members on this host; NULL if
 *  this rank is the only one. The caller keeps it, and attaches to it before the first call. */
td_status td__hierarchy_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                               int size, int rank, struct td__shm_comm *comm, const char *algorithm,
                               struct td__hierarchy **hierarchy);

void td__hierarchy_destroy(struct td__hierarchy *hierarchy);

/** The rail of this rank; NULL if it is in none. */
struct td__tcp_comm *td__hierarchy_rail(const struct td__hierarchy *hierarchy);

/** Whether td__hierarchy_run() implements `kind`: all_reduce, reduce, broadcast and barrier. */
bool td__hierarchy_has(td_op_kind kind);

td_status td__hierarchy_run(struct td__hierarchy *hierarchy, const struct td__operation *operation);

#endif
