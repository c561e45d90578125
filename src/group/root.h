/* What a world and all groups of its ranks have in common; see process_group.h. */
#ifndef TD_GROUP_ROOT_H
#define TD_GROUP_ROOT_H

#include "group/process_group.h"

/** Ends the first group of a root, all that are left, and the root. */
void td__root_close(td_group *first);

/** Makes a group of ranks of the root; not in its list yet. */
td_status td__group_make(struct td__root *root, const int *ranks, int count,
                         const td_group_options *options, td_group **group);

/** Waits for what was started, and frees the group. */
void td__group_free(td_group *group);

void td__root_forget_names(struct td__root *root);

#endif
