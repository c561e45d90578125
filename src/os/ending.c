/* How a process has ended; see ending.h. */
#include "os/ending.h"

#include "base/fail.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

/* What ioctl(pidfd) tells, in its first version; later kernels append to it. */
struct process_info {
    uint64_t mask;
    uint64_t cgroup;
    uint32_t ids[11];
    int32_t exit_code;
};

#define GET_INFO _IOWR(0xFF, 11, struct process_info)
#define INFO_EXIT (UINT64_C(1) << 3)

static int ask_kernel(int pidfd)
{
    struct process_info info = {.mask = INFO_EXIT};
    if (pidfd < 0 || ioctl(pidfd, GET_INFO, &info) || !(info.mask & INFO_EXIT))
        return TD__ENDING_UNKNOWN;
    return info.exit_code;
}

/* State and exit code: the third field of /proc/PID/stat, behind a name that may hold anything, and the
 * last one. */
static char read_stat(int pid, int *exit_code)
{
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    bool read = fgets(line, sizeof line, file);
    fclose(file);
    char *name_end = read ? strrchr(line, ')') : NULL;
    char *last = read ? strrchr(line, ' ') : NULL;
    if (!name_end || name_end[1] != ' ' || !last)
        return 0;
    *exit_code = atoi(last + 1);
    return name_end[2];
}

char td__ending_state(int pid)
{
    int exit_code;
    return read_stat(pid, &exit_code);
}

/* It counts while the process is a zombie. */
static int ask_proc(int pid)
{
    int exit_code;
    return read_stat(pid, &exit_code) == 'Z' ? exit_code : TD__ENDING_UNKNOWN;
}

int td__ending_of(int pid, int pidfd)
{
    int ending = ask_kernel(pidfd);
    if (ending == TD__ENDING_UNKNOWN)
        ending = ask_proc(pid);
    return ending == TD__ENDING_UNKNOWN ? ask_kernel(pidfd) : ending; /* waited for in between */
}

void td__ending_text(int ending, char *text, size_t room)
{
    if (ending == TD__ENDING_UNKNOWN)
        snprintf(text, room, "has ended");
    else if (WIFSIGNALED(ending))
        snprintf(text, room, "was killed by %s", td__signal_name(WTERMSIG(ending)));
    else
        snprintf(text, room, "exited with code %d without leaving the group", WEXITSTATUS(ending));
}
