/* The launcher among the others, shared by node.c (the thread, and what the agent calls), node_join.c (how a
 * launcher finds the job), node_member.c (what it makes of the coordinator's messages, and of its loss) and
 * node_coordinator.c (what the coordinator decides). All but the fields behind `lock` are the thread's. */
#ifndef TD_LAUNCH_NODE_INTERNAL_H
#define TD_LAUNCH_NODE_INTERNAL_H

#include "base/auth.h"
#include "launch/node_link.h"
#include "launch/roster.h"

#include <pthread.h>
#include <sys/queue.h>

struct td__auth_listener;
struct td__coordination;
struct td__node_store;

/* In the job's store: port, identity and address of the coordinator's listener. */
#define TD__COORDINATOR_KEY "\1launch/coordinator"

/* A launcher that has connected to this one. */
struct td__node_peer {
    TAILQ_ENTRY(td__node_peer) entry;
    struct td__node_link link;
    int id;                    /* of its node; -1 as long as it has none */
    struct td__buffer joining; /* its JOIN, which waits until this launcher is the coordinator */
    bool dropped;              /* it is closed once its last message was sent */
    int64_t dropped_ns;
};

struct td__event_entry {
    STAILQ_ENTRY(td__event_entry) entry;
    struct td__node_event event;
};

struct td__node {
    const struct td__run_options *options;
    const struct td__job_secret *given_secret;
    void (*notify)(void *arg);
    void *arg;

    /* How others reach this launcher. */
    struct td__secret secret;
    struct td__auth_listener *listener;
    uint8_t identity[TD__IDENTITY_SIZE];
    int port;
    TAILQ_HEAD(, td__node_peer) peers;

    td_store *store; /* where this launcher has it, or a connection to it */
    struct td__node_store *keeper; /* where the store has standbys (node_store.h) */
    struct td__introduction introduction;
    struct td__roster roster; /* the last that was agreed; without nodes before the first round */
    struct td__node_link up;  /* to the coordinator, where that is another launcher */
    int64_t
        up_limit_ns; /* after a takeover: until when the new coordinator has to answer; 0: it has */
    struct td__coordination *lead; /* this launcher is the coordinator */
    uint8_t *lost; /* in a takeover, for each node of the roster: td__roster_has_quorum() */
    bool over;     /* the job has ended, or goes on without this node */
    bool leaves;   /* this node does, in order */

    pthread_t thread;
    int wake; /* an eventfd */

    pthread_mutex_t lock; /* protects all below; no other lock is taken under it */
    pthread_cond_t thread_ended;
    STAILQ_HEAD(, td__event_entry) events;
    struct td__node_link orders; /* messages of the agent, in `in`; it has no descriptor */
    bool running;                /* the thread is */
    bool joined;                 /* it does not wait for the network any more */
    bool closing;
};

/* ---- node.c ---------------------------------------------------------------------------------- */

void td__node_post(struct td__node *node, enum td__node_event_kind kind, bool own, int code,
                   const char *text);
void td__node_post_round(struct td__node *node, bool late);
void td__node_post_store(struct td__node *node);

/** Ends the job for this node: it has noticed that itself. */
void td__node_post_over(struct td__node *node, const char *text);

/** Sends a message to the coordinator. */
void td__node_tell(struct td__node *node, enum td__node_message kind, const void *body,
                   size_t size);

/* ---- node_join.c ----------------------------------------------------------------------------- */

/** Finds the job, and joins it: from then on there is `up`, or `lead`. */
td_status td__node_join(struct td__node *node);

/** Connects to a launcher; TD_ERR_PEER at once where it has ended. */
td_status td__node_connect(struct td__node *node, const struct td__roster_node *to,
                           int64_t timeout_ms, int *fd);

/** The value of TD__COORDINATOR_KEY where this launcher is the coordinator. */
void td__node_put_coordinator(const struct td__node *node, struct td__buffer *value);

/** Sends the JOIN to the coordinator. */
void td__node_introduce(struct td__node *node);

/* ---- node_member.c --------------------------------------------------------------------------- */

/** A message of the coordinator. */
void td__member_take(struct td__node *node, enum td__node_message kind, struct td__span body);

/** The connection to the coordinator has ended, or it is silent. */
void td__member_lose_coordinator(struct td__node *node, bool silent);

/** Joins the next launcher that may be the coordinator now, or becomes it. */
void td__member_take_over(struct td__node *node);

/** "the launcher of node 1 (process 5 on b) has ended", or why it counts as lost. */
void td__member_describe_loss(const struct td__roster_node *lost, bool silent, char *text,
                              size_t room);

/* ---- node_coordinator.c ---------------------------------------------------------------------- */

/** This launcher is the coordinator of a job that begins, … */
td_status td__lead_begin(struct td__node *node);

/** … or from now on, of those of node->roster that are not `lost`. */
void td__lead_take_over(struct td__node *node);

/** A message of a node, or of one that has none yet: `peer` is NULL for this one. */
void td__lead_take(struct td__node *node, struct td__node_peer *peer, enum td__node_message kind,
                   struct td__span body);

/** The connection of a node has ended, or it is silent. */
void td__lead_lose(struct td__node *node, struct td__node_peer *peer, bool silent);

/** Whether a node that has not been heard of for so long may be lost. */
int64_t td__node_silence_ns(void);

/** Does what is due; returns when it is to be called again. */
int64_t td__lead_tick(struct td__node *node);

/** Ends the job on all nodes but node `except`. */
void td__lead_end_job(struct td__node *node, int except, int code, const char *text);

/** Whether there is nothing more to be said to the other nodes. */
bool td__lead_is_done(const struct td__node *node);

void td__lead_free(struct td__node *node);

#endif
