/* Runs compiled schedules over sockets: a transfer is sent and received without blocking, as a frame of header and
 * payload. */
#ifndef TD_TCP_LINK_IO_H
#define TD_TCP_LINK_IO_H

#include "base/wait.h"
#include "tcp/compiled_schedule.h"
#include "tcp/links.h"

/* ---- The memory of blocks -------------------------------------------------------------------- */

/* One of three layouts: a vector of `count` elements, cut into `pieces` of about the same size; parts of
 * `count` elements each (`pieces` is 0); or parts of any sizes (`starts`, `ends`). A range of several blocks must
 * be contiguous. */
struct td__blocks {
    char *base;
    size_t element; /* bytes */
    size_t count;
    int32_t pieces;
    const size_t *starts, *ends; /* of each part, in elements */
};

static inline size_t td__block_start(const struct td__blocks *blocks, int32_t block)
{
    size_t i = (size_t)block;
    if (blocks->starts)
        return blocks->starts[i] * blocks->element;
    if (!blocks->pieces)
        return i * blocks->count * blocks->element;
    size_t pieces = (size_t)blocks->pieces;
    return (blocks->count / pieces * i + blocks->count % pieces * i / pieces) * blocks->element;
}

/** The bytes of the `count` contiguous blocks from `block` on. */
static inline size_t td__block_bytes(const struct td__blocks *blocks, int32_t block, int32_t count)
{
    if (blocks->starts)
        return count ? (blocks->ends[block + count - 1] - blocks->starts[block]) * blocks->element
                     : 0;
    return td__block_start(blocks, block + count) - td__block_start(blocks, block);
}

/** `base` + `bytes`; `base` may be NULL if `bytes` is 0. */
static inline char *td__add_offset(const void *base, size_t bytes)
{
    return bytes ? (char *)base + bytes : (char *)base;
}

static inline char *td__block_at(const struct td__blocks *blocks, int32_t block)
{
    return td__add_offset(blocks->base, td__block_start(blocks, block));
}

/* ---- Transfers ------------------------------------------------------------------------------- */

/** One run of a compiled schedule; the same for all its transfers. */
struct td__run {
    const struct td__compiled_schedule *compiled;
    struct td__link_call call;
    struct td__blocks buffers[3]; /* by enum td__schedule_buffer */
    char *piece;                  /* TD__LINK_PIECE bytes: receive buffer of data to be reduced */
};

enum { TD__LINK_PIECE = 256 << 10 };

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

/* ---- The executor ---------------------------------------------------------------------------- */

struct pollfd;

/** The memory that is kept between runs. Zero-initialized. */
struct td__executor {
    struct td__link_io *ios;
    struct pollfd *polled;
    uint32_t capacity; /* of both */
    char *piece;
    int processors;
    struct td__backoff backoff;
};

void td__executor_free(struct td__executor *executor);

/** Runs `run`, round by round, and sets its `piece`. Returns when all rounds are done, or with the first failure, of
 *  which it has notified the other members; the links cannot be used any more then. */
td_status td__executor_run(struct td__executor *executor, struct td__run *run);

#endif
