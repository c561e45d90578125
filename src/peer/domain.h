/* A domain: the resources that the endpoints of a process share, so that another world costs no thread and hardly a
 * descriptor.
 *
 *     listener            a TCP and a unix socket, and the thread "td-endpoint" that serves them. A request names
 *                         the endpoint that it is for by a number, which is on the endpoint's card
 *     failure detector    the thread "td-detector" (failure_detector.c), started for the first endpoint that has
 *                         other ranks to watch
 *     process watches     a pidfd for each process of this host that is watched
 *     arena views         the memory of other processes of this host (fd_exchange.c)
 *
 * Endpoints with the same listening address and the same secret have the same domain. The first one opens it, the
 * last one closes it. A child of fork() does not see the domains of its parent.
 *
 * Each of the two threads works for one endpoint at a time, `served` and `examined`, without holding a lock. Removing
 * an endpoint waits until it is neither, but not for work on other endpoints. */
#ifndef TD_PEER_DOMAIN_H
#define TD_PEER_DOMAIN_H

#include "base/auth.h"
#include "os/auth_listener.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

enum { TD__CARD_TEXT = 128 };

struct td__endpoint;

/* See failure_detector.c. The domain's lock protects `started` and the list. */
struct td__failure_detector {
    bool started;
    pthread_t thread;
    int epoll, wake;
    atomic_bool ending;
    LIST_HEAD(, td__watched_process) processes;
};

struct td__domain {
    LIST_ENTRY(td__domain) link; /* of the process */
    int users;
    char host[TD__CARD_TEXT];
    struct td__secret secret;
    uint8_t identity[TD__IDENTITY_SIZE]; /* of the listener: the handshake covers it */
    int port;
    char local[TD__CARD_TEXT]; /* "unix:@name" */
    pthread_t thread;
    int wake;     /* an eventfd that ends the thread */
    int wake_set; /* an epoll set that the thread polls: see td__endpoint_wake_on() */
    struct td__auth_listener *listener;

    pthread_mutex_t lock;                 /* for what follows */
    pthread_cond_t idle;                  /* `served` or `examined` has changed */
    TAILQ_HEAD(, td__endpoint) endpoints; /* by increasing number */
    struct td__endpoint *served;          /* by the listener's thread; or NULL */
    struct td__endpoint *examined;        /* by the failure detector's; or NULL */
    uint32_t last_number;
    struct td__former_exclusion *former; /* of endpoints that are closed, the newest first */
    struct td__failure_detector detector;

    pthread_mutex_t view_lock; /* is never held together with `lock` */
    LIST_HEAD(, td__shared_view) views;
};

/** Finds or opens the domain for endpoints at `host`, an address of this machine. */
td_status td__domain_open(const char *host, struct td__domain **domain);

/** The last user closes the domain. */
void td__domain_close(struct td__domain *domain);

/** Requests reach the endpoint from now on, by the number that it gets. */
void td__domain_add(struct td__domain *domain, struct td__endpoint *endpoint);

/** The endpoint is about to be closed: the ranks that it has excluded are refused further on, so that they do not take it
 *  for one that has left. */
void td__domain_keep_exclusions(struct td__domain *domain, const struct td__endpoint *endpoint);

/** No request reaches the endpoint any more: none of its functions runs when this returns. */
void td__domain_remove(struct td__domain *domain, struct td__endpoint *endpoint);

#endif
