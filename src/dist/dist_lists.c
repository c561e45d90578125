/* Collectives with a list of tensors, one for each rank: the list is one side of the call. */
#include "base/fail.h"
#include "dist/tensor_call.h"

#include <inttypes.h>
#include <stdlib.h>

static struct td__side list_side(const char *name, td_tensor *const *tensors, int count, int use)
{
    return (struct td__side){.name = name, .tensors = tensors, .count = count, .use = use};
}

static size_t *counts_of(const struct td__side *side)
{
    size_t *counts = malloc((size_t)side->count * sizeof *counts);
    for (int i = 0; counts && i < side->count; i++)
        counts[i] = (size_t)td_tensor_numel(side->tensors[i]);
    return counts;
}

/* Runs a call whose lists of counts, where it should have them, are there or could not be made. */
static td_status run_counted(struct td__tensor_call *x, td_work **work)
{
    if (x->operation.call.input_counts && x->operation.call.output_counts)
        return td__tensor_call_run(x, work);
    free((void *)x->operation.call.input_counts);
    free((void *)x->operation.call.output_counts);
    return td__fail_nomem(x->name);
}

/* ---- A list on every rank --------------------------------------------------------------------
 *
 * Its tensors may have different numbers of elements, the same on all ranks. */

/* Checks the list against `tensor`, the part of this rank. */
static td_status check_parts(const struct td__tensor_call *x, const struct td__side *list,
                             const struct td__member *member, const char *name,
                             const td_tensor *tensor)
{
    TD_TRY(td__check_list(x->name, list->name, list->tensors, list->count, member->size, list->use,
                          NULL, NULL));
    for (int i = 0; i < list->count; i++)
        if (td_tensor_dtype(list->tensors[i]) != td_tensor_dtype(tensor))
            return td_fail(TD_ERR_INVALID,
                           "%s: %s[%d] has elements of %s, but %s has %s; all must have the same "
                           "dtype",
                           x->name, list->name, i, td_dtype_name(td_tensor_dtype(list->tensors[i])),
                           name, td_dtype_name(td_tensor_dtype(tensor)));
    const td_tensor *own = list->tensors[member->rank];
    if (td_tensor_numel(own) != td_tensor_numel(tensor))
        return td_fail(TD_ERR_INVALID,
                       "%s: %s[%d], the part of this rank, has %" PRId64
                       " elements, but %s has %" PRId64 "; both must have the same number",
                       x->name, list->name, member->rank, td_tensor_numel(own), name,
                       td_tensor_numel(tensor));
    return TD_OK;
}

/* Runs all_gather or reduce_scatter between `list` and `tensor`. */
static td_status run_parts(struct td__tensor_call *x, const struct td__side *list,
                           const td_tensor *tensor, td_work **work)
{
    bool even = true;
    x->operation.call.dtype = td_tensor_dtype(tensor);
    for (int i = 0; i < list->count; i++)
        even = even && td_tensor_numel(list->tensors[i]) == td_tensor_numel(tensor);
    if (even) {
        x->operation.call.count = (size_t)td_tensor_numel(tensor);
        return td__tensor_call_run(x, work);
    }
    x->operation.call.input_counts = counts_of(list);
    x->operation.call.output_counts = counts_of(list);
    return run_counted(x, work);
}

td_status td_all_gather(td_tensor *const *tensors, int count, td_tensor *tensor, td_group *group,
                        td_work **work)
{
    struct td__tensor_call x = {
        .name = "all_gather", .group = group, .operation.call.kind = TD_OP_ALL_GATHER};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    TD_TRY(td__check_tensor(x.name, "tensor", tensor, TD__READ));
    x.input = list_side("tensor", &tensor, 1, TD__READ);
    x.output = list_side("tensors", tensors, count, TD__WRITE);
    TD_TRY(check_parts(&x, &x.output, &member, "tensor", tensor));
    return run_parts(&x, &x.output, tensor, work);
}

td_status td_reduce_scatter(td_tensor *output, td_tensor *const *input_list, int count,
                            td_reduce_op op, td_group *group, td_work **work)
{
    struct td__tensor_call x = {.name = "reduce_scatter",
                                .group = group,
                                .operation.call.kind = TD_OP_REDUCE_SCATTER,
                                .operation.call.op = op};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    TD_TRY(td__check_tensor(x.name, "output", output, TD__WRITE));
    x.input = list_side("input_list", input_list, count, TD__READ);
    x.output = list_side("output", &output, 1, TD__WRITE);
    TD_TRY(check_parts(&x, &x.input, &member, "output", output));
    return run_parts(&x, &x.input, output, work);
}

/* ---- A list on the root only ----------------------------------------------------------------- */

/* Checks the list of the root, and that the others have none. */
static td_status check_root_list(const char *call, const char *name, td_tensor *const *list,
                                 int count, const struct td__member *member, int root, int use,
                                 const td_tensor *tensor)
{
    if (member->global == root)
        return td__check_list(call, name, list, count, member->size, use, "tensor", tensor);
    if (list)
        return td_fail(TD_ERR_INVALID,
                       "%s: rank %d passed %s, but the root is rank %d; others pass NULL", call,
                       member->global, name, root);
    return TD_OK;
}

td_status td_gather(td_tensor *tensor, td_tensor *const *gather_list, int count, int dst,
                    td_group *group, td_work **work)
{
    struct td__tensor_call x = {
        .name = "gather", .group = group, .operation.call.kind = TD_OP_GATHER, .peer = dst};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    TD_TRY(td__check_tensor(x.name, "tensor", tensor, TD__READ));
    TD_TRY(check_root_list(x.name, "gather_list", gather_list, count, &member, dst, TD__WRITE,
                           tensor));
    x.input = list_side("tensor", &tensor, 1, TD__READ);
    x.output = list_side("gather_list", gather_list, gather_list ? count : 0, TD__WRITE);
    x.operation.call.dtype = td_tensor_dtype(tensor);
    x.operation.call.count = (size_t)td_tensor_numel(tensor);
    return td__tensor_call_run(&x, work);
}

td_status td_scatter(td_tensor *tensor, td_tensor *const *scatter_list, int count, int src,
                     td_group *group, td_work **work)
{
    struct td__tensor_call x = {
        .name = "scatter", .group = group, .operation.call.kind = TD_OP_SCATTER, .peer = src};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    TD_TRY(td__check_tensor(x.name, "tensor", tensor, TD__WRITE));
    TD_TRY(check_root_list(x.name, "scatter_list", scatter_list, count, &member, src, TD__READ,
                           tensor));
    x.input = list_side("scatter_list", scatter_list, scatter_list ? count : 0, TD__READ);
    x.output = list_side("tensor", &tensor, 1, TD__WRITE);
    x.operation.call.dtype = td_tensor_dtype(tensor);
    x.operation.call.count = (size_t)td_tensor_numel(tensor);
    return td__tensor_call_run(&x, work);
}

/* ---- Scatter and gather in halves ------------------------------------------------------------ */

td_status td_scatter_send(td_tensor *const *scatter_list, int count, td_tensor *tensor,
                          td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member("scatter_send", &group, &member));
    return td_scatter(tensor, scatter_list, count, member.global, group, NULL);
}

td_status td_scatter_recv(td_tensor *tensor, int src, td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member("scatter_recv", &group, &member));
    if (member.global == src)
        return td_fail(TD_ERR_INVALID,
                       "scatter_recv: rank %d is the source itself; it calls td_scatter_send()",
                       src);
    return td_scatter(tensor, NULL, 0, src, group, NULL);
}

td_status td_gather_recv(td_tensor *const *gather_list, int count, td_tensor *tensor,
                         td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member("gather_recv", &group, &member));
    return td_gather(tensor, gather_list, count, member.global, group, NULL);
}

td_status td_gather_send(td_tensor *tensor, int dst, td_group *group)
{
    struct td__member member;
    TD_TRY(td__check_member("gather_send", &group, &member));
    if (member.global == dst)
        return td_fail(TD_ERR_INVALID,
                       "gather_send: rank %d is the destination itself; it calls td_gather_recv()",
                       dst);
    return td_gather(tensor, NULL, 0, dst, group, NULL);
}

/* ---- all_to_all ------------------------------------------------------------------------------
 *
 * Always with counts: whether all parts happen to be even here says nothing about other ranks. */

static td_status check_dtypes(const struct td__tensor_call *x, const struct td__side *side)
{
    for (int i = 0; i < side->count; i++)
        if (td_tensor_dtype(side->tensors[i]) != x->operation.call.dtype)
            return td_fail(TD_ERR_INVALID, "%s: %s[%d] has dtype %s, but input_list[0] has %s",
                           x->name, side->name, i, td_dtype_name(td_tensor_dtype(side->tensors[i])),
                           td_dtype_name(x->operation.call.dtype));
    return TD_OK;
}

td_status td_all_to_all(td_tensor *const *output_list, int output_count,
                        td_tensor *const *input_list, int input_count, td_group *group,
                        td_work **work)
{
    struct td__tensor_call x = {
        .name = "all_to_all", .group = group, .operation.call.kind = TD_OP_ALL_TO_ALL};
    struct td__member member;
    TD_TRY(td__check_member(x.name, &x.group, &member));
    TD_TRY(td__check_list(x.name, "output_list", output_list, output_count, member.size, TD__WRITE,
                          NULL, NULL));
    TD_TRY(td__check_list(x.name, "input_list", input_list, input_count, member.size, TD__READ,
                          NULL, NULL));
    x.input = list_side("input_list", input_list, input_count, TD__READ);
    x.output = list_side("output_list", output_list, output_count, TD__WRITE);
    x.operation.call.dtype = td_tensor_dtype(input_list[0]);
    TD_TRY(check_dtypes(&x, &x.input));
    TD_TRY(check_dtypes(&x, &x.output));

    x.operation.call.input_counts = counts_of(&x.input);
    x.operation.call.output_counts = counts_of(&x.output);
    return run_counted(&x, work);
}
