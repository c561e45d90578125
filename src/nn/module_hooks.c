/* Hooks of modules.
 *
 *     x --> [inputs of call] --> forward --> [results of call] --> y
 *                 |                                |
 *        backward hooks                  backward_pre hooks           when the gradients come back
 *
 * A forward with backward hooks records two nodes that hand gradients on: one for all results, whose backward has the
 * gradients of all of them before anything of the module runs, and one for all inputs, whose backward runs when the
 * module has computed the gradients of all of them. The two share a `struct hooked_call`, in which the first one leaves
 * the gradients of the results for the second. Nodes may outlive the module and its hooks: they refer to both through
 * the list of hooks, which is counted, and which a destroyed module leaves. */
#include "nn/module.h"

#include "base/option_rules.h"

#include <stdlib.h>

struct hook {
    struct hook *next;
    uint64_t id;
    td_module_hooks functions;
};

struct td__module_hook_list {
    atomic_int owners;
    td_module *module; /* NULL: it was destroyed, and no hook runs any more */
    struct hook *first;
    uint64_t last_id;
};

/* A forward whose gradients the hooks will see. */
struct hooked_call {
    atomic_int owners;
    struct td__module_hook_list *list;
    bool has_inputs;             /* an input requires grad: there is a node for the inputs */
    td_tensor_list grad_results; /* retained */
};

/* Which tensors of a list a node has: those that require grad. */
struct hooked_node {
    struct hooked_call *call;
    int list_count;
    int count;
    int index[TD_TENSOR_LIST_MAX]; /* in the list */
};

/* ---- Lists of hooks -------------------------------------------------------------------------------- */

static void release_list(struct td__module_hook_list *list)
{
    if (atomic_fetch_sub(&list->owners, 1) > 1)
        return;
    for (struct hook *hook = list->first, *next; hook; hook = next) {
        next = hook->next;
        free(hook);
    }
    free(list);
}

void td__module_leave_hooks(td_module *module)
{
    if (!module->hooks)
        return;
    module->hooks->module = NULL;
    release_list(module->hooks);
}

static struct td__module_hook_list *list_of(td_module *module)
{
    if (!module->hooks && (module->hooks = calloc(1, sizeof *module->hooks))) {
        atomic_init(&module->hooks->owners, 1);
        module->hooks->module = module;
    }
    return module->hooks;
}

td_status td_module_add_hooks(td_module *module, const td_module_hooks *hooks, uint64_t *id)
{
    if (!module || !hooks)
        return td__fail_null(__func__);
    TD_TRY(td__check_reserved(__func__, hooks->reserved));
    if (!hooks->forward_pre && !hooks->forward && !hooks->backward_pre && !hooks->backward)
        return td_fail(TD_ERR_INVALID, "%s: all four functions are NULL", __func__);
    struct td__module_hook_list *list = list_of(module);
    struct hook *hook = list ? calloc(1, sizeof *hook) : NULL, **end;
    if (!hook)
        return td__fail_nomem(__func__);
    *hook = (struct hook){.id = ++list->last_id, .functions = *hooks};
    for (end = &list->first; *end; end = &(*end)->next)
        ;
    *end = hook;
    if (id)
        *id = hook->id;
    return TD_OK;
}

td_status td_module_remove_hooks(td_module *module, uint64_t id)
{
    if (!module)
        return td__fail_null(__func__);
    for (struct hook **at = module->hooks ? &module->hooks->first : NULL; at && *at;
         at = &(*at)->next) {
        struct hook *hook = *at;
        if (hook->id != id)
            continue;
        *at = hook->next;
        free(hook);
        return TD_OK;
    }
    return td_fail(TD_ERR_INVALID, "%s: the %s has no hooks of the number %llu", __func__,
                   module->ops->name, (unsigned long long)id);
}

bool td__module_is_hooked(const td_module *module)
{
    return module->hooks && module->hooks->first;
}

static bool has_backward(const struct td__module_hook_list *list)
{
    for (const struct hook *hook = list->first; hook; hook = hook->next)
        if (hook->functions.backward_pre || hook->functions.backward)
            return true;
    return false;
}

/* ---- What hooks may do with a list ------------------------------------------------------------------- */

static td_status check_count(const td_module *module, const char *hook, int count, int least)
{
    if (count >= least && count <= TD_TENSOR_LIST_MAX)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "td_forward: a %s hook of a %s left %d tensors; %d to %d are "
                   "possible",
                   hook, module->ops->name, count, least, TD_TENSOR_LIST_MAX);
}

static td_status check_present(const td_module *module, const char *hook,
                               const td_tensor_list *list)
{
    TD_TRY(check_count(module, hook, list->count, 1));
    for (int i = 0; i < list->count; i++)
        if (!list->at[i])
            return td_fail(TD_ERR_INVALID, "td_forward: a %s hook of a %s set tensor %d to NULL",
                           hook, module->ops->name, i);
    return TD_OK;
}

/* A hook may replace gradients, but there are as many as before, each like the one that it replaces. */
static td_status check_grads(const td_module *module, const char *hook,
                             const td_tensor_list *before, const td_tensor_list *after)
{
    bool same = before->count == after->count;
    int at = 0;
    for (int i = 0; same && i < after->count; i++) {
        const td_tensor *was = before->at[i], *is = after->at[i];
        same = was == is || !is || !was ||
               (td__same_shape(was, is) && was->layout.dtype == is->layout.dtype &&
                was->storage->device == is->storage->device);
        at = i;
    }
    if (same)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "td_backward: a %s hook of a %s replaced gradient %d by one of "
                   "another shape, dtype or device, or changed the number of gradients",
                   hook, module->ops->name, at);
}

/* ---- The nodes --------------------------------------------------------------------------------------- */

static void release_call(struct hooked_call *call)
{
    if (atomic_fetch_sub(&call->owners, 1) > 1)
        return;
    for (int i = 0; i < call->grad_results.count; i++)
        td_tensor_release(call->grad_results.at[i]);
    release_list(call->list);
    free(call);
}

static void free_node_data(void *data)
{
    release_call(((struct hooked_node *)data)->call);
}

/* The gradients that a node got, at their places in the list. */
static td_tensor_list list_grads(const struct hooked_node *node, td_tensor *const *grads)
{
    td_tensor_list list = {.count = node->list_count};
    for (int i = 0; i < node->count; i++)
        list.at[node->index[i]] = grads[i];
    return list;
}

static td_status run_backward_hooks(struct hooked_call *call, td_tensor_list *grad_inputs)
{
    td_module *module = call->list->module;
    for (struct hook *hook = module ? call->list->first : NULL; hook; hook = hook->next) {
        td_tensor_list before = *grad_inputs;
        if (!hook->functions.backward)
            continue;
        TD_TRY(hook->functions.backward(module, grad_inputs, &call->grad_results,
                                        hook->functions.arg));
        TD_TRY(check_grads(module, "backward", &before, grad_inputs));
    }
    return TD_OK;
}

static td_status inputs_backward(td_node *node, td_tensor *const *grads, td_tensor **grad_inputs)
{
    const struct hooked_node *data = td_node_data(node);
    td_tensor_list list = list_grads(data, grads);
    TD_TRY(run_backward_hooks(data->call, &list));
    for (int i = 0; i < data->count; i++)
        grad_inputs[i] = list.at[data->index[i]];
    return TD_OK;
}

/* Leaves the gradients of the results for the backward hooks; a retained graph may run again. */
static void keep_grad_results(struct hooked_call *call, const td_tensor_list *list)
{
    for (int i = 0; i < call->grad_results.count; i++)
        td_tensor_release(call->grad_results.at[i]);
    call->grad_results = *list;
    for (int i = 0; i < list->count; i++)
        td_tensor_retain(list->at[i]);
}

static td_status results_backward(td_node *node, td_tensor *const *grads, td_tensor **grad_inputs)
{
    const struct hooked_node *data = td_node_data(node);
    struct hooked_call *call = data->call;
    td_module *module = call->list->module;
    td_tensor_list list = list_grads(data, grads);
    for (struct hook *hook = module ? call->list->first : NULL; hook; hook = hook->next) {
        td_tensor_list before = list;
        if (!hook->functions.backward_pre)
            continue;
        TD_TRY(hook->functions.backward_pre(module, &list, hook->functions.arg));
        TD_TRY(check_grads(module, "backward_pre", &before, &list));
    }
    keep_grad_results(call, &list);
    if (!call->has_inputs)
        TD_TRY(run_backward_hooks(call, &(td_tensor_list){0}));
    for (int i = 0; i < data->count; i++)
        grad_inputs[i] = list.at[data->index[i]];
    return TD_OK;
}

static const td_function inputs_function = {
    .name = "inputs of a module", .backward = inputs_backward, .free_data = free_node_data};
static const td_function results_function = {
    .name = "results of a module", .backward = results_backward, .free_data = free_node_data};

/* Replaces the tensors of a list that require grad by outputs of a node; the others stay. *found: whether there are
 * any. */
static td_status pass_through(const td_function *function, struct hooked_call *call,
                              td_tensor_list *list, bool *found)
{
    struct hooked_node data = {.call = call, .list_count = list->count};
    td_tensor *from[TD_TENSOR_LIST_MAX], *to[TD_TENSOR_LIST_MAX];
    for (int i = 0; i < list->count; i++) {
        if (!td_tensor_requires_grad(list->at[i]))
            continue;
        from[data.count] = list->at[i];
        to[data.count] = td__adopt(td__alias(list->at[i]));
        if (!to[data.count])
            return TD_ERR_NOMEM;
        data.index[data.count++] = i;
    }
    *found = data.count > 0;
    if (!data.count)
        return TD_OK;
    td_node_spec spec = {.input_count = data.count, .data = &data, .data_size = sizeof data};
    if (data.count > TD_NODE_MAX_TENSORS)
        spec.more_inputs = from;
    for (int i = 0; i < data.count && !spec.more_inputs; i++)
        spec.inputs[i] = from[i];
    atomic_fetch_add(&call->owners, 1);
    td_status status = td_record_all(function, to, data.count, &spec);
    if (status) {
        release_call(call);
        return status;
    }
    for (int i = 0; i < data.count; i++)
        list->at[data.index[i]] = to[i];
    return TD_OK;
}

static struct hooked_call *create_call(struct td__module_hook_list *list)
{
    struct hooked_call *call = calloc(1, sizeof *call);
    if (!call) {
        td__fail_nomem("td_forward");
        return NULL;
    }
    atomic_init(&call->owners, 1);
    atomic_fetch_add(&list->owners, 1);
    call->list = list;
    return call;
}

/* ---- Forward ----------------------------------------------------------------------------------------- */

static td_status run_forward_hooks(td_module *module, const td_tensor_list *inputs,
                                   td_tensor_list *results)
{
    for (struct hook *hook = module->hooks->first; hook; hook = hook->next) {
        if (!hook->functions.forward)
            continue;
        TD_TRY(hook->functions.forward(module, inputs, results, hook->functions.arg));
        TD_TRY(check_present(module, "forward", results));
    }
    return TD_OK;
}

static td_status run_hooked(td_module *module, td_tensor_list *inputs, td_tensor_list *results,
                            struct hooked_call *call, td__forward_run run)
{
    bool found = false;
    for (struct hook *hook = module->hooks->first; hook; hook = hook->next) {
        if (!hook->functions.forward_pre)
            continue;
        TD_TRY(hook->functions.forward_pre(module, inputs, hook->functions.arg));
        TD_TRY(check_present(module, "forward_pre", inputs));
    }
    if (call)
        TD_TRY(pass_through(&inputs_function, call, inputs, &call->has_inputs));
    TD_TRY(run(module, inputs, results));
    TD_TRY(run_forward_hooks(module, inputs, results));
    return call ? pass_through(&results_function, call, results, &found) : TD_OK;
}

td_status td__module_run_hooked(td_module *module, const td_tensor_list *inputs,
                                td_tensor_list *results, td__forward_run run)
{
    TD_SCOPE;
    td_tensor_list given = *inputs;
    struct hooked_call *call = NULL;
    if (has_backward(module->hooks) && td_grad_enabled() && !(call = create_call(module->hooks)))
        return TD_ERR_NOMEM;
    *results = (td_tensor_list){0};
    td_status status = run_hooked(module, &given, results, call, run);
    if (call)
        release_call(call);
    for (int i = 0; !status && i < results->count; i++)
        status = td_scope_return(results->at[i]) ? TD_OK : TD_ERR_NOMEM;
    if (status)
        *results = (td_tensor_list){0};
    return status;
}
