/* DistributedDataParallel.
 *
 *     forward    rebuild the buckets, once · broadcast the buffers · run the module · find what is
 *                unused
 *     backward   each parameter's hook: its gradient is in its bucket; a full bucket starts
 *     its end    wait for all buckets; every gradient is then an average, and a view of its bucket
 *
 * In a context of distributed autograd the gradients are those of the context: ddp_context.c.
 *
 * A gradient that is no view of its bucket (a parameter's first, or one that the program has set)
 * is copied into the bucket and replaced by a view; from then on operators write directly into the
 * bucket. */
#include "parallel/ddp.h"

#include "autograd/graph.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "group/process_group.h"
#include "parallel/buckets.h"
#include "parallel/in_backward.h"

#include <tandem/fsdp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Backward -------------------------------------------------------------------------------------- */

static td_status reduce(struct td__ddp *ddp)
{
    TD_TRY(td__ddp_check_deadline(ddp));
    if (!td__buckets_complete(&ddp->buckets))
        return td__ddp_fail_missing(ddp);
    ddp->expecting = false;
    if (ddp->slices && !ddp->buckets.last_slice) {
        td__ddp_slices_end_pass(ddp);
        return td__buckets_finish(&ddp->buckets, NULL, NULL);
    }
    if (ddp->used || ddp->context)
        TD_TRY(td__ddp_agree(ddp));
    if (ddp->stepped_count && !ddp->place) {
        TD_TRY(td__ddp_finish_with_steps(ddp));
    } else {
        TD_TRY(td__buckets_finish(&ddp->buckets, NULL, NULL));
        if (ddp->place)
            TD_TRY(td__ddp_deliver(ddp));
        else if (ddp->used)
            TD_TRY(td__ddp_restore_unused(ddp));
    }
    td__ddp_plan_rebuild(ddp);
    td__ddp_slices_end_pass(ddp);
    return TD_OK;
}

static td_status end_pass(void *arg)
{
    struct td__ddp *ddp = arg;
    int64_t before = td__ddp_limit_calls(ddp);
    td_status status = reduce(ddp);
    td__swap_call_timeout(before);
    if (status && ddp->context)
        td__ddp_abandon(ddp);
    pthread_mutex_lock(&ddp->lock);
    ddp->ending = false;
    ddp->expecting = false;
    ddp->place = NULL;
    pthread_mutex_unlock(&ddp->lock);
    return status;
}

static void drop_pass(void *ddp)
{
    td__ddp_abandon(ddp);
}

/* Copies the gradient into its bucket, and replaces it by the view, unless it is in another place. */
static td_status move_in(struct td__ddp_parameter *parameter, td_tensor *view)
{
    const struct td__grad_place *place = parameter->ddp->place;
    if (place) {
        td_tensor *elsewhere = place->get(place->arg, parameter->tensor);
        td_status status = elsewhere ? td__tensor_copy(view, elsewhere)
                                     : td_fail(TD_ERR_STATE, "td_ddp: the context has ended");
        td_tensor_release(elsewhere);
        return status;
    }
    td_tensor *grad = td_tensor_grad(parameter->tensor);
    if (grad == view)
        return TD_OK;
    if (grad)
        TD_TRY(td__tensor_copy(view, grad));
    else
        TD_TRY(td__kernels_of(view)->fill(view, 0));
    return td_tensor_set_grad(parameter->tensor, view);
}

static td_status on_accumulated(td_tensor *tensor, const struct td__grad_place *place, void *arg)
{
    struct td__ddp_parameter *parameter = arg;
    struct td__ddp *ddp = parameter->ddp;
    bool reduces = ddp->sync && (place || ddp->expecting);
    (void)tensor;
    if (reduces && place)
        TD_TRY(td__ddp_enter_place(parameter, place, &reduces));
    if (!reduces)
        return TD_OK;
    if (!atomic_exchange(&ddp->ending, true)) {
        td_status status = td__at_end_of_backward(end_pass, ddp->context ? drop_pass : NULL, ddp);
        if (status && place)
            td__ddp_abandon(ddp);
        TD_TRY(status);
    }
    if (ddp->buckets.gradients[parameter->number].ready)
        return td_fail(
            TD_ERR_STATE,
            "td_ddp: parameter \"%s\" got a second gradient after its first was reduced; the "
            "graph of a static_graph model has changed, or two backward passes followed one "
            "forward",
            parameter->name);
    TD_TRY(td__ddp_check_deadline(ddp));
    td_tensor *view = td__buckets_view(&ddp->buckets, parameter->number);
    if (!view)
        return td__error_status();
    TD_TRY(move_in(parameter, view));
    int64_t before = td__ddp_limit_calls(ddp);
    td_status status = td__buckets_ready(&ddp->buckets, parameter->number);
    td__swap_call_timeout(before);
    return !status && ddp->stepped_count ? td__ddp_step_reduced(ddp) : status;
}

/* ---- Forward --------------------------------------------------------------------------------------- */

/* Whether two tensors can be in one call: on one device, or in the host's memory. */
static bool go_together(const td_tensor *a, const td_tensor *b)
{
    return a->storage->device == b->storage->device || (td__on_host(a) && td__on_host(b));
}

/* One call for each device of a model over several, in the order of the tensors. */
td_status td__ddp_broadcast(struct td__ddp *ddp, td_tensor *const *tensors, int count)
{
    int source = td_get_global_rank(ddp->group, ddp->source);
    td_tensor **left = calloc((size_t)count + 1, 2 * sizeof *left), **now = left + count;
    if (!left)
        return td__fail_nomem("td_ddp");
    memcpy(left, tensors, (size_t)count * sizeof *left);
    td_status status = TD_OK;
    while (count > 0 && !status) {
        int taken = 0, kept = 0;
        const td_tensor *first = left[0];
        for (int i = 0; i < count; i++)
            if (go_together(first, left[i]))
                now[taken++] = left[i];
            else
                left[kept++] = left[i];
        status = td_broadcast_coalesced(now, taken, source, ddp->group, NULL);
        count = kept;
    }
    free(left);
    return status;
}

static td_status broadcast_buffers(struct td__ddp *ddp)
{
    if (!ddp->buffer_count || ddp->options.no_broadcast_buffers || !ddp->buffers_changed)
        return TD_OK;
    ddp->buffers_changed = false;
    return td__ddp_broadcast(ddp, ddp->buffers, ddp->buffer_count);
}

td_status td__ddp_prepare(struct td__ddp *ddp, bool records)
{
    bool first = !td__ddp_slices_in_step(ddp);
    if (records)
        TD_TRY(td__ddp_slices_prepare(ddp, &first));
    TD_TRY(td__ddp_settle(ddp));
    if (first)
        TD_TRY(broadcast_buffers(ddp));
    if (!records)
        return TD_OK;
    if (ddp->rebuild && first)
        TD_TRY(td__ddp_rebuild(ddp));
    TD_TRY(td__ddp_slices_begin_pass(ddp));
    return td__buckets_begin(&ddp->buckets);
}

static td_status before_forward(struct td__ddp *ddp, bool records)
{
    if (records && ddp->sync)
        TD_TRY(td__ddp_enter_context(ddp));
    if (ddp->join)
        TD_TRY(td__ddp_join_round(ddp, records));
    if (records)
        ddp->recorded_locally = !ddp->sync;
    if (!ddp->sync)
        return records && ddp->slices ? td__ddp_slices_prepare(ddp, &(bool){0}) : TD_OK;
    TD_TRY(td__ddp_prepare(ddp, records));
    if (records) {
        pthread_mutex_lock(&ddp->lock);
        ddp->ending = false;
        ddp->expecting = ddp->count > 0;
        pthread_mutex_unlock(&ddp->lock);
    }
    return TD_OK;
}

/* Counts those of ddp->parameters, from number `next` on, that are still in the module, in the same
 * order; tensors that are not averaged may be in between. */
static int count_known(const struct td__ddp *ddp, const td_module *module, int next)
{
    const td_tensor *tensor;
    for (int i = 0; next < ddp->count && (tensor = td_param(module, i)); i++)
        next += tensor == ddp->parameters[next].tensor;
    for (int i = 0; next < ddp->count && i < td_child_count(module); i++)
        next = count_known(ddp, td_child(module, i), next);
    return next;
}

/* A module that was moved since has parameters without hooks: their gradients would not be
 * averaged. */
static td_status check_parameters(const struct td__ddp *ddp, const td_module *module)
{
    int known = count_known(ddp, module, 0);
    if (known == ddp->count)
        return TD_OK;
    return td_fail(TD_ERR_STATE,
                   "td_ddp: the parameter \"%s\" was replaced after td_ddp(), so its gradient "
                   "would not be averaged; call td_module_to() before td_ddp()",
                   ddp->parameters[known].name);
}

static td_status ddp_forward(td_module *module, const td_tensor_list *inputs,
                             td_tensor_list *results)
{
    struct td__ddp *ddp = *(struct td__ddp **)td_module_data(module);
    td_module *inner = td_child(module, 0);
    bool records = td_grad_enabled();
    TD_TRY(check_parameters(ddp, inner));
    pthread_mutex_lock(&ddp->forward_lock);
    td_status status = before_forward(ddp, records);
    pthread_mutex_unlock(&ddp->forward_lock);
    TD_TRY(status);
    if (td_module_is_training(module))
        ddp->buffers_changed = true;
    td_tensor_list moved = *inputs;
    for (int i = 0; ddp->device && i < moved.count; i++)
        moved.at[i] = td_tensor_to(moved.at[i], ddp->device);
    TD_TRY(td_forward_list(inner, &moved, results));
    for (int i = 0; ddp->output && i < results->count; i++) {
        results->at[i] = td_tensor_to(results->at[i], ddp->output);
        if (!results->at[i])
            return td__error_status();
    }
    if (records && ddp->sync && ddp->used) {
        pthread_mutex_lock(&ddp->lock);
        status = ddp->expecting && ddp->context == td__current_context
                     ? td__ddp_mark_unused(ddp, results)
                     : td_fail(
                           TD_ERR_STATE,
                           "td_ddp: the context has ended, or another one has called the module");
        pthread_mutex_unlock(&ddp->lock);
    }
    return status;
}

/* ---- Making one ------------------------------------------------------------------------------------- */

static void free_ddp(struct td__ddp *ddp)
{
    if (!ddp)
        return;
    td__ddp_unlist(ddp);
    for (int i = 0; i < ddp->count; i++) {
        struct td__ddp_parameter *parameter = &ddp->parameters[i];
        if (parameter->stepper)
            td__in_backward_forget(parameter->stepper, parameter->step_index);
        if (parameter->hook)
            td_tensor_remove_hook(parameter->tensor, parameter->hook);
        td_tensor_release(parameter->tensor);
        td_tensor_release(parameter->before);
        free(parameter->name);
    }
    td__ddp_settle(ddp);
    if (ddp->buckets.gradients)
        td__buckets_free(&ddp->buckets);
    pthread_mutex_destroy(&ddp->lock);
    pthread_mutex_destroy(&ddp->forward_lock);
    free(ddp->parameters);
    td__ddp_slices_free(ddp);
    for (int i = 0; i < ddp->buffer_count; i++)
        td_tensor_release(ddp->buffers[i]);
    free(ddp->buffers);
    free(ddp->agreement);
    free(ddp->static_unused);
    free(ddp->join);
    free(ddp);
}

static void free_data(void *data)
{
    free_ddp(*(struct td__ddp **)data);
}

static td_status refuse_clone(void *data, const void *from)
{
    (void)data, (void)from;
    return td_fail(TD_ERR_UNSUPPORTED,
                   "td_module_clone: a DistributedDataParallel module cannot be cloned; clone the "
                   "module inside, td_module_find(ddp, \"module\")");
}

static td_status refuse_sending(const td_module *module, td_state *options)
{
    (void)module, (void)options;
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "a DistributedDataParallel module cannot be sent, since its process group is of this "
        "process; send the module inside, td_module_find(ddp, \"module\")");
}

static const td_module_ops ddp_ops = {
    .name = "DistributedDataParallel",
    .data_size = sizeof(struct td__ddp *),
    .forward_list = ddp_forward,
    .free_data = free_data,
    .clone_data = refuse_clone,
    .save_options = refuse_sending,
};

bool td__is_ddp(const td_module *module)
{
    return module && td_module_ops_of(module) == &ddp_ops;
}

struct td__ddp *td__ddp_of(const td_module *module, const char *call)
{
    if (td__is_ddp(module))
        return *(struct td__ddp **)td_module_data(module);
    td_fail(TD_ERR_INVALID, "%s: the module is %s", call,
            module ? "not one that td_ddp() made" : "NULL");
    return NULL;
}

static bool is_ignored(const td_ddp_options *options, const char *name)
{
    for (int i = 0; i < options->ignore_count; i++)
        if (!strcmp(options->ignore[i], name))
            return true;
    return false;
}

static td_status collect_parameters(struct td__ddp *ddp, const td_state *parameters)
{
    int count = td_state_count(parameters);
    ddp->parameters = calloc((size_t)count + 1, sizeof *ddp->parameters);
    if (!ddp->parameters)
        return td__fail_nomem("td_ddp");
    for (int i = 0; i < count; i++) {
        td_tensor *tensor = td_state_tensor(parameters, i);
        const char *name = td_state_name(parameters, i);
        if (!td_tensor_requires_grad(tensor) || is_ignored(&ddp->options, name))
            continue;
        struct td__ddp_parameter *parameter = &ddp->parameters[ddp->count];
        parameter->ddp = ddp;
        parameter->number = ddp->count++;
        parameter->tensor = td_tensor_retain(tensor);
        parameter->name = strdup(name);
        if (!parameter->name)
            return td__fail_nomem("td_ddp");
        TD_TRY(td__leaf_add_observer(tensor, on_accumulated, parameter, &parameter->hook));
    }
    return TD_OK;
}

static td_status collect_buffers(struct td__ddp *ddp, const td_state *buffers)
{
    int count = td_state_count(buffers);
    ddp->buffers = calloc((size_t)count + 1, sizeof *ddp->buffers);
    if (!ddp->buffers)
        return td__fail_nomem("td_ddp");
    for (int i = 0; i < count; i++)
        if (!is_ignored(&ddp->options, td_state_name(buffers, i)))
            ddp->buffers[ddp->buffer_count++] = td_tensor_retain(td_state_tensor(buffers, i));
    return TD_OK;
}

static td_status describe(const struct td__ddp *ddp, struct td__gradient **gradients,
                          const char ***names)
{
    *gradients = calloc((size_t)ddp->count + 1, sizeof **gradients);
    *names = calloc((size_t)ddp->count + 1, sizeof **names);
    if (!*gradients || !*names)
        return td__fail_nomem("td_ddp");
    for (int i = 0; i < ddp->count; i++) {
        const td_tensor *tensor = ddp->parameters[i].tensor;
        struct td__gradient *gradient = &(*gradients)[i];
        gradient->dtype = tensor->layout.dtype;
        gradient->ndim = tensor->layout.ndim;
        memcpy(gradient->shape, tensor->layout.shape, sizeof gradient->shape);
        gradient->numel = tensor->layout.numel;
        gradient->device = tensor->storage->device;
        (*names)[i] = ddp->parameters[i].name;
    }
    return TD_OK;
}

static td_status make_buckets(struct td__ddp *ddp)
{
    struct td__gradient *gradients;
    const char **names;
    td_status status = describe(ddp, &gradients, &names);
    if (!status)
        status = td__verify_gradients("td_ddp", gradients, names, ddp->count, ddp->group);
    if (!status)
        status = td__buckets_init(&ddp->buckets, gradients, ddp->count, NULL, 0, ddp->bucket_bytes);
    if (!status) {
        ddp->buckets.group = ddp->group;
        ddp->buckets.hook = ddp->options.hook;
    }
    free(gradients);
    free(names);
    return status;
}

td_status td__ddp_synchronise(struct td__ddp *ddp)
{
    td_tensor **tensors = calloc((size_t)ddp->count + 1, sizeof *tensors);
    if (!tensors)
        return td__fail_nomem("td_ddp");
    for (int i = 0; i < ddp->count; i++)
        tensors[i] = ddp->parameters[i].tensor;
    td_status status = td__ddp_broadcast(ddp, tensors, ddp->count);
    for (int i = 0; i < ddp->count && !status; i++)
        td__tensor_bump_version(tensors[i]);
    free(tensors);
    ddp->buffers_changed = true;
    return status ? status : broadcast_buffers(ddp);
}

static td_status set_devices(struct td__ddp *ddp)
{
    td_ddp_options *options = &ddp->options;
    if (options->device_count < 0 || options->device_count > 1 ||
        (options->device_count == 1) != (options->device_ids != NULL))
        return td_fail(TD_ERR_INVALID,
                       "td_ddp: device_count is %d, and device_ids %s; one device or none: a rank "
                       "trains on one, td_data_parallel() on several",
                       options->device_count, options->device_ids ? "is a list" : "is NULL");
    ddp->device = options->device_ids ? options->device_ids[0] : NULL;
    ddp->output = options->output_device;
    options->device_ids = NULL; /* the caller's */
    if (ddp->device && !td__use_device("td_ddp", ddp->device))
        return td__error_status();
    if (ddp->output && !td__use_device("td_ddp", ddp->output))
        return td__error_status();
    return TD_OK;
}

static td_status fill(struct td__ddp *ddp, td_module *module)
{
    if (td_get_world_size(ddp->group) < 1)
        return td_fail(TD_ERR_STATE,
                       "td_ddp: there is no process group, or this rank is not in it; call "
                       "td_init_process_group() first");
    TD_TRY(set_devices(ddp));
    td_state *parameters = td_module_parameters(module), *buffers = td_module_buffers(module);
    td_status status = parameters && buffers ? TD_OK : td__error_status();
    for (int i = 0; i < td_state_count(parameters) && !status; i++)
        if (td_tensor_is_meta(td_state_tensor(parameters, i)))
            status = td_fail(TD_ERR_STATE,
                             "td_ddp: the parameter \"%.200s\" has no memory yet; call "
                             "td_module_materialize() first, or td_fsdp()",
                             td_state_name(parameters, i));
    if (!status)
        status = collect_parameters(ddp, parameters);
    if (!status)
        status = collect_buffers(ddp, buffers);
    td_state_destroy(parameters);
    td_state_destroy(buffers);
    TD_TRY(status);
    ddp->agreement = calloc((size_t)ddp->count + 1, sizeof *ddp->agreement);
    ddp->static_unused = calloc((size_t)ddp->count + 1, sizeof *ddp->static_unused);
    if (!ddp->agreement || !ddp->static_unused)
        return td__fail_nomem("td_ddp");
    if (ddp->options.find_unused_parameters || ddp->options.static_graph)
        ddp->used = ddp->agreement + 1;
    TD_TRY(make_buckets(ddp));
    TD_TRY(td__ddp_slices_make(ddp));
    return td__ddp_synchronise(ddp);
}

td_module *td_ddp(td_module *module, const td_ddp_options *options)
{
    if (!module)
        return td__null(__func__);
    if (options && (td__check_reserved(__func__, options->reserved) ||
                    td__check_reserved(__func__, options->hook.reserved))) {
        td_module_destroy(module);
        return NULL;
    }
    struct td__ddp *ddp = calloc(1, sizeof *ddp);
    td_module *wrapped = ddp ? td_module_create(&ddp_ops) : NULL;
    if (!wrapped) {
        free(ddp);
        td_module_destroy(module);
        td__fail_nomem("td_ddp");
        return NULL;
    }
    ddp->wrapper = wrapped;
    ddp->options = options ? *options : (td_ddp_options){0};
    ddp->group = ddp->options.group;
    ddp->bucket_bytes = (size_t)(ddp->options.bucket_cap_mb * (1 << 20));
    ddp->sync = true;
    pthread_mutex_init(&ddp->lock, NULL);
    pthread_mutex_init(&ddp->forward_lock, NULL);
    td__ddp_list(ddp);
    *(struct td__ddp **)td_module_data(wrapped) = ddp;
    td_status status = fill(ddp, module);
    ddp->options.ignore = NULL; /* the caller's */
    if (status) {
        td_module_destroy(module);
        td_module_destroy(wrapped);
        return NULL;
    }
    td_module_add_child(wrapped, "module", module);
    return td_module_finish(wrapped);
}

/* ---- Settings ------------------------------------------------------------------------------------------ */

bool td_ddp_set_sync(td_module *module, bool sync)
{
    if (td_is_fsdp(module))
        return td_fsdp_set_sync(module, sync);
    struct td__ddp *ddp = td__ddp_of(module, "td_ddp_set_sync");
    if (!ddp)
        return false;
    bool before = ddp->sync;
    ddp->sync = sync;
    return before;
}

td_no_sync td_no_sync_begin(td_module *ddp)
{
    return (td_no_sync){.ddp = ddp, .before = td_ddp_set_sync(ddp, false), .open = true};
}

void td_no_sync_end(td_no_sync *no_sync)
{
    if (no_sync->open)
        td_ddp_set_sync(no_sync->ddp, no_sync->before);
    no_sync->open = false;
}

td_status td_ddp_set_hook(td_module *module, td_comm_hook hook)
{
    struct td__ddp *ddp = td__ddp_of(module, "td_ddp_set_hook");
    if (!ddp)
        return TD_ERR_INVALID;
    TD_TRY(td__check_reserved(__func__, hook.reserved));
    if (ddp->slices)
        return td_fail(TD_ERR_INVALID,
                       "td_ddp_set_hook: slices are summed without a communication hook");
    if (ddp->buckets.stats.passes || ddp->expecting)
        return td_fail(TD_ERR_STATE, "td_ddp_set_hook: the first pass has begun already");
    ddp->options.hook = ddp->buckets.hook = hook;
    return TD_OK;
}

td_status td_ddp_get_stats(td_module *module, td_ddp_stats *stats)
{
    struct td__ddp *ddp = td__ddp_of(module, "td_ddp_get_stats");
    if (!ddp)
        return TD_ERR_INVALID;
    *stats = ddp->buckets.stats;
    return TD_OK;
}
