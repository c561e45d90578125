/* Parsing the frames that come on a link.
 *
 *     0     4     8        16       24
 *     | kind| tag | size   | id     | payload of EAGER and DATA: `size` bytes
 *
 * Little-endian; the upper half of the kind is a magic number. Up to 8 KiB are read ahead, so that a small
 * message is one system call; the rest of a longer payload is read directly into the recv's buffer where there
 * is one, else into memory of its own. Every field is checked; a rank that sends an invalid frame is
 * disconnected. */
#include "p2p/p2p_link.h"

#include "base/fail.h"
#include "os/tls.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define MARK UINT32_C(0x54440000)

enum { BUDGET = 1024 * 1024 }; /* bytes of one link before the next link is read */

static void store_u64(uint8_t *to, uint64_t value)
{
    td__store_u32(to, (uint32_t)value);
    td__store_u32(to + 4, (uint32_t)(value >> 32));
}

static uint64_t load_u64(const uint8_t *from)
{
    return td__load_u32(from) | (uint64_t)td__load_u32(from + 4) << 32;
}

void td__wire_header(uint8_t *header, enum td__frame_kind kind, int tag, uint64_t size, uint64_t id)
{
    td__store_u32(header, MARK | kind);
    td__store_u32(header + 4, (uint32_t)tag);
    store_u64(header + 8, size);
    store_u64(header + 16, id);
}

/* ---- One frame ------------------------------------------------------------------------------- */

static void read_into(struct td__p2p_link *link, struct td__post *post)
{
    post->link = link;
    link->post = post;
    link->into = post->data;
}

static bool begin_eager(struct td__p2p *p2p, struct td__p2p_link *link)
{
    const struct td__envelope *envelope = &link->envelope;
    if (envelope->size > TD__WIRE_EAGER)
        return false;
    struct td__post *post = td__match_posted(p2p, envelope->source, envelope->tag);
    if (!post) {
        link->arrival = td__arrival_make(envelope);
        if (!link->arrival)
            return false;
        link->into = link->arrival->data;
    } else if (td__take(p2p, post, envelope)) {
        td__post_move(post, &p2p->expected);
        read_into(link, post);
    }
    return true;
}

static bool begin_data(struct td__p2p *p2p, struct td__p2p_link *link)
{
    const struct td__envelope *envelope = &link->envelope;
    if (!envelope->id)
        return false;
    struct td__post *post = td__find_expected(p2p, envelope->source, envelope->id);
    if (!post)
        return true; /* cancelled meanwhile: skipped */
    if (envelope->size != post->message_size)
        return false;
    read_into(link, post);
    return true;
}

/* Whether a frame may come on a link: messages come from the side that has opened it. */
static bool is_allowed(const struct td__p2p_link *link, uint32_t kind)
{
    bool of_sender = kind == TD__FRAME_EAGER || kind == TD__FRAME_REQUEST ||
                     kind == TD__FRAME_DATA || kind == TD__FRAME_CANCEL;
    bool of_receiver = kind == TD__FRAME_GO || kind == TD__FRAME_DROP;
    return kind == TD__FRAME_BYE || (link->incoming ? of_sender : of_receiver);
}

static bool take_wire_header(struct td__p2p *p2p, struct td__p2p_link *link, const uint8_t *header)
{
    uint32_t kind = td__load_u32(header) ^ MARK;
    link->envelope = (struct td__envelope){.kind = kind,
                                           .source = link->peer,
                                           .tag = (int)td__load_u32(header + 4),
                                           .size = load_u64(header + 8),
                                           .id = load_u64(header + 16)};
    if (link->bye || !is_allowed(link, kind))
        return false;
    if (kind == TD__FRAME_BYE) {
        link->bye = true;
        return true;
    }
    if (kind != TD__FRAME_EAGER && kind != TD__FRAME_DATA)
        return link->envelope.id && td__take_frame(p2p, &link->envelope, NULL);
    link->left = link->envelope.size;
    return kind == TD__FRAME_EAGER ? begin_eager(p2p, link) : begin_data(p2p, link);
}

static void end_payload(struct td__p2p *p2p, struct td__p2p_link *link)
{
    struct td__p2p_arrival *arrival = link->arrival;
    link->arrival = NULL;
    link->into = NULL;
    if (link->post)
        td__post_finish(p2p, link->post, TD_OK);
    else if (arrival)
        td__arrival_complete(p2p, arrival);
}

/* ---- The stream ------------------------------------------------------------------------------ */

static void advance(struct td__p2p_link *link, size_t size)
{
    link->left -= size;
    if (link->into)
        link->into += size;
    if (link->post)
        td__post_arrived(link->post, (size_t)(link->envelope.size - link->left));
}

/* Parses what was read ahead. False when it is not valid. */
static bool parse_ahead(struct td__p2p *p2p, struct td__p2p_link *link)
{
    for (;;) {
        size_t have = link->to - link->from;
        if (link->left) {
            size_t size = have < link->left ? have : (size_t)link->left;
            if (!size)
                return true;
            if (link->into)
                memcpy(link->into, link->ahead + link->from, size);
            link->from += size;
            advance(link, size);
        } else {
            if (have < TD__WIRE_HEADER)
                return true;
            const uint8_t *header = link->ahead + link->from;
            link->from += TD__WIRE_HEADER;
            if (!take_wire_header(p2p, link, header))
                return false;
        }
        if (!link->left)
            end_payload(p2p, link);
    }
}

/* Reads up to `most` bytes of the rest of the payload to `into`, and reads ahead what follows. */
static ssize_t receive_into(struct td__p2p_link *link, void *into, size_t most, size_t *asked)
{
    struct iovec parts[2];
    int count = 0;
    *asked = 0;
    if (link->left) {
        size_t size = link->left < most ? (size_t)link->left : most;
        parts[count++] = (struct iovec){into, size};
        *asked = size;
    }
    if (*asked == link->left) {
        memmove(link->ahead, link->ahead + link->from, link->to - link->from);
        link->to -= link->from;
        link->from = 0;
        parts[count++] = (struct iovec){link->ahead + link->to, sizeof link->ahead - link->to};
        *asked += sizeof link->ahead - link->to;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t got;
    do {
        got = td__sock_recvmsg(link->fd, &message, MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    return got;
}

/* Skips a payload. A function of its own, so that receive() does not have its buffer on the stack. */
static __attribute__((noinline)) ssize_t receive_nowhere(struct td__p2p_link *link, size_t *asked)
{
    char nowhere[16384];
    return receive_into(link, nowhere, sizeof nowhere, asked);
}

static ssize_t receive(struct td__p2p_link *link, size_t *asked)
{
    return link->left && !link->into ? receive_nowhere(link, asked)
                                     : receive_into(link, link->into, BUDGET, asked);
}

enum td__wire_state td__wire_read(struct td__p2p *p2p, struct td__p2p_link *link,
                                  const char **exit_reason)
{
    for (size_t total = 0; total < BUDGET;) {
        size_t asked;
        ssize_t got = receive(link, &asked);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return TD__WIRE_IDLE;
        if (got <= 0) {
            const char *complaint = td__tls_complaint(link->fd);
            *exit_reason = link->bye   ? "has left the group"
                           : complaint ? complaint
                           : got       ? "has ended, or its connection broke"
                                       : "has ended, or closed the connection";
            return TD__WIRE_ENDED;
        }
        total += (size_t)got;
        size_t direct = (uint64_t)got < link->left ? (size_t)got : (size_t)link->left;
        link->to += (size_t)got - direct;
        if (direct) {
            advance(link, direct);
            if (!link->left)
                end_payload(p2p, link);
        }
        if (!link->left && !parse_ahead(p2p, link)) {
            *exit_reason = "is disconnected, since it sent a frame that is not valid";
            return TD__WIRE_ENDED;
        }
        if ((size_t)got < asked && !link->bye)
            return TD__WIRE_IDLE; /* there was no more */
    }
    return TD__WIRE_MORE;
}
