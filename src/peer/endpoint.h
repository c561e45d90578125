/* The endpoint of a rank: how other ranks connect to it, and how it connects to them.
 *
 * Each rank has a card (its host, its addresses, the identity of its listener) and gets the cards of the
 * others. A rank connects to another one, proves the job's secret to just this listener, and sends a
 * request:
 *
 *     a link          the connection itself becomes a stream between the two, for one channel of one group
 *     a shared fd     a descriptor that the other rank offers: its arena, the control memory of a group
 *     a query         the other endpoint answers it, whatever its program is doing
 *
 * Shared fds go over unix sockets, so only between ranks of one host. No connection is made before it is
 * needed. All functions may be called from any thread. */
#ifndef TD_PEER_ENDPOINT_H
#define TD_PEER_ENDPOINT_H

#include "base/buffer.h"
#include "base/clock.h"

#include <tandem/base.h>

#include <stdatomic.h>

struct td__endpoint;

enum td__link_channel { TD__CHANNEL_COLLECTIVE, TD__CHANNEL_MESSAGES };

/** Makes this rank reachable: at `host` (an address of this machine) by TCP, and at a unix socket.
 *  `shared` false: as if every rank were on a host of its own. */
td_status td__endpoint_open(int rank, int size, const char *host, bool shared,
                            struct td__endpoint **endpoint);

/** Appends this rank's card. */
void td__endpoint_card(const struct td__endpoint *endpoint, struct td__buffer *card);

/** Takes the cards of all `size` ranks, in order. Before this only the two functions above may be
 *  called. TD_ERR_MISMATCH where one is not a card. */
td_status td__endpoint_connect_all(struct td__endpoint *endpoint, const td_bytes *cards);

/** Closes everything. No other call may run. */
void td__endpoint_close(struct td__endpoint *endpoint);

int td__endpoint_rank(const struct td__endpoint *endpoint);
int td__endpoint_size(const struct td__endpoint *endpoint);

/** Which host `rank` is on: hosts are numbered from 0 in the order of their first rank. */
int td__endpoint_host(const struct td__endpoint *endpoint, int rank);

/** The pid of `rank`, in its own namespace. */
int td__endpoint_pid(const struct td__endpoint *endpoint, int rank);

/** "rank 3 (on node7, pid 4711)", into a buffer of the thread's own. */
const char *td__endpoint_describe(const struct td__endpoint *endpoint, int rank);

/* ---- Presence --------------------------------------------------------------------------------
 *
 * Which ranks are still there; failure_detector.c says how that is known. */

enum td__presence {
    TD__PRESENT, /* as far as is known */
    TD__LEFT,    /* in order */
    TD__GONE,    /* nothing listens at its address: it has left, or has ended unseen */
    TD__ENDED,   /* its process has ended without leaving */
    TD__CUT_OFF, /* its host has not answered for longer than TANDEM_HEARTBEAT */
};

typedef struct td__look_fns {
    /** Whether a rank of this host has left in order. NULL: ranks of this host are watched like those of
     *  other hosts. */
    bool (*has_left)(void *arg, int rank);

    /** Called a few times a second, on the detector's thread. May be NULL. */
    void (*tick)(void *arg);
} td__look_fns;

/** Starts the failure detector. Once, after td__endpoint_connect_all(). */
td_status td__endpoint_start_detector(struct td__endpoint *endpoint, const td__look_fns *fns,
                                      void *arg);

/** Stops it: the functions above are not called any more. */
void td__endpoint_stop_detector(struct td__endpoint *endpoint);

/** What is known of `rank`. Cheap. */
enum td__presence td__endpoint_presence(const struct td__endpoint *endpoint, int rank);

/** How many ranks are TD__ENDED or TD__CUT_OFF: the epoch of the failure detector. Cheap: compare with an
 *  earlier number to see new losses. Leaving in order is no loss, but wakes the waiters as one does. */
unsigned td__endpoint_losses(const struct td__endpoint *endpoint);

/** Waits until td__endpoint_losses() is not `known` any more; false at the deadline. */
bool td__endpoint_await_loss(struct td__endpoint *endpoint, unsigned known, td__deadline deadline);

/** How a rank that is TD__ENDED ended: a wait status, or TD__STATUS_UNKNOWN. */
int td__endpoint_wait_status(const struct td__endpoint *endpoint, int rank);

/** Takes over what another rank knows about `rank`; ignores values that make no sense. */
void td__endpoint_learn(struct td__endpoint *endpoint, uint64_t rank, uint64_t presence,
                        int wait_status);

/** Watches `rank` from now on, on whatever host it is; for a caller that waits for it. Cheap after the first
 *  time. */
void td__endpoint_watch(struct td__endpoint *endpoint, int rank);

/** Whether the process of `rank` is known to be stopped. */
bool td__endpoint_is_stopped(const struct td__endpoint *endpoint, int rank);

/** "was killed by SIGKILL", "has left", …; NULL while it is there. In a buffer of the thread's own. */
const char *td__endpoint_exit_reason(const struct td__endpoint *endpoint, int rank);

/** The same for a caller whose connection to `rank` has ended: waits until the failure detector knows why,
 *  at most until the deadline. NULL where it does not find out. Does not wait on the detector's thread. */
const char *td__endpoint_find_out(struct td__endpoint *endpoint, int rank, td__deadline deadline);

/* ---- Waiters ---------------------------------------------------------------------------------
 *
 * A thread that waits for other ranks sleeps until what it waits for is signalled, or until something happens
 * that may have made its wait hopeless: a rank has ended, left or is cut off, a group was aborted, another
 * rank has connected. Each of these wakes all waiters of the endpoint, and each looks for itself: at the
 * presence of the ranks that it waits for, at the state of its group. */

struct td__endpoint_waiter {
    struct td__endpoint_waiter *next; /* the endpoint's */

    /** Makes the thread look again, now or when it next goes to sleep. On any thread, with the lock of the
     *  endpoint held: must not block, nor call the endpoint. */
    void (*wake)(void *arg);
    void *arg;
};

/** Adds a waiter, which stays the caller's; after td__endpoint_remove_waiter() its wake() is not called any
 *  more. For the life of a communicator, not for a call. */
void td__endpoint_add_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter);
void td__endpoint_remove_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter);

/** Wakes all waiters of this rank, after a change that they look at. */
void td__endpoint_wake_waiters(struct td__endpoint *endpoint);

/** Wakes those of `rank`, where it can be reached by the deadline. */
void td__endpoint_wake_rank(struct td__endpoint *endpoint, int rank, td__deadline deadline);

/** Wakes all waiters of this rank once, as soon as `fd` is readable, which may be now: for a waiter that
 *  sleeps on memory, and has descriptors, too. Ends with the descriptor. */
void td__endpoint_wake_on(struct td__endpoint *endpoint, int fd);

/* ---- Queries ---------------------------------------------------------------------------------
 *
 * The thread of the other endpoint answers a query at once, whatever its program is doing. */

enum { TD__ANSWER_LIMIT = 32768 };

/** Answers a query of `rank`: appends to `answer`. On the endpoint's own thread: must not block. */
typedef void (*td__answer_fn)(void *arg, int rank, uint32_t topic, uint64_t group, uint64_t value,
                              struct td__buffer *answer);

/** Sets the function that answers; NULL: none. When this returns, the former one is not called any more. */
void td__endpoint_answer(struct td__endpoint *endpoint, td__answer_fn fn, void *arg);

/** Sends a query to `rank`, and appends its answer, TD__ANSWER_LIMIT bytes at most. TD_ERR_TIMEOUT where it
 *  does not answer in time, TD_ERR_PEER where it cannot be reached, or has no function that answers. */
td_status td__endpoint_ask(struct td__endpoint *endpoint, int rank, uint32_t topic, uint64_t group,
                           uint64_t value, td__deadline deadline, struct td__buffer *answer);

/** Sends a query as a notification: its answer, and whether it arrived, are ignored. */
void td__endpoint_tell(struct td__endpoint *endpoint, int rank, uint32_t topic, uint64_t group,
                       uint64_t value, td__deadline deadline);

/* ---- Links -----------------------------------------------------------------------------------
 *
 * A link is a connected stream socket: non-blocking, without delay, TCP between hosts and a unix
 * socket inside one (TCP there, too, where the endpoint is not `shared`). It belongs to the caller that
 * got it. `group` is the number of a group, the same on all its ranks and unique in the world. */

/** Opens a link to `rank`, which gets it from td__endpoint_accept() or its td__link_fn. */
td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__link_channel channel, td__deadline deadline, int *fd);

/** The same for a caller that only sends `rank` a short message: where nothing listens, it fails at once, and
 *  does not find out why. */
td_status td__endpoint_connect_briefly(struct td__endpoint *endpoint, int rank, uint64_t group,
                                       enum td__link_channel channel, td__deadline deadline,
                                       int *fd);

/** Waits for the link that `rank` opens to this rank. */
td_status td__endpoint_accept(struct td__endpoint *endpoint, int rank, uint64_t group,
                              enum td__link_channel channel, td__deadline deadline, int *fd);

/** Takes over a link that `rank` has opened; on the endpoint's own thread, so it must not block. */
typedef void (*td__link_fn)(void *arg, int rank, int fd);

/** Hands all links of this group and channel to `fn`, those that have arrived already at once. With NULL, `fn`
 *  is not called any more when this returns, and links that arrive later are closed. */
void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group,
                         enum td__link_channel channel, td__link_fn fn, void *arg);

/** Forgets a group: closes its links that were not accepted, and withdraws its shared fds. */
void td__endpoint_forget(struct td__endpoint *endpoint, uint64_t group);

/** Whether `rank` is known not to receive: a send to it has timed out on leaving. `note` records that one has
 *  now. */
bool td__endpoint_is_unresponsive(struct td__endpoint *endpoint, int rank, bool note);

/* ---- Shared memory (ranks of one host) ------------------------------------------------------- */

/** Offers the descriptor `fd` to other ranks under `group`; it stays the caller's, and must stay open until
 *  td__endpoint_forget(). */
td_status td__endpoint_offer(struct td__endpoint *endpoint, uint64_t group, int fd);

/** Hands a copy of the descriptor offered under `group` over to `rank`, which finds it with
 *  td__endpoint_fetch() when this rank has left. */
td_status td__endpoint_hand_over(struct td__endpoint *endpoint, int rank, uint64_t group, int fd,
                                 td__deadline deadline);

/** Gets a copy of the descriptor that `rank` offers, or will offer by the deadline. TD_ERR_ABORTED when
 *  *given_up (which may be NULL) becomes true. */
td_status td__endpoint_fetch(struct td__endpoint *endpoint, int rank, uint64_t group,
                             td__deadline deadline, const atomic_bool *given_up, int *fd);

/** The same without waiting for the offer: TD_ERR_PEER at once where there is none. */
td_status td__endpoint_fetch_now(struct td__endpoint *endpoint, int rank, uint64_t group,
                                 td__deadline deadline, int *fd);

/** Maps `size` bytes at `offset` of the default arena of `rank`, on the same host. The address stays
 *  good until the endpoint is closed. Cheap except for the first time. */
td_status td__endpoint_map(struct td__endpoint *endpoint, int rank, size_t offset, size_t size,
                           td__deadline deadline, void **address);

#endif
