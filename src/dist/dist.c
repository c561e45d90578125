/* Collectives on one tensor, or on one for the input and one for the output. */
#include "base/fail.h"
#include "dist/tensor_call.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- One tensor, in place -------------------------------------------------------------------- */

static td_status run_in_place(struct td__tensor_call *x, td_tensor *tensor, int use, td_work **work)
{
    TD_TRY(td__check_tensor(x->name, "tensor", tensor, use));
    x->output = (struct td__side){.name = "tensor", .tensors = &tensor, .count = 1, .use = use};
    x->operation.call.dtype = td_tensor_dtype(tensor);
    x->operation.call.count = (size_t)td_tensor_numel(tensor);
    return td__tensor_call_run(x, work);
}

td_status td_broadcast(td_tensor *tensor, int src, td_group *group, td_work **work)
{
    struct td__tensor_call x = {
        .name = "broadcast", .group = group, .operation.call.kind = TD_OP_BROADCAST, .peer = src};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    return run_in_place(&x, tensor, member.global == src ? TD__READ : TD__WRITE, work);
}

td_status td_all_reduce(td_tensor *tensor, td_reduce_op op, td_group *group, td_work **work)
{
    struct td__tensor_call x = {.name = "all_reduce",
                                .group = group,
                                .operation.call.kind = TD_OP_ALL_REDUCE,
                                .operation.call.op = op};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    return run_in_place(&x, tensor, TD__READ | TD__WRITE, work);
}

td_status td_reduce(td_tensor *tensor, int dst, td_reduce_op op, td_group *group, td_work **work)
{
    struct td__tensor_call x = {.name = "reduce",
                                .group = group,
                                .operation.call.kind = TD_OP_REDUCE,
                                .operation.call.op = op,
                                .peer = dst};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    return run_in_place(&x, tensor, TD__READ | (member.global == dst ? TD__WRITE : 0), work);
}

/* ---- From one tensor to another -------------------------------------------------------------- */

/* Checks what all of these have in common, and fills in the sides; `input` and `output` must stay.
 */
static td_status set_sides(struct td__tensor_call *x, td_tensor *const *output,
                           td_tensor *const *input, struct td__member *member)
{
    TD_TRY(td__check_member(x->name, &x->group, member));
    TD_TRY(td__check_tensor(x->name, "output", *output, TD__WRITE));
    TD_TRY(td__check_tensor(x->name, "input", *input, TD__READ));
    x->output = (struct td__side){
        .name = "output", .tensors = output, .count = 1, .use = TD__WRITE};
    x->input = (struct td__side){.name = "input", .tensors = input, .count = 1, .use = TD__READ};
    x->operation.call.dtype = td_tensor_dtype(*input);
    return TD_OK;
}

td_status td_all_gather_into_tensor(td_tensor *output, td_tensor *input, td_group *group,
                                    td_work **work)
{
    struct td__tensor_call x = {
        .name = "all_gather_into_tensor", .group = group, .operation.call.kind = TD_OP_ALL_GATHER};
    struct td__member member;
    TD_TRY(set_sides(&x, &output, &input, &member));
    TD_TRY(td__check_parts(x.name, "output", output, "input", input, member.size));
    x.operation.call.count = (size_t)td_tensor_numel(input);
    return td__tensor_call_run(&x, work);
}

td_status td_reduce_scatter_tensor(td_tensor *output, td_tensor *input, td_reduce_op op,
                                   td_group *group, td_work **work)
{
    struct td__tensor_call x = {.name = "reduce_scatter_tensor",
                                .group = group,
                                .operation.call.kind = TD_OP_REDUCE_SCATTER,
                                .operation.call.op = op};
    struct td__member member;
    TD_TRY(set_sides(&x, &output, &input, &member));
    TD_TRY(td__check_parts(x.name, "input", input, "output", output, member.size));
    x.operation.call.count = (size_t)td_tensor_numel(output);
    return td__tensor_call_run(&x, work);
}

/* ---- all_to_all_single ----------------------------------------------------------------------- */

/* Fills in the numbers of elements of the parts of `tensor` along dimension 0. */
static td_status count_parts(const char *call, const char *name, const td_tensor *tensor,
                             const int64_t *splits, int size, size_t *counts)
{
    const struct td__layout *layout = &tensor->layout;
    if (layout->ndim == 0)
        return td_fail(TD_ERR_INVALID, "%s: %s has no dimension 0 that could be cut", call, name);
    int64_t rows = layout->shape[0], row = 1, sum = 0;
    for (int d = 1; d < layout->ndim; d++)
        row *= layout->shape[d];
    if (!splits && rows % size)
        return td_fail(TD_ERR_INVALID,
                       "%s: dimension 0 of %s has size %" PRId64
                       ", which is no multiple of the %d ranks; give split sizes",
                       call, name, rows, size);
    for (int r = 0; r < size; r++) {
        int64_t part = splits ? splits[r] : rows / size;
        if (part < 0 || part > rows - sum)
            return td_fail(TD_ERR_INVALID,
                           "%s: split size %d of %s is %" PRId64 ", but %" PRId64 " of the %" PRId64
                           " indices of dimension 0 are left",
                           call, r, name, part, rows - sum, rows);
        sum += part;
        counts[r] = (size_t)(part * row);
    }
    if (sum != rows)
        return td_fail(TD_ERR_INVALID,
                       "%s: the split sizes of %s add up to %" PRId64
                       ", but its dimension 0 has size %" PRId64,
                       call, name, sum, rows);
    return TD_OK;
}

static td_status run_splits(struct td__tensor_call *x, const int64_t *output_splits,
                            const int64_t *input_splits, int size, td_work **work)
{
    size_t *inputs = calloc((size_t)size, sizeof *inputs);
    size_t *outputs = calloc((size_t)size, sizeof *outputs);
    td_status status = inputs && outputs ? TD_OK : td__fail_nomem(x->name);
    if (!status)
        status = count_parts(x->name, "input", x->input.tensors[0], input_splits, size, inputs);
    if (!status)
        status = count_parts(x->name, "output", x->output.tensors[0], output_splits, size, outputs);
    if (status) {
        free(inputs);
        free(outputs);
        return status;
    }
    x->operation.call.input_counts = inputs;
    x->operation.call.output_counts = outputs;
    return td__tensor_call_run(x, work);
}

td_status td_all_to_all_single(td_tensor *output, td_tensor *input,
                               const int64_t *output_split_sizes, const int64_t *input_split_sizes,
                               td_group *group, td_work **work)
{
    struct td__tensor_call x = {
        .name = "all_to_all_single", .group = group, .operation.call.kind = TD_OP_ALL_TO_ALL};
    struct td__member member;
    TD_TRY(set_sides(&x, &output, &input, &member));
    if (td_tensor_dtype(output) != td_tensor_dtype(input))
        return td_fail(TD_ERR_INVALID, "%s: output has dtype %s, but input has %s", x.name,
                       td_dtype_name(td_tensor_dtype(output)),
                       td_dtype_name(td_tensor_dtype(input)));
    if (output_split_sizes || input_split_sizes)
        return run_splits(&x, output_split_sizes, input_split_sizes, member.size, work);

    TD_TRY(td__check_parts(x.name, "output", output, "input", input, 1));
    int64_t rows = td_tensor_ndim(input) > 0 ? td_tensor_size(input, 0) : 1;
    if (rows % member.size)
        return td_fail(TD_ERR_INVALID,
                       "%s: dimension 0 of input has size %" PRId64
                       ", which is no multiple of the %d ranks; give split sizes",
                       x.name, rows, member.size);
    x.operation.call.count = (size_t)(td_tensor_numel(input) / member.size);
    return td__tensor_call_run(&x, work);
}

/* ---- Without tensors ------------------------------------------------------------------------- */

td_status td_barrier(td_group *group, td_work **work)
{
    return td_group_barrier(group, work);
}

td_status td_monitored_barrier(td_group *group, int64_t timeout_ms, bool wait_all_ranks,
                               int *missing, int *missing_count)
{
    return td_group_monitored_barrier(group, timeout_ms, wait_all_ranks, missing, missing_count);
}
