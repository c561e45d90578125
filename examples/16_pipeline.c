/* Pipeline parallelism: a small transformer whose layers are spread over the ranks, trained in micro-batches.
 *
 *     $ tdrun --standalone --nproc-per-node=4 ./16_pipeline
 *     rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 …
 *     …
 *     loss 2.2… to 0.0…, on 4 ranks, bubble 0.27 in theory
 *
 * Each rank makes its own layers only; the first one has the embedding, the last one the output layer. The model learns
 * to repeat the token before the current one. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 8, LENGTH = 6, WIDTH = 16, BATCH = 32, MICRO_BATCHES = 8, STEPS = 60 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "16_pipeline: %s\n", td_last_error());
    exit(1);
}

/* [batch, length] -> [batch, length, WIDTH]: tokens and positions. */
static td_tensor *embed_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *positions = td_arange(0, LENGTH, 1, TD_I64, NULL);
    return td_add(td_forward(td_child(module, 0), inputs[0]),
                  td_forward(td_child(module, 1), positions));
}

static const td_module_ops embed_ops = {.name = "Embed", .forward = embed_forward};

/* The part of the model that this rank has. */
static td_module *make_stage(int rank, int size)
{
    td_module *layer = td_transformer_encoder_layer_with(
        WIDTH, 2,
        &(td_transformer_options){
            .feedforward = 32, .dropout = TD_ZERO, .causal = true, .batch_first = true});
    if (rank == 0) {
        td_module *embed = td_module_create(&embed_ops);
        td_module_add_child(embed, "token", td_embedding(TOKENS, WIDTH));
        td_module_add_child(embed, "position", td_embedding(LENGTH, WIDTH));
        layer = td_sequential(td_module_finish(embed), layer, NULL);
    }
    return rank == size - 1 ? td_sequential(layer, td_linear(WIDTH, TOKENS), NULL) : layer;
}

static td_tensor *loss_of(const td_tensor_list *outputs, const td_tensor_list *targets, void *arg)
{
    (void)arg;
    return td_cross_entropy(td_reshape(outputs->at[0], TD_SHAPE(-1, TOKENS)),
                            td_reshape(targets->at[0], TD_SHAPE(-1)));
}

int main(void)
{
    check(!td_init_process_group(NULL));
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_manual_seed((uint64_t)rank);
    td_module *stage = make_stage(rank, size);
    td_pipeline *pipeline = td_pipeline_create(
        &stage, 1, &(td_pipeline_options){.micro_batches = MICRO_BATCHES, .loss = loss_of});
    check(pipeline);
    td_optimizer *adam = td_adam(td_pipeline_module(pipeline), &(td_adam_options){.lr = 0.01});
    check(adam);

    if (rank == 0) {
        td_bytes drawing = td_pipeline_text(TD_PIPELINE_1F1B, size, 1, MICRO_BATCHES);
        printf("%s", drawing.data);
        td_bytes_free(&drawing);
    }
    double first = 0, loss = 0;
    td_manual_seed(1); /* the same batches on the first rank, which has the inputs, and the last */
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *text = td_randint(0, TOKENS, TD_SHAPE(BATCH, LENGTH + 1), TD_I64, NULL);
        td_tensor *input = td_narrow(text, 1, 1, LENGTH), *target = td_narrow(text, 1, 0, LENGTH);
        /* The first position cannot know the token before it: it repeats itself. */
        target = td_cat(TD_TENSORS(td_narrow(input, 1, 0, 1), td_narrow(target, 1, 1, LENGTH - 1)),
                        1);
        td_optimizer_zero_grad(adam);
        check(!td_pipeline_step(pipeline, rank == 0 ? input : NULL,
                                rank == size - 1 ? target : NULL, &loss));
        check(!td_optimizer_step(adam));
        first = step == 0 ? loss : first;
    }

    td_pipeline_stats stats;
    check(!td_pipeline_get_stats(pipeline, &stats));
    if (rank == 0)
        printf("loss %.4f to %.4f, on %d ranks, bubble %.2f in theory\n", first, loss, size,
               stats.theory);
    td_optimizer_destroy(adam);
    td_pipeline_destroy(pipeline);
    check(!td_destroy_process_group());
    return 0;
}
