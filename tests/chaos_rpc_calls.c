/* The calls of a lane. Some are waited for at once, of others a few are in flight. */
#include "chaos_rpc.h"

#include <stdio.h>
#include <string.h>

enum { IN_FLIGHT = 4, PATH = 5, MOST_STOPPED = 2 };

/* A call that has begun. */
struct flight {
    struct remote_call call;
    td_future *future; /* NULL: none */
    td_tensor *input;
    int64_t since;
};

struct lane_state {
    struct rank *rank;
    struct flight flights[IN_FLIGHT];
    int next;
    int stopped; /* calls that have waited for a stopped victim in vain */
};

static void succeed(const struct lane_state *state)
{
    atomic_fetch_add(&state->rank->report->operations, 1);
}

static void fail_result(const struct lane_state *state, const struct remote_call *call)
{
    rank_report(state->rank,
                "lane %d, call %d, %s%s to w%d, w%d, %lld elements: the result is wrong",
                call->lane, call->index, call->async ? "asynchronous " : "",
                call_name((int)call->kind), call->to, call->third, (long long)call->count);
}

/* A result that was expected is right or wrong; NULL: the call has failed. */
static void end_call(struct lane_state *state, const struct remote_call *call, int64_t since,
                     bool there, bool right)
{
    if (!there) {
        state->stopped += td_last_status() == TD_ERR_TIMEOUT;
        judge_call(state->rank, call, since);
    } else if (!right) {
        fail_result(state, call);
    } else {
        succeed(state);
    }
}

static bool is_number(const td_value *value, int64_t expected)
{
    int64_t number;
    return value && !td_value_int(value, &number) && number == expected;
}

/* ---- Calls of one function --------------------------------------------------------------------- */

/* The way of nested calls: the workers that the plan names, in turn. */
static td_value *path_of(const struct remote_call *call, int *length)
{
    td_value *names[PATH];
    *length = 1 + (int)(call->key % PATH);
    for (int i = 0; i < *length; i++)
        names[i] = td_value_of(worker_name(i % 2 ? call->to : call->third));
    return td_value_list(names, *length);
}

static td_future *begin_call(const struct remote_call *call, td_tensor *x)
{
    const char *to = worker_name(call->to);
    int64_t key = (int64_t)call->key;
    td_rpc_call_options options = {.timeout_ms = call->timeout_ms, .copy = call->copy};
    int length;
    switch (call->kind) {
    case CALL_EXCHANGE:
        return td_rpc_async(to, "exchange", TD_ARGS(key, x), &options);
    case CALL_IN_PLACE:
        return td_rpc_async(to, "in_place", TD_ARGS(key, x), &options);
    case CALL_KEEP:
        return td_rpc_async(to, "keep", TD_ARGS(key, x), &options);
    case CALL_NESTED:
        return td_rpc_async(to, "visit", TD_ARGS(path_of(call, &length), 0), &options);
    case CALL_LATER:
        return td_rpc_async(to, "later", TD_ARGS(worker_name(call->third), key), &options);
    case CALL_CANCELLED:
        return td_rpc_async(to, "hold", TD_ARGS(td_value_from_bool(false)), &options);
    case CALL_SHORT:
        return td_rpc_async(to, "nap", TD_NO_ARGS, &options);
    case CALL_REFUSED:
        return td_rpc_async(to, "refuse", TD_NO_ARGS, &options);
    default:
        return td_rpc_async(to, "add", TD_ARGS(key, call->index), &options);
    }
}

static bool is_right(const struct remote_call *call, const td_value *result, td_tensor *input)
{
    int length;
    bool whole = !input || tensor_is_keyed(input, call->key, call->count, 0);
    switch (call->kind) {
    case CALL_EXCHANGE:
        return whole && tensor_is_keyed(td_value_tensor(result), call->key + 1, call->count, 0);
    case CALL_IN_PLACE:
        return whole && tensor_is_keyed(td_value_tensor(result), call->key, call->count, 1);
    case CALL_KEEP: /* the callee still has it */
        return whole && !td_add_scalar_(input, 1) &&
               tensor_is_keyed(input, call->key, call->count, 1);
    case CALL_NESTED:
        path_of(call, &length);
        return is_number(result, length);
    case CALL_LATER:
        return is_number(result, (int64_t)call->key + 101);
    case CALL_CANCELLED:
    case CALL_REFUSED:
        return false;
    case CALL_SHORT:
        return true; /* of a caller that was slower than the callee */
    default:
        return is_number(result, (int64_t)call->key + call->index);
    }
}

static void land(struct lane_state *state, struct flight *flight)
{
    TD_SCOPE;
    if (!flight->future)
        return;
    if (flight->call.async) /* it may have been complete for long */
        flight->since = td__now_ns();
    if (flight->call.kind == CALL_CANCELLED) {
        td__sleep_ns((int64_t)(flight->call.key % 3000) * 1000);
        td_future_cancel(flight->future);
    }
    td_value *result = td_future_wait(flight->future, 0);
    end_call(state, &flight->call, flight->since, result,
             result && is_right(&flight->call, result, flight->input));
    td_future_release(flight->future);
    td_tensor_release(flight->input);
    flight->future = NULL;
}

static void fly(struct lane_state *state, const struct remote_call *call)
{
    TD_SCOPE;
    struct flight *flight = &state->flights[state->next++ % IN_FLIGHT];
    bool sends = call->kind == CALL_EXCHANGE || call->kind == CALL_IN_PLACE ||
                 call->kind == CALL_KEEP;
    land(state, flight);
    td_tensor *x = sends ? keyed_tensor(call->key, call->count) : NULL;
    *flight = (struct flight){.call = *call, .since = td__now_ns()};
    td_future *future = begin_call(call, x);
    if (!future) {
        judge_call(state->rank, call, flight->since);
        return;
    }
    flight->future = td_future_retain(future);
    flight->input = x ? td_tensor_retain(x) : NULL;
    if (!call->async)
        land(state, flight);
}

/* ---- Calls of several steps -------------------------------------------------------------------- */

static void use_object(struct lane_state *state, const struct remote_call *call)
{
    TD_SCOPE;
    td_rpc_call_options options = {.timeout_ms = call->timeout_ms};
    int64_t since = td__now_ns(), start = (int64_t)(call->key % 1000);
    td_rref *cell = td_remote(worker_name(call->to), "Cell", TD_ARGS(start), &options);
    td_value *there = cell ? td_rpc_sync(worker_name(call->third), "use_cell", TD_ARGS(cell, 5),
                                         &options)
                           : NULL;
    end_call(state, call, since, there, is_number(there, start + 5));
    if (!cell)
        return;
    since = td__now_ns();
    td_value *here = td_rref_sync(cell, "add", TD_ARGS(1), &options);
    bool right = is_number(here, start + 6) || (!there && is_number(here, start + 1));
    end_call(state, call, since, here, right);
}

static void use_reference(struct lane_state *state, const struct remote_call *call)
{
    TD_SCOPE;
    td_rpc_call_options options = {.timeout_ms = call->timeout_ms};
    int64_t since = td__now_ns();
    td_rref *reference = td_remote(worker_name(call->to), "make",
                                   TD_ARGS((int64_t)call->key, call->count), &options);
    td_value *copy = reference ? td_rref_to_here(reference, call->timeout_ms) : NULL;
    end_call(state, call, since, copy,
             copy && tensor_is_keyed(td_value_tensor(copy), call->key, call->count, 0));
}

static void use_gradient(struct lane_state *state, const struct remote_call *call)
{
    TD_SCOPE;
    TD_DIST_AUTOGRAD(context);
    int64_t since = td__now_ns(), count = call->count % 5000 + 1;
    bool direct = call->to == call->third;
    td_tensor *x = keyed_tensor(call->key, count);
    td_tensor_set_requires_grad(x, true);
    td_value *y = direct ? td_rpc_sync(worker_name(call->to), "square", TD_ARGS(x), NULL)
                         : td_rpc_sync(worker_name(call->to), "square_there",
                                       TD_ARGS(worker_name(call->third), x), NULL);
    td_tensor *loss = y ? td_sum(td_value_tensor(y)) : NULL;
    bool done = loss && !td_dist_backward(context, &loss, 1, NULL);
    td_tensor *grad = done ? td_dist_autograd_grad(context, x) : NULL;
    const float *g = grad ? td_tensor_data(grad) : NULL, *data = td_tensor_data(x);
    bool right = g && td_tensor_numel(grad) == count;
    for (int64_t i = 0; right && i < count; i++)
        right = g[i] == data[i] * (direct ? 2 : 4);
    end_call(state, call, since, done, right);
}

/* ---- A lane ------------------------------------------------------------------------------------ */

static void run_call(struct lane_state *state, const struct remote_call *call)
{
    struct report *report = state->rank->report;
    atomic_store(&report->at[call->lane], call->index);
    atomic_store(&report->since[call->lane], td__now_ns());
    atomic_store(&report->kind[call->lane], (int)call->kind);
    atomic_store(&report->group[call->lane], call->to);
    if (call->kind == CALL_OBJECT)
        use_object(state, call);
    else if (call->kind == CALL_REFERENCE)
        use_reference(state, call);
    else if (call->kind == CALL_GRADIENT)
        use_gradient(state, call);
    else
        fly(state, call);
}

void rpc_run_lane(struct rank *rank, int lane, int count)
{
    struct lane_state state = {.rank = rank};
    const struct plan *plan = rank->plan;
    for (int i = 0; i < count; i++) {
        struct remote_call call;
        rank_at(rank, lane, i);
        plan_call(rank, lane, i, &call);
        bool waits = plan->fault == FAULT_STOP && call.through >> plan->victim & 1;
        if (!waits || state.stopped < MOST_STOPPED)
            run_call(&state, &call);
    }
    for (int i = 0; i < IN_FLIGHT; i++)
        land(&state, &state.flights[i]);
}

/* ---- The last calls ---------------------------------------------------------------------------- */

static void add_last(struct rank *rank, struct remote_call *call)
{
    TD_SCOPE;
    int64_t since = td__now_ns();
    td_rpc_call_options options = {.timeout_ms = call->timeout_ms};
    td_value *sum = td_rpc_sync(worker_name(call->to), "add", TD_ARGS(1, 2), &options);
    if (!sum)
        judge_call(rank, call, since);
    else if (!is_number(sum, 3))
        rank_report(rank, "the last call to w%d: the result is wrong", call->to);
}

/* Waits for its end; from then on, calls to it fail at once. */
static void hold_last(struct rank *rank, struct remote_call *call)
{
    for (int i = 0; i < 2; i++) {
        TD_SCOPE;
        int64_t since = td__now_ns();
        if (td_rpc_sync(worker_name(call->to), "hold", TD_ARGS(td_value_from_bool(true)), NULL))
            rank_report(rank, "a call to w%d, which has ended, was answered", call->to);
        else
            judge_call(rank, call, since);
        if (i && td__now_ns() - since > (int64_t)2000000000 * slowness())
            rank_report(rank, "w%d has ended, but the call took %.2f s", call->to,
                        (double)(td__now_ns() - since) / 1e9);
    }
}

/* It is stopped: sooner or later a call times out. */
static void stop_last(struct rank *rank, struct remote_call *call)
{
    for (bool answered = true; answered;) {
        TD_SCOPE;
        int64_t since = td__now_ns();
        td_rpc_call_options options = {.timeout_ms = call->timeout_ms};
        answered = td_rpc_sync(worker_name(call->to), "add", TD_ARGS(1, 2), &options);
        if (!answered)
            judge_call(rank, call, since);
    }
}

void rpc_run_last(struct rank *rank, int lane)
{
    const struct plan *plan = rank->plan;
    for (int r = 0; r < plan->size; r++) {
        struct remote_call call = {.lane = lane,
                                   .index = plan->count[lane],
                                   .to = r,
                                   .third = r,
                                   .kind = CALL_KINDS,
                                   .through = 1u << r};
        bool victim = r == plan->victim && r != rank->rank;
        bool cut_off = plan->fault == FAULT_CUT && rank->rank == plan->victim && r != rank->rank;
        bool ends = plan->fault == FAULT_KILL || plan->fault == FAULT_EARLY ||
                    plan->fault == FAULT_CUT || plan->fault == FAULT_LEAVE;
        if (victim && plan->fault == FAULT_STOP) {
            call.timeout_ms = plan->short_ms * slowness();
            stop_last(rank, &call);
        } else if (cut_off || (victim && ends)) {
            hold_last(rank, &call);
        } else {
            add_last(rank, &call);
        }
    }
}
