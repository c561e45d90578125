/* Calls on a group, and the backends that carry them out; what a group is made of: fault/group_state.h. */
#ifndef TD_GROUP_PROCESS_GROUP_H
#define TD_GROUP_PROCESS_GROUP_H

#include "fault/group_state.h"
#include "group/work.h"

/** The group that NULL stands for; NULL (and the last error set) where there is none, where a fork
 *  has inherited it, or where this rank is not in it. The error text begins with `what`. */
td_group *td__group_enter(td_group *group, const char *what);

/** Between the two the group is not destroyed: for calls that wait other than in a collective, or that
 *  touch the group after one. Nothing of it may be touched after the second. */
static inline void td__group_use(td_group *group)
{
    atomic_fetch_add(&group->users, 1);
}

static inline void td__group_unuse(td_group *group)
{
    atomic_fetch_sub(&group->users, 1);
}

/** Runs a checked collective: here and now, or as a work. */
td_status td__group_run(td_group *group, struct td__operation *operation, td_work **work);

/** Starts a checked send or recv, and waits for it where `work` is NULL. Its timeout is that of the call
 *  where it has one. */
td_status td__group_post(td_group *group, const td_call *call, td_work **work);

/** Checks a call and carries it out, or starts it where `work` is not NULL. `group` is one that td__group_enter() has
 *  returned, `rank` the root, source or destination, a rank of the world; the call gets the rank in the group, and the
 *  operation its reduction. */
td_status td__group_call(td_group *group, struct td__operation *operation, int rank,
                         td_work **work);

/** Whether the input and the output of a collective, of so many bytes, overlap other than in place: the same buffer
 *  on both sides, or this rank's own part of the side that has all parts. */
bool td__call_overlaps(const td_group *group, const td_call *call, size_t input_bytes,
                       size_t output_bytes);

/** The checks of it that need no buffer: the other rank of a message; its tag, unless it is the library's own. */
td_status td__check_message(const td_group *group, td_call *call, int other);
td_status td__check_tag(const td_call *call);

/** Carries out what is queued up to `work`, in this thread. Returns at once where another thread is at it;
 *  `work` will be complete later then. */
void td__group_help(td_work *work);

/** Whether `call` has uneven parts that the group's backend does not take; and carries it out by an even call
 *  of `slot`, with the parts padded to the longest one (padding.c). */
static inline bool td__needs_padding(const td_group *group, const td_call *call)
{
    return call->input_counts && call->kind != TD_OP_ALL_TO_ALL && !group->ops->has_uneven;
}
td_status td__call_padded(const td_group *group, const td_call *call, td_collective_fn slot);

/** Lets the worker begin with what is queued. */
void td__group_hurry(td_work *work);

/** Waits for what is queued and for the calls of other threads, and ends the worker. May be called
 *  again. */
void td__group_drain(td_group *group);

/** How long a call of this thread on `group` may take. */
int64_t td__call_timeout(const td_group *group);

/** td_set_call_timeout(), and returns what was set before. */
int64_t td__swap_call_timeout(int64_t timeout_ms);

/** A backend by its name; NULL (and the last error set) where there is none. */
const td_backend_ops *td__backend_find(const char *name, void **arg, const char **kept_name);

/** A backend other than `name` that has the slot of `kind`, the native one before others; or NULL. */
const char *td__backend_with(td_op_kind kind, const char *name);

/** The slot of a collective. */
td_collective_fn td__backend_slot(const td_backend_ops *ops, td_op_kind kind);

/** A backend in the list of those that are known. */
struct td__backend {
    struct td__backend *next;
    const td_backend_ops *ops; /* NULL: taken back; the name stays for groups that point to it */
    void *arg;
    const char *shown; /* of a built-in one: what td_get_backend() says */
    char name[32];
};

/** The list of the built-in ones, the default first. A component above this one defines it. */
extern struct td__backend td__builtin_backends[];

/** The reduction of a td_reduce_op on `dtype`, checked; TD_ERR_INVALID where there is no such one. */
td_status td__reduction_of(td_reduce_op op, td_dtype dtype, struct td__reduction *reduction);

/** The world, or NULL. */
td_group *td__world(void);

#endif
