/* Which thread reads the links, and which runs functions.
 *
 * One thread at a time leads: it reads all links, completes futures, and queues calls to this worker. It is
 *
 *     a thread that waits for a future    so that an answer is read by the thread that needs it. It leads for as long
 *                                         as it polls, and leaves calls to the agent's threads
 *     a thread of the agent               which also runs the functions that are called, right after it has read them
 *
 * A thread that runs a function does not poll. If it does so for long, another one takes the lead over: at once, if it
 * waits for a future; or at the next tick. A tick is an expiry of `timer`, while there is something to do:
 *
 *     control->awake    1: a thread reads the links, or the timer ticks. Other workers write to their rings, and no more
 *                       0: all threads sleep, or one has just been woken (see below). Other workers write to `event`,
 *                          which wakes one
 *
 * To set the timer takes the kernel longer than all else of a small call. So a thread that was woken leaves `awake` at 0
 * until it has run the first function: whoever writes to a ring meanwhile wakes a second thread, and that one, since it
 * cannot lead, sets the timer. This waits for messages that the first thread has not read (`rung` is 0 again before it
 * reads), so none is left alone with a function that takes long.
 *
 * A thread that has stopped waiting for a future neither sleeps nor wakes another thread: if no thread has led since
 * the last tick, one of the agent's does. A thread of the agent that finds nothing to do for a while sets `awake` to 0
 * and sleeps. So an idle agent costs no processor time, and a busy one no system calls.
 *
 * All threads of the agent that have nothing to do sleep in epoll_wait(); an event wakes one of them. */
#include "base/arena.h"
#include "base/fail.h"
#include "peer/wait_event.h"
#include "rpc/rpc_agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum {
    TICK_NS = 200000,
    WAIT_NS = 200000, /* a thread that waits for a future yields until then */
    WAKE_NS = 500000, /* … or until then, if it has woken the callee */
    HOLD_NS = 10000,  /* answers are published after that */
    LONG_NS = 100000, /* a function that runs for longer does so beside the thread that leads */
    POLLS = 4,        /* between two looks at the clock */
    EVENTS = 16,
    THREADS_AT_ONCE = 16,
};

/* The values of agent->lead: a thread, and whether it runs a function meanwhile. */
enum { RUNS = 1 };

#define EVENT_ID UINT64_MAX
#define TIMER_ID (UINT64_MAX - 1)
#define SOCKETS_ID (UINT64_MAX - 2)
#define DEADLINE_ID (UINT64_MAX - 3)

static uint64_t this_thread(void)
{
    static _Atomic uint64_t last;
    static _Thread_local uint64_t own;
    if (!own)
        own = atomic_fetch_add(&last, 1) + 1;
    return own << 1;
}

_Thread_local bool td__io_must_not_wait;

/* ---- The timer ------------------------------------------------------------------------------- */

static void start_ticking(struct td__rpc_agent *agent)
{
    if (!atomic_load(&agent->ticking) && !atomic_exchange(&agent->ticking, true)) {
        struct itimerspec spec = {.it_value = td__timespec(TICK_NS)};
        timerfd_settime(agent->timer, 0, &spec, NULL);
    }
}

void td__io_set_deadline(struct td__rpc_agent *agent, td__deadline at)
{
    struct itimerspec spec = {.it_value = at == TD__NEVER ? td__timespec(0) : td__timespec(at)};
    timerfd_settime(agent->deadline_timer, TFD_TIMER_ABSTIME, &spec, NULL);
}

/* ---- Leading --------------------------------------------------------------------------------- */

/* While a thread leads, it polls the sockets itself, and they wake no other. */
static void watch_sockets(struct td__rpc_agent *agent, bool watch)
{
    struct epoll_event event = {.events = watch ? EPOLLIN : 0, .data.u64 = SOCKETS_ID};
    if (atomic_load_explicit(&agent->socket_links, memory_order_relaxed))
        epoll_ctl(agent->epoll, EPOLL_CTL_MOD, agent->sockets, &event);
}

/* Before `ticking` is read. By the thread that leads and runs no function; or by one that sets the timer afterwards. Any
 * other might do so while the thread that has taken the lead over goes to sleep, and all would sleep with `awake` at 1. */
static void announce(struct td__rpc_agent *agent)
{
    if (!atomic_load_explicit(&agent->control->awake, memory_order_relaxed))
        atomic_store(&agent->control->awake, 1);
}

/* Takes the lead, if no other thread has it; or (`take_over`) from a thread that runs a function. `woken`: by another
 * worker, and `awake` stays as it is. */
static bool take_lead(struct td__rpc_agent *agent, bool take_over, bool woken)
{
    uint64_t held = atomic_load(&agent->lead), own = this_thread();
    if (held && (!(held & RUNS) || ((held & ~(uint64_t)RUNS) != own && !take_over)))
        return false;
    if (!atomic_compare_exchange_strong(&agent->lead, &held, own))
        return false;
    atomic_fetch_add_explicit(&agent->leads, 1, memory_order_relaxed);
    if (woken && !held)
        agent->rung_by = atomic_exchange(&agent->control->rung,
                                         0); /* a full barrier before the rings are read */
    else
        announce(agent);
    if (!held)
        watch_sockets(agent, false);
    return true;
}

/* Gives the lead back, and lets other workers know that all sleep. False if there is something to do meanwhile, and
 * this thread leads again.
 *
 * Another worker that has seen `awake` at 0 writes to `event`, which wakes a thread. If that thread cannot take the lead
 * because this one has it still, it sets `missed`. */
static bool go_to_sleep(struct td__rpc_agent *agent)
{
    atomic_store(&agent->missed, false);
    atomic_store(&agent->control->rung, 0);
    atomic_store(&agent->control->awake, 0);
    if (!td__io_fence_before_sleep(agent) || td__io_has_news(agent)) {
        atomic_store(&agent->control->awake, 1);
        return false;
    }
    watch_sockets(agent, true);
    atomic_store(&agent->lead, 0);
    return !atomic_load(&agent->missed) || !take_lead(agent, false, false);
}

/* Whether another process that is awake runs on this processor: it needs it, and a spin would only delay it. The kernel
 * leaves two workers on one processor for seconds where a third process keeps another one busy; and it likes to run a
 * woken thread at once, on the processor of the one that wakes it, which has not written the message yet. */
static bool shares_processor(struct td__rpc_agent *agent)
{
    int own = sched_getcpu() + 1;
    if (agent->rung_by == (uint32_t)own)
        return true;
    if (atomic_load_explicit(&agent->control->processor, memory_order_relaxed) != own)
        atomic_store_explicit(&agent->control->processor, own, memory_order_relaxed);
    for (int i = 0; i < agent->link_count && !agent->oversubscribed; i++) {
        struct td__rpc_control *control = agent->links[i]->control;
        if (control && atomic_load_explicit(&control->processor, memory_order_relaxed) == own &&
            atomic_load_explicit(&control->awake, memory_order_relaxed))
            return true;
    }
    /* Of a worker behind a socket this is not known. A poll is a system call there, a yield costs little beside it. */
    return agent->oversubscribed ||
           atomic_load_explicit(&agent->socket_links, memory_order_relaxed);
}

/* After a poll without success: false if the thread should sleep. The clock costs more than a poll. `rang`: see
 * td__io_rang. */
static bool poll_again(struct td__rpc_agent *agent, struct td__backoff *backoff, unsigned *polls,
                       bool rang)
{
    if (++*polls % POLLS == 0 && !td__backoff(backoff, shares_processor(agent) || rang))
        return false;
    td__pause_processor();
    return true;
}

/* ---- Threads --------------------------------------------------------------------------------- */

static void *serve_all(void *arg);

/* Keeps a thread free for events, while others run functions or wait in them. With run_lock held. */
static void ensure_thread(struct td__rpc_agent *agent)
{
    int count = agent->thread_count;
    if (atomic_load(&agent->sleeping) > 0 || atomic_load(&agent->stopping) ||
        count > agent->threads + agent->waiting + 1)
        return;
    if (count % THREADS_AT_ONCE == 0) {
        pthread_t *all = realloc(agent->all_threads,
                                 sizeof *all * (size_t)(count + THREADS_AT_ONCE));
        if (!all)
            return; /* the others go on */
        agent->all_threads = all;
    }
    if (!td__thread_start(&agent->all_threads[count], "td-rpc", serve_all, agent))
        agent->thread_count++;
}

/* A task waits for other workers most of the time. It takes no thread from the functions. */
static int *count_of(struct td__rpc_agent *agent, const struct td_rpc_call *call)
{
    return call->task ? &agent->waiting : &agent->running;
}

/* A call that has run, and its thread's count. */
struct ended {
    int *count;               /* NULL: none */
    struct td_rpc_call *call; /* to be freed; or NULL */
};

/* With run_lock held; `queued` changes only then. */
static void count_queued(struct td__rpc_agent *agent, int change)
{
    int queued = atomic_load_explicit(&agent->queued, memory_order_relaxed);
    atomic_store_explicit(&agent->queued, queued + change, memory_order_release);
}

/* Ends a call that has run, and takes the next one, unless it is to `stop`. */
static struct td_rpc_call *next_call(struct td__rpc_agent *agent, struct ended *ended, bool stop)
{
    if (!ended->count && !atomic_load_explicit(&agent->queued, memory_order_relaxed))
        return NULL;
    if (ended->call)
        td__function_keep(ended->call->entry);
    pthread_mutex_lock(&agent->run_lock);
    if (ended->count)
        *ended->count -= 1;
    bool kept = !ended->call || td__serve_keep(ended->call);
    struct td_rpc_call *call = stop ? NULL : agent->queue;
    if (call && !call->task && agent->running >= agent->threads)
        call = NULL;
    if (call) {
        agent->queue = call->next;
        if (!agent->queue)
            agent->queue_last = &agent->queue;
        count_queued(agent, -1);
        call->more = agent->queue && !agent->queue->task && agent->queue->link == call->link;
        *count_of(agent, call) += 1;
        ensure_thread(agent);
    }
    pthread_mutex_unlock(&agent->run_lock);
    if (!kept)
        free(ended->call);
    *ended = (struct ended){0};
    return call;
}

static struct ended run(struct td__rpc_agent *agent, struct td_rpc_call *call, int64_t now)
{
    struct ended ended = {.count = count_of(agent, call)};
    td__io_must_not_wait = false;
    if (call->task)
        call->task(call);
    else if (td__serve_run(call, now))
        ended.call = call;
    td__io_must_not_wait = true;
    return ended;
}

static void run_queue(struct td__rpc_agent *agent)
{
    struct td_rpc_call *call;
    struct ended ended = {0};
    while ((call = next_call(agent, &ended, false))) {
        if (atomic_load(&agent->queued))
            start_ticking(agent); /* another thread runs the next one, if this one takes long */
        call->more = false;
        ended = run(agent, call, td__now_ns());
    }
}

/* Runs the queued calls on the thread that leads, and publishes the answers of brief ones together. False if another
 * thread leads now. */
static bool run_and_lead(struct td__rpc_agent *agent, bool *found)
{
    uint64_t own = this_thread(), runs = own | RUNS;
    struct ended ended = {0};
    struct td_rpc_call *call = next_call(agent, &ended, false);
    if (!call)
        return true;
    *found = true;
    int64_t now = td__now_ns(), published = now;
    atomic_store_explicit(&agent->running_since, now, memory_order_relaxed);
    atomic_store(&agent->lead, runs);
    do {
        if (atomic_load_explicit(&agent->control->awake, memory_order_relaxed) ||
            atomic_load_explicit(&agent->queued, memory_order_relaxed)) {
            announce(agent);
            start_ticking(agent);
        }
        ended = run(agent, call, now);
        int64_t end = td__now_ns();
        if (ended.call && ended.call->entry)
            td__function_took(ended.call->entry, end - now);
        if (end - published > HOLD_NS) {
            td__link_publish();
            published = end;
        }
        now = end;
        atomic_store_explicit(&agent->running_since, now, memory_order_relaxed);
        call = next_call(agent, &ended, atomic_load(&agent->lead) != runs);
    } while (call);
    td__link_publish();
    bool leads = atomic_compare_exchange_strong(&agent->lead, &runs, own);
    if (leads)
        atomic_fetch_add_explicit(&agent->leads, 1, memory_order_relaxed);
    return leads;
}

/* For a thread that waits for a future, and polls: it is the one that needs the next answer. */
static void yield_lead(struct td__rpc_agent *agent)
{
    start_ticking(agent);
    watch_sockets(agent, true);
    atomic_store(&agent->lead, 0);
}

/* Leads until there has been nothing to do for a while. */
static void lead(struct td__rpc_agent *agent)
{
    struct td__backoff backoff = {0};
    unsigned polls = 0;
    do {
        for (;;) {
            bool found = td__io_poll_links(agent);
            if (!run_and_lead(agent, &found)) {
                run_queue(agent);
                return;
            }
            announce(agent);
            if (found) {
                backoff.begun = 0;
                agent->rung_by = 0;
            } else if (atomic_load_explicit(&agent->pollers, memory_order_relaxed)) {
                yield_lead(agent);
                return;
            } else if (atomic_load(&agent->stopping) || !poll_again(agent, &backoff, &polls, false))
                break;
        }
    } while (!go_to_sleep(agent));
}

/* Whether a thread of the agent is to take over: no thread has led since the last tick, or the one that leads runs a
 * function for long. */
static bool tick(struct td__rpc_agent *agent)
{
    uint64_t held = atomic_load(&agent->lead);
    unsigned leads = atomic_load(&agent->leads);
    bool idle = atomic_exchange(&agent->seen_leads, leads) == leads;
    atomic_store(&agent->ticking, false);
    if (held && (!(held & RUNS) || td__now_ns() - atomic_load(&agent->running_since) < LONG_NS)) {
        start_ticking(agent);
        return false;
    }
    bool awake = atomic_load(&agent->control->awake);
    if (!held && !idle && awake)
        start_ticking(agent);
    return held || (idle && awake);
}

static bool take_event(struct td__rpc_agent *agent, const struct epoll_event *event)
{
    uint64_t count, id = event->data.u64;
    if (id == EVENT_ID)
        return false; /* not read: it is edge-triggered, so every write is an event, and its count never overflows */
    if (id == TIMER_ID || id == DEADLINE_ID) {
        int fd = id == TIMER_ID ? agent->timer : agent->deadline_timer;
        bool there = read(fd, &count, sizeof count) > 0;
        if (id == DEADLINE_ID)
            td__calls_expire(agent);
        return there && id == TIMER_ID;
    }
    if (id == SOCKETS_ID)
        return false;
    pthread_mutex_lock(&agent->lock);
    struct td__rpc_link *link = agent->by_id[id];
    if (link && event->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        atomic_store(&link->hup, true);
    pthread_mutex_unlock(&agent->lock);
    return false;
}

static void *serve_all(void *arg)
{
    struct td__rpc_agent *agent = arg;
    td__io_must_not_wait = true;
    while (!atomic_load(&agent->stopping)) {
        struct epoll_event events[EVENTS];
        bool ticked = false, led = false;
        atomic_fetch_add(&agent->sleeping, 1);
        int count = epoll_wait(agent->epoll, events, EVENTS, -1);
        atomic_fetch_sub(&agent->sleeping, 1);
        for (int i = 0; i < count; i++)
            ticked |= take_event(agent, &events[i]);
        bool take_over = ticked && tick(agent);
        if (!ticked || take_over || count > 1) {
            /* The sockets of links to other hosts wake no thread while one leads: the timer has to tick. */
            bool woken = !ticked && !atomic_load(&agent->socket_links);
            led = take_lead(agent, take_over, woken);
            if (!led) {
                atomic_store(&agent->missed, true);
                led = take_lead(agent, take_over, woken);
            }
            if (!led && !atomic_load(&agent->control->awake))
                start_ticking(agent); /* see above */
        }
        if (led)
            lead(agent);
        else
            run_queue(agent);
    }
    td__io_wake(agent); /* the next thread ends, too */
    td__function_end_thread();
    return NULL;
}

/* ---- For the others -------------------------------------------------------------------------- */

void td__io_wake(struct td__rpc_agent *agent)
{
    uint64_t one = 1;
    if (write(agent->event, &one, sizeof one) < 0)
        return; /* it is readable already */
}

void td__io_queue(struct td__rpc_agent *agent, struct td_rpc_call *call)
{
    struct td_rpc_call **at = call->task ? &agent->queue : agent->queue_last;
    call->next = *at;
    if (at == agent->queue_last)
        agent->queue_last = &call->next;
    *at = call;
    count_queued(agent, 1);
}

void td__io_run(struct td__rpc_agent *agent, struct td_rpc_call *call)
{
    pthread_mutex_lock(&agent->run_lock);
    td__io_queue(agent, call);
    pthread_mutex_unlock(&agent->run_lock);
}

bool td__io_begin_wait(struct td__rpc_agent *agent)
{
    if (!td__current_call || td__current_call->agent != agent)
        return false;
    td__link_publish();
    pthread_mutex_lock(&agent->run_lock);
    agent->running--;
    agent->waiting++;
    ensure_thread(agent);
    pthread_mutex_unlock(&agent->run_lock);
    if (atomic_load(&agent->queued))
        td__io_wake(agent);
    return true;
}

void td__io_end_wait(struct td__rpc_agent *agent)
{
    pthread_mutex_lock(&agent->run_lock);
    agent->running++;
    agent->waiting--;
    pthread_mutex_unlock(&agent->run_lock);
}

/* Leads until the future is complete, the deadline, or there has been nothing to do for a while. */
static void lead_for(struct td__rpc_agent *agent, const td_future *future, td__deadline deadline,
                     struct td__backoff *backoff, bool ran, bool rang)
{
    unsigned polls = 0;
    while (!td__future_is_complete(future)) {
        if (td__io_poll_links(agent)) {
            backoff->begun = 0;
            if (atomic_load(&agent->queued))
                td__io_wake(agent);
            if (!td__future_is_complete(future) && td__deadline_passed(deadline))
                break;
        } else if (!poll_again(agent, backoff, &polls, rang)) {
            break;
        }
    }
    bool complete = td__future_is_complete(future);
    if (ran && complete) {
        atomic_store_explicit(&agent->running_since, td__now_ns(), memory_order_relaxed);
        atomic_store(&agent->lead, this_thread() | RUNS);
        start_ticking(agent); /* the last tick may have found the thread reading, and have ended */
        return;
    }
    yield_lead(agent);
    if (!complete)
        td__io_wake(agent); /* this thread is going to sleep */
}

void td__io_poll(struct td__rpc_agent *agent, const td_future *future, td__deadline deadline)
{
    bool rang = td__io_rang && !agent->oversubscribed;
    struct td__backoff backoff = {.yield_ns = rang ? WAKE_NS : WAIT_NS};
    td__io_rang = false;
    if (rang) { /* yield_lead() needs the timer; now it takes no time, since the callee is being woken */
        announce(agent); /* before that: the callee need not wake another thread of this agent */
        start_ticking(agent);
    }
    atomic_fetch_add_explicit(&agent->pollers, 1, memory_order_relaxed);
    while (!td__future_is_complete(future)) {
        bool ran = atomic_load(&agent->lead) == (this_thread() | RUNS);
        if (take_lead(agent, true, false)) {
            lead_for(agent, future, deadline, &backoff, ran, rang);
            break;
        }
        if (!td__backoff(&backoff, agent->oversubscribed || agent->pinned))
            break;
    }
    atomic_fetch_sub_explicit(&agent->pollers, 1, memory_order_relaxed);
}

/* ---- Opening and closing --------------------------------------------------------------------- */

static bool watch(int epoll, int fd, uint32_t events, uint64_t id)
{
    struct epoll_event event = {.events = events, .data.u64 = id};
    return !epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

td_status td__io_open(struct td__rpc_agent *agent)
{
    agent->pinned = td__processors() == 1;
    agent->queue_last = &agent->queue;
    agent->control_fd = memfd_create("tandem-rpc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    agent->epoll = epoll_create1(EPOLL_CLOEXEC);
    agent->sockets = epoll_create1(EPOLL_CLOEXEC);
    agent->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    agent->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    agent->deadline_timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    bool opened = agent->control_fd >= 0 && agent->epoll >= 0 && agent->sockets >= 0 &&
                  agent->event >= 0 && agent->timer >= 0 && agent->deadline_timer >= 0 &&
                  !ftruncate(agent->control_fd, (off_t)td__page_size()) &&
                  watch(agent->epoll, agent->event, EPOLLIN | EPOLLET, EVENT_ID) &&
                  watch(agent->epoll, agent->timer, EPOLLIN | EPOLLET, TIMER_ID) &&
                  watch(agent->epoll, agent->deadline_timer, EPOLLIN | EPOLLET, DEADLINE_ID) &&
                  watch(agent->epoll, agent->sockets, EPOLLIN, SOCKETS_ID);
    void *page = opened ? mmap(NULL, td__page_size(), PROT_READ | PROT_WRITE, MAP_SHARED,
                               agent->control_fd, 0)
                        : MAP_FAILED;
    if (page == MAP_FAILED)
        return td_fail(TD_ERR_SYSTEM, "td_init_rpc: %s", td__errno_text(errno));
    agent->control = page;
    td__io_register_barriers(agent);
    pthread_mutex_lock(&agent->run_lock);
    ensure_thread(agent);
    bool started = agent->thread_count > 0;
    pthread_mutex_unlock(&agent->run_lock);
    return started ? TD_OK : td_fail(TD_ERR_SYSTEM, "td_init_rpc: no thread could be started");
}

/* With run_lock held; false if there is no thread `index`. */
static bool thread_at(struct td__rpc_agent *agent, int index, pthread_t *thread)
{
    bool there = index < agent->thread_count;
    if (there)
        *thread = agent->all_threads[index];
    return there;
}

void td__io_stop(struct td__rpc_agent *agent)
{
    pthread_t thread;
    pthread_mutex_lock(&agent->run_lock);
    atomic_store(&agent->stopping, true);
    pthread_mutex_unlock(&agent->run_lock);
    td__handshakes_cancel(agent);
    pthread_mutex_lock(&agent->run_lock);
    td__io_wake(agent);
    for (int i = 0; thread_at(agent, i, &thread); i++) {
        pthread_mutex_unlock(&agent->run_lock);
        pthread_join(thread, NULL);
        pthread_mutex_lock(&agent->run_lock);
    }
    agent->thread_count = 0;
    free(agent->all_threads);
    agent->all_threads = NULL;
    struct td_rpc_call *queue = agent->queue, *next;
    agent->queue = NULL;
    pthread_mutex_unlock(&agent->run_lock);
    for (; queue; queue = next) {
        next = queue->next;
        td__serve_drop(queue);
    }
}

void td__io_close(struct td__rpc_agent *agent)
{
    td__io_add_links(agent);
    for (int i = 0; i < agent->link_count; i++)
        td__link_release(agent->links[i]);
    for (struct td_rpc_call *call = agent->spare, *next; call; call = next) {
        next = call->next;
        free(call);
    }
    free(agent->links);
    free(agent->by_id);
    if (agent->control)
        munmap(agent->control, td__page_size());
    int fds[] = {agent->control_fd, agent->epoll, agent->sockets,
                 agent->event,      agent->timer, agent->deadline_timer};
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}
