/* A rank's place among the others: how they reach it, and how it reaches them.
 *
 * Each rank has a card (its host, its addresses, the identity of its listener) and is given the cards of the
 * others. A rank that wants something from another connects to it, proves the job's secret to just this
 * listener, and says what it wants:
 *
 *     a link      the connection itself becomes a stream between the two, for one channel of one group
 *     a shared_fd     a descriptor that the other has laid out: its arena, a group's control memory
 *
 * The second goes over unix sockets, so only between ranks of one host. Nothing is opened before
 * somebody asks for it. All functions may be called from any thread. */
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

/** Closes everything. No call may be under way. */
void td__endpoint_close(struct td__endpoint *endpoint);

int td__endpoint_rank(const struct td__endpoint *endpoint);
int td__endpoint_size(const struct td__endpoint *endpoint);

/** Which host `rank` is on: hosts are numbered from 0 in the order of their first rank. */
int td__endpoint_host(const struct td__endpoint *endpoint, int rank);

/** The process of `rank`, as it calls itself. */
int td__endpoint_pid(const struct td__endpoint *endpoint, int rank);

/** "rank 3 (on node7, pid 4711)", into a buffer of the thread's own. */
const char *td__endpoint_describe(const struct td__endpoint *endpoint, int rank);

/* ---- Presence --------------------------------------------------------------------------------
 *
 * Who is still there; failure_detector.c says how that is known. */

enum td__presence {
    TD__PRESENT, /* as far as is known */
    TD__LEFT,    /* in order */
    TD__GONE,    /* nobody is at its address: it has left, or has ended unseen */
    TD__ENDED,   /* its process has, without leaving */
    TD__CUT_OFF, /* its host has not answered for longer than TANDEM_HEARTBEAT */
};

typedef struct td__look_fns {
    /** Whether a rank of this host has left in order; where this is NULL, ranks of this host are treated
     *  like others. */
    bool (*has_left)(void *arg, int rank);

    /** Called a few times a second, on the detector's thread. May be NULL. */
    void (*tick)(void *arg);
} td__look_fns;

/** Begins to look after the others. Once, after td__endpoint_connect_all(). */
td_status td__endpoint_start_detector(struct td__endpoint *endpoint, const td__look_fns *fns,
                                      void *arg);

/** Ends it: the functions above are not called any more. */
void td__endpoint_stop_detector(struct td__endpoint *endpoint);

/** What is known of `rank`. Cheap. */
enum td__presence td__endpoint_presence(const struct td__endpoint *endpoint, int rank);

/** How many have died or are cut off. Cheap: who remembers the number sees whether there is news. */
unsigned td__endpoint_losses(const struct td__endpoint *endpoint);

/** For somebody who waits for `rank`: it is watched from now on, wherever it is. Cheap after the first
 *  time. */
void td__endpoint_watch(struct td__endpoint *endpoint, int rank);

/** Whether the process of `rank` is seen to be stopped. */
bool td__endpoint_is_stopped(const struct td__endpoint *endpoint, int rank);

/** "was killed by SIGKILL", "has left", …; NULL while it is there. In a buffer of the thread's own. */
const char *td__endpoint_exit_reason(const struct td__endpoint *endpoint, int rank);

/** The same for somebody whose connection to `rank` has ended: it takes a moment to find out why, at most
 *  until the deadline. NULL where nothing can be. At once on the detector's own thread. */
const char *td__endpoint_find_out(struct td__endpoint *endpoint, int rank, td__deadline deadline);

/* ---- Questions -------------------------------------------------------------------------------
 *
 * A rank can ask another something that is answered at once by the other's endpoint, whatever its
 * program is doing. */

enum { TD__ANSWER_LIMIT = 32768 };

/** Answers a question of `rank`: appends to `answer`. On the endpoint's own thread: must not block. */
typedef void (*td__answer_fn)(void *arg, int rank, uint32_t topic, uint64_t group, uint64_t value,
                              struct td__buffer *answer);

/** Who answers; NULL: nobody. After this the former one is not called any more. */
void td__endpoint_answer(struct td__endpoint *endpoint, td__answer_fn fn, void *arg);

/** Asks `rank`, and appends its answer, TD__ANSWER_LIMIT bytes at most. TD_ERR_TIMEOUT where it does not
 *  answer in time, TD_ERR_PEER where it cannot be reached, or nobody answers there. */
td_status td__endpoint_ask(struct td__endpoint *endpoint, int rank, uint32_t topic, uint64_t group,
                           uint64_t value, td__deadline deadline, struct td__buffer *answer);

/** The same where only being asked matters. Whether it was does not. */
void td__endpoint_tell(struct td__endpoint *endpoint, int rank, uint32_t topic, uint64_t group,
                       uint64_t value, td__deadline deadline);

/* ---- Links -----------------------------------------------------------------------------------
 *
 * A link is a connected stream socket: non-blocking, without delay, TCP between hosts and a unix
 * socket inside one (TCP there, too, where the endpoint is not `shared`). It belongs to whoever got
 * it. `group` is the number of a group, the same on all its ranks and unique in the world. */

/** Opens a link to `rank`, which gets it from td__endpoint_accept() or its td__link_fn. */
td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__link_channel channel, td__deadline deadline, int *fd);

/** The same for somebody who only has to tell `rank` something: where nobody is there, it fails at once, and
 *  does not find out why. */
td_status td__endpoint_connect_briefly(struct td__endpoint *endpoint, int rank, uint64_t group,
                                       enum td__link_channel channel, td__deadline deadline,
                                       int *fd);

/** Waits for the link that `rank` opens to here. */
td_status td__endpoint_accept(struct td__endpoint *endpoint, int rank, uint64_t group,
                              enum td__link_channel channel, td__deadline deadline, int *fd);

/** Takes over a link that `rank` has opened; on the endpoint's own thread, so it must not block. */
typedef void (*td__link_fn)(void *arg, int rank, int fd);

/** Hands all links to this group and channel to `fn`, those that have come already at once. NULL ends
 *  it: after that `fn` is not called any more, and links that come are closed. */
void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group,
                         enum td__link_channel channel, td__link_fn fn, void *arg);

/** Forgets a group: links for it that nobody has taken are closed. */
void td__endpoint_forget(struct td__endpoint *endpoint, uint64_t group);

/** Whether `rank` has once been waited for in vain, to take what was sent to it; where `note`, it has been
 *  now. */
bool td__endpoint_is_deaf(struct td__endpoint *endpoint, int rank, bool note);

/* ---- Shared memory (ranks of one host) ------------------------------------------------------- */

/** Lays the descriptor `fd` out for others under `group`; it stays the caller's, and must stay open
 *  until td__endpoint_forget(). */
td_status td__endpoint_offer(struct td__endpoint *endpoint, uint64_t group, int fd);

/** Gives a copy of what is laid out under `group` to `rank`, which has it from then on as if it had laid it
 *  out itself, and finds it with td__endpoint_fetch() when this rank is gone. */
td_status td__endpoint_hand_over(struct td__endpoint *endpoint, int rank, uint64_t group, int fd,
                                 td__deadline deadline);

/** Gets a copy of what `rank` has laid out, or will have by the deadline. Given up with TD_ERR_ABORTED
 *  when *given_up (which may be NULL) becomes true. */
td_status td__endpoint_fetch(struct td__endpoint *endpoint, int rank, uint64_t group,
                             td__deadline deadline, const atomic_bool *given_up, int *fd);

/** The same of what `rank` has laid out by now: TD_ERR_PEER at once where it has not. */
td_status td__endpoint_fetch_now(struct td__endpoint *endpoint, int rank, uint64_t group,
                                 td__deadline deadline, int *fd);

/** Maps `size` bytes at `offset` of the default arena of `rank`, on the same host. The address stays
 *  good until the endpoint is closed. Cheap except for the first time. */
td_status td__endpoint_map(struct td__endpoint *endpoint, int rank, size_t offset, size_t size,
                           td__deadline deadline, void **address);

#endif
