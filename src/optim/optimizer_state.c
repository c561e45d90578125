/* Saving and loading the state of an optimizer.
 *
 *     group.0.size, group.0.lr, group.0.weight_decay, group.0.initial_lr (where a schedule was made)
 *     options.momentum, …                         the numbers of the kind
 *     state.3.step, state.3.exp_avg, …            of parameter 3, once it has made a step
 *
 * Everything is read and compared before anything is changed. */
#include "optim/optimizer.h"

#include "base/fail.h"
#include "tensor/file_memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_SIZE = 64 };

static const char *name_of(char name[static NAME_SIZE], const char *part, int index,
                           const char *what)
{
    if (index < 0)
        snprintf(name, NAME_SIZE, "%s.%s", part, what);
    else
        snprintf(name, NAME_SIZE, "%s.%d.%s", part, index, what);
    return name;
}

static double *number_at(struct td__optim_numbers *numbers, const struct td__optim_number *number)
{
    return (double *)(void *)((char *)numbers + number->offset);
}

/* ---- Saving ------------------------------------------------------------------------------------- */

static td_status save_numbers(td_optimizer *optimizer, td_state *state)
{
    char name[NAME_SIZE];
    for (int g = 0; g < optimizer->group_count; g++) {
        const struct td__parameter_group *group = &optimizer->groups[g];
        TD_TRY(td_state_add_integer(state, name_of(name, "group", g, "size"), group->count));
        TD_TRY(td_state_add_number(state, name_of(name, "group", g, "lr"), group->lr));
        TD_TRY(td_state_add_number(state, name_of(name, "group", g, "weight_decay"),
                                   group->weight_decay));
        if (!isnan(group->initial_lr))
            TD_TRY(td_state_add_number(state, name_of(name, "group", g, "initial_lr"),
                                       group->initial_lr));
    }
    for (int n = 0; n < optimizer->kind->number_count; n++) {
        const struct td__optim_number *number = &optimizer->kind->numbers[n];
        TD_TRY(td_state_add_number(state, name_of(name, "options", -1, number->name),
                                   *number_at(&optimizer->numbers, number)));
    }
    return TD_OK;
}

static td_status save_parameters(const td_optimizer *optimizer, td_state *state)
{
    char name[NAME_SIZE];
    for (int i = 0; i < optimizer->count; i++) {
        const struct td__parameter *parameter = &optimizer->parameters[i];
        if (optimizer->kind->counts_steps && parameter->steps)
            TD_TRY(
                td_state_add_integer(state, name_of(name, "state", i, "step"), parameter->steps));
        for (int b = 0; b < TD__BUFFERS_MOST && parameter->buffers[b]; b++)
            TD_TRY(td_state_add(state, name_of(name, "state", i, optimizer->kind->buffer_names[b]),
                                parameter->buffers[b]));
    }
    return TD_OK;
}

td_state *td_optimizer_state(td_optimizer *optimizer)
{
    td_state *state = optimizer ? td_state_create() : NULL;
    if (state && (save_numbers(optimizer, state) || save_parameters(optimizer, state))) {
        td_state_destroy(state);
        return NULL;
    }
    return state;
}

/* ---- Loading ------------------------------------------------------------------------------------ */

struct loading {
    const td_state *state;
    td_state *seen; /* the entries that were read */
    struct td__optim_numbers numbers;
    struct td__parameter *parameters; /* with new buffers */
    struct td__parameter_group *groups;
};

static td_status read_number(struct loading *loading, const char *name, double *value)
{
    TD_TRY(td_state_get_number(loading->state, name, value));
    return td_state_add(loading->seen, name, td_state_get(loading->state, name));
}

static td_status read_groups(struct loading *loading, const td_optimizer *optimizer)
{
    char name[NAME_SIZE];
    for (int g = 0; g < optimizer->group_count; g++) {
        struct td__parameter_group *group = &loading->groups[g];
        double size = 0;
        *group = optimizer->groups[g];
        TD_TRY(read_number(loading, name_of(name, "group", g, "size"), &size));
        if (size != group->count)
            return td_fail(TD_ERR_INVALID, "group %d has %g parameters in the state, and %d here",
                           g, size, group->count);
        TD_TRY(read_number(loading, name_of(name, "group", g, "lr"), &group->lr));
        TD_TRY(
            read_number(loading, name_of(name, "group", g, "weight_decay"), &group->weight_decay));
        TD_TRY(td__check_number("the state", "a learning rate", group->lr, 0, INFINITY));
        TD_TRY(td__check_number("the state", "a weight decay", group->weight_decay, 0, INFINITY));
        if (td_state_get(loading->state, name_of(name, "group", g, "initial_lr")))
            TD_TRY(read_number(loading, name, &group->initial_lr));
    }
    return TD_OK;
}

static td_status read_numbers(struct loading *loading, const td_optimizer *optimizer)
{
    char name[NAME_SIZE];
    loading->numbers = optimizer->numbers;
    for (int n = 0; n < optimizer->kind->number_count; n++) {
        const struct td__optim_number *number = &optimizer->kind->numbers[n];
        double *value = number_at(&loading->numbers, number);
        TD_TRY(read_number(loading, name_of(name, "options", -1, number->name), value));
        if (!isfinite(*value))
            return td_fail(TD_ERR_INVALID, "\"%s\" is %g in the state", name, *value);
    }
    if (loading->numbers.decoupled != optimizer->numbers.decoupled)
        return td_fail(TD_ERR_INVALID, "the state is that of %s",
                       loading->numbers.decoupled != 0 ? "td_adamw()" : "td_adam()");
    return TD_OK;
}

/* Copies between any two devices and dtypes; converts where `from` is. */
static td_status copy_to(td_tensor *to, td_tensor *from)
{
    if (to->storage->device == from->storage->device)
        return td__kernels_of(from)->copy(to, from);
    td_tensor *converted = td__empty_like_as(from, to->layout.dtype);
    td_status status = converted ? td__kernels_of(from)->copy(converted, from) : TD_ERR_NOMEM;
    if (!status)
        status = td__transfer("td_optimizer_load_state", to, converted, false);
    td_tensor_release(converted);
    return status;
}

/* A copy of a tensor of the state as a buffer of the parameter, on its device. */
static td_status read_buffer(struct loading *loading, const char *name,
                             struct td__parameter *parameter, int buffer)
{
    td_tensor *from = td_state_get(loading->state, name);
    if (!from)
        return td_fail(TD_ERR_INVALID, "\"%s\" is missing in the state", name);
    if (!td__tensor_fits(from, parameter->tensor))
        return td_fail(TD_ERR_INVALID, "\"%s\" has the shape %s in the state, the parameter %s",
                       name, td__shape_of(from), td__shape_of(parameter->tensor));
    TD_TRY(td_state_add(loading->seen, name, from));
    parameter->buffers[buffer] = td__empty_beside(parameter->tensor);
    if (!parameter->buffers[buffer])
        return TD_ERR_NOMEM;
    TD_TRY(td__tensor_copy_shard(parameter->buffers[buffer], parameter->tensor));
    td_tensor *part = td__tensor_part_for(from, parameter->tensor);
    td_status status = part ? copy_to(parameter->buffers[buffer], part) : td__error_status();
    td_tensor_release(part);
    return status;
}

static td_status read_parameter(struct loading *loading, const td_optimizer *optimizer, int index)
{
    const struct td__optimizer_kind *kind = optimizer->kind;
    struct td__parameter *parameter = &loading->parameters[index];
    *parameter = (struct td__parameter){.tensor = optimizer->parameters[index].tensor,
                                        .group = optimizer->parameters[index].group};
    int buffers = kind->buffer_count(&loading->numbers);
    char name[NAME_SIZE];
    if (!buffers ||
        !td_state_get(loading->state, name_of(name, "state", index, kind->buffer_names[0])))
        return TD_OK; /* it had made no step yet */
    for (int b = 0; b < buffers; b++)
        TD_TRY(read_buffer(loading, name_of(name, "state", index, kind->buffer_names[b]), parameter,
                           b));
    if (!kind->counts_steps)
        return TD_OK;
    TD_TRY(td_state_get_integer(loading->state, name_of(name, "state", index, "step"),
                                &parameter->steps));
    TD_TRY(td_state_add(loading->seen, name, td_state_get(loading->state, name)));
    if (parameter->steps < 1)
        return td_fail(TD_ERR_INVALID, "\"%s\" is %lld in the state", name,
                       (long long)parameter->steps);
    return TD_OK;
}

/* Fails with the name of the first tensor of the state that was not read. */
static td_status check_unexpected(const struct loading *loading)
{
    for (int i = 0; i < td_state_count(loading->state); i++)
        if (!td_state_get(loading->seen, td_state_name(loading->state, i)))
            return td_fail(TD_ERR_INVALID, "\"%s\" is in the state, but not in this optimizer",
                           td_state_name(loading->state, i));
    return TD_OK;
}

static td_status read_all(struct loading *loading, const td_optimizer *optimizer)
{
    TD_TRY(read_groups(loading, optimizer));
    TD_TRY(read_numbers(loading, optimizer));
    for (int i = 0; i < optimizer->count; i++)
        TD_TRY(read_parameter(loading, optimizer, i));
    return check_unexpected(loading);
}

/* Swaps what was read with what the optimizer had; the caller frees the latter. */
static void take_over(td_optimizer *optimizer, struct loading *loading)
{
    optimizer->numbers = loading->numbers;
    memcpy(optimizer->groups, loading->groups,
           (size_t)optimizer->group_count * sizeof loading->groups[0]);
    for (int i = 0; i < optimizer->count; i++) {
        struct td__parameter former = optimizer->parameters[i];
        optimizer->parameters[i] = loading->parameters[i];
        loading->parameters[i] = former;
    }
}

td_status td_optimizer_load_state(td_optimizer *optimizer, const td_state *state)
{
    if (!optimizer || !state)
        return td_fail(TD_ERR_INVALID, "td_optimizer_load_state: the %s is NULL",
                       optimizer ? "state" : "optimizer");
    struct loading loading = {
        .state = state,
        .seen = td_state_create(),
        .parameters = calloc((size_t)optimizer->count + 1, sizeof(struct td__parameter)),
        .groups = calloc((size_t)optimizer->group_count + 1, sizeof(struct td__parameter_group)),
    };
    td_status status = TD_ERR_NOMEM;
    if (!loading.seen || !loading.parameters || !loading.groups)
        td__fail_nomem("td_optimizer_load_state");
    else if ((status = read_all(&loading, optimizer)))
        td_fail(status, "td_optimizer_load_state: the state does not fit this %s: %s",
                optimizer->kind->name, td__error_text());
    else
        take_over(optimizer, &loading);
    for (int i = 0; loading.parameters && i < optimizer->count; i++)
        for (int b = 0; b < TD__BUFFERS_MOST; b++) {
            td_tensor *former = loading.parameters[i].buffers[b];
            if (former && former->shard)
                former->shard->sharding = NULL; /* a td_state may outlive the optimizer */
            td_tensor_release(former);
        }
    td_state_destroy(loading.seen);
    free(loading.parameters);
    free(loading.groups);
    return status;
}
