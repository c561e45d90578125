/* Softmax and log-softmax over the middle one of three dimensions, [outer, n, inner].
 *
 *     softmax      y = e^(x - max) / sum e^(x - max)      dx = y (dy - sum dy y)
 *     logarithm    y = x - max - log sum e^(x - max)      dx = dy - e^y sum dy
 *
 * If inner is 1, a row is processed at a time: it stays in the cache for the maximum, the exponentials and the
 * quotients. Otherwise COLUMNS columns are processed side by side. Threads share the rows, or the blocks of
 * columns. */
#include "tensor/cpu_kernels.h"

#include "tensor/parallel_for.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

#define COLUMNS 128

/* One call, forward or backward. */
struct softmax {
    int64_t outer, n, inner;
    int64_t blocks; /* of columns, where inner is not 1 */
    void *to;
    const void *from; /* x, or the gradient of y */
    const void *y;    /* backward only */
    bool logarithm;
};

#include "tensor/real_f32.h"
#include "tensor/cpu_softmax_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_softmax_loops.h"

static struct softmax softmax_of(const td_tensor *x, bool logarithm)
{
    const int64_t *shape = x->layout.shape;
    return (struct softmax){.outer = shape[0],
                            .n = shape[1],
                            .inner = shape[2],
                            .blocks = shape[2] == 1 ? 1 : (shape[2] + COLUMNS - 1) / COLUMNS,
                            .logarithm = logarithm};
}

/* An exponential costs as much as a few elements of other loops. */
static void run(struct softmax *k, td__range_fn *fn)
{
    int64_t width = k->inner < COLUMNS ? k->inner : COLUMNS;
    td__parallel_for(k->outer * k->blocks, td__grain_of(4 * k->n * width), fn, k);
}

td_status td__cpu_softmax(td_tensor *out, const td_tensor *x, bool logarithm)
{
    struct softmax k = softmax_of(x, logarithm);
    struct td__wide w = {0};
    k.from = td__widen(&w, x);
    k.to = td__widen_out(&w, out, false);
    if (w.status == TD_OK && x->layout.numel)
        run(&k, td__wide_dtype(x) == TD_F32 ? softmax_f32 : softmax_f64);
    return td__widen_end(&w);
}

td_status td__cpu_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                               bool logarithm)
{
    struct softmax k = softmax_of(y, logarithm);
    struct td__wide w = {0};
    k.y = td__widen(&w, y);
    k.from = td__widen(&w, grad_y);
    k.to = td__widen_out(&w, grad_x, false);
    if (w.status == TD_OK && y->layout.numel)
        run(&k, td__wide_dtype(y) == TD_F32 ? softmax_grad_f32 : softmax_grad_f64);
    return td__widen_end(&w);
}
