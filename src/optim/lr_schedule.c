/* Learning rate schedules. A step computes the rate of each group from its current one, as PyTorch
 * does: several schedules of one optimizer compound, and they continue from a rate that was set by
 * hand. Only td_lambda_schedule() and the start of a part of a sequence use the initial rate. */
#include "optim/optimizer.h"

#include "base/fail.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td_schedule {
    td_optimizer *optimizer;
    int64_t steps;
    /** The rate of step `steps` from that of the step before; of step 0 from the rate that the
     *  group has when the schedule is made. */
    double (*next)(const td_schedule *schedule, double initial, double lr, int64_t steps);
    /** The rate of step 0 from the initial one, for a part of a sequence. */
    double (*first)(const td_schedule *schedule, double initial);
    double gamma, start, end, minimum;
    int64_t size;        /* steps of the kind that has some */
    int64_t *milestones; /* owned, increasing */
    int milestone_count;
    td_schedule_factor factor;
    void *arg;
    td_schedule **parts; /* owned, of a sequence: one more than milestones */
    int part_count;
};

/* ---- Formulas -------------------------------------------------------------------------- */

static double same_first(const td_schedule *schedule, double initial)
{
    (void)schedule;
    return initial;
}

static double step_next(const td_schedule *schedule, double initial, double lr, int64_t steps)
{
    (void)initial;
    return steps > 0 && steps % schedule->size == 0 ? lr * schedule->gamma : lr;
}

/* How many milestones have been reached. */
static int reached(const td_schedule *schedule, int64_t steps)
{
    int count = 0;
    while (count < schedule->milestone_count && schedule->milestones[count] <= steps)
        count++;
    return count;
}

static double multi_step_next(const td_schedule *schedule, double initial, double lr, int64_t steps)
{
    (void)initial;
    int now = reached(schedule, steps) - reached(schedule, steps - 1);
    return now ? lr * pow(schedule->gamma, now) : lr;
}

static double multi_step_first(const td_schedule *schedule, double initial)
{
    return multi_step_next(schedule, initial, initial, 0);
}

static double exponential_next(const td_schedule *schedule, double initial, double lr,
                               int64_t steps)
{
    (void)initial;
    return steps > 0 ? lr * schedule->gamma : lr;
}

/* At the minimum, from which no factor leads up again, the rate is set by a sum instead. */
static double cosine_next(const td_schedule *schedule, double initial, double lr, int64_t steps)
{
    double size = (double)schedule->size, minimum = schedule->minimum;
    if (steps == 0)
        return lr;
    if ((steps - 1 - schedule->size) % (2 * schedule->size) == 0)
        return lr + (initial - minimum) * (1 - cos(M_PI / size)) / 2;
    double now = 1 + cos(M_PI * (double)steps / size);
    double before = 1 + cos(M_PI * (double)(steps - 1) / size);
    return now / before * (lr - minimum) + minimum;
}

static double linear_first(const td_schedule *schedule, double initial)
{
    return initial * schedule->start;
}

static double linear_next(const td_schedule *schedule, double initial, double lr, int64_t steps)
{
    double rise = schedule->end - schedule->start, size = (double)schedule->size;
    if (steps == 0)
        return lr * schedule->start;
    if (steps > schedule->size)
        return lr;
    double before = size * schedule->start + (double)(steps - 1) * rise;
    if (before == 0) /* no factor leads from 0 to another rate */
        return initial * (rise / size);
    return lr * (1 + rise / before);
}

static double lambda_first(const td_schedule *schedule, double initial)
{
    return initial * schedule->factor(0, schedule->arg);
}

static double lambda_next(const td_schedule *schedule, double initial, double lr, int64_t steps)
{
    (void)lr;
    return initial * schedule->factor(steps, schedule->arg);
}

static double sequential_first(const td_schedule *schedule, double initial)
{
    const td_schedule *part = schedule->parts[reached(schedule, 0)];
    return part->first(part, initial);
}

static double sequential_next(const td_schedule *schedule, double initial, double lr, int64_t steps)
{
    int index = reached(schedule, steps);
    const td_schedule *part = schedule->parts[index];
    int64_t begin = index ? schedule->milestones[index - 1] : 0;
    return steps == begin ? part->first(part, initial)
                          : part->next(part, initial, lr, steps - begin);
}

/* ---- Making them -------------------------------------------------------------------------------- */

/* Sets the learning rates of the schedule's step: all, or none if one is invalid. */
static td_status apply(const td_schedule *schedule, const char *call)
{
    td_optimizer *optimizer = schedule->optimizer;
    double *rates = malloc(((size_t)optimizer->group_count + 1) * sizeof rates[0]);
    if (!rates)
        return td__fail_nomem(call);
    td_status status = TD_OK;
    for (int g = 0; g < optimizer->group_count && !status; g++) {
        struct td__parameter_group *group = &optimizer->groups[g];
        if (isnan(group->initial_lr))
            group->initial_lr = group->lr;
        rates[g] = schedule->next(schedule, group->initial_lr, group->lr, schedule->steps);
        status = td__check_number(call, "the learning rate of a schedule", rates[g], 0, INFINITY);
    }
    for (int g = 0; g < optimizer->group_count && !status; g++)
        optimizer->groups[g].lr = rates[g];
    free(rates);
    return status;
}

void td_schedule_destroy(td_schedule *schedule)
{
    if (!schedule)
        return;
    for (int i = 0; i < schedule->part_count; i++)
        td_schedule_destroy(schedule->parts[i]);
    free(schedule->parts);
    free(schedule->milestones);
    free(schedule);
}

/* A copy of `form`, with a copy of the milestones, at step 0. */
static td_schedule *create(td_schedule form, const char *call, td_optimizer *optimizer,
                           const int64_t *milestones)
{
    if (!optimizer) {
        td__fail_null(call);
        return NULL;
    }
    for (int i = 0; i < form.milestone_count; i++)
        if (milestones[i] < (i ? milestones[i - 1] : 0)) {
            td_fail(TD_ERR_INVALID, "%s: milestone %d is %lld; they must increase, from 0 on", call,
                    i, (long long)milestones[i]);
            return NULL;
        }
    td_schedule *schedule = malloc(sizeof *schedule);
    size_t bytes = (size_t)form.milestone_count * sizeof milestones[0];
    form.milestones = bytes ? malloc(bytes) : NULL;
    if (!schedule || (bytes && !form.milestones)) {
        free(schedule);
        free(form.milestones);
        td__fail_nomem(call);
        return NULL;
    }
    if (bytes)
        memcpy(form.milestones, milestones, bytes);
    form.optimizer = optimizer;
    *schedule = form;
    return schedule;
}

/* Sets the learning rates of step 0. */
static td_schedule *begin(td_schedule *schedule, const char *call)
{
    if (!schedule || !apply(schedule, call))
        return schedule;
    td_schedule_destroy(schedule);
    return NULL;
}

/* Whether a number of steps and a factor can be used. */
static bool check(const char *call, int64_t steps, double factor)
{
    if (steps < 1)
        td_fail(TD_ERR_INVALID, "%s: the number of steps is %lld; it must be at least 1", call,
                (long long)steps);
    return steps >= 1 && !td__check_number(call, "the factor", factor, 0, INFINITY);
}

td_schedule *td_step_schedule(td_optimizer *optimizer, int64_t size, double gamma)
{
    const char *call = "td_step_schedule";
    if (!check(call, size, gamma))
        return NULL;
    return begin(
        create((td_schedule){.next = step_next, .first = same_first, .size = size, .gamma = gamma},
               call, optimizer, NULL),
        call);
}

td_schedule *td_multi_step_schedule(td_optimizer *optimizer, const int64_t *milestones, int count,
                                    double gamma)
{
    const char *call = "td_multi_step_schedule";
    if (!check(call, 1, gamma))
        return NULL;
    if (count < 0 || (count > 0 && !milestones)) {
        td_fail(TD_ERR_INVALID, "%s: the list of %d milestones is NULL or has a negative length",
                call, count);
        return NULL;
    }
    td_schedule form = {.next = multi_step_next,
                        .first = multi_step_first,
                        .milestone_count = count,
                        .gamma = gamma};
    return begin(create(form, call, optimizer, milestones), call);
}

td_schedule *td_exponential_schedule(td_optimizer *optimizer, double gamma)
{
    const char *call = "td_exponential_schedule";
    if (!check(call, 1, gamma))
        return NULL;
    return begin(
        create((td_schedule){.next = exponential_next, .first = same_first, .gamma = gamma}, call,
               optimizer, NULL),
        call);
}

td_schedule *td_cosine_schedule(td_optimizer *optimizer, int64_t steps, double minimum)
{
    const char *call = "td_cosine_schedule";
    if (!check(call, steps, minimum))
        return NULL;
    return begin(create((td_schedule){.next = cosine_next,
                                      .first = same_first,
                                      .size = steps,
                                      .minimum = minimum},
                        call, optimizer, NULL),
                 call);
}

td_schedule *td_linear_schedule(td_optimizer *optimizer, double start, double end, int64_t steps)
{
    const char *call = "td_linear_schedule";
    if (!check(call, steps, start) || !check(call, steps, end))
        return NULL;
    td_schedule form = {
        .next = linear_next, .first = linear_first, .size = steps, .start = start, .end = end};
    return begin(create(form, call, optimizer, NULL), call);
}

td_schedule *td_lambda_schedule(td_optimizer *optimizer, td_schedule_factor factor, void *arg)
{
    const char *call = "td_lambda_schedule";
    if (!factor) {
        td_fail(TD_ERR_INVALID, "%s: the function is NULL", call);
        return NULL;
    }
    return begin(
        create(
            (td_schedule){.next = lambda_next, .first = lambda_first, .factor = factor, .arg = arg},
            call, optimizer, NULL),
        call);
}

/* ---- Sequences ---------------------------------------------------------------------------------- */

static td_status check_parts(const char *call, const td_optimizer *optimizer,
                             td_schedule *const *schedules, int count, const int64_t *milestones)
{
    if (count < 1 || !schedules || (count > 1 && !milestones))
        return td_fail(TD_ERR_INVALID,
                       "%s: the schedules (%d) or their milestones are NULL, or "
                       "there are none",
                       call, count);
    for (int i = 0; i < count; i++) {
        if (!schedules[i])
            return td__fail_null(call);
        if (schedules[i]->optimizer != optimizer)
            return td_fail(TD_ERR_INVALID, "%s: schedule %d belongs to another optimizer", call, i);
    }
    return TD_OK;
}

td_schedule *td_sequential_schedule(td_optimizer *optimizer, td_schedule *const *schedules,
                                    int count, const int64_t *milestones)
{
    const char *call = "td_sequential_schedule";
    td_schedule form = {
        .next = sequential_next, .first = sequential_first, .milestone_count = count - 1};
    td_schedule *sequence = NULL;
    if (!check_parts(call, optimizer, schedules, count, milestones))
        sequence = create(form, call, optimizer, milestones);
    td_schedule **parts = sequence ? calloc((size_t)count, sizeof parts[0]) : NULL;
    if (!parts) {
        if (sequence)
            td__fail_nomem(call);
        td_schedule_destroy(sequence);
        for (int i = 0; schedules && i < count; i++)
            td_schedule_destroy(schedules[i]);
        return NULL;
    }
    memcpy(parts, schedules, (size_t)count * sizeof parts[0]);
    sequence->parts = parts;
    sequence->part_count = count;
    return begin(sequence, call);
}

td_schedule *td_warmup_schedule(td_optimizer *optimizer, double start, int64_t steps,
                                td_schedule *then)
{
    td_schedule *parts[] = {td_linear_schedule(optimizer, start, 1, steps), then};
    if (!parts[0]) {
        td_schedule_destroy(then);
        return NULL;
    }
    return then ? td_sequential_schedule(optimizer, parts, 2, &steps) : parts[0];
}

/* ---- Using them --------------------------------------------------------------------------------- */

td_status td_schedule_step(td_schedule *schedule)
{
    if (!schedule)
        return td__fail_null("td_schedule_step");
    schedule->steps++;
    td_status status = apply(schedule, "td_schedule_step");
    schedule->steps -= status != TD_OK;
    return status;
}

int64_t td_schedule_steps(const td_schedule *schedule)
{
    return schedule ? schedule->steps : -1;
}

/* "group.1.lr". */
static const char *rate_name(char name[static 32], int group)
{
    snprintf(name, 32, "group.%d.lr", group);
    return name;
}

td_state *td_schedule_state(const td_schedule *schedule)
{
    td_state *state = schedule ? td_state_create() : NULL;
    td_status status = state ? td_state_add_integer(state, "steps", schedule->steps) : TD_OK;
    for (int g = 0; state && g < schedule->optimizer->group_count && !status; g++) {
        char name[32];
        status = td_state_add_number(state, rate_name(name, g), schedule->optimizer->groups[g].lr);
    }
    if (status) {
        td_state_destroy(state);
        return NULL;
    }
    return state;
}

static td_status read_rates(const char *call, const td_state *state, int count, double *rates)
{
    for (int g = 0; g < count; g++) {
        char name[32];
        TD_TRY(td_state_get_number(state, rate_name(name, g), &rates[g]));
        TD_TRY(td__check_number(call, "a learning rate of the state", rates[g], 0, INFINITY));
    }
    return TD_OK;
}

td_status td_schedule_load_state(td_schedule *schedule, const td_state *state)
{
    const char *call = "td_schedule_load_state";
    if (!schedule || !state)
        return td_fail(TD_ERR_INVALID, "%s: the %s is NULL", call, schedule ? "state" : "schedule");
    td_optimizer *optimizer = schedule->optimizer;
    int64_t steps = 0;
    TD_TRY(td_state_get_integer(state, "steps", &steps));
    if (steps < 0)
        return td_fail(TD_ERR_INVALID, "%s: the number of steps is %lld", call, (long long)steps);
    double *rates = malloc(((size_t)optimizer->group_count + 1) * sizeof rates[0]);
    if (!rates)
        return td__fail_nomem(call);
    td_status status = read_rates(call, state, optimizer->group_count, rates);
    for (int g = 0; g < optimizer->group_count && !status; g++)
        optimizer->groups[g].lr = rates[g];
    if (!status)
        schedule->steps = steps;
    free(rates);
    return status;
}
