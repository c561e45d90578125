/* Worlds of several processes by every scheme; once, and again. */
#include "forks.h"
#include "runner.h"
#include "worlds.h"

#include "base/clock.h"

#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const int sizes[] = {1, 2, 5, 8};
enum { SIZES = sizeof sizes / sizeof *sizes };

struct meeting {
    struct init_url init;
    int size;
    const char *url; /* NULL: detected */
    void (*set_up)(int rank, const struct meeting *meeting);
};

/* ---- The launchers' variables ---------------------------------------------------------------- */

/* One rank, which finds everything in its environment. */
static void meet_by_environment(int rank, void *arg)
{
    const struct meeting *meeting = arg;
    td_world world;
    meeting->set_up(rank, meeting);
    CHECK_OK(td_rendezvous(meeting->url, NULL, &world));
    use_world(&world, rank, meeting->size);
    CHECK_OK(td_world_close(&world));
}

static void set_env(int rank, const struct meeting *meeting)
{
    (void)meeting;
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
}

TEST(worlds_meet_by_env_where_rank_0_hosts)
{
    VARIABLES("MASTER_ADDR=127.0.0.1");
    for (int i = 0; i < SIZES; i++) {
        set_number("MASTER_PORT", reserve_port());
        set_number("WORLD_SIZE", sizes[i]);
        struct meeting meeting = {
            .size = sizes[i], .url = i % 2 ? "env://" : NULL, .set_up = set_env};
        fork_ranks(sizes[i], meet_by_environment, &meeting);
    }
}

static void meet_at_the_agent(void)
{
    td_world world;
    CHECK_OK(td_rendezvous(NULL, NULL, &world));
    CHECK_EQ(world.local_rank, td_test_rank());
    CHECK_EQ(world.local_world_size, td_test_size());
    use_world(&world, td_test_rank(), td_test_size());
    CHECK_OK(td_world_close(&world));
}

RANKS(world_of_1_meets_at_the_agent, .ranks = 1)
{
    meet_at_the_agent();
}

RANKS(world_of_2_meets_at_the_agent, .ranks = 2)
{
    meet_at_the_agent();
}

RANKS(world_of_5_meets_at_the_agent, .ranks = 5)
{
    meet_at_the_agent();
}

RANKS(world_of_8_meets_at_the_agent, .ranks = 8)
{
    meet_at_the_agent();
}

/* Numbers that no other test has at the same time: the socket is named after them. */
static void set_slurm_job(void)
{
    set_number("SLURM_JOB_ID", getpid());
    VARIABLES("SLURM_STEP_ID=0");
}

static void set_slurm(int rank, const struct meeting *meeting)
{
    (void)meeting;
    set_number("SLURM_PROCID", rank);
    set_number("SLURM_LOCALID", rank);
}

TEST(worlds_meet_by_slurm_on_one_host)
{
    set_slurm_job();
    VARIABLES("SLURM_JOB_NODELIST=no-such-node7"); /* not looked up: a unix socket is enough */
    for (int i = 0; i < SIZES; i++) {
        set_number("SLURM_NTASKS", sizes[i]);
        struct meeting meeting = {
            .size = sizes[i], .url = i % 2 ? "slurm://" : NULL, .set_up = set_slurm};
        fork_ranks(sizes[i], meet_by_environment, &meeting);
    }
    /* The tasks of the step count, not those of the job. */
    VARIABLES("SLURM_NTASKS=9", "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NODELIST=no-such-node[07]",
              "SLURM_JOB_NODELIST=no-such-node[07-09]");
    fork_ranks(2, meet_by_environment, &(struct meeting){.size = 2, .set_up = set_slurm});
}

TEST(worlds_meet_by_slurm_at_the_master)
{
    struct meeting meeting = {.size = 3, .set_up = set_slurm};
    set_slurm_job();
    VARIABLES("SLURM_NTASKS=3", "SLURM_JOB_NODELIST=no-such-node[1-3]", "MASTER_ADDR=127.0.0.1");
    set_number("MASTER_PORT", reserve_port());
    fork_ranks(3, meet_by_environment, &meeting);
    VARIABLES("SLURM_JOB_NODELIST=");
    fork_ranks(3, meet_by_environment, &meeting);
    /* On one host the port alone is enough. */
    VARIABLES("SLURM_JOB_NODELIST=no-such-node1", "MASTER_ADDR=");
    fork_ranks(3, meet_by_environment, &meeting);
}

/* Two steps of one job beside each other. */
static void meet_in_two_steps(int rank, void *arg)
{
    (void)arg;
    td_world world;
    set_number("SLURM_STEP_ID", rank / 2);
    set_slurm(rank % 2, NULL);
    CHECK_OK(td_rendezvous("slurm://", NULL, &world));
    use_world(&world, rank % 2, 2);
    CHECK_OK(td_world_close(&world));
}

TEST(steps_of_one_job_do_not_mix)
{
    set_slurm_job();
    VARIABLES("SLURM_NTASKS=2", "SLURM_JOB_NODELIST=no-such-node1");
    fork_ranks(4, meet_in_two_steps, NULL);
}

static void set_open_mpi(int rank, const struct meeting *meeting)
{
    set_number("OMPI_COMM_WORLD_RANK", rank);
    set_number("OMPI_COMM_WORLD_SIZE", meeting->size);
    set_number("OMPI_COMM_WORLD_LOCAL_RANK", rank);
    set_number("OMPI_COMM_WORLD_LOCAL_SIZE", meeting->size);
}

static void set_mpich(int rank, const struct meeting *meeting)
{
    set_number("PMI_RANK", rank);
    set_number("PMI_SIZE", meeting->size);
    set_number("MPI_LOCALRANKID", rank);
    set_number("MPI_LOCALNRANKS", meeting->size);
}

static void set_bare_pmi(int rank, const struct meeting *meeting)
{
    set_number("PMI_RANK", rank);
    set_number("PMI_SIZE", meeting->size);
}

TEST(worlds_meet_by_mpi)
{
    static void (*const dialects[])(int, const struct meeting *) = {set_open_mpi, set_mpich,
                                                                    set_bare_pmi};
    for (size_t i = 0; i < sizeof dialects / sizeof *dialects; i++)
        for (int size = 1; size <= 4; size++) {
            struct meeting meeting = {
                .size = size, .url = size % 2 ? "mpi://" : NULL, .set_up = dialects[i]};
            fork_ranks(size, meet_by_environment, &meeting); /* their parent is the same */
        }
    struct meeting meeting = {.size = 3, .set_up = set_open_mpi};
    char name[64];
    snprintf(name, sizeof name, "prte-host-%d@1/2", (int)getpid());
    setenv("PMIX_NAMESPACE", name, 1);
    fork_ranks(3, meet_by_environment, &meeting);
    set_number("MASTER_PORT", reserve_port());
    fork_ranks(3, meet_by_environment, &meeting);
}

static void set_two_hosts(int rank, const struct meeting *meeting)
{
    set_open_mpi(rank, meeting);
    set_number("OMPI_COMM_WORLD_LOCAL_RANK", rank % 2);
    set_number("OMPI_COMM_WORLD_LOCAL_SIZE", 2);
}

TEST(worlds_meet_by_mpi_at_the_master)
{
    VARIABLES("MASTER_ADDR=127.0.0.1");
    set_number("MASTER_PORT", reserve_port());
    struct meeting meeting = {.size = 4, .set_up = set_two_hosts};
    fork_ranks(4, meet_by_environment, &meeting);
}

/* ---- URLs and registered schemes ------------------------------------------------------------- */

static void meet_by_url(int rank, void *arg)
{
    const struct meeting *meeting = arg;
    td_world world;
    CHECK_OK(rendezvous_at(&meeting->init, rank, meeting->size, 0, &world));
    CHECK_EQ(world.local_rank, -1);
    use_world(&world, rank, meeting->size);
    CHECK_OK(td_world_close(&world));
}

TEST(worlds_meet_by_tcp)
{
    for (int i = 0; i < SIZES; i++)
        fork_ranks(sizes[i], meet_by_url,
                   &(struct meeting){.init = tcp_init_url(), .size = sizes[i]});
}

TEST(worlds_meet_by_file)
{
    for (int i = 0; i < SIZES; i++) {
        struct meeting meeting = {.init = file_init_url(), .size = sizes[i]};
        fork_ranks(sizes[i], meet_by_url, &meeting);
        CHECK(access(meeting.init.url + strlen("file://"), F_OK) && errno == ENOENT);
    }
}

/* Rank 0 has all from the URL; rank 1 its rank from the options; rank 2 both. */
static void meet_by_mixture(int rank, void *arg)
{
    const struct meeting *meeting = arg;
    char url[700];
    td_world world;
    td_rendezvous_options options = {.rank = rank, .world_size = rank == 2 ? 3 : 0};
    snprintf(url, sizeof url, "%s?%s", meeting->init.url,
             rank == 2 ? "rank=7&world_size=8" : "rank=0&world_size=3");
    CHECK_OK(td_rendezvous(url, &options, &world));
    use_world(&world, rank, 3);
    CHECK_OK(td_world_close(&world));
}

TEST(rank_and_size_come_from_the_options_then_the_url)
{
    fork_ranks(3, meet_by_mixture, &(struct meeting){.init = tcp_init_url()});
    fork_ranks(3, meet_by_mixture, &(struct meeting){.init = file_init_url()});
}

/* A scheme over a file store, as a user might write it: own://path, numbers in `arg`. */
static td_status meet_own_way(const char *url, const td_rendezvous_options *options, void *arg,
                              td_world *world)
{
    (void)options;
    const int *numbers = arg;
    const char *path = strstr(url, "://") + 3;
    td_status status = td_file_store_open(path, &world->store);
    if (status)
        return td_fail(status, "own way: %s", td_last_error());
    world->rank = numbers[0];
    world->world_size = numbers[1];
    world->local_rank = numbers[0] + 40;
    return TD_OK;
}

static void meet_by_own_scheme(int rank, void *arg)
{
    const struct meeting *meeting = arg;
    int numbers[] = {rank, meeting->size};
    td_world world;
    CHECK_OK(td_register_rendezvous("own", meet_own_way, numbers));
    CHECK_OK(td_rendezvous(meeting->url, NULL, &world));
    CHECK_EQ(world.local_rank, rank + 40);
    use_world(&world, rank, meeting->size);
    CHECK_OK(td_world_close(&world));
    CHECK_OK(td_register_rendezvous("own", NULL, NULL));
}

TEST(worlds_meet_by_a_registered_scheme)
{
    for (int i = 0; i < SIZES; i++) {
        char url[500];
        snprintf(url, sizeof url, "own://%s/own-%d", td_test_temp_dir(), i);
        fork_ranks(sizes[i], meet_by_own_scheme, &(struct meeting){.size = sizes[i], .url = url});
    }
}

/* An address of this host that others could reach, or false. */
static bool outside_address(char text[INET_ADDRSTRLEN])
{
    struct ifaddrs *list;
    bool found = false;
    CHECK_EQ(getifaddrs(&list), 0);
    for (struct ifaddrs *at = list; at && !found; at = at->ifa_next) {
        if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET || at->ifa_flags & IFF_LOOPBACK ||
            !(at->ifa_flags & IFF_UP))
            continue;
        const struct sockaddr_in *address = (const struct sockaddr_in *)at->ifa_addr;
        found = inet_ntop(AF_INET, &address->sin_addr, text, INET_ADDRSTRLEN) != NULL;
    }
    freeifaddrs(list);
    return found;
}

TEST(worlds_meet_beyond_loopback_with_a_secret)
{
    char address[INET_ADDRSTRLEN];
    if (!outside_address(address))
        td_test_skip("this host has no IPv4 address but loopback");
    struct meeting meeting = {.size = 2};
    snprintf(meeting.init.url, sizeof meeting.init.url, "tcp://%s:%d", address, reserve_port());
    VARIABLES("TANDEM_SECRET=open sesame");
    fork_ranks(2, meet_by_url, &meeting);
    VARIABLES("TANDEM_SECRET=", "TANDEM_INSECURE=1");
    fork_ranks(2, meet_by_url, &meeting);
}

/* ---- Again ----------------------------------------------------------------------------------- */

enum { ROUNDS = 3 };

/* The same processes join a world, leave, and join again; each time the store is empty. use_world() looks for
 * keys of an earlier world, too. */
static void meet_again_and_again(int rank, void *arg)
{
    const struct meeting *meeting = arg;
    for (int round = 0; round < ROUNDS; round++) {
        td_world world;
        if (meeting->init.url[0])
            CHECK_OK(rendezvous_at(&meeting->init, rank, meeting->size, 0, &world));
        else
            CHECK_OK(td_rendezvous(meeting->url, NULL, &world));
        CHECK(!world_has(&world, "left behind"));
        use_world(&world, rank, meeting->size);
        if (rank == meeting->size - 1) {
            await_all(&world);
            CHECK_OK(td_store_set(world.store, "left behind", "x", 1));
        }
        CHECK_OK(td_world_close(&world));
    }
}

TEST(worlds_meet_again_where_rank_0_hosts)
{
    fork_ranks(4, meet_again_and_again, &(struct meeting){.init = tcp_init_url(), .size = 4});
}

TEST(worlds_meet_again_by_file)
{
    struct meeting meeting = {.init = file_init_url(), .size = 4};
    fork_ranks(4, meet_again_and_again, &meeting);
    CHECK(access(meeting.init.url + strlen("file://"), F_OK) && errno == ENOENT);
}

RANKS(worlds_meet_again_at_the_agent, .ranks = 4)
{
    meet_again_and_again(td_test_rank(), &(struct meeting){.url = NULL, .size = 4});
}

static td_status find_agent(const char *url, const td_rendezvous_options *options, void *arg,
                            td_world *world)
{
    (void)url;
    (void)options;
    (void)arg;
    world->rank = td_test_rank();
    world->world_size = td_test_size();
    return td_tcp_store_open("127.0.0.1", atoi(getenv("MASTER_PORT")), NULL, &world->store);
}

RANKS(worlds_meet_again_by_a_registered_scheme, .ranks = 3)
{
    CHECK_OK(td_register_rendezvous("agent", find_agent, NULL));
    meet_again_and_again(td_test_rank(), &(struct meeting){.url = "agent://", .size = 3});
}

/* A launcher that starts the workers anew keeps its store; the new processes know nothing of the
 * first world but their restart count. */
static void meet_after_restart(void *arg)
{
    int restart = *(int *)arg;
    td_world world;
    set_number("TORCHELASTIC_RESTART_COUNT", restart);
    CHECK_OK(td_rendezvous("env://", NULL, &world));
    CHECK(!world_has(&world, "left behind"));
    use_world(&world, td_test_rank(), td_test_size());
    await_all(&world);
    CHECK_OK(td_store_set(world.store, "left behind", "x", 1));
    if (restart == 0) {
        CHECK(world_has(&world, "left behind")); /* it has arrived */
        raise(SIGKILL);
    }
    CHECK_OK(td_world_close(&world));
}

RANKS(restarted_workers_find_an_empty_store, .ranks = 2)
{
    for (int restart = 0; restart < 3; restart++) {
        pid_t pid = fork_start(meet_after_restart, &restart);
        if (restart == 0)
            fork_kill(pid, 0); /* it ends by itself */
        else
            fork_join(pid);
        td_test_barrier();
    }
}

struct meeting_beside {
    struct init_url init;
    atomic_bool may_go_on;
};

/* Rank 1 leaves and rejoins before rank 0, which hosts the store, has left. */
static void come_back_early(int rank, void *arg)
{
    struct meeting_beside *shared = arg;
    td_world world;
    CHECK_OK(rendezvous_at(&shared->init, rank, 2, 20000, &world));
    use_world(&world, rank, 2);
    if (rank == 0) {
        CHECK_SOON(atomic_load(&shared->may_go_on));
        /* Time for rank 1 to reach the store of the first world, should it do that. */
        const char *sign = "\1rendezvous/0.1/0/joined";
        td_store_wait(world.store, &sign, 1, 500);
    } else {
        CHECK_OK(td_world_close(&world));
        atomic_store(&shared->may_go_on, true);
        CHECK_OK(rendezvous_at(&shared->init, rank, 2, 5000, &world));
    }
    if (rank == 0) {
        CHECK_OK(td_world_close(&world));
        CHECK_OK(rendezvous_at(&shared->init, rank, 2, 5000, &world));
    }
    use_world(&world, rank, 2);
    CHECK_OK(td_world_close(&world));
}

TEST(a_rank_may_rejoin_before_the_host_has_left)
{
    struct meeting_beside *shared = fork_shared(sizeof *shared);
    shared->init = tcp_init_url();
    fork_ranks(2, come_back_early, shared);
}

/* Rank 0 has timed out; it tries once more, together with a rank 1 that tries for the first time. */
static void come_late(int rank, void *arg)
{
    struct meeting_beside *shared = arg;
    td_world world;
    if (rank == 0) {
        CHECK_FAILS(rendezvous_at(&shared->init, rank, 2, 100, &world), TD_ERR_TIMEOUT,
                    "1 of 2 ranks have joined; missing: rank 1");
        atomic_store(&shared->may_go_on, true);
    } else {
        CHECK_SOON(atomic_load(&shared->may_go_on));
    }
    CHECK_OK(rendezvous_at(&shared->init, rank, 2, 5000, &world));
    use_world(&world, rank, 2);
    CHECK_OK(td_world_close(&world));
}

TEST(a_rank_may_try_again)
{
    struct meeting_beside *shared = fork_shared(sizeof *shared);
    shared->init = tcp_init_url();
    fork_ranks(2, come_late, shared);
}

TEST(a_rank_may_try_again_by_file)
{
    struct meeting_beside *shared = fork_shared(sizeof *shared);
    shared->init = file_init_url();
    fork_ranks(2, come_late, shared);
}
