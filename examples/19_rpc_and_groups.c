/* Remote calls and a process group in one program: trainers wrap their own layer in td_ddp(), and share an embedding that
 * lives on another worker.
 *
 *     $ tdrun --standalone --nproc-per-node=3 ./19_rpc_and_groups
 *     trainer 0: loss 1.… to 0.…
 *     trainer 1: loss 1.… to 0.…
 *
 * Ranks 0 and 1 are trainers and form a process group; rank 2 has the embedding, and calls train() on them with a
 * reference to it. A trainer's model is the remote embedding and its layer. In the backward pass td_ddp() averages the
 * gradients of the layer over the trainers, those of the embedding go to its worker, and all are in a context of
 * distributed autograd, from which one optimizer takes them. */
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

/* Trains a layer of this trainer, and the embedding that `args[0]` refers to. Called by the embedding's worker. */
static td_value *train(td_rpc_call *call, td_value *const *args, int count)
{
    TD_SCOPE;
    (void)call;
    (void)count;
    int rank = td_get_rank(NULL);
    td_manual_seed(1);
    td_module *layer = td_ddp(td_linear(WIDTH, CLASSES), &(td_ddp_options){.group = trainers});
    td_module *embedding = td_remote_module_of(td_value_rref(args[0]), NULL);
    td_module *model = td_sequential(embedding, layer, NULL);
    check(model);
    td_dist_optimizer *sgd = td_dist_sgd(td_remote_parameters(model), &(td_sgd_options){.lr = 0.5});
    check(sgd);

    double first = 0, last = 0;
    td_manual_seed((uint64_t)(100 + rank));
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        TD_DIST_AUTOGRAD(context);
        td_tensor *words = td_randint(0, WORDS, TD_SHAPE(BATCH), TD_I64, NULL);
        td_tensor *classes = td_clone(words);
        for (int64_t *c = td_tensor_data(classes), i = 0; i < BATCH; i++)
            c[i] %= CLASSES;
        td_tensor *loss = td_cross_entropy(td_forward(model, words), classes);
        check(loss);
        check(!td_dist_backward(context, &loss, 1, NULL));
        check(!td_dist_optimizer_step(sgd, context));
        /* No trainer reads the embedding in its next forward while the other one's step writes it. The all-reduce of
         * td_ddp() keeps a step behind both forwards. */
        check(!td_group_barrier(trainers, NULL));
        last = td_item(loss);
        first = step == 0 ? last : first;
    }
    printf("trainer %d: loss %.2f to %.2f\n", rank, first, last);
    td_dist_optimizer_destroy(sgd);
    td_module_destroy(model);
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
