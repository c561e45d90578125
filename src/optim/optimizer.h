/* An optimizer: parameters in groups, a kind, and the kind's buffers of each parameter. */
#ifndef TD_OPTIM_OPTIMIZER_H
#define TD_OPTIM_OPTIMIZER_H

#include "tensor/tensor_internal.h"

#include <tandem/optim.h>

enum {
    TD__BUFFERS_MOST = 3,
    TD__STEP_NUMBERS = 7 /* the most numbers of an update of kernels.h */
};

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

/* One parameter's step: contiguous tensors of one dtype on one device, each with a reference. */
struct td__parameter_step {
    struct td__parameter *parameter;
    td_tensor *tensor; /* the parameter itself, or a copy of one with other strides */
    td_tensor *grad;
    td_tensor *buffers[TD__BUFFERS_MOST];
    int64_t number; /* this step's, from 1 on */
    bool first;     /* the buffers are new, and full of zeros */
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
    /** The numbers of step number `step` of a parameter of `group`, in the order of kernels.h. */
    void (*write_numbers)(const td_optimizer *optimizer, int group, int64_t step,
                          double numbers[TD__STEP_NUMBERS]);
    /** Calls the device's kernel, once, for `count` parameters of one device, at least one: all or nothing. */
    td_status (*run)(const td_optimizer *optimizer, const struct td__parameter_step *steps,
                     int count);
};

/* What a wrapper (src/parallel) adds to an optimizer. Each member may be NULL. */
struct td__optimizer_hooks {
    const char *name;       /* of the call that has made the wrapper */
    bool steps_in_backward; /* gradients do not outlive the backward pass */
    /** The name of a parameter in its module, for errors; NULL if it has none. */
    const char *(*name_of)(const td_optimizer *optimizer, int index);
    /** The tensor whose gradient is that of parameter `index`, or of which this is a part. NULL: the parameter. */
    td_tensor *(*source)(const td_optimizer *optimizer, int index);
    /** Before a step: parameters get their gradients. */
    td_status (*begin_step)(td_optimizer *optimizer);
    /** When all is prepared, or that has failed, and nothing has changed: the status with which the step goes on. */
    td_status (*agree)(td_optimizer *optimizer, td_status status);
    /** After begin_step(), whatever has failed since. */
    td_status (*end_step)(td_optimizer *optimizer, td_status status);
    /** td_optimizer_add_group(). */
    td_status (*add_group)(td_optimizer *optimizer, td_tensor *const *parameters, int count,
                           const td_parameter_group *options);
    /** Before the optimizer is freed. */
    void (*destroy)(td_optimizer *optimizer);
};

struct td_optimizer {
    const struct td__optimizer_kind *kind;
    const struct td__optimizer_hooks *hooks; /* NULL: none */
    void *hook_data;
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

/** td_optimizer_add_group() without hooks. */
td_status td__optimizer_add_group(td_optimizer *optimizer, td_tensor *const *parameters, int count,
                                  const td_parameter_group *options);

/** The tensor whose gradient a step of parameter `index` uses, or a part of it. */
td_tensor *td__optimizer_source(const td_optimizer *optimizer, int index);

/** td_optimizer_step() of some parameters only. */
td_status td__optimizer_step_some(td_optimizer *optimizer, const int *indices, int count);

/** In a capture (td_graph_capture()), *numbers is where the kernel finds the numbers of step i of `steps`; else NULL.
 *  The first call is for i = 0, and makes each launch a step of all `count` (captured_step.c). */
td_status td__capture_numbers(const td_optimizer *optimizer, const struct td__parameter_step *steps,
                              int count, int i, const double **numbers);

/** Fails with "<call>: <what> is …" if a number is not in [low, high). */
td_status td__check_number(const char *call, const char *what, double value, double low,
                           double high);

/** The parameters of a module as a list, for free(); they are the module's. */
td_status td__parameter_list(const char *call, td_module *module, td_tensor ***list, int *count);

/* ---- Gradients by device (grads_by_device.c) ------------------------------------------------- */

/* Gradients of one device; the host's numbered devices are the host here. */
struct td__device_grads {
    td_device *device;
    td_tensor **list; /* in struct td__grads */
    int *numbers;     /* which of all gradients each is */
    int count;
    td_tensor *
        number; /* for the user of the struct: a result of the device, released at the end; or NULL */
};

struct td__grads {
    td_tensor **list;
    int *numbers;
    struct td__device_grads *devices; /* an accelerator comes first, where there is one */
    int device_count;
};

/** The gradients of parameters that have one. td__free_grads() in any case. */
td_status td__find_grads(const char *call, td_tensor *const *parameters, int count,
                         struct td__grads *grads);
void td__free_grads(struct td__grads *grads);

/** The device whose kernels compute with a tensor: numbered devices of the host are the host. */
td_device *td__memory_device(const td_tensor *tensor);

/** TD_ERR_STATE where the parameter is a shard, and its gradient is not that of the shard. */
td_status td__check_shard_grad(const td_tensor *parameter, const td_tensor *grad);

/** A tensor of one element as it is, or a copy of it on another device; one reference. */
td_tensor *td__number_to(const char *call, td_device *device, td_tensor *number);

#endif
