/* Alarms: the first failure that makes a group useless, and giving a group up on purpose. */
#ifndef TD_GROUP_ABORT_H
#define TD_GROUP_ABORT_H

#include "group/process_group.h"

/* Why a group is given up, as the ranks tell each other: one number, in which this stands lowest. */
enum {
    TD__GIVEN_UP_ABORT,  /* td_group_abort() */
    TD__GIVEN_UP_MIXED,  /* a monitored barrier met another call */
    TD__GIVEN_UP_SHRINK, /* td_group_shrink() */
};

/** For a rank in a monitored barrier: `rank` of the root is in its collective `sequence` of this kind
 *  instead. */
uint64_t td__given_up_mixed(int rank, td_op_kind kind, uint64_t sequence);

/** For a rank that shrinks the group, because of those that it knows to be lost. */
uint64_t td__given_up_shrink(const td_group *group);

/** Marks the group as useless with the last error, unless it is already. */
void td__group_break(td_group *group, td_status status);

/** TD_OK, or how the group became useless. Cheap. */
td_status td__group_state(const td_group *group);

/** The group was given up by `rank` of the root, as far as this rank is concerned. */
void td__abort_here(td_group *group, int rank, uint64_t why);

/** It is given up by this rank, which tells the others where they do not know yet. The last error stays as
 *  it was. */
void td__abort_own(td_group *group, uint64_t why, bool tell);

/** Another rank (of the root) has given up the group with this key. On the endpoint's thread. */
void td__abort_hear(struct td__root *root, uint64_t key, int rank, uint64_t why);

/** Whether another rank gave this group up before it was made here; then it is useless from the start. */
void td__abort_recall(td_group *group);

#endif
