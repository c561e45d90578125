/* Steps over slices that can be repeated, by other ranks than before.
 *
 * Parameters change in the optimizer's step, after all. What a pass changes are the buffers and the generators: a step that
 * holds leaves the buffers as they were before it, and those for after it apart, on all ranks, until td__ddp_commit(). So a
 * step that has failed is undone by forgetting it, and no rank is needed for what it alone has. */
#include "parallel/ddp_slices.h"

#include "base/fail.h"

void td__ddp_hold(struct td__ddp *ddp, uint64_t seed)
{
    ddp->slices->state.seed = seed;
    ddp->slices->holds = true;
    /* A rank that joins later has had no pass whose order could be taken: all keep the order of the parameters. */
    ddp->buckets.stats.rebuilt = true;
}

static td_status make_after(struct td__ddp *ddp)
{
    struct td__ddp_slices *slices = ddp->slices;
    for (int i = 0; i < ddp->buffer_count; i++) {
        if (!slices->state.after[i])
            slices->state.after[i] = td__empty_like(ddp->buffers[i]);
        if (!slices->state.after[i])
            return td__error_status();
    }
    return TD_OK;
}

td_status td__ddp_share_buffers(struct td__ddp *ddp)
{
    struct td__ddp_slices *slices = ddp->slices;
    if (!ddp->buffer_count || !slices->state.has_before)
        return TD_OK;
    TD_TRY(make_after(ddp));
    TD_TRY(td__ddp_broadcast(ddp, slices->state.after, ddp->buffer_count));
    slices->state.has_after = true;
    return TD_OK;
}

int td__ddp_held_buffers(struct td__ddp *ddp, td_tensor **buffers)
{
    if (!ddp->slices->state.has_after)
        return 0;
    for (int i = 0; i < ddp->buffer_count; i++)
        buffers[i] = ddp->slices->state.after[i];
    return ddp->buffer_count;
}

td_status td__ddp_receive_buffers(struct td__ddp *ddp)
{
    TD_TRY(make_after(ddp));
    ddp->slices->state.has_after = true;
    return TD_OK;
}

td_status td__ddp_commit(struct td__ddp *ddp)
{
    struct td__ddp_slices *slices = ddp->slices;
    bool has_after = slices->state.has_after;
    slices->state.has_before = slices->state.has_after = false;
    return has_after ? td__slice_state_copy(&slices->state, slices->state.after, true) : TD_OK;
}

td_status td__ddp_undo(struct td__ddp *ddp)
{
    struct td__ddp_slices *slices = ddp->slices;
    for (int b = 0; b < ddp->buckets.count; b++)
        if (ddp->buckets.buckets[b].sums)
            td__slice_sums_drop(ddp->buckets.buckets[b].sums);
    td_status status = slices->state.has_before
                           ? td__slice_state_copy(&slices->state, slices->state.before, true)
                           : TD_OK;
    slices->state.has_before = slices->state.has_after = false;
    if (slices->active) {
        td_status restored = td__slice_state_restore(&slices->state);
        status = status ? status : restored;
    }
    slices->active = false;
    ddp->expecting = false;
    ddp->ending = false;
    return status;
}

void td__ddp_rebind(struct td__ddp *ddp, td_group *group, int slices)
{
    ddp->buckets.slices = slices;
    ddp->group = ddp->options.group = ddp->buckets.group = group;
}
