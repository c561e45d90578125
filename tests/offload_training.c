#include "offload_training.h"

#include "runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 24, WIDE = 96, OUT = 5, BATCH = 6 };

/* ---- A network ------------------------------------------------------------------------------------------------ */

/* A block that is called twice in a pass. */
static td_tensor *twice_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_f_tanh(td_forward(td_child(module, 0), inputs[0]));
    return td_f_tanh(td_forward(td_child(module, 0), x));
}

static const td_module_ops twice_ops = {.name = "Twice", .forward = twice_forward};

static td_module *twice(void)
{
    td_module *module = td_module_create(&twice_ops);
    td_module_add_child(module, "inner", td_linear(WIDE, WIDE));
    return td_module_finish(module);
}

td_module *offload_net(td_device *device)
{
    td_manual_seed(17);
    TD_DEVICE_SCOPE(td_device_get("cpu"));
    td_module *net = td_sequential(
        td_linear(IN, WIDE), td_tanh(), twice(),
        td_sequential(td_linear(WIDE, WIDE), td_tanh(), td_linear(WIDE, WIDE), NULL),
        td_linear(WIDE, OUT), NULL);
    CHECK_OK(td_module_to(net, device));
    return net;
}

static td_tensor *make_input(td_device *device, int step, int part)
{
    td_tensor *x = td_empty(TD_SHAPE(BATCH, IN), TD_F32, td_device_get("cpu"));
    float *values = td_tensor_data(x);
    unsigned state = (unsigned)(step * 1009 + td_get_rank(NULL) * 31 + part * 7 + 5);
    for (int i = 0; i < BATCH * IN; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
    }
    return td_tensor_to(x, device);
}

td_optimizer *offload_optimizer(td_module *model, const struct offload_job *job)
{
    const td_adam_options options = {.lr = 0.01};
    if (!job->groups)
        return td_adam(model, &options);
    td_state *state = td_module_parameters(model);
    int count = td_state_count(state), half = count / 2;
    td_tensor **list = calloc((size_t)count, sizeof *list);
    for (int i = 0; i < count; i++)
        list[i] = td_state_tensor(state, i);
    td_optimizer *adam = td_adam_of(list, half, &options);
    CHECK(adam != NULL);
    CHECK_OK(td_optimizer_add_group(adam, list + half, count - half,
                                    &(td_parameter_group){.lr = 0.003, .weight_decay = 0.1}));
    free(list);
    td_state_destroy(state);
    return adam;
}

/* ---- Training ---------------------------------------------------------------------------------------------------- */

static td_status pass(td_module *model, td_grad_scaler *scaler, td_tensor *x, float *loss)
{
    td_tensor *y = td_to_dtype(td_forward(model, x), TD_F32);
    td_tensor *mean = td_mean(td_mul(y, y));
    if (!mean)
        return td_last_status();
    td_status status = td_backward(scaler ? td_grad_scaler_scale(scaler, mean) : mean);
    if (!status)
        *loss = (float)td_item(mean);
    return status;
}

td_status offload_step(td_module *model, td_optimizer *optimizer, td_grad_scaler *scaler,
                       const struct offload_job *job, int step, float *loss, double *norm)
{
    td_status status = job->in_backward ? TD_OK : td_optimizer_zero_grad(optimizer);
    for (int part = 0; part < job->parts && !status; part++) {
        TD_SCOPE;
        bool silent = job->no_sync && part + 1 < job->parts;
        td_no_sync scope = {0};
        if (silent)
            scope = td_no_sync_begin(model);
        status = pass(model, scaler, make_input(job->device, step, part), loss);
        if (silent)
            td_no_sync_end(&scope);
    }
    if (!status && scaler && job->clip > 0)
        status = td_grad_scaler_unscale(scaler, optimizer);
    if (!status && job->clip > 0)
        status = td_clip_grad_norm_(model, job->clip, NULL, norm);
    if (status || job->in_backward)
        return status;
    if (!scaler)
        return td_optimizer_step(optimizer);
    status = td_grad_scaler_step(scaler, optimizer, NULL);
    return status ? status : td_grad_scaler_update(scaler, 0);
}

/* ---- Results ------------------------------------------------------------------------------------------------------ */

static void add_state(const td_state *state, char **bits, size_t *bytes)
{
    for (int i = 0; i < td_state_count(state); i++) {
        TD_SCOPE;
        td_tensor *tensor = td_state_tensor(state, i);
        td_tensor *here = td_contiguous(td_tensor_to(td_detach(tensor), td_device_get("cpu")));
        CHECK(here != NULL);
        size_t size = td_tensor_nbytes(here);
        *bits = realloc(*bits, *bytes + size + 1);
        if (size)
            memcpy(*bits + *bytes, td_tensor_data(here), size);
        *bytes += size;
    }
}

void *offload_bits(td_module *model, td_optimizer *optimizer, size_t *bytes)
{
    char *bits = NULL;
    *bytes = 0;
    td_state *state = td_module_parameters(model);
    add_state(state, &bits, bytes);
    td_state_destroy(state);
    state = td_optimizer_state(optimizer);
    CHECK(state != NULL);
    add_state(state, &bits, bytes);
    td_state_destroy(state);
    return bits;
}

struct offload_result offload_train(const struct offload_job *job, const td_fsdp_options *options)
{
    struct offload_result result = {0};
    td_module *model = td_fsdp(offload_net(job->device), options);
    if (!model)
        FAIL("%s", td_last_error());
    td_optimizer *adam = offload_optimizer(model, job);
    if (job->in_backward)
        CHECK_OK(td_optimizer_in_backward(model, adam));
    td_grad_scaler *scaler = job->scales ? td_grad_scaler_create(NULL) : NULL;
    for (int step = 0; step < OFFLOAD_STEPS; step++)
        CHECK_OK(offload_step(model, adam, scaler, job, step, &result.losses[step], &result.norm));
    result.bits = offload_bits(model, adam, &result.bytes);
    CHECK_OK(td_fsdp_get_stats(model, &result.stats));
    td_grad_scaler_destroy(scaler);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    return result;
}
