/* Control messages: sent until they are answered, with a number for each receiver, so that a repetition is recognized. */
#include "rpc/control.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

enum { ANSWER_MS = 5000 };

struct control {
    int to;
    uint64_t number;
    enum td__control kind;
    uint64_t id, fork;
    td__control_fn done;
    void *arg;
};

static void finish(struct td__rpc_agent *agent, struct control *control)
{
    if (control->done)
        control->done(agent, control->arg);
    free(control);
}

static bool is_gone(struct td__rpc_agent *agent, int rank)
{
    pthread_mutex_lock(&agent->lock);
    bool gone = agent->workers[rank]->gone;
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
        finish(value ? agent : NULL, control);
    td__agent_leave(agent);
}

static void send_control(struct td__rpc_agent *agent, struct control *control)
{
    TD_SCOPE;
    td_value *args = TD_ARGS((int64_t)control->number, (int64_t)control->kind, (int64_t)control->id,
                             (int64_t)control->fork);
    td_future *answer = args ? td__call_start(agent, "rpc", control->to, "td.control", args,
                                              &(td_rpc_call_options){.timeout_ms = ANSWER_MS})
                             : NULL;
    if (!answer || td__future_on_complete(answer, on_answer, control))
        finish(NULL, control);
    td_future_release(answer);
}

void td__control_send(struct td__rpc_agent *agent, int to, enum td__control kind, uint64_t id,
                      uint64_t fork, td__control_fn done, void *arg)
{
    struct control *control = malloc(sizeof *control);
    if (!control) {
        if (done)
            done(NULL, arg);
        return;
    }
    *control = (struct control){
        .to = to, .kind = kind, .id = id, .fork = fork, .done = done, .arg = arg};
    pthread_mutex_lock(&agent->lock);
    control->number = ++agent->workers[to]->sent;
    pthread_mutex_unlock(&agent->lock);
    send_control(agent, control);
}

/* Whether message `number` comes for the first time. With the agent's lock held. */
static bool is_new(struct td__rpc_worker *worker, uint64_t number)
{
    if (number <= worker->received)
        return false;
    for (int i = 0; i < worker->early_count; i++)
        if (worker->early[i] == number)
            return false;
    if (number != worker->received + 1) {
        if (worker->early_count == worker->early_capacity) {
            int capacity = worker->early_capacity ? 2 * worker->early_capacity : 16;
            uint64_t *early = realloc(worker->early, sizeof *early * (size_t)capacity);
            if (!early)
                return true;
            worker->early = early;
            worker->early_capacity = capacity;
        }
        worker->early[worker->early_count++] = number;
        return true;
    }
    worker->received = number;
    for (int i = 0; i < worker->early_count;) {
        if (worker->early[i] != worker->received + 1) {
            i++;
            continue;
        }
        worker->received++;
        worker->early[i] = worker->early[--worker->early_count];
        i = 0;
    }
    return true;
}

td_value *td__control_receive(td_rpc_call *call, td_value *const *args, int count)
{
    struct td__rpc_agent *agent = call->agent;
    int64_t at[4] = {0};
    for (int i = 0; i < count && i < 4; i++)
        if (td_value_int(args[i], &at[i]))
            return NULL;
    pthread_mutex_lock(&agent->lock);
    bool new_one = is_new(agent->workers[call->from], (uint64_t)at[0]);
    pthread_mutex_unlock(&agent->lock);
    if (new_one && td__rref_control(agent, call->from, at[1], (uint64_t)at[2], (uint64_t)at[3]))
        return NULL;
    return td_value_nil();
}
