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
};

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

/** Destroys modules that a failed call has taken over. */
void td__modules_destroy(td_module *const *modules, int count);

/** Fails with "<call>: <what> is <value>; it must be …" if a size is below `least`. */
td_status td__check_size(const char *call, const char *what, int64_t value, int64_t least);

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
