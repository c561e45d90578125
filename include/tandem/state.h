/* States: named tensors in order, what modules, optimizers and schedules hand out to be saved, and
 * take back.
 *
 *     td_state *state = td_module_state(net);
 *     for (int i = 0; i < td_state_count(state); i++)
 *         printf("%s\n", td_state_name(state, i));
 *     td_state_destroy(state);
 *
 * Numbers, such as a count of steps, are tensors of no dimensions. A state retains its tensors; it
 * does not copy them: those of td_module_state() are the module's own memory, and change with it.
 *
 * Threads. A state may be read by several threads at the same time, and changed by one alone. */
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

/** Another state with copies of all tensors, which nobody else changes. NULL for NULL, and without
 *  memory. */
TD_API td_state *td_state_clone(const td_state *state);

/* ---- Putting in --------------------------------------------------------------------------------- */

/** Adds a tensor behind all others. The name is copied, the tensor retained. TD_ERR_INVALID where
 *  the name is empty or there already, and for a NULL tensor (the last error stays that of the
 *  expression that failed). */
TD_API td_status td_state_add(td_state *state, const char *name, td_tensor *tensor);

/** Adds a number, as a tensor of no dimensions: f64, and i64. */
TD_API td_status td_state_add_number(td_state *state, const char *name, double value);
TD_API td_status td_state_add_integer(td_state *state, const char *name, int64_t value);

/** Adds all tensors of `from`, with `prefix` in front of their names ("model."; NULL: ""). Where it
 *  fails, `state` is as it was. */
TD_API td_status td_state_add_all(td_state *state, const char *prefix, const td_state *from);

/* ---- Looking ------------------------------------------------------------------------------------ */

/** The number of tensors; 0 for NULL. */
TD_API int td_state_count(const td_state *state);

/** The name and the tensor at a place, in the order in which they were added; NULL behind the end.
 *  Both belong to the state. */
TD_API const char *td_state_name(const td_state *state, int index);
TD_API td_tensor *td_state_tensor(const td_state *state, int index);

/** The tensor of a name, which belongs to the state; NULL where there is none (no error). */
TD_API td_tensor *td_state_get(const td_state *state, const char *name);

/** The number of a name: that of a tensor with one element, of any dtype but a complex one.
 *  td_state_get_integer() refuses what is no whole number. TD_ERR_INVALID where there is none, and
 *  the message names it. */
TD_API td_status td_state_get_number(const td_state *state, const char *name, double *value);
TD_API td_status td_state_get_integer(const td_state *state, const char *name, int64_t *value);

/** What begins with `prefix`, without it, as a state of its own: the other way of
 *  td_state_add_all(). It may be empty. NULL for NULL, and without memory. */
TD_API td_state *td_state_part(const td_state *state, const char *prefix);

#ifdef __cplusplus
}
#endif

#endif
