/* The environment of a worker: what tdrun was started with, and the variables that say where the
 * worker stands in its job. */
#ifndef TD_LAUNCH_ENVIRONMENT_H
#define TD_LAUNCH_ENVIRONMENT_H

#include "launch/node.h"

/** The environment of `local_rank` in `round`, with the place of its log (os/flight.h) or "", ended by NULL, in one piece of memory for free();
 *  NULL without memory. */
char **td__environment_make(const struct td__run_options *options,
                            const struct td__job_secret *secret, const struct td__node_world *world,
                            int local_rank, int round, const char *flight);

#endif
