/* Headers of frames; see call_header.h. */
#include "call/call_header.h"

#include "base/fail.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAGIC = 'T' };

_Static_assert(sizeof(struct td__call_header) == TD__HEADER_BYTES, "no padding");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are little-endian");

struct td__call_header td__header_of(const struct td__operation *operation, size_t count,
                                     int algorithm, uint64_t turn)
{
    td_op_kind kind = operation->call.kind;
    struct td__call_header header = {
        .type = TD__HEADER_DATA,
        .kind = (uint8_t)kind,
        .algorithm = (uint16_t)algorithm,
        .sequence = (uint32_t)operation->call.sequence,
        .turn = turn,
        .past = operation->past,
        .detail = operation->call.detail,
    };
    if (kind != TD_OP_BARRIER) {
        header.dtype = (uint8_t)operation->reduction.dtype;
        header.count = operation->call.input_counts && kind == TD_OP_ALL_TO_ALL ? TD__HEADER_UNEVEN
                                                                                : count;
    }
    if (td__has_root(kind))
        header.root = (uint32_t)operation->called_root;
    if (td__reduces(kind))
        header.op = operation->reduction.user
                        ? (uint16_t)(TD__HEADER_USER_OP |
                                     operation->reduction.number % TD__HEADER_USER_OP)
                        : (uint16_t)operation->reduction.op;
    return header;
}

void td__header_write(const struct td__call_header *header, uint8_t *bytes)
{
    memcpy(bytes, header, sizeof *header);
    bytes[0] = MAGIC;
}

bool td__header_read(const uint8_t *bytes, struct td__call_header *header)
{
    struct td__call_header read;
    memcpy(&read, bytes, sizeof read);
    if (read.magic != MAGIC || read.type < TD__HEADER_DATA || read.type > TD__HEADER_CALL)
        return false;
    if (read.kind >= TD__COLLECTIVES || !td_dtype_size((td_dtype)read.dtype))
        return false;
    if (read.type == TD__HEADER_FAILURE &&
        (read.payload > TD__FAILURE_TEXT || read.op == TD_OK || read.op > TD_ERR_ABORTED))
        return false;
    if (read.type == TD__HEADER_CALL && read.payload)
        return false;
    *header = read;
    return true;
}

bool td__header_differs(const struct td__call_header *a, const struct td__call_header *b)
{
    return a->kind != b->kind || a->dtype != b->dtype || a->op != b->op || a->root != b->root ||
           a->sequence != b->sequence || a->count != b->count || a->detail != b->detail;
}

bool td__header_same_call(const struct td__call_header *a, const struct td__call_header *b)
{
    return !td__header_differs(a, b) && a->algorithm == b->algorithm && a->turn == b->turn &&
           a->past == b->past;
}

/* "1024 f32 (sum) to root 3". */
static void describe_arguments(const struct td__call_header *header, uint32_t other_detail,
                               char *text, size_t room)
{
    char count[32] = "uneven parts", op[32] = "", root[32] = "", detail[64];
    if (header->count != TD__HEADER_UNEVEN)
        snprintf(count, sizeof count, "%" PRIu64, header->count);
    if (td__reduces(header->kind) && header->op & TD__HEADER_USER_OP)
        snprintf(op, sizeof op, " (its own operation no. %d)", header->op ^ TD__HEADER_USER_OP);
    else if (td__reduces(header->kind))
        snprintf(op, sizeof op, " (%s)", td_reduce_op_name((td_reduce_op)header->op));
    if (td__has_root(header->kind))
        snprintf(root, sizeof root, " and root %" PRIu32, header->root);
    snprintf(text, room, "%s%s %s%s%s%s%s", count, header->count == TD__HEADER_UNEVEN ? " of" : "",
             td_dtype_name((td_dtype)header->dtype), op, root,
             td__detail_text(header->detail, detail), td__place_text(header->detail, other_detail));
}

void td__header_describe(const struct td__call_header *header, char *text, size_t room)
{
    char arguments[192];
    describe_arguments(header, header->detail, arguments, sizeof arguments);
    bool bare = header->kind == TD_OP_BARRIER;
    snprintf(text, room, "%s #%" PRIu32 "%s%s", td_op_kind_name(header->kind), header->sequence,
             bare ? "" : " with ", bare ? "" : arguments);
}

static const char *algorithm_name(const struct td__call_header *header)
{
    for (int i = 0; td__algorithms[i].name; i++)
        if (i == header->algorithm)
            return td__algorithms[i].name;
    return "an unknown algorithm";
}

td_status td__header_mismatch(const struct td__operation *operation,
                              const struct td__call_header *mine, const char *me,
                              const struct td__call_header *theirs, const char *other)
{
    char a[256], b[256], counts[TD__COUNTS_TEXT];
    const char *what = td__operation_describe(operation);
    if (mine->kind != theirs->kind || mine->sequence != theirs->sequence) {
        td__header_describe(mine, a, sizeof a);
        td__header_describe(theirs, b, sizeof b);
        return td_fail(TD_ERR_MISMATCH,
                       "%s: %s called %s, %s called %s; every rank must make the same calls in the "
                       "same order",
                       what, me, a, other, b);
    }
    describe_arguments(mine, theirs->detail, a, sizeof a);
    describe_arguments(theirs, mine->detail, b, sizeof b);
    if (td__operation_uneven(operation) && td__header_differs(mine, theirs))
        return td_fail(
            TD_ERR_MISMATCH,
            "%s: %s called it with %s, %s with %s; every rank must pass the same counts, "
            "which are %s on %s",
            what, me, a, other, b,
            td__counts_text(operation->call.input_counts, operation->parts, counts), me);
    if (td__header_differs(mine, theirs))
        return td_fail(
            TD_ERR_MISMATCH, "%s: %s called it with %s, %s with %s; %s", what, me, a, other, b,
            td__remedy_text(mine->detail, theirs->detail, "every rank must pass the same"));
    if (mine->past != theirs->past || mine->turn != theirs->turn)
        return td_fail(TD_ERR_MISMATCH,
                       "%s: %s and %s have made different calls before; every rank must make the "
                       "same calls in the same order",
                       what, me, other);
    if (mine->algorithm != theirs->algorithm)
        return td_fail(
            TD_ERR_MISMATCH,
            "%s: %s uses algorithm %s, %s uses algorithm %s; every rank must use the same "
            "algorithm",
            what, me, algorithm_name(mine), other, algorithm_name(theirs));
    return td_fail(TD_ERR_MISMATCH,
                   "%s: %s sends %" PRIu64 " bytes, but %s expects %" PRIu64
                   "; each rank's output_counts must be what the others send to it",
                   what, other, theirs->payload, me, mine->payload);
}
