/* The job's secret, and the store that its nodes and its workers use. */
#ifndef TD_LAUNCH_JOB_STORE_H
#define TD_LAUNCH_JOB_STORE_H

#include "launch/options.h"

#include <tandem/store.h>

struct td__job_secret {
    bool made; /* here, for this job: the workers get it in TANDEM_SECRET */
    char text[65];
};

/**
 * Finds the job's secret: what TANDEM_SECRET or TANDEM_SECRET_FILE say, otherwise a fresh one for a
 * job of one node, otherwise none.
 *
 * TD_ERR_AUTH: several hosts, but no secret, nor TANDEM_INSECURE=1.
 */
td_status td__job_secret_find(const struct td__run_options *options, struct td__job_secret *secret);

/**
 * Opens the store: hosts it on node 0, connects to it on the others, within the join timeout. Where
 * the node's rank is not given, *node_rank is 0 for the one that hosts it, and -1 for the others.
 */
td_status td__job_store_open(const struct td__run_options *options,
                             const struct td__job_secret *secret, int *node_rank, td_store **store);

#endif
