/* Embedding: rows of a table for indices. The gradient of the table is as large as the table, and
 * is accumulated directly in the leaf's; the row padding_idx is restored afterwards. */
#include "autograd/op_kernel.h"
#include "base/fail.h"

#include <string.h>

static const char call[] = "td_f_embedding";

static td_status embedding_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    const int64_t padding = *(const int64_t *)td_node_data(node);
    td_tensor *indices = td_node_saved(node, 0);
    TD_TRY(td__done(indices));
    bool accumulate;
    td_tensor *table = td__grad_target_or_new(node, 0, &accumulate);
    if (!table)
        return TD_ERR_NOMEM;
    const td_kernels *kernels = td__kernels_of(table);
    int64_t count = indices->layout.numel;
    td_tensor *rows = td__adopt(
        td__reshape(grad_y[0], (int64_t[]){count, table->layout.shape[1]}, 2, NULL));
    if (!rows)
        return TD_ERR_NOMEM;
    if (!accumulate)
        TD_TRY(kernels->fill(table, 0));
    td_tensor *row = NULL, *before = NULL;
    if (padding >= 0) {
        row = td__adopt(td__select_index(table, 0, padding));
        before = row ? td__adopt(td__clone(row)) : NULL;
        if (!before)
            return TD_ERR_NOMEM;
    }
    struct td_tensor list = td__view_as(indices, &count, 1);
    TD_TRY(kernels->index_add(table, 0, &list, rows));
    if (row)
        TD_TRY(kernels->copy(row, before));
    grads[0] = table;
    return TD_OK;
}

static const td_function embedding_function = {.name = call, .backward = embedding_backward};

static td_status check(const td_tensor *indices, const td_tensor *weight, int64_t padding_idx)
{
    TD_TRY(td__check_dims(call, "weight", weight, 2, 2));
    if (indices->layout.dtype != TD_I64)
        return td_fail(TD_ERR_INVALID, "%s: the indices are %s, the weight %s; indices are i64",
                       call, td_dtype_name(indices->layout.dtype),
                       td_dtype_name(weight->layout.dtype));
    if (indices->storage->device != weight->storage->device)
        return td_fail(TD_ERR_INVALID, "%s: the indices are on %s, the weight on %s", call,
                       indices->storage->device->name, weight->storage->device->name);
    if (indices->layout.ndim >= TD_MAX_DIMS)
        return td_fail(TD_ERR_INVALID, "%s: the indices have the shape %s; %d dimensions at most",
                       call, td__shape_of(indices), TD_MAX_DIMS - 1);
    if (padding_idx >= weight->layout.shape[0])
        return td_fail(TD_ERR_INVALID, "%s: padding_idx is %lld, and weight has the shape %s", call,
                       (long long)padding_idx, td__shape_of(weight));
    return TD_OK;
}

static td_tensor *embedding(td_tensor *indices, td_tensor *weight, int64_t padding_idx)
{
    if (check(indices, weight, padding_idx))
        return NULL;
    td_tensor *contiguous = td__scoped_contiguous(indices);
    if (!contiguous)
        return NULL;
    int64_t shape[TD_MAX_DIMS], count = indices->layout.numel;
    int ndim = indices->layout.ndim;
    memcpy(shape, indices->layout.shape, sizeof shape);
    shape[ndim] = weight->layout.shape[1];
    td_tensor *y = td__empty(call, shape, ndim + 1, weight->layout.dtype, weight->storage->device);
    if (!y)
        return NULL;
    struct td_tensor rows = td__view_as(y, (int64_t[]){count, shape[ndim]}, 2);
    struct td_tensor list = td__view_as(contiguous, &count, 1);
    td_status status = td__kernels_of(weight)->index_select(&rows, weight, 0, &list);
    if (status == TD_ERR_INVALID) /* the kernel got the indices flattened */
        td__check_indices(call, "index", contiguous, weight->layout.shape[0]);
    y = td__kept(y, status);
    return td__result(&embedding_function, y,
                      &(td_node_spec){.inputs = {weight},
                                      .input_count = 1,
                                      .saved = {contiguous},
                                      .saved_count = 1,
                                      .data = &padding_idx,
                                      .data_size = sizeof padding_idx});
}

td_tensor *td_f_embedding(td_tensor *indices, td_tensor *weight, int64_t padding_idx)
{
    td_tensor *y = NULL;
    if (!indices || !weight)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(embedding(indices, weight, padding_idx));
    }
    return y;
}
