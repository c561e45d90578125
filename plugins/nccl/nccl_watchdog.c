/* The worker of a group: it drives communicators that are not ready, watches what the device runs, and aborts.
 *
 * Watching costs a call nothing: ten times a second, while calls are enqueued that the device may not have run, the worker
 * records an event behind the last one, and looks whether NCCL reports an error. An event that has not passed after a
 * second may mean that ranks have made different calls, so the worker compares the calls with those of other ranks; that
 * the device is busy, or that another rank is late, is no failure, however long it takes.
 *
 * A group fails once. Then the worker aborts all its communicators (nccl_abort.c). */
#include "nccl_backend.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TICK_NS 100000000LL
#define STALL_NS 1000000000LL
#define SLOWEST_STALL_NS 10000000000LL
#define WARN_NS 30000000000LL
#define NOTICE_NS 3000000000LL   /* how long a lost rank may stay without a name */
#define REQUESTS_NS 1000000000LL /* how often a rank without calls looks for requests */
#define FIRST_PAUSE_NS 50000LL
#define LAST_PAUSE_NS 2000000LL

enum { COMPARED = 8 }; /* ranks at a time */

/* ---- Failing -------------------------------------------------------------------------------------- */

static void wake(struct nccl_group *group) /* with the wake lock */
{
    group->woken = true;
    pthread_cond_signal(&group->wake);
}

void nccl_worker_wake(struct nccl_group *group)
{
    pthread_mutex_lock(&group->wake_lock);
    wake(group);
    pthread_mutex_unlock(&group->wake_lock);
}

void nccl_note_failure(struct nccl_group *group, td_status status)
{
    pthread_mutex_lock(&group->wake_lock);
    if (!atomic_load(&group->failed)) {
        snprintf(group->cause, sizeof group->cause, "%s", td_last_error());
        atomic_store(&group->failed, (int)status);
        wake(group);
    }
    pthread_mutex_unlock(&group->wake_lock);
}

td_status nccl_failure(const struct nccl_group *group)
{
    int status = atomic_load_explicit(&group->failed, memory_order_acquire);
    return status ? td_fail((td_status)status, "%s", group->cause) : TD_OK;
}

/* ---- Watching -------------------------------------------------------------------------------------- */

static td_status check_comm(const struct nccl_channel *channel)
{
    int state = NCCL_OK, result = nccl.ncclCommGetAsyncError(channel->comm, &state);
    char text[600];
    result = result == NCCL_OK ? state : result;
    if (result == NCCL_OK || result == NCCL_IN_PROGRESS)
        return TD_OK;
    return td_fail(result == NCCL_REMOTE_ERROR ? TD_ERR_PEER : TD_ERR_SYSTEM,
                   "group \"%s\": %s reports: %s", channel->group->context->name, nccl.name,
                   nccl_result_text(result, channel->comm, text, sizeof text));
}

/* NCCL notices that a rank has gone, but not which one, and often before the failure detector does: for some seconds
 * that one, or the comparison of calls, may name it. */
static td_status check_in_time(struct nccl_channel *channel, int64_t now)
{
    struct nccl_watch *watch = &channel->watch;
    td_status status = check_comm(channel);
    if (status != TD_ERR_PEER)
        return status;
    if (!watch->remote_ns)
        watch->remote_ns = now;
    return now - watch->remote_ns < NOTICE_NS ? TD_OK : status;
}

/* With the lock. */
static void follow_device(struct nccl_channel *channel, int64_t now)
{
    struct nccl_watch *watch = &channel->watch;
    if (watch->is_set && td_event_is_done(watch->event)) {
        channel->done = watch->number;
        channel->done_sequence = watch->sequence;
        watch->is_set = false;
    }
    if (watch->is_set || channel->enqueued == channel->done)
        return;
    if (!watch->event)
        watch->event = td_event_create(channel->group->device, NULL);
    if (!watch->event || td_event_record(watch->event, channel->stream))
        return;
    watch->is_set = true;
    watch->number = channel->enqueued;
    watch->sequence = channel->sequence;
    watch->since_ns = now;
    watch->next_ns = now + STALL_NS;
    watch->warn_ns = WARN_NS;
}

/* A rank that has found a difference leaves its text for others, which may find this rank gone. */
static void publish_mismatch(struct nccl_group *group)
{
    td_store_set(group->context->store, "mismatch", group->cause, strlen(group->cause));
}

static td_status read_mismatch(const struct nccl_group *group)
{
    const char *keys[1] = {"mismatch"};
    td_bytes text = {0};
    bool found = false;
    if (td_store_check(group->context->store, keys, 1, &found) || !found ||
        td_store_get(group->context->store, keys[0], 0, &text))
        return TD_OK;
    td_status status = td_fail(TD_ERR_MISMATCH, "%s", text.data);
    td_bytes_free(&text);
    return status;
}

/* A rank that has left may have done so since it has found a difference. */
static td_status find_cause(const struct nccl_group *group, td_status status)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", td_last_error());
    td_status cause = read_mismatch(group);
    return cause ? cause : td_fail(status, "%s", text);
}

/* Compares the calls with those of some other ranks, each time others. */
static td_status compare_calls(struct nccl_channel *channel, uint64_t sequence, bool meets)
{
    const td_backend_context *context = channel->group->context;
    int others = context->size - 1;
    for (int i = 0; i < COMPARED && i < others; i++) {
        int rank = (context->rank + 1 + channel->watch.turns++ % others) % context->size;
        td_status status = td_backend_compare(context, sequence, rank);
        if (status && (status != TD_ERR_PEER || meets))
            return status == TD_ERR_PEER ? find_cause(channel->group, status) : status;
    }
    return TD_OK;
}

/* Whether messages and collectives wait on the device at once, which may be for each other. */
static bool both_wait(struct nccl_group *group)
{
    bool waits[2] = {false, false};
    pthread_mutex_lock(&group->lock);
    for (struct nccl_channel *channel = group->channels; channel; channel = channel->next)
        waits[channel->source >= 0] |= channel->enqueued > channel->done;
    pthread_mutex_unlock(&group->lock);
    return waits[0] && waits[1];
}

static void warn(const struct nccl_channel *channel, int64_t since_ns, int64_t now)
{
    const td_backend_context *context = channel->group->context;
    char what[80];
    if (channel->source < 0)
        snprintf(what, sizeof what, "collective #%llu",
                 (unsigned long long)channel->watch.sequence);
    else
        snprintf(what, sizeof what, "a message from rank %d to rank %d",
                 context->global_ranks[channel->source], context->global_ranks[channel->target]);
    td_log(TD_LOG_WARN, "group \"%s\": %s has not run %s after %lld s%s", context->name,
           td_device_name(channel->group->device), what, (long long)((now - since_ns) / 1000000000),
           both_wait(channel->group) ? "; messages and collectives both wait: they wait for each "
                                       "other if ranks call them in different orders on one stream"
                                     : "");
}

static td_status compare_messages(struct nccl_channel *channel)
{
    td_status status = nccl_compare_messages(channel);
    nccl_request_log(channel);
    return status;
}

/* Returns whether the device has something to run. */
static bool watch_channel(struct nccl_channel *channel)
{
    struct nccl_group *group = channel->group;
    struct nccl_watch *watch = &channel->watch;
    td_status status = TD_OK;
    int64_t now = nccl_now_ns(), since = 0;
    pthread_mutex_lock(&group->lock);
    bool is_open = channel->comm && channel->state == NCCL_READY;
    if (is_open)
        status = check_in_time(channel, now);
    if (is_open && !status)
        follow_device(channel, now);
    bool runs = channel->enqueued > channel->done || watch->remote_ns;
    bool stalls = is_open && !status && watch->is_set && now >= watch->next_ns;
    bool meets = channel->meeting > channel->done_sequence && channel->meeting <= watch->sequence;
    uint64_t sequence = watch->sequence;
    if (stalls) {
        since = watch->since_ns;
        int64_t pause = now - since;
        watch->next_ns = now + (pause < SLOWEST_STALL_NS ? pause : SLOWEST_STALL_NS);
    }
    pthread_mutex_unlock(&group->lock);
    if (stalls && now - since >= watch->warn_ns) { /* only the worker reads these two */
        warn(channel, since, now);
        watch->warn_ns = 2 * (now - since);
    }
    if (stalls)
        status = channel->source < 0 ? compare_calls(channel, sequence, meets)
                                     : compare_messages(channel);
    if (status)
        nccl_note_failure(group, status);
    if (status == TD_ERR_MISMATCH && atomic_load(&group->failed) == TD_ERR_MISMATCH)
        publish_mismatch(group);
    return runs;
}

/* The worker's times: of the next looks at the device and for requests, and its pause while NCCL is in progress. */
struct nccl_clock {
    int64_t next_tick, next_request, pause;
    bool runs; /* at the last look the device had something to run */
};

/* ---- The thread -------------------------------------------------------------------------------------- */

static struct nccl_channel *channels_of(struct nccl_group *group)
{
    pthread_mutex_lock(&group->lock);
    struct nccl_channel *first = group->channels; /* others are added in front of it */
    pthread_mutex_unlock(&group->lock);
    return first;
}

/* Until it is woken, or `pause_ns` has passed; below 0: not at all. Returns false when it is to end. */
static bool sleep_until_woken(struct nccl_group *group, int64_t pause_ns, bool *woken)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + (pause_ns > 0 ? pause_ns : 0);
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    pthread_mutex_lock(&group->wake_lock);
    int error = 0;
    while (!group->woken && !group->stopping && error != ETIMEDOUT)
        error = pause_ns < 0 ? pthread_cond_wait(&group->wake, &group->wake_lock)
                             : pthread_cond_timedwait(&group->wake, &group->wake_lock, &until);
    *woken = group->woken;
    group->woken = false;
    bool goes_on = !group->stopping;
    pthread_mutex_unlock(&group->wake_lock);
    return goes_on;
}

/* Whether a call was submitted since `runs` was false. */
static bool has_more(struct nccl_group *group)
{
    bool more = false;
    atomic_store(&group->watching, false);
    pthread_mutex_lock(&group->lock);
    for (struct nccl_channel *channel = group->channels; channel; channel = channel->next)
        more = more || channel->enqueued > channel->done;
    pthread_mutex_unlock(&group->lock);
    if (more)
        atomic_store(&group->watching, true);
    return more;
}

static bool has_messages(const struct nccl_channel *channel)
{
    while (channel && channel->source < 0)
        channel = channel->next;
    return channel != NULL;
}

/* How long the worker may sleep after a look at all channels. */
static int64_t look(struct nccl_group *group, struct nccl_clock *times, bool woken)
{
    struct nccl_list done;
    int64_t now = nccl_now_ns();
    bool tick = now >= times->next_tick, waits = false;
    nccl_list_init(&done);
    if (tick) {
        times->runs = false;
        times->next_tick = now + TICK_NS;
    }
    struct nccl_channel *first = channels_of(group);
    for (struct nccl_channel *channel = first; channel; channel = channel->next) {
        waits = nccl_channel_step(channel, &done) || waits;
        if (tick)
            times->runs = watch_channel(channel) || times->runs;
    }
    nccl_complete(group, &done);
    bool has_log = has_messages(first);
    if (tick && has_log && now >= times->next_request) {
        times->next_request = now + REQUESTS_NS;
        td_status status = nccl_answer_requests(group, first);
        if (status)
            nccl_note_failure(group, status);
    }
    if (woken)
        times->pause = FIRST_PAUSE_NS;
    else if (times->pause < LAST_PAUSE_NS)
        times->pause *= 2;
    if (waits)
        return times->pause;
    if (!tick || times->runs || has_more(group))
        return times->next_tick > now ? times->next_tick - now : 0;
    return has_log ? REQUESTS_NS : -1;
}

static void *run_worker(void *arg)
{
    struct nccl_group *group = arg;
    struct nccl_clock times = {.pause = FIRST_PAUSE_NS};
    int64_t pause = 0;
    bool woken;
    while (sleep_until_woken(group, pause, &woken) || atomic_load(&group->failed)) {
        if (!atomic_load(&group->failed)) {
            pause = look(group, &times, woken);
            continue;
        }
        nccl_abort_all(group);
        while (sleep_until_woken(group, -1, &woken))
            continue;
        break;
    }
    return NULL;
}

td_status nccl_worker_start(struct nccl_group *group)
{
    sigset_t all, before;
    if (group->working)
        return TD_OK;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&group->worker, NULL, run_worker, group);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return td_fail(TD_ERR_SYSTEM, "backend nccl: no thread for group \"%s\": %s",
                       group->context->name, strerror(error));
    group->working = true;
    return TD_OK;
}

void nccl_worker_stop(struct nccl_group *group)
{
    if (!group->working)
        return;
    pthread_mutex_lock(&group->wake_lock);
    group->stopping = true;
    wake(group);
    pthread_mutex_unlock(&group->wake_lock);
    pthread_join(group->worker, NULL);
    group->working = false;
}
