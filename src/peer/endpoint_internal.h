/* What the files of an endpoint share with each other. */
#ifndef TD_PEER_ENDPOINT_INTERNAL_H
#define TD_PEER_ENDPOINT_INTERNAL_H

#include "base/arena.h"
#include "base/auth.h"
#include "peer/endpoint.h"
#include "peer/endpoint_listener.h"

#include <pthread.h>
#include <stdatomic.h>

enum { TD__CARD_TEXT = 128 };

/* What a card says, and what is known about its rank since. */
struct td__card {
    char host_id[TD__CARD_TEXT]; /* the same text: the same memory, and unix sockets in reach */
    char host_name[TD__CARD_TEXT];
    char address[TD__CARD_TEXT];
    char local[TD__CARD_TEXT]; /* "unix:@name" */
    uint8_t
        identity[TD__IDENTITY_SIZE]; /* of its listener: who connects says that he means this one */
    int port;
    int pid;
    uint64_t pid_space; /* the name space that the pid belongs to */
    bool shared;        /* it takes part in shared memory */
    bool tls;           /* it encrypts what goes over TCP */
    int host;           /* its number */
    struct td__arena_view view;
    bool viewed;

    atomic_bool deaf; /* what was sent to it when parting did not arrive */

    /* The detector's; see failure_detector.c. */
    atomic_int presence;  /* a td__presence: changes once */
    int wait_status;      /* ENDED: a wait status, or TD__STATUS_UNKNOWN */
    int process;          /* a pidfd, or -1 */
    bool process_watched; /* its process is enough to go by */
    atomic_int wanted;    /* a lifeline: 1 wanted, 2 settled */
    int lifeline;         /* or -1 */
    bool held;            /* the lifeline, by the other rank */
    int64_t silent_since; /* its host has not answered since then; 0: it has, or was not asked */
    int silent_probes;    /* and how often it was asked */
    int64_t next_try;     /* when to try again to get a lifeline, and … */
    int64_t pause;        /* … how long after that */
};

/* What a rank wants that has come to the listener. */
enum td__want {
    TD__WANT_LINK = 1,
    TD__WANT_SHARED_FD,
    TD__WANT_ANSWER,   /* `channel` is the topic */
    TD__WANT_LIFELINE, /* the connection is kept until one of the two has gone */
    TD__WANT_NEWS, /* nothing: it tells of a loss. `channel` is the presence, `group` the rank, and
                          `value` the wait_status */
    TD__WANT_HAND_OVER, /* nothing: it gives a shared_fd that was its own */
};

struct td__request {
    enum td__want what;
    int rank; /* who wants it */
    uint64_t group;
    uint32_t channel;
    uint64_t value;
};

/* The bytes on a lifeline: the first says that it is held at the other end, too, so that its end means
 * something; the last, that its end is in order. */
enum { TD__HOLDING = 'H', TD__LEAVING = 'L' };

struct td__endpoint_arrival;
struct td__listener;
struct td__shared_fd;
struct td__failure_detector;

struct td__endpoint {
    int rank, size;
    bool shared;
    struct td__secret secret;
    struct td__endpoint_listener *listener;
    struct td__card own;
    struct td__card *peers;

    pthread_mutex_t lock;
    pthread_cond_t arrived;
    struct td__endpoint_arrival *arrivals;
    struct td__listener *listeners;
    struct td__shared_fd *shared_fds;
    int *watchers; /* lifelines that others have to here */
    int watcher_count, watcher_room;
    pthread_mutex_t answer_lock; /* held while somebody answers; taken before those of groups */
    td__answer_fn answer;
    void *answer_arg;

    pthread_mutex_t map_lock;

    struct td__failure_detector *detector;
    atomic_uint losses; /* ranks that have died or are cut off */
};

/** Takes a request apart; false where no rank of a world of `size` can have made it. */
bool td__request_read(const uint8_t bytes[TD__REQUEST_SIZE], int size, struct td__request *request);

/** Connects to `rank` with a request. Where nobody is there any more, td__endpoint_explain() says why. */
td_status td__endpoint_reach(struct td__endpoint *endpoint, int rank, bool locally,
                             const struct td__request *request, td__deadline deadline, int *fd);

/** The status of td__endpoint_reach(); where it is TD_ERR_PEER, the last error says what became of `rank`, if
 *  that can be found out until the deadline. For those whose caller wants to know. */
td_status td__endpoint_explain(struct td__endpoint *endpoint, int rank, td_status status,
                               td__deadline deadline);

/** Whether somebody listens at the address of `rank`: 0, or an errno. */
int td__endpoint_probe(const struct td__endpoint *endpoint, int rank, bool locally,
                       td__deadline deadline);

/** Whether that errno says that nobody does. */
bool td__is_refused(int error);

/** Takes a request out of those that wait, of any rank where that is -1: its connection, or -1. With the
 *  lock. */
int td__endpoint_take_arrival(struct td__endpoint *endpoint, enum td__want what, int rank,
                              uint64_t group, uint32_t channel);

/** True where the two are on one host. */
bool td__endpoint_is_near(const struct td__endpoint *endpoint, int rank);

/* fd_exchange.c; the first and the last with the lock. */

/** Serves a wish for a shared_fd; false where it has to wait for it. */
bool td__shared_fd_hand_out(struct td__endpoint *endpoint, const struct td__request *request,
                            int connection);

/** Takes a bequest. */
void td__shared_fd_take_over(struct td__endpoint *endpoint, const struct td__request *request,
                             int connection);

/** Forgets the shared_fds of a group, or all. */
void td__shared_fds_forget(struct td__endpoint *endpoint, uint64_t group, bool all);

/* endpoint_queries.c, for the detector; and what it does with those who come. */

/** Opens a lifeline to `rank`. */
td_status td__endpoint_open_lifeline(struct td__endpoint *endpoint, int rank, td__deadline deadline,
                                     int *fd);

/** Tells `to` that `rank` is lost. */
void td__endpoint_tell_loss(struct td__endpoint *endpoint, int to, int rank,
                            enum td__presence presence, int wait_status, td__deadline deadline);

/** Asks `whom` what is known there of `rank`; leaves both as they are where that is nothing. */
void td__endpoint_ask_presence(struct td__endpoint *endpoint, int whom, int rank,
                               td__deadline deadline, enum td__presence *presence,
                               int *wait_status);

/** Serves a question, a lifeline or news, and takes the connection over. On the endpoint's thread. */
void td__endpoint_serve(struct td__endpoint *endpoint, const struct td__request *request, int fd);

/** Says to those who hold on to this rank that it leaves in order, and lets go. */
void td__endpoint_part(struct td__endpoint *endpoint);

/** Fills in this rank's own card, but for the addresses. */
void td__card_fill_in(struct td__card *card, const char *host);

#endif
