/* A work: one operation that is under way, or complete.
 *
 * It is completed exactly once, by the thread that carries it out, and has two kinds of owners: the caller
 * (td_work_release()) and that thread (released by completing it). Its group may be gone once it is complete, and is
 * not touched any more. */
#ifndef TD_GROUP_WORK_H
#define TD_GROUP_WORK_H

#include "call/operation.h"
#include "peer/wait_event.h"

#include <tandem/backend.h>

#include <pthread.h>

struct td__work_callback {
    struct td__work_callback *next;
    td_work_fn fn;
    void *arg;
};

struct td_work {
    atomic_int owners;
    atomic_bool complete;
    td_group *group;
    unsigned generation;            /* td__fork_generation() of the process that made it */
    struct td__operation operation; /* of a message: only its call */
    td_status status;
    char *reason; /* the text of a failure */
    int source;   /* rank of the world */
    size_t received;
    pthread_mutex_t lock; /* guards what follows; taken last */
    pthread_cond_t changed;
    struct td__work_callback first_callback; /* most works have one at most */
    struct td__work_callback *callbacks,
        **callbacks_end;      /* in the order in which they are called */
    bool calling;             /* a thread calls them, and those that are added meanwhile */
    int64_t begin_ns, end_ns; /* of what was queued: when it was carried out */
    uint64_t entry;           /* in the recorder; 0: none */
    struct td_work *next;     /* in the group's queue */
    size_t *counts;           /* its own copy of the counts of an uneven all_to_all */

    struct td_work *inner; /* td__work_follow() */
    void (*after)(void *arg);
    void *after_arg;
};

/** Makes a work for `call` with two owners. NULL without memory (and the last error set). */
td_work *td__work_create(td_group *group, const td_call *call);

/** Makes a work that completes as `inner` does, after after(arg) has run, whether well or not.
 *  Waiting for it moves `inner` on, which is taken over, also on failure. */
td_status td__work_follow(td_work *inner, void (*after)(void *arg), void *arg, td_work **outer);

/** Waits until it is complete, or the deadline: false. */
bool td__work_wait_until(td_work *work, td__deadline deadline);

/** Waits until it is complete, for a call that has the group in use (td__group_use()): also while the group is
 *  being destroyed, since that waits for the call. */
void td__work_finish(td_work *work);

/** When a collective was carried out. Leaves both as they are where that is not known. */
void td__work_times(const td_work *work, int64_t *begin_ns, int64_t *end_ns);

#endif
