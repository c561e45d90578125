/* The store's wire protocol, once both sides have proven the secret (base/auth.h).
 *
 *     frame      u32 size of the body | u32 id | u8 op or status | 3 zero bytes | body
 *     string     u32 length | bytes
 *
 *     request        body                              answer
 *     SET            u32 n, n times key and value      none
 *     APPEND         key, value                        none
 *     GET            u32 n, n keys                     n values, when all keys exist
 *     WAIT           u32 n, n keys                     empty, when all keys exist
 *     CHECK          u32 n, n keys                     u8
 *     ADD            key, i64                          i64
 *     COMPARE_SET    key, expected, desired            value
 *     DELETE         key                               u8
 *     NUM_KEYS       prefix                            i64
 *     CANCEL         u32 id                            none; that GET or WAIT is answered TIMEOUT
 *     SYNC           empty                             empty
 *     WILL           key, value                        none; set when the client ends without BYE
 *     BYE            empty                             none
 *     HELLO          client, first number, …           STATE, where asked for; else none
 *     ATTACH, ACK, DEPOSED                             of standbys: store_replica.h
 *
 * Requests of one client are carried out in order, so an answer confirms all that was sent before
 * its request. A failure is answered with a status other than OK and a string: the message, and for
 * TIMEOUT the missing key. A request without an answer that fails is reported by a frame of id 0.
 * Anything that does not fit this ends the connection. */
#ifndef TD_STORE_WIRE_H
#define TD_STORE_WIRE_H

#include "base/buffer.h"

#include <tandem/store.h>

enum {
    TD__WIRE_HEADER = 12,
    TD__WIRE_FEW = 8, /* spans inside a request; more are allocated */
};

#define TD__WIRE_MAX_BODY ((size_t)512 << 20)

enum td__wire_op {
    TD__WIRE_SET = 1,
    TD__WIRE_APPEND,
    TD__WIRE_GET,
    TD__WIRE_WAIT,
    TD__WIRE_CHECK,
    TD__WIRE_ADD,
    TD__WIRE_COMPARE_SET,
    TD__WIRE_DELETE,
    TD__WIRE_NUM_KEYS,
    TD__WIRE_CANCEL,
    TD__WIRE_SYNC,
    TD__WIRE_WILL,
    TD__WIRE_BYE,
    TD__WIRE_HELLO,
    TD__WIRE_ATTACH,
    TD__WIRE_ACK,
    TD__WIRE_DEPOSED,
};

struct td__wire_header {
    size_t body_size;
    uint32_t id;
    uint8_t code; /* an op in a request; a td_status or a td__replica_frame from the server */
};

/** Reads a header of TD__WIRE_HEADER bytes; false when it cannot be one. */
bool td__wire_read_header(const uint8_t *bytes, struct td__wire_header *header);

/** Begins a frame at the end of `buffer` and returns where, for td__wire_end(). */
size_t td__wire_begin(struct td__buffer *buffer, uint32_t id, uint8_t code);

/** Fills in the size of the frame that began at `start`. */
void td__wire_end(struct td__buffer *buffer, size_t start);

/* A request taken apart. The spans point into its body. */
struct td__wire_request {
    uint8_t op;
    uint32_t id;
    size_t count;
    struct td__span *keys;
    struct td__span *values; /* SET, APPEND, WILL; COMPARE_SET: expected, desired */
    int64_t number;          /* ADD: the amount, then the sum; CANCEL: the id */
    bool had_effect;         /* of a change that was carried out: the store differs */
    struct td__span few[TD__WIRE_FEW];
};

/** Takes a request apart: TD_ERR_INVALID when it is malformed, TD_ERR_NOMEM. */
td_status td__wire_parse(const struct td__wire_header *header, const uint8_t *body,
                         struct td__wire_request *request);

/** Requests that change the store: each client counts its own, from 1 on. */
static inline bool td__wire_is_change(uint8_t op)
{
    return op == TD__WIRE_SET || op == TD__WIRE_APPEND || op == TD__WIRE_ADD ||
           op == TD__WIRE_COMPARE_SET || op == TD__WIRE_DELETE || op == TD__WIRE_WILL;
}

/** Requests that are answered by nothing but a failure, and that with id 0. */
static inline bool td__wire_is_silent(uint8_t op)
{
    return op == TD__WIRE_SET || op == TD__WIRE_APPEND || op == TD__WIRE_WILL;
}

void td__wire_request_free(struct td__wire_request *request);

#endif
