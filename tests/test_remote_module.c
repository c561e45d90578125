/* Remote modules: a model over several workers that trains to the bits of one process, modes, several inputs and
 * results, what is refused, and handles that are sent. */
#include "runner.h"

#include <tandem/tandem.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 8, CLASSES = 3, BATCH = 5, STEPS = 25 };

/* ---- Functions --------------------------------------------------------------------------------- */

static td_module *stage(int64_t number)
{
    td_manual_seed((uint64_t)(10 + number));
    return td_sequential(td_linear(WIDTH, WIDTH), td_tanh(), NULL);
}

static td_value *make_stage(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t number;
    (void)call, (void)count;
    return td_value_int(args[0], &number) ? NULL : td_value_from_module(stage(number));
}

static td_value *make_dropout(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_from_module(td_dropout(0.5));
}

static td_value *make_attention(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_manual_seed(3);
    return td_value_from_module(td_multihead_attention(WIDTH, 2));
}

/* A model whose first stage is on the next worker. */
static td_value *make_nested(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td_module *first = td_remote_module(td_value_text(args[0]), "make_stage", TD_ARGS(0), NULL);
    return td_value_from_module(td_sequential(first, stage(1), NULL));
}

static td_status split_forward(td_module *module, const td_tensor_list *inputs,
                               td_tensor_list *results)
{
    (void)module;
    if (td_tensor_list_add(results, "double", td_mul_scalar(inputs->at[0], 2)))
        return td_last_status();
    return td_tensor_list_add(results, NULL, td_mul_scalar(inputs->at[0], 3));
}

static td_value *make_split(td_rpc_call *call, td_value *const *args, int count)
{
    static const td_module_ops ops = {.name = "Split", .forward_list = split_forward};
    (void)call, (void)args, (void)count;
    return td_value_from_module(td_module_create(&ops));
}

static td_value *make_nothing(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_of(1);
}

/* Runs a module that it is given. */
static td_value *use(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_value_of(td_forward(td_value_module(args[0]), td_value_tensor(args[1])));
}

static void begin(void)
{
    char name[8];
    CHECK_OK(td_rpc_register("make_stage(number: int)", make_stage, NULL));
    CHECK_OK(td_rpc_register("make_dropout()", make_dropout, NULL));
    CHECK_OK(td_rpc_register("make_attention()", make_attention, NULL));
    CHECK_OK(td_rpc_register("make_nested(worker: text)", make_nested, NULL));
    CHECK_OK(td_rpc_register("make_split()", make_split, NULL));
    CHECK_OK(td_rpc_register("make_nothing()", make_nothing, NULL));
    CHECK_OK(td_rpc_register("use(module: module, x: tensor)", use, NULL));
    snprintf(name, sizeof name, "w%d", td_test_rank());
    CHECK_OK(td_init_rpc(name, NULL));
}

static td_tensor *numbers(int seed)
{
    td_manual_seed((uint64_t)seed);
    return td_randn(TD_SHAPE(BATCH, WIDTH), TD_F32, NULL);
}

static void check_same(td_tensor *a, td_tensor *b)
{
    CHECK(a && b);
    CHECK_EQ(td_tensor_nbytes(a), td_tensor_nbytes(b));
    CHECK_MEM(td_tensor_data(a), td_tensor_data(b), td_tensor_nbytes(a));
}

/* ---- Training ---------------------------------------------------------------------------------- */

static td_module *head(void)
{
    td_manual_seed(20);
    return td_linear(WIDTH, CLASSES);
}

static td_tensor *loss_of(td_module *model, int step)
{
    td_tensor *x = numbers(100 + step), *y = td_randint(0, CLASSES, TD_SHAPE(BATCH), TD_I64, NULL);
    return td_cross_entropy(td_forward(model, x), y);
}

/* Trains `model`, the first two stages of which are elsewhere, and one in this process. */
static void train_both(td_module *model)
{
    td_module *alone = td_sequential(td_sequential(stage(0), stage(1), NULL), head(), NULL);
    td_optimizer *sgd = td_sgd(alone, &(td_sgd_options){.lr = 0.3, .momentum = 0.9});
    td_value *parameters = td_remote_parameters(model);
    CHECK_EQ(td_value_count(parameters), 6);
    CHECK_STR(td_rref_owner(td_value_rref(td_value_at(parameters, 5))), "w0");
    td_dist_optimizer *dist = td_dist_sgd(parameters,
                                          &(td_sgd_options){.lr = 0.3, .momentum = 0.9});
    CHECK(model && alone && sgd && dist);
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *loss = loss_of(model, step);
        CHECK(loss);
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        CHECK_OK(td_dist_optimizer_step(dist, context));
        CHECK_OK(td_optimizer_zero_grad(sgd));
        td_tensor *expected = loss_of(alone, step);
        CHECK_OK(td_backward(expected));
        CHECK_OK(td_optimizer_step(sgd));
        check_same(loss, expected);
    }
    td_state *state = td_module_parameters(alone);
    for (int64_t i = 0; i < 6; i++) {
        td_value *there = td_rref_to_here(td_value_rref(td_value_at(parameters, i)), 0);
        check_same(td_value_tensor(there), td_state_tensor(state, (int)i));
    }
    td_state_destroy(state);
    td_dist_optimizer_destroy(dist);
    td_optimizer_destroy(sgd);
    td_module_destroy(alone);
    td_module_destroy(model);
}

RANKS(two_remote_stages_and_a_local_head_train_to_the_same_bits, .ranks = 3)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_module *stages = td_sequential(td_remote_module("w1", "make_stage", TD_ARGS(0), NULL),
                                          td_remote_module("w2", "make_stage", TD_ARGS(1), NULL),
                                          NULL);
        train_both(td_sequential(stages, head(), NULL));
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

RANKS(a_remote_module_may_contain_another, .ranks = 3)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        train_both(td_sequential(td_remote_module("w1", "make_nested", TD_ARGS("w2"), NULL), head(),
                                 NULL));
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* ---- Use --------------------------------------------------------------------------------------- */

RANKS(modes_inputs_results_and_text, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = numbers(1);
        td_module *dropout = td_sequential(td_remote_module("w1", "make_dropout", TD_NO_ARGS, NULL),
                                           NULL);
        td_rref *rref = td_remote_module_rref(td_child(dropout, 0));
        CHECK_STR(td_rref_owner(rref), "w1");
        td_module_eval(dropout);
        check_same(td_forward(dropout, x), x);
        check_same(td_value_tensor(td_rref_sync(rref, "forward", TD_ARGS(x), NULL)), x);
        td_module_train(dropout, true);
        td_tensor *dropped = td_forward(dropout, x);
        CHECK(memcmp(td_tensor_data(dropped), td_tensor_data(x), td_tensor_nbytes(x)) != 0);

        /* Several inputs, by name, too. */
        td_module *attention = td_remote_module("w1", "make_attention", TD_NO_ARGS, NULL);
        td_manual_seed(3);
        td_module *here = td_multihead_attention(WIDTH, 2);
        td_tensor *mask = td_full(TD_SHAPE(BATCH, BATCH), -1, TD_F32, NULL);
        td_tensor_list inputs = {.count = 2, .at = {mask, x}, .names = {"mask", NULL}}, results;
        CHECK_OK(td_forward_list(attention, &inputs, &results));
        check_same(results.at[0], td_forward_with(here, TD_TENSORS(x, mask)));
        check_same(td_forward_with(attention, TD_TENSORS(x, x, x)),
                   td_forward_with(here, TD_TENSORS(x, x, x)));

        /* Several results, one with a name. */
        td_module *split = td_remote_module("w1", "make_split", TD_NO_ARGS, NULL);
        inputs = (td_tensor_list){.count = 1, .at = {x}};
        CHECK_OK(td_forward_list(split, &inputs, &results));
        CHECK_EQ(results.count, 2);
        check_same(td_tensor_list_get(&results, "double"), td_mul_scalar(x, 2));
        check_same(results.at[1], td_mul_scalar(x, 3));

        td_module *tree = td_sequential(td_remote_module("w1", "make_stage", TD_ARGS(0), NULL),
                                        NULL);
        td_bytes text = td_module_text(tree);
        CHECK_STR(text.data, "Sequential(\n"
                             "  (0): Remote(worker=\"w1\", Sequential(\n"
                             "    (0): Linear(in_features=8, out_features=8, bias=True)\n"
                             "    (1): Tanh()\n"
                             "  ))\n"
                             ")");
        td_bytes_free(&text);
        td_module_destroy(tree);
        td_module_destroy(split);
        td_module_destroy(here);
        td_module_destroy(attention);
        td_module_destroy(dropout);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* Outside of a context, and with grad mode off, nothing is recorded. */
RANKS(what_is_recorded, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_module *remote = td_remote_module("w1", "make_stage", TD_ARGS(0), NULL),
                  *here = stage(0);
        td_tensor *x = numbers(1), *expected = td_forward(here, x);
        td_tensor *y = td_forward(remote, x);
        check_same(y, expected);
        CHECK(!td_tensor_requires_grad(y));
        TD_DIST_AUTOGRAD(context);
        y = td_forward(remote, x);
        check_same(y, expected);
        CHECK(td_tensor_requires_grad(y));
        TD_NO_GRAD;
        y = td_forward(remote, x);
        check_same(y, expected);
        CHECK(!td_tensor_requires_grad(y));
        td_module_destroy(remote);
        td_module_destroy(here);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

RANKS(a_remote_module_is_sent_as_a_reference, .ranks = 3)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = numbers(1);
        td_rref *rref = td_remote("w1", "make_stage", TD_ARGS(0), NULL);
        td_module *first = td_remote_module_of(rref, NULL),
                  *alone = td_sequential(stage(0), head(), NULL);
        CHECK(first);
        td_value *model = td_value_from_module(td_sequential(first, head(), NULL));
        td_tensor *expected = td_forward(alone, x);
        for (int r = 0; r < 3; r++) { /* another worker, the owner, and this one */
            td_value *y = td_rpc_sync(td_worker_name(r), "use", TD_ARGS(model, x), NULL);
            check_same(td_value_tensor(y), expected);
        }
        /* It is no copy: what is loaded there is seen through all handles. */
        td_value *state = td_rref_sync(rref, "state", TD_NO_ARGS, NULL);
        td_value *zeros = td_value_set(td_value_map(), "0.weight",
                                       td_value_of(td_zeros(TD_SHAPE(WIDTH, WIDTH), TD_F32, NULL)));
        zeros = td_value_set(zeros, "0.bias", td_value_get(state, "0.bias"));
        CHECK(td_rref_sync(rref, "load_state", TD_ARGS(zeros), NULL));
        td_value *y = td_rpc_sync("w2", "use", TD_ARGS(model, x), NULL);
        check_same(td_value_tensor(y), td_forward(td_value_module(model), x));
        CHECK(memcmp(td_tensor_data(td_value_tensor(y)), td_tensor_data(expected),
                     td_tensor_nbytes(expected)) != 0);
        td_module_destroy(alone);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* ---- Refusals and failures --------------------------------------------------------------------- */

RANKS(what_needs_the_tensors_is_refused, .ranks = 2)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_module *model = td_sequential(td_remote_module("w1", "make_stage", TD_ARGS(0), NULL),
                                         head(), NULL);
        CHECK(!td_module_parameters(model));
        CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
        CHECK_CONTAINS(td_last_error(), "w1");
        CHECK(!td_module_state(model));
        CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
        CHECK(!td_sgd(model, &(td_sgd_options){.lr = 0.1}));
        CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
        char path[300];
        snprintf(path, sizeof path, "%s/model.safetensors", td_test_temp_dir());
        CHECK_FAILS(td_save_module(path, model), TD_ERR_UNSUPPORTED, "w1");
        CHECK(!td_module_clone(model));
        CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
        CHECK_FAILS(td_module_to_dtype(model, TD_F64), TD_ERR_UNSUPPORTED, "w1");
        CHECK(!td_remote_module_rref(model));
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);

        /* A function that returns something else, and one that is not there. */
        CHECK(!td_remote_module("w1", "make_nothing", TD_NO_ARGS, NULL));
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), "w1");
        CHECK(!td_remote_module("w1", "no_such", TD_NO_ARGS, NULL));
        CHECK_CONTAINS(td_last_error(), "no_such");
        CHECK(!td_remote_module("nobody", "make_stage", TD_ARGS(0), NULL));
        CHECK_CONTAINS(td_last_error(), "nobody");
        /* An input that does not fit. */
        CHECK(!td_forward(model, td_zeros(TD_SHAPE(2, 3), TD_F32, NULL)));
        CHECK_CONTAINS(td_last_error(), "w1");
        td_module_destroy(model);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

RANKS(a_worker_that_has_died, .ranks = 2, .may_die = 1 << 1)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_module *model = td_remote_module("w1", "make_stage", TD_ARGS(0), NULL);
        CHECK(td_forward(model, numbers(1)));
        td_test_kill(1, SIGKILL);
        td_module_eval(model); /* which cannot fail */
        CHECK(!td_forward(model, numbers(1)));
        CHECK_EQ(td_last_status(), TD_ERR_PEER);
        CHECK_CONTAINS(td_last_error(), "w1");
        td_module_destroy(model);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}
