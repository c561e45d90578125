/* Batch norm with the statistics of all ranks.
 *
 *     forward     mean, sum of squared differences and count of each rank, all-gathered and combined
 *                 in the order of the ranks: the same bits on all
 *     backward    grad_x = w rstd (grad_y - mean(grad_y) - z mean(grad_y z)),  z = (x - mean) rstd
 *                 where the means are over all ranks: two sums a channel, one all-reduce
 *
 * Statistics are exchanged in f64, so that the result is as precise as that of one rank with the
 * whole batch. The gradients of weight and bias are local: DDP averages them. The rest is done by
 * the kernels of batch norm in evaluation, which take statistics. */
#include "autograd/autocast.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"
#include "base/option_rules.h"
#include "nn/module.h"
#include "tensor/tensor_internal.h"

#include <tandem/parallel.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RUNNING_MEAN, RUNNING_VAR, BATCHES };

/* Single elements of contiguous f32 and f64 tensors in the host's memory, as doubles. */
static double get(const td_tensor *x, int64_t at)
{
    const void *data = td_tensor_data(x);
    return x->layout.dtype == TD_F64 ? ((const double *)data)[at] : ((const float *)data)[at];
}

static void set(td_tensor *x, int64_t at, double value)
{
    void *data = td_tensor_data(x);
    if (x->layout.dtype == TD_F64)
        ((double *)data)[at] = value;
    else
        ((float *)data)[at] = (float)value;
}

static const char *const call = "td_sync_batch_norm";

struct sync_batch_norm {
    int64_t features;
    td_batch_norm_options options;
    td_group *group;
};

/* For backward. */
struct sync_norm {
    int64_t shape[3]; /* [N, C, S] */
    double total;     /* values a channel, of all ranks */
    double eps;
    td_group *group;
    bool has_weight;
};

/* ---- Forward ---------------------------------------------------------------------------------------------- */

/* This rank's statistics: means [C], sums of squared differences from them [C], count. `scratch` is
 * like x. */
static td_status measure(double *part, td_tensor *x, td_tensor *scratch)
{
    int64_t channels = x->layout.shape[1];
    double count = (double)(x->layout.shape[0] * x->layout.shape[2]);
    memset(part, 0, (size_t)(2 * channels) * sizeof *part);
    part[2 * channels] = count;
    if (count == 0 || channels == 0)
        return TD_OK;
    const td_kernels *kernels = td__kernels_of(x);
    const int64_t flat[] = {1, channels, 1};
    td_tensor *mean = td__fresh(call, flat, 3, x), *squares = td__fresh(call, flat, 3, x);
    if (!mean || !squares)
        return TD_ERR_NOMEM;
    TD_TRY(kernels->reduce(TD_REDUCE_KIND_MEAN, mean, x, 1u << 0 | 1u << 2));
    td_tensor *wide = td__adopt(td__expand(call, mean, x->layout.shape, 3));
    if (!wide)
        return TD_ERR_NOMEM;
    TD_TRY(kernels->binary(TD_BINARY_SUB, scratch, x, wide));
    TD_TRY(kernels->reduce(TD_REDUCE_KIND_SQUARES, squares, scratch, 1u << 0 | 1u << 2));
    for (int64_t c = 0; c < channels; c++) {
        part[c] = get(mean, c);
        part[channels + c] = get(squares, c);
    }
    return TD_OK;
}

/* Combines the statistics of all ranks. */
static double combine(const double *parts, int size, int64_t channels, td_tensor *mean,
                      td_tensor *var)
{
    int64_t step = 2 * channels + 1;
    double total = 0;
    for (int r = 0; r < size; r++)
        total += parts[r * step + 2 * channels];
    for (int64_t c = 0; c < channels && total > 0; c++) {
        double middle = 0, squares = 0;
        for (int r = 0; r < size; r++)
            middle += parts[r * step + c] * (parts[r * step + 2 * channels] / total);
        for (int r = 0; r < size; r++) {
            double away = parts[r * step + c] - middle;
            squares += parts[r * step + channels + c] +
                       parts[r * step + 2 * channels] * away * away;
        }
        set(mean, c, middle);
        set(var, c, squares / total);
    }
    return total;
}

static td_status gather_here(td_group *group, td_tensor *x, td_tensor *scratch, int size,
                             td_tensor *mean, td_tensor *var, double *total)
{
    int64_t channels = x->layout.shape[1];
    size_t step = 2 * (size_t)channels + 1;
    double *parts = malloc(((size_t)size + 1) * step * sizeof *parts);
    if (!parts)
        return td__fail_nomem(call);
    double *mine = size > 1 ? parts + (size_t)size * step : parts;
    td_status status = measure(mine, x, scratch);
    if (!status && size > 1)
        status = td_group_all_gather(parts, mine, step, TD_F64, group, NULL);
    if (!status)
        *total = combine(parts, size, channels, mean, var);
    free(parts);
    return status;
}

/* ---- Forward on an accelerator: the same by operators, so that the host need not wait ---------------------- */

/* The counts of all ranks, which the host knows; their sum. Collective. */
static td_status gather_counts(td_group *group, double mine, int size, double *counts,
                               double *total)
{
    counts[0] = mine;
    if (size > 1)
        TD_TRY(td_group_all_gather(counts, &mine, 1, TD_F64, group, NULL));
    *total = 0;
    for (int r = 0; r < size; r++)
        *total += counts[r];
    return TD_OK;
}

/* This rank's means and sums of squared differences, f64 [2, C]; zeros where it has no values. */
static td_tensor *measure_there(td_tensor *x)
{
    int64_t channels = x->layout.shape[1];
    if (x->layout.numel == 0)
        return td_zeros(TD_SHAPE(2, channels), TD_F64, x->storage->device);
    td_tensor *mean = td_mean_dims(x, TD_DIMS(0, 2), true);
    td_tensor *squares = td_sum_dims(td_square(td_sub(x, mean)), TD_DIMS(0, 2), false);
    td_tensor *flat = td_reshape(mean, TD_SHAPE(channels));
    return td_to_dtype(td_stack(TD_TENSORS(flat, squares), 0), TD_F64);
}

/* Combines the statistics [size, 2, C] of all ranks in their order. */
static td_status combine_there(td_tensor *parts, const double *counts, double total, int size,
                               td_tensor *mean, td_tensor *var)
{
    td_tensor *middle = NULL, *squares = NULL;
    for (int r = 0; r < size; r++) {
        td_tensor *of_rank = td_select(td_select(parts, 0, r), 0, 0);
        td_tensor *share = td_mul_scalar(of_rank, counts[r] / total);
        middle = middle ? td_add(middle, share) : share;
    }
    for (int r = 0; r < size; r++) {
        td_tensor *of_rank = td_select(parts, 0, r);
        td_tensor *away = td_square(td_sub(td_select(of_rank, 0, 0), middle));
        td_tensor *share = td_add_scaled(td_select(of_rank, 0, 1), away, counts[r]);
        squares = squares ? td_add(squares, share) : share;
    }
    TD_TRY(td_tensor_copy(mean, td_to_dtype(middle, mean->layout.dtype)));
    return td_tensor_copy(var, td_to_dtype(td_div_scalar(squares, total), var->layout.dtype));
}

static td_status gather_there(td_group *group, td_tensor *x, int size, td_tensor *mean,
                              td_tensor *var, double *total)
{
    TD_NO_GRAD;
    TD_SCOPE;
    double *counts = malloc((size_t)size * sizeof *counts);
    if (!counts)
        return td__fail_nomem(call);
    int64_t channels = x->layout.shape[1];
    td_status status = gather_counts(group, (double)(x->layout.shape[0] * x->layout.shape[2]), size,
                                     counts, total);
    td_tensor *part = status ? NULL : measure_there(x);
    td_tensor *parts = td_reshape(part, TD_SHAPE(1, 2, channels));
    if (part && size > 1) {
        parts = td_empty(TD_SHAPE(size, 2, channels), TD_F64, x->storage->device);
        status = parts ? td_all_gather_into_tensor(parts, part, group, NULL) : TD_ERR_NOMEM;
    }
    if (!status)
        status = td__done(parts);
    if (!status && *total >= 2)
        status = combine_there(parts, counts, *total, size, mean, var);
    free(counts);
    return status;
}

/* The statistics of all ranks. Collective. */
static td_status gather_statistics(td_group *group, td_tensor *x, td_tensor *scratch,
                                   td_tensor *mean, td_tensor *var, double *total)
{
    int size = td_get_world_size(group);
    size = size < 1 ? 1 : size;
    td_status status = td__on_host(x) ? gather_here(group, x, scratch, size, mean, var, total)
                                      : gather_there(group, x, size, mean, var, total);
    if (!status && *total < 2)
        return td_fail(TD_ERR_INVALID,
                       "td_sync_batch_norm: all ranks together have %g values a channel; training "
                       "needs more than one",
                       *total);
    return status;
}

/* running = (1 - momentum) running + momentum new */
static td_status move(td_tensor *running, td_tensor *to, double momentum, double factor)
{
    if (!running)
        return TD_OK;
    TD_TRY(td__prepare_write(running));
    const td_kernels *kernels = td__kernels_of(running);
    TD_TRY(kernels->binary_scalar(TD_BINARY_MUL, running, running, 1 - momentum, false));
    TD_TRY(kernels->add_scaled(running, running, to, momentum * factor));
    td__tensor_bump_version(running);
    return TD_OK;
}

static td_status sync_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads);
static const td_function sync_function = {.name = "td_sync_batch_norm", .backward = sync_backward};

static td_status check(td_module *self, const td_tensor *x)
{
    const struct sync_batch_norm *norm = self->data;
    if (x->layout.ndim < 2 || x->layout.shape[1] != norm->features)
        return td_fail(TD_ERR_INVALID,
                       "td_forward: a SyncBatchNorm of %lld features got the shape %s; it takes "
                       "two dimensions or more, with the features as the second size",
                       (long long)norm->features, td__shape_of(x));
    if (x->layout.dtype != TD_F32 && x->layout.dtype != TD_F64)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "td_forward: a SyncBatchNorm got %s; it takes f32 and f64",
                       td_dtype_name(x->layout.dtype));
    const char *names[] = {"weight", "bias", "running_mean", "running_var"};
    td_tensor *tensors[] = {td_param(self, 0), td_param(self, 1), td_buffer(self, RUNNING_MEAN),
                            td_buffer(self, RUNNING_VAR)};
    for (int i = 0; i < 4; i++)
        TD_TRY(td__check_optional(call, names[i], tensors[i], x, &norm->features, 1));
    return TD_OK;
}

/* Increments num_batches_tracked, and sets *momentum. */
static td_status count_batch(td_module *self, double *momentum)
{
    const struct sync_batch_norm *norm = self->data;
    td_tensor *batches = td_buffer(self, BATCHES);
    *momentum = norm->options.momentum;
    if (!self->training || !batches)
        return TD_OK;
    TD_TRY(td_add_scalar_(batches, 1));
    if (norm->options.cumulative)
        *momentum = 1 / td_item(batches);
    return TD_OK;
}

static td_tensor *normalise(td_module *self, td_tensor *x)
{
    const struct sync_batch_norm *norm = self->data;
    struct sync_norm record = {.shape = {x->layout.shape[0], x->layout.shape[1], 1},
                               .eps = norm->options.eps,
                               .group = norm->group};
    for (int d = 2; d < x->layout.ndim; d++)
        record.shape[2] *= x->layout.shape[d];
    td_tensor *in = td__scoped_contiguous(x);
    td_tensor *weight = td__scoped_contiguous(td_param(self, 0)),
              *bias = td__scoped_contiguous(td_param(self, 1));
    td_tensor *mean = td__fresh(call, &record.shape[1], 1, x);
    td_tensor *var = td__fresh(call, &record.shape[1], 1, x);
    td_tensor *y = in && mean && var && !weight == !td_param(self, 0) ? td__empty_like(in) : NULL;
    if (!y)
        return NULL;
    struct td_tensor from = td__view_as(in, record.shape, 3), out = td__view_as(y, record.shape, 3);
    td_status status = gather_statistics(norm->group, &from, &out, mean, var, &record.total);
    double momentum = 0;
    if (!status)
        status = count_batch(self, &momentum);
    if (!status && self->training) {
        status = move(td_buffer(self, RUNNING_MEAN), mean, momentum, 1);
        if (!status)
            status = move(td_buffer(self, RUNNING_VAR), var, momentum,
                          record.total / (record.total - 1));
    }
    if (!status)
        status = td__kernels_of(x)->batch_norm(&out, NULL, NULL, &from, weight, bias, mean, var,
                                               false, 0, record.eps);
    record.has_weight = weight != NULL;
    return td__result(&sync_function, td__kept(y, status),
                      &(td_node_spec){.inputs = {x, td_param(self, 0), td_param(self, 1)},
                                      .input_count = 3,
                                      .saved = {in, weight, mean, var},
                                      .saved_count = 4,
                                      .data = &record,
                                      .data_size = sizeof record});
}

static td_tensor *sync_forward(td_module *self, td_tensor *const *inputs, int count)
{
    const struct sync_batch_norm *norm = self->data;
    if (!td__takes(self, count, 1))
        return NULL;
    td_tensor *x = inputs[0], *weight = td_param(self, 0), *mean = td_buffer(self, RUNNING_MEAN);
    TD__AUTOCAST(TD__CAST_BATCH_NORM, &x, &weight, &mean);
    if (check(self, x))
        return NULL;
    if (self->training || norm->options.no_running_stats)
        return TD__AUTOCAST_RESULT(normalise(self, x));
    return TD__AUTOCAST_RESULT(td_batch_norm(x, td_buffer(self, RUNNING_MEAN),
                                             td_buffer(self, RUNNING_VAR), td_param(self, 0),
                                             td_param(self, 1), false, 0, norm->options.eps));
}

/* ---- Backward --------------------------------------------------------------------------------------------- */

/* The same on an accelerator, by operators. */
static td_status gather_sums_there(const struct sync_norm *record, td_tensor *weight,
                                   td_tensor *rstd, td_tensor *slope, td_tensor *shift)
{
    TD_SCOPE;
    td_tensor *sums = td_to_dtype(td_stack(TD_TENSORS(slope, shift), 0), TD_F64);
    TD_TRY(td__done(sums));
    if (td_get_world_size(record->group) > 1)
        TD_TRY(td_all_reduce(sums, TD_SUM, record->group, NULL));
    td_tensor *factor = td_to_dtype(rstd, TD_F64);
    if (weight)
        factor = td_mul(factor, td_to_dtype(weight, TD_F64));
    sums = td_to_dtype(td_mul(sums, td_div_scalar(factor, record->total)), slope->layout.dtype);
    TD_TRY(td__done(sums));
    TD_TRY(td_tensor_copy(slope, td_select(sums, 0, 0)));
    return td_tensor_copy(shift, td_select(sums, 0, 1));
}

/* grad_x loses slope z + shift: computes these two [C]. Collective. */
static td_status gather_sums(const struct sync_norm *record, td_tensor *weight, td_tensor *rstd,
                             td_tensor *slope, td_tensor *shift)
{
    if (!td__on_host(slope))
        return gather_sums_there(record, weight, rstd, slope, shift);
    size_t channels = (size_t)record->shape[1];
    double *sums = malloc((2 * channels + 1) * sizeof *sums);
    if (!sums)
        return td__fail_nomem(call);
    for (size_t c = 0; c < channels; c++) {
        sums[c] = get(slope, (int64_t)c);
        sums[channels + c] = get(shift, (int64_t)c);
    }
    td_status status = td_get_world_size(record->group) > 1
                           ? td_group_all_reduce(sums, sums, 2 * channels, TD_F64, TD_SUM,
                                                 record->group, NULL)
                           : TD_OK;
    for (size_t c = 0; c < channels && !status; c++) {
        double factor = (weight ? get(weight, (int64_t)c) : 1) * get(rstd, (int64_t)c) /
                        record->total;
        set(slope, (int64_t)c, factor * sums[c]);
        set(shift, (int64_t)c, factor * sums[channels + c]);
    }
    free(sums);
    return status;
}

static td_status copy_of(td_tensor *x, td_tensor **copy)
{
    *copy = td__adopt(td__clone(x));
    return td__done(*copy);
}

/* Inputs x, weight, bias; saved x, weight, mean, var. */
static td_status sync_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    const struct sync_norm *record = td_node_data(node);
    td_tensor *in = td_node_saved(node, 0), *mean = td_node_saved(node, 2);
    td_tensor *var = td_node_saved(node, 3), *rstd, *slope, *shift;
    td_tensor *weight = record->has_weight ? td_node_saved(node, 1) : NULL;
    if (!in || !mean || !var || (record->has_weight && !weight))
        return td__done(NULL);
    const td_kernels *kernels = td__kernels_of(in);
    TD_TRY(copy_of(var, &rstd));
    TD_TRY(kernels->binary_scalar(TD_BINARY_ADD, rstd, rstd, record->eps, false));
    TD_TRY(kernels->unary(TD_UNARY_RSQRT, rstd, rstd));
    td_tensor *contiguous = td__scoped_contiguous(grad_y[0]);
    td_tensor *grad_x = td__adopt(td__empty_like(in)), *taken = td__adopt(td__empty_like(in));
    td_tensor *grad_weight = td__fresh(call, &record->shape[1], 1, in);
    td_tensor *grad_bias = td__fresh(call, &record->shape[1], 1, in);
    if (!contiguous || !grad_x || !taken || !grad_weight || !grad_bias)
        return TD_ERR_NOMEM;
    struct td_tensor x = td__view_as(in, record->shape, 3);
    struct td_tensor grad = td__view_as(contiguous, record->shape, 3);
    struct td_tensor into = td__view_as(grad_x, record->shape, 3);
    struct td_tensor take = td__view_as(taken, record->shape, 3);
    TD_TRY(kernels->batch_norm_grad(&into, grad_weight, grad_bias, &grad, &x, weight, mean, rstd,
                                    false));
    grads[1] = grad_weight;
    grads[2] = grad_bias;
    if (!td_node_needs(node, 0))
        return TD_OK;
    TD_TRY(copy_of(grad_weight, &slope));
    TD_TRY(copy_of(grad_bias, &shift));
    TD_TRY(gather_sums(record, weight, rstd, slope, shift));
    TD_TRY(
        kernels->batch_norm(&take, NULL, NULL, &x, slope, shift, mean, var, false, 0, record->eps));
    TD_TRY(kernels->add_scaled(grad_x, grad_x, taken, -1));
    grads[0] = grad_x;
    return TD_OK;
}

/* ---- The module ------------------------------------------------------------------------------------------- */

static int sync_describe(const td_module *self, char *text, size_t size)
{
    const struct sync_batch_norm *norm = self->data;
    char momentum[32] = "None";
    if (!norm->options.cumulative)
        snprintf(momentum, sizeof momentum, "%g", norm->options.momentum);
    return snprintf(text, size, "%lld, eps=%g, momentum=%s, affine=%s, track_running_stats=%s",
                    (long long)norm->features, norm->options.eps, momentum,
                    norm->options.no_affine ? "False" : "True",
                    norm->options.no_running_stats ? "False" : "True");
}

static td_status refuse_sending(const td_module *module, td_state *options)
{
    (void)module, (void)options;
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "a SyncBatchNorm module cannot be sent, since its process group is of this process; "
        "send one with td_batch_norm2d() and the same state");
}

static const td_module_ops sync_ops = {.name = "SyncBatchNorm",
                                       .data_size = sizeof(struct sync_batch_norm),
                                       .forward = sync_forward,
                                       .describe = sync_describe,
                                       .save_options = refuse_sending};

/* The same tensors under the same names. */
static td_status take_tensors(td_module *self, const td_module *from)
{
    for (int i = 0; i < from->parameters.count; i++) {
        const struct td__module_tensor *entry = &from->parameters.at[i];
        bool requires_grad = td_tensor_requires_grad(entry->tensor);
        TD_TRY(td_module_add_parameter(self, entry->name, entry->tensor));
        if (!requires_grad)
            TD_TRY(td_tensor_set_requires_grad(entry->tensor, false));
    }
    for (int i = 0; i < from->buffers.count; i++) {
        const struct td__module_tensor *entry = &from->buffers.at[i];
        TD_TRY(td_module_add_buffer(self, entry->name, entry->tensor, entry->saved));
    }
    return TD_OK;
}

/* The SyncBatchNorm for a batch norm; NULL, with the last error set, without memory. */
static td_module *converted(const td_module *from, const td_batch_norm_options *options,
                            int64_t features, td_group *group)
{
    td_module *self = td_module_create(&sync_ops);
    if (!self)
        return NULL;
    *(struct sync_batch_norm *)self->data = (struct sync_batch_norm){
        .features = features, .options = *options, .group = group};
    self->training = from->training;
    if (take_tensors(self, from)) {
        td_module_destroy(self);
        return NULL;
    }
    return td_module_finish(self);
}

static td_status convert_children(td_module *module, td_group *group)
{
    for (int i = 0; i < td_child_count(module); i++) {
        td_module *child = td_child(module, i);
        int64_t features;
        const td_batch_norm_options *options = td__batch_norm_options_of(child, &features);
        if (!options) {
            TD_TRY(convert_children(child, group));
            continue;
        }
        td_module *twin = converted(child, options, features, group);
        if (!twin)
            return TD_ERR_NOMEM;
        TD_TRY(td_module_replace_child(module, i, twin));
    }
    return TD_OK;
}

td_module *td_convert_sync_batch_norm(td_module *module, td_group *group)
{
    if (!module)
        return td__null(__func__);
    int64_t features;
    const td_batch_norm_options *options = td__batch_norm_options_of(module, &features);
    td_module *result = options ? converted(module, options, features, group)
                        : convert_children(module, group) ? NULL
                                                          : module;
    if (result != module)
        td_module_destroy(module);
    return result;
}

td_module *td_sync_batch_norm(int64_t features, const td_batch_norm_options *options,
                              td_group *group)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    return td_convert_sync_batch_norm(td_batch_norm1d_with(features, options), group);
}
