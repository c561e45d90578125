/* The agent: the worker of this process, its links to other workers, and the threads that serve calls.
 *
 *     rpc_agent.c   initialization and shutdown
 *     membership.c  joining and leaving the world of workers
 *     workers.c     the other workers: names, ranks, connecting
 *     link.c        a link to one of them: a socket, and rings in shared memory on one host
 *     link_resume.c a link whose socket has ended goes on over another one
 *     io.c          which thread reads the links, and which runs functions
 *     agent_poll.c  reading and writing all links
 *     agent_wake.c  how an agent that sleeps is woken
 *     rpc_calls.c   calls that this worker has made and that are not complete
 *     serve.c       calls that other workers have made to this one
 *     lease.c       tensors that are lent and borrowed
 *     parallel_copy.c  large tensors by value
 *     rpc_devices.c tensors of accelerators
 *     rref.c        remote references
 *
 * Locks, in this order: lock, calls_lock, run_lock, a link's write_lock, a future's lock. */
#ifndef TD_RPC_RPC_AGENT_H
#define TD_RPC_RPC_AGENT_H

#include "base/map.h"
#include "base/thread.h"
#include "base/wait.h"
#include "peer/endpoint.h"
#include "rpc/byte_ring.h"
#include "rpc/message.h"
#include "rpc/rpc_registry.h"

#include <stdatomic.h>

/* ---- Links ----------------------------------------------------------------------------------- */

/** A page that the workers of one host see: whether the agent reads its rings, or is to be woken. The first line is
 *  read for every message, and seldom written. */
struct td__rpc_control {
    _Atomic uint32_t awake; /* a thread reads the rings */
    _Alignas(64) _Atomic uint32_t
        rung;              /* the agent is being woken: by a thread on this processor, plus one */
    _Atomic int processor; /* of the thread that reads, plus one; 0: not known */
    _Atomic uint32_t barriers; /* it sleeps after a barrier on all processors; see agent_wake.c */
};

struct td__rpc_link {
    struct td__rpc_link *next; /* in agent->new_links */
    struct td__rpc_agent *agent;
    int rank;   /* of the worker at the other end */
    int fd;     /* carries the messages, unless there are rings */
    int event;  /* of the other worker, if there are rings: wakes its agent */
    bool local; /* there are rings */
    bool opener;
    uint64_t number; /* its name on both workers; the opener has chosen it */
    struct td__byte_ring_pair rings;
    struct td__rpc_control *control; /* of the other worker */
    atomic_int users;

    /* Writing. */
    pthread_mutex_t write_lock;
    struct td__message *first, **last;           /* that do not fit yet */
    struct td__message *unacked, **last_unacked; /* of a socket: not known to be received */
    uint64_t end;                                /* the bytes of all messages until now */
    atomic_bool blocked;                         /* there are messages that do not fit */
    atomic_bool held_back;                       /* the last bytes in the ring are not published */
    bool unready;                                /* its handshake is not complete … */
    bool stopped;                                /* … or its socket has ended: all wait … */
    bool closed;                                 /* … or the link: nothing is written any more */
    bool last_sent;                              /* nothing after the messages that wait */
    bool forwards; /* it is closed, and another one carries its messages */

    /* Reading: only the thread that leads. */
    uint8_t header[TD__HEADER_SIZE];
    size_t header_have;
    struct td__incoming *incoming;
    struct td__incoming *arrived, **last_arrived; /* requests that are not queued yet */
    uint8_t *buffer;                              /* of a socket */
    int64_t read_at;                              /* when the last td__link_read() began */
    uint64_t received;                            /* bytes of a socket … */
    uint64_t told;                                /* … of which the other worker knows */
    int untold;                                   /* messages after these */
    bool broken;                                  /* the socket has ended */
    bool ended;
    bool leaving; /* the other worker has sent its last message */

    atomic_bool
        suspended; /* it waits for another socket: not read, by the thread that leads or any other */
    atomic_bool dead; /* there will be none, or its worker has gone: it ends */
    pthread_mutex_t resume_lock;
    uint32_t attempts; /* to resume it, under resume_lock */

    uint64_t id;     /* of its events */
    atomic_bool hup; /* its socket has ended */
};

/** Sends a message, which it owns, also on failure. After TD__MESSAGE_LEAVE, none is sent. */
td_status td__link_send(struct td__rpc_link *link, struct td__message *message);

/** Publishes what this thread has held back: messages with `more`, after which none without it was sent. */
void td__link_publish(void);

/** The link to a worker, if this thread holds back messages to it; NULL: it does not. */
struct td__rpc_link *td__link_held(int rank);

/** Writes messages that did not fit before, and publishes what is held back; on any thread. True if it did. */
bool td__link_flush(struct td__rpc_link *link);

/** Whether there is room in the ring of a local link for a message that did not fit before. */
static inline bool td__link_has_room(const struct td__rpc_link *link)
{
    return atomic_load(&link->blocked) && td__byte_ring_has_room(&link->rings.out);
}

/** Reads what is there, and passes complete messages to td__agent_receive(). True if there was something. On the thread
 *  that leads. */
bool td__link_read(struct td__rpc_link *link);

/* A handshake begins with HELLO: what it is for, the number of the link, and the bytes that were received before. */
enum { TD__LINK_HELLO = 0x63707274, TD__LINK_HELLO_SIZE = 24 };
enum td__hello { TD__HELLO_SOCKET, TD__HELLO_RINGS, TD__HELLO_RESUME };
void td__hello_write(uint8_t hello[TD__LINK_HELLO_SIZE], enum td__hello kind, uint64_t number,
                     uint32_t attempt, uint64_t received);

/** A handshake that is under way, so that the end of the agent cancels it. */
struct td__handshake {
    struct td__handshake *next;
    int fd;
};
void td__handshake_begin(struct td__rpc_agent *agent, struct td__handshake *handshake, int fd);
void td__handshake_end(struct td__rpc_agent *agent, struct td__handshake *handshake);
void td__handshakes_cancel(struct td__rpc_agent *agent);

/** The two sides of the handshake on a new connection `fd`, which they own. */
td_status td__link_open(struct td__rpc_agent *agent, int rank, int fd, td__deadline deadline);
td_status td__link_accept(struct td__rpc_agent *agent, int rank, int fd, td__deadline deadline);

/** The other worker has received the first `bytes` bytes. */
void td__link_acked(struct td__rpc_link *link, uint64_t bytes);

/** Opens another connection for a suspended link, or has its opener do so, which this waits for a moment. TD_ERR_STATE if
 *  the other worker does not know the link. */
td_status td__link_resume(struct td__rpc_link *link, td__deadline deadline);

/** Closes a link that has ended, and is not its worker's any more. True if the other worker has received nothing over it:
 *  its messages are in *unsent, and td__link_send() passes later ones to td__agent_send(). */
bool td__link_close(struct td__rpc_link *link, struct td__message **unsent);

/** The other worker wants to do that: the handshake on `fd`, which it owns, after its first bytes. */
td_status td__link_accept_resume(struct td__rpc_agent *agent, int rank, int fd, uint64_t number,
                                 uint32_t attempt, uint64_t received, td__deadline deadline);

/** The events of its socket are watched; after it has got another one, again. */
void td__link_watch(struct td__rpc_link *link);

/** NULL is fine. */
struct td__rpc_link *td__link_retain(struct td__rpc_link *link);
void td__link_release(struct td__rpc_link *link);

/* ---- Workers --------------------------------------------------------------------------------- */

struct td__rpc_worker {
    /* Control messages (control.c), under the agent's lock. */
    uint64_t sent;     /* the number of the last one to this worker */
    uint64_t received; /* all up to this one have come from it … */
    uint64_t *
        early; /* … and of the next `early_capacity` those whose bit is set, at their number modulo it */
    uint64_t early_capacity;

    bool forks_ended; /* it has gone, and gets no forks any more; under the agent's rref_lock */

    int rank;
    atomic_bool resolved; /* its name is known, and its endpoint */
    struct td__map_node by_name;
    char name[TD_RPC_MAX_NAME + 1];
    char label[16];            /* for texts, until it is resolved: "rank 3" */
    struct td__rpc_link *link; /* NULL: none is open; changes under calls_lock, too */
    atomic_uint ended;         /* how many links have ended before */
    bool connecting;
    struct td__message *first, **last; /* for the link that is being opened */
    bool gone;                         /* it has left or ended; changes under calls_lock, too */
    char why[256];                     /* how */
};

/* ---- Calls ----------------------------------------------------------------------------------- */

/** A call that this worker has made. Its id is the index of its entry and the entry's generation. */
struct td__pending {
    td_future *future; /* NULL: not in use */
    uint32_t generation;
    uint32_t next_free;
    int to;
    unsigned link; /* worker->ended when it began */
    td__deadline deadline;
    int64_t timeout_ms;
    char function[40]; /* for texts */
};

/** A call to this worker. */
struct td_rpc_call {
    struct td_rpc_call *next;            /* in the run queue */
    struct td_rpc_call *later, *earlier; /* in the list of all */
    struct td__rpc_agent *agent;
    struct td__incoming *incoming;
    struct td__function_entry *entry;
    void *self;
    int from, depth;
    uint64_t link; /* the id of the link by which it came, and 1; 0: of this worker itself */
    uint64_t id, context;
    bool copy;
    bool
        more; /* the next call of the queue came by the same link, and the same thread answers it */
    td__deadline deadline;
    atomic_bool cancelled;
    atomic_bool expired; /* its function knows that the deadline has passed */
    td_future *later_result;
    bool answers_later;                     /* under run_lock */
    void (*task)(struct td_rpc_call *task); /* instead of a call: work of the agent's own */
    int fd;                                 /* of a task … */
    unsigned links;                         /* … and worker->ended … */
    struct td__rpc_link *suspended;         /* … and the link, with a reference */
    void (*continuation)(void *arg);        /* a task that is run in any case, with `self` */
};

struct td__rpc_agent {
    char name[TD_RPC_MAX_NAME + 1];
    bool dynamic;        /* workers come and go */
    int rank, limit;     /* ranks are below it */
    int64_t epoch;       /* how often this rank has become a worker; 0 if it is dynamic */
    unsigned generation; /* of forks */
    int64_t timeout_ms;
    int threads;
    size_t max_message;
    td_world world;
    td_store *store; /* the agent's part of it */
    struct td__endpoint *endpoint;
    struct td__endpoint_waiter waiter;

    pthread_mutex_t lock; /* workers, and what follows */
    struct td__control_active *controls;
    struct td__handshake *handshakes;
    struct td__rpc_worker *_Atomic *workers; /* by rank; NULL: not known. They stay until the end */
    atomic_int known;                        /* those that are known are below it */
    struct td__map names;

    /* Reading (io.c). */
    _Atomic uint64_t lead; /* the thread that reads the links; 0: none */
    atomic_uint leads;     /* how often it has changed */
    struct td__rpc_control *control;
    int control_fd;
    int epoll;   /* the events that a thread sleeps for: `event`, `timer`, local links, and … */
    int sockets; /* … the links to other hosts */
    int event, timer, deadline_timer;
    atomic_int socket_links;
    _Atomic(struct td__rpc_link *) new_links;
    struct td__rpc_link **links; /* that are read; only the thread that leads uses the list */
    int link_count, link_capacity;
    struct td__rpc_link **by_id; /* under `lock` */
    uint64_t id_count, id_capacity;
    atomic_int near; /* workers of this host */
    bool
        pinned; /* this process has one processor: `control` tells which workers share it, their number does not */
    atomic_bool oversubscribed;
    bool ordered;       /* other workers' barriers order what this process writes */
    uint32_t rung_by;   /* `rung` of the message that it was woken for; of the thread that leads */
    atomic_bool missed; /* a thread that was woken could not take the lead */
    atomic_bool presence_changed;
    atomic_int pollers;            /* threads that wait for a future, and poll */
    _Atomic int64_t running_since; /* since when the leading thread has run one function */
    atomic_uint seen_leads;        /* `leads` at the last tick */
    atomic_bool ticking;           /* `timer` is set for the next tick */

    /* Threads and calls to this worker (io.c, serve.c). */
    pthread_mutex_t run_lock;
    struct td_rpc_call *queue, **queue_last;
    struct td_rpc_call *active;
    struct td_rpc_call *spare; /* memory for the next ones */
    int spare_count;
    atomic_int queued;
    int running, waiting, thread_count; /* threads that run functions, that wait in one, and all */
    atomic_int sleeping;
    int continuations; /* that wait or run, under run_lock */
    atomic_bool stopping;
    atomic_bool aborting;          /* functions do not wait for futures any more … */
    struct td__future_wait *waits; /* … as these do; under run_lock */
    pthread_t *all_threads;        /* thread_count of them */

    /* Calls of this worker (rpc_calls.c). */
    pthread_mutex_t calls_lock;
    struct td__pending **pending; /* in chunks */
    uint32_t pending_capacity, first_free;
    int pending_count;
    td__deadline next_deadline;
    bool closed;           /* no new calls */
    atomic_bool leaving;   /* the other workers know it, or are about to */
    atomic_bool finishing; /* td_rpc_shutdown() waits for the other workers */
    atomic_ullong begun;   /* counts the calls of this worker, under calls_lock … */
    atomic_ullong served;  /* … and those to it and continuations, under run_lock */

    /* References (rref.c). */
    uint64_t serial;           /* of the agents of this process */
    pthread_mutex_t rref_lock; /* for what follows, and the entries */
    struct td__map rref_entries;
    struct td__map rref_children; /* references that are kept for their forks */
    atomic_ullong last_id;        /* of references and forks that this worker has made */

    pthread_mutex_t context_lock; /* for `contexts` */
    struct td__map contexts;      /* of distributed autograd (grad_context.c) */

    pthread_mutex_t lease_lock;
    struct td__map leases; /* tensors that are lent */
    uint64_t last_lease;
    bool orderly; /* all workers have left in order */

    struct td__device_map *device_maps;
    int device_map_count;
    pthread_mutex_t device_lock; /* for `arrivals`, by the slots of devices */
    td_stream *arrivals[TD__ACCELERATORS_MOST];
};

/** Adds to a counter that only changes under a lock, and is read without it. */
static inline void td__count(atomic_ullong *counter, unsigned more)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + more,
                          memory_order_relaxed);
}

/** The agent of this process, which stays until td__agent_leave(); NULL, with the last error set, if there is none. */
struct td__rpc_agent *td__agent_enter(const char *call);

/** The same without an error. */
struct td__rpc_agent *td__agent_hold(void);
void td__agent_leave(struct td__rpc_agent *agent);

/** Sends a message to a worker, which it owns; opens a link if there is none. Failures of a request come to its
 *  future. */
td_status td__agent_send(struct td__rpc_agent *agent, int rank, struct td__message *message);

/** Frees a message that was not sent, and fails its call if it is a request. */
void td__agent_fail_unsent(struct td__rpc_agent *agent, int rank, struct td__message *message,
                           td_status status, const char *text);

/** A message has arrived; owns it. On the thread that leads. */
void td__agent_receive(struct td__rpc_link *link, struct td__incoming *incoming);

/** A link has ended. On the thread that leads. */
void td__agent_link_ended(struct td__rpc_link *link);

/* ---- membership.c ----------------------------------------------------------------------------- */

/** Publishes this worker, which gets a rank if the world is dynamic, and waits for all others if it is not. `given` is
 *  the store of which the agent has a part. */
td_status td__membership_join(struct td__rpc_agent *agent, td_store *given, const char *host,
                              bool shared);

/** Waits until no worker has work left, in a dynamic world this one; `await_idle` waits until this one has none. */
td_status td__membership_leave(struct td__rpc_agent *agent,
                               bool (*await_idle)(struct td__rpc_agent *agent,
                                                  td__deadline deadline),
                               td__deadline deadline);

/** This worker is not found in the store any more; also after it could not join. */
void td__membership_withdraw(struct td__rpc_agent *agent);

/** In a dynamic world: looks up the rank of a name, -1 if no worker has it; and the worker of a rank, which is resolved
 *  then: TD_ERR_PEER if it has left. */
td_status td__membership_find_name(struct td__rpc_agent *agent, const char *name, int *rank);
td_status td__membership_introduce(struct td__rpc_agent *agent, int rank);

/* ---- workers.c ------------------------------------------------------------------------------- */

/** The worker of a rank; NULL: not known. */
static inline struct td__rpc_worker *td__worker(const struct td__rpc_agent *agent, int rank)
{
    return atomic_load_explicit(&agent->workers[rank], memory_order_acquire);
}

/** The first known worker from *rank on, and its rank; NULL if there is none. */
static inline struct td__rpc_worker *td__worker_from(const struct td__rpc_agent *agent, int *rank)
{
    int known = agent->workers ? atomic_load_explicit(&agent->known, memory_order_acquire) : 0;
    struct td__rpc_worker *worker = NULL;
    while (*rank < known && !(worker = td__worker(agent, *rank)))
        ++*rank;
    return worker;
}

#define TD__WORKER_FOREACH(worker, r, agent)                                                       \
    for (int r = 0; (worker = td__worker_from(agent, &r)) != NULL; r++)

/** The same, and it is known from now on. NULL: no memory. */
struct td__rpc_worker *td__worker_get(struct td__rpc_agent *agent, int rank);

enum { TD__LINKS = 1 }; /* the group of the agent's links at the endpoint */

/** Makes the table of workers, and the endpoint; and starts to watch the next worker, and those of links. */
td_status td__workers_open(struct td__rpc_agent *agent, const char *host, bool shared);
td_status td__workers_watch(struct td__rpc_agent *agent);

/** Serves calls from now on, whose functions may use the agent of the process. */
void td__workers_listen(struct td__rpc_agent *agent);

/** After this, no links arrive, and td__workers_check() is not asked for. */
void td__workers_close(struct td__rpc_agent *agent);
void td__workers_free(struct td__rpc_agent *agent);

/** Resolves a worker by what it has published: its name, and the card of its endpoint. TD_ERR_MISMATCH if another worker
 *  of a fixed world has the name. */
td_status td__worker_introduce(struct td__rpc_agent *agent, int rank, const td_bytes *published);

/** Resolves a worker, which may wait for the store. TD_ERR_PEER if it has left. */
td_status td__worker_resolve(struct td__rpc_agent *agent, int rank);

/** The rank of a name; -1, with the last error set, if there is none. It may wait for the store. */
int td__worker_rank(struct td__rpc_agent *agent, const char *name);

/** Its name; "rank 3" if it is not resolved. */
const char *td__worker_name_of(struct td__rpc_agent *agent, int rank);

/** Whether it is known to be on this host. */
bool td__worker_is_near(struct td__rpc_agent *agent, int rank);

/** Connects to a worker, for a handshake. */
td_status td__worker_connect(struct td__rpc_agent *agent, int rank, td__deadline deadline, int *fd);

/** Opens a link to a worker, on another thread; messages wait for it. */
void td__workers_connect(struct td__rpc_agent *agent, int rank);

/** Tells the other workers that nothing comes any more. */
void td__workers_say_goodbye(struct td__rpc_agent *agent);

/** The socket of a link has ended: looks for another one, on another thread. False if that cannot be done. On the thread
 *  that leads. */
bool td__workers_resume(struct td__rpc_link *link);

/** A new link is ready: it is read from now on, and messages that wait for one are sent. */
void td__workers_add_link(struct td__rpc_link *link);

/** The failure detector has news. */
void td__workers_check(struct td__rpc_agent *agent);

/* ---- io.c ------------------------------------------------------------------------------------ */

td_status td__io_open(struct td__rpc_agent *agent);

/** Ends all threads. */
void td__io_stop(struct td__rpc_agent *agent);
void td__io_close(struct td__rpc_agent *agent);

/** Before and after the calling thread waits for a future. If it runs a function, another thread may run one meanwhile,
 *  and `begin` returns true. */
bool td__io_begin_wait(struct td__rpc_agent *agent);
void td__io_end_wait(struct td__rpc_agent *agent);

/** Reads the links until the future is complete, the deadline, or there has been nothing to read for a while. */
void td__io_poll(struct td__rpc_agent *agent, const td_future *future, td__deadline deadline);

/** Makes a thread look at what has changed. */
void td__io_wake(struct td__rpc_agent *agent);

/** Makes a thread call td__calls_expire() then. */
void td__io_set_deadline(struct td__rpc_agent *agent, td__deadline at);

/** Adds to the run queue, with run_lock held: calls in their order, tasks before them. */
void td__io_queue(struct td__rpc_agent *agent, struct td_rpc_call *call);
/** The same without the lock. */
void td__io_run(struct td__rpc_agent *agent, struct td_rpc_call *call);

/** Whether this thread must not wait for a future: it reads links, or handles events. */
extern _Thread_local bool td__io_must_not_wait;

/* ---- agent_poll.c, on the thread that leads -------------------------------------------------- */

/** Takes the links that were opened since; true if there are some. */
bool td__io_add_links(struct td__rpc_agent *agent);

/** Reads and writes all links. True if there was something. */
bool td__io_poll_links(struct td__rpc_agent *agent);

/** Whether td__io_poll_links() would find something. */
bool td__io_has_news(struct td__rpc_agent *agent);

/* ---- agent_wake.c ---------------------------------------------------------------------------- */

/** Wakes the agent at the other end of a local link, if it sleeps. */
void td__io_ring(struct td__rpc_link *link);

/** The same before a message is written that will be soon: it is made while the agent wakes up. The agent finds nothing,
 *  or polls for a while; td__io_ring() is called as well, when the message is there. */
void td__io_ring_early(struct td__rpc_link *link);

/** This thread has woken an agent since it last waited for a future. The kernel may put the woken thread on the processor
 *  of this one, where it runs as soon as this one yields: so the wait does so at once, and does not spin before. */
extern _Thread_local bool td__io_rang;

/** Once, when `control` is there. */
void td__io_register_barriers(struct td__rpc_agent *agent);

/** Between a write of `awake` and a read of the rings. False if it failed: the agent must not sleep. */
bool td__io_fence_before_sleep(const struct td__rpc_agent *agent);

/* ---- parallel_copy.c -------------------------------------------------------------------------- */

/** As memcpy(), for tensors: large ones with the help of idle threads of the agent `arg`. */
void td__rpc_copy(void *arg, void *to, const void *from, size_t bytes);

/** For tests: how many threads help; -1: as the processors allow. */
extern atomic_int td__rpc_copy_helpers;

/* ---- rpc_calls.c --------------------------------------------------------------------------------- */

/** A call that has begun. */
struct td__begun {
    uint64_t id;
    td_future *future; /* one reference */
    struct td__rpc_link
        *link; /* the open link to the worker, with a reference; NULL: there is none */
    bool busy; /* there are others */
};

/** Makes the entry of a call, and its future. A request that is sent over *begun->link after that has ended may be lost: the
 *  end fails the calls that began before. */
td_status td__call_begin(struct td__rpc_agent *agent, int to, const char *function,
                         int64_t timeout_ms, struct td__begun *begun);

/** Starts a call; NULL if it cannot be started. One reference. `call` is the name for texts. */
td_future *td__call_start(struct td__rpc_agent *agent, const char *call, int to,
                          const char *function, td_value *args, const td_rpc_call_options *options);

/** The answer of `from`, whose value it takes over, or the failure of a call; ignored if there is no such call (any
 *  more). */
void td__call_complete(struct td__rpc_agent *agent, int from, uint64_t id, td_value *value);
void td__call_fail(struct td__rpc_agent *agent, int from, uint64_t id, td_status status,
                   const char *text);

/** Fails all calls to a worker, or (-1) all; those to its first `links` + 1 links, or (UINT_MAX) to any. */
void td__calls_fail_all(struct td__rpc_agent *agent, int to, unsigned links, td_status status,
                        const char *text);

/** Fails calls whose time is over. */
void td__calls_expire(struct td__rpc_agent *agent);

/** The caller does not wait any more. */
void td__call_cancel(struct td__rpc_agent *agent, uint64_t id);

/* ---- serve.c --------------------------------------------------------------------------------- */

/** Queues a call to this worker, which came by `link` (NULL: from itself); owns the message. Calls that are read together
 *  are queued together: td__serve_arrived() does so, on the thread that leads, before a message of another kind is
 *  received and after each piece that is read. */
void td__serve(struct td__rpc_agent *agent, struct td__rpc_link *link,
               struct td__incoming *incoming);
void td__serve_arrived(struct td__rpc_link *link);

/** For tests: takes a request that has arrived, to pass it to td__serve_now() later; false: it is served at once. */
typedef bool (*td__serve_delay_fn)(struct td__rpc_agent *agent, struct td__incoming *incoming);
extern _Atomic(td__serve_delay_fn) td__serve_delay;
void td__serve_now(struct td__rpc_agent *agent, struct td__incoming *incoming);

/** Runs a call of the queue at the time `now`. True if it has ended: the caller passes it to td__serve_keep(), with
 *  run_lock held, and frees it if that returns false; the reference to its function is released. False: it answers later. */
bool td__serve_run(struct td_rpc_call *call, int64_t now);
bool td__serve_keep(struct td_rpc_call *call);

/** Frees one without an answer. */
void td__serve_drop(struct td_rpc_call *call);

/** Cancels the futures of calls that answer later, and waits until none is left. */
void td__serve_close(struct td__rpc_agent *agent);

/** Calls a function, or a method of an object, with arguments that are not bound yet, in the place of `call`. The result
 *  belongs to the scope; NULL on failure. */
td_value *td__serve_call(td_rpc_call *call, const char *function, td_value *args, td_value *kwargs);
td_value *td__serve_method(td_rpc_call *call, td_value *self, const char *method, td_value *args,
                           td_value *kwargs);

/** Remote modules (remote_module.c): registers their kind; runs a module for one; and one as a value, NULL for other
 *  modules, and back. */
td_status td__remote_module_register(void);
td_value *td__module_call(td_module *module, td_value *const *args);
td_value *td__remote_module_pack(const td_module *module);
td_status td__remote_module_unpack(td_module *module, const td_value *packed);

/** The same for the methods of modules; module_methods.c. */
td_value *td__module_method(td_rpc_call *call, td_module *module, const char *method,
                            td_value *args, td_value *kwargs);

void td__serve_cancel(struct td__rpc_agent *agent, int from, uint64_t id);

/** Cancels all calls of a worker that has gone, or (-1) of all workers; or those that came by a link that has ended. */
void td__serve_lost(struct td__rpc_agent *agent, int from);
void td__serve_link_ended(struct td__rpc_agent *agent, const struct td__rpc_link *link);

/** The call that this thread serves; NULL: none. */
extern _Thread_local struct td_rpc_call *td__current_call;

/* ---- future.c -------------------------------------------------------------------------------- */

/** A future of a call, with so many references. */
td_future *td__future_create(struct td__rpc_agent *agent, uint64_t id, td__deadline deadline,
                             int owners);
td_future *td__future_adopt(td_future *future);
bool td__future_is_complete(const td_future *future);
/** Completes it, unless it is complete: with a value (retained), or a failure. */
bool td__future_complete(td_future *future, td_value *value, td_status status, const char *text);
/** Completes it with a value, which it takes over. The caller has a reference to the future. */
void td__future_fulfil(td_future *future, td_value *value);
/** Completes it with a value, which may be a future itself; or, for NULL, with the last error. */
void td__future_resolve(td_future *future, td_value *value);
/** Waits for its value as td_future_wait() does, and releases it. NULL for NULL. */
td_value *td__future_take(td_future *future);
/** Waits until it is complete, and reads links meanwhile; false at the deadline. */
bool td__future_await(td_future *future, td__deadline deadline);
/** Ends the waits of functions that the agent serves, which fail with TD_ERR_ABORTED. */
void td__futures_abort_waits(struct td__rpc_agent *agent);
/** Its value, with one reference; or NULL and the last error set to its failure. */
td_value *td__future_value(const td_future *future);
/** Calls fn(future, arg) once it is complete. */
td_status td__future_on_complete(td_future *future, void (*fn)(td_future *future, void *arg),
                                 void *arg);

/** An id that no other reference, fork, context or message has; and the rank that has made it. */
uint64_t td__rref_new_id(struct td__rpc_agent *agent);
enum { TD__ID_RANK_SHIFT = 44 };
static inline int td__id_rank(uint64_t id)
{
    return (int)(id >> TD__ID_RANK_SHIFT);
}
_Static_assert(TD__MAX_RANKS <= 1 << (64 - TD__ID_RANK_SHIFT), "ranks fit into ids");

/* ---- rref.c ---------------------------------------------------------------------------------- */

/** Makes a fork of a reference for a message to the worker `to`; and takes it back, if the message is not sent. */
td_status td__rref_put(struct td__rpc_agent *agent, int to, td_rref *rref,
                       struct td__rref_record *record);
void td__rref_take_back(struct td__rpc_agent *agent, int to, const struct td__rref_record *record);

/** The reference of a message of `from`, with one reference; or it is not used. */
td_rref *td__rref_get(struct td__rpc_agent *agent, int from, const struct td__rref_record *record);
void td__rref_refuse(struct td__rpc_agent *agent, int from, const struct td__rref_record *record);

#endif
