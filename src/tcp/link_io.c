/* Transfers on a link; see link_io.h.
 *
 * One sendmsg() sends header and payload, one recvmsg() receives them: a short transfer costs one system call on
 * each side. The receiver knows the size of the frame and never reads more, so that it reads nothing of the next
 * frame.
 *
 * Data to be reduced are received in pieces that stay in the cache, and reduced at once:
 *
 *     socket --recvmsg--> piece |tail|##########|--combine--> block
 *
 * The tail is the first part of an element whose rest has not been received. */
#include "tcp/link_io.h"

#include "base/fail.h"
#include "os/tls.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum {
    MAX_PARTS = 32,         /* of one sendmsg() or recvmsg() */
    SEND_LIMIT = 512 << 10, /* bytes of one call, so that both directions make progress */
    RECV_LIMIT = 512 << 10,
};

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static const struct td__segment *segment_of(const struct td__link_io *io, const struct td__run *run,
                                            uint32_t index)
{
    return &run->compiled->segments[io->transfer->first + index];
}

static size_t segment_bytes(const struct td__run *run, const struct td__segment *segment)
{
    return td__block_bytes(&run->buffers[segment->buffer], segment->block, segment->count);
}

/* Advances the position in the payload by `bytes`, and past empty segments. */
static void advance(struct td__link_io *io, const struct td__run *run, size_t bytes)
{
    while (io->segment < io->transfer->count) {
        size_t left = segment_bytes(run, segment_of(io, run, io->segment)) - io->segment_done;
        size_t step = min_size(left, bytes);
        io->segment_done += step;
        bytes -= step;
        if (step < left)
            return;
        io->segment++;
        io->segment_done = 0;
    }
}

void td__link_io_begin(struct td__link_io *io, const struct td__run *run,
                       const struct td__transfer *transfer)
{
    io->transfer = transfer;
    io->size = TD__HEADER_BYTES;
    io->done = 0;
    io->segment = 0;
    io->segment_done = 0;
    io->ready = true;
    io->tail_size = 0;
    for (uint32_t i = 0; i < transfer->count; i++)
        io->size += segment_bytes(run, segment_of(io, run, i));
    advance(io, run, 0);
}

/* Fills in `parts` for one system call: the rest of the frame, up to `limit` bytes and up to the first segment
 * to be reduced. Returns the number of parts. */
static int parts_of(struct td__link_io *io, const struct td__run *run, struct iovec *parts,
                    size_t limit)
{
    int count = 0;
    if (io->done < TD__HEADER_BYTES)
        parts[count++] = (struct iovec){.iov_base = io->header + io->done,
                                        .iov_len = TD__HEADER_BYTES - io->done};
    size_t skip = io->segment_done;
    for (uint32_t i = io->segment; i < io->transfer->count && count < MAX_PARTS && limit; i++) {
        const struct td__segment *segment = segment_of(io, run, i);
        if (segment->reduces)
            break;
        size_t bytes = min_size(segment_bytes(run, segment) - skip, limit);
        if (bytes) {
            char *base = td__block_at(&run->buffers[segment->buffer], segment->block);
            parts[count++] = (struct iovec){.iov_base = base + skip, .iov_len = bytes};
            limit -= bytes;
        }
        skip = 0;
    }
    return count;
}

td_status td__link_io_send(struct td__link_io *io, const struct td__run *run, bool *moved)
{
    struct td__tcp_link *link = &run->call.links->at[io->transfer->peer];
    struct iovec parts[MAX_PARTS];
    struct msghdr msg = {.msg_iov = parts};
    if (io->done == 0) {
        struct td__call_header header = run->call.header;
        header.payload = io->size - TD__HEADER_BYTES;
        td__header_write(&header, io->header);
    }
    msg.msg_iovlen = (size_t)parts_of(io, run, parts, SEND_LIMIT);
    ssize_t sent;
    do
        sent = td__sock_sendmsg(link->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0) {
        io->ready = false;
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return TD_OK;
        return td__links_fail_end(&run->call, io->transfer->peer, errno);
    }
    size_t bytes = (size_t)sent;
    size_t header = io->done < TD__HEADER_BYTES ? min_size(bytes, TD__HEADER_BYTES - io->done) : 0;
    io->done += bytes;
    advance(io, run, bytes - header);
    link->sending = !td__link_io_done(io);
    *moved = true;
    return TD_OK;
}

/* ---- Received headers ------------------------------------------------------------------------ */

/* Removes the first TD__HEADER_BYTES of the `got` bytes in `parts`, and moves the others up. */
static void drop_header(struct td__link_io *io, struct iovec *parts, size_t got)
{
    struct iovec *to = parts, *from = parts;
    size_t to_at = 0, from_at = 0;
    for (size_t i = 0; i < got; i++) {
        while (from_at == from->iov_len)
            from++, from_at = 0;
        while (to_at == to->iov_len)
            to++, to_at = 0;
        if (i >= TD__HEADER_BYTES)
            ((char *)to->iov_base)[to_at++] = ((char *)from->iov_base)[from_at];
        from_at++;
    }
    io->done = 0;
}

/* Checks the header, the first of `parts`, in which `*got` bytes have been received. Drops headers that do not
 * concern this call (td__links_check_header()), so that `parts` then have the beginning of the expected frame. */
static td_status check_header(struct td__link_io *io, const struct td__run *run,
                              struct iovec *parts, size_t *got)
{
    struct td__link_call call = run->call;
    struct td__call_header theirs;
    int peer = io->transfer->peer;
    uint8_t expected[TD__HEADER_BYTES];
    call.header.payload = io->size - TD__HEADER_BYTES;
    td__header_write(&call.header, expected);
    parts[0] = (struct iovec){.iov_base = io->header, .iov_len = TD__HEADER_BYTES};
    while (*got >= TD__HEADER_BYTES && memcmp(io->header, expected, TD__HEADER_BYTES) != 0) {
        char text[TD__FAILURE_TEXT];
        size_t size = 0, extra = *got - TD__HEADER_BYTES;
        for (int i = 1; size < extra && size < sizeof text; i++) {
            size_t part = min_size(min_size(parts[i].iov_len, extra - size), sizeof text - size);
            memcpy(text + size, parts[i].iov_base, part);
            size += part;
        }
        if (!td__header_read(io->header, &theirs))
            return td__links_fail_invalid(&call, peer);
        TD_TRY(td__links_check_header(&call, peer, call.links->at[peer].fd, &theirs, text, size));
        drop_header(io, parts, *got);
        *got -= TD__HEADER_BYTES;
    }
    return TD_OK;
}

/* ---- Receiving ------------------------------------------------------------------------------- */

/* Reduces the complete elements among the tail and the `bytes` bytes received after it. */
static void reduce_piece(struct td__link_io *io, const struct td__run *run, size_t bytes)
{
    const struct td__segment *segment = segment_of(io, run, io->segment);
    const struct td__blocks *blocks = &run->buffers[segment->buffer];
    size_t size = io->tail_size + bytes, whole = size / blocks->element;
    char *to = td__block_at(blocks, segment->block) + io->segment_done - io->tail_size;
    td__reduce_combine(&run->call.operation->reduction, to, run->piece, whole);
    io->tail_size = (uint8_t)(size - whole * blocks->element);
    memcpy(io->tail, run->piece + whole * blocks->element, io->tail_size);
    advance(io, run, bytes);
}

/* If the next segment is to be reduced, adds `piece` to `parts`. */
static bool add_piece(struct td__link_io *io, const struct td__run *run, struct iovec *parts,
                      int *count)
{
    if (io->segment == io->transfer->count)
        return false;
    const struct td__segment *segment = segment_of(io, run, io->segment);
    if (!segment->reduces)
        return false;
    size_t left = segment_bytes(run, segment) - io->segment_done;
    memcpy(run->piece, io->tail, io->tail_size);
    parts[(*count)++] = (struct iovec){.iov_base = run->piece + io->tail_size,
                                       .iov_len = min_size(left, TD__LINK_PIECE - io->tail_size)};
    return true;
}

td_status td__link_io_receive(struct td__link_io *io, const struct td__run *run, bool *moved)
{
    struct td__tcp_link *link = &run->call.links->at[io->transfer->peer];
    struct iovec parts[MAX_PARTS + 1];
    struct msghdr msg = {.msg_iov = parts};
    int count = parts_of(io, run, parts, RECV_LIMIT);
    bool has_header = io->done < TD__HEADER_BYTES;
    bool reduces = count == has_header && add_piece(io, run, parts, &count);
    msg.msg_iovlen = (size_t)count;
    ssize_t received;
    do
        received = td__sock_recvmsg(link->fd, &msg, MSG_DONTWAIT);
    while (received < 0 && errno == EINTR);
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        io->ready = false;
        return TD_OK;
    }
    if (received <= 0)
        return td__links_fail_end(&run->call, io->transfer->peer, received ? errno : 0);
    *moved = true;
    size_t bytes = (size_t)received;
    if (has_header) {
        size_t got = io->done + bytes;
        if (got >= TD__HEADER_BYTES)
            TD_TRY(check_header(io, run, parts, &got));
        io->done = min_size(got, TD__HEADER_BYTES);
        bytes = got - io->done;
    }
    io->done += bytes;
    link->receiving = io->done && !td__link_io_done(io);
    if (reduces && bytes)
        reduce_piece(io, run, bytes);
    else
        advance(io, run, bytes);
    return TD_OK;
}
