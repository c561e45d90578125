/* Threads of the program that use accelerators at once: each trains a module of its own, with the bits of the host, on
 * the default stream, which threads share, or on streams of their own, while others ask for statistics, empty the cache
 * and let the host compute what the device lacks. Best run under ThreadSanitizer. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { TRAINERS = 4, STEPS = 4, BATCH = 6, FEATURES = 9, CLASSES = 5, ROUNDS = 30 };

/* What all threads read. */
static td_module *original;
static td_tensor *inputs[STEPS], *labels[STEPS]; /* on the host */
static td_tensor *shared[TOY_DEVICES];           /* the same numbers on each device */
static td_event *ready[TOY_DEVICES];             /* after which they are there */
static atomic_int training;

static td_device *toy(int index)
{
    return td_device_get(index ? "toy:1" : "toy:0");
}

static void begin(void)
{
    CHECK_OK(toy_register());
    toy_set_delay(20);
    td_manual_seed(5);
    original = td_sequential(td_linear(FEATURES, 16), td_layer_norm(16), td_gelu(),
                             td_linear(16, CLASSES), NULL);
    CHECK(original != NULL);
    for (int step = 0; step < STEPS; step++) {
        inputs[step] = td_randn(TD_SHAPE(BATCH, FEATURES), TD_F32, td_device_get("cpu"));
        labels[step] = td_randint(0, CLASSES, TD_SHAPE(BATCH), TD_I64, td_device_get("cpu"));
        CHECK(inputs[step] && labels[step]);
    }
    for (int i = 0; i < TOY_DEVICES; i++) {
        CHECK((shared[i] = td_tensor_to(inputs[0], toy(i))) != NULL);
        CHECK((ready[i] = td_event_create(toy(i), NULL)) != NULL);
        CHECK_OK(td_event_record(ready[i], td_default_stream(toy(i))));
    }
}

static void end(void)
{
    for (int i = 0; i < TOY_DEVICES; i++) {
        td_event_destroy(ready[i]);
        td_tensor_release(shared[i]);
    }
    for (int step = 0; step < STEPS; step++) {
        td_tensor_release(inputs[step]);
        td_tensor_release(labels[step]);
    }
    td_module_destroy(original);
}

/* Trains `net` for all steps, and moves it to the host. */
static void train(td_module *net, td_device *device)
{
    td_optimizer *adam = td_adam(net, &(td_adam_options){.lr = 0.05});
    CHECK(adam != NULL);
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = td_tensor_to(inputs[step], device);
        td_tensor *y = td_tensor_to(labels[step], device);
        CHECK_OK(td_optimizer_zero_grad(adam));
        td_tensor *loss = td_cross_entropy(td_forward(net, x), y);
        CHECK(loss != NULL);
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_clip_grad_norm_(net, 1, NULL, NULL));
        CHECK_OK(td_optimizer_step(adam));
    }
    td_optimizer_destroy(adam);
    CHECK_OK(td_module_to(net, td_device_get("cpu")));
}

struct trainer {
    pthread_t thread;
    int number;
    td_module *net;
};

/* Trainers 0 and 1 share the default stream of toy:0; the others have a stream of their own. */
static void *run_trainer(void *arg)
{
    struct trainer *trainer = arg;
    td_device *device = toy(trainer->number > 2);
    CHECK_OK(td_set_device(device));
    td_stream *stream = trainer->number > 1 ? td_stream_create(device, 0)
                                            : td_stream_retain(td_default_stream(device));
    CHECK(stream != NULL);
    CHECK_OK(td_set_stream(stream));
    CHECK_OK(td_module_to(trainer->net, device));
    train(trainer->net, device);
    CHECK_OK(td_stream_synchronize(stream));
    td_stream_release(stream);
    atomic_fetch_sub(&training, 1);
    return NULL;
}

/* What the program may do meanwhile. */
static void *run_observer(void *arg)
{
    int number = *(const int *)arg;
    td_device *device = toy(number);
    for (int round = 0; atomic_load(&training) > 0 && round < ROUNDS; round++) {
        TD_SCOPE;
        td_memory_stats stats;
        CHECK_OK(td_device_memory_stats(device, &stats));
        CHECK(stats.allocated > 0 && stats.allocated <= stats.reserved);
        td_bytes text = td_device_memory_text(device);
        CHECK(text.size > 0);
        td_bytes_free(&text);
        if (round % 4 == 0)
            CHECK_OK(td_device_empty_cache(device));
        CHECK_EQ(td_device_count("toy"), TOY_DEVICES);
        CHECK(td_device_waits(device) >= 0);

        td_stream *stream = td_stream_create(device, 0);
        CHECK(stream != NULL);
        {
            TD_STREAM_SCOPE(stream);
            CHECK_OK(td_stream_wait_event(stream, ready[number]));
            td_tensor *most = td_argmax(shared[number], 1, false); /* by the host */
            td_tensor *random = td_rand(TD_SHAPE(7), TD_F32, device);
            CHECK(most && random);
            CHECK_EQ(td_tensor_numel(td_tensor_to(most, td_device_get("cpu"))), BATCH);
            td_tensor *other = td_tensor_to(shared[number], toy(!number));
            CHECK(other != NULL);
            CHECK(td_item(td_sum(td_abs(other))) > 0);
            CHECK_OK(td_event_record(ready[number], stream)); /* later than what is awaited */
        }
        td_stream_release(stream);
    }
    return NULL;
}

TEST(threads_train_on_accelerators_at_once, .deadline_s = 60)
{
    setenv("TANDEM_FALLBACK", "cpu", 1);
    begin();
    td_module *expected = td_module_clone(original);
    CHECK(expected != NULL);
    train(expected, td_device_get("cpu"));

    struct trainer trainers[TRAINERS];
    pthread_t observers[TOY_DEVICES];
    int numbers[TOY_DEVICES];
    atomic_store(&training, TRAINERS);
    for (int i = 0; i < TRAINERS; i++) {
        trainers[i] = (struct trainer){.number = i, .net = td_module_clone(original)};
        CHECK(trainers[i].net != NULL);
        CHECK_EQ(pthread_create(&trainers[i].thread, NULL, run_trainer, &trainers[i]), 0);
    }
    for (int i = 0; i < TOY_DEVICES; i++) {
        numbers[i] = i;
        CHECK_EQ(pthread_create(&observers[i], NULL, run_observer, &numbers[i]), 0);
    }
    for (int i = 0; i < TRAINERS; i++)
        CHECK_EQ(pthread_join(trainers[i].thread, NULL), 0);
    for (int i = 0; i < TOY_DEVICES; i++)
        CHECK_EQ(pthread_join(observers[i], NULL), 0);

    td_state *wanted = td_module_state(expected);
    for (int i = 0; i < TRAINERS; i++) {
        td_state *state = td_module_state(trainers[i].net);
        CHECK(state && td_state_count(state) == td_state_count(wanted));
        for (int j = 0; j < td_state_count(wanted); j++) {
            td_tensor *a = td_state_tensor(wanted, j), *b = td_state_tensor(state, j);
            CHECK_MEM(td_tensor_data(a), td_tensor_data(b), td_tensor_nbytes(a));
        }
        td_state_destroy(state);
        td_module_destroy(trainers[i].net);
    }
    td_state_destroy(wanted);
    td_module_destroy(expected);
    end();
}
