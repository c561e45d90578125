/* Deferred initialisation: modules on a meta device, and the bits that they get later. */
#include "module_samples.h"
#include "runner.h"
#include "toy_device.h"

#include <tandem/dlpack.h>
#include <tandem/tandem.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static td_device *toy(void)
{
    CHECK_OK(toy_register());
    toy_set_delay(0);
    return td_device_get("toy:0");
}

static td_device *meta(void)
{
    return td_device_get("meta");
}

/* The same dtype, shape and bits, on whichever devices. */
static void check_same(const char *name, td_tensor *a, td_tensor *b)
{
    TD_SCOPE;
    TD_NO_GRAD;
    CHECK(td_tensor_dtype(a) == td_tensor_dtype(b) && td_tensor_ndim(a) == td_tensor_ndim(b));
    td_tensor *x = td_contiguous(td_tensor_to(td_detach(a), td_device_get("cpu")));
    td_tensor *y = td_contiguous(td_tensor_to(td_detach(b), td_device_get("cpu")));
    CHECK(x && y && td_tensor_nbytes(x) == td_tensor_nbytes(y));
    if (td_tensor_nbytes(x) && memcmp(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x))) {
        fprintf(stderr, "%s has other bits\n", name);
        CHECK(!"the same bits");
    }
}

static void check_same_states(td_state *a, td_state *b)
{
    CHECK(a && b && td_state_count(a) == td_state_count(b));
    for (int i = 0; i < td_state_count(a); i++) {
        CHECK_STR(td_state_name(a, i), td_state_name(b, i));
        check_same(td_state_name(a, i), td_state_tensor(a, i), td_state_tensor(b, i));
    }
    td_state_destroy(a);
    td_state_destroy(b);
}

static void check_same_modules(td_module *a, td_module *b)
{
    check_same_states(td_module_parameters(a), td_module_parameters(b));
    check_same_states(td_module_buffers(a), td_module_buffers(b));
}

/* The state of the default generators of the host and the toy: the next numbers. */
static void next_numbers(td_device *device, float numbers[24])
{
    TD_SCOPE;
    td_tensor *x = td_tensor_to(td_randn(TD_SHAPE(3), TD_F32, device), td_device_get("cpu"));
    td_tensor *y = td_tensor_to(td_rand(TD_SHAPE(21), TD_F32, device), td_device_get("cpu"));
    memcpy(numbers, td_tensor_data(x), 3 * sizeof(float));
    memcpy(numbers + 3, td_tensor_data(y), 21 * sizeof(float));
}

/* ---- Devices ----------------------------------------------------------------------------------------------- */

TEST(meta_devices_have_names)
{
    td_device *device = toy();
    CHECK(td_device_get("meta") == td_device_meta(td_device_get("cpu")));
    CHECK(td_device_get("meta:toy:0") == td_device_meta(device));
    CHECK(td_device_meta(meta()) == meta() && td_device_is_meta(meta()));
    CHECK(!td_device_is_meta(device) && !td_device_is_meta(NULL));
    CHECK_STR(td_device_name(td_device_meta(device)), "meta:toy:0");
    CHECK_STR(td_device_kind(meta()), "meta");
    CHECK(td_device_exists("meta") && td_device_exists("meta:toy:1"));
    CHECK(!td_device_exists("meta:nothing:0") && !td_device_exists("meta:meta"));
    TD_SCOPE;
    CHECK(td_zeros(TD_SHAPE(2), TD_F32, td_device_get("meta:meta")) == NULL);
    CHECK(td_zeros(TD_SHAPE(2), TD_F32, td_device_get("meta:")) == NULL);
    CHECK_OK(td_device_synchronize(meta()));
    td_memory_stats stats;
    td_device_memory_stats(meta(), &stats);
    td_stream *stream = td_stream_create(meta(), 0);
    CHECK_OK(td_set_stream(stream));
    CHECK_OK(td_stream_synchronize(stream));
    td_stream_release(stream);
}

/* ---- Kinds of modules -------------------------------------------------------------------------------------- */

static void every_kind_on(td_device *device)
{
    for (int i = 0; i < sample_count; i++) {
        td_module *whole, *deferred;
        float expected[24], numbers[24];
        td_manual_seed(40 + (uint64_t)i);
        {
            TD_DEVICE_SCOPE(device);
            whole = samples[i].make();
        }
        next_numbers(device, expected);
        td_manual_seed(40 + (uint64_t)i);
        {
            TD_DEVICE_SCOPE(td_device_meta(device));
            deferred = samples[i].make();
        }
        if (!deferred)
            fprintf(stderr, "%s: %s\n", samples[i].name, td_last_error());
        CHECK(whole && deferred);
        next_numbers(device, numbers);
        CHECK(!memcmp(expected, numbers, sizeof numbers));
        td_state *state = td_module_parameters(deferred);
        for (int p = 0; p < td_state_count(state); p++)
            CHECK(td_tensor_is_meta(td_state_tensor(state, p)) &&
                  !td_tensor_data(td_state_tensor(state, p)) &&
                  td_tensor_requires_grad(td_state_tensor(state, p)));
        td_module *clone = td_module_clone(deferred);
        CHECK_OK(td_module_materialize(deferred));
        CHECK_OK(td_module_materialize(deferred)); /* nothing is left */
        for (int p = 0; p < td_state_count(state); p++)
            CHECK(td_tensor_device(td_state_tensor(state, p)) == device);
        td_state_destroy(state);
        next_numbers(device, expected);
        check_same_modules(whole, deferred);
        CHECK_OK(td_module_to(clone, td_device_get("cpu")));
        check_same_modules(whole, clone);
        td_module_destroy(clone);
        td_module_destroy(whole);
        td_module_destroy(deferred);
    }
}

TEST(every_kind_has_its_bits)
{
    every_kind_on(td_device_get("cpu"));
}

TEST(every_kind_has_its_bits_on_an_accelerator)
{
    every_kind_on(toy());
}

/* A module that was materialised trains as one that was not deferred. */
TEST(a_materialized_module_trains)
{
    td_module *nets[2];
    td_optimizer *optimizers[2];
    for (int n = 0; n < 2; n++) {
        td_manual_seed(5);
        TD_DEVICE_SCOPE(n ? meta() : td_device_get("cpu"));
        nets[n] = td_sequential(td_linear(6, 8), td_batch_norm1d(8), td_relu(), td_linear(8, 2),
                                NULL);
        optimizers[n] = td_adam(nets[n], &(td_adam_options){.lr = 0.01}); /* also before it */
        CHECK(optimizers[n]);
    }
    CHECK_OK(td_module_materialize(nets[1]));
    for (int step = 0; step < 4; step++)
        for (int n = 0; n < 2; n++) {
            TD_SCOPE;
            td_manual_seed(100 + (uint64_t)step);
            td_tensor *y = td_forward(nets[n], td_randn(TD_SHAPE(5, 6), TD_F32, NULL));
            CHECK_OK(td_optimizer_zero_grad(optimizers[n]));
            CHECK_OK(td_backward(td_mean(td_mul(y, y))));
            CHECK_OK(td_optimizer_step(optimizers[n]));
        }
    check_same_modules(nets[0], nets[1]);
    for (int n = 0; n < 2; n++) {
        td_optimizer_destroy(optimizers[n]);
        td_module_destroy(nets[n]);
    }
}

/* ---- Draws ------------------------------------------------------------------------------------------------- */

typedef td_status draw_fn(td_tensor *tensor, td_generator *generator);

static td_status uniform(td_tensor *tensor, td_generator *generator)
{
    return td_uniform_(tensor, -0.3, 1.7, generator);
}

static td_status normal(td_tensor *tensor, td_generator *generator)
{
    return td_normal_(tensor, 0.5, 2, generator);
}

static td_status bernoulli(td_tensor *tensor, td_generator *generator)
{
    return td_bernoulli_(tensor, 0.3, generator);
}

static td_status integers(td_tensor *tensor, td_generator *generator)
{
    return td_random_range_(tensor, -3, 100, generator);
}

static td_status wide_integers(td_tensor *tensor, td_generator *generator)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    if (dtype != TD_I64 && dtype != TD_F64)
        return td_random_(tensor, generator);
    return td_random_range_(tensor, 0, INT64_C(1) << 40, generator);
}

/* Three tensors of each size one after another, of which the last is transposed. */
static void draw_on(td_device *device, draw_fn *draw, td_dtype dtype, int64_t size)
{
    TD_SCOPE;
    td_tensor *made[2][3];
    float numbers[2][24];
    for (int deferred = 0; deferred < 2; deferred++) {
        td_manual_seed(9);
        for (int i = 0; i < 3; i++) {
            td_tensor *x = td_empty(TD_SHAPE(size, i == 2 ? 3 : 1), dtype,
                                    deferred ? td_device_meta(device) : device);
            CHECK_OK(draw(i == 2 ? td_transpose(x, 0, 1) : x, NULL));
            made[deferred][i] = x;
        }
        next_numbers(device, numbers[deferred]);
    }
    CHECK(!memcmp(numbers[0], numbers[1], sizeof numbers[0]));
    for (int i = 2; i >= 0; i--) /* in any order */
        check_same(td_dtype_name(dtype), made[0][i], made[1][i]);
}

static void draws_on(td_device *device)
{
    static draw_fn *const floats[] = {uniform, normal, bernoulli, integers, wide_integers};
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_BF16, TD_I64, TD_I32};
    static const int64_t sizes[] = {0,   1,   2,   15,  16,  17,  33,  511, 512,
                                    513, 622, 623, 624, 625, 626, 641, 5000};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t f = 0; f < sizeof floats / sizeof *floats; f++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                if (dtypes[d] <= TD_BF16 || f >= 2)
                    draw_on(device, floats[f], dtypes[d], sizes[s]);
}

TEST(skipped_draws_are_those_of_pytorch)
{
    draws_on(td_device_get("cpu"));
}

TEST(skipped_draws_are_those_of_counters)
{
    draws_on(toy());
}

TEST(generators_of_the_program)
{
    TD_SCOPE;
    td_generator *a = td_generator_create(3, NULL), *b = td_generator_create(3, NULL);
    td_tensor *x = td_empty(TD_SHAPE(50), TD_F32, NULL),
              *y = td_empty(TD_SHAPE(50), TD_F32, meta());
    CHECK_OK(td_normal_(x, 0, 1, a));
    CHECK_OK(td_normal_(y, 0, 1, b));
    td_generator_destroy(b); /* its state is kept */
    td_generator_destroy(a);
    check_same("x", x, y);
    td_generator *wrong = td_generator_create(3, toy());
    CHECK_FAILS(td_normal_(y, 0, 1, wrong), TD_ERR_INVALID, "toy:0");
    td_generator_destroy(wrong);
}

/* ---- What is recorded -------------------------------------------------------------------------------------- */

static td_tensor *many_steps(td_device *device, int way)
{
    TD_NO_GRAD;
    const float array[] = {1, 2, 3, 4, 5, 6};
    td_tensor *x = td_randn(TD_SHAPE(20, 6), TD_F32, device);
    switch (way) {
    case 0: /* changes in place, also of views */
        CHECK_OK(td_mul_scalar_(x, 0.125));
        CHECK_OK(td_clamp_(td_select(x, 0, 3), -0.05, 0.05));
        CHECK_OK(td_fill_(td_narrow(x, 1, 2, 2), 7));
        CHECK_OK(td_add_scalar_(td_transpose(x, 0, 1), -1));
        CHECK_OK(td_f_relu_(td_select(x, 1, 0)));
        return x;
    case 1: /* values of the program, conversions and clones */
        CHECK_OK(
            td_tensor_copy(td_select(x, 0, 4), td_from_array(array, TD_SHAPE(6), TD_F32, device)));
        x = td_to_dtype(td_clone(td_transpose(x, 0, 1)), TD_BF16);
        CHECK_OK(td_mul_scalar_(x, 3));
        return td_to_dtype(x, TD_F64);
    case 2:
        CHECK_OK(td_tensor_copy(td_select(x, 1, 2), td_arange(0, 20, 1, TD_F32, device)));
        CHECK_OK(td_tensor_copy(td_select(x, 0, 0), td_linspace(0, 1, 6, TD_F32, device)));
        CHECK_OK(td_init_trunc_normal(td_narrow(x, 0, 5, 5), 0, 0.5, -0.7, 0.7));
        return x;
    case 3: /* copied before it changes again */
    {
        td_tensor *y = td_clone(x);
        CHECK_OK(td_zero_(x));
        return y;
    }
    case 4:
        return td_to_dtype(td_randperm(30, TD_I64, device), TD_F32);
    case 5:
        CHECK_OK(td_init_kaiming_normal(x, NULL));
        CHECK_OK(td_init_xavier_uniform(x, 2));
        CHECK_OK(td_tensor_copy(x, x));
        return x;
    case 6:
        return td_randint(3, 90, TD_SHAPE(40), TD_I32, device);
    default:
        x = td_empty(TD_SHAPE(64), way == 7 ? TD_F16 : TD_F64, device);
        CHECK_OK(td_init_trunc_normal(x, 0.1, 0.5, -0.7, 0.7));
        return x;
    }
}

static void steps_on(td_device *device)
{
    for (int way = 0; way < 9; way++) {
        TD_SCOPE;
        char name[16];
        snprintf(name, sizeof name, "way %d", way);
        td_manual_seed(77);
        td_tensor *x = many_steps(device, way);
        td_manual_seed(77);
        td_tensor *y = many_steps(td_device_meta(device), way);
        CHECK(y && td_tensor_is_meta(y));
        td_manual_seed(1);
        check_same(name, x, y);
        check_same(name, x, y); /* td_tensor_to() leaves the record */
    }
}

TEST(steps_are_recorded)
{
    steps_on(td_device_get("cpu"));
}

TEST(steps_are_recorded_for_an_accelerator)
{
    steps_on(toy());
}

/* What the program has changed since does not matter. */
TEST(copied_values_are_those_of_then)
{
    TD_SCOPE;
    td_tensor *from = td_full(TD_SHAPE(8), 3, TD_F32, NULL),
              *to = td_empty(TD_SHAPE(8), TD_F32, meta());
    float array[2] = {1, 2};
    td_tensor *list = td_from_array(array, TD_SHAPE(2), TD_F32, meta());
    CHECK_OK(td_tensor_copy(to, from));
    CHECK_OK(td_fill_(from, 9));
    array[0] = 9;
    CHECK(td_item(td_sum(td_tensor_to(to, td_device_get("cpu")))) == 24);
    CHECK(td_item(td_sum(td_tensor_to(list, td_device_get("cpu")))) == 3);
}

/* ---- Moves ------------------------------------------------------------------------------------------------- */

static td_module *tied(void)
{
    td_module *net = td_sequential(td_embedding(12, 6),
                                   td_linear_with(6, 12, &(td_linear_options){.no_bias = true}),
                                   td_batch_norm1d(12), NULL);
    CHECK_OK(td_module_set_tensor(net, "1.weight", td_module_parameter(net, "0.weight")));
    CHECK_OK(td_tensor_set_requires_grad(td_module_parameter(net, "2.bias"), false));
    return net;
}

static td_module *make_tied(td_device *device)
{
    td_manual_seed(31);
    TD_DEVICE_SCOPE(device);
    return tied();
}

static void check_tied(td_module *whole, td_module *deferred)
{
    CHECK(td_module_parameter(deferred, "0.weight") == td_module_parameter(deferred, "1.weight"));
    CHECK(!td_tensor_requires_grad(td_module_parameter(deferred, "2.bias")));
    check_same_modules(whole, deferred);
    td_module_destroy(whole);
    td_module_destroy(deferred);
}

TEST(shared_and_frozen_parameters)
{
    td_module *whole = make_tied(td_device_get("cpu")), *deferred = make_tied(meta());
    CHECK_OK(td_module_materialize(deferred));
    check_tied(whole, deferred);
}

TEST(deferred_modules_move)
{
    td_device *cpu = td_device_get("cpu"), *accelerator = toy();
    /* Drawn on the host, moved while it is deferred. */
    td_module *whole = make_tied(cpu), *deferred = make_tied(meta());
    CHECK_OK(td_module_to(whole, accelerator));
    CHECK_OK(td_module_to(deferred, td_device_meta(accelerator)));
    CHECK(td_tensor_is_meta(td_module_parameter(deferred, "0.weight")));
    CHECK_OK(td_module_materialize(deferred));
    CHECK(td_tensor_device(td_module_parameter(deferred, "0.weight")) == accelerator);
    check_tied(whole, deferred);
    /* Drawn on the accelerator, to the host, and converted. */
    whole = make_tied(accelerator), deferred = make_tied(td_device_meta(accelerator));
    CHECK_OK(td_module_to_dtype(whole, TD_BF16));
    CHECK_OK(td_module_to_dtype(deferred, TD_BF16));
    CHECK_OK(td_module_to(whole, cpu));
    CHECK_OK(td_module_to(deferred, cpu));
    CHECK(td_tensor_device(td_module_parameter(deferred, "0.weight")) == cpu);
    check_tied(whole, deferred);
    /* To a meta device: the values are gone. */
    deferred = make_tied(cpu);
    CHECK_OK(td_module_to(deferred, meta()));
    CHECK(!td_tensor_data(td_module_parameter(deferred, "0.weight")));
    CHECK_FAILS(td_module_materialize(deferred), TD_ERR_STATE, "0.weight");
    CHECK(strstr(td_last_error(), "dropped its values") != NULL);
    CHECK_OK(td_init_constant(td_module_parameter(deferred, "0.weight"), 1));
    CHECK_OK(td_init_constant(td_module_parameter(deferred, "2.weight"), 1));
    CHECK_FAILS(td_module_materialize(deferred), TD_ERR_STATE, "2.bias");
    td_module_destroy(deferred);
}

/* ---- Loading ----------------------------------------------------------------------------------------------- */

TEST(weights_are_loaded_without_being_initialised)
{
    char path[] = "/tmp/td_deferred_XXXXXX", text[64];
    CHECK(mkdtemp(path));
    snprintf(text, sizeof text, "%s/weights", path);
    td_module *whole = make_tied(td_device_get("cpu")), *deferred = make_tied(meta());
    CHECK_OK(td_init_constant(td_module_parameter(whole, "0.weight"), 0.5));
    CHECK_OK(td_save_module(text, whole));
    CHECK_FAILS(td_save_module(text, deferred), TD_ERR_STATE, "td_module_materialize()");
    CHECK_OK(td_load_module(text, deferred, NULL));
    CHECK(!td_tensor_is_meta(td_module_parameter(deferred, "0.weight")));
    CHECK_OK(td_module_materialize(deferred)); /* buffers that are not saved; none */
    check_tied(whole, deferred);
    unlink(text);
    /* A sharded checkpoint, in one process. */
    whole = make_tied(td_device_get("cpu")), deferred = make_tied(meta());
    CHECK_OK(td_init_constant(td_module_parameter(whole, "0.weight"), 0.25));
    td_state *from = td_module_state(whole), *to = td_module_state(deferred);
    CHECK_OK(td_save_sharded(text, from, NULL, 0, NULL, NULL));
    CHECK_OK(td_load_sharded(text, to, NULL));
    td_state_destroy(from);
    td_state_destroy(to);
    check_tied(whole, deferred);
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", path);
    CHECK(system(command) == 0);
}

/* A tensor that is loaded and one that is not have one storage: the latter keeps its values. */
TEST(parts_of_one_storage)
{
    TD_SCOPE;
    static const td_module_ops ops = {.name = "Parts"};
    td_module *nets[2];
    for (int deferred = 0; deferred < 2; deferred++) {
        td_manual_seed(8);
        td_tensor *all = td_randn(TD_SHAPE(4, 5), TD_F32, deferred ? meta() : NULL);
        nets[deferred] = td_module_create(&ops);
        for (int i = 0; i < 2; i++)
            CHECK_OK(td_module_add_buffer(nets[deferred], i ? "b" : "a", td_select(all, 0, 2 * i),
                                          true));
    }
    td_state *state = td_state_create();
    CHECK_OK(td_state_add(state, "a", td_full(TD_SHAPE(5), 3, TD_F32, NULL)));
    for (int n = 0; n < 2; n++)
        CHECK_OK(td_module_load_state(nets[n], state, false));
    check_same_modules(nets[0], nets[1]);
    td_state_destroy(state);
    td_module_destroy(nets[0]);
    td_module_destroy(nets[1]);
}

/* A whole training is resumed in a model that has no memory yet. */
TEST(a_training_is_resumed)
{
    char path[512];
    snprintf(path, sizeof path, "%s/training", td_test_temp_dir());
    td_module *nets[2];
    td_optimizer *adams[2];
    for (int n = 0; n < 2; n++) {
        td_manual_seed(5);
        TD_DEVICE_SCOPE(n ? meta() : td_device_get("cpu"));
        nets[n] = td_sequential(td_linear(6, 8), td_batch_norm1d(8), td_linear(8, 2), NULL);
        adams[n] = td_adam(nets[n], &(td_adam_options){.lr = 0.01});
    }
    for (int step = 0; step < 6; step++)
        for (int n = 0; n < 2; n++) {
            TD_SCOPE;
            td_training training = {.model = nets[n], .optimizer = adams[n], .step = step};
            if (step == 3)
                CHECK_OK(n ? td_training_load(path, &training, NULL)
                           : td_training_save(path, &training, NULL));
            if (n && step < 3)
                continue;
            td_manual_seed(100 + (uint64_t)step);
            td_tensor *y = td_forward(nets[n], td_randn(TD_SHAPE(5, 6), TD_F32, NULL));
            CHECK_OK(td_optimizer_zero_grad(adams[n]));
            CHECK_OK(td_backward(td_mean(td_mul(y, y))));
            CHECK_OK(td_optimizer_step(adams[n]));
        }
    check_same_modules(nets[0], nets[1]);
    for (int n = 0; n < 2; n++) {
        td_optimizer_destroy(adams[n]);
        td_module_destroy(nets[n]);
    }
}

/* ---- Errors ------------------------------------------------------------------------------------------------ */

static void check_refused(const void *result)
{
    if (result || td_last_status() != TD_ERR_STATE || !strstr(td_last_error(), "meta") ||
        !strstr(td_last_error(), "td_module_materialize()"))
        fprintf(stderr, "the error is: %s\n", td_last_error());
    CHECK(!result && td_last_status() == TD_ERR_STATE && strstr(td_last_error(), "meta") &&
          strstr(td_last_error(), "td_module_materialize()"));
}

#define REFUSED(call)                                                                              \
    do {                                                                                           \
        CHECK((call) == TD_ERR_STATE);                                                             \
        check_refused(NULL);                                                                       \
    } while (0)

TEST(operators_say_what_to_do)
{
    TD_SCOPE;
    td_tensor *m = td_randn(TD_SHAPE(4, 4), TD_F32, meta()),
              *x = td_randn(TD_SHAPE(4, 4), TD_F32, NULL);
    td_tensor *index = td_zeros(TD_SHAPE(4), TD_I64, meta());
    check_refused(td_add(m, m));
    check_refused(td_add(m, x));
    check_refused(td_matmul(x, m));
    check_refused(td_matmul(m, m));
    check_refused(td_exp(m));
    check_refused(td_mul_scalar(m, 2));
    check_refused(td_sum(m));
    check_refused(td_f_softmax(m, 1));
    check_refused(td_index_select(m, 0, index));
    check_refused(td_tril(m, 0));
    CHECK(isnan(td_item(td_select(td_select(m, 0, 0), 0, 0))));
    check_refused(NULL);
    REFUSED(td_add_(m, m));
    REFUSED(td_tensor_copy(x, m));
    td_module *net;
    {
        TD_DEVICE_SCOPE(meta());
        net = td_sequential(td_linear(4, 4), td_relu(), td_layer_norm(4), NULL);
    }
    check_refused(td_forward(net, x));
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.1});
    CHECK_OK(td_optimizer_step(sgd)); /* there are no gradients */
    td_optimizer_destroy(sgd);
    td_module_destroy(net);
    td_bytes text = td_tensor_text(m);
    CHECK(!text.data || strstr(text.data, "meta"));
    td_bytes_free(&text);
    CHECK(td_to_dlpack(m) == NULL);
    CHECK(td_tensor_pin(m, NULL) == NULL);
    text = td_device_memory_text(meta());
    td_bytes_free(&text);
    td_graph *graph;
    CHECK(td_graph_capture(meta(), NULL, NULL, &graph) != TD_OK);
    float value;
    CHECK(td_from_blob(&value, TD_SHAPE(1), NULL, TD_F32, meta(), NULL, NULL) == NULL);
    CHECK(strstr(td_last_error(), "td_from_blob") != NULL);
    CHECK_FAILS(td_module_materialize(NULL), TD_ERR_INVALID, "NULL");
}

/* ---- Memory ------------------------------------------------------------------------------------------------ */

TEST(a_deferred_module_has_no_memory)
{
    td_device *device = toy();
    td_memory_stats before, after;
    CHECK_OK(td_device_memory_stats(device, &before));
    td_module *net;
    {
        TD_DEVICE_SCOPE(td_device_meta(device));
        /* More than the toy, and this machine, have. */
        net = td_sequential(td_linear(1 << 20, 1 << 10), td_linear(1 << 10, 1 << 10), NULL);
    }
    CHECK(net && td_module_parameter_count(net) > (INT64_C(1) << 30));
    CHECK_OK(td_device_memory_stats(device, &after));
    CHECK(after.allocated == before.allocated);
    CHECK_FAILS(td_module_materialize(net), TD_ERR_NOMEM, "\"0.weight\"");
    td_module_destroy(net);
}
