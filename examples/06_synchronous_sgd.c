/* Synchronous SGD by hand: every rank trains on its part of the data, and averages the gradients of
 * its own model with those of the others before each step. This is what td_ddp() does for you, faster.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./06_synchronous_sgd [fashion-mnist]
 *     rank 0, epoch 0: loss 2.2…
 *
 * Without an argument it learns 512 generated images. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLES = 512, CLASSES = 10, EPOCHS = 10, BATCH = 128 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "06_synchronous_sgd: %s\n", td_last_error());
    exit(1);
}

/* An image of noise for each class, and samples that are one of them with more noise. */
static td_dataset *make_up_images(void)
{
    td_dataset *dataset = NULL;
    {
        TD_SCOPE;
        td_tensor *target = td_randint(0, CLASSES, TD_SHAPE(SAMPLES), TD_I64, NULL);
        td_tensor *classes = td_randn(TD_SHAPE(CLASSES, 1, 28, 28), TD_F32, NULL);
        td_tensor *noise = td_randn(TD_SHAPE(SAMPLES, 1, 28, 28), TD_F32, NULL);
        td_tensor *input = td_add_scaled(td_index_select(classes, 0, target), noise, 0.3);
        dataset = td_tensor_dataset(input, target); /* it keeps both */
    }
    return dataset;
}

static td_module *make_net(void)
{
    return td_sequential(td_conv2d(1, 10, 5), td_max_pool2d(2), td_relu(), td_conv2d(10, 20, 5),
                         td_dropout2d(0.2), td_max_pool2d(2), td_relu(), td_flatten(),
                         td_linear(320, 50), td_relu(), td_linear(50, CLASSES), td_log_softmax(1),
                         NULL);
}

static void average_gradients(const td_state *parameters)
{
    for (int i = 0; i < td_state_count(parameters); i++) {
        td_tensor *grad = td_tensor_grad(td_state_tensor(parameters, i));
        check(!td_all_reduce(grad, TD_SUM, NULL, NULL)); /* TD_AVG would divide, too */
        check(!td_mul_scalar_(grad, 1.0 / td_get_world_size(NULL)));
    }
}

int main(int argc, char **argv)
{
    check(!td_init_process_group(NULL));
    td_manual_seed(1234); /* the same first weights, and the same images, on all ranks */
    bool real = argc > 1 && !strcmp(argv[1], "fashion-mnist");
    if (argc > 1 && !real) {
        fprintf(stderr, "usage: 06_synchronous_sgd [fashion-mnist]\n");
        return 2;
    }
    td_dataset *all = real ? td_fashion_mnist(TD_TRAIN, NULL) : make_up_images();
    td_dataset *part = td_partition_dataset(all, NULL); /* this rank's */
    td_loader *loader = td_loader_create(
        part, &(td_loader_options){.batch_size = BATCH / td_get_world_size(NULL), .shuffle = true});
    td_module *net = make_net();
    td_state *parameters = td_module_parameters(net);
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = real ? 0.01 : 0.05, .momentum = 0.5});
    check(loader && sgd);

    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        double sum = 0;
        for (td_batch b; td_loader_next(loader, &b);) {
            TD_SCOPE;
            td_optimizer_zero_grad(sgd);
            td_tensor *loss = td_nll_loss(td_forward(net, b.input), b.target);
            check(!td_backward(loss));
            sum += td_item(loss);
            average_gradients(parameters);
            check(!td_optimizer_step(sgd));
        }
        check(!td_loader_status(loader));
        printf("rank %d, epoch %d: loss %.4f\n", td_get_rank(NULL), epoch,
               sum / (double)td_loader_batches(loader));
    }
    {
        TD_SCOPE;
        printf("rank %d: the first weights have the norm %.9g\n", td_get_rank(NULL),
               td_item(td_norm(td_module_parameter(net, "0.weight"))));
    }

    td_optimizer_destroy(sgd);
    td_state_destroy(parameters);
    td_module_destroy(net);
    td_loader_destroy(loader);
    td_dataset_release(part);
    td_dataset_release(all);
    check(!td_destroy_process_group());
    return 0;
}
