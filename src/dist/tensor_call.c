/* How a tensor call runs.
 *
 * A blocking one stays on the stack and counts no references: the caller has them.
 * One with a work moves to the heap first, so that nothing can fail between starting the operation
 * and handing its work out but making the outer work:
 *
 *     group's work (inner) --complete--> unpack, free --> the caller's work (outer) complete
 *
 * Several calls can be one call. The group carries its operations out in order, and after a
 * failure all that follow fail with the same; so the status of the last work is that of all of them. */
#include "base/fail.h"
#include "call/operation.h"
#include "dist/tensor_call.h"
#include "group/process_group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Packing --------------------------------------------------------------------------------- */

static const char *end_of(const td_tensor *tensor)
{
    return (const char *)td_tensor_data(tensor) + td_tensor_nbytes(tensor);
}

/* Memory of a user's need not be aligned to its elements, but a group's buffers must be. */
static bool is_aligned(const td_tensor *tensor)
{
    size_t element = td_dtype_size(tensor->layout.dtype);
    return (uintptr_t)td_tensor_data(tensor) % (element < 8 ? element : 8) == 0;
}

/* Whether the tensors' own memory is the buffer: contiguous, one after another, in one storage. */
static bool is_one_run(const struct td__side *side)
{
    for (int i = 0; i < side->count; i++) {
        const td_tensor *tensor = side->tensors[i];
        if (!td_tensor_is_contiguous(tensor) || !is_aligned(tensor))
            return false;
        if (i == 0)
            continue;
        const td_tensor *before = side->tensors[i - 1];
        if (tensor->storage != before->storage || td_tensor_data(tensor) != end_of(before))
            return false;
    }
    return true;
}

/* On an accelerator: between a tensor and its part of the scratch, by its kernels, on the current stream. */
static td_status copy_on_device(const char *call, const struct td__side *side, td_tensor *tensor,
                                size_t offset, bool pack)
{
    struct td__layout flat = tensor->layout;
    td__layout_set_contiguous(&flat);
    td_tensor *part = td__tensor_over(side->device_scratch->storage,
                                      (int64_t)(offset / td_dtype_size(flat.dtype)), &flat);
    if (!part)
        return td__error_status();
    td_status status = pack ? td__transfer(call, part, tensor, true)
                            : td__transfer(call, tensor, part, true);
    td_tensor_release(part);
    return status;
}

/* Copies all tensors to the scratch, or from it. */
static td_status copy_all(const struct td__tensor_call *x, const struct td__side *side, bool pack)
{
    size_t at = 0;
    for (int i = 0; i < side->count; i++) {
        td_tensor *tensor = side->tensors[i];
        char *part = (char *)side->scratch + at;
        struct td__layout flat = tensor->layout;
        td__layout_set_contiguous(&flat);
        if (side->device_scratch)
            TD_TRY(copy_on_device(x->name, side, tensor, at, pack));
        else if (pack)
            td__layout_copy(&flat, part, &tensor->layout, td_tensor_data(tensor));
        else
            td__layout_copy(&tensor->layout, td_tensor_data(tensor), &flat, part);
        at += td_tensor_nbytes(tensor);
    }
    return TD_OK;
}

static td_status use_scratch(const struct td__tensor_call *x, struct td__side *side)
{
    td_device *device = x->operation.call.device;
    td_dtype dtype = side->tensors[0]->layout.dtype;
    if (device) {
        side->device_scratch = td__empty(
            x->name, (int64_t[]){(int64_t)(side->bytes / td_dtype_size(dtype))}, 1, dtype, device);
        if (!side->device_scratch)
            return td__error_status();
        side->scratch = td_tensor_data(side->device_scratch);
    } else {
        side->scratch = td_alloc(side->bytes);
    }
    if (!side->scratch)
        return td_fail(TD_ERR_NOMEM, "%s: no memory to pack %zu bytes of %s", x->name, side->bytes,
                       side->name);
    side->data = side->scratch;
    return side->use & TD__READ ? copy_all(x, side, true) : TD_OK;
}

/* All tensors of a call are on one device, or in the host's memory. */
static td_status find_device(struct td__tensor_call *x, const struct td__side *side,
                             const td_tensor **first, const char **first_name)
{
    for (int i = 0; i < side->count; i++) {
        const td_tensor *tensor = side->tensors[i];
        td_device *device = tensor->storage->device;
        if (td__is_meta(device))
            return td__fail_meta(x->name, device);
        if (!*first) {
            *first = tensor;
            *first_name = side->name;
            x->operation.call.device = device->is_host ? NULL : device;
        } else if ((*first)->storage->device != device &&
                   !(device->is_host && td__on_host(*first))) {
            return td_fail(TD_ERR_INVALID,
                           "%s: a tensor of %s is on %s, but one of %s is on %s; all tensors of a "
                           "call must be on one device",
                           x->name, side->name, td_device_name(device), *first_name,
                           td_device_name((*first)->storage->device));
        }
    }
    return TD_OK;
}

static td_status prepare_side(const struct td__tensor_call *x, struct td__side *side)
{
    side->bytes = 0;
    for (int i = 0; i < side->count; i++) {
        side->bytes += td_tensor_nbytes(side->tensors[i]);
        if (side->use & TD__WRITE)
            TD_TRY(td__prepare_write(side->tensors[i]));
    }
    if (side->bytes == 0)
        return TD_OK;
    if (!is_one_run(side))
        return use_scratch(x, side);
    side->data = td_tensor_data(side->tensors[0]);
    return TD_OK;
}

/* An operation in place has its buffer on both sides; the group drops what a rank has no use for. Tensors that
 * overlap otherwise, which the group does not allow, are packed. */
static td_status prepare(struct td__tensor_call *x)
{
    td_call *call = &x->operation.call;
    bool in_place = call->kind == TD_OP_BROADCAST || call->kind == TD_OP_REDUCE ||
                    call->kind == TD_OP_ALL_REDUCE;
    const td_tensor *first = NULL;
    const char *first_name = NULL;
    TD_TRY(find_device(x, &x->output, &first, &first_name));
    TD_TRY(find_device(x, &x->input, &first, &first_name));
    TD_TRY(prepare_side(x, &x->output));
    TD_TRY(prepare_side(x, &x->input));
    call->output = x->output.data;
    call->input = in_place ? x->output.data : x->input.data;
    if (in_place || !td__call_overlaps(x->group, call, x->input.bytes, x->output.bytes))
        return TD_OK;
    TD_TRY(use_scratch(x, &x->input));
    call->input = x->input.data;
    return TD_OK;
}

/* ---- Ending ---------------------------------------------------------------------------------- */

/* Memory of a device stays until the stream of the call has run. */
static void drop_side(const struct td__tensor_call *x, struct td__side *side)
{
    td_stream *stream = x->operation.call.stream;
    for (int i = 0; stream && i < side->count; i++)
        td_tensor_record_stream(side->tensors[i], stream);
    if (side->device_scratch) {
        td_tensor_record_stream(side->device_scratch, stream);
        td_tensor_release(side->device_scratch);
    } else {
        td_free(side->scratch);
    }
    if (!x->held)
        return;
    for (int i = 0; i < side->count; i++)
        td_tensor_release(side->tensors[i]);
    free((void *)side->tensors);
}

/* `well`: the call has succeeded, and its results are unpacked. */
static td_status finish(struct td__tensor_call *x, bool well)
{
    td_status status = TD_OK;
    if (well && x->output.scratch && (x->output.use & TD__WRITE))
        status = copy_all(x, &x->output, false);
    drop_side(x, &x->input);
    drop_side(x, &x->output);
    free((void *)x->operation.call.input_counts);
    free((void *)x->operation.call.output_counts);
    td_work_release(x->inner);
    if (x->held)
        free(x);
    return status;
}

static td_status finish_chain(struct td__tensor_call *first, bool well)
{
    td_status status = TD_OK;
    for (struct td__tensor_call *next; first; first = next) {
        next = first->next;
        td_status one = finish(first, well && !status);
        status = status ? status : one;
    }
    return status;
}

void td__tensor_call_discard(struct td__tensor_call *first)
{
    finish_chain(first, false);
}

/* ---- Holding --------------------------------------------------------------------------------- */

static bool hold_side(struct td__side *side, const struct td__side *from)
{
    *side = *from;
    side->tensors = NULL;
    if (from->count == 0)
        return true;
    td_tensor **list = malloc((size_t)from->count * sizeof *list);
    if (!list)
        return false;
    for (int i = 0; i < from->count; i++)
        list[i] = td_tensor_retain(from->tensors[i]);
    side->tensors = list;
    return true;
}

td_status td__tensor_call_hold(struct td__tensor_call *x, struct td__tensor_call **out)
{
    td_status status = prepare(x);
    if (status)
        goto drop;
    struct td__tensor_call *held = malloc(sizeof *held);
    status = TD_ERR_NOMEM;
    if (!held)
        goto drop;
    *held = *x;
    held->held = true;
    if (!hold_side(&held->input, &x->input))
        goto free_held;
    if (!hold_side(&held->output, &x->output))
        goto release_input;
    *out = held;
    return TD_OK;

release_input:
    for (int i = 0; i < held->input.count; i++)
        td_tensor_release(held->input.tensors[i]);
    free((void *)held->input.tensors);
free_held:
    free(held);
drop:
    if (status == TD_ERR_NOMEM)
        td_fail(status, "%s on group \"%s\": out of memory", x->name, td_group_name(x->group));
    finish(x, false);
    return status;
}

/* ---- Running --------------------------------------------------------------------------------- */

/* After the last work of a chain, well or not. On a device, it unpacks on the stream of the call. */
static td_status after_last(void *arg)
{
    struct td__tensor_call *last = arg;
    while (last->next)
        last = last->next;
    TD_STREAM_SCOPE(last->operation.call.stream);
    return finish_chain(arg, td_work_status(last->inner) == TD_OK);
}

/* Waits for the works of the calls before `end`, so that nothing touches their buffers any
 * more, frees the chain, and keeps the sentence of the failure that was before. What is still under
 * way after the group's timeout keeps its memory for good. */
static td_status give_up(struct td__tensor_call *first, const struct td__tensor_call *end)
{
    struct td__error error;
    td__error_save(&error);
    bool complete = true;
    for (struct td__tensor_call *x = first; x != end; x = x->next) {
        td_work_wait(x->inner, 0);
        complete = complete && td_work_test(x->inner);
    }
    if (complete)
        finish_chain(first, false);
    return td__error_restore(&error);
}

static td_status start(struct td__tensor_call *x, td_work **work)
{
    return td__group_call(x->group, &x->operation, x->peer, work);
}

static td_status start_chain(struct td__tensor_call *first, td_work **work)
{
    struct td__tensor_call *last = first;
    for (struct td__tensor_call *x = first; x; x = x->next) {
        td_status status = start(x, &x->inner);
        if (status)
            return give_up(first, x);
        last = x;
    }
    /* Where this fails, it has waited, and the chain is gone. */
    return td__work_follow(td_work_retain(last->inner), after_last, first, work);
}

static td_status run_chain(struct td__tensor_call *first)
{
    td_status status = TD_OK;
    for (struct td__tensor_call *x = first; x && !status; x = x->next)
        status = start(x, NULL);
    td_status finished = finish_chain(first, !status);
    return status ? status : finished;
}

td_status td__tensor_call_run_chain(struct td__tensor_call *first, td_work **work)
{
    td_group *group = first->group;
    td__group_use(group);
    td_status status = work ? start_chain(first, work) : run_chain(first);
    td__group_unuse(group);
    return status;
}

td_status td__tensor_call_run(struct td__tensor_call *x, td_work **work)
{
    if (work) {
        struct td__tensor_call *held;
        TD_TRY(td__tensor_call_hold(x, &held));
        return start_chain(held, work);
    }
    td_status status = prepare(x);
    if (!status)
        status = start(x, NULL);
    td_status finished = finish(x, !status);
    return status ? status : finished;
}
