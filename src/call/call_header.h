/* The header of every frame of a collective over sockets: it identifies the call. A receiver compares the bytes with
 * those that it expects, and decodes them only if they differ, for the error text. */
#ifndef TD_CALL_CALL_HEADER_H
#define TD_CALL_CALL_HEADER_H

#include "call/operation.h"

enum { TD__HEADER_BYTES = 48, TD__FAILURE_TEXT = TD__REASON_TEXT };

enum td__header_type {
    TD__HEADER_DATA = 1,
    TD__HEADER_FAILURE, /* the sender has failed; the payload is the error text, at most
                           TD__FAILURE_TEXT bytes */
    TD__HEADER_CALL,    /* the sender waits in this call; no payload */
};

#define TD__HEADER_USER_OP 0x8000    /* as the operation: the user's function with this number */
#define TD__HEADER_UNEVEN UINT64_MAX /* as the count */

/* As it is sent, little-endian. */
struct td__call_header {
    uint8_t magic; /* td__header_write() sets it */
    uint8_t type, kind, dtype;
    uint16_t op; /* of a reduction, or the status of a failure */
    uint16_t algorithm;
    uint32_t root;
    uint32_t sequence; /* its low half */
    uint64_t count;
    uint64_t payload; /* bytes that follow */
    uint64_t turn;    /* calls of the comm so far */
    uint32_t past;    /* a hash of all earlier calls of the group */
    uint32_t detail;
};

/** The header of a DATA frame of `operation` with `count` elements by td__algorithms[algorithm]; the caller sets
 *  `payload`. */
struct td__call_header td__header_of(const struct td__operation *operation, size_t count,
                                     int algorithm, uint64_t turn);

void td__header_write(const struct td__call_header *header, uint8_t *bytes);

/** False if the bytes are not a valid header; they may be anything. */
bool td__header_read(const uint8_t *bytes, struct td__call_header *header);

/** Whether both belong to the same call with the same arguments, after the same calls. */
bool td__header_same_call(const struct td__call_header *a, const struct td__call_header *b);

/** Whether the two calls differ in themselves, not only in earlier calls or the algorithm. */
bool td__header_differs(const struct td__call_header *a, const struct td__call_header *b);

/** Writes "all_reduce #812 with 1024 f32 (sum)" to `text`. */
void td__header_describe(const struct td__call_header *header, char *text, size_t room);

/**
 * TD_ERR_MISMATCH: `me` made the call `mine`, and `other` has sent `theirs`. `operation` is this
 * side's; the two names are as td__endpoint_describe() gives them.
 */
td_status td__header_mismatch(const struct td__operation *operation,
                              const struct td__call_header *mine, const char *me,
                              const struct td__call_header *theirs, const char *other);

#endif
