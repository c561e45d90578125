/* A user's own operator and module, and a few steps of training.
 *
 *     $ ./own_module
 *     step   0  loss 2.3…
 *     step  45  loss 0.1…
 *
 * The operator is a «square» nonlinearity with its gradient. The module is a convolutional network: two
 * convolutions, a dropout and two linear layers as named children, with a forward of its own.
 * docs/adding-an-op.md walks through both. */
#include <tandem/tandem.h>

#include <stdio.h>

/* ---- An operator: y = x^2 where x > 0, else 0 ---------------------------------------------------- */

/* The gradient of x is 2 max(x, 0) times that of y. Autograd records nothing here, and the results are
 * released after it. */
static td_status relu_squared_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    td_tensor *positive = td_f_relu(td_node_saved(node, 0));
    grad_x[0] = td_mul(grad_y[0], td_mul_scalar(positive, 2));
    return grad_x[0] ? TD_OK : TD_ERR_STATE;
}

static const td_function relu_squared_function = {.name = "relu_squared",
                                                  .backward = relu_squared_backward};

static td_tensor *relu_squared(td_tensor *x)
{
    td_tensor *y = NULL;
    {
        TD_NO_GRAD;
        y = td_square(td_f_relu(x));
    }
    return td_record(&relu_squared_function, y,
                     &(td_node_spec){
                         .inputs = {x},
                         .input_count = 1,
                         .saved = {x},
                         .saved_count = 1,
                     });
}

/* ---- A module: children by number, plain data, and a forward ------------------------------------- */

enum { CONV1, CONV2, DROP, FC1, FC2 };

struct net {
    int64_t flat; /* what FC1 takes */
};

static td_tensor *net_forward(td_module *net, td_tensor *const *inputs, int count)
{
    const struct net *data = td_module_data(net);
    (void)count;
    td_tensor *x = td_forward(td_child(net, CONV1), inputs[0]);
    x = td_f_relu(td_f_max_pool2d(x, 2, 2, NULL));
    x = td_forward(td_child(net, DROP), td_forward(td_child(net, CONV2), x));
    x = td_f_relu(td_f_max_pool2d(x, 2, 2, NULL));
    x = td_reshape(x, TD_SHAPE(-1, data->flat));
    x = relu_squared(td_forward(td_child(net, FC1), x));
    return td_f_log_softmax(td_forward(td_child(net, FC2), x), 1);
}

/* Its data as numbers, for modules that are sent to other processes. */
static td_status net_save(const td_module *net, td_state *options)
{
    const struct net *data = td_module_data(net);
    return td_state_add_integer(options, "flat", data->flat);
}

static td_status net_load(td_module *net, const td_state *options)
{
    struct net *data = td_module_data(net);
    td_status status = td_state_get_integer(options, "flat", &data->flat);
    return status || data->flat >= 1 ? status : td_fail(TD_ERR_INVALID, "flat is less than 1");
}

static const td_module_ops net_ops = {
    .name = "Net",
    .data_size = sizeof(struct net),
    .forward = net_forward,
    .save_options = net_save,
    .load_options = net_load,
};

/* No call needs a check: the first failure is sticky, and td_module_finish() then returns NULL. */
static td_module *net_create(void)
{
    td_module *net = td_module_create(&net_ops);
    td_module_add_child(net, "conv1", td_conv2d(1, 10, 5));
    td_module_add_child(net, "conv2", td_conv2d(10, 20, 5));
    td_module_add_child(net, "conv2_drop", td_dropout2d(0.1));
    td_module_add_child(net, "fc1", td_linear(320, 50));
    td_module_add_child(net, "fc2", td_linear(50, 10));
    if (net)
        *(struct net *)td_module_data(net) = (struct net){.flat = 320};
    return td_module_finish(net);
}

/* ---- Training on one batch of random images ----------------------------------------------------- */

static td_status train(td_module *net, td_optimizer *adam, td_tensor *images, td_tensor *classes)
{
    for (int step = 0; step <= 45; step++) {
        TD_SCOPE;
        td_optimizer_zero_grad(adam);
        td_tensor *loss = td_nll_loss(td_forward(net, images), classes);
        td_status status = td_backward(loss);
        if (!status)
            status = td_optimizer_step(adam);
        if (status)
            return status;
        if (step % 5 == 0)
            printf("step %3d  loss %.4f\n", step, td_item(loss));
    }
    return TD_OK;
}

int main(void)
{
    td_manual_seed(1234);
    td_module *net = net_create();
    td_optimizer *adam = td_adam(net, &(td_adam_options){.lr = 0.003});
    td_tensor *images = td_randn(TD_SHAPE(64, 1, 28, 28), TD_F32, NULL);
    td_tensor *classes = td_randint(0, 10, TD_SHAPE(64), TD_I64, NULL);
    td_status status = td_register_module(&net_ops);
    if (!status)
        status = adam ? train(net, adam, images, classes) : TD_ERR_INVALID;
    if (status)
        fprintf(stderr, "%s\n", td_last_error());
    else
        td_module_print(net, stdout);
    td_tensor_release(classes);
    td_tensor_release(images);
    td_optimizer_destroy(adam);
    td_module_destroy(net);
    return status ? 1 : 0;
}
