/* Alarms: the first failure that makes a group useless, and giving a group up on purpose. */
#ifndef TD_GROUP_ABORT_H
#define TD_GROUP_ABORT_H

#include "group/process_group.h"

/** Marks the group as useless with the last error, unless it is already. */
void td__group_break(td_group *group, td_status status);

/** TD_OK, or how the group became useless. Cheap. */
td_status td__group_state(const td_group *group);

/** td_group_abort() for this rank alone. */
td_status td__abort_quietly(td_group *group);

/** The group was given up by `rank` of the root, as far as this rank is concerned. */
void td__abort_here(td_group *group, int rank);

/** Another rank (of the root) has given up the group with this key. On the endpoint's thread. */
void td__abort_hear(struct td__root *root, uint64_t key, int rank);

/** Whether another rank gave this group up before it was made here; then it is useless from the start. */
void td__abort_recall(td_group *group);

#endif
