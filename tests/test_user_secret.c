/* The user's own secret: how it is made, its errors, and that it keeps other users out of jobs that were started
 * by hand. */
#include "forks.h"
#include "runner.h"
#include "worlds.h"

#include "base/auth.h"
#include "os/socket.h"
#include "os/trust.h"
#include "store/slurm.h"

#include <tandem/group.h>

#include <pthread.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <pwd.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATIENCE_MS = 30000 };

/* What the library looks for below this test's HOME. */
static const char *secret_path(void)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/.config/tandem/secret", getenv("HOME"));
    return path;
}

static struct td__secret bound_secret(const char *address)
{
    struct td__secret secret;
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(!secret.given && !secret.bound);
    CHECK_OK(td__secret_bind(&secret, address));
    CHECK(!secret.given && secret.bound);
    return secret;
}

static bool same(const struct td__secret *a, const struct td__secret *b)
{
    return !memcmp(a->key, b->key, sizeof a->key);
}

/* ---- The file -------------------------------------------------------------------------------- */

TEST(user_secret_is_made_on_first_use)
{
    struct stat info;
    CHECK(access(secret_path(), F_OK));
    struct td__secret first = bound_secret("here"), second = bound_secret("here"),
                      other = bound_secret("there");
    CHECK(same(&first, &second));
    CHECK(!same(&first, &other));
    CHECK(!stat(secret_path(), &info));
    CHECK_EQ(info.st_mode, S_IFREG | 0600);
    CHECK_EQ(info.st_uid, geteuid());
    CHECK_EQ(info.st_size, 32);
    char directory[512];
    snprintf(directory, sizeof directory, "%s/.config/tandem", getenv("HOME"));
    CHECK(!stat(directory, &info));
    CHECK_EQ(info.st_mode, S_IFDIR | 0700);
    CHECK_EQ(td_test_count_files(directory), 1); /* nothing was left beside it */

    setenv("XDG_CONFIG_HOME", td_test_temp_dir(), 1);
    struct td__secret elsewhere = bound_secret("here");
    CHECK(!same(&first, &elsewhere));
    char path[512];
    snprintf(path, sizeof path, "%s/tandem/secret", td_test_temp_dir());
    CHECK(!stat(path, &info));
    setenv("XDG_CONFIG_HOME", "not/absolute", 1); /* is to be ignored */
    second = bound_secret("here");
    CHECK(same(&first, &second));
}

TEST(user_secret_is_not_used_where_one_is_given)
{
    struct td__secret secret;
    setenv("TANDEM_SECRET", "given", 1);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(secret.given && secret.bound);
    setenv("TANDEM_SECRET", "", 1);
    setenv("TANDEM_INSECURE", "1", 1);
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK(!secret.given && secret.bound);
    CHECK_OK(td__secret_bind(&secret, "here"));
    CHECK(access(secret_path(), F_OK));
}

struct race {
    pthread_barrier_t *start;
    struct td__secret *keys;
};

static void make_at_once(int rank, void *arg)
{
    struct race *race = arg;
    pthread_barrier_wait(race->start);
    race->keys[rank] = bound_secret("here");
}

TEST(user_secret_is_the_same_for_concurrent_processes)
{
    enum { PROCESSES = 8, ROUNDS = 10 };
    struct race race = {.start = fork_shared(sizeof *race.start),
                        .keys = fork_shared(PROCESSES * sizeof *race.keys)};
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    CHECK(!pthread_barrier_init(race.start, &shared, PROCESSES));
    for (int i = 0; i < ROUNDS; i++) {
        char config[300], directory[320];
        snprintf(config, sizeof config, "%s/%d", td_test_temp_dir(), i);
        setenv("XDG_CONFIG_HOME", config, 1);
        fork_ranks(PROCESSES, make_at_once, &race);
        for (int p = 1; p < PROCESSES; p++)
            CHECK(same(&race.keys[0], &race.keys[p]));
        snprintf(directory, sizeof directory, "%s/tandem", config);
        CHECK_EQ(td_test_count_files(directory), 1);
    }
}

/* ---- What is wrong with it ------------------------------------------------------------------- */

static void refused(const char *part)
{
    struct td__secret secret;
    CHECK_OK(td__secret_load(NULL, &secret));
    CHECK_FAILS(td__secret_bind(&secret, "here"), TD_ERR_AUTH, part);
    CHECK_CONTAINS(td_last_error(), "TANDEM_SECRET");
    CHECK(!strchr(td_last_error(), '\n'));
    CHECK(!secret.bound);
}

TEST(user_secret_needs_a_home)
{
    char home[300], path[320];
    snprintf(home, sizeof home, "%s", getenv("HOME"));
    VARIABLES("HOME=");
    refused("HOME is not set");
    setenv("HOME", "", 1);
    refused("HOME is not set");
    setenv("HOME", "here", 1);
    refused("HOME is not an absolute path");
    setenv("HOME", "/proc/self", 1); /* where nothing can be made, not even by root */
    refused("/proc/self/.config");
    snprintf(path, sizeof path, "%s/.config", home);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    setenv("HOME", home, 1);
    refused("Not a directory");
}

TEST(user_secret_that_cannot_be_written)
{
    struct rlimit limit = {0, 0};
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
    refused("ulimit -f");
    char directory[512];
    snprintf(directory, sizeof directory, "%s/.config/tandem", getenv("HOME"));
    CHECK_EQ(td_test_count_files(directory), 0); /* no part of it */
}

TEST(user_secret_that_others_may_know)
{
    bound_secret("here");
    CHECK(!chmod(secret_path(), 0640));
    refused("chmod 600");
    CHECK(!chmod(secret_path(), 0602));
    refused("chmod 600");
    CHECK(!chmod(secret_path(), 0600));
    bound_secret("here");
    CHECK(!truncate(secret_path(), 31));
    refused("does not hold 32 bytes");
    CHECK(!unlink(secret_path()) && !mkdir(secret_path(), 0700));
    refused("is not a regular file");
    CHECK(!rmdir(secret_path()) && !mkfifo(secret_path(), 0600));
    refused("is not a regular file");
}

static const struct passwd *another_user(void)
{
    const struct passwd *user = getpwnam("nobody");
    if (geteuid() != 0)
        td_test_skip("only root can be two users");
    if (!user || user->pw_uid == 0)
        td_test_skip("there is no user nobody");
    return user;
}

TEST(user_secret_of_another_user)
{
    const struct passwd *user = another_user();
    bound_secret("here");
    CHECK(!chown(secret_path(), user->pw_uid, user->pw_gid));
    refused("belongs to another user");
}

/* ---- Worlds ---------------------------------------------------------------------------------- */

static void reduce_in_world(const char *url, int rank, int size)
{
    float sum = 1;
    td_init_options options = {
        .init_method = url, .rank = rank, .world_size = size, .timeout_ms = PATIENCE_MS};
    CHECK_OK(td_init_process_group(&options));
    CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_F32, TD_SUM, NULL, NULL));
    CHECK(sum == (float)(size ? size : 1));
    CHECK_OK(td_destroy_process_group());
}

TEST(one_process_needs_no_secret_and_no_home)
{
    VARIABLES("HOME=");
    reduce_in_world(NULL, 0, 0);
    reduce_in_world("tcp://127.0.0.1:0", 0, 1);
    reduce_in_world(file_init_url().url, 0, 1);
    VARIABLES("MASTER_ADDR=127.0.0.1", "RANK=0", "WORLD_SIZE=1");
    set_number("MASTER_PORT", reserve_port());
    reduce_in_world(NULL, 0, 0);
    VARIABLES("RANK=", "WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=");
    VARIABLES("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0",
              "OMPI_COMM_WORLD_LOCAL_SIZE=1");
    reduce_in_world("mpi://", 0, 0);
    VARIABLES("SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=here");
    reduce_in_world("slurm://", 0, 0);
}

struct meeting {
    char url[600];
};

static void join_in(int rank, void *arg)
{
    reduce_in_world(((struct meeting *)arg)->url, rank, 2);
}

/* Both have only their user's secret, with every scheme. */
TEST(processes_of_one_user_meet_by_hand)
{
    struct meeting meeting;
    snprintf(meeting.url, sizeof meeting.url, "%s", tcp_init_url().url);
    fork_ranks(2, join_in, &meeting);
    snprintf(meeting.url, sizeof meeting.url, "%s", file_init_url().url);
    fork_ranks(2, join_in, &meeting);
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    fork_ranks(2, join_in, &meeting);
    CHECK(!access(secret_path(), F_OK));
}

static void fail_by_file(int rank, void *arg)
{
    td_init_options options = {
        .init_method = arg, .rank = rank, .world_size = 2, .timeout_ms = PATIENCE_MS};
    CHECK_FAILS(td_init_process_group(&options), TD_ERR_AUTH, "HOME is not set");
}

TEST(two_processes_need_a_home)
{
    td_world world;
    td_store *store;
    struct init_url tcp = tcp_init_url(), file = file_init_url();
    VARIABLES("HOME=");
    for (int rank = 0; rank < 2; rank++) /* also the rank that starts before the store */
        CHECK_FAILS(rendezvous_at(&tcp, rank, 2, PATIENCE_MS, &world), TD_ERR_AUTH,
                    "TANDEM_SECRET");
    CHECK_FAILS(
        td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true}, &store),
        TD_ERR_AUTH, "HOME is not set");
    fork_ranks(2, fail_by_file, file.url);
    VARIABLES("TANDEM_SECRET=as the sentence says");
    CHECK_OK(
        td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true}, &store));
    CHECK_OK(td_store_close(store));
}

/* A client that looks for the job at one port is none of the job at another. */
TEST(jobs_of_one_user_do_not_mix)
{
    td_store *store;
    td_tcp_store_options options = {.host_server = true};
    struct td__address_list list;
    bool retry;
    uint8_t challenge[TD__CHALLENGE_SIZE];
    CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &options, &store));
    int port = td_tcp_store_port(store);
    for (int right = 0; right < 2; right++) {
        char address[64];
        uint8_t hello[TD__HELLO_SIZE];
        snprintf(address, sizeof address, "127.0.0.1:%d", right ? port : port == 1 ? 2 : 1);
        struct td__auth auth = {.purpose = "store", .secret = bound_secret(address)};
        CHECK_OK(td__auth_hello(&auth, hello));
        CHECK_OK(td__resolve("127.0.0.1", port, TD__NEVER, &list, &retry));
        int fd = td__connect_to(&list.at[0], td__deadline_in_ms(PATIENCE_MS));
        CHECK(fd >= 0);
        CHECK_EQ(td__send_all(fd, hello, sizeof hello, TD__NEVER), 0);
        int error = td__recv_all(fd, challenge, sizeof challenge, td__deadline_in_ms(PATIENCE_MS));
        CHECK_EQ(error == 0, right);
        close(fd);
    }
    CHECK_OK(td_store_close(store));
}

/* ---- Another user ---------------------------------------------------------------------------- */

struct other_user {
    const struct passwd *user;
    char home[300];
    atomic_int port; /* 0: there is no store yet */
};

static void become(const struct other_user *other)
{
    CHECK_SOON(atomic_load(&other->port));
    CHECK(!setgroups(0, NULL));
    CHECK(!setresgid(other->user->pw_gid, other->user->pw_gid, other->user->pw_gid));
    CHECK(!setresuid(other->user->pw_uid, other->user->pw_uid, other->user->pw_uid));
    setenv("HOME", other->home, 1);
    prctl(PR_SET_DUMPABLE, 1); /* or a sanitizer cannot look at its own memory at the end */
}

static void try_to_join(void *arg)
{
    const struct other_user *other = arg;
    td_store *store;
    td_world world;
    char url[64];
    become(other);
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", other->port, NULL, &store), TD_ERR_AUTH,
                "another user's job");
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", other->port);
    td_rendezvous_options options = {.rank = 1, .world_size = 2, .timeout_ms = PATIENCE_MS};
    CHECK_FAILS(td_rendezvous(url, &options, &world), TD_ERR_AUTH, "another user's job");
    VARIABLES("RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1");
    set_number("MASTER_PORT", other->port);
    CHECK_FAILS(td_rendezvous("env://", NULL, &world), TD_ERR_AUTH, "another user's job");
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", other->port,
                                  &(td_tcp_store_options){.secret = "a guess"}, &store),
                TD_ERR_AUTH, "refused");
    VARIABLES("TANDEM_INSECURE=1");
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", other->port, NULL, &store), TD_ERR_AUTH, "refused");
}

static void join_without_secrets(void *arg)
{
    td_store *store;
    become(arg);
    CHECK_OK(td_tcp_store_open("127.0.0.1", ((struct other_user *)arg)->port, NULL, &store));
    CHECK_OK(td_store_close(store));
}

/* Runs `fn` as another user, beside a store of this one. The fork is made before the server's thread. */
static void beside_a_store(struct other_user *other, void (*fn)(void *))
{
    td_store *store;
    td_bytes value;
    atomic_store(&other->port, 0);
    pid_t pid = fork_start(fn, other);
    CHECK_OK(
        td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true}, &store));
    CHECK_OK(td_store_set(store, "key", "value", 5));
    atomic_store(&other->port, td_tcp_store_port(store));
    fork_join(pid);
    CHECK_OK(td_store_get(store, "key", 0, &value));
    CHECK_EQ(value.size, 5);
    td_bytes_free(&value);
    CHECK_OK(td_store_close(store));
}

TEST(another_user_cannot_join)
{
    struct other_user *other = fork_shared(sizeof *other);
    other->user = another_user();
    snprintf(other->home, sizeof other->home, "%s/home", td_test_temp_dir());
    CHECK(!mkdir(other->home, 0700) && !chmod(td_test_temp_dir(), 0755));
    CHECK(!chown(other->home, other->user->pw_uid, other->user->pw_gid));
    beside_a_store(other, try_to_join);
    VARIABLES("TANDEM_INSECURE=1"); /* other users are trusted */
    beside_a_store(other, join_without_secrets);
}

/* ---- Jobs of Slurm --------------------------------------------------------------------------- */

static const char *secret_of_run(const char *job, const char *restarts)
{
    static char text[8][65];
    static int next;
    char *made = text[next++ % 8];
    setenv("SLURM_JOB_ID", job, 1);
    setenv("SLURM_RESTART_COUNT", restarts, 1);
    td__secret_adopt("", NULL); /* as in a new process */
    CHECK_OK(td__slurm_adopt_secret(made));
    return made;
}

TEST(jobs_of_slurm_have_secrets_of_their_own)
{
    struct td__secret secret, adopted;
    VARIABLES("SLURM_CLUSTER_NAME=c", "SLURM_STEP_ID=0");
    const char *first = secret_of_run("17", "0");
    CHECK_EQ(strlen(first), 64);
    CHECK_OK(td__secret_load(NULL, &adopted));
    CHECK_OK(td__secret_load(first, &secret));
    CHECK(adopted.given && same(&adopted, &secret)); /* the process uses it from now on */
    CHECK(!strcmp(secret_of_run("17", "0"), first)); /* the same on each node */
    CHECK(strcmp(secret_of_run("18", "0"), first) != 0);
    CHECK(strcmp(secret_of_run("17", "1"), first) != 0); /* after it was requeued */
    setenv("SLURM_CLUSTER_NAME", "d", 1);
    CHECK(strcmp(secret_of_run("17", "0"), first) != 0);

    VARIABLES("TANDEM_SECRET=given");
    CHECK_STR(secret_of_run("17", "0"), "");
    VARIABLES("TANDEM_SECRET=", "TANDEM_INSECURE=1");
    CHECK_STR(secret_of_run("17", "0"), "");
    VARIABLES("TANDEM_INSECURE=", "SLURM_JOB_ID=");
    td__secret_adopt("", NULL);
    char none[65];
    CHECK_OK(td__slurm_adopt_secret(none));
    CHECK_STR(none, "");
}

TEST(a_secret_that_others_can_read_is_not_used_for_jobs_of_slurm)
{
    char text[65];
    bound_secret("here");
    VARIABLES("SLURM_JOB_ID=17");
    CHECK(!chmod(secret_path(), 0644));
    CHECK_FAILS(td__slurm_adopt_secret(text), TD_ERR_AUTH, "can be read or written by other users");
}
