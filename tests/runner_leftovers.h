/* What a test leaves behind: the runner finds, ends and removes it. */
#ifndef TD_TESTS_RUNNER_LEFTOVERS_H
#define TD_TESTS_RUNNER_LEFTOVERS_H

#include <stddef.h>

/** Calls `fn` for each child of this process, with its state and name as /proc has them. */
void td_test_each_child(void (*fn)(void *arg, int pid, char state, const char *comm), void *arg);

/** Kills all children, and writes their names into `names`. */
void td_test_kill_children(char *names, size_t room);

/** Returns when no child is left. Children that are alive after `grace_s` are killed and named. */
void td_test_end_children(int grace_s, char *names, size_t room);

/** Removes a directory with all that is in it, or prints why it cannot. */
void td_test_remove_tree(const char *path);

#endif
