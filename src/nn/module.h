/* A module: an ops table, plain data, and lists of named tensors and children. */
#ifndef TD_NN_MODULE_H
#define TD_NN_MODULE_H

#include "tensor/tensor_internal.h"

#include <tandem/nn.h>

/* A parameter or a buffer. */
struct td__module_tensor {
    char *name;
    td_tensor *tensor; /* retained */
    bool is_buffer;
    bool saved; /* part of the state */
};

struct td__module_tensors {
    struct td__module_tensor *at;
    int count, capacity;
};

struct td__child {
    char *name;
    td_module *module; /* owned */
};

struct td_module {
    const td_module_ops *ops;
    void *data;
    td_module *parent; /* NULL: no child */
    bool training;
    struct td__module_tensors parameters, buffers;
    struct td__child *children;
    int child_count, child_capacity;
    td_status failure; /* of the first call that failed to add a part */
    char *reason;      /* its text; NULL without memory */
    struct td__module_hook_list *hooks; /* NULL: none were added */
    struct td__module_attachment *attachments;
};

/* What other components keep with a module. */

/** Attaches `arg` to a module under `key`, an address that stands for its kind; free_fn(arg) is called before the module,
 *  its tensors or its children are destroyed. One for each key. */
td_status td__module_attach(td_module *module, const void *key, void *arg,
                            void (*free_fn)(void *arg));
/** What is attached under a key; or NULL. */
void *td__module_attached(const td_module *module, const void *key);
/** Removes it without a call of free_fn. */
void td__module_detach(td_module *module, const void *key);

/** Keeps the last error as the failure of `module`, and returns `status`. */
td_status td__module_set_failure(td_module *module, td_status status);

/** A saved f32 buffer, or a parameter, filled with one value; sizes as for
 * td_module_new_parameter(). */
td_tensor *td__module_new_buffer(td_module *module, const char *name, const int64_t *shape,
                                 int ndim, td_dtype dtype, double value);
td_tensor *td__module_filled_parameter(td_module *module, const char *name, const int64_t *shape,
                                       int ndim, double value);

/** Calls visit(name, entry, arg) for each parameter and buffer: a module's own parameters, its own
 *  buffers, then its children. The name is valid during the call. Stops at the first failure. */
typedef td_status (*td__visit_tensor)(const char *name, struct td__module_tensor *entry, void *arg);
td_status td__module_visit(td_module *module, td__visit_tensor visit, void *arg);

/** Whether a module is a linear layer with a bias, or a GELU by tanh: modules that run several at once ask. */
bool td__is_linear(const td_module *module);
bool td__is_gelu_tanh(const td_module *module);
bool td__is_relu(const td_module *module);
bool td__is_batch_norm(const td_module *module);

/** Destroys modules that a failed call has taken over. */
void td__modules_destroy(td_module *const *modules, int count);

/** Fails with "<call>: <what> is <value>; it must be …" if a size is below `least`. */
td_status td__check_size(const char *call, const char *what, int64_t value, int64_t least);

/* ---- Hooks (module_hooks.c) ------------------------------------------------------------------- */

/** Whether hooks run when the module does: then it must be run by td_forward(). */
bool td__module_is_hooked(const td_module *module);

/** Runs the module itself, without hooks. The results belong to the scope around the call. */
typedef td_status (*td__forward_run)(td_module *module, const td_tensor_list *inputs,
                                     td_tensor_list *results);

/** Runs a module with hooks, by `run`. */
td_status td__module_run_hooked(td_module *module, const td_tensor_list *inputs,
                                td_tensor_list *results, td__forward_run run);

/** Before a module is destroyed: nodes that are left run no hooks. */
void td__module_leave_hooks(td_module *module);

/* ---- Kinds ----------------------------------------------------------------------------------- */

/** The tables of the kinds of each file, up to a NULL. */
extern const td_module_ops *const td__activation_kinds[],
    *const td__attention_kinds[],
        *const td__conv_kinds[], *const td__linear_kinds[], *const td__norm_kinds[],
                                                                *const td__sequential_kinds[],
                                                                    *const td__transformer_kinds[];

/** The kind of a name; NULL, with the last error set, if there is none. */
const td_module_ops *td__module_kind(const char *name);

/** The options of a module by save_options, for td_state_destroy(). NULL, with the last error set, for a
 *  module that cannot be sent. */
td_state *td__module_save_options(const td_module *module);

/** Sets the data of a module that has all its parts, by load_options. */
td_status td__module_load_options(td_module *module, const td_state *options);

/** One number of the data of a kind. */
struct td__kind_option {
    const char *name;
    enum { TD__OPTION_BOOL, TD__OPTION_INT, TD__OPTION_INT64, TD__OPTION_DOUBLE } type;
    size_t offset;      /* in the data */
    double least, most; /* valid numbers; not for bools */
};

/** save_options and load_options of data with these options. Loading fails if one of them is missing, is not
 *  finite, not within its limits, or if there are others. */
td_status td__options_save(const td_module *module, td_state *options,
                           const struct td__kind_option *list, int count);
td_status td__options_load(td_module *module, const td_state *options,
                           const struct td__kind_option *list, int count);

/** A tensor that a kind has. */
struct td__kind_tensor {
    const char *name;
    const int64_t *shape;
    int ndim;
    bool is_count; /* i64; others are of a floating-point dtype */
};

/** TD_ERR_INVALID unless a module has exactly these parameters, or buffers. */
td_status td__check_parameters(const td_module *module, const struct td__kind_tensor *list,
                               int count);
td_status td__check_buffers(const td_module *module, const struct td__kind_tensor *list, int count);

/** TD_ERR_INVALID unless a module has children of these names, and no others; the last `optional` may be
 *  missing. */
td_status td__check_children(const td_module *module, const char *const *names, int count,
                             int optional);


/* ---- Helpers of layers ----------------------------------------------------------------------- */

/** False, with the last error set, if a module got more than `most` inputs. */
bool td__takes(const td_module *module, int count, int most);

/** Fails with "<call>: the probability is …" outside of 0 to 1. */
td_status td__check_probability(const char *call, double p);

/** The initial values of linear layers and convolutions: weight [out, in, …] and bias (NULL:
 *  none). */
td_status td__init_affine(td_tensor *weight, td_tensor *bias);

/** The options of a batch norm with defaults filled in, and its features; NULL for another
 * module. */
const td_batch_norm_options *td__batch_norm_options_of(const td_module *module, int64_t *features);

/** The inputs of an attention module with the one named "mask" last. Returns their number; 0, with
 *  the last error set, for more than `most`, and for a mask beside anything but x, or query, key
 *  and value. */
int td__mask_last(const td_module *module, const td_tensor_list *inputs, td_tensor **ordered,
                  int most);

#endif
