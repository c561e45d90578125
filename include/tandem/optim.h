/* Optimizers, schedules of learning rates, and clipping of gradients.
 *
 *     td_optimizer *sgd = td_sgd(net, &(td_sgd_options){.lr = 0.01, .momentum = 0.5});
 *     td_schedule *cosine = td_cosine_schedule(sgd, 100, 0);
 *     …
 *         td_optimizer_zero_grad(sgd);
 *         td_backward(loss);
 *         td_optimizer_step(sgd);
 *     …
 *     td_schedule_step(cosine);                            after each epoch, or each step
 *
 * The formulas, and the order in which they are computed, are those of PyTorch 1.13. An optimizer
 * retains its parameters and updates them in place; it skips those without a gradient, and updates
 * those with one whether they require grad or not. Its state is on the devices of the parameters.
 *
 * Threads. An optimizer, and its schedules, are used by one thread at a time. */
#ifndef TANDEM_OPTIM_H
#define TANDEM_OPTIM_H

#include <tandem/nn.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_optimizer td_optimizer;

/* ---- Creating ------------------------------------------------------------------------------------
 *
 * Of all parameters of a module, or of a list of tensors (which may be empty: groups can be added).
 * NULL on failure: for a NULL module, options out of range, a parameter that is no floating-point
 * leaf, and duplicates. */

typedef struct td_sgd_options {
    double lr; /* required; TD_ZERO is possible */
    double momentum;
    double dampening;
    double weight_decay;
    bool nesterov; /* needs a momentum, and no dampening */
    bool maximize;
    void *reserved[4];
} td_sgd_options;

/** Stochastic gradient descent, over all parameters of a module or over those of a list. */
TD_API td_optimizer *td_sgd(td_module *module, const td_sgd_options *options);
TD_API td_optimizer *td_sgd_of(td_tensor *const *parameters, int count,
                               const td_sgd_options *options);

typedef struct td_adam_options {
    double lr;           /* 0: 1e-3 */
    double beta1, beta2; /* 0: 0.9 and 0.999 */
    double eps;          /* 0: 1e-8 */
    double weight_decay; /* td_adam(): added to the gradient; td_adamw(): 0 is 0.01 */
    bool amsgrad;
    bool maximize;
    void *reserved[4];
} td_adam_options;

/** Adam, and AdamW with decoupled weight decay; of a module or of a list. `options` may be NULL. */
TD_API td_optimizer *td_adam(td_module *module, const td_adam_options *options);
TD_API td_optimizer *td_adam_of(td_tensor *const *parameters, int count,
                                const td_adam_options *options);
TD_API td_optimizer *td_adamw(td_module *module, const td_adam_options *options);
TD_API td_optimizer *td_adamw_of(td_tensor *const *parameters, int count,
                                 const td_adam_options *options);

/** Frees it and its state. Destroy its schedules first. NULL is fine. */
TD_API void td_optimizer_destroy(td_optimizer *optimizer);

/* ---- Parameter groups ------------------------------------------------------------------------- */

typedef struct td_parameter_group {
    double lr;           /* 0: that of the optimizer's options */
    double weight_decay; /* 0: that of the optimizer's options */
    void *reserved[4];
} td_parameter_group;

/** Adds parameters, with a learning rate and a weight decay of their own. None may be in a group
 *  already. Group 0 has the parameters that the optimizer was created with. */
TD_API td_status td_optimizer_add_group(td_optimizer *optimizer, td_tensor *const *parameters,
                                        int count, const td_parameter_group *options);

/** The number of groups of parameters. */
TD_API int td_optimizer_group_count(const td_optimizer *optimizer);

/** The learning rate of group 0 (of a group); NaN if there is none. */
TD_API double td_optimizer_lr(const td_optimizer *optimizer);
TD_API double td_optimizer_group_lr(const td_optimizer *optimizer, int group);

/** Sets it for all groups, or for one. Not negative. */
TD_API td_status td_optimizer_set_lr(td_optimizer *optimizer, double lr);
TD_API td_status td_optimizer_set_group_lr(td_optimizer *optimizer, int group, double lr);

/* ---- Using it ----------------------------------------------------------------------------------- */

/** Updates all parameters that have a gradient, each on its device: with one kernel for all parameters of a device, and
 *  without waiting for it. On failure nothing has changed: no parameter, no state, no step count; but a device that fails
 *  later, when it gets there, is lost with what it has.
 *
 *  Where parameters are on several accelerators, or are not contiguous there, a step needs the memory of these parameters
 *  and their state once more while it lasts. */
TD_API td_status td_optimizer_step(td_optimizer *optimizer);

/** td_tensor_zero_grad() for all parameters. */
TD_API td_status td_optimizer_zero_grad(td_optimizer *optimizer);

/** The state_dict: "state.0.momentum_buffer" (of parameter 0), "group.0.lr" and so on. The tensors
 *  share the optimizer's memory; td_state_clone() copies them. */
TD_API td_state *td_optimizer_state(td_optimizer *optimizer);

/** Loads the state of an optimizer of the same kind over parameters of the same shapes in the same
 *  groups; its tensors may be on any device, and are copied to those of the parameters. For a parameter
 *  that is a shard they may be whole. TD_ERR_INVALID, and nothing changed, if it does not fit; the error names the entry. */
TD_API td_status td_optimizer_load_state(td_optimizer *optimizer, const td_state *state);

/* ---- Clipping gradients ------------------------------------------------------------------------- */

typedef struct td_clip_options {
    double norm_type; /* 0: 2; INFINITY: the greatest absolute value */
    bool
        error_if_nonfinite; /* TD_ERR_INVALID, and nothing changed, for a norm of NaN or infinity */
    void *reserved[4];
} td_clip_options;

/** Scales all gradients so that their norm, taken over all of them as one vector, is at most
 *  `max_norm`. *norm, if not NULL, gets the norm before. A norm of NaN or infinity makes the
 *  gradients useless, as in PyTorch, unless error_if_nonfinite is set.
 *
 *  Gradients may be on several devices. The host waits for an accelerator only with a `norm`, with error_if_nonfinite,
 *  where some gradients are the host's and others are not, and for shards. On failure some gradients may have been scaled.
 *
 *  Parameters may be shards (td_tensor_set_shard()) that a wrapper of this library has made: the norm is then that of the
 *  whole gradients, with the same bits for any number of ranks, and the call is collective: all ranks of the wrapper make
 *  it, with the same list, and have gradients of the same parameters, or none of one. TD_ERR_MISMATCH names a parameter of
 *  which one rank has a gradient and another has none; TD_ERR_STATE is for shards of the program's own. */
TD_API td_status td_clip_grad_norm_(td_module *module, double max_norm,
                                    const td_clip_options *options, double *norm);
TD_API td_status td_clip_grad_norm_of_(td_tensor *const *parameters, int count, double max_norm,
                                       const td_clip_options *options, double *norm);

/** Clamps each element of the gradients to -limit … limit. */
TD_API td_status td_clip_grad_value_(td_module *module, double limit);
TD_API td_status td_clip_grad_value_of_(td_tensor *const *parameters, int count, double limit);

/* ---- Schedules ----------------------------------------------------------------------------------
 *
 * A schedule sets the learning rates of all groups when it is created (its step 0), and with each
 * td_schedule_step(). As in PyTorch it computes them from the current rates: several schedules of
 * one optimizer compound, in the order in which they are stepped, and td_optimizer_set_lr() is
 * continued from. Only td_lambda_schedule() and the start of a part of a sequence use the initial
 * rate, which the group had when its first schedule was created. Schedules belong to the caller;
 * the optimizer must outlive them. NULL on failure. */

typedef struct td_schedule td_schedule;

/** Multiplies by gamma every `size` steps. */
TD_API td_schedule *td_step_schedule(td_optimizer *optimizer, int64_t size, double gamma);

/** Multiplies by gamma at each of these steps, which increase. */
TD_API td_schedule *td_multi_step_schedule(td_optimizer *optimizer, const int64_t *milestones,
                                           int count, double gamma);

/** Multiplies by gamma at each step. */
TD_API td_schedule *td_exponential_schedule(td_optimizer *optimizer, double gamma);

/** Cosine annealing to `minimum` at step `steps`, and back up after it. */
TD_API td_schedule *td_cosine_schedule(td_optimizer *optimizer, int64_t steps, double minimum);

/** A factor that changes linearly from `start` to `end` at step `steps`, and then stays. With
 *  start below 1 and end 1 it is a warm-up. */
TD_API td_schedule *td_linear_schedule(td_optimizer *optimizer, double start, double end,
                                       int64_t steps);

/** The initial rate times factor(step, arg), whatever other schedules and td_optimizer_set_lr()
 *  have set. */
typedef double (*td_schedule_factor)(int64_t step, void *arg);
TD_API td_schedule *td_lambda_schedule(td_optimizer *optimizer, td_schedule_factor factor,
                                       void *arg);

/** Schedules of one optimizer in sequence: schedules[i + 1] begins, at its step 0 and from the
 *  initial rate, after milestones[i] steps, which increase; there are `count` - 1 of them. Takes
 *  the schedules over in any case. */
TD_API td_schedule *td_sequential_schedule(td_optimizer *optimizer, td_schedule *const *schedules,
                                           int count, const int64_t *milestones);

/** A linear warm-up from `start` (a factor, such as 0.01) to 1 in `steps` steps, followed by
 *  `then`, which it takes over; NULL: the learning rate stays. */
TD_API td_schedule *td_warmup_schedule(td_optimizer *optimizer, double start, int64_t steps,
                                       td_schedule *then);

/** Makes one step: sets the learning rates of the groups. On failure, for a rate that is negative
 *  or not finite, nothing has changed. */
TD_API td_status td_schedule_step(td_schedule *schedule);

/** The number of steps made. */
TD_API int64_t td_schedule_steps(const td_schedule *schedule);

/** Frees it; the learning rates stay as they are. NULL is fine. */
TD_API void td_schedule_destroy(td_schedule *schedule);

/** Saves the number of steps and the learning rates; loads both. The initial rates are in the
 *  state of the optimizer. */
TD_API td_state *td_schedule_state(const td_schedule *schedule);
TD_API td_status td_schedule_load_state(td_schedule *schedule, const td_state *state);

#ifdef __cplusplus
}
#endif

#endif
