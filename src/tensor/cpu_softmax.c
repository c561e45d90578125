/* Softmax and its logarithm over the middle one of three dimensions, [outer, n, inner].
 *
 *     softmax      y = e^(x - max) / sum e^(x - max)      dx = y (dy - sum dy y)
 *     logarithm    y = x - max - log sum e^(x - max)      dx = dy - e^y sum dy
 *
 * Where inner is 1, a row is done at a time: it stays in the cache while it is read for the maximum,
 * the exponentials and the quotients. Otherwise COLUMNS columns are done side by side. */
#include "tensor/cpu_softmax.h"

#include "tensor/widen.h"
#include "tensor/vector.h"

#define COLUMNS 128

struct extent {
    int64_t outer, n, inner;
};

#include "tensor/real_f32.h"
#include "tensor/cpu_softmax_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_softmax_loops.h"

static struct extent extent_of(const td_tensor *x)
{
    return (struct extent){x->layout.shape[0], x->layout.shape[1], x->layout.shape[2]};
}

td_status td__cpu_softmax(td_tensor *out, const td_tensor *x, bool logarithm)
{
    struct extent e = extent_of(x);
    struct td__wide w = {0};
    const void *from = td__widen(&w, x);
    void *to = td__widen_out(&w, out, false);
    if (w.status == TD_OK && x->layout.numel) {
        if (td__wide_dtype(x) == TD_F32)
            softmax_all_f32(to, from, &e, logarithm);
        else
            softmax_all_f64(to, from, &e, logarithm);
    }
    return td__widen_end(&w);
}

td_status td__cpu_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                               bool logarithm)
{
    struct extent e = extent_of(y);
    struct td__wide w = {0};
    const void *result = td__widen(&w, y), *gy = td__widen(&w, grad_y);
    void *gx = td__widen_out(&w, grad_x, false);
    if (w.status == TD_OK && y->layout.numel) {
        if (td__wide_dtype(y) == TD_F32)
            softmax_grad_all_f32(gx, gy, result, &e, logarithm);
        else
            softmax_grad_all_f64(gx, gy, result, &e, logarithm);
    }
    return td__widen_end(&w);
}
