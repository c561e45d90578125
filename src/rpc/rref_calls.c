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

static td_rref *start_remote(struct td__rpc_agent *agent, const char *call, int to,
                             const char *function, td_value *args,
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
    td_rref *rref = to == agent->rank ? td__rref_own(agent, id, false, function)
                                      : td__rref_user(agent, id, fork, to);
    td_future *made = packed && rref ? td__call_start(agent, call, to, "td.remote", packed, &all)
                                     : NULL;
    if (!made) {
        if (rref)
            td__rref_forget(agent, rref);
        return NULL;
    }
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
    td_rref *rref = rank < 0 ? NULL : start_remote(agent, __func__, rank, function, args, options);
    td__agent_leave(agent);
    return td__rref_adopt(rref);
}

/* td.remote(id: int, fork: int, function: text, args: list, kwargs: map): makes the value of a reference. The answer
 * confirms the fork; a failure of the function is the failure of the value. */
static td_value *serve_remote(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    uint64_t id = (uint64_t)args[0]->integer, fork = (uint64_t)args[1]->integer;
    const char *function = td_value_text(args[2]);
    td_future *future = td__rref_begin(call->agent, id, fork, call->from, function);
    if (!future)
        return NULL;
    td_value *value = td__serve_call(call, function, args[3], args[4]);
    td__future_resolve(future, value);
    td_future_release(future);
    return td_value_nil();
}

/* ---- The value ------------------------------------------------------------------------------- */

/* td.value(id: int): the value of a reference, once it is there. */
static td_value *serve_value(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    td_future *future = td__rref_wait_for(call->agent, (uint64_t)args[0]->integer);
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

static td_value *await_local(td_rref *rref, int64_t timeout_ms)
{
    return td_future_wait(td__rref_future(rref), timeout_ms);
}

static td_future *fetch(struct td__rpc_agent *agent, const td_rref *rref, int64_t timeout_ms)
{
    TD_SCOPE;
    td_value *args = TD_ARGS((int64_t)td__rref_id(rref));
    return args ? td__call_start(agent, "td_rref_to_here", td__rref_owner_rank(rref), "td.value",
                                 args, &(td_rpc_call_options){.timeout_ms = timeout_ms})
                : NULL;
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
    if (td_rref_is_owner(rref)) {
        value = await_local(rref, limit);
    } else if (timeout_ms < 0) {
        td_fail(TD_ERR_INVALID, "td_rref_to_here: a timeout of %lld ms", (long long)timeout_ms);
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
        value = await_local(rref, agent->timeout_ms);
    else
        td_fail(TD_ERR_STATE,
                "td_rref_local_value: the value is on worker \"%s\"; td_rref_to_here() copies it",
                td_rref_owner(rref));
    td__agent_leave(agent);
    return value;
}

/* ---- Methods --------------------------------------------------------------------------------- */

/* td.method(id: int, method: text, args: list, kwargs: map). */
static td_value *serve_method(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    td_future *future = td__rref_wait_for(call->agent, (uint64_t)args[0]->integer);
    if (!future)
        return NULL;
    td_value *self = td_future_wait(future, 0), *result = NULL;
    td_future_release(future);
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

static td_future *start_method(struct td__rpc_agent *agent, const char *call, td_rref *rref,
                               const char *method, td_value *args,
                               const td_rpc_call_options *options)
{
    td_rpc_call_options all = options ? *options : (td_rpc_call_options){0};
    if (!method || !args)
        return td__null(call);
    if (is_failed(rref))
        return NULL;
    TD_SCOPE;
    td_value *packed = pack_method(rref, method, args, &all);
    return packed
               ? td__call_start(agent, call, td__rref_owner_rank(rref), "td.method", packed, &all)
               : NULL;
}

td_future *td_rref_async(td_rref *rref, const char *method, td_value *args,
                         const td_rpc_call_options *options)
{
    if (!rref)
        return td__null(__func__);
    struct td__rpc_agent *agent = td__rref_enter(rref, __func__);
    td_future *future = agent ? start_method(agent, __func__, rref, method, args, options) : NULL;
    td__agent_leave(agent);
    return td__future_adopt(future);
}

td_value *td_rref_sync(td_rref *rref, const char *method, td_value *args,
                       const td_rpc_call_options *options)
{
    if (!rref)
        return td__null(__func__);
    struct td__rpc_agent *agent = td__rref_enter(rref, __func__);
    td_future *future = agent ? start_method(agent, __func__, rref, method, args, options) : NULL;
    td_value *value = future ? td_future_wait(future, 0) : NULL;
    td_future_release(future);
    td__agent_leave(agent);
    return value;
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
                                       packed, &all)
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
            status = td__dist_autograd_register();
        if (!status)
            status = td__dist_optimizer_register();
        registered = !status;
    }
    pthread_mutex_unlock(&once);
    return status;
}
