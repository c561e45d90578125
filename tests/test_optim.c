/* Optimizers and clipping against PyTorch: parameters bit for bit over 20 steps; groups, states, and what
 * is refused. What was recorded, and how, is in tests/reference/record_modules.py. */
#include "host_data.h"
#include "runner.h"

#include <tandem/checkpoint.h>
#include <tandem/optim.h>
#include <tandem/parallel.h>

#include <math.h>
#include <string.h>
#include <zlib.h>

struct recorded_path {
    const char *name;
    bool wide;
    uint32_t checksums[20];
    double values[4];
};

struct recorded_clip {
    double type, limit, norm;
    double values[4];
};

#include "reference/optim_vectors.h"

static td_tensor *leaf_of(td_tensor *tensor)
{
    CHECK(tensor);
    CHECK_OK(td_tensor_set_requires_grad(tensor, true));
    return tensor;
}

/* Draws a gradient. */
static void set_grad(td_tensor *parameter)
{
    {
        TD_SCOPE;
        td_tensor *grad = host_randn(td_tensor_shape(parameter), td_tensor_ndim(parameter),
                                     td_tensor_dtype(parameter));
        CHECK_OK(td_tensor_set_grad(parameter, grad));
    }
}

/* ---- Paths ----------------------------------------------------------------------------------------- */

static td_optimizer *make(const char *name, td_tensor **p, int count)
{
    td_sgd_options sgd = {.lr = 0.1};
    td_adam_options adam = {0};
    if (!strcmp(name, "sgd_decay"))
        sgd = (td_sgd_options){.lr = 0.1, .weight_decay = 0.03};
    else if (!strcmp(name, "sgd_momentum"))
        sgd = (td_sgd_options){.lr = 0.01, .momentum = 0.5};
    else if (!strcmp(name, "sgd_dampening"))
        sgd = (td_sgd_options){.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01};
    else if (!strcmp(name, "sgd_nesterov"))
        sgd = (td_sgd_options){.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01};
    else if (!strcmp(name, "sgd_maximize"))
        sgd = (td_sgd_options){.lr = 0.1, .momentum = 0.9, .maximize = true};
    else if (!strcmp(name, "adam_options"))
        adam = (td_adam_options){
            .lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-5, .weight_decay = 0.1};
    else if (!strcmp(name, "adam_amsgrad"))
        adam = (td_adam_options){.lr = 0.02, .amsgrad = true, .weight_decay = 0.1};
    else if (!strcmp(name, "adam_no_beta1"))
        adam = (td_adam_options){.lr = 0.02, .beta1 = TD_ZERO};
    else if (!strcmp(name, "adam_maximize"))
        adam = (td_adam_options){.lr = 0.02, .maximize = true};
    else if (!strcmp(name, "adamw_options"))
        adam = (td_adam_options){.lr = 0.02, .weight_decay = 0.3, .amsgrad = true};
    else if (!strcmp(name, "adamw_no_decay"))
        adam = (td_adam_options){.lr = 0.02, .weight_decay = TD_ZERO};
    if (!strncmp(name, "sgd", 3))
        return td_sgd_of(p, count, &sgd);
    return strncmp(name, "adamw", 5) ? td_adam_of(p, count, &adam) : td_adamw_of(p, count, &adam);
}

TEST(paths_are_those_of_pytorch)
{
    for (size_t i = 0; i < sizeof recorded_paths / sizeof recorded_paths[0]; i++) {
        const struct recorded_path *path = &recorded_paths[i];
        td_manual_seed(1);
        td_tensor *parameter = leaf_of(
            host_randn((const int64_t[]){37}, 1, path->wide ? TD_F64 : TD_F32));
        td_optimizer *optimizer = make(path->name, &parameter, 1);
        CHECK(optimizer);
        for (int step = 0; step < 20; step++) {
            set_grad(parameter);
            CHECK_OK(td_optimizer_step(optimizer));
            uint32_t sum = (uint32_t)crc32(0, host_data(parameter),
                                           (unsigned)td_tensor_nbytes(parameter));
            /* Normal numbers of f64 are those of the C library, and may differ in their last bits. */
            if (sum != path->checksums[step] && !path->wide)
                FAIL("%s: other elements after step %d", path->name, step + 1);
        }
        for (int v = 0; v < 4; v++) {
            double value = path->wide ? ((const double *)host_data(parameter))[v]
                                      : (double)((const float *)host_data(parameter))[v];
            CHECK(fabs(value - path->values[v]) <= 1e-13 * fmax(1, fabs(value)));
        }
        td_optimizer_destroy(optimizer);
        td_tensor_release(parameter);
    }
}

/* Views and halves go another way, to the same numbers. */
TEST(other_layouts_and_dtypes)
{
    const char *names[] = {"sgd_nesterov", "adam_amsgrad"};
    for (int n = 0; n < 2; n++) {
        td_manual_seed(5);
        td_tensor *plain = leaf_of(td_randn((const int64_t[]){6, 5}, 2, TD_F32, NULL));
        td_tensor *base = td_empty((const int64_t[]){5, 12}, 2, TD_F32, NULL), *turned = NULL;
        {
            TD_SCOPE;
            turned = td_tensor_retain(td_slice(td_transpose(base, 0, 1), 0, 0, 12, 2));
        }
        td_tensor *half = NULL;
        {
            TD_NO_GRAD;
            CHECK_OK(td_tensor_copy(turned, plain));
            half = td_to_dtype(plain, TD_BF16);
        }
        leaf_of(turned);
        leaf_of(half);
        td_tensor *all[] = {plain, turned, half};
        td_optimizer *optimizer = make(names[n], all, 3);
        for (int step = 0; step < 3; step++) {
            set_grad(plain);
            {
                TD_SCOPE;
                td_tensor *grad = td_tensor_grad(plain);
                CHECK_OK(td_tensor_set_grad(turned, grad));
                CHECK_OK(td_tensor_set_grad(half, td_to_dtype(grad, TD_BF16)));
            }
            CHECK_OK(td_optimizer_step(optimizer));
        }
        CHECK(td_equal(plain, turned));
        {
            TD_NO_GRAD;
            {
                TD_SCOPE;
                CHECK(td_allclose(td_to_dtype(half, TD_F32), plain, 0.05, 0.05));
            }
        }
        td_optimizer_destroy(optimizer);
        td_tensor_release(half);
        td_tensor_release(turned);
        td_tensor_release(base);
        td_tensor_release(plain);
    }
}

TEST(parameters_without_gradient_are_passed_over)
{
    td_tensor *with = leaf_of(td_ones((const int64_t[]){2}, 1, TD_F32, NULL));
    td_tensor *without = leaf_of(td_ones((const int64_t[]){2}, 1, TD_F32, NULL));
    td_tensor *frozen = td_ones((const int64_t[]){2}, 1, TD_F32, NULL);
    td_tensor *empty = leaf_of(td_ones((const int64_t[]){0}, 1, TD_F32, NULL));
    td_optimizer *sgd = td_sgd_of((td_tensor *[]){with, without, frozen, empty}, 4,
                                  &(td_sgd_options){.lr = 1, .momentum = 0.5});
    set_grad(with);
    set_grad(empty);
    CHECK_OK(td_optimizer_step(sgd));
    CHECK(((const float *)host_data(with))[0] != 1);
    CHECK(((const float *)host_data(without))[0] == 1);
    CHECK(((const float *)host_data(frozen))[0] == 1);
    /* Its gradient counts as 0 now: only the momentum moves it. */
    float before = ((const float *)host_data(with))[0], moved = 1 - before;
    CHECK_OK(td_optimizer_zero_grad(sgd));
    CHECK_OK(td_optimizer_step(sgd));
    CHECK(fabsf(before - ((const float *)host_data(with))[0] - moved / 2) < 1e-6f);
    td_optimizer_destroy(sgd);
    td_optimizer_destroy(NULL);
    td_tensor_release(empty);
    td_tensor_release(frozen);
    td_tensor_release(without);
    td_tensor_release(with);
}

/* What was saved for a gradient is known to be gone after a step. */
/* As in PyTorch, what counts is that there is a gradient. */
TEST(parameters_that_do_not_require_grad_are_stepped)
{
    {
        TD_SCOPE;
        td_tensor *p[] = {leaf_of(td_ones((int64_t[]){2}, 1, TD_F32, NULL)),
                          td_ones((int64_t[]){2}, 1, TD_F32, NULL)};
        td_optimizer *sgd = td_sgd_of(p, 2, &(td_sgd_options){.lr = 0.5});
        CHECK_OK(td_backward(td_sum(td_square(p[0]))));
        CHECK_OK(td_tensor_set_requires_grad(p[0], false));
        CHECK_OK(td_tensor_set_grad(p[1], td_ones((int64_t[]){2}, 1, TD_F32, NULL)));
        CHECK_OK(td_optimizer_step(sgd));
        CHECK(((const float *)host_data(p[0]))[0] == 0);
        CHECK(((const float *)host_data(p[1]))[1] == 0.5f);
        CHECK_OK(td_optimizer_zero_grad(sgd));
        CHECK_OK(td_optimizer_step(sgd));
        CHECK(((const float *)host_data(p[1]))[0] == 0.5f);
        td_optimizer_destroy(sgd);
    }
}

TEST(a_step_counts_as_a_change)
{
    td_tensor *w = leaf_of(td_ones((const int64_t[]){2}, 1, TD_F32, NULL));
    td_tensor *x = leaf_of(td_ones((const int64_t[]){2}, 1, TD_F32, NULL));
    td_optimizer *sgd = td_sgd_of(&w, 1, &(td_sgd_options){.lr = 1});
    {
        TD_SCOPE;
        td_tensor *loss = td_sum(td_mul(w, x));
        set_grad(w);
        CHECK_OK(td_optimizer_step(sgd));
        CHECK_EQ(td_backward(loss), TD_ERR_STATE);
    }
    td_optimizer_destroy(sgd);
    td_tensor_release(x);
    td_tensor_release(w);
}

/* ---- Groups and refusals ----------------------------------------------------------------------------- */

TEST(groups_have_numbers_of_their_own)
{
    td_tensor *p[3];
    for (int i = 0; i < 3; i++)
        p[i] = leaf_of(td_ones((const int64_t[]){1}, 1, TD_F64, NULL));
    td_optimizer *sgd = td_sgd_of(p, 1, &(td_sgd_options){.lr = 0.1, .weight_decay = 0.5});
    CHECK_OK(td_optimizer_add_group(sgd, p + 1, 1, &(td_parameter_group){.lr = 0.2}));
    CHECK_OK(td_optimizer_add_group(sgd, p + 2, 1, &(td_parameter_group){.weight_decay = TD_ZERO}));
    CHECK_EQ(td_optimizer_group_count(sgd), 3);
    CHECK(td_optimizer_lr(sgd) == 0.1 && td_optimizer_group_lr(sgd, 1) == 0.2);
    CHECK(isnan(td_optimizer_group_lr(sgd, 3)) && isnan(td_optimizer_lr(NULL)));
    {
        TD_SCOPE;
        for (int i = 0; i < 3; i++)
            CHECK_OK(td_tensor_set_grad(p[i], td_zeros((const int64_t[]){1}, 1, TD_F64, NULL)));
    }
    CHECK_OK(td_optimizer_step(sgd));
    double want[] = {1 - 0.1 * 0.5, 1 - 0.2 * 0.5, 1};
    for (int i = 0; i < 3; i++)
        CHECK(fabs(*(const double *)host_data(p[i]) - want[i]) < 1e-15);
    CHECK_OK(td_optimizer_set_group_lr(sgd, 1, 0.7));
    CHECK(td_optimizer_lr(sgd) == 0.1 && td_optimizer_group_lr(sgd, 1) == 0.7);
    CHECK_OK(td_optimizer_set_lr(sgd, 0));
    CHECK(td_optimizer_group_lr(sgd, 2) == 0);
    CHECK_FAILS(td_optimizer_set_lr(sgd, -1), TD_ERR_INVALID, "-1");
    CHECK_FAILS(td_optimizer_set_group_lr(sgd, 3, 1), TD_ERR_INVALID, "group 3");
    CHECK_FAILS(td_optimizer_add_group(sgd, p, 1, NULL), TD_ERR_INVALID, "already");
    CHECK_FAILS(td_optimizer_add_group(NULL, p, 1, NULL), TD_ERR_INVALID, "NULL");
    CHECK_EQ(td_optimizer_group_count(sgd), 3);
    td_optimizer_destroy(sgd);
    for (int i = 0; i < 3; i++)
        td_tensor_release(p[i]);
}

#define CHECK_NO(call, part)                                                                       \
    do {                                                                                           \
        CHECK(!(call));                                                                            \
        CHECK_CONTAINS(td_last_error(), part);                                                     \
    } while (0)

TEST(optimizers_refuse)
{
    td_tensor *p = leaf_of(td_ones((const int64_t[]){2}, 1, TD_F32, NULL));
    td_tensor *integers = td_ones((const int64_t[]){2}, 1, TD_I32, NULL),
              *result = td_mul_scalar(p, 2);
    td_module *net = td_linear(2, 2);
    CHECK_NO(td_sgd(net, NULL), "no learning rate");
    CHECK_NO(td_sgd(net, &(td_sgd_options){.momentum = 0.5}), "no learning rate");
    CHECK_NO(td_sgd(net, &(td_sgd_options){.lr = -1}), "lr is -1");
    CHECK_NO(td_sgd(net, &(td_sgd_options){.lr = NAN}), "lr is");
    CHECK_NO(td_sgd(net, &(td_sgd_options){.lr = 1, .nesterov = true}), "nesterov");
    CHECK_NO(td_sgd(net, &(td_sgd_options){.lr = 1, .weight_decay = -1}), "weight_decay");
    CHECK_NO(td_sgd(NULL, &(td_sgd_options){.lr = 1}), "NULL");
    CHECK_NO(td_adam(net, &(td_adam_options){.beta2 = 1}), "beta2 is 1");
    CHECK_NO(td_adamw(net, &(td_adam_options){.eps = -1}), "eps is -1");
    CHECK_NO(td_sgd_of(&integers, 1, &(td_sgd_options){.lr = 1}), "i32");
    CHECK_NO(td_sgd_of(&result, 1, &(td_sgd_options){.lr = 1}), "leaves");
    CHECK_NO(td_sgd_of((td_tensor *[]){p, p}, 2, &(td_sgd_options){.lr = 1}), "already");
    CHECK_NO(td_adam_of((td_tensor *[]){p, NULL}, 2, NULL), "parameter 1 is NULL");
    CHECK_NO(td_adam_of(NULL, 2, NULL), "2 parameters");
    {
        TD_SCOPE;
        td_tensor *repeated = td_expand(td_detach(p), (const int64_t[]){3, 2}, 2);
        CHECK_NO(td_adam_of(&repeated, 1, NULL), "share memory");
    }
    CHECK_FAILS(td_optimizer_step(NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_optimizer_zero_grad(NULL), TD_ERR_INVALID, "NULL");
    td_optimizer *none = td_adam_of(NULL, 0, NULL);
    CHECK(none && td_optimizer_lr(none) == 1e-3);
    CHECK_OK(td_optimizer_step(none));
    td_optimizer_destroy(none);
    td_module_destroy(net);
    td_tensor_release(result);
    td_tensor_release(integers);
    td_tensor_release(p);
}

/* ---- Modules ------------------------------------------------------------------------------------------ */

/* Trains a network on random data for some steps; the data follow from the step's number. */
static void train(td_module *net, td_optimizer *optimizer, td_schedule *schedule, int from, int to)
{
    for (int step = from; step < to; step++) {
        TD_SCOPE;
        td_manual_seed((uint64_t)step);
        td_tensor *x = td_randn((const int64_t[]){8, 4}, 2, TD_F32, NULL);
        td_tensor *target = td_randint(0, 3, (const int64_t[]){8}, 1, TD_I64, NULL);
        CHECK_OK(td_optimizer_zero_grad(optimizer));
        CHECK_OK(td_backward(td_cross_entropy(td_forward(net, x), target)));
        CHECK_OK(td_optimizer_step(optimizer));
        CHECK_OK(td_schedule_step(schedule));
    }
}

static td_module *network(void)
{
    td_manual_seed(9);
    return td_sequential(td_linear(4, 8), td_batch_norm1d(8), td_tanh(), td_linear(8, 3), NULL);
}

static void check_same_parameters(td_module *a, td_module *b)
{
    td_state *of_a = td_module_state(a), *of_b = td_module_state(b);
    for (int i = 0; i < td_state_count(of_a); i++)
        CHECK(td_equal(td_state_tensor(of_a, i), td_state_tensor(of_b, i)));
    td_state_destroy(of_b);
    td_state_destroy(of_a);
}

static td_optimizer *optimizer_of(td_module *net, int kind)
{
    const td_adam_options amsgrad = {.lr = 0.05, .amsgrad = true};
    return kind == 0   ? td_sgd(net, &(td_sgd_options){.lr = 0.1, .momentum = 0.9})
           : kind == 1 ? td_adam(net, &amsgrad)
                       : td_adamw(net, NULL);
}

/* Saved in the middle, loaded into a fresh start, and the end is the same, bit for bit. */
TEST(states_go_on_bit_for_bit)
{
    for (int kind = 0; kind < 3; kind++) {
        td_module *net = network();
        td_optimizer *optimizer = optimizer_of(net, kind);
        td_schedule *schedule = td_warmup_schedule(optimizer, 0.1, 4,
                                                   td_cosine_schedule(optimizer, 20, 0));
        train(net, optimizer, schedule, 0, 7);
        td_state *of_net = td_module_state(net), *of_optimizer = td_optimizer_state(optimizer);
        td_state *saved = td_state_create(), *of_schedule = td_schedule_state(schedule);
        CHECK_OK(td_state_add_all(saved, "model.", of_net));
        CHECK_OK(td_state_add_all(saved, "optimizer.", of_optimizer));
        CHECK_OK(td_state_add_all(saved, "schedule.", of_schedule));
        td_state *copy = td_state_clone(saved);
        train(net, optimizer, schedule, 7, 15);

        td_module *other = network();
        td_optimizer *fresh = optimizer_of(other, kind);
        td_schedule *again = td_warmup_schedule(fresh, 0.1, 4, td_cosine_schedule(fresh, 20, 0));
        td_state *part = td_state_part(copy, "model.");
        CHECK_OK(td_module_load_state(other, part, true));
        td_state_destroy(part);
        part = td_state_part(copy, "optimizer.");
        CHECK_OK(td_optimizer_load_state(fresh, part));
        td_state_destroy(part);
        part = td_state_part(copy, "schedule.");
        CHECK_OK(td_schedule_load_state(again, part));
        td_state_destroy(part);
        train(other, fresh, again, 7, 15);
        check_same_parameters(net, other);
        CHECK(td_optimizer_lr(fresh) == td_optimizer_lr(optimizer));

        td_state_destroy(copy);
        td_state_destroy(saved);
        td_state_destroy(of_schedule);
        td_state_destroy(of_optimizer);
        td_state_destroy(of_net);
        td_schedule_destroy(again);
        td_schedule_destroy(schedule);
        td_optimizer_destroy(fresh);
        td_optimizer_destroy(optimizer);
        td_module_destroy(other);
        td_module_destroy(net);
    }
}

TEST(names_in_the_state)
{
    td_module *net = network();
    td_optimizer *sgd = optimizer_of(net, 0), *adam = optimizer_of(net, 1);
    td_state *fresh = td_optimizer_state(sgd);
    CHECK(td_state_get(fresh, "group.0.lr") && td_state_get(fresh, "options.momentum"));
    CHECK(!td_state_get(fresh, "state.0.momentum_buffer"));
    td_schedule *schedule = td_step_schedule(sgd, 3, 0.5);
    train(net, sgd, schedule, 0, 1);
    CHECK_OK(td_optimizer_step(adam));
    td_state *state = td_optimizer_state(sgd), *other = td_optimizer_state(adam);
    CHECK(td_state_get(state, "state.5.momentum_buffer"));
    CHECK(td_state_get(state, "group.0.initial_lr"));
    CHECK(!td_state_get(state, "state.6.momentum_buffer"));
    int64_t steps = 0;
    CHECK_OK(td_state_get_integer(other, "state.2.step", &steps));
    CHECK_EQ(steps, 1);
    CHECK(td_state_get(other, "state.0.exp_avg") && td_state_get(other, "state.0.max_exp_avg_sq"));
    CHECK_OK(td_optimizer_load_state(sgd, fresh)); /* as at the beginning */
    td_state *again = td_optimizer_state(sgd);
    CHECK(!td_state_get(again, "state.0.momentum_buffer"));
    td_state_destroy(again);
    td_state_destroy(other);
    td_state_destroy(state);
    td_state_destroy(fresh);
    td_schedule_destroy(schedule);
    td_optimizer_destroy(adam);
    td_optimizer_destroy(sgd);
    td_module_destroy(net);
    CHECK(!td_optimizer_state(NULL) && !td_schedule_state(NULL));
}

/* A copy of `state` without one entry, or with another tensor in its place. */
static td_state *changed(const td_state *state, const char *name, td_tensor *instead)
{
    td_state *copy = td_state_create();
    for (int i = 0; i < td_state_count(state); i++) {
        bool here = strcmp(td_state_name(state, i), name) == 0;
        td_tensor *tensor = here ? instead : td_state_tensor(state, i);
        if (tensor)
            CHECK_OK(td_state_add(copy, td_state_name(state, i), tensor));
    }
    return copy;
}

TEST(states_that_do_not_fit)
{
    td_module *net = network();
    td_optimizer *adam = optimizer_of(net, 1), *sgd = optimizer_of(net, 0);
    td_schedule *schedule = td_step_schedule(adam, 3, 0.5);
    train(net, adam, schedule, 0, 2);
    td_state *good = td_optimizer_state(adam);
    {
        TD_SCOPE;
        td_tensor *wrong = td_zeros((const int64_t[]){7}, 1, TD_F32, NULL);
        td_tensor *many = td_zeros(NULL, 0, TD_I64, NULL),
                  *negative = td_full(NULL, 0, -1, TD_F64, NULL);
        const struct {
            const char *name;
            td_tensor *instead;
            const char *message;
        } cases[] = {
            {"state.1.exp_avg_sq", NULL, "\"state.1.exp_avg_sq\" is missing"},
            {"state.1.exp_avg", wrong, "has the shape [7]"},
            {"state.1.step", NULL, "state.1.step"},
            {"state.1.step", many, "state.1.step"},
            {"state.1.exp_avg", NULL, "state.1."}, /* the rest of it is unexpected */
            {"group.0.size", many, "0 parameters"},
            {"group.0.lr", NULL, "group.0.lr"},
            {"group.0.lr", negative, "learning rate is -1"},
            {"options.beta1", wrong, "options.beta1"},
        };
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            td_state *bad = changed(good, cases[i].name, cases[i].instead);
            CHECK_FAILS(td_optimizer_load_state(adam, bad), TD_ERR_INVALID, cases[i].message);
            td_state_destroy(bad);
        }
    }
    CHECK_FAILS(td_optimizer_load_state(sgd, good), TD_ERR_INVALID, "options.momentum");
    CHECK_FAILS(td_optimizer_load_state(sgd, NULL), TD_ERR_INVALID, "NULL");
    td_optimizer *adamw = td_adamw(net, &(td_adam_options){.amsgrad = true});
    CHECK_FAILS(td_optimizer_load_state(adamw, good), TD_ERR_INVALID, "td_adam()");
    CHECK_OK(td_state_add_number(good, "state.99.exp_avg", 1));
    CHECK_FAILS(td_optimizer_load_state(adam, good), TD_ERR_INVALID, "state.99.exp_avg");
    train(net, adam, schedule, 2, 3); /* the next step is unaffected */
    td_optimizer_destroy(adamw);
    td_state_destroy(good);
    td_schedule_destroy(schedule);
    td_optimizer_destroy(sgd);
    td_optimizer_destroy(adam);
    td_module_destroy(net);
}

/* ---- Clipping ------------------------------------------------------------------------------------------- */

TEST(clipping_is_that_of_pytorch)
{
    for (size_t i = 0; i < sizeof recorded_clips / sizeof recorded_clips[0]; i++) {
        const struct recorded_clip *clip = &recorded_clips[i];
        td_manual_seed(1);
        td_tensor *p[] = {
            leaf_of(td_zeros((const int64_t[]){5}, 1, TD_F32, NULL)),
            leaf_of(td_zeros((const int64_t[]){30}, 1, TD_F32, NULL)),
            leaf_of(td_zeros((const int64_t[]){3}, 1, TD_F32, NULL))}; /* no gradient */
        set_grad(p[0]);
        set_grad(p[1]);
        double norm = 0;
        CHECK_OK(td_clip_grad_norm_of_(p, 3, clip->limit,
                                       &(td_clip_options){.norm_type = clip->type}, &norm));
        CHECK(fabs(norm - clip->norm) < 1e-6 * clip->norm);
        const float *grad = host_data(td_tensor_grad(p[1]));
        for (int v = 0; v < 4; v++)
            CHECK(fabs(grad[v] - clip->values[v]) < 1e-6);
        for (int t = 0; t < 3; t++)
            td_tensor_release(p[t]);
    }
}

static void set_at(td_tensor *x, int64_t index, double value)
{
    TD_SCOPE;
    CHECK_OK(td_fill_(td_select(x, 0, index), value));
}

TEST(clipping_of_what_is_not_finite)
{
    td_tensor *p = leaf_of(td_zeros((const int64_t[]){3}, 1, TD_F32, NULL));
    const double types[] = {2, INFINITY, 1};
    const float bad[] = {NAN, INFINITY};
    for (int t = 0; t < 3; t++)
        for (int b = 0; b < 2; b++) {
            set_grad(p);
            td_tensor *grad = td_tensor_grad(p);
            float first = *(const float *)host_data(grad);
            set_at(grad, 1, bad[b]);
            td_clip_options options = {.norm_type = types[t], .error_if_nonfinite = true};
            double norm = 7;
            CHECK_FAILS(td_clip_grad_norm_of_(&p, 1, 1, &options, &norm), TD_ERR_INVALID,
                        b ? "inf" : "nan");
            CHECK(*(const float *)host_data(grad) == first && norm == 7);
            options.error_if_nonfinite = false;
            CHECK_OK(td_clip_grad_norm_of_(&p, 1, 1, &options, &norm));
            const float *clipped = host_data(grad);
            CHECK(b ? isinf(norm) && clipped[0] == 0 && isnan(clipped[1])
                    : isnan(norm) && isnan(clipped[0]));
        }
    CHECK_FAILS(td_clip_grad_norm_of_(&p, 1, -1, NULL, NULL), TD_ERR_INVALID, "-1");
    CHECK_FAILS(td_clip_grad_norm_of_(NULL, 1, 1, NULL, NULL), TD_ERR_INVALID, "1 parameters");
    CHECK_FAILS(td_clip_grad_norm_(NULL, 1, NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_clip_grad_value_(NULL, 1), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_clip_grad_value_of_(&p, 1, NAN), TD_ERR_INVALID, "nan");
    CHECK_FAILS(td_clip_grad_value_of_(&p, -1, 1), TD_ERR_INVALID, "-1 parameters");
    td_tensor_release(p);
}

TEST(reserved_members_must_be_zero)
{
    td_module *net = td_linear(2, 2);
    CHECK(!td_sgd(net, &(td_sgd_options){.lr = 0.1, .reserved = {NULL, net}}));
    CHECK_CONTAINS(td_last_error(), "td_sgd: reserved[1] is not zero");
    CHECK(!td_sgd(net, &(td_sgd_options){0}));                         /* lr must be given, */
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = TD_ZERO}); /* and may be 0 */
    CHECK(sgd && td_optimizer_lr(sgd) == 0);
    td_optimizer_destroy(sgd);
    td_module_destroy(net);
}

static td_status no_backward(td_node *node, td_tensor *const *grad_outputs, td_tensor **grad_inputs)
{
    (void)node, (void)grad_outputs, (void)grad_inputs;
    return TD_OK;
}

static int64_t one(void *self)
{
    (void)self;
    return 1;
}

static void describe_wrongly(void *self, td_sample_spec *input, td_sample_spec *target)
{
    input->reserved[3] = self;
    target->ndim = -1;
}

static td_status read_nothing(void *self, int64_t index, void *input, void *target)
{
    (void)self, (void)index, (void)input, (void)target;
    return TD_OK;
}

static td_status order_nothing(void *self, int64_t epoch, uint64_t seed, int64_t *indices)
{
    (void)self, (void)epoch, (void)seed;
    indices[0] = 0;
    return TD_OK;
}

TEST(reserved_members_of_tables_must_be_zero)
{
    int set;
    TD_SCOPE;
    CHECK(!td_module_create(&(td_module_ops){.name = "M", .reserved = {&set}}));
    CHECK_CONTAINS(td_last_error(), "td_module_create: reserved[0] is not zero");
    td_dataset_ops dataset_ops = {.size = one, .describe = describe_wrongly, .read = read_nothing};
    CHECK(!td_dataset_create(&dataset_ops, &set));
    CHECK_CONTAINS(td_last_error(), "td_dataset_create: reserved[3] is not zero");
    dataset_ops.reserved[1] = &set;
    CHECK(!td_dataset_create(&dataset_ops, NULL));
    CHECK_CONTAINS(td_last_error(), "td_dataset_create: reserved[1] is not zero");
    td_sampler_ops sampler_ops = {.size = one, .order = order_nothing, .reserved = {&set}};
    CHECK(!td_sampler_create(&sampler_ops, NULL));
    CHECK_CONTAINS(td_last_error(), "td_sampler_create: reserved[0] is not zero");
    sampler_ops.reserved[0] = NULL;
    td_sampler *sampler = td_sampler_create(&sampler_ops, NULL);
    CHECK_FAILS(td_sampler_set_position(sampler, &(td_sampler_position){.reserved = {&set}}),
                TD_ERR_INVALID, "td_sampler_set_position: reserved[0] is not zero");
    td_sampler_release(sampler);
    td_function function = {.name = "f", .backward = no_backward};
    td_tensor *x = td_ones(NULL, 0, TD_F32, NULL);
    CHECK(!td_record(&function, x, &(td_node_spec){.reserved = {&set}}));
    CHECK_CONTAINS(td_last_error(), "td_record: reserved[0] is not zero");
    function.reserved[2] = &set;
    CHECK(!td_record(&function, x, &(td_node_spec){0}));
    CHECK_CONTAINS(td_last_error(), "td_record: reserved[2] is not zero");
    CHECK(!td_reducer_create(NULL, 0, &(td_reducer_options){.hook = {.reserved = {&set}}}));
    CHECK_CONTAINS(td_last_error(), "td_reducer_create: reserved[0] is not zero");
    CHECK(!td_reducer_create(&(td_reducer_buffer){.count = 1, .reserved = {&set}}, 1, NULL));
    CHECK_CONTAINS(td_last_error(), "td_reducer_create: reserved[0] is not zero");
    CHECK(!td_ddp(td_linear(1, 1), &(td_ddp_options){.hook = {.reserved = {&set}}}));
    CHECK_CONTAINS(td_last_error(), "td_ddp: reserved[0] is not zero");
    td_training training = {.reserved = {NULL, NULL, &set}};
    CHECK_FAILS(td_training_save("/nowhere", &training, NULL), TD_ERR_INVALID,
                "td_training_save: reserved[2] is not zero");
}

TEST(clipping_a_module)
{
    td_module *net = td_linear(3, 1);
    set_grad(td_module_parameter(net, "weight"));
    double norm = 0;
    CHECK_OK(td_clip_grad_norm_(net, 0.5, NULL, &norm));
    CHECK_OK(td_clip_grad_norm_(net, 100, NULL, &norm));
    CHECK(fabs(norm - 0.5) < 1e-5);
    CHECK_OK(td_clip_grad_value_(net, 0.1));
    const float *grad = host_data(td_tensor_grad(td_module_parameter(net, "weight")));
    float greatest = 0;
    for (int i = 0; i < 3; i++)
        greatest = fmaxf(greatest, fabsf(grad[i]));
    CHECK(greatest == 0.1f);
    td_module_destroy(net);
}
