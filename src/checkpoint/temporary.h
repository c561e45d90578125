/* Temporary names of what is being written: ".tandem-", 16 digits, and a suffix for the kind.
 *
 * The writer holds a lock (flock) on its temporary file or directory, which the system drops when the process ends. A process
 * that gets the lock knows that the writer is dead, and may remove what it left; a pid would not do, since it may be reused or
 * of another host. Something can be removed between its creation and its lock: the writer notices that its link count is
 * 0, and begins again. */
#ifndef TD_CHECKPOINT_TEMPORARY_H
#define TD_CHECKPOINT_TEMPORARY_H

#include <stdbool.h>

enum { TD__TEMPORARY_ATTEMPTS = 100 }; /* to find a name that is free */

/** A new name in `directory`, for free(); NULL with errno. */
char *td__temporary_name(const char *directory, const char *suffix);

/** Whether `name`, without its directory, is such a name with this suffix. */
bool td__temporary_is(const char *name, const char *suffix);

/** Locks what this process has just created and opened. Otherwise closes it, and returns -1 with EAGAIN: another process
 *  has taken it for a dead writer's. */
int td__temporary_lock(int fd);

/** "dir" of "dir/file", "/" of "/file", "." of "file", for free(). */
char *td__path_parent(const char *path);

/** Syncs a directory; -1 with errno. Some file systems cannot, and that is fine. */
int td__sync_directory(const char *path);

#endif
