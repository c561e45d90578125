/* Rendezvous: how a process learns its rank and the size of the world, and finds the others.
 *
 *     td_world world;
 *     if (td_rendezvous(NULL, NULL, &world))
 *         … td_last_error() …
 *     … world.rank, world.world_size, world.store …
 *     td_world_close(&world);
 *
 * A URL says how:
 *
 *     env://              RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (as tdrun and torchrun set them)
 *     tcp://host:port     rank and world size from the options, or ?rank=…&world_size=…
 *     file:///path        likewise, through a file that all ranks can reach
 *     slurm://            SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST
 *     mpi://              the variables that Open MPI, MPICH and other PMI launchers set
 *     NULL                env://, slurm:// or mpi://, whichever has its variables set; a world of one
 *                         where none has
 *
 * and td_register_rendezvous() adds schemes. With slurm:// and mpi:// the store is at MASTER_ADDR and
 * MASTER_PORT where those are set; otherwise, on one host, at a unix socket named after the job, and on
 * several, for Slurm, at the first host of the node list.
 *
 * Threads: td_register_rendezvous() and td_rendezvous() may be called from any thread, also at once for
 * different addresses. Several calls for one address take their epochs in the order in which they complete, so
 * all ranks must make them one after the other. No thread may change the environment meanwhile.
 * td_world_close() must be the last call on its world. */
#ifndef TANDEM_RENDEZVOUS_H
#define TANDEM_RENDEZVOUS_H

#include <tandem/store.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_rendezvous_options {
    int world_size;     /* 0 (or -1): from the URL or the environment */
    int rank;           /* 0: from these, too; where they have none and world_size is given, and
                              in a world of 1, it is rank 0. -1: from these alone */
    int64_t timeout_ms; /* for all ranks to join; 0: 300 s. The store's own timeout afterwards */
    void *reserved[4];
} td_rendezvous_options;

/** Where a process stands in its job. */
typedef struct td_world {
    td_store *store; /* shared by all ranks; belongs to the td_world */
    int rank;        /* 0 … world_size-1 */
    int world_size;
    int local_rank;       /* among the ranks of this host, where the launcher says; else -1 */
    int local_world_size; /* likewise */
    void *reserved[4];    /* NULL */
} td_world;

/**
 * Joins the other processes of the job: returns when all `world_size` of them have joined.
 *
 * Errors, on every rank that is still waiting: TD_ERR_INVALID (the URL, an option or a variable is
 * wrong, and is named), TD_ERR_TIMEOUT (names the ranks that are missing), TD_ERR_MISMATCH (two
 * processes have the same rank, or another world size; both are named), and those of
 * td_tcp_store_open().
 */
TD_API td_status td_rendezvous(const char *url, const td_rendezvous_options *options,
                               td_world *world);

/**
 * Opens the store of a URL alone, without a rank, for processes that come and go: nothing waits for others.
 *
 *     env://              at MASTER_ADDR and MASTER_PORT
 *     tcp://host:port     there
 *     file:///path        the file
 *
 * The first process on the host of a TCP store hosts it, unless the launcher does, and the others are its clients;
 * closing it there waits for them, as td_world_close() does. Other schemes open the store as td_rendezvous() does, and
 * take a rank from the environment. NULL as for td_rendezvous(), but there must be a job. timeout_ms 0: 300 s.
 *
 * Errors: those of td_rendezvous() and td_tcp_store_open().
 */
TD_API td_status td_rendezvous_store(const char *url, int64_t timeout_ms, td_store **store);

/** Closes world->store and clears `world`. The rank that hosts the store waits until the others
 *  have closed theirs or died, at most the store's timeout. Errors as td_store_close(). */
TD_API td_status td_world_close(td_world *world);

/**
 * A rendezvous of one's own. Fills in `world`: the store (handed over; opened for this rank), the
 * rank and the world size; local_rank and local_world_size are -1 beforehand. Waiting for the
 * others is not its task: td_rendezvous() does that through the store. A failure is returned as a
 * status; the message is what td_fail() was given.
 */
typedef td_status (*td_rendezvous_fn)(const char *url, const td_rendezvous_options *options,
                                      void *arg, td_world *world);

/** Has URLs that begin with `scheme`:// handled by `fn`; NULL for `fn` takes that back. A scheme is
 *  a letter followed by letters, digits, '+', '-' or '.'. The built-in ones cannot be replaced:
 *  TD_ERR_INVALID; a second one of the same name is TD_ERR_STATE. */
TD_API td_status td_register_rendezvous(const char *scheme, td_rendezvous_fn fn, void *arg);

#ifdef __cplusplus
}
#endif

#endif
