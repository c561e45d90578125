/* The order of a group's collectives.
 *
 * A blocking call with nothing before it runs in the caller's thread: `pending` goes from 0 to 1 and back,
 * and that is all; no lock, no hand-over. All others are queued, and carried out in their order by the first thread
 * that is free: one that waits for one of them, or the group's worker, which the first of them starts. A call is taken
 * when all that is pending is queued, so that there is one at a time.
 *
 * Where every processor of the host has a rank to compute for, the worker is patient: it could only take
 * the time away from that rank's own computing, and from the caches, so it leaves the queue to threads that
 * wait for it. It begins after PATIENCE, or when a thread tests whether a work is complete.
 *
 * A call that failed because of another rank leaves the ranks out of step: the group is broken then,
 * and every later call fails with the same sentence. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/thread.h"
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

/* A backend that failed without td_fail() has left an older error, which would be taken for the reason. */
static void ensure_reason(const td_group *group, const td_call *call, td_status status)
{
    if (status && td_last_status() != status)
        td_fail(status,
                "%s #%llu on group \"%s\": backend \"%s\" failed with %s, and gave no reason by "
                "td_fail()",
                td_op_kind_name(call->kind), (unsigned long long)call->sequence, group->name,
                group->backend, td_status_name(status));
}

/* `entry` is that of a call which was queued. */
static td_status carry_out(td_group *group, const td_call *call, uint64_t entry)
{
    entry = td__record_start(group, call, entry);
    td_status status = td__group_state(group);
    if (!status) {
        td_collective_fn slot = td__backend_slot(group->ops, call->kind);
        status = td__needs_padding(group, call) ? td__call_padded(group, call, slot)
                                                : slot(group->self, call);
        ensure_reason(group, call, status);
        if (!group->ops->explains_timeouts)
            td__explain_delay(group, call->sequence, -1, status);
        if (status && status != TD_ERR_INVALID && status != TD_ERR_UNSUPPORTED)
            td__group_break(group, status);
        if (status == TD_ERR_ABORTED)
            status = td__group_state(group);
    }
    td__record_end(group, entry, status);
    return status;
}

/* With the lock held: wakes the worker where it has something to do before it would wake by itself. */
static void wake(td_group *group)
{
    if (group->stopping || (group->queue && group->patient_until < group->alarm))
        pthread_cond_signal(&group->changed);
}

/* One call less; what is queued behind it can be taken. The thread that destroys the group waits until nothing is
 * pending, so the last call touches the group no more, or holds the lock. */
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

/* With the lock held: the next of the queue, which the caller then carries out. NULL where there is none,
 * or where another thread is at one. */
static td_work *take(td_group *group)
{
    td_work *work = group->queue;
    if (!work || atomic_load_explicit(&group->pending, memory_order_acquire) != group->queued)
        return NULL;
    group->queue = work->next;
    if (!group->queue)
        group->queue_end = &group->queue;
    group->queued--;
    return work;
}

/* Carries out a work that was taken, and takes the next, unless this is `last`. */
static td_work *do_one(td_group *group, td_work *work, const td_work *last)
{
    work->begin_ns = td__now_ns();
    td_status status = carry_out(group, &work->operation.call, work->entry);
    work->end_ns = td__now_ns();
    pthread_mutex_lock(&group->lock);
    atomic_fetch_sub_explicit(&group->pending, 1, memory_order_acq_rel);
    td_work *next = work == last ? NULL : take(group);
    if (!next)
        wake(group);
    pthread_mutex_unlock(&group->lock);
    td_work_complete(work, status, -1, 0);
    return next;
}

/* What the worker waits for: a call that it may take, or with an empty queue, the end. */
static bool has_nothing_to_do(td_group *group, td__deadline *until)
{
    unsigned pending = atomic_load_explicit(&group->pending, memory_order_acquire);
    *until = TD__NEVER;
    if (!group->queue)
        return !group->stopping || group->helpers;
    if (pending != group->queued)
        return true;
    *until = group->patient_until;
    return !group->stopping && td__now_ns() < *until;
}

static void *work_through(void *arg)
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
        td_work *work = take(group);
        if (!work)
            break;
        pthread_mutex_unlock(&group->lock);
        while (work)
            work = do_one(group, work, NULL);
        pthread_mutex_lock(&group->lock);
    }
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

/* With the lock held: the worker is wanted now. */
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
    td_work *next = complete ? NULL : take(group);
    if (next)
        group->helpers++;
    else
        hurry(group);
    pthread_mutex_unlock(&group->lock);
    if (!next)
        return;
    while (next)
        next = do_one(group, next, work);
    pthread_mutex_lock(&group->lock);
    group->helpers--;
    wake(group);
    pthread_mutex_unlock(&group->lock);
}

/* The caller's lists need not outlive the call. */
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

/* Puts the call into the queue; called with the lock held. */
static td_status enqueue(td_group *group, const struct td__operation *operation, td_work **work_out)
{
    td_work *work = td__work_create(group, &operation->call);
    if (!work)
        return TD_ERR_NOMEM;
    work->operation.reduction = operation->reduction;
    if (!keep_counts(work, group->size)) {
        discard(work);
        return td__fail_nomem("work");
    }
    if (!group->working) {
        int error = td__thread_start(&group->worker, "td-group", work_through, group);
        if (error) {
            discard(work);
            return td_fail(TD_ERR_SYSTEM, "group \"%s\": no thread for asynchronous calls (%s)",
                           group->name, td__errno_text(error));
        }
        group->working = true;
        group->patient = group->ops->fills_host && group->ops->fills_host(group->self);
    }
    if (!group->queue)
        group->patient_until = group->patient ? td__deadline_in_ms(PATIENCE_MS) : 0;
    work->entry = td__record_queued(group, &operation->call);
    *group->queue_end = work;
    group->queue_end = &work->next;
    group->queued++;
    atomic_fetch_add_explicit(&group->pending, 1, memory_order_acq_rel);
    wake(group);
    *work_out = work;
    return TD_OK;
}

/* The buffers are borrowed until the work is complete, so this does not return before that. */
static td_status finish_waiting(td_work *work)
{
    td__work_finish(work);
    td_status status = td_work_status(work);
    td_work_release(work);
    return status;
}

static td_status fail_unsupported(const td_group *group, const td_call *call)
{
    const char *other = td__backend_with(call->kind, group->backend);
    return td_fail(
        TD_ERR_UNSUPPORTED, "backend \"%s\" of group \"%s\" has no %s; backend \"%s\" has it",
        group->backend, group->name, td_op_kind_name(call->kind), other ? other : "native");
}

/* Calls on one group come one after another, so there is one writer at a time; td_group_sequence() may read. */
static uint64_t next_sequence(td_group *group)
{
    uint64_t next = atomic_load_explicit(&group->sequence, memory_order_relaxed) + 1;
    atomic_store_explicit(&group->sequence, next, memory_order_relaxed);
    return next;
}

td_status td__group_run(td_group *group, struct td__operation *operation, td_work **work)
{
    td_call *call = &operation->call;
    if (!td__backend_slot(group->ops, call->kind))
        return fail_unsupported(group, call);
    call->timeout_ms = td__call_timeout(group);
    unsigned none = 0;
    if (!work && atomic_compare_exchange_strong_explicit(
                     &group->pending, &none, 1, memory_order_acq_rel, memory_order_relaxed)) {
        call->sequence = next_sequence(group);
        td_status status = carry_out(group, call, 0);
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
    if (status || work) {
        if (!status)
            *work = queued;
        return status;
    }
    return finish_waiting(queued);
}

static td_status post(td_group *group, const td_call *call, td_work **work_out)
{
    if (!group->ops->post)
        return fail_unsupported(group, call);
    if (atomic_load_explicit(&group->broken, memory_order_acquire) == TD_ERR_ABORTED ||
        (!group->ops->abort && atomic_load(&group->aborted)))
        return td__group_state(group);
    if (!work_out && group->ops->run_message) {
        td_call timed = *call;
        timed.timeout_ms = call->timeout_ms ? call->timeout_ms : td__call_timeout(group);
        uint64_t entry = td__record_message(group, call, false);
        td_status status = group->ops->run_message(group->self, &timed);
        td__explain_delay(group, 0, call->peer, status);
        td__record_message_end(group, entry, status);
        return status;
    }
    td_work *work = td__work_create(group, call);
    if (!work)
        return TD_ERR_NOMEM;
    if (!work->operation.call.timeout_ms)
        work->operation.call.timeout_ms = td__call_timeout(group);
    uint64_t entry = work->entry = td__record_message(group, call, work_out != NULL);
    td_status status = group->ops->post(group->self, &work->operation.call, work);
    if (status) {
        td__record_message_end(group, entry, status);
        discard(work);
        return status;
    }
    if (work_out) {
        *work_out = work;
        return TD_OK;
    }
    return finish_waiting(work);
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
    pthread_mutex_lock(&group->lock); /* the last one has let go of it then */
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

/* A call that is waited for may queue another one, and so start a worker once more. */
void td__group_drain(td_group *group)
{
    atomic_store(&group->closing, true);
    do {
        end_worker(group);
        await_calls(group);
    } while (group->working);
}
