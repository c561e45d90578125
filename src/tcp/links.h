/* The links of a socket comm: one stream socket for each pair of members that has talked.
 *
 * Links are opened on first use, the higher index of the two connecting. They stay open until the
 * comm is destroyed, after a failure, too: what is in them must still reach the others.
 *
 * A rank that waits for a higher one which does not connect can connect to it on the side, to be heard:
 * such a side link carries no data. */
#ifndef TD_TCP_LINKS_H
#define TD_TCP_LINKS_H

#include "call/call_header.h"
#include "peer/endpoint.h"

#include <stdatomic.h>

/** Where links come from: an endpoint, or a test. Members are given by their index. */
struct td__link_source {
    td_status (*connect)(void *arg, int peer, td__deadline deadline, int *fd);

    /** The same to tell the peer something: fails at once where nobody is there. */
    td_status (*approach)(void *arg, int peer, td__deadline deadline, int *fd);

    /** Takes the link that the peer has opened; TD_ERR_TIMEOUT where it has not yet. When it does, the source
     *  calls td__links_wake(). */
    td_status (*accept)(void *arg, int peer, int *fd);

    /** "rank 3 (on node7, pid 4711)", into a buffer of the thread's own. */
    const char *(*describe)(void *arg, int peer);

    /** Hands links that come from now on to `fn`; with NULL they are closed. */
    void (*listen)(void *arg, td__link_fn fn, void *fn_arg);

    /** "has left", "was killed by SIGKILL"; NULL while the peer is there, as far as is known. Both may be
     *  NULL themselves. */
    const char *(*exit_reason)(void *arg, int peer);

    /** Watches the peer from now on, so that its exit_reason will be known. */
    void (*watch)(void *arg, int peer);

    /** Whether the peer has once been waited for in vain, to take what was sent to it; where `note`, it has
     *  been now. May be NULL. */
    bool (*is_deaf)(void *arg, int peer, bool note);

    /** The peer has made other calls before: TD_ERR_MISMATCH with the first of them, or TD_OK where that is
     *  not known any more. May be NULL. */
    td_status (*recall)(void *arg, int peer, const struct td__operation *operation);
};

struct td__tcp_link {
    int fd;         /* -1: not open */
    int side;       /* likewise */
    bool sending;   /* a message to the peer has been sent in part */
    bool receiving; /* one from it has been received in part */
    bool expected;  /* one is expected in this round */
    uint64_t told;  /* the turn in which the peer was told that it is waited for */
};

struct td__links {
    const struct td__link_source *source;
    void *arg;
    int size, index;
    struct td__tcp_link *at; /* `size` */
    uint8_t *goodbye;        /* header and text, once the comm has failed */
    size_t goodbye_size;
    bool heard;     /* another member's goodbye */
    int neighbours; /* members on this machine to which there is a link */
    int wake_set;   /* an epoll that td__links_sleep() polls: of `wake`, and of watched links … */
    atomic_int wake; /* … and an eventfd; both -1 until this member first sleeps */

    /** Fails where the call has become pointless for a reason outside the comm, and may set *next to an earlier
     *  time for the next look; called when a waiting thread is woken, and during long waits. May be NULL. */
    td_status (*outside)(void *arg, const struct td__operation *operation, td__deadline *next);

    /** Adds to the last error, that a call was not done in time, where the others are. May be NULL. */
    void (*explain)(void *arg, const struct td__operation *operation);
    void *outside_arg;
};

/** False without memory. */
bool td__links_init(struct td__links *links, const struct td__link_source *source, void *arg,
                    int size, int index);
void td__links_free(struct td__links *links);

/** Opens the link to `peer`, which takes part in the call of `header`, too. */
td_status td__links_open(struct td__links *links, int peer, const struct td__operation *operation,
                         const struct td__call_header *header);

/* ---- Sleeping -------------------------------------------------------------------------------- */

struct pollfd;

/** Sleeps until one of the `count` descriptors of `polled`, which has room for one more, is ready, until
 *  td__links_wake(), until there is something on a watched link, or the deadline. Returns what poll() does for
 *  these descriptors; *woken becomes true where the caller should look around. */
int td__links_sleep(struct td__links *links, struct pollfd *polled, uint32_t count,
                    td__deadline deadline, bool *woken);

/** Wakes the thread that sleeps, or will sleep next. On any thread. */
void td__links_wake(struct td__links *links);

/** Watches all links, so that what comes on one of them ends a sleep; once for each link, since what comes may
 *  belong to a later round. Returns the descriptor that becomes readable then, or -1. */
int td__links_watch(struct td__links *links);

/* ---- Waiting for long ------------------------------------------------------------------------
 *
 * Where ranks have made different calls, each may wait for a message that never comes. So whoever
 * waits for long tells those whom it waits for in which call, and looks for such news from others. */

/** TD_ERR_TIMEOUT: this rank has waited for `whom`. */
td_status td__links_fail_timeout(struct td__links *links, const struct td__operation *operation,
                                 const char *whom);

/** Fails as another member has, where its goodbye is there; looks at nothing else. */
td_status td__links_hear(struct td__links *links, const struct td__operation *operation);

/** Tells `peer`, once a turn, that this rank waits for it in the call of `header`; also on the side,
 *  where `aside`. */
void td__links_tell(struct td__links *links, int peer, const struct td__call_header *header,
                    bool aside);

/** Looks at all links, and for those that others have opened. TD_OK where nobody is seen to have
 *  failed, or to have made another call than `header`'s. *next becomes the time of the next look, where that
 *  is earlier. */
td_status td__links_look_around(struct td__links *links, const struct td__operation *operation,
                                const struct td__call_header *header, td__deadline *next);

/** Why nothing more comes from `peer`, or NULL; it is watched from now on. */
const char *td__links_exit_reason(const struct td__links *links, int peer);

/* ---- Ends and goodbyes ----------------------------------------------------------------------- */

/** Tells all that are linked, and all that will be, that this member has failed with `status` and
 *  for which reason. For whoever waits for it, now or later. */
void td__links_say_goodbye(struct td__links *links, const struct td__operation *operation,
                           td_status status, const char *reason);

/** Says it to `peer` on the side, where the link has not carried it. */
void td__links_reach(struct td__links *links, int peer, td__deadline deadline);

/** Looks at the link to a peer from which nothing is due in this round: a failure where there is
 *  anything but the notice that it waits. */
td_status td__links_look_at(struct td__links *links, int peer,
                            const struct td__operation *operation,
                            const struct td__call_header *mine);

/** Another header than `mine` has come from `peer`, and was taken from `fd`: TD_OK where it means
 *  nothing for this call, otherwise a failure. `text` are `size` bytes that have been taken from
 *  behind it. */
td_status td__links_judge(struct td__links *links, int peer, int fd,
                          const struct td__operation *operation, const struct td__call_header *mine,
                          const struct td__call_header *theirs, const void *text, size_t size);

/** TD_ERR_MISMATCH: something that is no header has come. */
td_status td__links_fail_noise(struct td__links *links, int peer,
                               const struct td__operation *operation);

/** The last error says that `peer` cannot be reached. Fails with the reason for that where it is found, else with the last
 *  error. */
td_status td__links_find_cause(struct td__links *links, int peer,
                               const struct td__operation *operation,
                               const struct td__call_header *mine);

/** The link to `peer` has ended, with an errno or 0. Where this is the consequence of a failure that
 *  somebody tells about, fails with that; otherwise TD_ERR_PEER. */
td_status td__links_fail_end(struct td__links *links, int peer,
                             const struct td__operation *operation,
                             const struct td__call_header *mine, int error);

#endif
