/* States: order, names, numbers, parts and copies, and what is refused. */
#include "host_data.h"
#include "runner.h"

#include <tandem/ops.h>
#include <tandem/state.h>

#include <stdio.h>

static td_tensor *filled(double value, td_dtype dtype)
{
    td_tensor *tensor = td_full((const int64_t[]){2}, 1, value, dtype, NULL);
    CHECK(tensor);
    return tensor;
}

/* A state of three tensors. */
static td_state *three(void)
{
    td_state *state = td_state_create();
    CHECK(state);
    {
        TD_SCOPE;
        CHECK_OK(td_state_add(state, "b.weight", filled(1, TD_F32)));
        CHECK_OK(td_state_add(state, "a", filled(2, TD_I64)));
        CHECK_OK(td_state_add(state, "b.bias", filled(3, TD_F64)));
    }
    return state;
}

TEST(keeps_order_and_tensors)
{
    td_state *state = three();
    CHECK_EQ(td_state_count(state), 3);
    CHECK_STR(td_state_name(state, 0), "b.weight");
    CHECK_STR(td_state_name(state, 1), "a");
    CHECK_STR(td_state_name(state, 2), "b.bias");
    CHECK(!td_state_name(state, 3));
    CHECK(!td_state_tensor(state, 3));
    CHECK(td_state_tensor(state, 1) == td_state_get(state, "a"));
    CHECK_EQ(((const int64_t *)host_data(td_state_get(state, "a")))[1], 2);
    CHECK(!td_state_get(state, "b"));
    CHECK(!td_state_get(state, NULL));
    td_state_destroy(state);
    td_state_destroy(NULL);
    CHECK_EQ(td_state_count(NULL), 0);
}

TEST(many_names)
{
    td_state *state = td_state_create();
    char name[32];
    for (int i = 0; i < 5000; i++) {
        snprintf(name, sizeof name, "layer.%d", i);
        CHECK_OK(td_state_add_integer(state, name, i));
    }
    for (int i = 0; i < 5000; i++) {
        snprintf(name, sizeof name, "layer.%d", i);
        int64_t value = -1;
        CHECK_OK(td_state_get_integer(state, name, &value));
        CHECK_EQ(value, i);
        CHECK_STR(td_state_name(state, (size_t)i), name);
    }
    td_state_destroy(state);
}

TEST(refuses_names_and_tensors)
{
    td_state *state = three();
    td_tensor *tensor = filled(1, TD_F32);
    CHECK_FAILS(td_state_add(state, "a", tensor), TD_ERR_INVALID, "\"a\" already");
    CHECK_FAILS(td_state_add(state, "", tensor), TD_ERR_INVALID, "empty");
    CHECK_FAILS(td_state_add(state, NULL, tensor), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_state_add(NULL, "x", tensor), TD_ERR_INVALID, "NULL");
    CHECK_EQ(td_state_add(state, "x", NULL), TD_ERR_INVALID);
    CHECK_EQ(td_state_count(state), 3);
    td_tensor_release(tensor);
    td_state_destroy(state);
}

TEST(numbers)
{
    td_state *state = three();
    CHECK_OK(td_state_add_number(state, "lr", 0.1));
    CHECK_OK(td_state_add_integer(state, "step", INT64_MAX));
    CHECK_EQ(td_tensor_ndim(td_state_get(state, "lr")), 0);
    double number = 0;
    int64_t integer = 0;
    CHECK_OK(td_state_get_number(state, "lr", &number));
    CHECK(number == 0.1);
    CHECK_OK(td_state_get_integer(state, "step", &integer));
    CHECK(integer == INT64_MAX);
    CHECK_FAILS(td_state_get_integer(state, "lr", &integer), TD_ERR_INVALID, "whole number");
    CHECK_FAILS(td_state_get_number(state, "a", &number), TD_ERR_INVALID, "[2]");
    CHECK_FAILS(td_state_get_number(state, "none", &number), TD_ERR_INVALID, "\"none\"");
    CHECK_FAILS(td_state_get_number(state, NULL, &number), TD_ERR_INVALID, "NULL");
    CHECK(number == 0.1 && integer == INT64_MAX);
    {
        TD_SCOPE;
        /* As PyTorch saves the count of steps: an f32, perhaps with a dimension of size 1. */
        CHECK_OK(td_state_add(state, "f32", td_full((const int64_t[]){1, 1}, 2, 7, TD_F32, NULL)));
        CHECK_OK(td_state_add(state, "u8", td_full(NULL, 0, 200, TD_U8, NULL)));
        CHECK_OK(td_state_add(state, "nan", td_full(NULL, 0, 0.0 / 0.0, TD_F64, NULL)));
        CHECK_OK(td_state_add(state, "complex", td_full(NULL, 0, 1, TD_COMPLEX64, NULL)));
        CHECK_OK(td_state_add(state, "none", td_full((const int64_t[]){0}, 1, 1, TD_F32, NULL)));
    }
    CHECK_OK(td_state_get_integer(state, "f32", &integer));
    CHECK_EQ(integer, 7);
    CHECK_OK(td_state_get_integer(state, "u8", &integer));
    CHECK_EQ(integer, 200);
    CHECK_FAILS(td_state_get_integer(state, "nan", &integer), TD_ERR_INVALID, "whole number");
    CHECK_FAILS(td_state_get_number(state, "complex", &number), TD_ERR_INVALID, "complex");
    CHECK_FAILS(td_state_get_number(state, "none", &number), TD_ERR_INVALID, "[0]");
    td_state_destroy(state);
}

TEST(parts_and_prefixes)
{
    td_state *state = three();
    td_state *part = td_state_part(state, "b.");
    CHECK_EQ(td_state_count(part), 2);
    CHECK_STR(td_state_name(part, 0), "weight");
    CHECK_STR(td_state_name(part, 1), "bias");
    CHECK(td_state_tensor(part, 1) == td_state_get(state, "b.bias"));

    CHECK_OK(td_state_add_all(part, "more.", state));
    CHECK_EQ(td_state_count(part), 5);
    CHECK(td_state_get(part, "more.b.weight") == td_state_get(state, "b.weight"));

    /* The third name is there already: nothing is added. */
    CHECK_OK(td_state_add_integer(part, "again.b.bias", 1));
    CHECK_FAILS(td_state_add_all(part, "again.", state), TD_ERR_INVALID, "again.b.bias");
    CHECK_EQ(td_state_count(part), 6);
    CHECK(!td_state_get(part, "again.b.weight"));
    CHECK_FAILS(td_state_add_all(part, "", NULL), TD_ERR_INVALID, "NULL");

    td_state *none = td_state_part(state, "b.weight");
    CHECK_EQ(td_state_count(none), 0);
    td_state *all = td_state_part(state, NULL);
    CHECK_EQ(td_state_count(all), 3);
    CHECK(!td_state_part(NULL, "x"));
    td_state_destroy(all);
    td_state_destroy(none);
    td_state_destroy(part);
    td_state_destroy(state);
}

TEST(clones_are_independent)
{
    td_state *state = three();
    td_state *clone = td_state_clone(state);
    CHECK_EQ(td_state_count(clone), 3);
    CHECK_OK(td_fill_(td_state_get(state, "b.weight"), 9));
    CHECK(((const float *)host_data(td_state_get(clone, "b.weight")))[0] == 1);
    CHECK_STR(td_state_name(clone, 2), "b.bias");
    td_state_destroy(state);
    CHECK(((const double *)host_data(td_state_get(clone, "b.bias")))[1] == 3);
    td_state_destroy(clone);
    CHECK(!td_state_clone(NULL));
}
