/* A projection cut into the heads of an attention.
 *
 *     x [N, L, parts E] -> parts times [N, heads, L, E / heads]
 *
 * One operator with several outputs: these are views, and its backward copies their gradients into one gradient
 * of the whole. With td_narrow() there would be a gradient of that size for each part, to be summed up. The gradients
 * of an attention are parts of one tensor already, which is the gradient of the whole then, without a copy. */
#include "autograd/heads.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <inttypes.h>

td_tensor *td__heads_part(td_tensor *whole, const struct td__heads *split, int64_t index)
{
    int64_t shape[] = {split->batch, split->length, split->parts, split->heads, split->width};
    td_tensor *all = td__reshape(whole, shape, 5, NULL);
    td_tensor *part = td__select_index(all, 2, index);
    td_tensor *turned = td__transpose(part, 1, 2);
    td_tensor_release(part);
    td_tensor_release(all);
    return turned;
}

bool td__heads_are_whole(td_tensor *const *x, const struct td__heads *split)
{
    int64_t part = split->heads * split->width, row = split->parts * part;
    const int64_t shape[] = {split->batch, split->heads, split->length, split->width};
    const int64_t strides[] = {split->length * row, split->width, row, 1};
    for (int64_t i = 0; i < split->parts; i++) {
        if (!x[i] || x[i]->layout.ndim != 4 || x[i]->storage != x[0]->storage ||
            x[i]->layout.dtype != x[0]->layout.dtype || x[i]->offset != x[0]->offset + i * part)
            return false;
        for (int d = 0; d < 4; d++)
            if (x[i]->layout.shape[d] != shape[d] ||
                (shape[d] != 1 && x[i]->layout.strides[d] != strides[d]))
                return false;
    }
    return true;
}

/* The tensor whose parts these are. */
static td_tensor *whole_of(td_tensor *const *parts, const struct td__heads *split)
{
    struct td__layout layout = {
        .dtype = parts[0]->layout.dtype,
        .ndim = 3,
        .numel = parts[0]->layout.numel * split->parts,
        .shape = {split->batch, split->length, split->parts * split->heads * split->width}};
    td__layout_set_contiguous(&layout);
    return td__adopt(td__tensor_over(parts[0]->storage, parts[0]->offset, &layout));
}

static td_status split_backward(td_node *node, td_tensor *const *grad_parts, td_tensor **grad_x)
{
    const struct td__heads *split = td_node_data(node);
    td_tensor *any = NULL;
    if (td__heads_are_whole(grad_parts, split))
        return td__done(grad_x[0] = whole_of(grad_parts, split));
    for (int i = 0; i < split->parts && !any; i++)
        any = grad_parts[i];
    int64_t shape[] = {split->batch, split->length, split->parts * split->heads * split->width};
    td_tensor *whole = td__adopt(
        td__empty("split_heads", shape, 3, any->layout.dtype, any->storage->device));
    for (int i = 0; i < split->parts && whole; i++) {
        td_tensor *place = td__heads_part(whole, split, i);
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
    struct td__heads split = {.batch = shape[0],
                              .length = shape[1],
                              .parts = parts,
                              .heads = heads,
                              .width = shape[2] / parts / heads};
    TD_SCOPE;
    for (int i = 0; i < parts; i++)
        TD_TRY(td__done(results[i] = td__adopt(td__heads_part(x, &split, i))));
    TD_TRY(td_record_all(
        &split_function, results, parts,
        &(td_node_spec){
            .inputs = {x}, .input_count = 1, .data = &split, .data_size = sizeof split}));
    for (int i = 0; i < parts; i++)
        td_scope_return(results[i]);
    return TD_OK;
}
