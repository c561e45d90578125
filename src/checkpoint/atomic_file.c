/* Atomic files: data go to a temporary file in the same directory, which is synced and renamed over
 * the former file; then the directory is synced. A crash at any moment leaves the former file or
 * the new one complete.
 *
 * The writer holds a lock on its temporary file, by which others see that it lives (temporary.h). */
#include "base/fail.h"
#include "base/file_limit.h"
#include "base/thread.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/temporary.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX ".tmp"

static td_status refuse(const struct td__atomic_file *file)
{
    return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be written: %s", file->call, file->path,
                   td__errno_text(errno));
}

/* A directory, a device, or a file without write permission is not replaced. */
static td_status check_target(const struct td__atomic_file *file)
{
    struct stat there;
    size_t length = strlen(file->path);
    if (length == 0 || file->path[length - 1] == '/')
        return td_fail(TD_ERR_INVALID, "%s: \"%s\" is no name of a file", file->call, file->path);
    if (stat(file->path, &there))
        return TD_OK;
    if (!S_ISREG(there.st_mode))
        return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be written: it is %s", file->call, file->path,
                       S_ISDIR(there.st_mode) ? "a directory" : "there, and is no regular file");
    return faccessat(AT_FDCWD, file->path, W_OK, AT_EACCESS) ? refuse(file) : TD_OK;
}

/* Creates and locks a temporary file; -1 with errno, EAGAIN to try again. */
static int create_locked(const char *temporary)
{
    td__fork_hold(); /* a forked child would keep the lock */
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), error = errno;
    td__fork_exclude(fd);
    td__fork_release();
    if (fd < 0)
        errno = error == EEXIST ? EAGAIN : error;
    return fd < 0 || td__temporary_lock(fd) ? -1 : fd;
}

td_status td__atomic_file_open(struct td__atomic_file *file, const char *call, const char *path)
{
    *file = (struct td__atomic_file){.call = call, .path = path, .fd = -1};
    TD_TRY(check_target(file));
    file->directory = td__path_parent(path);
    if (!file->directory)
        return td__fail_nomem(call);
    for (int attempt = 0; attempt < TD__TEMPORARY_ATTEMPTS && file->fd < 0; attempt++) {
        free(file->temporary);
        file->temporary = td__temporary_name(file->directory, SUFFIX);
        file->fd = file->temporary ? create_locked(file->temporary) : -1;
        if (file->fd < 0 && errno != EAGAIN)
            break;
    }
    if (file->fd >= 0)
        return TD_OK;
    td_status status = td_fail(TD_ERR_SYSTEM, "%s: %s cannot be written: the directory %s: %s",
                               call, path, file->directory, td__errno_text(errno));
    free(file->directory);
    free(file->temporary);
    return status;
}

td_status td__atomic_file_write(struct td__atomic_file *file, const void *data, size_t size)
{
    errno = td__file_write_all(file->fd, data, size);
    return errno ? refuse(file) : TD_OK;
}

td_status td__atomic_file_rewrite(struct td__atomic_file *file, size_t at, const void *data,
                                  size_t size)
{
    ssize_t written;
    do
        written = td__file_pwrite(file->fd, data, size, (off_t)at);
    while (written < 0 && errno == EINTR);
    if (written == (ssize_t)size)
        return TD_OK;
    if (written >= 0)
        errno = EIO;
    return refuse(file);
}

static void forget(struct td__atomic_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    free(file->directory);
    free(file->temporary);
}

void td__atomic_file_drop(struct td__atomic_file *file)
{
    unlink(file->temporary);
    forget(file);
}

td_status td__atomic_file_commit(struct td__atomic_file *file)
{
    td_status status = TD_OK;
    if (fsync(file->fd))
        status = refuse(file);
    else if (rename(file->temporary, file->path))
        status = refuse(file);
    if (status) {
        td__atomic_file_drop(file);
        return status;
    }
    if (td__sync_directory(file->directory))
        status = td_fail(TD_ERR_SYSTEM,
                         "%s: %s is written, but may be lost in a system crash: the directory "
                         "cannot be synced: %s",
                         file->call, file->path, td__errno_text(errno));
    forget(file);
    return status;
}

td_status td__atomic_file_directory(const char *call, const char *path)
{
    if (mkdir(path, 0777)) {
        if (errno == EEXIST)
            return TD_OK;
        return td_fail(TD_ERR_SYSTEM, "%s: the directory %s cannot be made: %s", call, path,
                       td__errno_text(errno));
    }
    /* Its own entry must be synced, too. */
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    char *name = strndup(path, length), *parent = name ? td__path_parent(name) : NULL;
    td_status status = parent ? TD_OK : td__fail_nomem(call);
    if (!status && td__sync_directory(parent))
        status = td_fail(TD_ERR_SYSTEM, "%s: the directory %s cannot be synced: %s", call, parent,
                         td__errno_text(errno));
    free(name);
    free(parent);
    return status;
}

/* ---- Stale files --------------------------------------------------------------------------------- */

void td__atomic_file_sweep(const char *directory)
{
    DIR *stream = opendir(directory);
    if (!stream)
        return;
    for (struct dirent *entry; (entry = readdir(stream));) {
        if (!td__temporary_is(entry->d_name, SUFFIX))
            continue;
        int fd = openat(dirfd(stream), entry->d_name,
                        O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0)
            continue;
        if (!flock(fd, LOCK_EX | LOCK_NB) && !unlinkat(dirfd(stream), entry->d_name, 0))
            td_log(TD_LOG_INFO, "removed %s/%s, a temporary file of a process that has ended",
                   directory, entry->d_name);
        close(fd);
    }
    closedir(stream);
}
