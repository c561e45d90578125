/* The authenticating listener; see auth_listener.h.
 *
 *     accept -> HELLO (68 bytes) -> challenge -> PROOF (32 bytes) [-> TLS] -> REQUEST -> admitted
 *
 * A complete hello that is wrong gets a refusal, four bytes, so that a client of the job with another secret
 * fails at once. All else that is wrong gets no answer: the connection is closed. A pending connection is
 * read as soon as it is accepted, so that most are rejected, or have sent a good hello, before they are added
 * to the epoll set. It has HANDSHAKE_MS in all.
 *
 * A flood of connections: pending ones are on two lists, without and with a good hello. Each list is limited,
 * and evicts its oldest entry when it is full. A client of the job sends its hello at once, so it is on the
 * first list for a moment only, and a client without the secret does not get to the second: a replayed hello
 * is known by its nonce, and is not answered again. The limit is a part of the process's limit of
 * descriptors; when those run out, the oldest pending connection is evicted. An evicted client sees a reset,
 * and tries again if it is of the job, as after any end without a refusal. While the first list is more than
 * half full, accepting is throttled: once in PAUSE_MS, for all connections in the backlog.
 *
 * The listening sockets and the pending connections are in an epoll set of the listener, and not handles of libuv:
 * those make three times as many system calls, and a pending connection must cost the server less than its
 * client. */
#include "os/auth_listener.h"

#include "base/clock.h"
#include "base/fail.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/queue.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
    HANDSHAKE_MS = 10000,
    EXPIRY_MS = 500,
    MOST_PENDING = 4096, /* on each list, … */
    LEAST_PENDING = 16,
    SHARE = 4,      /* … and no more than the limit of descriptors divided by this */
    SPARE_FDS = 8,  /* left for the rest of the process */
    FULL_MS = 2000, /* without a descriptor, before options.full is called */
    AT_ONCE = 64,   /* accepted, or read, in one turn of the loop */
    PAUSE_MS = 1,
    NONCES = 1 << 10 /* remembered */
};

enum stage { HELLO, PROOF, REQUEST };

struct pending {
    struct td__auth_listener *listener;
    TAILQ_ENTRY(pending) link;
    int fd;
    bool local;
    bool watched; /* is in listener->watch */
    enum stage stage;
    struct td__auth auth;
    td__deadline end;
    size_t got;
    uint8_t bytes[TD__HELLO_SIZE > TD__PROOF_SIZE + TD__AUTH_LISTENER_REQUEST
                      ? TD__HELLO_SIZE
                      : TD__PROOF_SIZE + TD__AUTH_LISTENER_REQUEST];
};

struct list {
    TAILQ_HEAD(, pending) queue; /* the oldest first */
    size_t count;
};

struct entrance { /* a listening socket */
    int fd;       /* -1: there is none */
    bool local;
    bool watched; /* is in listener->watch */
};

struct td__auth_listener {
    struct entrance entrances[2];
    td__deadline
        next_check; /* of expired connections, and of sockets that are not watched; TD__NEVER: none */
    int watch;      /* epoll set */
    struct epoll_event heard[AT_ONCE]; /* the last events of `watch`, … */
    int heard_count;                   /* … while they are handled */
    struct td__secret secret;
    struct td__auth_listener_options options;
    int highest_fd; /* at most pending */
    size_t limit;   /* of each list */
    struct list silent, known;
    bool warned;           /* of one that disagrees about TLS … */
    bool warned_of_secret; /* … or the secret */
    bool warned_of_room;
    int64_t full_since; /* since when connections wait for a descriptor; 0: none does */
    uint8_t nonces[NONCES][TD__NONCE_SIZE];
};

/* ---- The lists of pending ones --------------------------------------------------------------- */

static struct list *list_of(const struct pending *pending)
{
    return pending->stage == HELLO ? &pending->listener->silent : &pending->listener->known;
}

static void list_add(struct pending *pending)
{
    struct list *list = list_of(pending);
    TAILQ_INSERT_TAIL(&list->queue, pending, link);
    list->count++;
}

static void list_remove(struct pending *pending)
{
    struct list *list = list_of(pending);
    TAILQ_REMOVE(&list->queue, pending, link);
    list->count--;
}

static struct pending *oldest_of(const struct list *list)
{
    return TAILQ_FIRST(&list->queue);
}

/* Frees the pending connection; its descriptor is the caller's. */
static int dismiss(struct pending *pending)
{
    struct td__auth_listener *listener = pending->listener;
    int fd = pending->fd;
    list_remove(pending);
    if (pending->watched)
        epoll_ctl(listener->watch, EPOLL_CTL_DEL, fd, NULL);
    for (int i = 0; i < listener->heard_count; i++)
        if (listener->heard[i].data.ptr == pending)
            listener->heard[i].data.ptr = NULL;
    free(pending);
    return fd;
}

/* Whether closing it resets the connection. Accepted sockets inherit this from the listening one, since most
 * pending connections end so. */
static void set_abrupt(int fd, bool abrupt)
{
    struct linger linger = {.l_onoff = abrupt, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
}

/* It may be of the job: a reset makes its client try again. */
static void throttle(struct pending *pending)
{
    td__sock_close(dismiss(pending));
}

/* It is not of the job, or disagrees about TLS. An orderly end, so that what was sent to it arrives. */
static void reject(struct pending *pending)
{
    int fd = dismiss(pending);
    set_abrupt(fd, false);
    td__sock_close(fd);
}

/* ---- The handshake --------------------------------------------------------------------------- */

static void add_pending(struct td__auth_listener *listener, int fd, bool local, enum stage stage,
                        td__deadline end);

/* Each client has a fresh nonce, so one that comes again is a replay. The table is small; a hello that has
 * dropped out of it gets a challenge, which only a client with the secret can answer. */
static bool is_replayed(struct td__auth_listener *listener, const uint8_t nonce[TD__NONCE_SIZE])
{
    uint8_t *place = listener->nonces[(nonce[0] | nonce[1] << 8) % NONCES];
    if (!memcmp(place, nonce, TD__NONCE_SIZE))
        return true;
    memcpy(place, nonce, TD__NONCE_SIZE);
    return false;
}

static void warn_of_tls(struct td__auth_listener *listener)
{
    if (listener->warned)
        return;
    listener->warned = true;
    td_log(
        TD_LOG_WARN,
        "a process of this job connected to the %s %s TLS, but here TANDEM_TLS is %s: set it to the "
        "same value on every host",
        listener->options.purpose, listener->secret.tls ? "without" : "with",
        listener->secret.tls ? "1" : "not set");
}

/* Once, so that clients cannot fill the log. A client of the job with another secret knows it from the refusal,
 * but the ranks that wait for it do not. */
static void warn_of_secret(const struct pending *pending)
{
    static const uint8_t none[TD__IDENTITY_SIZE];
    struct td__auth_listener *listener = pending->listener;
    struct td__address peer;
    char where[TD__ADDRESS_TEXT];
    if (listener->warned_of_secret)
        return;
    listener->warned_of_secret = true;
    td__remote_address(pending->fd, &peer);
    bool one_of_many = memcmp(listener->options.identity, none, sizeof none) != 0;
    td_log(TD_LOG_WARN,
           "a client %s%s connected to the %s with another secret%s: if it is a process of this "
           "job, set TANDEM_SECRET to the same text %s",
           pending->local ? "on this host" : "at ",
           pending->local ? "" : td__address_text(&peer, where), listener->options.purpose,
           one_of_many ? ", or looked for another one" : "",
           listener->secret.given ? "there" : "here, where it is not set");
}

/* The refusal and the end of the stream go in one packet, shorter than the hello. Where the socket does not take it,
 * the client tries again. */
static void send_refusal(int fd)
{
    uint8_t refusal[TD__REFUSAL_SIZE];
    td__auth_refusal(refusal);
    ssize_t ignored = send(fd, refusal, sizeof refusal, MSG_NOSIGNAL | MSG_DONTWAIT | MSG_MORE);
    (void)ignored;
}

static bool answer_hello(struct pending *pending)
{
    uint8_t challenge[TD__CHALLENGE_SIZE];
    bool right = td__auth_check_hello(&pending->auth, pending->bytes);
    if (!right && !pending->auth.other_tls) {
        warn_of_secret(pending);
        send_refusal(pending->fd);
        return false;
    }
    if (is_replayed(pending->listener, pending->auth.client_nonce) ||
        td__auth_challenge(&pending->auth, challenge))
        return false;
    /* The first bytes on a connection always fit into its buffer. */
    if (send(pending->fd, challenge, sizeof challenge, MSG_NOSIGNAL | MSG_DONTWAIT) !=
        (ssize_t)sizeof challenge)
        return false;
    if (!right) { /* the challenge shows the client what is wrong */
        warn_of_tls(pending->listener);
        return false;
    }
    list_remove(pending);
    pending->stage = PROOF;
    pending->got = 0;
    list_add(pending);
    if (pending->listener->known.count > pending->listener->limit)
        throttle(oldest_of(&pending->listener->known));
    return true;
}

static void admit(struct pending *pending, const uint8_t *request)
{
    struct td__auth_listener *listener = pending->listener;
    uint8_t copy[TD__AUTH_LISTENER_REQUEST];
    bool local = pending->local;
    memcpy(copy, request, listener->options.request_size);
    int fd = dismiss(pending);
    set_abrupt(fd, false);
    listener->options.fn(listener->options.arg, fd, local, copy);
}

/* Reading the request carries out the handshake first. */
static void begin_tls(struct pending *pending)
{
    struct td__auth_listener *listener = pending->listener;
    uint8_t key[TD__MAC_SIZE];
    td__auth_key(&pending->auth, key);
    td__deadline end = pending->end;
    int fd = dismiss(pending);
    set_abrupt(fd, false);
    if (td__tls_wrap(fd, true, key, end, NULL)) {
        td_log(TD_LOG_WARN, "a connection to the %s is lost: %s", listener->options.purpose,
               td__error_text());
        return;
    }
    add_pending(listener, fd, false, REQUEST, end);
}

static size_t wanted(const struct pending *pending)
{
    size_t request = pending->listener->options.request_size;
    switch (pending->stage) {
    case HELLO:
        return TD__HELLO_SIZE;
    case PROOF: /* the request stands behind the proof, or inside TLS */
        return TD__PROOF_SIZE + (pending->auth.tls ? 0 : request);
    default:
        return request;
    }
}

/* All bytes of a stage are there; false when the pending connection is freed. */
static bool take_step(struct pending *pending)
{
    switch (pending->stage) {
    case HELLO:
        if (answer_hello(pending))
            return true;
        reject(pending);
        return false;
    case PROOF:
        if (!td__auth_check_proof(&pending->auth, pending->bytes)) {
            reject(pending);
            return false;
        }
        if (!pending->local)
            td__tune_tcp(pending->fd);
        if (pending->auth.tls)
            begin_tls(pending);
        else
            admit(pending, pending->bytes + TD__PROOF_SIZE);
        return false;
    default:
        admit(pending, pending->bytes);
        return false;
    }
}

/* Reads what is there; false when the pending connection is freed. */
static bool read_pending(struct pending *pending, bool failed)
{
    while (pending->got < wanted(pending) || take_step(pending)) {
        size_t room = wanted(pending) - pending->got;
        ssize_t got = td__sock_recv(pending->fd, pending->bytes + pending->got, room, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN && !failed)
            return true;
        if (got <= 0) {
            throttle(pending);
            return false;
        }
        pending->got += (size_t)got;
        if (pending->stage == HELLO && pending->got >= TD__MAGIC_SIZE &&
            !td__auth_may_be_hello(pending->bytes)) {
            reject(pending);
            return false;
        }
    }
    return false;
}

/* ---- Accepting ------------------------------------------------------------------------------- */

/* Adds an accepted connection; closes it where that fails. */
static void add_pending(struct td__auth_listener *listener, int fd, bool local, enum stage stage,
                        td__deadline end)
{
    struct pending *pending = calloc(1, sizeof *pending);
    if (!pending) {
        td__sock_close(fd);
        return;
    }
    pending->listener = listener;
    pending->fd = fd;
    pending->local = local;
    pending->stage = stage;
    pending->auth = (struct td__auth){.secret = listener->secret,
                                      .purpose = listener->options.purpose,
                                      .tls = listener->secret.tls && !local};
    memcpy(pending->auth.identity, listener->options.identity, TD__IDENTITY_SIZE);
    pending->end = end;
    list_add(pending);
    if (!read_pending(pending, false))
        return;
    struct epoll_event bytes = {.events = EPOLLIN, .data.ptr = pending};
    if (epoll_ctl(listener->watch, EPOLL_CTL_ADD, fd, &bytes)) {
        reject(pending);
        return;
    }
    pending->watched = true;
    if (listener->silent.count > listener->limit)
        throttle(oldest_of(&listener->silent));
}

/* Evicts the oldest connection without a hello; false where there is none. */
static bool make_room(struct td__auth_listener *listener)
{
    if (!oldest_of(&listener->silent))
        return false;
    throttle(oldest_of(&listener->silent));
    return true;
}

/* There is no descriptor for the connections in the backlog, nor a pending connection to evict. Tries again
 * later. */
static void run_out(struct td__auth_listener *listener, int error)
{
    int64_t now = td__now_ns();
    if (!listener->full_since)
        listener->full_since = now;
    if (now - listener->full_since < FULL_MS * (int64_t)1000000)
        return;
    if (!listener->warned_of_room)
        td_log(TD_LOG_WARN, "the %s cannot accept connections: %s", listener->options.purpose,
               td__errno_text(error));
    listener->warned_of_room = true;
    if (listener->options.full)
        listener->options.full(listener->options.arg, error);
}

/* False where there is no descriptor left. */
static bool take_in(struct td__auth_listener *listener, const struct entrance *entrance)
{
    for (int i = 0; i < AT_ONCE; i++) {
        int fd = td__accept(entrance->fd);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0 && errno == EAGAIN)
            return true;
        if (fd < 0 && make_room(listener))
            continue;
        if (fd < 0) {
            run_out(listener, errno);
            return false;
        }
        listener->full_since = 0;
        if (fd > listener->highest_fd) /* the last event before there are none */
            make_room(listener);
        if (entrance->local && !td__peer_is_us(fd)) {
            td__sock_close(fd);
            continue;
        }
        add_pending(listener, fd, entrance->local, HELLO, td__deadline_in_ms(HANDSHAKE_MS));
    }
    return true;
}

/* False where the kernel has no memory for that. */
static bool watch_entrance(struct td__auth_listener *listener, struct entrance *entrance)
{
    struct epoll_event connections = {.events = EPOLLIN, .data.ptr = entrance};
    if (entrance->fd >= 0 && !entrance->watched)
        entrance->watched = !epoll_ctl(listener->watch, EPOLL_CTL_ADD, entrance->fd, &connections);
    return entrance->watched || entrance->fd < 0;
}

static void on_connection(struct td__auth_listener *listener, struct entrance *entrance)
{
    bool room = take_in(listener, entrance);
    if (room && listener->silent.count <= listener->limit / 2)
        return;
    epoll_ctl(listener->watch, EPOLL_CTL_DEL, entrance->fd, NULL);
    entrance->watched = false;
    td__deadline again = td__deadline_in_ms(room ? PAUSE_MS : EXPIRY_MS);
    listener->next_check = td__deadline_earlier(listener->next_check, again);
}

/* Both lists are in the order in which connections were added, so one behind another whose time is not over
 * may have to wait for it, at most for twice the time. */
static void check_all(struct td__auth_listener *listener)
{
    struct list *lists[] = {&listener->silent, &listener->known};
    for (int i = 0; i < 2; i++)
        while (oldest_of(lists[i]) && td__deadline_passed(oldest_of(lists[i])->end))
            throttle(oldest_of(lists[i]));
    listener->next_check = TD__NEVER;
    for (int i = 0; i < 2; i++)
        if (!watch_entrance(listener, &listener->entrances[i]))
            listener->next_check = td__deadline_in_ms(EXPIRY_MS);
}

int td__auth_listener_fd(const struct td__auth_listener *listener)
{
    return listener->watch;
}

int td__auth_listener_turn(struct td__auth_listener *listener)
{
    listener->heard_count = epoll_wait(listener->watch, listener->heard, AT_ONCE, 0);
    for (int i = 0; i < listener->heard_count; i++) {
        void *which = listener->heard[i].data.ptr;
        if (which == &listener->entrances[0] || which == &listener->entrances[1])
            on_connection(listener, which);
        else if (which)
            read_pending(which, listener->heard[i].events & EPOLLERR);
    }
    listener->heard_count = 0;
    if (td__deadline_passed(listener->next_check))
        check_all(listener);
    if (listener->silent.count || listener->known.count)
        listener->next_check = td__deadline_earlier(listener->next_check,
                                                    td__deadline_in_ms(EXPIRY_MS));
    return td__deadline_poll_ms(listener->next_check);
}

/* ---- Life ------------------------------------------------------------------------------------ */

static void set_limits(struct td__auth_listener *listener)
{
    struct rlimit limit;
    bool known = !getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur < INT_MAX;
    size_t share = known ? limit.rlim_cur / SHARE : MOST_PENDING;
    listener->highest_fd = known ? (int)limit.rlim_cur - SPARE_FDS - 1 : INT_MAX;
    listener->limit = share < LEAST_PENDING  ? LEAST_PENDING
                      : share > MOST_PENDING ? MOST_PENDING
                                             : share;
}

static void close_socket(int fd)
{
    if (fd >= 0)
        td__sock_close(fd);
}

td_status td__auth_listener_open(int tcp_fd, int local_fd,
                                 const struct td__auth_listener_options *options,
                                 struct td__auth_listener **listener_out)
{
    int fds[2] = {tcp_fd, local_fd};
    struct td__auth_listener *listener = calloc(1, sizeof *listener);
    td_status status = listener ? TD_OK : td__fail_nomem(options->purpose);
    if (listener && (listener->watch = epoll_create1(EPOLL_CLOEXEC)) < 0)
        status = td_fail(TD_ERR_SYSTEM, "%s: cannot listen: %s", options->purpose,
                         td__errno_text(errno));
    if (status) {
        free(listener);
        close_socket(tcp_fd);
        close_socket(local_fd);
        return status;
    }
    listener->secret = *options->secret;
    listener->options = *options;
    TAILQ_INIT(&listener->silent.queue);
    TAILQ_INIT(&listener->known.queue);
    set_limits(listener);
    for (int i = 0; i < 2; i++) {
        struct td__address address = {0};
        if (fds[i] >= 0) {
            td__local_address(fds[i], &address);
            set_abrupt(fds[i], true);
        }
        listener->entrances[i] = (struct entrance){.fd = fds[i],
                                                   .local = address.any.sa_family == AF_UNIX};
    }
    check_all(listener);
    *listener_out = listener;
    return TD_OK;
}

void td__auth_listener_close(struct td__auth_listener *listener)
{
    while (oldest_of(&listener->silent))
        throttle(oldest_of(&listener->silent));
    while (oldest_of(
        &listener->known)) { /* a client whose proof is there already counts as admitted */
        struct pending *pending = oldest_of(&listener->known);
        if (read_pending(pending, false))
            throttle(pending);
    }
    td__auth_listener_abandon(listener);
    free(listener);
}

void td__auth_listener_abandon(struct td__auth_listener *listener)
{
    close_socket(listener->entrances[0].fd);
    close_socket(listener->entrances[1].fd);
    close_socket(listener->watch);
}
