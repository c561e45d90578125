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
#include <sys/queue.h>

struct td__endpoint;

enum td__link_channel { TD__CHANNEL_COLLECTIVE, TD__CHANNEL_MESSAGES, TD__CHANNEL_RPC };

enum { TD__MAX_RANKS = 1 << 20 };

/** Makes this rank reachable: at `host` (an address of this machine) by TCP, and at a unix socket.
 *  `shared` false: as if every rank were on a host of its own. `size` 0: the world grows; ranks below TD__MAX_RANKS may
 *  be added at any time, and those that are added after the start of the failure detector are watched only by a
 *  td__endpoint_watch(). */
td_status td__endpoint_open(int rank, int size, const char *host, bool shared,
                            struct td__endpoint **endpoint);

/** Appends this rank's card. */
void td__endpoint_card(const struct td__endpoint *endpoint, struct td__buffer *card);

/** Sets the cards of all `size` ranks, in order. Before this only the two functions above may be called.
 *  TD_ERR_MISMATCH if one is not a valid card. */
td_status td__endpoint_connect_all(struct td__endpoint *endpoint, const td_bytes *cards);

/** Adds a rank to a world that grows: its card. Does nothing if it is known. Functions below that take a rank want one that
 *  is known. This rank itself is added first. TD_ERR_MISMATCH as above. */
td_status td__endpoint_add_rank(struct td__endpoint *endpoint, int rank, const td_bytes *card);
bool td__endpoint_knows(const struct td__endpoint *endpoint, int rank);

/** Closes everything. No other call may run. */
void td__endpoint_close(struct td__endpoint *endpoint);

int td__endpoint_rank(const struct td__endpoint *endpoint);

/** The number of ranks; in a world that grows, one more than the highest that is known. */
int td__endpoint_size(const struct td__endpoint *endpoint);

/** Which host `rank` is on: hosts are numbered from 0 in the order of their first rank. */
int td__endpoint_host(const struct td__endpoint *endpoint, int rank);

/** The pid of `rank`, in its own namespace. */
int td__endpoint_pid(const struct td__endpoint *endpoint, int rank);

/** "rank 3 (on node7, pid 4711)", in a thread-local buffer. */
const char *td__endpoint_describe(const struct td__endpoint *endpoint, int rank);

/* ---- Presence --------------------------------------------------------------------------------
 *
 * Which ranks have left or ended, as the failure detector knows it (presence.c). */

enum td__presence {
    TD__PRESENT, /* not known to have left or ended */
    TD__LEFT,    /* it has closed its endpoint */
    TD__GONE,    /* nothing listens at its address: it has left, or its process has ended */
    TD__ENDED,   /* its process has ended without leaving */
    TD__CUT_OFF, /* its host has not answered for longer than TANDEM_HEARTBEAT */
};

typedef struct td__detector_fns {
    /** Whether a rank of this host has left. NULL: ranks of this host are watched like those of other hosts. */
    bool (*has_left)(void *arg, int rank);

    /** Called a few times a second, on the detector's thread. May be NULL. */
    void (*tick)(void *arg);

    /** A rank was excluded, perhaps this one. Called on the detector's thread. May be NULL. */
    void (*excluded)(void *arg);
} td__detector_fns;

/** Starts the failure detector. Once, when the cards of all ranks are known; in a world that grows, at least this
 *  rank's. */
td_status td__endpoint_start_detector(struct td__endpoint *endpoint, const td__detector_fns *fns,
                                      void *arg);

/** Stops it. After this, the td__detector_fns are not called any more. */
void td__endpoint_stop_detector(struct td__endpoint *endpoint);

/** The presence of `rank`, as known now. Cheap. */
enum td__presence td__endpoint_presence(const struct td__endpoint *endpoint, int rank);

/** Whether a rank that is not present may well live, where it cannot be reached: it is TD__CUT_OFF, or was excluded for a reason
 *  that begins with TD__SILENCE. */
#define TD__SILENCE "has not answered for"
bool td__endpoint_is_silent(const struct td__endpoint *endpoint, int rank);

/** How many ranks are TD__ENDED or TD__CUT_OFF: the epoch of the failure detector. Cheap: there are new losses if
 *  it differs from an earlier value. TD__LEFT is no loss, but wakes the waiters as well. */
unsigned td__endpoint_losses(const struct td__endpoint *endpoint);

/** Waits until td__endpoint_losses() differs from `known`; false at the deadline. */
bool td__endpoint_await_loss(struct td__endpoint *endpoint, unsigned known, td__deadline deadline);

/** How a rank that is TD__ENDED ended: a wait status, or TD__STATUS_UNKNOWN. */
int td__endpoint_wait_status(const struct td__endpoint *endpoint, int rank);

/** Sets the presence of `rank` to what another rank has reported; ignores invalid values. */
void td__endpoint_learn(struct td__endpoint *endpoint, uint64_t rank, uint64_t presence,
                        int wait_status);

/** Watches `rank` from now on, on any host; for a caller that waits for it. Cheap after the first time. */
void td__endpoint_watch(struct td__endpoint *endpoint, int rank);

/** Looks whether `rank` has left while its process runs on, which the failure detector finds only with its next tick, if
 *  it is on this host. Cheap. */
void td__endpoint_look(struct td__endpoint *endpoint, int rank);

/** Whether the process of `rank` is known to be stopped. */
bool td__endpoint_is_stopped(const struct td__endpoint *endpoint, int rank);

/** For how many milliseconds `rank` has shown no sign of life (pulse.c). Waits 50 ms at most, and only if its host does
 *  not answer. */
int64_t td__endpoint_silence_ms(struct td__endpoint *endpoint, int rank);

/** "was killed by SIGKILL", "has left", …, in a thread-local buffer; NULL while it is TD__PRESENT. */
const char *td__endpoint_exit_reason(const struct td__endpoint *endpoint, int rank);

/** The same for a caller whose connection to `rank` has ended: waits until the failure detector knows why, at most
 *  until the deadline; NULL if it does not learn it. On the detector's thread it does not wait. */
const char *td__endpoint_find_out(struct td__endpoint *endpoint, int rank, td__deadline deadline);

/* ---- Exclusion -------------------------------------------------------------------------------
 *
 * A rank that is excluded counts as TD__ENDED on all others, although its process may live (exclusion.c). */

enum { TD__EXCLUSION_TEXT = 200 }; /* bytes of a reason */

/** Excludes `rank`, which is another one: on this rank, and on all others that are present and answer. TD_ERR_STATE if
 *  this rank was excluded itself, TD_ERR_PEER if `rank` has left, TD_ERR_UNSUPPORTED if no rank could end its process. */
td_status td__endpoint_exclude(struct td__endpoint *endpoint, int rank, const char *reason);

/** Whether a td__endpoint_exclude() is running: this rank may learn from it that it was excluded itself. */
bool td__endpoint_is_excluding(const struct td__endpoint *endpoint);

/** TD_OK, or TD_ERR_STATE with the reason: this rank was excluded. Cheap. */
td_status td__endpoint_check_excluded(const struct td__endpoint *endpoint, const char *what);

/** Whether this process was excluded once, from any world. */
bool td__endpoint_was_excluded(void);

/** Whether `rank` was excluded. Cheap. */
bool td__endpoint_is_excluded(const struct td__endpoint *endpoint, int rank);

/** How many exclusions this rank knows. Cheap. */
unsigned td__endpoint_exclusions(const struct td__endpoint *endpoint);

/** Sends all exclusions that this rank knows to `rank`; false if it has not taken them. */
bool td__endpoint_tell_exclusions(struct td__endpoint *endpoint, int rank, td__deadline deadline);

/** Appends the exclusions that this rank knows; reads them, as a rank that is present has put them. */
void td__endpoint_put_exclusions(const struct td__endpoint *endpoint, struct td__buffer *buffer);
void td__endpoint_take_exclusions(struct td__endpoint *endpoint, struct td__reader *reader);

/** Ends the processes of excluded ranks of this host, with which this rank shares memory, and waits until they have
 *  ended; TD_ERR_TIMEOUT names one that has not by the deadline. */
td_status td__endpoint_fence(struct td__endpoint *endpoint, td__deadline deadline);

/* ---- Waiters ---------------------------------------------------------------------------------
 *
 * A thread that waits for other ranks sleeps until its condition is signalled, or until an event after which the
 * condition may never become true: a rank has ended, left or is cut off, a group was aborted, another rank has
 * connected. Each such event wakes all waiters of the endpoint, and each waiter checks the presence of the ranks
 * that it waits for, and the state of its group. */

struct td__endpoint_waiter {
    LIST_ENTRY(td__endpoint_waiter) link; /* the endpoint's */

    /** Makes the thread check again, now or before it sleeps next. Called on any thread, with the lock of the
     *  endpoint held: must not block, nor call the endpoint. */
    void (*wake)(void *arg);
    void *arg;
};

/** Adds a waiter, which the caller owns; after td__endpoint_remove_waiter() its wake() is not called any more. For
 *  the lifetime of a communicator, not for a call. Removing an all-zero waiter does nothing. */
void td__endpoint_add_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter);
void td__endpoint_remove_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter);

/** Wakes all waiters of this rank, after a change of a state that they check. */
void td__endpoint_wake_waiters(struct td__endpoint *endpoint);

/** Wakes the waiters of `rank`, if it can be reached by the deadline. */
void td__endpoint_wake_rank(struct td__endpoint *endpoint, int rank, td__deadline deadline);

/** Wakes all waiters of this rank once, as soon as `fd` is readable, which may be now: for a waiter that sleeps on
 *  a futex and also waits for descriptors. Closing `fd` cancels it. */
void td__endpoint_wake_on(struct td__endpoint *endpoint, int fd);

/* ---- Queries ---------------------------------------------------------------------------------
 *
 * The listener's thread of the other rank answers a query at once, independently of its program. */

enum { TD__ANSWER_LIMIT = 32768 };

/** Answers a query of `rank`: appends to `answer`. Called on the listener's thread: must not block. */
typedef void (*td__answer_fn)(void *arg, int rank, uint32_t topic, uint64_t group, uint64_t value,
                              struct td__buffer *answer);

/** Sets the function that answers queries; NULL: none. After this returns, the former one is not called any more. */
void td__endpoint_answer(struct td__endpoint *endpoint, td__answer_fn fn, void *arg);

/** Sends a query to `rank`, and appends its answer, at most TD__ANSWER_LIMIT bytes. TD_ERR_TIMEOUT if it does not
 *  answer in time, TD_ERR_PEER if it cannot be reached or has no td__answer_fn. */
td_status td__endpoint_query(struct td__endpoint *endpoint, int rank, uint32_t topic,
                             uint64_t group, uint64_t value, td__deadline deadline,
                             struct td__buffer *answer);

/** Sends a query as a notification: ignores the answer, and failures. */
void td__endpoint_notify(struct td__endpoint *endpoint, int rank, uint32_t topic, uint64_t group,
                         uint64_t value, td__deadline deadline);

/* ---- Links -----------------------------------------------------------------------------------
 *
 * A link is a connected stream socket: non-blocking, without delay, TCP between hosts and a unix
 * socket inside one (TCP there, too, where the endpoint is not `shared`). It belongs to the caller that
 * got it. `group` is the number of a group, the same on all its ranks and unique in the world. */

/** Opens a link to `rank`, which gets it from td__endpoint_accept() or its td__link_fn. */
td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__link_channel channel, td__deadline deadline, int *fd);

/** The same for a caller that only sends a short notice: if nothing listens at the address of `rank`, fails at once,
 *  without the reason. */
td_status td__endpoint_connect_briefly(struct td__endpoint *endpoint, int rank, uint64_t group,
                                       enum td__link_channel channel, td__deadline deadline,
                                       int *fd);

/** Waits for the link that `rank` opens to this rank. */
td_status td__endpoint_accept(struct td__endpoint *endpoint, int rank, uint64_t group,
                              enum td__link_channel channel, td__deadline deadline, int *fd);

/** Gets a link that `rank` has opened, and owns it. Called on the listener's thread: must not block. */
typedef void (*td__link_fn)(void *arg, int rank, int fd);

/** Passes all links of this group and channel to `fn`, those that have arrived already at once. With NULL, the former
 *  `fn` is not called any more after this returns, and links that arrive later are closed. */
void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group,
                         enum td__link_channel channel, td__link_fn fn, void *arg);

/** Forgets a group: closes its links that were not accepted, and withdraws its shared fds. */
void td__endpoint_forget(struct td__endpoint *endpoint, uint64_t group);

/** Whether `rank` has once not received, in time, the data that was sent to it before a link was closed; `note`
 *  records that it has not. */
bool td__endpoint_is_unresponsive(struct td__endpoint *endpoint, int rank, bool note);

/* ---- Shared memory (ranks of one host) ------------------------------------------------------- */

/** Offers the descriptor `fd` to other ranks under `group`. The caller owns it, and keeps it open until
 *  td__endpoint_forget(). */
td_status td__endpoint_offer(struct td__endpoint *endpoint, uint64_t group, int fd);

/** Hands a copy of the descriptor offered under `group` over to `rank`, whose td__endpoint_fetch() returns it after
 *  this rank has left. */
td_status td__endpoint_hand_over(struct td__endpoint *endpoint, int rank, uint64_t group, int fd,
                                 td__deadline deadline);

/** Gets a copy of the descriptor that `rank` offers, or will offer by the deadline. TD_ERR_ABORTED when
 *  *given_up (which may be NULL) becomes true. */
td_status td__endpoint_fetch(struct td__endpoint *endpoint, int rank, uint64_t group,
                             td__deadline deadline, const atomic_bool *given_up, int *fd);

/** The same without waiting for the offer: TD_ERR_PEER at once if there is none. */
td_status td__endpoint_fetch_now(struct td__endpoint *endpoint, int rank, uint64_t group,
                                 td__deadline deadline, int *fd);

/** Maps `size` bytes at `offset` of the default arena of `rank`, on the same host. The address is valid until the
 *  endpoint is closed, or td__endpoint_unmap(). Cheap after the first time. */
td_status td__endpoint_map(struct td__endpoint *endpoint, int rank, size_t offset, size_t size,
                           td__deadline deadline, void **address);
void td__endpoint_unmap(struct td__endpoint *endpoint, int rank);
/** What is mapped stays so, but its pages do not count as this process's any more until they are accessed again. At any
 *  time, also while other threads access them. */
void td__endpoint_drop_pages(struct td__endpoint *endpoint);

#endif
