/* A process that td_spawn() has started; see spawn.h.
 *
 * One that was started by exec runs main() again, and td_spawn_main() takes over there. It recognises such a process by
 * a variable with the number of a socket, and the socket by its peer: the kernel says which process made it, and that
 * must be the parent. A variable that was inherited further, or set by hand, means nothing. */
#include "launch/spawn.h"

#include "base/fail.h"
#include "base/number.h"
#include "os/flight.h"
#include "os/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static atomic_bool main_called;

static void set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

static void set_environment(const struct td__spawn_orders *orders)
{
    char endpoint[32];
    setenv(TD__FLIGHT_VARIABLE, orders->flight, 1);
    set_number("RANK", orders->rank);
    set_number("LOCAL_RANK", orders->rank);
    set_number("GROUP_RANK", 0);
    set_number("WORLD_SIZE", orders->count);
    set_number("LOCAL_WORLD_SIZE", orders->count);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", orders->port);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%d", orders->port);
    setenv("TANDEM_AGENT_STORE", endpoint, 1);
    if (*orders->secret)
        setenv("TANDEM_SECRET", orders->secret, 1);
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    unsetenv("TANDEM_ROUND");
}

/* A copy of the bytes that is written to without effect on other processes. */
static td_status map_argument(const struct td__spawn_orders *orders, void **arg)
{
    if (orders->arg_fd < 0)
        return TD_OK;
    *arg = mmap(NULL, orders->arg_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, orders->arg_fd, 0);
    int error = errno;
    close(orders->arg_fd);
    if (*arg == MAP_FAILED)
        return td_fail(TD_ERR_SYSTEM, "td_spawn: %zu bytes of arguments: mmap: %s",
                       orders->arg_size, td__errno_text(error));
    return TD_OK;
}

/* `fn` is NULL where it comes with the orders. */
static td_status follow(const struct td__spawn_orders *orders, td_spawn_fn fn, void *arg)
{
    set_environment(orders);
    if (!fn)
        TD_TRY(td__spawn_find(&orders->function, &fn));
    TD_TRY(map_argument(orders, &arg));
    td_fail(TD_OK, "%s", ""); /* the last error of the parent */
    return fn(orders->rank, arg);
}

static _Noreturn void end(int link, td_status status)
{
    struct td__error report;
    td__error_save(&report);
    report.status = status;
    if (!*report.text)
        snprintf(report.text, sizeof report.text, "%s", td_status_name(status));
    size_t size = offsetof(struct td__error, text) + strlen(report.text) + 1;
    send(link, &report, size, MSG_NOSIGNAL); /* where it fails, the exit code is left */
    fflush(NULL);
    _exit(status ? 1 : 0);
}

void td__spawn_run(int link, pid_t parent, td_spawn_fn fn, void *arg)
{
    struct td__spawn_orders orders;
    if (td__die_with_parent(parent, SIGKILL))
        _exit(1);
    send(link, "", 1, MSG_NOSIGNAL);
    ssize_t got;
    while ((got = recv(link, &orders, sizeof orders, 0)) < 0 && errno == EINTR)
        ;
    if (got <= 0)
        _exit(1); /* the parent could not start the job */
    if (got != sizeof orders || orders.library != td__library_fingerprint())
        end(link,
            td_fail(
                TD_ERR_STATE,
                "td_spawn_main: this is another build of the library than in the process that called "
                "td_spawn()"));
    end(link, follow(&orders, fn, arg));
}

/* The socket to the parent, in a process that td_spawn() has started by exec; otherwise -1. */
static int find_link(void)
{
    struct ucred maker;
    socklen_t size = sizeof maker;
    const char *text = secure_getenv(TD__SPAWN_VARIABLE);
    int link;
    if (!text || !td__parse_int(text, 0, INT_MAX, &link))
        return -1;
    if (getsockopt(link, SOL_SOCKET, SO_PEERCRED, &maker, &size) || maker.pid != getppid())
        return -1;
    return link;
}

bool td__spawn_is_pending(void)
{
    return !td__spawn_main_called() && find_link() >= 0;
}

bool td__spawn_main_called(void)
{
    return atomic_load(&main_called);
}

void td_spawn_main(void)
{
    int link = find_link();
    bool again = atomic_exchange(&main_called, true);
    unsetenv(TD__SPAWN_VARIABLE);
    if (link < 0 || again)
        return;
    fcntl(link, F_SETFD, FD_CLOEXEC);
    td__spawn_run(link, getppid(), NULL, NULL);
}
