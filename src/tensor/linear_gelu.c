/* linear_gelu and linear_gelu_grad by other kernels, for tables that have none of their own. */
#include "base/fail.h"
#include "tensor/linear_gelu.h"

td_status td__linear_gelu_by(const td_kernels *kernels, td_tensor *out, td_tensor *pre,
                             const td_tensor *x, const td_tensor *w, const td_tensor *bias)
{
    TD_TRY(kernels->linear(pre, x, w, bias));
    return kernels->unary(TD_UNARY_GELU_TANH, out, pre);
}

td_status td__linear_gelu_grad_by(const td_kernels *kernels, td_tensor *grad_pre,
                                  td_tensor *grad_bias, const td_tensor *grad_y, const td_tensor *w,
                                  const td_tensor *pre)
{
    TD_TRY(kernels->matmul(grad_pre, grad_y, w, 1, false));
    TD_TRY(kernels->unary_grad(TD_UNARY_GELU_TANH, grad_pre, grad_pre, pre));
    return grad_bias ? kernels->reduce(TD_REDUCE_KIND_SUM, grad_bias, grad_pre, 1u << 0) : TD_OK;
}

td_status td__cpu_linear_gelu(td_tensor *out, td_tensor *pre, const td_tensor *x,
                              const td_tensor *w, const td_tensor *bias)
{
    return td__linear_gelu_by(&td__cpu_kernels, out, pre, x, w, bias);
}

td_status td__cpu_linear_gelu_grad(td_tensor *grad_pre, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *w,
                                   const td_tensor *pre)
{
    return td__linear_gelu_grad_by(&td__cpu_kernels, grad_pre, grad_bias, grad_y, w, pre);
}
