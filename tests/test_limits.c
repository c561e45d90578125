/* Processes with low limits of descriptors or file sizes: calls beyond them fail soon, and the sentence names the
 * limit. */
#include "forks.h"
#include "runner.h"
#include "worlds.h"

#include "base/file_limit.h"
#include "os/address.h"
#include "os/socket.h"

#include <tandem/tandem.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { PATIENCE_MS = 300000 }; /* far beyond the deadline of each test here */

static void set_limit(int resource, rlim_t value)
{
    struct rlimit limit;
    CHECK(!getrlimit(resource, &limit));
    limit.rlim_cur = value;
    CHECK(!setrlimit(resource, &limit));
}

/* ---- Files that may not grow ----------------------------------------------------------------- */

TEST(memory_counts_as_a_file)
{
    void *first = td_alloc(1000);
    CHECK(first);
    td_free(first);
    set_limit(RLIMIT_FSIZE, 20 << 20);
    char *second = td_alloc((size_t)18
                            << 20); /* more than has grown, less than would be grown by */
    CHECK(second);
    memset(second, 1, (size_t)18 << 20);
    CHECK(!td_alloc((size_t)64 << 20));
    CHECK_EQ(td_last_status(), TD_ERR_NOMEM);
    CHECK_CONTAINS(td_last_error(), "ulimit -f");
    CHECK_CONTAINS(td_last_error(), "20971520");
    td_free(second);
    CHECK(!td_zeros((int64_t[]){64 << 20}, 1, TD_F32, NULL));
    CHECK_CONTAINS(td_last_error(), "ulimit -f");
}

TEST(a_small_limit_is_no_signal)
{
    set_limit(RLIMIT_FSIZE, 100 << 10);
    CHECK(!td_alloc(1 << 20));
    CHECK_EQ(td_last_status(), TD_ERR_NOMEM);
    CHECK_CONTAINS(td_last_error(), "102400");
    char *small = td_alloc(1000); /* small enough */
    CHECK(small);
    small[999] = 1;
    td_free(small);
}

static void reduce_with_small_files(int rank, void *arg)
{
    td_init_options options = {
        .init_method = arg, .rank = rank, .world_size = 2, .timeout_ms = 20000};
    if (rank == 0) /* creates the memory that both share */
        set_limit(RLIMIT_FSIZE, 4096);
    td_status status = td_init_process_group(&options);
    float sum = 1;
    if (!status)
        status = td_group_all_reduce(&sum, &sum, 1, TD_F32, TD_SUM, NULL, NULL);
    CHECK(status);
    if (rank == 0)
        CHECK_CONTAINS(td_last_error(), "ulimit -f");
}

TEST(groups_that_cannot_have_memory, .deadline_s = 60)
{
    struct init_url init = tcp_init_url();
    fork_ranks(2, reduce_with_small_files, init.url);
}

TEST(stores_and_checkpoints_that_cannot_grow)
{
    char path[512], *value = calloc(1, 65536);
    td_module *model = td_linear(100, 100);
    CHECK(model);
    td_store *store;
    snprintf(path, sizeof path, "%s/store", td_test_temp_dir());
    CHECK_OK(td_file_store_open(path, &store));
    set_limit(RLIMIT_FSIZE, 10000);
    CHECK_OK(td_store_set(store, "small", value, 100));
    CHECK_FAILS(td_store_set(store, "large", value, 65536), TD_ERR_SYSTEM, "ulimit -f");
    CHECK_OK(td_store_set(store, "small again", value, 100));
    CHECK_OK(td_store_close(store));

    snprintf(path, sizeof path, "%s/model", td_test_temp_dir());
    CHECK_FAILS(td_save_module(path, model), TD_ERR_SYSTEM, "ulimit -f");
    CHECK(access(path, F_OK));
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 0); /* the store went with its last user */
    td_module_destroy(model);
    free(value);
}

/* A signal that the program itself waits for, or had before, is left alone. */
TEST(other_signals_are_left_alone)
{
    char path[512];
    sigset_t set, before, after, pending;
    snprintf(path, sizeof path, "%s/file", td_test_temp_dir());
    int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    set_limit(RLIMIT_FSIZE, 10);
    CHECK_EQ(td__file_write(fd, "0123456789abc", 13), 10);
    CHECK(td__file_write(fd, "d", 1) < 0 && errno == EFBIG);
    CHECK(td__file_truncate(fd, 11) < 0 && errno == EFBIG);
    CHECK(td__file_pwrite(fd, "x", 1, 10) < 0 && errno == EFBIG);
    CHECK_EQ(td__file_allocate(fd, 100), EFBIG);
    CHECK(!pthread_sigmask(SIG_BLOCK, NULL, &before));
    CHECK(!sigismember(&before, SIGXFSZ));

    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    CHECK(!pthread_sigmask(SIG_BLOCK, &set, NULL));
    CHECK(!raise(SIGXFSZ));
    CHECK(td__file_write(fd, "d", 1) < 0 && errno == EFBIG);
    CHECK(!sigpending(&pending) && sigismember(&pending, SIGXFSZ));
    CHECK(!pthread_sigmask(SIG_BLOCK, NULL, &after));
    CHECK(sigismember(&after, SIGXFSZ));
    close(fd);
}

/* ---- Few descriptors ------------------------------------------------------------------------- */

/* Takes descriptors until the process has `left`. */
static void leave_descriptors(int left)
{
    int fds[64], count = 0;
    set_limit(RLIMIT_NOFILE, 64);
    while (count < 64 && (fds[count] = dup(STDERR_FILENO)) >= 0)
        count++;
    CHECK(count >= left && count < 64);
    while (left--)
        close(fds[--count]);
}

/* At the end of a test, since sanitizers want some then. */
static void have_descriptors_again(void)
{
    struct rlimit limit;
    CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
    set_limit(RLIMIT_NOFILE, limit.rlim_max);
}

struct attempt {
    int descriptors;
    char url[128];
    td_status status;
    char message[1024];
};

static void open_with_few(void *arg)
{
    struct attempt *attempt = arg;
    td_init_options options = {
        .init_method = attempt->url, .world_size = 1, .timeout_ms = PATIENCE_MS};
    float sum = 1;
    leave_descriptors(attempt->descriptors);
    attempt->status = td_init_process_group(&options);
    if (!attempt->status)
        attempt->status = td_group_all_reduce(&sum, &sum, 1, TD_F32, TD_SUM, NULL, NULL);
    snprintf(attempt->message, sizeof attempt->message, "%s", td_last_error());
    if (td_is_initialized())
        td_destroy_process_group();
    have_descriptors_again();
}

/* Whichever call it is that finds no descriptor any more. */
TEST(few_descriptors_are_named, .deadline_s = 60)
{
    struct attempt *attempt = fork_shared(sizeof *attempt);
    int worked = 0;
    for (int left = 0; left < 40 && worked < 3; left++) {
        *attempt = (struct attempt){.descriptors = left, .url = "tcp://127.0.0.1:0"};
        fork_join(fork_start(open_with_few, attempt));
        worked += !attempt->status;
        if (attempt->status && !strstr(attempt->message, "ulimit -n"))
            FAIL("with %d descriptors: %s: %s", left, td_status_name(attempt->status),
                 attempt->message);
    }
    CHECK_EQ(worked, 3);
}

TEST(connecting_without_descriptors_fails_at_once)
{
    td_store *store;
    struct init_url init = tcp_init_url(); /* where no server listens */
    td_world world;
    VARIABLES("TANDEM_SECRET=hush");
    leave_descriptors(0);
    CHECK_FAILS(rendezvous_at(&init, 1, 2, PATIENCE_MS, &world), TD_ERR_SYSTEM, "ulimit -n");
    CHECK_CONTAINS(td_last_error(), "the limit is 64");
    CHECK_FAILS(td_tcp_store_open("127.0.0.1", 1,
                                  &(td_tcp_store_options){.timeout_ms = PATIENCE_MS}, &store),
                TD_ERR_SYSTEM, "ulimit -n");
    have_descriptors_again();
}

struct latecomer {
    atomic_bool go;
    struct init_url init;
};

static void come_late(void *arg)
{
    struct latecomer *late = arg;
    td_world world;
    CHECK_SOON(atomic_load(&late->go));
    rendezvous_at(&late->init, 1, 2, PATIENCE_MS, &world); /* it is not admitted */
}

/* Rank 0 has a store, but no descriptor for the connection of rank 1. */
TEST(a_store_without_descriptors_says_so, .deadline_s = 60)
{
    td_store *store;
    td_bytes value;
    td_tcp_store_options options = {.host_server = true, .timeout_ms = PATIENCE_MS};
    struct latecomer *late = fork_shared(sizeof *late);
    late->init = tcp_init_url();
    VARIABLES("TANDEM_SECRET=hush");
    pid_t other = fork_start(come_late, late);
    CHECK_OK(
        td_tcp_store_open("127.0.0.1", atoi(strrchr(late->init.url, ':') + 1), &options, &store));
    leave_descriptors(0);
    atomic_store(&late->go, true);
    CHECK_FAILS(td_store_get(store, "what the late one would set", PATIENCE_MS, &value),
                TD_ERR_SYSTEM, "ulimit -n");
    CHECK_CONTAINS(td_last_error(), "cannot accept more clients");
    fork_kill(other, SIGKILL);
    CHECK_OK(td_store_close(store));
    have_descriptors_again();
}

TEST(a_passed_descriptor_beyond_the_limit)
{
    int ends[2], passed = -1;
    char byte;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
    CHECK_EQ(td__send_fd(ends[0], STDERR_FILENO, "x", 1, TD__NEVER), 0);
    leave_descriptors(0);
    CHECK_EQ(td__recv_fd(ends[1], &passed, &byte, 1, TD__NEVER), EMFILE);
    CHECK_EQ(passed, -1);
    have_descriptors_again();
}
