/* Slots of accelerators that others replace: where the kind has none there is no fallback to the host, since there is
 * another way on the device. */
#include "tensor/linear_gelu.h"
#include "tensor/wrapped_kernels.h"

/* Runs a slot, or, where the kind has none or it does not know the dtype, what follows in the function. */
#define RUN_OR_COMPOSE(slot_, written_, at_, ...)                                                  \
    struct td__operands operands = {                                                               \
        .device = td__operands_device(at_, (int)(sizeof(at_) / sizeof((at_)[0]))),                 \
        .slot = #slot_,                                                                            \
        .at = at_,                                                                                 \
        .written = written_,                                                                       \
        .count = (int)(sizeof(at_) / sizeof((at_)[0]))};                                           \
    const td_kernels *own = &operands.device->kind->kernels;                                       \
    td_status status = own->slot_ ? own->slot_(__VA_ARGS__) : TD_ERR_UNSUPPORTED;                  \
    td__note_kernel(#slot_, status);                                                               \
    if (!status)                                                                                   \
        td__note_uses(&operands);                                                                  \
    if (status != TD_ERR_UNSUPPORTED)                                                              \
    return status

td_status td__wrapped_binary_mixed(td_binary op, td_tensor *out, const td_tensor *a,
                                   const td_tensor *b)
{
    RUN_OR_COMPOSE(binary_mixed, 1, OPERANDS(AT(out), AT(a), AT(b)), op, out, a, b);
    return status;
}

td_status td__wrapped_add_layer_norm(td_tensor *out, td_tensor *sum, td_tensor *mean,
                                     td_tensor *rstd, const td_tensor *x, const td_tensor *residual,
                                     const td_tensor *weight, const td_tensor *bias, double eps)
{
    RUN_OR_COMPOSE(
        add_layer_norm, 4,
        OPERANDS(AT(out), AT(sum), AT(mean), AT(rstd), AT(x), AT(residual), AT(weight), AT(bias)),
        out, sum, mean, rstd, x, residual, weight, bias, eps);
    return status;
}

td_status td__wrapped_add_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                          td_tensor *grad_weight, td_tensor *grad_bias,
                                          const td_tensor *grad_y, const td_tensor *grad_sum,
                                          const td_tensor *sum, const td_tensor *weight,
                                          const td_tensor *mean, const td_tensor *rstd)
{
    RUN_OR_COMPOSE(add_layer_norm_grad, 4,
                   OPERANDS(AT(grad_x), AT(grad_residual), AT(grad_weight), AT(grad_bias),
                            AT(grad_y), AT(grad_sum), AT(sum), AT(weight), AT(mean), AT(rstd)),
                   grad_x, grad_residual, grad_weight, grad_bias, grad_y, grad_sum, sum, weight,
                   mean, rstd);
    return status;
}

td_status td__wrapped_batch_norm_relu(td_tensor *out, td_tensor *statistics, const td_tensor *x,
                                      const td_tensor *residual, const td_tensor *weight,
                                      const td_tensor *bias, td_tensor *running_mean,
                                      td_tensor *running_var, bool training, double momentum,
                                      double eps)
{
    RUN_OR_COMPOSE(batch_norm_relu, 4,
                   OPERANDS(AT(out), AT(statistics), AT(running_mean), AT(running_var), AT(x),
                            AT(residual), AT(weight), AT(bias)),
                   out, statistics, x, residual, weight, bias, running_mean, running_var, training,
                   momentum, eps);
    return status;
}

td_status td__wrapped_batch_norm_relu_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                           td_tensor *grad_weight, td_tensor *grad_bias,
                                           const td_tensor *grad_y, const td_tensor *x,
                                           const td_tensor *out, const td_tensor *weight,
                                           const td_tensor *statistics, bool training)
{
    RUN_OR_COMPOSE(batch_norm_relu_grad, 4,
                   OPERANDS(AT(grad_x), AT(grad_residual), AT(grad_weight), AT(grad_bias),
                            AT(grad_y), AT(x), AT(out), AT(weight), AT(statistics)),
                   grad_x, grad_residual, grad_weight, grad_bias, grad_y, x, out, weight,
                   statistics, training);
    return status;
}

td_status td__wrapped_linear_gelu(td_tensor *out, td_tensor *pre, const td_tensor *x,
                                  const td_tensor *w, const td_tensor *bias)
{
    RUN_OR_COMPOSE(linear_gelu, 2, OPERANDS(AT(out), AT(pre), AT(x), AT(w), AT(bias)), out, pre, x,
                   w, bias);
    return td__linear_gelu_by(&td__wrapped_kernels, out, pre, x, w, bias);
}

td_status td__wrapped_linear_gelu_grad(td_tensor *grad_pre, td_tensor *grad_bias,
                                       const td_tensor *grad_y, const td_tensor *w,
                                       const td_tensor *pre)
{
    RUN_OR_COMPOSE(linear_gelu_grad, 2,
                   OPERANDS(AT(grad_pre), AT(grad_bias), AT(grad_y), AT(w), AT(pre)), grad_pre,
                   grad_bias, grad_y, w, pre);
    return td__linear_gelu_grad_by(&td__wrapped_kernels, grad_pre, grad_bias, grad_y, w, pre);
}

td_status td__wrapped_matmul_f32(td_tensor *out, const td_tensor *a, const td_tensor *b,
                                 double alpha, bool accumulate)
{
    RUN_OR_COMPOSE(matmul_f32, 1, OPERANDS(AT(out), AT(a), AT(b)), out, a, b, alpha, accumulate);
    return status;
}
