/* Processes that are found again; see process_mark.h. */
#include "os/process_mark.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { START_FIELD = 22 }; /* of /proc/PID/stat, counted from 1 */

static bool read_line(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "re");
    bool read = file && fgets(text, (int)room, file);
    if (file)
        fclose(file);
    return read;
}

/* The boot's number and the namespace's, as one. */
static bool find_space(uint64_t *space)
{
    char boot[64];
    struct stat name = {0};
    if (!read_line("/proc/sys/kernel/random/boot_id", boot, sizeof boot) ||
        stat("/proc/self/ns/pid", &name))
        return false;
    *space = 14695981039346656037u ^ (uint64_t)name.st_ino;
    for (const char *at = boot; *at; at++)
        *space = (*space ^ (unsigned char)*at) * 1099511628211u;
    return true;
}

/* The name, which is the second field, may hold anything. */
static bool find_start(int pid, uint64_t *started)
{
    char path[64], line[1024];
    unsigned long long value;
    /* Not /proc/PID/stat: QEMU makes that file up for the process itself, with a start of its own. */
    snprintf(path, sizeof path, "/proc/./%d/stat", pid);
    char *at = read_line(path, line, sizeof line) ? strrchr(line, ')') : NULL;
    for (int field = 2; at && field < START_FIELD; field++)
        at = strchr(at + 1, ' ');
    if (!at || sscanf(at, "%llu", &value) != 1)
        return false;
    *started = value;
    return true;
}

bool td__process_mark(int pid, struct td__process_mark *mark)
{
    mark->pid = pid;
    return find_space(&mark->space) && find_start(pid, &mark->started);
}

bool td__process_mark_equal(const struct td__process_mark *a, const struct td__process_mark *b)
{
    return a->space == b->space && a->pid == b->pid && a->started == b->started;
}

/* With the descriptor open the pid cannot become another's any more: what is read then is about the one that
 * is held. */
int td__process_mark_open(const struct td__process_mark *mark, bool *ended)
{
    uint64_t started;
    int fd = (int)syscall(SYS_pidfd_open, mark->pid, 0);
    *ended = fd < 0 && errno == ESRCH;
    if (fd < 0)
        return -1;
    if (find_start(mark->pid, &started) && started == mark->started)
        return fd;
    close(fd);
    *ended = true;
    return -1;
}
