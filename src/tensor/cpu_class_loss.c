/* Classification losses: x [N, C, S] with targets [N, S], the negative log likelihood and the gradient of
 * the cross entropy.
 *
 *     nll            y[n, s] = -w[t] x[n, t, s]
 *     cross entropy  dx[n, c, s] = dy w[t] (e^l[n, c, s] - (c == t)),  l the log-softmax
 *
 * All targets are checked before anything is written; also in the backward pass, since the memory of the
 * targets is the user's and may have changed. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <inttypes.h>

/* How many positions of the last dimension are processed side by side. */
#define COLUMNS 128

struct class_loss {
    int64_t n, c, s;
    const int64_t *target;
    int64_t ignore_index;
    const void *x, *weight, *grad_y;
    bool grad_each; /* grad_y has one number for each target, otherwise one for all */
    double scale;
    void *out;
    double total;
};

#include "tensor/real_f32.h"
#include "tensor/cpu_class_loss_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_class_loss_loops.h"

static td_status check_targets(const struct class_loss *k, const td_tensor *target,
                               const char *call)
{
    for (int64_t i = 0; i < k->n * k->s; i++) {
        int64_t t = k->target[i];
        if ((t < 0 || t >= k->c) && t != k->ignore_index)
            return td_fail(
                TD_ERR_INVALID,
                "%s: the target at %s is %" PRId64 ", but there are %" PRId64
                " classes: targets go from 0 to %" PRId64 ", or are ignore_index, %" PRId64,
                call, td__index_text(&target->layout, i), t, k->c, k->c - 1, k->ignore_index);
    }
    return TD_OK;
}

/* The sizes are those of x, or of its gradient. */
static struct class_loss loss_of(const td_tensor *x, const td_tensor *target, int64_t ignore_index)
{
    const int64_t *shape = x->layout.shape;
    return (struct class_loss){.n = shape[0],
                               .c = shape[1],
                               .s = shape[2],
                               .target = td_tensor_data(target),
                               .ignore_index = ignore_index};
}

td_status td__cpu_nll_loss(td_tensor *out, td_tensor *factor, const td_tensor *x,
                           const td_tensor *target, const td_tensor *weight, int64_t ignore_index)
{
    struct class_loss k = loss_of(x, target, ignore_index);
    TD_TRY(check_targets(&k, target, "nll_loss"));
    struct td__wide w = {0};
    k.x = td__widen(&w, x);
    k.weight = td__widen(&w, weight);
    k.out = td__widen_out(&w, out, false);
    if (w.status == TD_OK) {
        if (td__wide_dtype(x) == TD_F32)
            nll_loss_f32(&k);
        else
            nll_loss_f64(&k);
        if (factor)
            *(double *)td_tensor_data(factor) = 1 / k.total;
    }
    return td__widen_end(&w);
}

td_status td__cpu_nll_loss_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *factor,
                                const td_tensor *target, const td_tensor *weight,
                                int64_t ignore_index)
{
    struct class_loss k = loss_of(grad_x, target, ignore_index);
    TD_TRY(check_targets(&k, target, "gradient of nll_loss"));
    struct td__wide w = {0};
    k.weight = td__widen(&w, weight);
    k.grad_y = td__widen(&w, grad_y);
    k.grad_each = grad_y->layout.numel == k.n * k.s;
    k.scale = factor ? *(const double *)td_tensor_data(factor) : 1;
    k.out = td__widen_out(&w, grad_x, false);
    if (w.status == TD_OK)
        td__parallel_for(k.n, td__grain_of(k.c * k.s),
                         td__wide_dtype(grad_x) == TD_F32 ? nll_loss_grad_f32 : nll_loss_grad_f64,
                         &k);
    return td__widen_end(&w);
}

td_status td__cpu_cross_entropy_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                     const td_tensor *factor, const td_tensor *log_softmax,
                                     const td_tensor *target, const td_tensor *weight,
                                     int64_t ignore_index)
{
    struct class_loss k = loss_of(grad_x, target, ignore_index);
    TD_TRY(check_targets(&k, target, "gradient of cross_entropy"));
    struct td__wide w = {0};
    k.x = td__widen(&w, log_softmax);
    k.weight = td__widen(&w, weight);
    k.grad_y = td__widen(&w, grad_y);
    k.grad_each = grad_y->layout.numel == k.n * k.s;
    k.scale = factor ? *(const double *)td_tensor_data(factor) : 1;
    k.out = td__widen_out(&w, grad_x, false);
    if (w.status == TD_OK)
        td__parallel_for(
            k.n, td__grain_of(4 * k.c * k.s),
            td__wide_dtype(grad_x) == TD_F32 ? cross_entropy_grad_f32 : cross_entropy_grad_f64, &k);
    return td__widen_end(&w);
}
