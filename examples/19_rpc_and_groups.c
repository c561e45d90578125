/* Remote calls and a process group in one process: an embedding lives on one worker, and the trainers that use it average
 * the gradients of their own layer.
 *
 *     $ tdrun --standalone --nproc-per-node=3 ./19_rpc_and_groups
 *     trainer 0: loss 1.… to 0.…
 *     trainer 1: loss 1.… to 0.…
 *
 * Ranks 0 and 1 are trainers and form a process group; rank 2 has the embedding, and calls train() on them with a
 * reference to it. The backward pass goes through both: the gradients of the embedding are in a context of distributed
 * autograd, those of the layer, too, until td_all_reduce() has averaged them. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { WORDS = 20, WIDTH = 8, CLASSES = 4, STEPS = 200, BATCH = 16, TRAINERS = 2 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "19_rpc_and_groups: %s\n", td_last_error());
    exit(1);
}

static td_group *trainers;

/* Averages a gradient of the context over the trainers. */
static void average(uint64_t context, td_tensor *parameter)
{
    td_tensor *grad = td_dist_autograd_grad(context, parameter);
    check(grad && !td_all_reduce(grad, TD_AVG, trainers, NULL));
    check(!td_tensor_set_grad(parameter, grad));
}

/* Trains a layer of this trainer, and the embedding that `args[0]` refers to. Called by the embedding's worker. */
static td_value *train(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    (void)count;
    int rank = td_get_rank(NULL);
    td_rref *embedding = td_value_rref(args[0]);
    td_value *parameters = td_rref_sync(embedding, "parameters", TD_NO_ARGS, NULL);
    td_dist_optimizer *remote = td_dist_sgd(parameters, &(td_sgd_options){.lr = 0.5});
    td_manual_seed(1);
    td_module *layer = td_linear(WIDTH, CLASSES);
    td_optimizer *local = td_sgd(layer, &(td_sgd_options){.lr = 0.5});
    check(remote && local);

    double first = 0, last = 0;
    td_manual_seed((uint64_t)(100 + rank));
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *words = td_randint(0, WORDS, TD_SHAPE(BATCH), TD_I64);
        td_tensor *classes = td_clone(words);
        for (int64_t *c = td_tensor_data(classes), i = 0; i < BATCH; i++)
            c[i] %= CLASSES;
        td_value *vectors = td_rref_sync(embedding, "forward", TD_ARGS(words), NULL);
        check(vectors);
        td_tensor *loss = td_cross_entropy(td_forward(layer, td_value_tensor(vectors)), classes);
        check(!td_dist_backward(context, &loss, 1, NULL));
        average(context, td_module_parameter(layer, "weight"));
        average(context, td_module_parameter(layer, "bias"));
        check(!td_optimizer_step(local));
        check(!td_dist_optimizer_step(remote, context));
        last = td_item(loss);
        first = step == 0 ? last : first;
    }
    printf("trainer %d: loss %.2f to %.2f\n", rank, first, last);
    td_dist_optimizer_destroy(remote);
    td_optimizer_destroy(local);
    td_module_destroy(layer);
    return td_value_nil();
}

/* Makes the embedding, and lets the trainers train with it. */
static void lead(void)
{
    TD_SCOPE;
    td_manual_seed(7);
    td_rref *embedding = td_rref_create(td_value_of(td_embedding(WORDS, WIDTH)));
    td_future *training[TRAINERS];
    for (int i = 0; i < TRAINERS; i++)
        training[i] = td_rpc_async(td_worker_name(i), "train", TD_ARGS(embedding), NULL);
    check(td_future_wait(td_future_all(training, TRAINERS), 0));
}

int main(void)
{
    check(!td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    char name[32];
    snprintf(name, sizeof name, rank < TRAINERS ? "trainer_%d" : "embedding", rank);
    check(!td_new_group((int[]){0, 1}, TRAINERS, NULL, &trainers));
    check(!td_rpc_register("train(embedding: rref)", train, NULL));
    check(!td_init_rpc(name, NULL));
    if (rank == TRAINERS)
        lead();
    check(!td_rpc_shutdown(NULL));
    check(!td_destroy_process_group());
    return 0;
}
