/* DistributedDataParallel on one machine, by td_spawn(): the program starts its own processes.
 *
 *     $ ./08_ddp_spawn [processes]
 *     epoch 0: loss 0.5…
 *
 * Each process has the whole model and its share of the data; gradients are averaged while the
 * backward pass runs. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 100, WIDTH = 10, EPOCHS = 5 };

/* 100 random inputs, and their images under a fixed linear function. */
static td_dataset *make_data(void)
{
    td_dataset *data = NULL;
    td_manual_seed(1); /* the same on all ranks */
    {
        TD_SCOPE;
        td_tensor *x = td_randn(TD_SHAPE(SAMPLES, WIDTH), TD_F32, NULL);
        td_tensor *w = td_randn(TD_SHAPE(WIDTH, WIDTH), TD_F32, NULL);
        data = td_tensor_dataset(x, td_mul_scalar(td_matmul(x, w), 0.3));
    }
    return data;
}

static td_status train(td_module *model, td_optimizer *sgd, td_loader *loader, double *mean)
{
    td_status status = TD_OK;
    *mean = 0;
    for (td_batch b; !status && td_loader_next(loader, &b);) {
        TD_SCOPE;
        td_optimizer_zero_grad(sgd);
        td_tensor *loss = td_mse_loss(td_forward(model, b.input), b.target);
        status = td_backward(loss);
        if (!status)
            status = td_optimizer_step(sgd);
        *mean += status ? 0 : td_item(loss) / (double)td_loader_batches(loader);
    }
    return status ? status : td_loader_status(loader);
}

static td_status process(int rank, void *arg)
{
    (void)arg;
    td_status status = td_init_process_group(NULL);
    if (status)
        return status;
    td_dataset *data = make_data();
    td_sampler *sampler = td_distributed_sampler(data, NULL);
    td_loader *loader = td_loader_create(
        data, &(td_loader_options){.batch_size = 10, .sampler = sampler});
    td_module *model = td_ddp(td_linear(WIDTH, WIDTH), NULL); /* rank 0's weights, everywhere */
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.5});
    status = loader && sgd ? TD_OK : TD_ERR_INVALID; /* td_last_error() has the reason */
    for (int epoch = 0; epoch < EPOCHS && !status; epoch++) {
        double loss;
        td_sampler_set_epoch(sampler, epoch);
        status = train(model, sgd, loader, &loss);
        if (!status)
            status = td_group_all_reduce(&loss, &loss, 1, TD_F64, TD_AVG, NULL, NULL);
        if (!status && rank == 0)
            printf("epoch %d: loss %.4f\n", epoch, loss);
    }
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    td_loader_destroy(loader);
    td_sampler_release(sampler);
    td_dataset_release(data);
    return status ? status : td_destroy_process_group();
}

int main(int argc, char **argv)
{
    td_spawn_main(); /* for processes that are fresh starts of this program, as devices may need them */
    if (td_spawn(process, NULL, argc > 1 ? atoi(argv[1]) : 2, NULL)) {
        fprintf(stderr, "08_ddp_spawn: %s\n", td_last_error());
        return 1;
    }
    return 0;
}
