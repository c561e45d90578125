/* Graphs: a captured step of training has the bits of the same steps without capture, and what a captured function may
 * not do. On the host a graph is the function itself; a device without graphs says so. */
#include "host_data.h"
#include "runner.h"

#include <tandem/autograd.h>
#include <tandem/device.h>
#include <tandem/nn.h>
#include <tandem/ops.h>
#include <tandem/optim.h>
#include <tandem/random.h>

#include <string.h>

enum { STEPS = 20, ROWS = 24, WIDTH = 32, CLASSES = 5 };
enum { EMULATED_S = 120 }; /* a training takes seconds on the emulated driver, and longer beside other programs */

struct training {
    td_module *net;
    td_optimizer *optimizer;
    td_schedule *schedule;
    td_tensor *x, *labels, *loss; /* loss: one element, of the last step */
    bool clips, checkpoints;
    int calls; /* of the function */
};

static td_status try_empty(void *arg)
{
    (void)arg;
    return TD_OK;
}

/* Ends the test on devices without graphs. */
static void need_graphs(void)
{
    td_graph *graph = NULL;
    td_status status = td_graph_capture(NULL, try_empty, NULL, &graph);
    if (status == TD_ERR_UNSUPPORTED)
        td_test_skip("%s", td_last_error());
    CHECK_OK(status);
    td_graph_destroy(graph);
}

/* ---- Training -------------------------------------------------------------------------------------- */

static td_tensor *hidden(td_tensor *const *inputs, int count, void *arg)
{
    (void)count;
    return td_forward(arg, inputs[0]);
}

static td_status step(void *arg)
{
    struct training *t = arg;
    TD_SCOPE;
    t->calls++;
    td_status status = td_optimizer_zero_grad(t->optimizer);
    td_tensor *y = t->checkpoints ? td_checkpoint(hidden, t->net, (td_tensor *[]){t->x}, 1)
                                  : td_forward(t->net, t->x);
    td_tensor *loss = td_cross_entropy(y, t->labels);
    if (!loss)
        return td_last_status();
    if (!status)
        status = td_tensor_copy(t->loss, td_detach(loss));
    if (!status)
        status = td_backward(loss);
    if (!status && t->clips)
        status = td_clip_grad_norm_(t->net, 0.5, NULL, NULL);
    return status ? status : td_optimizer_step(t->optimizer);
}

static void begin_with(struct training *t, td_optimizer *(*make)(td_module *), double dropout)
{
    td_manual_seed(7);
    *t = (struct training){.clips = true};
    t->net = td_sequential(td_linear(WIDTH, 48), td_layer_norm(48), td_gelu(), td_dropout(dropout),
                           td_linear(48, 48), td_relu(), td_dropout(dropout / 3),
                           td_linear(48, CLASSES), NULL);
    t->optimizer = make(t->net);
    t->schedule = td_cosine_schedule(t->optimizer, STEPS, 1e-5);
    t->x = td_empty(TD_SHAPE(ROWS, WIDTH), TD_F32, NULL);
    t->labels = td_empty(TD_SHAPE(ROWS), TD_I64, NULL);
    t->loss = td_zeros(NULL, 0, TD_F32, NULL);
    CHECK(t->net && t->optimizer && t->schedule && t->x && t->labels && t->loss);
}

static void begin(struct training *t, td_optimizer *(*make)(td_module *))
{
    begin_with(t, make, 0.3);
}

static void end(struct training *t)
{
    td_schedule_destroy(t->schedule);
    td_optimizer_destroy(t->optimizer);
    td_module_destroy(t->net);
    td_tensor_release(t->x);
    td_tensor_release(t->labels);
    td_tensor_release(t->loss);
}

/* Another batch for each step, the same ones in all runs. */
static void load_batch(struct training *t, int number)
{
    float x[ROWS * WIDTH];
    int64_t labels[ROWS];
    uint64_t state = (uint64_t)number + 1;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(state >> 40) / (float)(1 << 23) - 1;
    }
    for (int i = 0; i < ROWS; i++)
        labels[i] = (i * 7 + number) % CLASSES;
    set_host_data(t->x, x);
    set_host_data(t->labels, labels);
}

/* The losses of all steps, and the weights at the end. */
struct outcome {
    float losses[STEPS];
    float weights[1 << 14];
    size_t count;
};

static void note_weights(struct training *t, struct outcome *outcome)
{
    td_state *state = td_module_parameters(t->net);
    CHECK(state);
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *tensor = td_state_get(state, td_state_name(state, i));
        size_t count = (size_t)td_tensor_numel(tensor);
        CHECK(outcome->count + count <= sizeof outcome->weights / sizeof outcome->weights[0]);
        memcpy(outcome->weights + outcome->count, host_data(tensor), count * sizeof(float));
        outcome->count += count;
    }
    td_state_destroy(state);
}

/* `captured_at`: the step that is captured; negative: none. */
static void train(struct training *t, int captured_at, struct outcome *outcome)
{
    td_graph *graph = NULL;
    memset(outcome, 0, sizeof *outcome);
    for (int i = 0; i < STEPS; i++) {
        load_batch(t, i);
        if (graph)
            CHECK_OK(td_graph_launch(graph));
        else if (i == captured_at)
            CHECK_OK(td_graph_capture(NULL, step, t, &graph));
        else
            CHECK_OK(step(t));
        CHECK_OK(td_schedule_step(t->schedule));
        if (i == STEPS / 2 && !td_test_on_host()) /* what others allocate meanwhile */
            td_tensor_release(td_ones(TD_SHAPE(300, 300), TD_F32, NULL));
        outcome->losses[i] = *(const float *)host_data(t->loss);
    }
    note_weights(t, outcome);
    td_graph_destroy(graph);
}

static td_optimizer *make_adamw(td_module *net)
{
    return td_adamw(net, &(td_adam_options){.lr = 0.01, .weight_decay = 0.1});
}

static td_optimizer *make_amsgrad(td_module *net)
{
    return td_adam(net, &(td_adam_options){.lr = 0.01, .weight_decay = 0.1, .amsgrad = true});
}

static td_optimizer *make_sgd(td_module *net)
{
    return td_sgd(net, &(td_sgd_options){.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
}

static td_optimizer *make_plain_sgd(td_module *net)
{
    return td_sgd(net, &(td_sgd_options){.lr = 0.1});
}

static void compare_with(td_optimizer *(*make)(td_module *), int captured_at, bool checkpoints,
                         double dropout)
{
    static struct outcome plain, captured;
    struct training t;
    begin_with(&t, make, dropout);
    t.checkpoints = checkpoints;
    train(&t, -1, &plain);
    CHECK_EQ(t.calls, STEPS);
    end(&t);
    begin_with(&t, make, dropout);
    t.checkpoints = checkpoints;
    train(&t, captured_at, &captured);
    CHECK_EQ(t.calls, td_test_on_host() ? STEPS : captured_at + 1);
    end(&t);
    CHECK_MEM(plain.losses, captured.losses, sizeof plain.losses);
    CHECK_EQ(plain.count, captured.count);
    CHECK_MEM(plain.weights, captured.weights, plain.count * sizeof(float));
    CHECK(plain.losses[0] != plain.losses[STEPS - 1]);
}

static void compare(td_optimizer *(*make)(td_module *), int captured_at, bool checkpoints)
{
    compare_with(make, captured_at, checkpoints, 0.3);
}

TEST(adamw_with_dropout_schedule_and_clipping, .deadline_s = EMULATED_S)
{
    need_graphs();
    compare(make_adamw, 1, false);
}

TEST(amsgrad, .deadline_s = EMULATED_S)
{
    need_graphs();
    compare(make_amsgrad, 3, false);
}

TEST(sgd_with_momentum, .deadline_s = EMULATED_S)
{
    need_graphs();
    compare(make_sgd, 1, false);
}

/* The first numbers that change are those of the optimizer, behind all other kernels. */
TEST(without_random_numbers, .deadline_s = EMULATED_S)
{
    need_graphs();
    compare_with(make_adamw, 1, false, 0);
}

/* It has no state that a first step would make. */
TEST(sgd_from_the_first_step, .deadline_s = EMULATED_S)
{
    need_graphs();
    compare(make_plain_sgd, 0, false);
}

/* The forward pass draws its numbers twice. */
TEST(checkpointed_part, .deadline_s = EMULATED_S)
{
    need_graphs();
    compare(make_adamw, 1, true);
}

/* ---- State on the host --------------------------------------------------------------------------------- */

/* Steps with and without the graph may follow each other, and see each other's counts. */
TEST(steps_between_launches, .deadline_s = EMULATED_S)
{
    need_graphs();
    static struct outcome plain, mixed;
    struct training t;
    td_graph *graph = NULL;
    begin(&t, make_adamw);
    train(&t, -1, &plain);
    end(&t);
    begin(&t, make_adamw);
    memset(&mixed, 0, sizeof mixed);
    for (int i = 0; i < STEPS; i++) {
        load_batch(&t, i);
        if (i == 1)
            CHECK_OK(td_graph_capture(NULL, step, &t, &graph));
        else
            CHECK_OK(i % 3 && graph ? td_graph_launch(graph) : step(&t));
        CHECK_OK(td_schedule_step(t.schedule));
        mixed.losses[i] = *(const float *)host_data(t.loss);
    }
    note_weights(&t, &mixed);
    td_graph_destroy(graph);
    end(&t);
    CHECK_MEM(plain.losses, mixed.losses, sizeof plain.losses);
    CHECK_MEM(plain.weights, mixed.weights, plain.count * sizeof(float));
}

struct draw {
    td_tensor *numbers;
};

static td_status draw(void *arg)
{
    return td_uniform_(((struct draw *)arg)->numbers, 0, 1, NULL);
}

/* The generator is where the plain calls would have left it, and a new seed counts. */
TEST(generator_goes_on)
{
    need_graphs();
    struct draw d = {td_empty(TD_SHAPE(37), TD_F32, NULL)};
    float expected[6][37];
    td_graph *graph = NULL;
    for (int pass = 0; pass < 2; pass++) {
        td_manual_seed(3);
        for (int i = 0; i < 6; i++) {
            if (i == 4)
                td_manual_seed(11);
            if (pass == 0 || i == 2)
                CHECK_OK(draw(&d));
            else
                CHECK_OK(graph ? td_graph_launch(graph) : td_graph_capture(NULL, draw, &d, &graph));
            if (pass)
                CHECK_MEM(expected[i], host_data(d.numbers), sizeof expected[i]);
            memcpy(expected[i], host_data(d.numbers), sizeof expected[i]);
        }
    }
    td_graph_destroy(graph);
    td_tensor_release(d.numbers);
}

/* ---- Memory ----------------------------------------------------------------------------------------------- */

struct sums {
    td_tensor *x, *kept;
};

static td_status add_up(void *arg)
{
    struct sums *s = arg;
    TD_SCOPE;
    td_tensor *y = td_add(td_mul(s->x, s->x), td_mul_scalar(s->x, 2));
    td_tensor *sum = td_sum(y);
    td_tensor_release(s->kept);
    s->kept = td_tensor_retain(sum);
    return sum ? TD_OK : td_last_status();
}

/* What the function keeps is written by each launch; what it has read is not given away, though it was released. */
TEST(kept_and_released_tensors)
{
    need_graphs();
    if (td_test_on_host())
        td_test_skip("on the host each launch makes new tensors");
    struct sums s = {.x = td_full(TD_SHAPE(1000), 1, TD_F32, NULL)};
    td_graph *graph;
    CHECK_OK(td_graph_capture(NULL, add_up, &s, &graph));
    CHECK_EQ(*(const float *)host_data(s.kept), 3000);
    td_tensor *view = td_select(s.x, 0, 0);
    CHECK_OK(td_fill_(view, 2));
    td_tensor_release(view);
    CHECK_OK(td_graph_launch(graph));
    CHECK_EQ(*(const float *)host_data(s.kept), 3005);
    td_tensor_release(s.x);
    CHECK_OK(td_device_empty_cache(NULL));
    td_tensor *others[64];
    for (int i = 0; i < 64; i++)
        others[i] = td_full(TD_SHAPE(1000), -7, TD_F32, NULL);
    CHECK_OK(td_graph_launch(graph));
    CHECK_EQ(*(const float *)host_data(s.kept), 3005);
    for (int i = 0; i < 64; i++) {
        const float *elements = host_data(others[i]);
        for (int k = 0; k < 1000; k++)
            CHECK_EQ(elements[k], -7);
        td_tensor_release(others[i]);
    }
    CHECK_OK(td_graph_launch(graph));
    td_graph_destroy(graph); /* while it may be running */
    CHECK_EQ(*(const float *)host_data(s.kept), 3005);
    td_tensor_release(s.kept);
    td_memory_stats stats;
    CHECK_OK(td_device_memory_stats(NULL, &stats));
    CHECK_EQ(stats.tensors, 0);
    CHECK_OK(td_device_empty_cache(NULL));
    CHECK_OK(td_device_memory_stats(NULL, &stats));
    CHECK_EQ(stats.reserved, 0);
}

static td_status add_range(void *arg)
{
    struct sums *s = arg;
    TD_SCOPE;
    td_tensor *range = td_arange(0, 10, 1, TD_F32, NULL);
    td_tensor *half = td_linspace(0, 4.5, 10, TD_F32, NULL);
    return td_tensor_copy(s->kept, td_add(td_add(s->x, range), half));
}

/* Numbers that are made on the host, and are the same each time, are copied once. */
TEST(constants)
{
    need_graphs();
    struct sums s = {.x = td_full(TD_SHAPE(10), 1, TD_F32, NULL),
                     .kept = td_empty(TD_SHAPE(10), TD_F32, NULL)};
    td_graph *graph;
    CHECK_OK(td_graph_capture(NULL, add_range, &s, &graph));
    td_tensor_release(td_full(TD_SHAPE(10), -7, TD_F32, NULL));
    for (int i = 1; i < 4; i++) {
        const float *sums = host_data(s.kept);
        for (int k = 0; k < 10; k++)
            CHECK(sums[k] == (float)i + 1.5f * (float)k);
        CHECK_OK(td_add_scalar_(s.x, 1));
        CHECK_OK(td_graph_launch(graph));
    }
    td_graph_destroy(graph);
    td_tensor_release(s.x);
    td_tensor_release(s.kept);
}

/* ---- Streams ------------------------------------------------------------------------------------------------ */

struct fork {
    struct sums sums;
    td_stream *side;
    bool joins;
};

static td_status add_beside(void *arg)
{
    struct fork *f = arg;
    td_stream *main = td_current_stream(NULL);
    td_status status = td_stream_wait_stream(f->side, main);
    {
        TD_STREAM_SCOPE(f->side);
        if (!status)
            status = add_up(&f->sums);
    }
    if (!status && f->joins)
        status = td_stream_wait_stream(main, f->side);
    return status;
}

TEST(side_streams)
{
    need_graphs();
    if (td_test_on_host())
        td_test_skip("streams of the host do nothing");
    struct fork f = {.sums.x = td_full(TD_SHAPE(10), 1, TD_F32, NULL),
                     .side = td_stream_create(NULL, 0),
                     .joins = true};
    td_graph *graph = NULL;
    CHECK_OK(td_graph_capture(NULL, add_beside, &f, &graph));
    CHECK_EQ(*(const float *)host_data(f.sums.kept), 30);
    CHECK_OK(td_fill_(f.sums.x, 2));
    td_stream *other = td_stream_create(NULL, 0);
    CHECK_OK(td_stream_wait_stream(other, td_current_stream(NULL)));
    {
        TD_STREAM_SCOPE(other);
        CHECK_OK(td_graph_launch(graph));
        CHECK_EQ(*(const float *)host_data(f.sums.kept), 80);
    }
    td_stream_release(other);
    td_graph_destroy(graph);
    f.joins = false;
    graph = NULL;
    CHECK(td_graph_capture(NULL, add_beside, &f, &graph) == TD_ERR_SYSTEM);
    CHECK(!graph);
    f.joins = true;
    CHECK_OK(td_graph_capture(NULL, add_beside, &f, &graph));
    td_graph_destroy(graph);
    td_stream_release(f.side);
    td_tensor_release(f.sums.x);
    td_tensor_release(f.sums.kept);
}

/* ---- What is refused ------------------------------------------------------------------------------------------ */

static td_status fail_here(void *arg)
{
    struct sums *s = arg;
    TD_SCOPE;
    td_tensor *y = td_mul(s->x, s->x);
    return y ? td_fail(TD_ERR_INVALID, "the function is not ready") : td_last_status();
}

static td_status read_item(void *arg)
{
    struct sums *s = arg;
    TD_SCOPE;
    td_item(td_sum(s->x));
    return td_last_status();
}

static td_status copy_from_host(void *arg)
{
    struct sums *s = arg;
    float numbers[10] = {0};
    TD_SCOPE;
    td_tensor *host = td_from_array(numbers, TD_SHAPE(10), TD_F32, td_device_get("cpu"));
    return td_tensor_copy(s->x, host);
}

static td_status synchronize(void *arg)
{
    (void)arg;
    return td_device_synchronize(NULL);
}

static td_status capture_inside(void *arg)
{
    td_graph *graph;
    return td_graph_capture(NULL, add_up, arg, &graph);
}

static td_status launch_inside(void *arg)
{
    return td_graph_launch(arg);
}

TEST(refusals)
{
    need_graphs();
    struct sums s = {.x = td_full(TD_SHAPE(10), 1, TD_F32, NULL)};
    td_graph *graph = NULL, *none = NULL;
    CHECK_FAILS(td_graph_capture(NULL, NULL, &s, &none), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_graph_launch(NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_graph_capture(NULL, fail_here, &s, &none), TD_ERR_INVALID,
                "the function is not ready");
    CHECK(!none);
    td_graph_destroy(NULL);
    if (!td_test_on_host()) {
        CHECK_FAILS(td_graph_capture(NULL, read_item, &s, &none), TD_ERR_STATE, "td_item");
        CHECK_FAILS(td_graph_capture(NULL, copy_from_host, &s, &none), TD_ERR_STATE,
                    "copies from the host");
        CHECK_FAILS(td_graph_capture(NULL, synchronize, &s, &none), TD_ERR_STATE,
                    "td_device_synchronize waits for the device");
        CHECK_FAILS(td_graph_capture(NULL, capture_inside, &s, &none), TD_ERR_STATE, "nest");
        CHECK_OK(td_graph_capture(NULL, add_up, &s, &graph));
        CHECK_FAILS(td_graph_capture(NULL, launch_inside, graph, &none), TD_ERR_STATE,
                    "td_graph_launch launches a graph");
        CHECK_OK(td_graph_launch(graph));
        CHECK_EQ(*(const float *)host_data(s.kept), 30);
    }
    CHECK(!none);
    td_graph_destroy(graph);
    td_tensor_release(s.x);
    td_tensor_release(s.kept);
}

TEST(state_of_optimizers)
{
    need_graphs();
    if (td_test_on_host())
        td_test_skip("the host calls the function, which makes its state");
    struct training t;
    td_graph *graph = NULL;
    begin(&t, make_adamw);
    load_batch(&t, 0);
    CHECK_FAILS(td_graph_capture(NULL, step, &t, &graph), TD_ERR_STATE,
                "make a step before td_graph_capture()");
    CHECK_OK(step(&t));
    CHECK_OK(td_graph_capture(NULL, step, &t, &graph));
    td_state *state = td_optimizer_state(t.optimizer);
    CHECK_OK(td_optimizer_load_state(t.optimizer, state));
    td_state_destroy(state);
    CHECK_FAILS(td_graph_launch(graph), TD_ERR_STATE, "capture the step anew");
    td_graph_destroy(graph);
    end(&t);
}

TEST(device_without_graphs)
{
    td_graph *graph = NULL;
    if (td_test_on_host() ||
        td_graph_capture(NULL, try_empty, NULL, &graph) != TD_ERR_UNSUPPORTED) {
        td_graph_destroy(graph);
        td_test_skip("this one has graphs");
    }
    CHECK_CONTAINS(td_last_error(), td_device_name(NULL));
}
