/* Works: completing, waiting, callbacks; see work.h. */
#include "group/work.h"

#include "base/fail.h"
#include "base/thread.h"
#include "fault/peer_query.h"
#include "group/process_group.h"

#include <stdlib.h>
#include <string.h>

/* One work that nobody uses: a program that waits for each message before the next needs no other. */
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
    work->call = *call;
    work->status = TD_OK;
    work->source = -1;
    work->received = 0;
    work->entry = 0;
    work->begin_ns = work->end_ns = 0;
    work->callback = NULL;
    work->next = work->inner = NULL;
    return work;
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
    free(work->message);
    free(work->counts);
    work->message = NULL;
    work->counts = NULL;
    td_work *other = atomic_exchange_explicit(&spare, work, memory_order_acq_rel);
    if (!other)
        return;
    pthread_cond_destroy(&other->changed);
    pthread_mutex_destroy(&other->lock);
    free(other);
}

static void finish(td_work *work, td_status status, const char *message, int source,
                   size_t received)
{
    work->status = status;
    if (status)
        work->message = strdup(message);
    work->source = source;
    work->received = received;
    pthread_mutex_lock(&work->lock);
    atomic_store_explicit(&work->complete, true, memory_order_release);
    td_work_fn callback = work->callback;
    work->callback = NULL;
    pthread_cond_broadcast(&work->changed);
    pthread_mutex_unlock(&work->lock);
    if (callback)
        callback(work, status, work->callback_arg);
    td_work_release(work);
}

void td_work_complete(td_work *work, td_status status, int source, size_t received)
{
    const td_group *group = work->group;
    bool known = source >= 0 && group && source < group->size;
    if (work->call.kind >= TD_OP_SEND)
        td__record_message_end(work->group, work->entry, status);
    finish(work, status, td_last_error(), known ? group->ranks[source] : -1, received);
}

td_status td_work_status(td_work *work)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "td_work_status: the work is NULL");
    if (!atomic_load_explicit(&work->complete, memory_order_acquire) || !work->status)
        return TD_OK;
    return td_fail(work->status, "%s", work->message ? work->message : "out of memory");
}

/* True where the group is used now: the caller calls td__group_unuse(). It is there as long as the work is
 * not complete, since whoever destroys it completes all of its works first; it is closing where that has
 * begun, and then the work will be complete without this thread. */
static bool use_group(td_work *work)
{
    pthread_mutex_lock(&work->lock);
    bool used = !atomic_load_explicit(&work->complete, memory_order_acquire);
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
    if (!work)
        return true;
    if (atomic_load_explicit(&work->complete, memory_order_acquire))
        return true;
    if (work->inner) {
        td_work_test(work->inner);
    } else if (use_group(work)) {
        td_group *group = work->group;
        if (work->call.kind < TD_OP_SEND)
            td__group_hurry(work);
        else if (group->ops->progress)
            group->ops->progress(group->self, work, 0);
        td__group_unuse(group);
    }
    return atomic_load_explicit(&work->complete, memory_order_acquire);
}

/* Moves it on, where a thread that waits can. */
static void advance(td_work *work, td__deadline deadline)
{
    td_group *group = work->group;
    td__record_waited(group, work->entry);
    if (work->call.kind >= TD_OP_SEND && group->ops->progress) {
        int64_t left;
        while (!atomic_load_explicit(&work->complete, memory_order_acquire) &&
               (left = deadline - td__now_ns()) > 0)
            group->ops->progress(group->self, work, (left + 999999) / 1000000);
    } else if (work->call.kind < TD_OP_SEND) {
        /* Whoever carries it out cannot give up before the call itself does. */
        if (deadline - td__now_ns() > (work->call.timeout_ms - 1) * 1000000)
            td__group_help(work);
        else
            td__group_hurry(work);
    }
}

static void wait_until(td_work *work, td__deadline deadline)
{
    td_group *group = work->group;
    if (work->inner) {
        wait_until(work->inner, deadline);
        if (!atomic_load_explicit(&work->inner->complete, memory_order_acquire))
            return;
    } else if (use_group(work)) {
        advance(work, deadline);
        td__group_unuse(group);
    }
    pthread_mutex_lock(&work->lock);
    bool in_time = true;
    while (!atomic_load_explicit(&work->complete, memory_order_acquire) && in_time)
        in_time = td__cond_wait(&work->changed, &work->lock, deadline);
    pthread_mutex_unlock(&work->lock);
}

bool td__work_wait_until(td_work *work, td__deadline deadline)
{
    wait_until(work, deadline);
    return atomic_load_explicit(&work->complete, memory_order_acquire);
}

/* With the group in use. */
static td_status wait_in_group(td_work *work, int64_t timeout_ms)
{
    td_group *group = work->group;
    int64_t limit = timeout_ms ? timeout_ms : td__call_timeout(group);
    wait_until(work, td__deadline_in_ms(limit));
    if (atomic_load_explicit(&work->complete, memory_order_acquire))
        return TD_OK;
    return td__explain_delay(
        group, work->call.sequence, work->call.peer,
        td_fail(TD_ERR_TIMEOUT, "%s on group \"%s\": not complete after %lld ms",
                td_op_kind_name(work->call.kind), group->name, (long long)limit));
}

td_status td_work_wait(td_work *work, int64_t timeout_ms)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "td_work_wait: the work is NULL");
    if (timeout_ms < 0)
        return td_fail(TD_ERR_INVALID,
                       "td_work_wait: the timeout is %lld ms; it must be positive, or 0 for the "
                       "group's",
                       (long long)timeout_ms);
    if (!atomic_load_explicit(&work->complete, memory_order_acquire)) {
        if (use_group(work)) {
            td_group *group = work->group;
            td_status status = wait_in_group(work, timeout_ms);
            td__group_unuse(group);
            if (status)
                return status;
        } else {
            wait_until(work, TD__NEVER);
        }
    }
    return td_work_status(work);
}

void td__work_finish(td_work *work)
{
    td_group *group = work->group;
    bool ours = work->call.kind >= TD_OP_SEND && group->ops->progress; /* to move on */
    while (!atomic_load_explicit(&work->complete, memory_order_acquire)) {
        if (ours)
            advance(work, td__deadline_in_ms(td__call_timeout(group)));
        else
            td_work_wait(work, 0);
    }
}

td_status td_work_wait_all(td_work *const *works, int count, int64_t timeout_ms)
{
    char message[512] = "";
    td_status first = TD_OK;
    if (count < 0 || (count && !works))
        return td_fail(TD_ERR_INVALID, "td_work_wait_all: no list of %d works", count);
    td__deadline deadline = timeout_ms > 0 ? td__deadline_in_ms(timeout_ms) : TD__NEVER;
    for (int i = 0; i < count; i++) {
        if (!works[i])
            continue;
        int64_t left = timeout_ms;
        if (timeout_ms > 0) {
            left = (deadline - td__now_ns() + 999999) / 1000000;
            left = left > 0 ? left : 1;
        }
        td_status status = td_work_wait(works[i], left);
        if (status && !first) {
            first = status;
            strncpy(message, td_last_error(), sizeof message - 1);
        }
    }
    return first ? td_fail(first, "%s", message) : TD_OK;
}

/* The work as such is left alone: somebody will wait for it, or for the one that follows. */
static td_status set_callback(td_work *work, td_work_fn fn, void *arg)
{
    pthread_mutex_lock(&work->lock);
    bool complete = atomic_load(&work->complete), taken = work->callback != NULL;
    if (!complete && !taken) {
        work->callback = fn;
        work->callback_arg = arg;
    }
    pthread_mutex_unlock(&work->lock);
    if (!complete && taken)
        return td_fail(TD_ERR_STATE, "td_work_on_complete: the work has a function already");
    if (complete)
        fn(work, work->status, arg);
    return TD_OK;
}

td_status td_work_on_complete(td_work *work, td_work_fn fn, void *arg)
{
    if (!work || !fn)
        return td_fail(TD_ERR_INVALID, "td_work_on_complete: the %s is NULL",
                       work ? "function" : "work");
    td_work_test(work); /* nobody may ever wait for it: it must come forward by itself */
    return set_callback(work, fn, arg);
}

void td__work_times(const td_work *work, int64_t *begin_ns, int64_t *end_ns)
{
    while (work && work->inner)
        work = work->inner;
    if (!work || !td_work_test((td_work *)work) || !work->end_ns)
        return;
    *begin_ns = work->begin_ns;
    *end_ns = work->end_ns;
}

int td_work_source(const td_work *work)
{
    return work && atomic_load(&work->complete) ? work->source : -1;
}

size_t td_work_received(const td_work *work)
{
    return work && atomic_load(&work->complete) ? work->received : 0;
}

static void on_inner(td_work *inner, td_status status, void *arg)
{
    td_work *outer = arg;
    outer->after(outer->after_arg);
    finish(outer, status, inner->message ? inner->message : "out of memory", inner->source,
           inner->received);
}

td_status td__work_follow(td_work *inner, void (*after)(void *arg), void *arg, td_work **outer_out)
{
    td_work *outer = td__work_create(inner->group, &inner->call);
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
    return set_callback(inner, on_inner, outer);
}
