/* Directories of sharded checkpoints. One is written under a temporary name beside its own, and renamed when it is complete,
 * so that a checkpoint is either there as a whole or not at all. One of the same name is exchanged with it in one step.
 *
 * Rank 0 holds a lock on the temporary directory, by which others see that it lives (temporary.h). */
#include "base/fail.h"
#include "base/file_limit.h"
#include "base/thread.h"
#include "checkpoint/sharded.h"
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

#define SUFFIX ".sharded"

/* ---- Names -------------------------------------------------------------------------------------------- */

/* The path without slashes at its end, and its parent, for free(). */
static bool split_path(const char *path, char **own, char **parent)
{
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    *own = strndup(path, length);
    *parent = *own ? td__path_parent(*own) : NULL;
    if (*parent)
        return true;
    free(*own);
    return false;
}

/* ---- Removing ------------------------------------------------------------------------------------------ */

/* Removes the files of a directory that a checkpoint has, and the directory. Others stay, and so does the directory then. */
static int remove_contents(const char *path)
{
    DIR *stream = opendir(path);
    if (!stream)
        return errno == ENOENT ? 0 : errno;
    for (struct dirent *entry; (entry = readdir(stream));)
        if (!strcmp(entry->d_name, TD__INDEX_NAME) || !strncmp(entry->d_name, "shard-", 6))
            unlinkat(dirfd(stream), entry->d_name, 0);
    closedir(stream);
    return rmdir(path) && errno != ENOENT ? errno : 0;
}

int td__sharded_directory_remove(const char *path)
{
    char *own, *parent;
    if (!split_path(path, &own, &parent))
        return ENOMEM;
    char *temporary = td__temporary_name(parent, SUFFIX);
    int error = !temporary || rename(own, temporary) ? errno : remove_contents(temporary);
    free(temporary);
    free(own);
    free(parent);
    return error;
}

void td__sharded_directory_sweep(const char *parent)
{
    DIR *stream = opendir(parent);
    if (!stream)
        return;
    for (struct dirent *entry; (entry = readdir(stream));) {
        if (!td__temporary_is(entry->d_name, SUFFIX))
            continue;
        int fd = openat(dirfd(stream), entry->d_name,
                        O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0)
            continue;
        char *path = NULL;
        if (!flock(fd, LOCK_EX | LOCK_NB) && asprintf(&path, "%s/%s", parent, entry->d_name) > 0) {
            if (!remove_contents(path))
                td_log(TD_LOG_INFO, "removed %s, a checkpoint that was not complete", path);
            free(path);
        }
        close(fd);
    }
    closedir(stream);
}

/* ---- Writing ------------------------------------------------------------------------------------------- */

static td_status refuse(const struct td__sharded_directory *directory)
{
    return td_fail(TD_ERR_SYSTEM, "%s: %s cannot be written: %s", directory->call, directory->path,
                   td__errno_text(errno));
}

/* Only a checkpoint and an empty directory are replaced. */
static td_status check_target(const struct td__sharded_directory *directory)
{
    struct stat there;
    if (lstat(directory->path, &there))
        return TD_OK;
    DIR *stream = S_ISDIR(there.st_mode) ? opendir(directory->path) : NULL;
    if (!stream && S_ISDIR(there.st_mode))
        return refuse(directory);
    bool replaceable = stream != NULL;
    bool has_index = stream && !faccessat(dirfd(stream), TD__INDEX_NAME, F_OK, 0);
    for (struct dirent *entry; !has_index && replaceable && (entry = readdir(stream));)
        replaceable = !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..");
    if (stream)
        closedir(stream);
    if (replaceable)
        return TD_OK;
    return td_fail(TD_ERR_SYSTEM,
                   "%s: %s cannot be written: it is there, and neither a sharded checkpoint nor an "
                   "empty directory",
                   directory->call, directory->path);
}

/* Makes and locks a temporary directory; -1 with errno, EAGAIN to try again. */
static int make_locked(const char *temporary)
{
    if (mkdir(temporary, 0777)) {
        errno = errno == EEXIST ? EAGAIN : errno;
        return -1;
    }
    td__fork_hold(); /* a forked child would keep the lock */
    int fd = open(temporary, O_RDONLY | O_DIRECTORY | O_CLOEXEC), error = errno;
    td__fork_exclude(fd);
    td__fork_release();
    if (fd < 0)
        errno = error == ENOENT ? EAGAIN : error;
    return fd < 0 || td__temporary_lock(fd) ? -1 : fd;
}

static void forget(struct td__sharded_directory *directory)
{
    if (directory->lock >= 0)
        close(directory->lock);
    free(directory->path);
    free(directory->parent);
    free(directory->temporary);
    *directory = (struct td__sharded_directory){.lock = -1};
}

td_status td__sharded_directory_open(struct td__sharded_directory *directory, const char *call,
                                     const char *path)
{
    *directory = (struct td__sharded_directory){.call = call, .lock = -1};
    if (!split_path(path, &directory->path, &directory->parent))
        return td__fail_nomem(call);
    td_status status = check_target(directory);
    for (int attempt = 0; !status && directory->lock < 0; attempt++) {
        free(directory->temporary);
        directory->temporary = td__temporary_name(directory->parent, SUFFIX);
        directory->lock = directory->temporary ? make_locked(directory->temporary) : -1;
        if (directory->lock < 0 && (errno != EAGAIN || attempt == TD__TEMPORARY_ATTEMPTS))
            status = refuse(directory);
    }
    if (status)
        forget(directory);
    return status;
}

void td__sharded_directory_drop(struct td__sharded_directory *directory)
{
    if (!directory->temporary)
        return;
    int error = remove_contents(directory->temporary);
    if (error)
        td_log(TD_LOG_WARN, "%s: %s, which is not complete, cannot be removed: %s", directory->call,
               directory->temporary, td__errno_text(error));
    forget(directory);
}

static td_status write_index(const struct td__sharded_directory *directory,
                             const struct td__buffer *index)
{
    int fd = openat(directory->lock, TD__INDEX_NAME, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    int error = fd < 0 ? errno : td__file_write_all(fd, index->data, index->size);
    if (!error && fsync(fd))
        error = errno;
    if (fd >= 0)
        close(fd);
    if (!error && fsync(directory->lock) && errno != EINVAL)
        error = errno;
    return error ? td_fail(TD_ERR_SYSTEM, "%s: %s/" TD__INDEX_NAME " cannot be written: %s",
                           directory->call, directory->path, td__errno_text(error))
                 : TD_OK;
}

/* Gives the directory its name. *old: the temporary name of what was there before, for free(). */
static td_status rename_it(const struct td__sharded_directory *directory, char **old)
{
    struct stat there;
    *old = NULL;
    if (lstat(directory->path, &there))
        return rename(directory->temporary, directory->path) ? refuse(directory) : TD_OK;
    if (!renameat2(AT_FDCWD, directory->temporary, AT_FDCWD, directory->path, RENAME_EXCHANGE)) {
        *old = strdup(directory->temporary);
        return TD_OK;
    }
    if (errno != EINVAL && errno != ENOSYS)
        return refuse(directory);
    /* A file system that cannot exchange: for a moment neither of them has the name. */
    *old = td__temporary_name(directory->parent, SUFFIX);
    if (!*old || rename(directory->path, *old))
        return refuse(directory);
    if (!rename(directory->temporary, directory->path))
        return TD_OK;
    td_status status = refuse(directory);
    rename(*old, directory->path);
    free(*old);
    *old = NULL;
    return status;
}

td_status td__sharded_directory_commit(struct td__sharded_directory *directory,
                                       const struct td__buffer *index)
{
    char *old = NULL;
    td_status status = write_index(directory, index);
    if (!status)
        status = rename_it(directory, &old);
    if (status) {
        td__sharded_directory_drop(directory);
        return status;
    }
    if (td__sync_directory(directory->parent))
        status = td_fail(TD_ERR_SYSTEM,
                         "%s: %s is written, but may be lost in a system crash: the directory "
                         "cannot be synced: %s",
                         directory->call, directory->path, td__errno_text(errno));
    if (old)
        remove_contents(old);
    free(old);
    forget(directory);
    return status;
}
