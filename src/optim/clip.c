/* Gradient clipping. The factor is computed where the norm is, so that the host waits for an accelerator only where it has
 * to know the norm itself. */
#include "optim/grad_norm.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <math.h>
#include <stdlib.h>

/* Waits for an accelerator. */
static td_status read_number(td_tensor *number, double *value)
{
    td_tensor *copy = td__to_host("td_clip_grad_norm_", number);
    if (!copy)
        return td__error_status();
    *value = *(double *)td_tensor_data(copy);
    td_tensor_release(copy);
    return TD_OK;
}

/* ---- Scaling -------------------------------------------------------------------------------------- */

/* The norm becomes min(1, max_norm / (norm + 1e-6)), where it is. */
static td_status make_factor(td_tensor *number, double max_norm)
{
    const td_kernels *kernels = td__kernels_of(number);
    TD_TRY(kernels->binary_scalar(TD_BINARY_ADD, number, number, 1e-6, false));
    TD_TRY(kernels->binary_scalar(TD_BINARY_DIV, number, number, max_norm, true));
    return kernels->clamp(number, number, 0, 1);
}

static td_status scale_all(struct td__grads *grads, td_tensor *factor)
{
    for (int i = 0; i < grads->device_count; i++) {
        const struct td__device_grads *group = &grads->devices[i];
        for (int k = 0; k < group->count; k++)
            TD_TRY(td__prepare_write(group->list[k]));
        td_tensor *here = td__number_to("td_clip_grad_norm_", group->device, factor);
        if (!here)
            return td__error_status();
        td_status status = td__kernels_of(here)->scale(group->list, group->count, here);
        td_tensor_release(here);
        TD_TRY(status);
        for (int k = 0; k < group->count; k++)
            td__tensor_bump_version(group->list[k]);
    }
    return TD_OK;
}

/* *norm, where not NULL, gets the norm. */
static td_status clip(td_tensor *const *parameters, int count, struct td__grads *grads,
                      double max_norm, double type, bool only_finite, double *norm)
{
    td_tensor *total = NULL;
    TD_TRY(td__grad_norm(parameters, count, grads, type, &total));
    td_status status = TD_OK;
    double value = NAN;
    bool known = norm || only_finite || td__on_host(total);
    if (known)
        status = read_number(total, &value);
    if (!status && only_finite && !isfinite(value))
        status = td_fail(TD_ERR_INVALID, "td_clip_grad_norm_: the norm of the gradients is %g",
                         value);
    if (!status && !(known && max_norm / (value + 1e-6) >= 1)) {
        status = make_factor(total, max_norm);
        if (!status)
            status = scale_all(grads, total);
    }
    if (!status && norm)
        *norm = value;
    td_tensor_release(total);
    return status;
}

/* ---- The calls ---------------------------------------------------------------------------------- */

td_status td_clip_grad_norm_of_(td_tensor *const *parameters, int count, double max_norm,
                                const td_clip_options *options, double *norm)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    const char *call = "td_clip_grad_norm_";
    double type = td__option(options ? options->norm_type : 0, 2);
    if (count < 0 || (count > 0 && !parameters))
        return td_fail(TD_ERR_INVALID,
                       "%s: the list of %d parameters is NULL or has a negative "
                       "length",
                       call, count);
    if (!(max_norm >= 0) || !(type > 0))
        return td_fail(TD_ERR_INVALID,
                       "%s: max_norm is %g and norm_type %g; neither may be negative", call,
                       max_norm, type);
    struct td__grads grads = {0};
    td_status status = td__find_grads(call, parameters, count, &grads);
    double value = 0;
    if (!status)
        status = clip(parameters, count, &grads, max_norm, type,
                      options && options->error_if_nonfinite, norm ? &value : NULL);
    if (!status && norm)
        *norm = value;
    td__free_grads(&grads);
    return status;
}

td_status td_clip_grad_value_of_(td_tensor *const *parameters, int count, double limit)
{
    const char *call = "td_clip_grad_value_";
    if (count < 0 || (count > 0 && !parameters))
        return td_fail(TD_ERR_INVALID, "%s: the list of %d parameters is no list", call, count);
    if (!(limit >= 0))
        return td_fail(TD_ERR_INVALID, "%s: the limit is %g; it may not be negative", call, limit);
    for (int i = 0; i < count; i++) {
        td_tensor *grad = td_tensor_grad(parameters[i]);
        if (!grad)
            continue;
        TD_TRY(td__prepare_write(grad));
        TD_TRY(td__kernels_of(grad)->clamp(grad, grad, -limit, limit));
        td__tensor_bump_version(grad);
    }
    return TD_OK;
}

td_status td_clip_grad_norm_(td_module *module, double max_norm, const td_clip_options *options,
                             double *norm)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    td_tensor **list = NULL;
    int count = 0;
    TD_TRY(td__parameter_list("td_clip_grad_norm_", module, &list, &count));
    td_status status = td_clip_grad_norm_of_(list, count, max_norm, options, norm);
    free(list);
    return status;
}

td_status td_clip_grad_value_(td_module *module, double limit)
{
    td_tensor **list = NULL;
    int count = 0;
    TD_TRY(td__parameter_list("td_clip_grad_value_", module, &list, &count));
    td_status status = td_clip_grad_value_of_(list, count, limit);
    free(list);
    return status;
}
