/* Network namespaces; see network_space.h. */
#include "network_space.h"

#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

bool network_space_write(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool written = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return written;
}

bool network_space_enter(void)
{
    char map[32];
    snprintf(map, sizeof map, "0 %u 1", (unsigned)getuid());
    return !unshare(CLONE_NEWNET) || (!unshare(CLONE_NEWUSER | CLONE_NEWNET) &&
                                      network_space_write("/proc/self/setgroups", "deny") &&
                                      network_space_write("/proc/self/uid_map", map));
}

bool network_space_open_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool opened = control >= 0 && !ioctl(control, SIOCSIFFLAGS, &request);
    if (control >= 0)
        close(control);
    return opened;
}
