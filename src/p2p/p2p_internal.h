/* What the files of src/p2p share.
 *
 *     p2p.c            the calls of p2p.h: creating, posting, destroying
 *     p2p_posts.c      posts: their lists, failures, deadlines; ranks that have ended or left
 *     p2p_match.c      matching of receives and messages
 *     p2p_progress.c   the progress engine: waiting threads, and a thread of its own
 *     p2p_wait.c       waiting: spinning, yielding, sleeping
 *     p2p_shm.c        the memory that the ranks of a host share, and their processes
 *     p2p_ring.c       the rings in that memory
 *     p2p_large.c      large messages on one host: copied once, by both sides where both wait
 *     p2p_tcp.c        links to other hosts
 *     p2p_wire.c       parsing what comes on a link
 *
 * Terms: a message is what a send sends and a recv receives. A frame is the unit of a ring or link: a
 * header, and for some kinds a payload; a small message is one frame, a large one several. A descriptor is an
 * entry in shared memory through which a large message is copied.
 *
 * A post is a send or a recv that has begun and not ended. It is in the list of all posts, and in the one list
 * that is its state:
 *
 *     recv   peer->posted or any  ──────────────────────────────────────────────> finished
 *              └─ large: active (copied by descriptor), or expected (in pieces) ─────┘
 *     send   peer->queue  ── small: written ────────────────────────────────────> finished
 *              └─ large: active (descriptor), or announced ─ go ─ peer->queue ───────┘
 *
 * One lock guards everything; it is never held while a large message is copied, while a work is
 * completed (its callback may post), or while a thread waits. */
#ifndef TD_P2P_P2P_INTERNAL_H
#define TD_P2P_P2P_INTERNAL_H

#include "base/thread.h"
#include "p2p/p2p.h"
#include "peer/wait_event.h"

#include <tandem/backend.h>

#include <pthread.h>
#include <sys/queue.h>

enum td__frame_kind {
    TD__FRAME_NONE,    /* shared memory: no frame yet */
    TD__FRAME_EAGER,   /* the payload follows */
    TD__FRAME_LARGE,   /* shared memory: the payload is copied through a descriptor */
    TD__FRAME_REQUEST, /* the payload comes after a GO */
    TD__FRAME_DATA,    /* the payload of a REQUEST, or a piece of it, follows */
    TD__FRAME_GO,      /* to the sender: there is a recv for the request */
    TD__FRAME_DROP,    /* to the sender: the recv's buffer is too small; do not send */
    TD__FRAME_CANCEL,  /* to the receiver: the sender gave the request up */
    TD__FRAME_BYE,     /* nothing comes after this */
    TD__FRAME_WRAP,    /* shared memory: go on at the ring's beginning */
    TD__FRAME_KINDS,
};

/** The header of a frame. `id` is the sender's number of a request. */
struct td__envelope {
    enum td__frame_kind kind;
    int source; /* rank in the group */
    int tag;
    uint64_t size;
    uint64_t id;
    uint32_t number;  /* LARGE: the descriptor */
    uint32_t memory;  /* LARGE: how to reach the payload, see p2p_large.c */
    uint64_t address; /* LARGE: where */
};

TAILQ_HEAD(td__post_list, td__post);

struct td__post {
    TAILQ_ENTRY(td__post) entry;
    struct td__post_list *list; /* that it is in, or NULL */
    LIST_ENTRY(td__post) in_all;
    const atomic_bool *complete; /* of the work */
    td_work *work;               /* NULL: a control frame, such as GO, or … */
    atomic_bool *waited;         /* … a thread waits for this, and owns the post */
    enum td__frame_kind kind;    /* of a send: what is to be written next; of a recv: NONE */
    int peer;                    /* may be TD_ANY_SOURCE until a message has come */
    int tag;
    char *data;
    size_t size;
    size_t moved;          /* bytes of the payload that are written or here */
    uint64_t message_size; /* of a recv: the size of the message */
    td__deadline deadline;
    int64_t timeout_ms;
    uint64_t order; /* of a recv: when it was posted */
    uint64_t id;
    struct td__p2p_link *link;     /* of a recv: whose payload is being read into `data` */
    struct td__p2p_stream *stream; /* NULL: the payload is sent, and received, as a whole */

    /* Large messages in shared memory. */
    struct td__descriptor *descriptor;
    uint32_t number;
    uint32_t memory;  /* of a recv: the sender's */
    uint64_t address; /* of a recv: the sender's */
    bool copying;     /* a thread of this process copies it, without the lock */
    bool helped;      /* of a send: this process has copied what it could */

    const char
        *suspect; /* the other side cancelled it: the text, unless the reason becomes known */

    /* Finished. */
    td_status status;
    char *why; /* the text of the failure */
};

/** A message that came before its recv. */
struct td__p2p_arrival {
    TAILQ_ENTRY(td__p2p_arrival) entry;  /* of the same source, in order */
    TAILQ_ENTRY(td__p2p_arrival) in_all; /* of all, in order */
    struct td__envelope envelope;
    char data[]; /* EAGER */
};

TAILQ_HEAD(td__arrival_list, td__p2p_arrival);

/** One direction of a ring: where this process writes, or reads. */
struct td__ring_end {
    struct td__ring *ring;
    _Atomic uint32_t at; /* offset of the next message */
    uint64_t total;      /* bytes written, or taken */
    uint64_t room;       /* of a writer: what `total` may become, as last seen */
};

struct td__peer {
    int local; /* index among the ranks of this host, -1 on another one */
    bool gone; /* ended or left: see `exit_reason` */
    bool stalled;
    bool awaited;    /* a post waits for it; while peers are checked */
    char connecting; /* 1: wanted, 2: running */
    char *exit_reason;
    const char *unexplained;     /* its link has ended, and the reason is not known: the text … */
    td__deadline explain_by;     /* … unless it is known by then */
    td__deadline left_end;       /* it has left: until when its link may arrive; 0: it has not */
    struct td__post_list posted; /* receives from this rank */
    struct td__arrival_list arrivals;
    struct td__post_list queue;        /* to be written, in order */
    struct td__ring_end writes, reads; /* on this host */
    struct td__p2p_link *links[2];     /* elsewhere: opened by us, by the other side */
    _Atomic signed char readable;      /* its memory, by process_vm_readv(): 0 unknown, 1, -1 */
};

enum { TD__DESCRIPTORS = 128 }; /* large sends of a rank that can be copied by descriptor at once */

enum td__owner { TD__OWNER_NONE, TD__OWNER_PROGRAM, TD__OWNER_THREAD };

struct td__p2p {
    struct td__p2p_options options;
    int *world_ranks;
    char *name;
    struct td__peer *peers;

    pthread_mutex_t lock; /* taken after the endpoint's, before those of works */
    uint64_t order;       /* counts receives */
    uint64_t ids;         /* counts requests */
    LIST_HEAD(, td__post) all;
    struct td__post_list any;       /* receives from any source */
    struct td__post_list active;    /* with a descriptor */
    struct td__post_list announced; /* sends that wait for a GO */
    struct td__post_list expected;  /* receives that have sent a GO */
    struct td__post_list copies;    /* active, and waiting for a thread to copy */
    struct td__post_list finished;  /* their works are not completed yet */
    struct td__arrival_list arrivals;
    td__deadline next_deadline; /* no post's is earlier */
    int stalled;                /* peers whose queue waits for room */
    int remaining;              /* other ranks that are not gone */
    int last_gone;              /* of those that are */
    bool unexplained;           /* the end of some peer's link is */
    int lost;                   /* one of those that have ended, or -1 */
    char *aborted;              /* the group was aborted: the reason … */
    td_status aborted_with;     /* … and what calls get */
    unsigned losses;            /* of the endpoint, as last looked at */
    bool alerted;               /* by the endpoint, since the last check of the peers */
    td__deadline next_check;    /* when to check the peers without that */
    td__deadline checked;       /* when they were last */
    td__deadline attach_by; /* 0: the owner of the shared memory is present; else until when other
                               ranks may still map it */

    /* Shared memory; see p2p_shm.c. */
    bool attach_wanted, attaching, attached;
    int *locals; /* ranks of this host, in order */
    int local_size, local_index;
    struct td__shared *shared;
    bool taken[TD__DESCRIPTORS]; /* of this rank: in use */
    _Atomic uint32_t departures; /* as last seen */
    uint64_t nonce;              /* by which others see whether they can read this process */

    /* Links; see p2p_tcp.c. */
    int epoll, event; /* -1 until links are needed */
    int links;
    int connects_wanted;
    struct td__p2p_link *closed;    /* to be freed after the current events */
    struct td__p2p_link *kept_open; /* of an aborted group: open until it is destroyed */

    /* Progress; see p2p_progress.c. */
    _Atomic int watch;         /* above 0: looking at the rings is not enough */
    unsigned oversubscribed;   /* with how many others each rank of this host shares a processor */
    bool maybe_oversubscribed; /* the same if all ranks were here, as they can be with links, too */
    enum td__owner owner;      /* of the right to sleep until something happens */
    int sleepers;              /* owners without the lock; a deposed one may still be among them */
    td__deadline asleep_until; /* of the last one of them */
    int unattached; /* of the sleepers, those on `changed` until there is something to sleep on */
    int waiters;    /* threads that wait for another to do it */
    pthread_cond_t changed;
    pthread_cond_t thread_wake;
    pthread_t thread;
    bool thread_runs, thread_rests, stopping;
    bool thread_naps_long; /* it has to be woken when the owner has gone */
    uint64_t turns;        /* counts the threads of the program that have been owners */
    struct td__endpoint_waiter waiter;
    uint64_t posts; /* counts them, so that the thread sees whether there were new ones */
};

/* What the endpoint knows of a rank of the group. */
static inline enum td__presence td__p2p_presence(const struct td__p2p *p2p, int rank)
{
    return td__endpoint_presence(p2p->options.endpoint, p2p->world_ranks[rank]);
}

static inline const char *td__p2p_exit_reason(const struct td__p2p *p2p, int rank)
{
    return td__endpoint_exit_reason(p2p->options.endpoint, p2p->world_ranks[rank]);
}

static inline const char *td__p2p_describe(const struct td__p2p *p2p, int rank)
{
    return td__endpoint_describe(p2p->options.endpoint, p2p->world_ranks[rank]);
}

/* ---- p2p_posts.c, p2p_match.c ------------------------------------------------------ */

static inline bool td__is_send(const struct td__post *post)
{
    return post->kind != TD__FRAME_NONE;
}

/* Of a send: the bytes of the payload that can be read. */
static inline size_t td__post_ready(const struct td__post *post)
{
    return post->stream ? post->stream->ready : post->size;
}

/* Of a recv: the first `bytes` of the payload are there. With the lock held, or while `copying`. */
static inline void td__post_arrived(const struct td__post *post, size_t bytes)
{
    if (post->stream && bytes < post->message_size)
        post->stream->arrived(post->stream, bytes);
}

/** Moves a post from the list that it is in, if any, to the end of another one. */
void td__post_move(struct td__post *post, struct td__post_list *list);

/** Takes a new post into the list of all. */
void td__post_begin(struct td__p2p *p2p, struct td__post *post);

/** Appends a control frame to `queue`; false if out of memory. */
bool td__post_control(struct td__p2p *p2p, struct td__post_list *queue, enum td__frame_kind kind,
                      int peer, uint64_t id);

/** Ends a post; td__p2p_settle() completes its work. With a failure, td_last_error() is kept. */
void td__post_finish(struct td__p2p *p2p, struct td__post *post, td_status status);

/** The other side has cancelled a post, which has no descriptor any more. It ends like the group where that
 *  turns out to be aborted within a moment, otherwise with TD_ERR_PEER and `why`. */
void td__post_suspect(struct td__p2p *p2p, struct td__post *post, const char *why);

/** TD_ERR_PEER with the text of td__post_suspect(), and the ranks of the group that are gone. */
td_status td__post_fail_suspected(struct td__p2p *p2p, const struct td__post *post);

/** The receiver waits for the payload of a send: queues it. */
void td__post_send_data(struct td__p2p *p2p, struct td__post *post);

/** The post as text: "recv of 8 bytes from rank 3 …, tag 5, on group "world"". */
const char *td__post_describe(struct td__p2p *p2p, const struct td__post *post);

/** Whether a recv of tag `wanted` takes a message with `tag`. */
static inline bool td__tag_fits(int wanted, int tag)
{
    return wanted == tag || (wanted == TD_ANY_TAG && tag >= 0);
}

/** The first posted recv for such a message, which stays in its list. */
struct td__post *td__match_posted(struct td__p2p *p2p, int source, int tag);

/** The first message that fits a new recv. */
struct td__p2p_arrival *td__match_arrival(struct td__p2p *p2p, int source, int tag);

/** Takes a message out of the lists, and frees it. */
void td__arrival_drop(struct td__p2p *p2p, struct td__p2p_arrival *arrival);

/** Room for a message whose bytes are still coming, which is not in the lists (NULL if out of memory); and when it is
 *  whole, it goes to a recv that was posted meanwhile, or into the lists. */
struct td__p2p_arrival *td__arrival_make(const struct td__envelope *envelope);
void td__arrival_complete(struct td__p2p *p2p, struct td__p2p_arrival *arrival);

/** Binds a recv to its message. False, and the post has ended, where the message is too long. */
bool td__take(struct td__p2p *p2p, struct td__post *post, const struct td__envelope *envelope);

/** A recv is matched with a message: `data` is its payload if it is EAGER, otherwise the sender still has it. False
 *  when the sender has cancelled it: then nothing has happened, and the message is dropped. */
bool td__match(struct td__p2p *p2p, struct td__post *post, const struct td__envelope *envelope,
               const void *data);

/** Handles a frame of any kind but DATA; `data` is the payload if it is EAGER. False when it is not valid, or cannot
 *  be kept. */
bool td__take_frame(struct td__p2p *p2p, const struct td__envelope *envelope, const void *data);

/** The expected recv of a DATA frame, or NULL. */
struct td__post *td__find_expected(struct td__p2p *p2p, int source, uint64_t id);

/** Marks a rank as gone, and fails all posts that wait for it. `exit_reason` begins with
 *  "has" or "is", such as "has left the group". */
void td__peer_gone(struct td__p2p *p2p, int peer, const char *exit_reason);

/** The same for one whose link has ended, with or without a BYE: with the failure detector's reason, or else
 *  `exit_reason`. */
void td__peer_lost(struct td__p2p *p2p, int peer, bool bye, const char *exit_reason);

/** Ends a send that is not active with the last error, on both sides. */
void td__post_cancel_send(struct td__p2p *p2p, struct td__post *post, td_status status);

/** Ends what is past its deadline. */
void td__expire(struct td__p2p *p2p, int64_t now);

/** Parts with ranks that have ended or left: all of them, or those that a post waits for. Sets when to check
 *  again. */
void td__p2p_check_peers(struct td__p2p *p2p, bool all);

/** TD_ERR_PEER with the reason why the peer of `post` is gone, or the failure of the group that was aborted. */
td_status td__peer_refuse(struct td__p2p *p2p, const struct td__post *post);

/** TD_OK, or why a recv from any rank fails: a rank has ended, or no other is left. */
td_status td__any_cannot_come(struct td__p2p *p2p, const struct td__post *post);

/* ---- p2p_progress.c --------------------------------------------------------------------- */

/** With the lock held: reads and writes all rings and links that are ready. True when something happened. */
bool td__p2p_pump(struct td__p2p *p2p);

/** With the lock held, which is released in between: completes the works of the posts that ended. */
void td__p2p_settle(struct td__p2p *p2p);

/** With the lock held, which is released at the end: waits until `complete`, for `peer`, or for any rank
 *  (TD_ANY_SOURCE), at most until the deadline. */
void td__p2p_wait(struct td__p2p *p2p, const atomic_bool *complete, int peer,
                  td__deadline deadline);

/** With the lock held, after a new post that is not done: makes sure that a thread makes progress on it. */
void td__p2p_attend(struct td__p2p *p2p);

/** Ends the thread. */
void td__p2p_stop(struct td__p2p *p2p);

/** Writes what is in a peer's queue, as far as there is room. */
void td__peer_flush(struct td__p2p *p2p, int peer);

/* ---- p2p_wait.c ------------------------------------------------------------------------ */

/* The state of a thread that waits. */
struct td__p2p_wait {
    struct td__waiting waiting;
    td__deadline deadline;
    int peer;                   /* the rank that is waited for; TD_ANY_SOURCE: any, or not known */
    bool at_once;               /* sleeps without spinning before */
    bool begun;                 /* `waiting` is in use */
    bool slept;                 /* it is time to check deadlines */
    td__deadline until;         /* when to return from sleep at the latest */
    struct td__backoff backoff; /* with links */
};

static inline bool td__is_set(const atomic_bool *complete)
{
    return complete && atomic_load_explicit(complete, memory_order_acquire);
}

/** With the lock held, which is released meanwhile: one step of waiting for `complete` (which may be NULL) or
 *  any frame. False when the deadline has passed. Only the owner calls it. */
bool td__p2p_wait_step(struct td__p2p *p2p, struct td__p2p_wait *wait, const atomic_bool *complete);

/** Something has happened, or the wait is over: the next step begins with spinning again. */
void td__p2p_wait_reset(struct td__p2p_wait *wait);

/** With the lock held: wakes the sleeping owner. */
void td__p2p_wake(struct td__p2p *p2p);

/** Ends what is past its deadline, and parts with ranks that have ended or left, where it is time for that. */
void td__p2p_check_deadlines(struct td__p2p *p2p);

/** With the lock held, after a new post: wakes the sleeping owner where it would sleep too long. */
void td__p2p_wake_for_post(struct td__p2p *p2p);

/* ---- p2p_shm.c, p2p_ring.c --------------------------------------------------------- */

/* The memory that the ranks of a host share:
 *
 *     shared | entry of each rank | descriptors of each rank | ring 0→0, 0→1, … 1→0, … */
enum { TD__LINE = 64, TD__RING_BYTES = 32 * 1024, TD__RING_DATA = TD__RING_BYTES - 2 * TD__LINE };

struct td__ring {
    _Alignas(TD__LINE) _Atomic uint64_t head; /* bytes taken; the reader's */
    _Alignas(TD__LINE) _Atomic uint32_t full; /* the writer waits for room */
    _Alignas(TD__LINE) char data[TD__RING_DATA];
};

struct td__p2p_entry {
    _Alignas(TD__LINE) struct td__wait_event event;
    _Alignas(TD__LINE) _Atomic uint32_t pid; /* the others are valid once this is not 0 */
    _Atomic uint32_t gone;
    uint64_t nonce;
    uint64_t nonce_address;
};

struct td__shared {
    _Alignas(TD__LINE) _Atomic uint32_t departures;
    struct td__p2p_entry entries[];
};

/** A rank has left or ended: reads the frames that it wrote before, and marks it as gone. */
void td__ring_lose(struct td__p2p *p2p, int source, const char *exit_reason);

/** From now on `memory` is shared with the ranks of this host. */
void td__p2p_shm_begin(struct td__p2p *p2p, void *memory);

/** A small message straight into the ring; false where there is no room. */
bool td__p2p_shm_send_small(struct td__p2p *p2p, int peer, int tag, const void *data, size_t size);

/** A small message straight from the ring, where one from `source` with this tag is the next, or becomes so
 *  within a moment, and has room. Nothing may be posted, and nothing from that rank be kept. */
bool td__p2p_shm_recv_small(struct td__p2p *p2p, int source, int tag, void *data, size_t room,
                            size_t *size);

/** Writes the first post of a peer's queue as far as there is room: false where there was none. */
bool td__p2p_shm_write(struct td__p2p *p2p, int peer, struct td__post *post);

/** Whether a rank has left since the last check. With or without the lock. */
bool td__p2p_shm_departed(const struct td__p2p *p2p);

/** Without the lock: whether a message has come. */
bool td__p2p_shm_peek(const struct td__p2p *p2p);

/** Takes what has come. */
bool td__p2p_shm_read(struct td__p2p *p2p);

/** Signals the event of a rank of this host, after a frame was written for it. */
void td__p2p_shm_signal(struct td__p2p *p2p, int peer);
struct td__wait_event *td__p2p_shm_own_event(struct td__p2p *p2p);

/** Whether a rank of this host was last seen on another processor than this one. */
bool td__p2p_shm_elsewhere(struct td__p2p *p2p, int peer);

/** Notifies the other ranks of this host that this rank leaves. */
void td__p2p_shm_leave(struct td__p2p *p2p);

struct td__descriptor *td__p2p_shm_descriptor(struct td__p2p *p2p, int local, uint32_t number);

/** The process that a rank of this host is, and whether its memory can be read from here. */
int td__p2p_shm_pid(struct td__p2p *p2p, int peer);
bool td__p2p_shm_readable(struct td__p2p *p2p, int peer);

/** Whether a message goes through the ring whole: where the receiver can map it, copying it once is
 *  faster even for shorter ones, unless the sender has to be scheduled again for it. */
bool td__p2p_shm_is_small(const struct td__p2p *p2p, const void *data, size_t size);

/* ---- p2p_large.c ------------------------------------------------------------------------ */

/** What sender and receiver of a large message share; the sender's, in shared memory. */
struct td__descriptor {
    _Alignas(64) _Atomic uint32_t state;
    _Atomic uint32_t open;    /* the sender may copy, too */
    _Atomic uint64_t ready;   /* bytes that can be copied */
    _Atomic uint64_t next;    /* where the next piece begins */
    _Atomic uint64_t copied;  /* bytes; all of them: the message is there */
    _Atomic uint32_t pushing; /* the sender copies just now */
    uint64_t target;          /* where it goes */
    uint32_t target_memory;   /* and how that is reached */
};

/** Prepares a descriptor for a send and fills in number, memory and address; false where none is free. */
bool td__large_offer(struct td__p2p *p2p, struct td__post *post, struct td__envelope *envelope);

/** A recv takes a LARGE message on: as td__match(). */
bool td__large_claim(struct td__p2p *p2p, struct td__post *post,
                     const struct td__envelope *envelope);

/** The stream of an active send has more bytes. */
void td__large_supply(struct td__p2p *p2p, struct td__post *post);

/** Checks the progress of the active posts. True when something happened. */
bool td__large_look(struct td__p2p *p2p);

/** Copies what is to be copied of one post; releases the lock meanwhile. False: nothing to do. */
bool td__large_copy(struct td__p2p *p2p);

enum td__cancel_mode {
    TD__IF_IDLE, /* not while the other side copies */
    TD__SOON,    /* the other side is to stop; tried again while it still writes */
    TD__AT_ONCE, /* in any case: the other side has ended, or does not stop */
};

/** Tries to take an active post back; false where that is not done yet. */
bool td__large_cancel(struct td__p2p *p2p, struct td__post *post, enum td__cancel_mode how);

#endif
