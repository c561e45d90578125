/* The calls of group.h, as calls make them. */
#include "dist/tensor_call.h"
#include "group/process_group.h"

td_status td__start_broadcast(struct td__tensor_call *x, td_work **work)
{
    return td__group_broadcast(x->group, x->output.data, x->count, x->dtype, x->peer, x->detail,
                               work);
}

td_status td__start_all_reduce(struct td__tensor_call *x, td_work **work)
{
    return td__group_all_reduce(x->group, x->output.data, x->output.data, x->count, x->dtype, x->op,
                                x->detail, work);
}

/* Only the root's tensor is written to. */
td_status td__start_reduce(struct td__tensor_call *x, td_work **work)
{
    void *output = x->output.use & TD__WRITE ? x->output.data : NULL;
    return td_group_reduce(x->group, x->output.data, output, x->count, x->dtype, x->op, x->peer,
                           work);
}

td_status td__start_all_gather(struct td__tensor_call *x, td_work **work)
{
    return td__group_all_gather(x->group, x->input.data, x->output.data, x->count, x->dtype,
                                x->detail, work);
}

td_status td__start_gather(struct td__tensor_call *x, td_work **work)
{
    return td_group_gather(x->group, x->input.data, x->output.data, x->count, x->dtype, x->peer,
                           work);
}

td_status td__start_scatter(struct td__tensor_call *x, td_work **work)
{
    return td_group_scatter(x->group, x->input.data, x->output.data, x->count, x->dtype, x->peer,
                            work);
}

td_status td__start_reduce_scatter(struct td__tensor_call *x, td_work **work)
{
    return td__group_reduce_scatter(x->group, x->input.data, x->output.data, x->count, x->dtype,
                                    x->op, x->detail, work);
}

td_status td__start_all_to_all(struct td__tensor_call *x, td_work **work)
{
    if (!x->input_counts)
        return td_group_all_to_all(x->group, x->input.data, x->output.data, x->count, x->dtype,
                                   work);
    return td_group_all_to_all_v(x->group, x->input.data, x->input_counts, x->output.data,
                                 x->output_counts, x->dtype, work);
}

td_status td__start_send(struct td__tensor_call *x, td_work **work)
{
    return td_group_send(x->group, x->input.data, x->count, x->dtype, x->peer, x->tag, work);
}

td_status td__start_recv(struct td__tensor_call *x, td_work **work)
{
    return td_group_recv(x->group, x->output.data, x->count, x->dtype, x->peer, x->tag, work);
}
