/* A message on its way over a socket: header and payload, sent or received as far as the socket
 * goes. */
#ifndef TD_TCP_LINK_IO_H
#define TD_TCP_LINK_IO_H

#include "tcp/blocks.h"
#include "tcp/links.h"
#include "tcp/compiled_schedule.h"

/** What all messages of one run have in common. */
struct td__run {
    const struct td__compiled_schedule *compiled;
    const struct td__operation *operation;
    struct td__links *links;
    struct td__blocks places[3];   /* by enum td__place */
    struct td__call_header header; /* its payload is set for each message */
    char *piece;                   /* TD__FLOW_PIECE bytes, for what is received to be reduced */
};

enum { TD__FLOW_PIECE = 256 << 10 };

struct td__link_io {
    const struct td__message *message;
    size_t size; /* header and payload */
    size_t done;
    uint32_t segment;    /* where it goes on, in the payload */
    size_t segment_done; /* bytes */
    bool ready;          /* worth trying */
    uint8_t tail_size;
    uint8_t tail[16]; /* the beginning of an element of which the rest has not come */
    uint8_t header[TD__HEADER_BYTES];
};

/** Prepares the flow of `message`. */
void td__link_io_begin(struct td__link_io *io, const struct td__run *run,
                       const struct td__message *message);

/** Sends, or receives, what the socket takes or has at the moment; *moved where that was anything. */
td_status td__link_io_send(struct td__link_io *io, const struct td__run *run, bool *moved);
td_status td__link_io_receive(struct td__link_io *io, const struct td__run *run, bool *moved);

static inline bool td__link_io_done(const struct td__link_io *io)
{
    return io->done == io->size;
}

#endif
