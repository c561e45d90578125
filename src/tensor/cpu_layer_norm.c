/* Layer norm by rows of x [rows, n], and its gradients.
 *
 *     z = (x - mean) rstd,  y = z w + b,  rstd = 1 / sqrt(variance + eps)
 *
 * Statistics take two passes over a row, so that a large mean does not cancel the variance; the row stays in
 * the cache. Threads share the rows, and for the gradients of weight and bias the columns. */
#include "tensor/cpu_kernels.h"

#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#define WIDTH 64
#define BLOCK 64

/* The operands of one call, forward or backward, in the compute type. */
struct layer_norm {
    int64_t rows, n;
    const void *x, *weight, *bias, *grad_y;
    void *y, *mean, *rstd;
    void *grad_x, *grad_weight, *grad_bias;
    double eps;
};

#include "tensor/real_f32.h"
#include "tensor/cpu_layer_norm_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_layer_norm_loops.h"

td_status td__cpu_layer_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                             const td_tensor *weight, const td_tensor *bias, double eps)
{
    struct td__wide w = {0};
    struct layer_norm k = {
        .rows = x->layout.shape[0],
        .n = x->layout.shape[1],
        .x = td__widen(&w, x),
        .weight = td__widen(&w, weight),
        .bias = td__widen(&w, bias),
        .y = td__widen_out(&w, out, false),
        .mean = td__widen_out(&w, mean, false),
        .rstd = td__widen_out(&w, rstd, false),
        .eps = eps,
    };
    if (w.status == TD_OK) {
        td__range_fn *fn = td__wide_dtype(x) == TD_F32 ? layer_norm_rows_f32 : layer_norm_rows_f64;
        td__parallel_for(k.rows, td__grain_of(2 * k.n), fn, &k);
    }
    return td__widen_end(&w);
}

td_status td__cpu_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd)
{
    struct td__wide w = {0};
    struct layer_norm k = {
        .rows = x->layout.shape[0],
        .n = x->layout.shape[1],
        .x = td__widen(&w, x),
        .weight = td__widen(&w, weight),
        .mean = (void *)td__widen(&w, mean),
        .rstd = (void *)td__widen(&w, rstd),
        .grad_y = td__widen(&w, grad_y),
        .grad_x = td__widen_out(&w, grad_x, false),
        .grad_weight = td__widen_out(&w, grad_weight, false),
        .grad_bias = td__widen_out(&w, grad_bias, false),
    };
    if (w.status == TD_OK) {
        bool f32 = td__wide_dtype(x) == TD_F32;
        if (grad_x && k.n)
            td__parallel_for(k.rows, td__grain_of(2 * k.n),
                             f32 ? layer_norm_grad_rows_f32 : layer_norm_grad_rows_f64, &k);
        if (grad_weight || grad_bias)
            td__parallel_for((k.n + WIDTH - 1) / WIDTH, td__grain_of(2 * k.rows * WIDTH),
                             f32 ? layer_norm_grad_blocks_f32 : layer_norm_grad_blocks_f64, &k);
    }
    return td__widen_end(&w);
}
