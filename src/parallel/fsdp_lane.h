/* A thread that runs jobs in order: what offloaded shards need of the host beside a pass. */
#ifndef TD_PARALLEL_FSDP_LANE_H
#define TD_PARALLEL_FSDP_LANE_H

#include <tandem/base.h>

#include "base/fail.h"

/* Lives with what it works on; zero at the start. It can be given to a lane again when it was waited for. */
struct td__lane_job {
    td_status (*run)(void *arg);
    void *arg;
    struct td__lane_job *next;
    bool is_queued; /* or runs; this and what follows is guarded by the lock of the lane */
    td_status status;
    struct td__error error;
};

struct td__lane;

/** A thread of this name; NULL, with the last error set. It waits with at most `most` jobs. */
struct td__lane *td__lane_create(const char *name, int most);
/** Runs what is queued, and ends the thread. NULL is ignored. */
void td__lane_destroy(struct td__lane *lane);

/** Waits for a place in the queue. The job is in no queue. */
void td__lane_submit(struct td__lane *lane, struct td__lane_job *job);
/** Waits until it has run. Returns its status, the error being the last one, once: then TD_OK. */
td_status td__lane_wait(struct td__lane *lane, struct td__lane_job *job);

/** The time that jobs have taken. */
int64_t td__lane_busy_ns(struct td__lane *lane);

#endif
