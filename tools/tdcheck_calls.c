/* Operators that take more than tensors and a number, as the table calls them: case->numbers are their other
 * arguments. */
#include "tdcheck_calls.h"

#include "autograd/op_mlp.h"

#include <tandem/amp.h>

#include <math.h>

#define N(i) (c->numbers[i])
#define I(i) ((int)c->numbers[i])
#define FACTOR(i) (c->magnitudes ? fabs(N(i)) : N(i))
#define CALL(name)                                                                                 \
    td_tensor *check_##name(td_tensor **x, struct check_case *c __attribute__((unused)))

/* ---- Copies and views: a copy of the view, so that kernels see its strides ------------------------------ */

CALL(to_dtype)
{
    static const td_dtype targets[] = {TD_F32, TD_F64, TD_F16, TD_BF16, TD_I64, TD_I32, TD_BOOL};
    td_tensor *y = td_to_dtype(x[0], targets[I(0)]);
    return y == x[0] ? td_clone(y) : y;
}
CALL(transpose)
{
    return td_clone(td_transpose(x[0], I(0), I(1)));
}
CALL(permute)
{
    int dims[TD_MAX_DIMS];
    for (int d = 0; d < c->number_count; d++)
        dims[d] = I(d);
    return td_clone(td_permute(x[0], dims, c->number_count));
}
CALL(narrow)
{
    return td_clone(td_narrow(x[0], I(0), I(1), I(2)));
}
CALL(select)
{
    return td_clone(td_select(x[0], I(0), I(1)));
}
CALL(slice)
{
    return td_clone(td_slice(x[0], I(0), I(1), I(2), I(3)));
}
CALL(reshape)
{
    int64_t shape[TD_MAX_DIMS];
    for (int d = 0; d < c->number_count; d++)
        shape[d] = (int64_t)N(d);
    return td_clone(td_reshape(x[0], shape, c->number_count));
}
CALL(flatten)
{
    return td_clone(td_f_flatten(x[0], I(0), I(1)));
}
CALL(expand)
{
    int64_t shape[TD_MAX_DIMS];
    for (int d = 0; d < c->number_count; d++)
        shape[d] = (int64_t)N(d);
    return td_clone(td_expand(x[0], shape, c->number_count));
}
CALL(squeeze)
{
    return td_clone(td_squeeze(td_unsqueeze(td_unsqueeze(x[0], I(0)), 0), 0));
}
CALL(split)
{
    td_tensor **parts, *y = NULL;
    int count;
    if (td_split(x[0], I(1), I(0), &parts, &count))
        return NULL;
    y = td_cat(parts, count, I(0));
    td_free_list(parts);
    return y;
}
CALL(split_heads)
{
    td_tensor *parts[8];
    int count = (int)I(0);
    return td_split_heads(x[0], count, I(1), parts) ? NULL : td_cat(parts, count, 0);
}
CALL(cat)
{
    return td_cat(x, c->count, I(0));
}
CALL(stack)
{
    return td_stack(x, c->count, I(0));
}

/* ---- Arithmetic and reductions ---------------------------------------------------------------------------- */

CALL(add_scaled)
{
    return td_add_scaled(x[0], x[1], FACTOR(0));
}
CALL(clamp)
{
    return td_clamp(x[0], N(0), N(1));
}
CALL(masked_fill)
{
    return td_masked_fill(x[0], x[1], N(0));
}
CALL(where)
{
    return td_where(x[0], x[1], x[2]);
}

/* numbers: keepdim, then the dimensions. */
static int dims_of(const struct check_case *c, int from, int dims[TD_MAX_DIMS])
{
    for (int d = from; d < c->number_count; d++)
        dims[d - from] = I(d);
    return c->number_count - from;
}
CALL(sum_dims)
{
    int dims[TD_MAX_DIMS], count = dims_of(c, 1, dims);
    return td_sum_dims(x[0], dims, count, N(0) != 0);
}
CALL(mean_dims)
{
    int dims[TD_MAX_DIMS], count = dims_of(c, 1, dims);
    return td_mean_dims(x[0], dims, count, N(0) != 0);
}
CALL(var_dims)
{
    int dims[TD_MAX_DIMS], count = dims_of(c, 1, dims);
    return td_var_dims(x[0], dims, count, I(0), true);
}
CALL(max_dim)
{
    return td_max_dim(x[0], I(0), N(1) != 0, &c->more[0]);
}
CALL(min_dim)
{
    return td_min_dim(x[0], I(0), N(1) != 0, &c->more[0]);
}
CALL(argmax)
{
    return td_argmax(x[0], I(0), N(1) != 0);
}
CALL(argmin)
{
    return td_argmin(x[0], I(0), N(1) != 0);
}

/* ---- Products, windows, norms ------------------------------------------------------------------------------ */

CALL(linear)
{
    return td_f_linear(x[0], x[1], x[2]);
}
/* Of f32 under autocast to bf16: the host rounds gradients of weights to bf16, a device need not. */
CALL(linear_autocast)
{
    td_autocast scope = td_autocast_begin(td_device_kind(td_tensor_device(x[0])),
                                          &(td_autocast_options){.dtype = TD_BF16});
    td_tensor *y = td_f_linear(x[0], x[1], x[2]);
    td_autocast_end(&scope);
    return y ? td_to_dtype(y, c->dtype) : NULL; /* f64 is not cast */
}
CALL(mlp)
{
    return td__f_mlp(x[0], x[1], x[2], x[3], x[4]);
}
CALL(conv2d)
{
    td_conv2d_options options = {
        .stride = {I(0), I(1)}, .padding = {I(2), I(3)}, .dilation = {I(4), I(5)}, .groups = I(6)};
    return td_f_conv2d(x[0], x[1], x[2], &options);
}
static td_pool2d_options pool_of(const struct check_case *c)
{
    return (td_pool2d_options){.stride = {I(2), I(3)},
                               .padding = {I(4), I(5)},
                               .dilation = {I(6), I(6)},
                               .exclude_padding = N(7) != 0};
}
CALL(max_pool2d)
{
    td_pool2d_options options = pool_of(c);
    return td_f_max_pool2d(x[0], I(0), I(1), &options);
}
CALL(avg_pool2d)
{
    td_pool2d_options options = pool_of(c);
    return td_f_avg_pool2d(x[0], I(0), I(1), &options);
}
CALL(adaptive_avg_pool2d)
{
    return td_f_adaptive_avg_pool2d(x[0], I(0), I(1));
}
CALL(adaptive_max_pool2d)
{
    return td_f_adaptive_max_pool2d(x[0], I(0), I(1));
}
CALL(softmax)
{
    return td_f_softmax(x[0], I(0));
}
CALL(log_softmax)
{
    return td_f_log_softmax(x[0], I(0));
}
CALL(batch_norm)
{
    bool training = N(0) != 0;
    /* The running statistics are results: copies of the operands, which stay as they are. */
    td_tensor *mean = x[1] ? td_clone(td_detach(x[1])) : NULL;
    td_tensor *var = x[2] ? td_clone(td_detach(x[2])) : NULL;
    td_tensor *y = td_batch_norm(x[0], mean, var, x[3], x[4], training, 0.1, 1e-5);
    c->more[0] = mean;
    c->more[1] = var;
    return y;
}
/* With running statistics; the numbers: whether it is training, and whether there is a residual. */
CALL(batch_norm_relu)
{
    td_tensor *mean = td_clone(td_detach(x[1])), *var = td_clone(td_detach(x[2]));
    td_tensor *y = td_batch_norm_relu(x[0], N(1) != 0 ? x[5] : NULL, mean, var, x[3], x[4],
                                      N(0) != 0, 0.1, 1e-5);
    c->more[0] = mean;
    c->more[1] = var;
    return y;
}
CALL(layer_norm)
{
    int ndim = I(0), all = td_tensor_ndim(x[0]);
    return td_f_layer_norm(x[0], td_tensor_shape(x[0]) + all - ndim, ndim, x[1], x[2], 1e-5);
}
/* The first number: how many dimensions. The second: 1 for autocast to bf16 (f32 and halves), 2 for a residual of bf16.
 * With a third one the result is y + sum, so that both have a gradient. */
CALL(add_layer_norm)
{
    int ndim = I(0), all = td_tensor_ndim(x[0]), mode = I(1);
    const char *device = td_device_kind(td_tensor_device(x[0]));
    td_tensor *residual = x[1] && mode == 2 && c->dtype == TD_F32 ? td_to_dtype(x[1], TD_BF16)
                                                                  : x[1];
    td_autocast scope = td_autocast_begin(
        device, &(td_autocast_options){.dtype = TD_BF16, .disabled = mode == 0});
    td_tensor *sum = NULL;
    td_tensor *y = td_add_layer_norm(x[0], residual, td_tensor_shape(x[0]) + all - ndim, ndim, x[2],
                                     x[3], 1e-5, &sum);
    td_autocast_end(&scope);
    c->more[0] = sum;
    if (!y || c->number_count < 3)
        return y;
    td_tensor *both = td_add(td_to_dtype(y, td_tensor_dtype(sum)), sum);
    return td_to_dtype(both, td_tensor_dtype(y));
}
/* f32 with bf16 or f16 under autocast. The numbers: which operation, and which operand is the half. */
CALL(mixed)
{
    static td_tensor *(*const operations[])(td_tensor *, td_tensor *) = {td_add, td_sub, td_mul};
    td_tensor *a = x[0], *b = x[1];
    td_dtype half = I(2) ? TD_F16 : TD_BF16;
    if (I(1))
        b = td_to_dtype(b, half);
    else
        a = td_to_dtype(a, half);
    td_autocast scope = td_autocast_begin(td_device_kind(td_tensor_device(a)), NULL);
    td_tensor *y = operations[I(0)](a, b);
    td_autocast_end(&scope);
    return y;
}
CALL(attention)
{
    td_attention_options options = {.mask = x[3], .causal = N(0) != 0, .scale = N(1)};
    return td_scaled_dot_product_attention(x[0], x[1], x[2], &options);
}

/* ---- Indices ------------------------------------------------------------------------------------------------ */

CALL(embedding)
{
    return td_f_embedding(x[0], x[1], I(1));
}
CALL(index_select)
{
    return td_index_select(x[0], I(1), x[1]);
}
CALL(take_along_dim)
{
    return td_take_along_dim(x[0], I(1), x[1]);
}
CALL(one_hot)
{
    return td_one_hot(x[0], I(0));
}
CALL(arange)
{
    return td_arange(N(0), N(1), N(2), td_tensor_dtype(x[0]), td_tensor_device(x[0]));
}
CALL(linspace)
{
    return td_linspace(N(0), N(1), I(2), td_tensor_dtype(x[0]), td_tensor_device(x[0]));
}
CALL(full)
{
    td_tensor *y = td_full(td_tensor_shape(x[0]), td_tensor_ndim(x[0]), N(0), td_tensor_dtype(x[0]),
                           td_tensor_device(x[0]));
    c->more[0] = td_zeros_like(x[0]);
    c->more[1] = td_ones(td_tensor_shape(x[0]), td_tensor_ndim(x[0]), td_tensor_dtype(x[0]),
                         td_tensor_device(x[0]));
    c->more[2] = td_empty_like(x[0]);
    td_tensor *ones = td_ones_like(x[0]); /* NULL where the device lacks it: the error stays */
    if (!ones || !c->more[2] || td_tensor_copy(c->more[2], ones))
        return NULL;
    return y;
}
CALL(tril)
{
    return td_tril(x[0], I(0));
}
CALL(triu)
{
    return td_triu(x[0], I(0));
}

/* ---- Losses: numbers after the first are the reduction, ignore_index (below 0: none), label smoothing ------------ */

static td_loss_options loss_of(const struct check_case *c, td_tensor *weight)
{
    return (td_loss_options){.reduction = (td_reduction)I(1),
                             .weight = weight,
                             .ignore = N(2) >= 0 && c->number_count > 2,
                             .ignore_index = I(2),
                             .label_smoothing = N(3)};
}
CALL(nll_loss)
{
    td_loss_options options = loss_of(c, x[2] ? td_detach(x[2]) : NULL);
    return td_nll_loss_with(x[0], x[1], &options);
}
CALL(cross_entropy)
{
    td_loss_options options = loss_of(c, x[2] ? td_detach(x[2]) : NULL);
    return td_cross_entropy_with(x[0], x[1], &options);
}
/* Logits of 16 bits, a loss of f32. */
CALL(cross_entropy_autocast)
{
    TD_AUTOCAST(td_device_kind(td_tensor_device(x[0])),
                &(td_autocast_options){.dtype = td_tensor_dtype(x[0])});
    return check_cross_entropy(x, c);
}
/* All rows but the first, as a view, which is aligned otherwise; how much that changes their losses: not at all. */
CALL(cross_entropy_rows)
{
    td_loss_options options = {.reduction = TD_REDUCE_NONE};
    int64_t rows = td_tensor_size(x[0], 0) - 1;
    td_tensor *all = td_cross_entropy_with(x[0], x[1], &options);
    td_tensor *part = td_cross_entropy_with(td_narrow(x[0], 0, 1, rows),
                                            td_narrow(x[1], 0, 1, rows), &options);
    if (!all || !part)
        return NULL;
    c->more[0] = td_detach(td_sub(part, td_narrow(all, 0, 1, rows)));
    return part;
}
CALL(mse_loss)
{
    td_loss_options options = loss_of(c, NULL);
    return td_mse_loss_with(x[0], td_detach(x[1]), &options);
}
CALL(l1_loss)
{
    td_loss_options options = loss_of(c, NULL);
    return td_l1_loss_with(x[0], td_detach(x[1]), &options);
}
CALL(bce_with_logits)
{
    td_loss_options options = loss_of(c, NULL);
    return td_bce_with_logits_with(x[0], td_detach(x[1]), &options);
}

/* ---- In place, with other arguments ---------------------------------------------------------------------------- */

static td_tensor *changed(td_tensor **x, const struct check_case *c)
{
    return c->with_grad ? td_clone(x[0]) : x[0];
}
CALL(add_scaled_)
{
    td_tensor *y = changed(x, c);
    return td_add_scaled_(y, x[1], FACTOR(0)) ? NULL : y;
}
CALL(clamp_)
{
    td_tensor *y = changed(x, c);
    return td_clamp_(y, N(0), N(1)) ? NULL : y;
}
CALL(tensor_copy)
{
    TD_NO_GRAD;
    return td_tensor_copy(x[0], x[1]) ? NULL : x[0];
}
/* Source and destination share memory: each row moves to the next one. */
CALL(copy_overlapping)
{
    TD_NO_GRAD;
    int64_t rows = td_tensor_size(x[0], 0) - 1;
    return td_tensor_copy(td_narrow(x[0], 0, 1, rows), td_narrow(x[0], 0, 0, rows)) ? NULL : x[0];
}
/* Through a view, with autograd: the base follows. */
CALL(view_in_place)
{
    td_tensor *y = td_clone(x[0]);
    td_tensor *part = td_slice(td_transpose(y, 0, 1), 0, 0, INT64_MAX, 2);
    return td_mul_scalar_(part, 3) || td_add_(part, td_clone(td_select(part, 0, 0))) ? NULL
                                                                                     : td_mul(y, y);
}
