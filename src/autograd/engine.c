/* Running the nodes of a backward pass: which is ready, in which order, on which thread.
 *
 * A node is ready when each edge to it has delivered a gradient, or that there is none. It then runs
 * and delivers the gradients of its inputs. Leaves run first, then the node that was recorded last:
 * gradients of parameters become final early, in the reverse order of their use, and a node's saved
 * tensors are freed as soon as it has run.
 *
 * Nodes of a numbered device run on its worker, all others on the thread in td__pass_run(); each of
 * these threads has a ready queue, a heap of entries. One lock guards the pass and is not held while
 * a node computes. */
#include "autograd/pass.h"
#include "autograd/view_base.h"
#include "base/thread.h"

#include <stdlib.h>

enum { MAX_CLAIMS = 8 };

/* The node that this thread runs. */
struct running {
    struct td__pass *pass;
    struct td_node *claimed[MAX_CLAIMS]; /* leaves whose gradients are being written */
    int claim_count;
};
static _Thread_local struct running *running;

struct td__pass *td__running_pass(void)
{
    return running ? running->pass : NULL;
}

struct td__grad_sink td__running_sink(void)
{
    return running ? running->pass->options.sink : (struct td__grad_sink){0};
}

/* ---- Ready queues (with the lock held) ----------------------------------------------------------- */

static uint64_t priority(const struct td__ready_queue *queue, int number)
{
    const struct td_node *node = queue->pass->walk.entries[number].node;
    return td__node_is_leaf(node) ? UINT64_MAX : node->sequence;
}

static td_status push(struct td__ready_queue *queue, int number)
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

static int pop(struct td__ready_queue *queue)
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

struct td__ready_queue *td__engine_queue(struct td__pass *pass, td_device *device)
{
    /* What runs on an accelerator is only enqueued, in the order of the caller's streams. */
    if (device->index < 0 || !device->is_host || device == pass->here)
        device = NULL;
    for (int i = 0; i < pass->queue_count; i++)
        if (pass->queues[i].device == device)
            return &pass->queues[i];
    struct td__ready_queue *queue = &pass->queues[pass->queue_count++];
    *queue = (struct td__ready_queue){.pass = pass, .device = device};
    return queue;
}

static void run_next(void *queue);

void td__engine_fail(struct td__pass *pass, td_status status)
{
    if (pass->status)
        return;
    pass->status = status;
    td__error_save(&pass->error);
    pass->error.status = status;
}

void td__engine_make_ready(struct td__pass *pass, struct td__walk_entry *entry)
{
    struct td__ready_queue *queue = td__engine_queue(pass, entry->node->outputs[0].device);
    td_status status = push(queue, (int)(entry - pass->walk.entries));
    if (!status && queue->device) {
        status = td__device_submit(queue->device, run_next, queue);
        if (status)
            queue->count = 0; /* the pass has failed: drop the ready entries */
    }
    if (status)
        td__engine_fail(pass, status);
    else
        pass->unfinished++;
}

/* ---- Delivering gradients ------------------------------------------------------------------------ */

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

static td_status add_to_target(struct td__pass *pass, const struct td__walk_entry *entry, int input,
                               struct td__walk_entry *target, td_tensor *grad)
{
    int output_nr = entry->node->inputs[input].output_nr;
    if (td__edge_order_is_on(&pass->order))
        return td__edge_order_deliver(&pass->order, &pass->walk, (int)(entry - pass->walk.entries),
                                      input, target, grad);
    return grad ? td__grad_add(&target->grads[output_nr], grad) : TD_OK;
}

/* Delivers the gradients of the inputs (owned, or NULL). With the lock held. */
static void deliver(struct td__pass *pass, const struct td__walk_entry *entry, td_tensor **grads,
                    const bool *written)
{
    const struct td_node *node = entry->node;
    for (int i = 0; i < node->input_count; i++) {
        const struct td__edge *edge = &node->inputs[i];
        struct td__walk_entry *target = edge->node ? td__walk_find(&pass->walk, edge->node) : NULL;
        if (target && !pass->status) {
            td_status status = add_to_target(pass, entry, i, target, grads ? grads[i] : NULL);
            if (status)
                td__engine_fail(pass, status);
            target->written |= written && written[i];
            if (--target->pending == 0 && !pass->status)
                td__engine_make_ready(pass, target);
        }
        if (grads)
            td_tensor_release(grads[i]);
    }
}

/* ---- Running a node ------------------------------------------------------------------------------ */

/* Whether a node may write the gradient of a leaf directly: the leaf's own gets it, and other
 * gradients of the leaf cannot come before or after it as the timing is. */
static bool may_write(const struct td__pass *pass, const struct td_node *leaf)
{
    if (pass->options.captures || pass->options.sink.accumulate)
        return false;
    if (!td__edge_order_is_on(&pass->order))
        return true;
    const struct td__walk_entry *entry = td__walk_find(&pass->walk, leaf);
    return entry && td__edge_order_count(&pass->order, (int)(entry - pass->walk.entries)) == 1;
}

td_tensor *td__grad_target(td_node *node, int index, bool *accumulate)
{
    struct td_node *leaf = node->inputs[index].node;
    if (!running || !leaf || !td__node_is_leaf(leaf) || running->claim_count == MAX_CLAIMS ||
        !may_write(running->pass, leaf))
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

static td_status see_gradients(struct td__pass *pass, struct td__walk_entry *entry)
{
    struct td_node *node = entry->node;
    for (int output_nr = 0; output_nr < node->output_count; output_nr++) {
        if (!entry->grads[output_nr])
            continue;
        TD_TRY(td__run_grad_hooks(node, output_nr, &entry->grads[output_nr]));
        struct td__output *output = &node->outputs[output_nr];
        if (output->keep_grad && !td__node_is_leaf(node))
            TD_TRY(td__grad_add(&output->grad, entry->grads[output_nr]));
        struct td__capture *capture = pass->options.captures;
        for (int i = 0; i < pass->options.capture_count; i++, capture++)
            if (capture->node == node && capture->output_nr == output_nr)
                TD_TRY(td__grad_add(&capture->grad, entry->grads[output_nr]));
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

static td_status run_function(struct td__pass *pass, struct td__walk_entry *entry)
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
    if (!pass->options.retain_graph)
        td__node_free_saved(node);

    pthread_mutex_lock(&pass->lock);
    if (status)
        td__engine_fail(pass, status);
    deliver(pass, entry, grads, written);
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

static td_status run_entry(struct td__pass *pass, struct td__walk_entry *entry)
{
    struct td_node *node = entry->node;
    TD_TRY(td__add_fed(entry));
    if (!has_gradient(entry)) {
        if (entry->written)
            return td__leaf_accumulate(node, NULL);
        pthread_mutex_lock(&pass->lock);
        deliver(pass, entry, NULL, NULL);
        pthread_mutex_unlock(&pass->lock);
        return TD_OK;
    }
    TD_TRY(see_gradients(pass, entry));
    if (!td__node_is_leaf(node))
        return entry->needed || !pass->options.captures ? run_function(pass, entry) : TD_OK;
    if (pass->options.captures)
        return TD_OK;
    if (pass->options.sink.accumulate)
        return td__leaf_give(node, entry->grads[0], &pass->options.sink);
    return td__leaf_accumulate(node, entry->grads[0]);
}

/* Runs the first ready entry of a queue, on the queue's thread. */
static void run_next(void *arg)
{
    struct td__ready_queue *queue = arg;
    struct td__pass *pass = queue->pass;
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
        td__engine_fail(pass, status);
    if (--pass->unfinished == 0)
        pthread_cond_broadcast(&pass->changed);
    else if (queue->device)
        pthread_cond_broadcast(&pass->changed); /* the caller's queue may have a new entry */
    pthread_mutex_unlock(&pass->lock);
}

/* ---- Running a pass ------------------------------------------------------------------------------ */

static const struct td__walk_entry *first_awaited(const struct td__pass *pass, int *output_nr)
{
    for (int i = 0; i < pass->walk.count; i++)
        for (const struct td__expected *expected = pass->walk.entries[i].expected; expected;
             expected = expected->next)
            for (int k = 0; k < expected->count; k++)
                if (!expected->fed[k].arrived) {
                    *output_nr = expected->output_nr;
                    return &pass->walk.entries[i];
                }
    return NULL;
}

static void fail_late(struct td__pass *pass)
{
    int output_nr;
    const struct td__walk_entry *entry = first_awaited(pass, &output_nr);
    td_status status =
        entry ? td_fail(TD_ERR_TIMEOUT,
                        "td_backward: %d expected gradients did not arrive in time; the first is "
                        "for output %d of %s, of shape %s",
                        pass->awaited, output_nr, entry->node->function->name,
                        td__shape_text(entry->node->outputs[output_nr].layout.shape,
                                       entry->node->outputs[output_nr].layout.ndim))
              : td_fail(TD_ERR_TIMEOUT, "td_backward: %d nodes on devices did not end in time",
                        pass->unfinished);
    td__engine_fail(pass, status);
}

void td__engine_run(struct td__pass *pass, td__deadline deadline)
{
    struct td__ready_queue *own = &pass->queues[0];
    pthread_mutex_lock(&pass->lock);
    while (pass->unfinished > 0 || (pass->awaited > 0 && !pass->status)) {
        if (own->count == 0) {
            td__deadline until = pass->status ? TD__NEVER : deadline;
            if (!td__cond_wait(&pass->changed, &pass->lock, until) && until != TD__NEVER)
                fail_late(pass);
            continue;
        }
        pthread_mutex_unlock(&pass->lock);
        run_next(own);
        pthread_mutex_lock(&pass->lock);
    }
    pthread_mutex_unlock(&pass->lock);
}
