/* Optimizers and clipping: three steps over the same gradients on the host and on the device; parameters and state are
 * compared. */
#include "tdcheck_own.h"

#include <tandem/optim.h>

#include <math.h>
#include <stdio.h>

enum { PARAMETERS = 4, STEPS = 3 };

typedef td_optimizer *(*make_fn)(td_tensor **parameters, int variant);
typedef td_status (*clip_fn)(td_tensor **parameters, int variant, double *norm);

/* Parameters with gradients on a device. */
struct set {
    td_tensor *x[PARAMETERS];
    td_optimizer *optimizer;
    double norm;
};

static td_status set_gradients(struct checker *checker, struct set *set, td_dtype dtype, int step,
                               td_device *device)
{
    struct check_case c = {.row = checker->row, .dtype = dtype, .number_of = 1 + step};
    struct check_random random = check_random_of(checker->seed, &c);
    for (int i = 0; i < PARAMETERS; i++) {
        td_tensor *grad = check_numbers(&random, td_tensor_shape(set->x[i]),
                                        td_tensor_ndim(set->x[i]), dtype, 'n', 0);
        td_status status = td_tensor_set_grad(set->x[i], td_tensor_to(grad, device));
        if (status)
            return status;
    }
    return TD_OK;
}

static bool make(struct checker *checker, struct set *set, td_dtype dtype, td_device *device)
{
    static const struct {
        int64_t shape[2];
        int ndim;
    } shapes[PARAMETERS] = {{{17, 33}, 2}, {{7}, 1}, {{1}, 1}, {{4099}, 1}};
    struct check_case c = {.row = checker->row, .dtype = dtype};
    struct check_random random = check_random_of(checker->seed, &c);
    for (int i = 0; i < PARAMETERS; i++) {
        td_tensor *host = check_numbers(&random, shapes[i].shape, shapes[i].ndim, dtype, 'n', 0);
        set->x[i] = td_clone(td_tensor_to(host, device));
        if (!set->x[i] || td_tensor_set_requires_grad(set->x[i], true))
            return false;
    }
    return true;
}

static bool compare_lists(struct checker *checker, td_dtype dtype, const char *what,
                          td_tensor *host, td_tensor *device, double *worst)
{
    td_tensor *found = device ? check_fetch(device) : NULL;
    if (!found) {
        checker_refused(checker, dtype, what, checker->row->name);
        return false;
    }
    struct check_difference difference = check_compare(host, found, NULL, MEASURE_LARGEST,
                                                       dtype == TD_F32 || dtype == TD_F64 ? 16 : 2);
    *worst = fmax(*worst, difference.worst);
    if (difference.at >= 0)
        checker_failed(checker, dtype, what, "%s", difference.text);
    return difference.at < 0;
}

/* The states of both optimizers: the same names, and elements within the tolerance. */
static bool compare_states(struct checker *checker, td_dtype dtype, int variant, struct set *host,
                           struct set *device, double *worst)
{
    char what[96];
    td_state *a = td_optimizer_state(host->optimizer), *b = td_optimizer_state(device->optimizer);
    bool same = a && b && td_state_count(a) == td_state_count(b);
    if (!same)
        checker_failed(checker, dtype, "", "variant %d: the states have other entries", variant);
    for (int i = 0; same && i < td_state_count(a); i++) {
        snprintf(what, sizeof what, "variant %d, %.64s", variant, td_state_name(a, i));
        same = compare_lists(checker, dtype, what, td_state_tensor(a, i), td_state_tensor(b, i),
                             worst);
    }
    td_state_destroy(a);
    td_state_destroy(b);
    return same;
}

static void compare_sets(struct checker *checker, td_dtype dtype, int variant, struct set *host,
                         struct set *device, bool gradients)
{
    double worst = 0;
    char what[64];
    for (int i = 0; i < PARAMETERS; i++) {
        snprintf(what, sizeof what, "variant %d, %s %d", variant,
                 gradients ? "the gradient of parameter" : "parameter", i);
        td_tensor *a = gradients ? td_tensor_grad(host->x[i]) : td_detach(host->x[i]);
        td_tensor *b = gradients ? td_tensor_grad(device->x[i]) : device->x[i];
        if (!compare_lists(checker, dtype, what, a, b, &worst))
            return;
    }
    if (!gradients && !compare_states(checker, dtype, variant, host, device, &worst))
        return;
    checker_passed(checker, dtype, worst);
}

static td_status steps(struct checker *checker, struct set *set, td_dtype dtype, td_device *device,
                       make_fn create, int variant)
{
    set->optimizer = create(set->x, variant);
    td_status status = set->optimizer ? TD_OK : td_last_status();
    for (int step = 0; step < STEPS && !status; step++) {
        status = set_gradients(checker, set, dtype, step, device);
        int64_t waits = td_device_waits(device);
        if (!status)
            status = td_optimizer_step(set->optimizer);
        if (!status && td_device_waits(device) != waits && !checker->may_wait)
            status = td_fail(TD_ERR_STATE, "td_optimizer_step: the host has waited for the device");
    }
    return status;
}

static void check_optimizer(struct checker *checker, td_dtype dtype, make_fn create, int variants)
{
    for (int variant = 0; variant < variants; variant++) {
        TD_SCOPE;
        struct set host = {0}, device = {0};
        char inputs[32];
        snprintf(inputs, sizeof inputs, "variant %d", variant);
        td_device *cpu = td_device_get("cpu");
        if (!make(checker, &host, dtype, cpu) || steps(checker, &host, dtype, cpu, create, variant))
            checker_failed(checker, dtype, inputs, "the host refuses it: %s", td_last_error());
        else if (!make(checker, &device, dtype, checker->device) ||
                 steps(checker, &device, dtype, checker->device, create, variant))
            checker_refused(checker, dtype, inputs, checker->row->name);
        else
            compare_sets(checker, dtype, variant, &host, &device, false);
        td_optimizer_destroy(host.optimizer);
        td_optimizer_destroy(device.optimizer);
    }
}

static td_optimizer *make_sgd(td_tensor **x, int variant)
{
    static const td_sgd_options options[] = {
        {.lr = 0.1},
        {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
        {.lr = 0.1, .momentum = 0.9, .nesterov = true},
        {.lr = 0.1, .momentum = 0.5, .dampening = 0.1, .maximize = true},
    };
    return td_sgd_of(x, PARAMETERS, &options[variant]);
}

static const td_adam_options adam_options[] = {
    {.lr = 0.01},
    {.lr = 0.01, .weight_decay = 0.1, .amsgrad = true},
    {.lr = 0.01, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-3, .maximize = true},
};

static td_optimizer *make_adam(td_tensor **x, int variant)
{
    return td_adam_of(x, PARAMETERS, &adam_options[variant]);
}

static td_optimizer *make_adamw(td_tensor **x, int variant)
{
    return td_adamw_of(x, PARAMETERS, &adam_options[variant]);
}

CHECK_OWN_ROW(sgd)
{
    (void)row;
    check_optimizer(checker, dtype, make_sgd, 4);
}
CHECK_OWN_ROW(adam)
{
    (void)row;
    check_optimizer(checker, dtype, make_adam, 3);
}
CHECK_OWN_ROW(adamw)
{
    (void)row;
    check_optimizer(checker, dtype, make_adamw, 3);
}

/* ---- Clipping ------------------------------------------------------------------------------------------- */

static td_status clip_norm(td_tensor **x, int variant, double *norm)
{
    const double types[] = {2, INFINITY, 1, 2};
    /* The last one is above the norm: nothing changes. */
    return td_clip_grad_norm_of_(x, PARAMETERS, variant == 3 ? 1e4 : 1.5,
                                 &(td_clip_options){.norm_type = types[variant]}, norm);
}

static td_status clip_value(td_tensor **x, int variant, double *norm)
{
    *norm = 0;
    return td_clip_grad_value_of_(x, PARAMETERS, variant ? 1.25 : 0.5);
}

static void check_clip(struct checker *checker, td_dtype dtype, clip_fn clip, int variants)
{
    for (int variant = 0; variant < variants; variant++) {
        TD_SCOPE;
        struct set host = {0}, device = {0};
        char inputs[32];
        snprintf(inputs, sizeof inputs, "variant %d", variant);
        td_device *cpu = td_device_get("cpu");
        if (!make(checker, &host, dtype, cpu) || set_gradients(checker, &host, dtype, 0, cpu) ||
            clip(host.x, variant, &host.norm))
            checker_failed(checker, dtype, inputs, "the host refuses it: %s", td_last_error());
        else if (!make(checker, &device, dtype, checker->device) ||
                 set_gradients(checker, &device, dtype, 0, checker->device) ||
                 clip(device.x, variant, &device.norm))
            checker_refused(checker, dtype, inputs, checker->row->name);
        else if (fabs(host.norm - device.norm) > 1e-5 * host.norm)
            checker_failed(checker, dtype, inputs,
                           "the norm is %g on the host and %g on the device", host.norm,
                           device.norm);
        else
            compare_sets(checker, dtype, variant, &host, &device, true);
    }
}

CHECK_OWN_ROW(clip_grad_norm_)
{
    (void)row;
    check_clip(checker, dtype, clip_norm, 4);
}
CHECK_OWN_ROW(clip_grad_value_)
{
    (void)row;
    check_clip(checker, dtype, clip_value, 2);
}
