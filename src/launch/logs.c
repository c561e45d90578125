/* Files for the workers' output; see stream.h. */
#include "launch/stream.h"

#include "base/fail.h"
#include "base/file_limit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static td_status too_long(const char *directory)
{
    return td_fail(TD_ERR_INVALID, "the path of a log file below %.200s… would be too long",
                   directory);
}

/* Makes a directory and those above it. */
static td_status make_directories(char *path)
{
    for (char *slash = path; slash;) {
        slash = strchr(slash + 1, '/');
        if (slash)
            *slash = '\0';
        int failed = mkdir(path, 0777) && errno != EEXIST;
        int error = errno;
        if (slash)
            *slash = '/';
        if (failed)
            return td_fail(TD_ERR_SYSTEM, "cannot make the directory %s for output: %s", path,
                           td__errno_text(error));
    }
    return TD_OK;
}

static td_status make_fresh(char path[PATH_MAX])
{
    const char *parent = getenv("TMPDIR");
    int size = snprintf(path, PATH_MAX, "%s/tdrun_XXXXXX", parent && *parent ? parent : "/tmp");
    if (size >= PATH_MAX)
        return too_long(parent);
    if (!mkdtemp(path))
        return td_fail(TD_ERR_SYSTEM, "cannot make a directory for output, %s: %s", path,
                       td__errno_text(errno));
    return TD_OK;
}

td_status td__logs_open(struct td__logs *logs, const char *directory, const char *run_id, int node)
{
    char name[256], node_name[32] = "";
    snprintf(name, sizeof name, "%s", run_id);
    for (char *c = name; *c; c++)
        if (*c == '/' || (c == name && *c == '.'))
            *c = '_';
    if (node >= 0)
        snprintf(node_name, sizeof node_name, "/node_%d", node);
    logs->fresh[0] = '\0';
    if (!directory) {
        TD_TRY(make_fresh(logs->fresh));
        directory = logs->fresh;
    }
    int size = snprintf(logs->directory, sizeof logs->directory, "%s/%s%s", directory, name,
                        node_name);
    if (size >= (int)sizeof logs->directory)
        return too_long(directory);
    return make_directories(logs->directory);
}

td_status td__log_file_open(struct td__log_file *file, const struct td__logs *logs, int attempt,
                            const char *owner, const char *name)
{
    char path[PATH_MAX];
    int size = snprintf(path, sizeof path, "%s/attempt_%d/%s/%s.log", logs->directory, attempt,
                        owner, name);
    if (size >= (int)sizeof path)
        return too_long(logs->directory);
    char *slash = strrchr(path, '/');
    *slash = '\0';
    TD_TRY(make_directories(path));
    *slash = '/';
    char *copy = strdup(path);
    if (!copy)
        return td__fail_nomem("log file");
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        int error = errno;
        free(copy);
        return td_fail(TD_ERR_SYSTEM, "cannot write %s: %s", path, td__errno_text(error));
    }
    *file = (struct td__log_file){.fd = fd, .path = copy};
    return TD_OK;
}

bool td__log_file_write(struct td__log_file *file, const void *data, size_t size)
{
    if (file->fd < 0 || file->error)
        return true;
    file->error = td__file_write_all(file->fd, data, size);
    return !file->error;
}

bool td__log_file_close(struct td__log_file *file)
{
    bool fine = true;
    if (file->fd >= 0 && close(file->fd) && errno != EINTR && !file->error) {
        file->error = errno; /* a disk quota over a network, say */
        fine = false;
    }
    file->fd = -1;
    return fine;
}
