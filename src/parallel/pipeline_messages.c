/* Tensors between two stages. A micro-batch is one message for each tensor, in order, over a tag of the stage and
 * direction. Before the first one of each size in a step, the sender sends its layout over a tag of its own; the receiver
 * can then post receives before the messages come.
 *
 * A message is received on the device of the stage. Gradients are moved from there to the device of the results that
 * they are of, if that is another one. */
#include "parallel/pipeline_internal.h"

#include "base/buffer.h"
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <tandem/dist.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tags of the messages between a stage and the next one. */
enum { TAG_LAYOUT, TAG_INPUTS, TAG_GRADIENTS, TAGS };

static int tag_of(int stage, int what)
{
    return stage * TAGS + what;
}

static bool is_gradient(const struct td__action *action)
{
    return action->kind == TD__SEND_BACKWARD || action->kind == TD__RECV_BACKWARD;
}

/* The tag of a send or receive; the pair of stages has the number of the first one. */
static int tag_of_action(const struct td__action *action)
{
    switch (action->kind) {
    case TD__RECV_FORWARD:
        return tag_of(action->stage - 1, TAG_INPUTS);
    case TD__SEND_FORWARD:
        return tag_of(action->stage, TAG_INPUTS);
    case TD__RECV_BACKWARD:
        return tag_of(action->stage, TAG_GRADIENTS);
    default:
        return tag_of(action->stage - 1, TAG_GRADIENTS);
    }
}

static int world_rank(const td_pipeline *pipeline, int rank)
{
    return td_get_global_rank(pipeline->messages, rank);
}

/* ---- Layouts ------------------------------------------------------------------------------------ */

static struct td__list_layout *layout_of(td_pipeline *pipeline, struct td__list_layout *layouts,
                                         int micro_batch)
{
    return &layouts[td__micro_batch_size(pipeline, micro_batch) !=
                    td__micro_batch_size(pipeline, 0)];
}

/* The layout of the tensors that an action moves: gradients have that of what they are the gradients of. */
static struct td__list_layout *layout_of_action(td_pipeline *pipeline,
                                                const struct td__action *action)
{
    struct td__stage *stage = td__stage_of(pipeline, action->stage);
    bool in = action->kind == TD__RECV_FORWARD || action->kind == TD__SEND_BACKWARD;
    return layout_of(pipeline, in ? stage->in : stage->out, action->micro_batch);
}

static td_status describe(const td_pipeline *pipeline, const td_tensor_list *list,
                          struct td__list_layout *layout)
{
    layout->count = list->count;
    for (int i = 0; i < list->count; i++) {
        struct td__tensor_spec *spec = &layout->specs[i];
        td_tensor *tensor = list->at[i];
        const char *name = list->names[i] ? list->names[i] : "";
        *spec = (struct td__tensor_spec){.dtype = td_tensor_dtype(tensor),
                                         .requires_grad = pipeline->step.training &&
                                                          td_tensor_requires_grad(tensor),
                                         .ndim = td_tensor_ndim(tensor)};
        if (strlen(name) >= sizeof spec->name)
            return td_fail(TD_ERR_INVALID, "the name \"%s\" of result %d is longer than %d bytes",
                           name, i, TD__TENSOR_NAME - 1);
        memcpy(spec->name, name, strlen(name));
        memcpy(spec->shape, td_tensor_shape(tensor), (size_t)spec->ndim * sizeof spec->shape[0]);
    }
    return TD_OK;
}

static const char *spec_text(const struct td__tensor_spec *spec, char *text, size_t room)
{
    snprintf(text, room, "%s %s%s%s%s", td_dtype_name(spec->dtype),
             td__shape_text(spec->shape, spec->ndim), *spec->name ? " named " : "", spec->name,
             spec->requires_grad ? "" : " without grad");
    return text;
}

static bool same_specs(const struct td__tensor_spec *a, const struct td__tensor_spec *b)
{
    return a->dtype == b->dtype && a->requires_grad == b->requires_grad && a->ndim == b->ndim &&
           !memcmp(a->shape, b->shape, sizeof a->shape) && !strcmp(a->name, b->name);
}

static td_status check_layout(const td_pipeline *pipeline, const struct td__action *send,
                              const struct td__list_layout *agreed,
                              const struct td__list_layout *now)
{
    int self = world_rank(pipeline, pipeline->rank), peer = world_rank(pipeline, send->peer);
    if (agreed->count != now->count)
        return td_fail(
            TD_ERR_MISMATCH,
            "stage %d on rank %d returned %d tensors for micro-batch %d, rank %d expects "
            "%d as for the first one",
            send->stage, self, now->count, send->micro_batch, peer, agreed->count);
    for (int i = 0; i < now->count; i++) {
        char first[300], second[300];
        if (!same_specs(&agreed->specs[i], &now->specs[i]))
            return td_fail(TD_ERR_MISMATCH,
                           "result %d of stage %d on rank %d is %s for micro-batch %d, rank %d "
                           "expects %s as for the first one of this size",
                           i, send->stage, self, spec_text(&now->specs[i], first, sizeof first),
                           send->micro_batch, peer,
                           spec_text(&agreed->specs[i], second, sizeof second));
    }
    return TD_OK;
}

static void encode(const struct td__list_layout *layout, struct td__buffer *buffer)
{
    td__buffer_put_u32(buffer, (uint32_t)layout->count);
    for (int i = 0; i < layout->count; i++) {
        const struct td__tensor_spec *spec = &layout->specs[i];
        td__buffer_put_u32(buffer, (uint32_t)spec->dtype);
        td__buffer_put_u8(buffer, spec->requires_grad);
        td__buffer_put_u8(buffer, (uint8_t)spec->ndim);
        for (int d = 0; d < spec->ndim; d++)
            td__buffer_put_u64(buffer, (uint64_t)spec->shape[d]);
        td__buffer_put_string(buffer, spec->name, strlen(spec->name));
    }
}

static bool decode(const void *data, size_t size, struct td__list_layout *layout)
{
    struct td__reader reader = td__reader_of(data, size);
    uint32_t count = td__reader_u32(&reader);
    if (count < 1 || count > TD_TENSOR_LIST_MAX)
        return false;
    layout->count = (int)count;
    for (uint32_t i = 0; i < count && !reader.failed; i++) {
        struct td__tensor_spec *spec = &layout->specs[i];
        *spec = (struct td__tensor_spec){.dtype = (td_dtype)td__reader_u32(&reader)};
        spec->requires_grad = td__reader_u8(&reader);
        spec->ndim = td__reader_u8(&reader);
        if (spec->ndim > TD_MAX_DIMS || td_dtype_size(spec->dtype) == 0)
            return false;
        for (int d = 0; d < spec->ndim; d++)
            spec->shape[d] = (int64_t)td__reader_u64(&reader);
        struct td__span name = td__reader_string(&reader, sizeof spec->name - 1);
        if (name.size)
            memcpy(spec->name, name.data, name.size);
    }
    return td__reader_done(&reader);
}

/* ---- Sending ------------------------------------------------------------------------------------ */

/* Room for one more sending. */
static td_status reserve(td_pipeline *pipeline)
{
    if (pipeline->sending_count < pipeline->sending_capacity)
        return TD_OK;
    int capacity = 2 * pipeline->sending_capacity + 16;
    struct td__sending *more = realloc(pipeline->sendings,
                                       (size_t)capacity * sizeof *pipeline->sendings);
    if (!more)
        return td__fail_nomem(pipeline->step.call);
    pipeline->sendings = more;
    pipeline->sending_capacity = capacity;
    return TD_OK;
}

/* Releases the sends that are complete. In evaluation nothing bounds how far a rank is ahead of the next one, so there it
 * waits until no more than two micro-batches of the same queue are under way. */
static td_status reap(td_pipeline *pipeline, int tag, int micro_batch)
{
    int kept = 0;
    td_status status = TD_OK;
    for (int i = 0; i < pipeline->sending_count; i++) {
        struct td__sending sending = pipeline->sendings[i];
        bool wait = !pipeline->step.training && sending.tag == tag &&
                    sending.micro_batch + 2 <= micro_batch;
        if (!status && (wait || td_work_test(sending.work))) {
            status = td_work_wait(sending.work, 0);
            td_work_release(sending.work);
        } else {
            pipeline->sendings[kept++] = sending;
        }
    }
    pipeline->sending_count = kept;
    return status;
}

static void add_sending(td_pipeline *pipeline, td_work *work, int tag, int micro_batch)
{
    pipeline->sendings[pipeline->sending_count++] = (struct td__sending){
        .work = work, .tag = tag, .micro_batch = micro_batch};
}

static td_status send_layout(td_pipeline *pipeline, const struct td__action *action,
                             struct td__list_layout *layout)
{
    struct td__buffer buffer = {0};
    encode(layout, &buffer);
    td_status status = buffer.failed ? td__fail_nomem(pipeline->step.call)
                                     : td_bytes_copy(buffer.data, buffer.size, &layout->encoded);
    td__buffer_free(&buffer);
    TD_TRY(status);
    TD_TRY(reserve(pipeline));
    int tag = tag_of(action->stage, TAG_LAYOUT);
    td_work *work;
    TD_TRY(td_group_send(layout->encoded.data, layout->encoded.size, TD_U8,
                         world_rank(pipeline, action->peer), tag, pipeline->messages, &work));
    add_sending(pipeline, work, tag, action->micro_batch);
    return TD_OK;
}

static td_status send_list(td_pipeline *pipeline, const struct td__action *action,
                           const td_tensor_list *list)
{
    int tag = tag_of_action(action);
    TD_TRY(reap(pipeline, tag, action->micro_batch));
    for (int i = 0; i < list->count; i++) {
        td_work *work;
        TD_TRY(reserve(pipeline));
        TD_TRY(td_isend(list->at[i], world_rank(pipeline, action->peer), tag, pipeline->messages,
                        &work));
        add_sending(pipeline, work, tag, action->micro_batch);
    }
    return TD_OK;
}

static td_status send_outputs(td_pipeline *pipeline, const struct td__action *action,
                              struct td__slot *slot)
{
    struct td__list_layout *agreed = layout_of_action(pipeline, action), now = {.known = true};
    TD_TRY(describe(pipeline, &slot->outputs, &now));
    if (agreed->known) {
        TD_TRY(check_layout(pipeline, action, agreed, &now));
    } else {
        *agreed = now;
        TD_TRY(send_layout(pipeline, action, agreed));
    }
    TD_TRY(send_list(pipeline, action, &slot->outputs));
    if (!pipeline->step.training)
        td__list_release(&slot->outputs);
    return TD_OK;
}

/* The gradients of the inputs of a slot, as those of the results of the stage before it: retained. */
static td_status input_gradients(const struct td__slot *slot, td_tensor_list *gradients)
{
    TD_SCOPE;
    for (int i = 0; i < slot->inputs.count; i++) {
        td_tensor *input = slot->inputs.at[i];
        if (!td_tensor_requires_grad(input))
            continue;
        td_tensor *gradient = td_tensor_grad(input); /* NULL: the stage does not use the input */
        if (!gradient)
            gradient = td_zeros(td_tensor_shape(input), td_tensor_ndim(input),
                                td_tensor_dtype(input), td_tensor_device(input));
        if (!gradient)
            return td__error_status();
        gradients->at[gradients->count++] = td_tensor_retain(gradient);
    }
    return TD_OK;
}

td_status td__pipeline_send(td_pipeline *pipeline, const struct td__action *action)
{
    struct td__slot *slot = &td__stage_of(pipeline, action->stage)->slots[action->micro_batch];
    if (!is_gradient(action))
        return send_outputs(pipeline, action, slot);
    td_tensor_list gradients = {0};
    td_status status = input_gradients(slot, &gradients);
    if (!status)
        status = send_list(pipeline, action, &gradients);
    td__list_release(&gradients);
    td__list_release(&slot->inputs);
    return status;
}

td_status td__pipeline_flush(td_pipeline *pipeline)
{
    for (int i = 0; i < pipeline->sending_count; i++)
        TD_TRY(td_work_wait(pipeline->sendings[i].work, 0));
    return TD_OK;
}

/* ---- Receiving ---------------------------------------------------------------------------------- */

static td_status receive_layout(td_pipeline *pipeline, const struct td__action *action,
                                struct td__list_layout *layout)
{
    enum { SPEC = 4 + 1 + 1 + 8 * TD_MAX_DIMS + 4 + TD__TENSOR_NAME };
    char data[4 + TD_TENSOR_LIST_MAX * SPEC];
    int peer = world_rank(pipeline, action->peer);
    td_work *work;
    TD_TRY(td_group_recv(data, sizeof data, TD_U8, peer, tag_of(action->stage - 1, TAG_LAYOUT),
                         pipeline->messages, &work));
    while (!td_work_test(work)) /* `data` is in use until then */
        td_work_wait(work, 0);
    td_status status = td_work_status(work);
    size_t size = td_work_received(work);
    td_work_release(work);
    TD_TRY(status);
    if (!decode(data, size, layout))
        return td_fail(
            TD_ERR_MISMATCH,
            "rank %d cannot read the layout of stage %d that rank %d has sent; the ranks "
            "must use the same version of the library",
            world_rank(pipeline, pipeline->rank), action->stage - 1, peer);
    layout->known = true;
    return TD_OK;
}

/* Where a stage receives: on the current device, if it has none of its own. */
static td_device *stage_device(td_pipeline *pipeline, int stage)
{
    td_device *device = td__stage_of(pipeline, stage)->device;
    return device ? device : td_current_device();
}

/* Starts the receives of a message; the tensors go to `list`. */
static td_status post(td_pipeline *pipeline, const struct td__action *action,
                      struct td__receipt *receipt, td_tensor_list *list)
{
    struct td__list_layout *layout = layout_of_action(pipeline, action);
    td_device *device = stage_device(pipeline, action->stage);
    receipt->posted = true;
    for (int i = 0; i < layout->count; i++) {
        struct td__tensor_spec *spec = &layout->specs[i];
        if (is_gradient(action) && !spec->requires_grad)
            continue;
        td_tensor *tensor = td__empty(pipeline->step.call, spec->shape, spec->ndim, spec->dtype,
                                      device);
        if (!tensor)
            return td__error_status();
        list->names[list->count] = *spec->name ? spec->name : NULL;
        list->at[list->count++] = tensor;
        TD_TRY(td_irecv(tensor, world_rank(pipeline, action->peer), tag_of_action(action),
                        pipeline->messages, &receipt->works[receipt->count]));
        receipt->count++;
    }
    return TD_OK;
}

td_status td__pipeline_post(td_pipeline *pipeline, const struct td__action *action, bool *posted)
{
    struct td__slot *slot = &td__stage_of(pipeline, action->stage)->slots[action->micro_batch];
    struct td__receipt *receipt = is_gradient(action) ? &slot->gradient_receipt
                                                      : &slot->input_receipt;
    *posted = receipt->posted || layout_of_action(pipeline, action)->known;
    if (receipt->posted || !*posted)
        return TD_OK;
    return post(pipeline, action, receipt, is_gradient(action) ? &slot->gradients : &slot->inputs);
}

static td_status wait_for(struct td__receipt *receipt)
{
    td_status status = td_work_wait_all(receipt->works, receipt->count, 0);
    if (status)
        return status;
    for (int i = 0; i < receipt->count; i++)
        td_work_release(receipt->works[i]);
    *receipt = (struct td__receipt){0};
    return TD_OK;
}

/* Replaces a tensor without a graph by one on `device`. */
static td_status place(td_tensor **tensor, td_device *device)
{
    TD_SCOPE;
    if ((*tensor)->storage->device == device)
        return TD_OK;
    td_tensor *placed = td_tensor_to(*tensor, device);
    if (!placed)
        return td__error_status();
    td_tensor_release(*tensor);
    *tensor = td_tensor_retain(placed);
    return TD_OK;
}

static td_status place_gradients(struct td__slot *slot)
{
    for (int i = 0, k = 0; i < slot->outputs.count && k < slot->gradients.count; i++)
        if (td_tensor_requires_grad(slot->outputs.at[i]))
            TD_TRY(place(&slot->gradients.at[k++], slot->outputs.at[i]->storage->device));
    return TD_OK;
}

td_status td__pipeline_receive(td_pipeline *pipeline, const struct td__action *action)
{
    struct td__slot *slot = &td__stage_of(pipeline, action->stage)->slots[action->micro_batch];
    struct td__list_layout *layout = layout_of_action(pipeline, action);
    if (!layout->known) /* of gradients it is: their forward pass has run */
        TD_TRY(receive_layout(pipeline, action, layout));
    bool posted;
    TD_TRY(td__pipeline_post(pipeline, action, &posted));
    TD_TRY(wait_for(is_gradient(action) ? &slot->gradient_receipt : &slot->input_receipt));
    if (is_gradient(action))
        return place_gradients(slot);
    for (int i = 0; i < layout->count; i++)
        if (layout->specs[i].requires_grad)
            TD_TRY(td_tensor_set_requires_grad(slot->inputs.at[i], true));
    return TD_OK;
}

/* ---- Inside a rank ------------------------------------------------------------------------------ */

td_status td__pipeline_hand_on(td_pipeline *pipeline, int stage, int micro_batch)
{
    struct td__slot *from = &td__stage_of(pipeline, stage - 1)->slots[micro_batch];
    struct td__slot *to = &td__stage_of(pipeline, stage)->slots[micro_batch];
    TD_SCOPE;
    for (int i = 0; i < from->outputs.count; i++) {
        td_device *device = td__stage_of(pipeline, stage)->device;
        td_tensor *tensor = td_detach(from->outputs.at[i]);
        if (device)
            tensor = td_tensor_to(tensor, device);
        if (!tensor)
            return td__error_status();
        if (pipeline->step.training && td_tensor_requires_grad(from->outputs.at[i]))
            TD_TRY(td_tensor_set_requires_grad(tensor, true));
        to->inputs.names[i] = from->outputs.names[i];
        to->inputs.at[to->inputs.count++] = td_tensor_retain(tensor);
    }
    if (!pipeline->step.training)
        td__list_release(&from->outputs);
    return TD_OK;
}

td_status td__pipeline_hand_back(td_pipeline *pipeline, int stage, int micro_batch)
{
    struct td__slot *to = &td__stage_of(pipeline, stage - 1)->slots[micro_batch];
    TD_TRY(input_gradients(&td__stage_of(pipeline, stage)->slots[micro_batch], &to->gradients));
    return place_gradients(to);
}
