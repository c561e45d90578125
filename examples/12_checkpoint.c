/* Checkpoints: rank 0 saves a model, all ranks load it, and training resumes from a directory of
 * checkpoints.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./12_checkpoint [directory]
 *     rank 0: begins at step 0
 *     rank 0: step 10, loss 1.0…
 *
 * The first part is demo_checkpoint() of PyTorch's tutorial. The second saves everything that training needs
 * to resume bit for bit: start it again with the same directory, and it continues. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "12_checkpoint: %s\n", td_last_error());
    exit(1);
}

/* On the device of this rank; td_ddp() moves inputs there. */
static td_module *make_model(td_device *device)
{
    td_module *toy = td_sequential(td_linear(10, 10), td_relu(), td_dropout(0.1), td_linear(10, 5),
                                   NULL);
    check(td_module_to(toy, device));
    return td_ddp(toy, &(td_ddp_options){.device_ids = &device, .device_count = 1});
}

static double step(td_module *model, td_optimizer *optimizer, td_device *device)
{
    double value = 0;
    {
        TD_SCOPE;
        td_tensor *x = td_randn(TD_SHAPE(20, 10), TD_F32, NULL);
        td_tensor *labels = td_tensor_to(td_randn(TD_SHAPE(20, 5), TD_F32, NULL), device);
        check(td_optimizer_zero_grad(optimizer));
        td_tensor *loss = td_mse_loss(td_forward(model, x), labels);
        check(td_backward(loss));
        check(td_optimizer_step(optimizer));
        value = td_item(loss);
    }
    return value;
}

int main(int argc, char **argv)
{
    check(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    char name[16];
    snprintf(name, sizeof name, "cpu:%d", td_get_local_rank());
    td_device *device = td_device_get(name);
    td_manual_seed((uint64_t)rank); /* different weights on each rank; td_ddp() makes them equal */
    td_module *model = make_model(device);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.001, .momentum = 0.9});
    if (!model || !sgd)
        check(TD_ERR_NOMEM);

    /* Weights alone. All ranks have the same ones, so one process saves them; the barrier makes the others
     * wait for the file. */
    const char *directory = argc > 1 ? argv[1] : ".";
    char path[4096];
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    if (rank == 0)
        check(td_save_module(path, model));
    check(td_barrier(NULL, NULL));
    check(td_load_module(path, model, NULL));
    step(model, sgd,
         device); /* its all_reduce keeps rank 0 from removing the file before all have read it */
    if (rank == 0)
        unlink(path);

    /* The whole training state. Every rank calls these: rank 0 writes, and all get the same result. */
    td_training training = {.model = model, .optimizer = sgd};
    snprintf(path, sizeof path, "%s/checkpoints", directory);
    bool resumed = false;
    check(td_training_load_latest(path, &training, NULL, &resumed));
    printf("rank %d: %s at step %lld\n", rank, resumed ? "goes on" : "begins",
           (long long)training.step);
    double loss = 0;
    for (int i = 0; i < 10; i++) {
        loss = step(model, sgd, device);
        training.step++;
        if (training.step % 5 == 0)
            check(td_training_save_numbered(path, &training, 2, NULL));
    }
    printf("rank %d: step %lld, loss %.9g\n", rank, (long long)training.step, loss);

    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    check(td_destroy_process_group());
    return 0;
}
