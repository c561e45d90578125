/* The failure detector: a thread that knows at once which ranks have ended, have left, or are cut off.
 *
 *     ranks of this host    a pidfd each
 *     the next rank, where it is on another host, and every rank that td__endpoint_watch() names
 *                           a lifeline: a connection that carries one byte, when the other rank leaves in
 *                           order. Its end without that byte is a death, its silence (TCP keepalive,
 *                           os/socket.h) a host that is cut off
 *     all other ranks       another rank watches them, and reports a loss
 *
 * So each rank is watched by all ranks of its host, or by the rank before it. A loss is reported to all
 * others: by the lowest rank left on the host of the lost one, and by the ranks with a lifeline to it.
 * Leaving is not reported. But a rank that leaves handles the events that are there, and reports losses
 * among them: other ranks may rely on that.
 *
 * The presence of a rank changes once, from TD__PRESENT to something else, under the lock; it is read
 * without. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/heartbeat.h"
#include "os/process.h"
#include "os/socket.h"
#include "os/trust.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define LAST_PAUSE_NS ((int64_t)30000000000)

enum {
    TICK_MS = 200,
    CONNECT_MS = 300,          /* for a lifeline; one that is late is tried again */
    REPORT_MS = 200,           /* for a loss report to one rank … */
    REPORT_ALL_MS = 3000,      /* … and to all … */
    LAST_REPORT_ALL_MS = 1000, /* … when leaving */
    EXIT_MS = 100,
    FIND_OUT_MS = 1000,
    QUERIES = 5,
    LEAST_PROBES = 3,
    FIRST_PAUSE_NS = 500000000,
    PAUSE_NS = 50000000,
    BATCH = 32,
};

/* What an event is about, above the rank. */
enum { WAKE, PROCESS, LIFELINE };

struct td__failure_detector {
    pthread_t thread;
    int epoll, wake;
    atomic_bool stopping;        /* or it never started */
    atomic_int lifelines_wanted; /* lifelines to be opened */
    td__look_fns fns;
    void *arg;
};

static _Thread_local bool is_detector_thread; /* on the detector's thread */

/* ---- Presence -------------------------------------------------------------------------------- */

enum td__presence td__endpoint_presence(const struct td__endpoint *endpoint, int rank)
{
    return (enum td__presence)atomic_load_explicit(&endpoint->peers[rank].presence,
                                                   memory_order_acquire);
}

unsigned td__endpoint_losses(const struct td__endpoint *endpoint)
{
    return atomic_load_explicit(&endpoint->losses, memory_order_acquire);
}

const char *td__endpoint_exit_reason(const struct td__endpoint *endpoint, int rank)
{
    static _Thread_local char text[96];
    switch (td__endpoint_presence(endpoint, rank)) {
    case TD__PRESENT:
        return NULL;
    case TD__LEFT:
        return "has left";
    case TD__GONE:
        return "has ended, or has left";
    case TD__CUT_OFF:
        return "does not answer any more: its host is down, or cut off";
    case TD__ENDED:
        break;
    }
    int wait_status = endpoint->peers[rank].wait_status;
    td__wait_status_text(wait_status, text, sizeof text);
    if (wait_status != TD__STATUS_UNKNOWN && WIFEXITED(wait_status))
        strcat(text, " without leaving the group");
    return text;
}

/* True when the presence has changed. */
static bool settle(struct td__endpoint *endpoint, int rank, enum td__presence presence,
                   int wait_status)
{
    struct td__card *peer = &endpoint->peers[rank];
    pthread_mutex_lock(&endpoint->lock);
    bool changed = atomic_load(&peer->presence) == TD__PRESENT;
    if (changed) {
        peer->wait_status = wait_status;
        atomic_store(&peer->presence, presence);
        if (presence == TD__ENDED || presence == TD__CUT_OFF)
            atomic_fetch_add(&endpoint->losses, 1);
    }
    pthread_mutex_unlock(&endpoint->lock);
    return changed;
}

void td__failure_detector_report(struct td__endpoint *endpoint, int rank,
                                 enum td__presence presence, int wait_status)
{
    settle(endpoint, rank, presence, wait_status);
}

/* ---- Reporting ------------------------------------------------------------------------------- */

static bool same_host(const struct td__endpoint *endpoint, int a, int b)
{
    return endpoint->peers[a].host == endpoint->peers[b].host;
}

/* The lowest rank that is left on the host of `rank`. A rank that leaves says so before it handles its last
 * events, so one that is present here will see the same events. */
static int reporter_for(const struct td__endpoint *endpoint, int rank)
{
    const struct td__failure_detector *detector = endpoint->detector;
    for (int r = 0; r < endpoint->size; r++)
        if (same_host(endpoint, r, rank) && td__endpoint_presence(endpoint, r) == TD__PRESENT &&
            (!endpoint->peers[r].process_watched || !detector->fns.has_left(detector->arg, r)))
            return r;
    return -1;
}

static void report_loss(struct td__endpoint *endpoint, int rank, enum td__presence presence,
                        int wait_status)
{
    bool leaves = atomic_load(&endpoint->detector->stopping);
    td__deadline end = td__deadline_in_ms(leaves ? LAST_REPORT_ALL_MS : REPORT_ALL_MS);
    for (int r = 0; r < endpoint->size && !td__deadline_passed(end); r++)
        if (r != endpoint->rank && !same_host(endpoint, r, rank) &&
            td__endpoint_presence(endpoint, r) == TD__PRESENT)
            td__endpoint_report_loss(endpoint, r, rank, presence, wait_status,
                                     td__deadline_in_ms(REPORT_MS));
}

/* This rank has found the loss itself. */
static void lose(struct td__endpoint *endpoint, int rank, enum td__presence presence,
                 int wait_status)
{
    if (!settle(endpoint, rank, presence, wait_status) ||
        (presence != TD__ENDED && presence != TD__CUT_OFF))
        return;
    bool by_lifeline = !same_host(endpoint, rank, endpoint->rank);
    if (by_lifeline || reporter_for(endpoint, rank) == endpoint->rank)
        report_loss(endpoint, rank, presence, wait_status);
}

/* ---- Watching -------------------------------------------------------------------------------- */

static void follow(struct td__failure_detector *detector, int fd, int kind, int rank)
{
    struct epoll_event event = {.events = EPOLLIN,
                                .data.u64 = (uint64_t)kind << 32 | (uint32_t)rank};
    epoll_ctl(detector->epoll, EPOLL_CTL_ADD, fd, &event);
}

static void unfollow(struct td__failure_detector *detector, int fd)
{
    epoll_ctl(detector->epoll, EPOLL_CTL_DEL, fd, NULL);
}

/* True where the pid means the same process here. */
static bool is_neighbour(const struct td__endpoint *endpoint, const struct td__card *peer)
{
    const struct td__card *own = &endpoint->own;
    return !strcmp(peer->host_id, own->host_id) && peer->pid_space == own->pid_space &&
           peer->pid != own->pid;
}

bool td__endpoint_is_stopped(const struct td__endpoint *endpoint, int rank)
{
    const struct td__card *peer = &endpoint->peers[rank];
    if (!is_neighbour(endpoint, peer))
        return false;
    char state = td__process_state(peer->pid);
    return state == 'T' || state == 't';
}

static void lose_process(struct td__endpoint *endpoint, int rank)
{
    const struct td__failure_detector *detector = endpoint->detector;
    const struct td__card *peer = &endpoint->peers[rank];
    if (detector->fns.has_left && detector->fns.has_left(detector->arg, rank))
        lose(endpoint, rank, TD__LEFT, 0);
    else
        lose(endpoint, rank, TD__ENDED, td__process_wait_status(peer->pid, peer->process));
}

static void watch_process(struct td__endpoint *endpoint, int rank, bool follows)
{
    struct td__card *peer = &endpoint->peers[rank];
    if (!is_neighbour(endpoint, peer) || peer->process >= 0)
        return;
    bool ended;
    peer->process = td__process_watch(peer->pid, &ended);
    if (peer->process >= 0 && follows)
        follow(endpoint->detector, peer->process, PROCESS, rank);
    else if (ended && follows)
        lose_process(endpoint, rank);
}

static void on_process_end(struct td__endpoint *endpoint, int rank)
{
    unfollow(endpoint->detector, endpoint->peers[rank].process);
    lose_process(endpoint, rank);
}

/* The kernel closes the sockets of a process a moment before the process has ended. */
static int await_exit(const struct td__card *peer)
{
    return td__process_has_ended(peer->process, EXIT_MS)
               ? td__process_wait_status(peer->pid, peer->process)
               : TD__STATUS_UNKNOWN;
}

static bool is_silence(int error)
{
    return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
           error == ENETDOWN || error == EHOSTDOWN;
}

static int probe(struct td__endpoint *endpoint, int rank)
{
    return td__endpoint_probe(endpoint, rank, td__endpoint_is_near(endpoint, rank),
                              td__deadline_in_ms(CONNECT_MS));
}

/* Nothing listens at its address any more. The rank before it had a lifeline to it, and may know more. The
 * wait status is enough only where it is not 0. */
static void find_out(struct td__endpoint *endpoint, int rank, int wait_status)
{
    int before = (rank + endpoint->size - 1) % endpoint->size;
    enum td__presence presence = TD__GONE;
    if (wait_status != TD__STATUS_UNKNOWN && wait_status != 0)
        presence = TD__ENDED;
    for (int i = 0; i < QUERIES && presence == TD__GONE; i++) {
        if (i)
            td__sleep_ns(
                PAUSE_NS); /* it may not have noticed yet, and may report the loss itself when it has */
        if (atomic_load(&endpoint->detector->stopping) || before == endpoint->rank ||
            td__endpoint_presence(endpoint, rank) != TD__PRESENT ||
            td__endpoint_presence(endpoint, before) != TD__PRESENT || probe(endpoint, before))
            break;
        td__endpoint_ask_presence(endpoint, before, rank, td__deadline_in_ms(CONNECT_MS), &presence,
                                  &wait_status);
    }
    lose(endpoint, rank, presence, wait_status);
}

/* The lifeline ended before it was confirmed: the listener evicted it, or the rank is about to leave. */
static void lose_lifeline(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = &endpoint->peers[rank];
    if (atomic_load(&endpoint->detector->stopping))
        return; /* it would take time */
    int wait_status = await_exit(peer);
    close(peer->lifeline);
    peer->lifeline = -1;
    if (wait_status != TD__STATUS_UNKNOWN || probe(endpoint, rank)) {
        find_out(endpoint, rank, wait_status);
        return;
    }
    peer->next_try = td__now_ns() + FIRST_PAUSE_NS;
    atomic_store(&peer->wanted, 1);
    atomic_fetch_add(&endpoint->detector->lifelines_wanted, 1);
}

static void on_lifeline(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = &endpoint->peers[rank];
    char byte;
    ssize_t got = recv(peer->lifeline, &byte, 1, MSG_DONTWAIT);
    int error = got < 0 ? errno : 0;
    if (error == EAGAIN || error == EINTR)
        return;
    if (got == 1 && byte == TD__HOLDING) {
        peer->held = true;
        return;
    }
    unfollow(endpoint->detector, peer->lifeline);
    if (got == 1 && byte == TD__LEAVING)
        lose(endpoint, rank, TD__LEFT, 0);
    else if (is_silence(error))
        lose(endpoint, rank, TD__CUT_OFF, TD__STATUS_UNKNOWN);
    else if (!peer->held)
        lose_lifeline(endpoint, rank);
    else
        lose(endpoint, rank, TD__ENDED, await_exit(peer));
}

static bool connect_lifeline(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = &endpoint->peers[rank];
    if (td__endpoint_open_lifeline(endpoint, rank, td__deadline_in_ms(CONNECT_MS),
                                   &peer->lifeline)) {
        peer->lifeline = -1;
        return false;
    }
    watch_process(endpoint, rank, false);
    follow(endpoint->detector, peer->lifeline, LIFELINE, rank);
    return true;
}

/* A process that is stopped, or gets no CPU time, does not complete the handshake, but its host still
 * answers. Each attempt leaves a pending connection at its listener, so the pauses grow. */
static void open_lifeline(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = &endpoint->peers[rank];
    int64_t now = td__now_ns();
    int error = probe(endpoint, rank);
    if (!error && connect_lifeline(endpoint, rank))
        return;
    if (td__is_refused(error)) {
        find_out(endpoint, rank, TD__STATUS_UNKNOWN);
        return;
    }
    if (!error) {
        peer->silent_since = peer->silent_probes = 0;
        peer->pause = peer->pause ? peer->pause * 2 : FIRST_PAUSE_NS;
        if (peer->pause > LAST_PAUSE_NS)
            peer->pause = LAST_PAUSE_NS;
        peer->next_try = now + peer->pause;
    } else if (!peer->silent_since) {
        peer->silent_since = now;
    } else if (++peer->silent_probes >= LEAST_PROBES &&
               now - peer->silent_since >= td__heartbeat_ms() * 1000000) {
        lose(endpoint, rank, TD__CUT_OFF, TD__STATUS_UNKNOWN);
    }
}

static void open_lifelines(struct td__endpoint *endpoint)
{
    struct td__failure_detector *detector = endpoint->detector;
    for (int r = 0; r < endpoint->size && atomic_load(&detector->lifelines_wanted) > 0; r++) {
        struct td__card *peer = &endpoint->peers[r];
        if (atomic_load(&peer->wanted) != 1 || td__now_ns() < peer->next_try)
            continue;
        if (peer->lifeline < 0 && td__endpoint_presence(endpoint, r) == TD__PRESENT)
            open_lifeline(endpoint, r);
        if (peer->lifeline >= 0 || td__endpoint_presence(endpoint, r) != TD__PRESENT) {
            atomic_store(&peer->wanted, 2);
            atomic_fetch_sub(&detector->lifelines_wanted, 1);
        }
    }
}

void td__endpoint_watch(struct td__endpoint *endpoint, int rank)
{
    struct td__failure_detector *detector = endpoint->detector;
    struct td__card *peer = &endpoint->peers[rank];
    int no = 0;
    if (!detector || rank == endpoint->rank || peer->process_watched ||
        !atomic_compare_exchange_strong(&peer->wanted, &no, 1))
        return;
    uint64_t one = 1;
    atomic_fetch_add(&detector->lifelines_wanted, 1);
    ssize_t written = write(detector->wake, &one, sizeof one);
    (void)written;
}

const char *td__endpoint_find_out(struct td__endpoint *endpoint, int rank, td__deadline deadline)
{
    struct td__failure_detector *detector = endpoint->detector;
    td__deadline end = td__deadline_earlier(deadline, td__deadline_in_ms(FIND_OUT_MS));
    if (!detector || is_detector_thread)
        return td__endpoint_exit_reason(endpoint, rank);
    td__endpoint_watch(endpoint, rank);
    while (td__endpoint_presence(endpoint, rank) == TD__PRESENT && !td__deadline_passed(end))
        td__sleep_ns(1000000);
    return td__endpoint_exit_reason(endpoint, rank);
}

/* ---- The thread ------------------------------------------------------------------------------ */

/* What makes no event: a rank of this host leaves before its process ends, which may live on; and a lifeline
 * whose request did not arrive stays silent. */
static void poll_ranks(struct td__endpoint *endpoint)
{
    struct td__failure_detector *detector = endpoint->detector;
    for (int r = 0; r < endpoint->size; r++) {
        const struct td__card *peer = &endpoint->peers[r];
        if (td__endpoint_presence(endpoint, r) != TD__PRESENT)
            continue;
        if (peer->process_watched && detector->fns.has_left(detector->arg, r))
            settle(endpoint, r, TD__LEFT, 0);
        else if (peer->lifeline >= 0 && td__cut_off(peer->lifeline))
            lose(endpoint, r, TD__CUT_OFF, TD__STATUS_UNKNOWN);
    }
}

static void handle(struct td__endpoint *endpoint, const struct epoll_event *event)
{
    int rank = (int)(uint32_t)event->data.u64;
    uint64_t count;
    switch (event->data.u64 >> 32) {
    case PROCESS:
        on_process_end(endpoint, rank);
        break;
    case LIFELINE:
        on_lifeline(endpoint, rank);
        break;
    default: {
        ssize_t got = read(endpoint->detector->wake, &count, sizeof count);
        (void)got;
    }
    }
}

/* Handles the events that are there: one may be the reason why the program leaves. An event does not come
 * again, so this ends. */
static void handle_last_events(struct td__endpoint *endpoint)
{
    struct epoll_event events[BATCH];
    int count;
    while ((count = epoll_wait(endpoint->detector->epoll, events, BATCH, 0)) > 0)
        for (int i = 0; i < count; i++)
            handle(endpoint, &events[i]);
}

static void *run_detector(void *arg)
{
    struct td__endpoint *endpoint = arg;
    struct td__failure_detector *detector = endpoint->detector;
    int64_t next_tick = td__deadline_in_ms(TICK_MS);
    is_detector_thread = true;
    while (!atomic_load(&detector->stopping)) {
        struct epoll_event events[BATCH];
        int count = epoll_wait(detector->epoll, events, BATCH, td__deadline_poll_ms(next_tick));
        for (int i = 0; i < count && !atomic_load(&detector->stopping); i++)
            handle(endpoint, &events[i]);
        if (!atomic_load(&detector->stopping))
            open_lifelines(endpoint);
        if (td__deadline_passed(next_tick)) {
            poll_ranks(endpoint);
            if (detector->fns.tick && !atomic_load(&detector->stopping))
                detector->fns.tick(detector->arg);
            next_tick = td__deadline_in_ms(TICK_MS);
        }
    }
    handle_last_events(endpoint);
    return NULL;
}

td_status td__endpoint_start_detector(struct td__endpoint *endpoint, const td__look_fns *fns,
                                      void *arg)
{
    struct td__failure_detector *detector = calloc(1, sizeof *detector);
    if (!detector)
        return td__fail_nomem("endpoint");
    detector->fns = *fns;
    detector->arg = arg;
    detector->epoll = epoll_create1(EPOLL_CLOEXEC);
    detector->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    endpoint->detector = detector;
    if (detector->epoll < 0 || detector->wake < 0)
        return td_fail(TD_ERR_SYSTEM, "no descriptor to watch the other ranks: %s",
                       td__errno_text(errno));
    follow(detector, detector->wake, WAKE, 0);
    for (int r = 0; r < endpoint->size; r++) {
        struct td__card *peer = &endpoint->peers[r];
        peer->process_watched = fns->has_left && same_host(endpoint, r, endpoint->rank) &&
                                is_neighbour(endpoint, peer);
        if (peer->process_watched)
            watch_process(endpoint, r, true);
    }
    /* At once, so that the next rank is watched from the start. */
    int next = (endpoint->rank + 1) % endpoint->size;
    if (!same_host(endpoint, next, endpoint->rank) && connect_lifeline(endpoint, next))
        atomic_store(&endpoint->peers[next].wanted, 2);
    else
        td__endpoint_watch(endpoint, next);
    int error = td__thread_start(&detector->thread, "td-detector", run_detector, endpoint);
    if (error) {
        atomic_store(&detector->stopping, true);
        return td_fail(TD_ERR_SYSTEM, "no thread to watch the other ranks: %s",
                       td__errno_text(error));
    }
    return TD_OK;
}

void td__endpoint_stop_detector(struct td__endpoint *endpoint)
{
    struct td__failure_detector *detector = endpoint->detector;
    uint64_t one = 1;
    if (!detector || atomic_exchange(&detector->stopping, true))
        return;
    ssize_t written = write(detector->wake, &one, sizeof one);
    (void)written;
    pthread_join(detector->thread, NULL);
}

void td__failure_detector_stop(struct td__endpoint *endpoint)
{
    struct td__failure_detector *detector = endpoint->detector;
    if (!detector)
        return;
    td__endpoint_stop_detector(endpoint);
    for (int r = 0; r < endpoint->size; r++) {
        if (endpoint->peers[r].process >= 0)
            close(endpoint->peers[r].process);
        if (endpoint->peers[r].lifeline >= 0)
            close(endpoint->peers[r].lifeline);
    }
    if (detector->epoll >= 0)
        close(detector->epoll);
    if (detector->wake >= 0)
        close(detector->wake);
    free(detector);
    endpoint->detector = NULL;
}
