/* Contexts of distributed autograd; see grad_context.h. */
#include "rpc/grad_context.h"

#include "autograd/engine.h"
#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status (*td__on_recv_backward)(const struct td__recv_data *data, td_tensor *const *grads,
                                  int count);

void (*td__on_context_end)(struct td__grad_context *context, td_status status, const char *why);

/* ---- Nodes ----------------------------------------------------------------------------------- */

static td_status send_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    for (int i = 0; i < node->input_count; i++)
        grad_inputs[i] = grad_outputs[i];
    return TD_OK;
}

static td_status recv_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)grad_inputs;
    return td__on_recv_backward
               ? td__on_recv_backward(td_node_data(node), grad_outputs, node->output_count)
               : td_fail(TD_ERR_STATE,
                         "td_backward: the graph leads to another worker; td_dist_backward() "
                         "follows it");
}

const td_function td__send_function = {.name = "rpc send", .backward = send_backward};
const td_function td__recv_function = {.name = "rpc recv", .backward = recv_backward};

struct sent {
    struct td__map_node node;
    uint64_t message;
    struct td_node *graph; /* retained */
};

struct leaf_grad {
    struct td__map_node node;
    td_tensor *leaf; /* retained */
    td_tensor *grad;
};

/* ---- Contexts -------------------------------------------------------------------------------- */

static struct td__grad_context *make_context(uint64_t id)
{
    struct td__grad_context *context = calloc(1, sizeof *context);
    if (!context) {
        td__fail_nomem("context");
        return NULL;
    }
    context->id = id;
    context->node.key = (const char *)&context->id;
    context->node.key_size = sizeof context->id;
    atomic_init(&context->users, 1);
    pthread_mutex_init(&context->lock, NULL);
    return context;
}

struct td__grad_context *td__context_find(struct td__rpc_agent *agent, uint64_t id, bool add)
{
    pthread_mutex_lock(&agent->context_lock);
    struct td__map_node *node = td__map_find(&agent->contexts, (const char *)&id, sizeof id);
    struct td__grad_context *context = node ? TD__CONTAINER(node, struct td__grad_context, node)
                                            : NULL;
    if (!context && add) {
        context = make_context(id);
        if (context && !td__map_insert(&agent->contexts, &context->node)) {
            td__context_release(context);
            context = NULL;
            td__fail_nomem("context");
        }
    }
    if (context)
        atomic_fetch_add(&context->users, 1);
    pthread_mutex_unlock(&agent->context_lock);
    return context;
}

void td__context_release(struct td__grad_context *context)
{
    struct td__map_node *node;
    if (!context || atomic_fetch_sub(&context->users, 1) != 1)
        return;
    while ((node = td__map_next(&context->sends, NULL))) {
        struct sent *sent = TD__CONTAINER(node, struct sent, node);
        td__map_remove(&context->sends, node);
        td__node_release(sent->graph);
        free(sent);
    }
    while ((node = td__map_next(&context->grads, NULL))) {
        struct leaf_grad *entry = TD__CONTAINER(node, struct leaf_grad, node);
        td__map_remove(&context->grads, node);
        td_tensor_release(entry->leaf);
        td_tensor_release(entry->grad);
        free(entry);
    }
    td__map_free(&context->sends);
    td__map_free(&context->grads);
    pthread_mutex_destroy(&context->lock);
    td__rank_set_free(&context->workers);
    td__rank_set_free(&context->callers);
    free(context);
}

struct td__rank_set td__context_reaches(struct td__grad_context *context)
{
    struct td__rank_set reaches = {0};
    pthread_mutex_lock(&context->lock);
    for (int i = 0; i < context->workers.count; i++)
        td__rank_set_add(&reaches, context->workers.at[i]);
    pthread_mutex_unlock(&context->lock);
    return reaches;
}

/* Tells a worker that a context has ended. The answer is not needed. */
static void send_end(struct td__rpc_agent *agent, int rank, uint64_t id)
{
    uint64_t outer = td__current_context;
    td__current_context = 0;
    TD_SCOPE;
    td_value *args = TD_ARGS((int64_t)id);
    if (args)
        td_future_release(td__call_start(agent, "rpc", rank, "td.context_end", args, NULL));
    td__current_context = outer;
}

void td__context_lost(uint64_t id, int64_t timeout_ms)
{
    void (*lost)(uint64_t, int64_t) = atomic_load(&td__on_context_lost);
    if (lost)
        lost(id, timeout_ms);
}

static void end_context(struct td__rpc_agent *agent, uint64_t id, td_status status, const char *why)
{
    pthread_mutex_lock(&agent->context_lock);
    struct td__map_node *node = td__map_find(&agent->contexts, (const char *)&id, sizeof id);
    if (node)
        td__map_remove(&agent->contexts, node);
    pthread_mutex_unlock(&agent->context_lock);
    if (!node)
        return;
    struct td__grad_context *context = TD__CONTAINER(node, struct td__grad_context, node);
    if (td__on_context_end)
        td__on_context_end(context, status, why);
    td__context_lost(id, agent->timeout_ms);
    struct td__rank_set reaches = td__context_reaches(context);
    for (int i = 0; i < reaches.count; i++)
        if (reaches.at[i] != agent->rank)
            send_end(agent, reaches.at[i], id);
    td__rank_set_free(&reaches);
    td__context_release(context);
}

void td__context_end(struct td__rpc_agent *agent, uint64_t id)
{
    end_context(agent, id, TD_ERR_ABORTED, "the context has ended");
}

/* A worker has gone: whether a context is to end. */
static bool is_lost(struct td__rpc_agent *agent, struct td__grad_context *context, int rank)
{
    int beginner = td__id_rank(context->id);
    if (rank < 0 || beginner == rank)
        return true;
    pthread_mutex_lock(&context->lock);
    bool was_last = td__rank_set_remove(&context->callers, rank) && !context->callers.count;
    pthread_mutex_unlock(&context->lock);
    return was_last && beginner != agent->rank;
}

void td__contexts_lost(struct td__rpc_agent *agent, int rank)
{
    char why[512] = "this worker shuts down";
    if (rank >= 0) {
        pthread_mutex_lock(&agent->lock);
        snprintf(why, sizeof why, "worker \"%s\" %s", td__worker_name_of(agent, rank),
                 td__worker(agent, rank)->why);
        pthread_mutex_unlock(&agent->lock);
    }
    for (;;) {
        uint64_t id = 0;
        pthread_mutex_lock(&agent->context_lock);
        for (struct td__map_node *node = td__map_next(&agent->contexts, NULL); node && !id;
             node = td__map_next(&agent->contexts, node)) {
            struct td__grad_context *context = TD__CONTAINER(node, struct td__grad_context, node);
            if (is_lost(agent, context, rank))
                id = context->id;
        }
        pthread_mutex_unlock(&agent->context_lock);
        if (!id)
            break;
        end_context(agent, id, rank < 0 ? TD_ERR_ABORTED : TD_ERR_PEER, why);
    }
    pthread_mutex_lock(&agent->context_lock);
    if (!agent->contexts.size)
        td__map_free(&agent->contexts);
    pthread_mutex_unlock(&agent->context_lock);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static td_status add_send(struct td__grad_context *context, uint64_t message, struct td_node *graph,
                          int to)
{
    struct sent *sent = calloc(1, sizeof *sent);
    if (!sent)
        return td__fail_nomem("context");
    sent->message = message;
    sent->graph = graph;
    sent->node.key = (const char *)&sent->message;
    sent->node.key_size = sizeof sent->message;
    pthread_mutex_lock(&context->lock);
    bool added = td__rank_set_add(&context->workers, to) &&
                 td__map_insert(&context->sends, &sent->node);
    pthread_mutex_unlock(&context->lock);
    if (added)
        return TD_OK;
    free(sent);
    return td__fail_nomem("context");
}

td_status td__context_send(struct td__message *message, struct td__message_header *header)
{
    struct td__rpc_agent *agent = message->agent;
    struct td__grad_context *context = td__context_find(agent, header->context, false);
    struct td_node *graph = NULL;
    if (!context) { /* it has ended meanwhile */
        header->context = 0;
        return TD_OK;
    }
    pthread_mutex_lock(&context->lock);
    bool noted = td__rank_set_add(&context->workers, message->to);
    pthread_mutex_unlock(&context->lock);
    td_node_spec spec = {.more_inputs = message->recorded, .input_count = message->recorded_count};
    td_status status = !noted ? td__fail_nomem("context")
                       : message->recorded_count
                           ? td__node_make(&td__send_function, message->recorded_count, &spec,
                                           &graph)
                           : TD_OK;
    if (!status && graph) {
        for (int i = 0; i < message->recorded_count; i++)
            td__node_describe(graph, i, message->recorded[i]);
        header->message = td__rref_new_id(agent);
        status = add_send(context, header->message, graph, message->to);
        if (status)
            td__node_release(graph);
    }
    td__context_release(context);
    return status;
}

/* Also if the worker has gone meanwhile, and td__contexts_lost() was called before. */
static void add_caller(struct td__rpc_agent *agent, struct td__grad_context *context, int rank)
{
    pthread_mutex_lock(&context->lock);
    td__rank_set_add(&context->callers,
                     rank); /* without memory, the context ends with its worker */
    pthread_mutex_unlock(&context->lock);
    pthread_mutex_lock(&agent->lock);
    bool gone = td__worker(agent, rank)->gone;
    pthread_mutex_unlock(&agent->lock);
    if (gone)
        td__contexts_lost(agent, rank);
}

td_status td__context_receive(struct td__incoming *incoming)
{
    struct td__rpc_agent *agent = incoming->agent;
    const struct td__message_header *header = &incoming->header;
    bool request = header->kind == TD__MESSAGE_REQUEST;
    if (!header->context)
        return TD_OK;
    struct td__grad_context *context = td__context_find(agent, header->context, request);
    if (!context && request)
        return TD_ERR_NOMEM;
    if (!context) { /* the call has outlived it: the other worker frees its own */
        if (incoming->from != agent->rank)
            send_end(agent, incoming->from, header->context);
        return TD_OK;
    }
    if (request)
        add_caller(agent, context, incoming->from);
    td__context_release(context);
    if (!header->message || !incoming->recorded_count)
        return TD_OK;
    struct td__recv_data data = {
        .context = header->context, .message = header->message, .from = incoming->from};
    struct td_node *node = td__node_create(&td__recv_function, 0, (int)incoming->recorded_count, 0,
                                           sizeof data);
    if (!node)
        return TD_ERR_NOMEM;
    memcpy(node->data, &data, sizeof data);
    for (uint32_t i = 0, k = 0; i < header->tensors; i++) {
        td_tensor *tensor = incoming->tensors[i];
        if (!incoming->recorded[i])
            continue;
        td__node_attach(node, (int)k++, tensor);
        atomic_store(&tensor->history, atomic_load(&tensor->storage->history));
    }
    td__node_release(node);
    return TD_OK;
}

struct td_node *td__context_sent(struct td__grad_context *context, uint64_t message)
{
    struct td__map_node *node = td__map_find(&context->sends, (const char *)&message,
                                             sizeof message);
    return node ? TD__CONTAINER(node, struct sent, node)->graph : NULL;
}

/* ---- Gradients ------------------------------------------------------------------------------- */

/* A hook of the program expects the gradient in the leaf. */
static bool has_accumulated_hook(const td_tensor *leaf)
{
    const struct td__hook *hook = leaf->node ? leaf->node->outputs[0].hooks : NULL;
    while (hook && !hook->accumulated_hook)
        hook = hook->next;
    return hook;
}

/* The entry of a leaf, made if there is none; NULL without memory. With the lock held. */
static struct leaf_grad *find_leaf(struct td__grad_context *context, td_tensor *leaf)
{
    struct td__map_node *node = td__map_find(&context->grads, (const char *)&leaf, sizeof leaf);
    if (node)
        return TD__CONTAINER(node, struct leaf_grad, node);
    struct leaf_grad *entry = calloc(1, sizeof *entry);
    if (entry) {
        entry->leaf = leaf;
        entry->node.key = (const char *)&entry->leaf;
        entry->node.key_size = sizeof entry->leaf;
    }
    if (!entry || !td__map_insert(&context->grads, &entry->node)) {
        free(entry);
        td__fail_nomem("context");
        return NULL;
    }
    td_tensor_retain(leaf);
    return entry;
}

td_status td__context_accumulate(struct td__grad_context *context, td_tensor *leaf, td_tensor *grad)
{
    if (has_accumulated_hook(leaf))
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "td_dist_backward: a leaf of shape %s has an accumulated hook, which expects "
            "its gradient in td_tensor_grad(); use td_dist_autograd_grad() after the pass",
            td__shape_of(leaf));
    pthread_mutex_lock(&context->lock);
    struct leaf_grad *entry = find_leaf(context, leaf);
    td_status status = entry ? td__grad_add(&entry->grad, grad) : TD_ERR_NOMEM;
    pthread_mutex_unlock(&context->lock);
    return status;
}

static bool may_write(const td_tensor *grad)
{
    return grad && td__is_unshared(grad) && td__layout_is_contiguous(&grad->layout);
}

td_status td__context_replace(struct td__grad_context *context, td_tensor *leaf, td_tensor *grad)
{
    pthread_mutex_lock(&context->lock);
    struct leaf_grad *entry = find_leaf(context, leaf);
    td_tensor *own = !entry || may_write(entry->grad) ? NULL : td__clone(grad);
    td_status status = TD_OK;
    if (entry && may_write(entry->grad)) {
        status = td__tensor_copy(entry->grad, grad);
    } else if (own) {
        td_tensor_release(entry->grad);
        entry->grad = own;
    } else {
        status = TD_ERR_NOMEM;
    }
    pthread_mutex_unlock(&context->lock);
    return status;
}

td_tensor *td__context_grad(struct td__grad_context *context, td_tensor *leaf)
{
    pthread_mutex_lock(&context->lock);
    struct td__map_node *node = td__map_find(&context->grads, (const char *)&leaf, sizeof leaf);
    td_tensor *grad = node ? TD__CONTAINER(node, struct leaf_grad, node)->grad : NULL;
    td_tensor_retain(grad);
    pthread_mutex_unlock(&context->lock);
    return grad;
}

/* ---- Gradients in messages -------------------------------------------------------------------- */

td_value *td__gradients_list(td_tensor *const *grads, int count)
{
    td_value *list = td__value_adopt(td__value_new_list(count));
    for (int i = 0; list && i < count; i++) {
        td_tensor *grad = grads[i] ? td__to_host("td_dist_backward", grads[i]) : NULL;
        bool failed = grads[i] && !grad;
        td_value *item = failed ? NULL : td__value_create(grad ? TD_VALUE_TENSOR : TD_VALUE_NIL, 0);
        if (item && grad)
            item->tensor = grad;
        else
            td_tensor_release(grad);
        if (!item || !td__value_append(list, NULL, item)) {
            td_value_release(item);
            list = NULL;
        }
    }
    return list;
}

td_status td__gradients_move(struct td__rpc_agent *agent, const struct td_node *node,
                             const td_value *list)
{
    for (int i = 0; i < node->output_count && i < list->count; i++) {
        td_value *item = list->items[i];
        if (item->kind != TD_VALUE_TENSOR)
            continue;
        td_tensor *moved = td__device_move(agent, node->outputs[i].device, item->tensor);
        if (!moved)
            return td__error_status();
        td_tensor_release(item->tensor);
        item->tensor = moved;
    }
    return TD_OK;
}
