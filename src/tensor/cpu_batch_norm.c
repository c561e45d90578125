/* Batch norm over x [N, C, S]: a channel c is the N lines of S numbers at (n, c).
 *
 *     z = (x - mean) rstd,  y = z w + b,  rstd = 1 / sqrt(variance + eps)
 *
 * Statistics are two passes: the mean, then the moments of x - mean. Lines are added up in lanes of
 * their own type and the lines' sums in f64, so neither a large mean nor many lines cost precision.
 * Where lines are short (a batch of vectors has S = 1), channels are done side by side instead, with
 * an accumulator in f64 each. */
#include "tensor/cpu_norm.h"

#include "base/fail.h"
#include "tensor/cpu_floats.h"
#include "tensor/vector.h"

#include <stdlib.h>

/* From this length on a line is worth lanes of its own. */
#define LONG_LINE 8

/* A line is cut into pieces for its sums, so that the lanes' errors stay small. */
#define PIECE 4096

/* The operands of one call, forwards or backwards, as numbers of the type that is computed with. */
struct batch_norm {
    int64_t n, c, s;
    const void *x, *weight, *bias, *grad_y;
    void *y, *mean, *rstd, *running_mean, *running_var;
    void *grad_x, *grad_weight, *grad_bias;
    bool training;
    double momentum, eps;
    double *sums;  /* [4, C], zeros at first: what is added up for each channel */
    void *factors; /* [3, C], of the type that is computed with: what its numbers are changed by */
};

#include "tensor/real_f32.h"
#include "tensor/cpu_batch_norm_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_batch_norm_loops.h"

static td_status run(struct td__floats *f, struct batch_norm *k, bool gradient)
{
    k->factors = td__floats_scratch(f, 3 * k->c);
    k->sums = calloc((size_t)k->c + 1, 4 * sizeof *k->sums);
    if (!k->sums && f->status == TD_OK)
        f->status = td__fail_nomem("batch_norm");
    if (f->status == TD_OK) {
        if (f->dtype == TD_F32)
            (gradient ? batch_norm_grad_f32 : batch_norm_f32)(k);
        else
            (gradient ? batch_norm_grad_f64 : batch_norm_f64)(k);
    }
    free(k->sums);
    return td__floats_end(f);
}

td_status td__cpu_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                             const td_tensor *weight, const td_tensor *bias,
                             td_tensor *running_mean, td_tensor *running_var, bool training,
                             double momentum, double eps)
{
    struct td__floats f = td__floats_begin(x);
    const int64_t *shape = x->layout.shape;
    struct batch_norm k = {
        .n = shape[0],
        .c = shape[1],
        .s = shape[2],
        .x = td__floats_in(&f, x),
        .weight = td__floats_in(&f, weight),
        .bias = td__floats_in(&f, bias),
        .y = td__floats_out(&f, out),
        .mean = training ? td__floats_out(&f, mean) : NULL,
        .rstd = training ? td__floats_out(&f, rstd) : NULL,
        .running_mean = td__floats_inout(&f, running_mean),
        .running_var = td__floats_inout(&f, running_var),
        .training = training,
        .momentum = momentum,
        .eps = eps,
    };
    return run(&f, &k, false);
}

td_status td__cpu_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd, bool training)
{
    struct td__floats f = td__floats_begin(x);
    const int64_t *shape = x->layout.shape;
    struct batch_norm k = {
        .n = shape[0],
        .c = shape[1],
        .s = shape[2],
        .x = td__floats_in(&f, x),
        .weight = td__floats_in(&f, weight),
        .mean = (void *)td__floats_in(&f, mean),
        .rstd = (void *)td__floats_in(&f, rstd),
        .grad_y = td__floats_in(&f, grad_y),
        .grad_x = td__floats_out(&f, grad_x),
        .grad_weight = td__floats_out(&f, grad_weight),
        .grad_bias = td__floats_out(&f, grad_bias),
        .training = training,
    };
    return run(&f, &k, true);
}
