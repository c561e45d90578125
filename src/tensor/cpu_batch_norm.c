/* Batch norm over x [N, C, S]: a channel c is the N lines of S numbers at (n, c).
 *
 *     z = (x - mean) rstd,  y = z w + b,  rstd = 1 / sqrt(variance + eps)
 *
 * Statistics take two passes: the mean, then the moments of x - mean. A line is summed in vector lanes of
 * its own type, and the lines' sums in f64, so neither a large mean nor many lines cost precision. For short
 * lines (a batch of vectors has S = 1) channels are processed side by side instead, with an f64 accumulator
 * each. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <stdlib.h>

/* From this length on a line is summed in lanes. */
#define LONG_LINE 8

/* A line is cut into pieces for its sums, so that the lanes' errors stay small. */
#define PIECE 4096

/* The operands of one call, forward or backward, in the compute type. */
struct batch_norm {
    int64_t n, c, s;
    const void *x, *weight, *bias, *grad_y;
    void *y, *mean, *rstd, *running_mean, *running_var;
    void *grad_x, *grad_weight, *grad_bias;
    bool training;
    double momentum, eps;
    const double *from; /* of the loops over channels: what is subtracted, and what is added to */
    double *first, *second;
    double *sums;  /* [4, C], initially zero: the sums of each channel */
    void *factors; /* [3, C], in the compute type: the coefficients of each channel */
};

/* One thread sums a channel, in the order of its lines. */
static void over_channels(struct batch_norm *k, td__range_fn *fn, const double *from, double *first,
                          double *second)
{
    k->from = from;
    k->first = first;
    k->second = second;
    td__parallel_for(k->c, td__grain_of(k->n * k->s), fn, k);
}

static void over_lines(struct batch_norm *k, td__range_fn *fn)
{
    if (k->s == 1)
        td__parallel_for(k->n, td__grain_of(k->c), fn, k);
    else if (k->s)
        td__parallel_for(k->n * k->c, td__grain_of(k->s), fn, k);
}

#include "tensor/real_f32.h"
#include "tensor/cpu_batch_norm_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_batch_norm_loops.h"

static td_status run(struct td__wide *w, struct batch_norm *k, bool f32, bool gradient)
{
    /* Large enough for either type. */
    k->sums = calloc((size_t)k->c + 1, 7 * sizeof *k->sums);
    k->factors = k->sums + 4 * k->c;
    if (!k->sums && w->status == TD_OK)
        w->status = td__fail_nomem("batch_norm");
    if (w->status == TD_OK) {
        if (f32)
            (gradient ? batch_norm_grad_f32 : batch_norm_f32)(k);
        else
            (gradient ? batch_norm_grad_f64 : batch_norm_f64)(k);
    }
    free(k->sums);
    return td__widen_end(w);
}

td_status td__cpu_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd, const td_tensor *x,
                             const td_tensor *weight, const td_tensor *bias,
                             td_tensor *running_mean, td_tensor *running_var, bool training,
                             double momentum, double eps)
{
    struct td__wide w = {0};
    const int64_t *shape = x->layout.shape;
    struct batch_norm k = {
        .n = shape[0],
        .c = shape[1],
        .s = shape[2],
        .x = td__widen(&w, x),
        .weight = td__widen(&w, weight),
        .bias = td__widen(&w, bias),
        .y = td__widen_out(&w, out, false),
        .mean = training ? td__widen_out(&w, mean, false) : NULL,
        .rstd = training ? td__widen_out(&w, rstd, false) : NULL,
        .running_mean = td__widen_out(&w, running_mean, true),
        .running_var = td__widen_out(&w, running_var, true),
        .training = training,
        .momentum = momentum,
        .eps = eps,
    };
    return run(&w, &k, td__wide_dtype(x) == TD_F32, false);
}

td_status td__cpu_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight, td_tensor *grad_bias,
                                  const td_tensor *grad_y, const td_tensor *x,
                                  const td_tensor *weight, const td_tensor *mean,
                                  const td_tensor *rstd, bool training)
{
    struct td__wide w = {0};
    const int64_t *shape = x->layout.shape;
    struct batch_norm k = {
        .n = shape[0],
        .c = shape[1],
        .s = shape[2],
        .x = td__widen(&w, x),
        .weight = td__widen(&w, weight),
        .mean = (void *)td__widen(&w, mean),
        .rstd = (void *)td__widen(&w, rstd),
        .grad_y = td__widen(&w, grad_y),
        .grad_x = td__widen_out(&w, grad_x, false),
        .grad_weight = td__widen_out(&w, grad_weight, false),
        .grad_bias = td__widen_out(&w, grad_bias, false),
        .training = training,
    };
    return run(&w, &k, td__wide_dtype(x) == TD_F32, true);
}
