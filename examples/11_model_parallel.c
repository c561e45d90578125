/* Toy model parallel: one half of the model on one device, the other half on another; and DDP around
 * it, so that each process has two devices.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./11_model_parallel
 *     rank 0: net1 on cpu:0, net2 on cpu:1, loss 1.1… to 0.0…
 *
 * Tensors of different devices do not mix; td_tensor_to() copies them to another device, and their gradients
 * back. With accelerators the devices would be 2 * local rank and 2 * local rank + 1. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { NET1, RELU, NET2 };
enum { BATCH = 20, STEPS = 60 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "11_model_parallel: %s\n", td_last_error());
    exit(1);
}

static td_device *first_device, *second_device;

static td_tensor *toy_forward(td_module *toy, td_tensor *const *inputs, int count)
{
    (void)count;
    td_tensor *x = td_forward(td_child(toy, NET1), td_tensor_to(inputs[0], first_device));
    x = td_forward(td_child(toy, RELU), x);
    return td_forward(td_child(toy, NET2), td_tensor_to(x, second_device));
}

static const td_module_ops toy_ops = {.name = "ToyModel", .forward = toy_forward};

static td_module *make_toy_model(void)
{
    td_module *toy = td_module_create(&toy_ops);
    td_module_add_child(toy, "net1", td_linear(10, 10));
    td_module_add_child(toy, "relu", td_relu());
    td_module_add_child(toy, "net2", td_linear(10, 5));
    if (td_module_to(td_child(toy, NET1), first_device) ||
        td_module_to(td_child(toy, NET2), second_device)) {
        td_module_destroy(toy);
        return NULL;
    }
    return td_module_finish(toy);
}

int main(void)
{
    first_device = td_device_get("cpu:0");
    second_device = td_device_get("cpu:1");
    check(!td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_manual_seed((uint64_t)rank);
    td_module *model = td_ddp(make_toy_model(), NULL);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.05, .momentum = 0.9});
    check(sgd);

    double first = 0, last = 0;
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = td_randn(TD_SHAPE(BATCH, 10), TD_F32, NULL);
        td_tensor *labels = td_tensor_to(td_narrow(x, 1, 0, 5),
                                         second_device); /* where the output is */
        td_optimizer_zero_grad(sgd);
        td_tensor *loss = td_mse_loss(td_forward(model, x), labels);
        check(!td_backward(loss) && !td_optimizer_step(sgd));
        last = td_item(loss);
        first = step == 0 ? last : first;
    }
    {
        TD_SCOPE;
        printf("rank %d: net1 on %s, net2 on %s, loss %.4f to %.4f, weights %.9g\n", rank,
               td_device_name(td_tensor_device(td_module_parameter(model, "module.net1.weight"))),
               td_device_name(td_tensor_device(td_module_parameter(model, "module.net2.weight"))),
               first, last, td_item(td_norm(td_module_parameter(model, "module.net1.weight"))));
    }

    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    check(!td_destroy_process_group());
    return 0;
}
