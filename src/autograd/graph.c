/* Nodes: making them, what they save, and letting go of them; see graph.h.
 *
 * A record may be a chain of 100,000 nodes, each of which holds the next: so a node whose last owner
 * went is put on a list of the thread's, and one loop frees what is on it. */
#include "autograd/graph.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

static _Atomic uint64_t last_sequence;

/* ---- Letting go --------------------------------------------------------------------------------- */

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

void td__node_let_go(struct td_node *node)
{
    td_tensor *aliases[TD_RECIPE_MOST];
    pthread_mutex_lock(&node->lock);
    int count = node->let_go ? 0 : node->saved_count;
    for (int i = 0; i < count; i++)
        aliases[i] = node->saved[i].alias;
    if (node->saved_count)
        node->let_go = true;
    pthread_mutex_unlock(&node->lock);
    for (int i = 0; i < count; i++)
        td_tensor_release(aliases[i]);
}

/* Frees one node; those of its inputs that had no other owner go to the list behind *dying. */
static void free_node(struct td_node *node, struct td_node **dying)
{
    td__node_let_go(node);
    for (int i = 0; i < node->input_count; i++) {
        struct td_node *input = node->inputs[i].node;
        if (input && atomic_fetch_sub_explicit(&input->owners, 1, memory_order_acq_rel) == 1) {
            input->next_dying = *dying;
            *dying = input;
        }
    }
    for (int i = 0; i < node->output_count; i++) {
        free_hooks(node->outputs[i].hooks);
        td_tensor_release(node->outputs[i].grad);
    }
    if (node->function->free_data && node->data)
        node->function->free_data(node->data);
    pthread_mutex_destroy(&node->lock);
    free(node);
}

void td__node_release(struct td_node *node)
{
    if (!node || atomic_fetch_sub_explicit(&node->owners, 1, memory_order_acq_rel) > 1)
        return;
    /* Freeing a node may release tensors whose nodes end in turn (a custom function's data): then
     * this function runs again below itself, and only adds to the list of the one above. */
    static _Thread_local struct td_node *dying;
    static _Thread_local bool freeing;
    node->next_dying = dying;
    dying = node;
    if (freeing)
        return;
    freeing = true;
    while (dying) {
        struct td_node *next = dying;
        dying = next->next_dying;
        free_node(next, &dying);
    }
    freeing = false;
}

static void leave(struct td_node *node, td_tensor *tensor)
{
    pthread_mutex_lock(&node->lock);
    if (node->leaf == tensor) {
        node->leaf = NULL;
        atomic_fetch_sub(&tensor->storage->leaves, 1);
    }
    pthread_mutex_unlock(&node->lock);
    td__node_release(node);
}

/* ---- Making ------------------------------------------------------------------------------------- */

/* Tensors do not know of nodes: they are told how to leave one, before any thread can make one. */
__attribute__((constructor)) static void tell_tensors(void)
{
    td__node_leave = leave;
}

/* A node and all its lists are one piece of memory. */
static struct td_node *create_node(const td_function *function, int inputs, int outputs, int saved,
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
    return node;
}

static void describe_output(struct td__output *output, const td_tensor *tensor)
{
    output->layout = tensor->layout;
    output->device = tensor->storage->device;
}

struct td_node *td__leaf_node(td_tensor *tensor)
{
    struct td_node *node = create_node(&td__leaf_function, 0, 1, 0, 0);
    if (!node)
        return NULL;
    describe_output(&node->outputs[0], tensor);
    node->outputs[0].keep_grad = true;
    node->leaf = tensor;
    return node;
}

static td_tensor *const *inputs_of(const td_recipe *recipe)
{
    return recipe->more_inputs ? recipe->more_inputs : recipe->inputs;
}

td_status td__check_history(const td_tensor *tensor, const char *name)
{
    if (tensor->history == atomic_load_explicit(&tensor->storage->history, memory_order_relaxed))
        return TD_OK;
    return td__fail(TD_ERR_STATE,
                    "%s: the memory of its input of shape %s was changed in place through another "
                    "view of it, and its gradient cannot follow; change it through the tensor that "
                    "is used afterwards, or under TD_NO_GRAD",
                    name, td__shape_of(tensor));
}

bool td_would_record(td_tensor *const *inputs, int count)
{
    if (!td_grad_enabled())
        return false;
    for (int i = 0; i < count; i++)
        if (inputs[i] && (inputs[i]->node ||
                          inputs[i]->history != atomic_load_explicit(&inputs[i]->storage->history,
                                                                     memory_order_relaxed)))
            return true;
    return false;
}

static td_status save(struct td_node *node, const td_recipe *recipe)
{
    for (int i = 0; i < recipe->saved_count; i++) {
        td_tensor *tensor = recipe->saved[i];
        if (!tensor)
            continue;
        node->saved[i].alias = td__alias(tensor);
        if (!node->saved[i].alias)
            return TD_ERR_NOMEM;
        node->saved[i].version = atomic_load(&tensor->storage->version);
    }
    return TD_OK;
}

/* A node of the recipe; NULL in *node where nothing needs to be recorded. */
static td_status make_node(const td_function *function, int output_count, const td_recipe *recipe,
                           struct td_node **node_out)
{
    td_tensor *const *inputs = inputs_of(recipe);
    *node_out = NULL;
    if (recipe->saved_count < 0 || recipe->saved_count > TD_RECIPE_MOST ||
        recipe->input_count < 0 || (recipe->input_count > TD_RECIPE_MOST && !recipe->more_inputs))
        return td__fail(TD_ERR_INVALID,
                        "td_record: %s has %d inputs and saves %d tensors; %d fit, more inputs go "
                        "into more_inputs",
                        function->name, recipe->input_count, recipe->saved_count, TD_RECIPE_MOST);
    if (!td_would_record(inputs, recipe->input_count))
        return TD_OK;
    for (int i = 0; i < recipe->input_count; i++)
        if (inputs[i])
            TD_TRY(td__check_history(inputs[i], function->name));
    struct td_node *node = create_node(function, recipe->input_count, output_count,
                                       recipe->saved_count, recipe->data_size);
    if (!node)
        return TD_ERR_NOMEM;
    td_status status = save(node, recipe);
    if (status) {
        node->data = NULL; /* still the caller's */
        td__node_release(node);
        return status;
    }
    for (int i = 0; i < recipe->input_count; i++)
        if (inputs[i] && inputs[i]->node) {
            td__node_retain(inputs[i]->node);
            node->inputs[i] = (struct td__edge){inputs[i]->node, inputs[i]->node_slot};
        }
    if (recipe->data_size)
        memcpy(node->data, recipe->data, recipe->data_size);
    node->sequence = atomic_fetch_add_explicit(&last_sequence, 1, memory_order_relaxed) + 1;
    *node_out = node;
    return TD_OK;
}

static void attach(td_tensor *tensor, struct td_node *node, int slot)
{
    describe_output(&node->outputs[slot], tensor);
    td__node_retain(node);
    tensor->node = node;
    tensor->node_slot = slot;
}

td_status td_record_all(const td_function *function, td_tensor *const *outputs, int output_count,
                        const td_recipe *recipe)
{
    struct td_node *node;
    for (int i = 0; i < output_count; i++)
        if (!outputs[i] || outputs[i]->node)
            return td__fail(TD_ERR_INVALID, "td_record: output %d of %s is %s", i, function->name,
                            outputs[i] ? "a recorded tensor already; make it under TD_NO_GRAD"
                                       : "NULL");
    TD_TRY(make_node(function, output_count, recipe, &node));
    if (!node)
        return TD_OK;
    for (int i = 0; i < output_count; i++)
        attach(outputs[i], node, i);
    td__node_release(node);
    return TD_OK;
}

td_tensor *td_record(const td_function *function, td_tensor *output, const td_recipe *recipe)
{
    if (!output || td_record_all(function, &output, 1, recipe))
        return NULL;
    return output;
}

td_tensor *td__result(const td_function *function, td_tensor *output, const td_recipe *recipe)
{
    if (!output)
        return NULL;
    if (td_record_all(function, &output, 1, recipe)) {
        td_tensor_release(output);
        return NULL;
    }
    return td__adopt(output);
}

/* ---- Changes in place --------------------------------------------------------------------------- */

td_status td__check_in_place(const td_tensor *tensor, const char *name)
{
    if (!td_grad_enabled())
        return TD_OK;
    if (tensor->node && td__node_is_leaf(tensor->node))
        return td__fail(TD_ERR_STATE,
                        "%s: a leaf of shape %s that asks for its gradient cannot be changed in "
                        "place while changes are recorded; do it under TD_NO_GRAD",
                        name, td__shape_of(tensor));
    if (tensor->node && atomic_load(&tensor->storage->leaves) > 0)
        return td__fail(TD_ERR_STATE,
                        "%s: the tensor of shape %s is a view of a leaf that asks for its gradient, "
                        "and cannot be changed in place while changes are recorded; do it under "
                        "TD_NO_GRAD",
                        name, td__shape_of(tensor));
    return td__check_history(tensor, name);
}

td_status td__record_in_place(const td_function *function, td_tensor *tensor,
                              const td_recipe *recipe)
{
    struct td_node *node;
    td__tensor_touch(tensor);
    TD_TRY(make_node(function, 1, recipe, &node));
    if (!node)
        return TD_OK;
    struct td_node *former = tensor->node;
    attach(tensor, node, 0);
    td__node_release(node);
    td__node_release(former);
    tensor->history = atomic_fetch_add(&tensor->storage->history, 1) + 1;
    return TD_OK;
}

/* ---- What backward asks ------------------------------------------------------------------------- */

td_tensor *td_node_saved(td_node *node, int index)
{
    struct td__saved *saved = &node->saved[index];
    pthread_mutex_lock(&node->lock);
    bool gone = node->let_go;
    td_tensor *alias = gone ? NULL : td_tensor_retain(saved->alias);
    pthread_mutex_unlock(&node->lock);
    if (gone) {
        td__fail(TD_ERR_STATE,
                 "td_backward: what %s had saved was let go by an earlier backward pass; the first "
                 "pass needs retain_graph for a second",
                 node->function->name);
        return NULL;
    }
    if (!alias)
        return NULL;
    unsigned version = atomic_load(&alias->storage->version);
    if (version != saved->version) {
        td__fail(TD_ERR_STATE,
                 "td_backward: a tensor of shape %s that %s needs for its gradient was changed in "
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
