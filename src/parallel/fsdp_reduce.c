/* Gradients of sharded modules: whole while a pass computes them, averaged shards after it. */
#include "base/clock.h"
#include "base/fail.h"
#include "group/process_group.h"
#include "parallel/fsdp_offload.h"
#include "parallel/fsdp_slices.h"
#include "parallel/in_backward.h"
#include "tensor/file_memory.h"

#include <stdlib.h>

enum { MOST_REDUCTIONS = 64 };

static td_tensor *whole_view(const struct td__fsdp_param *param, struct td__storage *storage)
{
    return td__tensor_over(storage, param->offset, &param->whole);
}

static td_status fill(td_tensor *tensor)
{
    if (!tensor)
        return td__error_status();
    return tensor->layout.numel ? td__kernels_of(tensor)->fill(tensor, 0) : TD_OK;
}

/* Gradients do not stay. */
static bool is_stepped(const struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++)
        if (!flat->params[i].stepper)
            return false;
    return true;
}

/* ---- Before a pass ---------------------------------------------------------------------------------------- */

/* Padding is reduced with the rest. */
static td_status clear_padding(struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++) {
        int64_t end = flat->params[i].offset + flat->params[i].whole.numel;
        int64_t next = i + 1 < flat->count ? flat->params[i + 1].offset : flat->numel;
        td_tensor *pad = td__flat_view(flat->grads, flat->compute, end, next - end);
        td_status status = fill(pad);
        td_tensor_release(pad);
        TD_TRY(status);
    }
    return TD_OK;
}

static bool has_grads(const struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++)
        if (td__leaf_has_grad(flat->params[i].tensor))
            return true;
    return false;
}

static td_status make_shard_grads(struct td__fsdp_flat *flat)
{
    if (flat->shard_grads)
        return TD_OK;
    td_tensor *shard = td__flat_view(flat->shard, flat->dtype, 0, td__flat_shard_count(flat));
    flat->shard_grads = is_stepped(flat) ? td__empty_like(shard) : td__empty_beside(shard);
    td_tensor_release(shard);
    if (!flat->shard_grads)
        return td__error_status();
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        param->shard_grad = td__narrow(flat->shard_grads, 0, param->at, param->count);
        if (!param->shard_grad)
            return td__error_status();
    }
    return TD_OK;
}

/* Nobody else has the memory. */
static bool is_ours(const struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++) /* the leaf's, and ours */
        if (atomic_load(&flat->params[i].shard_grad->owners) > 2)
            return false;
    return atomic_load(&flat->shard_grads->storage->owners) == flat->count + 1;
}

void td__flat_free_zero_grads(struct td__fsdp_flat *flat)
{
    if (!flat->shard_grads || flat->is_whole || flat->in_pass || flat->grads || flat->in_file ||
        flat->home != flat->device || has_grads(flat) || !is_ours(flat))
        return;
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        td__leaf_place_grad(param->tensor, NULL, td__leaf_grad_is_zero(param->tensor));
        td_tensor_release(param->shard_grad);
        param->shard_grad = NULL;
    }
    td_tensor_release(flat->shard_grads);
    flat->shard_grads = NULL;
}

/* A gradient that the program has set gets into the shard. */
static td_status take_shard_grads(struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        td_tensor *grad = td_tensor_grad(param->tensor);
        if (!param->shard_grad || grad == param->shard_grad)
            continue;
        TD_TRY(td__leaf_has_grad(param->tensor) ? td__flat_copy(param->shard_grad, grad)
                                                : fill(param->shard_grad));
    }
    return TD_OK;
}

/* Gradients that were zeroed since a pass that was not reduced are not added to. */
static td_status forget_zeroed(struct td__fsdp_flat *flat)
{
    flat->adds &= has_grads(flat);
    for (int i = 0; i < flat->count && flat->adds; i++)
        if (!td__leaf_has_grad(flat->params[i].tensor))
            TD_TRY(fill(flat->params[i].shard_grad));
    return TD_OK;
}

/* The sum continues from the gradients of passes before, as that of whole gradients would. */
static td_status gather_shard_grads(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    td_tensor **parts;
    TD_TRY(td__flat_cut(flat, flat->grads, flat->compute, &parts));
    td_status status = td__flat_copy(parts[ranks->rank], flat->shard_grads);
    if (!status && ranks->size > 1)
        status = td_all_gather(parts, ranks->size, parts[ranks->rank], ranks->shards, NULL);
    td__flat_drop_cut(flat, &parts);
    return td__fsdp_fail(flat->unit, "gathering the gradients", status);
}

static td_status make_grads(struct td__fsdp_flat *flat)
{
    bool some = has_grads(flat);
    if (some)
        TD_TRY(make_shard_grads(flat));
    TD_TRY(td__fsdp_allocate(flat, &flat->grads, flat->compute));
    TD_TRY(clear_padding(flat));
    if (!some)
        return TD_OK;
    TD_TRY(take_shard_grads(flat));
    flat->adds = flat->compute != flat->dtype || flat->reduce != flat->dtype;
    return flat->adds ? TD_OK : gather_shard_grads(flat);
}

/* Waits for older reductions until the gradients fit beside what is there. */
static td_status make_room(struct td__fsdp_flat *flat)
{
    struct td__fsdp *fsdp = flat->unit->all;
    while (fsdp->reduction_count && fsdp->stats.whole_bytes + td__flat_bytes(flat) > fsdp->limit)
        TD_TRY(td__fsdp_wait_reductions(fsdp, fsdp->reduction_count - 1));
    return TD_OK;
}

/* The gradients of a flat that is always whole stay in one buffer. */
static td_status begin_whole(struct td__fsdp_flat *flat)
{
    if (!flat->grads) {
        flat->grads = td__storage_create_beside(flat->shard,
                                                (size_t)flat->numel * td_dtype_size(flat->dtype));
        if (!flat->grads)
            return td__fsdp_fail(flat->unit, "the gradients", td__error_status());
        TD_TRY(clear_padding(flat));
    }
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        td_tensor *grad = td_tensor_grad(param->tensor);
        bool has = td__leaf_has_grad(param->tensor);
        if (!param->shard_grad && !(param->shard_grad = whole_view(param, flat->grads)))
            return td__error_status();
        if (grad == param->shard_grad)
            continue;
        if (has)
            TD_TRY(td__flat_copy(param->shard_grad, grad));
        td__leaf_place_grad(param->tensor, param->shard_grad, !has);
    }
    return TD_OK;
}

td_status td__flat_begin_grads(struct td__fsdp_flat *flat)
{
    TD_TRY(td__offload_wait(flat));
    flat->pending = flat->count;
    for (int i = 0; i < flat->count; i++)
        flat->params[i].ready = false;
    flat->in_pass = true;
    if (flat->is_whole)
        return begin_whole(flat);
    bool kept = flat->grads != NULL; /* whole gradients of passes that were not reduced */
    if (kept) {
        TD_TRY(forget_zeroed(flat));
    } else {
        TD_TRY(make_room(flat));
        TD_TRY(make_grads(flat));
    }
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        bool has = td__leaf_has_grad(param->tensor) && (kept || !flat->adds);
        td_tensor *view = whole_view(param, flat->grads);
        if (!view)
            return td__error_status();
        td__leaf_place_grad(param->tensor, view, !has);
        td_tensor_release(view);
    }
    return TD_OK;
}

/* ---- Reduction -------------------------------------------------------------------------------------------- */

static void free_storage(struct td__fsdp_flat *flat, struct td__storage **storage)
{
    if (!*storage)
        return;
    td__fsdp_count(flat->unit->all, -(ptrdiff_t)(*storage)->bytes);
    td__storage_release(*storage);
    *storage = NULL;
}

void td__flat_drop_grads(struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++)
        td__leaf_place_grad(flat->params[i].tensor, NULL, false);
    flat->in_pass = false;
    flat->adds = false;
    if (!flat->is_whole)
        free_storage(flat, &flat->grads);
}

/* Parameters that the pass did not use have gradients of 0, or those of passes before. */
static td_status fill_missing(struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        if (param->ready)
            continue;
        td_tensor *grad = td_tensor_grad(param->tensor);
        if (grad && !td__leaf_has_grad(param->tensor)) {
            TD_TRY(fill(grad));
            td__leaf_place_grad(param->tensor, grad, false);
        }
    }
    return TD_OK;
}

/* The gradients in the dtype of the reduction: flat->reduce_from, or flat->grads itself. */
static td_status convert(struct td__fsdp_flat *flat, struct td__storage **from)
{
    *from = flat->grads;
    if (flat->reduce == flat->compute)
        return TD_OK;
    TD_TRY(td__fsdp_allocate(flat, &flat->reduce_from, flat->reduce));
    td_tensor *to = td__flat_view(flat->reduce_from, flat->reduce, 0, flat->numel);
    td_tensor *grads = td__flat_view(flat->grads, flat->compute, 0, flat->numel);
    td_status status = to && grads ? td__flat_copy(to, grads) : td__error_status();
    td_tensor_release(to);
    td_tensor_release(grads);
    *from = flat->reduce_from;
    return status;
}

static td_status start_shards(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    struct td__storage *from;
    TD_TRY(make_shard_grads(flat));
    TD_TRY(convert(flat, &from));
    TD_TRY(td__flat_cut(flat, from, flat->reduce, &flat->reduce_parts));
    if (flat->offload && ranks->size == 1 && !ranks->replicas)
        return td__offload_send(flat, flat->reduce_parts[0]);
    if (flat->reduce != flat->dtype || flat->adds || flat->offload) {
        int64_t count = td__flat_shard_count(flat);
        flat->reduced = td__empty("td_fsdp", &count, 1, flat->reduce, flat->device);
        if (!flat->reduced)
            return td__error_status();
    }
    td_tensor *to = flat->reduced ? flat->reduced : flat->shard_grads;
    if (ranks->size == 1)
        return td__flat_copy(to, flat->reduce_parts[0]);
    flat->unit->all->stats.reduced_bytes += (flat->numel - td__flat_shard_count(flat)) *
                                            (int64_t)td_dtype_size(flat->reduce);
    return td_reduce_scatter(to, flat->reduce_parts, ranks->size, TD_AVG, ranks->shards,
                             &flat->reducing);
}

/* A rank that shadows a pass has no gradients, and sends none. */
static td_status start_sums(struct td__fsdp_flat *flat)
{
    struct td__storage *from = flat->grads;
    if (!td__fsdp_shadows(flat->unit->all))
        TD_TRY(convert(flat, &from));
    return td__flat_sums_start(flat, from);
}

static td_status start_whole(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    if (!ranks->replicas)
        return TD_OK;
    if (!flat->shard_grads) {
        flat->shard_grads = td__flat_view(flat->grads, flat->dtype, 0, flat->numel);
        if (!flat->shard_grads)
            return td__error_status();
    }
    flat->unit->all->stats.reduced_bytes += flat->numel * (int64_t)td_dtype_size(flat->dtype) * 2 *
                                            (ranks->replicas->size - 1) / ranks->replicas->size;
    return td_all_reduce(flat->shard_grads, TD_AVG, ranks->replicas, &flat->reducing);
}

/* ---- The result --------------------------------------------------------------------------------------------- */

static td_status add_up(struct td__fsdp_flat *flat)
{
    if (!flat->reduced || !flat->reduced->layout.numel)
        return TD_OK;
    if (!flat->adds)
        return td__flat_copy(flat->shard_grads, flat->reduced);
    const td_kernels *kernels = td__kernels_of(flat->shard_grads);
    if (flat->reduced->layout.dtype == flat->dtype)
        return kernels->binary(TD_BINARY_ADD, flat->shard_grads, flat->shard_grads, flat->reduced);
    td_tensor *converted = td__empty_like_as(flat->reduced, flat->dtype);
    td_status status = converted ? td__flat_copy(converted, flat->reduced) : td__error_status();
    if (!status)
        status = kernels->binary(TD_BINARY_ADD, flat->shard_grads, flat->shard_grads, converted);
    td_tensor_release(converted);
    return status;
}

/* ---- Steps in the backward pass ----------------------------------------------------------------------------- */

void td__fsdp_set_stepper(struct td__fsdp_param *param, struct td__in_backward *stepper, int index)
{
    param->flat->unit->all->stepped_count += (stepper != NULL) - (param->stepper != NULL);
    param->stepper = stepper;
    param->step_index = index;
}

/* One step for all parameters of a flat that an optimizer has. */
static td_status step_some(struct td__fsdp_flat *flat, int first, int *indices)
{
    struct td__in_backward *stepper = flat->params[first].stepper;
    int count = 0;
    for (int i = 0; i < flat->count; i++) {
        if (flat->params[i].stepper != stepper)
            continue;
        if (i < first)
            return TD_OK; /* done with that one */
        indices[count++] = flat->params[i].step_index;
    }
    return td__in_backward_step(stepper, indices, count);
}

/* The memory of gradients that were stepped is freed, unless the flat has others. */
static void free_stepped(struct td__fsdp_flat *flat)
{
    if (!is_stepped(flat))
        return;
    for (int i = 0; i < flat->count; i++) {
        td_tensor_release(flat->params[i].shard_grad);
        flat->params[i].shard_grad = NULL;
    }
    td_tensor_release(flat->shard_grads);
    flat->shard_grads = NULL;
    if (flat->is_whole && flat->grads) {
        td__storage_release(flat->grads);
        flat->grads = NULL;
    }
}

/* The gradients of all ranks are final, so that none of them uses the parameters any more in this pass. */
static td_status step(struct td__fsdp_flat *flat)
{
    if (!flat->unit->all->stepped_count)
        return TD_OK;
    int *indices = calloc((size_t)flat->count, sizeof *indices);
    td_status status = indices ? TD_OK : td__fail_nomem("td_fsdp");
    for (int i = 0; i < flat->count && !status; i++)
        if (flat->params[i].stepper)
            status = step_some(flat, i, indices);
    free(indices);
    if (!status)
        free_stepped(flat);
    return status;
}

/* ---- The end of a reduction --------------------------------------------------------------------------------- */

td_status td__flat_take_grads(struct td__fsdp_flat *flat, td_status status)
{
    if (!status)
        status = add_up(flat);
    flat->adds = false;
    td_tensor_release(flat->reduced);
    flat->reduced = NULL;
    for (int i = 0; i < flat->count; i++) /* on failure there are none */
        td__leaf_place_grad(flat->params[i].tensor, status ? NULL : flat->params[i].shard_grad,
                            false);
    return status ? status : step(flat);
}

/* The reduced gradients go to the host. */
static td_status send(struct td__fsdp_flat *flat, td_status status)
{
    if (!status && flat->reduced)
        status = td__offload_send(flat, flat->reduced);
    if (!status)
        status = td__offload_sent(flat);
    if (status) {
        td__offload_drop(flat);
        td__flat_take_grads(flat, status);
    }
    return status;
}

static void free_whole_grads(struct td__fsdp_flat *flat)
{
    free_storage(flat, &flat->grads);
    free_storage(flat, &flat->reduce_from);
}

/* Of a pass that has failed: nothing is stepped. */
static void drop(struct td__fsdp_flat *flat)
{
    td__flat_drop_cut(flat, &flat->reduce_parts);
    td__flat_sums_drop(flat);
    if (flat->is_whole)
        return;
    if (flat->offload)
        td__offload_drop(flat);
    td__flat_take_grads(flat, TD_ERR_STATE);
    free_whole_grads(flat);
}

/* After the pass of a slice. Until the last one the sums are all that there is. */
static td_status finish_slice(struct td__fsdp_flat *flat, td_status status)
{
    bool complete;
    status = td__flat_sums_add(flat, status, &complete);
    if (flat->is_whole)
        return status;
    if (complete && !status)
        status = make_shard_grads(flat);
    if (complete)
        status = flat->offload ? send(flat, status) : td__flat_take_grads(flat, status);
    for (int i = 0; i < flat->count && !complete; i++)
        td__leaf_place_grad(flat->params[i].tensor, NULL, false);
    free_whole_grads(flat);
    return status;
}

static td_status finish(struct td__fsdp_flat *flat)
{
    const struct td__fsdp_ranks *ranks = flat->unit->ranks;
    td_status status = TD_OK;
    if (flat->reducing) {
        status = td_work_wait(flat->reducing, 0);
        td__fsdp_exchanged(flat, (size_t)flat->numel * td_dtype_size(flat->reduce));
    }
    td_work_release(flat->reducing);
    flat->reducing = NULL;
    if (td__fsdp_sums(flat->unit->all) && !flat->unit->all->unsettled)
        return finish_slice(flat, status);
    td__flat_drop_cut(flat, &flat->reduce_parts);
    td_tensor *result = flat->reduced ? flat->reduced : flat->shard_grads;
    if (!status && !flat->is_whole && ranks->replicas && result && result->layout.numel)
        status = td_all_reduce(result, TD_AVG, ranks->replicas, NULL);
    if (flat->unit->all->unsettled) {
        drop(flat);
        return status;
    }
    if (flat->is_whole)
        return status ? status : step(flat);
    status = flat->offload ? send(flat, status) : td__flat_take_grads(flat, status);
    free_whole_grads(flat);
    return status;
}

td_status td__fsdp_wait_reductions(struct td__fsdp *fsdp, int left)
{
    int64_t start = td__now_ns();
    td_status status = TD_OK;
    int done = 0;
    for (; fsdp->reduction_count - done > left; done++) {
        struct td__fsdp_flat *flat = fsdp->reductions[done];
        td_status finished = finish(flat);
        if (finished && !status)
            status = td__fsdp_fail(flat->unit, "reducing the gradients", finished);
    }
    fsdp->reduction_count -= done;
    for (int i = 0; i < fsdp->reduction_count; i++)
        fsdp->reductions[i] = fsdp->reductions[i + done];
    fsdp->stats.wait_ns += td__now_ns() - start;
    return status;
}

/* ---- The start of one -------------------------------------------------------------------------------------- */

td_status td__flat_reduce(struct td__fsdp_flat *flat)
{
    struct td__fsdp *fsdp = flat->unit->all;
    flat->in_pass = false;
    if (flat->pending && (fsdp->sync || flat->is_whole) && !td__fsdp_shadows(fsdp))
        TD_TRY(fill_missing(flat));
    if (fsdp->sync) {
        if (fsdp->reduction_count == MOST_REDUCTIONS)
            TD_TRY(td__fsdp_wait_reductions(fsdp, MOST_REDUCTIONS / 2));
        td_status status = td__fsdp_sums(fsdp) ? start_sums(flat)
                           : flat->is_whole    ? start_whole(flat)
                                               : start_shards(flat);
        if (status) {
            td__fsdp_fail(flat->unit, "reducing the gradients", status);
            drop(flat);
            return status;
        }
        fsdp->reductions[fsdp->reduction_count++] = flat;
        if (fsdp->stepped_count || flat->offload) /* while this one is reduced */
            TD_TRY(td__fsdp_wait_reductions(fsdp, 1));
    }
    return td__flat_leave(flat, true);
}
