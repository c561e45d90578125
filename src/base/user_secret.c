/* The user's own secret, which protects jobs on one host that have no secret.
 *
 * 32 random bytes in $XDG_CONFIG_HOME/tandem/secret, or $HOME/.config/tandem/secret, which only the user can
 * read. The first process that needs it writes it to a temporary file, and then calls link(), which fails if
 * the name exists. So the file is complete as soon as it exists, and several processes that start at once all
 * read the same one.
 *
 * The secret itself is never a key: each key is derived for the address of the server, so that jobs of one user
 * do not accept each other's connections. */
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

enum { USER_SECRET = 32, PATH_CAPACITY = 4096 };

#define OR_SET_SECRET "or set TANDEM_SECRET to the same text for every process of the job"

/* The directory of the secret. */
static td_status find_directory(char directory[PATH_CAPACITY])
{
    const char *config = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    int length;
    if (config && config[0] == '/')
        length = snprintf(directory, PATH_CAPACITY, "%s/tandem", config);
    else if (home && home[0] == '/')
        length = snprintf(directory, PATH_CAPACITY, "%s/.config/tandem", home);
    else
        return td_fail(
            TD_ERR_AUTH,
            "the job has no secret, and the user's own secret is below the home directory, but "
            "HOME is %s: set it, " OR_SET_SECRET,
            home && *home ? "not an absolute path" : "not set");
    /* The name of the file must fit, too. */
    return length < PATH_CAPACITY - 32
               ? TD_OK
               : td_fail(TD_ERR_AUTH,
                         "HOME has %d characters, which is too long: shorten it, " OR_SET_SECRET,
                         length);
}

static td_status cannot(const char *what, const char *path, int error)
{
    return td_fail(TD_ERR_AUTH, "cannot %s the user's secret %s: %s; fix that, " OR_SET_SECRET,
                   what, path, td__errno_text(error));
}

/* Why the file cannot be used, or NULL. */
static const char *problem_of(const struct stat *info)
{
    return !S_ISREG(info->st_mode)        ? "is not a regular file: remove it"
           : info->st_uid != geteuid()    ? "belongs to another user: remove it, or set HOME"
           : info->st_mode & 077          ? "can be read or written by other users: chmod 600 it"
           : info->st_size != USER_SECRET ? "does not hold 32 bytes: remove it"
                                          : NULL;
}

/* *there is false if the file does not exist. */
static td_status read_secret(const char *path, uint8_t bytes[USER_SECRET], bool *there)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    *there = fd >= 0 || errno != ENOENT;
    if (fd < 0)
        return *there ? cannot("read", path, errno) : TD_OK;
    const char *wrong = fstat(fd, &info) ? "cannot be checked" : problem_of(&info);
    ssize_t got = wrong ? 0 : read(fd, bytes, USER_SECRET);
    int error = got < 0 ? errno : EIO;
    close(fd);
    if (wrong)
        return td_fail(TD_ERR_AUTH, "the user's secret %s %s, " OR_SET_SECRET, path, wrong);
    return got == USER_SECRET ? TD_OK : cannot("read", path, error);
}

/* Creates the directory and its parents, with access for the user only. */
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
            return cannot("create the directory of", directory, error);
        *end = kept;
        if (!kept)
            return TD_OK;
    }
}

/* 0, or an errno. The file at `path` may then be another process's. */
static int write_secret(const char *directory, const char *path)
{
    uint8_t bytes[USER_SECRET];
    char temporary[PATH_CAPACITY];
    snprintf(temporary, sizeof temporary, "%.*s/secret.XXXXXX", PATH_CAPACITY - 32, directory);
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
        error = errno; /* for a file system without hard links */
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
    char directory[PATH_CAPACITY], path[PATH_CAPACITY + 8];
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

td_status td__secret_of_job(const char *context, char text[65])
{
    uint8_t bytes[USER_SECRET];
    struct td__secret secret = {0};
    TD_TRY(load_user_secret(bytes));
    td__secret_derive(&secret, bytes, sizeof bytes, context);
    OPENSSL_cleanse(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof secret.key; i++)
        snprintf(text + 2 * i, 3, "%02x", secret.key[i]);
    return TD_OK;
}
