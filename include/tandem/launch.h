/* Starting the processes of a job from inside a program. From a shell: tdrun.
 *
 * Threads: td_spawn() may be called from any thread, by one at a time. The processes end with the thread that
 * started them. One context is used by one thread at a time. */
#ifndef TANDEM_LAUNCH_H
#define TANDEM_LAUNCH_H

#include <sys/types.h>
#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What each process runs. A status other than TD_OK ends the job; the thread's td_last_error() is
 *  then the message that the parent gets. */
typedef td_status (*td_spawn_fn)(int rank, void *arg);

typedef struct td_spawn_context td_spawn_context;

typedef struct td_spawn_options {
    td_spawn_context **context;  /* not NULL: return at once; td_spawn_join() waits */
    int64_t shutdown_timeout_ms; /* between SIGTERM and SIGKILL for the others; 0: 30 s */
    void *reserved[4];
} td_spawn_options;

/**
 * Starts `nprocs` processes that run fn(rank, arg) and waits until all have ended. They are forks of
 * the calling process, so `arg` and everything else is there, as a copy (for memory of td_alloc() see
 * base.h). Their environment has what td_rendezvous() needs (RANK, LOCAL_RANK, WORLD_SIZE,
 * LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TANDEM_SECRET, …): this process hosts the store. All of
 * these are the job's own, whatever they were before, but for the secret: one that is set (TANDEM_SECRET or
 * TANDEM_SECRET_FILE) stays, and otherwise the job gets a fresh one. A process ends when `fn` returns: what
 * its streams hold is written, atexit handlers are not run.
 *
 * When one fails (a status, an exit code, a signal), the others get SIGTERM, after the shutdown
 * timeout SIGKILL, and the first failure's status and message are returned. None outlives the
 * thread that called this: the kernel ends them with it.
 *
 * Errors: TD_ERR_INVALID, TD_ERR_SYSTEM (could not be started), the status that `fn` returned,
 * TD_ERR_PEER (a process exited with another code than 0, or was ended by a signal).
 */
TD_API td_status td_spawn(td_spawn_fn fn, void *arg, int nprocs, const td_spawn_options *options);

/** Waits at most `timeout_ms` (0: as long as it takes; TD_NOW: not at all) for the processes of `context` to
 *  end, as td_spawn() does, and frees it, except when TD_ERR_TIMEOUT says that some are still running. */
TD_API td_status td_spawn_join(td_spawn_context *context, int64_t timeout_ms);

/** The process id of `rank`, while `context` lives; -1 for a rank that is not there. */
TD_API pid_t td_spawn_pid(const td_spawn_context *context, int rank);

#ifdef __cplusplus
}
#endif

#endif
