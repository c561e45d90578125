/* Backward passes over several workers.
 *
 *     expect      the worker that calls td_dist_backward() walks its graph from the roots, and asks the sender of each recv
 *                 node that it meets to expect gradients; the sender walks its own graph from the send node, and so on.
 *                 A worker answers when all that it has asked have answered: then all know what will come
 *     run         all workers that take part run their passes. A recv node sends its gradients to the sender of the
 *                 message, which feeds them to its pass
 *
 * So a message whose tensors take no part in the loss is not waited for. */
#include "autograd/engine.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "rpc/grad_context.h"

#include <tandem/dist_autograd.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NOTICE_MS = 3000, /* until it is known here that a worker has died or left */
    LOOK_NS = 1000000,
};

/* The pass of a context on this worker. With the context's lock held, except `pass` in the thread that runs it. */
struct td__dist_pass {
    uint64_t number;
    struct td__grad_context *context;
    struct td__pass *pass;
    struct td__grad_place place; /* the context, for parameters of td_ddp() */
    bool running;
    td_future **sent; /* gradients that were sent */
    int sent_count, sent_capacity;
    uint64_t *expected; /* messages */
    int expected_count, expected_capacity;
};

static td_status accumulate(void *arg, td_tensor *leaf, td_tensor *grad)
{
    struct td__dist_pass *pass = arg;
    TD_TRY(td__context_accumulate(pass->context, leaf, grad));
    return td__leaf_observe(leaf, &pass->place);
}

static td_tensor *get_grad(void *context, td_tensor *leaf)
{
    return td__context_grad(context, leaf);
}

static td_status replace_grad(void *context, td_tensor *leaf, td_tensor *grad)
{
    return td__context_replace(context, leaf, grad);
}

/* ---- Expecting ------------------------------------------------------------------------------- */

/* The pass `number` of a context, made if there is none; TD_ERR_STATE if there is another one. With the lock held. */
static td_status find_pass(struct td__rpc_agent *agent, struct td__grad_context *context,
                           uint64_t number, bool retain_graph, struct td__dist_pass **pass_out)
{
    struct td__dist_pass *pass = context->pass;
    if (pass && pass->number != number)
        return td_fail(TD_ERR_STATE, "a backward pass of this context is running");
    if (!pass) {
        pass = calloc(1, sizeof *pass);
        if (!pass)
            return td__fail_nomem("backward");
        struct td__pass_options options = {.retain_graph = retain_graph,
                                           .outermost = true,
                                           .sink = {.accumulate = accumulate, .arg = pass}};
        pass->number = number;
        pass->context = context;
        pass->place = (struct td__grad_place){.context = context->id,
                                              .deadline = TD__NEVER,
                                              .timeout_ms = agent->timeout_ms,
                                              .get = get_grad,
                                              .replace = replace_grad,
                                              .arg = context};
        td_status status = td__pass_open(&options, &pass->pass);
        if (status) {
            free(pass);
            return status;
        }
        context->pass = pass;
    }
    *pass_out = pass;
    return TD_OK;
}

/* Expects the gradients of a message, once. */
static td_status expect(struct td__dist_pass *pass, uint64_t message)
{
    for (int i = 0; i < pass->expected_count; i++)
        if (pass->expected[i] == message)
            return TD_OK;
    struct td_node *node = td__context_sent(pass->context, message);
    if (!node)
        return td_fail(TD_ERR_STATE, "the graph of a message is not there any more");
    if (pass->running)
        return td_fail(TD_ERR_STATE, "a backward pass has begun to run");
    if (pass->expected_count == pass->expected_capacity) {
        int capacity = pass->expected_capacity ? 2 * pass->expected_capacity : 8;
        uint64_t *expected = realloc(pass->expected, sizeof *expected * (size_t)capacity);
        if (!expected)
            return td__fail_nomem("backward");
        pass->expected = expected;
        pass->expected_capacity = capacity;
    }
    pass->expected[pass->expected_count++] = message;
    for (int i = 0; i < node->output_count; i++)
        TD_TRY(td__pass_expect(pass->pass, node, i, 1));
    return TD_OK;
}

/* The messages of new recv nodes in the pass that came from one worker, as a list in the scope; NULL: none. *from is the
 * worker. With the lock held. */
static td_value *next_senders(struct td__dist_pass *pass, int *from)
{
    td_value *list = NULL;
    struct td_node *node;
    int cursor = 0;
    *from = -1;
    while ((node = td__pass_next_node(pass->pass, &td__recv_function, &cursor))) {
        struct td__recv_data *data = node->data;
        if (data->expected == pass->number || (*from >= 0 && data->from != *from))
            continue;
        *from = data->from;
        data->expected = pass->number;
        if (!list)
            list = td__value_adopt(td__value_create(TD_VALUE_LIST, 0));
        td_value *item = td__value_create(TD_VALUE_INT, 0);
        if (item)
            item->integer = (int64_t)data->message;
        if (!list || !item || !td__value_append(list, NULL, item)) {
            td_value_release(item);
            return NULL;
        }
    }
    return list;
}

/* Asks the senders of all new recv nodes to expect gradients. *futures (owned by the caller) are their answers. */
static td_status ask_senders(struct td__rpc_agent *agent, struct td__dist_pass *pass,
                             bool retain_graph, td_future ***futures, int *count)
{
    struct td__grad_context *context = pass->context;
    TD_SCOPE;
    for (int from;;) {
        pthread_mutex_lock(&context->lock);
        td_value *messages = next_senders(pass, &from);
        pthread_mutex_unlock(&context->lock);
        if (from < 0)
            return TD_OK;
        if (!messages)
            return TD_ERR_NOMEM;
        td_value *args = TD_ARGS((int64_t)context->id, (int64_t)pass->number, messages,
                                 td_value_from_bool(retain_graph));
        td_future *future = args ? td__call_start(agent, "td_dist_backward", from, "td.expect",
                                                  args, NULL)
                                 : NULL;
        td_future **more = future ? realloc(*futures, sizeof *more * (size_t)(*count + 1)) : NULL;
        if (!more) {
            td_future_release(future);
            return td__error_status() ? td__error_status() : td__fail_nomem("backward");
        }
        *futures = more;
        more[(*count)++] = future;
    }
}

static void release_all(td_future **futures, int count)
{
    for (int i = 0; i < count; i++)
        td_future_release(futures[i]);
    free(futures);
}

/* Adds the ranks of a list to those that take part. */
static td_status join(const td_value *list, struct td__rank_set *part, int limit)
{
    for (int64_t i = 0; i < td_value_count(list); i++) {
        int64_t rank = list->items[i]->kind == TD_VALUE_INT ? list->items[i]->integer : -1;
        if (rank >= 0 && rank < limit && !td__rank_set_add(part, (int)rank))
            return td__fail_nomem("backward");
    }
    return TD_OK;
}

/* The answer to td.expect: this worker, and those which the senders that it has asked have named. */
static td_value *name_participants(td_future *all, void *arg)
{
    (void)arg;
    struct td__rpc_agent *agent = td__agent_hold();
    td_value *answers = td_future_wait(all, 0);
    struct td__rank_set part = {0};
    td_status status = agent && answers ? TD_OK : TD_ERR_STATE;
    for (int64_t i = 0; !status && i < td_value_count(answers); i++)
        status = join(td_value_at(answers, i), &part, agent->limit);
    if (!status && !td__rank_set_add(&part, agent->rank))
        status = td__fail_nomem("backward");
    td_value *list = status ? NULL : td__value_adopt(td__value_new_list(part.count));
    for (int i = 0; list && i < part.count; i++) {
        td_value *item = td__value_create(TD_VALUE_INT, 0);
        if (item)
            item->integer = part.at[i];
        if (!item || !td__value_append(list, NULL, item)) {
            td_value_release(item);
            list = NULL;
        }
    }
    td__rank_set_free(&part);
    td__agent_leave(agent);
    return list;
}

static struct td__grad_context *find_context(struct td__rpc_agent *agent, int64_t id)
{
    struct td__grad_context *context = td__context_find(agent, (uint64_t)id, false);
    if (!context)
        td_fail(TD_ERR_ABORTED, "the context %lld has ended on worker \"%s\"", (long long)id,
                agent->name);
    return context;
}

/* td.expect(context: int, pass: int, messages: list, retain_graph: bool): the ranks that take part. */
static td_value *serve_expect(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct td__rpc_agent *agent = call->agent;
    struct td__grad_context *context = find_context(agent, args[0]->integer);
    struct td__dist_pass *pass = NULL;
    td_future **futures = NULL;
    int future_count = 0;
    if (!context)
        return NULL;
    td__current_context = 0;
    pthread_mutex_lock(&context->lock);
    td_status status = find_pass(agent, context, (uint64_t)args[1]->integer, args[3]->boolean,
                                 &pass);
    for (int64_t i = 0; !status && i < args[2]->count; i++)
        status = args[2]->items[i]->kind == TD_VALUE_INT
                     ? expect(pass, (uint64_t)args[2]->items[i]->integer)
                     : td_fail(TD_ERR_INVALID, "a message id is not an integer");
    pthread_mutex_unlock(&context->lock);
    if (!status)
        status = ask_senders(agent, pass, args[3]->boolean, &futures, &future_count);
    td_value *result = NULL;
    if (!status) {
        td_future *all = td_future_all(futures, future_count);
        td_future *named = td_future_then(all, name_participants, NULL);
        result = td_value_from_future(named);
    }
    release_all(futures, future_count);
    td__context_release(context);
    return result;
}

/* ---- Running --------------------------------------------------------------------------------- */

/* A recv node: sends the gradients to the sender of the message. */
static td_status send_gradients(const struct td__recv_data *data, td_tensor *const *grads,
                                int count)
{
    struct td__rpc_agent *agent = td__agent_enter("td_dist_backward");
    if (!agent)
        return TD_ERR_STATE;
    struct td__grad_context *context = td__context_find(agent, data->context, false);
    td_status status = context ? TD_OK : td_fail(TD_ERR_STATE, "the context has ended");
    td_future *future = NULL;
    if (!status) {
        TD_SCOPE;
        td_value *list = td__gradients_list(grads, count);
        td_value *args = TD_ARGS((int64_t)data->context, (int64_t)data->message, list);
        future = args ? td__call_start(agent, "td_dist_backward", data->from, "td.gradient", args,
                                       NULL)
                      : NULL;
        status = future ? TD_OK : td__error_status();
    }
    if (!status) {
        pthread_mutex_lock(&context->lock);
        struct td__dist_pass *pass = context->pass;
        if (pass && pass->sent_count == pass->sent_capacity) {
            int capacity = pass->sent_capacity ? 2 * pass->sent_capacity : 8;
            td_future **sent = realloc(pass->sent, sizeof *sent * (size_t)capacity);
            pass->sent = sent ? sent : pass->sent;
            pass->sent_capacity = sent ? capacity : pass->sent_capacity;
        }
        if (pass && pass->sent_count < pass->sent_capacity)
            pass->sent[pass->sent_count++] = td_future_retain(future);
        pthread_mutex_unlock(&context->lock);
    }
    td_future_release(future);
    td__context_release(context);
    td__agent_leave(agent);
    return status;
}

/* td.gradient(context: int, message: int, grads: list): feeds the pass. */
static td_value *serve_gradient(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct td__grad_context *context = find_context(call->agent, args[0]->integer);
    if (!context)
        return NULL;
    pthread_mutex_lock(&context->lock);
    struct td_node *node = td__context_sent(context, (uint64_t)args[1]->integer);
    if (node)
        td__node_retain(node);
    pthread_mutex_unlock(&context->lock);
    /* Without the lock, since this waits for a device. */
    td_status status = node ? td__gradients_move(call->agent, node, args[2]) : TD_OK;
    pthread_mutex_lock(&context->lock);
    if (status || !context->pass || !node || args[2]->count != node->output_count)
        status = status ? status : td_fail(TD_ERR_STATE, "no backward pass expects this gradient");
    for (int i = 0; !status && i < node->output_count; i++) {
        const td_value *item = args[2]->items[i];
        status = td__pass_feed(context->pass->pass, node, i, 0,
                               item->kind == TD_VALUE_TENSOR ? item->tensor : NULL);
    }
    pthread_mutex_unlock(&context->lock);
    td__node_release(node);
    td__context_release(context);
    return status ? NULL : td_value_nil();
}

static void free_pass(struct td__dist_pass *pass)
{
    if (!pass)
        return;
    release_all(pass->sent, pass->sent_count);
    free(pass->expected);
    free(pass);
}

/* Runs the pass of a context to its end, and frees it. */
static td_status run_pass(struct td__rpc_agent *agent, struct td__grad_context *context,
                          uint64_t number, td__deadline deadline)
{
    pthread_mutex_lock(&context->lock);
    struct td__dist_pass *pass = context->pass;
    bool there = pass && pass->number == number && !pass->running;
    if (there)
        pass->running = true;
    pthread_mutex_unlock(&context->lock);
    if (!there)
        return td_fail(TD_ERR_STATE, "there is no such backward pass");
    uint64_t outer = td__current_context;
    td__current_context = 0;
    pass->place.deadline = deadline;
    td_status status = td__pass_start(pass->pass);
    if (!status) {
        bool waits = td__io_begin_wait(agent);
        status = td__pass_run(pass->pass, deadline);
        if (waits)
            td__io_end_wait(agent);
    }
    for (int i = 0; i < pass->sent_count && !status; i++) {
        TD_SCOPE;
        if (!td_future_wait(pass->sent[i], 0))
            status = td__error_status();
    }
    struct td__error error;
    td__error_save(&error);
    pthread_mutex_lock(&context->lock);
    context->pass = NULL;
    pthread_mutex_unlock(&context->lock);
    td__pass_close(pass->pass);
    if (status)
        td__context_lost(context->id, agent->timeout_ms);
    free_pass(pass);
    td__current_context = outer;
    return status ? td__error_restore(&error) : TD_OK;
}

/* td.backward(context: int, pass: int): runs the pass. */
static td_value *serve_backward(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct td__grad_context *context = find_context(call->agent, args[0]->integer);
    td_status status = context ? run_pass(call->agent, context, (uint64_t)args[1]->integer,
                                          call->deadline)
                               : TD_ERR_ABORTED;
    td__context_release(context);
    return status ? NULL : td_value_nil();
}

/* Ends the pass of a context after a failure elsewhere. */
static void fail_pass(struct td__grad_context *context, uint64_t number, td_status status,
                      const char *text)
{
    struct td__dist_pass *unused = NULL;
    pthread_mutex_lock(&context->lock);
    struct td__dist_pass *pass = context->pass;
    if (pass && pass->number == number && pass->running) {
        td__pass_fail(pass->pass, td_fail(status, "%s", text));
    } else if (pass && pass->number == number) {
        context->pass = NULL;
        unused = pass;
    }
    pthread_mutex_unlock(&context->lock);
    if (unused) {
        td__pass_close(unused->pass);
        td__context_lost(context->id, unused->place.timeout_ms);
    }
    free_pass(unused);
}

/* A context ends while its pass runs or waits to run: its worker has gone, or td.context_end has overtaken
 * td.backward_fail. */
static void end_pass(struct td__grad_context *context, td_status status, const char *why)
{
    pthread_mutex_lock(&context->lock);
    uint64_t number = context->pass ? context->pass->number : 0;
    pthread_mutex_unlock(&context->lock);
    if (number)
        fail_pass(context, number, status, why);
}

/* td.backward_fail(context: int, pass: int, text: text). */
static td_value *serve_fail(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct td__grad_context *context = find_context(call->agent, args[0]->integer);
    if (!context)
        return NULL;
    fail_pass(context, (uint64_t)args[1]->integer, TD_ERR_ABORTED, td_value_text(args[2]));
    td__context_release(context);
    return td_value_nil();
}

/* td.context_end(context: int). */
static td_value *serve_end(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    td__context_end(call->agent, (uint64_t)args[0]->integer);
    return td_value_nil();
}

/* ---- The worker that calls td_dist_backward() -------------------------------------------------- */

static td_status seed(struct td__dist_pass *pass, td_tensor *const *roots, int count)
{
    for (int i = 0; i < count; i++) {
        td_tensor *root = roots[i];
        if (!root)
            return td__fail_null("td_dist_backward");
        TD_TRY(td__refresh_node(root, "td_dist_backward"));
        if (!root->node || root->layout.numel != 1)
            return td_fail(TD_ERR_INVALID, "td_dist_backward: root %d, of shape %s, %s", i,
                           td__shape_of(root),
                           root->node ? "has not one element" : "does not require grad");
        TD_SCOPE;
        td_tensor *one = td_full(root->layout.shape, root->layout.ndim, 1, root->layout.dtype,
                                 root->storage->device);
        if (!one)
            return td__error_status();
        TD_TRY(td__pass_seed(pass->pass, root->node, root->output_nr, one));
    }
    return TD_OK;
}

/* Takes over the error of a call that has failed, unless an earlier one names the cause: a worker that has gone makes
 * calls to others fail as well. */
static void note_failure(td_status *status, struct td__error *error)
{
    if (*status == TD_ERR_PEER)
        return;
    *status = td__error_status();
    td__error_save(error);
}

/* Waits for all futures; the result is the failure that names the cause. Joins their answers, where `part` is not
 * NULL. */
static td_status await(td_future **futures, int count, struct td__rank_set *part, int limit)
{
    td_status status = TD_OK;
    struct td__error error;
    for (int i = 0; i < count; i++) {
        TD_SCOPE;
        td_value *answer = td_future_wait(futures[i], 0);
        bool joined = answer && (!part || !join(answer, part, limit));
        if (!joined)
            note_failure(&status, &error);
    }
    return status ? td__error_restore(&error) : TD_OK;
}

static td_future *start_on(struct td__rpc_agent *agent, int rank, const char *function,
                           uint64_t context, uint64_t number, const char *text)
{
    TD_SCOPE;
    td_value *args = text ? TD_ARGS((int64_t)context, (int64_t)number, text)
                          : TD_ARGS((int64_t)context, (int64_t)number);
    return args ? td__call_start(agent, "td_dist_backward", rank, function, args, NULL) : NULL;
}

struct participant {
    struct td__grad_context *context; /* retained */
    uint64_t number;
};

/* A worker that takes part has finished. If it has failed, the pass here waits for gradients that never come. */
static void on_finished(td_future *finished, void *arg)
{
    struct participant *participant = arg;
    td_value *value = td__future_value(finished);
    if (!value) {
        struct td__error error;
        td__error_save(&error);
        fail_pass(participant->context, participant->number, error.status, error.text);
    }
    td_value_release(value);
    td__context_release(participant->context);
    free(participant);
}

static td_status follow(td_future *future, struct td__grad_context *context, uint64_t number)
{
    struct participant *participant = malloc(sizeof *participant);
    if (!participant)
        return td__fail_nomem("backward");
    atomic_fetch_add(&context->users, 1);
    *participant = (struct participant){.context = context, .number = number};
    td_status status = td__future_on_complete(future, on_finished, participant);
    if (status) {
        td__context_release(context);
        free(participant);
    }
    return status;
}

/* Runs the passes of all workers that take part. */
static td_status run_all(struct td__rpc_agent *agent, struct td__grad_context *context,
                         uint64_t number, const struct td__rank_set *part)
{
    td_future **futures = calloc((size_t)part->count, sizeof *futures);
    td_status status = futures ? TD_OK : td__fail_nomem("backward");
    struct td__error error;
    int count = 0;
    for (int i = 0; !status && i < part->count; i++) {
        if (part->at[i] == agent->rank)
            continue;
        futures[count] = start_on(agent, part->at[i], "td.backward", context->id, number, NULL);
        if (futures[count])
            status = follow(futures[count++], context, number);
        else
            status = td__error_status();
    }
    if (!status)
        status = run_pass(agent, context, number, td__deadline_in_ms(agent->timeout_ms));
    td__error_save(&error);
    /* What another worker has reported is the cause of a failure here. */
    for (int i = 0; i < count; i++) {
        TD_SCOPE;
        bool ask = !status || td__future_is_complete(futures[i]);
        if (ask && !td_future_wait(futures[i], 0))
            note_failure(&status, &error);
    }
    if (status)
        td__error_restore(&error);
    if (futures)
        release_all(futures, count);
    return status;
}

/* The first worker of those that take part that has gone, and how; -1: none. */
static int find_gone(struct td__rpc_agent *agent, const struct td__rank_set *part, char *why,
                     size_t size)
{
    int gone = -1;
    pthread_mutex_lock(&agent->lock);
    for (int i = 0; i < part->count && gone < 0; i++) {
        const struct td__rpc_worker *worker = td__worker(agent, part->at[i]);
        if (!worker || !worker->gone)
            continue;
        gone = part->at[i];
        snprintf(why, size, "%s", worker->why);
    }
    pthread_mutex_unlock(&agent->lock);
    return gone;
}

/* Another worker has aborted the pass, with the error at hand. If a worker that takes part has died or left, that is why,
 * and this one knows it soon. */
static td_status name_gone(struct td__rpc_agent *agent, const struct td__rank_set *part)
{
    struct td__error error;
    td__error_save(&error);
    td__deadline deadline = td__deadline_in_ms(NOTICE_MS);
    do {
        char why[256];
        int rank = find_gone(agent, part, why, sizeof why);
        if (rank >= 0)
            return td_fail(TD_ERR_PEER, "td_dist_backward: worker \"%s\" %s",
                           td__worker_name_of(agent, rank), why);
        td__sleep_ns(LOOK_NS);
    } while (!td__deadline_passed(deadline));
    return td__error_restore(&error);
}

static td_status backward(struct td__rpc_agent *agent, struct td__grad_context *context,
                          td_tensor *const *roots, int count, bool retain_graph)
{
    struct td__dist_pass *pass = NULL;
    td_future **futures = NULL;
    int asked = 0;
    uint64_t number = td__rref_new_id(agent);
    struct td__rank_set part = {0};
    pthread_mutex_lock(&context->lock);
    td_status status = context->pass ? td_fail(TD_ERR_STATE, "td_dist_backward: a backward pass of "
                                                             "this context is running")
                                     : find_pass(agent, context, number, retain_graph, &pass);
    if (!status)
        status = seed(pass, roots, count);
    pthread_mutex_unlock(&context->lock);
    if (!status)
        status = ask_senders(agent, pass, retain_graph, &futures, &asked);
    if (!status)
        status = await(futures, asked, &part, agent->limit);
    if (!status)
        status = run_all(agent, context, number, &part);
    if (status == TD_ERR_ABORTED)
        status = name_gone(agent, &part);
    if (status && pass) {
        struct td__error error;
        td__error_save(&error);
        struct td__rank_set reaches = td__context_reaches(context);
        for (int i = 0; i < part.count; i++)
            td__rank_set_add(&reaches, part.at[i]);
        for (int i = 0; i < reaches.count; i++)
            if (reaches.at[i] != agent->rank)
                td_future_release(start_on(agent, reaches.at[i], "td.backward_fail", context->id,
                                           number, error.text));
        td__rank_set_free(&reaches);
        fail_pass(context, number, error.status, error.text);
        td__error_restore(&error);
    }
    release_all(futures, asked);
    td__rank_set_free(&part);
    return status;
}

td_status td_dist_backward(uint64_t id, td_tensor *const *roots, int count,
                           const td_backward_options *options)
{
    if (!roots || count < 1)
        return td_fail(TD_ERR_INVALID, "td_dist_backward: there are no roots");
    if (options)
        TD_TRY(td__check_reserved(__func__, options->reserved));
    struct td__rpc_agent *agent = td__agent_enter(__func__);
    if (!agent)
        return TD_ERR_STATE;
    struct td__grad_context *context = td__context_find(agent, id, false);
    td_status status = context
                           ? TD_OK
                           : td_fail(TD_ERR_INVALID, "td_dist_backward: there is no context %llu",
                                     (unsigned long long)id);
    uint64_t outer = td__current_context;
    td__current_context = 0;
    if (!status)
        status = backward(agent, context, roots, count, options && options->retain_graph);
    td__current_context = outer;
    td__context_release(context);
    td__agent_leave(agent);
    return status;
}

/* ---- Functions ------------------------------------------------------------------------------- */

td_status td__dist_autograd_register(void)
{
    td__on_recv_backward = send_gradients;
    td__on_context_end = end_pass;
    TD_TRY(td__rpc_register_own(
        "td.expect(context: int, pass: int, messages: list, retain_graph: bool)", serve_expect));
    TD_TRY(td__rpc_register_own("td.gradient(context: int, message: int, grads: list)",
                                serve_gradient));
    TD_TRY(td__rpc_register_own("td.backward(context: int, pass: int)", serve_backward));
    TD_TRY(
        td__rpc_register_own("td.backward_fail(context: int, pass: int, text: text)", serve_fail));
    return td__rpc_register_own("td.context_end(context: int)", serve_end);
}
