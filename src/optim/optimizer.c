/* Optimizers: parameters and groups. What differs between the kinds is in sgd.c and adam.c. */
#include "optim/optimizer.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Life --------------------------------------------------------------------------------------- */

void td_optimizer_destroy(td_optimizer *optimizer)
{
    if (!optimizer)
        return;
    if (optimizer->hooks && optimizer->hooks->destroy)
        optimizer->hooks->destroy(optimizer);
    for (int i = 0; i < optimizer->count; i++) {
        td_tensor_release(optimizer->parameters[i].tensor);
        for (int b = 0; b < TD__BUFFERS_MOST; b++)
            td_tensor_release(optimizer->parameters[i].buffers[b]);
    }
    free(optimizer->parameters);
    free(optimizer->groups);
    free(optimizer);
}

static td_status check_parameter(const td_optimizer *optimizer, const char *call, td_tensor *tensor,
                                 int index)
{
    if (!tensor)
        return td_fail(TD_ERR_INVALID, "%s: parameter %d is NULL", call, index);
    td_dtype dtype = tensor->layout.dtype;
    if (dtype != TD_F32 && dtype != TD_F64 && dtype != TD_F16 && dtype != TD_BF16)
        return td_fail(TD_ERR_INVALID, "%s: parameter %d is %s; it must be floating-point", call,
                       index, td_dtype_name(dtype));
    if (!td_tensor_is_leaf(tensor))
        return td_fail(
            TD_ERR_INVALID,
            "%s: parameter %d, of the shape %s, is not a leaf; only leaves can be changed", call,
            index, td__shape_of(tensor));
    if (td__layout_repeats(&tensor->layout))
        return td_fail(TD_ERR_INVALID,
                       "%s: elements of parameter %d, of the shape %s, share memory", call, index,
                       td__shape_of(tensor));
    for (int i = 0; i < optimizer->count; i++)
        if (optimizer->parameters[i].tensor == tensor)
            return td_fail(TD_ERR_INVALID,
                           "%s: parameter %d, of the shape %s, is in the optimizer already", call,
                           index, td__shape_of(tensor));
    return TD_OK;
}

static td_status reserve(td_optimizer *optimizer, const char *call, int more)
{
    if (optimizer->group_count == optimizer->group_capacity) {
        int capacity = optimizer->group_capacity ? optimizer->group_capacity * 2 : 2;
        struct td__parameter_group *groups = realloc(optimizer->groups,
                                                     (size_t)capacity * sizeof groups[0]);
        if (!groups)
            return td__fail_nomem(call);
        optimizer->groups = groups;
        optimizer->group_capacity = capacity;
    }
    if (more > optimizer->capacity - optimizer->count) {
        size_t capacity = (size_t)optimizer->count + (size_t)more;
        struct td__parameter *parameters = realloc(optimizer->parameters,
                                                   capacity * sizeof parameters[0]);
        if (!parameters)
            return td__fail_nomem(call);
        optimizer->parameters = parameters;
        optimizer->capacity = (int)capacity;
    }
    return TD_OK;
}

static td_status add_group(td_optimizer *optimizer, const char *call, td_tensor *const *parameters,
                           int count, double lr, double weight_decay)
{
    if (count < 0 || (count > 0 && !parameters))
        return td_fail(TD_ERR_INVALID, "%s: the list of %d parameters is no list", call, count);
    TD_TRY(td__check_number(call, "the learning rate", lr, 0, INFINITY));
    TD_TRY(td__check_number(call, "the weight decay", weight_decay, 0, INFINITY));
    TD_TRY(reserve(optimizer, call, count));
    int before = optimizer->count;
    for (int i = 0; i < count; i++) {
        td_status status = check_parameter(optimizer, call, parameters[i], i);
        if (status) {
            optimizer->count = before;
            return status;
        }
        optimizer->parameters[optimizer->count++] = (struct td__parameter){
            .tensor = parameters[i], .group = optimizer->group_count};
    }
    for (int i = before; i < optimizer->count; i++)
        td_tensor_retain(optimizer->parameters[i].tensor);
    optimizer->groups[optimizer->group_count++] = (struct td__parameter_group){
        .lr = lr, .weight_decay = weight_decay, .initial_lr = NAN, .count = count};
    return TD_OK;
}

td_status td__optimizer_add_group(td_optimizer *optimizer, td_tensor *const *parameters, int count,
                                  const td_parameter_group *options)
{
    const char *call = "td_optimizer_add_group";
    td_parameter_group given = options ? *options : (td_parameter_group){0};
    double lr = td__option(given.lr, optimizer->numbers.lr);
    double decay = td__option(given.weight_decay, optimizer->numbers.weight_decay);
    return add_group(optimizer, call, parameters, count, lr, decay);
}

td_status td_optimizer_add_group(td_optimizer *optimizer, td_tensor *const *parameters, int count,
                                 const td_parameter_group *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    if (!optimizer)
        return td__fail_null(__func__);
    const struct td__optimizer_hooks *hooks = optimizer->hooks;
    return hooks && hooks->add_group
               ? hooks->add_group(optimizer, parameters, count, options)
               : td__optimizer_add_group(optimizer, parameters, count, options);
}

td_optimizer *td__optimizer_create(const struct td__optimizer_kind *kind, const char *call,
                                   const struct td__optim_numbers *numbers,
                                   td_tensor *const *parameters, int count)
{
    td_optimizer *optimizer = calloc(1, sizeof *optimizer);
    if (!optimizer) {
        td__fail_nomem(call);
        return NULL;
    }
    optimizer->kind = kind;
    optimizer->numbers = *numbers;
    if (!add_group(optimizer, call, parameters, count, numbers->lr, numbers->weight_decay))
        return optimizer;
    td_optimizer_destroy(optimizer);
    return NULL;
}

td_status td__parameter_list(const char *call, td_module *module, td_tensor ***list, int *count)
{
    if (!module)
        return td__fail_null(call);
    td_state *parameters = td_module_parameters(module);
    if (!parameters)
        return td__error_status();
    int found = td_state_count(parameters);
    td_tensor **tensors = malloc(((size_t)found + 1) * sizeof tensors[0]);
    if (!tensors) {
        td_state_destroy(parameters);
        return td__fail_nomem(call);
    }
    for (int i = 0; i < found; i++)
        tensors[i] = td_state_tensor(parameters, i);
    td_state_destroy(parameters);
    *list = tensors;
    *count = found;
    return TD_OK;
}

td_optimizer *td__optimizer_of_module(const struct td__optimizer_kind *kind, const char *call,
                                      const struct td__optim_numbers *numbers, td_module *module)
{
    td_tensor **list = NULL;
    int count = 0;
    if (td__parameter_list(call, module, &list, &count))
        return NULL;
    td_optimizer *optimizer = td__optimizer_create(kind, call, numbers, list, count);
    free(list);
    return optimizer;
}

td_status td__check_number(const char *call, const char *what, double value, double low,
                           double high)
{
    if (value >= low && value < high)
        return TD_OK;
    if (isinf(high))
        return td_fail(TD_ERR_INVALID, "%s: %s is %g; it must be finite, and at least %g", call,
                       what, value, low);
    return td_fail(TD_ERR_INVALID, "%s: %s is %g; it must be at least %g, and below %g", call, what,
                   value, low, high);
}

/* ---- Learning rates ----------------------------------------------------------------------------- */

int td_optimizer_group_count(const td_optimizer *optimizer)
{
    return optimizer ? optimizer->group_count : 0;
}

double td_optimizer_group_lr(const td_optimizer *optimizer, int group)
{
    return group >= 0 && group < td_optimizer_group_count(optimizer) ? optimizer->groups[group].lr
                                                                     : NAN;
}

double td_optimizer_lr(const td_optimizer *optimizer)
{
    return td_optimizer_group_lr(optimizer, 0);
}

td_status td_optimizer_set_group_lr(td_optimizer *optimizer, int group, double lr)
{
    const char *call = "td_optimizer_set_lr";
    if (group < 0 || group >= td_optimizer_group_count(optimizer))
        return td_fail(TD_ERR_INVALID, "%s: there is no group %d of parameters", call, group);
    TD_TRY(td__check_number(call, "the learning rate", lr, 0, INFINITY));
    optimizer->groups[group].lr = lr;
    return TD_OK;
}

td_status td_optimizer_set_lr(td_optimizer *optimizer, double lr)
{
    if (!optimizer)
        return td__fail_null("td_optimizer_set_lr");
    for (int group = 0; group < optimizer->group_count; group++)
        TD_TRY(td_optimizer_set_group_lr(optimizer, group, lr));
    return TD_OK;
}

/* ---- Gradients -------------------------------------------------------------------------------------- */

td_tensor *td__optimizer_source(const td_optimizer *optimizer, int index)
{
    const struct td__optimizer_hooks *hooks = optimizer->hooks;
    return hooks && hooks->source ? hooks->source(optimizer, index)
                                  : optimizer->parameters[index].tensor;
}

td_status td_optimizer_zero_grad(td_optimizer *optimizer)
{
    if (!optimizer)
        return td__fail_null("td_optimizer_zero_grad");
    for (int i = 0; i < optimizer->count; i++)
        TD_TRY(td_tensor_zero_grad(td__optimizer_source(optimizer, i)));
    return TD_OK;
}
