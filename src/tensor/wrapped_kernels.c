/* The kernels of accelerators as operators call them: the kind's own kernel where there is one; where there is none, or
 * it does not know the dtype, the host's (fallback.h). After a kernel was enqueued, the memory of its operands is noted as
 * in use on the stream. */
#include "base/fail.h"
#include "tensor/cpu_convert.h"
#include "tensor/fallback.h"
#include "tensor/wrapped_kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const unary_names[] = {
    [TD_UNARY_NEG] = "neg",
    [TD_UNARY_ABS] = "abs",
    [TD_UNARY_SIGN] = "sign",
    [TD_UNARY_SQUARE] = "square",
    [TD_UNARY_EXP] = "exp",
    [TD_UNARY_LOG] = "log",
    [TD_UNARY_LOG1P] = "log1p",
    [TD_UNARY_SQRT] = "sqrt",
    [TD_UNARY_RSQRT] = "rsqrt",
    [TD_UNARY_RECIPROCAL] = "reciprocal",
    [TD_UNARY_SIN] = "sin",
    [TD_UNARY_COS] = "cos",
    [TD_UNARY_TANH] = "tanh",
    [TD_UNARY_SIGMOID] = "sigmoid",
    [TD_UNARY_RELU] = "relu",
    [TD_UNARY_GELU] = "gelu",
    [TD_UNARY_GELU_TANH] = "gelu by tanh",
    [TD_UNARY_SILU] = "silu",
    [TD_UNARY_FLOOR] = "floor",
    [TD_UNARY_CEIL] = "ceil",
    [TD_UNARY_ROUND] = "round",
    [TD_UNARY_ERF] = "erf",
    [TD_UNARY_NOT] = "not",
    [TD_UNARY_ISNAN] = "isnan",
};

static const char *const binary_names[] = {
    [TD_BINARY_ADD] = "add",         [TD_BINARY_SUB] = "sub", [TD_BINARY_MUL] = "mul",
    [TD_BINARY_DIV] = "div",         [TD_BINARY_POW] = "pow", [TD_BINARY_MAXIMUM] = "maximum",
    [TD_BINARY_MINIMUM] = "minimum", [TD_BINARY_EQ] = "eq",   [TD_BINARY_NE] = "ne",
    [TD_BINARY_LT] = "lt",           [TD_BINARY_LE] = "le",   [TD_BINARY_GT] = "gt",
    [TD_BINARY_GE] = "ge",           [TD_BINARY_AND] = "and", [TD_BINARY_OR] = "or",
    [TD_BINARY_XOR] = "xor",
};

static const char *const reduce_names[] = {
    [TD_REDUCE_KIND_SUM] = "sum",   [TD_REDUCE_KIND_MEAN] = "mean",
    [TD_REDUCE_KIND_PROD] = "prod", [TD_REDUCE_KIND_MAX] = "max",
    [TD_REDUCE_KIND_MIN] = "min",   [TD_REDUCE_KIND_ALL] = "all",
    [TD_REDUCE_KIND_ANY] = "any",   [TD_REDUCE_KIND_SQUARES] = "squares",
};

static const char *const pair_loss_names[] = {
    [TD_PAIR_LOSS_MSE] = "mse",
    [TD_PAIR_LOSS_L1] = "l1",
    [TD_PAIR_LOSS_BCE_LOGITS] = "bce with logits",
};

/* Runs a slot with the arguments that follow, of which `at` are the tensors, `count_` in number. */
#define RUN_LIST(slot_, detail_, written_, at_, count_, ...)                                       \
    struct td__operands operands = {.device = td__operands_device(at_, count_),                    \
                                    .slot = #slot_,                                                \
                                    .detail = detail_,                                             \
                                    .at = at_,                                                     \
                                    .written = written_,                                           \
                                    .count = count_};                                              \
    const td_kernels *own = &operands.device->kind->kernels;                                       \
    td_status status = own->slot_ ? own->slot_(__VA_ARGS__) : TD_ERR_UNSUPPORTED;                  \
    td__note_kernel(#slot_, status);                                                               \
    if (!status)                                                                                   \
        td__note_uses(&operands);                                                                  \
    if (status == TD_ERR_UNSUPPORTED) {                                                            \
        struct td__host_copy *copies;                                                              \
        status = td__fallback_begin(&operands, &copies);                                           \
        if (!status)                                                                               \
            status = td__fallback_end(&operands, copies, td__cpu_kernels.slot_(__VA_ARGS__));      \
    }

#define RUN(slot_, detail_, written_, at_, ...)                                                    \
    RUN_LIST(slot_, detail_, written_, at_, (int)(sizeof(at_) / sizeof((at_)[0])), __VA_ARGS__)    \
    return status

/* Numbers among the arguments, which the host's kernels check themselves: those of a device could do so too late, and fail
 * the device. */
static td_status check_number(const char *slot, td_dtype dtype, double value)
{
    _Alignas(16) char element[16];
    if (td__element_of(element, dtype, value))
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: %s%g is not in the range of %s", slot,
                   strcmp(slot, "fill") ? "the number " : "", value, td_dtype_name(dtype));
}

static td_status run_fill(td_tensor *out, double value)
{
    TD_TRY(check_number("fill", out->layout.dtype, value));
    RUN(fill, NULL, 1, OPERANDS(AT(out)), out, value);
}

static td_status run_copy(td_tensor *out, const td_tensor *x)
{
    RUN(copy, NULL, 1, OPERANDS(AT(out), AT(x)), out, x);
}

static td_status run_unary(td_unary op, td_tensor *out, const td_tensor *x)
{
    RUN(unary, unary_names[op], 1, OPERANDS(AT(out), AT(x)), op, out, x);
}

static td_status run_unary_grad(td_unary op, td_tensor *grad_x, const td_tensor *grad_y,
                                const td_tensor *saved)
{
    RUN(unary_grad, unary_names[op], 1, OPERANDS(AT(grad_x), AT(grad_y), AT(saved)), op, grad_x,
        grad_y, saved);
}

static td_status run_binary(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b)
{
    RUN(binary, binary_names[op], 1, OPERANDS(AT(out), AT(a), AT(b)), op, out, a, b);
}

static td_status run_binary_scalar(td_binary op, td_tensor *out, const td_tensor *a, double b,
                                   bool reversed)
{
    TD_TRY(check_number(binary_names[op], a->layout.dtype, b));
    RUN(binary_scalar, binary_names[op], 1, OPERANDS(AT(out), AT(a)), op, out, a, b, reversed);
}

static td_status run_add_scaled(td_tensor *out, const td_tensor *a, const td_tensor *b,
                                double alpha)
{
    td_dtype dtype = a->layout.dtype;
    if (dtype > TD_BF16 && dtype < TD_BOOL) /* integers */
        TD_TRY(check_number("add_scaled", TD_I64, alpha));
    RUN(add_scaled, NULL, 1, OPERANDS(AT(out), AT(a), AT(b)), out, a, b, alpha);
}

static td_status run_where(td_tensor *out, const td_tensor *condition, const td_tensor *a,
                           const td_tensor *b)
{
    RUN(where, NULL, 1, OPERANDS(AT(out), AT(condition), AT(a), AT(b)), out, condition, a, b);
}

static td_status run_clamp(td_tensor *out, const td_tensor *x, double low, double high)
{
    if (isnan(low) || isnan(high))
        return td_fail(TD_ERR_INVALID, "clamp: a bound is NaN");
    RUN(clamp, NULL, 1, OPERANDS(AT(out), AT(x)), out, x, low, high);
}

static td_status run_reduce(td_reduce_kind kind, td_tensor *out, const td_tensor *x, unsigned dims)
{
    RUN(reduce, reduce_names[kind], 1, OPERANDS(AT(out), AT(x)), kind, out, x, dims);
}

static td_status run_arg_reduce(bool least, td_tensor *out, const td_tensor *x, int dim)
{
    RUN(arg_reduce, least ? "min" : "max", 1, OPERANDS(AT(out), AT(x)), least, out, x, dim);
}

static td_status run_matmul(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha,
                            bool accumulate)
{
    RUN(matmul, NULL, 1, OPERANDS(AT(out), AT(a), AT(b)), out, a, b, alpha, accumulate);
}

static td_status run_linear(td_tensor *out, const td_tensor *x, const td_tensor *w,
                            const td_tensor *bias)
{
    RUN(linear, NULL, 1, OPERANDS(AT(out), AT(x), AT(w), AT(bias)), out, x, w, bias);
}

static td_status run_conv2d(td_tensor *out, const td_tensor *x, const td_tensor *w,
                            const td_tensor *bias, const td_window *window)
{
    RUN(conv2d, NULL, 1, OPERANDS(AT(out), AT(x), AT(w), AT(bias)), out, x, w, bias, window);
}

static td_status run_conv2d_grad_input(td_tensor *grad_x, const td_tensor *grad_y,
                                       const td_tensor *w, const td_window *window)
{
    RUN(conv2d_grad_input, NULL, 1, OPERANDS(AT(grad_x), AT(grad_y), AT(w)), grad_x, grad_y, w,
        window);
}

static td_status run_conv2d_grad_weight(td_tensor *grad_w, td_tensor *grad_bias,
                                        const td_tensor *grad_y, const td_tensor *x,
                                        const td_window *window, bool accumulate)
{
    RUN(conv2d_grad_weight, NULL, 2, OPERANDS(AT(grad_w), AT(grad_bias), AT(grad_y), AT(x)), grad_w,
        grad_bias, grad_y, x, window, accumulate);
}

static td_status run_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x,
                                const td_window *window)
{
    RUN(max_pool2d, NULL, 2, OPERANDS(AT(out), AT(indices), AT(x)), out, indices, x, window);
}

static td_status run_max_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                     const td_tensor *indices, const td_window *window)
{
    RUN(max_pool2d_grad, NULL, 1, OPERANDS(AT(grad_x), AT(grad_y), AT(indices)), grad_x, grad_y,
        indices, window);
}

static td_status run_avg_pool2d(td_tensor *out, const td_tensor *x, const td_window *window)
{
    RUN(avg_pool2d, NULL, 1, OPERANDS(AT(out), AT(x)), out, x, window);
}

static td_status run_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                     const td_window *window)
{
    RUN(avg_pool2d_grad, NULL, 1, OPERANDS(AT(grad_x), AT(grad_y)), grad_x, grad_y, window);
}

static td_status run_adaptive_avg_pool2d(td_tensor *out, const td_tensor *x)
{
    RUN(adaptive_avg_pool2d, NULL, 1, OPERANDS(AT(out), AT(x)), out, x);
}

static td_status run_adaptive_avg_pool2d_grad(td_tensor *grad_x, const td_tensor *grad_y)
{
    RUN(adaptive_avg_pool2d_grad, NULL, 1, OPERANDS(AT(grad_x), AT(grad_y)), grad_x, grad_y);
}

static td_status run_adaptive_max_pool2d(td_tensor *out, td_tensor *indices, const td_tensor *x)
{
    RUN(adaptive_max_pool2d, NULL, 2, OPERANDS(AT(out), AT(indices), AT(x)), out, indices, x);
}

static td_status run_batch_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd,
                                const td_tensor *x, const td_tensor *weight, const td_tensor *bias,
                                td_tensor *running_mean, td_tensor *running_var, bool training,
                                double momentum, double eps)
{
    RUN(batch_norm, NULL, 5,
        OPERANDS(AT(out), AT(mean), AT(rstd), AT(running_mean), AT(running_var), AT(x), AT(weight),
                 AT(bias)),
        out, mean, rstd, x, weight, bias, running_mean, running_var, training, momentum, eps);
}

static td_status run_batch_norm_grad(td_tensor *grad_x, td_tensor *grad_weight,
                                     td_tensor *grad_bias, const td_tensor *grad_y,
                                     const td_tensor *x, const td_tensor *weight,
                                     const td_tensor *mean, const td_tensor *rstd, bool training)
{
    RUN(batch_norm_grad, NULL, 3,
        OPERANDS(AT(grad_x), AT(grad_weight), AT(grad_bias), AT(grad_y), AT(x), AT(weight),
                 AT(mean), AT(rstd)),
        grad_x, grad_weight, grad_bias, grad_y, x, weight, mean, rstd, training);
}

static td_status run_layer_norm(td_tensor *out, td_tensor *mean, td_tensor *rstd,
                                const td_tensor *x, const td_tensor *weight, const td_tensor *bias,
                                double eps)
{
    RUN(layer_norm, NULL, 3, OPERANDS(AT(out), AT(mean), AT(rstd), AT(x), AT(weight), AT(bias)),
        out, mean, rstd, x, weight, bias, eps);
}

static td_status run_layer_norm_grad(td_tensor *grad_x, td_tensor *grad_weight,
                                     td_tensor *grad_bias, const td_tensor *grad_y,
                                     const td_tensor *x, const td_tensor *weight,
                                     const td_tensor *mean, const td_tensor *rstd)
{
    RUN(layer_norm_grad, NULL, 3,
        OPERANDS(AT(grad_x), AT(grad_weight), AT(grad_bias), AT(grad_y), AT(x), AT(weight),
                 AT(mean), AT(rstd)),
        grad_x, grad_weight, grad_bias, grad_y, x, weight, mean, rstd);
}

static td_status run_softmax(td_tensor *out, const td_tensor *x, bool logarithm)
{
    RUN(softmax, NULL, 1, OPERANDS(AT(out), AT(x)), out, x, logarithm);
}

static td_status run_softmax_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *y,
                                  bool logarithm)
{
    RUN(softmax_grad, NULL, 1, OPERANDS(AT(grad_x), AT(grad_y), AT(y)), grad_x, grad_y, y,
        logarithm);
}

static td_status run_attention(td_tensor *out, td_tensor *lse, const td_tensor *q,
                               const td_tensor *k, const td_tensor *v, const td_tensor *mask,
                               bool causal, double scale)
{
    RUN(attention, NULL, 2, OPERANDS(AT(out), AT(lse), AT(q), AT(k), AT(v), AT(mask)), out, lse, q,
        k, v, mask, causal, scale);
}

static td_status run_attention_grad(td_tensor *grad_q, td_tensor *grad_k, td_tensor *grad_v,
                                    const td_tensor *grad_y, const td_tensor *q, const td_tensor *k,
                                    const td_tensor *v, const td_tensor *y, const td_tensor *lse,
                                    const td_tensor *mask, bool causal, double scale)
{
    RUN(attention_grad, NULL, 3,
        OPERANDS(AT(grad_q), AT(grad_k), AT(grad_v), AT(grad_y), AT(q), AT(k), AT(v), AT(y),
                 AT(lse), AT(mask)),
        grad_q, grad_k, grad_v, grad_y, q, k, v, y, lse, mask, causal, scale);
}

static td_status run_index_select(td_tensor *out, const td_tensor *x, int dim,
                                  const td_tensor *index)
{
    RUN(index_select, NULL, 1, OPERANDS(AT(out), AT(x), AT(index)), out, x, dim, index);
}

static td_status run_index_add(td_tensor *out, int dim, const td_tensor *index,
                               const td_tensor *src)
{
    RUN(index_add, NULL, 1, OPERANDS(AT(out), AT(index), AT(src)), out, dim, index, src);
}

static td_status run_gather(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index)
{
    RUN(gather, NULL, 1, OPERANDS(AT(out), AT(x), AT(index)), out, x, dim, index);
}

static td_status run_scatter_add(td_tensor *out, int dim, const td_tensor *index,
                                 const td_tensor *src)
{
    RUN(scatter_add, NULL, 1, OPERANDS(AT(out), AT(index), AT(src)), out, dim, index, src);
}

static td_status run_nll_loss(td_tensor *out, td_tensor *factor, const td_tensor *x,
                              const td_tensor *target, const td_tensor *weight,
                              int64_t ignore_index)
{
    RUN(nll_loss, NULL, 2, OPERANDS(AT(out), AT(factor), AT(x), AT(target), AT(weight)), out,
        factor, x, target, weight, ignore_index);
}

static td_status run_nll_loss_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                   const td_tensor *factor, const td_tensor *target,
                                   const td_tensor *weight, int64_t ignore_index)
{
    RUN(nll_loss_grad, NULL, 1,
        OPERANDS(AT(grad_x), AT(grad_y), AT(factor), AT(target), AT(weight)), grad_x, grad_y,
        factor, target, weight, ignore_index);
}

static td_status run_cross_entropy_grad(td_tensor *grad_x, const td_tensor *grad_y,
                                        const td_tensor *factor, const td_tensor *x,
                                        const td_tensor *statistics, const td_tensor *target,
                                        const td_tensor *weight, int64_t ignore_index)
{
    RUN(cross_entropy_grad, NULL, 1,
        OPERANDS(AT(grad_x), AT(grad_y), AT(factor), AT(x), AT(statistics), AT(target), AT(weight)),
        grad_x, grad_y, factor, x, statistics, target, weight, ignore_index);
}

static td_status run_cross_entropy(td_tensor *out, td_tensor *statistics, td_tensor *factor,
                                   const td_tensor *x, const td_tensor *target,
                                   const td_tensor *weight, int64_t ignore_index)
{
    RUN(cross_entropy, NULL, 3,
        OPERANDS(AT(out), AT(statistics), AT(factor), AT(x), AT(target), AT(weight)), out,
        statistics, factor, x, target, weight, ignore_index);
}

static td_status run_pair_loss(td_pair_loss loss, td_tensor *out, const td_tensor *x,
                               const td_tensor *y, double scale)
{
    RUN(pair_loss, pair_loss_names[loss], 1, OPERANDS(AT(out), AT(x), AT(y)), loss, out, x, y,
        scale);
}

static td_status run_pair_loss_grad(td_pair_loss loss, td_tensor *grad_x, const td_tensor *grad_y,
                                    const td_tensor *x, const td_tensor *y, double scale)
{
    RUN(pair_loss_grad, pair_loss_names[loss], 1, OPERANDS(AT(grad_x), AT(grad_y), AT(x), AT(y)),
        loss, grad_x, grad_y, x, y, scale);
}

static td_status run_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                             int64_t block, td_generator *generator)
{
    RUN(dropout, NULL, 2, OPERANDS(AT(out), AT(keep), AT(x)), out, keep, x, p, block, generator);
}

static td_status run_dropout_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *keep,
                                  double p, int64_t block)
{
    RUN(dropout_grad, NULL, 1, OPERANDS(AT(grad_x), AT(grad_y), AT(keep)), grad_x, grad_y, keep, p,
        block);
}

static td_status run_uniform(td_tensor *out, double from, double to, td_generator *generator)
{
    RUN(uniform, NULL, 1, OPERANDS(AT(out)), out, from, to, generator);
}

static td_status run_normal(td_tensor *out, double mean, double std, td_generator *generator)
{
    RUN(normal, NULL, 1, OPERANDS(AT(out)), out, mean, std, generator);
}

static td_status run_bernoulli(td_tensor *out, double p, td_generator *generator)
{
    RUN(bernoulli, NULL, 1, OPERANDS(AT(out)), out, p, generator);
}

static td_status run_random_range(td_tensor *out, int64_t from, uint64_t range,
                                  td_generator *generator)
{
    RUN(random_range, NULL, 1, OPERANDS(AT(out)), out, from, range, generator);
}

/* ---- Lists of tensors: the operands are in copies of the lists -------------------------------------------- */

static td_status run_sgd(const td_sgd_update *updates, int count)
{
    if (count == 0)
        return TD_OK;
    td_sgd_update *list = malloc((size_t)count * sizeof *list);
    const td_tensor ***at = malloc(3 * (size_t)count * sizeof *at);
    if (!list || !at) {
        free(list);
        free(at);
        return td__fail_nomem("sgd");
    }
    memcpy(list, updates, (size_t)count * sizeof *list);
    for (int i = 0; i < count; i++) {
        at[2 * i] = AT(list[i].parameter);
        at[2 * i + 1] = AT(list[i].buffer);
        at[2 * count + i] = AT(list[i].grad);
    }
    RUN_LIST(sgd, NULL, 2 * count, at, 3 * count, list, count);
    free(at);
    free(list);
    return status;
}

static td_status run_adam(const td_adam_update *updates, int count)
{
    if (count == 0)
        return TD_OK;
    td_adam_update *list = malloc((size_t)count * sizeof *list);
    const td_tensor ***at = malloc(5 * (size_t)count * sizeof *at);
    if (!list || !at) {
        free(list);
        free(at);
        return td__fail_nomem("adam");
    }
    memcpy(list, updates, (size_t)count * sizeof *list);
    for (int i = 0; i < count; i++) {
        at[4 * i] = AT(list[i].parameter);
        at[4 * i + 1] = AT(list[i].mean);
        at[4 * i + 2] = AT(list[i].square);
        at[4 * i + 3] = AT(list[i].greatest);
        at[4 * count + i] = AT(list[i].grad);
    }
    RUN_LIST(adam, NULL, 4 * count, at, 5 * count, list, count);
    free(at);
    free(list);
    return status;
}

/* A copy of a list of tensors, and the addresses of its entries, from at[0] on, before that of `more`. Both for free(). */
static td_status copy_list(const char *call, td_tensor *const *x, int count, const td_tensor **more,
                           td_tensor ***list, const td_tensor ****at)
{
    *list = malloc((size_t)(count + 1) * sizeof **list);
    *at = malloc((size_t)(count + 1) * sizeof **at);
    if (!*list || !*at) {
        free(*list);
        free(*at);
        td__fail_nomem(call);
        return TD_ERR_NOMEM;
    }
    for (int i = 0; i < count; i++) {
        (*list)[i] = x[i];
        (*at)[i] = AT((*list)[i]);
    }
    (*at)[count] = more;
    return TD_OK;
}

/* The same, with `out`, which is written, as the first operand. */
static td_status copy_list_after(const char *call, td_tensor *const *x, int count,
                                 const td_tensor **out, td_tensor ***list, const td_tensor ****at)
{
    TD_TRY(copy_list(call, x, count, out, list, at));
    const td_tensor **first = (*at)[0];
    (*at)[0] = (*at)[count];
    (*at)[count] = first;
    return TD_OK;
}

static td_status run_norm(td_tensor *out, td_tensor *const *x, int count, double power)
{
    td_tensor **list;
    const td_tensor ***at;
    TD_TRY(copy_list_after("norm", x, count, AT(out), &list, &at));
    RUN_LIST(norm, NULL, 1, at, count + 1, out, list, count, power);
    free(at);
    free(list);
    return status;
}

static td_status run_power_sums(td_tensor *out, td_tensor *const *x, int count, double power)
{
    td_tensor **list;
    const td_tensor ***at;
    TD_TRY(copy_list_after("power_sums", x, count, AT(out), &list, &at));
    RUN_LIST(power_sums, NULL, 1, at, count + 1, out, list, count, power);
    free(at);
    free(list);
    return status;
}

static td_status run_scale(td_tensor *const *x, int count, const td_tensor *factor)
{
    td_tensor **list;
    const td_tensor ***at;
    TD_TRY(copy_list("scale", x, count, AT(factor), &list, &at));
    RUN_LIST(scale, NULL, count, at, count + 1, list, count, factor);
    free(at);
    free(list);
    return status;
}

static td_status run_unscale(td_tensor *const *x, int count, double factor, td_tensor *found)
{
    td_tensor **list;
    const td_tensor ***at;
    TD_TRY(copy_list("unscale", x, count, AT(found), &list, &at));
    RUN_LIST(unscale, NULL, count + 1, at, count + 1, list, count, factor, found);
    free(at);
    free(list);
    return status;
}

const td_kernels td__wrapped_kernels = {
    .version = TD_KERNELS_VERSION,
    .size = sizeof(td_kernels),
    .fill = run_fill,
    .copy = run_copy,
    .unary = run_unary,
    .unary_grad = run_unary_grad,
    .binary = run_binary,
    .binary_scalar = run_binary_scalar,
    .add_scaled = run_add_scaled,
    .where = run_where,
    .clamp = run_clamp,
    .reduce = run_reduce,
    .arg_reduce = run_arg_reduce,
    .matmul = run_matmul,
    .linear = run_linear,
    .conv2d = run_conv2d,
    .conv2d_grad_input = run_conv2d_grad_input,
    .conv2d_grad_weight = run_conv2d_grad_weight,
    .max_pool2d = run_max_pool2d,
    .max_pool2d_grad = run_max_pool2d_grad,
    .avg_pool2d = run_avg_pool2d,
    .avg_pool2d_grad = run_avg_pool2d_grad,
    .adaptive_avg_pool2d = run_adaptive_avg_pool2d,
    .adaptive_avg_pool2d_grad = run_adaptive_avg_pool2d_grad,
    .adaptive_max_pool2d = run_adaptive_max_pool2d,
    .batch_norm = run_batch_norm,
    .batch_norm_grad = run_batch_norm_grad,
    .layer_norm = run_layer_norm,
    .layer_norm_grad = run_layer_norm_grad,
    .softmax = run_softmax,
    .softmax_grad = run_softmax_grad,
    .attention = run_attention,
    .attention_grad = run_attention_grad,
    .index_select = run_index_select,
    .index_add = run_index_add,
    .gather = run_gather,
    .scatter_add = run_scatter_add,
    .nll_loss = run_nll_loss,
    .nll_loss_grad = run_nll_loss_grad,
    .cross_entropy_grad = run_cross_entropy_grad,
    .pair_loss = run_pair_loss,
    .pair_loss_grad = run_pair_loss_grad,
    .dropout = run_dropout,
    .dropout_grad = run_dropout_grad,
    .uniform = run_uniform,
    .normal = run_normal,
    .bernoulli = run_bernoulli,
    .random_range = run_random_range,
    .sgd = run_sgd,
    .adam = run_adam,
    .norm = run_norm,
    .power_sums = run_power_sums,
    .scale = run_scale,
    .unscale = run_unscale,
    .binary_mixed = td__wrapped_binary_mixed,
    .add_layer_norm = td__wrapped_add_layer_norm,
    .add_layer_norm_grad = td__wrapped_add_layer_norm_grad,
    .cross_entropy = run_cross_entropy,
    .batch_norm_relu = td__wrapped_batch_norm_relu,
    .batch_norm_relu_grad = td__wrapped_batch_norm_relu_grad,
    .linear_gelu = td__wrapped_linear_gelu,
    .linear_gelu_grad = td__wrapped_linear_gelu_grad,
    .matmul_f32 = td__wrapped_matmul_f32,
};
