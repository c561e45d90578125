/* Messages between workers.
 *
 *     header            TD__HEADER_SIZE bytes; or the first TD__SHORT_HEADER_SIZE, if all fields after these are 0, so that
 *                       a small message fits into a cache line
 *     tensor records    what each tensor is, and where its elements are
 *     rref records      what each reference refers to
 *     body              of a request: the function and the args, each with its size before it, and the kwargs; of a reply:
 *                       the result. Values are msgpack (codec.h)
 *     elements          of those tensors that are inline, one after the other
 *
 * A tensor of at least TD__LEND_FROM bytes that goes to a worker of the same host is lent: only its place in the arena
 * of the sender is in the record. Of a tensor on an accelerator, a copy in host memory is sent, with the name of the device
 * for which it is.
 *
 * Leases and references that a message carries are its own until it is sent, or taken from it: one that is freed before
 * gives them back. That is why references have records beside the body, which may never be decoded. */
#ifndef TD_RPC_MESSAGE_H
#define TD_RPC_MESSAGE_H

#include "base/clock.h"
#include "rpc/codec.h"
#include "rpc/rpc_devices.h"

enum {
    TD__HEADER_SIZE = 56,
    TD__SHORT_HEADER_SIZE = 20,
    TD__SMALL_MESSAGE = 256,
    TD__LEND_FROM = 4096,
    TD__RECORD_MAX = 2 + 8 * TD_MAX_DIMS + 16 + 4 + TD__DEVICE_NAME,
    TD__RREF_RECORD_SIZE = 20,
    TD__MAX_RREFS = 1 << 24, /* of one message */
};

enum td__message_kind {
    TD__MESSAGE_REQUEST = 1,
    TD__MESSAGE_REPLY,
    TD__MESSAGE_ERROR,
    TD__MESSAGE_CANCEL, /* of the request `id` */
    TD__MESSAGE_RETURN, /* the body has the numbers of leases that have ended, 8 bytes each */
    TD__MESSAGE_LEAVE,  /* the sender shuts down: nothing comes after this */
    TD__MESSAGE_ACK,    /* the sender has received the first `id` bytes of the link */
    TD__MESSAGE_KINDS,
    TD__LONG_HEADER = 0x80, /* in the first byte of one that is not short */
};

struct td__message_header {
    uint8_t kind;
    uint8_t copy;        /* tensors by value: the receiver copies those that are lent */
    uint16_t depth;      /* request: how deep calls are nested */
    uint32_t body;       /* bytes */
    uint64_t id;         /* of the request */
    uint32_t timeout_ms; /* request: how long the caller waits */
    /* Not in a short one: */
    uint32_t tensors;  /* records */
    uint32_t records;  /* bytes of these records, and of those of references */
    uint32_t rrefs;    /* references */
    uint64_t context;  /* request and reply: of distributed autograd; 0: none */
    uint64_t message;  /* with a context: under which id its tensors are recorded; 0: none are */
    uint64_t elements; /* bytes of the inline tensors */
};

/** Writes it so that it ends at `end`, and returns its size. */
size_t td__message_header_write(const struct td__message_header *header, uint8_t *end);

/** The size of a header that begins with `first`. */
static inline size_t td__message_header_size(uint8_t first)
{
    return first & TD__LONG_HEADER ? TD__HEADER_SIZE : TD__SHORT_HEADER_SIZE;
}

/** False if it is not valid. */
bool td__message_header_read(const uint8_t *bytes, struct td__message_header *header);

/* ---- Outgoing -------------------------------------------------------------------------------- */

struct td__rpc_agent;

struct td__outgoing_tensor {
    td_tensor *tensor; /* contiguous; NULL for one that is lent */
    td_tensor *held;   /* one that is sent back to its lender, until it is sent */
    uint64_t lease;    /* its number; 0: not lent */
    struct td__lease
        *frozen;          /* of `tensor`: its elements do not change until they are sent; or NULL */
    const char *elements; /* these */
};

/** A reference that a message carries: the value, a fork that the sender has made for the receiver, and the owner's
 *  rank. */
struct td__rref_record {
    uint64_t id, fork;
    int owner;
};

/** A message that is sent, or waits for that. */
struct td__message {
    struct td__message *next;
    struct td__buffer bytes; /* header and body; once it is sealed, header, records and body */
    struct td__buffer record_bytes; /* while it is made */
    struct td__rpc_agent *agent;
    int to;         /* the receiver's rank */
    bool lends;     /* it is on this host */
    bool request;   /* this worker's maps of devices count */
    bool more;      /* another message follows at once: this one may be published with it */
    bool busy;      /* others are sent soon */
    uint32_t count; /* tensors */
    uint32_t capacity;
    struct td__outgoing_tensor *tensors;
    bool records;         /* it is sent in a context of distributed autograd: keeps the … */
    td_tensor **recorded; /* … tensors that require grad */
    int recorded_count;
    struct td__rref_record *rrefs;
    uint32_t rref_count, rref_capacity;
    size_t skip;                      /* bytes of `bytes` before the header */
    uint64_t start;                   /* bytes of the link before it */
    size_t written;                   /* bytes that are in the link, of all */
    size_t size;                      /* of all */
    uint8_t small[TD__SMALL_MESSAGE]; /* the first memory of `bytes` */
};

/** Makes an empty message for the worker `to`; `lend`: tensors may be lent to it. */
struct td__message *td__message_create(struct td__rpc_agent *agent, int to, bool lend);

/** Appends a value to the body. */
td_status td__message_put(struct td__message *message, const td_value *value);

/** Adds the header. TD_ERR_INVALID if the message is larger than `max` bytes without its tensors. */
td_status td__message_seal(struct td__message *message, struct td__message_header *header,
                           size_t max);

/** The header of one that is sealed. */
static inline const uint8_t *td__message_head(const struct td__message *message)
{
    return message->bytes.data + message->skip;
}

/** Frees it; one that was not sent takes its leases and references back. */
void td__message_free(struct td__message *message);

/** The same for a list. */
void td__messages_free(struct td__message *first);

/** The next bytes to be written, at message->written. */
const void *td__message_next(const struct td__message *message, size_t *size);

/* ---- Incoming -------------------------------------------------------------------------------- */

/** A message that has arrived, or is arriving. */
struct td__incoming {
    struct td__incoming *next;
    struct td__rpc_agent *agent;
    int from;
    struct td__message_header header;
    uint8_t *bytes;      /* records and body */
    size_t capacity;     /* for them */
    size_t have;         /* of them */
    td_tensor **tensors; /* NULL until records and body are there */
    size_t *sizes;       /* of their elements that are inline */
    bool *recorded;      /* of those that require grad on the sender */
    struct td__span
        *devices; /* names of the devices that they are for; NULL: all are for the host */
    uint32_t recorded_count;
    uint32_t inline_at; /* the tensor whose elements are next */
    size_t inline_have; /* of its bytes */
    td_status status;   /* it cannot be served: why … */
    char *text;
    uint64_t skip; /* … and how many of its bytes are to be skipped */
    bool complete;
    uint64_t link;         /* that it came on, plus 1; 0: from this worker */
    td__deadline deadline; /* of a request */
    bool *taken;           /* the references that were taken from it; NULL: none */
};

/** Begins a message after its header. */
struct td__incoming *td__incoming_create(struct td__rpc_agent *agent, int from,
                                         const struct td__message_header *header, size_t max);

/** Where the next bytes go, and how many: NULL and a number for bytes to be skipped; 0 if it is complete. */
void *td__incoming_next(struct td__incoming *incoming, size_t *size);

/** `size` bytes are there. */
void td__incoming_advance(struct td__incoming *incoming, size_t size);

/** Puts its tensors on their devices, and gives those of the host memory of their own, if the sender has asked for that.
 *  Before they are used. */
td_status td__incoming_own(struct td__incoming *incoming);

/** The value of `size` bytes of its body, with one reference; NULL on failure. */
td_value *td__incoming_value(struct td__incoming *incoming, const void *bytes, size_t size);

/** Its body. */
struct td__reader td__incoming_body(const struct td__incoming *incoming);

/** Frees it, and its tensors and references that are not in use. */
void td__incoming_free(struct td__incoming *incoming);

#endif
