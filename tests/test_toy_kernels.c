/* The kernels of the toy accelerator: each gives the bits of the host's, and fails as a device does. */
#define _GNU_SOURCE
#include "runner.h"
#include "toy_machine.h"

#include <tandem/ops.h>

#include <string.h>

/* ---- Each kernel against the host's -------------------------------------------------------------------------
 *
 * An example is a list of tensors, such as "f2,3 i4" (f32 of 2 x 3, and i64 of 4), and a call with them. It runs once
 * with the host's kernels and once with the toy's; afterwards all tensors must be equal, those that were only read
 * too. */

#define MOST 12

struct example {
    const char *slot, *tensors;
    td_status (*run)(const td_kernels *k, td_tensor **t);
    size_t offset; /* of the slot in td_kernels */
};

static const td_window window = {
    .kernel = {2, 2}, .stride = {1, 2}, .padding = {1, 0}, .dilation = {1, 1}, .groups = 1};

#define EXAMPLE(slot, number, tensors, ...)                                                        \
    static td_status example_##slot##number(const td_kernels *k, td_tensor **t)                    \
    {                                                                                              \
        return k->slot(__VA_ARGS__);                                                               \
    }
#define EXAMPLES                                                                                   \
    X(fill, 1, "f3,4", t[0], 2.5)                                                                  \
    X(copy, 1, "h3,4 f3,4", t[0], t[1])                                                            \
    X(unary, 1, "f3,4 f3,4", TD_UNARY_EXP, t[0], t[1])                                             \
    X(unary, 2, "f3,4", TD_UNARY_TANH, t[0], t[0])                                                 \
    X(unary_grad, 1, "f3,4 f3,4 f3,4", TD_UNARY_SIGMOID, t[0], t[1], t[2])                         \
    X(unary_grad, 2, "f3,4 f3,4", TD_UNARY_NEG, t[0], t[1], NULL)                                  \
    X(binary, 1, "f5 f5 f5", TD_BINARY_SUB, t[0], t[1], t[2])                                      \
    X(binary, 2, "b5 i5 i5", TD_BINARY_LT, t[0], t[1], t[2])                                       \
    X(binary, 3, "f5 f5", TD_BINARY_MUL, t[0], t[0], t[1])                                         \
    X(binary, 4, "f0 f0 f0", TD_BINARY_MUL, t[0], t[1], t[2])                                      \
    X(binary_scalar, 1, "f5 f5", TD_BINARY_DIV, t[0], t[1], 3, true)                               \
    X(add_scaled, 1, "f5 f5 f5", t[0], t[1], t[2], 0.25)                                           \
    X(where, 1, "f5 b5 f5 f5", t[0], t[1], t[2], t[3])                                             \
    X(clamp, 1, "f9 f9", t[0], t[1], -0.1, 0.2)                                                    \
    X(reduce, 1, "f3,1,2 f3,4,2", TD_REDUCE_KIND_SUM, t[0], t[1], 2)                               \
    X(arg_reduce, 1, "i3,1 f3,4", true, t[0], t[1], 1)                                             \
    X(matmul, 1, "f4,6 f4,5 f5,6", t[0], t[1], t[2], 0.5, true)                                    \
    X(linear, 1, "f4,6 f4,5 f6,5 f6", t[0], t[1], t[2], t[3])                                      \
    X(linear, 2, "f4,6 f4,5 f6,5", t[0], t[1], t[2], NULL)                                         \
    X(linear_gelu, 1, "f4,6 f4,6 f4,5 f6,5 f6", t[0], t[1], t[2], t[3], t[4])                      \
    X(linear_gelu_grad, 1, "f4,6 f1,6 f4,3 f3,6 f4,6", t[0], t[1], t[2], t[3], t[4])               \
    X(conv2d, 1, "f2,4,5,2 f2,3,4,4 f4,3,2,2 f4", t[0], t[1], t[2], t[3], &window)                 \
    X(conv2d_grad_input, 1, "f2,3,4,4 f2,4,5,2 f4,3,2,2", t[0], t[1], t[2], &window)               \
    X(conv2d_grad_weight, 1, "f4,3,2,2 f4 f2,4,5,2 f2,3,4,4", t[0], t[1], t[2], t[3], &window,     \
      true)                                                                                        \
    X(max_pool2d, 1, "f2,3,5,2 j2,3,5,2 f2,3,4,4", t[0], t[1], t[2], &window)                      \
    X(max_pool2d_grad, 1, "f2,3,4,4 f2,3,2,2 j2,3,2,2", t[0], t[1], t[2], &window)                 \
    X(avg_pool2d, 1, "f2,3,5,2 f2,3,4,4", t[0], t[1], &window)                                     \
    X(avg_pool2d_grad, 1, "f2,3,4,4 f2,3,5,2", t[0], t[1], &window)                                \
    X(adaptive_avg_pool2d, 1, "f2,3,3,2 f2,3,4,4", t[0], t[1])                                     \
    X(adaptive_avg_pool2d_grad, 1, "f2,3,4,4 f2,3,3,2", t[0], t[1])                                \
    X(batch_norm, 1, "f4,3,5 f3 f3 f4,3,5 f3 f3 f3 f3", t[0], t[1], t[2], t[3], t[4], t[5], t[6],  \
      t[7], true, 0.1, 1e-5)                                                                       \
    X(batch_norm_grad, 1, "f4,3,5 f3 f3 f4,3,5 f4,3,5 f3 f3 f3", t[0], t[1], t[2], t[3], t[4],     \
      t[5], t[6], t[7], true)                                                                      \
    X(layer_norm, 1, "f4,5 f4 f4 f4,5 f5 f5", t[0], t[1], t[2], t[3], t[4], t[5], 1e-5)            \
    X(layer_norm_grad, 1, "f4,5 f5 f5 f4,5 f4,5 f5 f4 f4", t[0], t[1], t[2], t[3], t[4], t[5],     \
      t[6], t[7])                                                                                  \
    X(softmax, 1, "f2,5,3 f2,5,3", t[0], t[1], true)                                               \
    X(softmax_grad, 1, "f2,5,3 f2,5,3 f2,5,3", t[0], t[1], t[2], false)                            \
    X(attention, 1, "f2,3,4,3 f2,3,4 f2,3,4,6 f2,3,5,6 f2,3,5,3 f2,3,4,5", t[0], t[1], t[2], t[3], \
      t[4], t[5], false, 0.4)                                                                      \
    X(attention_grad, 1,                                                                           \
      "f2,3,4,6 f2,3,5,6 f2,3,5,3 f2,3,4,3 f2,3,4,6 f2,3,5,6 f2,3,5,3 f2,3,4,3 f2,3,4 f2,3,4,5",   \
      t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], true, 0.4)                       \
    X(index_select, 1, "f4,3 f5,3 i4", t[0], t[1], 0, t[2])                                        \
    X(index_add, 1, "f5,3 i4 f4,3", t[0], 0, t[1], t[2])                                           \
    X(gather, 1, "f4,3 f4,3 i4,3", t[0], t[1], 1, t[2])                                            \
    X(scatter_add, 1, "f4,3 i4,3 f4,3", t[0], 1, t[1], t[2])                                       \
    X(nll_loss, 1, "f4,2 d1 f4,3,2 i4,2 f3", t[0], t[1], t[2], t[3], t[4], 1)                      \
    X(nll_loss_grad, 1, "f4,3,2 f4,2 i4,2", t[0], t[1], NULL, t[2], NULL, -100)                    \
    X(cross_entropy_grad, 1, "f4,3,2 f1 d1 f4,3,2 f4,2,2 i4,2 f3", t[0], t[1], t[2], t[3], t[4],   \
      t[5], t[6], -100)                                                                            \
    X(cross_entropy, 1, "f4,2 f4,2,2 d1 f4,3,2 i4,2 f3", t[0], t[1], t[2], t[3], t[4], t[5], 1)    \
    X(cross_entropy, 2, "f4,1 f4,1,2 f4,3,1 i4,1", t[0], t[1], NULL, t[2], t[3], NULL, -100)       \
    X(pair_loss, 1, "f1 f3,4 f3,4", TD_PAIR_LOSS_BCE_LOGITS, t[0], t[1], t[2], 0.5)                \
    X(pair_loss_grad, 1, "f3,4 f1 f3,4 f3,4", TD_PAIR_LOSS_MSE, t[0], t[1], t[2], t[3], 0.5)       \
    X(dropout_grad, 1, "f3,4 f3,4 b3,4", t[0], t[1], t[2], 0.5, 1)                                 \
    X(sgd, 1, "f5 f5 f5 f2,3 f2,3",                                                                \
      (const td_sgd_update[]){                                                                     \
          {.parameter = t[0], .grad = t[1], .buffer = t[2], .lr = 0.1, .momentum = 0.9},           \
          {.parameter = t[3], .grad = t[4], .lr = 0.1, .weight_decay = 0.5, .maximize = true}},    \
      2)                                                                                           \
    X(adam, 1, "f5 f5 f5 p5 p5",                                                                   \
      &(const td_adam_update){.parameter = t[0],                                                   \
                              .grad = t[1],                                                        \
                              .mean = t[2],                                                        \
                              .square = t[3],                                                      \
                              .greatest = t[4],                                                    \
                              .beta1 = 0.9,                                                        \
                              .beta2 = 0.99,                                                       \
                              .eps = 1e-8,                                                         \
                              .shrink = 1,                                                         \
                              .size = 0.1,                                                         \
                              .root_correction = 0.5},                                             \
      1)                                                                                           \
    X(norm, 1, "f1 f3,4 f5", t[0], t + 1, 2, 2)                                                    \
    X(scale, 1, "f3,4 f5 f1", t, 2, t[2])                                                          \
    X(unscale, 1, "f3,4 f5 f1", t, 2, 0.5, t[2])                                                   \
    X(power_sums, 1, "d2 f3,4 f5", t[0], t + 1, 2, 2)

#define X EXAMPLE
EXAMPLES
#undef X
#define X(slot, number, tensors, ...)                                                              \
    {#slot, tensors, example_##slot##number, offsetof(td_kernels, slot)},
static const struct example examples[] = {EXAMPLES};
#undef X

/* Element i; indices are small enough for all of the examples. */
static void set_element(void *data, char dtype, int64_t i)
{
    int64_t number = (i * 7 + 3) % 11;
    switch (dtype) {
    case 'i':
        ((int64_t *)data)[i] = number % 3;
        return;
    case 'j':
        ((int32_t *)data)[i] = (int32_t)number;
        return;
    case 'b':
        ((bool *)data)[i] = number % 2;
        return;
    case 'd':
        ((double *)data)[i] = (double)number / 8;
        return;
    case 'h':
        ((uint16_t *)data)[i] = 0;
        return;
    default:
        ((float *)data)[i] = (float)number / 8 - (dtype == 'p' ? 0 : 0.5f);
    }
}

/* Makes the tensors of a list on a device; returns their number. */
static int make_tensors(const char *list, td_device *device, td_tensor **tensors)
{
    static const td_dtype dtypes[] = {
        ['f'] = TD_F32, ['p'] = TD_F32, ['d'] = TD_F64, ['h'] = TD_F16,
        ['i'] = TD_I64, ['j'] = TD_I32, ['b'] = TD_BOOL};
    _Alignas(8) char data[4096];
    int count = 0;
    for (const char *at = list; *at;) {
        char dtype = *at++;
        int64_t shape[4], numel = 1;
        int ndim = 0;
        for (char *end = NULL; !end || *end == ','; at = end + (*end == ',')) {
            shape[ndim] = strtoll(at, &end, 10);
            numel *= shape[ndim++];
        }
        at += *at == ' ';
        for (int64_t i = 0; i < numel; i++)
            set_element(data, dtype, i);
        tensors[count] = td_from_array(data, shape, ndim, dtypes[(int)dtype], device);
        CHECK(tensors[count++]);
    }
    return count;
}

/* Whether the host has a kernel for the slot of the example. */
static bool host_has(const struct example *example)
{
    td_status (*kernel)(void);
    memcpy(&kernel, (const char *)td_host_kernels() + example->offset, sizeof kernel);
    return kernel;
}

static void run_example(const struct example *example, td_device *toy)
{
    TD_SCOPE;
    td_tensor *here[MOST], *there[MOST];
    int count = make_tensors(example->tensors, td_device_get("cpu"), here);
    make_tensors(example->tensors, toy, there);
    if (!host_has(example)) {
        CHECK_FAILS(example->run(&toy_kernels, there), TD_ERR_UNSUPPORTED, example->slot);
        return;
    }
    int64_t runs = toy_kernel_runs(example->slot);
    if (example->run(td_host_kernels(), here) || example->run(&toy_kernels, there))
        FAIL("%s: %s", example->slot, td_last_error());
    CHECK_OK(td_device_synchronize(toy));
    for (int i = 0; i < count; i++) {
        td_tensor *back = td_tensor_to(there[i], td_device_get("cpu"));
        CHECK(back);
        if (td_tensor_nbytes(back) &&
            memcmp(td_tensor_data(here[i]), td_tensor_data(back), td_tensor_nbytes(back)))
            FAIL("%s with %s: tensor %d differs", example->slot, example->tensors, i);
    }
    CHECK_EQ(toy_kernel_runs(example->slot), runs + 1);
}

static td_device *begin(void)
{
    CHECK_OK(toy_register());
    return td_device_get("toy:0");
}

TEST(kernels_are_the_hosts)
{
    td_device *toy = begin();
    toy_set_missing("arg_reduce", false);
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++)
        run_example(&examples[i], toy);
}

static bool has_example(const char *slot)
{
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++)
        if (!strcmp(examples[i].slot, slot))
            return true;
    return false;
}

TEST(kernels_have_examples)
{
#define SLOT(slot) #slot
    static const char *const slots[] = {TOY_KERNELS(SLOT)};
    static const char random[] =
        "dropout uniform normal bernoulli random_range"; /* in test_device_random.c */
    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++)
        if (!has_example(slots[i]) && !strstr(random, slots[i]))
            FAIL("no example of %s", slots[i]);
}

/* A tensor over the memory of another one. */
static td_tensor *view(td_tensor *x, int64_t rows, int64_t columns, int64_t row, int64_t column)
{
    return td_from_blob(td_tensor_data(x), (int64_t[]){rows, columns}, 2, (int64_t[]){row, column},
                        td_tensor_dtype(x), td_tensor_device(x), NULL, NULL);
}

TEST(kernels_keep_strides)
{
    td_device *toy = begin();
    TD_SCOPE;
    td_tensor *t[2];
    make_tensors("f6,4 f4,6", toy, t);
    td_tensor *broadcast = view(t[0], 6, 4, 4, 0), *transposed = view(t[1], 6, 4, 1, 6);
    CHECK_OK(toy_kernels.binary(TD_BINARY_ADD, t[0], transposed, transposed));
    CHECK_OK(toy_kernels.copy(transposed, broadcast));
    td_tensor *back = td_tensor_to(t[1], td_device_get("cpu"));
    const float *data = td_tensor_data(back);
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 4; j++) /* of the first column, twice what was there before */
            CHECK(data[j * 6 + i] == 2 * ((float)((i * 7 + 3) % 11) / 8 - 0.5f));
}

/* ---- What is missing, and what fails ------------------------------------------------------------------------ */

TEST(some_kernels_are_missing)
{
    td_device *toy = begin();
    TD_SCOPE;
    td_tensor *t[3], *index[1];
    make_tensors("f4,4 f4,4 f4,4", toy, t);
    make_tensors("i4,1", toy, index);
    CHECK(!toy_kernels.adaptive_max_pool2d);
    CHECK_FAILS(toy_kernels.arg_reduce(true, index[0], t[0], 1), TD_ERR_UNSUPPORTED, "arg_reduce");
    CHECK_FAILS(toy_kernels.unary(TD_UNARY_ERF, t[0], t[1]), TD_ERR_UNSUPPORTED, "erf");
    CHECK_FAILS(toy_kernels.unary_grad(TD_UNARY_ERF, t[0], t[1], t[2]), TD_ERR_UNSUPPORTED, "erf");
    td_tensor *complex = td_from_array((float[]){1, 2}, TD_SHAPE(1), TD_COMPLEX64, toy);
    CHECK(complex);
    CHECK_FAILS(toy_kernels.fill(complex, 0), TD_ERR_UNSUPPORTED, "fill");

    CHECK_OK(toy_kernels.matmul(t[0], t[1], t[2], 1, false));
    toy_set_missing("matmul", true);
    CHECK_FAILS(toy_kernels.matmul(t[0], t[1], t[2], 1, false), TD_ERR_UNSUPPORTED, "matmul");
    toy_set_missing("matmul", false);
    CHECK_OK(toy_kernels.matmul(t[0], t[1], t[2], 1, false));
    CHECK_OK(td_device_synchronize(toy));
}

static void check_unchanged(td_tensor *tensor, float first)
{
    td_tensor *back = td_tensor_to(tensor, td_device_get("cpu"));
    CHECK(back);
    CHECK(*(float *)td_tensor_data(back) == first);
}

TEST(kernels_fail_on_request)
{
    td_device *toy = begin();
    TD_SCOPE;
    td_tensor *t[1];
    make_tensors("f4", toy, t);
    CHECK_OK(td_device_synchronize(toy));
    toy_fail_kernel(0, 2, TOY_AT_LAUNCH);
    CHECK_OK(toy_kernels.fill(t[0], 1));
    CHECK_FAILS(toy_kernels.fill(t[0], 2), TD_ERR_SYSTEM, "toy:0: fill could not be launched");
    check_unchanged(t[0], 1);

    toy_fail_kernel(0, 1, TOY_LATER);
    toy_hold(0, true);
    CHECK_OK(toy_kernels.clamp(t[0], t[0], 5, 6));
    CHECK_OK(toy_kernels.fill(t[0], 3));
    toy_hold(0, false);
    CHECK_FAILS(td_device_synchronize(toy), TD_ERR_SYSTEM, "toy:0: clamp: it failed on the device");
    CHECK_FAILS(toy_kernels.fill(t[0], 4), TD_ERR_SYSTEM, "toy:0: clamp");
    toy_clear_failure(0);
    check_unchanged(t[0], 1);
    CHECK_EQ(toy_kernel_runs("clamp"), 0);
}

TEST(an_index_out_of_range_is_a_failure_of_the_device)
{
    td_device *toy = begin();
    TD_SCOPE;
    td_tensor *t[3];
    make_tensors("f3 f3 i3", toy, t);
    CHECK_OK(toy_kernels.fill(t[2], 7));
    toy_hold(0, true);
    CHECK_OK(toy_kernels.index_select(t[0], t[1], 0, t[2]));
    toy_hold(0, false);
    CHECK_FAILS(td_device_synchronize(toy), TD_ERR_INVALID, "toy:0: index_select: the index");
    CHECK_CONTAINS(td_last_error(), "is 7");
    toy_clear_failure(0);
    CHECK_OK(td_device_synchronize(toy));
}
