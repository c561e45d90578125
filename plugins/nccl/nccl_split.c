/* Groups of td_group_split(): their communicator is split off that of the parent, if that is ready on all ranks. All ranks
 * of the parent are in the call, so it waits for them; other groups create theirs in their first call. */
#include "nccl_backend.h"

#include <stdlib.h>

#define PAUSE_NS 200000L

enum { NO_COLOR = -1 }; /* ncclCommSplit() of a rank that is in no part */

struct nccl_split {
    struct nccl_comm *comm;
    td_device *device;
};

static struct nccl_channel *collectives_of(const struct nccl_group *group)
{
    struct nccl_channel *channel = group->channels;
    while (channel && channel->source >= 0)
        channel = channel->next;
    return channel;
}

static bool is_ready(void *self)
{
    struct nccl_group *group = self;
    if (!nccl.ncclCommSplit || atomic_load(&group->failed))
        return false;
    pthread_mutex_lock(&group->lock);
    const struct nccl_channel *channel = collectives_of(group);
    bool ready = channel && channel->comm && channel->stream && channel->state == NCCL_READY &&
                 !channel->queue.first && !channel->issued.first;
    pthread_mutex_unlock(&group->lock);
    return ready;
}

/* The worker looks at a communicator that is busy, until NCCL is done with it. */
static td_status await_split(struct nccl_channel *channel, int64_t timeout_ms)
{
    struct nccl_group *group = channel->group;
    int64_t end = nccl_now_ns() + timeout_ms * 1000000;
    for (;;) {
        pthread_mutex_lock(&group->lock);
        bool done = channel->state == NCCL_READY;
        pthread_mutex_unlock(&group->lock);
        td_status status = nccl_failure(group);
        if (status || done)
            return status;
        if (nccl_now_ns() >= end) {
            status = td_fail(TD_ERR_TIMEOUT,
                             "td_group_split: NCCL has not split the communicator of group \"%s\" "
                             "within %lld ms",
                             group->context->name, (long long)timeout_ms);
            nccl_note_failure(group, status);
            return status;
        }
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
}

static td_status begin_split(struct nccl_channel *channel, int color, int key,
                             struct nccl_split *split)
{
    struct nccl_group *group = channel->group;
    td_status status = TD_OK;
    nccl_use_device_of(nccl_stream(group, channel->stream));
    pthread_mutex_lock(&group->lock);
    int result = NCCL_OK;
    if (!channel->comm)
        status = nccl_failure(group);
    else
        result = nccl.ncclCommSplit(channel->comm, color < 0 ? NO_COLOR : color, key, &split->comm,
                                    NULL);
    if (result == NCCL_IN_PROGRESS)
        channel->state = NCCL_BUSY;
    else if (result != NCCL_OK)
        status = nccl_fail_result(channel, NULL, result);
    pthread_mutex_unlock(&group->lock);
    if (status)
        nccl_note_failure(group, status);
    nccl_worker_wake(group);
    return status;
}

/* After a failure NCCL may still write the communicator: the memory for it stays. */
static td_status split_group(void *self, int color, int key, int64_t timeout_ms, void **made)
{
    struct nccl_group *group = self;
    struct nccl_channel *channel = collectives_of(group);
    struct nccl_split *split = calloc(1, sizeof *split);
    if (!split)
        return td_fail(TD_ERR_NOMEM, "backend nccl: out of memory");
    split->device = group->device;
    td_status status = begin_split(channel, color, key, split);
    if (!status)
        status = await_split(channel, timeout_ms);
    if (status)
        return status;
    *made = split;
    return TD_OK;
}

static td_status adopt(void *self, void *made)
{
    struct nccl_group *group = self;
    struct nccl_split *split = made;
    struct nccl_channel *channel = NULL;
    td_status status = TD_OK;
    if (group && split->comm) {
        pthread_mutex_lock(&group->lock);
        group->device = split->device;
        if ((channel = nccl_channel_add(group, -1, -1))) {
            channel->comm = split->comm;
            channel->state = NCCL_READY;
        } else {
            status = td_last_status();
        }
        pthread_mutex_unlock(&group->lock);
    }
    if (!channel && split->comm)
        nccl.ncclCommAbort(split->comm);
    free(split);
    return status;
}

const td_backend_split nccl_split = {.is_ready = is_ready, .split = split_group, .adopt = adopt};
