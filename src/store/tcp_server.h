/* What tcp_server.c and tcp_replica.c share: the server of a TCP store. All but what `lock` protects belongs to the loop's
 * thread. */
#ifndef TD_STORE_TCP_SERVER_H
#define TD_STORE_TCP_SERVER_H

#include "base/thread.h"
#include "base/wait.h"
#include "os/loop.h"
#include "store/store_engine.h"
#include "store/tcp_replica.h"

enum { TD__SERVER_READ_SIZE = 256 << 10 };

struct td__replica_link;

/* Bytes that wait for room, or for standbys. */
struct write {
    STAILQ_ENTRY(write) link;
    struct td__buffer bytes;
    size_t sent;
    uint64_t after; /* the sequence that every standby must have before */
};

/* A client, or a standby. */
struct connection {
    union {
        uv_handle_t handle;
        uv_poll_t poll;
    };
    struct td__tcp_server *server;
    int fd;
    bool closing;
    bool ends; /* it is closed when what waits is sent */
    bool shut; /* what it was owed is sent, and it is to close its end */
    struct td__session session;
    struct td__buffer in;
    STAILQ_HEAD(, write) writes; /* what waits for room */
    int events;                  /* of poll(), that are waited for */
    bool paused;                 /* it is not read from, or not all of `in` was handled yet */
    bool dirty;                  /* on the list of those with something to send */
    SLIST_ENTRY(connection) dirty_link;
    TAILQ_ENTRY(connection) client_link;
    bool holding; /* on the list of those with writes that wait for standbys */
    LIST_ENTRY(connection) holding_link;
};

struct td__tcp_server {
    struct td__loop loop;
    struct td__loop_listener accepting;
    struct td__loop_listener second; /* td__tcp_replica_listen() */
    struct td__secret second_secret;
    char *path;         /* of a unix socket in the file system, to be removed */
    uv_timer_t rest;    /* for sending what clients are still owed at the end */
    uv_timer_t silence; /* runs while a client has not acknowledged what it was sent */
    uv_idle_t spin;
    struct td__backoff backoff; /* begun with the last request */
    bool closing;               /* clients are only sent what they are owed */
    struct td__secret secret;
    struct td__engine engine;
    TAILQ_HEAD(, connection) clients;
    SLIST_HEAD(, connection) dirty;
    LIST_HEAD(, connection) holding;
    char read_buffer[TD__SERVER_READ_SIZE];

    /* Where there are standbys, or this is one. */
    uv_timer_t beat;
    bool beats;
    int port;
    uint64_t confirmed;               /* answers up to this sequence may be sent */
    uint64_t told_term, told_version; /* the members that clients know */
    enum td__replica_role told_role;
    bool clogged;                      /* clients wait for a standby */
    struct td__replica_link *link;     /* to the primary */
    bool primary_lost, ended, refused; /* what became of the latest link */
    char link_text[256];               /* why it has ended */
    void (*changed)(void *arg);
    void *changed_arg;

    pthread_mutex_t lock; /* protects the rest; no other lock is taken under it */
    pthread_cond_t left;
    bool stopping;
    bool empty;             /* no client is left */
    pthread_cond_t changes; /* of `state` */
    uint64_t published;
    struct td__tcp_replica_state state;
};

/** With `reset` the other side sees a reset instead of an orderly end. */
void td__connection_close(struct connection *connection, bool reset);

/** Waits for the events that matter now: input where the client is read from, and room where writes wait. */
void td__connection_watch(struct connection *connection);

/** For the listener: a client, and that one cannot be accepted. */
void td__tcp_server_accept(void *arg, int fd, bool local, const uint8_t *request);
void td__tcp_server_full(void *arg, int error);

/** At the end: closes the clients that have not taken what they were owed, and the timers. */
void td__tcp_server_close_rest(uv_timer_t *timer);

/** Sends what has come up, and does what follows from a change of the replica. */
void td__tcp_server_flush(struct td__tcp_server *server);

/* ---- tcp_replica.c --------------------------------------------------------------------------- */

/** Puts down the state for other threads, and reports a change. */
void td__tcp_replica_publish(struct td__tcp_server *server);

/** Begins to look at the clock every quarter of the heartbeat's limit. */
void td__tcp_server_beat(struct td__tcp_server *server);

/** Ends the link. */
void td__tcp_replica_unlink(struct td__tcp_server *server);

#endif
