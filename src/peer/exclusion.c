/* Excluding a rank whose process lives: it is stopped, computes without end, or its numbers are wrong.
 *
 * An exclusion is a fact that spreads and is never taken back. A rank that knows it counts the excluded rank as
 * TD__ENDED, and refuses its requests:
 *
 *     the rank that excludes        records it, and tells all others that are present, last the excluded rank
 *     a rank that is told           records it; so do ranks that exchange their exclusions (td_group_shrink())
 *     the excluded rank             gets the exclusion, if it was not reached before, on its lifelines and as the reply to
 *                                   its next request, and then counts all other ranks as TD__ENDED: they refuse it
 *
 * Fencing. A rank of the same host has mapped the memory of the others, and could write into it when its process goes on.
 * So a rank that shares memory with it ends its process: the rank that excludes when it has told the others, so that
 * they learn the reason before they see the end of the process; another one after KILL_MS, or in td__endpoint_fence(),
 * whichever is first. A rank of another host has only connections.
 *
 * Who excludes whom. Only what a rank says counts that is itself not excluded here. A process that was stopped and goes
 * on may take all others for silent: its exclusions are refused, and it learns that it is the one. If two ranks exclude
 * each other at the same time, each that hears of its own exclusion counts as excluded, even from the one that it
 * excludes: then both may be lost, but there are never two groups that go on. So td__endpoint_exclude() also tells the
 * rank that it excludes, and waits longer for that one if no other rank has confirmed that this one is not excluded. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "os/process.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TELL_MS = 250,          /* for one rank … */
    VICTIM_MS = 50,         /* … for the excluded one … */
    VICTIM_ALONE_MS = 1000, /* … if there is no other */
    RECEIVE_MS = 200,       /* for a reason, which is sent with its request */
    KILL_MS = 1000,
    LOOK_MS = 20,
    ENTRY = TD__EXCLUSION_TEXT + 16, /* bytes of td__endpoint_put_exclusions() for one */
};

static atomic_int excluded_pid; /* this process, if it was excluded; a fork of it was not */

bool td__endpoint_was_excluded(void)
{
    return atomic_load(&excluded_pid) == (int)getpid();
}

/* ---- Recording ------------------------------------------------------------------------------- */

static bool shares_memory(const struct td__endpoint *endpoint, const struct td__card *peer)
{
    return peer->host == td__peer(endpoint, endpoint->rank)->host;
}

/* A pidfd of its process; or -1. The process that is watched has not ended, so its pid is not another one's. */
static int open_process(const struct td__endpoint *endpoint, const struct td__card *peer)
{
    if (!shares_memory(endpoint, peer) || !td__is_neighbour(endpoint, peer) ||
        atomic_load(&peer->presence) == TD__LEFT)
        return -1;
    int fd = td__process_watch(peer->pid, NULL);
    if (fd >= 0 && peer->process_watched && peer->process &&
        td__process_has_ended(peer->process->fd, 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static struct td__exclusion *make(const struct td__endpoint *endpoint, int rank, int by,
                                  const char *reason, size_t size)
{
    struct td__exclusion *exclusion = malloc(sizeof *exclusion + size + 1);
    if (!exclusion)
        return NULL;
    exclusion->by = by;
    exclusion->pidfd = rank == endpoint->rank ? -1
                                              : open_process(endpoint, td__peer(endpoint, rank));
    atomic_init(&exclusion->kill_at,
                exclusion->pidfd < 0 ? TD__NEVER : td__deadline_in_ms(KILL_MS));
    for (size_t i = 0; i < size; i++)
        exclusion->reason[i] = (unsigned char)reason[i] < ' ' || reason[i] == 127 ? '?' : reason[i];
    exclusion->reason[size] = 0;
    return exclusion;
}

/* The caller holds the lock. */
static void end_presence(struct td__endpoint *endpoint, struct td__card *peer, int wait_status)
{
    if (atomic_load(&peer->presence) != TD__PRESENT)
        return;
    atomic_store(&peer->wait_status, wait_status);
    atomic_store(&peer->presence, TD__ENDED);
    atomic_fetch_add(&endpoint->losses, 1);
}

/* Records an exclusion, unless there is one. The rank may have left meanwhile, since it has heard of it: then it is the
 * reason, and its process is not ended. */
static td_status record(struct td__endpoint *endpoint, int rank, int by, const char *reason,
                        size_t size)
{
    struct td__card *peer = td__peer(endpoint, rank), *other;
    if (td__exclusion_of(endpoint, rank))
        return TD_OK;
    struct td__exclusion *made = make(endpoint, rank, by, reason, size), *none = NULL;
    if (!made)
        return td__fail_nomem("exclusion");
    pthread_mutex_lock(&endpoint->lock);
    bool added = atomic_compare_exchange_strong(&peer->exclusion, &none, made);
    if (added) {
        /* Before the presence: a thread that sees that must find the exclusion, too. */
        atomic_fetch_add(&endpoint->exclusions, 1);
        if (rank != endpoint->rank) {
            end_presence(endpoint, peer, TD__STATUS_UNKNOWN);
            td__endpoint_dismiss_watcher(endpoint, rank, made);
        } else {
            atomic_store(&excluded_pid, (int)getpid());
            TD__PEER_FOREACH (other, r, endpoint)
                if (r != rank)
                    end_presence(endpoint, other, TD__STATUS_REFUSES);
        }
        atomic_store(&endpoint->exclusion_news, true);
        td__waiters_wake(endpoint);
    }
    pthread_mutex_unlock(&endpoint->lock);
    if (added) {
        td__failure_detector_wake(endpoint->domain);
        return TD_OK;
    }
    if (made->pidfd >= 0)
        close(made->pidfd);
    free(made);
    return TD_OK;
}

struct td__exclusion *td__exclusion_copy(const struct td__exclusion *exclusion)
{
    size_t size = strlen(exclusion->reason) + 1;
    struct td__exclusion *copy = malloc(sizeof *copy + size);
    if (!copy)
        return NULL;
    copy->by = exclusion->by;
    copy->pidfd = -1;
    atomic_init(&copy->kill_at, TD__NEVER);
    memcpy(copy->reason, exclusion->reason, size);
    return copy;
}

void td__exclusion_free(struct td__card *peer)
{
    struct td__exclusion *exclusion = atomic_load(&peer->exclusion);
    if (exclusion && exclusion->pidfd >= 0)
        close(exclusion->pidfd);
    free(exclusion);
}

bool td__endpoint_is_excluded(const struct td__endpoint *endpoint, int rank)
{
    return td__exclusion_of(endpoint, rank);
}

unsigned td__endpoint_exclusions(const struct td__endpoint *endpoint)
{
    return atomic_load_explicit(&endpoint->exclusions, memory_order_acquire);
}

bool td__endpoint_is_excluding(const struct td__endpoint *endpoint)
{
    return atomic_load(&endpoint->excluding);
}

td_status td__endpoint_check_excluded(const struct td__endpoint *endpoint, const char *what)
{
    const struct td__exclusion *exclusion = td__exclusion_of(endpoint, endpoint->rank);
    return exclusion ? td_fail(TD_ERR_STATE,
                               "%s: this rank, %d, was excluded by rank %d: %s; the others go on "
                               "without it, and this process should end",
                               what, endpoint->rank, exclusion->by, exclusion->reason)
                     : TD_OK;
}

/* ---- Telling --------------------------------------------------------------------------------- */

/* True if `to` has recorded it. */
static bool tell(struct td__endpoint *endpoint, int to, int rank, td__deadline deadline)
{
    const struct td__exclusion *exclusion = td__exclusion_of(endpoint, rank);
    struct td__request request = {.what = TD__WANT_EXCLUSION,
                                  .group = (uint64_t)rank,
                                  .channel = (uint32_t)exclusion->by,
                                  .value = strlen(exclusion->reason),
                                  .text = exclusion->reason};
    int fd;
    if (td__endpoint_reach(endpoint, to, request, deadline, &fd))
        return false;
    td__sock_close(fd);
    return true;
}

bool td__endpoint_tell_exclusions(struct td__endpoint *endpoint, int rank, td__deadline deadline)
{
    const struct td__card *peer;
    bool told = true;
    TD__PEER_FOREACH (peer, r, endpoint)
        if (r != rank && td__exclusion_of(endpoint, r))
            told &= tell(endpoint, rank, r, deadline);
    return told;
}

void td__endpoint_put_exclusions(const struct td__endpoint *endpoint, struct td__buffer *buffer)
{
    const struct td__card *peer;
    if (!atomic_load(&endpoint->exclusions))
        return;
    TD__PEER_FOREACH (peer, r, endpoint) {
        const struct td__exclusion *exclusion = td__exclusion_of(endpoint, r);
        if (!exclusion || buffer->size + ENTRY > TD__ANSWER_LIMIT)
            continue;
        td__buffer_put_u32(buffer, (uint32_t)r);
        td__buffer_put_u32(buffer, (uint32_t)exclusion->by);
        td__buffer_put_string(buffer, exclusion->reason, strlen(exclusion->reason));
    }
}

void td__endpoint_take_exclusions(struct td__endpoint *endpoint, struct td__reader *reader)
{
    while (!td__reader_done(reader)) {
        uint32_t rank = td__reader_u32(reader), by = td__reader_u32(reader);
        struct td__span reason = td__reader_string(reader, TD__EXCLUSION_TEXT);
        if (reader->failed || rank >= (uint32_t)endpoint->capacity ||
            !td__peer(endpoint, (int)rank) || by >= (uint32_t)endpoint->capacity)
            return;
        record(endpoint, (int)rank, (int)by, reason.data, reason.size);
    }
}

/* ---- Being told ------------------------------------------------------------------------------ */

void td__exclusion_receive(struct td__endpoint *endpoint, const struct td__request *request, int fd)
{
    char reason[TD__EXCLUSION_TEXT];
    size_t size = (size_t)request->value;
    int rank = (int)request->group;
    bool good = td__peer(endpoint, rank) &&
                !td__recv_all(fd, reason, size, td__deadline_in_ms(RECEIVE_MS)) &&
                !record(endpoint, rank, (int)request->channel, reason, size);
    if (good)
        td__reply(fd, TD__REPLY_ACCEPTED);
    td__sock_close(fd);
}

void td__exclusion_refuse(const struct td__exclusion *exclusion, int fd)
{
    struct td__buffer reply = {0};
    td__buffer_put_u8(&reply, TD__REPLY_EXCLUDED);
    td__buffer_put_u32(&reply, (uint32_t)exclusion->by);
    td__buffer_put_u32(&reply, (uint32_t)strlen(exclusion->reason));
    td__buffer_put(&reply, exclusion->reason, strlen(exclusion->reason));
    if (!reply.failed) {
        ssize_t sent = td__sock_send(fd, reply.data, reply.size, MSG_DONTWAIT | MSG_NOSIGNAL);
        (void)sent;
    }
    td__buffer_free(&reply);
    td__sock_close(fd);
}

td_status td__exclusion_read_refusal(struct td__endpoint *endpoint, int fd, td__deadline deadline)
{
    uint8_t head[8];
    char reason[TD__EXCLUSION_TEXT];
    int error = td__recv_all(fd, head, sizeof head, deadline);
    uint32_t by = error ? 0 : td__load_u32(head), size = error ? 0 : td__load_u32(head + 4);
    if (!error && size < sizeof reason && by < (uint32_t)endpoint->capacity)
        error = td__recv_all(fd, reason, size, deadline);
    else
        error = error ? error : EBADMSG;
    if (error)
        return td_fail(TD_ERR_PEER, "it closed the connection: %s", td__errno_text(error));
    TD_TRY(record(endpoint, endpoint->rank, (int)by, reason, size));
    return td_fail(TD_ERR_PEER, "it refuses this rank, which was excluded by rank %d: %.*s",
                   (int)by, (int)size, reason);
}

/* ---- Fencing --------------------------------------------------------------------------------- */

static void kill_process(struct td__exclusion *exclusion)
{
    atomic_store(&exclusion->kill_at, TD__NEVER);
    td__process_kill(exclusion->pidfd);
}

td__deadline td__exclusion_step(struct td__endpoint *endpoint)
{
    td__deadline next = TD__NEVER;
    const struct td__card *peer;
    if (!atomic_load(&endpoint->exclusions))
        return next;
    /* The caller of td__endpoint_exclude() breaks the groups itself, once the others are told: they would see that in
     * shared memory, and go on, before they know who was excluded. */
    if (!td__endpoint_is_excluding(endpoint) && atomic_exchange(&endpoint->exclusion_news, false) &&
        endpoint->detector_fns.excluded)
        endpoint->detector_fns.excluded(endpoint->detector_arg);
    TD__PEER_FOREACH (peer, r, endpoint) {
        struct td__exclusion *exclusion = td__exclusion_of(endpoint, r);
        td__deadline at = exclusion ? atomic_load(&exclusion->kill_at) : TD__NEVER;
        if (td__deadline_passed(at))
            kill_process(exclusion);
        else
            next = td__deadline_earlier(next, at);
    }
    return next;
}

td_status td__endpoint_fence(struct td__endpoint *endpoint, td__deadline deadline)
{
    const struct td__card *peer;
    if (!atomic_load(&endpoint->exclusions))
        return TD_OK;
    TD__PEER_FOREACH (peer, r, endpoint) {
        struct td__exclusion *exclusion = td__exclusion_of(endpoint, r);
        if (!exclusion || exclusion->pidfd < 0)
            continue;
        kill_process(exclusion);
        while (!td__process_has_ended(exclusion->pidfd, LOOK_MS))
            if (td__deadline_passed(deadline))
                return td_fail(TD_ERR_TIMEOUT,
                               "the process of %s, which %s and shares memory with this rank, has "
                               "not ended after SIGKILL",
                               td__endpoint_describe(endpoint, r),
                               td__endpoint_exit_reason(endpoint, r));
    }
    return TD_OK;
}

/* The ranks that share memory with it are those that must end its process. */
static td_status check_fence(const struct td__endpoint *endpoint, int rank)
{
    const struct td__card *peer = td__peer(endpoint, rank), *other;
    TD__PEER_FOREACH (other, r, endpoint) {
        if (r == rank || other->host != peer->host ||
            td__endpoint_presence(endpoint, r) != TD__PRESENT ||
            (other->pid_space == peer->pid_space && other->pid != peer->pid))
            continue;
        return td_fail(TD_ERR_UNSUPPORTED,
                       "rank %d cannot be excluded: it shares memory with rank %d, which cannot "
                       "end its process, since %s",
                       rank, r,
                       other->pid_space == peer->pid_space
                           ? "both are in the same process"
                           : "the two are in different namespaces of pids");
    }
    return TD_OK;
}

/* ---- Excluding ------------------------------------------------------------------------------- */

static td_status tell_all(struct td__endpoint *endpoint, int rank)
{
    static const char what[] = "exclusion";
    const struct td__card *peer;
    bool confirmed = false;
    TD__PEER_FOREACH (peer, r, endpoint) {
        if (r == rank || r == endpoint->rank || td__endpoint_presence(endpoint, r) != TD__PRESENT)
            continue;
        confirmed |= tell(endpoint, r, rank, td__deadline_in_ms(TELL_MS));
        TD_TRY(td__endpoint_check_excluded(endpoint, what));
    }
    struct td__exclusion *exclusion = td__exclusion_of(endpoint, rank);
    if (exclusion->pidfd >= 0)
        kill_process(exclusion);
    else
        tell(endpoint, rank, rank, td__deadline_in_ms(confirmed ? VICTIM_MS : VICTIM_ALONE_MS));
    return td__endpoint_check_excluded(endpoint, what);
}

td_status td__endpoint_exclude(struct td__endpoint *endpoint, int rank, const char *reason)
{
    size_t size = strlen(reason), most = TD__EXCLUSION_TEXT - 1;
    enum td__presence presence = td__endpoint_presence(endpoint, rank);
    TD_TRY(td__endpoint_check_excluded(endpoint, "exclusion"));
    if (presence == TD__LEFT || presence == TD__GONE)
        return td_fail(TD_ERR_PEER, "%s %s", td__endpoint_describe(endpoint, rank),
                       td__endpoint_exit_reason(endpoint, rank));
    if (presence == TD__ENDED)
        return TD_OK;
    TD_TRY(check_fence(endpoint, rank));
    atomic_fetch_add(&endpoint->excluding, 1);
    td_status status = record(endpoint, rank, endpoint->rank, reason, size < most ? size : most);
    if (!status && td__exclusion_of(endpoint, rank))
        status = tell_all(endpoint, rank);
    atomic_fetch_sub(&endpoint->excluding, 1);
    return status;
}
