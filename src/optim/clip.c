/* Gradient clipping. The norm is that of all gradients as one vector, summed in f64: threads sum
 * blocks of each gradient, and the block sums are added in order. */
#include "optim/optimizer.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "tensor/parallel_for.h"

#include <math.h>
#include <stdlib.h>

/* ---- The norm ----------------------------------------------------------------------------------- */

enum { BLOCK = 32768 };

/* The blocks of one gradient, and their sums. */
struct blocks {
    const void *data;
    int64_t count;
    bool wide;
    double type;
    double *sums;
};

/* The sum of squares or powers of some elements, or the greatest absolute value. */
static double measure_part(const void *data, int64_t count, bool wide, double type)
{
    if (isinf(type))
        return wide ? td__greatest_f64(data, count) : td__greatest_f32(data, count);
    if (type == 2)
        return wide ? td__sum_squares_f64(data, count) : td__sum_squares_f32(data, count);
    return wide ? td__sum_powers_f64(data, count, type) : td__sum_powers_f32(data, count, type);
}

static void measure_blocks(void *arg, int64_t begin, int64_t end)
{
    const struct blocks *blocks = arg;
    size_t size = blocks->wide ? sizeof(double) : sizeof(float);
    for (int64_t b = begin; b < end; b++) {
        int64_t left = blocks->count - b * BLOCK;
        blocks->sums[b] = measure_part((const char *)blocks->data + (size_t)(b * BLOCK) * size,
                                       left < BLOCK ? left : BLOCK, blocks->wide, blocks->type);
    }
}

/* Adds the contribution of one gradient to *sum. */
static td_status measure(td_tensor *grad, double type, double *sum)
{
    struct blocks blocks = {
        .count = grad->layout.numel, .wide = grad->layout.dtype == TD_F64, .type = type};
    int64_t number = (blocks.count + BLOCK - 1) / BLOCK;
    struct td__staged_tensor staged;
    TD_TRY(td__staged_open(&staged, grad, blocks.wide));
    blocks.data = staged.data;
    blocks.sums = malloc((size_t)(number + 1) * sizeof *blocks.sums);
    td_status status = blocks.sums ? TD_OK : td__fail_nomem("td_clip_grad_norm_");
    if (!status)
        td__parallel_for(number, 1, measure_blocks, &blocks);
    for (int64_t b = 0; b < number && !status; b++) {
        double part = blocks.sums[b];
        *sum = !isinf(type) ? *sum + part : part > *sum || isnan(part) ? part : *sum;
    }
    free(blocks.sums);
    td_status closed = td__staged_close(&staged, false);
    return status ? status : closed;
}

static td_status find_norm(td_tensor *const *parameters, int count, double type, double *norm)
{
    double sum = 0;
    for (int i = 0; i < count; i++) {
        td_tensor *grad = td_tensor_grad(parameters[i]);
        if (grad)
            TD_TRY(measure(grad, type, &sum));
    }
    *norm = isinf(type) ? sum : type == 2 ? sqrt(sum) : pow(sum, 1 / type);
    return TD_OK;
}

/* ---- The calls ---------------------------------------------------------------------------------- */

td_status td_clip_grad_norm_of_(td_tensor *const *parameters, int count, double max_norm,
                                const td_clip_options *options, double *norm)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    const char *call = "td_clip_grad_norm_";
    double type = td__option(options ? options->norm_type : 0, 2);
    if (count < 0 || (count > 0 && !parameters))
        return td_fail(TD_ERR_INVALID,
                       "%s: the list of %d parameters is NULL or has a negative "
                       "length",
                       call, count);
    if (!(max_norm >= 0) || !(type > 0))
        return td_fail(TD_ERR_INVALID,
                       "%s: max_norm is %g and norm_type %g; neither may be negative", call,
                       max_norm, type);
    double total = 0;
    TD_TRY(find_norm(parameters, count, type, &total));
    if (options && options->error_if_nonfinite && !isfinite(total))
        return td_fail(TD_ERR_INVALID, "%s: the norm of the gradients is %g", call, total);
    double factor = max_norm / (total + 1e-6);
    for (int i = 0; i < count && !(factor >= 1); i++) {
        td_tensor *grad = td_tensor_grad(parameters[i]);
        if (!grad)
            continue;
        TD_TRY(td__prepare_write(grad));
        TD_TRY(td__kernels_of(grad)->binary_scalar(TD_BINARY_MUL, grad, grad, factor, false));
        td__tensor_bump_version(grad);
    }
    if (norm)
        *norm = total;
    return TD_OK;
}

td_status td_clip_grad_value_of_(td_tensor *const *parameters, int count, double limit)
{
    const char *call = "td_clip_grad_value_";
    if (count < 0 || (count > 0 && !parameters))
        return td_fail(TD_ERR_INVALID, "%s: the list of %d parameters is no list", call, count);
    if (!(limit >= 0))
        return td_fail(TD_ERR_INVALID, "%s: the limit is %g; it may not be negative", call, limit);
    for (int i = 0; i < count; i++) {
        td_tensor *grad = td_tensor_grad(parameters[i]);
        if (!grad)
            continue;
        TD_TRY(td__prepare_write(grad));
        TD_TRY(td__kernels_of(grad)->clamp(grad, grad, -limit, limit));
        td__tensor_bump_version(grad);
    }
    return TD_OK;
}

td_status td_clip_grad_norm_(td_module *module, double max_norm, const td_clip_options *options,
                             double *norm)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    td_tensor **list = NULL;
    int count = 0;
    TD_TRY(td__parameter_list("td_clip_grad_norm_", module, &list, &count));
    td_status status = td_clip_grad_norm_of_(list, count, max_norm, options, norm);
    free(list);
    return status;
}

td_status td_clip_grad_value_(td_module *module, double limit)
{
    td_tensor **list = NULL;
    int count = 0;
    TD_TRY(td__parameter_list("td_clip_grad_value_", module, &list, &count));
    td_status status = td_clip_grad_value_of_(list, count, limit);
    free(list);
    return status;
}
