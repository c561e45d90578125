/* td_fsdp() in trouble: writes where there must be none, parameters outside their unit, passes that fail, ranks that die,
 * and ends in any order. */
#include "runner.h"

#include <tandem/tandem.h>

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 5, WIDE = 67, OUT = 9 };

/* ---- A model that does what it is told ------------------------------------------------------------------------ */

enum deed { GOOD, WRITES, WRITES_MEMORY, FAILS, BORROWS, DIES };

static enum deed deed; /* of the next passes of this rank */

static td_status fail_backward(td_module *module, td_tensor_list *grads, void *arg)
{
    (void)module, (void)grads, (void)arg;
    return deed == FAILS ? td_fail(TD_ERR_UNSUPPORTED, "the hook has failed") : TD_OK;
}

static td_tensor *do_forward(td_module *self, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *weight = td_param(self, 0), *x = td_matmul(inputs[0], weight);
    if (deed == WRITES) {
        TD_NO_GRAD;
        if (td_fill_(weight, (double)td_get_rank(NULL) + 5))
            return NULL;
    }
    if (deed == WRITES_MEMORY)
        ((float *)td_tensor_data(weight))[0] = 77;
    if (deed == FAILS) {
        td_fail(TD_ERR_UNSUPPORTED, "the forward pass has failed");
        return NULL;
    }
    if (deed == BORROWS)
        return td_f_linear(x, td_module_parameter(self, "inner.weight"), NULL);
    if (deed == DIES)
        raise(SIGKILL);
    return td_forward(td_child(self, 0), x);
}

static const td_module_ops deed_ops = {.name = "Deed", .forward = do_forward};

static td_module *make_net(void)
{
    td_manual_seed(23);
    td_module *self = td_module_create(&deed_ops);
    CHECK_OK(td_init_normal(td_module_new_parameter(self, "weight", TD_SHAPE(WIDE, WIDE), TD_F32),
                            0, 0.1));
    td_module_add_child(self, "inner", td_linear(WIDE, WIDE));
    return td_sequential(td_linear(WIDE, WIDE), td_module_finish(self), td_linear(WIDE, OUT), NULL);
}

static td_tensor *numbers(int step, int rank)
{
    td_generator *generator = td_generator_create((uint64_t)(step * 64 + rank), NULL);
    td_tensor *x = td_empty(TD_SHAPE(ROWS, WIDE), TD_F32, NULL);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    td_generator_destroy(generator);
    return x;
}

static td_status run_step(td_module *model, td_optimizer *optimizer, int step, int rank)
{
    td_status status = TD_ERR_NOMEM;
    {
        TD_SCOPE;
        CHECK_OK(td_optimizer_zero_grad(optimizer));
        td_tensor *y = td_forward(model, numbers(step, rank));
        status = y ? td_backward(td_mean(td_mul(y, y))) : td_last_status();
    }
    return status ? status : td_optimizer_step(optimizer);
}

static td_optimizer *make_optimizer(td_module *model)
{
    return td_adam(model, &(td_adam_options){.lr = 0.01});
}

static const td_fsdp_options ways[] = {
    {.min_parameters = 300},
    {.min_parameters = 300, .no_shared_memory = true},
    {.min_parameters = 300, .strategy = TD_SHARD_GRAD_OP},
    {.min_parameters = 300, .strategy = TD_SHARD_GRAD_OP, .no_shared_memory = true},
};
enum { WAYS = sizeof ways / sizeof *ways };

/* The same bits in the shards of both. */
static void check_same(td_module *a, td_module *b)
{
    td_state *x = td_module_parameters(a), *y = td_module_parameters(b);
    CHECK(td_state_count(x) == td_state_count(y));
    for (int i = 0; i < td_state_count(x); i++) {
        size_t bytes = td_tensor_nbytes(td_state_tensor(x, i));
        CHECK(bytes == td_tensor_nbytes(td_state_tensor(y, i)));
        if (bytes && memcmp(td_tensor_data(td_state_tensor(x, i)),
                            td_tensor_data(td_state_tensor(y, i)), bytes)) {
            fprintf(stderr, "%s has other bits\n", td_state_name(x, i));
            CHECK(!"the same bits");
        }
    }
    td_state_destroy(x);
    td_state_destroy(y);
}

/* ---- Passes that fail on all ranks ------------------------------------------------------------------------------ */

/* Two models, of which one fails in every second pass: the others are as if these had not been. */
static void fail_and_go_on(enum deed what, const char *text)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    for (int way = 0; way < WAYS; way++) {
        td_module *good = td_fsdp(make_net(), &ways[way]), *bad = td_fsdp(make_net(), &ways[way]);
        td_optimizer *a = make_optimizer(good), *b = make_optimizer(bad);
        for (int step = 0; step < 4; step++) {
            deed = GOOD;
            CHECK_OK(run_step(good, a, step, rank));
            deed = what;
            td_status status = run_step(bad, b, step + 40, rank);
            CHECK(status != TD_OK);
            CHECK_CONTAINS(td_last_error(), text);
            deed = GOOD;
            CHECK_OK(run_step(bad, b, step, rank));
        }
        check_same(good, bad);
        td_fsdp_stats stats;
        CHECK_OK(td_fsdp_get_stats(bad, &stats));
        CHECK(stats.whole_bytes == 0);
        td_optimizer_destroy(a);
        td_optimizer_destroy(b);
        td_module_destroy(good);
        td_module_destroy(bad);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_write_in_a_pass, .ranks = 3)
{
    fail_and_go_on(WRITES, "the parameter \"1.weight\" is gathered for a pass on rank ");
}

RANKS(a_write_in_a_pass_over_tcp, .ranks = 2)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    fail_and_go_on(WRITES, "the parameter \"1.weight\" is gathered for a pass on rank ");
}

RANKS(a_forward_pass_that_fails, .ranks = 3)
{
    fail_and_go_on(FAILS, "the forward pass has failed");
}

/* With 3 ranks a shard is empty on some, where the shapes do not fit either. */
RANKS(a_parameter_outside_of_its_unit, .ranks = 2)
{
    fail_and_go_on(BORROWS, "\"1.inner.weight\" is used outside of the passes of its unit");
}

RANKS(a_backward_pass_that_fails, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int way = 0; way < WAYS; way++)
        for (int place = 0; place < 3; place++) {
            td_module *good = td_fsdp(make_net(), &ways[way]);
            td_module *bad = td_fsdp(make_net(), &ways[way]);
            uint64_t id;
            td_module_hooks hooks = {.backward_pre = fail_backward};
            CHECK_OK(td_module_add_hooks(td_child(bad, place), &hooks, &id));
            td_optimizer *a = make_optimizer(good), *b = make_optimizer(bad);
            for (int step = 0; step < 3; step++) {
                deed = GOOD;
                CHECK_OK(run_step(good, a, step, td_get_rank(NULL)));
                TD_SCOPE;
                td_tensor *y = td_forward(bad, numbers(step + 50, td_get_rank(NULL)));
                CHECK(y);
                deed = FAILS;
                CHECK_FAILS(td_backward(td_sum(y)), TD_ERR_UNSUPPORTED, "the hook has failed");
                deed = GOOD;
                CHECK_OK(run_step(bad, b, step, td_get_rank(NULL)));
            }
            check_same(good, bad);
            td_optimizer_destroy(a);
            td_optimizer_destroy(b);
            td_module_destroy(good);
            td_module_destroy(bad);
        }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Writes ----------------------------------------------------------------------------------------------------- */

/* The mapping of gathered parameters is read-only: a write by way of a pointer ends the rank that makes it, and no other
 * rank sees it. */
RANKS(a_write_through_a_pointer, .ranks = 2, .may_die = 1 << 1)
{
    CHECK_OK(td_init_process_group(NULL));
    td_module *model = td_fsdp(make_net(), &ways[0]);
    td_tensor *weight = td_module_parameter(model, "1.weight");
    td_fsdp_stats stats;
    CHECK_OK(td_fsdp_get_stats(model, &stats));
    CHECK(stats.shared_memory);
    float *before = malloc(td_tensor_nbytes(weight));
    memcpy(before, td_tensor_data(weight), td_tensor_nbytes(weight));
    td_test_barrier();
    deed = td_get_rank(NULL) == 1 ? WRITES_MEMORY : GOOD;
    td_optimizer *adam = make_optimizer(model);
    td_status status = run_step(model, adam, 0, td_get_rank(NULL));
    CHECK_EQ(status, TD_ERR_PEER); /* rank 1 does not get here */
    CHECK_CONTAINS(td_last_error(), "rank 1");
    CHECK_MEM(td_tensor_data(weight), before, td_tensor_nbytes(weight));
    free(before);
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    td_destroy_process_group();
}

/* Scopes: one for reading loses changes, one for changing keeps them; other ranks see neither meanwhile. */
RANKS(scopes, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    for (int way = 0; way < WAYS; way++) {
        td_module *model = td_fsdp(make_net(), &ways[way]);
        td_tensor *weight = td_module_parameter(model, "2.weight");
        for (int write = 0; write < 2; write++) {
            CHECK_OK(td_fsdp_gather_begin(model, write));
            const float *elements = td_tensor_data(weight);
            float last = elements[WIDE * OUT - 1];
            CHECK(td_tensor_size(weight, 0) == OUT && td_tensor_size(weight, 1) == WIDE);
            CHECK_OK(td_barrier(NULL, NULL));
            ((float *)td_tensor_data(weight))[0] = (float)(write ? 3 : rank + 10);
            CHECK_OK(td_barrier(NULL, NULL));
            CHECK(elements[0] == (float)(write ? 3 : rank + 10) &&
                  elements[WIDE * OUT - 1] == last);
            {
                TD_SCOPE;
                TD_NO_GRAD;
                CHECK(td_forward(model, numbers(0, rank)) != NULL); /* of whole parameters */
            }
            CHECK_OK(td_fsdp_gather_end(model));
            CHECK_OK(td_fsdp_gather_begin(model, false));
            CHECK((((float *)td_tensor_data(weight))[0] == 3) == (write == 1));
            CHECK_OK(td_fsdp_gather_end(model));
        }
        {
            TD_SCOPE; /* no training in a scope */
            CHECK_OK(td_fsdp_gather_begin(model, false));
            td_tensor *y = td_forward(model, numbers(0, rank));
            CHECK(y);
            CHECK_FAILS(td_backward(td_sum(y)), TD_ERR_STATE, "td_fsdp_gather_end()");
            CHECK_OK(td_fsdp_gather_end(model));
        }
        td_optimizer *adam = make_optimizer(model);
        CHECK_OK(run_step(model, adam, 0, rank));
        td_optimizer_destroy(adam);
        td_module_destroy(model);
    }
    CHECK_OK(td_destroy_process_group());
}

/* ---- Warnings --------------------------------------------------------------------------------------------------- */

static int warnings;

static void note_line(td_log_level level, const char *line, void *arg)
{
    (void)arg;
    warnings += level == TD_LOG_WARN && strstr(line, "the whole model is one unit") != NULL;
}

RANKS(one_unit_is_a_warning, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_log_set_sink(note_line, NULL);
    td_module_destroy(td_fsdp(make_net(), &ways[0]));
    CHECK_EQ(warnings, 0);
    td_module_destroy(td_fsdp(make_net(), NULL));
    CHECK_EQ(warnings, 1);
    td_log_set_sink(NULL, NULL);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Ends in any order ------------------------------------------------------------------------------------------ */

RANKS(ends_in_any_order, .ranks = 2)
{
    for (int way = 0; way < WAYS; way++)
        for (int order = 0; order < 6; order++) {
            CHECK_OK(td_init_process_group(NULL));
            int rank = td_get_rank(NULL);
            td_module *model = td_fsdp(make_net(), &ways[way]);
            td_optimizer *adam = make_optimizer(model);
            td_tensor *kept = td_tensor_retain(td_module_parameter(model, "0.weight"));
            td_tensor *y = NULL;
            deed = GOOD;
            CHECK_OK(run_step(model, adam, 0, rank));
            {
                TD_SCOPE; /* a graph that was not used */
                y = td_tensor_retain(td_forward(model, numbers(1, rank)));
            }
            if (order == 0 || order == 3)
                td_tensor_release(y);
            if (order == 1 || order == 4)
                CHECK_OK(td_destroy_process_group());
            if (order < 3)
                td_optimizer_destroy(adam);
            td_module_destroy(model);
            if (order >= 3)
                td_optimizer_destroy(adam);
            {
                TD_SCOPE; /* the parameter of a model that is gone is a plain shard */
                CHECK(td_tensor_numel(kept) == 0 || td_sum(kept) != NULL);
            }
            if (order != 0 && order != 3)
                td_tensor_release(y);
            td_tensor_release(kept);
            if (order != 1 && order != 4)
                CHECK_OK(td_destroy_process_group());
        }
}

/* A pass of a model whose group has ended is an error, not a crash. */
RANKS(a_group_that_has_ended, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_group *group;
    CHECK_OK(td_new_group((const int[]){0, 1}, 2, NULL, &group));
    td_fsdp_options options = {.min_parameters = 300, .group = group};
    td_module *model = td_fsdp(make_net(), &options);
    CHECK(model);
    CHECK_OK(td_group_abort(group));
    {
        TD_SCOPE;
        CHECK(td_forward(model, numbers(0, 0)) == NULL);
    }
    td_module_destroy(model);
    td_group_destroy(group);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Deaths ------------------------------------------------------------------------------------------------------ */

static void train_from(td_module *model, td_group *group, int steps, double *loss)
{
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    for (int step = 0; step < steps; step++)
        CHECK_OK(run_step(model, sgd, step, td_get_rank(group)));
    td_optimizer_destroy(sgd);
    TD_SCOPE;
    TD_NO_GRAD;
    td_tensor *y = td_forward(model, numbers(90, 0));
    *loss = td_item(td_sum(td_mul(y, y)));
}

static void *die_soon(void *arg)
{
    nanosleep(arg, NULL);
    raise(SIGKILL);
    return NULL;
}

/* Kills this process within 20 ms, whatever it does then. */
static void start_to_die(void)
{
    static struct timespec left;
    unsigned seed = (unsigned)getpid();
    left.tv_nsec = rand_r(&seed) % 20000 * 1000;
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, die_soon, &left));
    pthread_detach(thread);
}

/* A rank dies in a pass, or at any moment: the others name it, shrink the world, load what was saved last, and go on; so
 * does a world that had as many ranks from the beginning. */
static void go_on_without(int dying, bool shared, bool any_moment)
{
    char path[512];
    snprintf(path, sizeof path, "%s/state", td_test_temp_dir());
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_fsdp_options options = {.min_parameters = 300, .no_shared_memory = !shared};
    td_module *model = td_fsdp(make_net(), &options);
    td_optimizer *adam = make_optimizer(model);
    for (int step = 0; step < 3; step++)
        CHECK_OK(run_step(model, adam, step, rank));
    td_state *state = td_module_state(model);
    CHECK_OK(td_save_sharded(path, state, NULL, 0, NULL, NULL));
    td_state_destroy(state);
    CHECK_OK(run_step(model, adam, 3, rank)); /* which is lost */
    td_test_barrier();
    deed = rank == dying && !any_moment ? DIES : GOOD;
    if (rank == dying && any_moment)
        start_to_die();
    td_status status = TD_OK;
    for (int step = 0; (any_moment || step < 3) && !status; step++)
        status = run_step(model, adam, step, rank);
    char name[16];
    snprintf(name, sizeof name, "rank %d", dying);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), name);
    td_optimizer_destroy(adam);
    td_module_destroy(model);

    td_group *rest;
    CHECK_OK(td_group_shrink(NULL, NULL, &rest));
    options.group = rest;
    options.no_init = true;
    double losses[2];
    for (int again = 0; again < 2; again++) {
        td_module *net;
        {
            TD_DEVICE_SCOPE(td_device_get(again ? "meta" : "cpu"));
            net = make_net();
        }
        model = td_fsdp(net, &options);
        CHECK(model);
        state = td_module_state(model);
        CHECK_OK(td_load_sharded(path, state, rest));
        td_state_destroy(state);
        train_from(model, rest, 3, &losses[again]);
        td_module_destroy(model);
    }
    CHECK(losses[0] == losses[1] && isfinite(losses[0]));
    td_group_destroy(rest);
    td_destroy_process_group();
}

RANKS(a_dead_rank, .ranks = 4, .may_die = 1 << 2)
{
    go_on_without(2, true, false);
}

RANKS(a_dead_rank_without_shared_memory, .ranks = 3, .may_die = 1 << 0)
{
    go_on_without(0, false, false);
}

RANKS(a_dead_rank_over_tcp, .ranks = 4, .may_die = 1 << 3)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    go_on_without(3, false, false);
}

RANKS(a_rank_that_dies_at_any_moment, .ranks = 3, .may_die = 1 << 1)
{
    go_on_without(1, true, true);
}

RANKS(a_rank_that_dies_at_any_moment_over_tcp, .ranks = 3, .may_die = 1 << 0)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    go_on_without(0, false, true);
}
