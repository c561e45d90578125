/* Pipelines whose stages are on devices: the numbers are those of the host. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <string.h>

enum { SAMPLES = 7, WIDTH = 40, MICRO_BATCHES = 3 };

static td_tensor *mean_loss(const td_tensor_list *outputs, const td_tensor_list *targets, void *arg)
{
    (void)arg;
    return td_mse_loss(outputs->at[0], targets->at[0]);
}

static td_tensor *numbers(int seed, const char *device)
{
    static float data[SAMPLES * WIDTH];
    for (int i = 0; i < SAMPLES * WIDTH; i++)
        data[i] = (float)((i * 37 + 11 * seed) % 64) / 32 - 1;
    td_tensor *tensor = td_from_array(data, TD_SHAPE(SAMPLES, WIDTH), TD_F32,
                                      td_device_get(device));
    CHECK(tensor);
    return tensor;
}

static td_module *make_stage(int number, const char *device)
{
    td_manual_seed((uint64_t)number);
    td_module *stage = td_sequential(td_linear(WIDTH, WIDTH), td_relu(), NULL);
    CHECK(stage);
    CHECK_OK(td_module_to(stage, td_device_get(device)));
    return stage;
}

static void check_same(td_tensor *a, td_tensor *b)
{
    if (!a || !b)
        FAIL("%s", td_last_error());
    a = td_tensor_to(td_detach(a), td_device_get("cpu"));
    b = td_tensor_to(td_detach(b), td_device_get("cpu"));
    CHECK_EQ(td_tensor_nbytes(a), td_tensor_nbytes(b));
    CHECK_MEM(td_tensor_data(a), td_tensor_data(b), td_tensor_nbytes(a));
}

struct results {
    double loss;
    td_tensor *grads[2], *output; /* retained */
};

/* A step and an evaluation of the stages of this rank, on their devices. */
static struct results run(int stages, int first, const char *const *devices, td_group *group)
{
    struct results results = {0};
    td_module *modules[2];
    TD_SCOPE;
    for (int i = 0; i < stages; i++)
        modules[i] = make_stage(first + i, devices[i]);
    td_pipeline *pipeline = td_pipeline_create(
        modules, stages,
        &(td_pipeline_options){.micro_batches = MICRO_BATCHES, .loss = mean_loss, .group = group});
    if (!pipeline)
        FAIL("%s", td_last_error());
    td_tensor *x = numbers(1, devices[0]), *y = numbers(2, devices[stages - 1]), *output = NULL;
    if (td_pipeline_step(pipeline, x, y, &results.loss) ||
        td_pipeline_forward(pipeline, x, &output))
        FAIL("%s", td_last_error());
    results.output = td_tensor_retain(output);
    for (int i = 0; i < stages; i++) {
        td_tensor *grad = td_tensor_grad(td_module_parameter(modules[i], "0.weight"));
        CHECK_STR(td_device_name(td_tensor_device(grad)), devices[i]);
        results.grads[i] = td_tensor_retain(grad);
    }
    td_pipeline_destroy(pipeline);
    return results;
}

static void release(struct results *results)
{
    td_tensor_release(results->grads[0]);
    td_tensor_release(results->grads[1]);
    td_tensor_release(results->output);
}

/* The stages of two ranks, each on a device of its own. */
static void compare_ranks(const char *first, const char *second)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    struct results host = run(1, rank, (const char *[]){"cpu"}, NULL);
    struct results there = run(1, rank, (const char *[]){rank ? second : first}, NULL);
    TD_SCOPE;
    CHECK_MEM(&host.loss, &there.loss, sizeof host.loss);
    check_same(host.grads[0], there.grads[0]);
    CHECK_EQ(there.output != NULL, rank == 1);
    if (rank == 1) {
        CHECK_STR(td_device_name(td_tensor_device(there.output)), second);
        check_same(host.output, there.output);
    }
    release(&host);
    release(&there);
    CHECK_OK(td_destroy_process_group());
}

RANKS(stages_on_accelerators, .ranks = 2)
{
    compare_ranks("toy:0", "toy:0");
}

RANKS(stages_on_different_devices, .ranks = 2)
{
    compare_ranks("toy:1", "cpu");
    compare_ranks("cpu:1", "toy:0");
}

TEST(stages_of_one_rank_on_different_devices)
{
    CHECK_OK(toy_register());
    TD_SCOPE;
    struct results host = run(2, 0, (const char *[]){"cpu", "cpu"}, NULL);
    struct results there = run(2, 0, (const char *[]){"toy:0", "toy:1"}, NULL);
    CHECK_MEM(&host.loss, &there.loss, sizeof host.loss);
    for (int i = 0; i < 2; i++)
        check_same(host.grads[i], there.grads[i]);
    check_same(host.output, there.output);
    release(&host);
    release(&there);
}

/* A stage without parameters gets its inputs on the current device. */
RANKS(a_stage_without_parameters, .ranks = 2)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_init_process_group(NULL));
    TD_SCOPE;
    td_module *stage = td_get_rank(NULL) ? td_relu() : make_stage(0, "toy:1");
    td_pipeline *pipeline = td_pipeline_create(
        &stage, 1, &(td_pipeline_options){.micro_batches = MICRO_BATCHES, .loss = mean_loss});
    CHECK(pipeline);
    TD_DEVICE_SCOPE(td_device_get("toy:0"));
    td_tensor *output = NULL;
    if (td_pipeline_step(pipeline, numbers(1, "toy:1"), numbers(2, "toy:0"), NULL) ||
        td_pipeline_forward(pipeline, numbers(1, "toy:1"), &output))
        FAIL("%s", td_last_error());
    if (td_get_rank(NULL))
        CHECK_STR(td_device_name(td_tensor_device(output)), "toy:0");
    else
        CHECK(td_tensor_grad(td_module_parameter(stage, "0.weight")));
    td_pipeline_destroy(pipeline);
    CHECK_OK(td_destroy_process_group());
}
