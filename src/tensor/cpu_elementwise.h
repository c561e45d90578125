/* The kernels over elements, and the loops that they are made of. */
#ifndef TD_TENSOR_CPU_ELEMENTWISE_H
#define TD_TENSOR_CPU_ELEMENTWISE_H

#include "tensor/cpu_each.h"
#include "tensor/tensor_internal.h"

/* Loops over arrays of `count` elements without gaps, for td__each_run(). `dtype` is that of the
 * operands, no half. Which operations a dtype has is checked before. */

void td__binary_complex(td_binary op, td_dtype dtype, void *out, const void *a, const void *b,
                        int64_t count);
void td__binary_integer(td_binary op, td_dtype dtype, void *out, const void *a, const void *b,
                        int64_t count);
void td__binary_bool(td_binary op, void *out, const void *a, const void *b, int64_t count);

/** For td__each_pair(); the steps of POW are 1. */
void td__binary_f32(td_binary op, const struct td__pairs *pairs);
void td__binary_f64(td_binary op, const struct td__pairs *pairs);

/** ADD, SUB, MUL and DIV of bf16 without buffers of f32. */
void td__binary_bf16(td_binary op, const struct td__pairs *pairs);

/** sin(x + quarters * pi / 2) of f32: the sine (quarters 0) or cosine (1). */
void td__sin_quarters_array(float *out, const float *x, int64_t count, uint32_t quarters);

/** The names of the operations, by td_unary. */
extern const char *const td__unary_names[];

td_status td__cpu_unary(td_unary op, td_tensor *out, const td_tensor *x);
td_status td__cpu_unary_grad(td_unary op, td_tensor *grad_x, const td_tensor *grad_y,
                             const td_tensor *saved);
td_status td__cpu_binary(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b);
td_status td__cpu_scale(td_tensor *const *x, int count, const td_tensor *factor);
td_status td__cpu_binary_scalar(td_binary op, td_tensor *out, const td_tensor *a, double b,
                                bool reversed);
td_status td__cpu_add_scaled(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha);
td_status td__cpu_where(td_tensor *out, const td_tensor *condition, const td_tensor *a,
                        const td_tensor *b);
td_status td__cpu_clamp(td_tensor *out, const td_tensor *x, double low, double high);

#endif
