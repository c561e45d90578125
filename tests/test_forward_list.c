/* Modules of several inputs and results: by themselves, in a sequence, on several devices, and under DDP. */
#include "runner.h"

#include <tandem/tandem.h>

#include <stdlib.h>
#include <string.h>

/* Two results of two inputs: "sum" (a + b) * weight, and "product" a * b * other. Takes a by order, and b
 * by its name where it has one. */
static td_status pair_forward(td_module *module, const td_tensor_list *inputs,
                              td_tensor_list *results)
{
    td_tensor *a = inputs->at[0], *b = td_tensor_list_get(inputs, "b");
    if (!b)
        b = inputs->count > 1 ? inputs->at[1] : a;
    td_tensor_list_add(results, "sum", td_mul(td_add(a, b), td_param(module, 0)));
    return td_tensor_list_add(results, "product", td_mul(td_mul(a, b), td_param(module, 1)));
}

static const td_module_ops pair_ops = {.name = "Pair", .forward_list = pair_forward};

static td_module *make_pair(void)
{
    TD_SCOPE;
    td_module *module = td_module_create(&pair_ops);
    td_module_add_parameter(module, "weight", td_full(TD_SHAPE(1), 2, TD_F32, NULL));
    td_module_add_parameter(module, "other", td_full(TD_SHAPE(1), 3, TD_F32, NULL));
    return td_module_finish(module);
}

/* One result of two inputs, by the plain table. */
static td_tensor *difference(td_module *module, td_tensor *const *inputs, int count)
{
    (void)module;
    CHECK_EQ(count, 2);
    return td_sub(inputs[0], inputs[1]);
}

static const td_module_ops difference_ops = {.name = "Difference", .forward = difference};

static double at(td_tensor *tensor, int64_t index)
{
    return td_item(
        td_select(td_f_flatten(td_tensor_to(tensor, td_device_get("cpu")), 0, -1), 0, index));
}

TEST(a_module_gives_several_results)
{
    td_module *pair = make_pair();
    TD_SCOPE;
    td_tensor *a = td_arange(0, 4, 1, TD_F32, NULL), *b = td_full(TD_SHAPE(4), 5, TD_F32, NULL);
    td_tensor_list results;
    CHECK_OK(td_forward_list(pair, &(td_tensor_list){.count = 2, .at = {a, b}}, &results));
    CHECK_EQ(results.count, 2);
    CHECK(at(results.at[0], 3) == 16 && at(results.at[1], 3) == 45);
    CHECK(td_tensor_list_get(&results, "product") == results.at[1]);
    CHECK(td_tensor_list_get(&results, "no such") == NULL);

    /* By name, at any index; the list may be reused for the results. */
    td_tensor_list both = {.count = 3, .at = {a, a, b}, .names = {NULL, NULL, "b"}};
    CHECK_OK(td_forward_list(pair, &both, &both));
    CHECK_EQ(both.count, 2);
    CHECK(at(both.at[0], 3) == 16);

    CHECK(td_forward(pair, a) == NULL);
    CHECK(strstr(td_last_error(), "a Pair returned 2 results; td_forward_list() returns them all"));
    CHECK_OK(td_backward(td_sum(td_add(results.at[0], results.at[1]))));
    CHECK(td_item(td_tensor_grad(td_module_parameter(pair, "weight"))) == 26);
    td_module_destroy(pair);
}

TEST(lists_are_checked)
{
    TD_SCOPE;
    td_module *pair = make_pair();
    td_tensor *x = td_ones(TD_SHAPE(2), TD_F32, NULL);
    td_tensor_list list = {0}, results = {.count = 7};
    CHECK_OK(td_tensor_list_add(&list, "x", x));
    CHECK_EQ(td_tensor_list_add(&list, "x", x), TD_ERR_INVALID);
    CHECK_EQ(td_tensor_list_add(&list, NULL, NULL), TD_ERR_INVALID);
    while (list.count < TD_TENSOR_LIST_MAX)
        CHECK_OK(td_tensor_list_add(&list, NULL, x));
    CHECK_EQ(td_tensor_list_add(&list, NULL, x), TD_ERR_INVALID);
    CHECK_EQ(td_forward_list(pair, &(td_tensor_list){0}, &results), TD_ERR_INVALID);
    CHECK_EQ(results.count, 0);
    CHECK_EQ(td_forward_list(pair, &(td_tensor_list){.count = 2, .at = {x, NULL}}, &results),
             TD_ERR_INVALID);
    CHECK_FAILS(td_forward_list(pair, &(td_tensor_list){.count = 2, .at = {x, x}, .reserved = {x}},
                                &results),
                TD_ERR_INVALID, "td_forward_list: reserved[0] is not zero");
    td_tensor_list unfit = {.count = 2, .at = {x, td_ones(TD_SHAPE(3), TD_F32, NULL)}};
    CHECK_EQ(td_forward_list(pair, &unfit, &results), TD_ERR_INVALID);
    CHECK_EQ(results.count, 0);
    CHECK(strstr(td_last_error(), "[2] and [3]"));
    td_module_destroy(pair);
}

TEST(a_sequence_hands_all_results_on)
{
    TD_SCOPE;
    td_module *net = td_sequential(make_pair(), td_module_create(&difference_ops), td_relu(), NULL);
    td_tensor *a = td_full(TD_SHAPE(3), 1, TD_F32, NULL),
              *b = td_full(TD_SHAPE(3), 0.5, TD_F32, NULL);
    td_tensor *y = td_forward_with(net, TD_TENSORS(a, b));
    CHECK(at(y, 0) == 1.5); /* 2 (1 + 0.5) - 3 (1 * 0.5) */
    td_module *two = td_sequential(make_pair(), make_pair(), NULL);
    td_tensor_list results;
    CHECK_OK(td_forward_list(two, &(td_tensor_list){.count = 2, .at = {a, b}}, &results));
    CHECK(results.count == 2 && at(results.at[0], 0) == 9 && at(results.at[1], 0) == 13.5);
    td_module_destroy(two);
    td_module_destroy(net);
}

TEST(attention_takes_its_mask_by_name)
{
    TD_SCOPE;
    td_module *layer = td_transformer_encoder_layer(8, 2);
    td_module_eval(layer);
    td_tensor *x = td_randn(TD_SHAPE(3, 2, 8), TD_F32, NULL),
              *mask = td_tril(td_ones(TD_SHAPE(3, 3), TD_F32, NULL), 0);
    mask = td_gt_scalar(mask, 0);
    td_tensor_list named = {.count = 2, .at = {mask, x}, .names = {"mask", NULL}}, results;
    CHECK_OK(td_forward_list(layer, &named, &results));
    CHECK(td_equal(results.at[0], td_forward_with(layer, TD_TENSORS(x, mask))));
    CHECK(!td_equal(results.at[0], td_forward(layer, x)));
    td_tensor_list alone = {.count = 1, .at = {mask}, .names = {"mask"}};
    CHECK_EQ(td_forward_list(layer, &alone, &results), TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "got a mask and 0 inputs"));
    td_module_destroy(layer);
}

TEST(data_parallel_scatters_and_gathers_each)
{
    td_module *alone = make_pair();
    td_module *model = td_data_parallel(make_pair(),
                                        &(td_data_parallel_options){
                                            .device_count = td_test_on_host() ? 3 : 2});
    for (int64_t rows = 1; rows < 8; rows++) {
        TD_SCOPE;
        td_tensor *a = td_randn(TD_SHAPE(rows, 2), TD_F32, NULL),
                  *b = td_randn(TD_SHAPE(rows, 2), TD_F32, NULL);
        td_tensor_list inputs = {.count = 2, .at = {a, b}, .names = {NULL, "b"}}, expected, results;
        CHECK_OK(td_forward_list(alone, &inputs, &expected));
        CHECK_OK(td_forward_list(model, &inputs, &results));
        CHECK_EQ(results.count, 2);
        CHECK_STR(results.names[0], "sum");
        CHECK_STR(results.names[1], "product");
        for (int k = 0; k < 2; k++) {
            CHECK(td_tensor_device(results.at[k]) == td_current_device());
            CHECK(td_equal(results.at[k], expected.at[k]));
        }
        CHECK_OK(td_backward(td_sum(td_add(expected.at[0], expected.at[1]))));
        CHECK_OK(td_backward(td_sum(td_add(results.at[0], results.at[1]))));
    }
    {
        TD_SCOPE;
        CHECK(td_allclose(td_tensor_grad(td_module_parameter(alone, "other")),
                          td_tensor_grad(td_module_parameter(model, "module.other")), 1e-5, 1e-5));
        CHECK(td_forward(model, td_ones(TD_SHAPE(4, 2), TD_F32, NULL)) == NULL);
        CHECK(strstr(td_last_error(), "2 results"));
    }
    td_module_destroy(model);
    td_module_destroy(alone);
}

TEST(applied_in_parallel)
{
    TD_SCOPE;
    td_module *modules[] = {make_pair(), make_pair()};
    CHECK_OK(td_module_to(modules[1], td_device_get("cpu:1")));
    td_tensor *x = td_full(TD_SHAPE(2), 1, TD_F32, NULL),
              *y = td_tensor_to(x, td_device_get("cpu:1"));
    td_tensor_list inputs[] = {{.count = 1, .at = {x}}, {.count = 1, .at = {y}}}, results[2];
    CHECK_OK(td_parallel_apply(modules, inputs, 2, results));
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(results[i].count, 2);
        CHECK_STR(td_device_name(td_tensor_device(results[i].at[0])),
                  i ? "cpu:1" : td_device_name(NULL));
        CHECK(at(results[i].at[0], 1) == 4 && at(results[i].at[1], 1) == 3);
    }
    inputs[1] = (td_tensor_list){
        .count = 2,
        .at = {y, td_tensor_to(td_ones(TD_SHAPE(3), TD_F32, NULL), td_device_get("cpu:1"))}};
    CHECK_EQ(td_parallel_apply(modules, inputs, 2, results), TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "[2] and [3]"));
    CHECK(results[0].count == 0 && results[1].count == 0);
    td_module_destroy(modules[0]);
    td_module_destroy(modules[1]);
}

static td_status train_pair(int rank, void *arg)
{
    (void)arg;
    CHECK_OK(td_init_process_group(NULL));
    TD_SCOPE;
    td_module *model = td_ddp(make_pair(), &(td_ddp_options){.find_unused_parameters = true});
    CHECK(model != NULL);
    td_tensor *x = td_full(TD_SHAPE(2), rank + 1, TD_F32, NULL);
    td_tensor_list results;
    CHECK_OK(td_forward_list(
        model, &(td_tensor_list){.count = 2, .at = {x, x}, .names = {NULL, "b"}}, &results));
    CHECK_EQ(results.count, 2);
    /* Both are behind an output, so both wait for their gradients. */
    CHECK_OK(td_backward(td_sum(td_add(results.at[0], results.at[1]))));
    CHECK(td_item(td_tensor_grad(td_module_parameter(model, "module.weight"))) == 6);
    CHECK(td_item(td_tensor_grad(td_module_parameter(model, "module.other"))) == 5);
    td_module_destroy(model);
    CHECK_OK(td_destroy_process_group());
    return TD_OK;
}

TEST(ddp_averages_the_gradients_of_all_results)
{
    CHECK_OK(td_spawn(train_pair, NULL, 2, NULL));
}
