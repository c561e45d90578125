/* Adam and AdamW:
 *
 *     change = grad + weight_decay * parameter          (AdamW: parameter *= 1 - lr * weight_decay)
 *     mean   = beta1 * mean + (1 - beta1) * change
 *     square = beta2 * square + (1 - beta2) * change^2
 *     parameter -= lr / (1 - beta1^t) * mean / (sqrt(square) / sqrt(1 - beta2^t) + eps)
 *
 * where t is the parameter's step count; amsgrad uses the greatest square so far. */
#include "optim/optimizer.h"

#include "base/fail.h"
#include "base/option_rules.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

static void write_numbers(const td_optimizer *optimizer, int group_number, int64_t step,
                          double numbers[TD__STEP_NUMBERS])
{
    const struct td__optim_numbers *options = &optimizer->numbers;
    const struct td__parameter_group *group = &optimizer->groups[group_number];
    double correction1 = 1 - pow(options->beta1, (double)step);
    double correction2 = 1 - pow(options->beta2, (double)step);
    bool decoupled = options->decoupled != 0;
    numbers[0] = options->beta1;
    numbers[1] = options->beta2;
    numbers[2] = options->eps;
    numbers[3] = decoupled ? 0 : group->weight_decay;
    numbers[4] = decoupled ? 1 - group->lr * group->weight_decay : 1;
    numbers[5] = group->lr / correction1;
    numbers[6] = sqrt(correction2);
}

static td_adam_update update_of(const td_optimizer *optimizer,
                                const struct td__parameter_step *step)
{
    double numbers[TD__STEP_NUMBERS];
    write_numbers(optimizer, step->parameter->group, step->number, numbers);
    return (td_adam_update){
        .parameter = step->tensor,
        .grad = step->grad,
        .mean = step->buffers[0],
        .square = step->buffers[1],
        .greatest = step->buffers[2],
        .beta1 = numbers[0],
        .beta2 = numbers[1],
        .eps = numbers[2],
        .weight_decay = numbers[3],
        .shrink = numbers[4],
        .size = numbers[5],
        .root_correction = numbers[6],
        .maximize = optimizer->numbers.maximize != 0,
    };
}

static td_status run_adam(const td_optimizer *optimizer, const struct td__parameter_step *steps,
                          int count)
{
    td_adam_update *updates = malloc((size_t)count * sizeof *updates);
    if (!updates)
        return td__fail_nomem(optimizer->kind->name);
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++) {
        updates[i] = update_of(optimizer, &steps[i]);
        status = td__capture_numbers(optimizer, steps, count, i, &updates[i].numbers);
    }
    if (!status)
        status = td__kernels_of(steps[0].tensor)->adam(updates, count);
    free(updates);
    return status;
}

static int count_buffers(const struct td__optim_numbers *numbers)
{
    return numbers->amsgrad != 0 ? 3 : 2;
}

static const char *const buffer_names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
static const struct td__optim_number numbers_of_adam[] = {
    {"beta1", offsetof(struct td__optim_numbers, beta1)},
    {"beta2", offsetof(struct td__optim_numbers, beta2)},
    {"eps", offsetof(struct td__optim_numbers, eps)},
    {"amsgrad", offsetof(struct td__optim_numbers, amsgrad)},
    {"decoupled", offsetof(struct td__optim_numbers, decoupled)},
    {"maximize", offsetof(struct td__optim_numbers, maximize)},
};
static const struct td__optimizer_kind adam = {.name = "td_adam",
                                               .buffer_names = buffer_names,
                                               .buffer_count = count_buffers,
                                               .counts_steps = true,
                                               .numbers = numbers_of_adam,
                                               .number_count = 6,
                                               .write_numbers = write_numbers,
                                               .run = run_adam};
static const struct td__optimizer_kind adamw = {.name = "td_adamw",
                                                .buffer_names = buffer_names,
                                                .buffer_count = count_buffers,
                                                .counts_steps = true,
                                                .numbers = numbers_of_adam,
                                                .number_count = 6,
                                                .write_numbers = write_numbers,
                                                .run = run_adam};

static td_status check(const struct td__optimizer_kind *kind, const td_adam_options *options,
                       struct td__optim_numbers *numbers)
{
    td_adam_options all = options ? *options : (td_adam_options){0};
    bool decoupled = kind == &adamw;
    *numbers = (struct td__optim_numbers){
        .lr = td__option(all.lr, 1e-3),
        .weight_decay = td__option(all.weight_decay, decoupled ? 0.01 : 0),
        .beta1 = td__option(all.beta1, 0.9),
        .beta2 = td__option(all.beta2, 0.999),
        .eps = td__option(all.eps, 1e-8),
        .amsgrad = all.amsgrad,
        .decoupled = decoupled,
        .maximize = all.maximize,
    };
    TD_TRY(td__check_number(kind->name, "lr", numbers->lr, 0, INFINITY));
    TD_TRY(td__check_number(kind->name, "beta1", numbers->beta1, 0, 1));
    TD_TRY(td__check_number(kind->name, "beta2", numbers->beta2, 0, 1));
    TD_TRY(td__check_number(kind->name, "eps", numbers->eps, 0, INFINITY));
    return td__check_number(kind->name, "weight_decay", numbers->weight_decay, 0, INFINITY);
}

td_optimizer *td_adam(td_module *module, const td_adam_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    struct td__optim_numbers numbers;
    return check(&adam, options, &numbers)
               ? NULL
               : td__optimizer_of_module(&adam, "td_adam", &numbers, module);
}

td_optimizer *td_adam_of(td_tensor *const *parameters, int count, const td_adam_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    struct td__optim_numbers numbers;
    return check(&adam, options, &numbers)
               ? NULL
               : td__optimizer_create(&adam, "td_adam_of", &numbers, parameters, count);
}

td_optimizer *td_adamw(td_module *module, const td_adam_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    struct td__optim_numbers numbers;
    return check(&adamw, options, &numbers)
               ? NULL
               : td__optimizer_of_module(&adamw, "td_adamw", &numbers, module);
}

td_optimizer *td_adamw_of(td_tensor *const *parameters, int count, const td_adam_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    struct td__optim_numbers numbers;
    return check(&adamw, options, &numbers)
               ? NULL
               : td__optimizer_create(&adamw, "td_adamw_of", &numbers, parameters, count);
}
