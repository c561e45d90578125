/* DataParallel: one process, one model, and each batch divided among several devices.
 *
 *     $ 07_data_parallel
 *     inside: 15 of 30 samples on cpu:0
 *     inside: 15 of 30 samples on cpu:1
 *     outside: 30 results on cpu:0
 *     …
 *     loss 0.96… after step 0 …
 *
 * The devices cpu:0 and cpu:1 are threads with tensors of their own: what works here works with
 * accelerators. DDP (example 08) is faster: it copies the model once, not in each step. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>

enum { INPUTS = 5, OUTPUTS = 2, BATCH = 30, STEPS = 40 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "07_data_parallel: %s\n", td_last_error());
    exit(1);
}

/* A linear layer that tells what it is given: a module of one's own with one child. */
static bool silent;

static td_tensor *forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    if (!silent)
        printf("inside: %d of %d samples on %s\n", (int)td_tensor_size(inputs[0], 0), BATCH,
               td_tensor_device(inputs[0]));
    return td_forward(td_child(module, 0), inputs[0]);
}

static const td_module_ops telling_ops = {.name = "Telling", .forward = forward};

static td_module *make_model(void)
{
    td_module *model = td_module_create(&telling_ops);
    td_module_add_child(model, "fc", td_linear(INPUTS, OUTPUTS));
    return td_module_finish(model);
}

int main(void)
{
    td_manual_seed(1);
    td_module *model = make_model();
    check(!td_module_to(model, "cpu:0")); /* where its own parameters are */
    td_module *parallel = td_data_parallel(
        model, &(td_data_parallel_options){.device_ids = (const char *[]){"cpu:0", "cpu:1"},
                                           .device_count = 2});
    td_optimizer *sgd = td_sgd(parallel, &(td_sgd_options){.lr = 0.1});
    check(sgd);

    TD_SCOPE
    {
        td_tensor *x = td_randn((int64_t[]){BATCH, INPUTS}, 2, TD_F32);
        td_tensor *wanted = td_tensor_to(td_narrow(x, 1, 0, OUTPUTS), "cpu:0");
        for (int step = 0; step < STEPS; step++)
            TD_SCOPE
            {
                td_optimizer_zero_grad(sgd);
                td_tensor *y = td_forward(parallel, x);
                td_tensor *loss = td_mse_loss(y, wanted); /* both are on cpu:0 */
                check(!td_backward(loss) && !td_optimizer_step(sgd));
                if (!silent)
                    printf("outside: %d results on %s\n", (int)td_tensor_size(y, 0),
                           td_tensor_device(y));
                if (step % 13 == 0)
                    printf("loss %.4f after step %d\n", td_item(loss), step);
                silent = true;
            }
    }
    td_optimizer_destroy(sgd);
    td_module_destroy(parallel);
    return 0;
}
