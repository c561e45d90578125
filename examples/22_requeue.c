/* Training that is stopped in time, and goes on where it was: for batch systems, which announce the end of a job's time
 * by a signal.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./22_requeue directory 1000 & sleep 1; kill -USR1 $!
 *     rank 0: begins at step 0
 *     rank 0: stopped at step 412
 *     $ tdrun --standalone --nproc-per-node=2 ./22_requeue directory 1000
 *     rank 0: goes on at step 412
 *     rank 0: finished at step 1000, loss 1.0…
 *
 * The exit code is 0 when all steps are done and STOPPED when there are some left; slurm/requeue.sbatch puts its job into
 * the queue again then. The weights are those of a run that was not stopped, bit for bit. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { STOPPED = 75 }; /* EX_TEMPFAIL of sysexits.h: try again later */

static void check(td_status status)
{
    if (!status)
        return;
    fprintf(stderr, "22_requeue: %s\n", td_last_error());
    exit(1);
}

static double take_step(td_module *model, td_optimizer *optimizer)
{
    TD_SCOPE;
    td_tensor *x = td_randn(TD_SHAPE(20, 10), TD_F32, NULL);
    td_tensor *labels = td_randn(TD_SHAPE(20, 5), TD_F32, NULL);
    check(td_optimizer_zero_grad(optimizer));
    td_tensor *loss = td_mse_loss(td_forward(model, x), labels);
    check(td_backward(loss));
    check(td_optimizer_step(optimizer));
    return td_item(loss);
}

int main(int argc, char **argv)
{
    const char *directory = argc > 1 ? argv[1] : "checkpoints";
    long steps = argc > 2 ? atol(argv[2]) : 1000, pause_ms = argc > 3 ? atol(argv[3]) : 0;
    check(td_stop_on_signals(NULL, 0)); /* first of all: a signal before this ends the process */
    check(td_init_process_group(NULL));
    int rank = td_get_rank(NULL);
    td_manual_seed((uint64_t)rank);
    td_module *model = td_ddp(td_sequential(td_linear(10, 10), td_relu(), td_linear(10, 5), NULL),
                              NULL);
    td_optimizer *sgd = td_sgd(model, &(td_sgd_options){.lr = 0.001, .momentum = 0.9});
    if (!sgd)
        check(TD_ERR_NOMEM);

    td_training training = {.model = model, .optimizer = sgd};
    bool resumed = false, stop = false;
    check(td_training_load_latest(directory, &training, NULL, &resumed));
    if (rank == 0)
        printf("rank 0: %s at step %lld\n", resumed ? "goes on" : "begins",
               (long long)training.step);
    fflush(stdout);

    double loss = 0;
    while (training.step < steps && !stop) {
        loss = take_step(model, sgd);
        training.step++;
        nanosleep(
            &(struct timespec){.tv_sec = pause_ms / 1000, .tv_nsec = pause_ms % 1000 * 1000000},
            NULL);
        check(td_should_stop(NULL, &stop)); /* the same answer on all ranks */
    }
    check(td_training_save_numbered(directory, &training, 2, NULL));
    bool finished = training.step >= steps;
    if (rank == 0 && finished)
        printf("rank 0: finished at step %lld, loss %.9g\n", (long long)training.step, loss);
    else if (rank == 0)
        printf("rank 0: stopped at step %lld\n", (long long)training.step);

    td_optimizer_destroy(sgd);
    td_module_destroy(model);
    check(td_destroy_process_group());
    return finished ? 0 : STOPPED;
}
