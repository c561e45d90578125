/* The links of a socket comm: one stream socket for each pair of members that has exchanged data.
 *
 * A link is opened on first use; the member with the higher index connects. Links stay open until the comm is
 * destroyed, also after a failure: the data in them must still reach the other members.
 *
 * A member that waits for the link of a higher one can connect to it by a side link, to notify it. A side link
 * carries no data. */
#ifndef TD_TCP_LINKS_H
#define TD_TCP_LINKS_H

#include "call/call_header.h"
#include "tcp/tcp_comm.h"

#include <stdatomic.h>

/** Opens the links: an endpoint, or a test. `peer` is the index of a member. */
struct td__link_source {
    /** `briefly`, for a side link: fails at once if nothing listens at the peer's address. */
    td_status (*connect)(void *arg, int peer, bool briefly, td__deadline deadline, int *fd);

    /** Takes the link that the peer has opened; TD_ERR_TIMEOUT if it has not opened one yet. When it does, the
     *  source calls td__links_wake(). */
    td_status (*accept)(void *arg, int peer, int *fd);

    /** "rank 3 (on node7, pid 4711)", in a thread-local buffer. */
    const char *(*describe)(void *arg, int peer);

    /** Passes links that arrive from now on to `fn`; with NULL they are closed. */
    void (*listen)(void *arg, td__link_fn fn, void *fn_arg);

    /** "has left", "was killed by SIGKILL"; NULL while the peer is not known to have ended. `watch`: watches it
     *  from now on, so that its end becomes known. May be NULL. */
    const char *(*exit_reason)(void *arg, int peer, bool watch);

    /** Whether the peer has once not received, in time, the data that was sent to it; `note` records that it has
     *  not. May be NULL. */
    bool (*is_unresponsive)(void *arg, int peer, bool note);
};

struct td__tcp_link {
    int fd;                 /* -1: not open */
    int side;               /* the side link, or -1 */
    bool sending;           /* a frame to the peer has been sent in part */
    bool receiving;         /* a frame from the peer has been received in part */
    bool expected;          /* a frame from the peer is expected in this round */
    uint64_t notified_turn; /* the last turn in which td__links_notify() has sent a notice */
};

struct td__links {
    const struct td__link_source *source;
    void *arg;
    int size, index;
    struct td__tcp_link *at;                                     /* `size` */
    uint8_t failure_notice[TD__HEADER_BYTES + TD__FAILURE_TEXT]; /* header and text … */
    size_t failure_notice_size; /* … once the comm has failed; 0 before */
    bool failure_received;      /* the failure notice of another member */
    int neighbours;             /* members on this machine to which there is a link */
    int wake_set;    /* an epoll set that td__links_sleep() polls: `wake`, and watched links … */
    atomic_int wake; /* … and an eventfd; both -1 until this member first sleeps */
    struct td__comm_callbacks callbacks; /* each may be NULL */
    const int *world_ranks;              /* of the members, for callbacks.compare_calls() */
};

/** A call on the links. */
struct td__link_call {
    struct td__links *links;
    const struct td__operation *operation;
    struct td__call_header header; /* of its frames; `payload` is set for each transfer */
};

/** False if memory is exhausted. */
bool td__links_init(struct td__links *links, const struct td__link_source *source, void *arg,
                    int size, int index);
void td__links_free(struct td__links *links);

/** Opens the link to `peer`, which takes part in the call. */
td_status td__links_open(const struct td__link_call *call, int peer);

/* ---- Sleeping -------------------------------------------------------------------------------- */

struct pollfd;

/** Sleeps until one of the `count` descriptors of `polled` is ready, until td__links_wake(), until a watched link
 *  is readable, or until the deadline. `polled` has space for one more descriptor. Returns the result of poll()
 *  for the `count` descriptors; sets *woken if the caller should call td__links_check_all(). */
int td__links_sleep(struct td__links *links, struct pollfd *polled, uint32_t count,
                    td__deadline deadline, bool *woken);

/** Ends the current sleep, or the next one. From any thread. */
void td__links_wake(struct td__links *links);

/** Watches all links: when one becomes readable, that ends a sleep. Once for each link, since the data may belong
 *  to a later round. Returns a descriptor that becomes readable then, or -1. */
int td__links_watch(struct td__links *links);

/* ---- Long waits ------------------------------------------------------------------------------
 *
 * If ranks have made different calls, each may wait for a frame that is never sent. So a rank that has waited
 * for long notifies the ranks that it waits for of its call, and checks its links for such notices. */

/** TD_ERR_TIMEOUT: this rank has waited for `ranks`. */
td_status td__links_fail_timeout(struct td__links *links, const struct td__operation *operation,
                                 const char *ranks);

/** Fails with the failure notice of another member, if one has arrived; checks nothing else. */
td_status td__links_check_failures(struct td__links *links, const struct td__operation *operation);

/** Notifies `peer`, once a turn, that this rank waits for it in this call; `side_link`: also by a side link. */
void td__links_notify(const struct td__link_call *call, int peer, bool side_link);

/** Accepts pending links, and checks all links. Fails if a member has failed, or has made another call. Sets *next
 *  to the time of the next check, if that is earlier. */
td_status td__links_check_all(const struct td__link_call *call, td__deadline *next);

/** See struct td__link_source; NULL without such a function. */
const char *td__links_exit_reason(const struct td__links *links, int peer, bool watch);

/* ---- Failures -------------------------------------------------------------------------------- */

/** Sends a failure notice with `status` and `reason` on all links, and on each that is opened later. */
void td__links_send_failure(struct td__links *links, const struct td__operation *operation,
                            td_status status, const char *reason);

/** Sends the failure notice to `peer` by a side link, if its link has not carried it. */
void td__links_send_failure_to(struct td__links *links, int peer, td__deadline deadline);

/** The same to all members, unless there are very many. */
void td__links_send_failure_to_all(struct td__links *links, td__deadline deadline);

/** Checks the link to a peer from which nothing is expected in this round: fails on everything but a notice that
 *  the peer waits. */
td_status td__links_check_peer(const struct td__link_call *call, int peer);

/** Checks the header `theirs`, which differs from that of the call, and was received from `peer` on `fd` with the
 *  first `size` bytes of its payload, `text`. TD_OK if it does not concern this call. */
td_status td__links_check_header(const struct td__link_call *call, int peer, int fd,
                                 const struct td__call_header *theirs, const void *text,
                                 size_t size);

/** TD_ERR_MISMATCH: `peer` has sent bytes that are not a header. */
td_status td__links_fail_invalid(const struct td__link_call *call, int peer);

/** The last error says that `peer` cannot be reached. Fails with the cause of that if a member has reported it,
 *  else with the last error. */
td_status td__links_find_cause(const struct td__link_call *call, int peer);

/** The link to `peer` has ended, with an errno or 0. Fails with the cause of that if a member has reported it,
 *  else with TD_ERR_PEER. */
td_status td__links_fail_end(const struct td__link_call *call, int peer, int error);

#endif
