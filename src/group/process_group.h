/* What a group is made of, for the files of this room.
 *
 *     root      what a world and all groups of its ranks have in common: the endpoint, the store
 *     group     members, backend, and the order of its calls
 *
 * Locks: root->lock guards the list of groups and the count of names; group->lock guards the queue. None
 * is held while an operation runs, and never two of them at once. */
#ifndef TD_GROUP_PROCESS_GROUP_H
#define TD_GROUP_PROCESS_GROUP_H

#include "base/map.h"
#include "group/recorder.h"
#include "group/work.h"
#include "peer/endpoint.h"

#include <tandem/backend.h>
#include <tandem/rendezvous.h>

struct td__call_history;
struct td__given_up;
struct td__agreement;

/* What a component keeps with a root beyond the life of a group; the first member of its own struct. The
 * root's lock guards the list. */
struct td__attachment {
    struct td__attachment *next;
    const struct td__attachment_ops *ops; /* tells whose it is */
};

struct td__attachment_ops {
    /** This rank leaves: all groups but the first are destroyed, and others can still reach this rank. May be
     *  NULL. */
    void (*leave)(struct td__attachment *attachment, struct td__root *root);

    /** The first group is destroyed, too; nobody asks this rank any more. */
    void (*free)(struct td__attachment *attachment);
};

/* What was last seen to take long, and when to say so (again); the failure detector's. */
struct td__stall {
    int64_t limit_ms; /* 0: never */
    int64_t next_ms, age_ms;
    uint64_t key, sequence;
};

struct td__root {
    struct td__endpoint *endpoint;
    td_store *given; /* the user's store */
    td_store *store; /* a prefix of it */
    td_bytes *cards; /* those of all ranks, as they met */
    int rank, size;
    bool opening;        /* its first group is being made, by all ranks at once */
    unsigned generation; /* of forks: what a child inherited is of no use to it */
    char *name;          /* the first group's */
    char *backend;       /* the first group's, and its options */
    char *backend_options;
    int64_t timeout_ms;
    pthread_mutex_t lock;
    struct td__root *outgrown;        /* in the list of former worlds */
    td_group *first;                  /* NULL before it is made, and when it is to end */
    td_group *groups;                 /* all others */
    struct td__given_up *given_up;    /* groups that others gave up before they were made here */
    struct td__agreement *agreements; /* see shrink.c */
    struct td__stall stall;
    struct td__map names; /* how often a list of ranks was made a group */
    struct td__flight_log *flight;
    struct td__attachment *attachments;
    struct td__call_history *histories; /* of destroyed groups; see call_history.h */
};

struct td_group {
    struct td__root *root;
    td_group *next; /* in root->groups */
    bool first;     /* the root is its own */
    char *name;
    uint64_t key; /* the same on all ranks, and no other group's */
    int rank;     /* -1: not a member */
    int size;
    int *ranks; /* of the root, in order */
    td_backend_context context;
    const td_backend_ops *ops;
    const char *backend;
    void *self;
    _Atomic int64_t timeout_ms;

    atomic_uint pending; /* collectives that run or are queued */
    atomic_uint users;   /* other calls that are under way; see td__group_use() */
    atomic_bool closing; /* it is being destroyed: no call begins any more */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    td_work *queue, **queue_end;
    unsigned queued;
    unsigned
        helpers; /* threads that wait, and work through the queue meanwhile; the group stays for them */
    bool working, stopping;
    bool patient;               /* the worker is; see queue.c */
    td__deadline patient_until; /* and lets the queue be until then; 0: no longer */
    td__deadline alarm;         /* when the worker wakes by itself; 0: it is awake */
    pthread_t worker;
    uint64_t sequence;
    _Atomic uint64_t monitored;           /* barriers of that kind that were begun … */
    _Atomic uint64_t monitored_over;      /* … and have ended, on the rank that asks … */
    _Atomic uint64_t *monitored_arrivals; /* … and the last one that each rank came to in time */
    struct td__trace trace;
    struct td__call_history *history; /* the backend's, where it keeps one; see call_history.h */
    uint32_t shrunk;   /* how often */
    atomic_int broken; /* a td_status: the first failure that made the group useless; see abort.h */
    char *reason;      /* its message */
    atomic_bool given_up; /* on purpose: who did so has told the others */
};

/** The attachment with these ops, or NULL. The root's lock is held. */
struct td__attachment *td__root_attachment(struct td__root *root,
                                           const struct td__attachment_ops *ops);

/** Takes the attachment over; false where there is one with these ops already. */
bool td__root_attach(struct td__root *root, struct td__attachment *attachment);

/** The group that NULL stands for; NULL (and the last error set) where there is none, where a fork
 *  has inherited it, or where this rank is not in it. `what` begins the message. */
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
td_status td__group_run(td_group *group, td_call *call, td_work **work);

/** Starts a checked send or recv, and waits for it where `work` is NULL. Its timeout is that of the call
 *  where it has one. */
td_status td__group_post(td_group *group, const td_call *call, td_work **work);

/** Tags of the library's own messages, which TD_ANY_TAG does not match. */
enum { TD__TAG_HERE = -2, TD__TAG_VERDICT = -3, TD__TAG_OBJECT = -4 };

/** td_group_send() and td_group_recv(), also with such a tag. */
td_status td__group_send(td_group *group, const void *data, size_t count, td_dtype dtype, int dst,
                         int tag, td_work **work);
td_status td__group_recv(td_group *group, void *data, size_t count, td_dtype dtype, int src,
                         int tag, td_work **work);

/** The collectives of group.h with a detail (operation.h), for calls that are made of them. */
td_status td__group_broadcast(td_group *group, void *data, size_t count, td_dtype dtype, int root,
                              uint32_t detail, td_work **work);
td_status td__group_all_reduce(td_group *group, const void *input, void *output, size_t count,
                               td_dtype dtype, td_reduce_op op, uint32_t detail, td_work **work);
td_status td__group_all_gather(td_group *group, const void *input, void *output, size_t count,
                               td_dtype dtype, uint32_t detail, td_work **work);
td_status td__group_reduce_scatter(td_group *group, const void *input, void *output, size_t count,
                                   td_dtype dtype, td_reduce_op op, uint32_t detail,
                                   td_work **work);

/** Carries out what is queued up to `work`, in this thread. Returns at once where somebody else is at it;
 *  `work` will be complete later then. */
void td__group_help(td_work *work);

/** Has the worker begin with what is queued. */
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

/** The backends that are always there, the default first; ends with a name of NULL. A component above this
 *  one defines it. */
struct td__builtin_backend {
    const char *name;
    const char *shown; /* what td_get_backend() says */
    const td_backend_ops *ops;
};
extern const struct td__builtin_backend td__builtin_backends[];

/** The reduction of a td_reduce_op on `dtype`, checked; TD_ERR_INVALID where there is no such one. */
struct td__reduction;
td_status td__reduction_of(td_reduce_op op, td_dtype dtype, struct td__reduction *reduction);

/** The world, or NULL. */
td_group *td__world(void);

#endif
