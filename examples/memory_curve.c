/* Measures the memory of a step. Parameters, optimizer state and the gradients that an optimizer steps are there all the
 * time; what comes and goes is the rest: whole parameters and gradients of units of td_fsdp(), which counts them, and
 * activations, which are what else was allocated since the beginning. memory_drawing.c draws it. */
#include "memory_curve.h"
#include "memory_drawing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct hooked {
    td_module *module;
    uint64_t hooks;
};

struct memory_curve {
    td_module *model;
    td_device *device;
    double begin;
    int64_t allocated, whole; /* at the beginning */
    struct memory_sample *samples;
    int64_t count, capacity;
    struct memory_levels levels;
    struct hooked *hooked;
    int hooked_count;
    int part;
    td_status status;
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void read_memory(const struct memory_curve *curve, td_memory_stats *memory, int64_t *whole)
{
    td_fsdp_stats stats = {0};
    td_device_memory_stats(curve->device, memory);
    if (td_is_fsdp(curve->model))
        td_fsdp_get_stats(curve->model, &stats);
    *whole = (int64_t)stats.whole_bytes;
}

static void sample(struct memory_curve *curve)
{
    td_memory_stats memory;
    int64_t whole;
    read_memory(curve, &memory, &whole);
    if (curve->count == curve->capacity) {
        int64_t capacity = 2 * curve->capacity + 256;
        struct memory_sample *samples = realloc(curve->samples, (size_t)capacity * sizeof *samples);
        if (!samples)
            return;
        curve->samples = samples;
        curve->capacity = capacity;
    }
    int64_t rest = memory.allocated - curve->allocated - (whole - curve->whole);
    curve->samples[curve->count++] = (struct memory_sample){
        .ms = (float)(1e3 * (now() - curve->begin)),
        .whole = (float)whole,
        .activations = rest > 0 ? (float)rest : 0,
        .part = (float)curve->part,
    };
}

/* ---- Hooks ---------------------------------------------------------------------------------------------- */

static td_status forward_pre(td_module *module, td_tensor_list *inputs, void *curve)
{
    (void)module, (void)inputs;
    sample(curve);
    return TD_OK;
}

static td_status forward(td_module *module, const td_tensor_list *inputs, td_tensor_list *results,
                         void *curve)
{
    (void)module, (void)inputs, (void)results;
    sample(curve);
    return TD_OK;
}

static td_status backward_pre(td_module *module, td_tensor_list *grads, void *curve)
{
    (void)module, (void)grads;
    sample(curve);
    return TD_OK;
}

static td_status backward(td_module *module, td_tensor_list *grad_inputs,
                          const td_tensor_list *grad_results, void *curve)
{
    (void)module, (void)grad_inputs, (void)grad_results;
    sample(curve);
    return TD_OK;
}

static td_status count_module(td_module *module, void *arg)
{
    (void)module;
    ++*(int *)arg;
    return TD_OK;
}

static td_status add_hooks(td_module *module, void *arg)
{
    struct memory_curve *curve = arg;
    struct hooked *hooked = &curve->hooked[curve->hooked_count];
    hooked->module = module;
    td_status status = td_module_add_hooks(module,
                                           &(td_module_hooks){.forward_pre = forward_pre,
                                                              .forward = forward,
                                                              .backward_pre = backward_pre,
                                                              .backward = backward,
                                                              .arg = curve},
                                           &hooked->hooks);
    curve->hooked_count += !status;
    return status;
}

/* ---- Begin and end ----------------------------------------------------------------------------------------- */

static double bytes_of(td_state *state)
{
    double bytes = 0;
    for (int i = 0; i < td_state_count(state); i++)
        bytes += (double)td_tensor_nbytes(td_state_tensor(state, i));
    td_state_destroy(state);
    return bytes;
}

static double bytes_of_gradients(td_module *model)
{
    double bytes = 0;
    td_state *parameters = td_module_parameters(model);
    for (int i = 0; i < td_state_count(parameters); i++)
        if (td_tensor_requires_grad(td_state_tensor(parameters, i)))
            bytes += (double)td_tensor_nbytes(td_state_tensor(parameters, i));
    td_state_destroy(parameters);
    return bytes;
}

static void release(struct memory_curve *curve)
{
    for (int i = 0; i < curve->hooked_count; i++)
        td_module_remove_hooks(curve->hooked[i].module, curve->hooked[i].hooks);
    free(curve->hooked);
    free(curve->samples);
    free(curve);
}

struct memory_curve *memory_curve_begin(td_module *model, td_optimizer *optimizer,
                                        td_device *device)
{
    struct memory_curve *curve = calloc(1, sizeof *curve);
    int modules = 0;
    if (!curve)
        return NULL;
    curve->model = model;
    curve->device = device;
    curve->levels.parameters = bytes_of(td_module_parameters(model));
    curve->levels.state = bytes_of(td_optimizer_state(optimizer));
    curve->levels.gradients = bytes_of_gradients(model);
    td_module_apply(model, count_module, &modules);
    curve->hooked = calloc((size_t)modules + 1, sizeof *curve->hooked);
    if (!curve->hooked || td_module_apply(model, add_hooks, curve) ||
        (td_is_initialized() && td_barrier(NULL, NULL))) {
        release(curve);
        return NULL;
    }
    td_memory_stats memory;
    td_device_reset_peak(device);
    read_memory(curve, &memory, &curve->whole);
    curve->allocated = memory.allocated;
    curve->begin = now();
    sample(curve);
    return curve;
}

void memory_curve_mark(struct memory_curve *curve, enum memory_part part)
{
    if (!curve)
        return;
    curve->part = (int)part;
    sample(curve);
}

/* The samples of all ranks, one rank after another, on each of them. */
static td_status gather(const struct memory_curve *curve, struct memory_run *run)
{
    bool several = td_is_initialized();
    run->ranks = several ? td_get_world_size(NULL) : 1;
    int64_t count = curve->count;
    if (several) {
        td_status status = td_group_all_reduce(&count, &count, 1, TD_I64, TD_MAX, NULL, NULL);
        if (status)
            return status;
    }
    run->count = count;
    enum { NUMBERS = sizeof(struct memory_sample) / sizeof(float) };
    struct memory_sample *mine = calloc((size_t)count + 1, sizeof *mine);
    run->samples = calloc((size_t)(count * run->ranks) + 1, sizeof *run->samples);
    run->levels = calloc((size_t)run->ranks, sizeof *run->levels);
    td_status status = mine && run->samples && run->levels ? TD_OK : TD_ERR_NOMEM;
    if (!status) {
        memcpy(mine, curve->samples, (size_t)curve->count * sizeof *mine);
        for (int64_t i = curve->count; i < count; i++) /* a rank with fewer stays where it is */
            mine[i] = curve->samples[curve->count - 1];
        memcpy(run->samples, mine, several ? 0 : (size_t)count * sizeof *mine);
        *run->levels = curve->levels;
        if (several)
            status = td_group_all_gather(run->samples, mine, (size_t)count * NUMBERS, TD_F32, NULL,
                                         NULL);
        if (several && !status)
            status = td_group_all_gather(run->levels, &curve->levels,
                                         sizeof curve->levels / sizeof(double), TD_F64, NULL, NULL);
    }
    free(mine);
    return status;
}

td_status memory_curve_end(struct memory_curve *curve, const char *directory, const char *name)
{
    sample(curve);
    td_memory_stats memory;
    int64_t whole;
    read_memory(curve, &memory, &whole);
    curve->levels.peak = curve->levels.parameters + curve->levels.state + curve->levels.gradients +
                         (double)(memory.allocated_peak - curve->allocated + curve->whole);
    struct memory_run run = {0};
    td_status status = curve->count ? gather(curve, &run) : TD_ERR_NOMEM;
    snprintf(run.name, sizeof run.name, "%s", name);
    if (!status && (!td_is_initialized() || td_get_rank(NULL) == 0))
        status = memory_drawing_write(directory, &run);
    memory_run_free(&run);
    release(curve);
    return status;
}
