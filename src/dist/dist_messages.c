/* Messages: one tensor from one rank to another. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "dist/tensor_call.h"
#include "group/process_group.h"

#include <stdlib.h>

/* A message may be shorter than the tensor; so what is to be overwritten is packed as well. */
static int use_of(td_p2p_kind kind)
{
    return kind == TD_P2P_ISEND ? TD__READ : TD__READ | TD__WRITE;
}

/* Fills in all but the tensor. */
static td_status check_message(const td_p2p_op *op, struct td__tensor_call *x)
{
    if (op->kind != TD_P2P_ISEND && op->kind != TD_P2P_IRECV)
        return td_fail(TD_ERR_INVALID,
                       "batch_isend_irecv: %d is neither TD_P2P_ISEND nor TD_P2P_IRECV",
                       (int)op->kind);
    td_op_kind kind = op->kind == TD_P2P_ISEND ? TD_OP_SEND : TD_OP_RECV;
    *x = (struct td__tensor_call){.name = td_op_kind_name(kind),
                                  .group = op->group,
                                  .operation.call.kind = kind,
                                  .operation.call.tag = op->tag,
                                  .peer = op->peer};
    struct td__member member;
    TD_TRY(td__check_member(x->name, &x->group, &member));
    TD_TRY(td__check_tensor(x->name, "tensor", op->tensor, use_of(op->kind)));
    return td__check_tag(&x->operation.call);
}

static td_status run_message(td_p2p_op op, td_work **work)
{
    struct td__tensor_call x;
    TD_TRY(check_message(&op, &x));
    struct td__side side = {
        .name = "tensor", .tensors = &op.tensor, .count = 1, .use = use_of(op.kind)};
    x.operation.call.dtype = td_tensor_dtype(op.tensor);
    x.operation.call.count = (size_t)td_tensor_numel(op.tensor);
    if (op.kind == TD_P2P_ISEND)
        x.input = side;
    else
        x.output = side;
    return td__tensor_call_run(&x, work);
}

td_status td_send(td_tensor *tensor, int dst, int tag, td_group *group)
{
    return run_message(
        (td_p2p_op){
            .kind = TD_P2P_ISEND, .tensor = tensor, .peer = dst, .tag = tag, .group = group},
        NULL);
}

td_status td_isend(td_tensor *tensor, int dst, int tag, td_group *group, td_work **work)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "isend: work is NULL; td_send() is the call that blocks");
    return run_message(
        (td_p2p_op){
            .kind = TD_P2P_ISEND, .tensor = tensor, .peer = dst, .tag = tag, .group = group},
        work);
}

td_status td_recv(td_tensor *tensor, int src, int tag, td_group *group, int *source)
{
    td_p2p_op op = {
        .kind = TD_P2P_IRECV, .tensor = tensor, .peer = src, .tag = tag, .group = group};
    if (src != TD_ANY_SOURCE || !source) {
        TD_TRY(run_message(op, NULL));
        if (source)
            *source = src;
        return TD_OK;
    }
    td_work *work;
    TD_TRY(run_message(op, &work));
    while (!td_work_test(work)) /* the tensor is in use until then */
        td_work_wait(work, 0);
    td_status status = td_work_wait(work, TD_NOW); /* orders the current stream of a device */
    if (!status)
        *source = td_work_source(work);
    td_work_release(work);
    return status;
}

td_status td_irecv(td_tensor *tensor, int src, int tag, td_group *group, td_work **work)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "irecv: work is NULL; td_recv() is the call that blocks");
    return run_message(
        (td_p2p_op){
            .kind = TD_P2P_IRECV, .tensor = tensor, .peer = src, .tag = tag, .group = group},
        work);
}

/* One of a batch. */
struct batched {
    td_group *group;             /* in use */
    const struct td__part *part; /* which the batch has begun on; NULL: on an earlier one of it */
};

/* Checks one, and holds its group. */
static td_status check_op(const td_p2p_op *op, struct batched *batched)
{
    struct td__tensor_call x;
    TD_TRY(td__check_reserved("batch_isend_irecv", op->reserved));
    TD_TRY(check_message(op, &x));
    TD_TRY(td__check_message(x.group, &x.operation.call, x.peer));
    td_device *device = op->tensor->storage->device;
    if (td__is_meta(device))
        return td__fail_meta("batch_isend_irecv", device);
    x.operation.call.device = device->is_host ? NULL : device;
    if (x.operation.call.device && !td__part_prepare(x.group, &x.operation.call))
        return td__error_status();
    td__group_use(x.group);
    batched->group = x.group;
    batched->part = td__part_of(x.group, &x.operation.call);
    return TD_OK;
}

/* Begins the batch on each backend once, or ends it. The first failure ends the beginning. */
static td_status mark_batch(struct batched *all, int count, bool begin)
{
    td_status first = TD_OK;
    for (int i = 0; i < count; i++) {
        const struct td__part *part = all[i].part;
        for (int k = 0; begin && k < i && part; k++)
            part = all[k].part == part ? NULL : part;
        all[i].part = part;
        if (!part || !part->ops->batch_begin || !part->ops->batch_end)
            continue;
        td_status status = begin ? part->ops->batch_begin(part->self)
                                 : part->ops->batch_end(part->self);
        first = first ? first : status;
    }
    return first;
}

static td_status start_all(const td_p2p_op *ops, int count, const struct batched *all,
                           td_work **works)
{
    for (int i = 0; i < count; i++) {
        td_p2p_op op = ops[i];
        op.group = all[i].group;
        TD_TRY(run_message(op, &works[i]));
    }
    return TD_OK;
}

static td_status check_and_start(const td_p2p_op *ops, int count, struct batched *all,
                                 td_work **works)
{
    struct td__error error;
    for (int i = 0; i < count; i++) {
        td_status status = check_op(&ops[i], &all[i]);
        if (status)
            return td_fail(status, "batch_isend_irecv: ops[%d]: %s", i, td__error_text());
        works[i] = NULL;
    }
    td_status status = mark_batch(all, count, true);
    if (!status)
        status = start_all(ops, count, all, works);
    td__error_save(&error);
    td_status ended = mark_batch(all, count, false);
    if (!status && !ended)
        return TD_OK;
    for (int i = 0; i < count; i++) {
        td_work_release(works[i]);
        works[i] = NULL;
    }
    return status ? td__error_restore(&error) : ended;
}

/* The groups are in use from the check to the last start, so that no other thread destroys one in between. */
td_status td_batch_isend_irecv(const td_p2p_op *ops, int count, td_work **works)
{
    if (count < 1 || !ops || !works)
        return td_fail(TD_ERR_INVALID, "batch_isend_irecv: %s",
                       count < 1 ? "the list is empty"
                       : !ops    ? "ops is NULL"
                                 : "works is NULL");
    struct batched *all = calloc((size_t)count, sizeof *all);
    if (!all)
        return td__fail_nomem("batch_isend_irecv");
    td_status status = check_and_start(ops, count, all, works);
    for (int i = 0; i < count && all[i].group; i++)
        td__group_unuse(all[i].group);
    free(all);
    return status;
}
