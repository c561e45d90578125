/* Internal declarations of the files of this component. */
#ifndef TD_PEER_ENDPOINT_INTERNAL_H
#define TD_PEER_ENDPOINT_INTERNAL_H

#include "base/arena.h"
#include "base/auth.h"
#include "peer/endpoint.h"
#include "peer/domain.h"

#include <pthread.h>
#include <stdatomic.h>

enum { TD__REQUEST_SIZE = 32 };

/* TD__CUT_OFF, instead of TD__STATUS_UNKNOWN: no connection to the rank ever came about, though it has come this far. */
enum { TD__STATUS_UNREACHED = -2 };

/* TD__ENDED, too: it refuses this rank, which was excluded. */
enum { TD__STATUS_REFUSES = -3 };

/* Why a rank was excluded, and by which one; see exclusion.c. Not changed once its card has it. */
struct td__exclusion {
    int by;
    int pidfd; /* of its process, if that must be ended by this one; or -1 */
    _Atomic td__deadline
        kill_at; /* when the failure detector ends it; TD__NEVER: that is done, or not needed */
    char reason[];
};

/* A card, and the state of its rank. */
struct td__card {
    char host_id[TD__CARD_TEXT]; /* ranks with the same text share memory and unix sockets */
    char host_name[TD__CARD_TEXT];
    char address[TD__CARD_TEXT];
    char local[TD__CARD_TEXT];           /* "unix:@name" */
    uint8_t identity[TD__IDENTITY_SIZE]; /* of its listener */
    int port;
    uint32_t number; /* of its endpoint at that listener */
    int pid;
    uint64_t pid_space;           /* the namespace of the pid */
    bool shared;                  /* it takes part in shared memory */
    bool tls;                     /* it encrypts what goes over TCP */
    int host;                     /* its number */
    struct td__shared_view *view; /* of its arena; NULL: not mapped yet */

    atomic_bool reached;      /* a connection from here has reached it once */
    atomic_bool unresponsive; /* td__endpoint_is_unresponsive() */
    int pulse;                /* pulse.c: a connection that waits for an answer, or -1 … */
    int64_t silent_from;      /* … and since when there is none; 0: it is not silent */
    struct td__exclusion *_Atomic exclusion; /* NULL: none; written before `presence` */

    /* For the failure detector. All threads use `presence` and `wanted`; the rest belongs to the thread that
     * examines the endpoint (domain.h). */
    atomic_int presence; /* a td__presence: changes once */
    atomic_int
        wait_status; /* ENDED: a wait status, or TD__STATUS_UNKNOWN; written before `presence` */
    struct td__watched_process *process;
    bool process_watched; /* by a pidfd: no lifeline is needed */
    atomic_int wanted;    /* a lifeline: 1 wanted, 2 opened or not needed any more */
    int lifeline;         /* or -1 */
    int64_t silent_since; /* the first probe without an answer; 0: none */
    int silent_probes;    /* probes without an answer since then */
    int64_t next_try;     /* when to connect the lifeline again, or to send the next query … */
    int64_t pause;        /* … and the pause after that */
    int queries;          /* sent to learn why nothing listens at its address */
    int64_t lose_at; /* its lifeline has ended: how long to wait for a report of the cause; 0: no */
    int64_t report_end; /* until when its loss is reported to the other ranks; 0: it is not … */
    int report_to;      /* … from this one on */
};

/* The kinds of requests. */
enum td__want {
    TD__WANT_LINK = 1,
    TD__WANT_SHARED_FD,
    TD__WANT_ANSWER,   /* `channel` is the topic */
    TD__WANT_LIFELINE, /* the connection stays open until one of the two leaves or ends */
    TD__WANT_LOSS_REPORT, /* reports a loss: `channel` is the presence, `group` the rank, and `value` the
                             wait status */
    TD__WANT_HAND_OVER, /* hands over a shared descriptor, which follows the request */
    TD__WANT_WAKE,      /* wakes the waiters */
    TD__WANT_EXCLUSION, /* the rank `group` was excluded by the rank `channel`; the reason follows, `value` bytes */
};

struct td__request {
    enum td__want what;
    int rank; /* the sender */
    uint64_t group;
    uint32_t channel;
    uint64_t value;
    const char *text; /* follows the request, `value` bytes; NULL: none */
};

/* The accepting side replies to every request but a loss report and a wake with one byte. TD__REPLY_LEFT: the
 * endpoint is closed, while its listener is still open for other endpoints. TD__REPLY_EXCLUDED: the rank that sent the
 * request was excluded; by which rank, and why, follows. */
enum { TD__REPLY_ACCEPTED = 'A', TD__REPLY_LEFT = 'X', TD__REPLY_EXCLUDED = 'E' };

/* The byte that a rank sends on its lifelines when it leaves. A lifeline that ends without it means that the process
 * has ended. */
enum { TD__LEAVING = 'L' };

struct td__watcher {
    int fd, rank;
};

struct td__endpoint {
    int rank;
    int capacity;    /* ranks are below this */
    atomic_int size; /* and those that are known below this */
    bool grows;      /* ranks may be added at any time */
    bool shared;
    struct td__domain *domain;      /* NULL in a world of one rank */
    TAILQ_ENTRY(td__endpoint) link; /* of the domain */
    struct td__card own;
    struct td__card *_Atomic *peers; /* by rank; NULL: not known. A card stays until the end */
    struct td__buffer hosts; /* the first card of each host, by its number; under the lock */

    pthread_mutex_t lock;
    pthread_cond_t arrived; /* broadcast with every wake of the waiters, and on an arrival */
    LIST_HEAD(, td__endpoint_waiter) waiters;
    TAILQ_HEAD(, td__endpoint_arrival) arrivals;
    LIST_HEAD(, td__link_handler) link_handlers;
    LIST_HEAD(, td__shared_fd) shared_fds;
    struct td__buffer watchers;  /* lifelines of other ranks to this one: struct td__watcher */
    pthread_mutex_t pulse_lock;  /* for the pulses; no lock is locked after it */
    pthread_mutex_t answer_lock; /* held while `answer` runs; locked before the locks of groups */
    td__answer_fn answer;
    void *answer_arg;

    atomic_uint losses;     /* ranks that are TD__ENDED or TD__CUT_OFF */
    atomic_uint exclusions; /* cards with an exclusion */
    atomic_int excluding;   /* running td__endpoint_exclude() */
    atomic_bool
        exclusion_news;   /* the failure detector has not called td__detector_fns.excluded() yet */
    atomic_bool examined; /* by the failure detector; changes under the domain's lock */
    atomic_bool leaving;  /* the failure detector is being stopped */
    atomic_int lifelines_wanted; /* cards whose `wanted` is 1 */
    int reports;                 /* cards with a `report_end` */
    int awaited_reports;         /* cards with a `lose_at` */
    td__detector_fns detector_fns;
    void *detector_arg;
    bool ticks; /* it has conditions for which there is no event */
};

/** The card of `rank`; NULL if it is not known, which only an endpoint that grows has. */
static inline struct td__card *td__peer(const struct td__endpoint *endpoint, int rank)
{
    return atomic_load_explicit(&endpoint->peers[rank], memory_order_acquire);
}

/** The first known card from *rank on, and its rank; NULL if there is none. */
static inline struct td__card *td__peer_from(const struct td__endpoint *endpoint, int *rank)
{
    int size = atomic_load_explicit(&endpoint->size, memory_order_acquire);
    struct td__card *peer = NULL;
    while (*rank < size && !(peer = td__peer(endpoint, *rank)))
        ++*rank;
    return peer;
}

#define TD__PEER_FOREACH(peer, r, endpoint)                                                        \
    for (int r = 0; (peer = td__peer_from(endpoint, &r)) != NULL; r++)

/* ---- endpoint_accept.c ----------------------------------------------------------------------- */

/** Serves or keeps a request, and owns the connection from then on. On the listener's thread. */
void td__endpoint_take_request(struct td__endpoint *endpoint, int fd, bool local,
                               const uint8_t bytes[TD__REQUEST_SIZE]);

/** Sends a TD__REPLY_… or TD__LEAVING; false if the connection has ended. */
bool td__reply(int fd, char reply);

/** The number of the endpoint that a request is for. */
uint32_t td__request_number(const uint8_t bytes[TD__REQUEST_SIZE]);

/** Writes a request to the endpoint `number`. */
void td__request_write(const struct td__request *request, uint32_t number,
                       uint8_t bytes[TD__REQUEST_SIZE]);

/** Parses a request; false if it is not valid in a world of at most `size` ranks. */
bool td__request_read(const uint8_t bytes[TD__REQUEST_SIZE], int size, struct td__request *request);

/** Removes an arrival, of any rank if `rank` is -1, and returns its connection, or -1. The caller holds the lock. */
int td__take_arrival(struct td__endpoint *endpoint, enum td__want what, int rank, uint64_t group,
                     uint32_t channel, int *from);

/** Closes the arrivals and drops the link handlers of a group, or all. The caller holds the lock. */
void td__arrivals_forget(struct td__endpoint *endpoint, uint64_t group, bool all);

/* ---- endpoint.c ------------------------------------------------------------------------------ */

/** Wakes all waiters. The caller holds the lock. */
void td__waiters_wake(struct td__endpoint *endpoint);

/** Connects to `rank`, sends a request of this rank, and waits until it is accepted; except for a loss report, a wake
 *  and a descriptor that is handed over. After TD_ERR_PEER, td__endpoint_explain() finds the reason. */
td_status td__endpoint_reach(struct td__endpoint *endpoint, int rank, struct td__request request,
                             td__deadline deadline, int *fd);

/** Returns `status`, the result of td__endpoint_reach(). If it is TD_ERR_PEER, sets the last error to how `rank`
 *  ended, if that is known by the deadline. */
td_status td__endpoint_explain(struct td__endpoint *endpoint, int rank, td_status status,
                               td__deadline deadline);

/** Receives the reply to a request. TD_ERR_PEER if it is not TD__REPLY_ACCEPTED; sets *ended if the connection ended
 *  before. */
td_status td__endpoint_await_reply(struct td__endpoint *endpoint, int rank, int fd,
                                   td__deadline deadline, bool *ended);

/** Whether something listens at the address of `rank`: 0, or an errno. */
int td__endpoint_probe(const struct td__endpoint *endpoint, int rank, td__deadline deadline);

/** Whether an errno of td__endpoint_probe() means that nothing listens there. */
bool td__is_refused(int error);

/* ---- fd_exchange.c --------------------------------------------------------------------------- */

/** Serves a request for a shared descriptor; false if it is not offered yet. The caller holds the lock. */
bool td__shared_fd_hand_out(struct td__endpoint *endpoint, const struct td__request *request,
                            int connection);

/** Receives a descriptor that another rank hands over. */
void td__shared_fd_take_over(struct td__endpoint *endpoint, const struct td__request *request,
                             int connection);

/** Forgets the shared descriptors of a group, or all. The caller holds the lock. */
void td__shared_fds_forget(struct td__endpoint *endpoint, uint64_t group, bool all);

/** Unmaps the arenas of other ranks that no other endpoint of the domain uses. */
void td__views_close(struct td__endpoint *endpoint);

/* ---- endpoint_queries.c ---------------------------------------------------------------------- */

/** Opens a lifeline to `rank`. */
td_status td__endpoint_open_lifeline(struct td__endpoint *endpoint, int rank, td__deadline deadline,
                                     int *fd);

/** Reports to `to` that `rank` is lost. */
void td__endpoint_report_loss(struct td__endpoint *endpoint, int to, int rank,
                              enum td__presence presence, int wait_status, td__deadline deadline);

/** Sends a query for the presence of `rank` to `from`. Sets *presence and *wait_status only if it is not
 *  TD__PRESENT there. */
void td__endpoint_query_presence(struct td__endpoint *endpoint, int from, int rank,
                                 td__deadline deadline, enum td__presence *presence,
                                 int *wait_status);

/** Serve a query and a lifeline, and own the connection. On the listener's thread. */
void td__endpoint_answer_query(struct td__endpoint *endpoint, const struct td__request *request,
                               int fd);
void td__endpoint_keep_watcher(struct td__endpoint *endpoint, int rank, int fd);

/** Sends the exclusion on the lifelines of `rank` to this one, and closes them. The caller holds the lock. */
void td__endpoint_dismiss_watcher(struct td__endpoint *endpoint, int rank,
                                  const struct td__exclusion *exclusion);

/** Sends TD__LEAVING on the lifelines of other ranks, and closes them. */
void td__endpoint_leave(struct td__endpoint *endpoint);

/* ---- endpoint_card.c ------------------------------------------------------------------------- */

/** Fills in this rank's own card, except its listener. */
void td__card_fill_in(struct td__card *card, const char *host);

/** Frees the cards. */
void td__cards_free(struct td__endpoint *endpoint);

/* ---- exclusion.c ----------------------------------------------------------------------------- */

/** The exclusion of `rank`, which need not be known; NULL: there is none. */
static inline struct td__exclusion *td__exclusion_of(const struct td__endpoint *endpoint, int rank)
{
    const struct td__card *peer = td__peer(endpoint, rank);
    return peer ? atomic_load_explicit(&peer->exclusion, memory_order_acquire) : NULL;
}

/** Serves TD__WANT_EXCLUSION, and owns the connection. On the listener's thread. */
void td__exclusion_receive(struct td__endpoint *endpoint, const struct td__request *request,
                           int fd);

/** Refuses a request of an excluded rank, and closes the connection. */
void td__exclusion_refuse(const struct td__exclusion *exclusion, int fd);

/** Receives the rest of a TD__REPLY_EXCLUDED: sets the last error. */
td_status td__exclusion_read_refusal(struct td__endpoint *endpoint, int fd, td__deadline deadline);

/** On the detector's thread: calls td__detector_fns.excluded() if there are news, and ends the processes that are due.
 *  Returns when to call it again. */
td__deadline td__exclusion_step(struct td__endpoint *endpoint);

/** A copy without the process, for free(); NULL without memory. */
struct td__exclusion *td__exclusion_copy(const struct td__exclusion *exclusion);

/** Frees what a card has. */
void td__exclusion_free(struct td__card *peer);

/* ---- pulse.c --------------------------------------------------------------------------------- */

/** Closes the pulse of a card. */
void td__pulse_end(struct td__card *peer);

/* ---- presence.c ------------------------------------------------------------------------------ */

/** Whether the pid of `peer` is valid in this process's namespace. */
bool td__is_neighbour(const struct td__endpoint *endpoint, const struct td__card *peer);

/** Changes the presence of `rank` if it is TD__PRESENT, and returns whether it was. On any thread. */
bool td__presence_settle(struct td__endpoint *endpoint, int rank, enum td__presence presence,
                         int wait_status);

/** The functions below run on the thread that examines the endpoint (domain.h). */

/** Begins to watch: the processes of this host, and the next rank. */
void td__presence_begin(struct td__endpoint *endpoint);

/** The lifeline to `rank` is readable. */
void td__presence_on_lifeline(struct td__endpoint *endpoint, int rank);

/** Handles the processes that the failure detector has marked as ended. */
void td__presence_on_process_ends(struct td__endpoint *endpoint);

/** A few times a second, if endpoint->ticks: checks the conditions for which there is no event. */
void td__presence_tick(struct td__endpoint *endpoint);

/** Sends one report or opens one lifeline. Returns when to call it again: 0 at once, TD__NEVER not at all. */
td__deadline td__presence_step(struct td__endpoint *endpoint);

/** When the endpoint leaves: handles the pending events, and sends all reports. */
void td__presence_end(struct td__endpoint *endpoint);

/* ---- failure_detector.c ---------------------------------------------------------------------- */

/** True on the thread of a failure detector. */
extern _Thread_local bool td__is_detector_thread;

/** Stops watching for this endpoint, and closes its lifelines and watched processes. */
void td__failure_detector_close(struct td__endpoint *endpoint);

/** Ends the thread; no endpoint of the domain is left. */
void td__failure_detector_end(struct td__domain *domain);

/** Calls td__presence_on_lifeline() when `fd` is readable, or not any more. */
void td__failure_detector_follow(struct td__endpoint *endpoint, int fd, int rank);
void td__failure_detector_unfollow(struct td__endpoint *endpoint, int fd);

/** Makes the thread call td__presence_step() now. */
void td__failure_detector_wake(struct td__domain *domain);

/** A process that is watched, once for all endpoints of a domain. */
struct td__watched_process {
    LIST_ENTRY(td__watched_process) link;
    int pid, fd; /* a pidfd */
    int users;
    atomic_bool ended;
};

/** Watches the process `pid`; NULL if it has ended (*ended), or cannot be watched. */
struct td__watched_process *td__watched_process_open(struct td__domain *domain, int pid,
                                                     bool *ended);

#endif
