/* Operators that take more than tensors and a number; see tdcheck_calls.c. */
#ifndef TANDEM_TOOLS_TDCHECK_CALLS_H
#define TANDEM_TOOLS_TDCHECK_CALLS_H

#include "tdcheck.h"

td_tensor *check_to_dtype(td_tensor **x, struct check_case *c);
td_tensor *check_transpose(td_tensor **x, struct check_case *c);
td_tensor *check_permute(td_tensor **x, struct check_case *c);
td_tensor *check_narrow(td_tensor **x, struct check_case *c);
td_tensor *check_select(td_tensor **x, struct check_case *c);
td_tensor *check_slice(td_tensor **x, struct check_case *c);
td_tensor *check_reshape(td_tensor **x, struct check_case *c);
td_tensor *check_flatten(td_tensor **x, struct check_case *c);
td_tensor *check_expand(td_tensor **x, struct check_case *c);
td_tensor *check_squeeze(td_tensor **x, struct check_case *c);
td_tensor *check_split(td_tensor **x, struct check_case *c);
td_tensor *check_split_heads(td_tensor **x, struct check_case *c);
td_tensor *check_cat(td_tensor **x, struct check_case *c);
td_tensor *check_stack(td_tensor **x, struct check_case *c);
td_tensor *check_add_scaled(td_tensor **x, struct check_case *c);
td_tensor *check_clamp(td_tensor **x, struct check_case *c);
td_tensor *check_masked_fill(td_tensor **x, struct check_case *c);
td_tensor *check_where(td_tensor **x, struct check_case *c);
td_tensor *check_sum_dims(td_tensor **x, struct check_case *c);
td_tensor *check_mean_dims(td_tensor **x, struct check_case *c);
td_tensor *check_var_dims(td_tensor **x, struct check_case *c);
td_tensor *check_max_dim(td_tensor **x, struct check_case *c);
td_tensor *check_min_dim(td_tensor **x, struct check_case *c);
td_tensor *check_argmax(td_tensor **x, struct check_case *c);
td_tensor *check_argmin(td_tensor **x, struct check_case *c);
td_tensor *check_mlp(td_tensor **x, struct check_case *c);
td_tensor *check_linear(td_tensor **x, struct check_case *c);
td_tensor *check_linear_autocast(td_tensor **x, struct check_case *c);
td_tensor *check_conv2d(td_tensor **x, struct check_case *c);
td_tensor *check_max_pool2d(td_tensor **x, struct check_case *c);
td_tensor *check_avg_pool2d(td_tensor **x, struct check_case *c);
td_tensor *check_adaptive_avg_pool2d(td_tensor **x, struct check_case *c);
td_tensor *check_adaptive_max_pool2d(td_tensor **x, struct check_case *c);
td_tensor *check_softmax(td_tensor **x, struct check_case *c);
td_tensor *check_log_softmax(td_tensor **x, struct check_case *c);
td_tensor *check_batch_norm(td_tensor **x, struct check_case *c);
td_tensor *check_batch_norm_relu(td_tensor **x, struct check_case *c);
td_tensor *check_layer_norm(td_tensor **x, struct check_case *c);
td_tensor *check_add_layer_norm(td_tensor **x, struct check_case *c);
td_tensor *check_mixed(td_tensor **x, struct check_case *c);
td_tensor *check_attention(td_tensor **x, struct check_case *c);
td_tensor *check_embedding(td_tensor **x, struct check_case *c);
td_tensor *check_index_select(td_tensor **x, struct check_case *c);
td_tensor *check_take_along_dim(td_tensor **x, struct check_case *c);
td_tensor *check_one_hot(td_tensor **x, struct check_case *c);
td_tensor *check_arange(td_tensor **x, struct check_case *c);
td_tensor *check_linspace(td_tensor **x, struct check_case *c);
td_tensor *check_full(td_tensor **x, struct check_case *c);
td_tensor *check_tril(td_tensor **x, struct check_case *c);
td_tensor *check_triu(td_tensor **x, struct check_case *c);
td_tensor *check_nll_loss(td_tensor **x, struct check_case *c);
td_tensor *check_cross_entropy(td_tensor **x, struct check_case *c);
td_tensor *check_cross_entropy_autocast(td_tensor **x, struct check_case *c);
td_tensor *check_cross_entropy_rows(td_tensor **x, struct check_case *c);
td_tensor *check_mse_loss(td_tensor **x, struct check_case *c);
td_tensor *check_l1_loss(td_tensor **x, struct check_case *c);
td_tensor *check_bce_with_logits(td_tensor **x, struct check_case *c);
td_tensor *check_add_scaled_(td_tensor **x, struct check_case *c);
td_tensor *check_clamp_(td_tensor **x, struct check_case *c);
td_tensor *check_tensor_copy(td_tensor **x, struct check_case *c);
td_tensor *check_copy_overlapping(td_tensor **x, struct check_case *c);
td_tensor *check_view_in_place(td_tensor **x, struct check_case *c);

#endif
