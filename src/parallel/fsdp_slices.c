/* Steps of td_fsdp() over logical slices: rounds of passes, and shadows of the passes of others; see fsdp_slices.h. */
#include "parallel/fsdp_slices.h"

#include "base/fail.h"
#include "group/process_group.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- What passes do ----------------------------------------------------------------------------------------- */

static bool in_slice(const struct td__fsdp_slices *slices)
{
    return slices->active && slices->round >= 0;
}

static td_status fail_outside(const struct td__fsdp_slices *slices, const char *pass)
{
    return td_fail(
        TD_ERR_STATE,
        "td_fsdp: a %s pass of a module with %d slices begins with td_slices_begin() and "
        "td_slices_next()",
        pass, slices->total);
}

td_status td__fsdp_slices_enter(struct td__fsdp *fsdp, bool *first)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    *first = true;
    if (!slices)
        return TD_OK;
    if (!in_slice(slices))
        return td_grad_enabled() ? fail_outside(slices, "forward") : TD_OK;
    if (!fsdp->sync)
        return td_fail(TD_ERR_STATE, "td_fsdp: slices cannot be summed up without sync");
    *first = !slices->entered;
    return TD_OK;
}

td_status td__fsdp_slices_entered(struct td__fsdp *fsdp)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    if (!slices || !in_slice(slices))
        return TD_OK;
    slices->entered = true;
    return td_module_is_training(fsdp->module) ? td__slice_state_save_buffers(&slices->state)
                                               : TD_OK;
}

td_status td__fsdp_slices_backward(const struct td__fsdp *fsdp)
{
    const struct td__fsdp_slices *slices = fsdp->slices;
    if (!slices || slices->shadows)
        return TD_OK;
    if (!in_slice(slices))
        return fail_outside(slices, "backward");
    if (slices->passed)
        return td_fail(TD_ERR_STATE,
                       "td_fsdp: a slice of step %" PRId64 " has had its backward pass already",
                       slices->step);
    return TD_OK;
}

void td__fsdp_slices_passed(struct td__fsdp *fsdp)
{
    if (fsdp->slices)
        fsdp->slices->passed = true;
}

td_status td__fsdp_record(struct td__fsdp *fsdp, enum td__fsdp_event_kind kind, int unit, int flat)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    if (!slices || !in_slice(slices) || slices->shadows)
        return TD_OK;
    if (slices->event_count == slices->event_capacity) {
        int capacity = 2 * slices->event_capacity + 64;
        struct td__fsdp_event *events = realloc(slices->events, (size_t)capacity * sizeof *events);
        if (!events)
            return td__fail_nomem("td_fsdp");
        slices->events = events;
        slices->event_capacity = capacity;
    }
    slices->events[slices->event_count++] = (struct td__fsdp_event){
        .kind = kind, .unit = unit, .flat = flat, .records = td_grad_enabled()};
    return TD_OK;
}

/* ---- Shadows ------------------------------------------------------------------------------------------------- */

static td_status repeat(struct td__fsdp *fsdp, const struct td__fsdp_event *event,
                        td_tensor_list *none)
{
    struct td__fsdp_unit *unit = fsdp->units[event->unit];
    td_module *module = unit->module;
    switch (event->kind) {
    case TD__FSDP_FORWARD_PRE:
        return td__fsdp_forward_pre(module, none, unit);
    case TD__FSDP_FORWARD:
        return td__fsdp_forward(module, none, none, unit);
    case TD__FSDP_BACKWARD_PRE:
        return td__fsdp_backward_pre(module, none, unit);
    case TD__FSDP_REDUCE:
        return td__flat_reduce(&unit->flats[event->flat]);
    }
    return TD_OK;
}

/* What the last pass of this rank did, as a rank that computes nothing. */
static td_status shadow(struct td__fsdp *fsdp)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    if (!slices->event_count)
        return td_fail(TD_ERR_STATE,
                       "td_slices_next: this rank has no slice in step %" PRId64
                       ", and has had no pass before that it could repeat",
                       slices->step);
    td_tensor_list *none = calloc(1, sizeof *none);
    if (!none)
        return td__fail_nomem("td_slices_next");
    bool before = td_grad_enabled();
    td_status status = TD_OK;
    slices->shadows = true;
    for (int i = 0; i < slices->event_count && !status; i++) {
        td_set_grad_enabled(slices->events[i].records);
        status = repeat(fsdp, &slices->events[i], none);
    }
    td_set_grad_enabled(before);
    if (status)
        td__fsdp_drop_pass(fsdp);
    else
        status = td__fsdp_end_pass(fsdp);
    slices->shadows = false;
    free(none);
    return status;
}

/* ---- Steps ---------------------------------------------------------------------------------------------------- */

static void drop_sums(struct td__fsdp *fsdp)
{
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++)
            td__flat_sums_drop(&fsdp->units[u]->flats[f]);
}

/* From here on each device of the model has a generator. */
static td_status find_generators(const struct td__fsdp *fsdp)
{
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++)
            if (!td_default_generator(fsdp->units[u]->flats[f].device))
                return td__error_status();
    return TD_OK;
}

td_status td__fsdp_slices_begin(struct td__fsdp *fsdp, td_slices *step)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    if (!slices)
        return td_fail(TD_ERR_INVALID, "td_slices_begin: the module was made without the option "
                                       "`slices` of td_fsdp()");
    if (fsdp->stepped_count)
        return td_fail(TD_ERR_UNSUPPORTED, "td_slices_begin: td_optimizer_in_backward() steps "
                                           "parameters in each pass, not after the last slice");
    if (slices->active) /* the step before was left early */
        TD_TRY(td__slice_state_restore(&slices->state));
    drop_sums(fsdp);
    slices->active = slices->entered = false;
    slices->round = -1;
    slices->step = step->step;
    int rank = fsdp->units[0]->ranks->group->rank;
    step->total = slices->total;
    step->first = rank;
    step->stride = slices->computing;
    step->count = rank < slices->computing
                      ? td__slices_apart(slices->total, slices->computing, rank)
                      : 0;
    step->slice = rank - slices->computing;
    TD_TRY(find_generators(fsdp));
    TD_TRY(td__slice_state_begin(&slices->state));
    slices->active = true;
    return TD_OK;
}

static td_status begin_round(struct td__fsdp *fsdp)
{
    fsdp->slices->round++;
    fsdp->slices->passed = false;
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            struct td__fsdp_flat *flat = &fsdp->units[u]->flats[f];
            for (int i = 0; i < flat->count; i++)
                TD_TRY(td_tensor_zero_grad(flat->params[i].tensor));
        }
    return TD_OK;
}

static td_status end_step(struct td__fsdp *fsdp)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    td_status status = TD_OK;
    while (!status && (slices->round + 1) * slices->computing < slices->total) {
        status = begin_round(fsdp);
        if (!status)
            status = shadow(fsdp);
    }
    slices->active = false;
    td_status ended = td__slice_state_end(&slices->state);
    return status ? status : ended;
}

td_status td__fsdp_slices_next(struct td__fsdp *fsdp, td_slices *step, bool *more)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    if (!slices || !slices->active || slices->step != step->step)
        return td_fail(TD_ERR_STATE, "td_slices_next: the step %" PRId64 " of the module has ended",
                       step->step);
    if (slices->round >= 0) {
        if (!slices->passed)
            return td_fail(TD_ERR_STATE,
                           "td_slices_next: slice %d of step %" PRId64 " had no backward pass",
                           step->slice, step->step);
        TD_TRY(td__slice_state_end_slice(&slices->state, step->slice));
    }
    step->slice += step->stride;
    *more = step->count > 0 && step->slice < step->total;
    if (!*more)
        return end_step(fsdp);
    slices->event_count = 0;
    td__slice_state_seed(&slices->state, step->step, step->slice);
    return begin_round(fsdp);
}

/* ---- Making and freeing ------------------------------------------------------------------------------------ */

/* To all ranks of the group. */
static void deal_out(struct td__fsdp *fsdp)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    slices->computing = fsdp->units[0]->ranks->group->size;
    slices->round = -1;
    slices->reduces = td__fsdp_can_reduce(fsdp);
    slices->are_ranks = slices->reduces && slices->total == slices->computing;
    for (int u = 0; u < fsdp->count; u++) /* averages over hosts first are rounded */
        slices->are_ranks &= !fsdp->units[u]->ranks->shards || !fsdp->units[u]->ranks->replicas;
}

td_status td__fsdp_slices_make(struct td__fsdp *fsdp, int total)
{
    td_group *group = fsdp->units[0]->ranks->group;
    if (!total)
        return TD_OK;
    TD_TRY(td__slices_check("td_fsdp", total, group->size));
    for (int u = 0; u < fsdp->count; u++) {
        if (fsdp->units[u]->ranks->group != group)
            return td_fail(TD_ERR_UNSUPPORTED,
                           "td_fsdp: slices need one group for all units, but the unit \"%s\" was "
                           "made by a call with another one",
                           fsdp->units[u]->name);
        TD_TRY(td__fsdp_find_places(fsdp->units[u]->ranks));
    }
    fsdp->slices = calloc(1, sizeof *fsdp->slices);
    if (!fsdp->slices)
        return td__fail_nomem("td_fsdp");
    fsdp->slices->total = total;
    deal_out(fsdp);
    return td__slice_state_make(&fsdp->slices->state, fsdp->buffers, fsdp->buffer_count, group);
}

td_status td__fsdp_slices_remake(struct td__fsdp *fsdp, int root)
{
    struct td__fsdp_slices *slices = fsdp->slices;
    td_group *group = fsdp->units[0]->ranks->group;
    if (!slices)
        return TD_OK;
    TD_TRY(td__slices_check("td_fsdp", slices->total, group->size));
    TD_TRY(td__fsdp_find_places(fsdp->units[0]->ranks));
    td_status status = slices->active ? td__slice_state_restore(&slices->state) : TD_OK;
    slices->active = false;
    slices->state.has_before = slices->state.has_after = false;
    slices->event_count = 0;
    deal_out(fsdp);
    td_status shared = td_group_broadcast(&slices->state.seed, 1, TD_U64,
                                          td_get_global_rank(group, root), group, NULL);
    return status ? status : shared;
}

void td__fsdp_slices_free(struct td__fsdp *fsdp)
{
    if (!fsdp->slices)
        return;
    td__slice_state_free(&fsdp->slices->state);
    free(fsdp->slices->events);
    free(fsdp->slices);
    fsdp->slices = NULL;
}
