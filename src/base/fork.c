/* Descriptors that a forked child must not keep; see thread.h.
 *
 * A table by descriptor says which file it stood for when it was excluded. Its entries are not removed: one
 * whose descriptor stands for another file by now is passed over. So no close() can be forgotten, and a
 * descriptor of the program's own is never touched. */
#include "base/thread.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LEAST_ROOM = 256 };

struct excluded {
    dev_t device;
    ino_t file; /* 0: none */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken last */
static struct excluded *table;
static int room;

void td__fork_hold(void)
{
    pthread_mutex_lock(&lock);
}

void td__fork_release(void)
{
    pthread_mutex_unlock(&lock);
}

static bool make_room(int fd)
{
    if (fd < room)
        return true;
    int wanted = room ? room : LEAST_ROOM;
    while (wanted <= fd)
        wanted *= 2;
    struct excluded *grown = realloc(table, sizeof *grown * (size_t)wanted);
    if (!grown)
        return false;
    memset(grown + room, 0, sizeof *grown * (size_t)(wanted - room));
    table = grown;
    room = wanted;
    return true;
}

/* Without memory the child keeps its copy: peers then notice the end of the parent later. */
void td__fork_exclude(int fd)
{
    struct stat file;
    if (fd >= 0 && !fstat(fd, &file) && make_room(fd))
        table[fd] = (struct excluded){.device = file.st_dev, .file = file.st_ino};
}

/* A dead socket takes the number, so that a close() of it in the child closes no other descriptor. Only where
 * there is no descriptor left for that socket, the number becomes free, and serves the next one. */
static void give_up(int fd, int *dead)
{
    if (*dead < 0)
        *dead = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (*dead < 0 || dup3(*dead, fd, O_CLOEXEC) < 0)
        close(fd);
}

/* Only what is safe in a signal handler: the parent may have had other threads. */
static void in_child(void)
{
    int dead = -1;
    for (int fd = 0; fd < room; fd++) {
        struct stat file;
        if (table[fd].file && !fstat(fd, &file) && file.st_dev == table[fd].device &&
            file.st_ino == table[fd].file)
            give_up(fd, &dead);
        table[fd].file = 0;
    }
    if (dead >= 0)
        close(dead);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(td__fork_hold, td__fork_release, in_child);
}
