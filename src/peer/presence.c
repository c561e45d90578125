/* The presence of the ranks of a world, and how an endpoint detects it:
 *
 *     ranks of this host    by a pidfd each
 *     the next rank, if it is on another host, and each rank of a td__endpoint_watch()
 *                           by a lifeline: a connection on which the other rank sends one byte when it leaves. If it
 *                           ends without that byte, the process has ended; if TCP keepalive (os/socket.h) fails, the
 *                           host is cut off
 *     all other ranks       by the loss reports of other ranks
 *
 * So each rank is watched by all ranks of its host, or by the rank before it; in a world that grows, a rank that is added
 * later only by those of a td__endpoint_watch(). A loss is reported to all other ranks:
 * by the lowest rank left on the host of the lost one, and by the ranks with a lifeline to it. Leaving is not
 * reported. But a rank that leaves handles the pending events, and reports the losses among them: other ranks rely on
 * that.
 *
 * The presence of a rank changes once, from TD__PRESENT to another value, under the endpoint's lock; it is read
 * without the lock. All else belongs to the thread that examines the endpoint, the failure detector's
 * (failure_detector.c): it works for all endpoints of a process, so whatever takes time is done in steps. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/process.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define LAST_PAUSE_NS ((int64_t)30000000000)

enum {
    CONNECT_MS = 300,          /* for a lifeline; after that it is tried again */
    REPORT_MS = 200,           /* for a loss report to one rank … */
    REPORT_ALL_MS = 3000,      /* … and to all … */
    LAST_REPORT_ALL_MS = 1000, /* … when leaving */
    EXIT_MS = 100,
    AWAIT_REPORT_MS = 250,
    FIND_OUT_MS = 1000,
    QUERIES = 5,
    LEAST_PROBES = 3,
    FIRST_PAUSE_NS = 500000000,
    QUERY_PAUSE_NS = 50000000,
    PROBE_PAUSE_NS = 200000000,
};

/* ---- Presence -------------------------------------------------------------------------------- */

enum td__presence td__endpoint_presence(const struct td__endpoint *endpoint, int rank)
{
    return (enum td__presence)atomic_load_explicit(&td__peer(endpoint, rank)->presence,
                                                   memory_order_acquire);
}

static bool is_present(const struct td__endpoint *endpoint, int rank)
{
    return td__endpoint_presence(endpoint, rank) == TD__PRESENT;
}

bool td__endpoint_is_silent(const struct td__endpoint *endpoint, int rank)
{
    const struct td__exclusion *exclusion = td__exclusion_of(endpoint, rank);
    return exclusion ? !strncmp(exclusion->reason, TD__SILENCE, strlen(TD__SILENCE))
                     : td__endpoint_presence(endpoint, rank) == TD__CUT_OFF;
}

unsigned td__endpoint_losses(const struct td__endpoint *endpoint)
{
    return atomic_load_explicit(&endpoint->losses, memory_order_acquire);
}

const char *td__endpoint_exit_reason(const struct td__endpoint *endpoint, int rank)
{
    static _Thread_local char text[TD__CARD_TEXT + TD__EXCLUSION_TEXT];
    const struct td__card *peer = td__peer(endpoint, rank);
    enum td__presence presence = td__endpoint_presence(endpoint, rank);
    const struct td__exclusion *exclusion = td__exclusion_of(endpoint, rank);
    if (exclusion && presence != TD__PRESENT) {
        snprintf(text, sizeof text, "was excluded by rank %d: %s", exclusion->by,
                 exclusion->reason);
        return text;
    }
    switch (presence) {
    case TD__PRESENT:
        return NULL;
    case TD__LEFT:
        return "has left";
    case TD__GONE:
        return "has ended, or has left";
    case TD__CUT_OFF:
        if (td__endpoint_wait_status(endpoint, rank) == TD__STATUS_UNREACHED) {
            snprintf(
                text, sizeof text,
                "cannot be reached: connections to %s, port %d, get no answer, while those from "
                "it do; a firewall lets only one direction through, or its host is down",
                peer->address, peer->port);
            return text;
        }
        return "does not answer any more: its host is down, or cut off";
    case TD__ENDED:
        break;
    }
    int wait_status = td__endpoint_wait_status(endpoint, rank);
    exclusion = td__exclusion_of(endpoint, endpoint->rank);
    if (exclusion && wait_status == TD__STATUS_REFUSES) {
        snprintf(text, sizeof text, "refuses rank %d, which was excluded by rank %d: %s",
                 endpoint->rank, exclusion->by, exclusion->reason);
        return text;
    }
    td__wait_status_text(wait_status, text, sizeof text);
    if (wait_status != TD__STATUS_UNKNOWN && WIFEXITED(wait_status))
        strcat(text, endpoint->grows ? " without leaving" : " without leaving the group");
    return text;
}

bool td__presence_settle(struct td__endpoint *endpoint, int rank, enum td__presence presence,
                         int wait_status)
{
    struct td__card *peer = td__peer(endpoint, rank);
    pthread_mutex_lock(&endpoint->lock);
    int before = atomic_load(&peer->presence);
    bool changed = before == TD__PRESENT;
    if (changed || (before == TD__ENDED && presence == TD__ENDED &&
                    atomic_load(&peer->wait_status) == TD__STATUS_UNKNOWN))
        atomic_store(&peer->wait_status, wait_status);
    if (changed) {
        atomic_store(&peer->presence, presence);
        if (presence == TD__ENDED || presence == TD__CUT_OFF)
            atomic_fetch_add(&endpoint->losses, 1);
        td__waiters_wake(endpoint);
    }
    pthread_mutex_unlock(&endpoint->lock);
    return changed;
}

bool td__endpoint_await_loss(struct td__endpoint *endpoint, unsigned known, td__deadline deadline)
{
    bool in_time = true;
    pthread_mutex_lock(&endpoint->lock);
    while (td__endpoint_losses(endpoint) == known && in_time)
        in_time = td__cond_wait(&endpoint->arrived, &endpoint->lock, deadline);
    pthread_mutex_unlock(&endpoint->lock);
    return in_time;
}

int td__endpoint_wait_status(const struct td__endpoint *endpoint, int rank)
{
    return atomic_load(&td__peer(endpoint, rank)->wait_status);
}

void td__endpoint_learn(struct td__endpoint *endpoint, uint64_t rank, uint64_t presence,
                        int wait_status)
{
    if (rank < (uint64_t)endpoint->capacity && (int)rank != endpoint->rank &&
        td__peer(endpoint, (int)rank) && presence > TD__PRESENT && presence <= TD__CUT_OFF)
        td__presence_settle(endpoint, (int)rank, (enum td__presence)presence, wait_status);
}

bool td__is_neighbour(const struct td__endpoint *endpoint, const struct td__card *peer)
{
    const struct td__card *own = &endpoint->own;
    return !strcmp(peer->host_id, own->host_id) && peer->pid_space == own->pid_space &&
           peer->pid != own->pid;
}

void td__endpoint_look(struct td__endpoint *endpoint, int rank)
{
    const struct td__card *peer = td__peer(endpoint, rank);
    if (atomic_load(&endpoint->examined) && peer->process_watched && is_present(endpoint, rank) &&
        endpoint->detector_fns.has_left(endpoint->detector_arg, rank))
        td__presence_settle(endpoint, rank, TD__LEFT, 0);
}

bool td__endpoint_is_stopped(const struct td__endpoint *endpoint, int rank)
{
    const struct td__card *peer = td__peer(endpoint, rank);
    if (!td__is_neighbour(endpoint, peer))
        return false;
    char state = td__process_state(peer->pid);
    return state == 'T' || state == 't';
}

void td__endpoint_watch(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    int no = 0;
    if (!atomic_load(&endpoint->examined) || rank == endpoint->rank || peer->process_watched ||
        !atomic_compare_exchange_strong(&peer->wanted, &no, 1))
        return;
    atomic_fetch_add(&endpoint->lifelines_wanted, 1);
    td__failure_detector_wake(endpoint->domain);
}

const char *td__endpoint_find_out(struct td__endpoint *endpoint, int rank, td__deadline deadline)
{
    td__deadline end = td__deadline_earlier(deadline, td__deadline_in_ms(FIND_OUT_MS));
    if (!atomic_load(&endpoint->examined) || td__is_detector_thread)
        return td__endpoint_exit_reason(endpoint, rank);
    td__endpoint_watch(endpoint, rank);
    bool in_time = true;
    pthread_mutex_lock(&endpoint->lock);
    while (is_present(endpoint, rank) && in_time)
        in_time = td__cond_wait(&endpoint->arrived, &endpoint->lock, end);
    pthread_mutex_unlock(&endpoint->lock);
    return td__endpoint_exit_reason(endpoint, rank);
}

/* ---- Losses and their reports ---------------------------------------------------------------- */

static bool same_host(const struct td__endpoint *endpoint, int a, int b)
{
    return td__peer(endpoint, a)->host == td__peer(endpoint, b)->host;
}

/* The first known rank after `rank`, or before it, in a ring of all; `rank` itself if there is no other. */
static int neighbour(const struct td__endpoint *endpoint, int rank, int step)
{
    int size = atomic_load(&endpoint->size), at = rank;
    do
        at = (at + step + size) % size;
    while (!td__peer(endpoint, at));
    return at;
}

/* The lowest other rank that is left on the host of `rank`. A rank announces that it leaves before it handles its last
 * events, so a rank that is present here will handle the same events. */
static int reporter_for(const struct td__endpoint *endpoint, int rank)
{
    const struct td__card *peer;
    TD__PEER_FOREACH (peer, r, endpoint)
        if (r != rank && same_host(endpoint, r, rank) && is_present(endpoint, r) &&
            (!peer->process_watched || !endpoint->detector_fns.has_left(endpoint->detector_arg, r)))
            return r;
    return -1;
}

/* This rank has detected the loss itself. */
static void lose(struct td__endpoint *endpoint, int rank, enum td__presence presence,
                 int wait_status)
{
    struct td__card *peer = td__peer(endpoint, rank);
    if (!td__presence_settle(endpoint, rank, presence, wait_status) ||
        (presence != TD__ENDED && presence != TD__CUT_OFF))
        return;
    bool by_lifeline = !same_host(endpoint, rank, endpoint->rank);
    if (!by_lifeline && reporter_for(endpoint, rank) != endpoint->rank)
        return;
    peer->report_to = 0;
    peer->report_end = td__deadline_in_ms(REPORT_ALL_MS);
    endpoint->reports++;
}

/* Reports the loss of `rank` to the next rank that does not know it. */
static void report(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    while (td__peer_from(endpoint, &peer->report_to) && !td__deadline_passed(peer->report_end)) {
        int to = peer->report_to++;
        if (to == endpoint->rank || same_host(endpoint, to, rank) || !is_present(endpoint, to))
            continue;
        td__endpoint_report_loss(endpoint, to, rank, td__endpoint_presence(endpoint, rank),
                                 td__endpoint_wait_status(endpoint, rank),
                                 td__deadline_in_ms(REPORT_MS));
        return;
    }
    peer->report_end = 0;
    endpoint->reports--;
}

static void report_next(struct td__endpoint *endpoint)
{
    int rank = 0;
    while (!td__peer_from(endpoint, &rank)->report_end)
        rank++;
    report(endpoint, rank);
}

/* ---- Processes of this host ------------------------------------------------------------------ */

static void lose_process(struct td__endpoint *endpoint, int rank)
{
    const struct td__card *peer = td__peer(endpoint, rank);
    if (endpoint->detector_fns.has_left(endpoint->detector_arg, rank))
        lose(endpoint, rank, TD__LEFT, 0);
    else
        lose(endpoint, rank, TD__ENDED,
             td__process_wait_status(peer->pid, peer->process ? peer->process->fd : -1));
}

/* Returns whether there is no such process any more. */
static bool watch_process(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    bool ended = false;
    if (!peer->process && td__is_neighbour(endpoint, peer))
        peer->process = td__watched_process_open(endpoint->domain, peer->pid, &ended);
    return ended;
}

void td__presence_on_process_ends(struct td__endpoint *endpoint)
{
    const struct td__card *peer;
    TD__PEER_FOREACH (peer, r, endpoint) {
        if (peer->process_watched && peer->process && atomic_load(&peer->process->ended) &&
            is_present(endpoint, r))
            lose_process(endpoint, r);
    }
}

/* The kernel closes the sockets of a process a moment before the process has ended. */
static int await_exit(const struct td__card *peer)
{
    return peer->process && td__process_has_ended(peer->process->fd, EXIT_MS)
               ? td__process_wait_status(peer->pid, peer->process->fd)
               : TD__STATUS_UNKNOWN;
}

/* ---- Lifelines ------------------------------------------------------------------------------- */

static bool is_silence(int error)
{
    return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
           error == ENETDOWN || error == EHOSTDOWN;
}

static int probe(struct td__endpoint *endpoint, int rank)
{
    return td__endpoint_probe(endpoint, rank, td__deadline_in_ms(CONNECT_MS));
}

void td__presence_on_lifeline(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    char byte;
    if (peer->lifeline < 0)
        return;
    ssize_t got = td__sock_recv(peer->lifeline, &byte, 1, MSG_DONTWAIT);
    int error = got < 0 ? errno : 0;
    if (error == EAGAIN || error == EINTR)
        return;
    td__failure_detector_unfollow(endpoint, peer->lifeline);
    if (got == 1 && byte == TD__REPLY_EXCLUDED)
        td__exclusion_read_refusal(endpoint, peer->lifeline, td__deadline_in_ms(REPORT_MS));
    td__sock_close(peer->lifeline);
    peer->lifeline = -1;
    if (got == 1 && byte == TD__LEAVING) {
        lose(endpoint, rank, TD__LEFT, 0);
    } else if (is_silence(error)) {
        lose(endpoint, rank, TD__CUT_OFF, TD__STATUS_UNKNOWN);
    } else {
        int wait_status = await_exit(peer);
        if (wait_status == TD__STATUS_UNKNOWN && reporter_for(endpoint, rank) >= 0 &&
            !atomic_load(&endpoint->leaving)) {
            peer->lose_at = td__deadline_in_ms(AWAIT_REPORT_MS);
            endpoint->awaited_reports++;
        } else {
            lose(endpoint, rank, TD__ENDED, wait_status);
        }
    }
}

/* Only a rank of the same host knows the wait status of a process. Errors quote it, so this waits shortly for the
 * report of that rank. */
static td__deadline await_reports(struct td__endpoint *endpoint)
{
    td__deadline next = TD__NEVER;
    int64_t now = td__now_ns();
    struct td__card *peer;
    if (!endpoint->awaited_reports)
        return next;
    TD__PEER_FOREACH (peer, r, endpoint) {
        if (!peer->lose_at)
            continue;
        if (now < peer->lose_at && is_present(endpoint, r)) {
            next = td__deadline_earlier(next, peer->lose_at);
            continue;
        }
        peer->lose_at = 0;
        endpoint->awaited_reports--;
        lose(endpoint, r, TD__ENDED, TD__STATUS_UNKNOWN);
    }
    return next;
}

/* Nothing listens at the address of `rank` any more. The rank before it had a lifeline to it, and may know why; or it
 * may not have detected it yet, and will report the loss itself. The wait status alone is conclusive only if it is
 * not 0. */
static void find_out(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    int before = neighbour(endpoint, rank, -1);
    enum td__presence presence = TD__GONE;
    int wait_status = peer->queries ? TD__STATUS_UNKNOWN : await_exit(peer);
    if (wait_status != TD__STATUS_UNKNOWN && wait_status != 0)
        presence = TD__ENDED;
    bool may_query = presence == TD__GONE && peer->queries < QUERIES &&
                     !atomic_load(&endpoint->leaving) && before != endpoint->rank &&
                     is_present(endpoint, before) && !probe(endpoint, before);
    if (may_query)
        td__endpoint_query_presence(endpoint, before, rank, td__deadline_in_ms(CONNECT_MS),
                                    &presence, &wait_status);
    if (may_query && presence == TD__GONE && ++peer->queries < QUERIES)
        peer->next_try = td__now_ns() + QUERY_PAUSE_NS;
    else
        lose(endpoint, rank, presence, wait_status);
}

static bool connect_lifeline(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    watch_process(endpoint, rank);
    if (td__endpoint_open_lifeline(endpoint, rank, td__deadline_in_ms(CONNECT_MS),
                                   &peer->lifeline)) {
        peer->lifeline = -1;
        return false;
    }
    atomic_store(&peer->reached, true);
    td__failure_detector_follow(endpoint, peer->lifeline, rank);
    endpoint->ticks |= !same_host(endpoint, rank, endpoint->rank);
    return true;
}

/* If a process is stopped, or gets no CPU time, it does not complete the handshake, but its host still answers. Each
 * attempt leaves a pending connection at its listener, so the pauses grow. */
static void open_lifeline(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    int64_t now = td__now_ns();
    int error = probe(endpoint, rank);
    if (!error)
        atomic_store(&peer->reached, true);
    if (!error && connect_lifeline(endpoint, rank))
        return;
    if (!error) /* the process may have ended meanwhile */
        error = probe(endpoint, rank);
    if (!is_present(endpoint, rank))
        return; /* the reply was TD__REPLY_LEFT */
    if (td__is_refused(error)) {
        find_out(endpoint, rank);
    } else if (!error) {
        peer->silent_since = peer->silent_probes = 0;
        peer->pause = peer->pause ? peer->pause * 2 : FIRST_PAUSE_NS;
        if (peer->pause > LAST_PAUSE_NS)
            peer->pause = LAST_PAUSE_NS;
        peer->next_try = now + peer->pause;
    } else {
        if (!peer->silent_since)
            peer->silent_since = now;
        else
            peer->silent_probes++;
        if (peer->silent_probes >= LEAST_PROBES &&
            now - peer->silent_since >= td__heartbeat_ms() * 1000000)
            lose(endpoint, rank, TD__CUT_OFF,
                 atomic_load(&peer->reached) ? TD__STATUS_UNKNOWN : TD__STATUS_UNREACHED);
        peer->next_try = now + PROBE_PAUSE_NS;
    }
}

/* ---- The failure detector's calls ------------------------------------------------------------ */

void td__presence_begin(struct td__endpoint *endpoint)
{
    struct td__card *peer;
    endpoint->ticks = endpoint->detector_fns.has_left || endpoint->detector_fns.tick;
    TD__PEER_FOREACH (peer, r, endpoint) {
        peer->process_watched = endpoint->detector_fns.has_left &&
                                same_host(endpoint, r, endpoint->rank) &&
                                td__is_neighbour(endpoint, peer);
        if (peer->process_watched && watch_process(endpoint, r))
            lose_process(endpoint, r);
    }
    int next = neighbour(endpoint, endpoint->rank, 1);
    peer = td__peer(endpoint, next);
    if (next == endpoint->rank || peer->process_watched)
        return;
    /* At once, so that the next rank is watched from the start. */
    bool opened = connect_lifeline(endpoint, next);
    atomic_store(&peer->wanted, opened ? 2 : 1);
    atomic_store(&endpoint->lifelines_wanted, !opened);
}

/* There is no event for a rank of this host that leaves while its process runs on, nor for a lifeline whose host is
 * cut off. */
void td__presence_tick(struct td__endpoint *endpoint)
{
    td__presence_on_process_ends(endpoint);
    const struct td__card *peer;
    TD__PEER_FOREACH (peer, r, endpoint) {
        if (!is_present(endpoint, r))
            continue;
        if (peer->process_watched && endpoint->detector_fns.has_left(endpoint->detector_arg, r))
            td__presence_settle(endpoint, r, TD__LEFT, 0);
        else if (peer->lifeline >= 0 && !same_host(endpoint, r, endpoint->rank) &&
                 td__cut_off(peer->lifeline))
            lose(endpoint, r, TD__CUT_OFF, TD__STATUS_UNKNOWN);
    }
    if (endpoint->detector_fns.tick && !atomic_load(&endpoint->leaving))
        endpoint->detector_fns.tick(endpoint->detector_arg);
}

td__deadline td__presence_step(struct td__endpoint *endpoint)
{
    td__deadline next = td__deadline_earlier(await_reports(endpoint), td__exclusion_step(endpoint));
    if (endpoint->reports) {
        report_next(endpoint);
        return 0;
    }
    int wanted = atomic_load(&endpoint->lifelines_wanted);
    struct td__card *peer;
    for (int r = 0; wanted > 0 && (peer = td__peer_from(endpoint, &r)); r++) {
        if (atomic_load(&peer->wanted) != 1)
            continue;
        wanted--;
        bool present = is_present(endpoint, r);
        bool opened = present && peer->lifeline < 0 && td__now_ns() >= peer->next_try;
        if (opened)
            open_lifeline(endpoint, r);
        if (peer->lifeline >= 0 || !is_present(endpoint, r)) {
            atomic_store(&peer->wanted, 2);
            atomic_fetch_sub(&endpoint->lifelines_wanted, 1);
        } else {
            next = td__deadline_earlier(next, peer->next_try);
        }
        if (opened)
            return 0;
    }
    return next;
}

/* A pending event may be the reason why the program leaves. Each one changes a presence, so the loop ends. */
void td__presence_end(struct td__endpoint *endpoint)
{
    td__deadline end = td__deadline_in_ms(LAST_REPORT_ALL_MS);
    struct td__card *peer;
    TD__PEER_FOREACH (peer, r, endpoint) {
        if (!is_present(endpoint, r))
            continue;
        if (peer->process_watched && peer->process && td__process_has_ended(peer->process->fd, 0))
            lose_process(endpoint, r);
        else if (peer->lose_at)
            lose(endpoint, r, TD__ENDED, TD__STATUS_UNKNOWN);
        else
            td__presence_on_lifeline(endpoint, r);
    }
    TD__PEER_FOREACH (peer, r, endpoint)
        peer->report_end = td__deadline_earlier(peer->report_end, end);
    while (endpoint->reports)
        report_next(endpoint);
}
