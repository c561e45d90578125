/* Gradient scaling, with the arithmetic of PyTorch's GradScaler: the scale is an f32 number, and gradients are multiplied
 * by its reciprocal, rounded to f32.
 *
 * An optimizer goes through three stages in an iteration, ready, unscaled, stepped; the scaler has an entry for each
 * optimizer that has left the first one, until td_grad_scaler_update(). Whether a gradient is infinite is known on the
 * device at first: the host waits for it only when a step depends on it. Where parameters are shards, the ranks that have
 * them agree then: all of them skip a step, or none. */
#include "optim/optimizer.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <tandem/amp.h>
#include <tandem/ops.h>

#include <math.h>
#include <stdlib.h>

struct iteration {
    const td_optimizer *optimizer; /* compared only */
    td_tensor *
        found; /* one f32 on the device, not 0 if a gradient is not finite; NULL: was read, or has no gradients */
    bool found_inf;
    bool stepped;
    bool agreed; /* the ranks that have the shards have the same found_inf */
    const struct td__sharding **shardings; /* of the parameters, each once */
    int sharding_count;
};

struct td_grad_scaler {
    bool enabled;
    float scale;
    double growth_factor, backoff_factor;
    int64_t growth_interval;
    int64_t growth_tracker; /* iterations in a row without infinite gradients */
    struct iteration *iterations;
    int count, capacity;
};

/* ---- Life ------------------------------------------------------------------------------------------ */

/* Fails if a number is out of range; `what` is the call, or what the numbers are from. */
static td_status check_numbers(const char *what, const td_grad_scaler *scaler)
{
    if (!(scaler->scale > 0) || isinf(scaler->scale))
        return td_fail(TD_ERR_INVALID, "%s: the scale is %g; it must be above 0, and finite in f32",
                       what, (double)scaler->scale);
    if (!(scaler->growth_factor > 1) || isinf(scaler->growth_factor))
        return td_fail(TD_ERR_INVALID, "%s: growth_factor is %g; it must be finite, and above 1",
                       what, scaler->growth_factor);
    if (!(scaler->backoff_factor > 0 && scaler->backoff_factor < 1))
        return td_fail(TD_ERR_INVALID, "%s: backoff_factor is %g; it must be above 0, and below 1",
                       what, scaler->backoff_factor);
    if (scaler->growth_interval < 1 || scaler->growth_tracker < 0)
        return td_fail(TD_ERR_INVALID,
                       "%s: growth_interval is %lld, and growth_tracker %lld; they must be at "
                       "least 1 and 0",
                       what, (long long)scaler->growth_interval, (long long)scaler->growth_tracker);
    return TD_OK;
}

td_grad_scaler *td_grad_scaler_create(const td_grad_scaler_options *options)
{
    static const td_grad_scaler_options defaults;
    options = options ? options : &defaults;
    if (td__check_reserved(__func__, options->reserved))
        return NULL;
    td_grad_scaler made = {
        .enabled = !options->disabled,
        .scale = (float)td__option(options->init_scale, 65536),
        .growth_factor = td__option(options->growth_factor, 2),
        .backoff_factor = td__option(options->backoff_factor, 0.5),
        .growth_interval = options->growth_interval ? options->growth_interval : 2000,
    };
    if (made.enabled && check_numbers(__func__, &made))
        return NULL;
    td_grad_scaler *scaler = malloc(sizeof *scaler);
    if (!scaler) {
        td__fail_nomem(__func__);
        return NULL;
    }
    *scaler = made;
    return scaler;
}

/* Ends an iteration. */
static void forget(td_grad_scaler *scaler)
{
    while (scaler->count > 0) {
        struct iteration *iteration = &scaler->iterations[--scaler->count];
        td_tensor_release(iteration->found);
        free(iteration->shardings);
    }
}

void td_grad_scaler_destroy(td_grad_scaler *scaler)
{
    if (!scaler)
        return;
    forget(scaler);
    free(scaler->iterations);
    free(scaler);
}

double td_grad_scaler_get_scale(const td_grad_scaler *scaler)
{
    if (!scaler)
        return NAN;
    return scaler->enabled ? (double)scaler->scale : 1;
}

/* ---- The loss --------------------------------------------------------------------------------------- */

td_tensor *td_grad_scaler_scale(td_grad_scaler *scaler, td_tensor *loss)
{
    td_tensor *scaled = NULL;
    if (!scaler || !loss)
        return td__null(__func__);
    if (!scaler->enabled)
        return td__adopt(td_tensor_retain(loss));
    td_dtype dtype = loss->layout.dtype;
    {
        TD_SCOPE;
        if (dtype == TD_F16 ||
            dtype == TD_BF16) /* where the scale, or the product, may be infinite */
            loss = td_to_dtype(loss, TD_F32);
        scaled = td_scope_return(td_mul_scalar(loss, (double)scaler->scale));
    }
    return scaled;
}

/* ---- Gradients -------------------------------------------------------------------------------------- */

/* Unscales the gradients of one device. Not before all memory is there: group->number says what was found. */
static td_status unscale_device(struct td__device_grads *group, float inverse)
{
    for (int i = 0; i < group->count; i++)
        TD_TRY(td__prepare_write(group->list[i]));
    TD_TRY(td__kernels_of(group->number)
               ->unscale(group->list, group->count, (double)inverse, group->number));
    for (int i = 0; i < group->count; i++)
        td__tensor_bump_version(group->list[i]);
    return TD_OK;
}

/* *found gets what all devices have found, on the first one. */
static td_status unscale_all(const char *call, struct td__grads *grads, float inverse,
                             td_tensor **found)
{
    for (int i = 0; i < grads->device_count; i++) {
        struct td__device_grads *group = &grads->devices[i];
        group->number = td__empty(call, NULL, 0, TD_F32, group->device);
        if (!group->number)
            return td__error_status();
        TD_TRY(td__kernels_of(group->number)->fill(group->number, 0));
    }
    for (int i = 0; i < grads->device_count; i++)
        TD_TRY(unscale_device(&grads->devices[i], inverse));
    for (int i = 1; i < grads->device_count; i++) {
        td_tensor *first = grads->devices[0].number;
        td_tensor *other = td__number_to(call, first->storage->device, grads->devices[i].number);
        if (!other)
            return td__error_status();
        td_status status = td__kernels_of(first)->binary(TD_BINARY_MAXIMUM, first, first, other);
        td_tensor_release(other);
        TD_TRY(status);
    }
    *found = grads->device_count ? td_tensor_retain(grads->devices[0].number) : NULL;
    return TD_OK;
}

static td_status unscale_grads(const char *call, const td_optimizer *optimizer, float inverse,
                               td_tensor **found)
{
    td_tensor **list = malloc(((size_t)optimizer->count + 1) * sizeof *list);
    if (!list)
        return td__fail_nomem(call);
    for (int i = 0; i < optimizer->count; i++)
        list[i] = td__optimizer_source(optimizer, i);
    struct td__grads grads = {0};
    td_status status = td__find_grads(call, list, optimizer->count, &grads);
    if (!status)
        status = unscale_all(call, &grads, inverse, found);
    td__free_grads(&grads);
    free(list);
    return status;
}

/* Which ranks have other shards of the parameters. */
static td_status find_shardings(const char *call, const td_optimizer *optimizer,
                                struct iteration *iteration)
{
    iteration->shardings = calloc((size_t)optimizer->count + 1, sizeof(void *));
    if (!iteration->shardings)
        return td__fail_nomem(call);
    for (int i = 0; i < optimizer->count; i++) {
        const td_tensor *parameter = td__optimizer_source(optimizer, i);
        const struct td__sharding *sharding = parameter->shard ? parameter->shard->sharding : NULL;
        bool is_new = sharding != NULL;
        for (int s = 0; s < iteration->sharding_count; s++)
            is_new &= iteration->shardings[s] != sharding;
        if (is_new)
            iteration->shardings[iteration->sharding_count++] = sharding;
    }
    return TD_OK;
}

static td_status agree(const char *call, struct iteration *iteration)
{
    for (int s = 0; s < iteration->sharding_count && !iteration->agreed; s++) {
        const struct td__sharding *sharding = iteration->shardings[s];
        uint8_t mine = iteration->found_inf, *all = malloc((size_t)sharding->size);
        if (!all)
            return td__fail_nomem(call);
        td_status status = sharding->all_gather(sharding, &mine, 1, all);
        for (int rank = 0; rank < sharding->size && !status; rank++)
            iteration->found_inf |= all[rank];
        free(all);
        TD_TRY(status);
    }
    iteration->agreed = true;
    return TD_OK;
}

/* Waits for an accelerator, once in an iteration. */
static td_status read_found(const char *call, struct iteration *iteration)
{
    if (!iteration->found)
        return agree(call, iteration);
    td_tensor *copy = td__to_host(call, iteration->found);
    if (!copy)
        return td__error_status();
    iteration->found_inf = *(float *)td_tensor_data(copy) != 0;
    td_tensor_release(copy);
    td_tensor_release(iteration->found);
    iteration->found = NULL;
    return agree(call, iteration);
}

static struct iteration *find_iteration(const td_grad_scaler *scaler, const td_optimizer *optimizer)
{
    for (int i = 0; i < scaler->count; i++)
        if (scaler->iterations[i].optimizer == optimizer)
            return &scaler->iterations[i];
    return NULL;
}

/* Unscales the gradients of an optimizer that is ready, and enters it. */
static td_status unscale(const char *call, td_grad_scaler *scaler, const td_optimizer *optimizer)
{
    if (optimizer->hooks && optimizer->hooks->steps_in_backward)
        return td_fail(TD_ERR_STATE,
                       "%s: the steps of this optimizer are made in the backward pass (%s()), with "
                       "gradients that are scaled",
                       call, optimizer->hooks->name);
    if (scaler->count == scaler->capacity) {
        int capacity = scaler->capacity ? 2 * scaler->capacity : 2;
        struct iteration *iterations = realloc(scaler->iterations,
                                               (size_t)capacity * sizeof *iterations);
        if (!iterations)
            return td__fail_nomem(call);
        scaler->iterations = iterations;
        scaler->capacity = capacity;
    }
    struct iteration iteration = {.optimizer = optimizer};
    const float inverse = (float)(1 / (double)scaler->scale);
    td_status status = find_shardings(call, optimizer, &iteration);
    if (!status)
        status = unscale_grads(call, optimizer, inverse, &iteration.found);
    if (status) {
        free(iteration.shardings);
        return status;
    }
    scaler->iterations[scaler->count++] = iteration;
    return TD_OK;
}

td_status td_grad_scaler_unscale(td_grad_scaler *scaler, td_optimizer *optimizer)
{
    if (!scaler || !optimizer)
        return td__fail_null(__func__);
    if (!scaler->enabled)
        return TD_OK;
    const struct iteration *before = find_iteration(scaler, optimizer);
    if (before)
        return td_fail(
            TD_ERR_STATE,
            "%s: the gradients of this optimizer have been divided by the scale already, "
            "by %s; td_grad_scaler_update() ends an iteration",
            __func__, before->stepped ? "td_grad_scaler_step()" : "td_grad_scaler_unscale()");
    return unscale(__func__, scaler, optimizer);
}

td_status td_grad_scaler_step(td_grad_scaler *scaler, td_optimizer *optimizer, bool *stepped)
{
    if (!scaler || !optimizer)
        return td__fail_null(__func__);
    struct iteration *iteration = NULL;
    if (scaler->enabled) {
        iteration = find_iteration(scaler, optimizer);
        if (iteration && iteration->stepped)
            return td_fail(TD_ERR_STATE,
                           "%s: it was called for this optimizer already; td_grad_scaler_update() "
                           "ends an iteration",
                           __func__);
        if (!iteration)
            TD_TRY(unscale(__func__, scaler, optimizer));
        iteration = find_iteration(scaler, optimizer);
        TD_TRY(read_found(__func__, iteration));
    }
    bool skips = iteration && iteration->found_inf;
    if (!skips)
        TD_TRY(td_optimizer_step(optimizer));
    if (iteration)
        iteration->stepped = true;
    if (stepped)
        *stepped = !skips;
    return TD_OK;
}

/* ---- The scale -------------------------------------------------------------------------------------- */

static td_status adapt(const char *call, td_grad_scaler *scaler)
{
    bool found_inf = false;
    for (int i = 0; i < scaler->count; i++) {
        TD_TRY(read_found(call, &scaler->iterations[i]));
        found_inf |= scaler->iterations[i].found_inf;
    }
    if (found_inf) {
        scaler->scale = (float)((double)scaler->scale * scaler->backoff_factor);
        scaler->growth_tracker = 0;
        return TD_OK;
    }
    if (++scaler->growth_tracker < scaler->growth_interval)
        return TD_OK;
    float grown = (float)((double)scaler->scale * scaler->growth_factor);
    if (!isinf(grown))
        scaler->scale = grown;
    scaler->growth_tracker = 0;
    return TD_OK;
}

td_status td_grad_scaler_update(td_grad_scaler *scaler, double scale)
{
    if (!scaler)
        return td__fail_null(__func__);
    if (!scaler->enabled)
        return TD_OK;
    if (scale != 0) {
        td_grad_scaler changed = *scaler;
        changed.scale = (float)scale;
        TD_TRY(check_numbers(__func__, &changed));
        scaler->scale = changed.scale;
    } else if (scaler->count == 0) {
        return td_fail(TD_ERR_STATE,
                       "%s: no gradients were checked since the last call; call "
                       "td_grad_scaler_step() first",
                       __func__);
    } else {
        TD_TRY(adapt(__func__, scaler));
    }
    forget(scaler);
    return TD_OK;
}

/* ---- The state -------------------------------------------------------------------------------------- */

static td_status save(const td_grad_scaler *scaler, td_state *state)
{
    TD_TRY(td_state_add_number(state, "scale", (double)scaler->scale));
    TD_TRY(td_state_add_number(state, "growth_factor", scaler->growth_factor));
    TD_TRY(td_state_add_number(state, "backoff_factor", scaler->backoff_factor));
    TD_TRY(td_state_add_integer(state, "growth_interval", scaler->growth_interval));
    return td_state_add_integer(state, "growth_tracker", scaler->growth_tracker);
}

td_state *td_grad_scaler_state(const td_grad_scaler *scaler)
{
    td_state *state = scaler ? td_state_create() : NULL;
    if (state && scaler->enabled && save(scaler, state)) {
        td_state_destroy(state);
        return NULL;
    }
    return state;
}

static td_status load(const td_state *state, td_grad_scaler *scaler)
{
    double scale;
    TD_TRY(td_state_get_number(state, "scale", &scale));
    scaler->scale = (float)scale;
    TD_TRY(td_state_get_number(state, "growth_factor", &scaler->growth_factor));
    TD_TRY(td_state_get_number(state, "backoff_factor", &scaler->backoff_factor));
    TD_TRY(td_state_get_integer(state, "growth_interval", &scaler->growth_interval));
    TD_TRY(td_state_get_integer(state, "growth_tracker", &scaler->growth_tracker));
    return check_numbers("the state", scaler);
}

td_status td_grad_scaler_load_state(td_grad_scaler *scaler, const td_state *state)
{
    if (!scaler || !state)
        return td_fail(TD_ERR_INVALID, "%s: the %s is NULL", __func__, scaler ? "state" : "scaler");
    if (!scaler->enabled)
        return TD_OK;
    td_grad_scaler loaded = *scaler;
    td_status status = load(state, &loaded);
    if (status)
        return td_fail(status, "%s: the state is not that of a scaler: %s", __func__,
                       td__error_text());
    forget(&loaded); /* of gradients that were for another state */
    *scaler = loaded;
    return TD_OK;
}
