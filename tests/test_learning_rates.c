/* Schedules of learning rates against PyTorch, alone and several of them on one optimizer, with rates that
 * are set by hand, and going on from states. What was recorded, and how, is in
 * tests/reference/record_modules.py. */
#include "runner.h"

#include <tandem/optim.h>

#include <math.h>
#include <string.h>

enum { MOST_SCHEDULES = 3, STEPS = 30 };

struct recorded_curve {
    const char *names[MOST_SCHEDULES];
    bool by_hand; /* group 0 gets another rate at step 6, both groups do at step 17 */
    double rates[2 * STEPS];
};

#include "reference/schedule_vectors.h"

#define CHECK_NO(call, part)                                                                       \
    do {                                                                                           \
        CHECK(!(call));                                                                            \
        CHECK_CONTAINS(td_last_error(), part);                                                     \
    } while (0)

static double inverse(int64_t step, void *arg)
{
    return *(double *)arg / (double)(1 + step);
}

static double one = 1;

static td_schedule *schedule_of(const char *name, td_optimizer *o)
{
    if (!strcmp(name, "step"))
        return td_step_schedule(o, 7, 0.3);
    if (!strcmp(name, "multi_step"))
        return td_multi_step_schedule(o, (const int64_t[]){3, 4, 20}, 3, 0.5);
    if (!strcmp(name, "exponential"))
        return td_exponential_schedule(o, 0.9);
    if (!strcmp(name, "cosine"))
        return td_cosine_schedule(o, 12, 0.01);
    if (!strcmp(name, "long_cosine"))
        return td_cosine_schedule(o, 40, 0);
    if (!strcmp(name, "linear"))
        return td_linear_schedule(o, 0.25, 1, 8);
    if (!strcmp(name, "lambda"))
        return td_lambda_schedule(o, inverse, &one);
    if (!strcmp(name, "warmup"))
        return td_warmup_schedule(o, 0.1, 5, td_cosine_schedule(o, 20, 0));
    td_schedule *parts[] = {td_linear_schedule(o, 0.1, 1, 4), td_step_schedule(o, 3, 0.5),
                            td_exponential_schedule(o, 0.8)};
    return td_sequential_schedule(o, parts, 3, (const int64_t[]){4, 15});
}

/* An optimizer of two groups, and the schedules of a curve. */
struct course {
    td_optimizer *optimizer;
    td_schedule *schedules[MOST_SCHEDULES];
};

static struct course begin(const struct recorded_curve *curve)
{
    struct course course = {.optimizer = td_sgd_of(NULL, 0, &(td_sgd_options){.lr = 0.1})};
    CHECK_OK(td_optimizer_add_group(course.optimizer, NULL, 0, &(td_parameter_group){.lr = 0.3}));
    for (int i = 0; i < MOST_SCHEDULES && curve->names[i]; i++) {
        course.schedules[i] = schedule_of(curve->names[i], course.optimizer);
        CHECK(course.schedules[i]);
    }
    return course;
}

static void end(struct course *course)
{
    for (int i = 0; i < MOST_SCHEDULES; i++)
        td_schedule_destroy(course->schedules[i]);
    td_optimizer_destroy(course->optimizer);
}

/* Runs from one step to another, and compares the learning rates of each. */
static void follow(struct course *course, const struct recorded_curve *curve, int from, int to)
{
    for (int step = from; step < to; step++) {
        if (curve->by_hand && step == 6)
            CHECK_OK(td_optimizer_set_group_lr(course->optimizer, 0, 0.05 * 6));
        if (curve->by_hand && step == 17)
            CHECK_OK(td_optimizer_set_lr(course->optimizer, 0.05 * 17));
        for (int group = 0; group < 2; group++) {
            double want = curve->rates[2 * step + group];
            double lr = td_optimizer_group_lr(course->optimizer, group);
            if (fabs(lr - want) > 1e-14 * want)
                FAIL("%s and others: the rate of group %d at step %d is %.17g, not %.17g",
                     curve->names[0], group, step, lr, want);
        }
        for (int i = 0; i < MOST_SCHEDULES && course->schedules[i]; i++) {
            CHECK_EQ(td_schedule_steps(course->schedules[i]), step);
            CHECK_OK(td_schedule_step(course->schedules[i]));
        }
    }
}

TEST(learning_rates_are_those_of_pytorch)
{
    for (size_t i = 0; i < sizeof recorded_curves / sizeof recorded_curves[0]; i++) {
        struct course course = begin(&recorded_curves[i]);
        follow(&course, &recorded_curves[i], 0, STEPS);
        end(&course);
    }
}

/* Copies of the states of one course are loaded into a fresh one, in either order. */
static void hand_over(const struct course *from, struct course *to, bool optimizer_first)
{
    td_state *state = td_optimizer_state(from->optimizer);
    if (optimizer_first)
        CHECK_OK(td_optimizer_load_state(to->optimizer, state));
    for (int i = 0; i < MOST_SCHEDULES && from->schedules[i]; i++) {
        td_state *part = td_schedule_state(from->schedules[i]);
        CHECK_OK(td_schedule_load_state(to->schedules[i], part));
        td_state_destroy(part);
    }
    if (!optimizer_first)
        CHECK_OK(td_optimizer_load_state(to->optimizer, state));
    td_state_destroy(state);
}

TEST(learning_rates_go_on_from_a_state)
{
    for (size_t i = 0; i < sizeof recorded_curves / sizeof recorded_curves[0]; i++)
        for (int middle = 1; middle < STEPS; middle += 4) {
            struct course course = begin(&recorded_curves[i]);
            follow(&course, &recorded_curves[i], 0, middle);
            struct course other = begin(&recorded_curves[i]);
            hand_over(&course, &other, middle % 8 == 1);
            follow(&other, &recorded_curves[i], middle, STEPS);
            end(&other);
            end(&course);
        }
}

/* A rise from 0 cannot be made by factors alone. */
TEST(a_warm_up_from_nothing)
{
    td_optimizer *sgd = td_sgd_of(NULL, 0, &(td_sgd_options){.lr = 0.8});
    td_schedule *rise = td_warmup_schedule(sgd, 0, 4, NULL);
    for (int step = 0; step < 6; step++) {
        CHECK(fabs(td_optimizer_lr(sgd) - 0.2 * (step < 4 ? step : 4)) < 1e-15);
        CHECK_OK(td_schedule_step(rise));
    }
    td_schedule_destroy(rise);
    td_optimizer_destroy(sgd);
}

static double negative(int64_t step, void *arg)
{
    (void)arg;
    return step < 2 ? 1 : -1;
}

TEST(schedules_refuse)
{
    td_optimizer *sgd = td_sgd_of(NULL, 0, &(td_sgd_options){.lr = 0.1});
    td_optimizer *other = td_sgd_of(NULL, 0, &(td_sgd_options){.lr = 0.1});
    CHECK_NO(td_step_schedule(sgd, 0, 0.5), "number of steps is 0");
    CHECK_NO(td_step_schedule(NULL, 1, 0.5), "NULL");
    CHECK_NO(td_exponential_schedule(sgd, -0.5), "-0.5");
    CHECK_NO(td_multi_step_schedule(sgd, (const int64_t[]){3, 2}, 2, 0.5), "milestone 1 is 2");
    CHECK_NO(td_multi_step_schedule(sgd, NULL, 2, 0.5), "2 milestones");
    CHECK_NO(td_linear_schedule(sgd, 0, NAN, 3), "factor");
    CHECK_NO(td_lambda_schedule(sgd, NULL, NULL), "NULL");
    CHECK_NO(td_cosine_schedule(sgd, -3, 0), "-3");
    CHECK_NO(td_warmup_schedule(sgd, 0.1, 0, td_step_schedule(sgd, 1, 1)), "steps is 0");
    CHECK_NO(td_sequential_schedule(sgd, NULL, 0, NULL), "the schedules (0)");
    td_schedule *parts[] = {td_step_schedule(sgd, 1, 1), NULL};
    CHECK_NO(td_sequential_schedule(sgd, parts, 2, (const int64_t[]){1}),
             "td_sequential_schedule: an argument is NULL");
    parts[0] = td_step_schedule(other, 1, 1);
    CHECK_NO(td_sequential_schedule(sgd, parts, 1, NULL), "another optimizer");
    CHECK_FAILS(td_schedule_step(NULL), TD_ERR_INVALID, "NULL");
    CHECK_EQ(td_schedule_steps(NULL), -1);

    td_schedule *falls = td_lambda_schedule(sgd, negative, NULL);
    CHECK_OK(td_schedule_step(falls));
    CHECK_FAILS(td_schedule_step(falls), TD_ERR_INVALID, "-0.1");
    CHECK_EQ(td_schedule_steps(falls), 1); /* nothing has changed */
    CHECK(td_optimizer_lr(sgd) == 0.1);
    td_state *state = td_state_create();
    CHECK_FAILS(td_schedule_load_state(falls, state), TD_ERR_INVALID, "steps");
    CHECK_OK(td_state_add_integer(state, "steps", -4));
    CHECK_FAILS(td_schedule_load_state(falls, state), TD_ERR_INVALID, "-4");
    CHECK_FAILS(td_schedule_load_state(NULL, state), TD_ERR_INVALID, "NULL");
    td_state_destroy(state);
    state = td_state_create();
    CHECK_OK(td_state_add_integer(state, "steps", 4));
    CHECK_FAILS(td_schedule_load_state(falls, state), TD_ERR_INVALID, "group.0.lr");
    CHECK_OK(td_state_add_number(state, "group.0.lr", -1));
    CHECK_FAILS(td_schedule_load_state(falls, state), TD_ERR_INVALID, "is -1");
    CHECK_EQ(td_schedule_steps(falls), 1);
    td_state_destroy(state);
    td_schedule_destroy(falls);
    td_schedule_destroy(NULL);
    td_optimizer_destroy(other);
    td_optimizer_destroy(sgd);
}
