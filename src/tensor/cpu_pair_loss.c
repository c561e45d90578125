/* Losses of two tensors, element by element: x the input, y the target.
 *
 *     mse         (x - y)^2                               2 (x - y)
 *     l1          |x - y|                                 sign(x - y)
 *     bce_logits  max(x, 0) - x y + log(1 + e^-|x|)       1 / (1 + e^-x) - y
 *
 * A sum of all is made in pieces: one is written aside, added up in lanes, and its sum to one in
 * f64. */
#include "tensor/cpu_loss.h"

#include "tensor/widen.h"
#include "tensor/vector.h"

#define PIECE 1024

#include "tensor/real_f32.h"
#include "tensor/cpu_pair_loss_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_pair_loss_loops.h"

td_status td__cpu_pair_loss(enum td__pair_loss loss, td_tensor *out, const td_tensor *x,
                            const td_tensor *y, double scale)
{
    struct td__wide w = {0};
    const void *a = td__widen(&w, x), *b = td__widen(&w, y);
    void *to = td__widen_out(&w, out, false);
    int64_t n = x->layout.numel;
    bool each = out->layout.numel == n;
    if (w.status == TD_OK) {
        if (td__wide_dtype(x) == TD_F32)
            pair_loss_f32(loss, to, a, b, n, scale, each);
        else
            pair_loss_f64(loss, to, a, b, n, scale, each);
    }
    return td__widen_end(&w);
}

td_status td__cpu_pair_loss_grad(enum td__pair_loss loss, td_tensor *grad_x,
                                 const td_tensor *grad_y, const td_tensor *x, const td_tensor *y,
                                 double scale)
{
    struct td__wide w = {0};
    const void *a = td__widen(&w, x), *b = td__widen(&w, y);
    const void *gy = td__widen(&w, grad_y);
    void *gx = td__widen_out(&w, grad_x, false);
    int64_t n = x->layout.numel;
    bool each = grad_y->layout.numel == n;
    if (w.status == TD_OK && n) {
        if (td__wide_dtype(x) == TD_F32)
            pair_loss_grad_f32(loss, gx, gy, a, b, n, scale, each);
        else
            pair_loss_grad_f64(loss, gx, gy, a, b, n, scale, each);
    }
    return td__widen_end(&w);
}
