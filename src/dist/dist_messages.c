/* Messages: one tensor from one rank to another. */
#include "base/fail.h"
#include "dist/tensor_call.h"

/* A message may be shorter than the tensor; so what is to be overwritten is packed as well. */
static int use_of(td_p2p_kind kind)
{
    return kind == TD_P2P_ISEND ? TD__READ : TD__READ | TD__WRITE;
}

static td_status check_message(const td_p2p_op *op)
{
    if (op->kind != TD_P2P_ISEND && op->kind != TD_P2P_IRECV)
        return td_fail(TD_ERR_INVALID,
                       "batch_isend_irecv: %d is neither TD_P2P_ISEND nor TD_P2P_IRECV",
                       (int)op->kind);
    bool sends = op->kind == TD_P2P_ISEND;
    const char *call = sends ? "send" : "recv";
    struct td__member member;
    TD_TRY(td__check_member(call, op->group, &member));
    TD_TRY(td__check_tensor(call, "tensor", op->tensor, use_of(op->kind)));
    if (op->tag < 0 && (sends || op->tag != TD_ANY_TAG))
        return td_fail(TD_ERR_INVALID, "%s: tag %d is negative", call, op->tag);
    if (op->peer == member.global)
        return td_fail(TD_ERR_INVALID, "%s: rank %d cannot %s itself", call, op->peer,
                       sends ? "send to" : "receive from");
    if (!(!sends && op->peer == TD_ANY_SOURCE) && td_get_group_rank(op->group, op->peer) < 0)
        return td_fail(TD_ERR_INVALID, "%s on group \"%s\": rank %d of the world is not in it",
                       call, td_group_name(op->group), op->peer);
    return TD_OK;
}

static td_status run_message(td_p2p_op op, td_work **work)
{
    TD_TRY(check_message(&op));
    struct td__tensor_call x = {.group = op.group,
                                .dtype = td_tensor_dtype(op.tensor),
                                .count = (size_t)td_tensor_numel(op.tensor),
                                .peer = op.peer,
                                .tag = op.tag};
    struct td__side side = {
        .name = "tensor", .tensors = &op.tensor, .count = 1, .use = use_of(op.kind)};
    if (op.kind == TD_P2P_ISEND) {
        x.call = "send";
        x.start = td__start_send;
        x.input = side;
    } else {
        x.call = "recv";
        x.start = td__start_recv;
        x.output = side;
    }
    return td__tensor_call_run(&x, work);
}

td_status td_send(td_tensor *tensor, int dst, int tag, td_group *group)
{
    return run_message((td_p2p_op){TD_P2P_ISEND, tensor, dst, tag, group}, NULL);
}

td_status td_isend(td_tensor *tensor, int dst, int tag, td_group *group, td_work **work)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "isend: work is NULL; td_send() is the call that blocks");
    return run_message((td_p2p_op){TD_P2P_ISEND, tensor, dst, tag, group}, work);
}

td_status td_recv(td_tensor *tensor, int src, int tag, td_group *group, int *source)
{
    td_p2p_op op = {TD_P2P_IRECV, tensor, src, tag, group};
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
    td_status status = td_work_status(work);
    if (!status)
        *source = td_work_source(work);
    td_work_release(work);
    return status;
}

td_status td_irecv(td_tensor *tensor, int src, int tag, td_group *group, td_work **work)
{
    if (!work)
        return td_fail(TD_ERR_INVALID, "irecv: work is NULL; td_recv() is the call that blocks");
    return run_message((td_p2p_op){TD_P2P_IRECV, tensor, src, tag, group}, work);
}

td_status td_batch_isend_irecv(const td_p2p_op *ops, int count, td_work **works)
{
    if (count < 1 || !ops || !works)
        return td_fail(TD_ERR_INVALID, "batch_isend_irecv: %s",
                       count < 1 ? "the list is empty"
                       : !ops    ? "ops is NULL"
                                 : "works is NULL");
    for (int i = 0; i < count; i++) {
        td_status status = check_message(&ops[i]);
        if (status)
            return td_fail(status, "batch_isend_irecv: ops[%d]: %s", i, td_last_error());
    }
    for (int i = 0; i < count; i++) {
        td_status status = run_message(ops[i], &works[i]);
        if (!status)
            continue;
        while (i-- > 0) {
            td_work_release(works[i]);
            works[i] = NULL;
        }
        return status;
    }
    return TD_OK;
}
