/* A tour of tensors and gradients for users of PyTorch; each line has the PyTorch expression beside it.
 *
 *     $ ./15_tour
 *     tensor([[0., 1., 2.],
 *             [3., 4., 5.]])
 *     …
 *
 * Tensors that functions return belong to the enclosing TD_SCOPE, and are released with it. */
#include <tandem/tandem.h>

#include <stdio.h>

/* print(tensor). A NULL is the result of an expression that has failed. */
static void show(td_tensor *tensor)
{
    if (td_tensor_print(tensor, stdout))
        fprintf(stderr, "15_tour: %s\n", td_last_error());
}

static void tensors(void)
{
    td_tensor *six = td_arange(0, 6, 1, TD_F32, NULL);    /* arange(6.) */
    td_tensor *a = td_reshape(six, TD_SHAPE(2, 3)); /* six.reshape(2, 3) */
    td_tensor *row = td_select(a, 0, 1);            /* a[1]: a view */
    td_tensor *column = td_narrow(a, 1, 0, 1);      /* a[:, 0:1] */
    show(a);
    show(td_matmul(a, td_transpose(a, 0, 1))); /* a @ a.T */
    show(td_mul(a, column));                   /* a * a[:, 0:1] */
    show(td_sum_dims(a, TD_DIMS(0), false));   /* a.sum(0) */
    td_fill_(row, 7);                          /* a[1].fill_(7) */
    float *data = td_tensor_data(a);           /* a.data_ptr() */
    if (data)
        data[0] = -1; /* a[0, 0] = -1 */
    printf("%g elements above 0, the mean is %g\n",
           td_item(td_sum(td_gt_scalar(a, 0))), /* (a > 0).sum().item() */
           td_item(td_mean(a)));                /* a.mean().item() */
    show(a);
}

static td_status gradients(void)
{
    td_tensor *w = td_full(TD_SHAPE(3), 2, TD_F64, NULL);    /* full((3,), 2.) */
    td_tensor_set_requires_grad(w, true);              /* w.requires_grad_() */
    td_tensor *loss = td_sum(td_mul(w, td_square(w))); /* (w * w**2).sum() */
    td_status status = td_backward(loss);              /* loss.backward() */
    if (status)
        return status;
    show(td_tensor_grad(w)); /* w.grad: 3 * w**2 */
    {
        TD_NO_GRAD;
        td_add_scaled_(w, td_tensor_grad(w), -0.1);
    } /* w -= 0.1 * w.grad */
    show(w);
    return TD_OK;
}

/* A failure is reported once, at the end of an expression. */
static void failures(void)
{
    td_tensor *a = td_ones(TD_SHAPE(2, 3), TD_F32, NULL), *b = td_ones(TD_SHAPE(4), TD_F32, NULL);
    td_tensor *result = td_mean(td_f_relu(td_add(a, b))); /* raises RuntimeError */
    if (!result)
        printf("as expected: %s\n", td_last_error());
}

static td_status modules(void)
{
    td_manual_seed(0); /* the same numbers */
    td_module *net = td_sequential(td_linear(4, 3), td_relu(), td_linear(3, 1), NULL);
    td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.1}); /* SGD(net.parameters(), …) */
    td_tensor *loss = td_square(td_mean(td_forward(net, td_ones(TD_SHAPE(1, 4), TD_F32, NULL))));
    td_status status = td_backward(loss);
    if (!status)
        status = td_optimizer_step(sgd);
    if (!status)
        status = td_module_print(net, stdout); /* print(net) */
    td_optimizer_destroy(sgd);
    td_module_destroy(net);
    return status;
}

int main(void)
{
    td_status status = TD_OK;
    {
        TD_SCOPE;
        tensors();
        failures();
        status = gradients();
        if (!status)
            status = modules();
    }
    if (status)
        fprintf(stderr, "15_tour: %s\n", td_last_error());
    return status ? 1 : 0;
}
