/* The end of a group that has failed: its communicators are aborted, which ends what they run on the device, and its calls
 * are completed with the failure. */
#include "nccl_backend.h"

#include <pthread.h>

enum { LOCK_S = 1 }; /* how long a thread may be in NCCL before it counts as blocked */

static bool lock_in_time(struct nccl_group *group)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LOCK_S;
    return pthread_mutex_timedlock(&group->lock, &until) == 0;
}

static void *abort_comm(void *comm)
{
    nccl.ncclCommAbort(comm);
    return NULL;
}

/* Aborting frees memory of the device, which waits for all that the device runs, also for another communicator's
 * operations: one after another, the first might wait for ever. So each has a thread. */
static void abort_together(struct nccl_channel *first)
{
    for (struct nccl_channel *channel = first; channel; channel = channel->next)
        channel->is_aborting = channel->dying &&
                               !pthread_create(&channel->aborter, NULL, abort_comm, channel->dying);
    for (struct nccl_channel *channel = first; channel; channel = channel->next) {
        if (channel->is_aborting)
            pthread_join(channel->aborter, NULL);
        else if (channel->dying)
            abort_comm(channel->dying);
        channel->is_aborting = false;
        channel->dying = NULL;
    }
}

/* A thread waits in NCCL, for room in a stream that does not run: this makes room. Without ncclCommRevoke() the
 * communicator is freed under it, which only a rank that has failed already risks. */
static void free_blocked_thread(struct nccl_group *group)
{
    for (struct nccl_channel *channel = group->channels; channel; channel = channel->next) {
        if (channel->comm && nccl.ncclCommRevoke) {
            nccl.ncclCommRevoke(channel->comm, 0);
        } else if (channel->comm) {
            channel->dying = channel->comm;
            channel->comm = NULL;
        }
    }
    abort_together(group->channels);
    pthread_mutex_lock(&group->lock);
}

void nccl_abort_all(struct nccl_group *group)
{
    struct nccl_list done;
    nccl_list_init(&done);
    td_status status = nccl_failure(group);
    td_backend_fail(group->context, status);
    if (!lock_in_time(group))
        free_blocked_thread(group);
    group->cleaned = true;
    struct nccl_channel *first = group->channels;
    for (struct nccl_channel *channel = first; channel; channel = channel->next) {
        channel->dying = channel->comm;
        channel->comm = NULL;
        nccl_channel_fail(channel, status, &done);
    }
    pthread_mutex_unlock(&group->lock);
    nccl_complete(group, &done);
    abort_together(first);
}
