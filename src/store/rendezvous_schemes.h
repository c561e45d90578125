/* The built-in rendezvous schemes. Each reads its URL and the environment, finds rank and world size, and
 * opens the store; rendezvous.c then waits for the other ranks. */
#ifndef TD_STORE_RENDEZVOUS_SCHEMES_H
#define TD_STORE_RENDEZVOUS_SCHEMES_H

#include "base/clock.h"

#include <tandem/rendezvous.h>

/* ---- URLs: scheme://host:port/path?rank=…&world_size=… ------------------------------------------ */

struct td__url {
    char scheme[32];
    char host[256]; /* "" where there is none */
    int port;       /* -1 where there is none */
    char path[4096];
    int rank;       /* -1 where there is none */
    int world_size; /* likewise */
};

/** Reads the scheme alone: the text before "://", in lower case. */
td_status td__url_scheme(const char *text, char scheme[32]);

/** Parses a URL of a built-in scheme. TD_ERR_INVALID says what is wrong with it. */
td_status td__url_parse(const char *text, struct td__url *url);

/* ---- The schemes ----------------------------------------------------------------------------- */

/* What a scheme finds. */
struct td__rendezvous_state {
    td_world world;
    char address[512]; /* of the store, for messages: "127.0.0.1:29500" */
    int restart_count; /* how often the launcher has started all workers again */
};

typedef td_status td__scheme_fn(const struct td__url *url, const td_rendezvous_options *options,
                                struct td__rendezvous_state *state);

td__scheme_fn td__rendezvous_env, td__rendezvous_tcp, td__rendezvous_file, td__rendezvous_slurm,
    td__rendezvous_mpi;

/** The URL that fits the environment; NULL where the environment names no job. */
const char *td__rendezvous_detect(void);

/** The rank that this process will have, -1 where neither the options nor the environment say. */
int td__rendezvous_expected_rank(const char *url, const td_rendezvous_options *options);

/* ---- What the schemes share ------------------------------------------------------------------ */

/** Rank and world size from the options, then the URL; what is still open is left at -1. Checks
 *  those that are given. A rank of 0 in the options is open as long as the URL or the environment may
 *  have another one … */
td_status td__rendezvous_given(const struct td__url *url, const td_rendezvous_options *options,
                               int *rank, int *world_size);

/** … and stands where they have none and this is true. */
bool td__rendezvous_rank_0(const td_rendezvous_options *options);

/** TD_ERR_INVALID unless the URL has a host and a port, and no path. */
td_status td__rendezvous_check_tcp(const struct td__url *url);

/** TD_ERR_INVALID unless 0 <= rank < world_size. */
td_status td__rendezvous_check(const char *what, int rank, int world_size);

/** Opens the TCP store of the job at host:port: rank 0 hosts it, unless the launcher does. Sets
 *  world.store, rank, world_size and the address. */
td_status td__rendezvous_open(const char *host, int port, int rank, int world_size,
                              const td_rendezvous_options *options,
                              struct td__rendezvous_state *state);

/** The store of the job at host:port, for a process without a rank: hosts it, if this is its host and no process does. */
td_status td__rendezvous_open_store(const char *host, int port, int64_t timeout_ms,
                                    td_store **store);

/** Rank 0 hosts the store of the first epoch at `host` and a free port; for ranks that learn the port from it. */
td_status td__rendezvous_host(const char *host, const td_rendezvous_options *options,
                              struct td__rendezvous_state *state, int *port);

/** The same as td__rendezvous_open(), at an address that rank 0 puts into the launcher's key-value space. */
td_status td__rendezvous_by_launcher(const td_rendezvous_options *options,
                                     struct td__rendezvous_state *state);

/** MASTER_ADDR and MASTER_PORT. */
td_status td__rendezvous_env_address(const char **host, int *port);

/** The number in an environment variable. *found says whether it is set (empty is not);
 *  TD_ERR_INVALID, which names it, when it is set to something else than a number >= low. */
td_status td__env_number(const char *name, int low, int *number, bool *found);

/** The value of an environment variable, NULL when it is unset or empty. */
const char *td__env(const char *name);

/** Slurm's compressed host lists: "gpu[01-03,7],login" stands for gpu01 gpu02 gpu03 gpu7 login. Writes the
 *  first host of `list` to `first` and counts all of them. TD_ERR_INVALID says at which character the list
 *  is malformed. */
td_status td__hostlist_first(const char *list, char first[256], int64_t *count);

/* ---- The barrier: each rank joins it through the store, and goes on when all have joined ------ */

/**
 * Waits until all ranks of `world` have joined. `address` names the rendezvous in messages, `epoch` tells
 * several of them through one store apart.
 *
 * When it fails, every rank that waits fails with the same message: two processes that claim one rank or
 * disagree on the world size (TD_ERR_MISMATCH), a process that has ended (TD_ERR_PEER), or ranks that did
 * not join in time (TD_ERR_TIMEOUT, with their numbers).
 *
 * *rejoined: this process is the successor of one of this rendezvous, which has succeeded already.
 */
td_status td__rendezvous_barrier(const td_world *world, const char *address, const char *epoch,
                                 td__deadline deadline, bool *rejoined);

/* ---- Epochs ----------------------------------------------------------------------------------
 *
 * A process may pass another rendezvous at the same address when it has closed the first world. All ranks
 * count the same number of them, so the number tells them apart. */

/** How many times this process has completed a rendezvous at `address`. */
unsigned td__rendezvous_epoch(const char *address);

#endif
