/* The table of the CPU kernels; kernels.h has the contract of each. */
#include "tensor/tensor_internal.h"

#include "tensor/cpu_kernels.h"
#include "tensor/linear_gelu.h"
#include "tensor/cpu_convert.h"
#include "tensor/cpu_elementwise.h"
#include "tensor/cpu_reduce.h"

const td_kernels *td_host_kernels(void)
{
    return &td__cpu_kernels;
}

const td_kernels td__cpu_kernels = {
    .version = TD_KERNELS_VERSION,
    .size = sizeof(td_kernels),
    .fill = td__cpu_fill,
    .copy = td__cpu_copy,
    .unary = td__cpu_unary,
    .unary_grad = td__cpu_unary_grad,
    .binary = td__cpu_binary,
    .binary_scalar = td__cpu_binary_scalar,
    .add_scaled = td__cpu_add_scaled,
    .where = td__cpu_where,
    .clamp = td__cpu_clamp,
    .reduce = td__cpu_reduce,
    .arg_reduce = td__cpu_arg_reduce,
    .batch_norm = td__cpu_batch_norm,
    .batch_norm_grad = td__cpu_batch_norm_grad,
    .layer_norm = td__cpu_layer_norm,
    .layer_norm_grad = td__cpu_layer_norm_grad,
    .softmax = td__cpu_softmax,
    .softmax_grad = td__cpu_softmax_grad,
    .attention = td__cpu_attention,
    .attention_grad = td__cpu_attention_grad,
    .index_select = td__cpu_index_select,
    .index_add = td__cpu_index_add,
    .gather = td__cpu_gather,
    .scatter_add = td__cpu_scatter_add,
    .nll_loss = td__cpu_nll_loss,
    .nll_loss_grad = td__cpu_nll_loss_grad,
    .cross_entropy_grad = td__cpu_cross_entropy_grad,
    .pair_loss = td__cpu_pair_loss,
    .pair_loss_grad = td__cpu_pair_loss_grad,
    .dropout = td__cpu_dropout,
    .dropout_grad = td__cpu_dropout_grad,
    .uniform = td__cpu_uniform,
    .normal = td__cpu_normal,
    .bernoulli = td__cpu_bernoulli,
    .random_range = td__cpu_random_range,
    .sgd = td__cpu_sgd,
    .adam = td__cpu_adam,
    .norm = td__cpu_norm,
    .power_sums = td__cpu_power_sums,
    .scale = td__cpu_scale,
    .unscale = td__cpu_unscale,
    .cross_entropy = td__cpu_cross_entropy,
    .linear_gelu = td__cpu_linear_gelu,
    .linear_gelu_grad = td__cpu_linear_gelu_grad,
    .matmul = td__cpu_matmul,
    .linear = td__cpu_linear,
    .conv2d = td__cpu_conv2d,
    .conv2d_grad_input = td__cpu_conv2d_grad_input,
    .conv2d_grad_weight = td__cpu_conv2d_grad_weight,
    .max_pool2d = td__cpu_max_pool2d,
    .max_pool2d_grad = td__cpu_max_pool2d_grad,
    .avg_pool2d = td__cpu_avg_pool2d,
    .avg_pool2d_grad = td__cpu_avg_pool2d_grad,
    .adaptive_avg_pool2d = td__cpu_adaptive_avg_pool2d,
    .adaptive_avg_pool2d_grad = td__cpu_adaptive_avg_pool2d_grad,
    .adaptive_max_pool2d = td__cpu_adaptive_max_pool2d,
};
