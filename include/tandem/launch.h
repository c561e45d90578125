/* Starting the processes of a job from inside a program. From a shell: tdrun.
 *
 *     int main(int argc, char **argv)
 *     {
 *         td_spawn_main();
 *         …
 *         if (td_spawn(train, &config, 4, &(td_spawn_options){.arg_size = sizeof config})) …
 *
 * works with both start methods; without td_spawn_main() and arg_size, the processes can only be forks.
 *
 * Threads: td_spawn() may be called from any thread, by one at a time. The processes end with the thread that
 * started them. One context is used by one thread at a time. td_spawn_main() is called by the first thread. */
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

/** How processes are started; PyTorch's start_method. */
typedef enum td_spawn_method {
    TD_SPAWN_AUTO, /* fork; exec once a fork would not work, since a device was used whose driver forbids it */
    TD_SPAWN_FORK, /* copies of the calling process */
    TD_SPAWN_EXEC, /* fresh starts of the program ("spawn" in PyTorch) */
} td_spawn_method;

typedef struct td_spawn_options {
    td_spawn_context **context;  /* not NULL: return at once; td_spawn_join() waits */
    int64_t shutdown_timeout_ms; /* between SIGTERM and SIGKILL for the others; 0: 30 s */
    td_spawn_method method;
    size_t
        arg_size; /* each process gets a copy of so many bytes at `arg`; 0: the pointer itself, which exec cannot
                        pass on */
    void *reserved[4];
} td_spawn_options;

/**
 * Starts `nprocs` processes that run fn(rank, arg) and waits until all have ended.
 *
 * Forks are copies of the calling process, so `arg` and everything else is there, as a copy (for memory of td_alloc()
 * see base.h). With exec, each process is a fresh start of the program, with the same file (also where that was removed
 * or replaced since), arguments, environment, working directory and standard streams. There `fn` is called in
 * td_spawn_main(), instead of the rest of main(): global variables have their initial values. `fn` may be static; it
 * must be in the program or a shared object, which is loaded where it is not loaded by itself. `arg` is NULL, or a
 * copy of `arg_size` bytes, aligned to a page; pointers in them are void.
 *
 * The environment has what td_rendezvous() needs (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
 * MASTER_PORT, TANDEM_SECRET, …): this process hosts the store. All of these are the job's own, whatever they were
 * before, but for the secret: one that is set (TANDEM_SECRET or TANDEM_SECRET_FILE) stays, and otherwise the job gets a
 * fresh one. Neither arguments nor /proc/PID/environ show that. A process ends when `fn` returns: what its streams hold
 * is written, atexit handlers are not run.
 *
 * When one fails (a status, an exit code, a signal), the others get SIGTERM, after the shutdown
 * timeout SIGKILL, and the first failure's status and message are returned. None outlives the
 * thread that called this: the kernel ends them with it. They are in the process group of the caller.
 *
 * Errors: TD_ERR_INVALID; TD_ERR_STATE (exec, and main() has not called td_spawn_main(); TD_SPAWN_FORK, and a fork
 * would not work; in a process: the shared object of `fn` is another build); TD_ERR_UNSUPPORTED (exec in a
 * set-user-ID program); TD_ERR_SYSTEM (could not be started); the status that `fn` returned; TD_ERR_PEER (a process
 * exited with another code than 0, exited before `fn` was called, or was ended by a signal).
 */
TD_API td_status td_spawn(td_spawn_fn fn, void *arg, int nprocs, const td_spawn_options *options);

/** In a process that td_spawn() has started by exec: runs its function and exits. In any other process it returns at once
 *  and has no effect, except that td_spawn() may use exec from then on. It must be the first statement of main(), since
 *  everything before it is run by each process. */
TD_API void td_spawn_main(void);

/** Waits at most `timeout_ms` (0: as long as it takes; TD_NOW: not at all) for the processes of `context` to
 *  end, as td_spawn() does, and frees it, except when TD_ERR_TIMEOUT says that some are still running. */
TD_API td_status td_spawn_join(td_spawn_context *context, int64_t timeout_ms);

/** The process id of `rank`, while `context` lives; -1 for a rank that is not there. */
TD_API pid_t td_spawn_pid(const td_spawn_context *context, int rank);

#ifdef __cplusplus
}
#endif

#endif
