/* The store of a job whose nodes may be lost, as one of its launchers has it.
 *
 * Where the others go on without a node, each launcher has a server of the store (store/tcp_replica.h): one is the primary,
 * at first that of node 0, and those of the first other nodes are its standbys. The roster says which is which; it is
 * the coordinator that decides, by what the nodes report of their copies. A job that ends with any of its nodes has
 * one server, that of node 0. */
#ifndef TD_LAUNCH_NODE_STORE_H
#define TD_LAUNCH_NODE_STORE_H

#include "launch/options.h"
#include "launch/roster.h"

struct td__node;
struct td__node_store;

/** Whether the store has standbys. */
bool td__store_is_replicated(const struct td__run_options *options);

/** Takes part in it: opens this node's server, unless that hosts node->store already. `host` is where launchers
 *  listen. Sets what the introduction says of it. */
td_status td__node_store_open(struct td__node *node, bool first, const char *host);

/** The roster has changed: this node's server becomes what it is there. */
void td__node_store_follow(struct td__node *node);

/** What this node has; false where that is as it was at the last call. */
bool td__node_store_look(struct td__node *node, struct td__store_copy *copy);

/** No node that is left has a copy: opens an empty store here, and puts it into the roster. */
td_status td__node_store_renew(struct td__node *node);

void td__node_store_close(struct td__node *node);

#endif
