/* Classification losses: x [N, C, S] with targets [N, S], the negative log likelihood and the cross entropy.
 *
 *     nll            y[n, s] = -w[t] x[n, t, s]
 *     cross entropy  y[n, s] = -w[t] l[n, t, s],  l = (x - greatest) - log_sum, the log-softmax
 *                    dx[n, c, s] = dy w[t] (e^l[n, c, s] - (c == t))
 *
 * Cross entropy reads the logits twice, for the greatest and for the sum of exponentials, and nothing of their size is
 * written: halves are converted in chunks that stay in the cache, and l is computed again for the gradient. If S is 1, a
 * row is processed at a time, otherwise COLUMNS columns side by side; threads share the rows, or the blocks of columns.
 *
 * All targets are checked before anything is written; also in the backward pass, since the memory of the
 * targets is the user's and may have changed. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "base/half.h"
#include "tensor/cpu_convert.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <inttypes.h>

/* How many positions of the last dimension are processed side by side. */
#define COLUMNS 128

/* Elements of a row whose exponentials are held at a time; a multiple of twice the lanes of a vector. */
#define CHUNK 1024

/* Lines of halves that are shorter are converted all at once: a call for each of them would cost more. */
#define SHORT 64

struct class_loss {
    int64_t n, c, s;
    const int64_t *target;
    int64_t ignore_index;
    const void *x, *weight, *grad_y;
    bool grad_each; /* grad_y has one number for each target, otherwise one for all */
    double scale;
    void *statistics; /* of the cross entropy: the greatest logit and log_sum of each target */
    td_dtype dtype;   /* of x, which is not widened there, and of its gradient */
    bool half;        /* whether it is f16 or bf16, and converted in chunks */
    int64_t blocks;   /* of columns */
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

/* For the cross entropy, forward or backward. */
static struct class_loss logits_loss_of(struct td__wide *w, const td_tensor *x,
                                        const td_tensor *statistics, const td_tensor *target,
                                        int64_t ignore_index)
{
    struct class_loss k = loss_of(x, target, ignore_index);
    k.dtype = x->layout.dtype;
    k.half = (k.dtype == TD_F16 || k.dtype == TD_BF16) && (k.s == 1 ? k.c : k.s) >= SHORT;
    k.x = k.half ? td_tensor_data(x) : td__widen(w, x);
    k.statistics = td_tensor_data(statistics);
    k.blocks = k.s == 1 ? 1 : (k.s + COLUMNS - 1) / COLUMNS;
    return k;
}

/* An exponential costs as much as a few elements of other loops. */
static void run_logits(struct class_loss *k, td__range_fn *fn)
{
    int64_t width = k->s < COLUMNS ? k->s : COLUMNS;
    td__parallel_for(k->n * k->blocks, td__grain_of(4 * k->c * width), fn, k);
}

td_status td__cpu_cross_entropy(td_tensor *out, td_tensor *statistics, td_tensor *factor,
                                const td_tensor *x, const td_tensor *target,
                                const td_tensor *weight, int64_t ignore_index)
{
    struct td__wide w = {0};
    struct class_loss k = logits_loss_of(&w, x, statistics, target, ignore_index);
    TD_TRY(check_targets(&k, target, "cross_entropy"));
    k.weight = td__widen(&w, weight);
    k.out = td__widen_out(&w, out, false);
    if (w.status == TD_OK) {
        bool f32 = td__wide_dtype(x) == TD_F32;
        run_logits(&k, f32 ? cross_entropy_f32 : cross_entropy_f64);
        if (factor)
            *(double *)td_tensor_data(factor) = 1 / (f32 ? weights_f32(&k) : weights_f64(&k));
    }
    return td__widen_end(&w);
}

td_status td__cpu_cross_entropy_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                     const td_tensor *factor, const td_tensor *x,
                                     const td_tensor *statistics, const td_tensor *target,
                                     const td_tensor *weight, int64_t ignore_index)
{
    struct td__wide w = {0};
    struct class_loss k = logits_loss_of(&w, x, statistics, target, ignore_index);
    TD_TRY(check_targets(&k, target, "gradient of cross_entropy"));
    k.weight = td__widen(&w, weight);
    k.grad_y = td__widen(&w, grad_y);
    k.grad_each = grad_y->layout.numel == k.n * k.s;
    k.scale = factor ? *(const double *)td_tensor_data(factor) : 1;
    k.out = k.half ? td_tensor_data(grad_x) : td__widen_out(&w, grad_x, false);
    if (w.status == TD_OK)
        run_logits(&k,
                   td__wide_dtype(x) == TD_F32 ? cross_entropy_grad_f32 : cross_entropy_grad_f64);
    return td__widen_end(&w);
}
