/* Which nodes a job has, as its launchers have agreed: the coordinator makes a roster, and sends it to all.
 *
 * A node has an `id`, which no other node of the job gets after it, and the rank that it has at present. With
 * --on-failure restart-all each round ranks the nodes and workers from 0 again. Otherwise the workers that run keep
 * their ranks, and a node that joins gets the lowest ones that no living worker has. */
#ifndef TD_LAUNCH_ROSTER_H
#define TD_LAUNCH_ROSTER_H

#include "base/auth.h"
#include "base/buffer.h"
#include "launch/node.h"

enum { TD__ADOPTED = 64 }; /* ranks of nodes that are no more, which a node takes over at most */

struct td__roster_node {
    int id, node_rank;
    int rank, nproc;                     /* of its first worker, and how many there are */
    int spares;                          /* how many it was started with … */
    int adopted[TD__ADOPTED], adoptions; /* … and the ranks that some of them have for good */
    int pid;                             /* of its launcher's agent */
    int port;                            /* of its launcher, and … */
    char address[64];                    /* … where that is; "": where the endpoint is */
    uint8_t identity[TD__IDENTITY_SIZE]; /* of that launcher, for the proof of the secret */
    uint32_t store_number; /* of its server of the store … */
    int store_port;        /* … which is at the same address; 0: it has none */
    char host[256], role[256];
};

enum { TD__STANDBYS = 3 }; /* of the store: so many nodes may be lost at once */

struct td__roster {
    int version;            /* counts the changes, from 1 */
    int round;              /* how often all workers were started before */
    int restarts;           /* … because one had failed */
    int coordinator;        /* its id */
    char store_address[64]; /* of the workers' store; "": it is at the endpoint */
    int store_port;
    uint64_t store_term; /* of the primary there (store/tcp_replica.h) … */
    uint32_t store_number;      /* … and its number; where the store has no standbys both mean nothing */
    struct td__roster_node *at; /* by node_rank, ascending */
    int count;
};

void td__roster_put(struct td__buffer *buffer, const struct td__roster *roster);

/** Replaces *roster; false, and leaves it, where the bytes are no roster. */
bool td__roster_take(struct td__reader *reader, struct td__roster *roster);

void td__roster_free(struct td__roster *roster);

/** NULL where there is none. */
const struct td__roster_node *td__roster_find(const struct td__roster *roster, int id);

/** The node whose server of the store has this number; NULL where it is not in the roster. */
const struct td__roster_node *td__roster_find_store(const struct td__roster *roster,
                                                    uint32_t number);

/** Whether this node is to have a standby of the store: the first ones are. */
bool td__roster_is_standby(const struct td__roster *roster, const struct td__roster_node *node);

/** The ranks of the workers of node `id`, which is in the roster. */
void td__roster_world(const struct td__roster *roster, int id, struct td__node_world *world);

/** Whether the nodes that are left may go on without those that were silent before they were lost: more than half of
 *  them all, or half with the one of lowest rank. `lost[i]` is 0 for a node that is there, 1 for one that is silent, and
 *  2 for one whose launcher is known to have ended, which does not count. */
bool td__roster_has_quorum(const struct td__roster *roster, const uint8_t *lost);

/* ---- Messages ---------------------------------------------------------------------------------- */

/** What a node has of the store, as td__tcp_replica_state. */
struct td__store_copy {
    uint32_t number;
    bool primary, whole;
    uint64_t term, copy_term, copy_version;
};

void td__store_copy_put(struct td__buffer *buffer, const struct td__store_copy *copy);
void td__store_copy_read(struct td__reader *reader, struct td__store_copy *copy);

/** Something went wrong on a node. */
struct td__report {
    int node;                  /* its id */
    int round;                 /* of the workers */
    int code;                  /* the exit code that goes with it */
    char text[TD__ERROR_TEXT]; /* a sentence */
};

void td__report_put(struct td__buffer *buffer, const struct td__report *report);
bool td__report_read(struct td__span span, struct td__report *report);

/** What a node says of itself when it joins. */
struct td__introduction {
    int nnodes, min_nodes, max_restarts, on_failure;
    int wanted_rank; /* --node-rank, or -1 */
    char run_id[256];
    char version[64];            /* of Tandem */
    struct td__roster_node node; /* its id is -1 unless it has one already */
    int round_gone;              /* the last round in which all workers have ended here; -1: none */
    struct td__store_copy copy;
};

void td__introduction_put(struct td__buffer *buffer, const struct td__introduction *introduction);
bool td__introduction_read(struct td__reader *reader, struct td__introduction *introduction);

/** Compares what must be the same on all nodes; TD_ERR_MISMATCH names both. */
td_status td__introduction_check(const struct td__introduction *node, int node_rank,
                                 const struct td__introduction *first);

#endif
