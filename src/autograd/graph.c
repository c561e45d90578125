/* Nodes: creating them, their saved tensors, and freeing them; see graph.h.
 *
 * A graph may be a chain of 100,000 nodes, each of which holds the next. To avoid recursion, a node
 * that lost its last reference goes to a list of the thread, and one loop frees that list. */
#include "autograd/graph.h"
#include "autograd/view_base.h"

#include "base/option_rules.h"

#include <stdlib.h>
#include <string.h>

static _Atomic uint64_t last_sequence;

/* ---- Freeing ------------------------------------------------------------------------------------ */

void td__node_retain(struct td_node *node)
{
    atomic_fetch_add_explicit(&node->owners, 1, memory_order_relaxed);
}

static void free_hooks(struct td__hook *hook)
{
    while (hook) {
        struct td__hook *next = hook->next;
        free(hook);
        hook = next;
    }
}

void td__node_free_saved(struct td_node *node)
{
    td_tensor *aliases[TD_NODE_MAX_TENSORS];
    pthread_mutex_lock(&node->lock);
    int count = node->saved_freed ? 0 : node->saved_count;
    for (int i = 0; i < count; i++)
        aliases[i] = node->saved[i].alias;
    if (node->saved_count)
        node->saved_freed = true;
    pthread_mutex_unlock(&node->lock);
    for (int i = 0; i < count; i++)
        td_tensor_release(aliases[i]);
}

/* Frees one node, and prepends the inputs that had no other owner to *unreferenced. */
static void free_node(struct td_node *node, struct td_node **unreferenced)
{
    td__node_free_saved(node);
    for (int i = 0; i < node->input_count; i++) {
        struct td_node *input = node->inputs[i].node;
        if (input && atomic_fetch_sub_explicit(&input->owners, 1, memory_order_acq_rel) == 1) {
            input->next_dying = *unreferenced;
            *unreferenced = input;
        }
    }
    for (int i = 0; i < node->output_count; i++) {
        free_hooks(node->outputs[i].hooks);
        td_tensor_release(node->outputs[i].grad);
    }
    if (node->function->free_data && node->data)
        node->function->free_data(node->data);
    free(node->region);
    pthread_mutex_destroy(&node->lock);
    free(node);
}

void td__node_release(struct td_node *node)
{
    if (!node || atomic_fetch_sub_explicit(&node->owners, 1, memory_order_acq_rel) > 1)
        return;
    /* Freeing a node may release tensors that own other nodes (through free_data). This function is
     * then entered again, and the inner call only adds to the list. */
    static _Thread_local struct td_node *unreferenced;
    static _Thread_local bool freeing;
    node->next_dying = unreferenced;
    unreferenced = node;
    if (freeing)
        return;
    freeing = true;
    while (unreferenced) {
        struct td_node *next = unreferenced;
        unreferenced = next->next_dying;
        free_node(next, &unreferenced);
    }
    freeing = false;
}

void td__node_leave(td_tensor *tensor)
{
    struct td_node *node = tensor->node;
    if (!node)
        return;
    pthread_mutex_lock(&node->lock);
    if (node->leaf == tensor)
        node->leaf = NULL;
    pthread_mutex_unlock(&node->lock);
    tensor->node = NULL;
    td__node_release(node);
}

static void leave(td_tensor *tensor)
{
    td__node_leave(tensor);
    td__node_release(tensor->idle);
    td__view_base_leave(tensor);
}

/* ---- Making ------------------------------------------------------------------------------------- */

/* src/tensor knows no nodes: it gets the function that releases one, before any thread can make
 * one. */
__attribute__((constructor)) static void register_with_tensors(void)
{
    td__tensor_on_destroy = leave;
}

/* A node and its arrays are one allocation. */
struct td_node *td__node_create(const td_function *function, int inputs, int outputs, int saved,
                                size_t data_size)
{
    size_t size = sizeof(struct td_node);
    size_t inputs_at = size;
    size += (size_t)inputs * sizeof(struct td__edge);
    size_t outputs_at = size;
    size += (size_t)outputs * sizeof(struct td__output);
    size_t saved_at = size;
    size += (size_t)saved * sizeof(struct td__saved);
    size_t data_at = (size + 15) / 16 * 16;
    char *memory = calloc(1, data_at + data_size);
    if (!memory) {
        td__fail_nomem(function->name);
        return NULL;
    }
    struct td_node *node = (struct td_node *)memory;
    node->owners = 1;
    node->function = function;
    node->input_count = inputs;
    node->output_count = outputs;
    node->saved_count = saved;
    node->inputs = (struct td__edge *)(memory + inputs_at);
    node->outputs = (struct td__output *)(memory + outputs_at);
    node->saved = (struct td__saved *)(memory + saved_at);
    node->data = data_size ? memory + data_at : NULL;
    pthread_mutex_init(&node->lock, NULL);
    node->sequence = atomic_fetch_add_explicit(&last_sequence, 1, memory_order_relaxed) + 1;
    return node;
}

static void describe_output(struct td__output *output, const td_tensor *tensor)
{
    output->layout = tensor->layout;
    output->device = td__target_of(tensor->storage->device);
}

struct td_node *td__leaf_node(td_tensor *tensor)
{
    struct td_node *node = td__node_create(&td__leaf_function, 0, 1, 0, 0);
    if (!node)
        return NULL;
    describe_output(&node->outputs[0], tensor);
    node->sequence = 0;
    node->outputs[0].keep_grad = true;
    node->leaf = tensor;
    return node;
}

static td_tensor *const *inputs_of(const td_node_spec *spec)
{
    return spec->more_inputs ? spec->more_inputs : spec->inputs;
}

bool td_would_record(td_tensor *const *inputs, int count)
{
    if (!td_grad_enabled())
        return false;
    for (int i = 0; i < count; i++)
        if (inputs[i] && (!td__node_is_current(inputs[i]) || inputs[i]->node))
            return true;
    return false;
}

static td_status save(struct td_node *node, const td_node_spec *spec)
{
    for (int i = 0; i < spec->saved_count; i++) {
        td_tensor *tensor = spec->saved[i];
        if (!tensor)
            continue;
        node->saved[i].alias = td__alias(tensor);
        if (!node->saved[i].alias)
            return TD_ERR_NOMEM;
        node->saved[i].version = atomic_load(&tensor->storage->version);
    }
    return TD_OK;
}

td_status td__check_whole(const td_tensor *tensor, const char *function)
{
    const struct td__shard *shard = tensor->shard;
    if (!shard || !shard->name)
        return TD_OK;
    return td_fail(TD_ERR_STATE,
                   "%s: the parameter \"%s\" is used outside of the passes of its unit, where rank %d has only a "
                   "shard of it; gather it by td_fsdp_gather_begin(), or make the module that uses it the unit",
                   function, shard->name, shard->sharding ? shard->sharding->rank : 0);
}

td_status td__node_make(const td_function *function, int output_count, const td_node_spec *spec,
                        struct td_node **node_out)
{
    td_tensor *const *inputs = inputs_of(spec);
    *node_out = NULL;
    TD_TRY(td__check_reserved("td_record", function->reserved));
    TD_TRY(td__check_reserved("td_record", spec->reserved));
    if (spec->saved_count < 0 || spec->saved_count > TD_NODE_MAX_TENSORS || spec->input_count < 0 ||
        (spec->input_count > TD_NODE_MAX_TENSORS && !spec->more_inputs))
        return td_fail(TD_ERR_INVALID,
                       "td_record: %s has %d inputs and saves %d tensors; the limit is %d; pass "
                       "more inputs in more_inputs",
                       function->name, spec->input_count, spec->saved_count, TD_NODE_MAX_TENSORS);
    if (!td_would_record(inputs, spec->input_count))
        return TD_OK;
    for (int i = 0; i < spec->input_count; i++)
        if (inputs[i]) {
            TD_TRY(td__check_whole(inputs[i], function->name));
            TD_TRY(td__refresh_node(inputs[i], function->name));
        }
    struct td_node *node = td__node_create(function, spec->input_count, output_count,
                                           spec->saved_count, spec->data_size);
    if (!node)
        return TD_ERR_NOMEM;
    td_status status = save(node, spec);
    if (status) {
        node->data = NULL; /* still the caller's */
        td__node_release(node);
        return status;
    }
    for (int i = 0; i < spec->input_count; i++)
        if (inputs[i] && inputs[i]->node) {
            td__node_retain(inputs[i]->node);
            node->inputs[i] = (struct td__edge){inputs[i]->node, inputs[i]->output_nr};
        }
    if (spec->data_size)
        memcpy(node->data, spec->data, spec->data_size);
    *node_out = node;
    return TD_OK;
}

void td__node_describe(struct td_node *node, int output_nr, const td_tensor *tensor)
{
    describe_output(&node->outputs[output_nr], tensor);
}

void td__node_attach(struct td_node *node, int output_nr, td_tensor *tensor)
{
    describe_output(&node->outputs[output_nr], tensor);
    td__node_retain(node);
    tensor->node = node;
    tensor->output_nr = output_nr;
}

td_status td_record_all(const td_function *function, td_tensor *const *outputs, int output_count,
                        const td_node_spec *spec)
{
    struct td_node *node;
    for (int i = 0; i < output_count; i++)
        if (!outputs[i] || outputs[i]->node)
            return td_fail(TD_ERR_INVALID, "td_record: output %d of %s is %s", i, function->name,
                           outputs[i] ? "recorded already; compute it under TD_NO_GRAD" : "NULL");
    TD_TRY(td__node_make(function, output_count, spec, &node));
    if (!node)
        return TD_OK;
    for (int i = 0; i < output_count; i++) {
        td__view_base_leave(outputs[i]); /* an output of this node, and no longer a view of its
                                          * base */
        td__node_attach(node, i, outputs[i]);
        atomic_store(&outputs[i]->history, atomic_load(&outputs[i]->storage->history));
    }
    td__node_release(node);
    return TD_OK;
}

td_tensor *td_record(const td_function *function, td_tensor *output, const td_node_spec *spec)
{
    if (!output)
        return td__null(__func__);
    if (td_record_all(function, &output, 1, spec))
        return NULL;
    return output;
}

td_tensor *td__result(const td_function *function, td_tensor *output, const td_node_spec *spec)
{
    if (!output)
        return td__null(function->name);
    if (td_record_all(function, &output, 1, spec)) {
        td_tensor_release(output);
        return NULL;
    }
    return td__adopt(output);
}

/* ---- For backward ------------------------------------------------------------------------------- */

td_tensor *td_node_saved(td_node *node, int index)
{
    struct td__saved *saved = &node->saved[index];
    pthread_mutex_lock(&node->lock);
    bool gone = node->saved_freed;
    td_tensor *alias = gone ? NULL : td_tensor_retain(saved->alias);
    pthread_mutex_unlock(&node->lock);
    if (gone) {
        td_fail(TD_ERR_STATE,
                "td_backward: an earlier backward pass has freed the saved tensors of %s; set "
                "retain_graph in that pass to run a second one",
                node->function->name);
        return NULL;
    }
    if (!alias)
        return NULL;
    unsigned version = atomic_load(&alias->storage->version);
    if (version != saved->version) {
        td_fail(TD_ERR_STATE,
                "td_backward: a tensor of shape %s that %s saved for backward was changed in "
                "place since (%u times); change a td_clone() of it instead",
                td__shape_of(alias), node->function->name, version - saved->version);
        td_tensor_release(alias);
        return NULL;
    }
    return td__adopt(alias);
}

const void *td_node_data(const td_node *node)
{
    return node->data;
}

bool td_node_needs(const td_node *node, int index)
{
    return node->inputs[index].node != NULL;
}
