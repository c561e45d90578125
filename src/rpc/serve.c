/* Calls to this worker: from the message to the answer. */
#include "base/fail.h"
#include "os/tls.h"
#include "rpc/grad_context.h"
#include "rpc/rpc_agent.h"

#include <tandem/rpc.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SPARE_CALLS = 128 };

_Thread_local struct td_rpc_call *td__current_call;

/* ---- Calls ----------------------------------------------------------------------------------- */

void *td_rpc_call_arg(const td_rpc_call *call)
{
    return call && call->entry ? call->entry->arg : NULL;
}

void *td_rpc_call_self(const td_rpc_call *call)
{
    return call ? call->self : NULL;
}

const char *td_rpc_call_from(const td_rpc_call *call)
{
    return call ? td__worker_name_of(call->agent, call->from) : NULL;
}

bool td_rpc_call_is_cancelled(const td_rpc_call *call)
{
    if (!call || atomic_load(&call->cancelled))
        return call;
    bool expired = td__deadline_passed(call->deadline);
    if (expired)
        atomic_store(&((td_rpc_call *)call)->expired, true);
    return expired;
}

static void unlink_call(struct td_rpc_call *call)
{
    if (call->later)
        call->later->earlier = call->earlier;
    if (call->earlier)
        call->earlier->later = call->later;
    else
        call->agent->active = call->later;
}

bool td__serve_keep(struct td_rpc_call *call)
{
    struct td__rpc_agent *agent = call->agent;
    unlink_call(call);
    if (agent->spare_count == SPARE_CALLS)
        return false;
    call->next = agent->spare;
    agent->spare = call;
    agent->spare_count++;
    return true;
}

static void remove_and_free(struct td_rpc_call *call)
{
    struct td__rpc_agent *agent = call->agent;
    pthread_mutex_lock(&agent->run_lock);
    unlink_call(call);
    pthread_mutex_unlock(&agent->run_lock);
    td__function_release(call->entry);
    td_future_release(call->later_result);
    free(call);
}

_Atomic(td__serve_delay_fn) td__serve_delay;

/* With run_lock held; false without memory. */
static bool queue_call(struct td__rpc_agent *agent, struct td__incoming *incoming)
{
    const struct td__message_header *header = &incoming->header;
    struct td_rpc_call *call = agent->spare;
    if (call) {
        agent->spare = call->next;
        agent->spare_count--;
    } else if (!(call = malloc(sizeof *call))) {
        return false;
    }
    *call = (struct td_rpc_call){.agent = agent,
                                 .incoming = incoming,
                                 .from = incoming->from,
                                 .link = incoming->link,
                                 .id = header->id,
                                 .context = header->context,
                                 .depth = header->depth,
                                 .copy = header->copy,
                                 .deadline = incoming->deadline};
    call->later = agent->active;
    if (agent->active)
        agent->active->earlier = call;
    agent->active = call;
    if (atomic_load(&agent->leaving)) /* td__serve_lost() may have been called before */
        atomic_store(&call->cancelled, true);
    td__io_queue(agent, call);
    return true;
}

/* Queues a list of them. One without memory for its call is dropped: the caller's timeout ends that. */
static void queue_calls(struct td__rpc_agent *agent, struct td__incoming *incoming)
{
    struct td__incoming *dropped = NULL, *next;
    unsigned count = 0;
    pthread_mutex_lock(&agent->run_lock);
    for (; incoming; incoming = next) {
        next = incoming->next;
        if (queue_call(agent, incoming)) {
            count++;
        } else {
            incoming->next = dropped;
            dropped = incoming;
        }
    }
    td__count(&agent->served, count);
    pthread_mutex_unlock(&agent->run_lock);
    for (; dropped; dropped = next) {
        next = dropped->next;
        td__incoming_free(dropped);
    }
}

void td__serve(struct td__rpc_agent *agent, struct td__rpc_link *link,
               struct td__incoming *incoming)
{
    int64_t now = link ? link->read_at : td__now_ns();
    incoming->link = link ? link->id + 1 : 0;
    incoming->deadline = now + (int64_t)incoming->header.timeout_ms * 1000000;
    td__serve_delay_fn delay = atomic_load_explicit(&td__serve_delay, memory_order_relaxed);
    if (delay && delay(agent, incoming))
        return;
    if (!link) {
        td__serve_now(agent, incoming);
        return;
    }
    *link->last_arrived = incoming;
    link->last_arrived = &incoming->next;
}

void td__serve_arrived(struct td__rpc_link *link)
{
    struct td__incoming *arrived = link->arrived;
    if (!arrived)
        return;
    link->arrived = NULL;
    link->last_arrived = &link->arrived;
    queue_calls(link->agent, arrived);
}

void td__serve_now(struct td__rpc_agent *agent, struct td__incoming *incoming)
{
    incoming->next = NULL;
    queue_calls(agent, incoming);
}

/* ---- Answers --------------------------------------------------------------------------------- */

static void answer_error(struct td_rpc_call *call, td_status status, const char *text)
{
    struct td__rpc_agent *agent = call->agent;
    struct td__message_header header = {.kind = TD__MESSAGE_ERROR, .id = call->id};
    struct td__message *message = td__message_create(agent, call->from, false);
    if (!message)
        return;
    message->more = call->more;
    td__buffer_put_u32(&message->bytes, (uint32_t)status);
    td__buffer_put_string(&message->bytes, text, strlen(text));
    if (td__message_seal(message, &header, SIZE_MAX))
        td__message_free(message);
    else
        td__agent_send(agent, call->from, message);
}

static td_status answer_value(struct td_rpc_call *call, td_value *value)
{
    struct td__rpc_agent *agent = call->agent;
    struct td__message_header header = {
        .kind = TD__MESSAGE_REPLY, .id = call->id, .context = call->context, .copy = call->copy};
    bool lend = call->from != agent->rank && td__worker_is_near(agent, call->from);
    struct td__message *message = td__message_create(agent, call->from, lend);
    if (message) {
        message->records = call->context;
        message->more = call->more;
    }
    td_status status = message ? td__message_put(message, value) : TD_ERR_NOMEM;
    if (!status)
        status = td__message_seal(message, &header, agent->max_message);
    struct td__rpc_link *held = td__link_held(call->from);
    if (status)
        td__message_free(message);
    else if (held)
        td__link_send(held, message);
    else
        td__agent_send(agent, call->from, message);
    return status;
}

/* Answers with the value, or with the last error; unless the call was cancelled, or the function knows that the time is
 * over. Otherwise a caller whose time is over ignores the answer: that saves a look at the clock for every call. */
static void answer(struct td_rpc_call *call, td_value *value)
{
    if (atomic_load(&call->cancelled) || atomic_load(&call->expired))
        return;
    if (!value || answer_value(call, value))
        answer_error(call, td__error_status(), td__error_text());
}

static void answer_later(td_future *done, void *arg)
{
    struct td_rpc_call *call = arg;
    td_value *value = td__future_value(done);
    answer(call, value);
    td_value_release(value);
    remove_and_free(call);
}

/* The call answers when its result is complete. From then on it may be freed at any time. */
static void await_result(struct td_rpc_call *call)
{
    td_future *result = td_future_retain(call->later_result);
    call->more = false; /* it is answered by itself, on any thread */
    pthread_mutex_lock(&call->agent->run_lock);
    call->answers_later = true;
    bool cancelled = atomic_load(&call->cancelled);
    pthread_mutex_unlock(&call->agent->run_lock);
    if (td__future_on_complete(result, answer_later, call)) {
        answer(call, NULL);
        remove_and_free(call);
    } else if (cancelled) {
        td_future_cancel(result);
    }
    td_future_release(result);
}

/* ---- Running --------------------------------------------------------------------------------- */

/* The parts of a request: the function, and its arguments. */
static td_status read_request(struct td__incoming *incoming, struct td__span *function,
                              td_value **args, td_value **kwargs)
{
    struct td__reader body = td__incoming_body(incoming);
    *function = td__reader_string(&body, 4096);
    struct td__span list = td__reader_string(&body, incoming->header.body);
    if (body.failed)
        return td_fail(TD_ERR_INVALID, "the request is not valid");
    size_t rest = (size_t)(body.end - body.at);
    if (list.size && !(*args = td__incoming_value(incoming, list.data, list.size)))
        return td__error_status();
    if (rest && !(*kwargs = td__incoming_value(incoming, body.at, rest)))
        return td__error_status();
    if ((*args && (*args)->kind != TD_VALUE_LIST) || (*kwargs && (*kwargs)->kind != TD_VALUE_MAP))
        return td_fail(TD_ERR_INVALID, "the arguments of the request are not valid");
    return TD_OK;
}

/* The library's own functions are served also after the call was cancelled: the protocol of references needs them. */
static bool is_own(const struct td__incoming *incoming)
{
    struct td__reader body = td__incoming_body(incoming);
    struct td__span function = td__reader_string(&body, 4096);
    return !incoming->status && !body.failed && function.size > 3 &&
           !memcmp(function.data, "td.", 3);
}

/* Whether the call can be served at all. */
static td_status check_call(const struct td_rpc_call *call)
{
    const struct td__incoming *incoming = call->incoming;
    if (incoming->status)
        return td_fail(incoming->status, "%s", incoming->text ? incoming->text : "out of memory");
    if (call->depth >= TD_RPC_MAX_NESTING)
        return td_fail(TD_ERR_INVALID, "calls are nested deeper than %d", TD_RPC_MAX_NESTING);
    return TD_OK;
}

/* Calls `entry`, of which `self` is the object; the result belongs to the scope. */
static td_value *call_function(struct td_rpc_call *call, struct td__function_entry *entry,
                               void *self, td_value *args, td_value *kwargs)
{
    struct td__bound bound;
    if (td__signature_bind(entry->signature, args, kwargs, &bound))
        return NULL;
    struct td__function_entry *outer = call->entry;
    void *outer_self = call->self;
    uint64_t failures = td__error_count();
    call->entry = entry;
    call->self = self;
    td_value *result = td__function_call(entry, call, bound.values, bound.count);
    call->entry = outer;
    call->self = outer_self;
    if (!result && td__error_count() == failures)
        td_fail(TD_ERR_INVALID, "%s() returned NULL without an error",
                td__signature_name(entry->signature));
    td__bound_free(&bound);
    return result;
}

static struct td__function_entry *find_function(const char *name, size_t size)
{
    struct td__function_entry *entry = td__function_find(name, size);
    if (!entry)
        td_fail(TD_ERR_INVALID, "there is no function \"%.*s\"", (int)(size < 200 ? size : 200),
                name);
    return entry;
}

td_value *td__serve_call(td_rpc_call *call, const char *function, td_value *args, td_value *kwargs)
{
    struct td__function_entry *entry = find_function(function, strlen(function));
    td_value *result = entry ? call_function(call, entry, NULL, args, kwargs) : NULL;
    td__function_release(entry);
    return result;
}

td_value *td__serve_method(td_rpc_call *call, td_value *self, const char *method, td_value *args,
                           td_value *kwargs)
{
    struct td__function_entry *entry = td__method_find(self->object_class, method);
    if (entry)
        return call_function(call, entry, self->object, args, kwargs);
    td_fail(TD_ERR_INVALID, "class \"%s\" has no method \"%.100s\"",
            td__class_name(self->object_class), method);
    return NULL;
}

bool td__serve_run(struct td_rpc_call *call, int64_t now)
{
    struct td_rpc_call *above = td__current_call;
    struct td__span function = {0};
    td_value *args = NULL, *kwargs = NULL;
    bool later = false;
    uint64_t outer_context = td__current_context;
    td__current_call = call;
    td__current_context = call->context;
    bool cancelled = atomic_load(&call->cancelled) || now >= call->deadline;
    if (!cancelled || is_own(call->incoming)) {
        TD_SCOPE;
        bool valid = !check_call(call) && !td__incoming_own(call->incoming) &&
                     !td__context_receive(call->incoming) &&
                     !read_request(call->incoming, &function, &args, &kwargs);
        call->entry = valid ? find_function(function.data, function.size) : NULL;
        if (call->entry && !atomic_load_explicit(&call->entry->brief, memory_order_relaxed))
            td__link_publish(); /* the answers before this one do not wait for it */
        td_value *result = call->entry ? call_function(call, call->entry, NULL, args, kwargs)
                                       : NULL;
        if (result && result->kind == TD_VALUE_FUTURE) {
            call->later_result = td_future_retain(result->future);
            later = true;
        } else {
            answer(call, result);
        }
    }
    td_value_release(args);
    td_value_release(kwargs);
    td__incoming_free(call->incoming);
    call->incoming = NULL;
    td__current_call = above;
    td__current_context = outer_context;
    if (later)
        await_result(call);
    return !later;
}

void td__serve_drop(struct td_rpc_call *call)
{
    td__incoming_free(call->incoming);
    if (!call->task) {
        remove_and_free(call);
        return;
    }
    if (call->fd >= 0)
        td__sock_close(call->fd);
    if (call->suspended)
        td__link_release(call->suspended);
    if (call->continuation)
        call->continuation(call->self);
    free(call);
}

/* ---- Cancelling ------------------------------------------------------------------------------ */

/* Which calls; -1: of any worker, 0: by any link. */
struct some_calls {
    int from;
    uint64_t link;
    bool one; /* only `id` */
    uint64_t id;
};

static bool is_one_of(const struct td_rpc_call *call, const struct some_calls *some)
{
    return (some->from < 0 || call->from == some->from) &&
           (!some->link || call->link == some->link) && (!some->one || call->id == some->id);
}

/* Of calls that answer later, the futures are cancelled, without the lock: a callback may free the call. */
static void cancel(struct td__rpc_agent *agent, const struct some_calls *some)
{
    enum { AT_ONCE = 16 };
    td_future *futures[AT_ONCE];
    int count;
    do {
        count = 0;
        pthread_mutex_lock(&agent->run_lock);
        for (struct td_rpc_call *call = agent->active; call && count < AT_ONCE;
             call = call->later) {
            if (!is_one_of(call, some) || atomic_load(&call->cancelled))
                continue;
            atomic_store(&call->cancelled, true);
            if (call->answers_later)
                futures[count++] = td_future_retain(call->later_result);
        }
        pthread_mutex_unlock(&agent->run_lock);
        for (int i = 0; i < count; i++) {
            td_future_cancel(futures[i]);
            td_future_release(futures[i]);
        }
    } while (count == AT_ONCE);
}

void td__serve_cancel(struct td__rpc_agent *agent, int from, uint64_t id)
{
    cancel(agent, &(struct some_calls){.from = from, .one = true, .id = id});
}

void td__serve_lost(struct td__rpc_agent *agent, int from)
{
    cancel(agent, &(struct some_calls){.from = from});
}

void td__serve_link_ended(struct td__rpc_agent *agent, const struct td__rpc_link *link)
{
    cancel(agent, &(struct some_calls){.from = link->rank, .link = link->id + 1});
}

/* A call that answers later does so on any thread, which uses the agent. A function that runs may still return a
 * future. */
void td__serve_close(struct td__rpc_agent *agent)
{
    bool left = true;
    while (left) {
        cancel(agent, &(struct some_calls){.from = -1});
        pthread_mutex_lock(&agent->run_lock);
        left = agent->active;
        pthread_mutex_unlock(&agent->run_lock);
        if (left)
            td__sleep_ns(100000);
    }
}
