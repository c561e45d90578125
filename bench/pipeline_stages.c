/* Stages of pipelines; see pipeline_stages.h. */
#include "pipeline_stages.h"

#include "measure.h"

#include "base/clock.h"
#include "base/wait.h"

enum { MOST_LAYERS = 64 };

/* Adds a parameter to its input, so that the first stage, too, computes the gradient of what its first layer gets. */
static td_tensor *shift_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)count;
    return td_add(inputs[0], td_param(module, 0));
}

static const td_module_ops shift_ops = {.name = "Shift", .forward = shift_forward};

static td_module *make_shift(int width)
{
    td_module *shift = td_module_create(&shift_ops);
    td_init_constant(td_module_new_parameter(shift, "shift", TD_SHAPE(width), TD_F32), 0);
    return td_module_finish(shift);
}

td_module *bench_matrix_stage(int width, int layers)
{
    td_module *all[1 + 2 * MOST_LAYERS];
    if (layers > MOST_LAYERS)
        bench_die("--layers is %d at most", MOST_LAYERS);
    all[0] = make_shift(width);
    for (int i = 0; i < layers; i++) {
        all[1 + 2 * i] = td_linear(width, width);
        all[2 + 2 * i] = td_tanh();
    }
    return td_sequential_of(all, 1 + 2 * layers);
}

/* ---- By the clock -------------------------------------------------------------------------------- */

static int64_t pass_ns; /* of a forward pass */

static void spin_until(int64_t end)
{
    while (td__now_ns() < end)
        td__pause_processor();
}

static td_status spin_backward(td_node *node, td_tensor *const *grad_outputs,
                               td_tensor **grad_inputs)
{
    (void)node;
    spin_until(td__now_ns() + 2 * pass_ns);
    grad_inputs[0] = td_mul_scalar(grad_outputs[0], 1);
    return grad_inputs[0] ? TD_OK : TD_ERR_NOMEM;
}

static const td_function spin_function = {.name = "spin", .backward = spin_backward};

static td_tensor *spin_forward(td_module *module, td_tensor *const *inputs, int count)
{
    (void)module;
    (void)count;
    int64_t end = td__now_ns() + pass_ns;
    bool before = td_set_grad_enabled(false);
    td_tensor *same = td_mul_scalar(inputs[0], 1);
    td_set_grad_enabled(before);
    spin_until(end);
    return td_record(&spin_function, same,
                     &(td_node_spec){.inputs = {inputs[0]}, .input_count = 1});
}

static const td_module_ops spin_ops = {.name = "Spin", .forward = spin_forward};

td_module *bench_clock_stage(int width, int forward_us)
{
    pass_ns = (int64_t)forward_us * 1000;
    td_module *both[] = {make_shift(width), td_module_finish(td_module_create(&spin_ops))};
    return td_sequential_of(both, 2);
}
