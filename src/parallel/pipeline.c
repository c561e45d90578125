/* The public calls of pipelines; pipeline_internal.h has the parts. */
#include "parallel/pipeline_internal.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <tandem/dist.h>

#include <stdio.h>
#include <stdlib.h>

/* ---- Creating ----------------------------------------------------------------------------------- */

static td_status refuse_sending(const td_module *module, td_state *options)
{
    (void)module, (void)options;
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "the module of a pipeline cannot be sent, since its stages are on several ranks; send a "
        "stage, a child of it");
}

static const td_module_ops pipeline_ops = {.name = "Pipeline", .save_options = refuse_sending};

/* The parent of the stages' modules, which it owns in any case. */
static td_status adopt_modules(td_pipeline *pipeline, td_module *const *modules, int count)
{
    td_status status = TD_OK;
    pipeline->module = td_module_create(&pipeline_ops);
    for (int i = 0; i < count; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i * pipeline->plan.ranks + pipeline->rank);
        if (!modules[i])
            status = td__fail_null("td_pipeline_create");
        else if (!pipeline->module)
            td_module_destroy(modules[i]);
        else if (td_module_add_child(pipeline->module, name, modules[i]))
            status = td__error_status();
    }
    return pipeline->module ? status : td__error_status();
}

static td_status make_stages(td_pipeline *pipeline)
{
    int chunks = pipeline->plan.chunks;
    pipeline->stages = calloc((size_t)chunks, sizeof *pipeline->stages);
    if (!pipeline->stages)
        return td__fail_nomem("td_pipeline_create");
    for (int c = 0; c < chunks; c++) {
        struct td__stage *stage = &pipeline->stages[c];
        stage->number = c * pipeline->plan.ranks + pipeline->rank;
        stage->module = td_child(pipeline->module, c);
        stage->ddp = td__is_ddp(stage->module) ? td__ddp_of(stage->module, __func__) : NULL;
        stage->slots = calloc((size_t)pipeline->plan.micro_batches, sizeof *stage->slots);
        if (!stage->slots)
            return td__fail_nomem("td_pipeline_create");
    }
    pipeline->times = calloc((size_t)td__pass_count(&pipeline->plan), sizeof *pipeline->times);
    if (!pipeline->times)
        return td__fail_nomem("td_pipeline_create");
    struct td__pipeline_plan forward = pipeline->plan;
    forward.forward_only = true;
    if (!td__actions_build(&pipeline->plan, pipeline->rank, &pipeline->training) ||
        !td__actions_build(&forward, pipeline->rank, &pipeline->forward_only))
        return td__fail_nomem("td_pipeline_create");
    return TD_OK;
}

/* What a rank can check by itself. */
static td_status set_up(td_pipeline *pipeline, td_module *const *modules, int count,
                        const td_pipeline_options *options)
{
    TD_TRY(adopt_modules(pipeline, modules, count));
    TD_TRY(td__check_reserved("td_pipeline_create", options->reserved));
    pipeline->plan.kind = options->schedule;
    pipeline->plan.chunks = count;
    pipeline->plan.micro_batches = options->micro_batches ? options->micro_batches
                                                          : pipeline->plan.ranks;
    pipeline->plan.ahead = options->ahead;
    TD_TRY(td__pipeline_plan_check("td_pipeline_create", &pipeline->plan));
    pipeline->loss = options->loss;
    pipeline->loss_arg = options->loss_arg;
    pipeline->sum_loss = options->sum_loss;
    pipeline->stats.theory = td__pipeline_theory(&pipeline->plan);
    return make_stages(pipeline);
}

/* The rank and size in the group; one rank where there is no world. */
static td_status find_place(td_pipeline *pipeline, td_group *group)
{
    pipeline->rank = 0;
    pipeline->plan.ranks = 1;
    if (!group && !td_is_initialized())
        return TD_OK;
    pipeline->rank = td_get_rank(group);
    pipeline->plan.ranks = td_get_world_size(group);
    if (pipeline->rank < 0)
        return td_fail(TD_ERR_STATE, "td_pipeline_create: this rank is not in the group");
    return pipeline->plan.ranks > 1 ? td__pipeline_make_groups(pipeline, group) : TD_OK;
}

td_pipeline *td_pipeline_create(td_module *const *stages, int count,
                                const td_pipeline_options *options)
{
    td_pipeline_options none = {0};
    options = options ? options : &none;
    count = stages && count > 0 ? count : 0;
    td_pipeline *pipeline = calloc(1, sizeof *pipeline);
    td_status status = pipeline ? find_place(pipeline, options->group)
                                : td__fail_nomem("td_pipeline_create");
    if (status) {
        for (int i = 0; i < count; i++)
            td_module_destroy(stages[i]);
        td_pipeline_destroy(pipeline);
        return NULL;
    }
    status = td__pipeline_compare(pipeline, set_up(pipeline, stages, count, options));
    if (!status)
        return pipeline;
    td_pipeline_destroy(pipeline);
    return NULL;
}

td_module *td_pipeline_module(td_pipeline *pipeline)
{
    return pipeline ? pipeline->module : td__null(__func__);
}

void td_pipeline_destroy(td_pipeline *pipeline)
{
    if (!pipeline)
        return;
    for (int c = 0; pipeline->stages && c < pipeline->plan.chunks; c++)
        free(pipeline->stages[c].slots);
    free(pipeline->stages);
    td__actions_free(&pipeline->training);
    td__actions_free(&pipeline->forward_only);
    free(pipeline->sendings);
    free(pipeline->records);
    free(pipeline->times);
    struct td__error error;
    td__error_save(&error);
    td_group_destroy(pipeline->messages);
    td_group_destroy(pipeline->control);
    td__error_undo(&error);
    td_module_destroy(pipeline->module);
    free(pipeline);
}

/* ---- A step ------------------------------------------------------------------------------------- */

static bool is_last_rank(const td_pipeline *pipeline)
{
    return pipeline->rank == pipeline->plan.ranks - 1;
}

/* What can be checked before the ranks talk to each other. */
static td_status check_arguments(td_pipeline *pipeline)
{
    struct td__pipeline_step *step = &pipeline->step;
    if (pipeline->control && !pipeline->messages)
        return td_fail(TD_ERR_STATE, "the pipeline has failed before and could not be repaired");
    for (int which = 0; which < 2; which++) {
        const td_tensor_list *list = which ? step->targets : step->inputs;
        bool needed = which ? step->training && is_last_rank(pipeline) : pipeline->rank == 0;
        if (!needed)
            continue;
        if (!list || list->count < 1 || list->count > TD_TENSOR_LIST_MAX)
            return td_fail(TD_ERR_INVALID, "the %s rank needs %s", which ? "last" : "first",
                           which ? "a target" : "an input");
        TD_TRY(td__check_reserved(step->call, list->reserved));
        for (int i = 0; i < list->count; i++)
            if (!list->at[i])
                return td_fail(TD_ERR_INVALID, "%s %d is NULL", which ? "target" : "input", i);
    }
    if (step->training && is_last_rank(pipeline) && !pipeline->loss)
        return td_fail(TD_ERR_INVALID,
                       "the last rank has no loss function (td_pipeline_options.loss)");
    if (pipeline->rank > 0)
        return TD_OK;
    step->samples = td_tensor_size(step->inputs->at[0], 0);
    if (step->samples < pipeline->plan.micro_batches)
        return td_fail(TD_ERR_INVALID,
                       "the input has %lld samples for %d micro-batches; each needs at least one",
                       (long long)(step->samples < 0 ? 0 : step->samples),
                       pipeline->plan.micro_batches);
    return TD_OK;
}

static td_status check_targets(const td_pipeline *pipeline)
{
    const struct td__pipeline_step *step = &pipeline->step;
    if (!step->training || !is_last_rank(pipeline) ||
        td_tensor_size(step->targets->at[0], 0) == step->samples)
        return TD_OK;
    int64_t targets = td_tensor_size(step->targets->at[0], 0);
    return td_fail(TD_ERR_INVALID, "the input has %lld samples on the first rank, the target %lld",
                   (long long)step->samples, (long long)(targets < 0 ? 0 : targets));
}

/* The results of all micro-batches on the last rank. They belong to the scope around this call. */
static td_status collect(td_pipeline *pipeline, td_tensor_list *results)
{
    const struct td__slot *slots = pipeline->stages[pipeline->plan.chunks - 1].slots;
    int count = pipeline->plan.micro_batches;
    td_tensor **parts = calloc((size_t)count, sizeof(td_tensor *));
    td_status status = parts ? TD_OK : td__fail_nomem(pipeline->step.call);
    for (int k = 0; !status && k < slots[0].outputs.count; k++) {
        for (int i = 0; i < count; i++)
            parts[i] = k < slots[i].outputs.count ? slots[i].outputs.at[k] : NULL;
        td_tensor *whole = td_cat(parts, count, 0);
        status = whole ? TD_OK : td__error_status();
        results->names[k] = slots[0].outputs.names[k];
        results->at[results->count] = whole;
        results->count += !status;
    }
    free(parts);
    return status;
}

/* A call of all ranks; `results` is NULL in training. */
static td_status run_step(td_pipeline *pipeline, struct td__pipeline_step step,
                          td_tensor_list *results)
{
    if (!pipeline)
        return td__fail_null(step.call);
    TD_SCOPE;
    pipeline->step = step;
    pipeline->traced = pipeline->traced && !step.training;
    td_status status = td__pipeline_begin(pipeline, check_arguments(pipeline));
    if (!status)
        status = check_targets(pipeline);
    if (!status)
        status = td__pipeline_run(pipeline);
    if (!status && results && is_last_rank(pipeline)) {
        bool before = td_set_grad_enabled(false);
        status = collect(pipeline, results);
        td_set_grad_enabled(before);
    }
    status = td__pipeline_end(pipeline, status);
    td__pipeline_clear(pipeline);
    for (int i = 0; !status && results && i < results->count; i++)
        status = td_scope_return(results->at[i]) ? TD_OK : td__error_status();
    if (status && results)
        *results = (td_tensor_list){0};
    return status;
}

td_status td_pipeline_step_list(td_pipeline *pipeline, const td_tensor_list *inputs,
                                const td_tensor_list *targets, double *loss)
{
    struct td__pipeline_step step = {
        .call = "td_pipeline_step", .training = true, .inputs = inputs, .targets = targets};
    TD_TRY(run_step(pipeline, step, NULL));
    if (loss)
        *loss = pipeline->step.loss;
    return TD_OK;
}

td_status td_pipeline_step(td_pipeline *pipeline, td_tensor *input, td_tensor *target, double *loss)
{
    td_tensor_list inputs = {.count = input ? 1 : 0, .at = {input}};
    td_tensor_list targets = {.count = target ? 1 : 0, .at = {target}};
    return td_pipeline_step_list(pipeline, &inputs, &targets, loss);
}

td_status td_pipeline_forward_list(td_pipeline *pipeline, const td_tensor_list *inputs,
                                   td_tensor_list *results)
{
    td_tensor_list given = inputs ? *inputs : (td_tensor_list){0};
    struct td__pipeline_step step = {.call = "td_pipeline_forward", .inputs = &given};
    if (!results) {
        td_tensor_list unused;
        TD_SCOPE;
        return td_pipeline_forward_list(pipeline, inputs, &unused);
    }
    *results = (td_tensor_list){0};
    return run_step(pipeline, step, results);
}

td_status td_pipeline_forward(td_pipeline *pipeline, td_tensor *input, td_tensor **output)
{
    td_tensor_list inputs = {.count = input ? 1 : 0, .at = {input}}, results;
    TD_SCOPE; /* releases further results */
    TD_TRY(td_pipeline_forward_list(pipeline, &inputs, &results));
    if (output)
        *output = results.count ? td_scope_return(results.at[0]) : NULL;
    return TD_OK;
}

td_status td_pipeline_get_stats(const td_pipeline *pipeline, td_pipeline_stats *stats)
{
    if (!pipeline || !stats)
        return td__fail_null(__func__);
    *stats = pipeline->stats;
    return TD_OK;
}
