/* The life of a backward pass: opening it, its roots, the gradients that are fed, and its end; see
 * engine.h. */
#include "autograd/pass.h"

#include "autograd/autocast.h"
#include "base/thread.h"

#include <stdlib.h>

td_status td__pass_open(const struct td__pass_options *options, struct td__pass **pass_out)
{
    struct td__pass *pass = calloc(1, sizeof *pass);
    if (!pass)
        return td__fail_nomem("td_backward");
    pass->options = *options;
    pthread_mutex_init(&pass->lock, NULL);
    td__cond_init(&pass->changed);
    pass->last_at_end = &pass->first_at_end;
    pass->queues[0] = (struct td__ready_queue){.pass = pass};
    pass->queue_count = 1;
    *pass_out = pass;
    return TD_OK;
}

/* The pass's failure as this thread's last error. */
static td_status failure_of(const struct td__pass *pass)
{
    return pass->status ? td__error_restore(&pass->error) : TD_OK;
}

/* ---- Roots --------------------------------------------------------------------------------------- */

static td_status check_output(const td_node *node, int output_nr)
{
    if (!node)
        return td__fail_null("td_backward");
    if (output_nr < 0 || output_nr >= node->output_count)
        return td_fail(TD_ERR_INVALID,
                       "td_backward: %s has %d outputs, and none with the number %d",
                       node->function->name, node->output_count, output_nr);
    return TD_OK;
}

static td_status check_gradient(const td_node *node, int output_nr, const td_tensor *grad)
{
    const struct td__output *output = &node->outputs[output_nr];
    const struct td__layout *layout = &output->layout;
    bool fits = grad->layout.ndim == layout->ndim && grad->layout.dtype == layout->dtype &&
                grad->storage->device == output->device;
    for (int d = 0; fits && d < layout->ndim; d++)
        fits = grad->layout.shape[d] == layout->shape[d];
    if (fits)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "td_backward: the gradient for output %d of %s is %s %s on %s, the output %s %s "
                   "on %s",
                   output_nr, node->function->name, td_dtype_name(grad->layout.dtype),
                   td__shape_of(grad), grad->storage->device->name, td_dtype_name(layout->dtype),
                   td__shape_text(layout->shape, layout->ndim), output->device->name);
}

/* With the lock held. The entry is valid until the next root. */
static td_status add_root(struct td__pass *pass, td_node *node, struct td__walk_entry **entry)
{
    if (pass->started)
        return td_fail(TD_ERR_STATE,
                       "td_backward: the pass has been started; add %s as a root "
                       "before that",
                       node->function->name);
    TD_TRY(failure_of(pass));
    td_status status = td__walk_add_root(&pass->walk, node);
    if (status)
        td__engine_fail(pass, status); /* a part of the graph is missing */
    *entry = td__walk_find(&pass->walk, node);
    return status;
}

td_status td__pass_seed(struct td__pass *pass, td_node *node, int output_nr, td_tensor *grad)
{
    struct td__walk_entry *entry = NULL;
    TD_TRY(check_output(node, output_nr));
    if (!grad)
        return td__fail_null("td_backward");
    TD_TRY(check_gradient(node, output_nr, grad));
    pthread_mutex_lock(&pass->lock);
    td_status status = add_root(pass, node, &entry);
    if (!status)
        status = td__grad_add(&entry->grads[output_nr], grad);
    pthread_mutex_unlock(&pass->lock);
    return status;
}

static struct td__expected *find_expected(const struct td__walk_entry *entry, int output_nr)
{
    struct td__expected *expected = entry->expected;
    while (expected && expected->output_nr != output_nr)
        expected = expected->next;
    return expected;
}

static td_status expect_more(struct td__walk_entry *entry, int output_nr, int count)
{
    struct td__expected *expected = find_expected(entry, output_nr);
    if (!expected) {
        expected = calloc(1, sizeof *expected);
        if (!expected)
            return td__fail_nomem("td_backward");
        expected->output_nr = output_nr;
        expected->next = entry->expected;
        entry->expected = expected;
    }
    size_t before = (size_t)expected->count, after = before + (size_t)count;
    struct td__fed *fed = realloc(expected->fed, after * sizeof *fed);
    if (!fed)
        return td__fail_nomem("td_backward");
    for (size_t i = before; i < after; i++)
        fed[i] = (struct td__fed){0};
    expected->fed = fed;
    expected->count += count;
    entry->pending += count;
    return TD_OK;
}

td_status td__pass_expect(struct td__pass *pass, td_node *node, int output_nr, int count)
{
    struct td__walk_entry *entry = NULL;
    TD_TRY(check_output(node, output_nr));
    if (count < 0)
        return td_fail(TD_ERR_INVALID, "td_backward: %d gradients are expected for output %d of %s",
                       count, output_nr, node->function->name);
    pthread_mutex_lock(&pass->lock);
    td_status status = add_root(pass, node, &entry);
    if (!status && count > 0)
        status = expect_more(entry, output_nr, count);
    if (!status) {
        pass->awaited += count;
        pass->has_expected |= count > 0;
    }
    pthread_mutex_unlock(&pass->lock);
    return status;
}

bool td__pass_contains(const struct td__pass *pass, const td_node *node)
{
    return td__walk_find(&pass->walk, node) != NULL;
}

td_node *td__pass_next_node(const struct td__pass *pass, const td_function *function, int *cursor)
{
    while (*cursor < pass->walk.count) {
        struct td_node *node = pass->walk.entries[(*cursor)++].node;
        if (node->function == function)
            return node;
    }
    return NULL;
}

/* ---- Start --------------------------------------------------------------------------------------- */

/* Marks the nodes that lead to a capture. A node's inputs were recorded before it, so one sweep in
 * that order is enough. */
static td_status mark_needed(struct td__pass *pass)
{
    struct td__walk *walk = &pass->walk;
    int *by_sequence = td__walk_by_sequence(walk);
    if (!by_sequence)
        return TD_ERR_NOMEM;
    for (int i = 0; i < walk->count; i++) {
        struct td__walk_entry *entry = &walk->entries[by_sequence[i]];
        const struct td_node *node = entry->node;
        for (int k = 0; k < node->input_count && !entry->needed; k++) {
            const struct td_node *input = node->inputs[k].node;
            for (int c = 0; input && c < pass->options.capture_count; c++)
                entry->needed |= pass->options.captures[c].node == input;
            entry->needed |= input && td__walk_find(walk, input)->needed;
        }
    }
    free(by_sequence);
    return TD_OK;
}

/* Makes the queues of all devices. Returns whether one thread runs all nodes. */
static bool make_queues(struct td__pass *pass)
{
    const td_device *last = NULL;
    const struct td__ready_queue *only = NULL;
    bool one_thread = true;
    for (int i = 0; i < pass->walk.count; i++) {
        td_device *device = pass->walk.entries[i].node->outputs[0].device;
        if (device == last)
            continue;
        if (td__device_is_here(device))
            pass->here = device;
        last = device;
        const struct td__ready_queue *queue = td__engine_queue(pass, device);
        one_thread &= !only || queue == only;
        only = queue;
    }
    return one_thread;
}

/* With the lock held: a worker starts with the first ready entry, and a node that became ready by
 * what it delivers would otherwise be queued twice. */
static td_status start(struct td__pass *pass)
{
    TD_TRY(failure_of(pass));
    if (pass->started)
        return td_fail(TD_ERR_STATE, "td_backward: the pass has been started already");
    if (pass->options.captures)
        TD_TRY(mark_needed(pass));
    if (!make_queues(pass) || pass->has_expected)
        TD_TRY(td__edge_order_init(&pass->order, &pass->walk));
    pass->outer = pass->options.outermost ? NULL : td__running_pass();
    pass->started = true;
    for (int i = 0; i < pass->walk.count && !pass->status; i++)
        if (pass->walk.entries[i].pending == 0)
            td__engine_make_ready(pass, &pass->walk.entries[i]);
    return failure_of(pass);
}

td_status td__pass_start(struct td__pass *pass)
{
    pthread_mutex_lock(&pass->lock);
    td_status status = start(pass);
    if (!pass->started)
        td__engine_fail(pass, status);
    pthread_mutex_unlock(&pass->lock);
    return status;
}

/* ---- Gradients from outside ------------------------------------------------------------------------ */

static td_status feed(struct td__pass *pass, td_node *node, int output_nr, int number,
                      td_tensor *grad)
{
    struct td__walk_entry *entry = td__walk_find(&pass->walk, node);
    struct td__expected *expected = entry ? find_expected(entry, output_nr) : NULL;
    if (!expected || number < 0 || number >= expected->count)
        return td_fail(
            TD_ERR_INVALID,
            "td_backward: the pass expects %d gradients for output %d of %s, and got one "
            "with the number %d",
            expected ? expected->count : 0, output_nr, node->function->name, number);
    if (expected->fed[number].arrived)
        return td_fail(TD_ERR_INVALID, "td_backward: gradient %d for output %d of %s was fed twice",
                       number, output_nr, node->function->name);
    if (grad)
        TD_TRY(check_gradient(node, output_nr, grad));
    expected->fed[number] = (struct td__fed){.grad = td_tensor_retain(grad), .arrived = true};
    pass->awaited--;
    if (--entry->pending == 0 && pass->started)
        td__engine_make_ready(pass, entry);
    pthread_cond_broadcast(&pass->changed);
    return TD_OK;
}

td_status td__pass_feed(struct td__pass *pass, td_node *node, int output_nr, int number,
                        td_tensor *grad)
{
    TD_TRY(check_output(node, output_nr));
    pthread_mutex_lock(&pass->lock);
    td_status status = pass->status ? TD_OK : feed(pass, node, output_nr, number, grad);
    pthread_mutex_unlock(&pass->lock);
    return status;
}

void td__pass_fail(struct td__pass *pass, td_status status)
{
    pthread_mutex_lock(&pass->lock);
    td__engine_fail(pass, status);
    pthread_cond_broadcast(&pass->changed);
    pthread_mutex_unlock(&pass->lock);
}

/* ---- Run and end ----------------------------------------------------------------------------------- */

td_status td__at_end_of_backward(td_status (*fn)(void *arg), void (*dropped)(void *arg), void *arg)
{
    struct td__pass *pass = td__running_pass();
    if (!pass)
        return td_fail(TD_ERR_STATE, "td_backward: no backward pass is running");
    while (pass->outer)
        pass = pass->outer;
    struct td__at_end *at_end = malloc(sizeof *at_end);
    if (!at_end)
        return td__fail_nomem("td_backward");
    *at_end = (struct td__at_end){.fn = fn, .dropped = dropped, .arg = arg};
    pthread_mutex_lock(&pass->lock);
    *pass->last_at_end = at_end;
    pass->last_at_end = &at_end->next;
    pthread_mutex_unlock(&pass->lock);
    return TD_OK;
}

static td_status failure_now(struct td__pass *pass)
{
    pthread_mutex_lock(&pass->lock);
    td_status status = failure_of(pass);
    pthread_mutex_unlock(&pass->lock);
    return status;
}

/* Calls the functions, `dropped` once the pass has failed, and frees their list. */
static void run_at_end(struct td__pass *pass)
{
    struct td__at_end *at_end = pass->first_at_end, *next;
    pass->first_at_end = NULL;
    pass->last_at_end = &pass->first_at_end;
    for (; at_end; at_end = next) {
        next = at_end->next;
        bool failed = failure_now(pass);
        td_status status = failed ? TD_OK : at_end->fn(at_end->arg);
        if (status)
            td__pass_fail(pass, status);
        if (failed && at_end->dropped)
            at_end->dropped(at_end->arg);
        free(at_end);
    }
}

static void run(struct td__pass *pass, td__deadline deadline)
{
    td__engine_run(pass, deadline);
    run_at_end(pass);
}

td_status td__pass_run(struct td__pass *pass, td__deadline deadline)
{
    pthread_mutex_lock(&pass->lock);
    td_status status = pass->started ? TD_OK : failure_of(pass);
    if (!status && !pass->started)
        status = td_fail(TD_ERR_STATE, "td_backward: the pass has not been started");
    pthread_mutex_unlock(&pass->lock);
    if (status)
        return status;
    if (td__autocast_on) {
        struct td__autocast_state before = td__autocast_switch(NULL);
        run(pass, deadline);
        td__autocast_resume(&before);
    } else {
        run(pass, deadline);
    }
    return failure_now(pass);
}

td_status td__pass_close(struct td__pass *pass)
{
    if (!pass)
        return TD_OK;
    pthread_mutex_lock(&pass->lock);
    if (pass->started && !pass->status &&
        (pass->unfinished > 0 || pass->awaited > 0 || pass->first_at_end))
        td__engine_fail(pass, td_fail(TD_ERR_STATE,
                                      "td_backward: the pass was closed before it had run; %d "
                                      "expected gradients had not arrived",
                                      pass->awaited));
    pthread_mutex_unlock(&pass->lock);
    if (pass->started)
        td__engine_run(pass, TD__NEVER); /* drops what is ready, and waits for what runs */
    run_at_end(pass); /* drops what is left, if the pass was closed before it had run */
    td_status status = failure_of(pass);
    for (int i = 0; i < pass->queue_count; i++)
        free(pass->queues[i].ready);
    td__edge_order_free(&pass->order);
    td__walk_free(&pass->walk);
    pthread_mutex_destroy(&pass->lock);
    pthread_cond_destroy(&pass->changed);
    free(pass);
    return status;
}
