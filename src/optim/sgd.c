/* Stochastic gradient descent:
 *
 *     change = grad + weight_decay * parameter
 *     buffer = momentum * buffer + (1 - dampening) * change         (at first: change)
 *     parameter -= lr * buffer                                      (nesterov: change + momentum * buffer)
 */
#include "optim/optimizer.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

static void write_numbers(const td_optimizer *optimizer, int group_number, int64_t step,
                          double numbers[TD__STEP_NUMBERS])
{
    (void)step;
    const struct td__parameter_group *group = &optimizer->groups[group_number];
    numbers[0] = group->lr;
    numbers[1] = optimizer->numbers.momentum;
    numbers[2] = optimizer->numbers.dampening;
    numbers[3] = group->weight_decay;
}

static td_status run_sgd(const td_optimizer *optimizer, const struct td__parameter_step *steps,
                         int count)
{
    const struct td__optim_numbers *numbers = &optimizer->numbers;
    td_sgd_update *updates = malloc((size_t)count * sizeof *updates);
    if (!updates)
        return td__fail_nomem("td_sgd");
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++) {
        const struct td__parameter_group *group = &optimizer->groups[steps[i].parameter->group];
        updates[i] = (td_sgd_update){.parameter = steps[i].tensor,
                                     .grad = steps[i].grad,
                                     .buffer = steps[i].buffers[0],
                                     .lr = group->lr,
                                     .momentum = numbers->momentum,
                                     .dampening = numbers->dampening,
                                     .weight_decay = group->weight_decay,
                                     .nesterov = numbers->nesterov != 0,
                                     .maximize = numbers->maximize != 0,
                                     .first = steps[i].first};
        status = td__capture_numbers(optimizer, steps, count, i, &updates[i].numbers);
    }
    if (!status)
        status = td__kernels_of(steps[0].tensor)->sgd(updates, count);
    free(updates);
    return status;
}

static int count_buffers(const struct td__optim_numbers *numbers)
{
    return numbers->momentum != 0 ? 1 : 0;
}

static const char *const buffer_names[] = {"momentum_buffer"};
static const struct td__optim_number numbers_of_sgd[] = {
    {"momentum", offsetof(struct td__optim_numbers, momentum)},
    {"dampening", offsetof(struct td__optim_numbers, dampening)},
    {"nesterov", offsetof(struct td__optim_numbers, nesterov)},
    {"maximize", offsetof(struct td__optim_numbers, maximize)},
};
static const struct td__optimizer_kind sgd = {.name = "td_sgd",
                                              .buffer_names = buffer_names,
                                              .buffer_count = count_buffers,
                                              .numbers = numbers_of_sgd,
                                              .number_count = 4,
                                              .write_numbers = write_numbers,
                                              .run = run_sgd};

static td_status check(const td_sgd_options *options, struct td__optim_numbers *numbers)
{
    const char *call = "td_sgd";
    if (!options || (options->lr == 0 && !signbit(options->lr)))
        return td_fail(TD_ERR_INVALID,
                       "%s: no learning rate was given; set lr in the options, such as 0.01", call);
    TD_TRY(td__check_number(call, "lr", options->lr, 0, INFINITY));
    TD_TRY(td__check_number(call, "momentum", options->momentum, 0, INFINITY));
    TD_TRY(td__check_number(call, "dampening", options->dampening, -INFINITY, INFINITY));
    TD_TRY(td__check_number(call, "weight_decay", options->weight_decay, 0, INFINITY));
    if (options->nesterov && (options->momentum == 0 || options->dampening != 0))
        return td_fail(TD_ERR_INVALID,
                       "%s: nesterov needs a momentum and no dampening; these are %g and %g", call,
                       options->momentum, options->dampening);
    *numbers = (struct td__optim_numbers){.lr = options->lr,
                                          .weight_decay = options->weight_decay,
                                          .momentum = options->momentum,
                                          .dampening = options->dampening,
                                          .nesterov = options->nesterov,
                                          .maximize = options->maximize};
    return TD_OK;
}

td_optimizer *td_sgd(td_module *module, const td_sgd_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    struct td__optim_numbers numbers;
    return check(options, &numbers) ? NULL
                                    : td__optimizer_of_module(&sgd, "td_sgd", &numbers, module);
}

td_optimizer *td_sgd_of(td_tensor *const *parameters, int count, const td_sgd_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    struct td__optim_numbers numbers;
    return check(options, &numbers)
               ? NULL
               : td__optimizer_create(&sgd, "td_sgd_of", &numbers, parameters, count);
}
