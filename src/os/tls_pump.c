/* The thread that moves bytes between plain ends and their connections; see tls.h.
 *
 * The links belong to the thread. pump.lock protects the list of links (a fork reads it), the
 * threads that wait, and the state of the thread itself; nothing slow happens under it.
 *
 * A fork: the child has no such thread and no use for the connections. It closes its copies of the
 * descriptors, and the first wrap starts anew. */
#include "base/fail.h"
#include "base/thread.h"
#include "os/socket.h"
#include "os/tls_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    EVENTS = 64,
    EXIT_MS = 2000,  /* for what was written to be sent, when the process exits */
    TICK_MS = 2,     /* between checks of links that close or are in the handshake */
    WATCH_MS = 1000, /* between checks for hosts that are cut off */
    COMPLAINTS = 64, /* kept in mind */
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct td__tls_link *links;
    struct td__tls_link *incoming;   /* not seen by the thread yet */
    bool running;                    /* the thread is */
    bool joinable;                   /* it was started, and not waited for yet */
    uint64_t asked, answered;        /* how often it was to find the links that are `unsent` */
    uint64_t complaints[COMPLAINTS]; /* plain ends whose bytes were changed on the way, … */
    size_t complaint_count;          /* … so many so far */
    td__deadline exit_end;           /* the process ends, and so must the thread by then; 0: no */
    pthread_t thread;
    int epoll, wake;

    struct td__tls_link *hot; /* the thread's: links that it looks at again */
    bool done;                /* likewise: nothing is left to be sent before the exit */
    uint8_t scratch[TD__TLS_SCRATCH];
} pump = {.lock = PTHREAD_MUTEX_INITIALIZER, .epoll = -1, .wake = -1};

/* ---- The thread ------------------------------------------------------------------------------ */

/* Puts a link down for a look before the thread sleeps: it may be over, or not be done. */
static void touch(struct td__tls_link *link)
{
    if (link->hot)
        return;
    link->hot = true;
    link->hot_next = pump.hot;
    pump.hot = link;
}

/* False where no thread waits. Holds the lock. */
static bool answer_waiter(struct td__tls_link *link, const struct td__tls_failure *failure)
{
    if (!link->wait)
        return false;
    link->wait->failure = *failure;
    link->wait->done = true;
    link->wait = NULL;
    pthread_cond_broadcast(&pump.changed);
    return true;
}

bool td__tls_pump_answer(struct td__tls_link *link, const struct td__tls_failure *failure)
{
    pthread_mutex_lock(&pump.lock);
    bool answered = answer_waiter(link, failure);
    pthread_mutex_unlock(&pump.lock);
    return answered;
}

void td__tls_pump_complain(const struct td__tls_link *link)
{
    pthread_mutex_lock(&pump.lock);
    pump.complaints[pump.complaint_count++ % COMPLAINTS] = link->end_id;
    pthread_mutex_unlock(&pump.lock);
}

static void remove_link(struct td__tls_link *link)
{
    struct td__tls_failure late = {.error = ETIMEDOUT};
    pthread_mutex_lock(&pump.lock);
    if (link->before)
        link->before->after = link->after;
    else
        pump.links = link->after;
    if (link->after)
        link->after->before = link->before;
    answer_waiter(link, &late); /* a thread waits where it ended before the handshake was done */
    td__tls_link_free(link);    /* under the lock, so that a fork knows all descriptors */
    pthread_mutex_unlock(&pump.lock);
}

static void take_incoming(void)
{
    struct epoll_event wire = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET};
    struct epoll_event plain = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET};
    while (pump.incoming) {
        struct td__tls_link *link = pump.incoming;
        pump.incoming = link->after;
        link->after = pump.links;
        if (link->after)
            link->after->before = link;
        pump.links = link;
        link->epoll = pump.epoll;
        wire.data.ptr = plain.data.ptr = link;
        if (epoll_ctl(pump.epoll, EPOLL_CTL_ADD, link->wire, &wire) ||
            epoll_ctl(pump.epoll, EPOLL_CTL_ADD, link->plain, &plain))
            link->over = true;
        touch(link);
    }
}

/* Looks at the links that need it; returns how long the thread may sleep. */
static int look_at_hot(void)
{
    int sleep_ms = WATCH_MS;
    struct td__tls_link *link = pump.hot, *next;
    pump.hot = NULL;
    for (; link; link = next) {
        next = link->hot_next;
        link->hot = false;
        if (!link->over && (link->again || link->end != TD__NEVER))
            td__tls_move(link, pump.scratch);
        if (link->over || td__deadline_passed(link->end)) {
            remove_link(link);
            continue;
        }
        if (link->again || link->end != TD__NEVER)
            touch(link);
        if (link->again)
            sleep_ms = 0;
        else if (link->end != TD__NEVER && sleep_ms)
            sleep_ms = TICK_MS;
    }
    return sleep_ms;
}

/* Tries all that may have to be done on each link, for threads that wait until nothing is. */
static void look_at_all(void)
{
    size_t unsent = 0;
    for (struct td__tls_link *link = pump.links; link; link = link->after) {
        link->may_have_left = true;
        if (!link->over)
            td__tls_move(link, pump.scratch);
        touch(link);
        unsent += !link->over && (!link->open || link->again || link->up.size);
    }
    pthread_mutex_lock(&pump.lock);
    for (struct td__tls_link *link = pump.links; link; link = link->after)
        link->unsent = link->left && !link->over;
    pump.done = pump.exit_end && (!unsent || td__deadline_passed(pump.exit_end));
    pthread_mutex_unlock(&pump.lock);
}

/* The kernel goes on asking a host that is cut off for a quarter of an hour. */
static void look_for_the_cut_off(void)
{
    static int64_t last;
    if (td__now_ns() - last < (int64_t)WATCH_MS * 1000000)
        return;
    last = td__now_ns();
    for (struct td__tls_link *link = pump.links; link; link = link->after)
        if (td__cut_off(link->wire)) {
            link->over = true;
            touch(link);
        }
}

static void wait_for_events(int sleep_ms)
{
    struct epoll_event events[EVENTS];
    int count = epoll_wait(pump.epoll, events, EVENTS, sleep_ms);
    for (int i = 0; i < count; i++) {
        struct td__tls_link *link = events[i].data.ptr;
        uint64_t ignored;
        if (!link) {
            (void)!read(pump.wake, &ignored, sizeof ignored);
        } else {
            link->may_have_left |= (events[i].events & EPOLLHUP) != 0;
            if (!link->over)
                td__tls_move(link, pump.scratch);
            touch(link);
        }
    }
}

static void *run_pump(void *arg)
{
    (void)arg;
    for (int sleep_ms = 0;; wait_for_events(sleep_ms)) {
        pthread_mutex_lock(&pump.lock);
        take_incoming();
        uint64_t asked = pump.asked;
        bool look = asked != pump.answered || pump.exit_end;
        pthread_mutex_unlock(&pump.lock);
        if (look)
            look_at_all();
        look_for_the_cut_off();
        sleep_ms = look_at_hot();

        pthread_mutex_lock(&pump.lock);
        if (pump.done || (!pump.links && !pump.incoming))
            pump.running = false;
        bool ends = !pump.running;
        if (ends) {
            close(pump.epoll);
            close(pump.wake);
        }
        if (look || ends) {
            pump.answered = asked;
            pthread_cond_broadcast(&pump.changed);
        }
        if (pump.incoming)
            sleep_ms = 0;
        else if (pump.exit_end && sleep_ms)
            sleep_ms = TICK_MS;
        pthread_mutex_unlock(&pump.lock);
        if (ends)
            return NULL;
    }
}

/* ---- From outside: all hold the lock --------------------------------------------------------- */

static void wake_pump(void)
{
    eventfd_write(pump.wake, 1);
}

static void join_pump(void)
{
    if (!pump.joinable || pump.running)
        return;
    pthread_join(pump.thread, NULL); /* it has let go of the lock for good */
    pump.joinable = false;
}

static void send_rest_at_exit(void)
{
    pthread_mutex_lock(&pump.lock);
    pump.exit_end = td__deadline_in_ms(EXIT_MS);
    if (pump.running)
        wake_pump();
    while (pump.running)
        td__cond_wait(&pump.changed, &pump.lock, TD__NEVER);
    join_pump();
    pthread_mutex_unlock(&pump.lock);
}

static void before_fork(void)
{
    pthread_mutex_lock(&pump.lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&pump.lock);
}

/* The memory stays: nothing can be said about what the thread was doing with it. */
static void in_child(void)
{
    static struct td__tls_link *inherited[2];
    inherited[0] = pump.links;
    inherited[1] = pump.incoming;
    for (int i = 0; i < 2; i++)
        for (struct td__tls_link *link = inherited[i]; link; link = link->after) {
            close(link->wire);
            close(link->plain);
        }
    if (pump.running) {
        close(pump.epoll);
        close(pump.wake);
    }
    pump.links = pump.incoming = pump.hot = NULL;
    pump.running = pump.joinable = false;
    td__cond_init(&pump.changed);
    pthread_mutex_unlock(&pump.lock);
}

static void prepare_once(void)
{
    td__cond_init(&pump.changed);
    pthread_atfork(before_fork, after_fork, in_child);
    atexit(send_rest_at_exit); /* before OpenSSL's own, which was registered earlier */
}

static td_status start_pump(void)
{
    struct epoll_event wake = {.events = EPOLLIN};
    join_pump();
    pump.epoll = epoll_create1(EPOLL_CLOEXEC);
    pump.wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int error = errno;
    if (pump.epoll >= 0 && pump.wake >= 0) {
        error = epoll_ctl(pump.epoll, EPOLL_CTL_ADD, pump.wake, &wake) ? errno : 0;
        pump.running = pump.joinable = true;
        if (!error)
            error = td__thread_start(&pump.thread, "td-tls", run_pump, NULL);
        if (!error)
            return TD_OK;
    }
    pump.running = pump.joinable = false;
    if (pump.epoll >= 0)
        close(pump.epoll);
    if (pump.wake >= 0)
        close(pump.wake);
    return td_fail(TD_ERR_SYSTEM, "TLS: no thread or no descriptors: %s", td__errno_text(error));
}

td_status td__tls_pump_add(struct td__tls_link *link)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct td__tls_wait *wait = link->wait;
    pthread_once(&once, prepare_once);
    pthread_mutex_lock(&pump.lock);
    td_status status = pump.exit_end  ? td_fail(TD_ERR_STATE, "TLS: the process is exiting")
                       : pump.running ? TD_OK
                                      : start_pump();
    if (status) {
        td__tls_link_free(link);
        pthread_mutex_unlock(&pump.lock);
        return status;
    }
    link->after = pump.incoming;
    pump.incoming = link;
    wake_pump();
    while (wait && !wait->done) /* the thread answers at the deadline, too */
        td__cond_wait(&pump.changed, &pump.lock, TD__NEVER);
    pthread_mutex_unlock(&pump.lock);
    return TD_OK;
}

static uint64_t end_id_of(int fd)
{
    struct stat end;
    return fd < 0 || fstat(fd, &end) || !S_ISSOCK(end.st_mode) ? 0 : end.st_ino;
}

const char *td__tls_complaint(int fd)
{
    uint64_t id = end_id_of(fd);
    bool found = false;
    if (!id)
        return NULL;
    pthread_mutex_lock(&pump.lock);
    size_t count = pump.complaint_count < COMPLAINTS ? pump.complaint_count : COMPLAINTS;
    for (size_t i = 0; i < count; i++)
        found |= pump.complaints[i] == id;
    pthread_mutex_unlock(&pump.lock);
    return found ? TD__TLS_CHANGED : NULL;
}

void td__tls_set_owner(int fd, const void *owner)
{
    pthread_mutex_lock(&pump.lock);
    uint64_t id = pump.running ? end_id_of(fd) : 0;
    struct td__tls_link *const lists[] = {pump.links, pump.incoming};
    for (int i = 0; id && i < 2; i++)
        for (struct td__tls_link *link = lists[i]; link; link = link->after)
            if (link->end_id == id)
                link->owner = owner;
    pthread_mutex_unlock(&pump.lock);
}

static bool has_unsent(const void *owner)
{
    const struct td__tls_link *link = pump.links;
    while (link && !(link->unsent && link->owner == owner))
        link = link->after;
    return link;
}

static void disown(const void *owner)
{
    struct td__tls_link *const lists[] = {pump.links, pump.incoming};
    for (int i = 0; i < 2; i++)
        for (struct td__tls_link *link = lists[i]; link; link = link->after)
            if (link->owner == owner)
                link->owner = NULL;
}

void td__tls_drain(const void *owner, td__deadline deadline)
{
    pthread_mutex_lock(&pump.lock);
    while (pump.running) {
        bool in_time = true;
        uint64_t mine = ++pump.asked;
        wake_pump();
        while (pump.running && pump.answered < mine && in_time)
            in_time = td__cond_wait(&pump.changed, &pump.lock, deadline);
        if (!in_time || td__deadline_passed(deadline))
            break;
        if (pump.running && !has_unsent(owner) && (pump.links || pump.incoming))
            break;
        td__deadline tick = td__deadline_in_ms(TICK_MS);
        if (pump.running)
            td__cond_wait(&pump.changed, &pump.lock, td__deadline_earlier(deadline, tick));
    }
    if (pump.running)
        disown(owner);
    join_pump();
    pthread_mutex_unlock(&pump.lock);
}
