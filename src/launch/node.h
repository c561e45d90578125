/* This node's launcher among those of the other nodes.
 *
 * The launchers talk through the job's store, which node 0 hosts. All of it is done by threads, so
 * that a slow network never holds up the supervision of the workers; the agent gets events. A job
 * of one node has the same events, and uses no network. */
#ifndef TD_LAUNCH_NODE_H
#define TD_LAUNCH_NODE_H

#include "base/fail.h"
#include "launch/options.h"

#include <tandem/store.h>

/* ---- The job's secret, and the store that its nodes and its workers use ------------------------ */

struct td__job_secret {
    bool made; /* here, for this job: the workers get it in TANDEM_SECRET */
    char text[65];
};

/**
 * Finds the job's secret: what TANDEM_SECRET or TANDEM_SECRET_FILE say, otherwise a fresh one for a
 * job of one node, otherwise none.
 *
 * TD_ERR_AUTH: several hosts, but no secret, nor TANDEM_INSECURE=1.
 */
td_status td__job_secret_find(const struct td__run_options *options, struct td__job_secret *secret);

/**
 * Opens the store: hosts it on node 0, connects to it on the others, within the join timeout. Where
 * the node's rank is not given, *node_rank is 0 for the one that hosts it, and -1 for the others.
 */
td_status td__job_store_open(const struct td__run_options *options,
                             const struct td__job_secret *secret, int *node_rank, td_store **store);

/* ---- The other nodes -------------------------------------------------------------------------- */

enum td__node_event_kind {
    TD__NODE_READY,    /* all nodes have joined: td__node_world() is known, workers may start */
    TD__NODE_FAILED,   /* a worker has failed on another node: the attempt ends */
    TD__NODE_ALL_GONE, /* the workers of the attempt have ended on all nodes; when there was a failure
                          and restarts are left, the next attempt follows, otherwise the job has ended */
    TD__NODE_LOST,     /* --keep-going: a launcher has ended, and its workers with it */
    TD__NODE_OVER, /* the job cannot go on: a launcher has ended, or was signalled to end, … */
};

struct td__node_event {
    enum td__node_event_kind kind;
    int code;                  /* FAILED, OVER: the exit code that goes with it */
    char text[TD__ERROR_TEXT]; /* FAILED, LOST, OVER: what happened, in a sentence */
};

/** The ranks of this node's workers in the job. */
struct td__node_world {
    int node_rank;
    int rank;      /* of the first worker here */
    int size;      /* workers of all nodes */
    int role_rank; /* likewise, among the workers of the same role */
    int role_size;
    int port; /* of the store */
};

struct td__node;

/** Begins to join the other nodes. `notify` is called by another thread when there is an event. The
 *  options and the secret are borrowed until td__node_close(). */
td_status td__node_start(const struct td__run_options *options, const struct td__job_secret *secret,
                         void (*notify)(void *), void *arg, struct td__node **node);

/** Takes the next event; false when there is none. */
bool td__node_next(struct td__node *node, struct td__node_event *event);

/** From TD__NODE_READY on. */
const struct td__node_world *td__node_world(const struct td__node *node);

/** A worker has failed here: reports it to the other nodes, which get `code` and `text` when it was the
 *  first failure of the attempt. */
void td__node_failed(struct td__node *node, int attempt, int code, const char *text);

/** All workers of the attempt have ended here. TD__NODE_ALL_GONE follows, or TD__NODE_OVER. */
void td__node_gone(struct td__node *node, int attempt);

/** Ends the job on all nodes. */
void td__node_end_job(struct td__node *node, int code, const char *text);

/** Leaves the job. False when a thread still waits for the network: then the process should end at once,
 *  and `node` is not freed. */
bool td__node_close(struct td__node *node);

#endif
