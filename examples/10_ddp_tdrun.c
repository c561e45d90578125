/* DistributedDataParallel under tdrun: the launcher assigns the ranks, and the program is the same for one
 * process, all cores, and several nodes.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./10_ddp_tdrun
 *
 *     node0$ export TANDEM_SECRET=…
 *     node0$ tdrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 ./10_ddp_tdrun
 *     node1$ tdrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=10.0.0.1 ./10_ddp_tdrun
 *
 * Gradient accumulation: of two small batches only the second one is synchronised, with the gradients of
 * both. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { INPUTS = 10, OUTPUTS = 5, BATCH = 20, STEPS = 50 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "10_ddp_tdrun: rank %d: %s\n", td_get_rank(NULL), td_last_error());
    exit(1);
}

/* The loss for random inputs, whose first elements are the targets. */
static td_tensor *forward(td_module *model)
{
    td_tensor *x = td_randn(TD_SHAPE(BATCH, INPUTS), TD_F32, NULL);
    return td_mse_loss(td_forward(model, x), td_narrow(x, 1, 0, OUTPUTS));
}

int main(void)
{
    check(!td_init_process_group(NULL)); /* RANK, WORLD_SIZE, MASTER_ADDR …: from tdrun */
    int rank = td_get_rank(NULL);
    printf("rank %d of %d, local rank %d of %d\n", rank, td_get_world_size(NULL),
           td_get_local_rank(), td_get_local_size());

    td_manual_seed((uint64_t)rank); /* different data on each rank; the weights become rank 0's */
    td_module *model = td_ddp(
        td_sequential(td_linear(INPUTS, 10), td_relu(), td_linear(10, OUTPUTS), NULL), NULL);
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = 0.02});
    check(adam);

    double first = 0, last = 0;
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_optimizer_zero_grad(adam);
        {
            TD_NO_SYNC(model);
            check(!td_backward(forward(model)));
        } /* accumulates only */
        td_tensor *loss = forward(model);
        check(!td_backward(loss)); /* averages the sum of both over all ranks */
        check(!td_optimizer_step(adam));
        last = td_item(loss);
        first = step == 0 ? last : first;
    }
    td_ddp_stats stats;
    check(!td_ddp_get_stats(model, &stats));
    printf("rank %d: loss %.4f to %.4f, %d synchronised passes, %d bytes each\n", rank, first, last,
           (int)stats.passes, (int)(stats.bytes / (size_t)stats.passes));

    td_optimizer_destroy(adam);
    td_module_destroy(model);
    check(!td_destroy_process_group());
    return 0;
}
