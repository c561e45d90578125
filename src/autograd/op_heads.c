/* A projection cut into the heads of an attention.
 *
 *     x [N, L, parts E] -> parts times [N, heads, L, E / heads]
 *
 * One operator with several outputs: these are views, and its backward copies their gradients into one gradient
 * of the whole. With td_narrow() there would be a gradient of that size for each part, to be summed up. */
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <inttypes.h>

struct split {
    int64_t batch, length, parts, heads, width; /* width: of one head */
};

/* Part `index` of x [N, L, parts * heads * width], as a view [N, heads, L, width]. */
static td_tensor *part_of(td_tensor *x, const struct split *split, int64_t index)
{
    int64_t shape[] = {split->batch, split->length, split->parts, split->heads, split->width};
    td_tensor *all = td__reshape(x, shape, 5, NULL);
    td_tensor *part = td__select_index(all, 2, index);
    td_tensor *turned = td__transpose(part, 1, 2);
    td_tensor_release(part);
    td_tensor_release(all);
    return turned;
}

static td_status split_backward(td_node *node, td_tensor *const *grad_parts, td_tensor **grad_x)
{
    const struct split *split = td_node_data(node);
    td_tensor *any = NULL;
    for (int i = 0; i < split->parts && !any; i++)
        any = grad_parts[i];
    int64_t shape[] = {split->batch, split->length, split->parts * split->heads * split->width};
    td_tensor *whole = td__adopt(
        td__empty("split_heads", shape, 3, any->layout.dtype, any->storage->device));
    for (int i = 0; i < split->parts && whole; i++) {
        td_tensor *place = part_of(whole, split, i);
        td_status status = TD_ERR_NOMEM;
        if (place)
            status = grad_parts[i] ? td__kernels_of(place)->copy(place, grad_parts[i])
                                   : td__kernels_of(place)->fill(place, 0);
        td_tensor_release(place);
        TD_TRY(status);
    }
    grad_x[0] = whole;
    return whole ? TD_OK : TD_ERR_NOMEM;
}

static const td_function split_function = {.name = "split_heads", .backward = split_backward};

td_status td_split_heads(td_tensor *x, int parts, int64_t heads, td_tensor **results)
{
    if (!x)
        return td__fail_null(__func__);
    const int64_t *shape = x->layout.shape;
    if (!results || parts < 1 || heads < 1 || x->layout.ndim != 3 || shape[2] % parts ||
        shape[2] / parts % heads)
        return td_fail(TD_ERR_INVALID,
                       "td_split_heads: a tensor of shape %s, %d parts of %" PRId64
                       " heads; it takes [N, L, parts * E], where E is a multiple of the heads",
                       td__shape_of(x), parts, heads);
    struct split split = {.batch = shape[0],
                          .length = shape[1],
                          .parts = parts,
                          .heads = heads,
                          .width = shape[2] / parts / heads};
    TD_SCOPE;
    for (int i = 0; i < parts; i++)
        TD_TRY(td__done(results[i] = td__adopt(part_of(x, &split, i))));
    TD_TRY(td_record_all(
        &split_function, results, parts,
        &(td_node_spec){
            .inputs = {x}, .input_count = 1, .data = &split, .data_size = sizeof split}));
    for (int i = 0; i < parts; i++)
        td_scope_return(results[i]);
    return TD_OK;
}
