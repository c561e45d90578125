/* An optimizer: parameters in groups, a kind, and the kind's buffers of each parameter. */
#ifndef TD_OPTIM_OPTIMIZER_H
#define TD_OPTIM_OPTIMIZER_H

#include "optim/update.h"
#include "tensor/tensor_internal.h"

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

/* The options of all kinds as numbers, so that a state can hold them; each kind uses some. */
struct td__optim_numbers {
    double lr, weight_decay; /* defaults of groups */
    double momentum, dampening, nesterov;
    double beta1, beta2, eps, amsgrad;
    double decoupled; /* decoupled weight decay (AdamW) */
    double maximize;
};

/* One parameter's data for a step, contiguous, f32 or (wide) f64. */
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

/** An optimizer with group 0; NULL on failure. `call` is for errors. */
td_optimizer *td__optimizer_create(const struct td__optimizer_kind *kind, const char *call,
                                   const struct td__optim_numbers *numbers,
                                   td_tensor *const *parameters, int count);

/** The same for the parameters of a module. */
td_optimizer *td__optimizer_of_module(const struct td__optimizer_kind *kind, const char *call,
                                      const struct td__optim_numbers *numbers, td_module *module);

/** Fails with "<call>: <what> is …" if a number is not in [low, high). */
td_status td__check_number(const char *call, const char *what, double value, double low,
                           double high);

/** The parameters of a module as a list, for free(); they are the module's. */
td_status td__parameter_list(const char *call, td_module *module, td_tensor ***list, int *count);

/* ---- Staged tensors: contiguous elements, as f32 or f64 -------------------------------- */

struct td__staged_tensor {
    td_tensor *tensor; /* not retained */
    td_tensor *copy;   /* NULL: the tensor's own memory is used */
    void *data;
};

/** TD_ERR_UNSUPPORTED if the host cannot access the memory. */
td_status td__staged_open(struct td__staged_tensor *staged, td_tensor *tensor, bool wide);
/** With `write`, copies the elements back to the tensor. */
td_status td__staged_close(struct td__staged_tensor *staged, bool write);

#endif
