/* Ranks that end before all have joined: the others get the error at once, with how they ended. */
#include "runner.h"

#include "base/clock.h"
#include "os/process.h"
#include "store/peer_watch.h"

#include <tandem/group.h>
#include <tandem/rendezvous.h>

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOMENT_NS = 600000000 };

/* Long enough that the others have begun to look after it. */
static void die_soon(void)
{
    td__sleep_ns(MOMENT_NS);
    raise(SIGKILL);
}

static void check_init_fails(const td_init_options *options, const char *why)
{
    int64_t before = td__now_ns();
    CHECK_FAILS(td_init_process_group(options), TD_ERR_PEER, why);
    CHECK_PROMPT(before);
}

/* A process that waits for the others, and is killed. It stays a zombie, where the others may have to read how it
 * ended, until waitpid(). */
static pid_t join_and_die(void)
{
    pid_t pid = fork();
    if (!pid) {
        CHECK_OK(td_init_process_group(NULL));
        _exit(0);
    }
    td__sleep_ns(MOMENT_NS);
    kill(pid, SIGKILL);
    siginfo_t end;
    waitid(P_PID, (id_t)pid, &end, WEXITED | WNOWAIT);
    return pid;
}

/* Rank 2 dies while it waits for rank 1, which fails as soon as it starts. The next attempt succeeds. */
RANKS(death_before_all_have_joined, .ranks = 3)
{
    int rank = td_test_rank();
    pid_t pid = 0;
    if (rank == 2) {
        pid = join_and_die();
    } else {
        if (rank == 1)
            td__sleep_ns(3 * (int64_t)MOMENT_NS);
        check_init_fails(NULL, ": rank 2 (on ");
        CHECK_CONTAINS(td_last_error(), ") was killed by SIGKILL before all ranks had joined");
    }
    td_test_barrier();
    if (pid)
        waitpid(pid, NULL, 0);
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

/* Rank 2 is restarted at once, as a launcher does it: that is no duplicate rank. */
RANKS(death_before_all_have_joined_and_rejoin, .ranks = 3)
{
    int rank = td_test_rank();
    if (rank == 2) {
        waitpid(join_and_die(), NULL, 0);
    } else if (rank == 1) {
        td__sleep_ns(2 * (int64_t)MOMENT_NS);
    }
    td_status status;
    while ((status = td_init_process_group(NULL)) == TD_ERR_PEER)
        CHECK_CONTAINS(td_last_error(), "rank 2 (");
    CHECK_OK(status);
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

RANKS(death_before_a_world_is_complete, .ranks = 3, .may_die = 1 << 2)
{
    if (td_test_rank() == 2) {
        td_world world;
        CHECK_OK(td_rendezvous(NULL, NULL, &world));
        die_soon();
    }
    check_init_fails(NULL, "group \"world\": rank 2 (on ");
    CHECK_CONTAINS(td_last_error(), ") was killed by SIGKILL before all ranks had joined");
}

/* In the second world of these processes. */
RANKS(death_before_the_second_world_is_complete, .ranks = 3, .may_die = 1 << 0)
{
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_destroy_process_group());
    if (td_test_rank() == 0) {
        td_world world;
        CHECK_OK(td_rendezvous(NULL, NULL, &world));
        die_soon();
    }
    check_init_fails(NULL, "rank 0 (on ");
}

/* It is on another machine, where another rank has seen it. */
RANKS(a_lost_rank_that_is_reported, .ranks = 2)
{
    static const char text[] = "group \"world\": rank 1 (on moon, pid 7) was killed by SIGSEGV";
    if (td_test_rank() == 0) {
        check_init_fails(NULL, text);
        return;
    }
    td_world world;
    CHECK_OK(td_rendezvous(NULL, NULL, &world));
    CHECK_OK(td_store_set(world.store, "\1tandem/\1ended/world/1", text, strlen(text)));
    td__sleep_ns(MOMENT_NS);
    CHECK_OK(td_world_close(&world));
}

/* Without a rendezvous: a store of the program's own. */
RANKS(death_before_a_world_over_a_store_is_complete, .ranks = 3, .may_die = 1 << 2)
{
    char path[256];
    td_store *store;
    snprintf(path, sizeof path, "%s/store", td_test_temp_dir());
    CHECK_OK(td_file_store_open(path, &store));
    if (td_test_rank() == 2) {
        CHECK_OK(td__roster_add(store, "\1tandem/\1joined/world/1", 2, false));
        die_soon();
    }
    check_init_fails(&(td_init_options){.store = store, .rank = td_test_rank(), .world_size = 3},
                     "group \"world\": rank 2 (on ");
    CHECK_OK(td_store_close(store));
}

/* ---- Processes and the roster ---------------------------------------------------------------- */

TEST(processes_that_are_found_again)
{
    struct td__process_id own, child;
    bool ended;
    CHECK(td__process_identify((int)getpid(), &own));
    pid_t pid = fork();
    if (!pid) {
        pause();
        _exit(0);
    }
    CHECK(td__process_identify((int)pid, &child));
    CHECK(own.space == child.space && !td__process_id_equal(&own, &child));
    int fd = td__process_watch_id(&child, &ended);
    struct pollfd end = {.fd = fd, .events = POLLIN};
    CHECK(fd >= 0 && poll(&end, 1, 0) == 0);
    kill(pid, SIGKILL);
    CHECK_EQ(poll(&end, 1, 10000), 1);
    close(fd);
    waitpid(pid, NULL, 0);
    CHECK_EQ(td__process_watch_id(&child, &ended), -1);
    CHECK(ended);
    own.started++; /* another one that had the same number */
    CHECK_EQ(td__process_watch_id(&own, &ended), -1);
    CHECK(ended);
}

TEST(rosters)
{
    td_store *store;
    td_bytes list;
    struct td__process_id own;
    struct td__roster_entry entry;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_OK(td__roster_add(store, "list", 3, false));
    CHECK_OK(td_store_append(store, "list", "nonsense\n\n1 0 5 -7 8\n", 21));
    CHECK_OK(td__roster_add(store, "list", 4, true));
    CHECK_OK(td_store_append(store, "list", "5 0 7", 5));
    CHECK_OK(td_store_get(store, "list", 0, &list));
    CHECK(td__process_identify((int)getpid(), &own));
    const char *at = list.data;
    CHECK(td__roster_next(&at, &entry));
    CHECK_EQ(entry.rank, 3);
    CHECK(!entry.rejoined && td__process_id_equal(&entry.process, &own));
    CHECK(td__roster_next(&at, &entry));
    CHECK_EQ(entry.rank, 4);
    CHECK(entry.rejoined && td__process_id_equal(&entry.process, &own));
    CHECK(!td__roster_next(&at, &entry));
    td_bytes_free(&list);
    CHECK_OK(td_store_close(store));
}
