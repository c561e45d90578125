/* How a process on this machine has ended, as far as somebody who is not its parent can know. */
#ifndef TD_OS_ENDING_H
#define TD_OS_ENDING_H

#include <stddef.h>

enum { TD__ENDING_UNKNOWN = -1 };

/** The wait status of a process that has ended: from its entry while its parent has not waited for it
 *  yet, from the kernel's memory of it (Linux 6.15 and later) afterwards. `pidfd` was opened while it
 *  lived. TD__ENDING_UNKNOWN where neither knows. */
int td__ending_of(int pid, int pidfd);

/** The state of a process as /proc has it: 'R', 'T' for stopped, 'Z', …; 0 where that is not known. */
char td__ending_state(int pid);

/** "was killed by SIGKILL", "exited with code 3 without leaving the group", "has ended". */
void td__ending_text(int ending, char *text, size_t room);

#endif
