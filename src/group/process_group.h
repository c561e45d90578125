/* Calls on a group, and the backends that run them. struct td_group is in fault/group_state.h. */
#ifndef TD_GROUP_PROCESS_GROUP_H
#define TD_GROUP_PROCESS_GROUP_H

#include "fault/group_state.h"
#include "group/work.h"

/** Returns `group`, or the world if it is NULL. NULL with TD_ERR_STATE as the last error if there is none, if it belongs
 *  to the parent process of a fork(), or if this rank is not in it. The error text begins with `what`. */
td_group *td__group_enter(td_group *group, const char *what);

/** Between the two the group is not destroyed: for calls that wait outside of a collective, or that access the group
 *  after one. It must not be accessed after td__group_unuse(). */
static inline void td__group_use(td_group *group)
{
    atomic_fetch_add(&group->users, 1);
}

static inline void td__group_unuse(td_group *group)
{
    atomic_fetch_sub(&group->users, 1);
}

/** Runs a checked collective: blocking if `work` is NULL, else as a work. */
td_status td__group_run(td_group *group, struct td__operation *operation, td_work **work);

/** Starts a checked send or recv, and waits for it if `work` is NULL. The timeout is that of the call, or if that is 0,
 *  td__call_timeout(). */
td_status td__group_post(td_group *group, const td_call *call, td_work **work);

/** Checks a call and runs it, or starts it if `work` is not NULL. `group` is a result of td__group_enter(); `rank` is
 *  the root, source or destination, a rank of the world. Sets the rank in the group in the call, and the reduction of
 *  the operation. */
td_status td__group_call(td_group *group, struct td__operation *operation, int rank,
                         td_work **work);

/** Whether the input and the output of a collective overlap, unless they are in place: the same buffer on both sides,
 *  or this rank's own part of the side that has all parts. */
bool td__call_overlaps(const td_group *group, const td_call *call, size_t input_bytes,
                       size_t output_bytes);

/** The checks of a send or recv that need no buffer: of the other rank; of the tag, unless the library sets it. */
td_status td__check_message(const td_group *group, td_call *call, int other);
td_status td__check_tag(const td_call *call);

/** Runs the queued calls up to `work` in this thread. Returns at once if another thread runs one; that thread or the
 *  worker then completes `work` later. */
void td__group_help(td_work *work);

/** Whether `call` has uneven parts, which the backend does not support; td__call_padded() runs it by an even
 *  call of `slot`, with the parts padded to the longest one (padding.c). */
static inline bool td__needs_padding(const struct td__part *part, const td_call *call)
{
    return call->input_counts && call->kind != TD_OP_ALL_TO_ALL && !part->ops->has_uneven;
}
td_status td__call_padded(const struct td__part *part, const td_call *call, td_collective_fn slot);

/** Calls on memory of devices for a backend with `stage_devices`: a collective, which needs `slot`, a blocking message,
 *  for which the backend has run_message(), and another one. The component staging, above this one, defines them. */
td_status td__stage_collective(struct td__part *part, const td_call *call, td_collective_fn slot);
td_status td__stage_message(const struct td__part *part, const td_call *call);
td_status td__stage_post(const struct td__part *part, const td_call *call, td_work *work);

/** Makes the worker run the queued calls now. */
void td__group_hurry(td_work *work);

/** Waits for the queued calls and for the calls of other threads, and ends the worker. May be called again. */
void td__group_drain(td_group *group);

/** How long a call of this thread on `group` may take. */
int64_t td__call_timeout(const td_group *group);

/** td_set_call_timeout(), and returns what was set before. */
int64_t td__swap_call_timeout(int64_t timeout_ms);

/** A work of submit() of a collective is completed with `status`: returns the status of the work. */
td_status td__group_submitted(td_work *work, td_status status);

/* ---- Backends with submit() (submitted.c) ----------------------------------------------------------- */

/** The group gets one: prepares what follows. */
td_status td__submits_begin(td_group *group);

/** Records a collective that is about to be submitted, for the comparison with other ranks. */
void td__submit_note(td_group *group, struct td__operation *operation);

/** Before this rank leaves: TD_ERR_MISMATCH if the ranks have submitted different calls. */
td_status td__submits_verify(td_group *group, td__deadline deadline);

/** The backends are destroyed. */
void td__submits_end(td_group *group);

/* ---- The backends of a group (parts.c) ---------------------------------------------------------- */

struct td__backend_found;

/** TD_ERR_INVALID if a group cannot have these backends: a name, a list, or NULL. */
td_status td__backends_check(const char *chosen);

/** Whether host memory has the backend "tcp". */
bool td__backends_have_tcp(const char *chosen);

/** On a member: creates the backends that are chosen; `options` are theirs. On failure td__parts_free() frees them. */
td_status td__parts_create(td_group *group, const char *chosen, const char *options);

/** Destroys all backends; frees what is left of them. */
void td__parts_destroy(td_group *group);
void td__parts_free(td_group *group);

/** The backend for memory of a device, created if it is the first call that needs it, and the stream of the call. NULL,
 *  with the last error set, if there is none. */
struct td__part *td__part_prepare(td_group *group, td_call *call);

/** The backend of a kind for a group that has chosen none; may load a plug-in (default_backend.c). TD_ERR_MISMATCH where
 *  another rank has another one, with *other_rank, a rank of the root. */
td_status td__default_backend(const td_group *group, const char *kind,
                              struct td__backend_found *found, int *other_rank);

/** A stream of a backend on an open accelerator; NULL, with the last error set, if it cannot be created. */
td_stream *td__part_stream(struct td__part *part, td_device *device, enum td__part_stream which);

/** The backend of a call after td__part_prepare(). */
struct td__part *td__part_of_device(td_group *group, const td_device *device);
static inline struct td__part *td__part_of(td_group *group, const td_call *call)
{
    return call->device ? td__part_of_device(group, call->device) : &group->host;
}

/* ---- The registry (registry.c) ------------------------------------------------------------------- */

/** A registered backend, as a group uses it. */
struct td__backend_found {
    const td_backend_ops *ops;
    void *arg;
    const char *name; /* of a built-in one: what td_get_backend() returns */
    bool built_in;
};

/** A backend by its name, also one of a plug-in, which this loads; TD_ERR_INVALID if there is none. */
td_status td__backend_find(const char *name, struct td__backend_found *found);

/** The backend that was registered last and names the kind; false if there is none. */
bool td__backend_for_kind(const char *kind, struct td__backend_found *found);

/** Whether the backend takes memory of this kind of devices. */
bool td__backend_takes(const td_backend_ops *ops, const char *kind);

/** The names of all backends, with ", " between them. */
void td__backend_names(char *text, size_t room);

/** A backend other than `name` that has the slot of `kind`, the native one before others; or NULL. */
const char *td__backend_with(td_op_kind kind, const char *name);

/** The slot of a collective. */
td_collective_fn td__backend_slot(const td_backend_ops *ops, td_op_kind kind);

/** A registered backend. */
struct td__backend {
    struct td__backend *next;
    const td_backend_ops
        *ops; /* NULL: not registered any more; kept since groups point to the name */
    void *arg;
    const char *shown; /* of a built-in one: what td_get_backend() returns */
    char name[32];
};

/** The built-in backends, the default first. A component above this one defines it. */
extern struct td__backend td__builtin_backends[];

/** The reduction of a td_reduce_op on `dtype`, checked; TD_ERR_INVALID if there is none. */
td_status td__reduction_of(td_reduce_op op, td_dtype dtype, struct td__reduction *reduction);

/** The world, or NULL. */
td_group *td__world(void);

#endif
