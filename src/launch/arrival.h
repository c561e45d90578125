/* How a node joins its job: it claims its rank, says what it brings along, and learns from what all
 * nodes bring along where it stands. node.c has the keys' meaning. */
#ifndef TD_LAUNCH_ARRIVAL_H
#define TD_LAUNCH_ARRIVAL_H

#include "launch/node.h"

#define TD__KEY "\1launch/"
#define TD__KEY_OVER TD__KEY "over"
#define TD__KEY_NODE TD__KEY "node/"

enum { TD__KEY_ROOM = 64 };

/** Claims the rank *node_rank, or where that is -1 the next one. TD_ERR_MISMATCH: it is taken, or the
 *  job has all of its nodes; with *tell_all the other nodes should learn of it too. */
td_status td__arrival_claim(td_store *store, const struct td__run_options *options, int *node_rank,
                            bool *tell_all);

/** Leaves what this node brings along, and a will that speaks of its death. */
td_status td__arrival_introduce(td_store *store, const struct td__run_options *options,
                                int node_rank);

/** --keep-going, when the job has begun: the will says only that this node's workers are gone. */
td_status td__arrival_change_will(td_store *store, const struct td__run_options *options,
                                  int node_rank);

/** When the time to join is over: TD_ERR_TIMEOUT, which names the nodes that have not arrived. */
td_status td__arrival_missing(td_store *store, const struct td__run_options *options);

/** Works out the world from what all nodes bring along; `world` has zeros but for the node's rank and
 *  the port. TD_ERR_MISMATCH: they were not started alike. */
td_status td__arrival_survey(const td_bytes *values, const struct td__run_options *options,
                             struct td__node_world *world);

#endif
