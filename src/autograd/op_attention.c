/* Scaled dot-product attention, softmax(q k^T scale + mask) v.
 *
 *     q [..., L, E], k [..., S, E], v [..., S, F], mask [..., L, S], y [..., L, F]
 *
 * One fused kernel computes [N, heads, L, E] without storing the weights [L, S]: backward recomputes
 * them from q, k, v, y and the log-sum-exp of each row. It is called once: the dimensions before the
 * heads become N, whose strides are free. Where there are several that no single stride can describe,
 * as with k broadcast along one of them, it is called for each index of the first ones. The result has
 * the strides order of q: if the heads are a transpose of [N, L, heads, E], so is y, and merging them
 * costs no copy.
 *
 * With dropout, and with a mask that requires grad, it is composed of matmul, softmax and dropout,
 * and the weights [..., L, S] are stored. */
#include "autograd/autocast.h"
#include "autograd/heads.h"
#include "autograd/op_kernel.h"
#include "base/fail.h"
#include "base/option_rules.h"

#include <math.h>
#include <string.h>

static const char call[] = "td_scaled_dot_product_attention";

/* The operands of a call; they belong to the scope. Backward gets a copy whose tensor pointers only
 * tell whether there was a mask, and replaces them by the saved tensors. */
struct attention {
    td_tensor *q, *k, *v, *mask; /* of one batch; the mask is additive, and may be NULL */
    int64_t batch[TD_MAX_DIMS];  /* the dimensions before the last two */
    int ndim;                    /* of all dimensions */
    int64_t rows, columns;       /* L, S */
    bool causal;
    double scale;
};

/* ---- Shapes ------------------------------------------------------------------------------------------ */

/* Broadcasts attention->batch and the batch dimensions of x. */
static td_status join_batch(struct attention *attention, const td_tensor *x)
{
    int offset = attention->ndim - x->layout.ndim;
    for (int d = 0; d < x->layout.ndim - 2; d++) {
        int64_t *size = &attention->batch[d + offset];
        if (*size == 1)
            *size = x->layout.shape[d];
        else if (x->layout.shape[d] != 1 && x->layout.shape[d] != *size)
            return TD_ERR_INVALID;
    }
    return TD_OK;
}

static td_status check(struct attention *attention, td_tensor *q, td_tensor *k, td_tensor *v)
{
    TD_TRY(td__check_float(call, q));
    TD_TRY(td__check_same(call, q, k));
    TD_TRY(td__check_same(call, q, v));
    TD_TRY(td__check_dims(call, "q", q, 2, TD_MAX_DIMS));
    TD_TRY(td__check_dims(call, "k", k, 2, TD_MAX_DIMS));
    TD_TRY(td__check_dims(call, "v", v, 2, TD_MAX_DIMS));
    const struct td__layout *of_q = &q->layout, *of_k = &k->layout, *of_v = &v->layout;
    int ndim = of_q->ndim > of_k->ndim ? of_q->ndim : of_k->ndim;
    attention->ndim = of_v->ndim > ndim ? of_v->ndim : ndim;
    for (int d = 0; d < TD_MAX_DIMS; d++)
        attention->batch[d] = 1;
    attention->rows = of_q->shape[of_q->ndim - 2];
    attention->columns = of_k->shape[of_k->ndim - 2];
    if (of_q->shape[of_q->ndim - 1] == of_k->shape[of_k->ndim - 1] &&
        attention->columns == of_v->shape[of_v->ndim - 2] && !join_batch(attention, q) &&
        !join_batch(attention, k) && !join_batch(attention, v))
        return TD_OK;
    char queries[160];
    strncpy(queries, td__shape_of(q), sizeof queries - 1);
    queries[sizeof queries - 1] = 0;
    return td_fail(TD_ERR_INVALID,
                   "%s: q has the shape %s, k %s, v %s; q and k must have the same last size, k "
                   "and v the same last but one, and all broadcastable batch dimensions",
                   call, queries, td__shape_of(k), td__shape_of(v));
}

/* x expanded to the batch. */
static td_tensor *with_batch(const struct attention *attention, td_tensor *x)
{
    int64_t shape[TD_MAX_DIMS];
    int ndim = attention->ndim, own = x->layout.ndim;
    memcpy(shape, attention->batch, sizeof shape);
    shape[ndim - 2] = x->layout.shape[own - 2];
    shape[ndim - 1] = x->layout.shape[own - 1];
    return td__adopt(td__expand(call, x, shape, ndim));
}

/* The kernel needs a last dimension of stride 1. */
static td_tensor *dense(td_tensor *x)
{
    int last = x->layout.ndim - 1;
    return x->layout.strides[last] == 1 || x->layout.shape[last] <= 1 ? x
                                                                      : td__scoped_contiguous(x);
}

/* A bool mask (true: attend) as an additive one: the logarithm of 1 or 0. */
static td_tensor *added_mask(td_tensor *mask, const td_tensor *q)
{
    if (mask->storage->device != q->storage->device) {
        td_fail(TD_ERR_INVALID, "%s: q is on %s, the mask on %s", call, q->storage->device->name,
                mask->storage->device->name);
        return NULL;
    }
    if (mask->layout.dtype == q->layout.dtype)
        return mask;
    if (mask->layout.dtype != TD_BOOL) {
        td_fail(TD_ERR_INVALID, "%s: q is %s, the mask %s; a mask is bool or has the dtype of q",
                call, td_dtype_name(q->layout.dtype), td_dtype_name(mask->layout.dtype));
        return NULL;
    }
    const td_kernels *kernels = td__kernels_of(q);
    td_tensor *added = td__adopt(td__empty_like_as(mask, q->layout.dtype));
    if (!added || kernels->copy(added, mask) || kernels->unary(TD_UNARY_LOG, added, added))
        return NULL;
    return added;
}

static td_status set_mask(struct attention *attention, td_tensor *mask, const td_tensor *q)
{
    if (!mask)
        return TD_OK;
    int64_t shape[TD_MAX_DIMS];
    int ndim = attention->ndim;
    memcpy(shape, attention->batch, sizeof shape);
    shape[ndim - 2] = attention->rows;
    shape[ndim - 1] = attention->columns;
    attention->mask = added_mask(mask, q);
    TD_TRY(td__done(attention->mask));
    td_tensor *expanded = td__adopt(td__expand(call, attention->mask, shape, ndim));
    if (!expanded)
        return td_fail(TD_ERR_INVALID, "%s: the mask has the shape %s; it must broadcast to %s",
                       call, td__shape_of(mask), td__shape_text(shape, ndim));
    attention->mask = expanded;
    return TD_OK;
}

/* A tensor of the shape [batch, x's last but one, `last`] with its strides in the order of those of
 * x. */
static td_tensor *laid_out_as(const struct attention *attention, const td_tensor *x, int64_t last)
{
    int64_t shape[TD_MAX_DIMS];
    int ndim = attention->ndim;
    const int64_t *strides = x->layout.strides;
    memcpy(shape, attention->batch, sizeof shape);
    shape[ndim - 2] = x->layout.shape[x->layout.ndim - 2];
    shape[ndim - 1] = last;
    bool heads_inside = ndim > 2 && x->layout.ndim == ndim && strides[ndim - 3] < strides[ndim - 2];
    if (!heads_inside)
        return td__fresh(call, shape, ndim, x);
    int64_t heads = shape[ndim - 3];
    shape[ndim - 3] = shape[ndim - 2];
    shape[ndim - 2] = heads;
    td_tensor *whole = td__fresh(call, shape, ndim, x);
    return whole ? td__adopt(td__transpose(whole, -3, -2)) : NULL;
}

/* ---- The kernel -------------------------------------------------------------------------------------- */

/* The dimensions from..ndim - 4 of x as one: its stride; false where no stride does. */
static bool merge(const td_tensor *x, int from, int64_t *stride)
{
    int64_t size = 1;
    *stride = 0;
    for (int d = x->layout.ndim - 4; d >= from; d--) {
        if (x->layout.shape[d] == 1)
            continue;
        if (size == 1)
            *stride = x->layout.strides[d];
        else if (x->layout.strides[d] != *stride * size)
            return false;
        size *= x->layout.shape[d];
    }
    return true;
}

/* How the dimensions before the heads are cut: the first `outer` ones are looped over, the others are
 * the kernel's N. */
struct parts {
    int outer;
    int64_t count; /* of calls */
};

/* The fewest calls for these tensors, of which some may be NULL. All have the batch's shape. */
static struct parts parts_of(const struct attention *attention, const td_tensor *const *x,
                             int count)
{
    struct parts parts = {.outer = attention->ndim > 4 ? attention->ndim - 4 : 0, .count = 1};
    for (bool all = true; parts.outer > 0; parts.outer--) {
        int64_t stride;
        for (int i = 0; i < count && all; i++)
            all = !x[i] || merge(x[i], parts.outer - 1, &stride);
        if (!all)
            break;
    }
    for (int d = 0; d < parts.outer; d++)
        parts.count *= attention->batch[d];
    return parts;
}

/* Part i of x, [N, H, L, E], for the kernel. A dimension that x does not have is 1. */
static struct td_tensor part_of(const td_tensor *x, struct parts parts, int64_t i)
{
    struct td_tensor part = {.owners = 1, .storage = x->storage, .offset = x->offset};
    const struct td__layout *layout = &x->layout;
    for (int d = parts.outer; d-- > 0; i /= layout->shape[d])
        part.offset += i % layout->shape[d] * layout->strides[d];
    part.layout = (struct td__layout){.dtype = layout->dtype, .ndim = 4, .numel = 1};
    int64_t *shape = part.layout.shape, *strides = part.layout.strides;
    shape[0] = 1;
    for (int d = parts.outer; d < layout->ndim - 3; d++)
        shape[0] *= layout->shape[d];
    merge(x, parts.outer, &strides[0]);
    for (int d = 1; d < 4; d++) {
        int own = layout->ndim - 4 + d;
        shape[d] = own >= 0 ? layout->shape[own] : 1;
        strides[d] = own >= 0 ? layout->strides[own] : 0;
    }
    for (int d = 0; d < 4; d++)
        part.layout.numel *= shape[d];
    return part;
}

/* Rows of part i in the list of all rows, [N, H, L] of `of`, the part of q. */
static struct td_tensor rows_of(const td_tensor *lse, const struct td_tensor *of, int64_t i)
{
    struct td_tensor rows = {.owners = 1, .storage = lse->storage, .offset = lse->offset};
    const int64_t *shape = of->layout.shape;
    rows.layout = (struct td__layout){.dtype = lse->layout.dtype,
                                      .ndim = 3,
                                      .numel = shape[0] * shape[1] * shape[2],
                                      .shape = {shape[0], shape[1], shape[2]}};
    td__layout_set_contiguous(&rows.layout);
    rows.offset += i * rows.layout.numel;
    return rows;
}

static td_status attend(const struct attention *attention, td_tensor *y, td_tensor *lse)
{
    const td_kernels *kernels = td__kernels_of(y);
    struct td_tensor mask, rows;
    const td_tensor *all[] = {attention->q, attention->k, attention->v, attention->mask, y};
    struct parts parts = parts_of(attention, all, 5);
    for (int64_t i = 0; i < parts.count; i++) {
        struct td_tensor q = part_of(attention->q, parts, i), k = part_of(attention->k, parts, i);
        struct td_tensor v = part_of(attention->v, parts, i), out = part_of(y, parts, i);
        if (attention->mask)
            mask = part_of(attention->mask, parts, i);
        if (lse)
            rows = rows_of(lse, &q, i);
        TD_TRY(kernels->attention(&out, lse ? &rows : NULL, &q, &k, &v,
                                  attention->mask ? &mask : NULL, attention->causal,
                                  attention->scale));
    }
    return TD_OK;
}

/* ---- Backward ---------------------------------------------------------------------------------------- */

enum { SAVED_Q, SAVED_K, SAVED_V, SAVED_Y, SAVED_LSE, SAVED_MASK, SAVED_COUNT };

static td_status differentiate(const struct attention *attention, const td_tensor *grad_y,
                               const td_tensor *y, const td_tensor *lse, td_tensor *const *grads)
{
    const td_kernels *kernels = td__kernels_of(y);
    struct td_tensor mask;
    const td_tensor *all[] = {attention->q, attention->k, attention->v, attention->mask, y,
                              grad_y,       grads[0],     grads[1],     grads[2]};
    struct parts parts = parts_of(attention, all, 9);
    for (int64_t i = 0; i < parts.count; i++) {
        struct td_tensor q = part_of(attention->q, parts, i), k = part_of(attention->k, parts, i);
        struct td_tensor v = part_of(attention->v, parts, i), out = part_of(y, parts, i);
        struct td_tensor grad = part_of(grad_y, parts, i), rows = rows_of(lse, &q, i);
        struct td_tensor grad_q = part_of(grads[0], parts, i);
        struct td_tensor grad_k = part_of(grads[1], parts, i);
        struct td_tensor grad_v = part_of(grads[2], parts, i);
        if (attention->mask)
            mask = part_of(attention->mask, parts, i);
        TD_TRY(kernels->attention_grad(&grad_q, &grad_k, &grad_v, &grad, &q, &k, &v, &out, &rows,
                                       attention->mask ? &mask : NULL, attention->causal,
                                       attention->scale));
    }
    return TD_OK;
}

/* Tensors for the gradients. Where q, k and v are parts of one tensor (td_split_heads()), so are these. */
static td_status make_grads(const struct attention *attention, td_tensor **grads)
{
    td_tensor *operands[] = {attention->q, attention->k, attention->v}, *whole = NULL;
    const int64_t *shape = attention->q->layout.shape;
    struct td__heads split = {.parts = 3};
    if (attention->ndim == 4) {
        split = (struct td__heads){shape[0], shape[2], 3, shape[1], shape[3]};
        if (td__heads_are_whole(operands, &split))
            whole = td__fresh(call, (int64_t[]){shape[0], shape[2], 3 * shape[1] * shape[3]}, 3,
                              attention->q);
    }
    for (int i = 0; i < 3; i++) {
        const struct td__layout *layout = &operands[i]->layout;
        grads[i] = whole ? td__adopt(td__heads_part(whole, &split, i))
                         : laid_out_as(attention, operands[i], layout->shape[layout->ndim - 1]);
        TD_TRY(td__done(grads[i]));
    }
    return TD_OK;
}

static td_status attention_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grads)
{
    struct attention attention = *(const struct attention *)td_node_data(node);
    td_tensor *saved[SAVED_COUNT];
    for (int i = 0; i < SAVED_COUNT; i++) {
        saved[i] = i < SAVED_MASK || attention.mask ? td_node_saved(node, i) : NULL;
        if (i < SAVED_MASK || attention.mask)
            TD_TRY(td__done(saved[i]));
    }
    attention.q = saved[SAVED_Q];
    attention.k = saved[SAVED_K];
    attention.v = saved[SAVED_V];
    attention.mask = saved[SAVED_MASK];
    td_tensor *grad = dense(grad_y[0]);
    if (!grad)
        return TD_ERR_NOMEM;
    TD_TRY(make_grads(&attention, grads));
    return differentiate(&attention, grad, saved[SAVED_Y], saved[SAVED_LSE], grads);
}

static const td_function attention_function = {.name = call, .backward = attention_backward};

/* ---- Forward ----------------------------------------------------------------------------------------- */

static td_tensor *fused(struct attention *attention, td_tensor *q, td_tensor *k, td_tensor *v)
{
    td_tensor *inputs[] = {q, k, v};
    bool records = td_would_record(inputs, 3);
    attention->q = with_batch(attention, q);
    attention->k = with_batch(attention, k);
    attention->v = with_batch(attention, v);
    if (!attention->q || !attention->k || !attention->v)
        return NULL;
    attention->q = dense(attention->q);
    attention->k = dense(attention->k);
    attention->v = dense(attention->v);
    if (!attention->q || !attention->k || !attention->v)
        return NULL;
    td_tensor *y = laid_out_as(attention, attention->q, v->layout.shape[v->layout.ndim - 1]),
              *lse = NULL;
    if (y && records) {
        int64_t count = attention->rows;
        for (int d = 0; d < attention->ndim - 2; d++)
            count *= attention->batch[d];
        td_dtype dtype = q->layout.dtype == TD_F64 ? TD_F64 : TD_F32;
        lse = td__adopt(td__empty(call, &count, 1, dtype, q->storage->device));
    }
    if (!y || (records && !lse) || attend(attention, y, lse))
        return NULL;
    return td_record(&attention_function, y,
                     &(td_node_spec){.inputs = {q, k, v},
                                     .input_count = 3,
                                     .saved = {attention->q, attention->k, attention->v, y, lse,
                                               attention->mask},
                                     .saved_count = SAVED_COUNT,
                                     .data = attention,
                                     .data_size = sizeof *attention});
}

/* The mask with -inf above the diagonal. */
static td_tensor *with_causal(const struct attention *attention, td_tensor *mask,
                              const td_tensor *q)
{
    const int64_t shape[] = {attention->rows, attention->columns};
    td_tensor *hidden = td_triu(td_full(shape, 2, -INFINITY, q->layout.dtype, q->storage->device),
                                1);
    return mask ? td_add(mask, hidden) : hidden;
}

/* Rows that are masked completely, bool [..., L, 1]; *masked is NULL if there are none. */
static td_status find_masked_rows(td_tensor *mask, td_tensor **masked)
{
    int64_t shape[TD_MAX_DIMS];
    int ndim = mask->layout.ndim;
    *masked = NULL;
    {
        TD_NO_GRAD;
        td_tensor *hidden = td_eq_scalar(mask, -INFINITY);
        if (!hidden)
            return TD_ERR_NOMEM;
        memcpy(shape, hidden->layout.shape, sizeof shape);
        shape[ndim - 1] = 1;
        td_tensor *all = td__fresh(call, shape, ndim, hidden);
        if (!all)
            return TD_ERR_NOMEM;
        TD_TRY(td__kernels_of(all)->reduce(TD_REDUCE_KIND_ALL, all, hidden, 1u << (ndim - 1)));
        if (!td__on_host(all) || td_item(td_any(all)) != 0) /* the host does not wait for it */
            *masked = all;
    }
    return TD_OK;
}

static td_tensor *composed(const struct attention *attention, td_tensor *q, td_tensor *k,
                           td_tensor *v, td_tensor *mask, double dropout)
{
    td_tensor *masked = NULL;
    td_tensor *scores = td_matmul(td_mul_scalar(q, attention->scale), td_transpose(k, -1, -2));
    td_tensor *added = attention->causal ? with_causal(attention, mask, q) : mask;
    if (added && (scores = td_add(scores, added)) && find_masked_rows(added, &masked))
        return NULL;
    if (attention->causal && !added)
        return NULL;
    if (masked)
        scores = td_masked_fill(scores, masked, 0);
    td_tensor *weights = td_f_softmax(scores, -1);
    if (masked)
        weights = td_masked_fill(weights, masked, 0);
    return td_matmul(td_f_dropout(weights, dropout, true), v);
}

static td_tensor *attention_of(td_tensor *q, td_tensor *k, td_tensor *v,
                               const td_attention_options *options)
{
    struct attention attention = {.causal = options->causal, .scale = options->scale};
    if (check(&attention, q, k, v) || set_mask(&attention, options->mask, q))
        return NULL;
    if (!(options->dropout >= 0 && options->dropout <= 1)) {
        td_fail(TD_ERR_INVALID, "%s: dropout is %g; it must be 0 to 1", call, options->dropout);
        return NULL;
    }
    attention.scale = td__option(attention.scale,
                                 1 / sqrt((double)q->layout.shape[q->layout.ndim - 1]));
    if (options->dropout > 0 || td__would_record(options->mask)) {
        td_tensor *mask = options->mask ? added_mask(options->mask, q) : NULL;
        return options->mask && !mask ? NULL
                                      : composed(&attention, q, k, v, mask, options->dropout);
    }
    return fused(&attention, q, k, v);
}

td_tensor *td_scaled_dot_product_attention(td_tensor *q, td_tensor *k, td_tensor *v,
                                           const td_attention_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_attention_options given = options ? *options : (td_attention_options){0};
    TD__AUTOCAST(TD__CAST_ATTENTION, &q, &k, &v, &given.mask);
    td_tensor *y = NULL;
    if (!q || !k || !v)
        return td__null(__func__);
    {
        TD_SCOPE;
        y = td_scope_return(attention_of(q, k, v, &given));
    }
    return y;
}
