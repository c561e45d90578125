/* Runs the list of this rank, action by action. A send is only started; it is waited for at the end of the step, since
 * what it sends is stored for the backward pass anyway. A receive is started one pass ahead of where it stands in the
 * list, so that the message travels while the pass before it computes. */
#include "parallel/pipeline_internal.h"

#include "base/clock.h"
#include "base/fail.h"
#include "nn/module.h"

#include <tandem/autograd.h>

#include <stdlib.h>
#include <string.h>

/* ---- Lists and micro-batches -------------------------------------------------------------------- */

void td__list_release(td_tensor_list *list)
{
    for (int i = 0; i < list->count; i++)
        td_tensor_release(list->at[i]);
    *list = (td_tensor_list){0};
}

static void retain_all(const td_tensor_list *from, td_tensor_list *to)
{
    *to = *from;
    for (int i = 0; i < to->count; i++)
        td_tensor_retain(to->at[i]);
}

int64_t td__micro_batch_size(const td_pipeline *pipeline, int micro_batch)
{
    int64_t samples = pipeline->step.samples, count = pipeline->plan.micro_batches;
    return samples / count + (micro_batch < samples % count);
}

int64_t td__micro_batch_offset(const td_pipeline *pipeline, int micro_batch)
{
    int64_t samples = pipeline->step.samples, count = pipeline->plan.micro_batches;
    int64_t larger = samples % count;
    return samples / count * micro_batch + (micro_batch < larger ? micro_batch : larger);
}

/* The part of inputs or targets that belongs to a micro-batch. */
static td_status cut(const td_pipeline *pipeline, const td_tensor_list *whole, int micro_batch,
                     td_tensor_list *part)
{
    *part = *whole;
    for (int i = 0; i < whole->count; i++) {
        if (td_tensor_size(whole->at[i], 0) != pipeline->step.samples)
            continue;
        part->at[i] = td_narrow(whole->at[i], 0, td__micro_batch_offset(pipeline, micro_batch),
                                td__micro_batch_size(pipeline, micro_batch));
        if (!part->at[i])
            return td__error_status();
    }
    return TD_OK;
}

/* ---- Passes ------------------------------------------------------------------------------------- */

/* DDP averages with the last micro-batch; its forward pass must know that, too. */
static void set_sync(const td_pipeline *pipeline, struct td__stage *stage, int micro_batch)
{
    if (stage->ddp && pipeline->step.training)
        stage->ddp->sync = stage->ddp_sync && micro_batch == pipeline->plan.micro_batches - 1;
}

/* The loss of a micro-batch as its part of the loss of the batch; retained. */
static td_status compute_loss(td_pipeline *pipeline, const td_tensor_list *outputs, int micro_batch,
                              td_tensor **scaled)
{
    td_tensor_list targets = {0};
    TD_TRY(cut(pipeline, pipeline->step.targets, micro_batch, &targets));
    uint64_t failures = td__error_count();
    td_tensor *loss = pipeline->loss(outputs, &targets, pipeline->loss_arg);
    if (!loss)
        return td__error_count() != failures
                   ? td__error_status()
                   : td_fail(TD_ERR_INVALID, "the loss function returned NULL");
    if (td_tensor_numel(loss) != 1)
        return td_fail(TD_ERR_INVALID,
                       "the loss function returned %lld elements instead of 1; td_mean() makes one "
                       "of them",
                       (long long)td_tensor_numel(loss));
    double scale = (double)td__micro_batch_size(pipeline, micro_batch) /
                   (double)pipeline->step.samples;
    if (!pipeline->sum_loss && scale != 1)
        loss = td_mul_scalar(loss, scale);
    if (!loss)
        return td__error_status();
    pipeline->step.loss += td_item(loss);
    *scaled = td_tensor_retain(loss);
    return TD_OK;
}

static td_status compute_forward(td_pipeline *pipeline, struct td__stage *stage, int micro_batch)
{
    struct td__slot *slot = &stage->slots[micro_batch];
    bool is_last = stage->number == td__stage_count(pipeline) - 1;
    TD_SCOPE;
    td_tensor_list outputs;
    if (stage->number == 0) {
        td_tensor_list part;
        TD_TRY(cut(pipeline, pipeline->step.inputs, micro_batch, &part));
        retain_all(&part, &slot->inputs);
    }
    TD_TRY(td_forward_list(stage->module, &slot->inputs, &outputs));
    if (is_last && pipeline->step.training)
        return compute_loss(pipeline, &outputs, micro_batch, &slot->loss);
    retain_all(&outputs, &slot->outputs);
    return TD_OK;
}

/* A pass that began at `start` has ended now. */
static void record(td_pipeline *pipeline, int64_t start)
{
    struct td__pipeline_step *step = &pipeline->step;
    int64_t end = td__now_ns();
    step->busy_ns += end - start;
    if (step->training)
        pipeline->times[step->passes++] = (struct td__pass_time){start - step->started_ns,
                                                                 end - step->started_ns};
}

static td_status run_forward(td_pipeline *pipeline, const struct td__action *action)
{
    struct td__stage *stage = td__stage_of(pipeline, action->stage);
    if (stage->number > 0 && pipeline->plan.ranks == 1)
        TD_TRY(td__pipeline_hand_on(pipeline, stage->number, action->micro_batch));
    set_sync(pipeline, stage, action->micro_batch);
    bool before = td_set_grad_enabled(pipeline->step.training);
    int64_t start = td__now_ns();
    td_status status = compute_forward(pipeline, stage, action->micro_batch);
    record(pipeline, start);
    td_set_grad_enabled(before);
    TD_TRY(status);
    if (!pipeline->step.training) {
        td__list_release(&stage->slots[action->micro_batch].inputs);
        return TD_OK;
    }
    if (++pipeline->step.stored > pipeline->stats.peak_stored)
        pipeline->stats.peak_stored = pipeline->step.stored;
    return TD_OK;
}

static td_status compute_backward(const struct td__slot *slot)
{
    if (slot->loss)
        return td_backward(slot->loss);
    td_tensor *outputs[TD_TENSOR_LIST_MAX];
    int count = 0;
    for (int i = 0; i < slot->outputs.count; i++)
        if (td_tensor_requires_grad(slot->outputs.at[i]))
            outputs[count++] = slot->outputs.at[i];
    if (!count) /* nothing in this stage, or before it, requires grad */
        return TD_OK;
    return td_backward_from(outputs, slot->gradients.at, count, NULL);
}

static td_status run_backward(td_pipeline *pipeline, const struct td__action *action)
{
    struct td__stage *stage = td__stage_of(pipeline, action->stage);
    struct td__slot *slot = &stage->slots[action->micro_batch];
    set_sync(pipeline, stage, action->micro_batch);
    int64_t start = td__now_ns();
    td_status status = compute_backward(slot);
    record(pipeline, start);
    TD_TRY(status);
    td__list_release(&slot->outputs);
    td__list_release(&slot->gradients);
    td_tensor_release(slot->loss);
    slot->loss = NULL;
    pipeline->step.stored--;
    if (stage->number > 0 && pipeline->plan.ranks > 1)
        return TD_OK; /* SEND_BACKWARD needs the inputs */
    if (stage->number > 0)
        TD_TRY(td__pipeline_hand_back(pipeline, stage->number, action->micro_batch));
    td__list_release(&slot->inputs);
    return TD_OK;
}

/* ---- The list ----------------------------------------------------------------------------------- */

/* Starts receives up to the second pass from `at` on. `next` is the first action that was not considered before. It
 * stops at a receive whose layout is not known yet: messages of one tag must be posted in order. */
static td_status post_ahead(td_pipeline *pipeline, const struct td__actions *actions, int at,
                            int *next)
{
    *next = *next > at ? *next : at;
    int passes = 0;
    for (int i = at; i < *next; i++)
        passes += td__is_pass(&actions->list[i]);
    for (; *next < actions->count; (*next)++) {
        const struct td__action *action = &actions->list[*next];
        bool posted = true;
        if (td__is_pass(action) && ++passes == 2)
            return TD_OK;
        if (action->kind == TD__RECV_FORWARD || action->kind == TD__RECV_BACKWARD)
            TD_TRY(td__pipeline_post(pipeline, action, &posted));
        if (!posted)
            return TD_OK;
    }
    return TD_OK;
}

static td_status run_action(td_pipeline *pipeline, const struct td__action *action)
{
    switch (action->kind) {
    case TD__RECV_FORWARD:
    case TD__RECV_BACKWARD:
        return td__pipeline_receive(pipeline, action);
    case TD__SEND_FORWARD:
    case TD__SEND_BACKWARD:
        return td__pipeline_send(pipeline, action);
    case TD__FORWARD:
        return run_forward(pipeline, action);
    case TD__BACKWARD:
        return run_backward(pipeline, action);
    }
    return TD_OK;
}

static td_status run_list(td_pipeline *pipeline)
{
    const struct td__actions *actions = pipeline->step.training ? &pipeline->training
                                                                : &pipeline->forward_only;
    int next = 0;
    for (int at = 0; at < actions->count; at++) {
        TD_TRY(post_ahead(pipeline, actions, at, &next));
        TD_TRY(run_action(pipeline, &actions->list[at]));
    }
    return td__pipeline_flush(pipeline);
}

/* The device of the first tensor of a module; NULL: it has none. */
static td_device *device_of(const td_module *module)
{
    if (module->parameters.count)
        return td_tensor_device(module->parameters.at[0].tensor);
    if (module->buffers.count)
        return td_tensor_device(module->buffers.at[0].tensor);
    td_device *device = NULL;
    for (int i = 0; i < module->child_count && !device; i++)
        device = device_of(module->children[i].module);
    return device;
}

td_status td__pipeline_run(td_pipeline *pipeline)
{
    for (int c = 0; c < pipeline->plan.chunks; c++) {
        struct td__stage *stage = &pipeline->stages[c];
        stage->device = device_of(stage->module);
        if (stage->ddp)
            stage->ddp_sync = stage->ddp->sync;
    }
    td_status status = run_list(pipeline);
    for (int c = 0; c < pipeline->plan.chunks; c++)
        if (pipeline->stages[c].ddp)
            pipeline->stages[c].ddp->sync = pipeline->stages[c].ddp_sync;
    return status;
}

/* ---- The end ------------------------------------------------------------------------------------ */

static void clear_receipt(struct td__receipt *receipt)
{
    for (int i = 0; i < receipt->count; i++)
        td_work_release(receipt->works[i]);
    *receipt = (struct td__receipt){0};
}

static void clear_slot(struct td__slot *slot)
{
    clear_receipt(&slot->input_receipt);
    clear_receipt(&slot->gradient_receipt);
    td__list_release(&slot->inputs);
    td__list_release(&slot->outputs);
    td__list_release(&slot->gradients);
    td_tensor_release(slot->loss);
    slot->loss = NULL;
}

void td__pipeline_clear(td_pipeline *pipeline)
{
    struct td__error error;
    td__error_save(&error);
    for (int i = 0; i < pipeline->sending_count; i++) {
        td_work_wait(pipeline->sendings[i].work,
                     0); /* complete, or aborted: nothing is borrowed any more */
        td_work_release(pipeline->sendings[i].work);
    }
    pipeline->sending_count = 0;
    td__error_undo(&error); /* that of the step */
    for (int c = 0; c < pipeline->plan.chunks; c++) {
        struct td__stage *stage = &pipeline->stages[c];
        for (int i = 0; i < pipeline->plan.micro_batches; i++)
            clear_slot(&stage->slots[i]);
        for (int k = 0; k < TD__LAYOUTS; k++) {
            td_bytes_free(&stage->out[k].encoded);
            stage->in[k].known = stage->out[k].known = false;
        }
    }
}
