/* The host of a round, for its files:
 *
 *     chaos_setup.c      the page, the store, the environment and the networks of a round; starting a rank
 *     chaos_host.c       injecting the fault and watching
 *     chaos_verdict.c    the outcome, and what is left behind */
#ifndef TANDEM_TESTS_CHAOS_HOST_H
#define TANDEM_TESTS_CHAOS_HOST_H

#include "chaos.h"

struct child {
    pid_t pid;
    int output; /* a memfd */
    bool ended;
    int status;
    int64_t end_ns;
};

struct host {
    const struct plan *plan;
    struct outcome *outcome;
    struct page *page; /* NULL before it is made */
    int page_fd;
    td_store *store;
    char directory[256];
    int spaces[MAX_RANKS + 1]; /* descriptors of namespaces */
    int space_count;
    struct child ranks[MAX_RANKS];
    bool injected, killed;
    struct child first; /* the victim, where it was started again */
    bool again;
    int64_t resume_ns; /* when a paused victim goes on; 0: not paused */
    int64_t start_ns;
};

/** The round has failed: adds a line to its report. */
void host_report(struct host *host, const char *format, ...) __attribute__((format(printf, 2, 3)));

/** Makes all that the ranks need. False, and a line in the report, where that fails. */
bool host_set_up(struct host *host);

/** Starts a rank; `again`: it replaces one that has ended. */
bool host_start_rank(struct host *host, int index, bool again);

/** Looks at how all ranks have ended, and at what they say. */
void host_judge(struct host *host);

/** Waits for processes that ranks have left; they are ours, since this process is a subreaper. */
void host_await_orphans(struct host *host);

/** Looks for what is left behind when all is closed. */
void host_check_left(struct host *host);

#endif
