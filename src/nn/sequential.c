/* Sequential and ModuleList. */
#include "nn/module.h"

#include "autograd/op_mlp.h"
#include "base/fail.h"

#include <stdio.h>

/* Adds `count` modules with the names "0", "1", …; all are taken over. */
static td_module *gather(const td_module_ops *ops, const char *call, td_module *const *modules,
                         int count)
{
    for (int i = 0; i < count; i++)
        if (!modules[i]) {
            td__fail_null(call); /* keeps the error of the call that returned NULL */
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

static void retain(const td_tensor_list *list)
{
    for (int i = 0; i < list->count; i++)
        td_tensor_retain(list->at[i]);
}

static void release(const td_tensor_list *list)
{
    for (int i = 0; i < list->count; i++)
        td_tensor_release(list->at[i]);
}

/* Runs a linear layer, a GELU by tanh and a linear layer as one, where the device has kernels for that; false: children[i]
 * and the two behind it are not these, or do not fit, and run one by one. */
static bool run_mlp(const td_module *module, int i, const td_tensor_list *x, td_tensor_list *y)
{
    const struct td__child *at = module->children + i;
    if (i + 3 > module->child_count || x->count != 1 || !td__is_linear(at[0].module) ||
        !td__is_gelu_tanh(at[1].module) || !td__is_linear(at[2].module))
        return false;
    for (int k = 0; k < 3; k++)
        if (td__module_is_hooked(at[k].module))
            return false;
    td_tensor *w1 = td_param(at[0].module, 0), *b1 = td_param(at[0].module, 1);
    td_tensor *w2 = td_param(at[2].module, 0), *b2 = td_param(at[2].module, 1);
    if (!td__mlp_fits(x->at[0], w1, b1, w2, b2))
        return false;
    *y = (td_tensor_list){.at = {td__f_mlp(x->at[0], w1, b1, w2, b2)}};
    y->count = y->at[0] ? 1 : 0;
    return true;
}

/* Runs a batch norm and a ReLU as one; false: children[i] and the one behind it are not these, or have hooks. */
static bool run_norm_relu(const td_module *module, int i, const td_tensor_list *x,
                          td_tensor_list *y)
{
    const struct td__child *at = module->children + i;
    if (i + 2 > module->child_count || x->count != 1 || !td__is_batch_norm(at[0].module) ||
        !td__is_relu(at[1].module) || td__module_is_hooked(at[0].module) ||
        td__module_is_hooked(at[1].module))
        return false;
    *y = (td_tensor_list){.at = {td_forward_add_relu(at[0].module, x->at[0], NULL)}};
    y->count = y->at[0] ? 1 : 0;
    return true;
}

/* How many children, from children[i] on, have run as one; 0: none. */
static int run_fused(const td_module *module, int i, const td_tensor_list *x, td_tensor_list *y)
{
    return run_mlp(module, i, x, y) ? 3 : run_norm_relu(module, i, x, y) ? 2 : 0;
}

static td_status sequential_forward(td_module *module, const td_tensor_list *inputs,
                                    td_tensor_list *results)
{
    /* The results of a child are released as soon as the next one has run; the graph keeps what
     * backward needs. */
    td_tensor_list x = *inputs;
    td_status status = TD_OK;
    retain(&x);
    for (int i = 0; i < module->child_count && !status; i++) {
        TD_SCOPE;
        td_tensor_list y;
        int fused = run_fused(module, i, &x, &y);
        if (fused) {
            status = y.count ? TD_OK : td__error_status();
            i += fused - 1;
        } else {
            status = td_forward_list(module->children[i].module, &x, &y);
        }
        retain(&y);
        release(&x);
        x = y;
    }
    for (int i = 0; i < x.count; i++)
        x.at[i] = td__adopt(x.at[i]);
    *results = x;
    return status;
}

static const td_module_ops sequential_ops = {.name = "Sequential",
                                             .forward_list = sequential_forward};

td_module *td_sequential_of(td_module *const *modules, int count)
{
    return gather(&sequential_ops, "td_sequential", modules, count);
}

static const td_module_ops list_ops = {.name = "ModuleList"};

const td_module_ops *const td__sequential_kinds[] = {&sequential_ops, &list_ops, NULL};

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
