/* The file of a file store: which of its users is at work in it, and whether it has any.
 *
 *     byte 0    locked exclusively by whoever is at work in it
 *     byte 1    locked shared by everyone who has it open, until it is closed
 *
 * The locks are those of open file descriptions: two users in one process keep each other out as
 * those of two processes do, and the kernel drops them with the process, however it ends. So what is
 * in a file that nobody has open was left there earlier:
 *
 *     open     under byte 0: byte 1 can be had exclusively -> nobody else has it open. Whoever finds
 *              that is the first, and begins the file anew
 *     close    under byte 0: byte 1 can be had exclusively -> nobody else has it open: remove it
 *
 * A fork would keep byte 1 locked for as long as it lives, and byte 0 if its parent is killed at
 * work. The child therefore gives up its copies first of all (base/fork.h); the parent's locks stay.
 *
 * Those who only read do not share byte 0: their locks overlapped, and eight readers in a loop kept a
 * writer out for seconds.
 *
 * There is no falling back to flock() where these locks are missing: it knows no ranges, and two
 * processes that choose differently would not keep each other out. */
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
 *  whether nobody else has it open. */
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
