/* The server's side of the TCP store. The engine is its part without sockets: requests in, answers out, and
 * the waits of clients; all calls of it come from one thread. The server connects it to the network; the fuzzer
 * feeds it bytes. */
#ifndef TD_STORE_ENGINE_H
#define TD_STORE_ENGINE_H

#include "base/auth.h"
#include "base/clock.h"
#include "store/kv.h"
#include "store/store_replica.h"
#include "store/store_wire.h"

#include <sys/queue.h>

struct td__waiter;

/* A session with more answers than this on their way is not given more for now. */
#define TD__SESSION_OUT_LIMIT ((size_t)1 << 20)

struct td__engine {
    struct td__kv kv;
    struct td__map waiting;           /* key -> the waiters parked at it */
    LIST_HEAD(, td__session) greeted; /* clients that have said who they are */
    struct td__replica *replica;      /* NULL: there are no standbys, and nothing is remembered */
};

/* What becomes of a connection that the engine wants to end. */
enum td__session_end {
    TD__SESSION_GOES_ON,
    TD__SESSION_ENDS_SENT, /* when what it is owed is sent */
    TD__SESSION_ENDS_NOW,
};

/* One client. */
struct td__session {
    struct td__engine *engine;
    struct td__buffer out;                          /* answers that are not sent yet */
    void (*on_output)(struct td__session *session); /* `out` has grown: send it soon */
    size_t in_flight; /* bytes of answers that were taken from `out` and are not sent yet */
    LIST_HEAD(, td__waiter) waiters;
    size_t waiter_count;
    bool owes_answers; /* waiters were passed over because too much was on its way */
    td_bytes will_key, will_value;
    bool leaving; /* said BYE */
    enum td__session_end end;
    uint64_t client_id; /* 0: it has not said HELLO */
    uint64_t changes;   /* how many the client has sent, counted over all its connections */
    bool was_known;     /* when it said HELLO */
    struct td__known_client *known; /* where there are standbys */
    struct td__standby *standby;    /* the session is one's */
    LIST_ENTRY(td__session) greeted_link;
};

/** Carries out a change other than a will, and wakes those who wait for its keys. request->had_effect and ->number, and
 *  for COMPARE_SET *result, which points into the store or the request, say what came of it. */
td_status td__engine_apply(struct td__engine *engine, struct td__wire_request *request,
                           struct td__span *result);

/** Sets one key, and wakes those who wait for it. */
td_status td__engine_set(struct td__engine *engine, struct td__span key, struct td__span value);

/** Frees the store. All sessions have ended. */
void td__engine_free(struct td__engine *engine);

/** Carries out one request; its answer, if it has one now, is added to session->out. Others' answers
 *  may become due, too. False when the request is malformed or memory is short: the connection
 *  ends. */
bool td__engine_execute(struct td__session *session, const struct td__wire_header *header,
                        const uint8_t *body);

/** True while the session has so much on its way that nothing more should be read from it. */
bool td__session_is_full(const struct td__session *session);

/** To be called when a session is not full any more: answers the waiters that were passed over. */
void td__session_resume(struct td__session *session);

/** Answers all that the session waits for with a failure. */
void td__session_fail_waits(struct td__session *session, td_status status, const char *text);

/** Ends a session: its waits are dropped, and its will is carried out unless it said BYE. */
void td__session_end(struct td__session *session);

/* ---- The server: one thread, one event loop, any number of clients (tcp_server.c) -------------- */

struct td__tcp_server;

/** Serves at the listening socket `fd`, and at `shortcut` (-1: none), a unix socket beside it. Takes
 *  both over, also when it fails. */
td_status td__tcp_server_start(int fd, int shortcut, const struct td__secret *secret,
                               struct td__tcp_server **server);

/** Takes no new client from now on, waits until the present ones have left or the deadline has
 *  passed, sends what is still to be sent, and ends. */
void td__tcp_server_stop(struct td__tcp_server *server, td__deadline deadline);

/** In a forked child: closes the descriptors; the thread and its memory are the parent's. */
void td__tcp_server_abandon(struct td__tcp_server *server);

#endif
