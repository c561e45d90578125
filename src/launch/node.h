/* This node's launcher among those of the other nodes.
 *
 * One launcher, the coordinator, decides which nodes the job has, and when the workers start and end: node 0 at first,
 * which hosts the store; where it dies, another one takes over. The others have a connection to it each
 * (node_link.h). All of it is done by a thread, so that a slow network never holds up the supervision of the workers;
 * the agent gets events. A job of one node has the same events, and uses no network. */
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
 * job of one node, under Slurm the one of td__slurm_adopt_secret(), otherwise none.
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

/** The ranks of this node's workers in the job. */
struct td__node_world {
    int node_id; /* unlike its rank it never changes */
    int node_rank;
    int nodes;     /* how many there are */
    int rank;      /* of the first worker here */
    int size;      /* workers of all nodes */
    int role_rank; /* likewise, among the workers of the same role */
    int role_size;
    int round;        /* how often all workers were started before … */
    int restarts;     /* … because one had failed */
    bool late;        /* the others run already: these workers are newcomers */
    char address[64]; /* of the store; "": that of the options */
    int port;
    char standbys[600]; /* "host:port,host:port": where it may move to */
};

enum td__node_event_kind {
    TD__NODE_ROUND,    /* the workers may start; `world` has their ranks */
    TD__NODE_FAILED,   /* a worker has failed on another node: this round ends */
    TD__NODE_CHANGED,  /* nodes come or go: this round ends, another one follows */
    TD__NODE_ALL_GONE, /* the workers have ended on all nodes, and the job with them */
    TD__NODE_LOST,     /* a node is lost, and the others go on */
    TD__NODE_STORE,    /* the store has moved, or its standbys have: `world` says where they are */
    TD__NODE_DRAIN,    /* this node is to leave: td__node_depart() */
    TD__NODE_ADOPT,    /* a spare here gets rank `code`, of a node that is no more: `text` says which */
    TD__NODE_ANSWER,   /* to td__node_drain(): `code` is 0 where it is passed on */
    TD__NODE_OVER, /* the job cannot go on: a launcher has ended, or was signalled to end, … */
};

struct td__node_event {
    enum td__node_event_kind kind;
    bool own; /* OVER: this node has noticed it itself */
    int code; /* FAILED, OVER: the exit code that goes with it */
    char text
        [TD__ERROR_TEXT]; /* FAILED, CHANGED, LOST, ADOPT, ANSWER, OVER: what happened, in a sentence */
    struct td__node_world world; /* ROUND, STORE */
};

struct td__node;

/** Begins to join the other nodes. `notify` is called by another thread when there is an event. The
 *  options and the secret are borrowed until td__node_close(). */
td_status td__node_start(const struct td__run_options *options, const struct td__job_secret *secret,
                         void (*notify)(void *), void *arg, struct td__node **node);

/** Takes the next event; false when there is none. */
bool td__node_next(struct td__node *node, struct td__node_event *event);

/** A worker has failed here, and the round is to end: reports it to the other nodes, which get `code` and `text` when
 *  it was the first failure of the round. */
void td__node_failed(struct td__node *node, int round, int code, const char *text);

/** All workers of the round have ended here. TD__NODE_ROUND, TD__NODE_ALL_GONE or TD__NODE_OVER follows. */
void td__node_gone(struct td__node *node, int round);

/** This node leaves the job, once its workers have ended; the others go on. */
void td__node_depart(struct td__node *node);

/** Another node, or this one, is to leave: `name` is its rank or its host. TD__NODE_ANSWER follows, and there
 *  TD__NODE_DRAIN. */
void td__node_drain(struct td__node *node, const char *name);

/** Ends the job on all nodes. */
void td__node_end_job(struct td__node *node, int code, const char *text);

/** Leaves the job. False when a thread still waits for the network: then the process should end at once,
 *  and `node` is not freed. */
bool td__node_close(struct td__node *node);

#endif
