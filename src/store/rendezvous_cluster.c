/* slurm:// and mpi://: rank and world size from the variables of the cluster's launcher.
 *
 * The address of the store, for both:
 *     MASTER_ADDR is set           there, at MASTER_PORT
 *     all ranks are on one host    a unix socket named after the job: no port to clash with another
 *     several hosts                Slurm: the first host of the node list, at MASTER_PORT or a port
 *                                  made of the job's number; MPI: rank 0 puts it into the launcher's
 *                                  key-value space (launcher_address.c); without one, MASTER_ADDR must be set  */
#include "store/launcher_kv.h"
#include "store/rendezvous_schemes.h"

#include "base/fail.h"
#include "base/number.h"
#include "store/slurm.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEFAULT_PORT = 29500 };

/* The variables of one launcher. */
struct dialect {
    const char *scheme;
    const char *rank, *size, *size_of_step, *local_rank, *local_size;
};

static const struct dialect slurm = {.scheme = "slurm://",
                                     .rank = "SLURM_PROCID",
                                     .size = "SLURM_NTASKS",
                                     .size_of_step = "SLURM_STEP_NUM_TASKS",
                                     .local_rank = "SLURM_LOCALID"};

static const struct dialect mpi_dialects[] = {
    {.scheme = "mpi://",
     .rank = "OMPI_COMM_WORLD_RANK",
     .size = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {.scheme = "mpi://",
     .rank = "PMI_RANK",
     .size = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_size = "MPI_LOCALNRANKS"},
};

static const struct dialect *mpi_in_use(void)
{
    for (size_t i = 0; i < sizeof mpi_dialects / sizeof *mpi_dialects; i++)
        if (td__env(mpi_dialects[i].rank))
            return &mpi_dialects[i];
    return NULL;
}

const char *td__rendezvous_detect(void)
{
    if (td__env("RANK"))
        return "env://";
    if (td__env(slurm.rank) && (td__env(slurm.size) || td__env(slurm.size_of_step)))
        return "slurm://";
    if (mpi_in_use())
        return "mpi://";
    if (td__env("WORLD_SIZE") || td__env("MASTER_ADDR") || td__env("MASTER_PORT"))
        return "env://"; /* which then says that RANK is missing */
    return NULL;
}

int td__rendezvous_expected_rank(const char *url, const td_rendezvous_options *options)
{
    int rank = -1;
    const struct dialect *mpi = mpi_in_use();
    if (options->rank > 0)
        return options->rank;
    if (!url)
        url = td__rendezvous_detect();
    const char *name = !url                       ? NULL
                       : !strcmp(url, "env://")   ? "RANK"
                       : !strcmp(url, "slurm://") ? slurm.rank
                       : !strcmp(url, "mpi://")   ? (mpi ? mpi->rank : NULL)
                                                  : NULL;
    const char *text = name ? td__env(name) : NULL;
    if (!text || !td__parse_int(text, 0, INT_MAX, &rank))
        return td__rendezvous_rank_0(options) ? 0 : -1;
    return rank;
}

/* Rank and sizes, from the options, the URL, or the launcher's variables. */
static td_status read_numbers(const struct dialect *dialect, const struct td__url *url,
                              const td_rendezvous_options *options, td_world *world)
{
    bool found = false;
    TD_TRY(td__rendezvous_given(url, options, &world->rank, &world->world_size));
    if (world->rank < 0) {
        TD_TRY(td__env_number(dialect->rank, 0, &world->rank, &found));
        if (!found && td__rendezvous_rank_0(options))
            world->rank = 0;
        if (world->rank < 0)
            return td_fail(TD_ERR_INVALID,
                           "%s: the variable %s is not set; is this process "
                           "started by the cluster's launcher?",
                           dialect->scheme, dialect->rank);
    }
    if (world->world_size < 0 && dialect->size_of_step)
        TD_TRY(td__env_number(dialect->size_of_step, 1, &world->world_size, &found));
    if (world->world_size < 0) {
        TD_TRY(td__env_number(dialect->size, 1, &world->world_size, &found));
        if (!found)
            return td_fail(TD_ERR_INVALID,
                           "%s: the variable %s is not set; it says how many "
                           "processes there are",
                           dialect->scheme, dialect->size);
    }
    TD_TRY(td__env_number(dialect->local_rank, 0, &world->local_rank, &found));
    if (dialect->local_size)
        TD_TRY(td__env_number(dialect->local_size, 1, &world->local_world_size, &found));
    return td__rendezvous_check(dialect->scheme, world->rank, world->world_size);
}

/* A unix socket's name for the job: its user and what identifies it on this host. */
static void name_socket(const char *kind, const char *job, char host[256])
{
    snprintf(host, 96, "unix:@tandem-%ld-%s-%s", (long)getuid(), kind, job);
    for (char *at = host + sizeof "unix:@" - 1; *at; at++)
        if (!isalnum((unsigned char)*at) && !strchr("-._", *at))
            *at = '_';
}

/* MASTER_PORT, or `otherwise` where it is not set. */
static td_status master_port(int otherwise, int *port)
{
    bool found;
    *port = otherwise;
    TD_TRY(td__env_number("MASTER_PORT", 0, port, &found));
    if (*port > 65535)
        return td_fail(TD_ERR_INVALID, "MASTER_PORT is %d, which is outside 0 to 65535", *port);
    return TD_OK;
}

/* The address that the user chose: MASTER_ADDR, or MASTER_PORT alone for a job on one host. False when
 * neither decides. */
static bool chosen_address(bool one_host, char host[256])
{
    const char *address = td__env("MASTER_ADDR");
    if (!address && !(one_host && td__env("MASTER_PORT")))
        return false;
    snprintf(host, 256, "%s", address ? address : "127.0.0.1");
    return true;
}

static td_status slurm_address(char host[256], int *port)
{
    const char *job = td__env("SLURM_JOB_ID"), *step = td__env("SLURM_STEP_ID");
    char first[256];
    int64_t hosts;
    TD_TRY(td__slurm_nodes(first, &hosts));
    /* The same on every rank, different for jobs and steps that run side by side. */
    TD_TRY(master_port(td__slurm_port(), port));
    if (chosen_address(hosts == 1, host))
        return TD_OK;
    if (hosts == 1) {
        char name[64];
        snprintf(name, sizeof name, "%s.%s", job ? job : "0", step ? step : "0");
        name_socket("slurm", name, host);
        *port = 0;
        return TD_OK;
    }
    if (!hosts)
        return td_fail(TD_ERR_INVALID, "slurm://: the variable SLURM_JOB_NODELIST is not set; it "
                                       "says on which hosts the job runs (or set MASTER_ADDR)");
    td__slurm_node_address(first, host);
    return TD_OK;
}

td_status td__rendezvous_slurm(const struct td__url *url, const td_rendezvous_options *options,
                               struct td__rendezvous_state *state)
{
    char host[256];
    int port;
    TD_TRY(read_numbers(&slurm, url, options, &state->world));
    TD_TRY(slurm_address(host, &port));
    return td__rendezvous_open(host, port, state->world.rank, state->world.world_size, options,
                               state);
}

td_status td__rendezvous_mpi(const struct td__url *url, const td_rendezvous_options *options,
                             struct td__rendezvous_state *state)
{
    const struct dialect *dialect = mpi_in_use();
    td_world *world = &state->world;
    if (!dialect)
        dialect = &mpi_dialects[0];
    TD_TRY(read_numbers(dialect, url, options, world));

    char host[256];
    int port;
    bool one_host = world->local_world_size < 0 || world->local_world_size == world->world_size;
    TD_TRY(master_port(DEFAULT_PORT, &port));
    if (!chosen_address(one_host, host)) {
        if (!one_host && td__launcher_kv_exists())
            return td__rendezvous_by_launcher(options, state);
        if (!one_host)
            return td_fail(TD_ERR_INVALID,
                           "mpi://: the job spans several hosts; set MASTER_ADDR to "
                           "the host of rank 0 (and MASTER_PORT, where %d is taken)",
                           DEFAULT_PORT);
        /* The ranks of one host have the job's number, or at least their parent, in common. */
        const char *job = td__env("PMIX_NAMESPACE");
        if (!job)
            job = td__env("OMPI_MCA_ess_base_jobid");
        char parent[24];
        snprintf(parent, sizeof parent, "p%ld", (long)getppid());
        name_socket("mpi", job ? job : parent, host);
        port = 0;
    }
    return td__rendezvous_open(host, port, world->rank, world->world_size, options, state);
}
