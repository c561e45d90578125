/* Two hosts, as far as a network goes: this process moves to a network namespace of its own, and a fork of it
 * to another one, joined by a pair of virtual interfaces.
 *
 *     ranks 0 and 1 ── tda 10.99.0.1 ════ tdb 10.99.0.2 ── ranks 2 and 3
 *
 * The namespaces have no names, so they end with the last process in them. */
#include "forks.h"
#include "network_space.h"
#include "runner.h"

#include <tandem/group.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct net {
    const char *master, *other; /* addresses of the two sides */
    int prefix;
    bool default_route;
    atomic_bool moved, joined; /* the other side is in its namespace; the pair is there */
};

/* ---- Namespaces ------------------------------------------------------------------------------ */

static bool run_ip(const char *format, ...) __attribute__((format(printf, 1, 2)));

static bool run_ip(const char *format, ...)
{
    char command[256] = "ip ", *words[32];
    int count = 0;
    va_list args;
    va_start(args, format);
    vsnprintf(command + 3, sizeof command - 3, format, args);
    va_end(args);
    for (char *word = strtok(command, " "); word && count < 31; word = strtok(NULL, " "))
        words[count++] = word;
    words[count] = NULL;
    struct td_test_child child = td_test_exec((const char *const *)words);
    bool well = WIFEXITED(child.status) && WEXITSTATUS(child.status) == 0;
    if (!well)
        printf("ip %s: %s\n", format, child.output);
    free(child.output);
    return well;
}

static void move_away(void)
{
    if (!network_space_enter())
        td_test_skip("no network namespaces here: %s", strerror(errno));
}

static void set_up(const struct net *net, const char *device, const char *address,
                   const char *other)
{
    CHECK(run_ip("addr add %s/%d dev %s%s", address, net->prefix, device,
                 strchr(address, ':') ? " nodad" : ""));
    CHECK(run_ip("link set %s up", device));
    if (net->default_route)
        CHECK(run_ip("route add default via %s", other));
}

/* ---- Ranks ----------------------------------------------------------------------------------- */

/* Links to the other side, and none to anywhere else beyond this host. */
static int count_links(const char *to)
{
    int found = 0;
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_storage address;
        socklen_t size = sizeof address;
        char text[INET6_ADDRSTRLEN] = "";
        if (getpeername(fd, (struct sockaddr *)&address, &size))
            continue;
        if (address.ss_family == AF_INET)
            inet_ntop(AF_INET, &((struct sockaddr_in *)&address)->sin_addr, text, sizeof text);
        else if (address.ss_family == AF_INET6)
            inet_ntop(AF_INET6, &((struct sockaddr_in6 *)&address)->sin6_addr, text, sizeof text);
        found += !strcmp(text, to);
    }
    return found;
}

static void use_world(const struct net *net, int rank)
{
    enum { COUNT = 100000 };
    static float x[COUNT], y[4 * COUNT];
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = 15000 * td_test_slowness()}));
    CHECK_EQ(td_get_rank(NULL), rank);
    CHECK_EQ(td_get_world_size(NULL), 4);
    CHECK_EQ(td_get_local_size(), 2);
    CHECK_EQ(td_get_local_rank(), rank % 2);
    for (size_t count = 1; count <= COUNT; count *= 10) {
        for (size_t i = 0; i < count; i++)
            x[i] = (float)(rank + 1);
        CHECK_OK(td_group_all_reduce(y, x, count, TD_F32, TD_SUM, NULL, NULL));
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(y[i], 10);
        CHECK_OK(td_group_all_gather(y, x, count, TD_F32, NULL, NULL));
        for (size_t i = 0; i < 4 * count; i++)
            CHECK_EQ(y[i], i / count + 1);
        for (int root = 0; root < 4; root++) {
            for (size_t i = 0; i < count; i++)
                x[i] = (float)(rank == root ? root + 7 : 0);
            CHECK_OK(td_group_broadcast(x, count, TD_F32, root, NULL, NULL));
            for (size_t i = 0; i < count; i++)
                CHECK_EQ(x[i], root + 7);
        }
    }
    int peer = (rank + 2) % 4;
    td_work *work;
    CHECK_OK(td_group_recv(y, 10, TD_F32, peer, 3, NULL, &work));
    CHECK_OK(td_group_send(x, 10, TD_F32, peer, 3, NULL, NULL));
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    CHECK(count_links(rank < 2 ? net->other : net->master) >= 1);
    CHECK_OK(td_destroy_process_group());
}

static void run_rank(int rank, const struct net *net)
{
    VARIABLES("MASTER_PORT=29555", "WORLD_SIZE=4", "TANDEM_SECRET=known to both sides",
              "TANDEM_TRANSPORT=", "TANDEM_HOST_ID=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=");
    setenv("MASTER_ADDR", net->master, 1);
    set_number("RANK", rank);
    use_world(net, rank);
}

static void run_first(int rank, void *arg)
{
    run_rank(rank, arg);
}

static void run_second(int rank, void *arg)
{
    run_rank(rank + 2, arg);
}

/* The other side: a namespace, and the two ranks in it. */
static void other_side(void *arg)
{
    struct net *net = arg;
    CHECK_EQ(unshare(CLONE_NEWNET), 0);
    CHECK(run_ip("link set lo up"));
    atomic_store(&net->moved, true);
    CHECK_SOON(atomic_load(&net->joined));
    set_up(net, "tdb", net->other, net->master);
    fork_ranks(2, run_second, net);
}

static void run_in_two_spaces(const char *master, const char *other, int prefix, bool default_route)
{
    struct net *net = fork_shared(sizeof *net);
    net->master = master;
    net->other = other;
    net->prefix = prefix;
    net->default_route = default_route;
    if (access("/usr/sbin/ip", X_OK) && access("/sbin/ip", X_OK) && access("/usr/bin/ip", X_OK))
        td_test_skip("there is no program ip");
    move_away();
    if (!run_ip("link set lo up"))
        td_test_skip("ip cannot be used here");
    pid_t pid = fork_start(other_side, net);
    CHECK_SOON(atomic_load(&net->moved));
    if (!run_ip("link add tda type veth peer name tdb netns %d", (int)pid)) {
        fork_kill(pid, SIGKILL);
        td_test_skip("no pairs of virtual interfaces here");
    }
    set_up(net, "tda", master, other);
    atomic_store(&net->joined, true);
    fork_ranks(2, run_first, net);
    fork_join(pid);
}

TEST(two_hosts, .deadline_s = 40)
{
    run_in_two_spaces("10.99.0.1", "10.99.0.2", 24, true);
}

/* A network that leads nowhere else. */
TEST(two_hosts_without_a_default_route, .deadline_s = 40)
{
    run_in_two_spaces("10.99.0.1", "10.99.0.2", 24, false);
}

TEST(two_hosts_ipv6, .deadline_s = 40)
{
    run_in_two_spaces("fd99::1", "fd99::2", 64, false);
}
