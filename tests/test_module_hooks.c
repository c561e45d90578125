/* Hooks of modules: order, replaced tensors, gradients, failures, and graphs that outlive their module. */
#include "runner.h"

#include <tandem/tandem.h>

#include <string.h>

/* Writes a letter for each hook that runs. */
struct journal {
    char text[64];
    td_status fail; /* what the next hook returns */
    const char *fail_at;
};

static td_status note(struct journal *journal, const char *letter)
{
    strcat(journal->text, letter);
    if (journal->fail_at && !strcmp(journal->fail_at, letter))
        return td_fail(journal->fail, "the hook \"%s\" was told to fail", letter);
    return TD_OK;
}

static td_status on_forward_pre(td_module *module, td_tensor_list *inputs, void *arg)
{
    CHECK(module && inputs->count >= 1);
    return note(arg, "p");
}

static td_status on_forward(td_module *module, const td_tensor_list *inputs,
                            td_tensor_list *results, void *arg)
{
    CHECK(module && inputs->count >= 1 && results->count >= 1);
    return note(arg, "f");
}

static td_status on_backward_pre(td_module *module, td_tensor_list *grads, void *arg)
{
    CHECK(module && grads->count >= 1 && !td_grad_enabled());
    return note(arg, "P");
}

static td_status on_backward(td_module *module, td_tensor_list *grad_inputs,
                             const td_tensor_list *grad_results, void *arg)
{
    CHECK(module && grad_results->count >= 1);
    strcat(((struct journal *)arg)->text, grad_inputs->count ? "" : "0");
    return note(arg, "B");
}

static td_module_hooks journal_hooks(struct journal *journal)
{
    return (td_module_hooks){.forward_pre = on_forward_pre,
                             .forward = on_forward,
                             .backward_pre = on_backward_pre,
                             .backward = on_backward,
                             .arg = journal};
}

static td_tensor *input(bool requires_grad)
{
    td_tensor *x = td_full(TD_SHAPE(2, 3), 0.5, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(x, requires_grad));
    return x;
}

static double first_of(td_tensor *tensor)
{
    TD_SCOPE;
    return td_item(
        td_select(td_f_flatten(td_tensor_to(tensor, td_device_get("cpu")), 0, -1), 0, 0));
}

TEST(hooks_run_around_both_passes)
{
    struct journal journal = {0};
    td_module_hooks hooks = journal_hooks(&journal);
    td_module *net = td_sequential(td_linear(3, 4), td_tanh(), td_linear(4, 1), NULL);
    uint64_t id = 0;
    CHECK_OK(td_module_add_hooks(net, &hooks, &id));
    TD_SCOPE;
    td_tensor *x = input(true);
    td_tensor *y = td_forward(net, x);
    CHECK_STR(journal.text, "pf");
    CHECK_OK(td_backward(td_sum(y)));
    CHECK_STR(journal.text, "pfPB");
    CHECK(td_tensor_grad(x) && td_tensor_grad(td_param(td_child(net, 0), 0)));

    /* The same call twice in a pass: each has its own. */
    journal.text[0] = 0;
    CHECK_OK(td_backward(td_sum(td_add(td_forward(net, x), td_forward(net, x)))));
    CHECK_STR(journal.text, "pfpfPBPB");

    /* No gradient is recorded: only forward hooks. */
    journal.text[0] = 0;
    {
        TD_NO_GRAD;
        CHECK(td_forward(net, x));
    }
    CHECK_STR(journal.text, "pf");

    CHECK_OK(td_module_remove_hooks(net, id));
    CHECK_FAILS(td_module_remove_hooks(net, id), TD_ERR_INVALID, "no hooks of the number");
    journal.text[0] = 0;
    CHECK_OK(td_backward(td_sum(td_forward(net, x))));
    CHECK_STR(journal.text, "");
    td_module_destroy(net);
}

/* Devices run these three as one, but not around a hook. */
TEST(hooks_of_layers_that_are_fused)
{
    struct journal journal = {0};
    td_module_hooks hooks = journal_hooks(&journal);
    td_module *net = td_sequential(td_linear(3, 8), td_gelu_tanh(), td_linear(8, 2), NULL);
    CHECK_OK(td_module_add_hooks(td_child(net, 1), &hooks, NULL));
    TD_SCOPE;
    CHECK_OK(td_backward(td_sum(td_forward(net, input(true)))));
    CHECK_STR(journal.text, "pfPB");
    td_module_destroy(net);
}

TEST(gradients_are_the_same_with_hooks)
{
    struct journal journal = {0};
    td_module_hooks hooks = journal_hooks(&journal);
    td_manual_seed(3);
    td_module *net = td_sequential(td_linear(3, 4), td_relu(), td_linear(4, 2), NULL);
    td_module *plain = td_module_clone(net);
    CHECK_OK(td_module_add_hooks(net, &hooks, NULL));
    CHECK_OK(td_module_add_hooks(td_child(net, 0), &hooks, NULL));
    CHECK_OK(td_module_add_hooks(td_child(net, 1), &hooks, NULL));
    TD_SCOPE;
    td_tensor *a = input(true), *b = input(true);
    CHECK_OK(td_backward(td_sum(td_square(td_forward(net, a)))));
    CHECK_OK(td_backward(td_sum(td_square(td_forward(plain, b)))));
    CHECK_STR(journal.text, "ppfpffPPBPBB");
    CHECK(td_item(td_all(td_eq(td_tensor_grad(a), td_tensor_grad(b)))) == 1);
    td_tensor *of_net = td_tensor_grad(td_param(td_child(net, 0), 0)),
              *of_plain = td_tensor_grad(td_param(td_child(plain, 0), 0));
    CHECK(td_item(td_all(td_eq(of_net, of_plain))) == 1);
    td_module_destroy(plain); /* a clone has no hooks */
    td_module_destroy(net);
}

TEST(an_input_without_gradient)
{
    struct journal journal = {0};
    td_module_hooks hooks = journal_hooks(&journal);
    td_module *net = td_linear(3, 2);
    CHECK_OK(td_module_add_hooks(net, &hooks, NULL));
    TD_SCOPE;
    CHECK_OK(td_backward(td_sum(td_forward(net, input(false)))));
    CHECK_STR(journal.text, "pfP0B");
    CHECK(td_tensor_grad(td_param(net, 0)) != NULL);
    td_module_destroy(net);
}

/* ---- Replacing ------------------------------------------------------------------------------------------- */

static td_status double_inputs(td_module *module, td_tensor_list *inputs, void *arg)
{
    (void)module, (void)arg;
    inputs->at[0] = td_mul_scalar(inputs->at[0], 2);
    return inputs->at[0] ? TD_OK : TD_ERR_NOMEM;
}

static td_status add_ten(td_module *module, const td_tensor_list *inputs, td_tensor_list *results,
                         void *arg)
{
    (void)module, (void)arg, (void)inputs;
    results->at[0] = td_add_scalar(results->at[0], 10);
    return results->at[0] ? TD_OK : TD_ERR_NOMEM;
}

static td_status triple_grads(td_module *module, td_tensor_list *grads, void *arg)
{
    (void)module, (void)arg;
    grads->at[0] = td_mul_scalar(grads->at[0], 3);
    return grads->at[0] ? TD_OK : TD_ERR_NOMEM;
}

static td_status halve_grads(td_module *module, td_tensor_list *grad_inputs,
                             const td_tensor_list *grad_results, void *arg)
{
    (void)module, (void)arg;
    CHECK(first_of(grad_results->at[0]) == 3);
    grad_inputs->at[0] = td_mul_scalar(grad_inputs->at[0], 0.5);
    return grad_inputs->at[0] ? TD_OK : TD_ERR_NOMEM;
}

TEST(hooks_replace_tensors_and_gradients)
{
    td_module *net = td_identity();
    CHECK_OK(td_module_add_hooks(net,
                                 &(td_module_hooks){.forward_pre = double_inputs,
                                                    .forward = add_ten,
                                                    .backward_pre = triple_grads,
                                                    .backward = halve_grads},
                                 NULL));
    TD_SCOPE;
    td_tensor *x = input(true);
    td_tensor *y = td_forward(net, x);
    CHECK(first_of(y) == 11);
    CHECK_OK(td_backward(td_sum(y)));
    CHECK(first_of(td_tensor_grad(x)) == 3); /* 2 * 0.5 * 3 */
    td_module_destroy(net);
}

static td_status narrow_grads(td_module *module, td_tensor_list *grads, void *arg)
{
    (void)module, (void)arg;
    grads->at[0] = td_narrow(grads->at[0], 0, 0, 1);
    return TD_OK;
}

static td_status drop_results(td_module *module, const td_tensor_list *inputs,
                              td_tensor_list *results, void *arg)
{
    (void)module, (void)arg, (void)inputs;
    results->count = 0;
    return TD_OK;
}

TEST(what_a_hook_may_not_do)
{
    td_module *net = td_linear(3, 2);
    TD_SCOPE;
    uint64_t id;
    CHECK_FAILS(td_module_add_hooks(net, &(td_module_hooks){0}, NULL), TD_ERR_INVALID, "all four");
    CHECK_FAILS(td_module_add_hooks(NULL, &(td_module_hooks){.forward = add_ten}, NULL),
                TD_ERR_INVALID, "NULL");
    CHECK_OK(td_module_add_hooks(net, &(td_module_hooks){.backward_pre = narrow_grads}, &id));
    CHECK_FAILS(td_backward(td_sum(td_forward(net, input(true)))), TD_ERR_INVALID,
                "backward_pre hook of a Linear");
    CHECK_OK(td_module_remove_hooks(net, id));
    CHECK_OK(td_module_add_hooks(net, &(td_module_hooks){.forward = drop_results}, &id));
    CHECK(!td_forward(net, input(true)));
    CHECK(strstr(td_last_error(), "left 0 tensors"));
    td_module_destroy(net);
}

TEST(a_hook_that_fails_ends_the_pass)
{
    static const char *const letters[] = {"p", "f", "P", "B"};
    for (int i = 0; i < 4; i++) {
        TD_SCOPE;
        struct journal journal = {.fail = TD_ERR_STATE, .fail_at = letters[i]};
        td_module_hooks hooks = journal_hooks(&journal);
        td_module *net = td_linear(3, 2);
        CHECK_OK(td_module_add_hooks(net, &hooks, NULL));
        td_tensor *y = td_forward(net, input(true));
        CHECK((y != NULL) == (i >= 2));
        if (y)
            CHECK_FAILS(td_backward(td_sum(y)), TD_ERR_STATE, "was told to fail");
        CHECK(strstr(td_last_error(), "was told to fail"));
        td_module_destroy(net);
    }
}

TEST(a_graph_outlives_its_module)
{
    struct journal journal = {0};
    td_module_hooks hooks = journal_hooks(&journal);
    td_module *net = td_linear(3, 2);
    CHECK_OK(td_module_add_hooks(net, &hooks, NULL));
    TD_SCOPE;
    td_tensor *x = input(true);
    td_tensor *loss = td_sum(td_forward(net, x));
    td_module_destroy(net);
    CHECK_OK(td_backward(loss));
    CHECK_STR(journal.text, "pf"); /* its hooks are gone with it */
    CHECK(td_tensor_grad(x) != NULL);
}

TEST(a_retained_graph_runs_hooks_again)
{
    struct journal journal = {0};
    td_module_hooks hooks = journal_hooks(&journal);
    td_module *net = td_linear(3, 2);
    CHECK_OK(td_module_add_hooks(net, &hooks, NULL));
    TD_SCOPE;
    td_tensor *loss = td_sum(td_forward(net, input(true)));
    CHECK_OK(td_backward_from(&loss, NULL, 1, &(td_backward_options){.retain_graph = true}));
    CHECK_OK(td_backward(loss));
    CHECK_STR(journal.text, "pfPBPB");
    td_module_destroy(net);
}

/* ---- Several inputs and results ---------------------------------------------------------------------------- */

static td_status pair_forward(td_module *module, const td_tensor_list *inputs,
                              td_tensor_list *results)
{
    (void)module;
    td_tensor *b = td_tensor_list_get(inputs, "b");
    CHECK(b != NULL);
    td_tensor_list_add(results, "sum", td_add(inputs->at[0], b));
    return td_tensor_list_add(results, "product", td_mul(inputs->at[0], b));
}

static const td_module_ops pair_ops = {.name = "Pair", .forward_list = pair_forward};

static td_status see_two(td_module *module, td_tensor_list *grad_inputs,
                         const td_tensor_list *grad_results, void *arg)
{
    (void)module;
    CHECK_EQ(grad_inputs->count, 2);
    CHECK_EQ(grad_results->count, 2);
    CHECK(!grad_results->at[0] && grad_results->at[1]); /* only the product was used */
    CHECK(grad_inputs->at[0] && !grad_inputs->at[1]);   /* the second requires no gradient */
    ++*(int *)arg;
    return TD_OK;
}

TEST(lists_keep_their_places_and_names)
{
    int seen = 0;
    td_module *net = td_module_create(&pair_ops);
    CHECK_OK(td_module_add_hooks(net, &(td_module_hooks){.backward = see_two, .arg = &seen}, NULL));
    TD_SCOPE;
    td_tensor *a = input(true), *b = td_full(TD_SHAPE(2, 3), 7, TD_F32, NULL);
    td_tensor_list inputs = {.count = 2, .at = {a, b}, .names = {NULL, "b"}}, results;
    CHECK_OK(td_forward_list(net, &inputs, &results));
    CHECK(first_of(td_tensor_list_get(&results, "product")) == 3.5);
    CHECK_OK(td_backward(td_sum(results.at[1])));
    CHECK_EQ(seen, 1);
    CHECK(first_of(td_tensor_grad(a)) == 7);
    td_module_destroy(net);
}
