/* Fully sharded data parallelism, step by step: each rank keeps a shard of the parameters, gradients and optimizer state.
 *
 *     $ tdrun --standalone --nproc-per-node=2 ./21_fsdp directory
 *     3 units; of 35716 parameters rank 0 keeps 17732
 *     forward   unit ""   0.weight is [128, 16], gathered
 *     forward   unit "2"  2.weight is [128, 128], gathered
 *               unit "2"  2.weight is [8192], a shard again
 *     …
 *     backward  unit "4"  4.weight is [128, 128], gathered again
 *     …
 *     step      of 1024 elements of 0.weight, with as many of its gradient
 *     loss 0.9… to 0.0…
 *     whole parameters and gradients: 150 KiB with units, 279 KiB as one
 *     step 80 of "directory" has the loss 0.0…
 *
 * Each comment "torch:" is the line of PyTorch. */
#include <tandem/tandem.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 16, WIDTH = 128, OUTPUTS = 4, BATCH = 32, STEPS = 80 };

static void check(bool good)
{
    if (good)
        return;
    fprintf(stderr, "21_fsdp: rank %d: %s\n", td_get_rank(NULL), td_last_error());
    exit(1);
}

static td_module *make_net(void)
{
    td_manual_seed(1);
    return td_sequential(td_linear(INPUTS, WIDTH), td_gelu(), td_linear(WIDTH, WIDTH), td_gelu(),
                         td_linear(WIDTH, WIDTH), td_gelu(), td_linear(WIDTH, OUTPUTS), NULL);
}

/* ---- What happens in a pass: hooks of the units, which run after those of td_fsdp() ------------------------- */

struct unit {
    const char *name;
    td_tensor *weight;
    bool talks;
};

/* "[64, 16]" of a whole, "[512]" of a shard. */
static const char *shape_of(const td_tensor *tensor)
{
    static char text[100];
    size_t length = 0;
    for (int d = 0; d < td_tensor_ndim(tensor); d++)
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%lld", d ? ", " : "[",
                                   (long long)td_tensor_size(tensor, d));
    snprintf(text + length, sizeof text - length, "]");
    return text;
}

static td_status tell(const struct unit *unit, const char *when, const char *what)
{
    if (unit->talks)
        printf("%-9s unit \"%s\"%s  %s.weight is %s, %s\n", when, unit->name,
               *unit->name ? "" : " ", *unit->name ? unit->name : "0", shape_of(unit->weight),
               what);
    return TD_OK;
}

static td_status before_forward(td_module *module, td_tensor_list *inputs, void *unit)
{
    (void)module, (void)inputs;
    return tell(unit, "forward", "gathered");
}

static td_status after_forward(td_module *module, const td_tensor_list *inputs,
                               td_tensor_list *results, void *unit)
{
    (void)module, (void)inputs, (void)results;
    return tell(unit, "", "a shard again");
}

static td_status before_backward(td_module *module, td_tensor_list *grads, void *unit)
{
    (void)module, (void)grads;
    return tell(unit, "backward", "gathered again");
}

/* ---- Training --------------------------------------------------------------------------------------------- */

static td_tensor *loss_of(td_module *model)
{
    td_tensor *x = td_randn(TD_SHAPE(BATCH, INPUTS), TD_F32, NULL);
    return td_mse_loss(td_forward(model, x), td_narrow(x, 1, 0, OUTPUTS));
}

static double train(td_module *model, td_optimizer *adam, int steps)
{
    double loss = 0;
    for (int step = 0; step < steps; step++) {
        TD_SCOPE;
        td_optimizer_zero_grad(adam);
        td_tensor *tensor = loss_of(model); /* each unit: all-gather, forward, release */
        check(!td_backward(tensor)); /* each unit: all-gather, backward, reduce-scatter, release */
        check(!td_clip_grad_norm_(model, 1, NULL, NULL)); /* torch: model.clip_grad_norm_(1) */
        check(!td_optimizer_step(adam));                  /* each rank its shards */
        loss = td_item(tensor);
        check(!td_group_all_reduce(&loss, &loss, 1, TD_F64, TD_AVG, NULL, NULL));
    }
    return loss;
}

/* One step that tells what it does, on rank 0. */
static double show_a_step(td_module *model, td_optimizer *adam)
{
    static const char *const names[] = {"", "2", "4"};
    struct unit units[3];
    uint64_t hooks[3];
    for (int u = 0; u < 3; u++) {
        td_module *module = u ? td_child(model, 2 * u) : model;
        units[u] = (struct unit){.name = names[u],
                                 .weight = td_param(u ? module : td_child(model, 0), 0),
                                 .talks = td_get_rank(NULL) == 0};
        check(!td_module_add_hooks(module,
                                   &(td_module_hooks){.forward_pre = before_forward,
                                                      .forward = after_forward,
                                                      .backward_pre = before_backward,
                                                      .arg = &units[u]},
                                   &hooks[u]));
    }
    double loss = train(model, adam, 1);
    if (units[0].talks)
        printf("step      of %lld elements of 0.weight, with as many of its gradient\n",
               (long long)td_tensor_numel(td_tensor_grad(units[0].weight)));
    for (int u = 0; u < 3; u++)
        check(!td_module_remove_hooks(u ? td_child(model, 2 * u) : model, hooks[u]));
    return loss;
}

/* The most bytes of whole parameters and gradients in a step. On one host parameters need none, since the ranks read
 * each other's shards: here they are gathered, as between hosts. */
static double whole_kib(int64_t min_parameters)
{
    td_fsdp_stats stats;
    td_module *model = td_fsdp(
        make_net(), &(td_fsdp_options){.min_parameters = min_parameters, .no_shared_memory = true});
    td_optimizer *adam = td_adam(model, NULL);
    check(adam);
    train(model, adam, 1);
    check(!td_fsdp_get_stats(model, &stats));
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    return (double)stats.whole_bytes_peak / 1024;
}

/* ---- Construction, training, checkpoint --------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    check(!td_init_process_group(NULL)); /* torch: dist.init_process_group() */
    bool talks = td_get_rank(NULL) == 0;

    /* Modules with 10,000 parameters become units, the model itself has the rest.
     * torch: FSDP(net, auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=10000)) */
    td_module *model = td_fsdp(make_net(), &(td_fsdp_options){.min_parameters = 10000});
    td_optimizer *adam = td_adam(model, &(td_adam_options){.lr = 0.01}); /* of the shards */
    check(adam);
    td_fsdp_stats stats;
    check(!td_fsdp_get_stats(model, &stats));
    if (talks)
        printf("%d units; of %lld parameters rank 0 keeps %lld\n", stats.units,
               (long long)stats.parameters, (long long)td_module_parameter_count(model));

    td_manual_seed((uint64_t)td_get_rank(NULL) + 2); /* each rank its own batches */
    double first = show_a_step(model, adam), last = train(model, adam, STEPS - 1);
    if (talks)
        printf("loss %.4f to %.4f\n", first, last);

    /* torch: FSDP(net): a unit around the whole model saves no memory in a pass, and td_fsdp() warns of it. */
    double units = whole_kib(10000), one = whole_kib(0);
    if (talks)
        printf("whole parameters and gradients: %.0f KiB with units, %.0f KiB as one\n", units,
               one);

    /* All ranks write their shards in parallel; any number of ranks loads them. torch: dcp.save(), dcp.load() */
    if (argc > 1) {
        td_training training = {.model = model, .optimizer = adam, .step = STEPS, .any_size = true};
        bool loaded;
        check(!td_training_save_sharded_numbered(argv[1], &training, 2, NULL, NULL));
        check(!td_training_load_latest(argv[1], &training, NULL, &loaded) && loaded);
        TD_SCOPE;
        TD_NO_GRAD;
        double loss = td_item(loss_of(model));
        if (talks)
            printf("step %lld of \"%s\" has the loss %.4f\n", (long long)training.step, argv[1],
                   loss);
    }
    td_optimizer_destroy(adam);
    td_module_destroy(model);
    check(!td_destroy_process_group());
    return 0;
}
