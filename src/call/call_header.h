/* What stands in front of every message of a collective over sockets: which call it belongs to.
 *
 *     0   magic 'T', type, kind, dtype        one byte each
 *     4   operation of a reduction, or the status of a goodbye; number of the algorithm
 *                                             two bytes each
 *     8   root                                four bytes
 *    12   sequence number, its low half       four bytes
 *    16   count                               eight bytes
 *    24   bytes that follow                   eight bytes
 *    32   turn: calls of the comm so far      eight bytes
 *    40   past: all calls of the group before, in one word: four bytes
 *    44   detail of the call                  four bytes
 *
 * All little-endian. Both sides know what to expect, so a receiver compares the bytes with its own
 * header and reads them only where they differ, to say what the other one called. */
#ifndef TD_CALL_CALL_HEADER_H
#define TD_CALL_CALL_HEADER_H

#include "call/operation.h"

enum { TD__HEADER_BYTES = 48, TD__GOODBYE_TEXT = TD__REASON_TEXT };

enum td__header_type {
    TD__HEADER_DATA = 1,
    TD__HEADER_GOODBYE, /* the sender has failed: a sentence of at most TD__GOODBYE_TEXT bytes
                           follows */
    TD__HEADER_CALL,    /* the sender waits in this call; nothing follows */
};

#define TD__HEADER_USER_OP 0x8000    /* as the operation: the user's function with this number */
#define TD__HEADER_UNEVEN UINT64_MAX /* as the count */

struct td__call_header {
    uint8_t type;
    uint8_t kind;
    uint8_t dtype;
    uint16_t op; /* or a status */
    uint16_t algorithm;
    uint32_t root;
    uint32_t sequence;
    uint64_t count;
    uint64_t payload;
    uint64_t turn;
    uint32_t past;
    uint32_t detail;
};

/** Of a message of `operation` with `count` elements by td__algorithms[algorithm]; its payload is
 *  still open. */
struct td__call_header td__header_of(const struct td__operation *operation, size_t count,
                                     int algorithm, uint64_t turn);

void td__header_write(const struct td__call_header *header, uint8_t *bytes);

/** False where the bytes are no header: anything may stand in them. */
bool td__header_read(const uint8_t *bytes, struct td__call_header *header);

/** Whether both belong to the same call, made with the same arguments. Of two calls in the same turn
 *  that is to be expected. */
bool td__header_same_call(const struct td__call_header *a, const struct td__call_header *b);

/** Whether the two calls themselves differ; else the calls before them do, or how they are carried
 *  out. */
bool td__header_differs(const struct td__call_header *a, const struct td__call_header *b);

/** Puts "all_reduce #812 of 1024 f32 (sum)" into `text`. */
void td__header_describe(const struct td__call_header *header, char *text, size_t room);

/**
 * TD_ERR_MISMATCH: `me` made the call `mine`, and `other` has sent `theirs`. `operation` is this
 * side's; the two names are as td__endpoint_describe() gives them.
 */
td_status td__header_mismatch(const struct td__operation *operation,
                              const struct td__call_header *mine, const char *me,
                              const struct td__call_header *theirs, const char *other);

#endif
