/* Agreeing on who is left; see shrink.c. */
#ifndef TD_GROUP_SHRINK_H
#define TD_GROUP_SHRINK_H

#include "group/process_group.h"

/** Answers a question of `rank`, who takes part in shrinking the group with this key. On the endpoint's
 *  thread. */
void td__shrink_answer(struct td__root *root, int rank, uint64_t key, uint64_t value,
                       struct td__buffer *answer);

#endif
