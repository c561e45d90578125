/* The connection of a TCP store to its server, shared by all threads. */
#ifndef TD_STORE_TCP_CLIENT_H
#define TD_STORE_TCP_CLIENT_H

#include "base/buffer.h"
#include "base/fail.h"
#include "base/thread.h"
#include "base/wait.h"
#include "os/address.h"
#include "store/store_wire.h"

#include <sys/queue.h>

struct td__tcp_call;

struct td__tcp_client {
    int fd;
    char where[TD__ADDRESS_TEXT]; /* the server's address, for messages */
    unsigned fork_generation;

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
};

/** Takes over a connection that is proven; host and port are for messages. */
void td__tcp_client_init(struct td__tcp_client *client, int fd, const char *host, int port);

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

/** Makes sure that all that was sent has arrived, sends BYE and closes the connection; in a
 *  forked child it only closes the descriptor. */
td_status td__tcp_client_close(struct td__tcp_client *client, td__deadline deadline);

#endif
