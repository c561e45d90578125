/* One connection with TLS: what is moved between its plain end and its wire; see tls.h.
 *
 *     plain ── recv ─> scratch ── encrypt ─> wire        what the wire does not take: link->up
 *     plain <─ send ── scratch <─ decrypt ── wire        what the plain end does not take: link->down
 *
 * Each direction reads only when its buffer is empty, so a side that does not read stops the other, and a
 * link holds one scratch of bytes each way at most; one that is idle holds none. Events are
 * edge-triggered: after any of them all is tried that can be done on the link, BUDGET bytes each way
 * at a time. */
#include "os/socket.h"
#include "os/tls_internal.h"

#include <errno.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum {
    BUDGET = 512 << 10,
    RECORD = 16 << 10, /* the most that one holds */
    PARTING_MS =
        10000, /* for what was written to reach the other side, after the plain end closed */
};

/* The connection takes nothing more; what has come over it can still be read. */
static void stop_sending(struct td__tls_link *link)
{
    link->up_ended = link->up_closed = true;
    td__buffer_free(&link->up);
    shutdown(link->plain, SHUT_RD); /* a write there fails from now on */
}

static void send_what_is_left(struct td__tls_link *link)
{
    enum td__tls_step step = TD__TLS_MORE;
    size_t written;
    while (link->up.size && step == TD__TLS_MORE) {
        step = td__tls_write(link, link->up.data, link->up.size, &written);
        td__buffer_consume(&link->up, written);
    }
    if (step == TD__TLS_FAILED || step == TD__TLS_ENDED)
        stop_sending(link);
    else if (!link->up.size)
        td__buffer_free(&link->up);
}

static void end_sending(struct td__tls_link *link)
{
    enum td__tls_step step = td__tls_end(link);
    if (step == TD__TLS_WAITS)
        return;
    if (step == TD__TLS_MORE)
        shutdown(link->wire, SHUT_WR);
    link->up_closed = true;
}

/* From the plain end to the wire. */
static void move_up(struct td__tls_link *link, uint8_t *scratch)
{
    send_what_is_left(link);
    for (size_t moved = 0; !link->up.size && !link->up_ended;) {
        if (moved >= BUDGET) {
            link->again = true;
            return;
        }
        ssize_t got = recv(link->plain, scratch, TD__TLS_SCRATCH, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            return;
        if (got <= 0) { /* after a reset, too: what was written before it has come */
            link->up_ended = true;
            break;
        }
        moved += (size_t)got;
        size_t written = 0, total = 0;
        enum td__tls_step step = TD__TLS_MORE;
        while (total < (size_t)got && step == TD__TLS_MORE) {
            step = td__tls_write(link, scratch + total, (size_t)got - total, &written);
            total += written;
        }
        td__buffer_put(&link->up, scratch + total, (size_t)got - total);
        if (link->up.failed || step == TD__TLS_FAILED || step == TD__TLS_ENDED)
            stop_sending(link);
    }
    if (link->up_ended && !link->up.size && !link->up_closed)
        end_sending(link);
}

/* Whether there is room again; without a reader the bytes are dropped. */
static bool deliver(struct td__tls_link *link, const uint8_t *data, size_t size, size_t *taken)
{
    for (*taken = 0; *taken < size && !link->left;) {
        ssize_t sent = send(link->plain, data + *taken, size - *taken, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0)
            *taken += (size_t)sent;
        else if (errno == EAGAIN)
            return false;
        else if (errno != EINTR)
            break;
    }
    *taken = size;
    return true;
}

static void end_receiving(struct td__tls_link *link)
{
    shutdown(link->plain, SHUT_WR);
    link->down_closed = true;
}

static void tell_of_changes(struct td__tls_link *link)
{
    struct td__address peer;
    char where[TD__ADDRESS_TEXT];
    const char *reason;
    if (!td__tls_found_changes(&reason))
        return;
    td__tls_pump_complain(link);
    td__local_address(link->plain, &peer); /* stands for the other side, also after a reset */
    td_log(TD_LOG_WARN,
           "the connection with %s is cut off: TLS found that bytes were changed on the way (%s)",
           td__address_text(&peer, where), reason);
}

/* Reads records until there is no room for another. */
static enum td__tls_step read_records(struct td__tls_link *link, uint8_t *scratch, size_t *got)
{
    enum td__tls_step step = TD__TLS_MORE;
    for (*got = 0; step == TD__TLS_MORE && TD__TLS_SCRATCH - *got >= RECORD;) {
        size_t more;
        step = td__tls_read(link, scratch + *got, TD__TLS_SCRATCH - *got, &more);
        *got += more;
    }
    if (step == TD__TLS_FAILED)
        tell_of_changes(link);
    return step;
}

/* From the wire to the plain end. */
static void move_down(struct td__tls_link *link, uint8_t *scratch)
{
    size_t got, taken;
    if (link->down.size) {
        bool room = deliver(link, link->down.data, link->down.size, &taken);
        td__buffer_consume(&link->down, taken);
        if (!room)
            return;
        td__buffer_free(&link->down);
    }
    for (size_t moved = 0; !link->down_ended;) {
        if (moved >= BUDGET) {
            link->again = true;
            return;
        }
        enum td__tls_step step = read_records(link, scratch, &got);
        if (step == TD__TLS_ENDED || step == TD__TLS_FAILED) {
            link->down_ended = true;
            link->broken = step == TD__TLS_FAILED;
        }
        moved += got;
        if (!deliver(link, scratch, got, &taken)) {
            td__buffer_put(&link->down, scratch + taken, got - taken);
            link->broken |= link->down.failed;
            return;
        }
        if (step == TD__TLS_WAITS)
            return;
    }
    if (!link->down_closed)
        end_receiving(link);
}

/* All that was sent has arrived, or never will: see has_arrived() of a TCP link. */
static bool has_arrived(const struct td__tls_link *link)
{
    int queued = 0;
    return link->down_ended || ioctl(link->wire, SIOCOUTQ, &queued) || queued <= 1;
}

/* Where the plain end is closed, only what was written there before is still sent. */
static void notice_leaving(struct td__tls_link *link)
{
    struct pollfd plain = {.fd = link->plain};
    link->may_have_left = false;
    if (link->left || poll(&plain, 1, 0) != 1 || !(plain.revents & POLLHUP))
        return;
    if (link->down_closed && link->up_closed)
        return; /* it is the pump itself that shut it */
    link->left = true;
    if (link->open)
        link->end = td__deadline_in_ms(PARTING_MS);
    epoll_ctl(link->epoll, EPOLL_CTL_DEL, link->plain, NULL);
}

static bool shake_hands(struct td__tls_link *link)
{
    struct td__tls_failure failure = {0};
    enum td__tls_step step = td__tls_shake(link, &failure);
    if (step == TD__TLS_WAITS)
        return false;
    OPENSSL_cleanse(link->key, sizeof link->key);
    if (!td__tls_pump_answer(link, &failure) && *failure.reason && !failure.error)
        td_log(TD_LOG_WARN,
               "a client that had proven the job's secret failed in TLS (%s): the bytes may be "
               "changed on the way",
               failure.reason);
    link->end = link->left ? td__deadline_in_ms(PARTING_MS) : TD__NEVER;
    link->over = step == TD__TLS_FAILED;
    return link->open;
}

static void want_room(struct td__tls_link *link)
{
    bool want = link->down.size && !link->left;
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET | (want ? EPOLLOUT : 0),
                                .data.ptr = link};
    if (want != link->wants_room && !link->left &&
        !epoll_ctl(link->epoll, EPOLL_CTL_MOD, link->plain, &event))
        link->wants_room = want;
}

void td__tls_move(struct td__tls_link *link, uint8_t scratch[TD__TLS_SCRATCH])
{
    link->again = false;
    if (link->may_have_left)
        notice_leaving(link);
    if (!link->open && (link->over || !shake_hands(link)))
        return;
    if (!link->broken)
        move_up(link, scratch);
    move_down(link, scratch);
    want_room(link);
    if (link->broken)
        link->over = link->left || !link->down.size;
    else if (link->left)
        link->over = link->up_closed && has_arrived(link);
    else
        link->over = link->up_closed && link->down_closed;
}
