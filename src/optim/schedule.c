/* Schedules. Each is a function of the learning rate that a group began with and of the number of
 * steps: nothing is kept but that number, so that going on from a state is exact, and a sequence is a
 * matter of asking the right one. */
#include "optim/optimizer.h"

#include "base/fail.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct td_schedule {
    td_optimizer *optimizer;
    int64_t steps;
    /** The learning rate after `steps` steps, from the one at the beginning. */
    double (*rate)(const td_schedule *schedule, double initial, int64_t steps);
    double gamma, start, end, minimum;
    int64_t size;        /* steps of the kind that has some */
    int64_t *milestones; /* owned, increasing */
    int milestone_count;
    td_schedule_factor factor;
    void *arg;
    td_schedule **parts; /* owned, of a sequence: one more than milestones */
    int part_count;
};

/* ---- What they compute -------------------------------------------------------------------------- */

static double step_rate(const td_schedule *schedule, double initial, int64_t steps)
{
    return initial * pow(schedule->gamma, (double)(steps / schedule->size));
}

/* How many milestones have been reached. */
static int reached(const td_schedule *schedule, int64_t steps)
{
    int count = 0;
    while (count < schedule->milestone_count && schedule->milestones[count] <= steps)
        count++;
    return count;
}

static double multi_step_rate(const td_schedule *schedule, double initial, int64_t steps)
{
    return initial * pow(schedule->gamma, reached(schedule, steps));
}

static double exponential_rate(const td_schedule *schedule, double initial, int64_t steps)
{
    return initial * pow(schedule->gamma, (double)steps);
}

static double cosine_rate(const td_schedule *schedule, double initial, int64_t steps)
{
    double angle = M_PI * (double)steps / (double)schedule->size;
    return schedule->minimum + (initial - schedule->minimum) * (1 + cos(angle)) / 2;
}

static double linear_rate(const td_schedule *schedule, double initial, int64_t steps)
{
    double done = steps < schedule->size ? (double)steps / (double)schedule->size : 1;
    return initial * (schedule->start + (schedule->end - schedule->start) * done);
}

static double lambda_rate(const td_schedule *schedule, double initial, int64_t steps)
{
    return initial * schedule->factor(steps, schedule->arg);
}

static double sequential_rate(const td_schedule *schedule, double initial, int64_t steps)
{
    int part = reached(schedule, steps);
    int64_t begin = part ? schedule->milestones[part - 1] : 0;
    return schedule->parts[part]->rate(schedule->parts[part], initial, steps - begin);
}

/* ---- Making them -------------------------------------------------------------------------------- */

static td_status apply(td_schedule *schedule, const char *call)
{
    td_optimizer *optimizer = schedule->optimizer;
    for (int g = 0; g < optimizer->group_count; g++) {
        struct td__parameter_group *group = &optimizer->groups[g];
        if (isnan(group->initial_lr))
            group->initial_lr = group->lr;
        double lr = schedule->rate(schedule, group->initial_lr, schedule->steps);
        TD_TRY(td__check_number(call, "the learning rate of a schedule", lr, 0, INFINITY));
        group->lr = lr;
    }
    return TD_OK;
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
        td__fail(TD_ERR_INVALID, "%s: the optimizer is NULL", call);
        return NULL;
    }
    for (int i = 0; i < form.milestone_count; i++)
        if (milestones[i] < (i ? milestones[i - 1] : 0)) {
            td__fail(TD_ERR_INVALID, "%s: milestone %d is %lld; they must increase, from 0 on",
                     call, i, (long long)milestones[i]);
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
        td__fail(TD_ERR_INVALID, "%s: the number of steps is %lld; it must be at least 1", call,
                 (long long)steps);
    return steps >= 1 && !td__check_number(call, "the factor", factor, 0, INFINITY);
}

td_schedule *td_step_schedule(td_optimizer *optimizer, int64_t size, double gamma)
{
    const char *call = "td_step_schedule";
    if (!check(call, size, gamma))
        return NULL;
    return begin(create((td_schedule){.rate = step_rate, .size = size, .gamma = gamma}, call,
                        optimizer, NULL),
                 call);
}

td_schedule *td_multi_step_schedule(td_optimizer *optimizer, const int64_t *milestones, int count,
                                    double gamma)
{
    const char *call = "td_multi_step_schedule";
    if (!check(call, 1, gamma))
        return NULL;
    if (count < 0 || (count > 0 && !milestones)) {
        td__fail(TD_ERR_INVALID, "%s: the list of %d milestones is no list", call, count);
        return NULL;
    }
    td_schedule form = {.rate = multi_step_rate, .milestone_count = count, .gamma = gamma};
    return begin(create(form, call, optimizer, milestones), call);
}

td_schedule *td_exponential_schedule(td_optimizer *optimizer, double gamma)
{
    const char *call = "td_exponential_schedule";
    if (!check(call, 1, gamma))
        return NULL;
    return begin(
        create((td_schedule){.rate = exponential_rate, .gamma = gamma}, call, optimizer, NULL),
        call);
}

td_schedule *td_cosine_schedule(td_optimizer *optimizer, int64_t steps, double minimum)
{
    const char *call = "td_cosine_schedule";
    if (!check(call, steps, minimum))
        return NULL;
    return begin(create((td_schedule){.rate = cosine_rate, .size = steps, .minimum = minimum}, call,
                        optimizer, NULL),
                 call);
}

td_schedule *td_linear_schedule(td_optimizer *optimizer, double start, double end, int64_t steps)
{
    const char *call = "td_linear_schedule";
    if (!check(call, steps, start) || !check(call, steps, end))
        return NULL;
    td_schedule form = {.rate = linear_rate, .size = steps, .start = start, .end = end};
    return begin(create(form, call, optimizer, NULL), call);
}

td_schedule *td_lambda_schedule(td_optimizer *optimizer, td_schedule_factor factor, void *arg)
{
    const char *call = "td_lambda_schedule";
    if (!factor) {
        td__fail(TD_ERR_INVALID, "%s: the function is NULL", call);
        return NULL;
    }
    return begin(create((td_schedule){.rate = lambda_rate, .factor = factor, .arg = arg}, call,
                        optimizer, NULL),
                 call);
}

/* ---- Sequences ---------------------------------------------------------------------------------- */

static td_status check_parts(const char *call, const td_optimizer *optimizer,
                             td_schedule *const *schedules, int count, const int64_t *milestones)
{
    if (count < 1 || !schedules || (count > 1 && !milestones))
        return td__fail(TD_ERR_INVALID, "%s: %d schedules and their milestones are no sequence",
                        call, count);
    for (int i = 0; i < count; i++) {
        if (!schedules[i])
            return td__fail(TD_ERR_INVALID, "%s: schedule %d is NULL; the last failure was: %s",
                            call, i, td_last_error());
        if (schedules[i]->optimizer != optimizer)
            return td__fail(TD_ERR_INVALID, "%s: schedule %d is one of another optimizer", call, i);
    }
    return TD_OK;
}

td_schedule *td_sequential_schedule(td_optimizer *optimizer, td_schedule *const *schedules,
                                    int count, const int64_t *milestones)
{
    const char *call = "td_sequential_schedule";
    td_schedule form = {.rate = sequential_rate, .milestone_count = count - 1};
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
        return td__fail(TD_ERR_INVALID, "td_schedule_step: the schedule is NULL");
    schedule->steps++;
    return apply(schedule, "td_schedule_step");
}

int64_t td_schedule_steps(const td_schedule *schedule)
{
    return schedule ? schedule->steps : -1;
}

td_state *td_schedule_state(const td_schedule *schedule)
{
    td_state *state = schedule ? td_state_create() : NULL;
    if (state && td_state_add_integer(state, "steps", schedule->steps)) {
        td_state_destroy(state);
        return NULL;
    }
    return state;
}

td_status td_schedule_load_state(td_schedule *schedule, const td_state *state)
{
    const char *call = "td_schedule_load_state";
    if (!schedule || !state)
        return td__fail(TD_ERR_INVALID, "%s: the %s is NULL", call,
                        schedule ? "state" : "schedule");
    int64_t steps = 0, before = schedule->steps;
    TD_TRY(td_state_get_integer(state, "steps", &steps));
    if (steps < 0)
        return td__fail(TD_ERR_INVALID, "%s: the number of steps is %lld", call, (long long)steps);
    schedule->steps = steps;
    td_status status = apply(schedule, call);
    if (status)
        schedule->steps = before;
    return status;
}
