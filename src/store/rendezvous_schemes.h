/* The built-in ways to a store, a rank and a world size. Each reads its URL and the environment, and
 * opens the store; meeting the others is rendezvous.c's. */
#ifndef TD_STORE_RENDEZVOUS_SCHEMES_H
#define TD_STORE_RENDEZVOUS_SCHEMES_H

#include "store/rendezvous_url.h"

#include <tandem/rendezvous.h>

/* What a scheme found out. */
struct td__rendezvous_state {
    td_world world;
    char place[512];   /* where the job meets, for messages: "127.0.0.1:29500" */
    int restart_count; /* how often the launcher has started the job anew */
};

typedef td_status (*td__scheme_fn)(const struct td__url *url, const td_rendezvous_options *options,
                                   struct td__rendezvous_state *meeting);

td_status td__rendezvous_env(const struct td__url *url, const td_rendezvous_options *options,
                             struct td__rendezvous_state *meeting);
td_status td__rendezvous_tcp(const struct td__url *url, const td_rendezvous_options *options,
                             struct td__rendezvous_state *meeting);
td_status td__rendezvous_file(const struct td__url *url, const td_rendezvous_options *options,
                              struct td__rendezvous_state *meeting);
td_status td__rendezvous_slurm(const struct td__url *url, const td_rendezvous_options *options,
                               struct td__rendezvous_state *meeting);
td_status td__rendezvous_mpi(const struct td__url *url, const td_rendezvous_options *options,
                             struct td__rendezvous_state *meeting);

/** The URL that fits the environment; NULL when it speaks of no job at all. */
const char *td__rendezvous_detect(void);

/** Which rank this process is going to be, -1 where neither the options nor the environment tell. */
int td__rendezvous_expected_rank(const char *url, const td_rendezvous_options *options);

/* Shared by the schemes: */

/** Rank and world size from the options, then the URL; what is still open is left at -1. Checks
 *  those that are given. A rank of 0 in the options is open as long as the URL or the environment may
 *  have another one … */
td_status td__rendezvous_given(const struct td__url *url, const td_rendezvous_options *options,
                               int *rank, int *world_size);

/** … and stands where they have none and this is true. */
bool td__rendezvous_rank_0(const td_rendezvous_options *options);

/** TD_ERR_INVALID unless 0 <= rank < world_size. */
td_status td__rendezvous_check(const char *what, int rank, int world_size);

/** Opens the TCP store of the job at host:port: rank 0 hosts it, unless the launcher does. Sets
 *  world.store, rank, world_size and the place. */
td_status td__rendezvous_open(const char *host, int port, int rank, int world_size,
                              const td_rendezvous_options *options,
                              struct td__rendezvous_state *meeting);

/** The number in an environment variable. *found says whether it is set (empty is not);
 *  TD_ERR_INVALID, which names it, when it is set to something else than a number >= low. */
td_status td__env_number(const char *name, int low, int *number, bool *found);

/** The value of an environment variable, NULL when it is unset or empty. */
const char *td__env(const char *name);

#endif
