/* Dropout: each block of elements is kept with probability 1 - p, and then scaled by 1 / (1 - p); its
 * gradient is the same with the same mask. 1 - p and the factor are numbers of the tensor's dtype, as in
 * PyTorch, so that the results have its bits. Dropped elements are multiplied by 0: they keep their sign,
 * and NaN and infinity become NaN. One thread draws the mask, in order. */
#include "tensor/cpu_kernels.h"

#include "tensor/parallel_for.h"
#include "tensor/random_internal.h"
#include "tensor/vector.h"
#include "tensor/widen.h"

struct dropout {
    void *to;
    const void *from;
    const unsigned char *keep;
    int64_t block;
    double factor; /* a number of the tensor's dtype */
};

#include "tensor/real_f32.h"
#include "tensor/cpu_dropout_loops.h"
#include "tensor/real_f64.h"
#include "tensor/cpu_dropout_loops.h"

static float half_of(td_dtype dtype, float value)
{
    return dtype == TD_BF16  ? td_bf16_to_f32(td_f32_to_bf16(value))
           : dtype == TD_F16 ? td_f16_to_f32(td_f32_to_f16(value))
                             : value;
}

static td_status scale(td_tensor *out, const td_tensor *x, const td_tensor *keep, double p,
                       int64_t block)
{
    struct td__wide w = {0};
    td_dtype dtype = x->layout.dtype;
    const void *from = td__widen(&w, x);
    void *to = td__widen_out(&w, out, false);
    bool single = td__wide_dtype(x) == TD_F32;
    double factor = single ? half_of(dtype, 1 / half_of(dtype, (float)(1 - p))) : 1 / (1 - p);
    struct dropout k = {to, from, td_tensor_data(keep), block, factor};
    if (w.status == TD_OK)
        td__parallel_for(keep->layout.numel, td__grain_of(block),
                         single ? keep_blocks_f32 : keep_blocks_f64, &k);
    return td__widen_end(&w);
}

td_status td__cpu_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                          int64_t block, td_generator *generator)
{
    if (keep->layout.numel)
        td__dropout_mask(generator, td_tensor_data(keep), keep->layout.numel, p);
    return scale(out, x, keep, p, block);
}

td_status td__cpu_dropout_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *keep,
                               double p, int64_t block)
{
    return scale(grad_x, grad_y, keep, p, block);
}
