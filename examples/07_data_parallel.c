/* DataParallel: one process, one model, and each batch divided among several devices.
 *
 *     $ ./07_data_parallel
 *     inside: 15 of 30 samples on cpu:0
 *     inside: 15 of 30 samples on cpu:1
 *     outside: 30 results on cpu:0
 *     …
 *     epoch 0: loss 0.9…
 *
 * The devices cpu:0 and cpu:1 are threads with separate tensors: what works here works with accelerators. DDP
 * (example 08) is faster: it copies the model once, not in each step. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { INPUTS = 5, OUTPUTS = 2, SAMPLES = 300, BATCH = 30, EPOCHS = 5 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "07_data_parallel: %s\n", td_last_error());
    exit(1);
}

/* A linear layer that prints its input: a user's own module with one child. */
static bool silent;

static td_tensor *forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    if (!silent)
        printf("inside: %d of %d samples on %s\n", (int)td_tensor_size(inputs[0], 0), BATCH,
               td_device_name(td_tensor_device(inputs[0])));
    return td_forward(td_child(module, 0), inputs[0]);
}

static const td_module_ops telling_ops = {.name = "Telling", .forward = forward};

static td_module *make_model(void)
{
    td_module *model = td_module_create(&telling_ops);
    td_module_add_child(model, "fc", td_linear(INPUTS, OUTPUTS));
    return td_module_finish(model);
}

/* Random inputs, whose first elements are the targets. */
static td_dataset *make_data(void)
{
    td_dataset *data = NULL;
    {
        TD_SCOPE;
        td_tensor *x = td_randn(TD_SHAPE(SAMPLES, INPUTS), TD_F32, NULL);
        data = td_tensor_dataset(x, td_contiguous(td_narrow(x, 1, 0, OUTPUTS)));
    }
    return data;
}

int main(void)
{
    td_device *device = td_device_get(
        "cpu:0"); /* of the module itself, and of the gathered results */
    td_manual_seed(1);
    td_module *model = td_data_parallel(make_model(),
                                        &(td_data_parallel_options){.device_count = 2});
    check(model && !td_module_to(model, device));
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1});
    td_dataset *data = make_data();
    td_loader *loader = td_loader_create(
        data, &(td_loader_options){.batch_size = BATCH, .shuffle = true});
    check(sgd && loader);

    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        double sum = 0;
        for (td_batch b; td_loader_next(loader, &b);) {
            TD_SCOPE;
            td_tensor *x = td_tensor_to(b.input, device), *y = td_tensor_to(b.target, device);
            td_optimizer_zero_grad(sgd);
            td_tensor *output = td_forward(model, x);
            td_tensor *loss = td_mse_loss(output, y); /* of the whole batch, on one device */
            check(!td_backward(loss) && !td_optimizer_step(sgd));
            sum += td_item(loss);
            if (!silent)
                printf("outside: %d results on %s\n", (int)td_tensor_size(output, 0),
                       td_device_name(td_tensor_device(output)));
            silent = true;
        }
        check(!td_loader_status(loader));
        printf("epoch %d: loss %.4f\n", epoch, sum / (double)td_loader_batches(loader));
    }
    td_loader_destroy(loader);
    td_dataset_release(data);
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    return 0;
}
