/* Steps of td_ddp() over logical slices of the batch: a pass for each slice of this rank, of which the last one starts the
 * reductions (slices.h). What else a pass changes must not depend on which rank computes a slice (slice_state.h): of the
 * buffers, rank 0, which has slice 0, broadcasts those after it before the next step. */
#include "parallel/ddp_slices.h"

#include "base/fail.h"
#include "parallel/fsdp_internal.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- What passes do ----------------------------------------------------------------------------------------- */

td_status td__ddp_slices_prepare(struct td__ddp *ddp, bool *first)
{
    *first = true;
    if (!ddp->slices)
        return TD_OK;
    if (!ddp->slices->active)
        return td_fail(TD_ERR_STATE,
                       "td_ddp: a forward pass of a module with %d slices begins with "
                       "td_slices_begin() and td_slices_next()",
                       ddp->buckets.slices);
    if (!ddp->sync || ddp->join || ddp->context)
        return td_fail(TD_ERR_STATE, "td_ddp: slices cannot be summed up %s",
                       !ddp->sync  ? "without sync"
                       : ddp->join ? "between td_ddp_join_begin() and td_ddp_join_end()"
                                   : "in a context of distributed autograd");
    *first = ddp->buckets.first_slice;
    return TD_OK;
}

td_status td__ddp_slices_begin_pass(struct td__ddp *ddp)
{
    if (!ddp->slices)
        return TD_OK;
    ddp->slices->passed = false;
    return td_module_is_training(ddp->wrapper) ? td__slice_state_save_buffers(&ddp->slices->state)
                                               : TD_OK;
}

void td__ddp_slices_end_pass(struct td__ddp *ddp)
{
    if (ddp->slices)
        ddp->slices->passed = true;
}

bool td__ddp_slices_in_step(const struct td__ddp *ddp)
{
    return ddp->slices && ddp->slices->active;
}

/* ---- Steps ---------------------------------------------------------------------------------------------------- */

static td_status begin(struct td__ddp *ddp, td_slices *step)
{
    if (!ddp->slices)
        return td_fail(TD_ERR_INVALID, "td_slices_begin: the module was made without the option "
                                       "`slices` of td_ddp()");
    if (ddp->stepped_count)
        return td_fail(TD_ERR_UNSUPPORTED, "td_slices_begin: td_optimizer_in_backward() steps "
                                           "parameters in each pass, not after the last slice");
    struct td__ddp_slices *slices = ddp->slices;
    if (slices->active) /* the step before was left early */
        TD_TRY(td__slice_state_restore(&slices->state));
    slices->active = false;
    TD_TRY(td_slice_range(ddp->buckets.slices, ddp->group, &step->first, &step->count));
    step->total = ddp->buckets.slices;
    step->stride = 1;
    step->slice = step->first - 1;
    slices->step = step->step;
    slices->active = true;
    for (int i = 0; i < ddp->count; i++) /* from here on each device of the model has one */
        if (!td_default_generator(ddp->parameters[i].tensor->storage->device))
            return td__error_status();
    return td__slice_state_begin(&slices->state);
}

td_slices td_slices_begin(td_module *module, int64_t number)
{
    td_slices step = {.module = module, .step = number};
    if (td_is_fsdp(module)) {
        step.status = td__fsdp_slices_begin(td__fsdp_of(module), &step);
        return step;
    }
    struct td__ddp *ddp = td__ddp_of(module, "td_slices_begin");
    step.status = ddp ? begin(ddp, &step) : TD_ERR_INVALID;
    return step;
}

static td_status begin_slice(struct td__ddp *ddp, const td_slices *step)
{
    ddp->buckets.first_slice = step->slice == step->first;
    ddp->buckets.last_slice = step->slice == step->first + step->count - 1;
    ddp->slices->passed = false;
    for (int i = 0; i < ddp->count; i++)
        TD_TRY(td_tensor_zero_grad(ddp->parameters[i].tensor));
    td__slice_state_seed(&ddp->slices->state, step->step, step->slice);
    return TD_OK;
}

static td_status end_step(struct td__ddp *ddp)
{
    struct td__ddp_slices *slices = ddp->slices;
    slices->active = false;
    return slices->holds ? td__slice_state_restore(&slices->state)
                         : td__slice_state_end(&slices->state);
}

static td_status go_on(struct td__ddp *ddp, td_slices *step, bool *more)
{
    if (!ddp->slices || !ddp->slices->active || ddp->slices->step != step->step)
        return td_fail(TD_ERR_STATE, "td_slices_next: the step %" PRId64 " of the module has ended",
                       step->step);
    if (step->slice >= step->first) {
        if (!ddp->slices->passed)
            return td_fail(TD_ERR_STATE,
                           "td_slices_next: slice %d of step %" PRId64 " had no backward pass",
                           step->slice, step->step);
        TD_TRY(td__slice_state_end_slice(&ddp->slices->state, step->slice));
    }
    *more = ++step->slice < step->first + step->count;
    return *more ? begin_slice(ddp, step) : end_step(ddp);
}

bool td_slices_next(td_slices *step)
{
    bool more = false;
    if (!step || step->status)
        return false;
    if (td_is_fsdp(step->module)) {
        step->status = td__fsdp_slices_next(td__fsdp_of(step->module), step, &more);
        return more && !step->status;
    }
    struct td__ddp *ddp = td__ddp_of(step->module, "td_slices_next");
    step->status = ddp ? go_on(ddp, step, &more) : TD_ERR_INVALID;
    return more && !step->status;
}

td_status td_slices_status(const td_slices *step)
{
    return step ? step->status : td__fail_null("td_slices_status");
}

/* ---- Making and freeing ------------------------------------------------------------------------------------ */

td_status td__ddp_slices_make(struct td__ddp *ddp)
{
    int first, count;
    int total = ddp->options.slices;
    if (!total)
        return TD_OK;
    if (ddp->options.hook.start || ddp->options.hook.finish)
        return td_fail(TD_ERR_INVALID, "td_ddp: slices are summed without a communication hook");
    TD_TRY(td_slice_range(total, ddp->group, &first, &count));
    struct td__ddp_slices *slices = calloc(1, sizeof *slices);
    if (!slices)
        return td__fail_nomem("td_ddp");
    ddp->slices = slices;
    ddp->buckets.slices = total;
    return td__slice_state_make(&slices->state, ddp->buffers, ddp->buffer_count, ddp->group);
}

void td__ddp_slices_free(struct td__ddp *ddp)
{
    if (ddp->slices)
        td__slice_state_free(&ddp->slices->state);
    free(ddp->slices);
}
