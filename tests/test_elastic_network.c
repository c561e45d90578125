/* Elastic training where whole hosts become silent: their ranks are stopped for a while. */
#include "elastic_training.h"
#include "runner.h"
#include "ways.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned stopped_ranks; /* a mask */

/* A file that says that something has happened; all ranks see it. */
static const char *mark_of(const char *what, int rank)
{
    static char path[400];
    snprintf(path, sizeof path, "%s/%s.%d", td_test_temp_dir(), what, rank);
    return path;
}

static void mark(const char *what, int rank)
{
    int fd = open(mark_of(what, rank), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    close(fd);
}

/* Until a rank that was not stopped has ended its training. */
static td_status stop_for_a_while(td_elastic_slice *slice, void *arg)
{
    static bool once;
    if ((stopped_ranks >> td_test_rank() & 1) && slice->step == 4 && !once) {
        once = true;
        const char *path = mark_of("go", 0);
        pid_t own = getpid();
        if (fork() == 0) {
            for (int i = 0; access(path, F_OK) && i < 5000; i++)
                usleep(10000);
            kill(own, SIGCONT);
            _exit(0);
        }
        kill(own, SIGSTOP);
        wait(NULL);
    }
    return pass(slice, arg);
}

static struct elastic_outcome train_beside_silent(const char *hosts, unsigned silent)
{
    open_world(&(struct way){.hosts = hosts}, 0);
    stopped_ranks = silent;
    struct elastic_outcome outcome = train(
        &(struct elastic_plan){.slice = stop_for_a_while, .options.heartbeat_ms = 500}, NULL);
    if (silent >> td_test_rank() & 1) {
        mark("back", td_test_rank());
        return outcome;
    }
    mark("go", 0);
    for (int r = 0; r < 4 && !outcome.status; r++) /* they are told that nobody wants them */
        if (silent >> r & 1)
            CHECK_SOON(access(mark_of("back", r), F_OK) == 0);
    return outcome;
}

/* The lower half of two hosts goes on … */
RANKS(upper_host_is_silent, .ranks = 4, .deadline_s = 60)
{
    struct elastic_outcome outcome = train_beside_silent("aabb", 0xc);
    if (td_test_rank() < 2) {
        CHECK_OK(outcome.status);
        CHECK(outcome.ranks == 2 && outcome.stats.deaths == 2);
    } else {
        CHECK_EQ(outcome.status, TD_ERR_STATE); /* they come back, and nobody wants them any more */
        CHECK_CONTAINS(td_last_error(), "excluded");
    }
}

/* … the upper one does not … */
RANKS(lower_host_is_silent, .ranks = 4, .may_die = 0x3, .deadline_s = 60)
{
    struct elastic_outcome outcome = train_beside_silent("aabb", 0x3);
    if (td_test_rank() >= 2) {
        CHECK_EQ(outcome.status, TD_ERR_PEER);
        CHECK_CONTAINS(td_last_error(), "1 of 2 hosts can reach each other here");
    }
}

/* … but two of three do. */
RANKS(one_of_three_hosts_is_silent, .ranks = 4, .deadline_s = 60)
{
    struct elastic_outcome outcome = train_beside_silent("aabc", 0x3);
    if (td_test_rank() >= 2) {
        CHECK_OK(outcome.status);
        CHECK_EQ(outcome.ranks, 2);
    }
}
