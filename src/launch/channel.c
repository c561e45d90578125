/* Channels; see stream.h. */
#include "launch/stream.h"

#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

static bool open_terminal(int terminal, struct td__channel *channel)
{
    char name[128];
    struct termios settings;
    struct winsize size;
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), slave = -1;
    if (master < 0)
        return false;
    if (!grantpt(master) && !unlockpt(master) && !ptsname_r(master, name, sizeof name))
        slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0 || tcgetattr(slave, &settings))
        goto fail;
    cfmakeraw(&settings);
    if (tcsetattr(slave, TCSANOW, &settings))
        goto fail;
    if (!ioctl(terminal, TIOCGWINSZ, &size))
        ioctl(slave, TIOCSWINSZ, &size);
    *channel = (struct td__channel){.read_end = master, .write_end = slave};
    return true;

fail:
    if (slave >= 0)
        close(slave);
    close(master);
    return false;
}

td_status td__channel_open(int terminal, struct td__channel *channel)
{
    int ends[2];
    if (terminal >= 0 && open_terminal(terminal, channel))
        return TD_OK;
    if (pipe2(ends, O_CLOEXEC))
        return td_fail(TD_ERR_SYSTEM, "cannot make a pipe for a worker's output: %s",
                       td__errno_text(errno));
    if (fcntl(ends[0], F_SETFL, O_NONBLOCK)) {
        int error = errno;
        close(ends[0]);
        close(ends[1]);
        return td_fail(TD_ERR_SYSTEM, "cannot set up a pipe for a worker's output: %s",
                       td__errno_text(error));
    }
    *channel = (struct td__channel){.read_end = ends[0], .write_end = ends[1]};
    return TD_OK;
}

ssize_t td__channel_read(const struct td__channel *channel, void *data, size_t room)
{
    for (;;) {
        ssize_t got = read(channel->read_end, data, room);
        if (got > 0)
            return got;
        if (got < 0 && errno == EINTR)
            continue;
        /* A pseudo-terminal ends with EIO: nobody has the other side open. */
        return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : -1;
    }
}
