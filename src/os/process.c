/* Processes; see process.h. */
#include "os/process.h"

#include "base/fail.h"
#include "base/map.h"
#include "base/text.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- /proc/PID/stat -------------------------------------------------------------------------- */

/* Fields are counted from 1. The name, which is the second one, may hold any characters. */
bool td__process_stat(int pid, struct td__process_stat *stat)
{
    enum { STATE = 3, PARENT = 4, FLAGS = 9, STARTED = 22, FLAG_EXITING = 0x4 };
    char path[64], text[1024];
    /* Not /proc/PID/stat: QEMU makes that file up for the process itself, with a start of its own. */
    snprintf(path, sizeof path, "/proc/./%d/stat", pid);
    const char *at = td__text_read(path, text, sizeof text) ? strrchr(text, ')') : NULL;
    *stat = (struct td__process_stat){0};
    for (int field = STATE; at && (at = strchr(at, ' ')); field++) {
        at++;
        if (field == STATE)
            stat->state = *at;
        else if (field == PARENT)
            stat->parent = atoi(at);
        else if (field == FLAGS)
            stat->exiting = strtoul(at, NULL, 10) & FLAG_EXITING;
        else if (field == STARTED)
            stat->started = strtoull(at, NULL, 10);
        else if (field > STARTED)
            stat->exit_code = atoi(at); /* the last field */
    }
    return stat->state != 0;
}

char td__process_state(int pid)
{
    struct td__process_stat stat;
    return td__process_stat(pid, &stat) ? stat.state : 0;
}

/* ---- Identity -------------------------------------------------------------------------------- */

bool td__boot_name(char name[64])
{
    return td__text_read("/proc/sys/kernel/random/boot_id", name, 64);
}

uint32_t td__user_outside(void)
{
    uint32_t user = getuid(), inside, outside, count;
    FILE *map = fopen("/proc/self/uid_map", "re");
    bool found = false;
    while (map && !found &&
           fscanf(map, "%" SCNu32 " %" SCNu32 " %" SCNu32, &inside, &outside, &count) == 3)
        found = user >= inside && user - inside < count;
    if (map)
        fclose(map);
    return found ? outside + (user - inside) : user;
}

uint64_t td__boot_number(void)
{
    char text[64];
    td__boot_name(text);
    return td__hash(TD__HASH_START, text, strlen(text));
}

static bool find_space(uint64_t *space)
{
    char boot[64];
    struct stat namespace = {0};
    if (!td__boot_name(boot) || stat("/proc/self/ns/pid", &namespace))
        return false;
    *space = td__hash(TD__HASH_START ^ (uint64_t) namespace.st_ino, boot, strlen(boot));
    return true;
}

bool td__process_identify(int pid, struct td__process_id *id)
{
    struct td__process_stat stat;
    if (!find_space(&id->space) || !td__process_stat(pid, &stat))
        return false;
    id->pid = pid;
    id->started = stat.started;
    return true;
}

bool td__process_id_equal(const struct td__process_id *a, const struct td__process_id *b)
{
    return a->space == b->space && a->pid == b->pid && a->started == b->started;
}

/* ---- Watching -------------------------------------------------------------------------------- */

int td__process_watch(int pid, bool *ended)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (ended)
        *ended = fd < 0 && errno == ESRCH;
    return fd < 0 ? -1 : fd;
}

/* As long as the pidfd is open the pid is not given to another process, so what is read after that is
 * about the process of the pidfd. */
int td__process_watch_id(const struct td__process_id *id, bool *ended)
{
    struct td__process_stat stat;
    int fd = td__process_watch(id->pid, ended);
    if (fd < 0 || (td__process_stat(id->pid, &stat) && stat.started == id->started))
        return fd;
    close(fd);
    *ended = true;
    return -1;
}

int td__process_kill(int pidfd)
{
    return syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0) ? errno : 0;
}

bool td__process_has_ended(int pidfd, int timeout_ms)
{
    struct pollfd end = {.fd = pidfd, .events = POLLIN};
    return pidfd >= 0 && poll(&end, 1, timeout_ms) == 1;
}

/* ---- How it ended ---------------------------------------------------------------------------- */

/* The first version of struct pidfd_info; later kernels append to it. */
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
    if (ioctl(pidfd, GET_INFO, &info) || !(info.mask & INFO_EXIT))
        return TD__STATUS_UNKNOWN;
    return info.exit_code;
}

int td__process_wait_status(int pid, int pidfd)
{
    struct td__process_stat stat;
    if (pidfd < 0)
        return TD__STATUS_UNKNOWN;
    int wait_status = ask_kernel(pidfd);
    if (wait_status != TD__STATUS_UNKNOWN)
        return wait_status;
    if (td__process_stat(pid, &stat) && stat.state == 'Z')
        return stat.exit_code;
    return ask_kernel(pidfd); /* its parent may have waited for it since the first question */
}

void td__wait_status_text(int wait_status, char *text, size_t room)
{
    if (wait_status == TD__STATUS_UNKNOWN)
        snprintf(text, room, "has ended");
    else if (WIFSIGNALED(wait_status))
        snprintf(text, room, "was killed by %s", td__signal_name(WTERMSIG(wait_status)));
    else
        snprintf(text, room, "exited with code %d", WEXITSTATUS(wait_status));
}
