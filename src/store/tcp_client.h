/* The connection of a TCP store to its server, shared by all threads. */
#ifndef TD_STORE_TCP_CLIENT_H
#define TD_STORE_TCP_CLIENT_H

#include "base/auth.h"
#include "base/buffer.h"
#include "base/fail.h"
#include "base/thread.h"
#include "base/wait.h"
#include "os/address.h"
#include "store/store_replica.h"

#include <sys/queue.h>

/* A request that waits for its answer; on the stack of the thread that made it. */
struct td__tcp_call {
    LIST_ENTRY(td__tcp_call) link;
    uint32_t id;
    uint64_t sequence; /* of its request among all that were sent; 0: it was not sent yet */
    bool done;
    struct td__buffer *frame; /* its request, unless that is on the list of changes that are kept */
    bool kept;                /* it is */
    uint64_t number;          /* of a change */
    td_status status;
    struct td__buffer body;
};

/* A change that is not confirmed, for the next server. */
struct td__tcp_kept {
    STAILQ_ENTRY(td__tcp_kept) link;
    struct td__buffer frame;
    uint64_t number, sequence;
};

struct td__tcp_client {
    int fd;
    char where[TD__REPLICA_ADDRESS]; /* the server's address, for messages */
    unsigned fork_generation;
    struct td__secret secret; /* for other servers: not bound to an address */

    pthread_mutex_t lock; /* protects all below; never held while sending or waiting */
    pthread_cond_t answered;
    pthread_cond_t sendable;
    bool sending;                    /* a thread's request is going out: one at a time */
    LIST_HEAD(, td__tcp_call) calls; /* that wait for their answers */
    bool reading;                    /* a thread is at the socket: `in` is its own meanwhile */
    struct td__buffer in;
    struct td__backoff backoff; /* of the thread that reads */
    uint32_t last_id;
    uint64_t sent;             /* requests so far */
    uint64_t unconfirmed_last; /* `sent` after the last one without an answer … */
    size_t unconfirmed;        /* … how many of them are not confirmed … */
    char unconfirmed_key[64];  /* … and the key of the first */
    struct td__error broken;   /* the connection is lost; TD_OK: it is not */
    struct td__error late;     /* of a set or append that failed at the server, not reported yet */

    /* Where the store has several servers (tcp_failover.c). */
    uint64_t id;                  /* of this client */
    uint64_t changes;             /* requests so far that change the store: their numbers */
    uint64_t silent_not_kept;     /* the number of the latest without an answer that was not kept */
    bool replicated;              /* there are other servers: what is not confirmed is kept */
    uint64_t seen_term;           /* the highest that any server has told of */
    struct td__replica_report at; /* what the primary has said of itself */
    STAILQ_HEAD(, td__tcp_kept) kept;
    struct td__tcp_kept *going_out; /* the one whose frame a thread is sending */
    bool going_out_confirmed;
    size_t kept_bytes, kept_answers; /* of them, how many have an answer */
    bool lost;   /* the connection has ended, and the next server is looked for */
    bool moving; /* a thread is at that */
    char lost_text[160];
    td__deadline lost_at;
    int64_t attempt_ms;
    int rounds;       /* in which all servers were tried since … */
    char tried[1024]; /* … and how it went in the last one */
};

/** `secret` is for connections to other servers, not bound to an address. */
td_status td__tcp_client_init(struct td__tcp_client *client, const struct td__secret *secret);

/** Takes over a connection that is proven, and says who this client is; host and port are for messages. */
void td__tcp_client_start(struct td__tcp_client *client, int fd, const char *host, int port);

/** Finds the primary among several servers instead, whose addresses are in client->at. */
td_status td__tcp_client_find(struct td__tcp_client *client, td__deadline deadline);

/** A frame to be filled with the body of a request. */
struct td__buffer td__tcp_frame(uint8_t op);

/** Sends a request that has no answer; `key` is for the message if it is lost. Frees the frame. */
td_status td__tcp_client_tell(struct td__tcp_client *client, struct td__buffer *frame,
                              struct td__span key, td__deadline deadline);

/** Sends a request and waits for its answer: *body, which the caller frees. With `key_deadline` the server
 *  waits for keys, until then at most; otherwise it is NULL. Frees the frame. */
td_status td__tcp_client_ask(struct td__tcp_client *client, struct td__buffer *frame,
                             td__deadline deadline, const td__deadline *key_deadline,
                             struct td__buffer *body);

/** The server's address, for messages. */
void td__tcp_client_where(struct td__tcp_client *client, char text[TD__REPLICA_ADDRESS]);

/** Makes sure that all that was sent has arrived, sends BYE and closes the connection; in a
 *  forked child it only closes the descriptor. */
td_status td__tcp_client_close(struct td__tcp_client *client, td__deadline deadline);

/* ---- tcp_client.c, for tcp_failover.c ---------------------------------------------------------- */

/** The connection is lost for good. Holds the lock. */
void td__tcp_client_break(struct td__tcp_client *client, const char *reason);

/** The connection has ended: the next server is looked for, or it is lost for good. Holds the lock. */
void td__tcp_client_lose(struct td__tcp_client *client, const char *reason);

/** 0, or an errno. */
int td__tcp_client_send(struct td__tcp_client *client, const uint8_t *data, size_t size,
                        td__deadline deadline);

/* ---- Several servers (tcp_failover.c) ---------------------------------------------------------- */

/** Adds a HELLO: with `id` 0 it only asks. */
void td__tcp_put_hello(struct td__buffer *frame, const struct td__tcp_client *client, uint64_t id,
                       uint64_t first, bool wants_state);

/** Takes a STATE that the server has sent. Holds the lock. */
void td__tcp_take_state(struct td__tcp_client *client, const uint8_t *body, size_t size);

/** The connection is lost: looks for the next server once, or waits for a thread that does. False when the deadline has
 *  passed. Holds the lock, except while it tries. */
bool td__tcp_fail_over(struct td__tcp_client *client, td__deadline deadline);

/** Keeps a change until it is confirmed: takes over the frame. NULL without memory. Holds the lock. */
struct td__tcp_kept *td__tcp_keep(struct td__tcp_client *client, struct td__buffer *frame,
                                  uint64_t sequence);

/** All changes up to `sequence` are confirmed. Holds the lock. */
void td__tcp_confirm(struct td__tcp_client *client, uint64_t sequence);

void td__tcp_drop_kept(struct td__tcp_client *client);

#endif
