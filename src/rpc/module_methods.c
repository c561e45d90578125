/* The methods of modules that are reached by references; see td_rref_sync(). */
#include "base/fail.h"
#include "rpc/rpc_agent.h"

#include <string.h>

typedef td_value *(*method_fn)(td_module *module, td_value *const *args, int count);

static td_value *forward(td_module *module, td_value *const *args, int count)
{
    td_tensor_list inputs = {0}, results;
    for (int i = 0; i < count; i++)
        if (td_tensor_list_add(&inputs, NULL, td_value_tensor(args[i])))
            return NULL;
    if (td_forward_list(module, &inputs, &results))
        return NULL;
    if (results.count == 1)
        return td_value_from_tensor(results.at[0]);
    td_value *values[TD_TENSOR_LIST_MAX];
    for (int i = 0; i < results.count; i++)
        values[i] = td_value_from_tensor(results.at[i]);
    return td_value_list(values, results.count);
}

/* References to all parameters, in order. */
static td_value *parameters(td_module *module, td_value *const *args, int count)
{
    (void)args;
    (void)count;
    return td_remote_parameters(module);
}

/* What a remote module calls in place of forward: names, and whether to record a graph. */
static td_value *call_with_names(td_module *module, td_value *const *args, int count)
{
    (void)count;
    return td__module_call(module, args);
}

/* What a remote module knows of it. */
static td_value *about(td_module *module, td_value *const *args, int count)
{
    (void)args;
    (void)count;
    td_bytes text = td_module_text(module);
    td_value *result = text.data ? TD_ARGS((const char *)text.data,
                                           td_value_from_bool(td_module_is_training(module)))
                                 : NULL;
    td_bytes_free(&text);
    return result;
}

static td_value *parameter(td_module *module, td_value *const *args, int count)
{
    (void)count;
    return td_value_from_tensor(td_module_parameter(module, td_value_text(args[0])));
}

static td_value *state(td_module *module, td_value *const *args, int count)
{
    (void)args;
    (void)count;
    td_state *all = td_module_state(module);
    td_value *map = all ? td_value_map() : NULL;
    for (int i = 0; map && i < td_state_count(all); i++)
        map = td_value_set(map, td_state_name(all, i),
                           td_value_from_tensor(td_state_tensor(all, i)));
    td_state_destroy(all);
    return map;
}

static td_value *load_state(td_module *module, td_value *const *args, int count)
{
    (void)count;
    td_state *all = td_state_create();
    td_status status = all ? TD_OK : TD_ERR_NOMEM;
    for (int64_t i = 0; !status && i < td_value_count(args[0]); i++)
        status = td_state_add(all, td_value_key(args[0], i),
                              td_value_tensor(td_value_at(args[0], i)));
    if (!status)
        status = td_module_load_state(module, all, true);
    td_state_destroy(all);
    return status ? NULL : td_value_nil();
}

static td_value *train(td_module *module, td_value *const *args, int count)
{
    (void)count;
    td_module_train(module, args[0]->boolean);
    return td_value_nil();
}

static td_value *whole(td_module *module, td_value *const *args, int count)
{
    (void)args;
    (void)count;
    return td_value_from_module(td_module_clone(module));
}

static struct {
    const char *text;
    method_fn fn;
    struct td__signature *signature;
} methods[] = {
    {"forward(inputs...: tensor)", forward, NULL},
    {"call(inputs: list, names: list, records: bool)", call_with_names, NULL},
    {"about()", about, NULL},
    {"parameters()", parameters, NULL},
    {"parameter(name: text)", parameter, NULL},
    {"state()", state, NULL},
    {"load_state(state: map)", load_state, NULL},
    {"train(training: bool = true)", train, NULL},
    {"module()", whole, NULL},
};

enum { METHODS = sizeof methods / sizeof methods[0] };

static void parse_all(void)
{
    for (int i = 0; i < METHODS; i++)
        if (td__signature_parse(methods[i].text, &methods[i].signature))
            methods[i].signature = NULL;
}

td_value *td__module_method(td_rpc_call *call, td_module *module, const char *method,
                            td_value *args, td_value *kwargs)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct td__bound bound;
    (void)call;
    pthread_once(&once, parse_all);
    for (int i = 0; i < METHODS; i++) {
        struct td__signature *signature = methods[i].signature;
        if (!signature || strcmp(td__signature_name(signature), method) != 0)
            continue;
        if (td__signature_bind(signature, args, kwargs, &bound))
            return NULL;
        td_value *result = methods[i].fn(module, bound.values, bound.count);
        td__bound_free(&bound);
        return result;
    }
    td_fail(TD_ERR_INVALID, "a module has no method \"%.100s\"", method);
    return NULL;
}
