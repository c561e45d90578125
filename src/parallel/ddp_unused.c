/* Unused parameters.
 *
 * With find_unused_parameters the graph is traversed from the outputs; parameters that it does not
 * contain are ready at once, with a gradient of 0, so that their buckets need not wait. At the end
 * an all-reduce tells which parameters any rank has used; those used by none get back their former
 * gradient. With static_graph only the first pass traverses the graph. */
#include "parallel/ddp.h"

#include "autograd/graph.h"
#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void note_used(td_tensor *leaf, void *arg)
{
    struct td__ddp *ddp = arg;
    for (int i = 0; i < ddp->count; i++)
        if (ddp->parameters[i].tensor == leaf) {
            ddp->parameters[i].unused = false;
            return;
        }
}

/* Sets the gradient in the bucket to 0, and keeps the former gradient. */
static td_status zero_unused(struct td__ddp *ddp, struct td__ddp_parameter *parameter)
{
    td_tensor *view = td__buckets_view(&ddp->buckets, parameter->number);
    if (!view)
        return td__error_status();
    td_tensor *grad = td_tensor_grad(parameter->tensor);
    td_tensor_release(parameter->before);
    parameter->before = grad == view ? td__clone(grad) : td_tensor_retain(grad);
    if (grad && !parameter->before)
        return TD_ERR_NOMEM;
    TD_TRY(td__kernels_of(view)->fill(view, 0));
    return td__buckets_ready(&ddp->buckets, parameter->number);
}

td_status td__ddp_mark_unused(struct td__ddp *ddp, const td_tensor_list *outputs)
{
    bool walk = !ddp->options.static_graph || !ddp->first_static_pass_done;
    for (int i = 0; i < ddp->count; i++)
        ddp->parameters[i].unused = walk || ddp->static_unused[i];
    if (walk)
        TD_TRY(td__visit_leaves(outputs->at, outputs->count, note_used, ddp));
    for (int i = 0; i < ddp->count; i++) {
        struct td__ddp_parameter *parameter = &ddp->parameters[i];
        ddp->static_unused[i] = parameter->unused;
        bool before = ddp->slices && !ddp->buckets.first_slice && ddp->used[i];
        ddp->used[i] = before || !parameter->unused; /* in a slice of this step */
        if (parameter->unused)
            TD_TRY(zero_unused(ddp, parameter));
    }
    ddp->first_static_pass_done = true;
    return TD_OK;
}

td_status td__ddp_restore_unused(struct td__ddp *ddp)
{
    for (int i = 0; i < ddp->count; i++) {
        struct td__ddp_parameter *parameter = &ddp->parameters[i];
        if (!parameter->unused)
            continue;
        td_tensor *view = ddp->buckets.gradients[i].view, *before = parameter->before;
        bool was_view = td_tensor_grad(parameter->tensor) == view;
        if (ddp->used[i])
            TD_TRY(td_tensor_set_grad(parameter->tensor, view));
        else if (was_view)
            TD_TRY(td__tensor_copy(view, before));
        td_tensor_release(before);
        parameter->before = NULL;
    }
    return TD_OK;
}

td_status td__ddp_fail_missing(const struct td__ddp *ddp)
{
    char names[600] = "";
    size_t length = 0;
    int missing = 0;
    for (int i = 0; i < ddp->count; i++) {
        if (ddp->buckets.gradients[i].ready)
            continue;
        if (missing++ < 8 && length < sizeof names)
            length += (size_t)snprintf(names + length, sizeof names - length, "%s\"%.60s\"",
                                       length ? ", " : "", ddp->parameters[i].name);
    }
    return td_fail(TD_ERR_STATE,
                   "td_ddp: %d parameters were not used in the loss, so their gradients cannot "
                   "be averaged: %s%s; use all of them, or set find_unused_parameters",
                   missing, names, missing > 8 ? ", …" : "");
}
