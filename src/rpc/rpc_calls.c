/* Calls of this worker: a table of those that are not complete. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "rpc/grad_context.h"
#include "rpc/rpc_agent.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    CHUNK = 256,
    NONE = UINT32_MAX,
    BUSY = 4,           /* so many calls in flight: the next one comes soon */
    LONG_MS = 1000,     /* a timeout for which a tick does not count */
    TICK_NS = 10000000, /* of the slowest kernel */
};

/* ---- The table (with calls_lock held) ---------------------------------------------------------- */

static struct td__pending *entry_at(struct td__rpc_agent *agent, uint32_t index)
{
    return &agent->pending[index / CHUNK][index % CHUNK];
}

static bool grow(struct td__rpc_agent *agent)
{
    uint32_t chunks = agent->pending_capacity / CHUNK;
    struct td__pending **pending = realloc(agent->pending, sizeof *pending * (chunks + 1));
    if (!pending)
        return false;
    agent->pending = pending;
    pending[chunks] = calloc(CHUNK, sizeof **pending);
    if (!pending[chunks])
        return false;
    for (uint32_t i = 0; i < CHUNK; i++)
        pending[chunks][i].next_free = i + 1 < CHUNK ? agent->pending_capacity + i + 1 : NONE;
    agent->first_free = agent->pending_capacity;
    agent->pending_capacity += CHUNK;
    return true;
}

static struct td__pending *find(struct td__rpc_agent *agent, uint64_t id)
{
    uint32_t index = (uint32_t)id;
    if (index >= agent->pending_capacity)
        return NULL;
    struct td__pending *entry = entry_at(agent, index);
    return entry->future && entry->generation == id >> 32 ? entry : NULL;
}

/* Frees the entry, and returns its future with its reference. */
static td_future *take(struct td__rpc_agent *agent, struct td__pending *entry, uint32_t index)
{
    td_future *future = entry->future;
    entry->future = NULL;
    entry->generation++;
    entry->next_free = agent->first_free;
    agent->first_free = index;
    agent->pending_count--;
    return future;
}

/* ---- One call -------------------------------------------------------------------------------- */

/* To read the exact clock takes as long as to look for the link: only short timeouts need it. The coarse one is late by a
 * tick of the kernel at most. */
static td__deadline deadline_in(int64_t timeout_ms)
{
    struct timespec now;
    if (timeout_ms < LONG_MS || clock_gettime(CLOCK_MONOTONIC_COARSE, &now))
        return td__deadline_in_ms(timeout_ms);
    int64_t ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec + TICK_NS;
    return timeout_ms > (INT64_MAX - ns) / 1000000 ? TD__NEVER : ns + timeout_ms * 1000000;
}

td_status td__call_begin(struct td__rpc_agent *agent, int to, const char *function,
                         int64_t timeout_ms, struct td__begun *begun)
{
    td__deadline deadline = deadline_in(timeout_ms);
    pthread_mutex_lock(&agent->calls_lock);
    td_status status = TD_OK;
    if (agent->closed)
        status = td_fail(TD_ERR_STATE, "the worker has been shut down");
    else if (agent->first_free == NONE && !grow(agent))
        status = td__fail_nomem("rpc");
    if (!status) {
        uint32_t index = agent->first_free;
        struct td__pending *entry = entry_at(agent, index);
        uint64_t id = index | (uint64_t)entry->generation << 32;
        td_future *future = td__future_create(agent, id, deadline, 2);
        if (future) {
            const struct td__rpc_worker *worker = td__worker(agent, to);
            agent->first_free = entry->next_free;
            entry->future = future;
            entry->to = to;
            entry->link = atomic_load(&worker->ended);
            entry->deadline = deadline;
            entry->timeout_ms = timeout_ms;
            size_t length = strnlen(function, sizeof entry->function - 1);
            memcpy(entry->function, function, length);
            entry->function[length] = 0;
            agent->pending_count++;
            td__count(&agent->begun, 1);
            if (deadline < agent->next_deadline) {
                agent->next_deadline = deadline;
                td__io_set_deadline(agent, deadline);
            }
            *begun = (struct td__begun){.id = id,
                                        .future = future,
                                        .link = worker->gone ? NULL : td__link_retain(worker->link),
                                        .busy = agent->pending_count >= BUSY};
        } else {
            status = TD_ERR_NOMEM;
        }
    }
    pthread_mutex_unlock(&agent->calls_lock);
    return status;
}

static td_future *take_call(struct td__rpc_agent *agent, int from, uint64_t id)
{
    pthread_mutex_lock(&agent->calls_lock);
    struct td__pending *entry = find(agent, id);
    td_future *future = entry && (from < 0 || entry->to == from) ? take(agent, entry, (uint32_t)id)
                                                                 : NULL;
    pthread_mutex_unlock(&agent->calls_lock);
    return future;
}

void td__call_complete(struct td__rpc_agent *agent, int from, uint64_t id, td_value *value)
{
    td_future *future = take_call(agent, from, id);
    if (future)
        td__future_fulfil(future, value);
    else
        td_value_release(value);
    td_future_release(future);
}

void td__call_fail(struct td__rpc_agent *agent, int from, uint64_t id, td_status status,
                   const char *text)
{
    td_future *future = take_call(agent, from, id);
    if (future)
        td__future_complete(future, NULL, status, text);
    td_future_release(future);
}

static void send_cancel(struct td__rpc_agent *agent, int to, uint64_t id)
{
    struct td__message_header header = {.kind = TD__MESSAGE_CANCEL, .id = id};
    struct td__message *message = td__message_create(agent, to, false);
    if (message && !td__message_seal(message, &header, SIZE_MAX))
        td__agent_send(agent, to, message);
    else
        td__message_free(message);
}

void td__call_cancel(struct td__rpc_agent *agent, uint64_t id)
{
    int to = -1;
    pthread_mutex_lock(&agent->calls_lock);
    struct td__pending *entry = find(agent, id);
    td_future *future = NULL;
    if (entry) {
        to = entry->to;
        future = take(agent, entry, (uint32_t)id);
    }
    pthread_mutex_unlock(&agent->calls_lock);
    if (!future)
        return;
    send_cancel(agent, to, id);
    td__future_complete(future, NULL, TD_ERR_ABORTED, "the call was cancelled");
    td_future_release(future);
}

/* ---- Many calls ------------------------------------------------------------------------------ */

struct failed_call {
    struct failed_call *next;
    td_future *future;
    uint64_t id;
    int to;
    td_status status;
    char text[512];
};

/* Takes a call out of the table, to be failed without the lock. False without memory: it is failed later. */
static bool collect(struct td__rpc_agent *agent, uint32_t index, struct failed_call **list)
{
    struct td__pending *entry = entry_at(agent, index);
    struct failed_call *failed = malloc(sizeof *failed);
    if (!failed)
        return false;
    *failed = (struct failed_call){
        .next = *list, .to = entry->to, .id = index | (uint64_t)entry->generation << 32};
    *list = failed;
    failed->future = take(agent, entry, index);
    return true;
}

static void fail_collected(struct td__rpc_agent *agent, struct failed_call *list, bool cancel)
{
    for (struct failed_call *next; list; list = next) {
        next = list->next;
        if (cancel)
            send_cancel(agent, list->to, list->id);
        td__future_complete(list->future, NULL, list->status, list->text);
        td_future_release(list->future);
        free(list);
    }
}

void td__calls_fail_all(struct td__rpc_agent *agent, int to, unsigned links, td_status status,
                        const char *text)
{
    struct failed_call *list = NULL;
    pthread_mutex_lock(&agent->calls_lock);
    for (uint32_t i = 0; i < agent->pending_capacity; i++) {
        struct td__pending *entry = entry_at(agent, i);
        if (!entry->future || (to >= 0 && entry->to != to) || entry->link > links)
            continue;
        char function[sizeof entry->function];
        memcpy(function, entry->function, sizeof function);
        if (collect(agent, i, &list)) {
            list->status = status;
            snprintf(list->text, sizeof list->text, "%s() on worker \"%s\": %s", function,
                     td__worker_name_of(agent, list->to), text);
        }
    }
    pthread_mutex_unlock(&agent->calls_lock);
    fail_collected(agent, list, false);
}

void td__calls_expire(struct td__rpc_agent *agent)
{
    struct failed_call *list = NULL;
    int64_t now = td__now_ns();
    td__deadline next = TD__NEVER;
    pthread_mutex_lock(&agent->calls_lock);
    for (uint32_t i = 0; i < agent->pending_capacity; i++) {
        struct td__pending *entry = entry_at(agent, i);
        if (!entry->future)
            continue;
        if (entry->deadline > now) {
            next = td__deadline_earlier(next, entry->deadline);
            continue;
        }
        char function[sizeof entry->function];
        int64_t timeout_ms = entry->timeout_ms;
        memcpy(function, entry->function, sizeof function);
        if (collect(agent, i, &list)) {
            list->status = TD_ERR_TIMEOUT;
            snprintf(list->text, sizeof list->text,
                     "%s() on worker \"%s\" has not answered within %lld ms", function,
                     td__worker_name_of(agent, list->to), (long long)timeout_ms);
        }
    }
    agent->next_deadline = next;
    td__io_set_deadline(agent, next);
    pthread_mutex_unlock(&agent->calls_lock);
    fail_collected(agent, list, true);
}

/* ---- The public functions -------------------------------------------------------------------- */

static td_status check_call(const char *call, const char *function, const td_value *args,
                            const td_rpc_call_options *options)
{
    if (!function || !args)
        return td__fail_null(call);
    if (args->kind != TD_VALUE_LIST)
        return td_fail(TD_ERR_INVALID, "%s: the arguments of %s() are a %s, not a list: TD_ARGS()",
                       call, function, td_value_kind_name(args->kind));
    if (options->kwargs && options->kwargs->kind != TD_VALUE_MAP)
        return td_fail(TD_ERR_INVALID, "%s: the named arguments of %s() are a %s, not a map", call,
                       function, td_value_kind_name(options->kwargs->kind));
    if (options->timeout_ms < 0)
        return td_fail(TD_ERR_INVALID, "%s: a timeout of %lld ms", call,
                       (long long)options->timeout_ms);
    TD_TRY(td__check_reserved(call, options->reserved));
    int depth = td__current_call ? td__current_call->depth + 1 : 0;
    return depth < TD_RPC_MAX_NESTING
               ? TD_OK
               : td_fail(TD_ERR_INVALID, "%s: calls are nested deeper than %d", call,
                         TD_RPC_MAX_NESTING);
}

static td_status put_call(struct td__message *message, const char *function, const td_value *args,
                          const td_value *kwargs)
{
    td__buffer_put_string(&message->bytes, function, strlen(function));
    size_t at = message->bytes.size;
    td__buffer_put_u32(&message->bytes, 0);
    if (args->count)
        TD_TRY(td__message_put(message, args));
    if (message->bytes.failed)
        return td__fail_nomem("rpc");
    td__store_u32(message->bytes.data + at, (uint32_t)(message->bytes.size - at - 4));
    return kwargs ? td__message_put(message, kwargs) : TD_OK;
}

td_future *td__call_start(struct td__rpc_agent *agent, const char *call, int to,
                          const char *function, td_value *args, const td_rpc_call_options *options)
{
    td_rpc_call_options none = {0};
    struct td__begun begun;
    options = options ? options : &none;
    int64_t timeout_ms = options->timeout_ms ? options->timeout_ms : agent->timeout_ms;
    if (check_call(call, function, args, options) || !td__worker_get(agent, to) ||
        td__call_begin(agent, to, strncmp(function, "td.", 3) ? function : call, timeout_ms,
                       &begun))
        return NULL;
    struct td__rpc_link *link = begun.link;
    if (link)
        td__io_ring_early(link);
    bool near = to != agent->rank && td__worker_is_near(agent, to);
    struct td__message *message = td__message_create(agent, to, near);
    if (message) {
        message->records = td__current_context;
        message->request = true;
        message->busy = begun.busy;
    }
    struct td__message_header header = {
        .kind = TD__MESSAGE_REQUEST,
        .context = td__current_context,
        .copy = options->copy,
        .depth = (uint16_t)(td__current_call ? td__current_call->depth + 1 : 0),
        .id = begun.id,
        .timeout_ms = timeout_ms > UINT32_MAX ? UINT32_MAX : (uint32_t)timeout_ms};
    td_status status = message ? put_call(message, function, args, options->kwargs) : TD_ERR_NOMEM;
    if (!status)
        status = td__message_seal(message, &header, agent->max_message);
    if (status) {
        td__message_free(message);
        td__call_fail(agent, to, begun.id, status, td__error_text());
        td_fail(status, "%s: %s(): %s", call, function, td__error_text());
        td_future_release(begun.future);
        begun.future = NULL;
    } else if (link) {
        td__link_send(link, message);
    } else {
        td__agent_send(agent, to, message);
    }
    td__link_release(link);
    return begun.future;
}

/* Starts a call to the worker of a name; one reference. */
static td_future *start(const char *call, const char *to, const char *function, td_value *args,
                        const td_rpc_call_options *options)
{
    struct td__rpc_agent *agent = td__agent_enter(call);
    if (!agent)
        return NULL;
    int rank = td__worker_rank(agent, to);
    td_future *future = rank < 0 ? NULL
                                 : td__call_start(agent, call, rank, function, args, options);
    td__agent_leave(agent);
    return future;
}

td_future *td_rpc_async(const char *to, const char *function, td_value *args,
                        const td_rpc_call_options *options)
{
    return td__future_adopt(start(__func__, to, function, args, options));
}

td_value *td_rpc_sync(const char *to, const char *function, td_value *args,
                      const td_rpc_call_options *options)
{
    return td__future_take(start(__func__, to, function, args, options));
}
