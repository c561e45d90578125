/* Training over the backend mpi: the losses are those of the backend native. */
#include "mpi_cases.h"
#include "runner.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { STEPS = 20, BATCH = 6, IN = 10 };

/* Losses of the average over the ranks, step by step. */
static void train(bool sharded, double losses[STEPS])
{
    td_manual_seed(17);
    td_module *net = td_sequential(td_linear(IN, 64), td_relu(), td_linear(64, 64), td_relu(),
                                   td_linear(64, 3), NULL);
    td_module *model = sharded ? td_fsdp(net, NULL) : td_ddp(net, NULL);
    CHECK(model != NULL);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.1, .momentum = 0.9});
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = td_empty(TD_SHAPE(BATCH, IN), TD_F32, NULL);
        unsigned state = (unsigned)(step * 1009 + td_get_rank(NULL) * 31 + 5);
        for (int i = 0; i < BATCH * IN; i++) {
            state = state * 1664525u + 1013904223u;
            ((float *)td_tensor_data(x))[i] = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
        }
        CHECK_OK(td_optimizer_zero_grad(sgd));
        td_tensor *y = td_forward(model, x);
        td_tensor *loss = td_mean(td_mul(y, y));
        CHECK_OK(td_backward(loss));
        CHECK_OK(td_optimizer_step(sgd));
        losses[step] = td_item(loss);
    }
    td_optimizer_destroy(sgd);
    td_module_destroy(model);
}

void mpi_case_training(void)
{
    double losses[2][2][STEPS];
    for (int native = 0; native < 2; native++) {
        CHECK_OK(td_init_process_group(&(td_init_options){.backend = native ? "native" : "mpi"}));
        train(false, losses[native][0]);
        train(true, losses[native][1]);
        mpi_end();
    }
    double most = 0;
    for (int kind = 0; kind < 2; kind++)
        for (int step = 0; step < STEPS; step++) {
            double difference = fabs(losses[0][kind][step] - losses[1][kind][step]);
            most = difference > most ? difference : most;
        }
    printf("the greatest difference of a loss is %g; the last one is %.9g\n", most,
           losses[0][0][STEPS - 1]);
    CHECK(losses[0][0][STEPS - 1] < losses[0][0][0]);
    CHECK(most <= 1e-6);
}
