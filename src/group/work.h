/* A work: one operation that is under way, or complete.
 *
 * It is completed exactly once, by whoever carries it out, and has two kinds of owners: the caller
 * (td_work_release()) and the one who carries it out (released by completing it). After it is complete
 * it does not touch its group any more. */
#ifndef TD_GROUP_WORK_H
#define TD_GROUP_WORK_H

#include "peer/wait_event.h"

#include <tandem/backend.h>

#include <pthread.h>

struct td_work {
    atomic_int owners;
    atomic_bool complete;
    td_group *group;
    td_call call;
    td_status status;
    char *message; /* where it failed */
    int source;    /* rank of the world */
    size_t received;
    pthread_mutex_t lock; /* guards what follows; taken last */
    pthread_cond_t changed;
    td_work_fn callback;
    void *callback_arg;
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
