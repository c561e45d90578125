/* Sending and receiving a transfer over a socket, without blocking: a frame of header and payload. */
#ifndef TD_TCP_LINK_IO_H
#define TD_TCP_LINK_IO_H

#include "tcp/blocks.h"
#include "tcp/links.h"
#include "tcp/compiled_schedule.h"

/** One run of a compiled schedule; the same for all its transfers. */
struct td__run {
    const struct td__compiled_schedule *compiled;
    const struct td__operation *operation;
    struct td__links *links;
    struct td__blocks buffers[3];  /* by enum td__schedule_buffer */
    struct td__call_header header; /* `payload` is set for each transfer */
    char *piece;                   /* TD__FLOW_PIECE bytes: receive buffer of data to be reduced */
};

enum { TD__FLOW_PIECE = 256 << 10 };

/** The state of a transfer: how much of its frame has been sent or received. */
struct td__link_io {
    const struct td__transfer *transfer;
    size_t size;         /* bytes of header and payload */
    size_t done;         /* of these, sent or received */
    uint32_t segment;    /* of the payload: the next segment … */
    size_t segment_done; /* … and the bytes of it that are done */
    bool ready;          /* the socket may be ready */
    uint8_t tail_size;
    uint8_t tail[16]; /* the first bytes of an element that has not been received completely */
    uint8_t header[TD__HEADER_BYTES];
};

/** Starts `transfer`. */
void td__link_io_begin(struct td__link_io *io, const struct td__run *run,
                       const struct td__transfer *transfer);

/** Sends, or receives, as much as the socket allows now. Sets *moved if that is at least a byte. */
td_status td__link_io_send(struct td__link_io *io, const struct td__run *run, bool *moved);
td_status td__link_io_receive(struct td__link_io *io, const struct td__run *run, bool *moved);

static inline bool td__link_io_done(const struct td__link_io *io)
{
    return io->done == io->size;
}

#endif
