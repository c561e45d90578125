/* The user's own secret: what protects jobs on one host that nobody gave a secret.
 *
 * 32 random bytes in $XDG_CONFIG_HOME/tandem/secret, or $HOME/.config/tandem/secret, which only the user can
 * read. The first process that needs it makes it: under another name, and then by link(), which fails where
 * the name is taken. So the file is whole from the moment that it is there, and of several processes that
 * begin at once all read the same one.
 *
 * No job uses the secret itself as key: each key is derived for the address of the server, so that jobs of
 * one user do not accept each other's connections. */
#include "base/auth.h"
#include "base/fail.h"
#include "base/file_limit.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { USER_SECRET = 32, PATH_ROOM = 4096 };

#define WAY_OUT "or set TANDEM_SECRET to the same text for every process of the job"

/* Where it is, without the name itself. */
static td_status find_directory(char directory[PATH_ROOM])
{
    const char *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    int length;
    if (config && config[0] == '/')
        length = snprintf(directory, PATH_ROOM, "%s/tandem", config);
    else if (home && home[0] == '/')
        length = snprintf(directory, PATH_ROOM, "%s/.config/tandem", home);
    else
        return td_fail(
            TD_ERR_AUTH,
            "a job that was given no secret uses one of its user's own, which is kept below "
            "the home directory, but HOME is %s: set it, " WAY_OUT,
            home && *home ? "not an absolute path" : "not set");
    /* Room for the name of the file, too. */
    return length < PATH_ROOM - 32
               ? TD_OK
               : td_fail(TD_ERR_AUTH,
                         "HOME has %d characters, which is too long a path: shorten it, " WAY_OUT,
                         length);
}

static td_status cannot(const char *what, const char *path, int error)
{
    return td_fail(TD_ERR_AUTH, "cannot %s the user's secret %s: %s; make that possible, " WAY_OUT,
                   what, path, td__errno_text(error));
}

/* What is wrong with the file, or NULL. */
static const char *complaint(const struct stat *info)
{
    return !S_ISREG(info->st_mode)        ? "is not a regular file: remove it"
           : info->st_uid != geteuid()    ? "belongs to another user: remove it, or set HOME"
           : info->st_mode & 077          ? "can be read or written by other users: chmod 600 it"
           : info->st_size != USER_SECRET ? "does not hold 32 bytes: remove it"
                                          : NULL;
}

/* *there is false where there is none yet. */
static td_status read_secret(const char *path, uint8_t bytes[USER_SECRET], bool *there)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    *there = fd >= 0 || errno != ENOENT;
    if (fd < 0)
        return *there ? cannot("read", path, errno) : TD_OK;
    const char *wrong = fstat(fd, &info) ? "cannot be looked at" : complaint(&info);
    ssize_t got = wrong ? 0 : read(fd, bytes, USER_SECRET);
    int error = got < 0 ? errno : EIO;
    close(fd);
    if (wrong)
        return td_fail(TD_ERR_AUTH, "the user's secret %s %s, " WAY_OUT, path, wrong);
    return got == USER_SECRET ? TD_OK : cannot("read", path, error);
}

/* Makes the directory and those above it, which are the user's alone. */
static td_status make_directory(char *directory)
{
    for (char *end = directory + 1;; end++) {
        if (*end && *end != '/')
            continue;
        char kept = *end;
        *end = '\0';
        int error = mkdir(directory, 0700) ? errno : 0;
        struct stat info;
        if (error && (stat(directory, &info) || !S_ISDIR(info.st_mode)))
            return cannot("make the directory of", directory, error);
        *end = kept;
        if (!kept)
            return TD_OK;
    }
}

/* 0, or an errno. What is at `path` by then may be another process's. */
static int write_secret(const char *directory, const char *path)
{
    uint8_t bytes[USER_SECRET];
    char temporary[PATH_ROOM];
    snprintf(temporary, sizeof temporary, "%.*s/secret.XXXXXX", PATH_ROOM - 32, directory);
    if (td__random(bytes, sizeof bytes))
        return EIO;
    int fd = mkostemp(temporary, O_CLOEXEC); /* mode 0600 */
    if (fd < 0)
        return errno;
    ssize_t put = td__file_write(fd, bytes, sizeof bytes);
    int error = put < 0 ? errno : put != sizeof bytes ? ENOSPC : 0;
    if (!error && fsync(fd) && errno != EINVAL)
        error = errno;
    if (close(fd) && !error)
        error = errno;
    if (!error && link(temporary, path) && errno != EEXIST) {
        error = errno; /* a file system without links has this instead */
        if ((error == EPERM || error == EOPNOTSUPP || error == ENOSYS) &&
            (!renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RENAME_NOREPLACE) || errno == EEXIST))
            error = 0;
    }
    unlink(temporary);
    OPENSSL_cleanse(bytes, sizeof bytes);
    return error;
}

static td_status load_user_secret(uint8_t bytes[USER_SECRET])
{
    char directory[PATH_ROOM], path[PATH_ROOM + 8];
    bool there;
    TD_TRY(find_directory(directory));
    snprintf(path, sizeof path, "%s/secret", directory);
    TD_TRY(read_secret(path, bytes, &there));
    if (there)
        return TD_OK;
    TD_TRY(make_directory(directory));
    int error = write_secret(directory, path);
    if (error)
        return cannot("write", path, error);
    TD_TRY(read_secret(path, bytes, &there));
    return there ? TD_OK : cannot("read", path, ENOENT);
}

td_status td__secret_bind(struct td__secret *secret, const char *context)
{
    uint8_t bytes[USER_SECRET];
    if (secret->bound)
        return TD_OK;
    TD_TRY(load_user_secret(bytes));
    td__secret_derive(secret, bytes, sizeof bytes, context);
    OPENSSL_cleanse(bytes, sizeof bytes);
    return TD_OK;
}
