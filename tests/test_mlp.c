/* A linear layer, a GELU by tanh and a linear layer in a Sequential: on devices with kernels for that they run as one
 * node, with the results and gradients that the three have one by one. */
#include "host_data.h"
#include "runner.h"

#include "autograd/op_mlp.h"

#include <tandem/tandem.h>

#include <string.h>

enum { IN = 16, HIDDEN = 24, OUT = 8, PARAMETERS = 4 };

static td_tensor *parameter(td_module *module, int i)
{
    return td_param(td_child(module, i / 2 * 2), i % 2);
}

static td_module *make_mlp(void)
{
    td_manual_seed(3);
    td_module *module = td_sequential(td_linear(IN, HIDDEN), td_gelu_tanh(), td_linear(HIDDEN, OUT),
                                      NULL);
    CHECK(module && !td_module_to(module, td_current_device()));
    return module;
}

/* What a run leaves: the result, and the gradients of x and of the parameters (NULL where not needed). */
struct results {
    td_tensor *y, *grads[PARAMETERS + 1];
};

static struct results run(td_module *module, td_tensor *x, bool one_by_one, int times)
{
    struct results results = {0};
    for (int i = 0; i < PARAMETERS; i++)
        td_tensor_set_grad(parameter(module, i), NULL);
    td_tensor_set_grad(x, NULL);
    for (int t = 0; t < times; t++) {
        td_tensor *y = x;
        if (one_by_one)
            for (int i = 0; i < 3; i++)
                y = td_forward(td_child(module, i), y);
        else
            y = td_forward(module, x);
        CHECK(y);
        results.y = y;
        if (td_tensor_requires_grad(y))
            CHECK(!td_backward(td_sum(td_square(y))));
    }
    for (int i = 0; i < PARAMETERS; i++)
        results.grads[i] = td_tensor_grad(parameter(module, i));
    results.grads[PARAMETERS] = td_tensor_grad(x);
    for (int i = 0; i <= PARAMETERS; i++)
        results.grads[i] = results.grads[i] ? td_clone(results.grads[i]) : NULL;
    return results;
}

static void compare(const struct results *a, const struct results *b, double tolerance)
{
    CHECK(td_tensor_dtype(a->y) == td_tensor_dtype(b->y));
    CHECK(td_allclose(a->y, b->y, tolerance, tolerance));
    for (int i = 0; i <= PARAMETERS; i++) {
        CHECK_EQ(!a->grads[i], !b->grads[i]);
        if (a->grads[i]) {
            CHECK(td_tensor_dtype(a->grads[i]) == td_tensor_dtype(b->grads[i]));
            CHECK(td_allclose(a->grads[i], b->grads[i], tolerance, tolerance));
        }
    }
}

static void check(td_module *module, td_tensor *x, double tolerance)
{
    TD_SCOPE;
    for (int times = 1; times <= 2; times++) { /* the second time adds to the gradients */
        struct results expected = run(module, x, true, times), got = run(module, x, false, times);
        compare(&got, &expected, tolerance);
    }
}

TEST(mlp_is_that_of_its_parts)
{
    TD_SCOPE;
    td_module *module = make_mlp();
    td_tensor *x = host_randn(TD_SHAPE(5, 7, IN), TD_F32);
    td_tensor_set_requires_grad(x, true);
    check(module, x, 1e-5);
    td_tensor *flat = host_randn(TD_SHAPE(IN), TD_F32);
    check(module, flat, 1e-5);
    check(module, td_transpose(host_randn(TD_SHAPE(IN, 9), TD_F32), 0, 1), 1e-5);
    check(module, host_randn(TD_SHAPE(0, IN), TD_F32), 1e-5);
    td_module_destroy(module);
}

TEST(mlp_runs_as_one_where_the_device_can)
{
    TD_SCOPE;
    td_module *module = make_mlp();
    td_tensor *x = host_randn(TD_SHAPE(5, IN), TD_F32), *p[PARAMETERS];
    for (int i = 0; i < PARAMETERS; i++)
        p[i] = parameter(module, i);
    CHECK_EQ(td__mlp_fits(x, p[0], p[1], p[2], p[3]), !td_test_on_host());
    CHECK(!td__mlp_fits(x, p[2], p[1], p[0], p[3])); /* shapes */
    CHECK(!td__mlp_fits(x, p[0], NULL, p[2], p[3]));
    CHECK(!td__mlp_fits(td_to_dtype(x, TD_F64), p[0], p[1], p[2], p[3]));
    td_module_destroy(module);
}

/* Whichever of x and the parameters need gradients. */
TEST(mlp_of_frozen_parameters)
{
    td_module *module = make_mlp();
    for (unsigned frozen = 0; frozen < 1u << (PARAMETERS + 1); frozen++) {
        TD_SCOPE;
        td_tensor *x = host_randn(TD_SHAPE(6, IN), TD_F32);
        td_tensor_set_requires_grad(x, !(frozen >> PARAMETERS & 1));
        for (int i = 0; i < PARAMETERS; i++)
            td_tensor_set_requires_grad(parameter(module, i), !(frozen >> i & 1));
        check(module, x, 1e-5);
    }
    td_module_destroy(module);
}

TEST(mlp_under_autocast)
{
    TD_SCOPE;
    td_module *module = make_mlp();
    td_tensor *x = host_randn(TD_SHAPE(6, IN), TD_F32);
    td_tensor_set_requires_grad(x, true);
    char kind[64];
    snprintf(kind, sizeof kind, "%s", td_device_name(td_current_device()));
    *strchrnul(kind, ':') = 0;
    TD_AUTOCAST(kind, &(td_autocast_options){.dtype = TD_BF16});
    check(module, x, 5e-2);
    td_module_destroy(module);
}

TEST(mlp_among_other_modules)
{
    TD_SCOPE;
    td_module *module = td_sequential(td_linear(IN, IN), td_linear(IN, HIDDEN), td_gelu_tanh(),
                                      td_linear(HIDDEN, IN), td_gelu_tanh(), td_linear(IN, HIDDEN),
                                      td_gelu(), td_linear(HIDDEN, OUT), td_gelu_tanh(), NULL);
    CHECK(module && !td_module_to(module, td_current_device()));
    td_tensor *x = host_randn(TD_SHAPE(3, IN), TD_F32), *y = x;
    for (int i = 0; i < 9; i++)
        y = td_forward(td_child(module, i), y);
    CHECK(td_allclose(td_forward(module, x), y, 1e-5, 1e-5));
    td_module_destroy(module);
}

TEST(mlp_with_a_wrong_shape_names_the_layer)
{
    TD_SCOPE;
    td_module *module = make_mlp();
    CHECK(!td_forward(module, host_randn(TD_SHAPE(3, IN + 1), TD_F32)));
    CHECK(strstr(td_last_error(), "td_f_linear"));
    td_module_destroy(module);
}
