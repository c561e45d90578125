/* Frames between ranks of one host: a ring for each ordered pair of them, in shared memory.
 *
 * A ring has one writer and one reader. Frames begin at multiples of 64 bytes, each in one piece:
 * a header, whose first word is its kind, and the payload. The reader polls the first word of the
 * next frame, so that a small message moves one cache line from one processor to another.
 * For this, the word must be 0 until the frame is there: the writer clears it in advance, when it
 * writes the frame before. It never fills the last 64 bytes, so that there always is a next one.
 *
 * A writer that finds no room sets `full` in the ring, and is signalled when some of it was read. */
#include "p2p/p2p_internal.h"

#include "base/arena.h"

#include <string.h>

enum {
    EAGER_LIMIT = 8 * 1024,
    ARENA_EAGER_LIMIT = 4 * 1024,
    AT_ONCE = 64,           /* frames of one rank that are read before those of another */
    CLAIM_LIMIT = 2 * 1024, /* frames whose lines are claimed for the next one */
};

struct frame {
    _Atomic uint32_t kind;
    int32_t tag;
    uint64_t size;
    union {
        char payload[1]; /* EAGER, a short one */
        struct {
            uint64_t id;
            uint64_t address;
            uint32_t number;
            uint32_t memory;
            char piece[1]; /* DATA */
        };
    };
};

/* Where the payload of an EAGER frame begins: a short one in the frame's own line, a longer one in the next,
 * since whole lines are copied faster. */
static size_t payload_offset(size_t size)
{
    return offsetof(struct frame, payload) + size <= TD__LINE ? offsetof(struct frame, payload)
                                                              : TD__LINE;
}

/* ---- Writing --------------------------------------------------------------------------------- */

static size_t lines(size_t bytes)
{
    return (bytes + TD__LINE - 1) / TD__LINE * TD__LINE;
}

static struct frame *frame_at(const struct td__ring *ring, uint32_t at)
{
    return (struct frame *)(ring->data + at);
}

static struct frame *first_frame(const struct td__ring_end *end)
{
    return frame_at(end->ring, atomic_load_explicit(&end->at, memory_order_relaxed));
}

static bool has_room(struct td__ring_end *end, size_t need)
{
    if (end->total + need <= end->room)
        return true;
    end->room = atomic_load_explicit(&end->ring->head, memory_order_acquire) + TD__RING_DATA;
    if (end->total + need <= end->room)
        return true;
    /* The reader checks `full` after it has moved the head. Before this process sleeps, it checks here once
     * more, as with every condition of an event. */
    atomic_store(&end->ring->full, 1);
    end->room = atomic_load(&end->ring->head) + TD__RING_DATA;
    return end->total + need <= end->room;
}

/* Where a frame of so many bytes is to be written; NULL where there is no room. */
static struct frame *reserve(struct td__ring_end *end, size_t bytes)
{
    uint32_t at = atomic_load_explicit(&end->at, memory_order_relaxed);
    size_t size = lines(bytes);
    size_t waste = at + size > TD__RING_DATA ? TD__RING_DATA - at : 0;
    if (!has_room(end, waste + size + TD__LINE))
        return NULL;
    return frame_at(end->ring, waste ? 0 : at);
}

static void publish(struct td__ring_end *end, struct frame *frame, size_t bytes, uint32_t kind)
{
    uint32_t at = atomic_load_explicit(&end->at, memory_order_relaxed);
    uint32_t begin = (uint32_t)((char *)frame - end->ring->data);
    size_t size = lines(bytes);
    uint32_t next = (begin + (uint32_t)size) % TD__RING_DATA;
    atomic_store_explicit(&frame_at(end->ring, next)->kind, TD__FRAME_NONE, memory_order_relaxed);
    atomic_store_explicit(&frame->kind, kind, memory_order_release);
    if (begin != at) {
        atomic_store_explicit(&frame_at(end->ring, at)->kind, TD__FRAME_WRAP, memory_order_release);
        end->total += TD__RING_DATA - at;
    }
    end->total += size;
    atomic_store_explicit(&end->at, next, memory_order_relaxed);
}

/* Claims the cache lines of the next frame, assumed to be as large, from their last reader; not the first one,
 * which the reader polls. */
static void claim_next(const struct td__ring_end *end, size_t bytes)
{
    size_t at = atomic_load_explicit(&end->at, memory_order_relaxed), size = lines(bytes);
    if (bytes > CLAIM_LIMIT || at + size + TD__LINE > TD__RING_DATA ||
        end->total + size + TD__LINE > end->room)
        return;
    for (size_t line = TD__LINE; line <= size; line += TD__LINE)
        td__claim_line(end->ring->data + at + line);
}

bool td__p2p_shm_send_small(struct td__p2p *p2p, int peer, int tag, const void *data, size_t size)
{
    struct td__ring_end *end = &p2p->peers[peer].writes;
    size_t offset = payload_offset(size), bytes = offset + size;
    struct frame *frame = reserve(end, bytes);
    if (!frame)
        return false;
    frame->tag = tag;
    frame->size = size;
    if (size)
        memcpy((char *)frame + offset, data, size);
    publish(end, frame, bytes, TD__FRAME_EAGER);
    claim_next(end, bytes);
    return true;
}

static bool write_header(struct td__p2p *p2p, int peer, const struct td__envelope *envelope)
{
    struct td__ring_end *end = &p2p->peers[peer].writes;
    struct frame *frame = reserve(end, sizeof *frame);
    if (!frame)
        return false;
    frame->tag = envelope->tag;
    frame->size = envelope->size;
    frame->id = envelope->id;
    frame->address = envelope->address;
    frame->number = envelope->number;
    frame->memory = envelope->memory;
    publish(end, frame, sizeof *frame, envelope->kind);
    return true;
}

static bool write_pieces(struct td__p2p *p2p, struct td__post *post)
{
    struct td__ring_end *end = &p2p->peers[post->peer].writes;
    size_t ready = td__post_ready(post);
    while (post->moved < ready) {
        size_t size = ready - post->moved < EAGER_LIMIT ? ready - post->moved : EAGER_LIMIT;
        size_t bytes = offsetof(struct frame, piece) + size;
        struct frame *frame = reserve(end, bytes);
        if (!frame)
            return false;
        frame->size = size;
        frame->id = post->id;
        memcpy(frame->piece, post->data + post->moved, size);
        publish(end, frame, bytes, TD__FRAME_DATA);
        post->moved += size;
    }
    return ready == post->size;
}

/* Of a large message only the header is written; which list the post goes to depends on whether there was a
 * descriptor for it. */
static bool write_large(struct td__p2p *p2p, struct td__post *post)
{
    struct td__envelope envelope = {.tag = post->tag, .size = post->size};
    struct td__ring_end *end = &p2p->peers[post->peer].writes;
    if (!reserve(end, sizeof(struct frame)))
        return false;
    envelope.id = post->id = ++p2p->ids;
    bool offered = td__large_offer(p2p, post, &envelope);
    envelope.kind = offered ? TD__FRAME_LARGE : TD__FRAME_REQUEST;
    td__post_move(post, offered ? &p2p->active : &p2p->announced);
    return write_header(p2p, post->peer, &envelope);
}

bool td__p2p_shm_is_small(const struct td__p2p *p2p, const void *data, size_t size)
{
    if (size <= ARENA_EAGER_LIMIT || size > EAGER_LIMIT || p2p->oversubscribed)
        return size <= EAGER_LIMIT;
    struct td__arena *arena;
    size_t offset;
    return !td__arena_resolve(data, &arena, &offset);
}

bool td__p2p_shm_write(struct td__p2p *p2p, int peer, struct td__post *post)
{
    struct td__envelope control = {.kind = post->kind, .id = post->id};
    bool eager = post->kind == TD__FRAME_EAGER;
    bool large = eager && !td__p2p_shm_is_small(p2p, post->data, post->size);
    size_t before = post->moved;
    bool written = large   ? write_large(p2p, post)
                   : eager ? td__p2p_shm_send_small(p2p, peer, post->tag, post->data, post->size)
                   : post->kind == TD__FRAME_DATA ? write_pieces(p2p, post)
                                                  : write_header(p2p, peer, &control);
    if (written && !large)
        td__post_finish(p2p, post, TD_OK);
    if (written || post->moved != before)
        td__p2p_shm_signal(p2p, peer);
    return written;
}

/* ---- Reading --------------------------------------------------------------------------------- */

bool td__p2p_shm_departed(const struct td__p2p *p2p)
{
    return atomic_load_explicit(&p2p->shared->departures, memory_order_relaxed) !=
           atomic_load_explicit(&p2p->departures, memory_order_relaxed);
}

bool td__p2p_shm_peek(const struct td__p2p *p2p)
{
    for (int i = 0; i < p2p->local_size; i++) {
        const struct frame *frame = first_frame(&p2p->peers[p2p->locals[i]].reads);
        if (atomic_load_explicit(&frame->kind, memory_order_relaxed))
            return true;
    }
    return td__p2p_shm_departed(p2p);
}

static bool take_piece(struct td__p2p *p2p, int source, uint64_t id, const char *piece, size_t size)
{
    struct td__post *post = td__find_expected(p2p, source, id);
    if (!post)
        return true; /* cancelled meanwhile */
    if (size > post->message_size - post->moved)
        return false;
    memcpy(post->data + post->moved, piece, size);
    post->moved += size;
    td__post_arrived(post, post->moved);
    if (post->moved == post->message_size)
        td__post_finish(p2p, post, TD_OK);
    return true;
}

/* Handles one frame. Its fields are read once, since the other side could change them. Returns how many bytes
 * it has in the ring, or 0 when it is not valid or cannot be stored. */
static size_t take_frame(struct td__p2p *p2p, int source, struct frame *frame, uint32_t kind,
                         size_t limit)
{
    struct td__envelope envelope = {.kind = kind, .source = source, .tag = frame->tag};
    envelope.size = *(volatile uint64_t *)&frame->size;
    bool eager = kind == TD__FRAME_EAGER;
    if (eager || kind == TD__FRAME_DATA) {
        size_t offset = eager ? payload_offset(envelope.size) : offsetof(struct frame, piece);
        const char *payload = (char *)frame + offset;
        if (envelope.size > EAGER_LIMIT || offset + envelope.size > limit)
            return 0;
        bool valid = eager ? td__take_frame(p2p, &envelope, payload)
                           : take_piece(p2p, source, frame->id, payload, envelope.size);
        return valid ? offset + envelope.size : 0;
    }
    envelope.id = frame->id;
    envelope.address = frame->address;
    envelope.number = frame->number;
    envelope.memory = frame->memory;
    bool valid = envelope.number < TD__DESCRIPTORS && td__take_frame(p2p, &envelope, NULL);
    return valid ? sizeof *frame : 0;
}

/* `size` bytes of a ring have been read. */
static void advance(struct td__ring_end *end, size_t size)
{
    uint32_t at = atomic_load_explicit(&end->at, memory_order_relaxed);
    end->total += size;
    atomic_store_explicit(&end->at, (at + (uint32_t)size) % TD__RING_DATA, memory_order_relaxed);
    atomic_store_explicit(&end->ring->head, end->total, memory_order_release);
}

/* After something was read: wakes a writer that waits for room. */
static void wake_writer(struct td__p2p *p2p, const struct td__peer *peer)
{
    struct td__ring *ring = peer->reads.ring;
    td__wait_event_fence();
    if (atomic_load_explicit(&ring->full, memory_order_relaxed)) {
        atomic_store_explicit(&ring->full, 0, memory_order_relaxed);
        td__wait_event_signal(&p2p->shared->entries[peer->local].event);
    }
}

bool td__p2p_shm_recv_small(struct td__p2p *p2p, int source, int tag, void *data, size_t room,
                            size_t *size)
{
    struct td__peer *peer = &p2p->peers[source];
    struct td__ring_end *end = &peer->reads;
    struct frame *frame = first_frame(end);
    uint32_t kind;
    unsigned polls = td__first_polls(p2p->oversubscribed);
    while (!(kind = atomic_load_explicit(&frame->kind, memory_order_acquire)) &&
           td__poll_again(&polls))
        ;
    if (kind != TD__FRAME_EAGER || !td__tag_fits(tag, frame->tag))
        return false;
    /* Its fields are read once, since the other side could change them. */
    *size = *(volatile uint64_t *)&frame->size;
    size_t limit = TD__RING_DATA - (size_t)((char *)frame - end->ring->data);
    if (*size > room || *size > EAGER_LIMIT || payload_offset(*size) + *size > limit)
        return false;
    if (*size)
        memcpy(data, (char *)frame + payload_offset(*size), *size);
    advance(end, lines(payload_offset(*size) + *size));
    wake_writer(p2p, peer);
    return true;
}

static bool read_ring(struct td__p2p *p2p, int source, int most)
{
    struct td__peer *peer = &p2p->peers[source];
    struct td__ring_end *end = &peer->reads;
    uint64_t before = end->total;
    for (int i = 0; i < most; i++) {
        struct frame *frame = first_frame(end);
        size_t limit = TD__RING_DATA - (size_t)((char *)frame - end->ring->data);
        uint32_t kind = atomic_load_explicit(&frame->kind, memory_order_acquire);
        if (kind == TD__FRAME_NONE)
            break;
        size_t size = limit;
        if (kind != TD__FRAME_WRAP)
            size = lines(take_frame(p2p, source, frame, kind, limit));
        if (!size) {
            td__peer_gone(p2p, source, "has written a frame that is not valid");
            break;
        }
        advance(end, size);
    }
    if (end->total == before)
        return false;
    wake_writer(p2p, peer);
    return true;
}

void td__ring_lose(struct td__p2p *p2p, int source, const char *exit_reason)
{
    read_ring(p2p, source, TD__RING_DATA); /* the frames that it wrote before */
    td__peer_gone(p2p, source, exit_reason);
}

bool td__p2p_shm_read(struct td__p2p *p2p)
{
    struct td__shared *shared = p2p->shared;
    uint32_t departures = atomic_load_explicit(&shared->departures, memory_order_acquire);
    bool happened = false;
    for (int i = 0; i < p2p->local_size; i++)
        if (i != p2p->local_index && !p2p->peers[p2p->locals[i]].gone)
            happened |= read_ring(p2p, p2p->locals[i], AT_ONCE);
    if (departures == atomic_load_explicit(&p2p->departures, memory_order_relaxed))
        return happened;
    for (int i = 0; i < p2p->local_size; i++)
        if (i != p2p->local_index && atomic_load(&shared->entries[i].gone))
            td__ring_lose(p2p, p2p->locals[i], "has left the group");
    atomic_store_explicit(&p2p->departures, departures, memory_order_relaxed);
    return true;
}
