/* Control messages: sent until they are answered, with a number for each receiver, so that a repetition is recognized. */
#include "rpc/control.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

enum { ANSWER_MS = 5000, MAX_EARLY = 1 << 24 };

atomic_int td__control_answer_ms;

struct control {
    int to;
    uint64_t number;
    enum td__control kind;
    uint64_t id, fork;
    td__control_fn done;
    void *arg;
};

static void finish(struct td__rpc_agent *agent, bool done, struct control *control)
{
    if (control->done)
        control->done(agent, done, control->arg);
    free(control);
}

static bool is_gone(struct td__rpc_agent *agent, int rank)
{
    pthread_mutex_lock(&agent->lock);
    bool gone = td__worker(agent, rank)->gone;
    pthread_mutex_unlock(&agent->lock);
    return gone;
}

static void send_control(struct td__rpc_agent *agent, struct control *control);

static void on_answer(td_future *answer, void *arg)
{
    struct control *control = arg;
    struct td__rpc_agent *agent = td__agent_hold();
    td_value *value = td__future_value(answer);
    bool repeat = !value && agent && !is_gone(agent, control->to) &&
                  (td__error_status() == TD_ERR_TIMEOUT || td__error_status() == TD_ERR_PEER);
    td_value_release(value);
    if (repeat)
        send_control(agent, control);
    else
        finish(agent, value, control);
    td__agent_leave(agent);
}

/* It is no part of the call that this thread serves, if any: how deep that is nested does not count. */
static void send_control(struct td__rpc_agent *agent, struct control *control)
{
    TD_SCOPE;
    struct td_rpc_call *serving = td__current_call;
    int answer_ms = atomic_load_explicit(&td__control_answer_ms, memory_order_relaxed);
    td__current_call = NULL;
    td_value *args = TD_ARGS((int64_t)control->number, (int64_t)control->kind, (int64_t)control->id,
                             (int64_t)control->fork);
    td_rpc_call_options options = {.timeout_ms = answer_ms ? answer_ms : ANSWER_MS};
    td_future *answer = args ? td__call_start(agent, "rpc", control->to, "td.control", args,
                                              &options)
                             : NULL;
    if (!answer || td__future_on_complete(answer, on_answer, control))
        finish(agent, false, control);
    td_future_release(answer);
    td__current_call = serving;
}

void td__control_send(struct td__rpc_agent *agent, int to, enum td__control kind, uint64_t id,
                      uint64_t fork, td__control_fn done, void *arg)
{
    struct control *control = malloc(sizeof *control);
    if (!control) {
        if (done)
            done(agent, false, arg);
        return;
    }
    *control = (struct control){
        .to = to, .kind = kind, .id = id, .fork = fork, .done = done, .arg = arg};
    pthread_mutex_lock(&agent->lock);
    control->number = ++td__worker(agent, to)->sent;
    pthread_mutex_unlock(&agent->lock);
    send_control(agent, control);
}

static uint64_t *early_word(const struct td__rpc_worker *worker, uint64_t number)
{
    return &worker->early[number % worker->early_capacity / 64];
}

/* Makes the bits reach up to `number`. */
static td_status grow_early(struct td__rpc_worker *worker, uint64_t number)
{
    if (number - worker->received > MAX_EARLY)
        return td_fail(TD_ERR_INVALID, "the number of a control message is not valid");
    struct td__rpc_worker grown = {.early_capacity = worker->early_capacity};
    while (grown.early_capacity < number - worker->received)
        grown.early_capacity = grown.early_capacity ? 2 * grown.early_capacity : 1024;
    grown.early = calloc(grown.early_capacity / 64, sizeof *grown.early);
    if (!grown.early)
        return td__fail_nomem("rpc");
    for (uint64_t i = 1; i <= worker->early_capacity; i++)
        if (*early_word(worker, worker->received + i) >> (worker->received + i) % 64 & 1)
            *early_word(&grown, worker->received + i) |= UINT64_C(1) << (worker->received + i) % 64;
    free(worker->early);
    worker->early = grown.early;
    worker->early_capacity = grown.early_capacity;
    return TD_OK;
}

/* Whether message `number` comes for the first time. With the agent's lock held. */
static td_status note(struct td__rpc_worker *worker, uint64_t number, bool *is_new)
{
    *is_new = number > worker->received;
    if (!*is_new)
        return TD_OK;
    if (number - worker->received > worker->early_capacity)
        TD_TRY(grow_early(worker, number));
    uint64_t *word = early_word(worker, number), bit = UINT64_C(1) << number % 64;
    *is_new = !(*word & bit);
    *word |= bit;
    while (*(word = early_word(worker, worker->received + 1)) &
           (bit = UINT64_C(1) << (worker->received + 1) % 64)) {
        *word &= ~bit;
        worker->received++;
    }
    return TD_OK;
}

/* A message that takes effect on another thread at this moment. */
struct td__control_active {
    struct td__control_active *next;
    int from;
    uint64_t number;
};

/* Notes a message, and adds it to those that take effect if it is new; `busy`: it is a repetition of one of these. */
static td_status begin(struct td__rpc_agent *agent, struct td__control_active *active, bool *is_new,
                       bool *busy)
{
    *busy = false;
    pthread_mutex_lock(&agent->lock);
    td_status status = note(td__worker(agent, active->from), active->number, is_new);
    for (struct td__control_active *at = agent->controls; at && !*is_new; at = at->next)
        *busy |= at->from == active->from && at->number == active->number;
    if (!status && *is_new) {
        active->next = agent->controls;
        agent->controls = active;
    }
    pthread_mutex_unlock(&agent->lock);
    return status;
}

static void end(struct td__rpc_agent *agent, struct td__control_active *active)
{
    pthread_mutex_lock(&agent->lock);
    struct td__control_active **at = &agent->controls;
    while (*at != active)
        at = &(*at)->next;
    *at = active->next;
    pthread_mutex_unlock(&agent->lock);
}

/* A repetition is answered only after the first message has taken effect. An answer to FORK before that would let the
 * sender's DELETE overtake it: the fork would be added after its deletion, and keep the value for ever. The sender of a
 * repetition that gets no answer repeats it again. */
td_value *td__control_receive(td_rpc_call *call, td_value *const *args, int count)
{
    struct td__rpc_agent *agent = call->agent;
    int64_t at[4] = {0};
    for (int i = 0; i < count && i < 4; i++)
        if (td_value_int(args[i], &at[i]))
            return NULL;
    struct td__control_active active = {.from = call->from, .number = (uint64_t)at[0]};
    bool is_new, busy;
    td_status status = begin(agent, &active, &is_new, &busy);
    if (!status && is_new) {
        status = td__rref_control(agent, call->from, at[1], (uint64_t)at[2], (uint64_t)at[3]);
        end(agent, &active);
    }
    if (busy)
        atomic_store(&call->cancelled, true); /* no answer */
    return status ? NULL : td_value_nil();
}
