/* A link to another worker: a stream of messages in each direction.
 *
 *     other host    the bytes go over a socket
 *     this host     they go through rings in shared memory; the socket only ends with its process
 *
 * Any thread writes, under write_lock; only the thread that leads (io.c) reads.
 *
 * A link outlives its socket: link_resume.c. So messages that were written to a socket are kept until the other worker
 * has acknowledged them, which it does now and then. */
#include "base/arena.h"
#include "base/fail.h"
#include "os/socket.h"
#include "os/tls.h"
#include "rpc/rpc_agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    BUFFER_SIZE = 64 * 1024,
    SEGMENTS = 16,                            /* of one sendmsg() */
    READS = 64,                               /* of one link before it is the next one's turn */
    ACK_BYTES = 256 * 1024,                   /* how much may be received … */
    ACK_MESSAGES = 64,                        /* … or how many, until that is acknowledged */
    RING_STEP = TD__BYTE_RING_SIZE / 4 - 128, /* both ends of a ring copy at the same time */
};

/* ---- Opening --------------------------------------------------------------------------------- */

static struct td__rpc_link *create(struct td__rpc_agent *agent, int rank, int fd, bool local)
{
    struct td__rpc_link *link = calloc(1, sizeof *link);
    if (!link) {
        td__fail_nomem("rpc");
        return NULL;
    }
    *link = (struct td__rpc_link){
        .agent = agent, .rank = rank, .fd = fd, .event = -1, .local = local};
    atomic_init(&link->users, 1);
    pthread_mutex_init(&link->write_lock, NULL);
    pthread_mutex_init(&link->resume_lock, NULL);
    link->last = &link->first;
    link->last_unacked = &link->unacked;
    link->last_arrived = &link->arrived;
    if (!local && !(link->buffer = malloc(BUFFER_SIZE))) {
        td__fail_nomem("rpc");
        link->fd = -1;
        td__link_release(link);
        return NULL;
    }
    return link;
}

struct td__rpc_link *td__link_retain(struct td__rpc_link *link)
{
    if (link)
        atomic_fetch_add_explicit(&link->users, 1, memory_order_relaxed);
    return link;
}

void td__link_release(struct td__rpc_link *link)
{
    if (!link || atomic_fetch_sub(&link->users, 1) != 1)
        return;
    *link->last_unacked = link->first;
    td__messages_free(link->unacked);
    td__incoming_free(link->incoming);
    td__byte_ring_unmap(&link->rings);
    if (link->control)
        munmap(link->control, td__page_size());
    if (link->event >= 0)
        close(link->event);
    if (link->fd >= 0)
        td__sock_close(link->fd);
    pthread_mutex_destroy(&link->write_lock);
    pthread_mutex_destroy(&link->resume_lock);
    free(link->buffer);
    free(link);
}

static td_status map_control(struct td__rpc_link *link, int fd)
{
    void *page = mmap(NULL, td__page_size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return td_fail(TD_ERR_SYSTEM, "the shared memory of a link: mmap: %s",
                       td__errno_text(errno));
    link->control = page;
    return TD_OK;
}

static td_status failed(int error)
{
    return td_fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER, "the handshake failed: %s",
                   error == ENODATA ? "it closed the connection" : td__errno_text(error));
}

void td__handshake_begin(struct td__rpc_agent *agent, struct td__handshake *handshake, int fd)
{
    handshake->fd = fd;
    pthread_mutex_lock(&agent->lock);
    handshake->next = agent->handshakes;
    agent->handshakes = handshake;
    if (atomic_load(&agent->stopping))
        shutdown(fd, SHUT_RDWR);
    pthread_mutex_unlock(&agent->lock);
}

void td__handshake_end(struct td__rpc_agent *agent, struct td__handshake *handshake)
{
    pthread_mutex_lock(&agent->lock);
    struct td__handshake **at = &agent->handshakes;
    while (*at != handshake)
        at = &(*at)->next;
    *at = handshake->next;
    pthread_mutex_unlock(&agent->lock);
}

void td__handshakes_cancel(struct td__rpc_agent *agent)
{
    pthread_mutex_lock(&agent->lock);
    for (struct td__handshake *handshake = agent->handshakes; handshake;
         handshake = handshake->next)
        shutdown(handshake->fd, SHUT_RDWR);
    pthread_mutex_unlock(&agent->lock);
}

void td__link_watch(struct td__rpc_link *link)
{
    struct td__rpc_agent *agent = link->agent;
    struct epoll_event event = {.events = EPOLLET | (link->local ? EPOLLRDHUP : EPOLLIN | EPOLLOUT),
                                .data.u64 = link->id};
    if (epoll_ctl(link->local ? agent->epoll : agent->sockets, EPOLL_CTL_ADD, link->fd, &event))
        atomic_store(&link->hup, true);
}

/* The thread that leads reads it from now on. */
static td_status add(struct td__rpc_link *link)
{
    struct td__rpc_agent *agent = link->agent;
    pthread_mutex_lock(&agent->lock);
    bool added = agent->id_count < agent->id_capacity;
    if (!added) {
        uint64_t capacity = agent->id_capacity ? 2 * agent->id_capacity : 16;
        struct td__rpc_link **by_id = realloc(agent->by_id, sizeof *by_id * capacity);
        added = by_id;
        if (by_id) {
            agent->by_id = by_id;
            agent->id_capacity = capacity;
        }
    }
    if (added) {
        link->id = agent->id_count++;
        agent->by_id[link->id] = link;
        atomic_store(&link->dead, td__worker(agent, link->rank)->gone);
    }
    pthread_mutex_unlock(&agent->lock);
    if (!added)
        return td__fail_nomem("rpc");
    if (!link->local)
        atomic_fetch_add(&agent->socket_links, 1);
    td__link_watch(link);
    struct td__rpc_link *first = atomic_load(&agent->new_links);
    do
        link->next = first;
    while (!atomic_compare_exchange_weak(&agent->new_links, &first, link));
    td__io_wake(agent);
    return TD_OK;
}

/* The worker gets the link before it is read: once it is, it may end at any time, and the worker must not get it after
 * that. */
static td_status finish(struct td__rpc_link *link, td_status status)
{
    if (status) {
        td__link_release(link);
        return status;
    }
    td__workers_add_link(link);
    if (add(link))
        td__agent_link_ended(link);
    return TD_OK;
}

/* Sends a byte of the handshake with a descriptor, or receives one. */
static td_status send_fd(struct td__rpc_link *link, int fd, td__deadline deadline)
{
    int error = td__send_fd(link->fd, fd, "f", 1, deadline);
    return error ? failed(error) : TD_OK;
}

static td_status recv_fd(struct td__rpc_link *link, int *fd, td__deadline deadline)
{
    char byte;
    int error = td__recv_fd(link->fd, fd, &byte, 1, deadline);
    return error ? failed(error) : TD_OK;
}

/* What the other worker needs to see whether this agent sleeps, and to wake it. */
static td_status send_control(struct td__rpc_link *link, td__deadline deadline)
{
    TD_TRY(send_fd(link, link->agent->control_fd, deadline));
    return send_fd(link, link->agent->event, deadline);
}

static td_status recv_control(struct td__rpc_link *link, td__deadline deadline)
{
    int fd;
    TD_TRY(recv_fd(link, &fd, deadline));
    td_status status = map_control(link, fd);
    close(fd);
    return status ? status : recv_fd(link, &link->event, deadline);
}

static td_status open_rings(struct td__rpc_link *link, td__deadline deadline)
{
    int fd;
    TD_TRY(td__byte_ring_create(&link->rings, &fd));
    td_status status = send_fd(link, fd, deadline);
    close(fd);
    if (!status)
        status = send_control(link, deadline);
    return status ? status : recv_control(link, deadline);
}

static td_status accept_rings(struct td__rpc_link *link, td__deadline deadline)
{
    int fd;
    TD_TRY(recv_fd(link, &fd, deadline));
    td_status status = td__byte_ring_map(&link->rings, fd);
    close(fd);
    if (!status)
        status = recv_control(link, deadline);
    return status ? status : send_control(link, deadline);
}

/* The last byte of the handshake: the other worker has the link, and knows its number. If the byte is lost, the opener
 * has no link; what the other worker has sent over it until then is sent over the next one (td__agent_link_ended()).
 * Over rings it sends nothing before the opener has the link: its ring is full until then. */
static td_status await_ready(struct td__rpc_link *link, td__deadline deadline)
{
    uint8_t ready;
    int error = td__recv_all(link->fd, &ready, 1, deadline);
    if (!error && link->local && td__byte_ring_release(&link->rings.in))
        td__io_ring(link);
    return error ? failed(error) : TD_OK;
}

static void send_ready(struct td__rpc_link *link, td__deadline deadline)
{
    pthread_mutex_lock(&link->write_lock);
    if (!link->stopped)                           /* and not over the next socket */
        td__send_all(link->fd, "r", 1, deadline); /* the thread that leads notices a failure */
    link->unready &= link->local;
    pthread_mutex_unlock(&link->write_lock);
    td__link_flush(link);
}

td_status td__link_open(struct td__rpc_agent *agent, int rank, int fd, td__deadline deadline)
{
    uint8_t hello[TD__LINK_HELLO_SIZE];
    bool local = td__endpoint_host(agent->endpoint, rank) ==
                 td__endpoint_host(agent->endpoint, agent->rank);
    struct td__rpc_link *link = create(agent, rank, fd, local);
    if (!link) {
        td__sock_close(fd);
        return TD_ERR_NOMEM;
    }
    link->opener = true;
    link->number = td__rref_new_id(agent);
    td__hello_write(hello, local ? TD__HELLO_RINGS : TD__HELLO_SOCKET, link->number, 0, 0);
    struct td__handshake handshake;
    td__handshake_begin(agent, &handshake, fd);
    int error = td__send_all(fd, hello, sizeof hello, deadline);
    td_status status = error ? failed(error) : local ? open_rings(link, deadline) : TD_OK;
    if (!status)
        status = await_ready(link, deadline);
    td__handshake_end(agent, &handshake);
    return finish(link, status);
}

td_status td__link_accept(struct td__rpc_agent *agent, int rank, int fd, td__deadline deadline)
{
    uint8_t hello[TD__LINK_HELLO_SIZE];
    struct td__handshake handshake;
    td__handshake_begin(agent, &handshake, fd);
    int error = td__recv_all(fd, hello, sizeof hello, deadline);
    td__handshake_end(agent, &handshake);
    uint64_t number = td__load_u64(hello + 8), received = td__load_u64(hello + 16);
    uint32_t kind = hello[4], attempt = td__load_u32(hello + 4) >> 8;
    if (!error && td__load_u32(hello) == TD__LINK_HELLO && kind == TD__HELLO_RESUME)
        return td__link_accept_resume(agent, rank, fd, number, attempt, received, deadline);
    if (error || td__load_u32(hello) != TD__LINK_HELLO || kind > TD__HELLO_RINGS) {
        td__sock_close(fd);
        return error ? failed(error) : td_fail(TD_ERR_MISMATCH, "the handshake is not valid");
    }
    struct td__rpc_link *link = create(agent, rank, fd, kind == TD__HELLO_RINGS);
    if (!link) {
        td__sock_close(fd);
        return TD_ERR_NOMEM;
    }
    link->number = number;
    td__handshake_begin(agent, &handshake, fd);
    td_status status = link->local ? accept_rings(link, deadline) : TD_OK;
    td__handshake_end(agent, &handshake);
    link->unready = true;
    if (!status && link->local)
        td__byte_ring_await_room(&link->rings.out);
    td__link_retain(link);
    if (!(status = finish(link, status)))
        send_ready(link, deadline);
    td__link_release(link);
    return status;
}

/* ---- Writing (with write_lock held) ------------------------------------------------------------ */

static void publish(struct td__rpc_link *link)
{
    td__byte_ring_publish(&link->rings.out);
    atomic_store_explicit(&link->held_back, false, memory_order_relaxed);
}

/* Writes what there is room for; false if the link has ended. */
static bool write_ring(struct td__rpc_link *link, struct td__message *message)
{
    struct td__byte_ring *ring = &link->rings.out;
    while (message->written < message->size) {
        size_t size;
        const void *bytes = td__message_next(message, &size);
        size = size < RING_STEP ? size : RING_STEP;
        size_t written = td__byte_ring_write(ring, bytes, size);
        if (written == SIZE_MAX)
            return false;
        message->written += written;
        if (written == size && size < RING_STEP)
            continue;
        publish(link);
        if (written < size && !td__byte_ring_await_room(ring))
            break;
    }
    bool follows = atomic_load_explicit(&link->held_back, memory_order_relaxed);
    if (message->more)
        atomic_store_explicit(&link->held_back, true, memory_order_relaxed);
    else
        publish(link);
    if (message->more || message->busy || follows)
        td__byte_ring_claim(ring);
    return true;
}

static bool write_socket(struct td__rpc_link *link, struct td__message *message)
{
    while (message->written < message->size) {
        struct iovec segments[SEGMENTS];
        struct msghdr header = {.msg_iov = segments};
        size_t at = message->written, size;
        const void *bytes;
        while (header.msg_iovlen < SEGMENTS && (bytes = td__message_next(message, &size))) {
            segments[header.msg_iovlen++] = (struct iovec){(void *)bytes, size};
            message->written += size;
        }
        ssize_t sent = td__sock_sendmsg(link->fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
        message->written = at + (sent > 0 ? (size_t)sent : 0);
        if (sent < 0 && errno != EINTR)
            return errno == EAGAIN;
    }
    return true;
}

/* Writes what there is room for; false if the link has ended. A socket that has ended only stops it: the thread that
 * leads finds out by reading. */
static bool write_message(struct td__rpc_link *link, struct td__message *message)
{
    if (link->local) {
        link->unready = link->unready && !td__byte_ring_has_room(&link->rings.out);
        return link->unready || write_ring(link, message);
    }
    if (!link->stopped && !link->unready && !write_socket(link, message)) {
        link->stopped = true;
        shutdown(link->fd, SHUT_RDWR);
        td__io_wake(link->agent);
    }
    return true;
}

/* The count of the ring's reader is not valid. */
static void drop(struct td__rpc_link *link)
{
    link->closed = true;
    shutdown(link->fd, SHUT_RDWR);
    td__io_wake(link->agent);
}

/* A message is written: of a socket it is kept. */
static bool keep_unacked(struct td__rpc_link *link, struct td__message *message)
{
    if (link->local)
        return false;
    message->next = NULL;
    *link->last_unacked = message;
    link->last_unacked = &message->next;
    return true;
}

/* The link whose last bytes this thread has held back. Every change of a count that another process polls costs both
 * sides a cache line, and so do the bytes if they are read one message at a time. If this thread is kept from
 * publishing them by the next function, the thread that takes the lead over does so (td__link_flush()). */
static _Thread_local struct td__rpc_link *held_back;

struct td__rpc_link *td__link_held(int rank)
{
    return held_back && held_back->rank == rank ? held_back : NULL;
}

void td__link_publish(void)
{
    struct td__rpc_link *link = held_back;
    if (!link)
        return;
    held_back = NULL;
    td__link_flush(link);
    td__link_release(link);
}

static void hold_back(struct td__rpc_link *link)
{
    if (held_back == link)
        return;
    td__link_publish();
    td__link_retain(link);
    held_back = link;
}

td_status td__link_send(struct td__rpc_link *link, struct td__message *message)
{
    pthread_mutex_lock(&link->write_lock);
    bool open = !link->closed && !link->last_sent, kept = false;
    message->start = link->end;
    if (open)
        link->end += message->size;
    if (open && !link->first)
        open = write_message(link, message);
    if (!open && !link->closed && !link->last_sent)
        drop(link);
    link->last_sent |= *td__message_head(message) == TD__MESSAGE_LEAVE;
    bool forward = link->forwards && !link->last_sent;
    bool done = !open || message->written == message->size;
    if (!done) {
        *link->last = message;
        link->last = &message->next;
        atomic_store(&link->blocked, true);
    } else if (open) {
        kept = keep_unacked(link, message);
    }
    bool held = message->more && atomic_load_explicit(&link->held_back, memory_order_relaxed);
    pthread_mutex_unlock(&link->write_lock);
    if (forward)
        return td__agent_send(link->agent, link->rank, message);
    if (held)
        hold_back(link);
    else if (link->local && open)
        td__io_ring(link);
    if (kept)
        return TD_OK;
    if (done)
        td__message_free(message);
    else if (link->local && td__link_has_room(link))
        td__link_flush(link); /* the thread that leads may not have seen that the link is blocked */
    return open ? TD_OK : TD_ERR_PEER;
}

bool td__link_flush(struct td__rpc_link *link)
{
    struct td__message *done = NULL;
    pthread_mutex_lock(&link->write_lock);
    bool wrote = atomic_load_explicit(&link->held_back, memory_order_relaxed);
    if (wrote)
        publish(link);
    while (link->first && !link->closed) {
        struct td__message *message = link->first;
        size_t before = message->written;
        if (!write_message(link, message)) {
            drop(link);
            break;
        }
        wrote |= message->written != before;
        if (message->written < message->size)
            break;
        link->first = message->next;
        if (!link->first)
            link->last = &link->first;
        if (keep_unacked(link, message))
            continue;
        message->next = done;
        done = message;
    }
    atomic_store(&link->blocked, link->first && !link->closed);
    pthread_mutex_unlock(&link->write_lock);
    td__messages_free(done); /* without the lock: their tensors may be borrowed over this link */
    if (link->local && wrote)
        td__io_ring(link);
    return wrote;
}

/* ---- Reading --------------------------------------------------------------------------------- */

static void acknowledge(struct td__rpc_link *link)
{
    struct td__message_header header = {.kind = TD__MESSAGE_ACK, .id = link->received};
    struct td__message *message = td__message_create(link->agent, link->rank, false);
    if (!message || td__message_seal(message, &header, SIZE_MAX)) {
        td__message_free(message);
        return; /* the next message is acknowledged with this one */
    }
    link->told = link->received;
    link->untold = 0;
    td__link_send(link, message);
}

/* A message is complete if nothing of it is missing. */
static void check_complete(struct td__rpc_link *link)
{
    size_t size;
    td__incoming_next(link->incoming, &size);
    if (size)
        return;
    struct td__incoming *incoming = link->incoming;
    bool tensors = incoming->header.elements; /* which the sender keeps until then */
    link->incoming = NULL;
    link->header_have = 0;
    td__agent_receive(link, incoming);
    if (!link->local &&
        (tensors || ++link->untold >= ACK_MESSAGES || link->received - link->told >= ACK_BYTES))
        acknowledge(link);
}

static bool begin_message(struct td__rpc_link *link)
{
    struct td__message_header header;
    if (!td__message_header_read(link->header, &header))
        return false;
    link->incoming = td__incoming_create(link->agent, link->rank, &header,
                                         link->agent->max_message);
    if (!link->incoming)
        return false;
    check_complete(link);
    return true;
}

/* Takes bytes that have arrived; false if they are not valid. */
static bool take(struct td__rpc_link *link, const char *bytes, size_t count)
{
    while (count) {
        size_t size;
        if (!link->incoming) {
            if (!link->header_have)
                link->header[0] = (uint8_t)*bytes;
            size_t whole = td__message_header_size(link->header[0]);
            size = whole - link->header_have;
            size = size < count ? size : count;
            memcpy(link->header + link->header_have, bytes, size);
            link->header_have += size;
            if (link->header_have == whole && !begin_message(link))
                return false;
        } else {
            void *to = td__incoming_next(link->incoming, &size);
            size = size < count ? size : count;
            if (to)
                memcpy(to, bytes, size);
            td__incoming_advance(link->incoming, size);
            check_complete(link);
        }
        bytes += size;
        count -= size;
    }
    return true;
}

static bool read_ring(struct td__rpc_link *link)
{
    struct td__byte_ring *ring = &link->rings.in;
    const char *bytes;
    size_t size, all = 0;
    for (unsigned chunks = 0;
         all < RING_STEP && !link->leaving && (size = td__byte_ring_peek(ring, &bytes)); chunks++) {
        size = size < RING_STEP ? size : RING_STEP;
        td__byte_ring_prefetch(ring, bytes, size, chunks);
        if (!take(link, bytes, size)) {
            link->ended = true;
            return true;
        }
        td__byte_ring_consume(ring, size);
        all += size;
    }
    if (all && td__byte_ring_release(ring))
        td__io_ring(link);
    return all;
}

/* Large parts are received where they belong, all others through the buffer. */
static bool read_socket(struct td__rpc_link *link)
{
    size_t size = 0;
    void *to = link->incoming ? td__incoming_next(link->incoming, &size) : NULL;
    bool direct = to && size >= BUFFER_SIZE;
    ssize_t got = td__sock_recv(link->fd, direct ? to : link->buffer, direct ? size : BUFFER_SIZE,
                                MSG_DONTWAIT);
    if (got <= 0) {
        link->broken = got == 0 || (errno != EAGAIN && errno != EINTR);
        return link->broken;
    }
    link->received += (size_t)got;
    if (!direct) {
        link->ended = !take(link, (const char *)link->buffer, (size_t)got);
    } else {
        td__incoming_advance(link->incoming, (size_t)got);
        check_complete(link);
    }
    return true;
}

bool td__link_read(struct td__rpc_link *link)
{
    int read = 0;
    link->read_at = td__now_ns();
    while (!link->ended && !link->broken && !link->leaving && read < READS &&
           (link->local ? read_ring(link) : read_socket(link))) {
        td__serve_arrived(link);
        read++;
    }
    if (read == READS && !link->local)
        atomic_store(&link->hup, true);
    link->ended |= link->leaving;
    return read > 0;
}
