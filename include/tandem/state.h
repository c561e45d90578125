/* States (PyTorch's state_dict): named tensors in order, which modules, optimizers and schedules
 * save and load.
 *
 *     td_state *state = td_module_state(net);
 *     for (int i = 0; i < td_state_count(state); i++)
 *         printf("%s\n", td_state_name(state, i));
 *     td_state_destroy(state);
 *
 * Numbers, such as a count of steps, are tensors of no dimensions. A state retains its tensors; it
 * does not copy them: those of td_module_state() share the module's memory, and change with it.
 *
 * Threads. A state may be read by several threads at once, or changed by one. */
#ifndef TANDEM_STATE_H
#define TANDEM_STATE_H

#include <tandem/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_state td_state;

/** An empty state. NULL without memory. */
TD_API td_state *td_state_create(void);

/** Frees it, and releases its tensors. NULL is fine. */
TD_API void td_state_destroy(td_state *state);

/** A state with copies of all tensors. NULL for NULL, and without memory. */
TD_API td_state *td_state_clone(const td_state *state);

/* ---- Adding ------------------------------------------------------------------------------------- */

/** Appends a tensor. The name is copied, the tensor retained. TD_ERR_INVALID if the name is empty
 *  or present already, and for a NULL tensor (the last error stays that of the expression that
 *  failed). */
TD_API td_status td_state_add(td_state *state, const char *name, td_tensor *tensor);

/** Adds a number, as a tensor of no dimensions: f64, and i64. */
TD_API td_status td_state_add_number(td_state *state, const char *name, double value);
TD_API td_status td_state_add_integer(td_state *state, const char *name, int64_t value);

/** Adds all tensors of `from`, with `prefix` in front of their names ("model."; NULL: ""). On
 *  failure `state` is as it was. */
TD_API td_status td_state_add_all(td_state *state, const char *prefix, const td_state *from);

/* ---- Reading ------------------------------------------------------------------------------------ */

/** The number of tensors; 0 for NULL. */
TD_API int td_state_count(const td_state *state);

/** Name and tensor number `index`, in the order in which they were added; NULL outside of 0 …
 *  count - 1. Both belong to the state. */
TD_API const char *td_state_name(const td_state *state, int index);
TD_API td_tensor *td_state_tensor(const td_state *state, int index);

/** The tensor of a name, which belongs to the state; NULL if there is none (no error). */
TD_API td_tensor *td_state_get(const td_state *state, const char *name);

/** The value of a tensor with one element, of any dtype but complex ones. td_state_get_integer()
 *  rejects fractions. TD_ERR_INVALID if there is none, and the error names it. */
TD_API td_status td_state_get_number(const td_state *state, const char *name, double *value);
TD_API td_status td_state_get_integer(const td_state *state, const char *name, int64_t *value);

/** The entries whose names begin with `prefix`, without it: the inverse of td_state_add_all(). It
 *  may be empty. NULL for NULL, and without memory. */
TD_API td_state *td_state_part(const td_state *state, const char *prefix);

#ifdef __cplusplus
}
#endif

#endif
