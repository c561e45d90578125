/* Autocast: which operators cast their operands, to what, and the scopes that turn it on.
 *
 * A thread has a state (a dtype for each kind of device) and a flag, td__autocast_on, which is the only thing that
 * operators read where autocast is off. An operator that has cast its operands turns the flag off until it returns, so
 * that operators of which it is made do not cast again. */
#include "autograd/autocast.h"

#include "autograd/op.h"
#include "base/fail.h"
#include "base/option_rules.h"

#include <tandem/amp.h>

#include <stdlib.h>
#include <string.h>

/* Those of PyTorch. Where PyTorch promotes by itself, and operators here take one dtype only (TD__CAST_BINARY and what
 * follows it), they promote under autocast. PyTorch composes x^2 and b / x of operators that are listed. */
const struct td__cast_rule td__cast_rules[TD__CAST_COUNT] = {
    [TD__CAST_MATMUL] = {"td_matmul", TD__CAST_LOWER, TD__CAST_LOWER},
    [TD__CAST_BMM] = {"td_bmm", TD__CAST_LOWER, TD__CAST_LOWER},
    [TD__CAST_LINEAR] = {"td_f_linear", TD__CAST_LOWER, TD__CAST_LOWER},
    [TD__CAST_CONV2D] = {"td_f_conv2d", TD__CAST_LOWER, TD__CAST_LOWER},
    [TD__CAST_ATTENTION] = {"td_scaled_dot_product_attention", TD__CAST_LOWER, TD__CAST_LOWER},
    [TD__CAST_EXP] = {"td_exp", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_LN] = {"td_ln", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_LOG1P] = {"td_log1p", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_RSQRT] = {"td_rsqrt", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_RECIPROCAL] = {"td_reciprocal", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_RDIV_SCALAR] = {"td_rdiv_scalar", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_SQUARE] = {"td_square", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_POW] = {"td_pow", TD__CAST_PROMOTE, TD__CAST_F32},
    [TD__CAST_POW_SCALAR] = {"td_pow_scalar", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_SUM] = {"td_sum, td_sum_dims", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_PROD] = {"td_prod", TD__CAST_F32, TD__CAST_F32},
    [TD__CAST_NORM] = {"td_norm", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_SOFTMAX] = {"td_f_softmax", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_LOG_SOFTMAX] = {"td_f_log_softmax", TD__CAST_NONE, TD__CAST_F32},
    [TD__CAST_LAYER_NORM] = {"td_f_layer_norm", TD__CAST_KEEP, TD__CAST_F32},
    [TD__CAST_BATCH_NORM] = {"td_batch_norm, td_sync_batch_norm", TD__CAST_KEEP, TD__CAST_KEEP},
    [TD__CAST_NLL_LOSS] = {"td_nll_loss", TD__CAST_F32, TD__CAST_F32},
    [TD__CAST_CROSS_ENTROPY] = {"td_cross_entropy", TD__CAST_READ, TD__CAST_READ},
    [TD__CAST_MSE_LOSS] = {"td_mse_loss", TD__CAST_F32, TD__CAST_F32},
    [TD__CAST_L1_LOSS] = {"td_l1_loss", TD__CAST_F32, TD__CAST_F32},
    [TD__CAST_BCE_WITH_LOGITS] = {"td_bce_with_logits", TD__CAST_F32, TD__CAST_F32},
    [TD__CAST_BINARY] = {"td_add, td_sub, td_mul, td_div, td_add_scaled, td_maximum, td_minimum",
                         TD__CAST_PROMOTE, TD__CAST_PROMOTE},
    [TD__CAST_COMPARE] = {"td_eq, td_ne, td_lt, td_le, td_gt, td_ge", TD__CAST_PROMOTE,
                          TD__CAST_PROMOTE},
    [TD__CAST_WHERE] = {"td_where", TD__CAST_PROMOTE, TD__CAST_PROMOTE},
    [TD__CAST_JOIN] = {"td_cat, td_stack", TD__CAST_PROMOTE, TD__CAST_PROMOTE},
};

/* ---- The state of the thread ----------------------------------------------------------------------- */

_Thread_local bool td__autocast_on;
static _Thread_local struct td__autocast_state current;
static _Thread_local int depth; /* of scopes; the cache lives as long as the outermost one */

static bool is_on(const struct td__autocast_state *state)
{
    for (int i = 0; i < TD__AUTOCAST_KINDS && state->of[i].kind; i++)
        if (state->of[i].dtype != TD_F32)
            return true;
    return false;
}

static td_dtype dtype_of_kind(const struct td__device_kind *kind)
{
    for (int i = 0; i < TD__AUTOCAST_KINDS && current.of[i].kind; i++)
        if (current.of[i].kind == kind)
            return current.of[i].dtype;
    return TD_F32;
}

static td_status set_dtype(const struct td__device_kind *kind, td_dtype dtype)
{
    int i = 0;
    while (i < TD__AUTOCAST_KINDS && current.of[i].kind && current.of[i].kind != kind)
        i++;
    if (i == TD__AUTOCAST_KINDS)
        return td_fail(TD_ERR_UNSUPPORTED, "td_autocast_begin: at most %d kinds of devices at once",
                       TD__AUTOCAST_KINDS);
    current.of[i].kind = kind;
    current.of[i].dtype = dtype;
    td__autocast_on = is_on(&current);
    return TD_OK;
}

td_dtype td__autocast_dtype(const td_tensor *x)
{
    return td__autocast_on ? dtype_of_kind(x->storage->device->kind) : TD_F32;
}

static void leave_scope(void)
{
    if (--depth == 0)
        td__cast_cache_clear();
}

struct td__autocast_state td__autocast_current(void)
{
    return td__autocast_on ? current : (struct td__autocast_state){0};
}

struct td__autocast_state td__autocast_switch(const struct td__autocast_state *state)
{
    struct td__autocast_state before = td__autocast_current();
    current = state ? *state : (struct td__autocast_state){0};
    td__autocast_on = is_on(&current);
    depth++;
    return before;
}

void td__autocast_resume(const struct td__autocast_state *before)
{
    current = *before;
    td__autocast_on = is_on(&current);
    leave_scope();
}

/* ---- Scopes ---------------------------------------------------------------------------------------- */

/* The kind of a name; the only place that looks names up. */
static const struct td__device_kind *find_kind(const char *call, const char *name)
{
    const struct td__device_kind *kind = name ? td__find_kind(name) : NULL;
    if (!kind)
        td_fail(TD_ERR_INVALID, "%s: there is no kind of devices \"%.40s\"; \"cpu\" is one", call,
                name ? name : "NULL");
    return kind;
}

static bool is_cpu(const struct td__device_kind *kind)
{
    return !strcmp(kind->name, "cpu");
}

td_status td__autocast_begin(const struct td__device_kind *kind, td_dtype dtype, bool no_cache,
                             td_autocast *scope)
{
    *scope = (td_autocast){
        .kind = kind, .dtype = dtype_of_kind(kind), .no_cache = current.no_cache, .open = true};
    TD_TRY(set_dtype(kind, dtype));
    current.no_cache = no_cache;
    depth++;
    return TD_OK;
}

static td_status begin(const char *name, const td_autocast_options *options, td_autocast *scope)
{
    static const char call[] = "td_autocast_begin";
    static const td_autocast_options defaults;
    options = options ? options : &defaults;
    TD_TRY(td__check_reserved(call, options->reserved));
    const struct td__device_kind *kind = find_kind(call, name);
    if (!kind)
        return TD_ERR_INVALID;
    td_dtype dtype = options->dtype ? options->dtype : is_cpu(kind) ? TD_BF16 : TD_F16;
    if (dtype != TD_F16 && dtype != TD_BF16)
        return td_fail(TD_ERR_INVALID, "%s: the dtype is %s; it must be f16 or bf16", call,
                       td_dtype_name(dtype));
    return td__autocast_begin(kind, options->disabled ? TD_F32 : dtype, options->no_cache, scope);
}

td_autocast td_autocast_begin(const char *kind, const td_autocast_options *options)
{
    td_autocast scope = {0};
    td_status status = begin(kind, options, &scope);
    if (status)
        scope = (td_autocast){.status = status};
    return scope;
}

void td_autocast_end(td_autocast *autocast)
{
    if (!autocast || !autocast->open)
        return;
    autocast->open = false;
    set_dtype(autocast->kind, autocast->dtype);
    current.no_cache = autocast->no_cache;
    leave_scope();
}

td_dtype td_autocast_dtype(const char *kind)
{
    const struct td__device_kind *found = find_kind("td_autocast_dtype", kind);
    return found && td__autocast_on ? dtype_of_kind(found) : TD_F32;
}

/* ---- Casts ------------------------------------------------------------------------------------------ */

static bool is_half(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16;
}

static bool is_float(const td_tensor *x)
{
    td_dtype dtype = x->layout.dtype;
    return is_half(dtype) || dtype == TD_F32 || dtype == TD_F64;
}

/* What PyTorch computes with operands of two dtypes in. */
static td_dtype wider(td_dtype a, td_dtype b)
{
    if (a == b)
        return a;
    return a == TD_F64 || b == TD_F64 ? TD_F64 : TD_F32;
}

/* The widest floating-point dtype. As in PyTorch, tensors without dimensions count only if all are such. */
static bool widest(td_tensor **const *operands, int count, td_dtype *dtype)
{
    bool found = false, with_dims = false;
    for (int i = 0; i < count; i++) {
        const td_tensor *x = *operands[i];
        if (!x || !is_float(x) || (x->layout.ndim == 0 && with_dims))
            continue;
        bool first = !found || (x->layout.ndim > 0 && !with_dims);
        *dtype = first ? x->layout.dtype : wider(*dtype, x->layout.dtype);
        with_dims |= x->layout.ndim > 0;
        found = true;
    }
    return found;
}

/* A cast as a reference of its own; that of a parameter comes from the cache. */
static td_tensor *cast(td_tensor *x, td_dtype dtype, bool may_cache)
{
    td_tensor *y = NULL;
    if (may_cache && !current.no_cache && x->layout.dtype == TD_F32 && x->node &&
        td_tensor_is_leaf(x) && td_tensor_requires_grad(x))
        return td__cast_cached(x, dtype);
    {
        TD_SCOPE;
        y = td_tensor_retain(td_to_dtype(x, dtype));
    }
    return y;
}

static td_status cast_operand(struct td__cast_frame *frame, td_tensor **operand, td_dtype dtype,
                              bool may_cache)
{
    if ((*operand)->layout.dtype == dtype)
        return TD_OK;
    td_tensor *y = cast(*operand, dtype, may_cache);
    if (!y)
        return td__done(NULL);
    frame->casts[frame->count++] = *operand = y;
    return TD_OK;
}

/* From here on the operator computes with autocast off. */
static void enter(struct td__cast_frame *frame)
{
    *frame = (struct td__cast_frame){.entered = true, .narrow = TD_F32};
    td__autocast_on = false;
}

void td__cast_end(struct td__cast_frame *frame)
{
    for (int i = 0; i < frame->count; i++)
        td_tensor_release(frame->casts[i]);
    for (int i = 0; i < frame->list_count; i++)
        td_tensor_release(frame->list[i]);
    free(frame->list);
    td__autocast_on = true;
}

/* The operand that decides: the first one that is floating-point. */
static const td_tensor *first_float(td_tensor **const *operands, int count)
{
    for (int i = 0; i < count; i++)
        if (*operands[i] && is_float(*operands[i]))
            return *operands[i];
    return NULL;
}

static td_status cast_all(struct td__cast_frame *frame, enum td__cast_policy policy, td_dtype lower,
                          td_tensor **const *operands, int count)
{
    td_dtype to = policy == TD__CAST_LOWER ? lower : TD_F32;
    bool promotes = policy == TD__CAST_PROMOTE || policy == TD__CAST_KEEP;
    if (promotes && !widest(operands, count, &to))
        return TD_OK;
    for (int i = policy == TD__CAST_READ; i < count; i++) {
        const td_tensor *x = *operands[i];
        if (!x || !is_float(x) || (x->layout.dtype == TD_F64 && !promotes))
            continue;
        TD_TRY(cast_operand(frame, operands[i], to, policy == TD__CAST_LOWER));
    }
    return TD_OK;
}

td_status td__cast_enter(struct td__cast_frame *frame, enum td__cast_op op,
                         td_tensor **const *operands, int count)
{
    const td_tensor *first = first_float(operands, count);
    td_dtype lower = first ? td__autocast_dtype(first) : TD_F32;
    if (lower == TD_F32)
        return TD_OK;
    const struct td__cast_rule *rule = &td__cast_rules[op];
    enum td__cast_policy policy = is_cpu(first->storage->device->kind) ? rule->on_cpu
                                                                       : rule->on_others;
    td_dtype before = first->layout.dtype;
    if (policy == TD__CAST_NONE)
        return TD_OK;
    enter(frame);
    TD_TRY(cast_all(frame, policy, lower, operands, count));
    if (policy == TD__CAST_KEEP && is_half(before) && (*operands[0])->layout.dtype != before)
        frame->narrow = before;
    return TD_OK;
}

/* An operator that casts nothing must not come here again either: autocast is off for it, too. */
static void enter_anyway(struct td__cast_frame *frame)
{
    if (!frame->entered)
        enter(frame);
}

td_tensor *td__cast_call_1(td_tensor *(*function)(td_tensor *), enum td__cast_op op, td_tensor *x)
{
    struct td__cast_frame frame = {0};
    td_status status = td__cast_enter(&frame, op, (td_tensor * *const[]){&x}, 1);
    enter_anyway(&frame);
    td_tensor *y = status ? NULL : function(x);
    td__cast_end(&frame);
    return y;
}

td_tensor *td__cast_call_2(td_tensor *(*function)(td_tensor *, td_tensor *), enum td__cast_op op,
                           td_tensor *a, td_tensor *b)
{
    struct td__cast_frame frame = {0};
    td_status status = td__cast_enter(&frame, op, (td_tensor * *const[]){&a, &b}, 2);
    enter_anyway(&frame);
    td_tensor *y = status ? NULL : function(a, b);
    td__cast_end(&frame);
    return y;
}

td_status td__cast_enter_list(struct td__cast_frame *frame, enum td__cast_op op,
                              td_tensor *const **list, int count)
{
    (void)op; /* lists are joined, and promoted on all kinds */
    td_tensor *const *given = *list;
    td_dtype to = TD_F32;
    bool differ = false, found = false;
    for (int i = 0; given && i < count; i++) {
        if (!given[i] || !is_float(given[i]))
            continue;
        if (!found && td__autocast_dtype(given[i]) == TD_F32)
            return TD_OK;
        differ |= found && given[i]->layout.dtype != to;
        to = found ? wider(to, given[i]->layout.dtype) : given[i]->layout.dtype;
        found = true;
    }
    if (!differ)
        return TD_OK;
    td_tensor **casts = calloc((size_t)count, sizeof *casts);
    if (!casts)
        return td__fail_nomem("td_autocast");
    enter(frame);
    frame->list = casts;
    frame->list_count = count;
    for (int i = 0; i < count; i++) {
        bool casts_it = given[i] && is_float(given[i]) && given[i]->layout.dtype != to;
        casts[i] = casts_it ? cast(given[i], to, false) : td_tensor_retain(given[i]);
        if (given[i] && !casts[i])
            return td__done(NULL);
    }
    *list = casts;
    return TD_OK;
}

td_status td__cast_enter_in_place(struct td__cast_frame *frame, const td_tensor *x, td_tensor **b)
{
    if (!x || !*b || !is_float(x) || !is_float(*b) || td__autocast_dtype(x) == TD_F32)
        return TD_OK;
    enter(frame);
    return cast_operand(frame, b, x->layout.dtype, false);
}

td_tensor *td__cast_narrow(struct td__cast_frame *frame, td_tensor *y)
{
    return y ? td_to_dtype(y, frame->narrow) : NULL;
}
