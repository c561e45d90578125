/* Two hosts, as far as a network goes: this process moves to a network namespace of its own, and a fork of it
 * to another one, joined by a pair of virtual interfaces.
 *
 *     ranks 0 and 1 ── tda 10.99.0.1 ════ tdb 10.99.0.2 ── ranks 2 and 3
 *
 * The namespaces have no names, so they end with the last process in them. */
#include "forks.h"
#include "network_space.h"
#include "runner.h"

#include "base/clock.h"

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
    atomic_bool moved, joined,
        done; /* the other side is in its namespace; the pair is there; this side has ended */
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
    /* Without a process the namespace would go, and with it what these ranks still have to send. */
    CHECK_SOON(atomic_load(&net->done));
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
    atomic_store(&net->done, true);
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

/* ---- Three hosts, of which one is cut off ---------------------------------------------------- */

/*     rank 0 ── 10.99.0.1 (a bridge) ══╦══ 10.99.0.2 ── rank 1
 *                                      ╚══ 10.99.0.3 ── rank 2 */
enum { CUT_HEARTBEAT_S = 2, CUT_SIDES = 2 };

struct cut {
    atomic_bool moved[CUT_SIDES], joined;
    atomic_int ready, done; /* ranks that have a world, and that know of the cut */
    atomic_bool cut;
};

static void use_cut_world(struct cut *cut, int rank)
{
    static float x[1000];
    VARIABLES("MASTER_ADDR=10.99.0.1", "MASTER_PORT=29556", "WORLD_SIZE=3",
              "TANDEM_SECRET=known to all sides",
              "TANDEM_TRANSPORT=", "TANDEM_HOST_ID=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=");
    set_number("RANK", rank);
    set_number("TANDEM_HEARTBEAT", CUT_HEARTBEAT_S * td_test_slowness());
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = 60000 * td_test_slowness()}));
    CHECK_OK(td_group_all_reduce(x, x, 1000, TD_F32, TD_SUM, NULL, NULL));
    atomic_fetch_add(&cut->ready, 1);
    CHECK_SOON(atomic_load(&cut->cut));
    if (rank == 2) { /* lives, but nobody hears of it */
        CHECK_SOON(atomic_load(&cut->done) == 2);
        _exit(0);
    }
    td_status status = td_group_all_reduce(x, x, 1000, TD_F32, TD_SUM, NULL, NULL);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "rank 2");
    CHECK_CONTAINS(td_last_error(), "cut off");
    td_destroy_process_group(); /* rank 0 has the store, and does not wait for rank 2 to leave it */
    atomic_fetch_add(&cut->done, 1);
}

static void cut_side(struct cut *cut, int side)
{
    CHECK_EQ(unshare(CLONE_NEWNET), 0);
    CHECK(run_ip("link set lo up"));
    atomic_store(&cut->moved[side], true);
    CHECK_SOON(atomic_load(&cut->joined));
    CHECK(run_ip("addr add 10.99.0.%d/24 dev tds", side + 2));
    CHECK(run_ip("link set tds up"));
    use_cut_world(cut, side + 1);
}

static void first_side(void *arg)
{
    cut_side(arg, 0);
}

/* Its link goes down while it lives, so that no end of a connection can reach the others. */
static void second_side(void *arg)
{
    cut_side(arg, 1);
}

static void here(void *arg)
{
    use_cut_world(arg, 0);
}

TEST(three_hosts_of_which_one_is_cut_off, .deadline_s = 60)
{
    struct cut *cut = fork_shared(sizeof *cut);
    void (*const sides[CUT_SIDES])(void *) = {first_side, second_side};
    pid_t pids[CUT_SIDES];
    if (access("/usr/sbin/ip", X_OK) && access("/sbin/ip", X_OK) && access("/usr/bin/ip", X_OK))
        td_test_skip("there is no program ip");
    move_away();
    if (!run_ip("link set lo up"))
        td_test_skip("ip cannot be used here");
    bool bridged = run_ip("link add tdbr type bridge");
    for (int side = 0; side < CUT_SIDES; side++) {
        pids[side] = fork_start(sides[side], cut);
        CHECK_SOON(atomic_load(&cut->moved[side]));
        bridged = bridged &&
                  run_ip("link add td%d type veth peer name tds netns %d", side, (int)pids[side]) &&
                  run_ip("link set td%d master tdbr up", side);
    }
    if (!bridged) {
        for (int side = 0; side < CUT_SIDES; side++)
            fork_kill(pids[side], SIGKILL);
        td_test_skip("no bridges and virtual interfaces here");
    }
    CHECK(run_ip("addr add 10.99.0.1/24 dev tdbr"));
    CHECK(run_ip("link set tdbr up"));
    atomic_store(&cut->joined, true);
    pid_t own = fork_start(here, cut);
    CHECK_SOON(atomic_load(&cut->ready) == 3);
    CHECK(run_ip("link set td1 down"));
    int64_t before = td__now_ns();
    atomic_store(&cut->cut, true);
    fork_join(own);
    fork_join(pids[0]);
    /* The heartbeat, and what a busy machine needs besides. */
    CHECK(td__now_ns() - before < (CUT_HEARTBEAT_S + 8) * INT64_C(1000000000) * td_test_slowness());
    fork_join(pids[1]);
}
