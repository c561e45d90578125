/* Ending everything that descends from this process, daemons too. */
#ifndef TD_LAUNCH_REAP_TREE_H
#define TD_LAUNCH_REAP_TREE_H

#include "base/clock.h"

/** Makes this process the one that adopts its descendants when their parents die, so that none of
 *  them can get away. False where the system cannot do that. */
bool td__reap_tree_prepare(void);

/**
 * Kills all descendants of this process with SIGKILL, and reaps them; also those that appear while
 * it does so. Costs one system call when there are none. Returns how many are left when the deadline
 * has passed: processes that are stuck in the kernel, or that belong to another user.
 *
 * Takes the exit status of any child; blocks SIGCHLD meanwhile.
 */
int td__reap_tree(td__deadline deadline);

#endif
