/* What a module is made of: a table of its kind, plain data, and lists of named tensors and modules. */
#ifndef TD_NN_MODULE_H
#define TD_NN_MODULE_H

#include "tensor/tensor_internal.h"

#include <tandem/nn.h>

/* A parameter or a buffer. */
struct td__module_slot {
    char *name;
    td_tensor *tensor; /* retained */
    bool is_buffer;
    bool saved; /* a part of the state */
};

struct td__slots {
    struct td__module_slot *at;
    int count, capacity;
};

struct td__child {
    char *name;
    td_module *module; /* owned */
};

struct td_module {
    const td_module_ops *ops;
    void *data;
    td_module *parent; /* NULL where it belongs to nobody */
    bool training;
    struct td__slots parameters, buffers;
    struct td__child *children;
    int child_count, child_capacity;
    td_status failure; /* the first one of those that added something */
    char *reason;      /* its sentence; NULL without memory for it */
};

/** Remembers the last error as what went wrong with `module`, and returns `status`. */
td_status td__module_spoil(td_module *module, td_status status);

/** A saved buffer, or a parameter, of one value: sizes as for td_module_new_parameter(), f32. */
td_tensor *td__module_new_buffer(td_module *module, const char *name, const int64_t *shape,
                                 int ndim, td_dtype dtype, double value);
td_tensor *td__module_filled_parameter(td_module *module, const char *name, const int64_t *shape,
                                       int ndim, double value);

/** Calls visit(name, slot, arg) for each parameter and buffer inside: a module's own parameters, its
 *  own buffers, then its children. The name is valid during the call. The first failure ends it. */
typedef td_status (*td__visit_slot)(const char *name, struct td__module_slot *slot, void *arg);
td_status td__module_visit(td_module *module, td__visit_slot visit, void *arg);

/** Destroys modules that were handed over, where what should have taken them failed. */
void td__modules_destroy(td_module *const *modules, int count);

/** Fails with "<call>: <what> is <value>; it must be …" where a size is below `least`. */
td_status td__check_size(const char *call, const char *what, int64_t value, int64_t least);

#endif
