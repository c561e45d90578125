/* Runs programs over sockets, round by round. */
#ifndef TD_TCP_EXECUTOR_H
#define TD_TCP_EXECUTOR_H

#include "base/wait.h"
#include "tcp/link_io.h"

struct pollfd;

/** What is kept between runs. Zeroed at first. */
struct td__executor {
    struct td__link_io *ios;
    struct pollfd *polled;
    uint32_t capacity; /* of both */
    char *piece;
    int processors;
    struct td__backoff backoff;
};

void td__executor_free(struct td__executor *executor);

/**
 * Carries out `run`, whose `piece` is filled in here. Returns when all rounds are done, or with the
 * first failure; the links are then of no more use but for a goodbye.
 */
td_status td__executor_run(struct td__executor *executor, struct td__run *run);

#endif
