/* Many small tensors at once: one call for each dtype, and these are one call.
 *
 *     tensors    f32 a, f64 b, f32 c        ->    f32: a c    f64: b
 *
 * The dtypes come in the order in which they first appear, which is the same on all ranks. Where
 * each rank has a part of the whole (all_gather, reduce_scatter), the whole of one dtype is the
 * parts of all ranks one after another: a0 c0 a1 c1 … */
#include "base/fail.h"
#include "dist/tensor_call.h"
#include "call/operation.h"
#include "group/process_group.h"
#include "reduce/reduction.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* A call as its arguments have it: `own` tensors of one rank, and of the whole `size` times as
 * many. */
struct request {
    struct td__tensor_call x; /* what is the same for all dtypes */
    td_tensor *const *own;
    int count;
    const char *own_name;
    int own_use;
    td_tensor *const *whole; /* NULL: the operation is in place */
    const char *whole_name;
    int whole_use;
    bool reduces;
    struct td__member member;
};

/* ---- Checks ---------------------------------------------------------------------------------- */

/* Every dtype is checked before the first operation starts; the group would check the second one's
 * only then. */
static td_status check_op(const struct request *request, td_dtype dtype)
{
    struct td__reduction reduction;
    if (!request->reduces)
        return TD_OK;
    td_status status = td__reduction_of(request->x.operation.call.op, dtype, &reduction);
    return status ? td_fail(status, "%s: %s", request->x.name, td__error_text()) : TD_OK;
}

static td_status check_whole(const struct request *request, int whole_count)
{
    const char *call = request->x.name;
    int64_t expected = (int64_t)request->count * request->member.size;
    if (whole_count != expected)
        return td_fail(TD_ERR_INVALID,
                       "%s: %s has %d tensors, but must have %" PRId64
                       ": for each of %d ranks the %d of %s",
                       call, request->whole_name, whole_count, expected, request->member.size,
                       request->count, request->own_name);
    for (int r = 0; r < request->member.size; r++) {
        char name[64], like[64];
        snprintf(name, sizeof name, "%s of rank %d", request->whole_name, r);
        snprintf(like, sizeof like, "the one of %s", request->own_name);
        for (int i = 0; i < request->count; i++) {
            td_tensor *tensor = request->whole[r * request->count + i];
            TD_TRY(td__check_tensor(call, name, tensor, request->whole_use));
            TD_TRY(td__check_parts(call, name, tensor, like, request->own[i], 1));
        }
    }
    return TD_OK;
}

static td_status check(struct request *request, int whole_count)
{
    const char *call = request->x.name;
    TD_TRY(td__check_member(call, &request->x.group, &request->member));
    if (request->count < 1)
        return td_fail(TD_ERR_INVALID, "%s: %s is empty", call, request->own_name);
    TD_TRY(td__check_list(call, request->own_name, request->own, request->count, request->count,
                          request->own_use, NULL, NULL));
    for (int i = 0; i < request->count; i++)
        TD_TRY(check_op(request, td_tensor_dtype(request->own[i])));
    if (!request->whole_name)
        return TD_OK;
    if (!request->whole)
        return td_fail(TD_ERR_INVALID, "%s: %s is NULL", call, request->whole_name);
    return check_whole(request, whole_count);
}

/* ---- One call for each dtype ------------------------------------------------------------- */

/* The tensors of `dtype` among those of all `ranks`, to `chosen`; returns how many. */
static int choose(const struct request *request, td_tensor *const *tensors, int ranks,
                  td_dtype dtype, td_tensor **chosen)
{
    int found = 0;
    for (int i = 0; i < request->count * ranks; i++)
        if (td_tensor_dtype(tensors[i]) == dtype)
            chosen[found++] = tensors[i];
    return found;
}

/* Which sizes the tensors of a list have, in one word; one of a single tensor is no list. */
static uint32_t detail_of(td_tensor *const *tensors, int count)
{
    uint64_t sizes = 0;
    for (int i = 0; i < count; i++) {
        sizes = (sizes ^ (uint64_t)td_tensor_numel(tensors[i])) * 0x9e3779b97f4a7c15u;
        sizes ^= sizes >> 32;
    }
    return count > 1 ? (uint32_t)sizes | TD__DETAIL_LIST : 0;
}

/* `lists` has room for all tensors of both sides. */
static td_status hold_dtype(const struct request *request, td_dtype dtype, td_tensor **lists,
                            struct td__tensor_call **held)
{
    struct td__tensor_call x = request->x;
    x.operation.call.dtype = dtype;
    struct td__side own = {.name = request->own_name, .use = request->own_use, .tensors = lists};
    own.count = choose(request, request->own, 1, dtype, lists);
    for (int i = 0; i < own.count; i++)
        x.operation.call.count += (size_t)td_tensor_numel(lists[i]);
    x.operation.call.detail = detail_of(lists, own.count);

    struct td__side whole = {.name = request->whole_name, .use = request->whole_use};
    if (request->whole) {
        whole.tensors = lists + own.count;
        whole.count = choose(request, request->whole, request->member.size, dtype,
                             lists + own.count);
    }
    bool own_is_input = request->whole && request->own_use == TD__READ;
    x.input = own_is_input ? own : whole;
    x.output = own_is_input ? whole : own;
    return td__tensor_call_hold(&x, held);
}

static td_status run(struct request *request, int whole_count, td_work **work)
{
    TD_TRY(check(request, whole_count));
    size_t most = (size_t)request->count * (1 + (size_t)request->member.size);
    td_tensor **lists = malloc(most * sizeof *lists);
    if (!lists)
        return td__fail_nomem(request->x.name);

    struct td__tensor_call *first = NULL, **end = &first;
    td_status status = TD_OK;
    unsigned seen = 0; /* bit d: dtype d has its call */
    for (int i = 0; i < request->count && !status; i++) {
        td_dtype dtype = td_tensor_dtype(request->own[i]);
        if (seen & 1u << dtype)
            continue;
        seen |= 1u << dtype;
        status = hold_dtype(request, dtype, lists, end);
        if (!status)
            end = &(*end)->next;
    }
    free(lists);
    if (!status)
        return td__tensor_call_run_chain(first, work);
    td__tensor_call_discard(first);
    return status;
}

/* ---- The calls ------------------------------------------------------------------------------- */

td_status td_broadcast_coalesced(td_tensor *const *tensors, int count, int src, td_group *group,
                                 td_work **work)
{
    struct request request = {
        .x = {.name = "broadcast_coalesced",
              .group = group,
              .operation.call.kind = TD_OP_BROADCAST,
              .peer = src},
        .own = tensors,
        .count = count,
        .own_name = "tensors",
    };
    TD_TRY(td__check_member(request.x.name, &request.x.group, &request.member));
    request.own_use = request.member.global == src ? TD__READ : TD__WRITE;
    return run(&request, 0, work);
}

td_status td_all_reduce_coalesced(td_tensor *const *tensors, int count, td_reduce_op op,
                                  td_group *group, td_work **work)
{
    struct request request = {
        .x = {.name = "all_reduce_coalesced",
              .group = group,
              .operation.call.kind = TD_OP_ALL_REDUCE,
              .operation.call.op = op},
        .own = tensors,
        .count = count,
        .own_name = "tensors",
        .own_use = TD__READ | TD__WRITE,
        .reduces = true,
    };
    return run(&request, 0, work);
}

td_status td_all_gather_coalesced(td_tensor *const *outputs, int output_count,
                                  td_tensor *const *inputs, int input_count, td_group *group,
                                  td_work **work)
{
    struct request request = {
        .x = {.name = "all_gather_coalesced",
              .group = group,
              .operation.call.kind = TD_OP_ALL_GATHER},
        .own = inputs,
        .count = input_count,
        .own_name = "inputs",
        .own_use = TD__READ,
        .whole = outputs,
        .whole_name = "outputs",
        .whole_use = TD__WRITE,
    };
    return run(&request, output_count, work);
}

td_status td_reduce_scatter_coalesced(td_tensor *const *outputs, int output_count,
                                      td_tensor *const *inputs, int input_count, td_reduce_op op,
                                      td_group *group, td_work **work)
{
    struct request request = {
        .x = {.name = "reduce_scatter_coalesced",
              .group = group,
              .operation.call.kind = TD_OP_REDUCE_SCATTER,
              .operation.call.op = op},
        .own = outputs,
        .count = output_count,
        .own_name = "outputs",
        .own_use = TD__WRITE,
        .whole = inputs,
        .whole_name = "inputs",
        .whole_use = TD__READ,
        .reduces = true,
    };
    return run(&request, input_count, work);
}
