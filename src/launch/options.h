/* What tdrun was asked to do. */
#ifndef TD_LAUNCH_OPTIONS_H
#define TD_LAUNCH_OPTIONS_H

#include "launch/numa.h"

#include <tandem/base.h>

#include <limits.h>
#include <signal.h>
#include <stdio.h>

/* What becomes of a worker's stream. */
enum { TD__STREAM_STDOUT = 1, TD__STREAM_STDERR = 2 };

/* A host of --hosts (hosts.h). */
struct td__host {
    char target[256];    /* as ssh gets it: "user@b" */
    const char *address; /* behind the user: "b" */
    char slots[16];      /* how many workers; "" where that is not given */
};

struct td__hosts {
    struct td__host *at;
    int count;
};

/* What becomes of the others when a worker fails. */
enum td__on_failure {
    TD__RESTART_ALL, /* they are ended, and all start again */
    TD__REPLACE,     /* they go on, and the one that failed is started again, by itself */
    TD__SHRINK,      /* they go on without it */
};

/** "restart-all", "replace" or "shrink". */
const char *td__on_failure_name(enum td__on_failure on_failure);

enum { TD__MAX_ENDPOINTS = 8 };

struct td__run_options {
    bool help, version; /* print it and do nothing else */

    /* The job. */
    int nnodes;    /* at most … */
    int min_nodes; /* … and at least; the same where the number is fixed */
    int node_rank; /* -1: in the order in which the nodes arrive */
    int nproc;     /* workers on this node */
    const char *role;
    const char *run_id;
    enum td__on_failure on_failure;
    int max_restarts;            /* of all workers; TD__REPLACE: of each one */
    int spares;                  /* TD__REPLACE: processes that are kept ready on this node */
    char **program;              /* with its arguments, ended by NULL */
    bool module;                 /* it is the name of a Python module … */
    bool run_path;               /* … a Python script, whatever its name … */
    bool no_python;              /* … no Python script, whatever its name */
    const char *local_rank_name; /* "local_rank": workers get --local_rank=N; NULL: they do not */

    /* The endpoint of the store. */
    char host[256];
    int port;       /* 0: any */
    bool port_free; /* another port will do where this one is taken */
    struct td__store_endpoint {
        char host[256];
        int port;
    } endpoints[TD__MAX_ENDPOINTS]; /* all that --rdzv-endpoint lists; the first is the one above */
    int endpoint_count;
    const char *local_addr;
    int is_host; /* whether this launcher hosts the store: 1, 0, or -1: it finds out */
    double join_timeout_s;
    double last_call_timeout_s; /* to wait for further nodes once min_nodes are there */

    /* Other hosts, whose launchers are started from here: they are this one's workers. */
    struct td__hosts hosts;                  /* none: this is an ordinary launcher */
    const char *launch_agent, *remote_tdrun; /* NULL: ssh, and the file of this program */
    const char *exported;                    /* further variables for them */
    char hosts_master[256];                  /* where they meet */
    int hosts_port;
    char **flags; /* the flags as they were given */
    int flag_count;
    const char *served_host; /* this launcher was started so, on a host of this name */

    /* The workers' output. */
    const char *log_dir; /* NULL: a fresh one */
    uint8_t *redirect;   /* for each local rank: TD__STREAM_* that go to a file only … */
    uint8_t *tee;        /* … and those that go to a file and to the console */
    bool *shown;         /* for each local rank: whether the console shows it at all */

    const char *postmortem_file; /* NULL: none */

    sigset_t signals;
    double shutdown_timeout_s;
    enum td__numa_binding numa;

    int threads;      /* of each worker, as Slurm has it; 0 where it does not say */
    bool quiet;       /* parsing has failed, and another process of the job says why */
    char notes[1024]; /* lines for the user on what has no effect; "" when there are none */
    char generated_id[33];
};

/**
 * Reads the command line, and PET_… variables as defaults. The options keep pointers into argv and
 * into the environment, and are freed with td__run_options_free().
 *
 * TD_ERR_INVALID: a sentence that says what is wrong, for exit code 2.
 */
td_status td__run_options_parse(int argc, char **argv, struct td__run_options *options);

/** Whether the others go on when a worker, or a node, is lost. */
static inline bool td__others_go_on(const struct td__run_options *options)
{
    return options->on_failure != TD__RESTART_ALL;
}

void td__run_options_free(struct td__run_options *options);

/** The name of this host in messages. */
const char *td__this_host(const struct td__run_options *options);

/** The text of --help. */
void td__run_options_help(FILE *out);

/* ---- Under Slurm (options_slurm.c) ----------------------------------------------------------- */

/* What the flags said of the job's place; NULL and -1 where they did not. */
struct td__given_place {
    const char *nnodes, *master_addr, *endpoint;
    int node_rank, master_port;
    bool numbered_on_arrival; /* by --rdzv-backend c10d */
};

/**
 * Where srun has started one launcher on each node: fills in what the flags leave open, the number of nodes, the
 * rank of this one, node 0's address and a port, and how many threads a worker gets; a --node-rank that the batch
 * shell has expanded is replaced, with a note. Elsewhere it leaves all as it is.
 *
 * TD_ERR_INVALID: srun has started several launchers on a node that would all start the same workers. The sentence
 * says what to write instead; all but the first of them get `quiet`.
 */
td_status td__options_from_slurm(const struct td__given_place *given,
                                 struct td__run_options *options);

/* ---- Values of flags that are more than a number or a text ----------------------------------- */

enum { TD__MAX_NODES = 65536, TD__MAX_WORKERS = 65536 };

/** --nnodes: N, or MIN:MAX. */
td_status td__take_nnodes(const char *text, int *least, int *most);

/** --nproc-per-node: a number, or cpu (one for each that may be used), gpu (one for each that a CUDA
 *  program would see), or auto: gpu where there is one, otherwise cpu. */
td_status td__take_nproc(const char *text, int *nproc);

/** What --rdzv-conf may have, in seconds; what is not given stays as it is. `unused` is only accepted. */
struct td__rdzv_conf {
    double timeout, join_timeout, last_call_timeout;
    double is_host; /* 0 or 1 */
    double unused;
};

td_status td__take_conf(const char *list, struct td__rdzv_conf *conf);

/** --on-failure: restart-all, replace or shrink. */
td_status td__take_on_failure(const char *text, enum td__on_failure *on_failure);

/** --signals-to-handle: names with commas, with or without "SIG". */
td_status td__take_signals(const char *list, sigset_t *signals);

/** --redirects and --tee: "3" for every worker, or "0:3,1:1" for some of them. */
td_status td__take_streams(const char *flag, const char *text, int nproc, uint8_t *streams);

/** --local-ranks-filter: local ranks with commas. */
td_status td__take_filter(const char *list, int nproc, bool *shown);

/* ---- The GPUs of this machine, and those of them that a CUDA program would see ---------------- */

enum { TD__MAX_GPUS = 256 };

struct td__gpus {
    int count;
    struct {
        int minor;     /* of its device file, /dev/nvidia<minor> */
        char uuid[64]; /* "GPU-8932f937-…"; "" where the driver does not tell */
    } at[TD__MAX_GPUS];
};

/** Finds those that have a device file in `dev`, with what the driver tells about them in `driver`:
 *  "/dev" and "/proc/driver/nvidia/gpus" unless in a test. */
void td__gpus_find(const char *dev, const char *driver, struct td__gpus *gpus);

/**
 * How many of them a program sees with this CUDA_VISIBLE_DEVICES (NULL: it is not set), by CUDA's
 * rules: numbers, or UUIDs that begin with "GPU-" and may be cut short. The first entry that names no
 * GPU ends the list, a GPU that is named twice makes it empty, and so does the empty text. Of MIG
 * instances, "MIG-…", a program sees one.
 */
int td__gpus_visible(const struct td__gpus *gpus, const char *list);

/* ---- The program that is to be started: its file, its interpreter, its arguments --------------- */

/** What each worker runs. */
struct td__worker_program {
    char path[PATH_MAX]; /* what is executed: the program, or the interpreter of a script */
    char **argv;         /* ended by NULL; the arguments themselves belong to the options … */
    char *local_rank;    /* … but this one, with room for "--local_rank=N"; NULL: there is none */
    const char *local_rank_name;
    bool by_itself; /* a Python script that its first line runs */
};

/**
 * Finds out what to execute for options->program. A name with a slash is a file, another one the first
 * executable of that name in PATH, as for execvp(). A file *.py is a script for the interpreter, which
 * is $PYTHON_EXEC or python3, unless it is executable and names its own in its first line (and no
 * PYTHON_EXEC is set); one without a slash is looked for in the current directory first.
 *
 * TD_ERR_INVALID: there is none, or it cannot be run. The sentence says which, and what to do;
 * *exit_code is then what a shell would exit with, 127 or 126. Free with td__worker_program_free().
 */
td_status td__worker_program_plan(const struct td__run_options *options,
                                  struct td__worker_program *program, int *exit_code);

void td__worker_program_free(struct td__worker_program *program);

/** The arguments of one worker: program->argv, with its local rank where that is passed. */
char **td__worker_program_arguments(const struct td__worker_program *program, int local_rank);

/** Finds the file that execvp() would run for `name`. */
td_status td__find_program(const char *name, char path[PATH_MAX], int *exit_code);

/** The sentence and exit code for a file that was found, but that execve() refused with `error`. */
td_status td__worker_program_refused(const char *name, int error, int *exit_code);

#endif
