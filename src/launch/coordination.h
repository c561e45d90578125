/* The coordinator's state, shared by node_coordinator.c (rounds, and nodes that come) and node_losses.c. */
#ifndef TD_LAUNCH_COORDINATION_H
#define TD_LAUNCH_COORDINATION_H

#include "launch/node_internal.h"

enum td__phase { TD__GATHER, TD__RUN, TD__STOP, TD__TAKEOVER, TD__ENDED };

/* A node of the job. */
struct td__seat {
    struct td__introduction introduction;
    struct td__node_peer *peer; /* NULL: this node; or, in a takeover, one that has not come yet */
    bool own, here;
    bool in_round; /* it has workers of this round … */
    bool gone;     /* … which have ended */
    bool leaving;
    uint8_t lost; /* as for td__roster_has_quorum() */
    char why[512];
};

struct td__coordination {
    enum td__phase phase;
    struct td__seat *seats; /* by id, ascending */
    int count, next_id;
    struct td__introduction first; /* what all nodes must agree with */
    bool failed;                   /* TD__STOP: because of a worker */
    int64_t handing_ns; /* until when the store may take to move from a node that leaves; 0: it does not */
    int64_t begun_ns, limit_ns, last_call_ns;
};

/** Whether nodes may come and go. */
static inline bool td__lead_is_elastic(const struct td__node *node)
{
    return node->options->min_nodes < node->options->nnodes;
}

/** NULL where no node has this id. */
struct td__seat *td__lead_seat(const struct td__node *node, int id);

/** Seats may move in memory. */
struct td__seat *td__lead_add(struct td__node *node, const struct td__introduction *introduction,
                              struct td__node_peer *peer);
void td__lead_remove(struct td__node *node, struct td__seat *seat);

/** Sends a report to all nodes but `except`; TD__MESSAGE_STOP and _CHANGE to those that have workers. `from` is the
 *  id of a node, or -1. */
void td__lead_report(struct td__node *node, enum td__node_message kind, int from, int code,
                     const char *text, int except);

/** Tells one node. */
void td__lead_tell(struct td__node *node, const struct td__seat *seat, enum td__node_message kind,
                   const struct td__buffer *body);

/** Refuses a launcher. */
void td__lead_refuse(struct td__node_peer *peer, const char *text);

/** Sends a roster of the seats, while the workers go on. */
void td__lead_update(struct td__node *node);

/** Begins a round where enough nodes are there. */
void td__lead_check_gathered(struct td__node *node);

/** Ends the round where all its workers have ended. */
void td__lead_check_round(struct td__node *node);

/** Lets nodes go that leave in order, and have no worker left; a store that is on one of them moves before. */
void td__lead_let_go(struct td__node *node);

/** Ends the workers of all nodes, because nodes come or go. */
void td__lead_change(struct td__node *node, const char *text);

/* ---- node_adopt.c ---------------------------------------------------------------------------- */

/** With --on-failure replace: spares of other nodes get the ranks of a node that has left or is lost; its seat is still
 *  there. The roster that follows says who has them. */
void td__lead_pass_on(struct td__node *node, const struct td__seat *left);

/** The rank behind those of `other` where it has one of `count` from `rank` on; else -1. */
int td__roster_node_behind(const struct td__roster_node *other, int rank, int count);

/* ---- node_losses.c --------------------------------------------------------------------------- */

/** Decides on nodes that are lost. */
void td__lead_judge(struct td__node *node);

/** The node with the store's primary is lost, or leaves (`without`, or -1): another one is to have it, by the roster that
 *  is to be published. False where there is none with a copy; then it stays where it is. */
bool td__lead_move_store(struct td__node *node, int without);

/** What a node has of the store. */
void td__lead_take_copy(struct td__node *node, struct td__seat *seat, struct td__span body);

/** A node of the job that has lost the coordinator before this one. */
void td__lead_return(struct td__node *node, const struct td__introduction *introduction,
                     const struct td__roster *theirs, struct td__node_peer *peer);

/** TD__TAKEOVER: does what is due; returns when it is to be called again. */
int64_t td__lead_tick_takeover(struct td__node *node);

#endif
