/* Failures of a rendezvous: all affected ranks get an error that names the cause, soon; ranks of other jobs are
 * not disturbed. */
#include "forks.h"
#include "runner.h"
#include "worlds.h"

#include "base/clock.h"
#include "base/host.h"
#include "os/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SECOND ((int64_t)1000000000)

enum { PATIENCE_MS = 60000 }; /* a timeout that must not be reached */

/* What the processes of a test know of each other. */
struct common {
    struct init_url init;
    atomic_int arrived;
    atomic_int failed; /* ranks that got their error */
    atomic_bool released, closing, closed;
    pid_t pids[8];
    char messages[8][600];
};

static struct common *make_common(struct init_url init)
{
    struct common *common = fork_shared(sizeof *common);
    common->init = init;
    return common;
}

static void keep_message(struct common *common, int index)
{
    snprintf(common->messages[index], sizeof common->messages[index], "%s", td_last_error());
    atomic_fetch_add(&common->failed, 1);
}

static bool names_process(const char *message, pid_t pid)
{
    char text[40];
    snprintf(text, sizeof text, "process %d on ", (int)pid);
    return strstr(message, text) != NULL;
}

/* ---- Contradictions -------------------------------------------------------------------------- */

/* Process i claims rank claims[i] of a world of 3. */
static void claim(struct common *common, int index, int rank)
{
    td_world world;
    int64_t start = td__now_ns();
    common->pids[index] = getpid();
    CHECK_FAILS(rendezvous_at(&common->init, rank, 3, PATIENCE_MS, &world), TD_ERR_MISMATCH,
                "rendezvous at ");
    CHECK_PROMPT(start);
    keep_message(common, index);
}

/* Processes `a` and `b`, in any order, are said to have the same rank. */
static void expect_same_rank(const struct common *common, int count, int a, int b, int rank)
{
    char text[200];
    snprintf(
        text, sizeof text,
        " both are rank %d; each process needs a rank of its own, and each job an address of its "
        "own",
        rank);
    for (int i = 0; i < count; i++) {
        CHECK_STR(common->messages[i], common->messages[0]); /* the same error on all */
        CHECK_CONTAINS(common->messages[i], text);
        CHECK(names_process(common->messages[i], common->pids[a]));
        CHECK(names_process(common->messages[i], common->pids[b]));
    }
}

static void both_claim_0(int index, void *arg)
{
    claim(arg, index, 0);
}

static void two_claim_1(int index, void *arg)
{
    claim(arg, index, index == 0 ? 0 : 1);
}

TEST(two_ranks_0_both_fail)
{
    struct common *common = make_common(tcp_init_url());
    fork_ranks(2, both_claim_0, common);
    expect_same_rank(common, 2, 0, 1, 0);
    CHECK_CONTAINS(common->messages[0], "rendezvous at 127.0.0.1:");
}

TEST(two_ranks_1_both_fail)
{
    struct common *common = make_common(tcp_init_url());
    fork_ranks(3, two_claim_1, common);
    expect_same_rank(common, 3, 1, 2, 1);
}

static void both_claim_1(int index, void *arg)
{
    claim(arg, index, 1);
}

/* A third rank could start after the two have left, and find no trace of them. */
TEST(duplicate_ranks_both_fail_by_file)
{
    struct common *common = make_common(file_init_url());
    fork_ranks(2, both_claim_1, common);
    expect_same_rank(common, 2, 0, 1, 1);
    common = make_common(file_init_url());
    fork_ranks(2, both_claim_0, common);
    expect_same_rank(common, 2, 0, 1, 0);
}

RANKS(duplicate_ranks_both_fail_at_the_agent, .ranks = 3)
{
    td_world world;
    VARIABLES("WORLD_SIZE=4");
    set_number("RANK", td_test_rank() ? 2 : 0);
    CHECK_FAILS(td_rendezvous(NULL, NULL, &world), TD_ERR_MISMATCH, " both are rank 2; each");
}

/* The world is complete: the first two ranks join, and only the third fails. */
static void come_one_too_many(int index, void *arg)
{
    struct common *common = arg;
    td_world world;
    if (index == 2) {
        CHECK_SOON(atomic_load(&common->arrived) == 2);
        CHECK_FAILS(rendezvous_at(&common->init, 1, 2, PATIENCE_MS, &world), TD_ERR_MISMATCH,
                    " both are rank 1");
        atomic_store(&common->released, true);
        return;
    }
    CHECK_OK(rendezvous_at(&common->init, index, 2, PATIENCE_MS, &world));
    use_world(&world, index, 2);
    atomic_fetch_add(&common->arrived, 1);
    CHECK_SOON(atomic_load(&common->released));
    CHECK_OK(td_store_add(world.store, "key", 1, NULL));
    CHECK_OK(td_world_close(&world));
}

TEST(a_surplus_rank_does_not_disturb_the_others)
{
    fork_ranks(3, come_one_too_many, make_common(tcp_init_url()));
    fork_ranks(3, come_one_too_many, make_common(file_init_url()));
}

static void disagree_on_size(int rank, void *arg)
{
    struct common *common = arg;
    td_world world;
    common->pids[rank] = getpid();
    CHECK_FAILS(rendezvous_at(&common->init, rank, rank ? 4 : 3, PATIENCE_MS, &world),
                TD_ERR_MISMATCH, "; all must have the same");
    keep_message(common, rank);
}

static void expect_sizes_told(struct common *common)
{
    fork_ranks(2, disagree_on_size, common);
    CHECK_STR(common->messages[0], common->messages[1]);
    for (int i = 0; i < 2; i++) {
        CHECK(names_process(common->messages[0], common->pids[i]));
        CHECK_CONTAINS(common->messages[0], "has a world size of ");
        CHECK(strstr(common->messages[0], " of 3") && strstr(common->messages[0], " of 4"));
    }
}

TEST(different_world_sizes_fail_on_both)
{
    expect_sizes_told(make_common(tcp_init_url()));
    expect_sizes_told(make_common(file_init_url()));
}

static void disagree_on_version(int rank, void *arg)
{
    struct common *common = arg;
    td_world world;
    common->pids[rank] = getpid();
    if (rank == 1)
        td__job_version = "0.99.3";
    CHECK_FAILS(rendezvous_at(&common->init, rank, 2, PATIENCE_MS, &world), TD_ERR_MISMATCH,
                ": all ranks need the same version; install it on all hosts");
    keep_message(common, rank);
}

static void expect_versions_told(struct common *common)
{
    fork_ranks(2, disagree_on_version, common);
    CHECK_STR(common->messages[0], common->messages[1]);
    CHECK_CONTAINS(common->messages[0], td_version());
    CHECK_CONTAINS(common->messages[0], "0.99.3");
    for (int i = 0; i < 2; i++)
        CHECK(names_process(common->messages[0], common->pids[i]));
}

TEST(different_versions_fail_on_both)
{
    CHECK_STR(td__job_version, td_version());
    expect_versions_told(make_common(tcp_init_url()));
    expect_versions_told(make_common(file_init_url()));
}

RANKS(different_world_sizes_fail_on_both_at_the_agent, .ranks = 2)
{
    td_world world;
    set_number("WORLD_SIZE", 5 + td_test_rank());
    CHECK_FAILS(td_rendezvous(NULL, NULL, &world), TD_ERR_MISMATCH, "has a world size of ");
}

/* ---- Missing ranks --------------------------------------------------------------------------- */

static const int present[] = {0, 2};

static void wait_in_vain(int index, void *arg)
{
    struct common *common = arg;
    td_world world;
    char message[700];
    int64_t start = td__now_ns();
    int64_t timeout_ms = 700 * td_test_slowness();
    CHECK_EQ(rendezvous_at(&common->init, present[index], 4, timeout_ms, &world), TD_ERR_TIMEOUT);
    int64_t took = td__now_ns() - start;
    bool file = !strncmp(common->init.url, "file://", 7);
    snprintf(message, sizeof message,
             "rendezvous at %s%s: timed out: 2 of 4 ranks have joined; missing: ranks 1, 3",
             file ? "file " : "", strstr(common->init.url, "://") + 3);
    CHECK_STR(td_last_error(), message);
    CHECK(took > SECOND / 2);
    CHECK_PROMPT(start);
}

TEST(missing_ranks_are_named_on_all_ranks)
{
    fork_ranks(2, wait_in_vain, make_common(tcp_init_url()));
    fork_ranks(2, wait_in_vain, make_common(file_init_url()));
}

RANKS(missing_ranks_are_named_at_the_agent, .ranks = 2)
{
    td_world world;
    td_rendezvous_options options = {.timeout_ms = 500 * td_test_slowness()};
    VARIABLES("WORLD_SIZE=3");
    set_number("RANK", td_test_rank() + 1);
    td_test_barrier();
    CHECK_FAILS(td_rendezvous(NULL, &options, &world), TD_ERR_TIMEOUT,
                "2 of 3 ranks have joined; missing: rank 0");
}

/* The rank with the shortest timeout fails all others at once. */
static void wait_with_patience(int rank, void *arg)
{
    struct common *common = arg;
    td_world world;
    int64_t start = td__now_ns();
    int64_t timeout_ms = rank ? 500 * td_test_slowness() : PATIENCE_MS;
    CHECK_FAILS(rendezvous_at(&common->init, rank, 3, timeout_ms, &world), TD_ERR_TIMEOUT,
                "2 of 3 ranks have joined; missing: rank 2");
    CHECK_PROMPT(start);
}

TEST(the_first_timeout_fails_all_ranks)
{
    fork_ranks(2, wait_with_patience, make_common(tcp_init_url()));
}

TEST(the_first_of_many_missing_ranks_are_named)
{
    struct init_url init = tcp_init_url();
    td_world world;
    CHECK_EQ(rendezvous_at(&init, 0, 100, 500 * td_test_slowness(), &world), TD_ERR_TIMEOUT);
    CHECK_CONTAINS(td_last_error(), ": timed out: 1 of 100 ranks have joined; missing: ranks "
                                    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, …");
}

/* As the library looks it up. */
static void expect_addresses(const char *host, int port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG}, *list;
    CHECK_EQ(getaddrinfo(host, NULL, &hints, &list), 0);
    for (struct addrinfo *at = list; at; at = at->ai_next) {
        char numeric[64], text[100];
        CHECK_EQ(getnameinfo(at->ai_addr, at->ai_addrlen, numeric, sizeof numeric, NULL, 0,
                             NI_NUMERICHOST),
                 0);
        snprintf(text, sizeof text,
                 at->ai_family == AF_INET6 ? "[%s]:%d (Connection refused)"
                                           : "%s:%d (Connection refused)",
                 numeric, port);
        CHECK_CONTAINS(td_last_error(), text);
    }
    freeaddrinfo(list);
}

TEST(each_address_tried_is_listed_when_rank_0_is_missing)
{
    static const char *const hosts[] = {"127.0.0.1", "localhost", "::1"};
    int port = reserve_port();
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        struct init_url init;
        td_world world;
        char text[100];
        snprintf(init.url, sizeof init.url, strchr(hosts[i], ':') ? "tcp://[%s]:%d" : "tcp://%s:%d",
                 hosts[i], port);
        int64_t start = td__now_ns();
        CHECK_EQ(rendezvous_at(&init, 1, 2, 300, &world), TD_ERR_TIMEOUT);
        CHECK_PROMPT(start);
        snprintf(text, sizeof text, "cannot reach the store at %s, port %d, within 0.", hosts[i],
                 port);
        CHECK_CONTAINS(td_last_error(), text);
        expect_addresses(hosts[i], port);
    }
}

/* The one that hosts the store dies while others wait for the last. */
static void wait_for_the_last(void *arg)
{
    struct common *common = arg;
    td_world world;
    int rank = atomic_fetch_add(&common->arrived, 1);
    common->pids[rank] = getpid();
    CHECK_FAILS(rendezvous_at(&common->init, rank, 4, PATIENCE_MS, &world), TD_ERR_PEER,
                "the connection to the server is lost");
    atomic_fetch_add(&common->failed, 1);
}

TEST(the_death_of_the_host_fails_waiting_ranks)
{
    struct common *common = make_common(tcp_init_url());
    pid_t host = fork_start(wait_for_the_last, common);
    CHECK_SOON(common->pids[0] == host);
    pid_t others[] = {fork_start(wait_for_the_last, common), fork_start(wait_for_the_last, common)};
    td_store *store;
    int64_t come = 0;
    CHECK_OK(
        td_tcp_store_open("127.0.0.1", atoi(strrchr(common->init.url, ':') + 1), NULL, &store));
    CHECK_SOON(!td_store_add(store, "\1rendezvous/0.0/0/joined", 0, &come) && come == 3);
    fork_kill(host, SIGKILL);
    CHECK_SOON(atomic_load(&common->failed) == 2);
    for (int i = 0; i < 2; i++)
        fork_join(others[i]);
    CHECK_OK(td_store_close(store));
}

/* ---- The address is in use ------------------------------------------------------------------- */

/* Holds a port as another program might: it listens, or not even that, and never answers. */
static int take_port(bool listening)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK_EQ(bind(fd, (struct sockaddr *)&address, size), 0);
    CHECK(!listening || !listen(fd, 10));
    CHECK_EQ(getsockname(fd, (struct sockaddr *)&address, &size), 0);
    return ntohs(address.sin_port);
}

static void meet_at_taken_port(int index, void *arg)
{
    (void)arg;
    int port = take_port(index);
    td_world world;
    char message[300];
    set_number("MASTER_PORT", port);
    int64_t start = td__now_ns();
    CHECK_EQ(td_rendezvous("env://", NULL, &world), TD_ERR_SYSTEM);
    CHECK_PROMPT(start);
    snprintf(message, sizeof message,
             "port %d is in use already (listening for the store at 127.0.0.1:%d): choose another "
             "one with MASTER_PORT or --master-port, or end the program that has it",
             port, port);
    CHECK_STR(td_last_error(), message);
}

TEST(a_port_in_use_is_named)
{
    VARIABLES("RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1");
    fork_ranks(2, meet_at_taken_port, NULL);
}

/* Ranks 0 and 1 are the first job; 2 and 3 are another job at the same address. */
static void run_beside(int index, void *arg)
{
    struct common *common = arg;
    td_world world;
    if (index < 2) {
        CHECK_OK(rendezvous_at(&common->init, index, 2, PATIENCE_MS, &world));
        use_world(&world, index, 2);
        await_all(&world);
        atomic_fetch_add(&common->arrived, 1);
        while (!atomic_load(&common->released)) {
            CHECK_OK(td_store_add(world.store, "steps", 1, NULL));
            td__sleep_ns(200000);
        }
        int64_t keys;
        CHECK_OK(td_store_num_keys(world.store, &keys));
        CHECK_EQ(keys, 4); /* "done" and "steps" among them; nothing of the other job */
        CHECK_OK(td_world_close(&world));
        return;
    }
    CHECK_SOON(atomic_load(&common->arrived) == 2);
    bool other_secret = getenv("OTHER_SECRET") != NULL;
    if (other_secret)
        VARIABLES("TANDEM_SECRET=another");
    td_status status = rendezvous_at(&common->init, index - 2, 2, 5000, &world);
    if (!other_secret)
        CHECK_EQ(status, TD_ERR_MISMATCH);
    else
        CHECK_EQ(status, index == 2 ? TD_ERR_SYSTEM : TD_ERR_AUTH);
    keep_message(common, index);
    if (atomic_load(&common->failed) == 2)
        atomic_store(&common->released, true);
}

TEST(a_second_job_at_the_same_port_is_refused)
{
    struct common *common = make_common(tcp_init_url());
    VARIABLES("TANDEM_SECRET=one for both");
    fork_ranks(4, run_beside, common);
    CHECK_CONTAINS(common->messages[2],
                   " both are rank 0; each process needs a rank of its own, and "
                   "each job an address of its own");
    CHECK_CONTAINS(common->messages[3], " both are rank 1; ");
}

TEST(a_second_job_with_its_own_secret_is_refused)
{
    struct common *common = make_common(tcp_init_url());
    VARIABLES("TANDEM_SECRET=one", "OTHER_SECRET=yes");
    fork_ranks(4, run_beside, common);
    CHECK_CONTAINS(common->messages[2], "is in use already (listening for the store at 127.0.0.1:");
    CHECK_CONTAINS(common->messages[3], "refused the job's secret");
}

TEST(a_second_job_in_the_same_file_is_refused)
{
    struct common *common = make_common(file_init_url());
    fork_ranks(4, run_beside, common);
    CHECK_CONTAINS(common->messages[2], " both are rank 0; ");
    CHECK_CONTAINS(common->messages[3], " both are rank 1; ");
}

/* The first job is at its second rendezvous when the other starts its first. */
static void run_beside_the_second(int index, void *arg)
{
    struct common *common = arg;
    td_world world;
    if (index < 2) {
        for (int round = 0; round < 2; round++) {
            CHECK_OK(rendezvous_at(&common->init, index, 2, PATIENCE_MS, &world));
            use_world(&world, index, 2);
            await_all(&world);
            if (round == 0)
                CHECK_OK(td_world_close(&world));
        }
        atomic_fetch_add(&common->arrived, 1);
        while (atomic_load(&common->failed) < 2) {
            CHECK_OK(td_store_add(world.store, "steps", 1, NULL));
            td__sleep_ns(200000);
        }
        int64_t start = td__now_ns();
        CHECK_OK(td_world_close(&world));
        CHECK_PROMPT(start);
        return;
    }
    CHECK_SOON(atomic_load(&common->arrived) == 2);
    td_status status = rendezvous_at(&common->init, index - 2, 2, 1000, &world);
    /* The first job's file was removed with its first world if both ranks had left before either rejoined. The
     * new file then has no trace of that world, and the other job joins its first one there, beside the second of
     * the first job: their keys differ. */
    CHECK(status != TD_OK || !strncmp(common->init.url, "file:", 5));
    if (!status)
        CHECK_OK(td_world_close(&world));
    keep_message(common, index);
}

TEST(a_second_job_does_not_disturb_the_second_rendezvous)
{
    fork_ranks(4, run_beside_the_second, make_common(tcp_init_url()));
    fork_ranks(4, run_beside_the_second, make_common(file_init_url()));
}

/* ---- Secrets --------------------------------------------------------------------------------- */

struct secrets {
    struct init_url init;
    const char *of_rank[2];
    const char *refusal; /* the error of rank 1 */
};

static void meet_with_secrets(int rank, void *arg)
{
    const struct secrets *secrets = arg;
    td_world world;
    if (secrets->of_rank[rank])
        setenv("TANDEM_SECRET", secrets->of_rank[rank], 1);
    if (rank == 0) {
        CHECK_FAILS(rendezvous_at(&secrets->init, rank, 2, 700 * td_test_slowness(), &world),
                    TD_ERR_TIMEOUT, "1 of 2 ranks have joined; missing: rank 1");
        return;
    }
    int64_t start = td__now_ns();
    CHECK_FAILS(rendezvous_at(&secrets->init, rank, 2, PATIENCE_MS, &world), TD_ERR_AUTH,
                "the server at 127.0.0.1:");
    CHECK_CONTAINS(td_last_error(), secrets->refusal);
    CHECK_PROMPT(start);
}

TEST(a_wrong_secret_is_refused)
{
    struct secrets secrets = {
        .init = tcp_init_url(),
        .of_rank = {"right", "wrong"},
        .refusal =
            " refused the job's secret: TANDEM_SECRET is not the same, or missing, there (or "
            "it is no store of Tandem)"};
    fork_ranks(2, meet_with_secrets, &secrets);
    secrets.of_rank[0] = NULL; /* missing where the store is */
    fork_ranks(2, meet_with_secrets, &secrets);
}

TEST(a_missing_secret_is_refused)
{
    struct secrets secrets = {
        .init = tcp_init_url(),
        .of_rank = {"right", NULL},
        .refusal = " refused the job's secret: TANDEM_SECRET is set there, but missing here, or "
                   "it belongs to another user's job (or it is no store of Tandem)"};
    fork_ranks(2, meet_with_secrets, &secrets);
}

static void meet_with_file(int rank, void *arg)
{
    const struct secrets *secrets = arg;
    td_world world;
    if (rank == 0)
        setenv("TANDEM_SECRET", secrets->of_rank[0], 1);
    else
        setenv("TANDEM_SECRET_FILE", secrets->of_rank[1], 1);
    CHECK_OK(rendezvous_at(&secrets->init, rank, 2, 0, &world));
    use_world(&world, rank, 2);
    CHECK_OK(td_world_close(&world));
}

TEST(a_secret_may_be_in_a_file)
{
    char path[400];
    struct secrets secrets = {.init = tcp_init_url(), .of_rank = {"hush hush", path}};
    td_world world;
    snprintf(path, sizeof path, "%s/secret", td_test_temp_dir());
    setenv("TANDEM_SECRET_FILE", path, 1);
    CHECK_FAILS(rendezvous_at(&secrets.init, 0, 1, 0, &world), TD_ERR_AUTH,
                "TANDEM_SECRET_FILE: cannot read ");
    unsetenv("TANDEM_SECRET_FILE");
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    CHECK_EQ(write(fd, "hush hush\n", 10), 10);
    close(fd);
    fork_ranks(2, meet_with_file, &secrets);
}

/* Something that answers like a store, but does not know the secret. */
static void impersonate(void *arg)
{
    char bytes[64];
    int fd = accept(*(int *)arg, NULL, NULL);
    CHECK(fd >= 0);
    memset(bytes, 'x', sizeof bytes);
    CHECK_EQ(write(fd, bytes, sizeof bytes), (int)sizeof bytes);
    while (read(fd, bytes, sizeof bytes) > 0)
        ;
    close(fd);
}

TEST(a_server_that_cannot_prove_the_secret_is_refused)
{
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    CHECK_EQ(bind(listener, (struct sockaddr *)&address, size), 0);
    CHECK_EQ(listen(listener, 10), 0);
    CHECK_EQ(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    pid_t fraud = fork_start(impersonate, &listener);
    struct init_url init;
    td_world world;
    VARIABLES("TANDEM_SECRET=right");
    snprintf(init.url, sizeof init.url, "tcp://127.0.0.1:%d", ntohs(address.sin_port));
    CHECK_FAILS(
        rendezvous_at(&init, 1, 2, PATIENCE_MS, &world), TD_ERR_AUTH,
        "does not prove the job's secret: TANDEM_SECRET differs, or it is no store of Tandem");
    fork_join(fraud);
}

TEST(without_a_secret_nothing_goes_beyond_this_host)
{
    td_world world;
    VARIABLES("WORLD_SIZE=2", "MASTER_PORT=29500");
    /* Addresses for documentation, which no host has; refused before anything is sent. */
    static const char *const hosts[] = {"203.0.113.1", "2001:db8::1", "0.0.0.0"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        char message[400];
        setenv("MASTER_ADDR", hosts[i], 1);
        for (int rank = 0; rank < 2; rank++) {
            set_number("RANK", rank);
            snprintf(message, sizeof message, "%s the store at %s needs the job's secret",
                     rank ? "connecting to" : "listening for", hosts[i]);
            CHECK_FAILS(td_rendezvous(NULL, NULL, &world), TD_ERR_AUTH, message);
            CHECK_CONTAINS(td_last_error(),
                           "set TANDEM_SECRET (or TANDEM_SECRET_FILE) to the same text on every "
                           "host, or TANDEM_INSECURE=1 on a network without other users");
        }
    }
    VARIABLES("TANDEM_INSECURE=yes");
    CHECK_FAILS(td_rendezvous(NULL, NULL, &world), TD_ERR_INVALID, "TANDEM_INSECURE is \"yes\"");
}

/* ---- Leaving --------------------------------------------------------------------------------- */

static void part_early(int rank, void *arg)
{
    struct common *common = arg;
    td_world world;
    CHECK_OK(rendezvous_at(&common->init, rank, 3, PATIENCE_MS, &world));
    use_world(&world, rank, 3);
    await_all(&world);
    if (rank == 0) {
        atomic_store(&common->closing, true);
        CHECK_OK(td_world_close(&world));
        atomic_store(&common->closed, true);
        CHECK_EQ(atomic_load(&common->arrived), 2); /* at the end of their work */
        return;
    }
    CHECK_SOON(atomic_load(&common->closing));
    for (int i = 0; i < 100; i++) {
        char key[32], other[32];
        td_bytes value;
        snprintf(key, sizeof key, "late %d of %d", i, rank);
        snprintf(other, sizeof other, "late %d of %d", i, 3 - rank);
        CHECK_OK(td_store_set(world.store, key, "x", 1));
        CHECK_OK(td_store_get(world.store, other, 0, &value));
        td_bytes_free(&value);
        td__sleep_ns(1000000);
    }
    CHECK(!atomic_load(&common->closed));
    atomic_fetch_add(&common->arrived, 1);
    CHECK_OK(td_world_close(&world));
}

TEST(the_host_leaves_last)
{
    fork_ranks(3, part_early, make_common(tcp_init_url()));
}

static void part_from_the_dead(void *arg)
{
    struct common *common = arg;
    td_world world;
    int rank = atomic_fetch_add(&common->arrived, 1);
    common->pids[rank] = getpid();
    CHECK_OK(rendezvous_at(&common->init, rank, 3, PATIENCE_MS, &world));
    use_world(&world, rank, 3);
    if (rank) {
        atomic_fetch_add(&common->failed, 1);
        for (;;)
            pause();
    }
    CHECK_SOON(atomic_load(&common->released));
    int64_t start = td__now_ns();
    CHECK_OK(td_world_close(&world));
    CHECK_PROMPT(start);
}

TEST(leaving_does_not_wait_for_dead_ranks)
{
    struct common *common = make_common(tcp_init_url());
    pid_t pids[3];
    for (int i = 0; i < 3; i++)
        pids[i] = fork_start(part_from_the_dead, common);
    CHECK_SOON(atomic_load(&common->failed) == 2);
    bool first_killed = false;
    for (int i = 0; i < 3; i++) { /* one before the host closes, one meanwhile */
        if (pids[i] == common->pids[0])
            continue;
        if (first_killed)
            atomic_store(&common->released, true);
        fork_kill(pids[i], SIGKILL);
        first_killed = true;
    }
    for (int i = 0; i < 3; i++)
        if (pids[i] == common->pids[0])
            fork_join(pids[i]);
}
