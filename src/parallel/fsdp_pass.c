/* The passes of sharded modules: hooks of units, and observers of their parameters.
 *
 *     forward_pre     enter the unit, start to gather the next one
 *     forward         leave it
 *     backward_pre    enter it, a place for its gradients, start to gather the one before
 *     observers       the last gradient of a flat is final: start its reduction, and leave it
 *     the end         wait for all reductions: gradients are shards */
#include "base/fail.h"
#include "base/map.h"
#include "device/device_internal.h"
#include "group/process_group.h"
#include "parallel/fsdp_offload.h"
#include "parallel/fsdp_slices.h"

#include <stdlib.h>
#include <string.h>

/* ---- Which units run ------------------------------------------------------------------------------------ */

void td__fsdp_note(struct td__fsdp_unit *unit, bool backward)
{
    struct td__fsdp *fsdp = unit->all;
    int32_t number = backward ? ~unit->number : unit->number;
    fsdp->sequence = td__hash(fsdp->sequence, &number, sizeof number);
    if (fsdp->ran_count < fsdp->ran_capacity)
        fsdp->ran[fsdp->ran_count++] = number;
}

td_status td__fsdp_agree(struct td__fsdp *fsdp)
{
    const struct td__fsdp_ranks *ranks = fsdp->units[0]->ranks;
    if (ranks->group->size == 1)
        return TD_OK;
    uint64_t range[2] = {fsdp->sequence, ~fsdp->sequence};
    TD_TRY(td__fsdp_fail(fsdp->units[0], "the end of a backward pass",
                         td_group_all_reduce(range, range, 2, TD_U64, TD_MIN, ranks->group, NULL)));
    td_status status = TD_OK;
    if (range[0] != ~range[1]) {
        status = td_fail(TD_ERR_MISMATCH, "td_fsdp: the ranks ran different units");
        td__fsdp_name_difference(fsdp);
    }
    fsdp->sequence = 0;
    fsdp->ran_count = 0;
    return status;
}

/* ---- Prefetch ------------------------------------------------------------------------------------------- */

static td_status prefetch(struct td__fsdp_unit *unit, int place, bool backward)
{
    struct td__fsdp *fsdp = unit->all;
    if (!unit->prefetch || place < 0 || place >= fsdp->order_count)
        return TD_OK;
    struct td__fsdp_unit *next = fsdp->units[fsdp->order[place]];
    size_t bytes = td__unit_bytes(next);
    if (next == unit || fsdp->stats.whole_bytes + bytes * (backward ? 2 : 1) > fsdp->limit)
        return TD_OK;
    return td__unit_gather(next);
}

/* The unit is the next one in the order of the last pass, or begins another order. */
static td_status follow_order(struct td__fsdp_unit *unit)
{
    struct td__fsdp *fsdp = unit->all;
    if (fsdp->at >= fsdp->order_count || fsdp->order[fsdp->at] != unit->number) {
        fsdp->order_count = fsdp->at;
        if (fsdp->at == fsdp->order_capacity) {
            int capacity = 2 * fsdp->order_capacity + 64;
            int *order = realloc(fsdp->order, (size_t)capacity * sizeof *order);
            if (!order)
                return td__fail_nomem("td_fsdp");
            fsdp->order = order;
            fsdp->order_capacity = capacity;
        }
        fsdp->order[fsdp->order_count++] = unit->number;
    }
    fsdp->at++;
    fsdp->back = fsdp->at;
    return TD_OK;
}

/* ---- Forward -------------------------------------------------------------------------------------------- */

td_status td__fsdp_broadcast_buffers(struct td__fsdp *fsdp)
{
    const struct td__fsdp_ranks *ranks = fsdp->units[0]->ranks;
    if (!fsdp->broadcasts || !fsdp->buffer_count || !fsdp->buffers_changed ||
        ranks->group->size == 1)
        return TD_OK;
    fsdp->buffers_changed = false;
    return td_broadcast_coalesced(fsdp->buffers, fsdp->buffer_count,
                                  td_get_global_rank(ranks->group, 0), ranks->group, NULL);
}

/* What a failed pass has left. */
static td_status settle(struct td__fsdp *fsdp)
{
    for (int i = 0; i < fsdp->reduction_count; i++) /* a program has zeroed its gradients since */
        fsdp->reductions[i]->in_pass = true;
    td_status status = td__fsdp_wait_reductions(fsdp, 0);
    fsdp->unsettled = false;
    for (int u = 0; u < fsdp->count; u++) {
        td_status left = td__unit_leave(fsdp->units[u], true);
        status = status ? status : left;
        fsdp->units[u]->calls = 0;
        for (int i = 0; i < fsdp->units[u]->flat_count; i++)
            if (fsdp->units[u]->flats[i].in_pass)
                td__flat_drop_grads(&fsdp->units[u]->flats[i]);
    }
    return status;
}

/* The first passes and steps allocate what stays, such as the state of the optimizer, among what does not, and leave holes
 * of which later ones use other parts. The host's free pages are returned before the passes 2, 3, 5, 9, …: each time all
 * that a pass needs is touched anew, which a few passes can afford, and not each of them. */
static td_status return_holes(struct td__fsdp *fsdp)
{
    int64_t passes = fsdp->stats.passes;
    if (passes == fsdp->trimmed || passes & (passes - 1))
        return TD_OK;
    fsdp->trimmed = passes;
    return td__host_memory_trim();
}

static td_status begin_forward(struct td__fsdp *fsdp)
{
    if (fsdp->unsettled)
        TD_TRY(settle(fsdp));
    TD_TRY(return_holes(fsdp));
    bool first;
    TD_TRY(td__fsdp_slices_enter(fsdp, &first));
    if (first)
        TD_TRY(td__fsdp_broadcast_buffers(fsdp));
    if (td_module_is_training(fsdp->module))
        fsdp->buffers_changed = true;
    for (int u = 0; u < fsdp->count; u++) /* kept since a forward pass without a backward pass */
        TD_TRY(td__unit_leave(fsdp->units[u], true));
    for (int u = 0; u < fsdp->count && td_grad_enabled(); u++)
        for (int i = 0; i < fsdp->units[u]->flat_count; i++)
            td__flat_free_zero_grads(&fsdp->units[u]->flats[i]);
    fsdp->at = 0;
    TD_TRY(td__fsdp_slices_entered(fsdp));
    return first ? td__fsdp_publish(fsdp) : TD_OK;
}

static td_status convert_inputs(const struct td__fsdp_unit *unit, td_tensor_list *inputs)
{
    for (int i = 0; unit->mixed && i < inputs->count; i++) {
        td_dtype dtype = inputs->at[i]->layout.dtype;
        if (dtype == unit->param_dtype ||
            (dtype != TD_F32 && dtype != TD_F64 && dtype != TD_F16 && dtype != TD_BF16))
            continue;
        inputs->at[i] = td_to_dtype(inputs->at[i], unit->param_dtype);
        if (!inputs->at[i])
            return td__error_status();
    }
    return TD_OK;
}

td_status td__fsdp_forward_pre(td_module *module, td_tensor_list *inputs, void *arg)
{
    struct td__fsdp_unit *unit = arg;
    struct td__fsdp *fsdp = unit->all;
    (void)module;
    if (fsdp->scope)
        return TD_OK;
    if (unit->number == 0)
        fsdp->depth = 0; /* also after a pass that failed */
    if (fsdp->depth++ == 0 && !fsdp->ending) {
        TD_TRY(begin_forward(fsdp));
        TD_TRY(convert_inputs(unit, inputs));
    }
    unit->calls++;
    TD_TRY(td__fsdp_record(fsdp, TD__FSDP_FORWARD_PRE, unit->number, 0));
    td__fsdp_note(unit, false);
    if (fsdp->ending) /* td_checkpoint() runs it again: it stays gathered for its backward pass */
        return td__unit_enter(unit);
    TD_TRY(follow_order(unit));
    TD_TRY(td__unit_enter(unit));
    return prefetch(unit, fsdp->at, false);
}

td_status td__fsdp_forward(td_module *module, const td_tensor_list *inputs, td_tensor_list *results,
                           void *arg)
{
    struct td__fsdp_unit *unit = arg;
    struct td__fsdp *fsdp = unit->all;
    (void)module, (void)inputs, (void)results;
    if (fsdp->scope)
        return TD_OK;
    bool records = td_grad_enabled();
    TD_TRY(td__fsdp_record(fsdp, TD__FSDP_FORWARD, unit->number, 0));
    if (unit->calls > 0)
        unit->calls--;
    if (unit->calls == 0 && !fsdp->ending)
        TD_TRY(td__unit_leave(unit, !records || (!unit->keep && unit->number > 0)));
    if (--fsdp->depth > 0 || fsdp->ending)
        return TD_OK;
    for (int i = fsdp->at; i < fsdp->order_count; i++) /* gathered in vain */
        TD_TRY(td__unit_leave(fsdp->units[fsdp->order[i]], true));
    fsdp->order_count = fsdp->at;
    return records ? TD_OK : td__fsdp_meet(fsdp);
}

/* ---- Backward ------------------------------------------------------------------------------------------- */

td_status td__fsdp_end_pass(void *arg)
{
    struct td__fsdp *fsdp = arg;
    td_status status = TD_OK;
    for (int u = fsdp->count - 1; u >= 0 && !status; u--)
        for (int i = 0; i < fsdp->units[u]->flat_count && !status; i++)
            if (fsdp->units[u]->flats[i].in_pass)
                status = td__flat_reduce(&fsdp->units[u]->flats[i]);
    if (!status && fsdp->sync)
        status = td__fsdp_agree(fsdp);
    if (!status)
        status = td__fsdp_wait_reductions(fsdp, 0);
    td_status waited = td__offload_wait_all(fsdp);
    status = status ? status : waited;
    for (int u = 0; u < fsdp->count; u++) {
        td_status left = td__unit_leave(fsdp->units[u], true);
        status = status ? status : left;
    }
    fsdp->stats.passes += !status && fsdp->sync;
    if (!status)
        td__fsdp_slices_passed(fsdp);
    fsdp->ending = false;
    fsdp->unsettled |= status != TD_OK;
    return status;
}

void td__fsdp_drop_pass(void *arg)
{
    struct td__fsdp *fsdp = arg;
    fsdp->ending = false;
    fsdp->unsettled = true;
    struct td__error cause;
    td__error_save(&cause);
    td__offload_wait_all(fsdp); /* nothing changes after the pass */
    for (int u = 0; u < fsdp->count; u++)
        td__unit_leave(fsdp->units[u], true);
    td__error_restore(&cause);
}

td_status td__fsdp_backward_pre(td_module *module, td_tensor_list *grads, void *arg)
{
    struct td__fsdp_unit *unit = arg;
    struct td__fsdp *fsdp = unit->all;
    (void)module, (void)grads;
    if (fsdp->scope)
        return td_fail(TD_ERR_STATE,
                       "td_fsdp: a backward pass cannot run before td_fsdp_gather_end()");
    if (!fsdp->ending) {
        TD_TRY(td__fsdp_slices_backward(fsdp));
        if (!td__fsdp_shadows(fsdp))
            TD_TRY(td__at_end_of_backward(td__fsdp_end_pass, td__fsdp_drop_pass, fsdp));
        fsdp->ending = true;
        fsdp->back = fsdp->order_count;
    }
    TD_TRY(td__fsdp_record(fsdp, TD__FSDP_BACKWARD_PRE, unit->number, 0));
    td__fsdp_note(unit, true);
    TD_TRY(td__unit_enter(unit));
    for (int i = 0; i < unit->flat_count; i++)
        if (unit->flats[i].requires_grad && !unit->flats[i].in_pass)
            TD_TRY(td__flat_begin_grads(&unit->flats[i]));
    int place = fsdp->back - 1;
    while (place >= 0 && fsdp->order[place] != unit->number)
        place--;
    if (place > 0)
        fsdp->back = place;
    return prefetch(unit, place - 1, true);
}

td_status td__fsdp_on_accumulated(td_tensor *tensor, const struct td__grad_place *place, void *arg)
{
    struct td__fsdp_param *param = arg;
    struct td__fsdp_flat *flat = param->flat;
    (void)tensor;
    if (place)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "td_fsdp: the parameter \"%s\" got a gradient of a context of distributed "
                       "autograd; call td_backward() for sharded modules",
                       param->name);
    if (!flat->in_pass || param->ready)
        return td_fail(
            TD_ERR_STATE,
            "td_fsdp: the parameter \"%s\" got a gradient outside of the backward pass of "
            "its unit \"%s\" on rank %d; use parameters only in the module that has them",
            param->name, flat->unit->name, td_get_rank(flat->unit->ranks->group));
    param->ready = true;
    if (--flat->pending)
        return TD_OK;
    struct td__fsdp_unit *unit = flat->unit;
    TD_TRY(td__fsdp_record(unit->all, TD__FSDP_REDUCE, unit->number, (int)(flat - unit->flats)));
    return td__flat_reduce(flat);
}
