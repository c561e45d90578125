/* Automatic mixed precision, as PyTorch's torch.amp: products run in f16 or bf16, what loses too much there runs in
 * f32, and parameters stay f32.
 *
 *     td_grad_scaler *scaler = td_grad_scaler_create(NULL);        for f16; bf16 needs none
 *     …
 *         td_optimizer_zero_grad(sgd);
 *         {
 *             TD_AUTOCAST("cpu", NULL);
 *             loss = td_cross_entropy(td_forward(net, x), target);
 *         }
 *         td_backward(td_grad_scaler_scale(scaler, loss));
 *         td_grad_scaler_step(scaler, sgd, NULL);
 *         td_grad_scaler_update(scaler, 0);
 *
 * docs/amp.md has the operators and the dtypes in which they run.
 *
 * Threads. Autocast belongs to the thread, as grad mode does; the replicas of td_data_parallel() inherit it. A scaler is
 * used by one thread at a time. */
#ifndef TANDEM_AMP_H
#define TANDEM_AMP_H

#include <tandem/state.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Autocast ----------------------------------------------------------------------------------- */

typedef struct td_autocast_options {
    td_dtype dtype; /* TD_F16 or TD_BF16; 0: TD_BF16 for "cpu", TD_F16 for other kinds */
    bool disabled;  /* turns autocast off, inside of a scope that has turned it on */
    bool no_cache;  /* casts a parameter at each use (see below) */
    void *reserved[4];
} td_autocast_options;

/**
 * Autocast on devices of a kind ("cpu", also for "cpu:1") to the end of the block; a declaration, like TD_SCOPE:
 *
 *     {
 *         TD_AUTOCAST("cpu", NULL);
 *         y = td_forward(net, x);
 *         {
 *             TD_AUTOCAST("cpu", &(td_autocast_options){.disabled = true});
 *             z = td_matmul(td_to_dtype(y, TD_F32), w);
 *         }
 *     }
 *
 * Operators on tensors of that kind cast their operands first, as the table in docs/amp.md says: to the scope's dtype, to
 * f32, or to the widest dtype among them. f64 and integers are not cast. Casts are recorded, so that a gradient has the
 * dtype of its tensor. Backward passes run without autocast, and td_checkpoint() runs its segment again as it ran first.
 *
 * A scope may be inside of another, also of the same kind; the inner one counts. A leaf of f32 that requires grad is cast
 * once, and the cast is kept to the end of the outermost scope, or until the leaf is changed in place. (A change by way
 * of td_tensor_data() is not noticed.) The memory of these casts is freed with that scope.
 */
#define TD_AUTOCAST(kind, ...) TD_AUTOCAST_NAMED(TD_UNIQUE(td_autocast_), kind, __VA_ARGS__)
#define TD_AUTOCAST_NAMED(name, kind, ...)                                                         \
    td_autocast name                                                                               \
        __attribute__((cleanup(td_autocast_end), unused)) = td_autocast_begin(kind, __VA_ARGS__)

/** State of a scope; its members are private, but for the status. */
typedef struct td_autocast {
    td_status
        status; /* TD_ERR_INVALID for an unknown kind or dtype: autocast is as it was before */
    const void *kind;
    td_dtype dtype;
    bool no_cache, open;
} td_autocast;

/** What TD_AUTOCAST calls at its beginning and at its end. `options` may be NULL. Scopes end in the reverse order; a
 *  second end is fine. */
TD_API td_autocast td_autocast_begin(const char *kind, const td_autocast_options *options);
TD_API void td_autocast_end(td_autocast *autocast);

/** The dtype to which products on devices of this kind are cast now; TD_F32: autocast is off. */
TD_API td_dtype td_autocast_dtype(const char *kind);

/* ---- Gradient scaling ----------------------------------------------------------------------------
 *
 * Small gradients are 0 in f16. A scaler multiplies the loss, and with it all gradients, by a scale, and divides the
 * gradients by it before the step. A step with a gradient that is infinite or NaN is skipped, and the scale reduced; after
 * many good steps it is increased. With td_ddp() all ranks have the same gradients, and so skip the same steps; where
 * parameters are shards (td_fsdp()), the ranks agree in td_grad_scaler_step(), or td_grad_scaler_update() if there was none,
 * which are collective then. */

typedef struct td_grad_scaler td_grad_scaler;
typedef struct td_optimizer td_optimizer; /* optim.h */

typedef struct td_grad_scaler_options {
    double init_scale;       /* 0: 65536 */
    double growth_factor;    /* above 1; 0: 2 */
    double backoff_factor;   /* above 0, below 1; 0: 0.5 */
    int64_t growth_interval; /* steps without infinite gradients before the scale grows; 0: 2000 */
    bool disabled;           /* scales nothing: td_grad_scaler_step() is td_optimizer_step() */
    void *reserved[4];
} td_grad_scaler_options;

/** NULL on failure: options out of range, or no memory. `options` may be NULL. */
TD_API td_grad_scaler *td_grad_scaler_create(const td_grad_scaler_options *options);
/** NULL is fine. */
TD_API void td_grad_scaler_destroy(td_grad_scaler *scaler);

/** A loss, or any result, times the scale; f32 for f16 and bf16. Recorded. `loss` itself, with one more reference, if the
 *  scaler is disabled. */
TD_API td_tensor *td_grad_scaler_scale(td_grad_scaler *scaler, td_tensor *loss);

/**
 * Divides the gradients of an optimizer's parameters by the scale, in place, and notes whether one of them is infinite or
 * NaN, or becomes so. Needed only to use the gradients before the step, for td_clip_grad_norm_() for instance. Does not
 * wait for an accelerator; td_grad_scaler_step() does.
 *
 * TD_ERR_STATE if the optimizer's gradients have been divided since the last td_grad_scaler_update().
 */
TD_API td_status td_grad_scaler_unscale(td_grad_scaler *scaler, td_optimizer *optimizer);

/**
 * Divides the gradients by the scale, unless td_grad_scaler_unscale() has done so, and makes a step of the optimizer if
 * all gradients are finite. *stepped, where not NULL, says whether it was made.
 *
 * One scaler may serve several optimizers, of different parameters. TD_ERR_STATE if the optimizer has been stepped
 * since the last td_grad_scaler_update(). Errors of td_optimizer_step() are passed on.
 */
TD_API td_status td_grad_scaler_step(td_grad_scaler *scaler, td_optimizer *optimizer,
                                     bool *stepped);

/**
 * Ends an iteration, after the steps of all optimizers. Multiplies the scale by backoff_factor if one of them met an
 * infinite gradient or a NaN, and by growth_factor after growth_interval iterations in a row without one, unless it would
 * become infinite. `scale`, if not 0, becomes the scale instead.
 *
 * TD_ERR_STATE without a `scale`, if there was no step and no td_grad_scaler_unscale() since the last call.
 */
TD_API td_status td_grad_scaler_update(td_grad_scaler *scaler, double scale);

/** The scale; 1 if the scaler is disabled, NaN for NULL. */
TD_API double td_grad_scaler_get_scale(const td_grad_scaler *scaler);

/** Its state: "scale", "growth_factor", "backoff_factor", "growth_interval" and "growth_tracker"; empty if it is
 *  disabled. Save it between td_grad_scaler_update() and the next iteration. */
TD_API td_state *td_grad_scaler_state(const td_grad_scaler *scaler);
/** TD_ERR_INVALID, and nothing changed, if an entry is missing or out of range. A scaler that is disabled ignores it. */
TD_API td_status td_grad_scaler_load_state(td_grad_scaler *scaler, const td_state *state);

#ifdef __cplusplus
}
#endif

#endif
