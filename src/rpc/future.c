/* Futures; see rpc.h. */
#include "base/fail.h"
#include "rpc/block_cache.h"
#include "rpc/rpc_agent.h"
#include "rpc/value_internal.h"
#include "tensor/tensor_internal.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PENDING, AWAITED, COMPLETE }; /* AWAITED: a thread sleeps */

struct callback {
    struct callback *next;
    void (*fn)(td_future *future, void *arg);
    void *arg;
};

/* No lock: every call makes a future and completes it. Whoever takes `callbacks` completes it. */
struct td_future {
    atomic_int owners;
    _Atomic uint32_t state;
    const struct td__rpc_agent *agent; /* of the call; NULL: the program's own */
    uint64_t id;                       /* of the call */
    td__deadline deadline;
    _Atomic(struct callback *) callbacks; /* the latest one first; `taken` from its completion on */
    td_future *above; /* cancelling this one cancels that; not retained, and NULL once that is
                         complete. Under above_lock */
    td_value *value;
    char *text;
    td_status status;
};

static struct callback taken;
static pthread_mutex_t above_lock = PTHREAD_MUTEX_INITIALIZER;

td_future *td__future_create(struct td__rpc_agent *agent, uint64_t id, td__deadline deadline,
                             int owners)
{
    _Static_assert(sizeof(td_future) <= TD__BLOCK, "a future fits into a block");
    td_future *future = td__rpc_block_alloc(TD__BLOCK);
    if (!future) {
        td__fail_nomem("future");
        return NULL;
    }
    *future = (td_future){.owners = owners, .agent = agent, .id = id, .deadline = deadline};
    return future;
}

td_future *td_future_retain(td_future *future)
{
    if (future)
        atomic_fetch_add_explicit(&future->owners, 1, memory_order_relaxed);
    return future;
}

static void destroy(td_future *future)
{
    td_value_release(future->value);
    if (future->text)
        free(future->text);
    td__rpc_block_free(future, TD__BLOCK);
}

/* Nobody can complete it any more: its callbacks see a failure. */
static void abandon(td_future *future)
{
    atomic_store(&future->owners, 2);
    td__future_complete(future, NULL, TD_ERR_ABORTED,
                        "the future was released before it had a value");
    if (atomic_fetch_sub(&future->owners, 2) == 2)
        destroy(future);
}

/* A single owner needs no locked instruction, as in td__drop_owner(); if there are callbacks, retain_above() may still look
 * for owners. */
void td_future_release(td_future *future)
{
    if (!future)
        return;
    bool single = atomic_load_explicit(&future->owners, memory_order_acquire) == 1;
    if (!single && atomic_fetch_sub_explicit(&future->owners, 1, memory_order_acq_rel) != 1)
        return;
    struct callback *callbacks = atomic_load_explicit(&future->callbacks, memory_order_relaxed);
    if (!callbacks || callbacks == &taken)
        destroy(future);
    else if (!single || atomic_fetch_sub(&future->owners, 1) == 1)
        abandon(future);
}

static void release_future(void *future)
{
    td_future_release(future);
}

td_future *td__future_adopt(td_future *future)
{
    return td__scope_adopt(future, release_future);
}

bool td__future_is_complete(const td_future *future)
{
    return atomic_load_explicit(&future->state, memory_order_acquire) == COMPLETE;
}

/* Sleeps until it is complete, the deadline, or the agent (or NULL) ends the waits of its functions. */
static bool sleep_until(td_future *future, td__deadline deadline, const struct td__rpc_agent *agent)
{
    for (;;) {
        uint32_t state = PENDING;
        atomic_compare_exchange_strong(&future->state, &state, AWAITED);
        if (td__future_is_complete(future))
            return true;
        int64_t now = td__now_ns();
        if (now >= deadline || (agent && atomic_load(&agent->aborting)))
            return false;
        struct timespec left = td__timespec(deadline == TD__NEVER ? (int64_t)1000000000 * 3600
                                                                  : deadline - now);
        syscall(SYS_futex, &future->state, FUTEX_WAIT_PRIVATE, AWAITED, &left, NULL, 0);
    }
}

/* The first one to take the callbacks completes it. It owns the value. */
static bool complete_once(td_future *future, td_value *value, td_status status, const char *text)
{
    struct callback *latest = atomic_exchange(&future->callbacks, &taken), *first = NULL, *next;
    if (latest == &taken)
        return false;
    future->value = value;
    future->status = status;
    future->text = status && text ? strdup(text) : NULL;
    if (atomic_exchange_explicit(&future->state, COMPLETE, memory_order_acq_rel) == AWAITED)
        syscall(SYS_futex, &future->state, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    for (; latest; latest = next) { /* in the order in which they were added */
        next = latest->next;
        latest->next = first;
        first = latest;
    }
    for (; first; first = next) {
        next = first->next;
        first->fn(future, first->arg);
        free(first);
    }
    return true;
}

bool td__future_complete(td_future *future, td_value *value, td_status status, const char *text)
{
    td_future_retain(future); /* another thread may release it as soon as it is complete */
    bool first = complete_once(future, td_value_retain(value), status, text);
    if (!first)
        td_value_release(value);
    td_future_release(future);
    return first;
}

void td__future_fulfil(td_future *future, td_value *value)
{
    if (!complete_once(future, value, TD_OK, NULL))
        td_value_release(value);
}

td_status td__future_on_complete(td_future *future, void (*fn)(td_future *future, void *arg),
                                 void *arg)
{
    struct callback *latest = atomic_load(&future->callbacks), *callback = NULL;
    if (latest != &taken && !(callback = malloc(sizeof *callback)))
        return td__fail_nomem("future");
    while (latest != &taken) {
        *callback = (struct callback){.next = latest, .fn = fn, .arg = arg};
        if (atomic_compare_exchange_weak(&future->callbacks, &latest, callback))
            return TD_OK;
    }
    free(callback);
    sleep_until(future, TD__NEVER, NULL); /* it has its value in a moment */
    fn(future, arg);
    return TD_OK;
}

td_value *td__future_value(const td_future *future)
{
    if (!future->status)
        return td_value_retain(future->value);
    td_fail(future->status, "%s", future->text ? future->text : "out of memory");
    return NULL;
}

/* A function that waits for a future, on its stack; in agent->waits. */
struct td__future_wait {
    struct td__future_wait *next, **before;
    td_future *future;
};

static bool sleep_in_function(struct td__rpc_agent *agent, td_future *future, td__deadline deadline)
{
    struct td__future_wait wait = {.future = future};
    pthread_mutex_lock(&agent->run_lock);
    wait.next = agent->waits;
    wait.before = &agent->waits;
    if (wait.next)
        wait.next->before = &wait.next;
    agent->waits = &wait;
    pthread_mutex_unlock(&agent->run_lock);
    bool complete = sleep_until(future, deadline, agent);
    pthread_mutex_lock(&agent->run_lock);
    *wait.before = wait.next;
    if (wait.next)
        wait.next->before = wait.before;
    pthread_mutex_unlock(&agent->run_lock);
    return complete;
}

/* Called until no function waits: one may be about to sleep. */
void td__futures_abort_waits(struct td__rpc_agent *agent)
{
    pthread_mutex_lock(&agent->run_lock);
    for (struct td__future_wait *wait = agent->waits; wait; wait = wait->next) {
        uint32_t state = AWAITED;
        atomic_compare_exchange_strong(&wait->future->state, &state, PENDING);
        syscall(SYS_futex, &wait->future->state, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&agent->run_lock);
}

/* Whether this thread runs a function whose worker is shut down, and waits for nothing any more. */
static bool is_aborted(void)
{
    return td__current_call && atomic_load(&td__current_call->agent->aborting);
}

/* Waits until it is complete, or for the deadline. A thread that sleeps does not use the agent, so that the latter can
 * end meanwhile; except for one that runs a function, which the agent waits for. */
bool td__future_await(td_future *future, td__deadline deadline)
{
    if (td__io_must_not_wait || is_aborted())
        return td__future_is_complete(future);
    struct td__rpc_agent *agent = td__agent_hold();
    bool function = agent && td__io_begin_wait(agent);
    if (agent)
        td__io_poll(agent, future, deadline);
    if (!function)
        td__agent_leave(agent);
    bool complete = function ? sleep_in_function(agent, future, deadline)
                             : sleep_until(future, deadline, NULL);
    if (function)
        td__io_end_wait(agent);
    else
        agent = complete ? NULL : td__agent_hold();
    if (agent && !complete && td__deadline_passed(future->deadline)) {
        td__calls_expire(agent);
        sleep_until(future, td__deadline_in_ms(1000),
                    NULL); /* if another thread is about to fail it */
    }
    td__agent_leave(agent);
    return td__future_is_complete(future);
}

/* ---- The public functions -------------------------------------------------------------------- */

td_value *td_future_wait(td_future *future, int64_t timeout_ms)
{
    if (!future)
        return td__null(__func__);
    if (timeout_ms < TD_NOW) {
        td_fail(TD_ERR_INVALID, "td_future_wait: a timeout of %lld ms", (long long)timeout_ms);
        return NULL;
    }
    if (!td__future_is_complete(future) && timeout_ms != TD_NOW) {
        td__deadline deadline = timeout_ms ? td__deadline_in_ms(timeout_ms) : future->deadline;
        td__future_await(future, deadline);
    }
    if (td__future_is_complete(future))
        return td__value_adopt(td__future_value(future));
    if (timeout_ms != TD_NOW && td__io_must_not_wait)
        td_fail(TD_ERR_STATE, "td_future_wait: called on a thread that reads messages, which must "
                              "not wait: by a function that frees a value, for example");
    else if (timeout_ms != TD_NOW && is_aborted())
        td_fail(TD_ERR_ABORTED, "td_future_wait: this worker was shut down");
    else
        td_fail(TD_ERR_TIMEOUT, "td_future_wait: the future is not complete%s",
                timeout_ms == TD_NOW ? " yet" : " in time");
    return NULL;
}

td_value *td__future_take(td_future *future)
{
    td_value *value = future ? td_future_wait(future, 0) : NULL;
    td_future_release(future);
    return value;
}

bool td_future_test(const td_future *future)
{
    return future && td__future_is_complete(future);
}

struct then {
    td_future *done; /* retained while it waits for a thread */
    td_future *result;
    td_future_fn fn;
    void *arg;
};

static void pass_on(td_future *done, void *result)
{
    td_value *value = td__future_value(done);
    td__future_resolve(result, value);
    td_value_release(value);
    td_future_release(result);
}

void td__future_resolve(td_future *result, td_value *value)
{
    if (!value)
        td__future_complete(result, NULL, td__error_status(), td__error_text());
    else if (value->kind == TD_VALUE_FUTURE &&
             !td__future_on_complete(value->future, pass_on, td_future_retain(result)))
        return;
    else
        td__future_complete(result, value, TD_OK, NULL);
}

static void run_then(void *arg)
{
    struct then *then = arg;
    TD_SCOPE;
    uint64_t failures = td__error_count();
    td_value *value = then->fn(then->done, then->arg);
    if (!value && td__error_count() == failures)
        td_fail(TD_ERR_INVALID, "the function of td_future_then() returned NULL without an error");
    td__future_resolve(then->result, value);
    td_future_release(then->result);
    td_future_release(then->done);
    free(then);
}

static void run_continuation(struct td_rpc_call *task)
{
    struct td__rpc_agent *agent = task->agent;
    task->continuation(task->self);
    pthread_mutex_lock(&agent->run_lock);
    agent->continuations--;
    pthread_mutex_unlock(&agent->run_lock);
    free(task);
}

/* Calls fn(arg) on a thread of the agent, which may wait. False if that cannot be done. */
static bool continue_on(struct td__rpc_agent *agent, void (*fn)(void *arg), void *arg)
{
    struct td_rpc_call *task = calloc(1, sizeof *task);
    if (!task)
        return false;
    task->agent = agent;
    task->fd = -1;
    task->task = run_continuation;
    task->continuation = fn;
    task->self = arg;
    pthread_mutex_lock(&agent->run_lock);
    bool stopping = atomic_load(&agent->stopping);
    agent->continuations += !stopping;
    td__count(&agent->served, !stopping);
    pthread_mutex_unlock(&agent->run_lock);
    if (stopping) {
        free(task);
        return false;
    }
    td__io_run(agent, task);
    td__io_wake(agent);
    return true;
}

/* The function may wait for other calls, so it does not run on the thread that reads their answers. */
static void call_then(td_future *done, void *arg)
{
    struct then *then = arg;
    pthread_mutex_lock(&above_lock);
    then->result->above = NULL;
    pthread_mutex_unlock(&above_lock);
    then->done = td_future_retain(done);
    struct td__rpc_agent *agent = td__io_must_not_wait ? td__agent_hold() : NULL;
    if (!agent || !continue_on(agent, run_then, then))
        run_then(then);
    td__agent_leave(agent);
}

td_future *td_future_then(td_future *future, td_future_fn fn, void *arg)
{
    if (!future || !fn)
        return td__null(__func__);
    td_future *result = td__future_create(NULL, 0, TD__NEVER, 1);
    struct then *then = malloc(sizeof *then);
    if (!result || !then) {
        td_future_release(result);
        free(then);
        td__fail_nomem("future");
        return NULL;
    }
    result->above = future;
    *then = (struct then){.result = td_future_retain(result), .fn = fn, .arg = arg};
    if (td__future_on_complete(future, call_then, then)) {
        td_future_release(result);
        td_future_release(result);
        free(then);
        return NULL;
    }
    return td__future_adopt(result);
}

struct all {
    td_future *result;
    atomic_int left;
    int count;
    td_future *futures[];
};

static void release_all(struct all *all)
{
    for (int i = 0; i < all->count; i++)
        td_future_release(all->futures[i]);
    td_future_release(all->result);
    free(all);
}

static void finish_all(struct all *all)
{
    td_value *list = td__value_new_list(all->count);
    for (int i = 0; list && i < all->count; i++) {
        td_value *item = td__future_value(all->futures[i]);
        if (!td__value_append(list, NULL, item)) {
            td_value_release(item);
            td_value_release(list);
            list = NULL;
        }
    }
    if (list)
        td__future_complete(all->result, list, TD_OK, NULL);
    else
        td__future_complete(all->result, NULL, td__error_status(), td__error_text());
    td_value_release(list);
}

static void one_of_all(td_future *done, void *arg)
{
    struct all *all = arg;
    if (done->status)
        td__future_complete(all->result, NULL, done->status, done->text);
    if (atomic_fetch_sub(&all->left, 1) != 1)
        return;
    if (!td__future_is_complete(all->result))
        finish_all(all);
    release_all(all);
}

td_future *td_future_all(td_future *const *futures, int count)
{
    if (count < 0 || (count && !futures))
        return td__null(__func__);
    for (int i = 0; i < count; i++)
        if (!futures[i])
            return td__null(__func__);
    td_future *result = td__future_create(NULL, 0, TD__NEVER, 1);
    struct all *all = malloc(sizeof *all + sizeof all->futures[0] * (size_t)count);
    if (!result || !all) {
        td_future_release(result);
        free(all);
        td__fail_nomem("future");
        return NULL;
    }
    *all = (struct all){.result = td_future_retain(result), .count = count};
    atomic_init(&all->left, count + 1);
    for (int i = 0; i < count; i++)
        all->futures[i] = td_future_retain(futures[i]);
    for (int i = 0; i < count; i++)
        if (td__future_on_complete(futures[i], one_of_all, all)) {
            td__future_complete(result, NULL, TD_ERR_NOMEM, "future: out of memory");
            atomic_fetch_sub(&all->left, 1);
        }
    if (atomic_fetch_sub(&all->left, 1) == 1) {
        if (!td__future_is_complete(result))
            finish_all(all);
        release_all(all);
    }
    return td__future_adopt(result);
}

/* NULL if it is being released. It is not freed meanwhile: its callbacks run before that, and clear `above`. */
static td_future *retain_above(td_future *future)
{
    pthread_mutex_lock(&above_lock);
    td_future *above = future->above;
    int owners = above ? atomic_load(&above->owners) : 0;
    while (owners && !atomic_compare_exchange_weak(&above->owners, &owners, owners + 1))
        continue;
    pthread_mutex_unlock(&above_lock);
    return owners ? above : NULL;
}

void td_future_cancel(td_future *future)
{
    if (!future || td__future_is_complete(future))
        return;
    struct td__rpc_agent *agent = td__agent_hold();
    if (agent && agent == future->agent)
        td__call_cancel(agent, future->id);
    td__agent_leave(agent);
    td_future *above = retain_above(future);
    td_future_cancel(above);
    td_future_release(above);
    td__future_complete(future, NULL, TD_ERR_ABORTED, "the call was cancelled");
}

td_future *td_future_create(void)
{
    return td__future_adopt(td__future_create(NULL, 0, TD__NEVER, 1));
}

td_status td_future_set(td_future *future, td_value *value)
{
    if (!future || !value)
        return td__fail_null(__func__);
    return td__future_complete(future, value, TD_OK, NULL)
               ? TD_OK
               : td_fail(TD_ERR_STATE, "td_future_set: the future is complete");
}

td_status td_future_fail(td_future *future, td_status status, const char *text)
{
    if (!future)
        return td__fail_null(__func__);
    if (!status)
        return td_fail(TD_ERR_INVALID, "td_future_fail: TD_OK is no failure");
    return td__future_complete(future, NULL, status, text ? text : td_status_name(status))
               ? TD_OK
               : td_fail(TD_ERR_STATE, "td_future_fail: the future is complete");
}
