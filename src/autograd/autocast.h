/* Autocast inside of operators (the public side is tandem/amp.h).
 *
 * A listed operator casts its operands with one line at its entry, and computes with autocast off from there on.
 * Operators of one or two tensors, and small ones, call themselves again with the casts; others replace their operands:
 *
 *     td_tensor *td_exp(td_tensor *x)
 *     {
 *         TD__AUTOCAST_1(td_exp, TD__CAST_EXP, x);
 *         …
 *
 *     td_tensor *td_f_linear(td_tensor *x, td_tensor *weight, td_tensor *bias)
 *     {
 *         TD__AUTOCAST(TD__CAST_LINEAR, &x, &weight, &bias);
 *         …
 *
 * Where autocast is off, that is a load of a thread-local variable and a branch. */
#ifndef TD_AUTOGRAD_AUTOCAST_H
#define TD_AUTOGRAD_AUTOCAST_H

#include "tensor/tensor_internal.h"

/* ---- The table ----------------------------------------------------------------------------------- */

/** What an operator does with its operands; f64 is cast by TD__CAST_PROMOTE only, and integers never. */
enum td__cast_policy {
    TD__CAST_NONE,    /* nothing */
    TD__CAST_LOWER,   /* to the dtype of the scope */
    TD__CAST_F32,     /* to f32 */
    TD__CAST_PROMOTE, /* to the widest floating-point dtype among them */
    TD__CAST_KEEP,    /* the same, and the result to the dtype of the first operand */
    TD__CAST_READ, /* to f32, but for the first: the operator reads halves as they are, and its result is f32 */
};

enum td__cast_op {
    TD__CAST_MATMUL,
    TD__CAST_BMM,
    TD__CAST_LINEAR,
    TD__CAST_CONV2D,
    TD__CAST_ATTENTION,
    TD__CAST_EXP,
    TD__CAST_LN,
    TD__CAST_LOG1P,
    TD__CAST_RSQRT,
    TD__CAST_RECIPROCAL,
    TD__CAST_RDIV_SCALAR,
    TD__CAST_SQUARE,
    TD__CAST_POW,
    TD__CAST_POW_SCALAR,
    TD__CAST_SUM,
    TD__CAST_PROD,
    TD__CAST_NORM,
    TD__CAST_SOFTMAX,
    TD__CAST_LOG_SOFTMAX,
    TD__CAST_LAYER_NORM,
    TD__CAST_BATCH_NORM,
    TD__CAST_NLL_LOSS,
    TD__CAST_CROSS_ENTROPY,
    TD__CAST_MSE_LOSS,
    TD__CAST_L1_LOSS,
    TD__CAST_BCE_WITH_LOGITS,
    TD__CAST_BINARY,
    TD__CAST_COMPARE,
    TD__CAST_WHERE,
    TD__CAST_JOIN,
    TD__CAST_COUNT,
};

/** A line of the table: the operators, and their policies on CPUs and on other kinds of devices. */
struct td__cast_rule {
    const char *operators;
    enum td__cast_policy on_cpu, on_others;
};

extern const struct td__cast_rule td__cast_rules[TD__CAST_COUNT];

/* ---- The state of a thread ------------------------------------------------------------------------- */

enum { TD__AUTOCAST_KINDS = 8 };

/** Which kinds of devices are cast, and to what. */
struct td__autocast_state {
    struct {
        const struct td__device_kind *kind; /* NULL: the rest is free */
        td_dtype dtype;                     /* TD_F32: off */
    } of[TD__AUTOCAST_KINDS];
    bool no_cache;
};

/** Whether an operator of this thread may have to cast. */
extern _Thread_local bool td__autocast_on;

/** The dtype to which the tensor's kind of device is cast now; TD_F32: autocast is off. */
td_dtype td__autocast_dtype(const td_tensor *x);

/** Sets autocast of a kind, to the end of a scope; for td_autocast_begin(). */
struct td_autocast;
td_status td__autocast_begin(const struct td__device_kind *kind, td_dtype dtype, bool no_cache,
                             struct td_autocast *scope);

/** The state of this thread; and `state` (NULL: all off) as the state of this thread, until td__autocast_resume() gets
 *  what this one has returned. For work that runs later, or on another thread. */
struct td__autocast_state td__autocast_current(void);
struct td__autocast_state td__autocast_switch(const struct td__autocast_state *state);
void td__autocast_resume(const struct td__autocast_state *before);

/* ---- The cache (autocast_cache.c) -------------------------------------------------------------------- */

/** The cast of a leaf that requires grad, with one reference: the one that was kept, or a new one. NULL on failure. */
td_tensor *td__cast_cached(td_tensor *source, td_dtype dtype);
void td__cast_cache_clear(void);

/* ---- The entry of an operator ----------------------------------------------------------------------- */

enum { TD__CAST_OPERANDS = 5 };

/** What an operator has cast, and its result if that must be cast, too. */
struct td__cast_frame {
    bool entered;
    td_dtype narrow; /* TD_F32: the result stays as it is */
    int count;
    td_tensor *casts[TD__CAST_OPERANDS]; /* owned */
    td_tensor **list;                    /* owned, with its tensors; NULL: none */
    int list_count;
};

/** Replaces operands by their casts, which the frame owns. NULL operands are skipped. */
td_status td__cast_enter(struct td__cast_frame *frame, enum td__cast_op op,
                         td_tensor **const *operands, int count);
/** The same for a list, which is replaced as a whole. */
td_status td__cast_enter_list(struct td__cast_frame *frame, enum td__cast_op op,
                              td_tensor *const **list, int count);
/** Casts the second operand of an in-place operator to the dtype of the first. */
td_status td__cast_enter_in_place(struct td__cast_frame *frame, const td_tensor *x, td_tensor **b);
void td__cast_end(struct td__cast_frame *frame);
td_tensor *td__cast_narrow(struct td__cast_frame *frame, td_tensor *y);

/** function(x) and function(a, b) with the operands cast, and autocast off. */
td_tensor *td__cast_call_1(td_tensor *(*function)(td_tensor *), enum td__cast_op op, td_tensor *x);
td_tensor *td__cast_call_2(td_tensor *(*function)(td_tensor *, td_tensor *), enum td__cast_op op,
                           td_tensor *a, td_tensor *b);

#define TD__AUTOCAST_1(function, op, x)                                                            \
    if (__builtin_expect(td__autocast_on, 0))                                                      \
    return td__cast_call_1(function, op, x)
#define TD__AUTOCAST_2(function, op, a, b)                                                         \
    if (__builtin_expect(td__autocast_on, 0))                                                      \
    return td__cast_call_2(function, op, a, b)

static inline void td__cast_leave(struct td__cast_frame *frame)
{
    if (__builtin_expect(frame->entered, 0))
        td__cast_end(frame);
}

#define TD__CAST_FRAME                                                                             \
    struct td__cast_frame td__frame __attribute__((cleanup(td__cast_leave)));                      \
    td__frame.entered = false;                                                                     \
    td__frame.narrow = TD_F32

/** Casts the operands, &a, &b, …; returns NULL from the operator on failure. */
#define TD__AUTOCAST(op, ...)                                                                      \
    TD__CAST_FRAME;                                                                                \
    if (__builtin_expect(td__autocast_on, 0)) {                                                    \
        td_tensor **const td__operands[] = {__VA_ARGS__};                                          \
        if (td__cast_enter(&td__frame, op, td__operands,                                           \
                           (int)(sizeof td__operands / sizeof td__operands[0])))                   \
            return NULL;                                                                           \
    }

#define TD__AUTOCAST_LIST(op, list, count)                                                         \
    TD__CAST_FRAME;                                                                                \
    if (__builtin_expect(td__autocast_on, 0) && td__cast_enter_list(&td__frame, op, list, count))  \
    return NULL

#define TD__AUTOCAST_IN_PLACE(x, b)                                                                \
    TD__CAST_FRAME;                                                                                \
    if (__builtin_expect(td__autocast_on, 0))                                                      \
    TD_TRY(td__cast_enter_in_place(&td__frame, x, b))

/** The result of an operator that keeps the dtype of its first operand (TD__CAST_KEEP). */
#define TD__AUTOCAST_RESULT(y)                                                                     \
    (__builtin_expect(td__frame.narrow != TD_F32, 0) ? td__cast_narrow(&td__frame, y) : (y))

#endif
