/* The order of a group's collectives.
 *
 * A blocking call with no call before it runs in the caller's thread, and only changes `pending` from 0 to 1 and back:
 * no lock, no other thread. All other calls are queued, and run in their order by the first free thread: a thread that
 * waits for one of them, or the group's worker, which the first of them starts. A call is dequeued only if all pending
 * calls are queued, so that one runs at a time.
 *
 * If every processor of the host has a rank that computes, the worker is patient: it would only compete with the
 * ranks' own threads for processors and caches, so it leaves the queue to threads that wait for a work. It begins after
 * PATIENCE_MS, or when a thread tests whether a work is complete.
 *
 * After a call that failed because of another rank the ranks are not synchronized any more: the group is broken, and
 * every later call fails with the same text. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/thread.h"
#include "device/device_internal.h"
#include "fault/call_history.h"
#include "fault/peer_query.h"
#include "group/process_group.h"

#include <stdlib.h>
#include <string.h>

enum { PATIENCE_MS = 10, FIRST_PAUSE_NS = 20000, LAST_PAUSE_NS = 5000000 };

static _Thread_local int64_t thread_timeout_ms;

td_status td_set_call_timeout(int64_t timeout_ms)
{
    TD_TRY(td__check_kept_timeout("td_set_call_timeout", "the timeout", timeout_ms));
    thread_timeout_ms = timeout_ms;
    return TD_OK;
}

int64_t td__swap_call_timeout(int64_t timeout_ms)
{
    int64_t before = thread_timeout_ms;
    thread_timeout_ms = timeout_ms;
    return before;
}

int64_t td__call_timeout(const td_group *group)
{
    return thread_timeout_ms ? thread_timeout_ms : group->timeout_ms;
}

/* If a backend failed without td_fail(), the last error is an older one, and not the reason. */
static void ensure_reason(const struct td__part *part, const td_call *call, td_status status)
{
    if (status && td__error_status() != status)
        td_fail(status,
                "%s #%llu on group \"%s\": backend \"%s\" failed with %s, and gave no reason by "
                "td_fail()",
                td_op_kind_name(call->kind), (unsigned long long)call->sequence, part->group->name,
                part->name, td_status_name(status));
}

/* A collective has failed. Returns its status. */
static td_status note_failure(const struct td__part *part, const td_call *call, td_status status)
{
    td_group *group = part->group;
    ensure_reason(part, call, status);
    if (!part->ops->explains_timeouts)
        td__explain_delay(group, call->sequence, -1, status);
    if (status != TD_ERR_INVALID && status != TD_ERR_UNSUPPORTED)
        td__group_break(group, status);
    return status == TD_ERR_ABORTED ? td__group_state(group) : status;
}

/* `entry` is the recorder's entry of a queued call, or 0. */
static td_status run_call(td_group *group, const td_call *call, uint64_t entry)
{
    entry = td__record_start(group, call, entry);
    td_status status = td__group_state(group);
    if (!status) {
        struct td__part *part = td__part_of(group, call);
        td_collective_fn slot = td__backend_slot(part->ops, call->kind);
        if (call->device && part->ops->stage_devices)
            status = td__stage_collective(part, call, slot);
        else
            status = td__needs_padding(part, call) ? td__call_padded(part, call, slot)
                                                   : slot(part->self, call);
        if (status)
            status = note_failure(part, call, status);
    }
    td__record_end(group, entry, status);
    return status;
}

/* With the lock held: wakes the worker if it has something to do before its `alarm`. */
static void wake(td_group *group)
{
    if (group->stopping || (!STAILQ_EMPTY(&group->queue) && group->patient_until < group->alarm))
        pthread_cond_signal(&group->changed);
}

/* A call has ended; the next one in the queue can run. The thread that destroys the group waits until no call is
 * pending, so the last call does not access the group any more, or holds the lock. */
static void finish_call(td_group *group)
{
    unsigned last = 1;
    if (atomic_compare_exchange_strong_explicit(&group->pending, &last, 0, memory_order_acq_rel,
                                                memory_order_relaxed))
        return;
    pthread_mutex_lock(&group->lock);
    atomic_fetch_sub_explicit(&group->pending, 1, memory_order_acq_rel);
    wake(group);
    pthread_mutex_unlock(&group->lock);
}

/* With the lock held: removes the next work from the queue, which the caller then runs. NULL if there is none, or if
 * another thread runs a call. */
static td_work *dequeue(td_group *group)
{
    td_work *work = STAILQ_FIRST(&group->queue);
    if (!work || atomic_load_explicit(&group->pending, memory_order_acquire) != group->queued)
        return NULL;
    STAILQ_REMOVE_HEAD(&group->queue, link);
    group->queued--;
    return work;
}

/* Runs a work, and dequeues the next one, unless this is `last`. */
static td_work *run_work(td_group *group, td_work *work, const td_work *last)
{
    td_work_begin(work);
    work->begin_ns = td__now_ns();
    td_status status = run_call(group, &work->operation.call, work->entry);
    work->end_ns = td__now_ns();
    pthread_mutex_lock(&group->lock);
    atomic_fetch_sub_explicit(&group->pending, 1, memory_order_acq_rel);
    td_work *next = work == last ? NULL : dequeue(group);
    if (!next)
        wake(group);
    pthread_mutex_unlock(&group->lock);
    td_work_complete(work, status, -1, 0);
    return next;
}

/* Whether the worker waits: for a call that it may run, or with an empty queue, for `stopping`. */
static bool has_nothing_to_do(td_group *group, td__deadline *until)
{
    unsigned pending = atomic_load_explicit(&group->pending, memory_order_acquire);
    *until = TD__NEVER;
    if (STAILQ_EMPTY(&group->queue))
        return !group->stopping || group->helpers;
    if (pending != group->queued)
        return true;
    *until = group->patient_until;
    return !group->stopping && td__now_ns() < *until;
}

static void *run_worker(void *arg)
{
    td_group *group = arg;
    td__deadline until;
    pthread_mutex_lock(&group->lock);
    for (;;) {
        while (has_nothing_to_do(group, &until)) {
            group->alarm = until;
            td__cond_wait(&group->changed, &group->lock, until);
        }
        group->alarm = 0;
        td_work *work = dequeue(group);
        if (!work)
            break;
        pthread_mutex_unlock(&group->lock);
        while (work)
            work = run_work(group, work, NULL);
        pthread_mutex_lock(&group->lock);
    }
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

/* With the lock held: makes the worker begin now. */
static void hurry(td_group *group)
{
    group->patient_until = 0;
    wake(group);
}

void td__group_hurry(td_work *work)
{
    td_group *group = work->group;
    pthread_mutex_lock(&group->lock);
    hurry(group);
    pthread_mutex_unlock(&group->lock);
}

void td__group_help(td_work *work)
{
    td_group *group = work->group;
    pthread_mutex_lock(&group->lock);
    bool complete = atomic_load_explicit(&work->complete, memory_order_acquire);
    td_work *next = complete ? NULL : dequeue(group);
    if (next)
        group->helpers++;
    else
        hurry(group);
    pthread_mutex_unlock(&group->lock);
    if (!next)
        return;
    while (next)
        next = run_work(group, next, work);
    pthread_mutex_lock(&group->lock);
    group->helpers--;
    wake(group);
    pthread_mutex_unlock(&group->lock);
}

/* Copies the lists of counts, which the caller may free when the call returns. */
static bool keep_counts(td_work *work, int size)
{
    size_t n = (size_t)size;
    td_call *call = &work->operation.call;
    if (!call->input_counts)
        return true;
    work->counts = malloc(2 * n * sizeof *work->counts);
    if (!work->counts)
        return false;
    memcpy(work->counts, call->input_counts, n * sizeof *work->counts);
    memcpy(work->counts + n, call->output_counts, n * sizeof *work->counts);
    call->input_counts = work->counts;
    call->output_counts = work->counts + n;
    return true;
}

static void discard(td_work *work)
{
    work->owners = 1;
    td_work_release(work);
}

/* On a device, the call is ordered after the caller's current stream. */
static td_work *make_work(td_group *group, const struct td__operation *operation)
{
    td_work *work = td__work_create(group, &operation->call);
    if (!work)
        return NULL;
    work->operation.reduction = operation->reduction;
    if (!keep_counts(work, group->size)) {
        discard(work);
        td__fail_nomem("work");
        return NULL;
    }
    if (work->event)
        td_event_record(work->event, NULL);
    return work;
}

/* Puts the call into the queue; called with the lock held. */
static td_status enqueue(td_group *group, const struct td__operation *operation, td_work **work_out)
{
    td_work *work = make_work(group, operation);
    if (!work)
        return td__error_status();
    if (!group->working) {
        int error = td__thread_start(&group->worker, "td-group", run_worker, group);
        if (error) {
            discard(work);
            return td_fail(TD_ERR_SYSTEM, "group \"%s\": no thread for asynchronous calls (%s)",
                           group->name, td__errno_text(error));
        }
        group->working = true;
        group->patient = group->host.ops->fills_host &&
                         group->host.ops->fills_host(group->host.self);
    }
    if (STAILQ_EMPTY(&group->queue))
        group->patient_until = group->patient ? td__deadline_in_ms(PATIENCE_MS) : 0;
    work->entry = td__record_queued(group, &operation->call);
    STAILQ_INSERT_TAIL(&group->queue, work, link);
    group->queued++;
    atomic_fetch_add_explicit(&group->pending, 1, memory_order_acq_rel);
    wake(group);
    *work_out = work;
    return TD_OK;
}

/* The buffers are borrowed until the work is complete, so this waits for that without a deadline. */
static td_status finish_waiting(td_work *work)
{
    td__work_finish(work);
    td_status status = td__work_order(work);
    td_work_release(work);
    return status;
}

static td_status fail_unsupported(const struct td__part *part, const td_call *call)
{
    const char *other = td__backend_with(call->kind, part->name);
    return td_fail(TD_ERR_UNSUPPORTED,
                   "backend \"%s\" of group \"%s\" has no %s; backend \"%s\" has it", part->name,
                   part->group->name, td_op_kind_name(call->kind), other ? other : "native");
}

/* Calls on one group are made one after another, so there is one writer at a time; td_group_sequence() may read. */
static uint64_t next_sequence(td_group *group)
{
    uint64_t next = atomic_load_explicit(&group->sequence, memory_order_relaxed) + 1;
    atomic_store_explicit(&group->sequence, next, memory_order_relaxed);
    return next;
}

td_status td__group_submitted(td_work *work, td_status status)
{
    const td_call *call = &work->operation.call;
    if (status)
        status = note_failure(td__part_of(work->group, call), call, status);
    else if (work->group->history)
        td__call_history_end(work->group->history, &work->operation, false);
    td__record_submit_end(work->group, work->entry, call->sequence, status);
    return status;
}

/* A collective for a backend with submit(), which is in use until the work is complete. */
static td_status submit(td_group *group, const struct td__part *part,
                        const struct td__operation *operation, td_work **work_out)
{
    TD_TRY(td__group_state(group));
    td_work *work = make_work(group, operation);
    if (!work)
        return td__error_status();
    td_call *call = &work->operation.call;
    if (!part->ops->enqueues_later)
        td_work_begin(work);
    call->timeout_ms = td__call_timeout(group);
    call->sequence = next_sequence(group);
    work->submitted = true;
    td__submit_note(group, &work->operation);
    uint64_t entry = work->entry = td__record_submit(group, call), sequence = call->sequence;
    td__group_use(group);
    td_status status = part->ops->submit(part->self, call, work);
    if (status) {
        status = note_failure(part, call, status);
        td__record_submit_end(group, entry, sequence, status);
        td__group_unuse(group);
        discard(work);
        return status;
    }
    if (!work_out)
        return finish_waiting(work);
    *work_out = work;
    return TD_OK;
}

/* On a device, orders the caller's current stream after the call; also after one that has failed, whose copies may still
 * write to the caller's memory. */
static td_status order_after(const td_call *call, td_status status)
{
    struct td__error error;
    if (!call->device)
        return status;
    td__error_save(&error);
    td_status ordered = td_stream_wait_stream(td__stream_of(call->device), call->stream);
    return status ? td__error_restore(&error) : ordered;
}

/* On a device, the call is ordered after the caller's current stream. A device that has failed makes the call fail. */
static td_status run_now(td_group *group, td_call *call)
{
    if (!call->device)
        return run_call(group, call, 0);
    td_stream_wait_stream(call->stream, td__stream_of(call->device));
    return order_after(call, run_call(group, call, 0));
}

td_status td__group_run(td_group *group, struct td__operation *operation, td_work **work)
{
    td_call *call = &operation->call;
    const struct td__part *part = td__part_of(group, call);
    if (part->submits)
        return submit(group, part, operation, work);
    if (!td__backend_slot(part->ops, call->kind))
        return fail_unsupported(part, call);
    call->timeout_ms = td__call_timeout(group);
    unsigned none = 0;
    if (!work && atomic_compare_exchange_strong_explicit(
                     &group->pending, &none, 1, memory_order_acq_rel, memory_order_relaxed)) {
        call->sequence = next_sequence(group);
        td_status status = run_now(group, call);
        finish_call(group);
        return status;
    }
    pthread_mutex_lock(&group->lock);
    call->sequence = next_sequence(group);
    td_work *queued = NULL;
    td_status status = enqueue(group, operation, &queued);
    if (status)
        atomic_store_explicit(&group->sequence, call->sequence - 1, memory_order_relaxed);
    pthread_mutex_unlock(&group->lock);
    if (status)
        return status;
    if (!work)
        return finish_waiting(queued);
    *work = queued;
    return TD_OK;
}

static td_status run_message(td_group *group, const struct td__part *part, const td_call *call)
{
    uint64_t entry = td__record_message(group, call, false);
    bool staged = call->device && part->ops->stage_devices;
    td_status status = staged ? td__stage_message(part, call)
                              : part->ops->run_message(part->self, call);
    td__explain_delay(group, 0, call->peer, status);
    td__record_message_end(group, entry, status);
    return order_after(call, status);
}

static td_status post(td_group *group, const td_call *call, td_work **work_out)
{
    const struct td__part *part = td__part_of(group, call);
    if (!part->ops->post && !part->submits)
        return fail_unsupported(part, call);
    if (atomic_load_explicit(&group->broken, memory_order_acquire) == TD_ERR_ABORTED ||
        (!part->ops->abort && atomic_load(&group->aborted)))
        return td__group_state(group);
    td_call timed = *call;
    if (!timed.timeout_ms)
        timed.timeout_ms = td__call_timeout(group);
    bool later = part->submits && part->ops->enqueues_later;
    if (call->device && !later)
        td_stream_wait_stream(call->stream, td__stream_of(call->device));
    if (!work_out && part->ops->run_message && !part->submits)
        return run_message(group, part, &timed);
    td_work *work = td__work_create(group, &timed);
    if (!work)
        return td__error_status();
    if (work->event && later)
        td_event_record(work->event, NULL);
    uint64_t entry = work->entry = td__record_message(group, call, work_out != NULL);
    td_status status = call->device && part->ops->stage_devices
                           ? td__stage_post(part, &work->operation.call, work)
                           : (part->submits ? part->ops->submit : part->ops->post)(
                                 part->self, &work->operation.call, work);
    if (status) {
        td__record_message_end(group, entry, status);
        discard(work);
        return status;
    }
    if (!work_out)
        return finish_waiting(work);
    *work_out = work;
    return TD_OK;
}

td_status td__group_post(td_group *group, const td_call *call, td_work **work)
{
    td__group_use(group);
    td_status status = post(group, call, work);
    td__group_unuse(group);
    return status;
}

/* Calls do not signal their end, which would cost each of them; so this polls. */
static void await_calls(td_group *group)
{
    int64_t pause = FIRST_PAUSE_NS;
    while (atomic_load(&group->pending) || atomic_load(&group->users)) {
        td__sleep_ns(pause);
        pause = pause < LAST_PAUSE_NS ? pause * 2 : pause;
    }
    pthread_mutex_lock(&group->lock); /* the last call may still hold it */
    pthread_mutex_unlock(&group->lock);
}

static void end_worker(td_group *group)
{
    pthread_mutex_lock(&group->lock);
    group->stopping = true;
    bool working = group->working;
    wake(group);
    pthread_mutex_unlock(&group->lock);
    if (!working)
        return;
    pthread_join(group->worker, NULL);
    pthread_mutex_lock(&group->lock);
    group->working = false; /* not before: what a callback starts now goes to the same worker */
    pthread_mutex_unlock(&group->lock);
}

/* A call for which this waits may queue another one, and so start a worker again. */
void td__group_drain(td_group *group)
{
    atomic_store(&group->closing, true);
    do {
        end_worker(group);
        await_calls(group);
    } while (group->working);
}
