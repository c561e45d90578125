#include "parallel/fsdp_lane.h"

#include "base/clock.h"
#include "base/thread.h"

#include <pthread.h>
#include <stdlib.h>

struct td__lane {
    pthread_t thread;
    pthread_mutex_t lock; /* innermost: jobs run without it */
    pthread_cond_t changed;
    struct td__lane_job *first, *last; /* NULL: none; the first one is at work */
    int count, most;
    bool ends;
    int64_t busy_ns;
};

/* Runs the first job, without the lock. */
static void run_first(struct td__lane *lane)
{
    struct td__lane_job *job = lane->first;
    pthread_mutex_unlock(&lane->lock);
    struct td__error error = {0};
    int64_t start = td__now_ns();
    td_status status = job->run(job->arg);
    if (status)
        td__error_save(&error);
    pthread_mutex_lock(&lane->lock);
    lane->busy_ns += td__now_ns() - start;
    lane->first = job->next;
    lane->count--;
    job->status = status;
    job->error = error;
    job->is_queued = false;
    pthread_cond_broadcast(&lane->changed);
}

static void *run(void *arg)
{
    struct td__lane *lane = arg;
    pthread_mutex_lock(&lane->lock);
    while (lane->first || !lane->ends)
        if (lane->first)
            run_first(lane);
        else
            pthread_cond_wait(&lane->changed, &lane->lock);
    pthread_mutex_unlock(&lane->lock);
    return NULL;
}

static void free_lane(struct td__lane *lane)
{
    pthread_cond_destroy(&lane->changed);
    pthread_mutex_destroy(&lane->lock);
    free(lane);
}

struct td__lane *td__lane_create(const char *name, int most)
{
    struct td__lane *lane = calloc(1, sizeof *lane);
    if (!lane) {
        td__fail_nomem(name);
        return NULL;
    }
    lane->most = most;
    pthread_mutex_init(&lane->lock, NULL);
    td__cond_init(&lane->changed);
    int error = td__thread_start(&lane->thread, name, run, lane);
    if (!error)
        return lane;
    td_fail(TD_ERR_NOMEM, "no thread for offloaded parameters can be started: %s",
            td__errno_text(error));
    free_lane(lane);
    return NULL;
}

void td__lane_destroy(struct td__lane *lane)
{
    if (!lane)
        return;
    pthread_mutex_lock(&lane->lock);
    lane->ends = true;
    pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->lock);
    pthread_join(lane->thread, NULL);
    free_lane(lane);
}

void td__lane_submit(struct td__lane *lane, struct td__lane_job *job)
{
    pthread_mutex_lock(&lane->lock);
    while (lane->count >= lane->most)
        pthread_cond_wait(&lane->changed, &lane->lock);
    job->next = NULL;
    job->is_queued = true;
    job->status = TD_OK;
    if (lane->first)
        lane->last->next = job;
    else
        lane->first = job;
    lane->last = job;
    lane->count++;
    pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->lock);
}

td_status td__lane_wait(struct td__lane *lane, struct td__lane_job *job)
{
    pthread_mutex_lock(&lane->lock);
    while (job->is_queued)
        pthread_cond_wait(&lane->changed, &lane->lock);
    td_status status = job->status;
    job->status = TD_OK;
    if (status)
        td__error_restore(&job->error);
    pthread_mutex_unlock(&lane->lock);
    return status;
}

int64_t td__lane_busy_ns(struct td__lane *lane)
{
    pthread_mutex_lock(&lane->lock);
    int64_t busy = lane->busy_ns;
    pthread_mutex_unlock(&lane->lock);
    return busy;
}
