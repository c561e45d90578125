/* Steps: all or nothing.
 *
 *     prepare     new buffers, contiguous copies of what is not contiguous
 *     run         each device's kernel, once for all of its parameters
 *     commit      step counts, buffers, versions
 *
 * A failure while preparing has changed nothing: new buffers are not the optimizer's before the end. A kernel changes
 * everything or nothing. What remains is a failure after one kernel has run: of the kernel of another device, or of the
 * copy back to a parameter that is not contiguous. The host comes last, since neither can fail there. Only where more
 * than one of these calls is for accelerators are copies made first, from which the former values are restored: they
 * cost the memory of the parameters and the state once more, which a step on one device does not need. */
#include "optim/optimizer.h"

#include "base/fail.h"
#include "tensor/file_memory.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

struct plan {
    struct td__parameter_step *steps;
    int count;
    struct former *formers;
    int former_count;
};

/* A tensor that a step changes, and a copy of it. */
struct former {
    td_tensor *tensor; /* not retained */
    td_tensor *copy;
};

/* ---- Preparing ---------------------------------------------------------------------------------- */

/* td_fsdp() adds gradients of passes without communication up as wholes. */
td_status td__check_shard_grad(const td_tensor *parameter, const td_tensor *grad)
{
    if (!parameter->shard ||
        (grad->layout.ndim == 1 && grad->layout.numel == parameter->layout.numel))
        return TD_OK;
    return td_fail(
        TD_ERR_STATE,
        "the gradient has the shape %s and is not reduced yet, of passes in td_no_sync_begin(); "
        "make the last pass of a step without it",
        td__shape_of(grad));
}

static td_status prepare(const td_optimizer *optimizer, struct td__parameter *parameter,
                         td_tensor *grad, struct td__parameter_step *step)
{
    int buffers = optimizer->kind->buffer_count(&optimizer->numbers);
    *step = (struct td__parameter_step){.parameter = parameter,
                                        .number = parameter->steps + 1,
                                        .first = buffers > 0 && !parameter->buffers[0]};
    td_device *device = parameter->tensor->storage->device;
    if (step->first && td__capturing(device))
        return td_fail(TD_ERR_STATE,
                       "its state on %s does not exist yet: make a step before td_graph_capture()",
                       device->name);
    TD_TRY(td__check_shard_grad(parameter->tensor, grad));
    TD_TRY(td__prepare_write(parameter->tensor));
    step->tensor = td__contiguous(parameter->tensor);
    step->grad = step->tensor ? td__contiguous(grad) : NULL;
    if (!step->grad)
        return td__error_status();
    for (int b = 0; b < buffers; b++) {
        td_tensor *buffer = parameter->buffers[b];
        TD_TRY(td__prepare_write(buffer));
        step->buffers[b] = buffer ? td_tensor_retain(buffer) : td__zeros_beside(parameter->tensor);
        if (!step->buffers[b])
            return td__error_status();
        if (!buffer)
            TD_TRY(td__tensor_copy_shard(step->buffers[b], parameter->tensor));
    }
    return TD_OK;
}

static td_status fail_for(const td_optimizer *optimizer, int index, td_status status)
{
    const struct td__optimizer_hooks *hooks = optimizer->hooks;
    const char *name = hooks && hooks->name_of ? hooks->name_of(optimizer, index) : NULL;
    const char *quote = name ? "\"" : "";
    return td_fail(status, "%s: parameter %d%s%s%.120s%s, of the shape %s: %s",
                   optimizer->kind->name, index, name ? ", " : "", quote, name ? name : "", quote,
                   td__shape_of(optimizer->parameters[index].tensor), td__error_text());
}

/* Of the parameters with these indices; NULL: of the first `count`. */
static td_status prepare_all(td_optimizer *optimizer, const int *indices, int count,
                             struct plan *plan)
{
    plan->steps = calloc((size_t)count + 1, sizeof *plan->steps);
    if (!plan->steps)
        return td__fail_nomem("td_optimizer_step");
    for (int k = 0; k < count; k++) {
        int i = indices ? indices[k] : k;
        struct td__parameter *parameter = &optimizer->parameters[i];
        td_tensor *grad = td_tensor_grad(parameter->tensor);
        if (!grad)
            continue;
        td_status status = prepare(optimizer, parameter, grad, &plan->steps[plan->count++]);
        if (status)
            return fail_for(optimizer, i, status);
    }
    return TD_OK;
}

static bool is_staged(const struct td__parameter_step *step)
{
    return step->tensor != step->parameter->tensor;
}

/* Steps of equal number have one kernel call; the host is last. */
static int place_of(const struct td__parameter_step *step)
{
    const td_device *device = step->tensor->storage->device;
    return device->is_host ? INT_MAX : device->slot;
}

static int compare_steps(const void *a, const void *b)
{
    const struct td__parameter_step *one = a, *other = b;
    int place = place_of(one), other_place = place_of(other);
    if (place != other_place)
        return place < other_place ? -1 : 1;
    return one->parameter < other->parameter ? -1 : one->parameter > other->parameter;
}

/* ---- Former values ------------------------------------------------------------------------------- */

static bool needs_formers(const struct plan *plan)
{
    int calls = 0;
    for (int i = 0, place = INT_MAX; i < plan->count && place_of(&plan->steps[i]) != INT_MAX; i++) {
        calls += place_of(&plan->steps[i]) != place;
        calls += is_staged(&plan->steps[i]);
        place = place_of(&plan->steps[i]);
    }
    return calls > 1;
}

static td_status keep_former(struct plan *plan, td_tensor *tensor)
{
    td_tensor *copy = td__clone(tensor);
    if (!copy)
        return td__error_status();
    plan->formers[plan->former_count++] = (struct former){tensor, copy};
    return TD_OK;
}

/* Of all that is on accelerators; new buffers have no former values. */
static td_status keep_formers(struct plan *plan)
{
    plan->formers = calloc((size_t)plan->count * (1 + TD__BUFFERS_MOST), sizeof *plan->formers);
    if (!plan->formers)
        return td__fail_nomem("td_optimizer_step");
    for (int i = 0; i < plan->count && place_of(&plan->steps[i]) != INT_MAX; i++) {
        const struct td__parameter *parameter = plan->steps[i].parameter;
        TD_TRY(keep_former(plan, parameter->tensor));
        for (int b = 0; b < TD__BUFFERS_MOST && parameter->buffers[b]; b++)
            TD_TRY(keep_former(plan, parameter->buffers[b]));
    }
    return TD_OK;
}

/* A device on which this fails is lost, with all that it has. */
static void restore_formers(const struct plan *plan)
{
    struct td__error cause;
    td__error_save(&cause);
    for (int i = 0; i < plan->former_count; i++)
        td__transfer("td_optimizer_step", plan->formers[i].tensor, plan->formers[i].copy, true);
    td__error_restore(&cause);
}

/* ---- Running ------------------------------------------------------------------------------------- */

static td_status run_all(const td_optimizer *optimizer, const struct plan *plan)
{
    for (int begin = 0, end; begin < plan->count; begin = end) {
        const struct td__parameter_step *steps = plan->steps + begin;
        for (end = begin + 1; end < plan->count; end++)
            if (place_of(&plan->steps[end]) != place_of(steps))
                break;
        TD_TRY(optimizer->kind->run(optimizer, steps, end - begin));
        for (int i = 0; i < end - begin; i++)
            if (is_staged(&steps[i]))
                TD_TRY(td__transfer("td_optimizer_step", steps[i].parameter->tensor,
                                    steps[i].tensor, true));
    }
    return TD_OK;
}

static void commit(struct plan *plan)
{
    for (int i = 0; i < plan->count; i++) {
        struct td__parameter_step *step = &plan->steps[i];
        struct td__parameter *parameter = step->parameter;
        parameter->steps = step->number;
        td__tensor_bump_version(parameter->tensor);
        for (int b = 0; b < TD__BUFFERS_MOST && step->buffers[b]; b++) {
            td_tensor *former = parameter->buffers[b];
            parameter->buffers[b] = step->buffers[b];
            step->buffers[b] = former;
            td__tensor_bump_version(parameter->buffers[b]);
        }
    }
}

static void free_plan(struct plan *plan)
{
    for (int i = 0; i < plan->count; i++) {
        td_tensor_release(plan->steps[i].tensor);
        td_tensor_release(plan->steps[i].grad);
        for (int b = 0; b < TD__BUFFERS_MOST; b++)
            td_tensor_release(plan->steps[i].buffers[b]);
    }
    for (int i = 0; i < plan->former_count; i++)
        td_tensor_release(plan->formers[i].copy);
    free(plan->steps);
    free(plan->formers);
}

/* Sorts what is prepared by device, and keeps former values where they may be needed. */
static td_status arrange(struct plan *plan)
{
    bool on_host = true;
    for (int i = 0; i < plan->count && on_host; i++)
        on_host = place_of(&plan->steps[i]) == INT_MAX;
    if (on_host)
        return TD_OK;
    qsort(plan->steps, (size_t)plan->count, sizeof *plan->steps, compare_steps);
    return needs_formers(plan) ? keep_formers(plan) : TD_OK;
}

/* `status` is that of what was done before. */
static td_status make_step(td_optimizer *optimizer, const int *indices, int count, td_status status)
{
    const struct td__optimizer_hooks *hooks = optimizer->hooks;
    struct plan plan = {0};
    if (!status)
        status = prepare_all(optimizer, indices, count, &plan);
    if (!status && (status = arrange(&plan)))
        td_fail(status, "%s: %s", optimizer->kind->name, td__error_text());
    if (hooks && hooks->agree)
        status = hooks->agree(optimizer, status);
    if (!status) {
        status = run_all(optimizer, &plan);
        if (status) {
            restore_formers(&plan);
            td_fail(status, "%s: %s", optimizer->kind->name, td__error_text());
        } else {
            commit(&plan);
        }
    }
    free_plan(&plan);
    return status;
}

td_status td__optimizer_step_some(td_optimizer *optimizer, const int *indices, int count)
{
    return make_step(optimizer, indices, count, TD_OK);
}

td_status td_optimizer_step(td_optimizer *optimizer)
{
    if (!optimizer)
        return td__fail_null("td_optimizer_step");
    const struct td__optimizer_hooks *hooks = optimizer->hooks;
    td_status status = hooks && hooks->begin_step ? hooks->begin_step(optimizer) : TD_OK;
    status = make_step(optimizer, NULL, optimizer->count, status);
    return hooks && hooks->end_step ? hooks->end_step(optimizer, status) : status;
}
