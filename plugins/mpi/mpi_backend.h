/* The backend "mpi": what its files share. They are compiled once for each MPI that is there, with its header, into
 * tandem_mpi/<name>.so; tandem_mpi.so (mpi_plugin.c) loads the one that the process was started with.
 *
 *     collective   meeting of all ranks -> MPI's call
 *     message      MPI's request, tested by the thread that waits, or by the progress thread
 *
 * The meeting (mpi_meeting.c) is why MPI cannot hang for the usual reasons: a thread enters a collective of MPI, which
 * nothing can interrupt, when all ranks have come to the same call. Late ranks, other calls, ranks that are dead, timeouts
 * and aborts are noticed before, in a loop of our own. What remains is a rank that dies inside of MPI (mpi_rescue.c).
 *
 * Threads. With MPI_THREAD_MULTIPLE threads call MPI at will, and blocking calls of MPI are used, which are the faster
 * ones. Otherwise one thread at a time is in MPI, for a moment only: calls are started without blocking, and tested. */
#ifndef TANDEM_MPI_BACKEND_H
#define TANDEM_MPI_BACKEND_H

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <tandem/backend.h>
#include <time.h>

enum { MPI_PAGE_RANKS = 64, MPI_DESCRIBED = 8 };

/* ---- The library (mpi_library.c) -------------------------------------------------------------------- */

struct mpi_library {
    bool multiple;        /* MPI_THREAD_MULTIPLE */
    int rank, size;       /* in MPI_COMM_WORLD */
    int tag_limit;        /* the greatest tag */
    int processors;       /* that this process may use */
    uint64_t place;       /* which these are, and of which host: ranks with the same share them */
    char name[96];        /* "Open MPI 4.1.4" */
    uint64_t job;         /* the same on all processes of MPI_COMM_WORLD */
    atomic_bool lost;     /* a thread was taken out of MPI: nothing calls it any more */
    atomic_int groups;    /* that are not destroyed */
    atomic_bool failed;   /* a rank may be dead: MPI_Finalize() could wait for ever */
    pthread_mutex_t lock; /* held in MPI, unless `multiple` */
};
extern struct mpi_library mpi;

/** Initialises MPI, once, unless the program has. */
td_status mpi_library_open(void);

/** TD_ERR_SYSTEM with MPI's text for a result that is not MPI_SUCCESS. `what`: the call, as a user knows it. */
td_status mpi_check(int result, const char *what, const char *group);

static inline void mpi_enter(void)
{
    if (!mpi.multiple)
        pthread_mutex_lock(&mpi.lock);
}

static inline void mpi_leave(void)
{
    if (!mpi.multiple)
        pthread_mutex_unlock(&mpi.lock);
}

static inline int64_t mpi_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* ---- Waiting ----------------------------------------------------------------------------------------- */

/* A loop that waits for other ranks: it spins, then yields, then sleeps. */
struct mpi_wait {
    int turns, spins;
    int64_t deadline_ns, since_ns, next_ns; /* the first look at the clock is in a turn */
};

/** Before the next turn. True once in a while: look whether the group has failed, the time is over, … */
bool mpi_wait_turn(struct mpi_wait *wait);

/* ---- Groups (mpi_group.c) ------------------------------------------------------------------------------ */

struct mpi_page;

struct mpi_group {
    const td_backend_context *context;
    MPI_Comm comm;  /* collectives, and messages of the user */
    MPI_Comm inner; /* messages of the library, which TD_ANY_TAG does not match */
    bool has_comms;
    struct mpi_page *page; /* memory of all ranks, if they are on one host; else NULL */
    uint64_t met;          /* meetings so far */
    int spins;
    bool polls; /* calls of MPI are started and tested, and none blocks */
    size_t most; /* elements in one call of MPI */

    atomic_int failed;    /* a td_status, set once … */
    char cause[1024];     /* … after its text */
    pthread_mutex_t lock; /* guards setting these, and leaving */

    /* The thread that is in a call of MPI that blocks (mpi_rescue.c). */
    atomic_bool blocked;
    pthread_t blocked_thread;
    atomic_bool rescuing; /* another thread is about to take it out */

    atomic_int messages; /* that the progress thread has */
};

/** TD_OK, or the group's failure. */
td_status mpi_failure(const struct mpi_group *group);

/** Keeps the group's first failure: status and td_last_error(). */
void mpi_note_failure(struct mpi_group *group, td_status status);

/* ---- Meetings (mpi_meeting.c) --------------------------------------------------------------------------- */

/** Returns TD_OK when all ranks have come to this call. */
td_status mpi_meet(struct mpi_group *group, const td_call *call);

/** Opens the page of a group on one host; without one, which is no failure, requests are used. */
td_status mpi_page_open(struct mpi_group *group);
void mpi_page_close(struct mpi_group *group);

/** This rank leaves the group in order. */
void mpi_leave_meeting(struct mpi_group *group);

/** Tests a request until it is complete; the group's failure, or TD_ERR_TIMEOUT with what=NULL not mattering. The
 *  request is left alone then. */
td_status mpi_await_request(struct mpi_group *group, const td_call *call, MPI_Request *request,
                            int64_t deadline_ns);

/* ---- Collectives (mpi_collectives.c, mpi_reductions.c) ---------------------------------------------------- */

td_status mpi_collective(void *self, const td_call *call);

/* How MPI reduces a call. */
struct mpi_reduction {
    MPI_Datatype type;
    MPI_Op op;
    struct mpi_typed_call *typed; /* the type is ours, and leads to the call; or NULL */
    bool begins, ends;            /* td_reduce_begin() and td_reduce_end() have something to do */
};
td_status mpi_reduction_open(const td_call *call, struct mpi_reduction *reduction);
void mpi_reduction_close(struct mpi_reduction *reduction);

/* ---- Messages (mpi_messages.c) ----------------------------------------------------------------------------- */

td_status mpi_post(void *self, const td_call *call, td_work *work);
td_status mpi_run_message(void *self, const td_call *call);

/** Completes all messages of a group that is being destroyed, or has failed. */
void mpi_messages_end(struct mpi_group *group);
void mpi_progress_wake(void);

/* ---- A thread that MPI does not let go (mpi_rescue.c) -------------------------------------------------------- */

/** Runs fn(arg), which calls MPI and may block. TD_OK with *result, or the group's failure if the thread was taken out. */
td_status mpi_run_blocking(struct mpi_group *group, int (*fn)(void *arg), void *arg, int *result);

/** The group has failed: sees to it that a thread that blocks comes out. Does not block. */
void mpi_rescue(struct mpi_group *group);

#endif
