/* Networks that are trained from the same seed as in PyTorch follow the same curve: the initial weights
 * are the same bits, the gradients of the first step agree to five digits, the losses of a hundred
 * steps to four, and in the end the generator has given the same numbers to weights, data, shuffles and
 * dropout. What PyTorch did is in reference/training_curves.txt; record_training.py builds the same
 * networks in the same order, since each draws from the generator.
 *
 * Under a sanitizer only the first steps are made. */
#include "runner.h"
#include "training_recording.h"

#include <math.h>
#include <tandem/tandem.h>

enum { STEPS = 100, FEW_STEPS = 10, SEED = 1234 };

/* One training; train() destroys its parts. */
struct training {
    td_module *network;
    td_dataset *data;
    td_sampler *sampler; /* gets the epoch, or NULL */
    td_loader *loader;
    td_optimizer *optimizer;
    td_tensor *(*loss)(td_tensor *x, td_tensor *target);
};

static double total_norm(const td_state *parameters)
{
    double sum = 0;
    for (int i = 0; i < td_state_count(parameters); i++) {
        td_tensor *grad = td_tensor_grad(td_state_tensor(parameters, i));
        CHECK(grad);
        sum += recording_norm(grad) * recording_norm(grad);
    }
    return sqrt(sum);
}

static void check_grads(struct recording *recording, const td_state *parameters)
{
    double total = total_norm(parameters);
    for (int i = 0; i < td_state_count(parameters); i++)
        recording_check_grad(recording, td_state_name(parameters, i),
                             td_tensor_grad(td_state_tensor(parameters, i)), total);
}

static void step(struct training *training, struct recording *recording, td_batch batch, int number,
                 const td_state *parameters)
{
    {
        TD_SCOPE;
        CHECK_OK(td_optimizer_zero_grad(training->optimizer));
        td_tensor *loss = training->loss(td_forward(training->network, batch.input), batch.target);
        CHECK_OK(td_backward(loss));
        if (number == 0)
            check_grads(recording, parameters);
        CHECK_OK(td_optimizer_step(training->optimizer));
        recording_check_loss(recording, td_item(loss));
    }
}

static void all_steps(struct training *training, struct recording *recording,
                      const td_state *parameters, int steps)
{
    int done = 0;
    for (int epoch = 0; done < steps; epoch++) {
        td_sampler_set_epoch(training->sampler, epoch);
        for (td_batch batch; done < steps && td_loader_next(training->loader, &batch); done++)
            step(training, recording, batch, done, parameters);
        CHECK_OK(td_loader_status(training->loader));
    }
}

static void train(const char *name, struct training training)
{
    CHECK(training.network && training.loader && training.optimizer);
    int steps = td_test_slowness() > 1 ? FEW_STEPS : STEPS;
    struct recording *recording = recording_open(name);
    td_state *parameters = td_module_parameters(training.network);
    CHECK(parameters);
    for (int i = 0; i < td_state_count(parameters); i++)
        recording_check_weight(recording, td_state_name(parameters, i),
                               td_state_tensor(parameters, i));
    all_steps(&training, recording, parameters, steps);
    if (steps == STEPS) {
        for (int i = 0; i < td_state_count(parameters); i++)
            recording_check_final(recording, td_state_name(parameters, i),
                                  td_state_tensor(parameters, i));
        recording_check_next(recording);
    }
    recording_close(recording);
    td_state_destroy(parameters);
    td_optimizer_destroy(training.optimizer);
    td_loader_destroy(training.loader);
    td_sampler_release(training.sampler);
    td_dataset_release(training.data);
    td_module_destroy(training.network);
}

/* `count` random pictures of ten random classes. */
static td_dataset *pictures(int64_t count)
{
    td_dataset *data = NULL;
    {
        TD_SCOPE;
        td_tensor *input = td_randn((int64_t[]){count, 1, 28, 28}, 4, TD_F32, NULL);
        td_tensor *target = td_randint(0, 10, (int64_t[]){count}, 1, TD_I64, NULL);
        data = td_tensor_dataset(input, target);
    }
    CHECK(data);
    return data;
}

/* A sampler that shuffles and shares out to two ranks, weight decay, and a last batch that is smaller. */
TEST(mlp, .deadline_s = 60)
{
    td_manual_seed(SEED);
    struct training training = {.loss = td_cross_entropy};
    training.network = td_sequential(td_flatten(), td_linear(784, 64), td_relu(), td_linear(64, 64),
                                     td_tanh(), td_linear(64, 10), NULL);
    training.data = pictures(403);
    training.sampler = td_distributed_sampler(
        training.data, &(td_sampler_options){.num_replicas = 2, .rank = 1, .seed = 5});
    training.loader = td_loader_create(
        training.data, &(td_loader_options){.batch_size = 32, .sampler = training.sampler});
    training.optimizer = td_sgd(
        training.network, &(td_sgd_options){.lr = 0.005, .momentum = 0.9, .weight_decay = 1e-4});
    train("mlp", training);
}

static td_module *lenet(void)
{
    return td_sequential(td_conv2d_with(1, 6, 5, 5, &(td_conv2d_options){.padding = {2, 2}}),
                         td_batch_norm2d(6), td_relu(), td_max_pool2d(2), td_conv2d(6, 16, 5),
                         td_batch_norm2d(16), td_relu(), td_avg_pool2d(2), td_flatten(),
                         td_linear(400, 120), td_batch_norm1d(120), td_relu(), td_linear(120, 84),
                         td_relu(), td_linear(84, 10), NULL);
}

/* Batch norm of both kinds, a shuffle that draws from the default generator, and Nesterov. */
TEST(lenet, .deadline_s = 60)
{
    td_manual_seed(SEED);
    struct training training = {.loss = td_cross_entropy, .network = lenet()};
    training.data = pictures(300);
    training.loader = td_loader_create(
        training.data, &(td_loader_options){.batch_size = 16, .shuffle = true, .drop_last = true});
    training.optimizer = td_sgd(training.network,
                                &(td_sgd_options){.lr = 0.01, .momentum = 0.9, .nesterov = true});
    train("lenet", training);
}

/* The seeds' network, whose random numbers are drawn in the middle of the training too. */
TEST(seeds, .deadline_s = 60)
{
    td_manual_seed(SEED);
    struct training training = {.loss = td_nll_loss};
    training.network = td_sequential(td_conv2d(1, 10, 5), td_max_pool2d(2), td_relu(),
                                     td_conv2d(10, 20, 5), td_dropout2d(0.5), td_max_pool2d(2),
                                     td_relu(), td_flatten(), td_linear(320, 50), td_relu(),
                                     td_dropout(0.5), td_linear(50, 10), td_log_softmax(1), NULL);
    training.data = pictures(128);
    training.loader = td_loader_create(training.data, &(td_loader_options){.batch_size = 16});
    training.optimizer = td_sgd(training.network, &(td_sgd_options){.lr = 0.01, .momentum = 0.5});
    train("seeds", training);
}

/* ---- A model of language, a module of our own ----------------------------------------------------- */

enum { BYTES = 256, WIDTH = 32, HEADS = 4, SEQUENCE = 24 };
enum { TOKENS, PLACES, LAYERS, HEAD }; /* its children */

static td_tensor *transformer_forward(td_module *module, td_tensor *const *inputs, int count)
{
    CHECK_EQ(count, 1);
    td_tensor *places = td_arange(0, SEQUENCE, 1, TD_I64, NULL);
    td_tensor *x = td_add(td_forward(td_child(module, TOKENS), inputs[0]),
                          td_forward(td_child(module, PLACES), places));
    x = td_forward(td_child(module, LAYERS), x);
    return td_transpose(td_forward(td_child(module, HEAD), x), 1, 2);
}

static const td_module_ops transformer_ops = {.name = "Transformer",
                                              .forward = transformer_forward};

static td_module *transformer_layer(double dropout)
{
    return td_transformer_encoder_layer_with(
        WIDTH, HEADS,
        &(td_transformer_options){.batch_first = true,
                                  .feedforward = 4 * WIDTH,
                                  .dropout = dropout == 0 ? TD_ZERO : dropout,
                                  .gelu = true,
                                  .causal = true});
}

static void train_transformer(const char *name, double dropout)
{
    td_manual_seed(SEED);
    struct training training = {.loss = td_cross_entropy};
    td_module *network = td_module_create(&transformer_ops);
    td_module_add_child(network, "tokens", td_embedding(BYTES, WIDTH));
    td_module_add_child(network, "places", td_embedding(SEQUENCE, WIDTH));
    td_module *first = transformer_layer(dropout), *second = transformer_layer(dropout);
    td_module_add_child(network, "layers", td_sequential(first, second, NULL));
    td_module_add_child(network, "head", td_linear(WIDTH, BYTES));
    training.network = td_module_finish(network);
    {
        TD_SCOPE;
        td_tensor *text = td_randint(0, BYTES, (int64_t[]){40, SEQUENCE + 1}, 2, TD_I64, NULL);
        training.data = td_tensor_dataset(td_narrow(text, 1, 0, SEQUENCE),
                                          td_narrow(text, 1, 1, SEQUENCE));
    }
    training.loader = td_loader_create(training.data, &(td_loader_options){.batch_size = 8});
    training.optimizer = td_adamw(training.network,
                                  &(td_adam_options){.lr = 1e-3, .weight_decay = 0.05});
    train(name, training);
}

TEST(transformer, .deadline_s = 60)
{
    train_transformer("transformer", 0);
}

TEST(transformer_with_dropout, .deadline_s = 60)
{
    train_transformer("transformer_dropout", 0.1);
}
