/* Communication hooks with a state: PowerSGD, post-local SGD and the periodic averager. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

enum { BATCH = 24, WIDTH = 32, CLASSES = 5 };

static td_module *make_net(int seed)
{
    td_manual_seed((uint64_t)seed);
    return td_sequential(td_linear(WIDTH, 40), td_tanh(), td_linear(40, 24), td_relu(),
                         td_linear(24, CLASSES), NULL);
}

/* A task that can be learnt: the class is that of the largest of the first inputs. */
static double train(td_module *model, td_optimizer *sgd, int step, int rank, int size)
{
    double value = 0;
    {
        TD_SCOPE;
        td_generator *generator = td_generator_create((uint64_t)(1000 + step), NULL);
        td_tensor *x = td_empty(SHAPE(BATCH, WIDTH), TD_F32, NULL);
        CHECK_OK(td_normal_(x, 0, 1, generator));
        td_generator_destroy(generator);
        x = td_narrow(x, 0, rank * BATCH / size, BATCH / size);
        td_tensor *y = td_argmax(td_narrow(x, 1, 0, CLASSES), 1, false);
        CHECK_OK(td_optimizer_zero_grad(sgd));
        td_tensor *loss = td_cross_entropy(td_forward(model, td_contiguous(x)), y);
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_optimizer_step(sgd));
        value = td_item(loss);
    }
    return value;
}

static bool same_bits(td_module *model, td_group *group)
{
    bool same = true;
    td_state *parameters = td_module_parameters(model);
    for (int i = 0; i < td_state_count(parameters); i++) {
        td_tensor *mine = td_state_tensor(parameters, i), *theirs = td_clone(mine);
        CHECK_OK(td_broadcast(theirs, td_get_global_rank(group, 0), group, NULL));
        same = same &&
               !memcmp(td_tensor_data(mine), td_tensor_data(theirs), td_tensor_nbytes(mine));
        td_tensor_release(theirs);
    }
    td_state_destroy(parameters);
    return same;
}

/* ---- PowerSGD --------------------------------------------------------------------------------------------- */

/* The mean loss of the last steps, and the bytes sent. */
static double learn(const td_powersgd_options *options, int steps, size_t *bytes)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_powersgd *powersgd = options ? td_powersgd_create(options) : NULL;
    CHECK(powersgd || !options);
    td_module *model = td_ddp(
        make_net(1),
        &(td_ddp_options){.bucket_cap_mb = 0.002,
                          .hook = options ? td_powersgd_hook(powersgd) : (td_comm_hook){0}});
    CHECK(model != NULL);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.05, .momentum = 0.9});
    double sum = 0;
    for (int step = 0; step < steps; step++) {
        double loss = train(model, sgd, step, rank, size);
        CHECK_OK(td_group_all_reduce(&loss, &loss, 1, TD_F64, TD_AVG, NULL, NULL));
        if (step >= steps - 20)
            sum += loss / 20;
    }
    CHECK(same_bits(model, NULL));
    td_ddp_stats stats;
    CHECK_OK(td_ddp_get_stats(model, &stats));
    CHECK_EQ(stats.passes, steps);
    *bytes = stats.bytes;
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    td_powersgd_destroy(powersgd);
    return sum;
}

static void powersgd_learns(void)
{
    CHECK_OK(td_init_process_group(NULL));
    size_t plain_bytes, bytes;
    double plain = learn(NULL, 600, &plain_bytes);
    double loss = learn(&(td_powersgd_options){.rank = 2, .start_step = 5}, 600, &bytes);
    if (!(loss < plain + 0.15) || bytes * 2 >= plain_bytes) {
        printf("a loss of %g, without compression %g; %zu bytes, without %zu\n", loss, plain, bytes,
               plain_bytes);
        CHECK(false);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(powersgd_learns_alone, .ranks = 1, .deadline_s = 60)
{
    powersgd_learns();
}

RANKS(powersgd_learns_on_two, .ranks = 2, .deadline_s = 60)
{
    powersgd_learns();
}

RANKS(powersgd_learns_on_three, .ranks = 3, .deadline_s = 60)
{
    powersgd_learns();
}

RANKS(powersgd_learns_on_four, .ranks = 4, .deadline_s = 60)
{
    powersgd_learns();
}

RANKS(before_its_start_powersgd_is_the_average, .ranks = 2, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    size_t plain_bytes, bytes;
    double plain = learn(NULL, 30, &plain_bytes);
    double loss = learn(&(td_powersgd_options){0}, 30, &bytes); /* 1000 steps */
    CHECK(loss == plain);
    CHECK_EQ(bytes, plain_bytes);
    CHECK_OK(td_destroy_process_group());
}

/* One pass over plain gradients: a matrix n x m of rank 2 over all ranks, a vector, an empty one and a small one. */
enum { ROWS = 30, COLUMNS = 20 };

static double element(int rank, int i, int j)
{
    return (rank + 1) * sin(0.3 * i) * cos(0.7 * j) + (2 - rank) * cos(0.2 * i) * sin(1.1 * j + 1);
}

static void reduce_once(td_reducer *reducer, int rank, double *matrix, float *vector)
{
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++)
            matrix[i * COLUMNS + j] = element(rank, i, j);
    for (int i = 0; i < 100; i++)
        vector[i] = (float)(i + rank);
    CHECK_OK(td_reducer_ready(reducer, 1));
    CHECK_OK(td_reducer_ready(reducer, 0));
    CHECK_OK(td_reducer_wait(reducer));
    double mean = (td_get_world_size(NULL) - 1) / 2.0;
    for (int i = 0; i < 100; i++)
        CHECK(fabs(vector[i] - (i + mean)) < 1e-5);
}

/* A reducer's gradients are vectors: they go as they are. */
RANKS(vectors_are_not_compressed, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    static double matrix[ROWS * COLUMNS];
    static float vector[100];
    td_powersgd *powersgd = td_powersgd_create(&(td_powersgd_options){.start_step = -1});
    td_reducer *reducer = td_reducer_create(
        (td_reducer_buffer[]){{.data = matrix, .count = ROWS * COLUMNS, .dtype = TD_F64},
                              {.data = vector, .count = 100, .dtype = TD_F32}},
        2, &(td_reducer_options){.hook = td_powersgd_hook(powersgd)});
    CHECK(reducer != NULL);
    for (int step = 0; step < 3; step++)
        reduce_once(reducer, rank, matrix, vector);
    CHECK(fabs(matrix[7 * COLUMNS + 3] - element(1, 7, 3)) < 1e-12); /* the mean of the ranks */
    td_reducer_destroy(reducer);
    td_powersgd_destroy(powersgd);
    CHECK_OK(td_destroy_process_group());
}

/* y = sum of w * x, elementwise: the gradient of w is x, whatever w is. */
static td_tensor *weighted_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_sum(td_mul(td_param(module, 0), inputs[0]));
}

static const td_module_ops weighted_ops = {.name = "Weighted", .forward = weighted_forward};

static td_module *make_weighted(void)
{
    td_module *module = td_module_create(&weighted_ops);
    td_tensor *w = td_full(SHAPE(ROWS, COLUMNS), 1, TD_F64, NULL);
    td_module_add_parameter(module, "w", w);
    td_tensor_release(w);
    return td_module_finish(module);
}

/* The largest error of the gradient, against the mean over the ranks. */
static double worst_error(const td_powersgd_options *options, int passes, bool total)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_powersgd *powersgd = td_powersgd_create(options);
    td_module *model = td_ddp(make_weighted(),
                              &(td_ddp_options){.hook = td_powersgd_hook(powersgd)});
    CHECK(model != NULL);
    static double sums[ROWS * COLUMNS];
    memset(sums, 0, sizeof sums);
    const double *grad = NULL;
    td_tensor *x = td_empty(SHAPE(ROWS, COLUMNS), TD_F64, NULL);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        ((double *)td_tensor_data(x))[i] = element(rank, i / COLUMNS, i % COLUMNS);
    for (int pass = 0; pass < passes; pass++) {
        CHECK_OK(td_module_zero_grad(model));
        {
            TD_SCOPE;
            CHECK_OK(td_backward(td_forward(model, x)));
        }
        grad = td_tensor_data(td_tensor_grad(td_module_parameter(model, "module.w")));
        for (int i = 0; i < ROWS * COLUMNS; i++)
            sums[i] += grad[i] / passes;
    }
    double worst = 0;
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        double mean = 0;
        for (int r = 0; r < size; r++)
            mean += element(r, i / COLUMNS, i % COLUMNS) / size;
        worst = fmax(worst, fabs((total ? sums[i] : grad[i]) - mean));
    }
    td_tensor_release(x);
    td_module_destroy(model);
    td_powersgd_destroy(powersgd);
    return worst;
}

RANKS(powersgd_is_exact_where_the_rank_is_enough, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    /* The mean of matrices of rank 2 has rank 2, and a product with any Q has its image. */
    td_powersgd_options options = {.rank = 2, .start_step = -1, .seed = 3};
    CHECK(worst_error(&options, 1, false) < 1e-9);
    options.rank = 4; /* two rows of P are zero */
    options.min_compression_rate = 1;
    CHECK(worst_error(&options, 3, false) < 1e-9);
    options.no_warm_start = options.no_error_feedback = true;
    CHECK(worst_error(&options, 3, false) < 1e-9);
    CHECK_OK(td_destroy_process_group());
}

RANKS(powersgd_returns_what_it_has_lost, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_powersgd_options options = {.rank = 1, .start_step = -1};
    double with = worst_error(&options, 40, true);
    options.no_error_feedback = true;
    double without = worst_error(&options, 40, true);
    if (!(with < 0.2 * without)) {
        printf("an error of %g, without feedback %g\n", with, without);
        CHECK(false);
    }
    CHECK_OK(td_destroy_process_group());
}

TEST(powersgd_refuses_nonsense)
{
    CHECK(td_powersgd_create(&(td_powersgd_options){.rank = -1}) == NULL);
    CHECK_CONTAINS(td_last_error(), "the rank is -1");
    CHECK(td_powersgd_create(&(td_powersgd_options){.min_compression_rate = NAN}) == NULL);
    td_powersgd_destroy(NULL);
}

/* ---- Post-local SGD --------------------------------------------------------------------------------------- */

enum local { ALONE, IN_PAIRS, BY_HOST };

static void post_local(enum local local)
{
    const char *number = getenv("RANK");
    if (local == BY_HOST)
        setenv("TANDEM_HOST_ID", number && atoi(number) < 2 ? "one host" : "another", 1);
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_group *pair = NULL;
    bool grouped = local != ALONE;
    if (grouped)
        CHECK_OK(td_new_subgroups(2, NULL, &pair));
    td_post_local *post = td_post_local_create(
        &(td_post_local_options){.subgroup = local == IN_PAIRS ? pair : NULL,
                                 .no_local_all_reduce = !grouped,
                                 .start_step = 4});
    td_module *model = td_ddp(make_net(1), &(td_ddp_options){.hook = td_post_local_hook(post)});
    CHECK(model != NULL);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    td_periodic_averager *averager = td_periodic_averager_create(
        model, &(td_periodic_averager_options){.period = 3, .warmup_steps = 4});
    CHECK(averager != NULL);
    for (int step = 0; step < 14; step++) {
        train(model, sgd, step, rank, size);
        bool averages = step >= 4 && (step - 4) % 3 == 0;
        bool together = same_bits(model, NULL);
        int all = together;
        CHECK_OK(td_group_all_reduce(&all, &all, 1, TD_I32, TD_MIN, NULL, NULL));
        CHECK_EQ(all, step < 4 || size == 1 || (grouped && size == 2));
        if (grouped)
            CHECK(same_bits(model, pair));
        CHECK_OK(td_periodic_averager_step(averager));
        CHECK(!averages || same_bits(model, NULL));
    }
    td_periodic_averager_destroy(averager);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    td_post_local_destroy(post);
    td_group_destroy(pair);
    CHECK_OK(td_destroy_process_group());
}

RANKS(post_local_sgd_alone, .ranks = 1)
{
    post_local(ALONE);
}

RANKS(post_local_sgd_without_a_subgroup, .ranks = 3)
{
    post_local(ALONE);
}

RANKS(post_local_sgd_in_pairs, .ranks = 4, .deadline_s = 40)
{
    post_local(IN_PAIRS);
}

RANKS(post_local_sgd_by_host, .ranks = 4, .deadline_s = 40)
{
    post_local(BY_HOST);
}

TEST(an_averager_refuses_nonsense)
{
    td_module *net = td_linear(2, 2);
    CHECK(td_periodic_averager_create(net, NULL) == NULL);
    CHECK_CONTAINS(td_last_error(), "the period 0");
    CHECK(td_periodic_averager_create(NULL, &(td_periodic_averager_options){.period = 1}) == NULL);
    CHECK_FAILS(td_periodic_averager_step(NULL), TD_ERR_INVALID, "NULL");
    td_periodic_averager_destroy(NULL);
    td_module_destroy(net);
}
