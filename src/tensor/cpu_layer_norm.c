/* Layer norm by rows of x [rows, n], and its gradients.
 *
 *     z = (x - mean) rstd,  y = z w + b,  rstd = 1 / sqrt(variance + eps)
 *
 * A row is read twice for the statistics, so that a large mean does not swallow the variance, and
 * stays in the cache meanwhile. */
#include "tensor/cpu_norm.h"

#include "tensor/cpu_floats.h"
#include "tensor/vector.h"

#define WIDTH 64
#define BLOCK 64

/* The operands of one call, forwards or backwards, as numbers of the type that is computed with. */
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
    struct td__floats f = td__floats_begin(x);
    struct layer_norm k = {
        .rows = x->layout.shape[0],
        .n = x->layout.shape[1],
        .x = td__floats_in(&f, x),
        .weight = td__floats_in(&f, weight),
        .bias = td__floats_in(&f, bias),
        .y = td__floats_out(&f, out),
        .mean = td__floats_out(&f, mean),
        .rstd = td__floats_out(&f, rstd),
        .eps = eps,
    };
    if (f.status == TD_OK) {
        if (f.dtype == TD_F32)
            layer_norm_rows_f32(&k);
        else
            layer_norm_rows_f64(&k);
    }
    return td__floats_end(&f);
}

td_status td__cpu_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd)
{
    struct td__floats f = td__floats_begin(x);
    struct layer_norm k = {
        .rows = x->layout.shape[0],
        .n = x->layout.shape[1],
        .x = td__floats_in(&f, x),
        .weight = td__floats_in(&f, weight),
        .mean = (void *)td__floats_in(&f, mean),
        .rstd = (void *)td__floats_in(&f, rstd),
        .grad_y = td__floats_in(&f, grad_y),
        .grad_x = td__floats_out(&f, grad_x),
        .grad_weight = td__floats_out(&f, grad_weight),
        .grad_bias = td__floats_out(&f, grad_bias),
    };
    if (f.status == TD_OK) {
        if (f.dtype == TD_F32)
            layer_norm_grad_all_f32(&k);
        else
            layer_norm_grad_all_f64(&k);
    }
    return td__floats_end(&f);
}
