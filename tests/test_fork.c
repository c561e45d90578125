/* Forked children, such as the workers of a data loader: they do not hide the death of their parent, do not take
 * part in its calls, and the program's own descriptors stay theirs. */
#include "forks.h"
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "base/thread.h"

#include <tandem/group.h>
#include <tandem/store.h>

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TIMEOUT_MS = 90000, SOON_S = 10 };

/* ---- The death of a parent ------------------------------------------------------------------- */

static int survivors; /* a FIFO that all processes of the test have open until they end */

static const char *fifo_path(void)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/survivors", td_test_temp_dir());
    return path;
}

static void hold_fifo(void)
{
    survivors = open(fifo_path(), O_RDWR | O_CLOEXEC);
    CHECK(survivors >= 0);
}

/* Dies, and leaves a child that ends with the last of the survivors. */
static void die_as_a_parent(void)
{
    int up[2];
    char byte;
    CHECK_EQ(pipe(up), 0);
    if (fork() == 0) {
        int until = open(fifo_path(), O_RDONLY);
        close(survivors);
        CHECK_EQ(write(up[1], "!", 1), 1);
        _exit((int)read(until, &byte, 1));
    }
    CHECK_EQ(read(up[0], &byte, 1), 1);
    raise(SIGKILL);
}

/* Without a word from the kernel all would wait until the timeout. */
static void lose_a_parent(const struct way *way, const char *how)
{
    float x = 1;
    if (td_test_rank() == 0)
        CHECK_EQ(mkfifo(fifo_path(), 0600), 0);
    td_test_barrier();
    hold_fifo();
    open_world(way, TIMEOUT_MS);
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL));
    td_test_barrier();
    if (td_test_rank() == 1)
        die_as_a_parent();
    int64_t before = td__now_ns();
    td_status status = td_test_rank() ? td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, NULL, NULL)
                                      : td_group_recv(&x, 1, TD_F32, 1, 7, NULL, NULL);
    CHECK_FAILS(status, TD_ERR_PEER, "rank 1");
    CHECK_CONTAINS(td_last_error(), how);
    CHECK(td__now_ns() - before < SOON_S * 1000000000ll * td_test_slowness());
    CHECK_OK(td_destroy_process_group());
}

RANKS(death_of_a_parent, .ranks = 3, .may_die = 1 << 1, .deadline_s = 120)
{
    lose_a_parent(&shm, "was killed by SIGKILL");
}

RANKS(death_of_a_parent_tcp, .ranks = 3, .may_die = 1 << 1, .deadline_s = 120)
{
    lose_a_parent(&tcp, "was killed by SIGKILL");
}

RANKS(death_of_a_parent_on_hosts, .ranks = 4, .may_die = 1 << 1, .deadline_s = 120)
{
    lose_a_parent(&(struct way){.hosts = "abab"}, "");
}

/* A store that the rank hosts: its clients, also those that wait, get its end as an error. */
static int store_port;

static void serve_and_die(void)
{
    td_store *store;
    td_tcp_store_options options = {.host_server = true};
    CHECK_OK(td_tcp_store_open("127.0.0.1", store_port, &options, &store));
    CHECK_OK(td_store_set(store, "up", "1", 1));
    CHECK_OK(td_store_wait(store, &(const char *){"go"}, 1, TIMEOUT_MS));
    die_as_a_parent();
}

TEST(death_of_a_parent_with_a_store, .deadline_s = 120)
{
    td_store *store;
    td_bytes value;
    setenv("TANDEM_SECRET", "a secret of this test only", 1);
    CHECK_EQ(mkfifo(fifo_path(), 0600), 0);
    hold_fifo();
    store_port = reserve_port();
    pid_t server = fork();
    if (server == 0) {
        serve_and_die();
        _exit(1);
    }
    CHECK_OK(td_tcp_store_open("127.0.0.1", store_port, &(td_tcp_store_options){0}, &store));
    CHECK_OK(td_store_get(store, "up", TIMEOUT_MS, &value));
    td_bytes_free(&value);
    int64_t before = td__now_ns();
    CHECK_OK(td_store_set(store, "go", "1", 1));
    td_status status = td_store_get(store, "never", TIMEOUT_MS, &value);
    CHECK(status != TD_OK && status != TD_ERR_TIMEOUT);
    CHECK(td__now_ns() - before < SOON_S * 1000000000ll * td_test_slowness());
    td_store_close(store);
    CHECK_EQ(waitpid(server, NULL, 0), server);
}

/* ---- Works of the parent --------------------------------------------------------------------- */

static void count_call(td_work *work, td_status status, void *arg)
{
    (void)work, (void)status;
    ++*(int *)arg;
}

struct inherited {
    td_work *works[2];
    float received;
};

static void use_inherited_works(void *arg)
{
    struct inherited *inherited = arg;
    for (int i = 0; i < 2; i++) {
        int calls = 0;
        td_work *work = inherited->works[i];
        CHECK_FAILS(td_work_wait(work, 1000), TD_ERR_STATE, "fork()");
        CHECK_FAILS(td_work_wait(work, TD_NOW), TD_ERR_STATE, "fork()");
        CHECK_FAILS(td_work_status(work), TD_ERR_STATE, "fork()");
        CHECK_FAILS(td_work_on_complete(work, count_call, &calls), TD_ERR_STATE, "fork()");
        CHECK(td_work_test(work));
        CHECK_EQ(calls, 0);
        td_work_release(work);
    }
    CHECK_EQ(inherited->received, 0);
}

static void fork_during_works(const struct way *way)
{
    float sum = 1, sent = 7;
    struct inherited inherited = {.received = 0};
    open_world(way, TIMEOUT_MS);
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (td_test_rank() == 0) {
        CHECK_OK(td_group_recv(&inherited.received, 1, TD_F32, 1, 3, NULL, &inherited.works[0]));
        CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_F32, TD_SUM, NULL, &inherited.works[1]));
        struct td_test_child child = td_test_fork(use_inherited_works, &inherited);
        if (!WIFEXITED(child.status) || WEXITSTATUS(child.status))
            FAIL("the child ended with %d: %s", child.status, child.output);
        free(child.output);
        td_test_barrier();
        CHECK_OK(td_work_wait_all(inherited.works, 2, 0));
        CHECK_EQ(inherited.received, sent);
        td_work_release(inherited.works[0]);
        td_work_release(inherited.works[1]);
    } else {
        td_test_barrier();
        CHECK_OK(td_group_send(&sent, 1, TD_F32, 0, 3, NULL, NULL));
        CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_F32, TD_SUM, NULL, NULL));
    }
    CHECK_EQ(sum, 2);
    CHECK_OK(td_destroy_process_group());
}

RANKS(works_of_the_parent, .ranks = 2)
{
    fork_during_works(&shm);
}

RANKS(works_of_the_parent_tcp, .ranks = 2)
{
    fork_during_works(&tcp);
}

/* ---- Descriptors ----------------------------------------------------------------------------- */

static bool is_connected(int fd)
{
    struct sockaddr_storage peer;
    socklen_t size = sizeof peer;
    return !getpeername(fd, (struct sockaddr *)&peer, &size);
}

/* As the library makes its connections. */
static int excluded_pair(int ends[2])
{
    td__fork_hold();
    int failed = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends);
    td__fork_exclude(ends[0]);
    td__fork_exclude(ends[1]);
    td__fork_release();
    return failed;
}

/* A pair of the library's, one of the program's own, and one of the program's at a number that was the
 * library's before. */
TEST(descriptors_of_a_child)
{
    int theirs[2], ours[2], again[2];
    CHECK_EQ(excluded_pair(theirs), 0);
    CHECK_EQ(excluded_pair(again), 0);
    close(again[0]);
    close(again[1]);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, again), 0);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ours), 0);
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < 2; i++) {
            CHECK(is_connected(ours[i]));
            CHECK(is_connected(again[i]));
            CHECK(!is_connected(theirs[i]));
            CHECK(fcntl(theirs[i], F_GETFD) & FD_CLOEXEC); /* the number is not free */
        }
        close(theirs[0]);
        int next[2]; /* made in the child, and therefore its own */
        CHECK_EQ(excluded_pair(next), 0);
        CHECK(is_connected(next[0]) && is_connected(next[1]));
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    CHECK(is_connected(theirs[0]) && is_connected(theirs[1]));
}

/* Without a descriptor for the dead socket that replaces them. */
TEST(descriptors_of_a_child_that_has_none_left)
{
    int theirs[2][2], last = -1;
    for (int i = 0; i < 2; i++)
        CHECK_EQ(excluded_pair(theirs[i]), 0);
    int first = dup(0);
    for (int filler = first; filler >= 0; filler = dup(0))
        last = filler;
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < 4; i++)
            CHECK(!is_connected(theirs[i / 2][i % 2]));
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    for (int filler = first; filler <= last; filler++)
        close(filler); /* LeakSanitizer needs one */
}
