/* The environment of a worker: what tdrun was started with, and the variables that say where the
 * worker stands in its job. */
#ifndef TD_LAUNCH_ENVIRONMENT_H
#define TD_LAUNCH_ENVIRONMENT_H

#include "launch/node.h"

/** One start of a worker. */
struct td__environment_start {
    int local_rank;
    int round;          /* of all workers, from 0 */
    int restarts;       /* of this one by itself, into the round that is there */
    const char *flight; /* the place of its log (os/flight.h), or "" */
};

/** The environment of a worker, ended by NULL, in one piece of memory for free(); NULL without
 *  memory. */
char **td__environment_make(const struct td__run_options *options,
                            const struct td__job_secret *secret, const struct td__node_world *world,
                            const struct td__environment_start *start);

#endif
