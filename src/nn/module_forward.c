/* Running modules with one result (ops->forward) or several (ops->forward_list), by either call. */
#include "nn/module.h"

#include "base/option_rules.h"

#include <string.h>

/* ---- Lists ------------------------------------------------------------------------------------------- */

td_tensor *td_tensor_list_get(const td_tensor_list *list, const char *name)
{
    for (int i = 0; list && name && i < list->count; i++)
        if (list->names[i] && strcmp(list->names[i], name) == 0)
            return list->at[i];
    return NULL;
}

td_status td_tensor_list_add(td_tensor_list *list, const char *name, td_tensor *tensor)
{
    if (!list || !tensor)
        return td__fail_null(__func__);
    if (td_tensor_list_get(list, name))
        return td_fail(TD_ERR_INVALID, "td_tensor_list_add: there is a tensor \"%s\" already",
                       name);
    if (list->count < 0 || list->count >= TD_TENSOR_LIST_MAX)
        return td_fail(TD_ERR_INVALID, "td_tensor_list_add: a list has %d tensors at most",
                       TD_TENSOR_LIST_MAX);
    list->at[list->count] = tensor;
    list->names[list->count++] = name;
    return TD_OK;
}

/* ---- Running ----------------------------------------------------------------------------------------- */

static td_status check(const td_module *module, td_tensor *const *inputs, int count)
{
    if (!module)
        return td__fail_null("td_forward");
    const td_module_ops *ops = module->ops;
    for (int i = 0; i < count; i++)
        if (!inputs[i])
            return td__fail_null("td_forward");
    if (count < 1)
        return td_fail(TD_ERR_INVALID, "td_forward: a %s needs at least one input", ops->name);
    if (module->failure)
        return td_fail(TD_ERR_INVALID, "td_forward: a %s could not be made: %s", ops->name,
                       module->reason ? module->reason : "out of memory");
    if (!ops->forward && !ops->forward_list)
        return td_fail(TD_ERR_INVALID, "td_forward: a %s has no forward of its own", ops->name);
    if ((ops->forward_list || td__module_is_hooked(module)) && count > TD_TENSOR_LIST_MAX)
        return td_fail(TD_ERR_INVALID, "td_forward: a %s%s takes %d inputs at most, not %d",
                       ops->name, td__module_is_hooked(module) ? " with hooks" : "",
                       TD_TENSOR_LIST_MAX, count);
    return TD_OK;
}

/* Runs a module with forward_list. The results belong to the scope around this call. */
static td_status run_list(td_module *module, const td_tensor_list *inputs, td_tensor_list *results)
{
    TD_SCOPE;
    td_status status = module->ops->forward_list(module, inputs, results);
    if (!status && (results->count < 1 || results->count > TD_TENSOR_LIST_MAX))
        status = td_fail(TD_ERR_INVALID,
                         "td_forward: a %s returned %d results; 1 to %d are "
                         "possible",
                         module->ops->name, results->count, TD_TENSOR_LIST_MAX);
    for (int i = 0; !status && i < results->count; i++)
        if (!td_scope_return(results->at[i]))
            status = results->at[i] ? TD_ERR_NOMEM : TD_ERR_INVALID;
    if (status)
        *results = (td_tensor_list){0};
    return status;
}

/* Runs a module by either function. */
static td_status run_any(td_module *module, const td_tensor_list *inputs, td_tensor_list *results)
{
    if (module->ops->forward_list)
        return run_list(module, inputs, results);
    TD_SCOPE;
    td_tensor *y = td_scope_return(module->ops->forward(module, inputs->at, inputs->count));
    *results = (td_tensor_list){.count = y ? 1 : 0, .at = {y}};
    return y ? TD_OK : td__error_status();
}

static td_status run(td_module *module, const td_tensor_list *inputs, td_tensor_list *results)
{
    return td__module_is_hooked(module) ? td__module_run_hooked(module, inputs, results, run_any)
                                        : run_any(module, inputs, results);
}

td_tensor *td_forward_with(td_module *module, td_tensor *const *inputs, int count)
{
    if (check(module, inputs, count))
        return NULL;
    if (module->ops->forward && !td__module_is_hooked(module)) {
        TD_SCOPE;
        return td_scope_return(module->ops->forward(module, inputs, count));
    }
    td_tensor_list list = {.count = count}, results = {0};
    memcpy(list.at, inputs, (size_t)count * sizeof inputs[0]);
    if (run(module, &list, &results))
        return NULL;
    if (results.count == 1)
        return results.at[0];
    td_fail(TD_ERR_INVALID,
            "td_forward: a %s returned %d results; td_forward_list() returns "
            "them all",
            module->ops->name, results.count);
    return NULL;
}

td_tensor *td_forward(td_module *module, td_tensor *x)
{
    return td_forward_with(module, &x, 1);
}

td_status td_forward_list(td_module *module, const td_tensor_list *inputs, td_tensor_list *results)
{
    td_tensor_list given = inputs ? *inputs : (td_tensor_list){0};
    *results = (td_tensor_list){0};
    if (given.count > TD_TENSOR_LIST_MAX)
        return td_fail(TD_ERR_INVALID, "td_forward_list: a list has %d tensors at most, not %d",
                       TD_TENSOR_LIST_MAX, given.count);
    TD_TRY(td__check_reserved(__func__, given.reserved));
    TD_TRY(check(module, given.at, given.count));
    return run(module, &given, results);
}
