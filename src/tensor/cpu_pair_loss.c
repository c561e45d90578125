/* Elementwise losses of two tensors: x the input, y the target.
 *
 *     mse         (x - y)^2                               2 (x - y)
 *     l1          |x - y|                                 sign(x - y)
 *     bce_logits  max(x, 0) - x y + log(1 + e^-|x|)       1 / (1 + e^-x) - y
 *
 * A sum over all elements is computed in pieces: a piece goes to a buffer, is summed in lanes, and added to
 * an f64 sum. Each block of pieces has its own f64 sum, independent of the threads; these are added in
 * order. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#include <stdlib.h>

#define PIECE 1024
#define PIECES 32

/* One call, forward or backward. */
struct pair_loss {
    td_pair_loss loss;
    void *out;
    const void *x, *y, *grad_y;
    int64_t n;
    double scale;
    bool each;    /* one result, or one incoming gradient, an element; otherwise one for all */
    double *sums; /* of blocks */
};

#include "tensor/real_f32.h"
#include "tensor/cpu_pair_loss_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_pair_loss_loops.h"

static td_status sum_up(struct pair_loss *k, bool f32)
{
    int64_t blocks = (k->n + PIECES * PIECE - 1) / (PIECES * PIECE);
    k->sums = malloc((size_t)(blocks + 1) * sizeof *k->sums);
    if (!k->sums)
        return td__fail_nomem("pair_loss");
    td__parallel_for(blocks, 1, f32 ? pair_sums_f32 : pair_sums_f64, k);
    double sum = 0;
    for (int64_t block = 0; block < blocks; block++)
        sum += k->sums[block];
    if (f32)
        *(float *)k->out = (float)(sum * k->scale);
    else
        *(double *)k->out = sum * k->scale;
    free(k->sums);
    return TD_OK;
}

td_status td__cpu_pair_loss(td_pair_loss loss, td_tensor *out, const td_tensor *x,
                            const td_tensor *y, double scale)
{
    struct td__wide w = {0};
    struct pair_loss k = {.loss = loss, .n = x->layout.numel, .scale = scale};
    k.x = td__widen(&w, x);
    k.y = td__widen(&w, y);
    k.out = td__widen_out(&w, out, false);
    k.each = out->layout.numel == k.n;
    bool f32 = td__wide_dtype(x) == TD_F32;
    if (w.status == TD_OK && k.each)
        td__parallel_for(k.n, TD__GRAIN, f32 ? pair_each_f32 : pair_each_f64, &k);
    else if (w.status == TD_OK)
        w.status = sum_up(&k, f32);
    return td__widen_end(&w);
}

td_status td__cpu_pair_loss_grad(td_pair_loss loss, td_tensor *grad_x,
                                 const td_tensor *grad_y, const td_tensor *x, const td_tensor *y,
                                 double scale)
{
    struct td__wide w = {0};
    struct pair_loss k = {.loss = loss, .n = x->layout.numel, .scale = scale};
    k.x = td__widen(&w, x);
    k.y = td__widen(&w, y);
    k.grad_y = td__widen(&w, grad_y);
    k.out = td__widen_out(&w, grad_x, false);
    k.each = grad_y->layout.numel == k.n;
    if (w.status == TD_OK)
        td__parallel_for(k.n, TD__GRAIN,
                         td__wide_dtype(x) == TD_F32 ? pair_grad_f32 : pair_grad_f64, &k);
    return td__widen_end(&w);
}
