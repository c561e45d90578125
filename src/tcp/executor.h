/* Runs compiled schedules over sockets, round by round. */
#ifndef TD_TCP_EXECUTOR_H
#define TD_TCP_EXECUTOR_H

#include "base/wait.h"
#include "tcp/link_io.h"

struct pollfd;

/** The memory that is kept between runs. Zero-initialized. */
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
 * Runs `run`, and sets its `piece`. Returns when all rounds are done, or with the first failure, of which it has
 * notified the other members; the links cannot be used any more then.
 */
td_status td__executor_run(struct td__executor *executor, struct td__run *run);

#endif
