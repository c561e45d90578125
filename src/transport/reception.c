/* The door of an endpoint; see reception.h.
 *
 *     knock -> HELLO (68 bytes) -> challenge -> PROOF and request (64 bytes) -> handed on
 *
 * Sockets are watched with uv_poll_t, so that a proven one can be handed on as a plain descriptor.
 * A stranger has HANDSHAKE_MS, and the oldest goes when there are more than MAX_STRANGERS; one that
 * says anything wrong is closed without an answer. Everything runs on the loop's thread. */
#include "transport/reception.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/map.h"
#include "os/loop.h"
#include "os/socket.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HANDSHAKE_MS = 10000, SWEEP_MS = 500, MAX_STRANGERS = 1024 };

struct stranger {
    uv_poll_t poll;
    struct td__reception *reception;
    struct stranger *before, *after;
    int fd;
    bool local;
    bool proving; /* the hello was good */
    struct td__auth auth;
    td__deadline end;
    size_t got;
    uint8_t bytes[TD__HELLO_SIZE > TD__PROOF_SIZE + TD__REQUEST_SIZE
                      ? TD__HELLO_SIZE
                      : TD__PROOF_SIZE + TD__REQUEST_SIZE];
};

struct door {
    uv_poll_t poll;
    struct td__reception *reception;
    int fd;
    bool local;
    bool watched;
};

struct td__reception {
    struct td__loop loop;
    struct door doors[2];
    uv_timer_t sweep;
    struct td__secret secret;
    td__guest_fn fn;
    void *arg;
    struct stranger *oldest, *newest;
    size_t strangers;
};

static void on_stranger_closed(uv_handle_t *handle)
{
    free(TD__CONTAINER((uv_poll_t *)handle, struct stranger, poll));
}

/* Takes the stranger off the list; its descriptor is the caller's from then on. */
static int dismiss(struct stranger *stranger)
{
    struct td__reception *reception = stranger->reception;
    if (stranger->before)
        stranger->before->after = stranger->after;
    else
        reception->oldest = stranger->after;
    if (stranger->after)
        stranger->after->before = stranger->before;
    else
        reception->newest = stranger->before;
    reception->strangers--;
    int fd = stranger->fd;
    uv_poll_stop(&stranger->poll);
    uv_close((uv_handle_t *)&stranger->poll, on_stranger_closed);
    return fd;
}

static void turn_away(struct stranger *stranger)
{
    close(dismiss(stranger));
}

static bool answer_hello(struct stranger *stranger)
{
    uint8_t challenge[TD__CHALLENGE_SIZE];
    if (!td__auth_check_hello(&stranger->auth, stranger->bytes) ||
        td__auth_challenge(&stranger->auth, challenge))
        return false;
    /* The first bytes on a connection always fit into its buffer. */
    if (send(stranger->fd, challenge, sizeof challenge, MSG_NOSIGNAL | MSG_DONTWAIT) !=
        (ssize_t)sizeof challenge)
        return false;
    stranger->proving = true;
    stranger->got = 0;
    return true;
}

static void let_in(struct stranger *stranger)
{
    struct td__reception *reception = stranger->reception;
    uint8_t request[TD__REQUEST_SIZE];
    memcpy(request, stranger->bytes + TD__PROOF_SIZE, sizeof request);
    bool local = stranger->local;
    int fd = dismiss(stranger);
    reception->fn(reception->arg, fd, local, request);
}

static void on_bytes(uv_poll_t *poll, int status, int events)
{
    struct stranger *stranger = TD__CONTAINER(poll, struct stranger, poll);
    (void)events;
    for (;;) {
        size_t wanted = stranger->proving ? TD__PROOF_SIZE + TD__REQUEST_SIZE : TD__HELLO_SIZE;
        ssize_t got = recv(stranger->fd, stranger->bytes + stranger->got, wanted - stranger->got,
                           MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR) && !status)
            return;
        if (got <= 0) {
            turn_away(stranger);
            return;
        }
        stranger->got += (size_t)got;
        if (stranger->got < wanted)
            continue;
        if (!stranger->proving) {
            if (!answer_hello(stranger)) {
                turn_away(stranger);
                return;
            }
            continue;
        }
        if (td__auth_check_proof(&stranger->auth, stranger->bytes))
            let_in(stranger);
        else
            turn_away(stranger);
        return;
    }
}

static void admit(struct door *door, int fd)
{
    struct td__reception *reception = door->reception;
    struct stranger *stranger = calloc(1, sizeof *stranger);
    if (!stranger || (door->local && !td__peer_is_us(fd)) ||
        uv_poll_init_socket(&reception->loop.uv, &stranger->poll, fd)) {
        free(stranger);
        close(fd);
        return;
    }
    stranger->reception = reception;
    stranger->fd = fd;
    stranger->local = door->local;
    stranger->auth = (struct td__auth){.secret = reception->secret, .purpose = "link"};
    stranger->end = td__deadline_in_ms(HANDSHAKE_MS);
    stranger->before = reception->newest;
    if (reception->newest)
        reception->newest->after = stranger;
    else
        reception->oldest = stranger;
    reception->newest = stranger;
    if (++reception->strangers > MAX_STRANGERS)
        turn_away(reception->oldest);
    uv_poll_start(&stranger->poll, UV_READABLE, on_bytes);
}

static void on_knock(uv_poll_t *poll, int status, int events)
{
    struct door *door = TD__CONTAINER(poll, struct door, poll);
    (void)status;
    (void)events;
    for (;;) {
        int fd = accept4(door->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            admit(door, fd);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED)
            continue;
        if (errno != EAGAIN) { /* no descriptor left: the next sweep tries again */
            uv_poll_stop(&door->poll);
            door->watched = false;
        }
        return;
    }
}

static void watch_doors(struct td__reception *reception)
{
    for (int i = 0; i < 2; i++) {
        struct door *door = &reception->doors[i];
        if (door->fd >= 0 && !door->watched)
            door->watched = !uv_poll_start(&door->poll, UV_READABLE, on_knock);
    }
}

static void on_sweep(uv_timer_t *timer)
{
    struct td__reception *reception = timer->data;
    while (reception->oldest && td__deadline_passed(reception->oldest->end))
        turn_away(reception->oldest);
    watch_doors(reception);
}

static void start_on_loop(void *arg)
{
    struct td__reception *reception = arg;
    for (int i = 0; i < 2; i++) {
        struct door *door = &reception->doors[i];
        door->reception = reception;
        if (door->fd >= 0 && uv_poll_init_socket(&reception->loop.uv, &door->poll, door->fd)) {
            close(door->fd);
            door->fd = -1;
        }
    }
    watch_doors(reception);
    uv_timer_init(&reception->loop.uv, &reception->sweep);
    reception->sweep.data = reception;
    uv_timer_start(&reception->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
}

static void stop_on_loop(void *arg)
{
    struct td__reception *reception = arg;
    while (reception->oldest)
        turn_away(reception->oldest);
    for (int i = 0; i < 2; i++)
        if (reception->doors[i].fd >= 0)
            uv_close((uv_handle_t *)&reception->doors[i].poll, NULL);
    uv_close((uv_handle_t *)&reception->sweep, NULL);
}

static void close_doors(struct td__reception *reception)
{
    for (int i = 0; i < 2; i++)
        if (reception->doors[i].fd >= 0)
            close(reception->doors[i].fd);
}

td_status td__reception_open(int tcp_fd, int local_fd, const struct td__secret *secret,
                             td__guest_fn fn, void *arg, struct td__reception **reception_out)
{
    struct td__reception *reception = calloc(1, sizeof *reception);
    if (!reception) {
        if (tcp_fd >= 0)
            close(tcp_fd);
        if (local_fd >= 0)
            close(local_fd);
        return td__fail_nomem("endpoint");
    }
    reception->doors[0].fd = tcp_fd;
    reception->doors[1].fd = local_fd;
    reception->doors[1].local = true;
    reception->secret = *secret;
    reception->fn = fn;
    reception->arg = arg;
    td_status status = td__loop_start(&reception->loop, "td-endpoint");
    if (status) {
        close_doors(reception);
        free(reception);
        return status;
    }
    td__loop_run(&reception->loop, start_on_loop, reception);
    *reception_out = reception;
    return TD_OK;
}

void td__reception_close(struct td__reception *reception)
{
    td__loop_run(&reception->loop, stop_on_loop, reception);
    td__loop_stop(&reception->loop);
    close_doors(reception);
    free(reception);
}
