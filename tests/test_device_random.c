/* Random numbers of accelerators: the toy draws by the rules of random.h in code of its own, and the library's code for
 * the host (TANDEM_FALLBACK=cpu) must draw the same ones. Generators, their states, dropout and checkpoints. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/checkpoint.h>
#include <tandem/kernels.h>
#include <tandem/ops.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static td_device *toy(int index)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    return td_device_get(index ? "toy:1" : "toy:0");
}

static td_tensor *read(td_tensor *tensor)
{
    td_tensor *copy = td_contiguous(td_tensor_to(td_detach(tensor), td_device_get("cpu")));
    CHECK(copy);
    return copy;
}

static void check_same(td_tensor *a, td_tensor *b)
{
    {
        TD_SCOPE;
        td_tensor *x = read(a), *y = read(b);
        CHECK_EQ(td_tensor_nbytes(x), td_tensor_nbytes(y));
        CHECK_MEM(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x));
    }
}

static bool is_same(td_tensor *a, td_tensor *b)
{
    td_tensor *x = read(a), *y = read(b);
    return !memcmp(td_tensor_data(x), td_tensor_data(y), td_tensor_nbytes(x));
}

/* ---- The same numbers --------------------------------------------------------------------------- */

struct fill {
    const char *slot;
    td_status (*fill)(td_tensor *tensor, td_generator *generator);
    bool floats;
};

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

static td_status small_range(td_tensor *tensor, td_generator *generator)
{
    return td_random_range_(tensor, 3, 90, generator);
}

static const struct fill fills[] = {
    {"uniform", uniform, true},          {"normal", normal, true},
    {"bernoulli", bernoulli, false},     {"random_range", small_range, false},
    {"random_range", td_random_, false},
};

static td_tensor *empty(int64_t n, int layout, td_dtype dtype)
{
    if (layout == 0)
        return td_empty(TD_SHAPE(n), dtype, toy(0));
    td_tensor *tensor = td_empty(TD_SHAPE(n, 3, 2), dtype, toy(0));
    return layout == 1 ? td_transpose(tensor, 0, 1) : td_slice(tensor, 1, 0, 3, 2);
}

static void compare(const struct fill *fill, td_dtype dtype, int64_t n, int layout)
{
    TD_SCOPE;
    td_generator *a = td_generator_create(UINT64_C(0xabcdef0123456789), toy(0));
    td_generator *b = td_generator_create(UINT64_C(0xabcdef0123456789), toy(0));
    td_tensor *own = empty(n, layout, dtype), *fallen = empty(n, layout, dtype);
    for (int round = 0; round < 2; round++) { /* the second one begins where the first one ended */
        CHECK_OK(fill->fill(own, a));
        toy_set_missing(fill->slot, true);
        CHECK_OK(fill->fill(fallen, b));
        toy_set_missing(fill->slot, false);
        check_same(own, fallen);
    }
    unsigned char states[2][16];
    CHECK_OK(td_generator_get_state(a, states[0], 16));
    CHECK_OK(td_generator_get_state(b, states[1], 16));
    CHECK_MEM(states[0], states[1], 16);
    td_generator_destroy(a);
    td_generator_destroy(b);
}

TEST(devices_draw_the_same_numbers, .deadline_s = 60)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_BF16, TD_I64, TD_U8, TD_I32};
    static const int64_t sizes[] = {1, 5, 1001};
    setenv("TANDEM_FALLBACK", "cpu", 1); /* before the device is opened */
    for (size_t f = 0; f < sizeof fills / sizeof fills[0]; f++)
        for (int d = 0; d < (fills[f].floats ? 4 : 7); d++)
            for (int s = 0; s < 3; s++)
                for (int layout = 0; layout < 3; layout++)
                    compare(&fills[f], dtypes[d], sizes[s], layout);
}

TEST(numbers_on_a_device_have_the_right_moments)
{
    TD_SCOPE;
    td_manual_seed(3);
    int64_t waits = td_device_waits(toy(0));
    td_tensor *x = td_randn(TD_SHAPE(20000), TD_F32, toy(0));
    td_tensor *u = td_rand(TD_SHAPE(20000), TD_F32, toy(0));
    td_tensor *r = td_randint(0, 10, TD_SHAPE(20000), TD_F32, toy(0));
    CHECK(x && u && r);
    CHECK_EQ(td_device_waits(toy(0)), waits);
    td_tensor *const all[] = {x, u, r};
    static const double means[] = {0, 0.5, 4.5}, squares[] = {1, 1 / 3., 28.5};
    for (int i = 0; i < 3; i++) {
        double sum = 0, square = 0;
        const float *data = td_tensor_data(read(all[i]));
        for (int k = 0; k < 20000; k++) {
            sum += (double)data[k] / 20000;
            square += (double)data[k] * (double)data[k] / 20000;
        }
        CHECK(sum > means[i] - 0.1 && sum < means[i] + 0.1);
        CHECK(square > squares[i] * 0.95 && square < squares[i] * 1.05);
    }
}

/* ---- Generators ------------------------------------------------------------------------------------ */

TEST(one_seed_for_all_devices)
{
    TD_SCOPE;
    td_manual_seed(17);
    td_tensor *a = td_rand(TD_SHAPE(9), TD_F32, toy(0));
    td_tensor *next = td_rand(TD_SHAPE(9), TD_F32, toy(0));
    CHECK(!is_same(a, next));
    td_manual_seed(18);
    CHECK(!is_same(a, td_rand(TD_SHAPE(9), TD_F32, toy(0))));
    td_manual_seed(17);
    check_same(a, td_rand(TD_SHAPE(9), TD_F32, toy(0)));
    check_same(next, td_rand(TD_SHAPE(9), TD_F32, toy(0)));
    /* A device that is used for the first time. */
    CHECK_EQ(td_generator_initial_seed(td_default_generator(toy(1))), 17);
    check_same(a, td_rand(TD_SHAPE(9), TD_F32, toy(1)));
    CHECK(td_default_generator(toy(1)) != td_default_generator(toy(0)));
    CHECK(td_default_generator(td_device_get("cpu:1")) == td_default_generator(NULL));
    td_generator_destroy(td_default_generator(toy(1))); /* ignored */
    CHECK_EQ(td_generator_initial_seed(td_default_generator(toy(1))), 17);
    CHECK(!td_default_generator(td_device_get("toy:7")));
    CHECK_CONTAINS(td_last_error(), "toy:7");
    CHECK(!td_generator_create(1, td_device_get("nothing:0")));
    CHECK_CONTAINS(td_last_error(), "nothing:0");
}

TEST(states_of_counters)
{
    TD_SCOPE;
    unsigned char state[TD_GENERATOR_STATE_SIZE];
    td_generator *generator = td_generator_create(5, toy(0));
    CHECK(td_generator_device(generator) == toy(0));
    CHECK_EQ(td_generator_state_size(generator), 16);
    CHECK_EQ(td_generator_state_size(NULL), TD_GENERATOR_STATE_SIZE);
    td_tensor *x = td_empty(TD_SHAPE(6), TD_F32, toy(0)), *y = td_empty_like(x);
    CHECK_OK(td_normal_(x, 0, 1, generator));
    CHECK_OK(td_generator_get_state(generator, state, 16));
    CHECK_EQ(state[0], 5);
    CHECK_EQ(state[8], 2); /* blocks for 6 words */
    CHECK_OK(td_normal_(x, 0, 1, generator));
    CHECK_OK(td_generator_set_state(generator, state, 16));
    CHECK_OK(td_normal_(y, 0, 1, generator));
    check_same(x, y);
    CHECK_FAILS(td_generator_get_state(generator, state, sizeof state), TD_ERR_INVALID, "toy:0");
    CHECK_FAILS(td_generator_set_state(generator, state, sizeof state), TD_ERR_INVALID,
                "16 bytes, not 5056");
    uint64_t seed = 0, offset = 0;
    CHECK_OK(td_generator_take(generator, 9, &seed, &offset));
    CHECK_EQ(seed, 5);
    CHECK_EQ(offset, 4);
    CHECK_OK(td_generator_take(generator, 0, &seed, &offset));
    CHECK_EQ(offset, 7);
    CHECK_OK(td_generator_take(generator, 1, &seed, &offset));
    CHECK_EQ(offset, 7);
    CHECK_FAILS(td_generator_take(td_default_generator(NULL), 1, &seed, &offset), TD_ERR_INVALID,
                "cpu");
    td_generator_manual_seed(generator, 6);
    CHECK_OK(td_generator_take(generator, 1, &seed, &offset));
    CHECK_EQ(seed, 6);
    CHECK_EQ(offset, 0);
    td_generator_destroy(generator);
}

TEST(a_generator_of_another_device_is_refused)
{
    TD_SCOPE;
    td_tensor *x = td_zeros(TD_SHAPE(4), TD_F32, toy(0));
    td_tensor *host = td_zeros(TD_SHAPE(4), TD_F32, NULL);
    td_generator *other = td_generator_create(1, toy(1)), *mine = td_generator_create(1, NULL);
    CHECK_FAILS(td_uniform_(x, 0, 1, other), TD_ERR_INVALID, "toy:0");
    CHECK_CONTAINS(td_last_error(), "toy:1");
    CHECK_FAILS(td_normal_(x, 0, 1, mine), TD_ERR_INVALID, "cpu");
    CHECK_FAILS(td_bernoulli_(host, 0.5, other), TD_ERR_INVALID, "toy:1");
    CHECK(!td_randperm_with(4, TD_I64, toy(0), other));
    CHECK_OK(td_random_(td_zeros(TD_SHAPE(4), TD_F32, td_device_get("cpu:0")), mine));
    check_same(x, host);
    td_generator_destroy(other);
    td_generator_destroy(mine);
}

TEST(permutations_on_a_device)
{
    TD_SCOPE;
    td_manual_seed(2);
    td_tensor *host = td_randperm(700, TD_I64, td_device_get("cpu"));
    td_manual_seed(2);
    td_tensor *there = td_randperm(700, TD_I64, toy(0));
    CHECK(td_tensor_device(there) == toy(0));
    check_same(host, there);
    td_generator *generator = td_generator_create(3, toy(0));
    const int32_t *numbers = td_tensor_data(read(td_randperm_with(700, TD_I32, toy(0), generator)));
    bool seen[700] = {0};
    for (int i = 0; i < 700; i++) {
        CHECK(numbers[i] >= 0 && numbers[i] < 700 && !seen[numbers[i]]);
        seen[numbers[i]] = true;
    }
    td_generator_destroy(generator);
}

TEST(initial_values_on_a_device)
{
    TD_SCOPE;
    td_tensor *w = td_zeros(TD_SHAPE(40, 30), TD_F32, toy(0));
    CHECK_OK(td_init_kaiming_uniform(w, NULL));
    CHECK_OK(td_init_xavier_normal(w, 1));
    CHECK_OK(td_init_trunc_normal(w, 0, 1, -0.5, 0.25));
    const float *data = td_tensor_data(read(w));
    bool differ = false;
    for (int i = 0; i < 1200; i++) {
        CHECK(data[i] >= -0.5f && data[i] <= 0.25f);
        differ |= data[i] != data[0];
    }
    CHECK(differ);
}

/* ---- Dropout, and checkpoints ------------------------------------------------------------------------ */

TEST(dropout_on_a_device)
{
    TD_SCOPE;
    setenv("TANDEM_FALLBACK", "cpu", 1);
    td_tensor *x = td_ones(TD_SHAPE(30, 10), TD_F32, toy(0));
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    td_manual_seed(4);
    td_tensor *y = td_f_dropout(x, 0.5, true);
    CHECK_OK(td_backward(td_sum(y)));
    check_same(y, td_tensor_grad(x)); /* ones: both are the mask times 2 */
    const float *data = td_tensor_data(read(y));
    int kept = 0;
    for (int i = 0; i < 300; i++)
        kept += data[i] == 2;
    CHECK(kept > 90 && kept < 210);
    toy_set_missing("dropout", true);
    td_manual_seed(4);
    check_same(y, td_f_dropout(x, 0.5, true));
    toy_set_missing("dropout", false);
}

static td_tensor *drop(td_tensor *const *inputs, int count, void *arg)
{
    (void)count, (void)arg;
    return td_f_dropout(inputs[0], 0.5, true);
}

TEST(a_segment_runs_again_with_the_same_numbers_on_a_device)
{
    TD_SCOPE;
    td_manual_seed(4);
    td_tensor *x = td_ones(TD_SHAPE(30, 10), TD_F32, toy(0));
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    td_tensor *y = td_checkpoint(drop, NULL, &x, 1); /* the first use of the generator */
    td_tensor *next = td_rand(TD_SHAPE(5), TD_F32, toy(0));
    unsigned char states[2][16];
    CHECK_OK(td_generator_get_state(td_default_generator(toy(0)), states[0], 16));
    CHECK_OK(td_backward(td_sum(y)));
    check_same(y, td_tensor_grad(x));
    CHECK_OK(td_generator_get_state(td_default_generator(toy(0)), states[1], 16));
    CHECK_MEM(states[0], states[1], 16);
    CHECK(next);
}

TEST(a_checkpoint_has_the_generators_of_devices)
{
    TD_SCOPE;
    char path[512];
    snprintf(path, sizeof path, "%s/training", td_test_temp_dir());
    td_training training = {.epoch = 1};
    td_manual_seed(4);
    CHECK(td_rand(TD_SHAPE(5), TD_F32, toy(0)));
    CHECK_OK(td_training_save(path, &training, NULL));
    td_tensor *a = td_rand(TD_SHAPE(5), TD_F32, toy(0)), *b = td_rand(TD_SHAPE(5), TD_F32, NULL);
    td_manual_seed(99);
    CHECK_OK(td_training_load(path, &training, NULL));
    check_same(a, td_rand(TD_SHAPE(5), TD_F32, toy(0)));
    check_same(b, td_rand(TD_SHAPE(5), TD_F32, NULL));
}
