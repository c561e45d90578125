/* Remote references: making them by calls, and using what they refer to. */
#include "base/fail.h"
#include "rpc/control.h"
#include "rpc/grad_context.h"
#include "rpc/rref.h"
#include "rpc/rref_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Making ---------------------------------------------------------------------------------- */

td_rref *td_rref_create(td_value *value)
{
    if (!value)
        return td__null(__func__);
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent)
        return NULL;
    td_rref *rref = td__rref_own(agent, td__rref_new_id(agent), true,
                                 td_value_kind_name(value->kind));
    if (rref)
        td__future_complete(td__rref_future(rref), value, TD_OK, NULL);
    td__agent_leave(agent);
    return td__rref_adopt(rref);
}

/* `what`: the name for reports; `of`: the reference whose method is called, or NULL. */
static td_rref *start_remote(struct td__rpc_agent *agent, const char *call, int to,
                             const char *function, const char *what, td_rref *of, td_value *args,
                             const td_rpc_call_options *options)
{
    uint64_t id = td__rref_new_id(agent), fork = td__rref_new_id(agent);
    td_rpc_call_options all = options ? *options : (td_rpc_call_options){0};
    TD_SCOPE;
    if (!function || !args)
        return td__null(call);
    td_value *named = all.kwargs ? all.kwargs : td_value_map();
    td_value *packed = TD_ARGS((int64_t)id, (int64_t)fork, function, args, named);
    all.kwargs = NULL;
    td_rref *rref = to == agent->rank ? td__rref_own(agent, id, false, what)
                                      : td__rref_user(agent, id, fork, to);
    td_future *made = packed && rref ? td__call_start(agent, call, to, "td.remote", packed, &all)
                                     : NULL;
    if (!made) {
        if (rref)
            td__rref_forget(agent, rref);
        return NULL;
    }
    if (of)
        td__rref_keep_until(of, made);
    td__rref_set_made(rref, made);
    return rref;
}

td_rref *td_remote(const char *to, const char *function, td_value *args,
                   const td_rpc_call_options *options)
{
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent)
        return NULL;
    int rank = td__worker_rank(agent, to);
    td_rref *rref = rank < 0 ? NULL
                             : start_remote(agent, __func__, rank, function, function, NULL, args,
                                            options);
    td__agent_leave(agent);
    return td__rref_adopt(rref);
}

/* The caller has cancelled the call before it began. */
static bool is_cancelled(const td_rpc_call *call)
{
    if (!td_rpc_call_is_cancelled(call))
        return false;
    td_fail(TD_ERR_ABORTED, "the call was cancelled");
    return true;
}

/* td.remote(id: int, fork: int, function: text, args: list, kwargs: map): makes the value of a reference. The answer
 * confirms the fork; a failure of the function is the failure of the value. It is served also after it was cancelled,
 * since the owner waits for it once the fork was deleted. */
static td_value *serve_remote(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    uint64_t id = (uint64_t)args[0]->integer, fork = (uint64_t)args[1]->integer;
    const char *function = td_value_text(args[2]), *what = function;
    if (!strcmp(function, "td.method") && td_value_count(args[3]) > 1)
        what = td_value_text(td_value_at(args[3], 1));
    td_future *future = td__rref_begin(call->agent, id, fork, call->from, what ? what : function);
    if (!future)
        return NULL;
    td_value *value = is_cancelled(call) ? NULL : td__serve_call(call, function, args[3], args[4]);
    td__future_resolve(future, value);
    td_future_release(future);
    return td_value_nil();
}

/* ---- The value ------------------------------------------------------------------------------- */

/* td.value(id: int): the value of a reference, once it is there. */
static td_value *serve_value(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    if (is_cancelled(call))
        return NULL;
    td_future *future = td__rref_use(call->agent, (uint64_t)args[0]->integer);
    td_value *value = future ? td_value_from_future(future) : NULL;
    td_future_release(future);
    return value;
}

/* Fails if the call that makes the value has failed. */
static bool is_failed(const td_rref *rref)
{
    td_future *made = td__rref_made(rref);
    if (!made || !td__future_is_complete(made))
        return false;
    td_value *value = td__future_value(made);
    td_value_release(value);
    return !value;
}

static td_value *await_local(td_rref *rref, const char *call, int64_t timeout_ms)
{
    td_future *future = td__rref_future(rref);
    td_value *value = td_future_wait(future, timeout_ms);
    if (!value && !td__future_is_complete(future) && td__error_status() == TD_ERR_TIMEOUT)
        td_fail(TD_ERR_TIMEOUT, "%s: there is no value within %lld ms", call,
                (long long)timeout_ms);
    return value;
}

/* Starts a call that uses the reference. */
static td_future *start_use(struct td__rpc_agent *agent, const char *call, td_rref *rref,
                            const char *function, td_value *args,
                            const td_rpc_call_options *options)
{
    td_future *future = args ? td__call_start(agent, call, td__rref_owner_rank(rref), function,
                                              args, options)
                             : NULL;
    if (future)
        td__rref_keep_until(rref, future);
    return future;
}

static td_future *fetch(struct td__rpc_agent *agent, td_rref *rref, int64_t timeout_ms)
{
    TD_SCOPE;
    return start_use(agent, "td_rref_to_here", rref, "td.value",
                     TD_ARGS((int64_t)td__rref_id(rref)),
                     &(td_rpc_call_options){.timeout_ms = timeout_ms});
}

td_value *td_rref_to_here(td_rref *rref, int64_t timeout_ms)
{
    if (!rref)
        return td__null(__func__);
    struct td__rpc_agent *agent = td__rref_enter(rref, __func__);
    if (!agent)
        return NULL;
    td_value *value = NULL;
    int64_t limit = timeout_ms ? timeout_ms : agent->timeout_ms;
    if (timeout_ms < 0) {
        td_fail(TD_ERR_INVALID, "td_rref_to_here: a timeout of %lld ms", (long long)timeout_ms);
    } else if (td_rref_is_owner(rref)) {
        value = await_local(rref, __func__, limit);
    } else if (!is_failed(rref)) {
        td_future *future = fetch(agent, rref, limit);
        value = future ? td_future_wait(future, 0) : NULL;
        td_future_release(future);
    }
    td__agent_leave(agent);
    return value;
}

td_value *td_rref_local_value(td_rref *rref)
{
    if (!rref)
        return td__null(__func__);
    struct td__rpc_agent *agent = td__rref_enter(rref, __func__);
    if (!agent)
        return NULL;
    td_value *value = NULL;
    if (td_rref_is_owner(rref))
        value = await_local(rref, __func__, agent->timeout_ms);
    else
        td_fail(TD_ERR_STATE,
                "td_rref_local_value: the value is on worker \"%s\"; td_rref_to_here() copies it",
                td_rref_owner(rref));
    td__agent_leave(agent);
    return value;
}

/* ---- Methods --------------------------------------------------------------------------------- */

/* The object, once it is there, until the call ends or is cancelled. */
static td_value *await_self(td_rpc_call *call, uint64_t id)
{
    struct td__rpc_agent *agent = call->agent;
    td_future *future = is_cancelled(call) ? NULL : td__rref_use(agent, id);
    if (!future)
        return NULL;
    if (!td__future_is_complete(future)) {
        pthread_mutex_lock(&agent->run_lock);
        call->later_result = td_future_retain(future);
        pthread_mutex_unlock(&agent->run_lock);
        if (td_rpc_call_is_cancelled(call) || !td__future_await(future, call->deadline))
            td_future_cancel(future);
        pthread_mutex_lock(&agent->run_lock);
        call->later_result = NULL;
        pthread_mutex_unlock(&agent->run_lock);
        td_future_release(future);
    }
    td_value *self = td__value_adopt(td__future_value(future));
    td_future_release(future);
    return self;
}

/* td.method(id: int, method: text, args: list, kwargs: map). */
static td_value *serve_method(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    td_value *self = await_self(call, (uint64_t)args[0]->integer), *result = NULL;
    if (self && self->kind == TD_VALUE_OBJECT)
        result = td__serve_method(call, self, td_value_text(args[1]), args[2], args[3]);
    else if (self && self->kind == TD_VALUE_MODULE)
        result = td__module_method(call, self->module, td_value_text(args[1]), args[2], args[3]);
    else if (self)
        td_fail(TD_ERR_INVALID, "the reference is to a value of type %s, which has no methods",
                td_value_kind_name(self->kind));
    return result;
}

static td_value *pack_method(td_rref *rref, const char *method, td_value *args,
                             td_rpc_call_options *options)
{
    td_value *named = options->kwargs ? options->kwargs : td_value_map();
    options->kwargs = NULL;
    return TD_ARGS((int64_t)td__rref_id(rref), method, args, named);
}

/* Starts a call of a method; one reference. */
static td_future *start_method(const char *call, td_rref *rref, const char *method, td_value *args,
                               const td_rpc_call_options *options)
{
    td_rpc_call_options all = options ? *options : (td_rpc_call_options){0};
    if (!rref || !method || !args)
        return td__null(call);
    struct td__rpc_agent *agent = td__rref_enter(rref, call);
    td_future *future = NULL;
    if (agent && !is_failed(rref)) {
        TD_SCOPE;
        td_value *packed = pack_method(rref, method, args, &all);
        future = start_use(agent, call, rref, "td.method", packed, &all);
    }
    td__agent_leave(agent);
    return future;
}

td_future *td_rref_async(td_rref *rref, const char *method, td_value *args,
                         const td_rpc_call_options *options)
{
    return td__future_adopt(start_method(__func__, rref, method, args, options));
}

td_value *td_rref_sync(td_rref *rref, const char *method, td_value *args,
                       const td_rpc_call_options *options)
{
    return td__future_take(start_method(__func__, rref, method, args, options));
}

td_rref *td_rref_remote(td_rref *rref, const char *method, td_value *args,
                        const td_rpc_call_options *options)
{
    td_rpc_call_options all = options ? *options : (td_rpc_call_options){0};
    if (!rref || !method || !args)
        return td__null(__func__);
    struct td__rpc_agent *agent = td__rref_enter(rref, __func__);
    if (!agent)
        return NULL;
    td_rref *result = NULL;
    if (!is_failed(rref)) {
        TD_SCOPE;
        td_value *packed = pack_method(rref, method, args, &all);
        result = packed ? start_remote(agent, __func__, td__rref_owner_rank(rref), "td.method",
                                       method, rref, packed, &all)
                        : NULL;
    }
    td__agent_leave(agent);
    return td__rref_adopt(result);
}

/* ---- Registering ----------------------------------------------------------------------------- */

td_status td__rref_register(void)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static bool registered;
    td_status status = TD_OK;
    pthread_mutex_lock(&once);
    if (!registered) {
        status = td__rpc_register_own("td.control(number: int, kind: int, id: int, fork: int)",
                                      td__control_receive);
        if (!status)
            status = td__rpc_register_own(
                "td.remote(id: int, fork: int, function: text, args: list, kwargs: map)",
                serve_remote);
        if (!status)
            status = td__rpc_register_own("td.value(id: int)", serve_value);
        if (!status)
            status = td__rpc_register_own(
                "td.method(id: int, method: text, args: list, kwargs: map)", serve_method);
        if (!status)
            status = td__remote_module_register();
        if (!status)
            status = td__dist_autograd_register();
        if (!status)
            status = td__dist_optimizer_register();
        registered = !status;
    }
    pthread_mutex_unlock(&once);
    return status;
}
