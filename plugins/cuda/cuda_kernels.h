/* The slots of the table of kernels, by the files that have them. */
#ifndef CUDA_KERNELS_H
#define CUDA_KERNELS_H

#include <tandem/kernels.h>

/* launch_elements.c */
td_status td__cuda_fill(td_tensor *out, double value);
td_status td__cuda_copy(td_tensor *out, const td_tensor *x);
td_status td__cuda_where(td_tensor *out, const td_tensor *condition, const td_tensor *a,
                         const td_tensor *b);
td_status td__cuda_clamp(td_tensor *out, const td_tensor *x, double low, double high);
td_status td__cuda_add_scaled(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha);

/* launch_unary.c */
td_status td__cuda_unary(td_unary op, td_tensor *out, const td_tensor *x);
td_status td__cuda_unary_grad(td_unary op, td_tensor *grad_x, const td_tensor *grad_y,
                              const td_tensor *saved);

/* launch_binary.c */
td_status td__cuda_binary(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b);
td_status td__cuda_binary_mixed(td_binary op, td_tensor *out, const td_tensor *a,
                                const td_tensor *b);
td_status td__cuda_binary_scalar(td_binary op, td_tensor *out, const td_tensor *a, double b,
                                 bool reversed);

/* launch_random.c */
td_status td__cuda_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                           int64_t block, td_generator *generator);
td_status td__cuda_dropout_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *keep,
                                double p, int64_t block);
td_status td__cuda_uniform(td_tensor *out, double from, double to, td_generator *generator);
td_status td__cuda_normal(td_tensor *out, double mean, double std, td_generator *generator);
td_status td__cuda_bernoulli(td_tensor *out, double p, td_generator *generator);
td_status td__cuda_random_range(td_tensor *out, int64_t from, uint64_t range,
                                td_generator *generator);

/* launch_reductions.c */
td_status td__cuda_reduce(td_reduce_kind kind, td_tensor *out, const td_tensor *x, unsigned dims);
td_status td__cuda_arg_reduce(bool least, td_tensor *out, const td_tensor *x, int dim);

/* launch_sums.c */
struct reduce_args;
/** Whether it is a sum that sums.cu has kernels for: then it was launched, with *status. */
bool td__cuda_sum(const struct reduce_args *args, td_tensor *out, td_status *status);

/* launch_products.c */
td_status td__cuda_matmul(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                          bool accumulate);
td_status td__cuda_linear(td_tensor *out, const td_tensor *x, const td_tensor *w,
                          const td_tensor *bias);
td_status td__cuda_matmul_f32(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                              bool accumulate);
td_status td__cuda_linear_gelu(td_tensor *out, td_tensor *pre, const td_tensor *x,
                               const td_tensor *w, const td_tensor *bias);
td_status td__cuda_linear_gelu_grad(td_tensor *grad_pre, td_tensor *grad_bias,
                                    const td_tensor *grad_y, const td_tensor *w,
                                    const td_tensor *pre);

/* launch_convolution.c */
td_status td__cuda_conv2d(td_tensor *out, const td_tensor *x, const td_tensor *w,
                          const td_tensor *bias, const td_window *window);
td_status td__cuda_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                     const td_window *window);
td_status td__cuda_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                      const td_tensor *grad_y, const td_tensor *x,
                                      const td_window *window, bool accumulate);

/* launch_pooling.c */
td_status td__cuda_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x,
                              const td_window *window);
td_status td__cuda_adaptive_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x);
td_status td__cuda_max_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                   const td_tensor *indices, const td_window *window);
td_status td__cuda_avg_pool2d(td_tensor *out, const td_tensor *x, const td_window *window);
td_status td__cuda_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                   const td_window *window);
td_status td__cuda_adaptive_avg_pool2d(td_tensor *out, const td_tensor *x);
td_status td__cuda_adaptive_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y);

/* launch_attention.c */
td_status td__cuda_attention(td_tensor *out, td_tensor *lse, const td_tensor *q, const td_tensor *k,
                             const td_tensor *v, const td_tensor *mask, bool causal, double scale);
td_status td__cuda_attention_grad(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                                  const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                                  const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                                  const td_tensor *mask, bool causal, double scale);

/* flash_attention.c: what launch_attention.c calls where it is applicable. delta is memory for a number a query. */
struct attention_args;
bool td__cuda_flash_applies(const struct attention_args *args, const td_tensor *q);
td_status td__cuda_flash(const struct attention_args *args, const td_tensor *q);
td_status td__cuda_flash_grad(const struct attention_args *args, const td_tensor *q);

/* launch_softmax.c */
td_status td__cuda_softmax(td_tensor *out, const td_tensor *x, bool logarithm);
td_status td__cuda_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                                bool logarithm);

/* launch_layer_norm.c */
td_status td__cuda_layer_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                              const td_tensor *weight, const td_tensor *bias, double eps);
td_status td__cuda_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *x,
                                   const td_tensor *weight, const td_tensor *mean,
                                   const td_tensor *rstd);
td_status td__cuda_add_layer_norm(td_tensor *out, td_tensor *sum, td_tensor *mean, td_tensor *rstd,
                                  const td_tensor *x, const td_tensor *residual,
                                  const td_tensor *weight, const td_tensor *bias, double eps);
td_status td__cuda_add_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                       td_tensor *grad_weight, td_tensor *grad_bias,
                                       const td_tensor *grad_y, const td_tensor *grad_sum,
                                       const td_tensor *sum, const td_tensor *weight,
                                       const td_tensor *mean, const td_tensor *rstd);

/* launch_batch_norm.c */
td_status td__cuda_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                              const td_tensor *weight, const td_tensor *bias,
                              td_tensor *running_mean, td_tensor *running_var, bool training,
                              double momentum, double eps);
td_status td__cuda_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                   const td_tensor *grad_y, const td_tensor *x,
                                   const td_tensor *weight, const td_tensor *mean,
                                   const td_tensor *rstd, bool training);
td_status td__cuda_batch_norm_relu(td_tensor *out, td_tensor *statistics, const td_tensor *x,
                                   const td_tensor *residual, const td_tensor *weight,
                                   const td_tensor *bias, td_tensor *running_mean,
                                   td_tensor *running_var, bool training, double momentum,
                                   double eps);
td_status td__cuda_batch_norm_relu_grad(td_tensor *grad_x, td_tensor *grad_residual,
                                        td_tensor *grad_weight, td_tensor *grad_bias,
                                        const td_tensor *grad_y, const td_tensor *x,
                                        const td_tensor *out, const td_tensor *weight,
                                        const td_tensor *statistics, bool training);

/* launch_losses.c */
td_status td__cuda_nll_loss(td_tensor *out, td_tensor *factor, const td_tensor *x,
                            const td_tensor *target, const td_tensor *weight, int64_t ignore_index);
td_status td__cuda_nll_loss_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                 const td_tensor *factor, const td_tensor *target,
                                 const td_tensor *weight, int64_t ignore_index);
td_status td__cuda_cross_entropy_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                      const td_tensor *factor, const td_tensor *x,
                                      const td_tensor *statistics, const td_tensor *target,
                                      const td_tensor *weight, int64_t ignore_index);
td_status td__cuda_cross_entropy(td_tensor *out, td_tensor *statistics, td_tensor *factor,
                                 const td_tensor *x, const td_tensor *target,
                                 const td_tensor *weight, int64_t ignore_index);
td_status td__cuda_pair_loss(td_pair_loss loss, td_tensor *out, const td_tensor *x,
                             const td_tensor *y, double scale);
td_status td__cuda_pair_loss_grad(td_pair_loss loss, td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_tensor *x, const td_tensor *y, double scale);

/* launch_indices.c */
td_status td__cuda_index_select(td_tensor *out, const td_tensor *x, int dim,
                                const td_tensor *index);
td_status td__cuda_index_add(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src);
td_status td__cuda_gather(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index);
td_status td__cuda_scatter_add(td_tensor *out, int dim, const td_tensor *index,
                               const td_tensor *src);
/* launch_updates.c */
td_status td__cuda_sgd(const td_sgd_update *updates, int count);
td_status td__cuda_adam(const td_adam_update *updates, int count);
td_status td__cuda_scale(td_tensor *const *x, int count, const td_tensor *factor);
td_status td__cuda_unscale(td_tensor *const *x, int count, double factor, td_tensor *found);

/* launch_power_sums.c */
td_status td__cuda_power_sums(td_tensor *out, td_tensor *const *x, int count, double power);
td_status td__cuda_norm(td_tensor *out, td_tensor *const *x, int count, double power);

#endif
