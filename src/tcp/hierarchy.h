/* Collectives of a group that has several ranks on several hosts: inside each host through shared
 * memory, between hosts over sockets.
 *
 *     lane 0    rank 0 of host A ── rank 0 of host B ── …
 *     lane 1    rank 1 of host A ── rank 1 of host B ── …      as many lanes as every host has ranks
 *
 * The vector is cut into as many slices as there are lanes, and each lane carries one: all ranks of a
 * host, and all its connections, are at work at once, and what crosses the network is one slice a lane. */
#ifndef TD_TCP_HIERARCHY_H
#define TD_TCP_HIERARCHY_H

#include "call/operation.h"
#include "shm/shm_comm.h"

struct td__hierarchy;

/** The members' world ranks in order, this one at `rank`; `comm` has those of this host, NULL where
 *  there is one only. It stays the caller's, which attaches to it before the first call. */
td_status td__hierarchy_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                               int size, int rank, struct td__shm_comm *comm, const char *algorithm,
                               struct td__hierarchy **hierarchy);

void td__hierarchy_destroy(struct td__hierarchy *hierarchy);

/** As td__tcp_comm_fall_out(), for the lane. */
void td__hierarchy_fall_out(struct td__hierarchy *hierarchy, const struct td__operation *operation,
                            td_status status);

/** As td__tcp_comm_watch(), td__tcp_comm_watch_links() and td__tcp_comm_hear(), for the lane. */
/** Whether a call over the links between hosts has failed. */
bool td__hierarchy_is_broken(const struct td__hierarchy *hierarchy);

struct td__outside;
void td__hierarchy_watch(struct td__hierarchy *hierarchy, const struct td__outside *outside);
void td__hierarchy_watch_links(struct td__hierarchy *hierarchy);
td_status td__hierarchy_hear(struct td__hierarchy *hierarchy,
                             const struct td__operation *operation);

/** Whether it knows how to carry out `kind`: all_reduce, reduce, broadcast and barrier. */
bool td__hierarchy_has(td_op_kind kind);

td_status td__hierarchy_run(struct td__hierarchy *hierarchy, const struct td__operation *operation);

#endif
