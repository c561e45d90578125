/* Floods of unauthenticated clients at the listeners of a running job: it goes on, at about its speed, and
 * clients of the job can still connect. TD_TEST_CLIENTS=10000 is the long version;
 * `cost_of_unauthenticated_clients`, which runs only when it is named, prints the cost for both sides. */
#include "client_flood.h"
#include "runner.h"

#include "base/clock.h"
#include "os/loop.h"
#include "os/socket.h"

#include <tandem/group.h>
#include <tandem/store.h>

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* The ports at which this process listens. */
static int listening_ports(int *ports, int room)
{
    int count = 0;
    DIR *fds = opendir("/proc/self/fd");
    for (struct dirent *entry; (entry = readdir(fds));) {
        struct td__address address;
        int listens = 0, fd = atoi(entry->d_name);
        socklen_t size = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) || !listens)
            continue;
        td__local_address(fd, &address);
        if (address.any.sa_family != AF_UNIX && count < room)
            ports[count++] = td__address_port(&address);
    }
    closedir(fds);
    return count;
}

static double median_ms(double *took, int count)
{
    for (int i = 1; i < count; i++)
        for (int k = i; k > 0 && took[k] < took[k - 1]; k--) {
            double other = took[k];
            took[k] = took[k - 1];
            took[k - 1] = other;
        }
    return took[count / 2];
}

/* ---- A job ----------------------------------------------------------------------------------- */

enum { WORDS = 16384, ROUNDS = 200 };

/* All-reduces, each checked; how long one takes, in the middle. */
static double work(td_group *group, int64_t *rounds)
{
    static double took[ROUNDS];
    static float data[WORDS];
    for (int round = 0; round < ROUNDS; round++, ++*rounds) {
        for (int i = 0; i < WORDS; i++)
            data[i] = (float)(i % 100 + td_test_rank());
        int64_t start = td__now_ns();
        CHECK_OK(td_group_all_reduce(data, data, WORDS, TD_F32, TD_SUM, group, NULL));
        took[round] = (double)(td__now_ns() - start) / 1e6;
        for (int i = 0; i < WORDS; i++)
            if (data[i] != (float)(2 * (i % 100) + 1))
                FAIL("element %d of round %d is %g", i, round, (double)data[i]);
    }
    return median_ms(took, ROUNDS);
}

RANKS(a_job_under_a_client_flood, .ranks = 2, .deadline_s = 120)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    int clients = client_flood_size(600);
    int64_t rounds = 0;
    CHECK_OK(td_init_process_group(NULL));
    double before = work(NULL, &rounds);

    /* Each rank floods its own listener and that of the job's store. */
    struct client_flood flood = {.count = clients / 2,
                                 .ports = {0, atoi(getenv("MASTER_PORT"))},
                                 .purpose = {"link", "store"},
                                 .manner = MANNERS};
    CHECK(listening_ports(flood.ports, 1) == 1);
    snprintf(flood.secret, sizeof flood.secret, "%s", getenv("TANDEM_SECRET"));
    client_flood_start(&flood);
    td_test_barrier();
    double during = work(NULL, &rounds);

    /* New links, and another client of the store. */
    td_group *group;
    td_store *store;
    CHECK_OK(td_new_group((const int[]){1, 0}, 2, NULL, &group));
    work(group, &rounds);
    CHECK_OK(td_tcp_store_open("127.0.0.1", atoi(getenv("MASTER_PORT")), NULL, &store));
    for (int i = 0; i < 100; i++)
        CHECK_OK(td_store_add(store, "sum", 1, NULL));
    CHECK_OK(td_store_close(store));
    printf(
        "all_reduce of 64 KiB: %.3f ms, with %d unauthenticated clients %.3f ms; %d were held, %ld opened\n",
        before, clients, during, atomic_load(&flood.state->held),
        atomic_load(&flood.state->opened));
    td_test_barrier();
    client_flood_stop(&flood);
    work(NULL, &rounds);
    CHECK_OK(td_destroy_process_group());
}

/* ---- A store that is reached by TCP ---------------------------------------------------------- */

/* As many descriptors as a process has by default. */
static void have_descriptors(rlim_t count)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = count < limit.rlim_max ? count : limit.rlim_max;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(clients_connect_during_a_client_flood, .deadline_s = 120)
{
    td_store *server, *store;
    have_descriptors(1024);
    td_tcp_store_options options = {.host_server = true, .secret = "s"};
    CHECK_OK(td_tcp_store_open("0.0.0.0", 0, &options, &server));
    struct client_flood flood = {.count = client_flood_size(2000),
                                 .ports = {td_tcp_store_port(server)},
                                 .purpose = {"store"},
                                 .secret = "s",
                                 .manner = MANNERS};
    client_flood_start(&flood);
    double slowest = 0;
    for (int i = 0; i < 100; i++) {
        int64_t start = td__now_ns();
        options = (td_tcp_store_options){.secret = "s"};
        CHECK_OK(td_tcp_store_open("127.0.0.2", flood.ports[0], &options, &store));
        CHECK_OK(td_store_add(store, "sum", 1, NULL));
        CHECK_OK(td_store_close(store));
        double took = (double)(td__now_ns() - start) / 1e6;
        slowest = took > slowest ? took : slowest;
        td__sleep_ns(5000000);
    }
    printf("the slowest of 100 clients, with %d unauthenticated ones, took %.1f ms\n", flood.count,
           slowest);
    client_flood_stop(&flood);
    CHECK_OK(td_store_close(server));
}

/* ---- What it costs --------------------------------------------------------------------------- */

static double cpu_us(int usage_of)
{
    struct rusage usage;
    getrusage(usage_of, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* Of the threads of the server: all but this one, which waits for the flooding process. */
static double server_cpu_us(void)
{
    return cpu_us(RUSAGE_SELF) - cpu_us(RUSAGE_THREAD);
}

TEST(cost_of_unauthenticated_clients, .hidden = true, .deadline_s = 120)
{
    static const char *const names[] = {"silent",       "leaving",      "garbage",
                                        "half a hello", "wrong secret", "replayed"};
    char figures[512] = "";
    have_descriptors(20000);
    for (int manner = SILENT; manner < MANNERS; manner++) {
        td_store *server;
        td_tcp_store_options options = {.host_server = true, .secret = "s"};
        CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &server));
        struct client_flood flood = {.count = manner == SILENT || manner == HALF_A_HELLO ? 10000
                                                                                         : 100,
                                     .ports = {td_tcp_store_port(server)},
                                     .purpose = {"store"},
                                     .secret = "s",
                                     .manner = manner};
        flood.count = client_flood_size(flood.count);
        flood.state = NULL;
        double before = server_cpu_us();
        client_flood_start(&flood);
        atomic_store(&flood.state->attempts_wanted, 20000);
        client_flood_stop(&flood);
        double server_us = server_cpu_us() - before;
        long opened = atomic_load(&flood.state->opened);
        size_t used = strlen(figures);
        snprintf(figures + used, sizeof figures - used, "%s%s %.1f and %.1f", used ? ", " : "",
                 names[manner], server_us / (double)opened,
                 (double)atomic_load(&flood.state->cpu_us) / (double)opened);
        CHECK_OK(td_store_close(server));
    }
    td_test_skip("µs of processor of the server and of the client: %s", figures);
}
