/* cat, stack and split. The gradients of cat's inputs are views of the result's gradient. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* ---- Put together ---------------------------------------------------------------------------------- */

/* The part of each input: sizes[i] indices along `dim`, one after another; 0 for an input that is
 * skipped. Stacked inputs have one index each, and not that dimension. */
struct joint {
    int dim;
    bool stacked;
    int64_t sizes[];
};

static td_tensor *part_of(const struct joint *joint, td_tensor *whole, int input, int64_t start)
{
    return joint->stacked ? td__select_index(whole, joint->dim, input)
                          : td__narrow(whole, joint->dim, start, joint->sizes[input]);
}

/* td_cat() skips empty tensors of one dimension, whatever the shape of the others, as PyTorch does
 * for compatibility. */
static bool is_left_out(const struct td__layout *layout)
{
    return layout->ndim == 1 && layout->shape[0] == 0;
}

static td_status join_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const struct joint *joint = td_node_data(node);
    int64_t start = 0;
    for (int i = 0; i < node->input_count; start += joint->sizes[i++]) {
        if (!td_node_needs(node, i))
            continue;
        bool left_out = joint->sizes[i] == 0 && is_left_out(td__input_layout(node, i));
        grad_x[i] = td__adopt(left_out ? td__zeros("td_backward", (int64_t[]){0}, 1, grad_y[0])
                                       : part_of(joint, grad_y[0], i, start));
        TD_TRY(td__done(grad_x[i]));
    }
    return TD_OK;
}

static const td_function cat_function = {.name = "td_cat", .backward = join_backward};
static const td_function stack_function = {.name = "td_stack", .backward = join_backward};

/* Copies the inputs to their parts of `y`. */
static td_status fill_in(const struct joint *joint, td_tensor *y, td_tensor *const *tensors,
                         int count)
{
    int64_t start = 0;
    for (int i = 0; i < count; start += joint->sizes[i++]) {
        if (tensors[i]->layout.numel == 0)
            continue;
        td_tensor *part = part_of(joint, y, i, start);
        if (!part)
            return TD_ERR_NOMEM;
        td_status status = td__kernels_of(y)->copy(part, tensors[i]);
        td_tensor_release(part);
        TD_TRY(status);
    }
    return TD_OK;
}

/* All must have the shape of tensor `model`; if `dim` is not negative, that dimension may differ
 * and tensors may be skipped. */
static td_status check_shapes(const char *call, td_tensor *const *tensors, int count, int model,
                              int dim)
{
    for (int i = 0; i < count; i++) {
        TD_TRY(td__check_same(call, tensors[model], tensors[i]));
        const struct td__layout *a = &tensors[model]->layout, *b = &tensors[i]->layout;
        if (dim >= 0 && is_left_out(b))
            continue;
        bool fits = a->ndim == b->ndim;
        for (int d = 0; fits && d < a->ndim; d++)
            fits = d == dim || a->shape[d] == b->shape[d];
        if (!fits)
            return td_fail(TD_ERR_INVALID,
                           "%s: tensor %d has the shape %s, tensor %d the shape %s; %s", call,
                           model, td__shape_of(tensors[model]), i, td__shape_of(tensors[i]),
                           dim < 0 ? "they must be the same"
                                   : "only the size along the dimension of the concatenation may "
                                     "differ");
    }
    return TD_OK;
}

/* Fails for an empty list. */
static td_status check_list(const char *call, td_tensor *const *tensors, int count)
{
    if (!tensors || count < 1)
        return td_fail(TD_ERR_INVALID, "%s: there must be at least one tensor, not %d%s", call,
                       count, tensors ? "" : ", and their list is not NULL");
    for (int i = 0; i < count; i++)
        if (!tensors[i])
            return td__fail_null(call);
    return TD_OK;
}

static td_tensor *join(const td_function *function, td_tensor *const *tensors, int count,
                       const struct joint *head, const int64_t *shape, int ndim)
{
    size_t size = sizeof *head + (size_t)count * sizeof head->sizes[0];
    struct joint *joint = malloc(size);
    if (!joint) {
        td__fail_nomem(function->name);
        return NULL;
    }
    *joint = *head;
    for (int i = 0; i < count; i++)
        joint->sizes[i] = head->stacked                      ? 1
                          : is_left_out(&tensors[i]->layout) ? 0
                                                             : tensors[i]->layout.shape[head->dim];
    td_tensor *y = td__empty(function->name, shape, ndim, tensors[0]->layout.dtype,
                             tensors[0]->storage->device);
    if (y)
        y = td__kept(y, fill_in(joint, y, tensors, count));
    y = td__result(
        function, y,
        &(td_node_spec){
            .more_inputs = tensors, .input_count = count, .data = joint, .data_size = size});
    free(joint);
    return y;
}

td_tensor *td_cat(td_tensor *const *tensors, int count, int dim)
{
    TD__AUTOCAST_LIST(TD__CAST_JOIN, &tensors, count);
    const char *call = cat_function.name;
    int64_t shape[TD_MAX_DIMS];
    if (check_list(call, tensors, count))
        return NULL;
    int model = 0; /* the first that is not skipped */
    while (model < count - 1 && is_left_out(&tensors[model]->layout))
        model++;
    dim = td__find_dim(tensors[model], call, dim);
    if (dim < 0 || check_shapes(call, tensors, count, model, dim))
        return NULL;
    memcpy(shape, tensors[model]->layout.shape, sizeof shape);
    for (int i = model + 1; i < count; i++) {
        if (is_left_out(&tensors[i]->layout))
            continue;
        if (__builtin_add_overflow(shape[dim], tensors[i]->layout.shape[dim], &shape[dim])) {
            td_fail(TD_ERR_INVALID, "%s: dimension %d of the result is too large", call, dim);
            return NULL;
        }
    }
    return join(&cat_function, tensors, count, &(struct joint){.dim = dim}, shape,
                tensors[model]->layout.ndim);
}

td_tensor *td_stack(td_tensor *const *tensors, int count, int dim)
{
    TD__AUTOCAST_LIST(TD__CAST_JOIN, &tensors, count);
    const char *call = stack_function.name;
    if (check_list(call, tensors, count) || check_shapes(call, tensors, count, 0, -1))
        return NULL;
    const struct td__layout *layout = &tensors[0]->layout;
    int at = dim < 0 ? dim + layout->ndim + 1 : dim;
    if (at < 0 || at > layout->ndim || layout->ndim == TD_MAX_DIMS) {
        td_fail(TD_ERR_INVALID, "%s: tensors of shape %s cannot be stacked along dimension %d",
                call, td__shape_of(tensors[0]), dim);
        return NULL;
    }
    int64_t shape[TD_MAX_DIMS];
    for (int d = 0; d <= layout->ndim; d++)
        shape[d] = d == at ? count : layout->shape[d - (d > at)];
    return join(&stack_function, tensors, count, &(struct joint){.dim = at, .stacked = true}, shape,
                layout->ndim + 1);
}

/* ---- Taken apart ----------------------------------------------------------------------------------- */

/* Gives all parts to the thread's scope; on failure none is left. */
static td_status adopt_all(td_tensor **parts, int count)
{
    for (int i = 0; i < count; i++) {
        if (td__adopt(parts[i]))
            continue;
        for (int k = i + 1; k < count; k++)
            td_tensor_release(parts[k]);
        return TD_ERR_NOMEM;
    }
    return TD_OK;
}

static td_status split(td_tensor *tensor, int64_t size, int dim, td_tensor **parts, int count)
{
    int64_t whole = tensor->layout.shape[dim];
    for (int i = 0; i < count; i++) {
        int64_t start = i * size, length = whole - start < size ? whole - start : size;
        {
            TD_SCOPE;
            parts[i] = td_tensor_retain(td_narrow(tensor, dim, start, length));
        }
        if (parts[i])
            continue;
        while (i-- > 0)
            td_tensor_release(parts[i]);
        return td__done(NULL);
    }
    return adopt_all(parts, count);
}

td_status td_split(td_tensor *tensor, int64_t size, int dim, td_tensor ***parts_out, int *count_out)
{
    if (!tensor)
        return td__fail_null(__func__);
    if (!parts_out || !count_out)
        return td_fail(TD_ERR_INVALID, "td_split: parts or count is NULL");
    dim = td__find_dim(tensor, "td_split", dim);
    if (dim < 0)
        return TD_ERR_INVALID;
    int64_t whole = tensor->layout.shape[dim];
    int64_t count = size > 0 && whole > 0 ? (whole - 1) / size + 1 : 1;
    if (size < 1 || count > INT_MAX)
        return td_fail(TD_ERR_INVALID,
                       "td_split: dimension %d of a tensor of shape %s cannot be split into parts "
                       "of %" PRId64,
                       dim, td__shape_of(tensor), size);
    td_tensor **parts = malloc((size_t)count * sizeof *parts);
    if (!parts)
        return td__fail_nomem("td_split");
    td_status status = split(tensor, size, dim, parts, (int)count);
    if (status) {
        free(parts);
        return status;
    }
    *parts_out = parts;
    *count_out = (int)count;
    return TD_OK;
}

void td_free_list(td_tensor **list)
{
    free(list);
}
