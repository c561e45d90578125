/* The failure detector: a thread of the domain (domain.h) that detects which ranks have ended, have left, or are cut
 * off, for all endpoints that have started it. presence.c has the rules; this file has the thread, its events, and
 * the processes that it watches.
 *
 * The thread examines one endpoint at a time. Between two steps that wait for another rank it handles events, so that
 * a rank of one world that does not answer delays the detection in another world by one step. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/process.h"
#include "os/tls.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { TICK_MS = 200, BATCH = 32 };

_Thread_local bool td__is_detector_thread;

/* ---- Events ---------------------------------------------------------------------------------- */

/* The subject of an event: a lifeline, by the number of its endpoint and the rank; a process, by 0 and its pid; or
 * td__failure_detector_wake(), 0 and 0. Not a pointer, since the subject may be freed before the thread handles the
 * event. */
static uint64_t event_key(uint32_t number, int rank_or_pid)
{
    return (uint64_t)number << 32 | (uint32_t)rank_or_pid;
}

static void follow(struct td__failure_detector *detector, int fd, uint64_t key)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = key};
    epoll_ctl(detector->epoll, EPOLL_CTL_ADD, fd, &event);
}

void td__failure_detector_follow(struct td__endpoint *endpoint, int fd, int rank)
{
    follow(&endpoint->domain->detector, fd, event_key(endpoint->own.number, rank));
}

void td__failure_detector_unfollow(struct td__endpoint *endpoint, int fd)
{
    epoll_ctl(endpoint->domain->detector.epoll, EPOLL_CTL_DEL, fd, NULL);
}

void td__failure_detector_wake(struct td__domain *domain)
{
    eventfd_write(domain->detector.wake, 1);
}

/* ---- Processes ------------------------------------------------------------------------------- */

/* If a watched process has ended, its pid may belong to a new process. */
struct td__watched_process *td__watched_process_open(struct td__domain *domain, int pid,
                                                     bool *ended)
{
    struct td__failure_detector *detector = &domain->detector;
    *ended = false;
    pthread_mutex_lock(&domain->lock);
    struct td__watched_process *process;
    LIST_FOREACH (process, &detector->processes, link)
        if (process->pid == pid && !td__process_has_ended(process->fd, 0))
            break;
    if (process) {
        process->users++;
    } else if ((process = calloc(1, sizeof *process))) {
        process->pid = pid;
        process->users = 1;
        process->fd = td__process_watch(pid, ended);
        if (process->fd >= 0) {
            LIST_INSERT_HEAD(&detector->processes, process, link);
            follow(detector, process->fd, event_key(0, pid));
        } else {
            free(process);
            process = NULL;
        }
    }
    pthread_mutex_unlock(&domain->lock);
    return process;
}

static void close_process(struct td__domain *domain, struct td__watched_process *process)
{
    pthread_mutex_lock(&domain->lock);
    if (--process->users == 0) {
        LIST_REMOVE(process, link);
        close(process->fd);
        free(process);
    }
    pthread_mutex_unlock(&domain->lock);
}

/* Marks the processes with this pid that have ended. */
static void mark_ended(struct td__domain *domain, int pid)
{
    struct td__failure_detector *detector = &domain->detector;
    struct td__watched_process *at;
    pthread_mutex_lock(&domain->lock);
    LIST_FOREACH (at, &detector->processes, link)
        if (at->pid == pid && !atomic_load(&at->ended) && td__process_has_ended(at->fd, 0)) {
            epoll_ctl(detector->epoll, EPOLL_CTL_DEL, at->fd, NULL);
            atomic_store(&at->ended, true);
        }
    pthread_mutex_unlock(&domain->lock);
}

/* ---- The thread ------------------------------------------------------------------------------ */

/* Begins to examine the first endpoint from `number` on, instead of the former one; NULL if there is none. */
static struct td__endpoint *examine_from(struct td__domain *domain, uint32_t number)
{
    pthread_mutex_lock(&domain->lock);
    struct td__endpoint *endpoint;
    TAILQ_FOREACH (endpoint, &domain->endpoints, link)
        if (endpoint->own.number >= number && atomic_load(&endpoint->examined))
            break;
    if (domain->examined)
        pthread_cond_broadcast(&domain->idle);
    domain->examined = endpoint;
    pthread_mutex_unlock(&domain->lock);
    return endpoint;
}

static struct td__endpoint *examine_next(struct td__domain *domain,
                                         const struct td__endpoint *endpoint)
{
    return examine_from(domain, endpoint->own.number + 1);
}

static void examine_none(struct td__domain *domain)
{
    examine_from(domain, UINT32_MAX);
}

static void on_process_end(struct td__domain *domain, int pid)
{
    mark_ended(domain, pid);
    for (struct td__endpoint *at = examine_from(domain, 0); at; at = examine_next(domain, at))
        td__presence_on_process_ends(at);
}

static void on_lifeline(struct td__domain *domain, uint32_t number, int rank)
{
    struct td__endpoint *endpoint = examine_from(domain, number);
    if (endpoint && endpoint->own.number == number)
        td__presence_on_lifeline(endpoint, rank);
    examine_none(domain);
}

static void handle_events(struct td__domain *domain, td__deadline deadline)
{
    struct td__failure_detector *detector = &domain->detector;
    struct epoll_event events[BATCH];
    int count = epoll_wait(detector->epoll, events, BATCH, td__deadline_poll_ms(deadline));
    for (int i = 0; i < count; i++) {
        uint32_t number = (uint32_t)(events[i].data.u64 >> 32);
        int which = (int)(uint32_t)events[i].data.u64;
        eventfd_t wakes;
        if (number)
            on_lifeline(domain, number, which);
        else if (which)
            on_process_end(domain, which);
        else
            eventfd_read(detector->wake, &wakes);
    }
}

/* Ticks and takes one step for each endpoint. Returns when the next step is due; *ticks: whether one wants ticks. */
static td__deadline examine_all(struct td__domain *domain, bool tick, bool *ticks)
{
    td__deadline next = TD__NEVER;
    uint32_t number = 0;
    *ticks = false;
    for (struct td__endpoint *at; (at = examine_from(domain, number)); number++) {
        number = at->own.number;
        if (tick)
            td__presence_tick(at);
        td__deadline due = atomic_load(&at->leaving) ? TD__NEVER : td__presence_step(at);
        next = td__deadline_earlier(next, due);
        *ticks |= at->ticks;
        examine_none(domain);
        if (!due)
            handle_events(domain, 0);
    }
    return next;
}

static void *run_detector(void *arg)
{
    struct td__domain *domain = arg;
    td__deadline next_tick = td__deadline_in_ms(TICK_MS), next_step = TD__NEVER;
    td__is_detector_thread = true;
    while (!atomic_load(&domain->detector.ending)) {
        handle_events(domain, td__deadline_earlier(next_tick, next_step));
        bool tick = td__deadline_passed(next_tick), ticks;
        next_step = examine_all(domain, tick, &ticks);
        if (!ticks)
            next_tick = TD__NEVER;
        else if (tick || next_tick == TD__NEVER)
            next_tick = td__deadline_in_ms(TICK_MS);
    }
    return NULL;
}

/* ---- Life ------------------------------------------------------------------------------------ */

static void close_fds(struct td__failure_detector *detector)
{
    if (detector->epoll >= 0)
        close(detector->epoll);
    if (detector->wake >= 0)
        close(detector->wake);
}

/* The caller holds the domain's lock. */
static td_status start_thread(struct td__domain *domain)
{
    struct td__failure_detector *detector = &domain->detector;
    detector->epoll = epoll_create1(EPOLL_CLOEXEC);
    detector->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = detector->epoll < 0 || detector->wake < 0 ? errno : 0;
    if (!error) {
        follow(detector, detector->wake, event_key(0, 0));
        error = td__thread_start(&detector->thread, "td-detector", run_detector, domain);
    }
    detector->started = !error;
    if (!error)
        return TD_OK;
    close_fds(detector);
    return td_fail(TD_ERR_SYSTEM, "no thread or descriptor to watch the other ranks: %s",
                   td__errno_text(error));
}

void td__failure_detector_end(struct td__domain *domain)
{
    struct td__failure_detector *detector = &domain->detector;
    if (!detector->started)
        return;
    atomic_store(&detector->ending, true);
    td__failure_detector_wake(domain);
    pthread_join(detector->thread, NULL);
    close_fds(detector);
}

td_status td__endpoint_start_detector(struct td__endpoint *endpoint, const td__detector_fns *fns,
                                      void *arg)
{
    struct td__domain *domain = endpoint->domain;
    endpoint->detector_fns = *fns;
    endpoint->detector_arg = arg;
    pthread_mutex_lock(&domain->lock);
    td_status status = domain->detector.started ? TD_OK : start_thread(domain);
    pthread_mutex_unlock(&domain->lock);
    if (status)
        return status;
    td__presence_begin(endpoint);
    pthread_mutex_lock(&domain->lock);
    atomic_store(&endpoint->examined, true);
    pthread_mutex_unlock(&domain->lock);
    td__failure_detector_wake(domain);
    return TD_OK;
}

/* Handles the last events on the caller's thread, so that it does not wait for steps of other endpoints. */
void td__endpoint_stop_detector(struct td__endpoint *endpoint)
{
    struct td__domain *domain = endpoint->domain;
    if (!domain || !atomic_load(&endpoint->examined) || atomic_exchange(&endpoint->leaving, true))
        return;
    pthread_mutex_lock(&domain->lock);
    atomic_store(&endpoint->examined, false);
    while (domain->examined == endpoint)
        td__cond_wait(&domain->idle, &domain->lock, TD__NEVER);
    pthread_mutex_unlock(&domain->lock);
    struct td__card *peer;
    TD__PEER_FOREACH (peer, r, endpoint)
        if (peer->lifeline >= 0)
            td__failure_detector_unfollow(endpoint, peer->lifeline);
    td__presence_end(endpoint);
}

void td__failure_detector_close(struct td__endpoint *endpoint)
{
    td__endpoint_stop_detector(endpoint);
    struct td__card *peer;
    TD__PEER_FOREACH (peer, r, endpoint) {
        if (peer->process)
            close_process(endpoint->domain, peer->process);
        if (peer->lifeline >= 0)
            td__sock_close(peer->lifeline);
    }
}
