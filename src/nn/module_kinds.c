/* The kinds of modules by name, and their options as named numbers: what a module is sent by, besides its tensors.
 *
 * A received module is made from its kind's table, gets its parts, and then its data by load_options, which checks
 * the numbers and the parts that forward and describe rely on. */
#include "nn/module.h"

#include "base/map.h"
#include "base/option_rules.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct kind {
    struct td__map_node by_name;
    const td_module_ops *ops;
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct td__map kinds; /* those that programs have registered; never removed */

/* ---- Kinds by name ------------------------------------------------------------------------------ */

static const td_module_ops *built_in(const char *name)
{
    static const td_module_ops *const *const lists[] = {
        td__activation_kinds, td__attention_kinds,  td__conv_kinds,       td__linear_kinds,
        td__norm_kinds,       td__sequential_kinds, td__transformer_kinds};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        for (const td_module_ops *const *ops = lists[i]; *ops; ops++)
            if (strcmp((*ops)->name, name) == 0)
                return *ops;
    return NULL;
}

static const td_module_ops *registered(const char *name)
{
    struct td__map_node *node = td__map_find(&kinds, name, strlen(name));
    return node ? TD__CONTAINER(node, struct kind, by_name)->ops : NULL;
}

static const td_module_ops *find(const char *name)
{
    const td_module_ops *ops = built_in(name);
    if (ops)
        return ops;
    pthread_rwlock_rdlock(&lock);
    ops = registered(name);
    pthread_rwlock_unlock(&lock);
    return ops;
}

const td_module_ops *td__module_kind(const char *name)
{
    const td_module_ops *ops = find(name);
    if (!ops)
        td_fail(TD_ERR_INVALID,
                "there is no kind of module \"%.100s\" in this process; td_register_module() "
                "registers one",
                name);
    return ops;
}

/* Adds a kind; the lock is held. */
static td_status add(const td_module_ops *ops)
{
    const td_module_ops *other = built_in(ops->name);
    if (!other)
        other = registered(ops->name);
    if (other == ops)
        return TD_OK;
    if (other)
        return td_fail(TD_ERR_STATE, "td_register_module: there is another kind \"%s\" already",
                       ops->name);
    struct kind *kind = calloc(1, sizeof *kind);
    if (!kind)
        return td__fail_nomem("td_register_module");
    *kind = (struct kind){.by_name = {.key = ops->name, .key_size = strlen(ops->name)}, .ops = ops};
    if (td__map_insert(&kinds, &kind->by_name))
        return TD_OK;
    free(kind);
    return td__fail_nomem("td_register_module");
}

td_status td_register_module(const td_module_ops *ops)
{
    if (!ops || !ops->name || !ops->name[0])
        return td_fail(TD_ERR_INVALID, "td_register_module: the %s",
                       ops ? "kind has no name" : "table of functions is NULL");
    TD_TRY(td__check_reserved_of(__func__, ops->reserved, 2));
    if ((ops->data_size && !ops->save_options) ||
        ((ops->data_size || ops->save_options) && !ops->load_options))
        return td_fail(TD_ERR_INVALID, "td_register_module: \"%s\" has %s, so it needs %s",
                       ops->name, ops->data_size ? "data" : "save_options",
                       ops->data_size ? "save_options and load_options" : "load_options");
    pthread_rwlock_wrlock(&lock);
    td_status status = add(ops);
    pthread_rwlock_unlock(&lock);
    return status;
}

/* ---- The options of a module -------------------------------------------------------------------- */

/* The status of a function of a kind, with an error if it has failed without setting one. */
static td_status result_of(const td_module *module, const char *function, td_status status,
                           uint64_t errors_before)
{
    if (!status || td__error_count() != errors_before)
        return status;
    return td_fail(status, "%s of a %s has failed", function, module->ops->name);
}

td_state *td__module_save_options(const td_module *module)
{
    const td_module_ops *ops = module->ops;
    td_state *options = td_state_create();
    if (!options)
        return NULL;
    uint64_t errors = td__error_count();
    td_status status = ops->save_options ? ops->save_options(module, options) : TD_OK;
    status = result_of(module, "save_options", status, errors);
    if (!status && find(ops->name) != ops)
        status = td_fail(TD_ERR_INVALID,
                         "a module of the kind \"%s\" cannot be sent: td_register_module() must "
                         "register the kind, here and in the process that receives it",
                         ops->name);
    if (!status)
        return options;
    td_state_destroy(options);
    return NULL;
}

td_status td__module_load_options(td_module *module, const td_state *options)
{
    if (!module->ops->load_options)
        return td__options_load(module, options, NULL, 0);
    uint64_t errors = td__error_count();
    return result_of(module, "load_options", module->ops->load_options(module, options), errors);
}

td_status td__options_save(const td_module *module, td_state *options,
                           const struct td__kind_option *list, int count)
{
    for (int i = 0; i < count; i++) {
        const char *name = list[i].name;
        const void *at = (const char *)module->data + list[i].offset;
        switch (list[i].type) {
        case TD__OPTION_BOOL:
            TD_TRY(td_state_add_integer(options, name, *(const bool *)at));
            break;
        case TD__OPTION_INT:
            TD_TRY(td_state_add_integer(options, name, *(const int *)at));
            break;
        case TD__OPTION_INT64:
            TD_TRY(td_state_add_integer(options, name, *(const int64_t *)at));
            break;
        case TD__OPTION_DOUBLE:
            TD_TRY(td_state_add_number(options, name, *(const double *)at));
            break;
        }
    }
    return TD_OK;
}

static td_status load_option(td_module *module, const td_state *options,
                             const struct td__kind_option *option)
{
    bool is_bool = option->type == TD__OPTION_BOOL;
    double least = is_bool ? 0 : option->least, most = is_bool ? 1 : option->most, number = 0;
    int64_t integer = 0;
    if (!td_state_get(options, option->name))
        return td_fail(TD_ERR_INVALID, "a received %s has no option \"%s\"", module->ops->name,
                       option->name);
    if (option->type == TD__OPTION_DOUBLE) {
        TD_TRY(td_state_get_number(options, option->name, &number));
    } else {
        TD_TRY(td_state_get_integer(options, option->name, &integer));
        number = (double)integer;
    }
    if (!(number >= least && number <= most))
        return td_fail(TD_ERR_INVALID,
                       "the option \"%s\" of a received %s is %g; it must be %g to %g",
                       option->name, module->ops->name, number, least, most);
    void *at = (char *)module->data + option->offset;
    switch (option->type) {
    case TD__OPTION_BOOL:
        *(bool *)at = integer;
        break;
    case TD__OPTION_INT:
        *(int *)at = (int)integer;
        break;
    case TD__OPTION_INT64:
        *(int64_t *)at = integer;
        break;
    case TD__OPTION_DOUBLE:
        *(double *)at = number;
        break;
    }
    return TD_OK;
}

td_status td__options_load(td_module *module, const td_state *options,
                           const struct td__kind_option *list, int count)
{
    for (int i = 0; i < count; i++)
        TD_TRY(load_option(module, options, &list[i]));
    if (td_state_count(options) != count) /* all of the list are among them */
        return td_fail(TD_ERR_INVALID, "a received %s has %d options; there are %d",
                       module->ops->name, td_state_count(options), count);
    return TD_OK;
}

/* ---- Checks of parts ---------------------------------------------------------------------------- */

static bool fits(const struct td__module_tensor *entry, const struct td__kind_tensor *expected)
{
    const td_tensor *tensor = entry->tensor;
    td_dtype dtype = td_tensor_dtype(tensor);
    bool is_float = dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
    if (strcmp(entry->name, expected->name) != 0 || tensor->layout.ndim != expected->ndim)
        return false;
    for (int d = 0; d < expected->ndim; d++)
        if (tensor->layout.shape[d] != expected->shape[d])
            return false;
    return expected->is_count ? dtype == TD_I64 : is_float;
}

static td_status check_tensors(const td_module *module, const char *what,
                               const struct td__module_tensors *entries,
                               const struct td__kind_tensor *list, int count)
{
    if (entries->count != count)
        return td_fail(TD_ERR_INVALID, "a received %s has %d %ss; it must have %d",
                       module->ops->name, entries->count, what, count);
    for (int i = 0; i < count; i++)
        if (!fits(&entries->at[i], &list[i]))
            return td_fail(TD_ERR_INVALID,
                           "a received %s has the %s \"%.60s\" %s %s; it must be \"%s\" %s %s",
                           module->ops->name, what, entries->at[i].name,
                           td_dtype_name(td_tensor_dtype(entries->at[i].tensor)),
                           td__shape_of(entries->at[i].tensor), list[i].name,
                           list[i].is_count ? "i64" : "of a floating-point dtype",
                           td__shape_text(list[i].shape, list[i].ndim));
    return TD_OK;
}

td_status td__check_parameters(const td_module *module, const struct td__kind_tensor *list,
                               int count)
{
    return check_tensors(module, "parameter", &module->parameters, list, count);
}

td_status td__check_buffers(const td_module *module, const struct td__kind_tensor *list, int count)
{
    return check_tensors(module, "buffer", &module->buffers, list, count);
}

td_status td__check_children(const td_module *module, const char *const *names, int count,
                             int optional)
{
    if (module->child_count > count || module->child_count < count - optional)
        return td_fail(TD_ERR_INVALID, "a received %s has %d children; it must have %d",
                       module->ops->name, module->child_count, count);
    for (int i = 0; i < module->child_count; i++)
        if (strcmp(module->children[i].name, names[i]) != 0)
            return td_fail(TD_ERR_INVALID,
                           "a received %s has the child \"%.60s\"; it must be \"%s\"",
                           module->ops->name, module->children[i].name, names[i]);
    return TD_OK;
}
