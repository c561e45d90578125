/* The engine of backward passes.
 *
 * A pass first walks the graph and counts the edges to each node. A node is ready when each of them
 * has delivered a gradient, or that there is none. It then runs and delivers the gradients of its
 * inputs. Leaves run first, then the node that was recorded last: gradients of parameters become
 * final early, in the reverse order of their use, and a node's saved tensors are freed as soon as
 * it has run.
 *
 * Nodes of a numbered device run on its worker, all others on the calling thread; each of these
 * threads has a ready queue, a heap of entries. One lock guards the pass and is not held while a
 * node computes. Gradients are accumulated in an order that does not depend on timing as long as at
 * most two from different devices meet at one tensor. */
#include "autograd/engine.h"
#include "autograd/view_base.h"

#include "base/fail.h"
#include "base/thread.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_QUEUES = 66, MAX_CLAIMS = 8 };

struct ready_queue {
    struct pass *pass;
    struct td__device *device; /* NULL: the calling thread */
    int *ready;                /* a heap of entry numbers */
    int count, capacity;
};

struct at_end {
    struct at_end *next;
    td_status (*fn)(void *arg);
    void *arg;
};

struct pass {
    struct td__walk walk;
    struct td__capture *captures;
    int capture_count;
    bool retain_graph;
    struct pass *outer; /* the pass in whose node this one runs */

    pthread_mutex_t lock; /* guards all that follows, and the entries; taken before the
                             locks of nodes */
    pthread_cond_t changed;
    struct ready_queue queues[MAX_QUEUES];
    int queue_count;
    int unfinished; /* ready or running entries */
    td_status status;
    struct td__error error; /* of the first failure */
    struct at_end *first_at_end, **last_at_end;
};

/* The node that this thread runs. */
struct running {
    struct pass *pass;
    struct td_node *claimed[MAX_CLAIMS]; /* leaves whose gradients are being written */
    int claim_count;
};
static _Thread_local struct running *running;

/* ---- Ready queues (with the lock held) ----------------------------------------------------------- */

static uint64_t priority(const struct ready_queue *queue, int number)
{
    const struct td_node *node = queue->pass->walk.entries[number].node;
    return td__node_is_leaf(node) ? UINT64_MAX : node->sequence;
}

static td_status push(struct ready_queue *queue, int number)
{
    if (queue->count == queue->capacity) {
        int capacity = queue->capacity ? queue->capacity * 2 : 16;
        int *ready = realloc(queue->ready, (size_t)capacity * sizeof *ready);
        if (!ready)
            return td__fail_nomem("td_backward");
        queue->ready = ready;
        queue->capacity = capacity;
    }
    int at = queue->count++;
    while (at > 0 && priority(queue, queue->ready[(at - 1) / 2]) < priority(queue, number)) {
        queue->ready[at] = queue->ready[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue->ready[at] = number;
    return TD_OK;
}

static int pop(struct ready_queue *queue)
{
    int top = queue->ready[0], last = queue->ready[--queue->count], at = 0;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= queue->count)
            break;
        if (child + 1 < queue->count &&
            priority(queue, queue->ready[child + 1]) > priority(queue, queue->ready[child]))
            child++;
        if (priority(queue, queue->ready[child]) <= priority(queue, last))
            break;
        queue->ready[at] = queue->ready[child];
        at = child;
    }
    queue->ready[at] = last;
    return top;
}

static struct ready_queue *queue_of(struct pass *pass, struct td__device *device)
{
    if (device->index < 0 || td__device_is_here(device))
        device = NULL;
    for (int i = 0; i < pass->queue_count; i++)
        if (pass->queues[i].device == device)
            return &pass->queues[i];
    struct ready_queue *queue = &pass->queues[pass->queue_count++];
    *queue = (struct ready_queue){.pass = pass, .device = device};
    return queue;
}

static void run_next(void *queue);

static void fail(struct pass *pass, td_status status)
{
    if (pass->status)
        return;
    pass->status = status;
    td__error_save(&pass->error);
    pass->error.status = status;
}

static void make_ready(struct pass *pass, struct td__walk_entry *entry)
{
    struct ready_queue *queue = queue_of(pass, entry->node->outputs[0].device);
    td_status status = push(queue, (int)(entry - pass->walk.entries));
    if (!status && queue->device) {
        status = td__device_submit(queue->device, run_next, queue);
        if (status)
            queue->count = 0; /* the pass has failed: drop the ready entries */
    }
    if (status)
        fail(pass, status);
    else
        pass->unfinished++;
}

/* ---- Accumulating and delivering gradients ---------------------------------------------------------------------- */

static bool may_change(const td_tensor *tensor)
{
    return atomic_load(&tensor->owners) == 1 && atomic_load(&tensor->storage->owners) == 1 &&
           !td__layout_repeats(&tensor->layout) && tensor->storage->free_fn;
}

/* Adds `grad` to *sum, in place if one of the two is not shared. */
static td_status add_up(td_tensor **sum, td_tensor *grad)
{
    if (!*sum) {
        *sum = td_tensor_retain(grad);
        return TD_OK;
    }
    const struct td__kernels *kernels = td__kernels_of(grad);
    if (may_change(*sum))
        return kernels->binary(TD__ADD, *sum, *sum, grad);
    td_tensor *both = td__empty_like(grad);
    if (!both)
        return TD_ERR_NOMEM;
    td_status status = kernels->binary(TD__ADD, both, *sum, grad);
    if (status) {
        td_tensor_release(both);
        return status;
    }
    td_tensor_release(*sum);
    *sum = both;
    return TD_OK;
}

/* Checks what a node's backward returned for one input, and sums it over broadcast dimensions. On
 * success *grad is owned. */
static td_status fit(const struct td_node *node, int input, const struct td__output *target,
                     td_tensor **grad)
{
    td_tensor *given = *grad;
    if (given->layout.dtype != target->layout.dtype || given->storage->device != target->device)
        return td_fail(TD_ERR_INVALID,
                       "td_backward: %s returned a gradient of %s on %s for its input %d, which is "
                       "%s on %s",
                       node->function->name, td_dtype_name(given->layout.dtype),
                       given->storage->device->name, input, td_dtype_name(target->layout.dtype),
                       target->device->name);
    td_tensor *fitting = td__sum_to(given, &target->layout);
    if (!fitting)
        return td_fail(TD_ERR_INVALID,
                       "td_backward: %s returned a gradient of shape %s for its input %d, of shape "
                       "%s (%s)",
                       node->function->name, td__shape_of(given), input,
                       td__shape_text(target->layout.shape, target->layout.ndim), td__error_text());
    *grad = fitting;
    return TD_OK;
}

/* Delivers the gradients of the inputs (owned, or NULL). With the lock held. */
static void deliver(struct pass *pass, struct td_node *node, td_tensor **grads, const bool *written)
{
    for (int i = 0; i < node->input_count; i++) {
        struct td__edge *edge = &node->inputs[i];
        struct td__walk_entry *target = edge->node ? td__walk_find(&pass->walk, edge->node) : NULL;
        if (target && !pass->status) {
            td_status status = grads && grads[i] ? add_up(&target->grads[edge->output_nr], grads[i])
                                                 : TD_OK;
            if (status)
                fail(pass, status);
            target->written |= written && written[i];
            if (--target->pending == 0 && !pass->status)
                make_ready(pass, target);
        }
        if (grads)
            td_tensor_release(grads[i]);
    }
}

/* ---- Running a node ------------------------------------------------------------------------------ */

td_tensor *td__grad_target(td_node *node, int index, bool *accumulate)
{
    struct td_node *leaf = node->inputs[index].node;
    if (!running || running->pass->captures || !leaf || !td__node_is_leaf(leaf) ||
        running->claim_count == MAX_CLAIMS)
        return NULL;
    td_tensor *target = td__leaf_target(leaf, accumulate);
    if (target)
        running->claimed[running->claim_count++] = leaf;
    return target;
}

/* Whether the node that this thread runs is writing the gradient of this leaf. */
static bool is_claimed(const struct td_node *leaf)
{
    for (int i = 0; i < running->claim_count; i++)
        if (running->claimed[i] == leaf)
            return true;
    return false;
}

static td_status see_gradients(struct pass *pass, struct td__walk_entry *entry)
{
    struct td_node *node = entry->node;
    for (int output_nr = 0; output_nr < node->output_count; output_nr++) {
        if (!entry->grads[output_nr])
            continue;
        TD_TRY(td__run_grad_hooks(node, output_nr, &entry->grads[output_nr]));
        struct td__output *output = &node->outputs[output_nr];
        if (output->keep_grad && !td__node_is_leaf(node))
            TD_TRY(add_up(&output->grad, entry->grads[output_nr]));
        for (int i = 0; i < pass->capture_count; i++)
            if (pass->captures[i].node == node && pass->captures[i].output_nr == output_nr)
                TD_TRY(add_up(&pass->captures[i].grad, entry->grads[output_nr]));
    }
    return TD_OK;
}

/* Runs the node's function. On success grads[i] is owned; written[i]: td__grad_target() was
 * used. */
static td_status call_function(struct td__walk_entry *entry, td_tensor **grads, bool *written)
{
    struct td_node *node = entry->node;
    td_status status = node->region ? td__region_backward(node, entry->grads[0], grads)
                                    : node->function->backward(node, entry->grads, grads);
    for (int i = 0; i < node->input_count; i++) {
        struct td__edge *edge = &node->inputs[i];
        if (status || !edge->node || !grads[i]) {
            grads[i] = NULL;
        } else if (is_claimed(edge->node) && edge->node->outputs[0].grad == grads[i]) {
            written[i] = true;
            grads[i] = NULL;
        } else {
            status = fit(node, i, &edge->node->outputs[edge->output_nr], &grads[i]);
            if (status)
                grads[i] = NULL;
        }
    }
    return status;
}

static td_status run_function(struct pass *pass, struct td__walk_entry *entry)
{
    enum { FEW = 8 };
    struct td_node *node = entry->node;
    td_tensor *few[FEW] = {0}, **grads = few;
    bool few_written[FEW] = {0}, *written = few_written;
    if (node->input_count > FEW) {
        grads = calloc((size_t)node->input_count, sizeof *grads + sizeof *written);
        if (!grads)
            return td__fail_nomem("td_backward");
        written = (bool *)(grads + node->input_count);
    }
    td_status status = TD_OK;
    {
        TD_SCOPE;
        status = call_function(entry, grads, written);
    }
    for (int i = 0; i < running->claim_count; i++)
        td__leaf_unclaim(running->claimed[i]);
    if (!pass->retain_graph)
        td__node_free_saved(node);

    pthread_mutex_lock(&pass->lock);
    if (status)
        fail(pass, status);
    deliver(pass, node, grads, written);
    pthread_mutex_unlock(&pass->lock);
    if (grads != few)
        free(grads);
    return status;
}

static bool has_gradient(const struct td__walk_entry *entry)
{
    for (int output_nr = 0; output_nr < entry->node->output_count; output_nr++)
        if (entry->grads[output_nr])
            return true;
    return false;
}

static td_status run_entry(struct pass *pass, struct td__walk_entry *entry)
{
    struct td_node *node = entry->node;
    if (!has_gradient(entry)) {
        if (entry->written)
            return td__leaf_accumulate(node, NULL);
        pthread_mutex_lock(&pass->lock);
        deliver(pass, node, NULL, NULL);
        pthread_mutex_unlock(&pass->lock);
        return TD_OK;
    }
    TD_TRY(see_gradients(pass, entry));
    if (!td__node_is_leaf(node))
        return entry->needed ? run_function(pass, entry) : TD_OK;
    return pass->captures ? TD_OK : td__leaf_accumulate(node, entry->grads[0]);
}

/* Runs the first ready entry of a queue, on the queue's thread. */
static void run_next(void *arg)
{
    struct ready_queue *queue = arg;
    struct pass *pass = queue->pass;
    struct running here = {.pass = pass}, *above = running;
    bool grad_mode = td_set_grad_enabled(false);
    running = &here;
    pthread_mutex_lock(&pass->lock);
    struct td__walk_entry *entry = queue->count ? &pass->walk.entries[pop(queue)] : NULL;
    bool failed = pass->status != TD_OK;
    pthread_mutex_unlock(&pass->lock);

    td_status status = entry && !failed ? run_entry(pass, entry) : TD_OK;
    for (int output_nr = 0; entry && output_nr < entry->node->output_count; output_nr++) {
        td_tensor_release(entry->grads[output_nr]);
        entry->grads[output_nr] = NULL;
    }
    running = above;
    td_set_grad_enabled(grad_mode);

    pthread_mutex_lock(&pass->lock);
    if (status)
        fail(pass, status);
    if (--pass->unfinished == 0)
        pthread_cond_broadcast(&pass->changed);
    else if (queue->device)
        pthread_cond_broadcast(&pass->changed); /* the caller's queue may have a new entry */
    pthread_mutex_unlock(&pass->lock);
}

/* ---- A whole pass -------------------------------------------------------------------------------- */

td_status td__at_end_of_backward(td_status (*fn)(void *arg), void *arg)
{
    if (!running)
        return td_fail(TD_ERR_STATE, "td_backward: no backward pass is running");
    struct pass *pass = running->pass;
    while (pass->outer)
        pass = pass->outer;
    struct at_end *at_end = malloc(sizeof *at_end);
    if (!at_end)
        return td__fail_nomem("td_backward");
    *at_end = (struct at_end){.fn = fn, .arg = arg};
    pthread_mutex_lock(&pass->lock);
    *pass->last_at_end = at_end;
    pass->last_at_end = &at_end->next;
    pthread_mutex_unlock(&pass->lock);
    return TD_OK;
}

static int by_sequence(const void *a, const void *b)
{
    const struct td__walk_entry *x = *(struct td__walk_entry *const *)a,
                                *y = *(struct td__walk_entry *const *)b;
    return (x->node->sequence > y->node->sequence) - (x->node->sequence < y->node->sequence);
}

/* Marks the nodes that lead to a capture. A node's inputs were recorded before it, so one sweep in
 * that order is enough. */
static td_status mark_needed(struct pass *pass)
{
    struct td__walk *walk = &pass->walk;
    struct td__walk_entry **order = malloc((size_t)walk->count * sizeof *order);
    if (!order)
        return td__fail_nomem("td_gradients");
    for (int i = 0; i < walk->count; i++)
        order[i] = &walk->entries[i];
    qsort(order, (size_t)walk->count, sizeof *order, by_sequence);
    for (int i = 0; i < walk->count; i++) {
        struct td_node *node = order[i]->node;
        for (int k = 0; k < node->input_count && !order[i]->needed; k++) {
            struct td_node *input = node->inputs[k].node;
            for (int c = 0; input && c < pass->capture_count; c++)
                order[i]->needed |= pass->captures[c].node == input;
            order[i]->needed |= input && td__walk_find(walk, input)->needed;
        }
    }
    free(order);
    return TD_OK;
}

/* Delivers the gradients of the outputs, and queues the nodes that have no other edges. */
static void start(struct pass *pass, td_tensor *const *outputs, td_tensor *const *gradients,
                  int count)
{
    for (int i = 0; i < count; i++) {
        struct td__walk_entry *entry = td__walk_find(&pass->walk, outputs[i]->node);
        td_status status = add_up(&entry->grads[outputs[i]->output_nr], gradients[i]);
        if (status)
            fail(pass, status);
    }
    /* A worker starts with the first ready entry. Without the lock it could deliver meanwhile, and
     * a node that became ready by that would be queued twice. */
    pthread_mutex_lock(&pass->lock);
    for (int i = 0; i < pass->walk.count && !pass->status; i++)
        if (pass->walk.entries[i].pending == 0)
            make_ready(pass, &pass->walk.entries[i]);
    pthread_mutex_unlock(&pass->lock);
}

static void run_all(struct pass *pass)
{
    struct ready_queue *own = &pass->queues[0];
    pthread_mutex_lock(&pass->lock);
    while (pass->unfinished > 0) {
        if (own->count == 0) {
            pthread_cond_wait(&pass->changed, &pass->lock);
            continue;
        }
        pthread_mutex_unlock(&pass->lock);
        run_next(own);
        pthread_mutex_lock(&pass->lock);
    }
    pthread_mutex_unlock(&pass->lock);
}

static void finish(struct pass *pass)
{
    struct at_end *at_end = pass->first_at_end, *next;
    for (; at_end; at_end = next) {
        next = at_end->next;
        td_status status = pass->status ? TD_OK : at_end->fn(at_end->arg);
        if (status)
            fail(pass, status);
        free(at_end);
    }
    for (int i = 0; i < pass->queue_count; i++)
        free(pass->queues[i].ready);
    td__walk_free(&pass->walk);
    pthread_mutex_destroy(&pass->lock);
    pthread_cond_destroy(&pass->changed);
}

td_status td__run_backward(td_tensor *const *outputs, td_tensor *const *gradients, int count,
                           struct td__capture *captures, int capture_count, bool retain_graph)
{
    struct pass *pass = calloc(1, sizeof *pass);
    if (!pass)
        return td__fail_nomem("td_backward");
    pass->captures = captures;
    pass->capture_count = capture_count;
    pass->retain_graph = retain_graph;
    pass->outer = running ? running->pass : NULL;
    pthread_mutex_init(&pass->lock, NULL);
    td__cond_init(&pass->changed);
    pass->last_at_end = &pass->first_at_end;
    pass->queues[0] = (struct ready_queue){.pass = pass};
    pass->queue_count = 1;

    td_status status = td__walk_from(&pass->walk, outputs, count);
    if (!status && captures)
        status = mark_needed(pass);
    for (int i = 0; i < pass->walk.count && !captures; i++)
        pass->walk.entries[i].needed = true;
    if (status)
        fail(pass, status);
    else
        start(pass, outputs, gradients, count);
    run_all(pass);
    finish(pass);
    status = pass->status ? td__error_restore(&pass->error) : TD_OK;
    free(pass);
    return status;
}
