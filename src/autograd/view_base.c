/* Bases, views, and in-place changes; see view_base.h. */
#include "autograd/view_base.h"

#include "autograd/op.h"
#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

struct td__view_base {
    atomic_int owners;
    struct td__layout layout;
    int64_t offset;

    pthread_mutex_t lock; /* guards what follows, and the nodes of views while they are updated */
    struct td_node *node; /* of the whole; retained; NULL: it does not require grad */
    int output_nr;
    unsigned history; /* how many recorded in-place changes of the memory the node includes */
};

/* ---- Bases --------------------------------------------------------------------------------------- */

static void release_base(struct td__view_base *base)
{
    if (!base || atomic_fetch_sub_explicit(&base->owners, 1, memory_order_acq_rel) > 1)
        return;
    td__node_release(base->node);
    pthread_mutex_destroy(&base->lock);
    free(base);
}

void td__view_base_leave(td_tensor *tensor)
{
    release_base(atomic_exchange(&tensor->base, NULL));
}

/* With the lock held, or before the base is published. Retains the node. */
static void set_node(struct td__view_base *base, struct td_node *node, int output_nr,
                     unsigned history)
{
    struct td_node *former = base->node;
    if (node)
        td__node_retain(node);
    base->node = node;
    base->output_nr = output_nr;
    base->history = history;
    td__node_release(former);
}

/* Whether no two elements share memory, by a sufficient test: in the order of strides, each
 * dimension's stride exceeds the extent of those before it. */
static bool is_non_overlapping(const struct td__layout *layout)
{
    unsigned left = (1u << layout->ndim) - 1;
    int64_t reach = 1;
    while (left) {
        int least = -1;
        for (int d = 0; d < layout->ndim; d++)
            if (left & 1u << d && (least < 0 || layout->strides[d] < layout->strides[least]))
                least = d;
        left &= ~(1u << least);
        if (layout->shape[least] < 2)
            continue;
        if (layout->strides[least] < reach)
            return false;
        reach = layout->strides[least] * layout->shape[least];
    }
    return true;
}

/* The base of a tensor whose node is current; creates it. NULL for a tensor whose elements overlap,
 * and without memory. */
static struct td__view_base *base_of(td_tensor *tensor)
{
    struct td__view_base *base = atomic_load_explicit(&tensor->base, memory_order_acquire);
    if (base || !is_non_overlapping(&tensor->layout))
        return base;
    struct td__view_base *new = calloc(1, sizeof *new);
    if (!new)
        return NULL;
    new->owners = 1;
    new->layout = tensor->layout;
    new->offset = tensor->offset;
    pthread_mutex_init(&new->lock, NULL);
    set_node(new, tensor->node, tensor->output_nr, atomic_load(&tensor->history));
    /* Another thread may have created the base at the same time. */
    if (atomic_compare_exchange_strong(&tensor->base, &base, new))
        return new;
    release_base(new);
    return base;
}

/* Whether the tensor is the whole base, with the same strides. */
static bool is_whole(const struct td__view_base *base, const td_tensor *tensor)
{
    const struct td__layout *a = &base->layout, *b = &tensor->layout;
    size_t bytes = (size_t)a->ndim * sizeof a->shape[0];
    return base->offset == tensor->offset && a->ndim == b->ndim &&
           !memcmp(a->shape, b->shape, bytes) && !memcmp(a->strides, b->strides, bytes);
}

static struct td__region region_of(const struct td__view_base *base, const td_tensor *view)
{
    return (struct td__region){
        .whole = base->layout, .part = view->layout, .start = view->offset - base->offset};
}

void td__view_base_set_leaf(td_tensor *leaf)
{
    struct td__view_base *base = atomic_load(&leaf->base);
    if (!base)
        return;
    if (!is_whole(base, leaf)) {
        td__view_base_leave(leaf); /* a leaf is its own base */
        return;
    }
    pthread_mutex_lock(&base->lock);
    set_node(base, leaf->node, 0, atomic_load(&leaf->history));
    pthread_mutex_unlock(&base->lock);
}

td_tensor *td__view_result(const td_function *function, td_tensor *view, td_tensor *of,
                           const td_node_spec *spec)
{
    if (!view)
        return td__null(function->name);
    td__try_refresh_node(of);
    atomic_store(&view->history, atomic_load(&of->history));
    if (td_record_all(function, &view, 1, spec)) {
        td_tensor_release(view);
        return NULL;
    }
    struct td__view_base *base = td_grad_enabled() ? base_of(of) : NULL;
    if (base) {
        atomic_fetch_add_explicit(&base->owners, 1, memory_order_relaxed);
        atomic_store(&view->base, base);
    }
    return td__adopt(view);
}

/* ---- Regions ------------------------------------------------------------------------------------- */

/* A raw, uninitialised tensor with the strides of the whole. */
static td_tensor *new_whole(const struct td__region *region, td_device *device)
{
    struct td__storage *storage = td__storage_create(device, "backward",
                                                     td__layout_extent(&region->whole));
    td_tensor *whole = storage ? td__tensor_over(storage, 0, &region->whole) : NULL;
    if (storage)
        td__storage_release(storage);
    return whole;
}

/* The region of such a tensor, a raw view. */
static td_tensor *part_of(const struct td__region *region, const td_tensor *whole)
{
    return td__tensor_over(whole->storage, whole->offset + region->start, &region->part);
}

/* Zeros, with the gradient of the view added to its region. */
static td_status view_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    struct td__region region = *(const struct td__region *)td_node_data(node);
    struct td__layout *part = &region.part;
    int repeated[TD_MAX_DIMS], count = 0;
    for (int d = 0; d < part->ndim; d++)
        if (part->strides[d] == 0 && part->shape[d] > 1) {
            repeated[count++] = d;
            part->numel /= part->shape[d];
            part->shape[d] = 1;
        }
    td_tensor *grad = count ? td_sum_dims(grad_y[0], repeated, count, true) : grad_y[0];
    td_tensor *whole = td__adopt(new_whole(&region, grad_y[0]->storage->device));
    td_tensor *place = whole ? td__adopt(part_of(&region, whole)) : NULL;
    if (!grad || !place)
        return TD_ERR_NOMEM;
    grad_x[0] = whole;
    TD_TRY(td__kernels_of(whole)->fill(whole, 0));
    return td__kernels_of(whole)->copy(place, grad);
}

static const td_function view_function = {.name = "td_view", .backward = view_backward};

/* The gradient in the strides of the whole: `grad` itself if it is not shared, otherwise a copy. */
static td_tensor *writable(const struct td__region *region, td_tensor *grad)
{
    const struct td__layout *layout = &grad->layout;
    bool is_ours = td__is_unshared(grad) &&
                   !memcmp(layout->strides, region->whole.strides,
                           (size_t)layout->ndim * sizeof layout->strides[0]);
    if (is_ours)
        return grad;
    td_tensor *whole = td__adopt(new_whole(region, grad->storage->device));
    return whole && !td__kernels_of(whole)->copy(whole, grad) ? whole : NULL;
}

td_status td__region_backward(struct td_node *node, td_tensor *grad_output, td_tensor **grad_inputs)
{
    const struct td__region *region = node->region;
    td_tensor *whole = writable(region, grad_output);
    td_tensor *place = whole ? td__adopt(part_of(region, whole)) : NULL;
    td_tensor *grad = td__adopt(td__clone(place));
    if (!grad)
        return TD_ERR_NOMEM;
    TD_TRY(node->function->backward(node, &grad, grad_inputs));
    td_tensor *back = grad_inputs[0];
    if (!td_node_needs(node, 0))
        return TD_OK;
    grad_inputs[0] = whole;
    return back ? td__kernels_of(whole)->copy(place, back) : td__kernels_of(whole)->fill(place, 0);
}

/* ---- Updating nodes ------------------------------------------------------------------------------ */

/* The node of a view of the base as it is now; one reference. NULL without memory. */
static struct td_node *new_view_node(const struct td__view_base *base, const td_tensor *view)
{
    struct td__region region = region_of(base, view);
    struct td_node *node = td__node_create(&view_function, 1, 1, 0, sizeof region);
    if (!node)
        return NULL;
    memcpy(node->data, &region, sizeof region);
    td__node_retain(base->node);
    node->inputs[0] = (struct td__edge){base->node, base->output_nr};
    return node;
}

/* With the lock of the base held. */
static td_status follow_base(struct td__view_base *base, td_tensor *tensor)
{
    struct td_node *former = tensor->node;
    if (is_whole(base, tensor)) {
        td__node_retain(base->node);
        tensor->node = base->node;
        tensor->output_nr = base->output_nr;
    } else {
        struct td_node *node = new_view_node(base, tensor);
        if (!node)
            return TD_ERR_NOMEM;
        td__node_attach(node, 0, tensor);
        td__node_release(node);
    }
    td__node_release(former);
    atomic_store_explicit(&tensor->history, base->history, memory_order_release);
    return TD_OK;
}

/* TD_ERR_STATE, without an error text, if the memory was changed through another base. */
static td_status refresh(td_tensor *tensor)
{
    if (td__node_is_current(tensor))
        return TD_OK;
    struct td__view_base *base = atomic_load_explicit(&tensor->base, memory_order_acquire);
    if (!base)
        return TD_ERR_STATE;
    pthread_mutex_lock(&base->lock);
    td_status status = TD_OK;
    if (!td__node_is_current(tensor)) /* another thread may have updated it */
        status = base->history == atomic_load(&tensor->storage->history) && base->node
                     ? follow_base(base, tensor)
                     : TD_ERR_STATE;
    pthread_mutex_unlock(&base->lock);
    return status;
}

void td__try_refresh_node(const td_tensor *tensor)
{
    if (tensor)
        refresh((td_tensor *)tensor);
}

td_status td__refresh_node(td_tensor *tensor, const char *name)
{
    td_status status = refresh(tensor);
    if (status != TD_ERR_STATE)
        return status;
    return td_fail(status,
                   "%s: the memory of its input of shape %s was changed in place through a "
                   "td_detach() or a view made under TD_NO_GRAD, which autograd cannot follow; "
                   "make that view with grad mode on, or change it under TD_NO_GRAD",
                   name, td__shape_of(tensor));
}

/* ---- Changes in place ----------------------------------------------------------------------------- */

td_status td__check_in_place(td_tensor *tensor, const char *name)
{
    if (!td_grad_enabled())
        return td__prepare_write(tensor);
    TD_TRY(td__refresh_node(tensor, name));
    if (tensor->node && td__node_is_leaf(tensor->node))
        return td_fail(TD_ERR_STATE,
                       "%s: a leaf of shape %s that requires grad cannot be changed in place; do "
                       "it under TD_NO_GRAD",
                       name, td__shape_of(tensor));
    struct td__view_base *base = atomic_load(&tensor->base);
    if (base && base->node && td__node_is_leaf(base->node))
        return td_fail(TD_ERR_STATE,
                       "%s: the tensor of shape %s is a view of a leaf that requires grad, and "
                       "cannot be changed in place; do it under TD_NO_GRAD",
                       name, td__shape_of(tensor));
    return td__prepare_write(tensor);
}

/* Turns the node of an in-place change of a view into one of the whole base: its first input is the
 * old base, its output the new one. */
static td_status widen_to_base(struct td_node *node, const struct td__view_base *base,
                               const td_tensor *view)
{
    node->region = malloc(sizeof *node->region);
    if (!node->region)
        return td__fail_nomem(node->function->name);
    *node->region = region_of(base, view);
    td__node_release(node->inputs[0].node);
    if (base->node)
        td__node_retain(base->node);
    node->inputs[0] = (struct td__edge){base->node, base->output_nr};
    node->outputs[0].layout = base->layout;
    node->outputs[0].device = view->storage->device;
    return TD_OK;
}

td_status td__record_in_place(const td_function *function, td_tensor *tensor,
                              const td_node_spec *spec)
{
    struct td_node *node;
    td__tensor_bump_version(tensor);
    TD_TRY(td__node_make(function, 1, spec, &node));
    if (!node)
        return TD_OK;
    struct td__view_base *base = atomic_load(&tensor->base);
    bool is_part = base && !is_whole(base, tensor);
    td_status status = is_part ? widen_to_base(node, base, tensor) : TD_OK;
    if (!status) {
        unsigned history = atomic_fetch_add(&tensor->storage->history, 1) + 1;
        if (base) {
            pthread_mutex_lock(&base->lock);
            set_node(base, node, 0, history);
            pthread_mutex_unlock(&base->lock);
        }
        if (!is_part) {
            struct td_node *former = tensor->node;
            td__node_attach(node, 0, tensor);
            td__node_release(former);
            atomic_store_explicit(&tensor->history, history, memory_order_release);
        }
    }
    td__node_release(node);
    return status;
}
