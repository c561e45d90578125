/* Works: completing, waiting, callbacks; see work.h. */
#include "group/work.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "base/thread.h"
#include "device/device_internal.h"
#include "fault/peer_query.h"
#include "group/process_group.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_PAUSE_NS = 20000, LAST_PAUSE_NS = 1000000 }; /* of a thread that polls a device */

/* One free work, for reuse: a program that waits for each message before the next allocates no other. */
static _Atomic(td_work *) spare;

static td_work *make(void)
{
    td_work *work = atomic_exchange_explicit(&spare, NULL, memory_order_acq_rel);
    if (work)
        return work;
    work = calloc(1, sizeof *work);
    if (!work)
        return NULL;
    pthread_mutex_init(&work->lock, NULL);
    td__cond_init(&work->changed);
    return work;
}

/* A backend with submit() completes a work when it is enqueued: the failure comes later. */
static struct td__failure *keep_failure(const td_group *group, const td_call *call)
{
    struct td__failure *failure = td__part_of((td_group *)group, call)->submits ? group->failure
                                                                                : NULL;
    if (failure)
        atomic_fetch_add(&failure->owners, 1);
    return failure;
}

td_work *td__work_create(td_group *group, const td_call *call)
{
    td_work *work = make();
    if (!work) {
        td__fail_nomem("work");
        return NULL;
    }
    atomic_store_explicit(&work->owners, 2, memory_order_relaxed);
    atomic_store_explicit(&work->complete, false, memory_order_relaxed);
    work->group = group;
    work->generation = td__fork_generation();
    work->operation.call = *call;
    work->status = TD_OK;
    work->source = -1;
    work->received = 0;
    work->entry = 0;
    work->begin_ns = work->end_ns = 0;
    STAILQ_INIT(&work->callbacks);
    work->calling = false;
    work->inner = NULL;
    work->event = NULL;
    work->recorded = false;
    work->submitted = false;
    atomic_store_explicit(&work->staged, NULL, memory_order_relaxed);
    work->failure = call->device ? keep_failure(group, call) : NULL;
    if (call->device) {
        td_stream_retain(call->stream);
        work->event = td__event_take(call->device);
        if (!work->event) {
            work->owners = 1;
            td_work_release(work);
            return NULL;
        }
    }
    return work;
}

static bool is_complete(const td_work *work)
{
    return atomic_load_explicit(&work->complete, memory_order_acquire);
}

/* NULL: a waiting thread cannot make progress. */
static const struct td__part *progressing(const td_work *work)
{
    const struct td__part *part = td__part_of(work->group, &work->operation.call);
    return work->operation.call.kind >= TD_OP_SEND && part->ops->progress ? part : NULL;
}

td_work *td_work_retain(td_work *work)
{
    if (work)
        atomic_fetch_add(&work->owners, 1);
    return work;
}

void td_work_release(td_work *work)
{
    if (!work || atomic_fetch_sub_explicit(&work->owners, 1, memory_order_acq_rel) != 1)
        return;
    td_work_release(work->inner);
    if (work->operation.call.device) {
        td_work_release(atomic_load(&work->staged));
        td__event_give_back(work->event);
        td__failure_release(work->failure);
        td_stream_release(work->operation.call.stream);
    }
    free(work->reason);
    free(work->counts);
    work->reason = NULL;
    work->counts = NULL;
    td_work *other = atomic_exchange_explicit(&spare, work, memory_order_acq_rel);
    if (!other)
        return;
    pthread_cond_destroy(&other->changed);
    pthread_mutex_destroy(&other->lock);
    free(other);
}

/* ---- Callbacks -------------------------------------------------------------------------------
 *
 * One thread at a time calls them, in order, without the lock: the one that completes the work, or one that adds a
 * callback later. */

static _Thread_local unsigned in_callback; /* how deep this thread is in callbacks */

/* With the lock held, when the work is complete. */
static void call_back(td_work *work)
{
    bool called = !STAILQ_EMPTY(&work->callbacks);
    work->calling = true;
    while (!STAILQ_EMPTY(&work->callbacks)) {
        struct td__work_callback *done = STAILQ_FIRST(&work->callbacks), callback = *done;
        STAILQ_REMOVE_HEAD(&work->callbacks, link);
        if (done != &work->first_callback)
            free(done);
        pthread_mutex_unlock(&work->lock);
        in_callback++;
        callback.fn(work, work->status, callback.arg);
        in_callback--;
        pthread_mutex_lock(&work->lock);
    }
    work->calling = false;
    if (called)
        pthread_cond_broadcast(&work->changed);
}

/* With the lock held. */
static bool add_callback(td_work *work, td_work_fn fn, void *arg)
{
    bool is_free = STAILQ_EMPTY(&work->callbacks);
    struct td__work_callback *added = is_free ? &work->first_callback : malloc(sizeof *added);
    if (!added)
        return false;
    *added = (struct td__work_callback){.fn = fn, .arg = arg};
    STAILQ_INSERT_TAIL(&work->callbacks, added, link);
    return true;
}

/* If another thread is calling earlier callbacks, waits until it has called `fn`, too. A callback does not wait: two
 * callbacks that add to each other's works would wait forever. A callback may release the caller's work. */
td_status td__work_set_callback(td_work *work, td_work_fn fn, void *arg)
{
    td_work_retain(work);
    pthread_mutex_lock(&work->lock);
    bool added = add_callback(work, fn, arg);
    if (added && is_complete(work)) {
        if (!work->calling)
            call_back(work);
        while (work->calling && !in_callback)
            td__cond_wait(&work->changed, &work->lock, TD__NEVER);
    }
    pthread_mutex_unlock(&work->lock);
    td_work_release(work);
    return added ? TD_OK : td__fail_nomem("td_work_on_complete");
}

/* A work that was not complete at a fork() belongs to the parent: this process has neither the threads nor the
 * connections of its group. */
static bool belongs_to_parent(const td_work *work)
{
    return work->generation != td__fork_generation() && !is_complete(work);
}

static td_status fail_in_child(const td_work *work, const char *what)
{
    return td_fail(TD_ERR_STATE,
                   "%s: %s was started before a fork(), and belongs to the parent process", what,
                   td_op_kind_name(work->operation.call.kind));
}

td_status td_work_on_complete(td_work *work, td_work_fn fn, void *arg)
{
    if (!work || !fn)
        return td_fail(TD_ERR_INVALID, "td_work_on_complete: the %s is NULL",
                       work ? "function" : "work");
    if (belongs_to_parent(work))
        return fail_in_child(work, "td_work_on_complete");
    td_work_test(work); /* lets it progress even if no thread waits for it */
    return td__work_set_callback(work, fn, arg);
}

/* ---- Completing ------------------------------------------------------------------------------ */

static void finish(td_work *work, td_status status, const char *reason, int source, size_t received)
{
    work->status = status;
    if (status)
        work->reason = strdup(reason);
    work->source = source;
    work->received = received;
    pthread_mutex_lock(&work->lock);
    atomic_store_explicit(&work->complete, true, memory_order_release);
    pthread_cond_broadcast(&work->changed);
    call_back(work);
    pthread_mutex_unlock(&work->lock);
    td_work_release(work);
}

/* The result of a call on a device is what its stream has now. */
static td_status record_result(td_work *work, td_status status)
{
    if (work->recorded)
        return status;
    td_status recorded = td_event_record(work->event, work->operation.call.stream);
    return status ? status : recorded;
}

void td_work_complete(td_work *work, td_status status, int source, size_t received)
{
    td_group *group = work->group;
    bool known = source >= 0 && group && source < group->size, submitted = work->submitted;
    if (work->event)
        status = record_result(work, status);
    if (submitted)
        status = td__group_submitted(work, status);
    if (work->operation.call.kind >= TD_OP_SEND)
        td__record_message_end(work->group, work->entry, status);
    finish(work, status, td__error_text(), known ? group->ranks[source] : -1, received);
    if (submitted)
        td__group_unuse(group);
}

void td_work_begin(td_work *work)
{
    if (work->event) /* a device that has failed makes the call fail */
        td_stream_wait_event(work->operation.call.stream, work->event);
}

/* Where it fails, td_work_complete() does as well, and says so. */
void td_work_end(td_work *work)
{
    if (work->event)
        work->recorded = !td_event_record(work->event, work->operation.call.stream);
}

td_status td_work_status(td_work *work)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "td_work_status: the work is NULL");
    if (belongs_to_parent(work))
        return fail_in_child(work, "td_work_status");
    if (!is_complete(work) || !work->status)
        return TD_OK;
    return td_fail(work->status, "%s", work->reason ? work->reason : "out of memory");
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* The work of the group behind one that follows it. */
static td_work *innermost(td_work *work)
{
    while (work->inner)
        work = work->inner;
    return work;
}

/* Calls td__group_use(), unless the work is complete or its group is closing; then another thread completes it. The
 * group exists as long as the innermost work is not complete, since destroying it completes all of its works first. */
static bool use_group(td_work *work)
{
    work = innermost(work);
    pthread_mutex_lock(&work->lock);
    bool used = !is_complete(work);
    if (used) {
        td__group_use(work->group);
        used = !atomic_load(&work->group->closing);
        if (!used)
            td__group_unuse(work->group);
    }
    pthread_mutex_unlock(&work->lock);
    return used;
}

bool td_work_test(td_work *work)
{
    if (!work || is_complete(work) || belongs_to_parent(work))
        return true;
    if (work->inner) {
        td_work_test(work->inner);
    } else if (use_group(work)) {
        td_group *group = work->group;
        const struct td__part *part = progressing(work);
        if (part)
            part->ops->progress(part->self, work, TD_NOW);
        else if (work->operation.call.kind < TD_OP_SEND && !work->submitted)
            td__group_hurry(work);
        td__group_unuse(group);
    }
    return is_complete(work);
}

/* Makes progress, if a waiting thread can. */
static void advance(td_work *work, td__deadline deadline)
{
    td_group *group = work->group;
    td__record_waited(group, work->entry);
    const struct td__part *part = progressing(work);
    if (part) {
        int64_t left;
        while (!is_complete(work) && (left = deadline - td__now_ns()) > 0)
            part->ops->progress(part->self, work, (left + 999999) / 1000000);
    } else if (work->operation.call.kind < TD_OP_SEND && !work->submitted) {
        /* A thread that runs it cannot return before the call does. */
        if (deadline >= td__deadline_in_ms(work->operation.call.timeout_ms - 1))
            td__group_help(work);
        else
            td__group_hurry(work);
    }
}

bool td__work_await(td_work *work, td__deadline deadline)
{
    pthread_mutex_lock(&work->lock);
    bool in_time = true;
    while (!is_complete(work) && in_time)
        in_time = td__cond_wait(&work->changed, &work->lock, deadline);
    pthread_mutex_unlock(&work->lock);
    return is_complete(work);
}

bool td__work_wait_until(td_work *work, td__deadline deadline)
{
    td_group *group = work->group;
    if (work->inner) {
        if (!td__work_wait_until(work->inner, deadline))
            return false;
    } else if (use_group(work)) {
        advance(work, deadline);
        td__group_unuse(group);
    }
    return td__work_await(work, deadline);
}

static td_status fail_incomplete(const td_work *work, int64_t limit_ms)
{
    const td_call *call = &work->operation.call;
    if (limit_ms == TD_NOW)
        return td_fail(TD_ERR_TIMEOUT, "%s on group \"%s\" is not complete yet",
                       td_op_kind_name(call->kind), work->group->name);
    return td__explain_delay(
        work->group, call->sequence, call->peer,
        td_fail(TD_ERR_TIMEOUT, "%s on group \"%s\": not complete after %lld ms",
                td_op_kind_name(call->kind), work->group->name, (long long)limit_ms));
}

/* With the group in use. */
static td_status wait_in_group(td_work *work, int64_t timeout_ms)
{
    int64_t limit = timeout_ms ? timeout_ms : td__call_timeout(work->group);
    if (limit == TD_NOW)
        td_work_test(work);
    else
        td__work_wait_until(work, td__deadline_in_ms(limit));
    return is_complete(work) ? TD_OK : fail_incomplete(work, limit);
}

td_status td_work_wait(td_work *work, int64_t timeout_ms)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "td_work_wait: the work is NULL");
    TD_TRY(td__check_timeout("td_work_wait", timeout_ms));
    if (belongs_to_parent(work))
        return fail_in_child(work, "td_work_wait");
    if (!is_complete(work)) {
        if (use_group(work)) {
            td_group *group = work->group;
            td_status status = wait_in_group(work, timeout_ms);
            td__group_unuse(group);
            if (status)
                return status;
        } else if (timeout_ms != TD_NOW) {
            td__work_wait_until(work, TD__NEVER);
        } else if (!is_complete(work)) {
            return td_fail(TD_ERR_TIMEOUT, "%s: not complete yet; its group is being destroyed",
                           td_op_kind_name(work->operation.call.kind));
        }
    }
    return td__work_order(work);
}

td_status td__work_order(td_work *work)
{
    struct td__error error;
    td_status status = td_work_status(work);
    if (!status)
        status = td__failure_check(work->failure);
    if (!work->event)
        return status;
    td__error_save(&error);
    td_status ordered = td_stream_wait_event(NULL, work->event);
    return status ? td__error_restore(&error) : ordered;
}

/* The host waits for the device: until the deadline, or with TD__NEVER as the device itself does it. */
static td_status await_result(td_work *work, td__deadline deadline)
{
    int64_t pause = FIRST_PAUSE_NS;
    while (deadline != TD__NEVER && !td_event_is_done(work->event)) {
        TD_TRY(td__failure_check(work->failure));
        if (td__deadline_passed(deadline))
            return td_fail(TD_ERR_TIMEOUT,
                           "td_work_synchronize: %s does not have the result of %s yet",
                           td_device_name(work->operation.call.device),
                           td_op_kind_name(work->operation.call.kind));
        td__sleep_ns(pause);
        pause = pause < LAST_PAUSE_NS ? pause * 2 : pause;
    }
    TD_TRY(td__wait_for_event("td_work_synchronize", work->event));
    return td__failure_check(work->failure); /* an operation that was aborted has no result */
}

td_status td_work_synchronize(td_work *work, int64_t timeout_ms)
{
    td__deadline deadline = timeout_ms == TD_NOW ? 0
                            : timeout_ms > 0     ? td__deadline_in_ms(timeout_ms)
                                                 : TD__NEVER;
    TD_TRY(td_work_wait(work, timeout_ms));
    return work->event ? await_result(work, deadline) : TD_OK;
}

td_work *td__work_await_staged(td_work *work, td__deadline deadline)
{
    pthread_mutex_lock(&work->lock);
    bool in_time = true;
    while (!is_complete(work) && !atomic_load(&work->staged) && in_time)
        in_time = td__cond_wait(&work->changed, &work->lock, deadline);
    pthread_mutex_unlock(&work->lock);
    return atomic_load(&work->staged);
}

void td__work_set_staged(td_work *work, td_work *staged)
{
    pthread_mutex_lock(&work->lock);
    atomic_store(&work->staged, staged);
    pthread_cond_broadcast(&work->changed);
    pthread_mutex_unlock(&work->lock);
}

void td__work_finish(td_work *work)
{
    td_group *group = work->group;
    bool ours = progressing(work) != NULL; /* to move on */
    while (!is_complete(work)) {
        if (ours)
            advance(work, td__deadline_in_ms(td__call_timeout(group)));
        else
            td_work_wait(work, 0);
    }
}

td_status td_work_wait_all(td_work *const *works, int count, int64_t timeout_ms)
{
    struct td__error error;
    td_status first = TD_OK;
    TD_TRY(td__check_timeout("td_work_wait_all", timeout_ms));
    if (count < 0 || (count && !works))
        return td_fail(TD_ERR_INVALID, "td_work_wait_all: no list of %d works", count);
    td__deadline deadline = timeout_ms > 0 ? td__deadline_in_ms(timeout_ms) : TD__NEVER;
    for (int i = 0; i < count; i++) {
        if (!works[i])
            continue;
        int64_t left = timeout_ms;
        if (timeout_ms > 0) {
            left = (deadline - td__now_ns() + 999999) / 1000000;
            left = left > 0 ? left : TD_NOW;
        }
        td_status status = td_work_wait(works[i], left);
        if (status && !first) {
            first = status;
            td__error_save(&error);
        }
    }
    return first ? td__error_restore(&error) : TD_OK;
}

void td__work_times(const td_work *work, int64_t *begin_ns, int64_t *end_ns)
{
    work = work ? innermost((td_work *)work) : NULL;
    if (!work || !td_work_test((td_work *)work) || !work->end_ns)
        return;
    *begin_ns = work->begin_ns;
    *end_ns = work->end_ns;
}

int td_work_source(const td_work *work)
{
    return work && is_complete(work) ? work->source : -1;
}

size_t td_work_received(const td_work *work)
{
    return work && is_complete(work) ? work->received : 0;
}

static void on_inner(td_work *inner, td_status status, void *arg)
{
    td_work *outer = arg;
    td_status after = outer->after(outer->after_arg);
    if (outer->event)
        after = record_result(outer, after);
    if (after && !status) {
        finish(outer, after, td__error_text(), inner->source, inner->received);
        return;
    }
    finish(outer, status, inner->reason ? inner->reason : "out of memory", inner->source,
           inner->received);
}

td_status td__work_follow(td_work *inner, td_status (*after)(void *arg), void *arg,
                          td_work **outer_out)
{
    td_work *outer = td__work_create(inner->group, &inner->operation.call);
    if (!outer) {
        while (!td_work_test(inner)) /* the buffers are borrowed until then */
            td_work_wait(inner, 0);
        after(arg);
        td_work_release(inner);
        return TD_ERR_NOMEM;
    }
    outer->inner = inner;
    outer->after = after;
    outer->after_arg = arg;
    *outer_out = outer;
    return td__work_set_callback(inner, on_inner, outer);
}
