/* The door of a server; see door.h.
 *
 *     knock -> HELLO (68 bytes) -> challenge -> PROOF (32 bytes) [-> TLS] -> REQUEST -> handed on
 *
 * A whole hello that is wrong is answered by a refusal, four bytes, so that a client of the job with another
 * secret fails at once. All else that is wrong is not answered: the connection is closed. A stranger is looked at as soon as it is
 * accepted, so that most go, or have shown a good hello, before they cost a watch. It has HANDSHAKE_MS
 * in all.
 *
 * A flood: strangers are held on two lists, those without and those with a good hello, each limited; the
 * oldest goes when one is full. One of the job says hello at once, so it is on the first list for a
 * moment only, and nobody without the secret gets to the second: a hello that was overheard is known
 * by its nonce, and not answered again. The limit depends on that of the process, most of whose
 * descriptors are for others, and when they run out the oldest stranger makes room. Who had to go for
 * the sake of others sees a reset; a client of the job tries again after that, as after any end without a
 * refusal. While the first list is
 * more than half full, the door is opened once in BREATH_MS, for all who stand there by then.
 *
 * Strangers are watched in an epoll set of the door's own, which the loop watches: libuv's handles ask
 * the system three times as often, and a stranger shall cost us less than it costs himself. */
#include "os/door.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/map.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    HANDSHAKE_MS = 10000,
    SWEEP_MS = 500,
    MOST_STRANGERS = 4096, /* on each list, … */
    LEAST_STRANGERS = 16,
    SHARE = 4,      /* … and no more than the limit of descriptors divided by this */
    SPARE_FDS = 8,  /* left for the rest of the process */
    FULL_MS = 2000, /* without a descriptor, before those who wait are told */
    AT_ONCE = 64,   /* accepted, or listened to, before others have their turn */
    BREATH_MS = 1,
    NONCES = 1 << 10 /* remembered */
};

enum stage { HELLO, PROOF, REQUEST };

struct stranger {
    struct td__door *door;
    struct stranger *before, *after;
    int fd;
    bool local;
    bool watched; /* is in door->watch */
    enum stage stage;
    struct td__auth auth;
    td__deadline end;
    size_t got;
    uint8_t bytes[TD__HELLO_SIZE > TD__PROOF_SIZE + TD__DOOR_REQUEST
                      ? TD__HELLO_SIZE
                      : TD__PROOF_SIZE + TD__DOOR_REQUEST];
};

struct list {
    struct stranger *oldest, *newest;
    size_t count;
};

struct entrance {
    uv_poll_t poll;
    struct td__door *door;
    int fd; /* -1: there is none */
    bool local;
    bool watched;
};

struct td__door {
    struct entrance entrances[2];
    uv_timer_t sweep, breath;
    int watch; /* epoll set of the strangers */
    uv_poll_t watch_poll;
    struct epoll_event heard[AT_ONCE]; /* what it told last, … */
    int heard_count;                   /* … while that is looked through */
    struct td__secret secret;
    struct td__door_options options;
    int highest_fd; /* that a stranger may have */
    size_t limit;   /* of each list */
    struct list silent, known;
    bool warned;           /* of one that disagrees about TLS … */
    bool warned_of_secret; /* … or the secret */
    bool warned_of_room;
    int64_t full_since; /* when the first was left outside, 0: nobody is */
    int closing;        /* handles that are not closed yet */
    uint8_t nonces[NONCES][TD__NONCE_SIZE];
};

/* ---- Coming and going ------------------------------------------------------------------------ */

static struct list *list_of(const struct stranger *stranger)
{
    return stranger->stage == HELLO ? &stranger->door->silent : &stranger->door->known;
}

static void list_add(struct stranger *stranger)
{
    struct list *list = list_of(stranger);
    stranger->before = list->newest;
    stranger->after = NULL;
    if (list->newest)
        list->newest->after = stranger;
    else
        list->oldest = stranger;
    list->newest = stranger;
    list->count++;
}

static void list_remove(struct stranger *stranger)
{
    struct list *list = list_of(stranger);
    if (stranger->before)
        stranger->before->after = stranger->after;
    else
        list->oldest = stranger->after;
    if (stranger->after)
        stranger->after->before = stranger->before;
    else
        list->newest = stranger->before;
    list->count--;
}

/* Forgets the stranger; its descriptor is the caller's from then on. */
static int dismiss(struct stranger *stranger)
{
    struct td__door *door = stranger->door;
    int fd = stranger->fd;
    list_remove(stranger);
    if (stranger->watched)
        epoll_ctl(door->watch, EPOLL_CTL_DEL, fd, NULL);
    for (int i = 0; i < door->heard_count; i++)
        if (door->heard[i].data.ptr == stranger)
            door->heard[i].data.ptr = NULL;
    free(stranger);
    return fd;
}

/* Whether closing it resets the connection. Those that are accepted have this from the socket that
 * listens, since most strangers end so. */
static void set_abrupt(int fd, bool abrupt)
{
    struct linger linger = {.l_onoff = abrupt, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
}

/* It may be one of the job, and shall try again. */
static void put_off(struct stranger *stranger)
{
    close(dismiss(stranger));
}

/* It is none of the job, or disagrees about something. What it was told arrives, as it would not before a
 * reset. */
static void turn_away(struct stranger *stranger)
{
    int fd = dismiss(stranger);
    set_abrupt(fd, false);
    close(fd);
}

/* ---- The handshake --------------------------------------------------------------------------- */

static void admit(struct td__door *door, int fd, bool local, enum stage stage, td__deadline end);

/* Each client draws a nonce of its own, so one that comes again was overheard. The memory is short, and a
 * hello that has fallen out of it gets a challenge, which only the secret can answer. */
static bool is_replayed(struct td__door *door, const uint8_t nonce[TD__NONCE_SIZE])
{
    uint8_t *place = door->nonces[(nonce[0] | nonce[1] << 8) % NONCES];
    if (!memcmp(place, nonce, TD__NONCE_SIZE))
        return true;
    memcpy(place, nonce, TD__NONCE_SIZE);
    return false;
}

static void warn_of_tls(struct td__door *door)
{
    if (door->warned)
        return;
    door->warned = true;
    td_log(
        TD_LOG_WARN,
        "a process of this job connected to the %s %s TLS, but here TANDEM_TLS is %s: set it to the "
        "same value on every host",
        door->options.purpose, door->secret.tls ? "without" : "with",
        door->secret.tls ? "1" : "not set");
}

/* Once, so that strangers cannot fill the log. Who of the job has another secret knows it from the
 * refusal, but those who wait for him do not. */
static void warn_of_secret(const struct stranger *stranger)
{
    static const uint8_t none[TD__IDENTITY_SIZE];
    struct td__door *door = stranger->door;
    struct td__address peer;
    char where[TD__ADDRESS_TEXT];
    if (door->warned_of_secret)
        return;
    door->warned_of_secret = true;
    td__remote_address(stranger->fd, &peer);
    bool one_of_many = memcmp(door->options.identity, none, sizeof none) != 0;
    td_log(TD_LOG_WARN,
           "somebody %s%s connected to the %s with another secret%s: if it is a process of this "
           "job, set TANDEM_SECRET to the same text %s",
           stranger->local ? "on this host" : "at ",
           stranger->local ? "" : td__address_text(&peer, where), door->options.purpose,
           one_of_many ? ", or looked for another one" : "",
           door->secret.given ? "there" : "here, where it is not set");
}

/* It leaves together with the end, in one packet, and is shorter than what it answers. Where the socket does not
 * take it, the client tries again. */
static void send_refusal(int fd)
{
    uint8_t refusal[TD__REFUSAL_SIZE];
    td__auth_refusal(refusal);
    ssize_t ignored = send(fd, refusal, sizeof refusal, MSG_NOSIGNAL | MSG_DONTWAIT | MSG_MORE);
    (void)ignored;
}

static bool answer_hello(struct stranger *stranger)
{
    uint8_t challenge[TD__CHALLENGE_SIZE];
    bool right = td__auth_check_hello(&stranger->auth, stranger->bytes);
    if (!right && !stranger->auth.other_tls) {
        warn_of_secret(stranger);
        send_refusal(stranger->fd);
        return false;
    }
    if (is_replayed(stranger->door, stranger->auth.client_nonce) ||
        td__auth_challenge(&stranger->auth, challenge))
        return false;
    /* The first bytes on a connection always fit into its buffer. */
    if (send(stranger->fd, challenge, sizeof challenge, MSG_NOSIGNAL | MSG_DONTWAIT) !=
        (ssize_t)sizeof challenge)
        return false;
    if (!right) { /* the challenge tells it what is wrong */
        warn_of_tls(stranger->door);
        return false;
    }
    list_remove(stranger);
    stranger->stage = PROOF;
    stranger->got = 0;
    list_add(stranger);
    if (stranger->door->known.count > stranger->door->limit)
        put_off(stranger->door->known.oldest);
    return true;
}

static void let_in(struct stranger *stranger, const uint8_t *request)
{
    struct td__door *door = stranger->door;
    uint8_t copy[TD__DOOR_REQUEST];
    bool local = stranger->local;
    memcpy(copy, request, door->options.request_size);
    int fd = dismiss(stranger);
    set_abrupt(fd, false);
    door->options.fn(door->options.arg, fd, local, copy);
}

/* From here on it talks by the plain end. */
static void begin_tls(struct stranger *stranger)
{
    struct td__door *door = stranger->door;
    uint8_t key[TD__MAC_SIZE];
    td__auth_key(&stranger->auth, key);
    td__deadline end = stranger->end;
    int plain, fd = dismiss(stranger);
    set_abrupt(fd, false);
    if (td__tls_wrap(fd, true, key, end, NULL, &plain)) {
        td_log(TD_LOG_WARN, "a connection to the %s is lost: %s", door->options.purpose,
               td_last_error());
        return;
    }
    admit(door, plain, false, REQUEST, end);
}

static size_t wanted(const struct stranger *stranger)
{
    size_t request = stranger->door->options.request_size;
    switch (stranger->stage) {
    case HELLO:
        return TD__HELLO_SIZE;
    case PROOF: /* the request stands behind the proof, or inside TLS */
        return TD__PROOF_SIZE + (stranger->auth.tls ? 0 : request);
    default:
        return request;
    }
}

/* All that was wanted has come; false when the stranger is gone. */
static bool take_step(struct stranger *stranger)
{
    switch (stranger->stage) {
    case HELLO:
        if (answer_hello(stranger))
            return true;
        turn_away(stranger);
        return false;
    case PROOF:
        if (!td__auth_check_proof(&stranger->auth, stranger->bytes)) {
            turn_away(stranger);
            return false;
        }
        if (!stranger->local)
            td__tune_tcp(stranger->fd);
        if (stranger->auth.tls)
            begin_tls(stranger);
        else
            let_in(stranger, stranger->bytes + TD__PROOF_SIZE);
        return false;
    default:
        let_in(stranger, stranger->bytes);
        return false;
    }
}

/* Reads what is there; false when the stranger is gone. */
static bool listen_to(struct stranger *stranger, bool failed)
{
    while (stranger->got < wanted(stranger) || take_step(stranger)) {
        size_t room = wanted(stranger) - stranger->got;
        ssize_t got = recv(stranger->fd, stranger->bytes + stranger->got, room, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN && !failed)
            return true;
        if (got <= 0) {
            put_off(stranger);
            return false;
        }
        stranger->got += (size_t)got;
        if (stranger->stage == HELLO && stranger->got >= TD__MAGIC_SIZE &&
            !td__auth_may_be_hello(stranger->bytes)) {
            turn_away(stranger);
            return false;
        }
    }
    return false;
}

static void on_bytes(uv_poll_t *poll, int status, int events)
{
    struct td__door *door = poll->data;
    (void)status;
    (void)events;
    door->heard_count = epoll_wait(door->watch, door->heard, AT_ONCE, 0);
    for (int i = 0; i < door->heard_count; i++)
        if (door->heard[i].data.ptr)
            listen_to(door->heard[i].data.ptr, door->heard[i].events & EPOLLERR);
    door->heard_count = 0;
}

/* ---- The entrances --------------------------------------------------------------------------- */

/* Takes a connection in; it is closed where that fails. */
static void admit(struct td__door *door, int fd, bool local, enum stage stage, td__deadline end)
{
    struct stranger *stranger = calloc(1, sizeof *stranger);
    if (!stranger) {
        close(fd);
        return;
    }
    stranger->door = door;
    stranger->fd = fd;
    stranger->local = local;
    stranger->stage = stage;
    stranger->auth = (struct td__auth){.secret = door->secret,
                                       .purpose = door->options.purpose,
                                       .tls = door->secret.tls && !local};
    memcpy(stranger->auth.identity, door->options.identity, TD__IDENTITY_SIZE);
    stranger->end = end;
    list_add(stranger);
    if (!listen_to(stranger, false))
        return;
    struct epoll_event bytes = {.events = EPOLLIN, .data.ptr = stranger};
    if (epoll_ctl(door->watch, EPOLL_CTL_ADD, fd, &bytes)) {
        turn_away(stranger);
        return;
    }
    stranger->watched = true;
    if (door->silent.count > door->limit)
        put_off(door->silent.oldest);
}

/* The oldest of those who have said nothing goes; false where there is none. */
static bool make_room(struct td__door *door)
{
    if (!door->silent.oldest)
        return false;
    put_off(door->silent.oldest);
    return true;
}

/* There is no descriptor for who stands outside, nor a stranger to take one from. That may pass. */
static void run_out(struct td__door *door, int error)
{
    int64_t now = td__now_ns();
    if (!door->full_since)
        door->full_since = now;
    if (now - door->full_since < FULL_MS * (int64_t)1000000)
        return;
    if (!door->warned_of_room)
        td_log(TD_LOG_WARN, "the %s cannot take in those who come: %s", door->options.purpose,
               td__errno_text(error));
    door->warned_of_room = true;
    if (door->options.full)
        door->options.full(door->options.arg, error);
}

/* False where there is no descriptor left. */
static bool take_in(struct entrance *entrance)
{
    struct td__door *door = entrance->door;
    for (int i = 0; i < AT_ONCE; i++) {
        int fd = td__accept(entrance->fd);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0 && errno == EAGAIN)
            return true;
        if (fd < 0 && make_room(door))
            continue;
        if (fd < 0) {
            run_out(door, errno);
            return false;
        }
        door->full_since = 0;
        if (fd > door->highest_fd) /* the last sign before there are none */
            make_room(door);
        if (entrance->local && !td__peer_is_us(fd)) {
            close(fd);
            continue;
        }
        admit(door, fd, entrance->local, HELLO, td__deadline_in_ms(HANDSHAKE_MS));
    }
    return true;
}

static void on_breath(uv_timer_t *timer);

static void on_knock(uv_poll_t *poll, int status, int events)
{
    struct entrance *entrance = TD__CONTAINER(poll, struct entrance, poll);
    struct td__door *door = entrance->door;
    (void)status;
    (void)events;
    bool room = take_in(entrance);
    if (room && door->silent.count <= door->limit / 2)
        return;
    uv_poll_stop(poll);
    entrance->watched = false;
    if (room) /* else the next sweep tries again */
        uv_timer_start(&door->breath, on_breath, BREATH_MS, 0);
}

static void watch_entrances(struct td__door *door)
{
    for (int i = 0; i < 2; i++) {
        struct entrance *entrance = &door->entrances[i];
        if (entrance->fd >= 0 && !entrance->watched)
            entrance->watched = !uv_poll_start(&entrance->poll, UV_READABLE, on_knock);
    }
}

static void on_breath(uv_timer_t *timer)
{
    watch_entrances(timer->data);
}

/* Both lists are in the order in which their strangers came to them, so that those behind one whose time
 * is not over may have to wait for it; none waits for longer than twice the time. */
static void on_sweep(uv_timer_t *timer)
{
    struct td__door *door = timer->data;
    while (door->silent.oldest && td__deadline_passed(door->silent.oldest->end))
        put_off(door->silent.oldest);
    while (door->known.oldest && td__deadline_passed(door->known.oldest->end))
        put_off(door->known.oldest);
    watch_entrances(door);
}

/* ---- Life ------------------------------------------------------------------------------------ */

static void set_limits(struct td__door *door)
{
    struct rlimit limit;
    bool known = !getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur < INT_MAX;
    size_t share = known ? limit.rlim_cur / SHARE : MOST_STRANGERS;
    door->highest_fd = known ? (int)limit.rlim_cur - SPARE_FDS - 1 : INT_MAX;
    door->limit = share < LEAST_STRANGERS  ? LEAST_STRANGERS
                  : share > MOST_STRANGERS ? MOST_STRANGERS
                                           : share;
}

static void close_socket(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void on_closed(uv_handle_t *handle)
{
    struct td__door *door = handle->data;
    if (--door->closing == 0)
        free(door);
}

static void close_handle(struct td__door *door, uv_handle_t *handle)
{
    handle->data = door;
    door->closing++;
    uv_close(handle, on_closed);
}

static td_status fail_to_listen(const struct td__door_options *options, int error)
{
    return td__fail(TD_ERR_SYSTEM, "%s: cannot listen: %s", options->purpose,
                    td__errno_text(-error));
}

td_status td__door_open(struct td__loop *loop, int tcp_fd, int local_fd,
                        const struct td__door_options *options, struct td__door **door_out)
{
    int fds[2] = {tcp_fd, local_fd};
    struct td__door *door = calloc(1, sizeof *door);
    td_status status = door ? TD_OK : td__fail_nomem(options->purpose);
    if (status)
        goto close_sockets;
    door->watch = epoll_create1(EPOLL_CLOEXEC);
    int error = door->watch < 0 ? -errno : uv_poll_init(&loop->uv, &door->watch_poll, door->watch);
    if (error) {
        status = fail_to_listen(options, error);
        close_socket(door->watch);
        goto close_sockets;
    }
    door->secret = *options->secret;
    door->options = *options;
    set_limits(door);
    for (int i = 0; i < 2; i++)
        door->entrances[i] = (struct entrance){.door = door, .fd = -1};
    uv_timer_init(&loop->uv, &door->sweep);
    uv_timer_init(&loop->uv, &door->breath);
    door->sweep.data = door->breath.data = door->watch_poll.data = door;
    for (int i = 0; i < 2; i++) {
        struct entrance *entrance = &door->entrances[i];
        error = fds[i] < 0 ? 0 : uv_poll_init_socket(&loop->uv, &entrance->poll, fds[i]);
        if (error) {
            status = fail_to_listen(options, error);
            close_socket(fds[i]);
            if (i == 0)
                close_socket(fds[1]);
            td__door_close(door);
            return status;
        }
        struct td__address address;
        td__local_address(fds[i], &address);
        entrance->fd = fds[i];
        entrance->local = address.any.sa_family == AF_UNIX;
        set_abrupt(fds[i], true);
    }
    uv_poll_start(&door->watch_poll, UV_READABLE, on_bytes);
    watch_entrances(door);
    uv_timer_start(&door->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
    *door_out = door;
    return TD_OK;

close_sockets:
    free(door);
    close_socket(tcp_fd);
    close_socket(local_fd);
    return status;
}

void td__door_close(struct td__door *door)
{
    while (door->silent.oldest)
        put_off(door->silent.oldest);
    while (door->known.oldest) { /* one whose proof is there already takes itself for a guest */
        struct stranger *stranger = door->known.oldest;
        if (listen_to(stranger, false))
            put_off(stranger);
    }
    for (int i = 0; i < 2; i++) {
        if (door->entrances[i].fd < 0)
            continue;
        uv_poll_stop(&door->entrances[i].poll);
        close_handle(door, (uv_handle_t *)&door->entrances[i].poll);
        close(door->entrances[i].fd);
    }
    uv_poll_stop(&door->watch_poll);
    close_handle(door, (uv_handle_t *)&door->watch_poll);
    close(door->watch);
    close_handle(door, (uv_handle_t *)&door->sweep);
    close_handle(door, (uv_handle_t *)&door->breath);
}

void td__door_abandon(struct td__door *door)
{
    close_socket(door->entrances[0].fd);
    close_socket(door->entrances[1].fd);
    close_socket(door->watch);
}
