/* The file of a file store, and the locks of the handles that have it open.
 *
 *     byte 0    locked exclusively by the handle that reads or writes the file
 *     byte 1    locked shared by every handle, from open to close
 *
 * The locks are those of open file descriptions: two handles in one process exclude each other as those of two
 * processes do, and the kernel drops them with the process, however it ends. So a file in which byte 1 is not
 * locked was left by an earlier job:
 *
 *     open     with byte 0 locked: byte 1 can be locked exclusively -> no other handle has the file open; this
 *              one is the first, and empties the file
 *     close    with byte 0 locked: byte 1 can be locked exclusively -> this is the last handle: remove the file
 *
 * A forked child would keep byte 1 locked as long as it lives, and byte 0 if its parent is killed while it holds
 * that. The child therefore closes its copies first of all (base/thread.h); the parent's locks stay.
 *
 * Readers lock byte 0 exclusively, too: shared locks overlapped, and eight readers in a loop kept a writer
 * waiting for seconds.
 *
 * There is no fallback to flock() where these locks are missing: it has no ranges, and two
 * processes that choose differently would not exclude each other. */
#ifndef TD_STORE_SHARED_FILE_H
#define TD_STORE_SHARED_FILE_H

#include "base/clock.h"

#include <tandem/base.h>

struct td__shared_file {
    int fd;
    char *path;     /* absolute: it may be closed in another working directory */
    unsigned forks; /* td__fork_generation() of the process that opened it */
};

/** Opens `path`, and makes the file where it is not there. On success it is locked, and *first says
 *  whether no other handle has it open. */
td_status td__shared_file_open(struct td__shared_file *file, const char *path,
                               td__deadline deadline, bool *first);

/** Closes it, locked or not. With `remove`, the last one to close it removes the file; when the lock
 *  cannot be had for that, it is closed all the same. In a fork it only frees what `file` holds. */
td_status td__shared_file_close(struct td__shared_file *file, bool remove, td__deadline deadline);

/** Locks it. One user of `file` at a time: threads need a lock of their own. */
td_status td__shared_file_lock(const struct td__shared_file *file, td__deadline deadline);
void td__shared_file_unlock(const struct td__shared_file *file);

/** Whether this process is a fork of the one that opened it, and cannot use it. */
bool td__shared_file_inherited(const struct td__shared_file *file);

/** Whether its path still leads to it. */
bool td__shared_file_in_place(const struct td__shared_file *file);

#endif
