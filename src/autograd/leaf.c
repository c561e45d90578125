/* Leaves that require grad, their gradients, and hooks.
 *
 * A leaf that no longer requires grad keeps its node, with the gradient and the hooks. A gradient
 * that an older graph delivers to such a node is dropped.
 *
 * Zeroing a gradient only marks it: the next pass overwrites it instead of adding to it, and
 * td_tensor_grad() fills in zeros before that. If its memory is not shared, it is freed until then,
 * so that the activations of the next forward pass can use it. */
#include "autograd/view_base.h"
#include "base/fail.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* ---- Grad mode ---------------------------------------------------------------------------------- */

static _Thread_local bool grad_is_off;

bool td_set_grad_enabled(bool enabled)
{
    bool before = !grad_is_off;
    grad_is_off = !enabled;
    return before;
}

bool td_grad_enabled(void)
{
    return !grad_is_off;
}

td_no_grad td_no_grad_begin(void)
{
    return (td_no_grad){.before = td_set_grad_enabled(false), .open = true};
}

void td_no_grad_end(td_no_grad *no_grad)
{
    if (no_grad->open)
        td_set_grad_enabled(no_grad->before);
    no_grad->open = false;
}

_Thread_local uint64_t td__current_context;

void (*_Atomic td__on_context_lost)(uint64_t context, int64_t timeout_ms);

/* ---- Leaves ------------------------------------------------------------------------------------- */

const td_function td__leaf_function = {.name = "leaf"};

static bool is_float(td_dtype dtype)
{
    return dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
}

td_status td_tensor_set_requires_grad(td_tensor *tensor, bool requires_grad)
{
    if (!tensor)
        return td__fail_null(__func__);
    td__try_refresh_node(tensor);
    if (tensor->node && !td__node_is_leaf(tensor->node))
        return td_fail(TD_ERR_INVALID,
                       "td_tensor_set_requires_grad: the tensor of shape %s is no leaf but a "
                       "result of %s; use td_detach() of it",
                       td__shape_of(tensor), tensor->node->function->name);
    if (requires_grad == (tensor->node != NULL))
        return TD_OK;
    if (!requires_grad) {
        tensor->idle = tensor->node;
        td__node_retain(tensor->idle);
        td__node_leave(tensor);
        td__view_base_set_leaf(tensor);
        return TD_OK;
    }
    if (!is_float(tensor->layout.dtype))
        return td_fail(TD_ERR_INVALID,
                       "td_tensor_set_requires_grad: only floating-point tensors can require "
                       "grad, and this one is %s",
                       td_dtype_name(tensor->layout.dtype));
    struct td_node *node = tensor->idle ? tensor->idle : td__leaf_node(tensor);
    if (!node)
        return TD_ERR_NOMEM;
    pthread_mutex_lock(&node->lock);
    node->leaf = tensor;
    pthread_mutex_unlock(&node->lock);
    tensor->idle = NULL;
    tensor->node = node;
    tensor->output_nr = 0;
    td__view_base_set_leaf(tensor);
    return TD_OK;
}

bool td_tensor_requires_grad(const td_tensor *tensor)
{
    td__try_refresh_node(tensor);
    return tensor && tensor->node;
}

bool td_tensor_is_leaf(const td_tensor *tensor)
{
    td__try_refresh_node(tensor);
    return tensor && (!tensor->node || td__node_is_leaf(tensor->node));
}

td_tensor *td_detach(td_tensor *tensor)
{
    return td__adopt(td__alias(tensor));
}

td_status td_tensor_retain_grad(td_tensor *tensor)
{
    if (!tensor)
        return td__fail_null(__func__);
    td__try_refresh_node(tensor);
    if (!tensor->node)
        return td_fail(TD_ERR_INVALID,
                       "td_tensor_retain_grad: the tensor of shape %s does not require grad",
                       td__shape_of(tensor));
    tensor->node->outputs[tensor->output_nr].keep_grad = true;
    return TD_OK;
}

/* ---- The gradient -------------------------------------------------------------------------------- */

static void claim(struct td_node *node)
{
    pthread_mutex_lock(&node->lock);
    while (node->grad_is_busy) {
        pthread_mutex_unlock(&node->lock);
        sched_yield(); /* two passes accumulate in one leaf at once: rare, and short */
        pthread_mutex_lock(&node->lock);
    }
    node->grad_is_busy = true;
    pthread_mutex_unlock(&node->lock);
}

void td__leaf_unclaim(struct td_node *node)
{
    pthread_mutex_lock(&node->lock);
    node->grad_is_busy = false;
    pthread_mutex_unlock(&node->lock);
}

/* The node that holds the gradient, and its output number; NULL if there is none. */
static struct td_node *holder_of(const td_tensor *tensor, int *output_nr)
{
    td__try_refresh_node(tensor);
    *output_nr = tensor && tensor->node ? tensor->output_nr : 0;
    return !tensor ? NULL : tensor->node ? tensor->node : tensor->idle;
}

td_tensor *td_tensor_grad(const td_tensor *tensor)
{
    int output_nr;
    struct td_node *node = holder_of(tensor, &output_nr);
    if (!node)
        return NULL;
    struct td__output *output = &node->outputs[output_nr];
    if (!td__node_is_leaf(node))
        return output->grad;
    claim(node);
    if (node->grad_is_zero && !output->grad)
        output->grad = td__empty("gradient", output->layout.shape, output->layout.ndim,
                                 output->layout.dtype, output->device);
    td_tensor *grad = output->grad;
    if (grad && node->grad_is_zero) {
        if (td__prepare_write(grad) || td__kernels_of(grad)->fill(grad, 0))
            grad = NULL;
        else
            node->grad_is_zero = false;
    }
    td__leaf_unclaim(node);
    return grad;
}

td_status td_tensor_set_grad(td_tensor *tensor, td_tensor *grad)
{
    if (!tensor)
        return td__fail_null(__func__);
    int output_nr;
    struct td_node *node = holder_of(tensor, &output_nr);
    if (!is_float(tensor->layout.dtype) || (node && !td__node_is_leaf(node)))
        return td_fail(TD_ERR_INVALID, "td_tensor_set_grad: the tensor of shape %s is %s",
                       td__shape_of(tensor),
                       node ? "a result, not a leaf" : "not of floating point");
    if (grad && (!td__same_shape(tensor, grad) || grad->layout.dtype != tensor->layout.dtype ||
                 grad->storage->device != tensor->storage->device))
        return td_fail(TD_ERR_INVALID,
                       "td_tensor_set_grad: the gradient is %s %s on %s, the tensor %s %s on %s",
                       td_dtype_name(grad->layout.dtype), td__shape_of(grad),
                       grad->storage->device->name, td_dtype_name(tensor->layout.dtype),
                       td__shape_of(tensor), tensor->storage->device->name);
    if (grad == tensor)
        return td_fail(TD_ERR_INVALID,
                       "td_tensor_set_grad: the tensor of shape %s cannot be its own gradient",
                       td__shape_of(tensor));
    if (!node && !grad)
        return TD_OK;
    if (!node) {
        node = tensor->idle = td__leaf_node(tensor);
        if (!node)
            return TD_ERR_NOMEM;
        node->leaf = NULL;
    }
    td_tensor_retain(grad);
    claim(node);
    td_tensor *former = node->outputs[0].grad;
    node->outputs[0].grad = grad;
    node->grad_is_zero = false;
    td__leaf_unclaim(node);
    td_tensor_release(former);
    return TD_OK;
}

/* Contiguous and not shared: it can become the gradient without a copy. */
static bool can_be_grad(const td_tensor *tensor)
{
    return td__is_unshared(tensor) && td__layout_is_contiguous(&tensor->layout);
}

td_status td_tensor_zero_grad(td_tensor *tensor)
{
    if (!tensor)
        return td__fail_null(__func__);
    int output_nr;
    struct td_node *node = holder_of(tensor, &output_nr);
    if (!node)
        return TD_OK;
    if (!td__node_is_leaf(node)) {
        td_tensor_release(node->outputs[output_nr].grad);
        node->outputs[output_nr].grad = NULL;
        return TD_OK;
    }
    claim(node);
    td_tensor *grad = node->outputs[0].grad, *given_back = NULL;
    node->grad_is_zero |= grad != NULL;
    if (grad && can_be_grad(grad)) {
        given_back = grad;
        node->outputs[0].grad = NULL;
    }
    td__leaf_unclaim(node);
    td_tensor_release(given_back);
    return TD_OK;
}

/* With the gradient claimed. */
static td_status add_to_grad(struct td_node *node, td_tensor *grad)
{
    struct td__output *output = &node->outputs[0];
    if (!output->grad) {
        output->grad = can_be_grad(grad) ? td_tensor_retain(grad) : td__clone(grad);
        node->grad_is_zero &= !output->grad;
        return output->grad ? TD_OK : TD_ERR_NOMEM;
    }
    TD_TRY(td__prepare_write(output->grad));
    const td_kernels *kernels = td__kernels_of(grad);
    td_status status = node->grad_is_zero
                           ? kernels->copy(output->grad, grad)
                           : kernels->binary(TD_BINARY_ADD, output->grad, output->grad, grad);
    node->grad_is_zero = false;
    td__tensor_bump_version(output->grad);
    return status;
}

static td_tensor *retain_if_alive(td_tensor *tensor)
{
    int owners = atomic_load(&tensor->owners);
    while (owners > 0 && !atomic_compare_exchange_weak(&tensor->owners, &owners, owners + 1))
        ;
    return owners > 0 ? tensor : NULL;
}

/* The leaf's tensor, retained; NULL if it is gone. */
static td_tensor *tensor_of(struct td_node *node)
{
    pthread_mutex_lock(&node->lock);
    td_tensor *leaf = node->leaf ? retain_if_alive(node->leaf) : NULL;
    pthread_mutex_unlock(&node->lock);
    return leaf;
}

td_status td__leaf_give(struct td_node *node, td_tensor *grad, const struct td__grad_sink *sink)
{
    td_tensor *leaf = tensor_of(node);
    td_status status = leaf ? sink->accumulate(sink->arg, leaf, grad) : TD_OK;
    td_tensor_release(leaf);
    return status;
}

td_status td__leaf_accumulate(struct td_node *node, td_tensor *grad)
{
    td_tensor *leaf = tensor_of(node);
    if (!leaf)
        return TD_OK;
    td_status status = TD_OK;
    if (grad) {
        claim(node);
        status = add_to_grad(node, grad);
        td__leaf_unclaim(node);
    }
    for (struct td__hook *hook = node->outputs[0].hooks, *next; hook && !status; hook = next) {
        next = hook->next;
        if (hook->accumulated_hook)
            status = hook->accumulated_hook(leaf, hook->arg);
        else if (hook->observer)
            status = hook->observer(leaf, NULL, hook->arg);
    }
    td_tensor_release(leaf);
    return status;
}

td_status td__leaf_observe(td_tensor *leaf, const struct td__grad_place *place)
{
    td_status status = TD_OK;
    struct td__hook *hook = leaf->node ? leaf->node->outputs[0].hooks : NULL;
    for (struct td__hook *next; hook && !status; hook = next) {
        next = hook->next;
        if (hook->observer)
            status = hook->observer(leaf, place, hook->arg);
    }
    return status;
}

static bool has_grad_hook(const struct td__output *output)
{
    for (const struct td__hook *hook = output->hooks; hook; hook = hook->next)
        if (hook->grad_hook)
            return true;
    return false;
}

td_tensor *td__leaf_target(struct td_node *node, bool *accumulate)
{
    struct td__output *output = &node->outputs[0];
    pthread_mutex_lock(&node->lock);
    bool free = node->leaf && !node->grad_is_busy && !has_grad_hook(output);
    if (free)
        node->grad_is_busy = true;
    pthread_mutex_unlock(&node->lock);
    if (!free)
        return NULL;
    if (!output->grad) {
        output->grad = td__empty("gradient", output->layout.shape, output->layout.ndim,
                                 output->layout.dtype, output->device);
        node->grad_is_zero |= output->grad != NULL;
    }
    if (!output->grad || !td__layout_is_contiguous(&output->grad->layout) ||
        td__prepare_write(output->grad)) {
        td__leaf_unclaim(node);
        return NULL;
    }
    *accumulate = !node->grad_is_zero;
    node->grad_is_zero = false;
    td__tensor_bump_version(output->grad);
    return output->grad;
}

/* ---- Exchanged memory ----------------------------------------------------------------------------- */

void td__leaf_set_memory(td_tensor *leaf, struct td__storage *storage, int64_t offset,
                         const struct td__layout *layout)
{
    struct td__storage *former = leaf->storage;
    td__storage_retain(storage);
    td__view_base_leave(leaf);
    leaf->storage = storage;
    leaf->offset = offset;
    leaf->layout = *layout;
    atomic_store(&leaf->history, atomic_load_explicit(&storage->history, memory_order_relaxed));
    struct td_node *node = leaf->node ? leaf->node : leaf->idle;
    if (node)
        node->outputs[0].layout = *layout;
    td__storage_release(former);
}

void td__leaf_place_grad(td_tensor *leaf, td_tensor *grad, bool zero)
{
    struct td_node *node = leaf->node ? leaf->node : leaf->idle;
    if (!node)
        return;
    td_tensor_retain(grad);
    claim(node);
    td_tensor *former = node->outputs[0].grad;
    node->outputs[0].grad = grad;
    node->grad_is_zero = zero;
    td__leaf_unclaim(node);
    td_tensor_release(former);
}

bool td__leaf_grad_is_zero(const td_tensor *leaf)
{
    const struct td_node *node = leaf->node ? leaf->node : leaf->idle;
    return node && node->grad_is_zero;
}

bool td__leaf_has_grad(const td_tensor *leaf)
{
    const struct td_node *node = leaf->node ? leaf->node : leaf->idle;
    return node && node->outputs[0].grad && !node->grad_is_zero;
}

/* ---- Hooks -------------------------------------------------------------------------------------- */

static td_status add_hook(td_tensor *tensor, const char *call, struct td__hook hook, uint64_t *id)
{
    static _Atomic uint64_t last_id;
    if (!tensor)
        return td__fail_null(call);
    td__try_refresh_node(tensor);
    if (!tensor->node || (!hook.grad_hook && !td__node_is_leaf(tensor->node)))
        return td_fail(TD_ERR_INVALID, "%s: the tensor of shape %s %s", call, td__shape_of(tensor),
                       tensor->node ? "is a result, not a leaf" : "does not require grad");
    struct td__hook *new = malloc(sizeof *new);
    if (!new)
        return td__fail_nomem(call);
    *new = hook;
    new->id = atomic_fetch_add(&last_id, 1) + 1;
    if (id)
        *id = new->id;
    pthread_mutex_lock(&tensor->node->lock);
    struct td__hook **last = &tensor->node->outputs[tensor->output_nr].hooks;
    while (*last)
        last = &(*last)->next;
    *last = new;
    pthread_mutex_unlock(&tensor->node->lock);
    return TD_OK;
}

td_status td_tensor_add_grad_hook(td_tensor *tensor, td_grad_hook hook, void *arg, uint64_t *id)
{
    if (!hook)
        return td_fail(TD_ERR_INVALID, "td_tensor_add_grad_hook: the hook is NULL");
    return add_hook(tensor, "td_tensor_add_grad_hook",
                    (struct td__hook){.grad_hook = hook, .arg = arg}, id);
}

td_status td_tensor_add_accumulated_hook(td_tensor *tensor, td_accumulated_hook hook, void *arg,
                                         uint64_t *id)
{
    if (!hook)
        return td_fail(TD_ERR_INVALID, "td_tensor_add_accumulated_hook: the hook is NULL");
    return add_hook(tensor, "td_tensor_add_accumulated_hook",
                    (struct td__hook){.accumulated_hook = hook, .arg = arg}, id);
}

td_status td__leaf_add_observer(td_tensor *tensor, td__leaf_observer observer, void *arg,
                                uint64_t *id)
{
    return add_hook(tensor, "td_ddp", (struct td__hook){.observer = observer, .arg = arg}, id);
}

td_status td_tensor_remove_hook(td_tensor *tensor, uint64_t id)
{
    struct td__hook *found = NULL;
    int output_nr;
    struct td_node *node = holder_of(tensor, &output_nr);
    if (node) {
        pthread_mutex_lock(&node->lock);
        struct td__hook **at = &node->outputs[output_nr].hooks;
        while (*at && (*at)->id != id)
            at = &(*at)->next;
        found = *at;
        if (found)
            *at = found->next;
        pthread_mutex_unlock(&node->lock);
    }
    if (!found)
        return td_fail(TD_ERR_INVALID, "td_tensor_remove_hook: the tensor has no hook %llu",
                       (unsigned long long)id);
    free(found);
    return TD_OK;
}

td_status td__run_grad_hooks(struct td_node *node, int output_nr, td_tensor **grad)
{
    td_status status = TD_OK;
    struct td__output *output = &node->outputs[output_nr];
    for (struct td__hook *hook = output->hooks, *next; hook && !status; hook = next) {
        next = hook->next;
        if (!hook->grad_hook)
            continue;
        td_tensor *other = hook->grad_hook(*grad, hook->arg, &status);
        if (status || !other || other == *grad)
            continue;
        if (!td__same_shape(other, *grad) || other->layout.dtype != (*grad)->layout.dtype)
            return td_fail(TD_ERR_INVALID,
                           "td_backward: a grad hook returned a gradient of %s %s for one of %s "
                           "%s",
                           td_dtype_name(other->layout.dtype), td__shape_of(other),
                           td_dtype_name((*grad)->layout.dtype), td__shape_of(*grad));
        td_tensor_retain(other);
        td_tensor_release(*grad);
        *grad = other;
    }
    return status;
}
