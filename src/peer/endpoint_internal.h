/* What the files of an endpoint share with each other: endpoint.c, endpoint_accept.c, endpoint_card.c,
 * endpoint_queries.c, failure_detector.c and fd_exchange.c. */
#ifndef TD_PEER_ENDPOINT_INTERNAL_H
#define TD_PEER_ENDPOINT_INTERNAL_H

#include "base/arena.h"
#include "base/auth.h"
#include "os/auth_listener.h"
#include "os/loop.h"
#include "peer/endpoint.h"

#include <pthread.h>
#include <stdatomic.h>

enum { TD__CARD_TEXT = 128, TD__REQUEST_SIZE = 32 };

/* What a card says, and what is known about its rank since. */
struct td__card {
    char host_id[TD__CARD_TEXT]; /* ranks with the same text share memory and unix sockets */
    char host_name[TD__CARD_TEXT];
    char address[TD__CARD_TEXT];
    char local[TD__CARD_TEXT]; /* "unix:@name" */
    uint8_t
        identity[TD__IDENTITY_SIZE]; /* of its listener: a client proves that it means this one */
    int port;
    int pid;
    uint64_t pid_space; /* the namespace of the pid */
    bool shared;        /* it takes part in shared memory */
    bool tls;           /* it encrypts what goes over TCP */
    int host;           /* its number */
    struct td__arena_view view;
    bool viewed;

    atomic_bool deaf; /* it did not take what was sent to it on leaving */

    /* Of the failure detector. */
    atomic_int presence;  /* a td__presence: changes once */
    int wait_status;      /* ENDED: a wait status, or TD__STATUS_UNKNOWN */
    int process;          /* a pidfd, or -1 */
    bool process_watched; /* its pidfd is enough: no lifeline is needed */
    atomic_int wanted;    /* a lifeline: 1 wanted, 2 settled */
    int lifeline;         /* or -1 */
    bool held;            /* the other rank has confirmed the lifeline */
    int64_t silent_since; /* the first probe without an answer; 0: none */
    int silent_probes;    /* probes without an answer since then */
    int64_t next_try;     /* when to connect the lifeline again, and … */
    int64_t pause;        /* … the pause after that */
};

/* What a rank asks for when it connects. */
enum td__want {
    TD__WANT_LINK = 1,
    TD__WANT_SHARED_FD,
    TD__WANT_ANSWER,   /* `channel` is the topic */
    TD__WANT_LIFELINE, /* the connection stays open until one of the two leaves or ends */
    TD__WANT_LOSS_REPORT, /* reports a loss: `channel` is the presence, `group` the rank, and `value` the
                             wait status */
    TD__WANT_HAND_OVER, /* hands over a shared descriptor, which follows the request */
};

struct td__request {
    enum td__want what;
    int rank; /* who wants it */
    uint64_t group;
    uint32_t channel;
    uint64_t value;
};

/* The bytes on a lifeline. After TD__HOLDING its end means that the rank has ended; after TD__LEAVING,
 * that it has left in order. */
enum { TD__HOLDING = 'H', TD__LEAVING = 'L' };

struct td__endpoint_arrival;
struct td__link_handler;
struct td__shared_fd;
struct td__failure_detector;

struct td__endpoint {
    int rank, size;
    bool shared;
    struct td__secret secret;
    struct td__loop loop; /* "td-endpoint": accepts connections and serves requests */
    struct td__auth_listener *listener;
    struct td__card own;
    struct td__card *peers;

    pthread_mutex_t lock;
    pthread_cond_t arrived;
    struct td__endpoint_arrival *arrivals;
    struct td__link_handler *link_handlers;
    struct td__shared_fd *shared_fds;
    int *watchers; /* lifelines of other ranks to this one */
    int watcher_count, watcher_room;
    pthread_mutex_t answer_lock; /* held while `answer` runs; taken before the locks of groups */
    td__answer_fn answer;
    void *answer_arg;

    pthread_mutex_t map_lock;

    struct td__failure_detector *detector;
    atomic_uint losses; /* ranks that are TD__ENDED or TD__CUT_OFF */
};

/* ---- endpoint_accept.c ----------------------------------------------------------------------- */

/** Listens at `host` and at a unix socket, and starts the endpoint's thread. */
td_status td__endpoint_open_listener(struct td__endpoint *endpoint, const char *host);

/** Ends that thread: no request is served after this. */
void td__endpoint_close_listener(struct td__endpoint *endpoint);

/** Parses a request; false where no rank of a world of `size` can have sent it. */
bool td__request_read(const uint8_t bytes[TD__REQUEST_SIZE], int size, struct td__request *request);

/** Takes an arrival, of any rank where `rank` is -1: its connection, or -1. The caller holds the lock. */
int td__endpoint_take_arrival(struct td__endpoint *endpoint, enum td__want what, int rank,
                              uint64_t group, uint32_t channel);

/** Closes the arrivals and drops the link handlers of a group, or all. The caller holds the lock. */
void td__arrivals_forget(struct td__endpoint *endpoint, uint64_t group, bool all);

/* ---- endpoint.c ------------------------------------------------------------------------------ */

/** Connects to `rank` and sends a request. Where nothing listens there any more, td__endpoint_explain()
 *  says why. */
td_status td__endpoint_reach(struct td__endpoint *endpoint, int rank, bool locally,
                             const struct td__request *request, td__deadline deadline, int *fd);

/** Returns `status`, that of td__endpoint_reach(). Where it is TD_ERR_PEER, the last error then says how
 *  `rank` ended, if that is known by the deadline. */
td_status td__endpoint_explain(struct td__endpoint *endpoint, int rank, td_status status,
                               td__deadline deadline);

/** Whether something listens at the address of `rank`: 0, or an errno. */
int td__endpoint_probe(const struct td__endpoint *endpoint, int rank, bool locally,
                       td__deadline deadline);

/** Whether that errno says that nothing does. */
bool td__is_refused(int error);

/** True where `rank` is on this rank's host. */
bool td__endpoint_is_near(const struct td__endpoint *endpoint, int rank);

/* ---- fd_exchange.c --------------------------------------------------------------------------- */

/** Serves a request for a shared descriptor; false where it is not offered yet. The caller holds the
 *  lock. */
bool td__shared_fd_hand_out(struct td__endpoint *endpoint, const struct td__request *request,
                            int connection);

/** Receives a descriptor that another rank hands over. */
void td__shared_fd_take_over(struct td__endpoint *endpoint, const struct td__request *request,
                             int connection);

/** Forgets the shared descriptors of a group, or all. The caller holds the lock. */
void td__shared_fds_forget(struct td__endpoint *endpoint, uint64_t group, bool all);

/* ---- endpoint_queries.c ---------------------------------------------------------------------- */

/** Opens a lifeline to `rank`. */
td_status td__endpoint_open_lifeline(struct td__endpoint *endpoint, int rank, td__deadline deadline,
                                     int *fd);

/** Reports to `to` that `rank` is lost. */
void td__endpoint_report_loss(struct td__endpoint *endpoint, int to, int rank,
                              enum td__presence presence, int wait_status, td__deadline deadline);

/** Asks `whom` for the presence of `rank`; *presence and *wait_status stay as they are where it has no
 *  news. */
void td__endpoint_ask_presence(struct td__endpoint *endpoint, int whom, int rank,
                               td__deadline deadline, enum td__presence *presence,
                               int *wait_status);

/** Serves a query, a lifeline or a loss report, and takes the connection over. On the endpoint's thread. */
void td__endpoint_serve(struct td__endpoint *endpoint, const struct td__request *request, int fd);

/** Sends TD__LEAVING on the lifelines of other ranks, and closes them. */
void td__endpoint_leave(struct td__endpoint *endpoint);

/* ---- endpoint_card.c ------------------------------------------------------------------------- */

/** Fills in this rank's own card, but for port and unix socket. */
void td__card_fill_in(struct td__card *card, const char *host);

/* ---- failure_detector.c ---------------------------------------------------------------------- */

/** Another rank reports that `rank` is lost. On any thread. */
void td__failure_detector_report(struct td__endpoint *endpoint, int rank,
                                 enum td__presence presence, int wait_status);

/** Ends the detector's thread, and closes what it watched. */
void td__failure_detector_stop(struct td__endpoint *endpoint);

#endif
