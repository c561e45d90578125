/* Temporary names; see temporary.h. */
#include "checkpoint/temporary.h"

#include "base/auth.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX ".tandem-"
enum { DIGITS = 16 };

char *td__temporary_name(const char *directory, const char *suffix)
{
    uint64_t number = 0;
    char *name = NULL;
    if (td__random(&number, sizeof number)) {
        errno = EIO;
        return NULL;
    }
    if (asprintf(&name, "%s/" PREFIX "%016llx%s", directory, (unsigned long long)number, suffix) <
        0) {
        errno = ENOMEM;
        return NULL;
    }
    return name;
}

bool td__temporary_is(const char *name, const char *suffix)
{
    size_t prefix = strlen(PREFIX);
    return !strncmp(name, PREFIX, prefix) && strspn(name + prefix, "0123456789abcdef") == DIGITS &&
           !strcmp(name + prefix + DIGITS, suffix);
}

int td__temporary_lock(int fd)
{
    struct stat there;
    bool busy = flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK;
    if (!busy && (fstat(fd, &there) || there.st_nlink > 0))
        return 0;
    close(fd);
    errno = EAGAIN;
    return -1;
}

char *td__path_parent(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return strdup(".");
    return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

int td__sync_directory(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int result = fsync(fd), error = errno;
    close(fd);
    errno = error;
    return result && error == EINVAL ? 0 : result;
}
