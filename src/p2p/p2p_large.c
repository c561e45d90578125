/* Large messages between ranks of one host: copied once, straight from one buffer to the other.
 *
 *     sender                    descriptor                 receiver
 *     offers: where it is       ready
 *                               claimed                    has a recv for it
 *                               open, target               copies piece after piece
 *     copies pieces, too        next, copied
 *     all copied: complete      free                       all copied: complete
 *
 * The payload is reached through the sender's arena, which the receiver maps; or, where it is other
 * memory, by process_vm_readv(). Where neither works the receiver requests it in pieces through the
 * ring (`stream`). The sender copies only while it waits, and reaches the receiver's buffer by the
 * same two methods. `next` hands out the pieces; the side that copies the last one signals the other's event.
 * Of a stream, the sender sets `ready` again and again; the receiver copies alone, so that the pieces come in order.
 *
 * A descriptor belongs to the sender, and is free again when the receiver sets it free: no header that
 * refers to it is left then. A sender whose deadline has passed moves it from ready to cancelled and is done;
 * the receiver frees it when it reads the header. Once it is claimed, the receiver copies: the
 * sender waits for that, and cancels it in any case a second after its deadline. The receiver then has a
 * part of the data, but sees that its claim is gone, and fails. A receiver that cancels (its deadline, an
 * abort, the end of the group) withdraws its claim, and is done when the sender does not write any more:
 * a piece later, or when it has ended. Only a sender that was stopped in the middle of a piece for more
 * than a second would still write the rest of the piece. */
#include "p2p/p2p_internal.h"

#include "base/arena.h"
#include "base/fail.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FREE, READY, CLAIMED, WITHDRAWN, CANCELLED, STREAM };
enum { NOWHERE, IN_ARENA, IN_PROCESS };
enum { PAGE = 4096, PIECE = 256 * 1024, SHARED_FROM = 32 * 1024 };

/* ---- Offering and claiming ------------------------------------------------------------------- */

static uint32_t locate(const void *data, uint64_t *address)
{
    struct td__arena *arena;
    size_t offset;
    if (td__arena_resolve(data, &arena, &offset) && arena == td__arena_default()) {
        *address = offset;
        return IN_ARENA;
    }
    *address = (uintptr_t)data;
    return IN_PROCESS;
}

bool td__large_offer(struct td__p2p *p2p, struct td__post *post, struct td__envelope *envelope)
{
    for (uint32_t number = 0; number < TD__DESCRIPTORS; number++) {
        if (p2p->taken[number])
            continue;
        struct td__descriptor *descriptor = td__p2p_shm_descriptor(p2p, p2p->local_index, number);
        if (atomic_load_explicit(&descriptor->state, memory_order_acquire) != FREE)
            continue; /* the receiver has not read its header yet */
        p2p->taken[number] = true;
        atomic_store_explicit(&descriptor->open, 0, memory_order_relaxed);
        atomic_store_explicit(&descriptor->ready, td__post_ready(post), memory_order_relaxed);
        atomic_store_explicit(&descriptor->next, 0, memory_order_relaxed);
        atomic_store_explicit(&descriptor->copied, 0, memory_order_relaxed);
        atomic_store_explicit(&descriptor->pushing, 0, memory_order_relaxed);
        atomic_store_explicit(&descriptor->state, READY, memory_order_release);
        post->descriptor = descriptor;
        post->number = envelope->number = number;
        post->helped = false;
        envelope->memory = locate(post->data, &envelope->address);
        return true;
    }
    return false;
}

bool td__large_claim(struct td__p2p *p2p, struct td__post *post,
                     const struct td__envelope *envelope)
{
    struct td__descriptor *descriptor = td__p2p_shm_descriptor(
        p2p, p2p->peers[envelope->source].local, envelope->number);
    uint32_t state = READY;
    if (!atomic_compare_exchange_strong(&descriptor->state, &state, CLAIMED)) {
        atomic_store(&descriptor->state, FREE);
        return false;
    }
    if (!td__take(p2p, post, envelope)) {
        atomic_store(&descriptor->copied, envelope->size);
        atomic_store(&descriptor->state, FREE);
        td__p2p_shm_signal(p2p, envelope->source);
        return true;
    }
    post->descriptor = descriptor;
    post->memory = envelope->memory;
    post->address = envelope->address;
    td__post_move(post, &p2p->copies);
    return true;
}

void td__large_supply(struct td__p2p *p2p, struct td__post *post)
{
    atomic_store_explicit(&post->descriptor->ready, td__post_ready(post), memory_order_release);
    td__p2p_shm_signal(p2p, post->peer);
}

static void release_descriptor(struct td__p2p *p2p, struct td__post *post)
{
    if (td__is_send(post))
        p2p->taken[post->number] = false;
    post->descriptor = NULL;
}

static void fail_cancelled(struct td__p2p *p2p, struct td__post *post, const char *why)
{
    release_descriptor(p2p, post);
    td__post_suspect(p2p, post, why);
}

static bool cancel_send(struct td__descriptor *descriptor, enum td__cancel_mode how)
{
    uint32_t state = READY;
    if (atomic_compare_exchange_strong(&descriptor->state, &state, CANCELLED))
        return true;
    if (how == TD__IF_IDLE)
        return false;
    if (state == CLAIMED)
        atomic_compare_exchange_strong(&descriptor->state, &state, CANCELLED);
    if (state == STREAM)
        atomic_store(&descriptor->state, FREE); /* the receiver is done with it */
    return true;
}

static bool cancel_recv(struct td__descriptor *descriptor, enum td__cancel_mode how)
{
    /* One that no thread of this process has begun to copy is not open: the sender does not copy either. */
    if (how == TD__IF_IDLE && atomic_load(&descriptor->open) &&
        atomic_load(&descriptor->state) == CLAIMED)
        return false;
    uint32_t state = CLAIMED;
    atomic_compare_exchange_strong(&descriptor->state, &state, WITHDRAWN);
    if (state != CANCELLED && how != TD__AT_ONCE && atomic_load(&descriptor->pushing))
        return false;
    atomic_store(&descriptor->state, FREE);
    return true;
}

bool td__large_cancel(struct td__p2p *p2p, struct td__post *post, enum td__cancel_mode how)
{
    bool send = td__is_send(post);
    if (!(send ? cancel_send(post->descriptor, how) : cancel_recv(post->descriptor, how)))
        return false;
    if (!send)
        td__p2p_shm_signal(p2p, post->peer);
    release_descriptor(p2p, post);
    return true;
}

/* ---- Copying, without the lock --------------------------------------------------------------- */

/* How the other side's memory is accessed. */
struct route {
    char *mapped; /* NULL: by pid and address */
    int pid;
    uint64_t address;
};

static bool find_route(struct td__p2p *p2p, const struct td__post *post, uint32_t memory,
                       uint64_t address, size_t size, struct route *route)
{
    *route = (struct route){.address = address};
    if (memory == IN_ARENA) {
        void *mapped;
        if (td__endpoint_map(p2p->options.endpoint, p2p->world_ranks[post->peer], address, size,
                             post->deadline, &mapped))
            return false;
        route->mapped = mapped;
        return true;
    }
    route->pid = td__p2p_shm_pid(p2p, post->peer);
    if (memory != IN_PROCESS || !td__p2p_shm_readable(p2p, post->peer))
        return false;
    if (route->pid == (int)getpid())
        route->mapped = (char *)(uintptr_t)address; /* ranks can be threads of one process */
    return true;
}

static bool move_piece(const struct route *route, char *here, size_t offset, size_t size, bool push)
{
    if (route->mapped) {
        td__view_access_begin();
        memcpy(push ? route->mapped + offset : here + offset,
               push ? here + offset : route->mapped + offset, size);
        td__view_access_end();
        return true;
    }
    while (size) {
        struct iovec local = {here + offset, size};
        struct iovec remote = {(void *)(uintptr_t)(route->address + offset), size};
        ssize_t moved = push ? process_vm_writev(route->pid, &local, 1, &remote, 1, 0)
                             : process_vm_readv(route->pid, &local, 1, &remote, 1, 0);
        if (moved <= 0)
            return false;
        offset += (size_t)moved;
        size -= (size_t)moved;
    }
    return true;
}

/* Two halves, while they are small: more pieces cost more than they gain, most of all where each is a
 * call to the system. */
static size_t piece_size(size_t size)
{
    if (size < SHARED_FROM)
        return size;
    size_t half = (size / 2 + PAGE - 1) / PAGE * PAGE;
    return half < PIECE ? half : PIECE;
}

/* Whether the next piece can be copied: where it begins. */
static bool has_piece(struct td__descriptor *descriptor, size_t size, size_t step, uint64_t *offset)
{
    *offset = atomic_load(&descriptor->next);
    uint64_t ready = atomic_load_explicit(&descriptor->ready, memory_order_acquire);
    return *offset < size && (ready == size || *offset + step <= ready);
}

/* Copies pieces until none is left, or ready; false when one could not be copied. */
static bool move_pieces(struct td__p2p *p2p, struct td__post *post, const struct route *route,
                        size_t size)
{
    struct td__descriptor *descriptor = post->descriptor;
    bool push = td__is_send(post);
    size_t step = piece_size(size);
    for (;;) {
        if (atomic_load_explicit(&descriptor->state, memory_order_acquire) != CLAIMED)
            return true; /* cancelled */
        uint64_t offset;
        if (!has_piece(descriptor, size, step, &offset))
            return true;
        if (!atomic_compare_exchange_strong(&descriptor->next, &offset, offset + step))
            continue;
        size_t piece = size - offset < step ? size - offset : step;
        if (!move_piece(route, post->data, offset, piece, push))
            return false;
        if (!push)
            td__post_arrived(post, offset + piece);
        if (atomic_fetch_add(&descriptor->copied, piece) + piece == size)
            td__p2p_shm_signal(p2p, post->peer);
    }
}

enum outcome { MOVED, BROKEN, NO_ROUTE };

static enum outcome copy_out(struct td__p2p *p2p, struct td__post *post)
{
    struct td__descriptor *descriptor = post->descriptor;
    struct route route;
    if (!find_route(p2p, post, descriptor->target_memory, descriptor->target, post->size, &route))
        return MOVED; /* the receiver copies all of it */
    atomic_store(&descriptor->pushing, 1);
    bool moved = move_pieces(p2p, post, &route, post->size);
    atomic_store(&descriptor->pushing, 0);
    if (atomic_load(&descriptor->state) == WITHDRAWN)
        td__p2p_shm_signal(p2p, post->peer);
    return moved ? MOVED : BROKEN;
}

static enum outcome copy_in(struct td__p2p *p2p, struct td__post *post)
{
    struct td__descriptor *descriptor = post->descriptor;
    size_t size = post->message_size;
    struct route route;
    if (!find_route(p2p, post, post->memory, post->address, size, &route))
        return NO_ROUTE;
    if (size >= SHARED_FROM && !post->stream) {
        descriptor->target_memory = locate(post->data, &descriptor->target);
        atomic_store_explicit(&descriptor->open, 1, memory_order_release);
    }
    return move_pieces(p2p, post, &route, size) ? MOVED : BROKEN;
}

/* ---- How far the posts are ------------------------------------------------------------------- */

static void stream(struct td__p2p *p2p, struct td__post *post)
{
    struct td__descriptor *descriptor = post->descriptor;
    post->descriptor = NULL;
    td__post_move(post, &p2p->expected);
    atomic_store(&descriptor->state, STREAM);
    td__p2p_shm_signal(p2p, post->peer);
}

static bool look_at_send(struct td__p2p *p2p, struct td__post *post)
{
    struct td__descriptor *descriptor = post->descriptor;
    uint32_t state = atomic_load_explicit(&descriptor->state, memory_order_acquire);
    if (atomic_load_explicit(&descriptor->copied, memory_order_acquire) == post->size) {
        release_descriptor(p2p, post);
        td__post_finish(p2p, post, TD_OK);
    } else if (state == FREE || state == WITHDRAWN) {
        fail_cancelled(p2p, post, "the receiver cancelled the message before it was complete");
    } else if (state == STREAM) {
        release_descriptor(p2p, post);
        atomic_store(&descriptor->state, FREE);
        td__post_send_data(p2p, post);
    } else if (p2p->peers[post->peer].gone) {
        td__large_cancel(p2p, post, TD__AT_ONCE);
        td__post_finish(p2p, post, td__peer_refuse(p2p, post));
    } else if (!post->helped && !post->stream &&
               atomic_load_explicit(&descriptor->open, memory_order_acquire)) {
        post->helped = true;
        td__post_move(post, &p2p->copies);
    } else {
        return false;
    }
    return true;
}

/* A recv, soon. While the sender still writes, td__expire() tries again. */
static bool take_back(struct td__p2p *p2p, struct td__post *post)
{
    bool present = td__p2p_presence(p2p, post->peer) == TD__PRESENT;
    if (td__large_cancel(p2p, post, present ? TD__SOON : TD__AT_ONCE))
        return true;
    post->deadline = td__deadline_earlier(post->deadline, td__now_ns());
    p2p->next_deadline = td__deadline_earlier(p2p->next_deadline, post->deadline);
    return false;
}

static bool look_at_recv(struct td__p2p *p2p, struct td__post *post)
{
    struct td__descriptor *descriptor = post->descriptor;
    uint32_t claimed = CLAIMED;
    if (atomic_load_explicit(&descriptor->copied, memory_order_acquire) == post->message_size) {
        if (atomic_compare_exchange_strong(&descriptor->state, &claimed, FREE)) {
            release_descriptor(p2p, post);
            td__post_finish(p2p, post, TD_OK);
            return true;
        }
    }
    if (atomic_load_explicit(&descriptor->state, memory_order_acquire) == CANCELLED) {
        atomic_store(&descriptor->state, FREE);
        fail_cancelled(p2p, post, "the sender cancelled the message before it was complete");
    } else if (p2p->peers[post->peer].gone && take_back(p2p, post)) {
        td__post_finish(p2p, post, td__peer_refuse(p2p, post));
    } else if (atomic_load_explicit(&descriptor->state, memory_order_acquire) == CLAIMED &&
               has_piece(descriptor, post->message_size, piece_size(post->message_size),
                         &(uint64_t){0})) {
        td__post_move(post, &p2p->copies);
    } else {
        return false;
    }
    return true;
}

bool td__large_look(struct td__p2p *p2p)
{
    bool happened = false;
    for (struct td__post *post = TAILQ_FIRST(&p2p->active), *next; post; post = next) {
        next = TAILQ_NEXT(post, entry);
        if (!post->copying)
            happened |= td__is_send(post) ? look_at_send(p2p, post) : look_at_recv(p2p, post);
    }
    return happened;
}

bool td__large_copy(struct td__p2p *p2p)
{
    struct td__post *post = TAILQ_FIRST(&p2p->copies);
    if (!post)
        return false;
    td__post_move(post, &p2p->active);
    post->copying = true;
    bool send = td__is_send(post);
    pthread_mutex_unlock(&p2p->lock);
    enum outcome outcome = send ? copy_out(p2p, post) : copy_in(p2p, post);
    pthread_mutex_lock(&p2p->lock);
    post->copying = false;
    if (outcome == NO_ROUTE && p2p->peers[post->peer].gone) {
        td__large_cancel(p2p, post, TD__AT_ONCE); /* it was not open */
        td__post_finish(p2p, post, td__peer_refuse(p2p, post));
    } else if (outcome == NO_ROUTE) {
        stream(p2p, post);
    } else if (outcome == BROKEN) {
        post->suspect = "the other process's memory cannot be reached any more";
        if (send)
            td__large_cancel(p2p, post, TD__AT_ONCE);
        if (send || take_back(p2p, post))
            td__post_finish(p2p, post, td__post_fail_suspected(p2p, post));
    } else if (send) {
        look_at_send(p2p, post);
    } else {
        look_at_recv(p2p, post);
    }
    return true;
}
