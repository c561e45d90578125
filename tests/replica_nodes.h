/* Servers of a replicated store, each in a process of its own, as the launchers of a job have them. The process that
 * starts them is their clients, and tells them what to do. All of these end the test when they fail. */
#ifndef TANDEM_TESTS_REPLICA_NODES_H
#define TANDEM_TESTS_REPLICA_NODES_H

#include "store/tcp_replica.h"

#include <tandem/store.h>

#include <sys/types.h>

struct replica_node_page;

struct replica_node {
    pid_t pid;
    int number;
    char address[32];
    struct replica_node_page *page; /* shared with it */
};

/** Servers that are started afterwards are reached over TCP, and not by the unix socket beside it. */
extern bool replica_over_tcp;

#define REPLICA_SECRET "a secret for replicas"

/** Starts one; it is a standby of nobody. */
void replica_start(struct replica_node *node, int number);

/** The calls of tcp_replica.h in that process; the last error is its. */
td_status replica_attach(struct replica_node *node, const struct replica_node *primary);
td_status replica_promote(struct replica_node *node, int term);
td_status replica_depose(struct replica_node *node, int term);
struct td__tcp_replica_state replica_state(struct replica_node *node);

/** Closes its server in order, and waits for its end. */
void replica_close(struct replica_node *node);

void replica_kill(struct replica_node *node);

/** SIGSTOP, and returns when it is stopped; SIGCONT. */
void replica_stop(struct replica_node *node);
void replica_go_on(struct replica_node *node);

/** Starts `count`; the first one is promoted, the others are attached to it. */
void replica_start_all(struct replica_node *nodes, int count);

/** A client that knows the addresses of the first `count`. */
td_store *replica_open(const struct replica_node *nodes, int count);

/** How many members the primary has. */
int replica_members(struct replica_node *node);

#endif
