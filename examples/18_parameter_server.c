/* A parameter server: one worker has the model; trainers fetch its parameters, and send it gradients, each at its own
 * pace.
 *
 *     $ tdrun --standalone --nproc-per-node=3 ./18_parameter_server
 *     trainer 1: loss 2.… to 0.0…
 *     trainer 2: loss 2.… to 0.0…
 *     server: 200 updates
 *
 * The server's methods run on several threads at once: a lock guards the model. */
#include <tandem/tandem.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { FEATURES = 4, STEPS = 100, BATCH = 16 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "18_parameter_server: %s\n", td_last_error());
    exit(1);
}

/* ---- The server ---------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static td_tensor *weight;
static td_optimizer *optimizer;
static int updates;

/* get(): the parameters as they are now. */
static td_value *get(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    (void)args;
    (void)count;
    pthread_mutex_lock(&lock);
    td_value *value = td_value_of(td_clone(td_detach(weight)));
    pthread_mutex_unlock(&lock);
    return value;
}

/* push(grad): one step of the optimizer. */
static td_value *push(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    (void)count;
    pthread_mutex_lock(&lock);
    td_status status = td_tensor_set_grad(weight, td_value_tensor(args[0]));
    if (!status)
        status = td_optimizer_step(optimizer);
    updates++;
    pthread_mutex_unlock(&lock);
    return status ? NULL : td_value_nil();
}

/* ---- A trainer ------------------------------------------------------------------------------------ */

static void train(int rank)
{
    double first = 0, last = 0;
    td_manual_seed((uint64_t)rank);
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_value *fetched = td_rpc_sync("server", "get", TD_NO_ARGS, NULL);
        check(fetched);
        td_tensor *w = td_value_tensor(fetched);
        check(!td_tensor_set_requires_grad(w, true));

        td_tensor *x = td_randn(TD_SHAPE(BATCH, FEATURES), TD_F32, NULL);
        td_tensor *y = td_sum_dims(x, TD_DIMS(1), true); /* the weights to be found are 1 */
        td_tensor *loss = td_mse_loss(td_matmul(x, w), y);
        check(!td_backward(loss));
        check(td_rpc_sync("server", "push", TD_ARGS(td_tensor_grad(w)), NULL));
        last = td_item(loss);
        first = step == 0 ? last : first;
    }
    printf("trainer %d: loss %.2f to %.4f\n", rank, first, last);
}

int main(void)
{
    td_world world; /* from the launcher: tdrun, srun, mpirun */
    char name[32];
    check(!td_rendezvous(NULL, NULL, &world));
    int rank = world.rank;
    TD_SCOPE;
    if (rank == 0) {
        weight = td_zeros(TD_SHAPE(FEATURES, 1), TD_F32, NULL);
        check(!td_tensor_set_requires_grad(weight, true));
        optimizer = td_sgd_of(&weight, 1, &(td_sgd_options){.lr = 0.05});
        check(optimizer && !td_rpc_register("get()", get, NULL) &&
              !td_rpc_register("push(grad: tensor)", push, NULL));
    }
    snprintf(name, sizeof name, rank ? "trainer_%d" : "server", rank);
    td_rpc_options options = {.rank = rank, .world_size = world.world_size, .store = world.store};
    check(!td_init_rpc(name, &options));
    if (rank > 0)
        train(rank);
    check(!td_rpc_shutdown(NULL));
    check(!td_world_close(&world));
    if (rank == 0)
        printf("server: %d updates\n", updates);
    td_optimizer_destroy(optimizer);
    return 0;
}
