/* What an optimizer is made of: parameters in groups, a kind, and what the kind keeps about each
 * parameter. */
#ifndef TD_OPTIM_OPTIMIZER_H
#define TD_OPTIM_OPTIMIZER_H

#include "optim/update.h"
#include "tensor/kernels.h"

#include <tandem/optim.h>

enum { TD__BUFFERS_MOST = 3 };

struct td__parameter {
    td_tensor *tensor; /* retained */
    int group;
    td_tensor *buffers[TD__BUFFERS_MOST]; /* contiguous, of the parameter's dtype; NULL before the
                                             first step */
    int64_t steps;
};

struct td__parameter_group {
    double lr, weight_decay;
    double initial_lr; /* what schedules start from; NaN until there is one */
    int count;         /* of parameters */
};

/* The numbers of all kinds; each uses its own. Numbers, so that a state can hold them. */
struct td__optim_numbers {
    double lr, weight_decay; /* what groups begin with */
    double momentum, dampening, nesterov;
    double beta1, beta2, eps, amsgrad;
    double decoupled; /* the weight decay is no part of the gradient */
    double maximize;
};

/* One parameter's data for a step, one after another, f32 or (wide) f64. */
struct td__update {
    void *parameter;
    const void *grad;
    void *buffers[TD__BUFFERS_MOST];
    int64_t count;
    bool wide;
};

/* A number of td__optim_numbers as it is named in a state. */
struct td__optim_number {
    const char *name;
    size_t offset;
};

struct td__optimizer_kind {
    const char *name;
    const char *const *buffer_names; /* in the state */
    /** How many buffers a parameter has: the first few of buffer_names. */
    int (*buffer_count)(const struct td__optim_numbers *numbers);
    bool counts_steps; /* a part of the state */
    const struct td__optim_number *numbers;
    int number_count;
    /** One step. `first`: the buffers are new, and full of zeros. */
    void (*update)(const struct td__update *update, const struct td__optim_numbers *numbers,
                   const struct td__parameter_group *group, int64_t steps, bool first);
};

struct td_optimizer {
    const struct td__optimizer_kind *kind;
    struct td__optim_numbers numbers;
    struct td__parameter *parameters;
    int count, capacity;
    struct td__parameter_group *groups;
    int group_count, group_capacity;
};

/** An optimizer with group 0; NULL where something does not fit. `call` is for messages. */
td_optimizer *td__optimizer_create(const struct td__optimizer_kind *kind, const char *call,
                                   const struct td__optim_numbers *numbers,
                                   td_tensor *const *parameters, int count);

/** The same for the parameters of a module. */
td_optimizer *td__optimizer_of_module(const struct td__optimizer_kind *kind, const char *call,
                                      const struct td__optim_numbers *numbers, td_module *module);

/** Fails with "<call>: <what> is …" where a number is not within [low, high). */
td_status td__check_number(const char *call, const char *what, double value, double low,
                           double high);

/** The parameters of a module as a list, for free(); they are the module's. */
td_status td__parameter_list(const char *call, td_module *module, td_tensor ***list, int *count);

/* ---- Lanes: a tensor's elements one after another, as f32 or f64 -------------------------------- */

struct td__lane {
    td_tensor *tensor; /* not retained */
    td_tensor *copy;   /* NULL where the tensor's own memory will do */
    void *data;
};

/** TD_ERR_UNSUPPORTED where the memory is not the host's. */
td_status td__lane_open(struct td__lane *lane, td_tensor *tensor, bool wide);
/** With `write`, brings what was written back to the tensor. */
td_status td__lane_close(struct td__lane *lane, bool write);

#endif
