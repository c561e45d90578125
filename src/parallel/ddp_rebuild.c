/* Rebuilds the buckets once, in the order in which the gradients of the first pass became ready on
 * the first active rank, so that buckets become full one after another. */
#include "parallel/ddp.h"

#include "base/fail.h"
#include "device/device_internal.h"

#include <stdlib.h>
#include <string.h>

/* Broadcasts the order of one rank, and checks that it is a permutation. */
static td_status agree_on_order(struct td__ddp *ddp, int32_t *order)
{
    for (int i = 0; i < ddp->count; i++)
        order[i] = ddp->buckets.order[i];
    TD_TRY(td_group_broadcast(order, (size_t)ddp->count, TD_I32,
                              td_get_global_rank(ddp->group, ddp->source), ddp->group, NULL));
    bool *seen = calloc((size_t)ddp->count + 1, sizeof *seen);
    if (!seen)
        return td__fail_nomem("td_ddp");
    bool good = true;
    for (int i = 0; i < ddp->count && good; i++) {
        good = order[i] >= 0 && order[i] < ddp->count && !seen[order[i]];
        if (good)
            seen[order[i]] = true;
    }
    free(seen);
    return good ? TD_OK
                : td_fail(TD_ERR_PEER,
                          "td_ddp: rank %d sent an order of gradients that is no "
                          "permutation",
                          td_get_global_rank(ddp->group, ddp->source));
}

/* Moves gradients that are views of the former buckets to the new ones. */
static td_status move_gradients(struct td__ddp *ddp, const struct td__buckets *former)
{
    for (int i = 0; i < ddp->count; i++) {
        td_tensor *grad = td_tensor_grad(ddp->parameters[i].tensor);
        if (!grad || grad != former->gradients[i].view)
            continue;
        td_tensor *view = td__buckets_view(&ddp->buckets, i);
        if (!view)
            return td__error_status();
        TD_TRY(td__tensor_copy(view, grad));
        TD_TRY(td_tensor_set_grad(ddp->parameters[i].tensor, view));
    }
    return TD_OK;
}

td_status td__ddp_rebuild(struct td__ddp *ddp)
{
    ddp->rebuild = false;
    int32_t *order = calloc((size_t)ddp->count + 1, sizeof *order);
    if (!order)
        return td__fail_nomem("td_ddp");
    td_status status = agree_on_order(ddp, order);
    struct td__buckets former = ddp->buckets;
    if (!status) {
        struct td__buckets fresh = {.group = former.group,
                                    .hook = former.hook,
                                    .scale = former.scale,
                                    .lazy = former.lazy,
                                    .slices = former.slices,
                                    .first_slice = former.first_slice,
                                    .last_slice = former.last_slice,
                                    .stats = former.stats};
        status = td__buckets_init(&fresh, former.gradients, ddp->count, order, 0,
                                  ddp->bucket_bytes);
        if (!status) {
            fresh.stats.rebuilt = true;
            ddp->buckets = fresh;
            for (int b = 0; b < fresh.count; b++)
                ddp->buckets.buckets[b].all = &ddp->buckets;
            status = move_gradients(ddp, &former);
            td__buckets_free(&former);
            if (!status) /* pages of the former buckets; later passes do not need as many */
                status = td__host_memory_trim();
        }
    }
    free(order);
    return status;
}

void td__ddp_plan_rebuild(struct td__ddp *ddp)
{
    if (!ddp->buckets.stats.rebuilt &&
        (!ddp->options.find_unused_parameters || ddp->options.static_graph))
        ddp->rebuild = true;
}
