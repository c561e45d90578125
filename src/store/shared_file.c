/* A file that several processes have open; see shared_file.h.
 *
 * A lock is tried again and again, with growing pauses: fcntl() that waits for one has no deadline. */
#include "store/shared_file.h"

#include "base/fail.h"
#include "base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    WORK_BYTE = 0,
    OPEN_BYTE = 1,
    OPEN_ATTEMPTS = 1000,
    FIRST_PAUSE_NS = 50000,
    LONGEST_PAUSE_NS = 2000000,
};

/* 0 or an errno. */
static int open_fd(struct td__shared_file *file)
{
    td__fork_hold();
    file->fd = open(file->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int error = file->fd < 0 ? errno : 0;
    td__fork_exclude(file->fd);
    td__fork_release();
    return error;
}

bool td__shared_file_inherited(const struct td__shared_file *file)
{
    return file->forks != td__fork_generation();
}

/* ---- Locks ------------------------------------------------------------------------------------ */

/* Locks, converts or unlocks `length` bytes (0: all that follow) now or not at all. 0, EAGAIN when
 * the lock of another handle is in the way, or another errno. */
static int try_lock(const struct td__shared_file *file, short type, int byte, int length)
{
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = length};
    if (!fcntl(file->fd, F_OFD_SETLK, &range))
        return 0;
    return errno == EACCES || errno == EINTR ? EAGAIN : errno;
}

static td_status fail_lock(const struct td__shared_file *file, int error)
{
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "file store: cannot lock \"%s\": %s; give a path on a file system that has fcntl locks, or "
        "use a tcp store",
        file->path, td__errno_text(error));
}

td_status td__shared_file_lock(const struct td__shared_file *file, td__deadline deadline)
{
    int error;
    int64_t pause = FIRST_PAUSE_NS;
    while ((error = try_lock(file, F_WRLCK, WORK_BYTE, 1)) == EAGAIN)
        if (!td__pause_longer(&pause, LONGEST_PAUSE_NS, deadline))
            return td_fail(
                TD_ERR_TIMEOUT,
                "file store: other processes kept \"%s\" locked until the time was over; is one of "
                "them stopped (state T in ps)?",
                file->path);
    return error ? fail_lock(file, error) : TD_OK;
}

void td__shared_file_unlock(const struct td__shared_file *file)
{
    try_lock(file, F_UNLCK, WORK_BYTE, 1);
}

/* ---- Opening and closing ---------------------------------------------------------------------- */

bool td__shared_file_in_place(const struct td__shared_file *file)
{
    struct stat here, there;
    return !fstat(file->fd, &here) && !stat(file->path, &there) && here.st_dev == there.st_dev &&
           here.st_ino == there.st_ino;
}

static char *absolute_path(const char *path)
{
    if (*path == '/')
        return strdup(path);
    char *absolute = NULL, *directory = getcwd(NULL, 0);
    if (directory && asprintf(&absolute, "%s/%s", directory, path) < 0)
        absolute = NULL;
    free(directory);
    return absolute;
}

static td_status fail_open(const char *path, int error)
{
    if (error == EISDIR)
        return td_fail(TD_ERR_INVALID,
                       "file store: \"%s\" is a directory; give the path of a file in it", path);
    return td_fail(TD_ERR_SYSTEM, "file store: cannot open \"%s\": %s%s", path,
                   td__errno_text(error),
                   error == ENOENT ? "; the directory of the file must exist" : "");
}

static td_status lock_regular(const struct td__shared_file *file, td__deadline deadline)
{
    struct stat info;
    if (fstat(file->fd, &info))
        return fail_open(file->path, errno);
    if (!S_ISREG(info.st_mode))
        return td_fail(TD_ERR_INVALID, "file store: \"%s\" is not a regular file", file->path);
    return td__shared_file_lock(file, deadline);
}

/* Opens and locks it. The last handle may be closed in between, and the file removed: then once more. */
static td_status open_locked(struct td__shared_file *file, td__deadline deadline)
{
    for (int i = 0; i < OPEN_ATTEMPTS; i++) {
        int error = open_fd(file);
        if (error)
            return fail_open(file->path, error);
        td_status status = lock_regular(file, deadline);
        if (!status && td__shared_file_in_place(file))
            return TD_OK;
        close(file->fd);
        if (status)
            return status;
    }
    return td_fail(TD_ERR_STATE,
                   "file store: cannot open \"%s\": it was replaced each time, %d times",
                   file->path, OPEN_ATTEMPTS);
}

td_status td__shared_file_open(struct td__shared_file *file, const char *path,
                               td__deadline deadline, bool *first)
{
    *file = (struct td__shared_file){.fd = -1, .forks = td__fork_generation()};
    file->path = absolute_path(path);
    if (!file->path)
        return fail_open(path, errno);
    td_status status = open_locked(file, deadline);
    if (status)
        goto free_path;

    int error = try_lock(file, F_WRLCK, OPEN_BYTE, 1);
    *first = !error;
    if (!error || error == EAGAIN)
        error = try_lock(file, F_RDLCK, OPEN_BYTE, 1);
    if (!error)
        return TD_OK;
    status = fail_lock(file, error);
    close(file->fd);
free_path:
    free(file->path);
    return status;
}

/* Removes the file where no other handle has it open, and it was not removed before. */
static td_status remove_if_last(const struct td__shared_file *file, td__deadline deadline)
{
    TD_TRY(td__shared_file_lock(file, deadline));
    if (try_lock(file, F_WRLCK, OPEN_BYTE, 1) || !td__shared_file_in_place(file))
        return TD_OK;
    if (unlink(file->path))
        return td_fail(TD_ERR_SYSTEM, "file store: cannot remove \"%s\": %s", file->path,
                       td__errno_text(errno));
    return TD_OK;
}

td_status td__shared_file_close(struct td__shared_file *file, bool remove, td__deadline deadline)
{
    td_status status = TD_OK;
    if (!td__shared_file_inherited(file)) {
        if (remove)
            status = remove_if_last(file, deadline);
        try_lock(file, F_UNLCK, 0, 0); /* a child that is about to exec() may still have it open */
    }
    close(file->fd);
    free(file->path);
    return status;
}
