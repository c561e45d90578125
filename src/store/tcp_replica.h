/* A TCP store that outlives the process that hosts it.
 *
 * Every launcher of a job opens a server; one of them is the primary, the others are its standbys:
 *
 *     launcher 0                launcher 1                launcher 2
 *     ┌──────────────┐  every   ┌──────────────┐          ┌──────────────┐
 *     │ primary      │  change  │ standby 1    │          │ standby 2    │
 *     │ term 1       ├─────────>│ copy (1, 3)  │          │ copy (1, 3)  │
 *     │              ├──────────┼──────────────┼─────────>│              │
 *     └──▲───▲───▲───┘   ACKs   └──────────────┘          └──────────────┘
 *        clients: know the addresses of all three, in order
 *
 * The primary carries a change out, sends it to all standbys, and answers the client when all have confirmed it. So a
 * standby has all that was confirmed. One that is late for the heartbeat's limit (TANDEM_HEARTBEAT), or whose connection
 * ends, is dropped; the store goes on without it, and it may attach again.
 *
 * Nobody becomes primary on its own. When the primary's connection ends, or it is silent for the heartbeat's limit,
 * its standbys say so (primary_lost), and no more. The launchers then agree, by what they know of each other, on whether
 * it is lost and on the successor, and one calls td__tcp_replica_promote() there:
 *
 *     1  each launcher reads td__tcp_replica_state() of its own server
 *     2  they compare the copies: the highest (copy_term, copy_version) with `whole`; among these the lowest number
 *     3  that one is promoted, with a term above all terms that anyone has seen
 *     4  the others attach to it; so does the old primary if it comes back
 *
 *     primary: launcher 0 ✗        1: promote(server, 2)       2: attach(server, "host1:port")
 *
 * What keeps two primaries apart: a term belongs to one primary. Whoever has seen term t (standbys in their link, clients
 * in every answer to their HELLO) refuses a primary of an earlier one, and says t to it: it is then deposed, drops the
 * answers that no standby has confirmed, sends its clients away and logs it. The promoted server says so to the old one
 * first of all, on the connection that it has; a primary that was only stopped reads that before it drops a standby, since
 * a standby is dropped only at the second look. A standby that was dropped is not a successor: the list of members has a
 * version, which clients learn before any answer that the dropped one does not have, and they refuse a primary that
 * began with an older one. What remains: a primary that is cut off from all standbys goes on alone for those clients that
 * it still reaches, as the only member; where that must not be, its launcher, which is cut off with it, calls
 * td__tcp_replica_depose() or ends.
 *
 * Clients notice the end of their connection, and try the servers that they know, lowest number first, until one is the
 * primary. They send again what was not answered; each change carries its client's number, so it is carried out
 * once. Calls that wait go on waiting there. A will (store_ops.h) is copied, too: it is carried out by the next primary
 * when its client does not come back within the heartbeat's limit. */
#ifndef TD_STORE_TCP_REPLICA_H
#define TD_STORE_TCP_REPLICA_H

#include "base/clock.h"
#include "store/store_replica.h"

struct td__tcp_server;

struct td__tcp_replica_options {
    const char *host; /* where to listen, as in td_tcp_store_open() */
    int port;         /* 0: a free one */
    const char *secret;
    uint32_t number;     /* of this server in its job, unique; the launcher's node rank */
    const char *address; /* "host:port" for the others; NULL: `host` and the port */

    /** NULL, or called when the state has changed, on the server's thread: must not block, and calls nothing of this
     *  header but td__tcp_replica_state(). */
    void (*changed)(void *arg);
    void *arg;
};

struct td__tcp_replica_state {
    enum td__replica_role role;
    uint64_t term;                    /* the highest that it has seen; 0: none */
    uint64_t copy_term, copy_version; /* what its copy is of; later ones compare higher */
    bool whole;        /* the copy is complete, and the primary counted on it when last heard */
    bool primary_lost; /* it was attached, and the connection has ended or is silent */
    bool ended;        /* the primary was closed in order: there will be no successor */
    uint32_t number;
    struct td__replica_list members; /* the primary and its standbys, by number */
};

/**
 * Opens a server that is a standby of nobody yet: clients and standbys are sent away. The first server of a store is
 * promoted with term 1, every other one is attached.
 *
 * Errors: TD_ERR_INVALID, TD_ERR_AUTH, TD_ERR_SYSTEM (the port is taken, …), TD_ERR_NOMEM.
 */
td_status td__tcp_replica_open(const struct td__tcp_replica_options *options,
                               struct td__tcp_server **server);

int td__tcp_replica_port(const struct td__tcp_server *server);

/** The server of a store that td_tcp_store_open() hosts, NULL where it does not: the primary of term 1, which standbys
 *  may attach to. It lives as long as the store, and is not closed by td__tcp_replica_close(). */
struct td__tcp_server *td__tcp_store_server(td_store *store);

/** Gives such a server what td__tcp_replica_open() takes: its number (0 before), its address for the others (where
 *  clients and standbys have reached it), and the callback. Before the first standby attaches. */
td_status td__tcp_replica_name(struct td__tcp_server *server, uint32_t number, const char *address,
                               void (*changed)(void *arg), void *arg);

/**
 * Makes the server a standby of the primary at `address` ("host:port"), and waits until its copy is whole and the primary
 * counts on it. A standby of another primary leaves that; a deposed primary gives its own copy up. `secret` is that of
 * td_tcp_store_options.
 *
 * Errors: TD_ERR_STATE (it is a primary; or what is there is none, or one of an earlier term, or has a member of this number
 * or too many: the message says which), TD_ERR_TIMEOUT, TD_ERR_PEER, TD_ERR_AUTH. It is then a standby of nobody, with the
 * copy that it had, unless a new one had arrived.
 */
td_status td__tcp_replica_attach(struct td__tcp_server *server, const char *address,
                                 const char *secret, td__deadline deadline);

/**
 * Makes a standby the primary of `term`. Before anything else the earlier primary is told, where it can be reached.
 *
 * Errors: TD_ERR_STATE: it is a primary, its copy is not whole, a primary of a later term than the copy's has been seen,
 * or `term` is not higher than every term that it has seen.
 */
td_status td__tcp_replica_promote(struct td__tcp_server *server, uint64_t term);

/** Tells the server that there is a primary of `term`: if it is one of an earlier term, it is deposed. */
td_status td__tcp_replica_depose(struct td__tcp_server *server, uint64_t term);

/** Lets clients and standbys reach the server at a second address, too: where its predecessor was. Once.
 *
 *  Errors: TD_ERR_STATE: it has a second one already; otherwise as td__tcp_replica_open(). */
td_status td__tcp_replica_listen(struct td__tcp_server *server, const char *host, int port,
                                 const char *secret);

/** Drops the standbys whose numbers are not among these: they are known to be lost, and answers need not wait for
 *  them until the heartbeat's limit. */
void td__tcp_replica_keep(struct td__tcp_server *server, const uint32_t *numbers, int count);

/** From any thread. */
void td__tcp_replica_state(struct td__tcp_server *server, struct td__tcp_replica_state *state);

/** Ends the server, as td__tcp_server_stop(). Clients and standbys of a primary are told that the store ends. */
void td__tcp_replica_close(struct td__tcp_server *server, td__deadline deadline);

/**
 * td_tcp_store_open() for a client that knows several servers ("host:port") of which any may be the primary by now: asks
 * all of them until one is, or options->timeout_ms is over.
 *
 * Errors: as td_tcp_store_open(); TD_ERR_TIMEOUT lists what was tried.
 */
struct td_tcp_store_options;
td_status td__tcp_store_open_any(const char *const *addresses, int count,
                                 const struct td_tcp_store_options *options, td_store **store);

#endif
