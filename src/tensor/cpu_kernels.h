/* The CPU kernels of kernels.h, for the table in cpu_kernels.c; elementwise kernels, conversions and
 * reductions are in cpu_elementwise.h, cpu_convert.h and cpu_reduce.h. */
#ifndef TD_TENSOR_CPU_KERNELS_H
#define TD_TENSOR_CPU_KERNELS_H

#include "tensor/tensor_internal.h"

/* ---- Normalisation --------------------------------------------------------------------------- */

td_status td__cpu_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                             const td_tensor *weight, const td_tensor *bias,
                             td_tensor *running_mean, td_tensor *running_var, bool training,
                             double momentum, double eps);
td_status td__cpu_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd, bool training);
td_status td__cpu_layer_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                             const td_tensor *weight, const td_tensor *bias, double eps);
td_status td__cpu_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd);

/* ---- Softmax --------------------------------------------------------------------------------- */

td_status td__cpu_softmax(td_tensor *out, const td_tensor *x, bool logarithm);
td_status td__cpu_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                               bool logarithm);

/* ---- Attention ------------------------------------------------------------------------------- */

td_status td__cpu_attention(td_tensor *out, td_tensor *lse, const td_tensor *q, const td_tensor *k,
                            const td_tensor *v, const td_tensor *mask, bool causal, double scale);
td_status td__cpu_attention_grad(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                                 const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                                 const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                                 const td_tensor *mask, bool causal, double scale);

/* ---- Indices --------------------------------------------------------------------------------- */

td_status td__cpu_index_select(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index);
td_status td__cpu_index_add(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src);
td_status td__cpu_gather(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index);
td_status td__cpu_scatter_add(td_tensor *out, int dim, const td_tensor *index,
                              const td_tensor *src);

/* ---- Losses ---------------------------------------------------------------------------------- */

td_status td__cpu_nll_loss(td_tensor *out, td_tensor *factor, const td_tensor *x,
                           const td_tensor *target, const td_tensor *weight, int64_t ignore_index);
td_status td__cpu_nll_loss_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *factor,
                                const td_tensor *target, const td_tensor *weight,
                                int64_t ignore_index);
td_status td__cpu_cross_entropy_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                     const td_tensor *factor, const td_tensor *x,
                                     const td_tensor *statistics, const td_tensor *target,
                                     const td_tensor *weight, int64_t ignore_index);
td_status td__cpu_cross_entropy(td_tensor *out, td_tensor *statistics, td_tensor *factor,
                                const td_tensor *x, const td_tensor *target,
                                const td_tensor *weight, int64_t ignore_index);
td_status td__cpu_pair_loss(td_pair_loss loss, td_tensor *out, const td_tensor *x,
                            const td_tensor *y, double scale);
td_status td__cpu_pair_loss_grad(td_pair_loss loss, td_tensor *grad_x, const td_tensor *grad_y,
                                 const td_tensor *x, const td_tensor *y, double scale);

/* ---- Dropout --------------------------------------------------------------------------------- */

td_status td__cpu_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                          int64_t block, td_generator *generator);
td_status td__cpu_dropout_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *keep,
                               double p, int64_t block);

/* ---- Random numbers (random_fill.c) ------------------------------------------------------------ */

td_status td__cpu_uniform(td_tensor *out, double from, double to, td_generator *generator);
td_status td__cpu_normal(td_tensor *out, double mean, double std, td_generator *generator);
td_status td__cpu_bernoulli(td_tensor *out, double p, td_generator *generator);
td_status td__cpu_random_range(td_tensor *out, int64_t from, uint64_t range,
                               td_generator *generator);

/* ---- Optimizers, and lists of tensors ---------------------------------------------------------- */

td_status td__cpu_sgd(const td_sgd_update *updates, int count);
td_status td__cpu_adam(const td_adam_update *updates, int count);
td_status td__cpu_norm(td_tensor *out, td_tensor *const *x, int count, double power);
td_status td__cpu_power_sums(td_tensor *out, td_tensor *const *x, int count, double power);
td_status td__cpu_unscale(td_tensor *const *x, int count, double factor, td_tensor *found);

/* ---- Products and pooling -------------------------------------------------------------------- */

td_status td__cpu_matmul(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                         bool accumulate);
td_status td__cpu_linear(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias);
td_status td__cpu_conv2d(td_tensor *out, const td_tensor *x, const td_tensor *w,
                         const td_tensor *bias, const td_window *window);
td_status td__cpu_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *w,
                                    const td_window *window);
td_status td__cpu_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                     const td_tensor *grad_y, const td_tensor *x,
                                     const td_window *window, bool accumulate);

td_status td__cpu_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x,
                             const td_window *window);
td_status td__cpu_max_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_tensor *indices, const td_window *window);
td_status td__cpu_adaptive_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x);
td_status td__cpu_avg_pool2d(td_tensor *out, const td_tensor *x, const td_window *window);
td_status td__cpu_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                  const td_window *window);
td_status td__cpu_adaptive_avg_pool2d(td_tensor *out, const td_tensor *x);
td_status td__cpu_adaptive_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y);

#endif
