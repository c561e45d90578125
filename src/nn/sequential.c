/* Modules that are made of others: a sequence, and a list. */
#include "nn/module.h"

#include "base/fail.h"

#include <stdio.h>

/* Adds `count` modules with the names "0", "1", …; all are taken over. */
static td_module *gather(const td_module_ops *ops, const char *call, td_module *const *modules,
                         int count)
{
    for (int i = 0; i < count; i++)
        if (!modules[i]) {
            td_fail(TD_ERR_INVALID, "%s: module %d of %d is NULL; the last failure was: %s", call,
                    i, count, td_last_error());
            td__modules_destroy(modules, count);
            return NULL;
        }
    td_module *module = td_module_create(ops);
    if (!module) {
        td__modules_destroy(modules, count);
        return NULL;
    }
    for (int i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        td_module_add_child(module, name, modules[i]);
    }
    return td_module_finish(module);
}

static td_tensor *sequential_forward(td_module *module, td_tensor *const *inputs, int count)
{
    if (count != 1) {
        td_fail(TD_ERR_INVALID, "td_forward: a Sequential has one input, not %d", count);
        return NULL;
    }
    /* What a child made is let go as soon as the next one has run; what backward needs is kept by
     * the record. */
    td_tensor *x = td_tensor_retain(inputs[0]);
    for (int i = 0; i < module->child_count && x; i++) {
        td_tensor *y = NULL;
        {
            TD_SCOPE;
            y = td_tensor_retain(td_forward(module->children[i].module, x));
        }
        td_tensor_release(x);
        x = y;
    }
    return td__adopt(x);
}

static const td_module_ops sequential_ops = {.name = "Sequential", .forward = sequential_forward};

td_module *td_sequential_of(td_module *const *modules, int count)
{
    return gather(&sequential_ops, "td_sequential", modules, count);
}

static const td_module_ops list_ops = {.name = "ModuleList"};

td_module *td_module_list_of(td_module *const *modules, int count)
{
    return gather(&list_ops, "td_module_list", modules, count);
}

/* ---- Lists of the macros ------------------------------------------------------------------------ */

static td_module *gather_ended(const td_module_ops *ops, const char *call,
                               td_module *const *modules, int count)
{
    if (count > 0 && !modules[count - 1])
        return gather(ops, call, modules, count - 1);
    td_fail(TD_ERR_INVALID, "%s: the last argument must be NULL, which ends the list", call);
    td__modules_destroy(modules, count);
    return NULL;
}

td_module *td_sequential_ended(td_module *const *modules, int count)
{
    return gather_ended(&sequential_ops, "td_sequential", modules, count);
}

td_module *td_module_list_ended(td_module *const *modules, int count)
{
    return gather_ended(&list_ops, "td_module_list", modules, count);
}
