/* What ranks ask each other about the barrier that names who is missing. */
#ifndef TD_GROUP_MONITORED_BARRIER_H
#define TD_GROUP_MONITORED_BARRIER_H

#include "group/process_group.h"

/** Answers TD__TOPIC_BARRIER of `rank` about the group with this key. On the endpoint's thread. */
void td__barrier_answer(struct td__root *root, uint64_t key, int rank, struct td__buffer *answer);

#endif
