/* The server's side of the store without its sockets: requests in, answers out, and the waits of
 * clients. tcp_server.c connects it to the network; the fuzzer feeds it bytes.
 *
 * All calls come from one thread. */
#ifndef TD_STORE_ENGINE_H
#define TD_STORE_ENGINE_H

#include "store/kv.h"
#include "store/store_wire.h"

struct td__waiter;

/* A session with more answers than this on their way is not given more for now. */
#define TD__SESSION_OUT_LIMIT ((size_t)1 << 20)

struct td__engine {
    struct td__kv kv;
    struct td__map waiting; /* key -> the waiters parked at it */
};

/* One client. */
struct td__session {
    struct td__engine *engine;
    struct td__buffer out;                          /* answers that are not sent yet */
    void (*on_output)(struct td__session *session); /* `out` has grown: send it soon */
    size_t in_flight; /* bytes of answers that were taken from `out` and are not sent yet */
    struct td__waiter *waiters;
    size_t waiter_count;
    bool owes_answers; /* waiters were passed over because too much was on its way */
    td_bytes will_key, will_value;
    bool leaving; /* said BYE */
};

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

#endif
