/* Descriptors that a forked child must not keep; see thread.h.
 *
 * A table by descriptor has the file that it referred to when it was excluded. Entries are not removed: one
 * whose descriptor now refers to another file is skipped. So close() needs no counterpart, and descriptors of
 * the program are never touched. */
#include "base/thread.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MIN_CAPACITY = 256 };

struct excluded {
    dev_t device;
    ino_t file; /* 0: none */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken last */
static struct excluded *table;
static int capacity;

void td__fork_hold(void)
{
    pthread_mutex_lock(&lock);
}

void td__fork_release(void)
{
    pthread_mutex_unlock(&lock);
}

static bool grow_table(int fd)
{
    if (fd < capacity)
        return true;
    int wanted = capacity ? capacity : MIN_CAPACITY;
    while (wanted <= fd)
        wanted *= 2;
    struct excluded *grown = realloc(table, sizeof *grown * (size_t)wanted);
    if (!grown)
        return false;
    memset(grown + capacity, 0, sizeof *grown * (size_t)(wanted - capacity));
    table = grown;
    capacity = wanted;
    return true;
}

/* Without memory the child keeps its copy: peers then detect the parent's death later. */
void td__fork_exclude(int fd)
{
    struct stat file;
    if (fd >= 0 && !fstat(fd, &file) && grow_table(fd))
        table[fd] = (struct excluded){.device = file.st_dev, .file = file.st_ino};
}

/* An unconnected socket takes the number, so that a later close() in the child closes no other descriptor. If
 * no descriptor is left for that socket, the number is closed, and the socket for the next one takes it. */
static void replace(int fd, int *unconnected)
{
    if (*unconnected < 0)
        *unconnected = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (*unconnected < 0 || dup3(*unconnected, fd, O_CLOEXEC) < 0)
        close(fd);
}

/* Async-signal-safe calls only: the parent may have had other threads. */
static void in_child(void)
{
    int unconnected = -1;
    for (int fd = 0; fd < capacity; fd++) {
        struct stat file;
        if (table[fd].file && !fstat(fd, &file) && file.st_dev == table[fd].device &&
            file.st_ino == table[fd].file)
            replace(fd, &unconnected);
        table[fd].file = 0;
    }
    if (unconnected >= 0)
        close(unconnected);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(td__fork_hold, td__fork_release, in_child);
}
