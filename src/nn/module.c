/* Modules: construction, parts, destruction.
 *
 * While a module is built, its first failure is kept, so that callers need not check each call:
 * td_module_finish() returns the module or reports that failure. */
#include "nn/module.h"

#include "base/option_rules.h"

#include <stdlib.h>
#include <string.h>

/* ---- Life --------------------------------------------------------------------------------------- */

td_module *td_module_create(const td_module_ops *ops)
{
    if (!ops || !ops->name) {
        td_fail(TD_ERR_INVALID, "td_module_create: the %s is NULL",
                ops ? "name of the kind" : "table of functions");
        return NULL;
    }
    if (td__check_reserved_of(__func__, ops->reserved, 2))
        return NULL;
    td_module *module = calloc(1, sizeof *module);
    void *data = module && ops->data_size ? calloc(1, ops->data_size) : NULL;
    if (!module || (ops->data_size && !data)) {
        free(module);
        td__fail_nomem("td_module_create");
        return NULL;
    }
    module->ops = ops;
    module->data = data;
    module->training = true;
    return module;
}

static void free_tensors(struct td__module_tensors *entries)
{
    for (int i = 0; i < entries->count; i++) {
        td_tensor_release(entries->at[i].tensor);
        free(entries->at[i].name);
    }
    free(entries->at);
}

struct td__module_attachment {
    struct td__module_attachment *next;
    const void *key;
    void *arg;
    void (*free_fn)(void *arg);
};

td_status td__module_attach(td_module *module, const void *key, void *arg,
                            void (*free_fn)(void *arg))
{
    struct td__module_attachment *attachment = malloc(sizeof *attachment);
    if (!attachment)
        return td__fail_nomem("module");
    *attachment = (struct td__module_attachment){
        .next = module->attachments, .key = key, .arg = arg, .free_fn = free_fn};
    module->attachments = attachment;
    return TD_OK;
}

void *td__module_attached(const td_module *module, const void *key)
{
    for (const struct td__module_attachment *a = module->attachments; a; a = a->next)
        if (a->key == key)
            return a->arg;
    return NULL;
}

void td__module_detach(td_module *module, const void *key)
{
    for (struct td__module_attachment **at = &module->attachments; *at; at = &(*at)->next)
        if ((*at)->key == key) {
            struct td__module_attachment *found = *at;
            *at = found->next;
            free(found);
            return;
        }
}

/* Before the children, whose tensors a function may still use. */
static void free_attachments(td_module *module)
{
    for (struct td__module_attachment *next; module->attachments; module->attachments = next) {
        struct td__module_attachment *attachment = module->attachments;
        next = attachment->next;
        attachment->free_fn(attachment->arg);
        free(attachment);
    }
}

static void destroy(td_module *module)
{
    free_attachments(module);
    for (int i = 0; i < module->child_count; i++) {
        destroy(module->children[i].module);
        free(module->children[i].name);
    }
    free_tensors(&module->parameters);
    free_tensors(&module->buffers);
    if (module->ops->free_data)
        module->ops->free_data(module->data);
    td__module_leave_hooks(module);
    free(module->data);
    free(module->children);
    free(module->reason);
    free(module);
}

void td_module_destroy(td_module *module)
{
    if (!module)
        return;
    if (module->parent) {
        td_log(TD_LOG_ERROR, "td_module_destroy: a %s is a child of a %s, which destroys it",
               module->ops->name, module->parent->ops->name);
        return;
    }
    destroy(module);
}

void td__modules_destroy(td_module *const *modules, int count)
{
    for (int i = 0; i < count; i++) {
        bool again = false; /* a list may contain one twice by mistake */
        for (int j = 0; j < i; j++)
            again = again || modules[j] == modules[i];
        if (modules[i] && !again && !modules[i]->parent)
            destroy(modules[i]);
    }
}

/* ---- Putting together --------------------------------------------------------------------------- */

td_status td__module_set_failure(td_module *module, td_status status)
{
    if (module && status && !module->failure) {
        module->failure = status;
        module->reason = strdup(td__error_text());
    }
    return status;
}

td_module *td_module_finish(td_module *module)
{
    if (!module || !module->failure)
        return module;
    td_fail(module->failure, "%s", module->reason ? module->reason : "out of memory");
    td_module_destroy(module);
    return NULL;
}

static bool has_tensor(const struct td__module_tensors *entries, const char *name)
{
    for (int i = 0; i < entries->count; i++)
        if (strcmp(entries->at[i].name, name) == 0)
            return true;
    return false;
}

static bool has_child(const td_module *module, const char *name)
{
    for (int i = 0; i < module->child_count; i++)
        if (strcmp(module->children[i].name, name) == 0)
            return true;
    return false;
}

static td_status check_name(const td_module *module, const char *call, const char *name)
{
    if (!name || !name[0] || strchr(name, '.'))
        return td_fail(TD_ERR_INVALID,
                       "%s: \"%s\" is no name for a part of a %s; it must not be empty or "
                       "contain a dot",
                       call, name ? name : "(NULL)", module->ops->name);
    if (has_tensor(&module->parameters, name) || has_tensor(&module->buffers, name) ||
        has_child(module, name))
        return td_fail(TD_ERR_INVALID, "%s: the %s has a part of the name \"%s\" already", call,
                       module->ops->name, name);
    return TD_OK;
}

static td_status add_tensor(td_module *module, const char *call, const char *name,
                            td_tensor *tensor, bool is_buffer, bool saved)
{
    TD_TRY(check_name(module, call, name));
    struct td__module_tensors *entries = is_buffer ? &module->buffers : &module->parameters;
    if (entries->count == entries->capacity) {
        int capacity = entries->capacity ? entries->capacity * 2 : 4;
        struct td__module_tensor *at = realloc(entries->at, (size_t)capacity * sizeof at[0]);
        if (!at)
            return td__fail_nomem(call);
        entries->at = at;
        entries->capacity = capacity;
    }
    char *copy = strdup(name);
    if (!copy)
        return td__fail_nomem(call);
    if (!is_buffer && !td_tensor_requires_grad(tensor)) {
        td_status status = td_tensor_set_requires_grad(tensor, true);
        if (status) {
            free(copy);
            return status;
        }
    }
    entries->at[entries->count++] = (struct td__module_tensor){
        .name = copy, .tensor = td_tensor_retain(tensor), .is_buffer = is_buffer, .saved = saved};
    return TD_OK;
}

static td_status check_given(const char *call, td_module *module, const void *part)
{
    if (module && part)
        return TD_OK;
    return td__module_set_failure(module, td__fail_null(call));
}

td_status td_module_add_parameter(td_module *module, const char *name, td_tensor *tensor)
{
    TD_TRY(check_given(__func__, module, tensor));
    return td__module_set_failure(
        module, add_tensor(module, "td_module_add_parameter", name, tensor, false, true));
}

td_tensor *td_module_new_parameter(td_module *module, const char *name, const int64_t *shape,
                                   int ndim, td_dtype dtype)
{
    if (!module)
        return td__null(__func__);
    td_device *device = td__use_device("td_module_new_parameter", NULL);
    td_tensor *tensor = device ? td__empty("td_module_new_parameter", shape, ndim, dtype, device)
                               : NULL;
    td_status status = td_module_add_parameter(module, name, tensor);
    td_tensor_release(tensor);
    return status ? NULL : tensor; /* the module holds a reference */
}

td_status td_module_add_buffer(td_module *module, const char *name, td_tensor *tensor, bool saved)
{
    TD_TRY(check_given(__func__, module, tensor));
    return td__module_set_failure(
        module, add_tensor(module, "td_module_add_buffer", name, tensor, true, saved));
}

td_tensor *td__module_new_buffer(td_module *module, const char *name, const int64_t *shape,
                                 int ndim, td_dtype dtype, double value)
{
    if (!module)
        return NULL;
    td_device *device = td__use_device(module->ops->name, NULL);
    td_tensor *tensor = device ? td__empty(module->ops->name, shape, ndim, dtype, device) : NULL;
    td_status status = tensor ? td_fill_(tensor, value) : TD_ERR_NOMEM;
    if (status)
        td__module_set_failure(module, status);
    else
        status = td_module_add_buffer(module, name, tensor, true);
    td_tensor_release(tensor);
    return status ? NULL : tensor;
}

td_tensor *td__module_filled_parameter(td_module *module, const char *name, const int64_t *shape,
                                       int ndim, double value)
{
    td_tensor *tensor = td_module_new_parameter(module, name, shape, ndim, TD_F32);
    if (tensor && td__module_set_failure(module, td_init_constant(tensor, value)))
        return NULL;
    return tensor;
}

static bool is_inside(const td_module *module, const td_module *inner)
{
    for (; inner; inner = inner->parent)
        if (inner == module)
            return true;
    return false;
}

static td_status add_child(td_module *module, const char *name, td_module *child)
{
    const char *call = "td_module_add_child";
    TD_TRY(check_name(module, call, name));
    if (child->parent || is_inside(child, module))
        return td_fail(TD_ERR_INVALID, "%s: \"%s\", a %s, is a child of a %s already; clone it",
                       call, name, child->ops->name,
                       child->parent ? child->parent->ops->name : module->ops->name);
    if (module->child_count == module->child_capacity) {
        int capacity = module->child_capacity ? module->child_capacity * 2 : 4;
        struct td__child *children = realloc(module->children,
                                             (size_t)capacity * sizeof children[0]);
        if (!children)
            return td__fail_nomem(call);
        module->children = children;
        module->child_capacity = capacity;
    }
    char *copy = strdup(name);
    if (!copy)
        return td__fail_nomem(call);
    module->children[module->child_count++] = (struct td__child){.name = copy, .module = child};
    child->parent = module;
    return TD_OK;
}

td_status td_module_add_child(td_module *module, const char *name, td_module *child)
{
    td_status status = check_given(__func__, module, child);
    if (!status && child->failure) {
        td_module_finish(child); /* destroys it, and sets the last error */
        return td__module_set_failure(module, TD_ERR_INVALID);
    }
    if (!status)
        status = td__module_set_failure(module, add_child(module, name, child));
    if (status && !is_inside(child, module))
        td__modules_destroy(&child, child ? 1 : 0);
    return status;
}

td_status td_module_replace_child(td_module *module, int index, td_module *child)
{
    const char *call = "td_module_replace_child";
    if (!child)
        return td__fail_null(__func__);
    td_status status = TD_OK;
    if (!module || index < 0 || index >= module->child_count)
        status = td_fail(TD_ERR_INVALID, "%s: there is no child %d", call, index);
    else if (child->parent || is_inside(child, module))
        status = td_fail(TD_ERR_INVALID, "%s: a %s is a child of a module already; clone it", call,
                         child->ops->name);
    if (status) {
        if (!is_inside(child, module))
            td__modules_destroy(&child, 1);
        return status;
    }
    destroy(module->children[index].module);
    module->children[index].module = child;
    child->parent = module;
    return TD_OK;
}

/* ---- Looking ------------------------------------------------------------------------------------ */

void *td_module_data(const td_module *module)
{
    return module ? module->data : NULL;
}

const td_module_ops *td_module_ops_of(const td_module *module)
{
    return module ? module->ops : NULL;
}

td_tensor *td_param(const td_module *module, int index)
{
    return module && index >= 0 && index < module->parameters.count
               ? module->parameters.at[index].tensor
               : NULL;
}

td_tensor *td_buffer(const td_module *module, int index)
{
    return module && index >= 0 && index < module->buffers.count ? module->buffers.at[index].tensor
                                                                 : NULL;
}

td_module *td_child(const td_module *module, int index)
{
    return module && index >= 0 && index < module->child_count ? module->children[index].module
                                                               : NULL;
}

int td_child_count(const td_module *module)
{
    return module ? module->child_count : 0;
}

const char *td_child_name(const td_module *module, int index)
{
    return td_child(module, index) ? module->children[index].name : NULL;
}

td_status td__check_size(const char *call, const char *what, int64_t value, int64_t least)
{
    if (value >= least)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: %s is %lld; it must be at least %lld", call, what,
                   (long long)value, (long long)least);
}
