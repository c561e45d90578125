/* The backend "nccl": what its files share.
 *
 *     group      what serves one group: its channels, its worker thread, its first failure
 *     channel    a communicator, with the calls that are to be enqueued on it in order. The collectives of a group have
 *                one, and the messages from one rank to another one have one
 *
 *     submit()  --queue-->  channel  --NCCL-->  stream of the device
 *
 * A call is enqueued by the thread that submits it, if the communicator is ready, and else by the worker, which creates
 * communicators, completes what NCCL has not enqueued at once, watches what is enqueued (nccl_watchdog.c), and aborts
 * (nccl_abort.c).
 *
 * Locks. group->lock guards channels and queues, and is held during calls of NCCL on communicators. group->wake_lock
 * guards the failure and the wake-up of the worker, so that abort() does not wait for a thread that NCCL blocks; no lock
 * is locked after it. No lock is held while a work is completed. */
#ifndef TANDEM_NCCL_BACKEND_H
#define TANDEM_NCCL_BACKEND_H

#include "nccl_library.h"

#include <tandem/backend.h>
#include <tandem/device_ops.h>
#include <tandem/tensor.h>

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

/* A call that was submitted, and is not complete. */
struct nccl_call {
    struct nccl_call *next;
    const td_call *call; /* stays until the work is complete */
    td_work *work;
    int64_t deadline_ns;
    struct nccl_batch *batch; /* it is held back until the end of the batch; NULL: it is not */
    uint64_t batch_number;    /* also after that; 0: of no batch */
    bool has_op;
    int op; /* made for this call: premul_sum */
    td_status status;
};

struct nccl_list {
    struct nccl_call *first, **end;
};

/* A td_batch_isend_irecv() of a thread. */
struct nccl_batch {
    struct nccl_batch *next;
    pthread_t thread;
    uint64_t number;
};

enum nccl_state {
    NCCL_NEW,     /* its members need the id */
    NCCL_JOINING, /* NCCL connects them */
    NCCL_READY,
    NCCL_BUSY, /* NCCL has not enqueued the last call so far */
};

enum { NCCL_LOGGED = 32 }; /* messages that a log has, at most */

struct nccl_logged {
    int64_t tag;
    uint64_t bytes;
};

/* What the device has run, for the watchdog: an event behind the first `number` calls. */
struct nccl_watch {
    td_event *event;
    bool is_set;
    uint64_t number, sequence;
    int64_t since_ns, next_ns; /* recorded; the next comparison with other ranks … */
    int64_t warn_ns;           /* … and the age of the next warning */
    int64_t remote_ns;         /* since when NCCL reports that a rank has gone; 0: it does not */
    int turns;
};

struct nccl_channel {
    struct nccl_channel *next;
    struct nccl_group *group;
    char name[32];      /* "all", or "2-0": messages from rank 2 to rank 0 of the group */
    int rank, size;     /* in the communicator */
    int source, target; /* of messages; -1: collectives */
    enum nccl_state state;
    struct nccl_comm *comm;
    struct nccl_comm *dying; /* the worker's: to be aborted … */
    pthread_t aborter;       /* … by this thread */
    bool is_aborting;
    struct nccl_list queue, issued;
    td_stream *stream;       /* of the last call */
    uint64_t enqueued, done; /* calls; those that the device has run */
    uint64_t sequence;       /* of the collective that was enqueued last … */
    uint64_t done_sequence;  /* … and of the last one that the device has run */
    uint64_t meeting;        /* of the last one that ends on no rank before all have called it */
    int64_t timeout_ms;      /* of the last call */
    struct nccl_watch watch;
    struct nccl_logged log[NCCL_LOGGED]; /* messages, by their number modulo the size */
};

struct nccl_group {
    const td_backend_context *context;
    pthread_mutex_t lock;
    td_device *device; /* of the first call; a communicator has one */
    struct nccl_channel *channels;
    struct nccl_batch *batches;
    uint64_t batches_begun;
    pthread_t worker;
    bool working;

    pthread_mutex_t wake_lock;
    pthread_cond_t wake;
    bool woken, stopping;
    atomic_bool watching; /* the worker looks again by itself */
    atomic_int failed;    /* a td_status, set once … */
    char cause[1024];     /* … after its text */
    bool cleaned;         /* the worker's: everything is aborted */
};

static inline int64_t nccl_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void nccl_list_init(struct nccl_list *list)
{
    list->first = NULL;
    list->end = &list->first;
}

static inline void nccl_list_add(struct nccl_list *list, struct nccl_call *call)
{
    call->next = NULL;
    *list->end = call;
    list->end = &call->next;
}

static inline struct nccl_call *nccl_list_take(struct nccl_list *list)
{
    struct nccl_call *call = list->first;
    if (call && !(list->first = call->next))
        list->end = &list->first;
    return call;
}

/* ---- Calls (nccl_calls.c) ------------------------------------------------------------------------ */

/** TD_ERR_UNSUPPORTED if NCCL cannot do it, with what helps. */
td_status nccl_check_call(const struct nccl_group *group, const td_call *call);

/** Calls NCCL for it; between ncclGroupStart() and ncclGroupEnd(). Returns NCCL's result, or with -1 td_last_error(). */
int nccl_run_call(struct nccl_channel *channel, struct nccl_call *call);

/** The CUDA stream of a stream. */
void *nccl_stream(const struct nccl_group *group, td_stream *stream);

/* ---- Channels (nccl_channel.c) -------------------------------------------------------------------- */

/** The channel of a call, created if there is none; NULL, with td_fail(). With the lock. */
struct nccl_channel *nccl_channel_of(struct nccl_group *group, const td_call *call);

/** Enqueues what can be enqueued; calls that are over are added to `done`. With the lock. */
void nccl_channel_pump(struct nccl_channel *channel, struct nccl_list *done);

/** A step of the communicator's life, by the worker: creates it, or looks whether NCCL is done with the last calls.
 *  True: it waits for something. Takes the lock. */
bool nccl_channel_step(struct nccl_channel *channel, struct nccl_list *done);

/** Completes the works of calls that are over, and frees these. Without a lock. */
void nccl_complete(struct nccl_group *group, struct nccl_list *done);

/** Moves everything that waits in a channel to `done`, with `status`. With the lock. */
void nccl_channel_fail(struct nccl_channel *channel, td_status status, struct nccl_list *done);

/** Ends the communicators of a group that has not failed, within about a second, and frees the channels. */
void nccl_channels_free(struct nccl_group *group);

/* ---- The worker (nccl_watchdog.c) ------------------------------------------------------------------ */

/** Starts it, once. With the lock. */
td_status nccl_worker_start(struct nccl_group *group);
void nccl_worker_stop(struct nccl_group *group);
void nccl_worker_wake(struct nccl_group *group);

/** Keeps the group's first failure: status and td_last_error(), and wakes the worker, which aborts everything. */
void nccl_note_failure(struct nccl_group *group, td_status status);

/** TD_OK, or that failure. */
td_status nccl_failure(const struct nccl_group *group);

/** Aborts everything, once, on the worker (nccl_abort.c). */
void nccl_abort_all(struct nccl_group *group);

/* ---- The log of messages (nccl_message_log.c) ------------------------------------------------------- */

/** Publishes this rank's log of a channel in the store, and compares it with that of the other rank, if that has
 *  published one. TD_ERR_MISMATCH names the first message that differs. Without a lock. */
td_status nccl_compare_messages(struct nccl_channel *channel);

/** Requests the same of the other rank. */
void nccl_request_log(const struct nccl_channel *channel);

/** Does it if another rank has requested it. */
td_status nccl_answer_requests(struct nccl_group *group, struct nccl_channel *first);

#endif
