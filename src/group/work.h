/* A work: an operation that was started, and may be complete.
 *
 * It is completed exactly once, by the thread that runs it, and has two kinds of owners: the caller (td_work_release())
 * and that thread, which releases it by completing it. Once it is complete, its group may be destroyed, and is not
 * accessed any more. */
#ifndef TD_GROUP_WORK_H
#define TD_GROUP_WORK_H

#include "call/operation.h"
#include "peer/wait_event.h"

#include <tandem/backend.h>

#include <pthread.h>
#include <sys/queue.h>

struct td__work_callback {
    STAILQ_ENTRY(td__work_callback) link;
    td_work_fn fn;
    void *arg;
};

struct td_work {
    atomic_int owners;
    atomic_bool complete;
    td_group *group;
    unsigned generation;            /* td__fork_generation() of the process that made it */
    struct td__operation operation; /* for a send or recv: only its call */
    td_status status;
    char *reason; /* the text of a failure */
    int source;   /* rank of the world */
    size_t received;
    pthread_mutex_t lock; /* guards the following members; locked last */
    pthread_cond_t changed;
    struct td__work_callback first_callback;    /* most works have one at most */
    STAILQ_HEAD(, td__work_callback) callbacks; /* in the order in which they are called */
    bool calling;               /* a thread calls them, also those that are added meanwhile */
    int64_t begin_ns, end_ns;   /* of a queued call: when it ran */
    uint64_t entry;             /* in the recorder; 0: none */
    STAILQ_ENTRY(td_work) link; /* in the group's queue */
    size_t *counts;             /* its own copy of the counts of an uneven all_to_all */

    td_event *event; /* of a call on a device: at first its start, when it is complete the result */
    bool recorded;   /* it is the result by now */
    bool submitted;  /* a collective that the backend completes by itself */
    struct td__failure
        *failure; /* of the group, which a result on a device may share; NULL: none can */
    _Atomic(td_work *) staged; /* of a message on a device: the one on host memory; owned */

    struct td_work *inner; /* td__work_follow() */
    td_status (*after)(void *arg);
    void *after_arg;
};

/** Creates a work for `call` with two owners. NULL with TD_ERR_NOMEM as the last error if memory is exhausted. */
td_work *td__work_create(td_group *group, const td_call *call);

/** Creates a work that completes with the status of `inner`, or else of after(arg), which has run before. Waiting for it makes `inner`
 *  progress. It owns `inner`, also on failure. */
td_status td__work_follow(td_work *inner, td_status (*after)(void *arg), void *arg,
                          td_work **outer);

/** As td_work_on_complete(), but does not make the work progress. */
td_status td__work_set_callback(td_work *work, td_work_fn fn, void *arg);

/** Waits until it is complete; false at the deadline. */
bool td__work_wait_until(td_work *work, td__deadline deadline);

/** The status of a complete work. Of a call on a device, makes the thread's current stream wait for the result; also
 *  after a failure, since its copies may still write. */
td_status td__work_order(td_work *work);

/** Waits until another thread has completed the work; false at the deadline. */
bool td__work_await(td_work *work, td__deadline deadline);

/** Waits for work->staged, and returns it. NULL if the work is complete without one, and at the deadline. */
td_work *td__work_await_staged(td_work *work, td__deadline deadline);

/** Sets work->staged, and takes over a reference to it. */
void td__work_set_staged(td_work *work, td_work *staged);

/** Waits until it is complete, also while the group is being destroyed: for a call that has the group in use
 *  (td__group_use()), for which that waits. */
void td__work_finish(td_work *work);

/** When a queued collective ran. Does not change the two if that is not known. */
void td__work_times(const td_work *work, int64_t *begin_ns, int64_t *end_ns);

#endif
