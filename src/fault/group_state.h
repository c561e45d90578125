/* The structs of roots and groups, and the state that all components above share.
 *
 *     root      what a world and all groups of its ranks share: the endpoint, the store
 *     group     members, backend, the order of its calls, and its first failure
 *
 * Locks: root->lock guards the list of groups and the count of names; group->lock guards the queue. A thread
 * holds at most one of them, and none while an operation runs. */
#ifndef TD_FAULT_GROUP_STATE_H
#define TD_FAULT_GROUP_STATE_H

#include "base/map.h"
#include "fault/recorder.h"
#include "peer/endpoint.h"

#include <tandem/backend.h>
#include <tandem/group.h>

#include <pthread.h>
#include <sys/queue.h>

struct td__call_history;
struct td__early_abort;
struct td__withdrawal;

/* State of a component that outlives a group and belongs to the root; the first member of the component's struct.
 * The root's lock guards the list. */
struct td__attachment {
    struct td__attachment *next;
    const struct td__attachment_ops *ops; /* identify the component */
};

struct td__attachment_ops {
    /** This rank leaves: all groups but the first are destroyed, and other ranks can still connect. May be NULL. */
    void (*leave)(struct td__attachment *attachment, struct td__root *root);

    /** The first group is destroyed, too; no rank queries this one any more. */
    void (*free)(struct td__attachment *attachment);
};

/* The call that was last found to take long, and the time of the next warning; for the failure detector's
 * thread. */
struct td__stall {
    int64_t limit_ms; /* 0: never */
    int64_t next_ms, age_ms;
    uint64_t key, sequence;
};

struct td__root {
    struct td__endpoint *endpoint;
    td_store *given; /* the user's store */
    td_store *store; /* a prefix of it */
    td_bytes *cards; /* of all ranks: their addresses */
    int rank, size;
    unsigned generation; /* of forks: a child cannot use an inherited root */
    char *name;          /* in the keys of the store, and of the first group */
    bool named;          /* by the caller */
    bool world;          /* the process's, of td_init_process_group() */
    bool grown;          /* td_group_grow() or td_group_admit() has made it … */
    bool discarded; /* it has not come about: no rank needs what this one has */
    bool admitted;       /* … the latter */
    char tag[12];        /* "@3f2a91", in the names of unnamed groups; "": the process's world */
    int64_t epoch; /* number of the exchange of addresses, under this name and in this store */
    char *backend; /* the first group's, NULL: not chosen, and its options */
    char *backend_options;
    char
        agreed[128]; /* "<cuda>": kinds of devices whose default backend is the same on all ranks */
    int64_t timeout_ms;
    pthread_mutex_t lock;
    struct td__root *outgrown;      /* in the list of former worlds */
    td_group *first;                /* NULL before it is created, and while it is destroyed */
    LIST_HEAD(, td_group) groups;   /* all, beginning with `first` */
    struct td__early_abort *aborts; /* of groups that this rank has not created yet */
    struct td__withdrawal *withdrawals;
    struct td__stall stall;
    struct td__map names; /* the number of groups created for a list of ranks */
    struct td__flight_log *flight;
    struct td__attachment *attachments;
    struct td__call_history *histories; /* of destroyed groups; see call_history.h */
};

/* The failure that has broken a group, for works of submit(), which outlive the group. Counted. */
struct td__failure {
    atomic_uint owners;
    atomic_int status; /* TD_OK: none so far; the text is set before */
    char *reason;
};

void td__failure_release(struct td__failure *failure);

/** TD_OK, or that failure. NULL: TD_OK. */
td_status td__failure_check(const struct td__failure *failure);

/* The streams of a group's backend on one device. Never removed before the group ends. */
enum td__part_stream {
    TD__STREAM_COLLECTIVES,
    TD__STREAM_MESSAGES,
    TD__STREAM_COPIES,
    TD__STREAMS
};

struct td__part_streams {
    struct td__part_streams *next;
    td_device *device;
    int lane; /* 0; else only TD__STREAM_MESSAGES: of the messages from or to one rank, see parts.c */
    td_stream *streams[TD__STREAMS];
};

/* A backend of a group, for one kind of devices or several. */
struct td__part {
    const td_backend_ops *ops;
    void *self;
    bool submits; /* it has submit() */
    bool watched; /* it is aborted when the group breaks, and that breaks when a member is lost */
    td_group *group;
    const char *name; /* of the backend */
    td_backend_context context;
    _Atomic(struct td__part_streams *) streams;
    struct td__part *next; /* in group->parts */
};

/* Which backend serves a kind of device; the list only grows. */
struct td__kind_part {
    struct td__kind_part *next;
    struct td__part *part;
    char kind[16];
};

struct td_group {
    struct td__root *root;
    LIST_ENTRY(td_group) link; /* in root->groups, or in the list of shells */
    bool named;                /* by the caller */
    bool handed_out;           /* of the world's: td_group_grow() has returned it to the caller */
    char *name;
    uint64_t key; /* the same on all ranks, and unique */
    int rank;     /* -1: not a member */
    int size;
    int *ranks;                            /* of the root, in order */
    struct td__part host;                  /* the backend of host memory */
    _Atomic(struct td__part *) parts;      /* those of devices only; see group/parts.c */
    _Atomic(struct td__kind_part *) kinds; /* of devices that were used, or named */
    pthread_mutex_t parts_lock;            /* held while a backend of devices is created */
    char *backend;                         /* what td_get_backend() returns */
    char *chosen; /* by the options of the group or of the world; NULL: none */
    _Atomic int64_t timeout_ms;

    atomic_uint pending; /* collectives that run or are queued */
    atomic_uint users;   /* other running calls; see td__group_use() */
    atomic_bool closing; /* it is being destroyed: no call begins any more */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    STAILQ_HEAD(, td_work) queue;
    unsigned queued;
    unsigned
        helpers; /* waiting threads that run the queue; the group is not freed before they end */
    bool working, stopping;
    bool patient;               /* the worker leaves the queue to waiting threads; see queue.c */
    td__deadline patient_until; /* … until then; 0: no longer */
    td__deadline alarm;         /* the end of the sleep of the worker; 0: it is awake */
    pthread_t worker;
    _Atomic uint64_t sequence;        /* collectives that were begun */
    _Atomic uint64_t monitored;       /* monitored barriers that were begun … */
    _Atomic uint64_t monitored_over;  /* … and have ended; rank 0: their outcome is settled … */
    _Atomic uint64_t monitored_doubt; /* … the last one in which this rank was about to give up */
    /* By rank: the last one of which its arrival is here, in time; on other ranks than 0 the verdict of rank 0. */
    _Atomic uint64_t *monitored_arrivals;
    struct td__trace trace;
    struct td__call_history *history; /* the backend's, where it keeps one; see call_history.h */
    bool owns_history;                /* it is that of group/submitted.c */
    struct td__failure *failure;      /* NULL: no backend has submit() */
    uint32_t shrunk;                  /* how often */
    atomic_int broken; /* a td_status: the first failure, which has broken the group */
    char *reason;      /* its text */
    atomic_bool
        aborted; /* by td_group_abort() or td_group_shrink(): the calling rank notifies the others */
};

/** An attachment with these ops, or NULL. The root's lock is held. */
struct td__attachment *td__root_attachment(struct td__root *root,
                                           const struct td__attachment_ops *ops);

/** Takes the attachment over. The root's lock is held. */
void td__root_attach(struct td__root *root, struct td__attachment *attachment);

/** Calls the leave() of all attachments; their free(). */
void td__root_leave(struct td__root *root);
void td__root_detach(struct td__root *root);

/** The backends of a member: begin with NULL; NULL at the end. */
static inline struct td__part *td__next_part(const td_group *group, const struct td__part *part)
{
    if (!part)
        return group->host.ops ? (struct td__part *)&group->host : NULL;
    return part == &group->host
               ? atomic_load_explicit(&((td_group *)group)->parts, memory_order_acquire)
               : part->next;
}

/** The rank in the group of a rank of the root; -1: it is not a member. */
int td__group_index(const td_group *group, int rank);

/** The group with this key, or NULL. The root's lock is held. */
td_group *td__root_find(struct td__root *root, uint64_t key);

/** Tags of the library's own messages, which TD_ANY_TAG does not match. */
enum { TD__TAG_ARRIVAL = -2, TD__TAG_VERDICT = -3, TD__TAG_OBJECT = -4 };

/* ---- The first failure, which breaks a group, and aborting a group on purpose ---------------------- */

/* The reason of an abort, in the lowest bits of the number that ranks send each other. */
enum {
    TD__ABORT_CALLED,   /* td_group_abort() */
    TD__ABORT_MIXED,    /* a rank is in a monitored barrier, another one in a collective */
    TD__ABORT_SHRINK,   /* td_group_shrink() */
    TD__ABORT_BACKENDS, /* two ranks have different backends for a kind of devices */
};

/** The number for TD__ABORT_MIXED: this rank is in a monitored barrier, `rank` of the root is in the collective
 *  `sequence` of `kind`. */
uint64_t td__abort_mixed(int rank, td_op_kind kind, uint64_t sequence);

/** The number for TD__ABORT_SHRINK, with a rank that is lost if this rank knows one. */
uint64_t td__abort_shrink(const td_group *group);

/** The number for TD__ABORT_BACKENDS: this rank has another one than `rank` of the root. */
uint64_t td__abort_backends(int rank);

/** Breaks the group with `status` and the last error, unless it is broken already. Aborts the backends with submit():
 *  what they have enqueued on a device would wait for other ranks for ever. */
void td__group_break(td_group *group, td_status status);

/** Breaks the groups with a backend of submit() that have a member which has ended, or is cut off. Other backends notice
 *  that themselves, in the calls that wait. */
void td__break_lost_groups(struct td__root *root);

/** TD_OK, or the failure that has broken the group. Cheap. */
td_status td__group_state(const td_group *group);

/** `rank` of the root has aborted the group: marks it on this rank. */
void td__abort_here(td_group *group, int rank, uint64_t why);

/** This rank aborts the group, and with `notify` all others. The last error stays as it was. */
void td__abort_own(td_group *group, uint64_t why, bool notify);

/** Another rank (of the root) has aborted the group with this key: TD__TOPIC_ABORT, without an answer. */
void td__abort_receive(struct td__root *root, int rank, uint64_t key, uint64_t why,
                       struct td__buffer *answer);

/** Aborts the groups that have an excluded rank, with TD_ERR_PEER and its reason; if this rank was excluded, all of them
 *  with TD_ERR_STATE. */
void td__abort_excluded(struct td__root *root);

/** Aborts a new group that another rank has aborted before this rank created it. */
void td__abort_early(td_group *group);

/** Frees the early aborts of the root. */
void td__abort_forget(struct td__root *root);

#endif
