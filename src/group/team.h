/* The ranks of a group that are on one host, and the memory that they share.
 *
 *     control memory (a memfd, made by the team's first rank, mapped by all)
 *     | head | cell 0 | cell 1 | …   | slots: DEPTH × size | stages: size | messages |
 *
 *     cell    what a rank has reached in its last calls, and what they were
 *     slot    a rank's notice of one call (where its buffers are) and, for a small
 *             call, its data
 *     stage   room for data that pass through in pieces, because they are not in shareable memory
 *
 * A rank announces a call by writing its slot and then its post-it in its cell; others wait for that and
 * read the slot. The slot of call n is used again by call n + DEPTH, so a rank may not announce that
 * before all have begun call n + 1. A call whose data fit into the post-it uses no slot, and there are more
 * of those. Nobody ever waits for more than that: a rank whose part is done goes on.
 *
 * The memory exists once for each group and host. Ranks attach to it on their first call. */
#ifndef TD_GROUP_TEAM_H
#define TD_GROUP_TEAM_H

#include "group/operation.h"
#include "transport/bell.h"
#include "transport/endpoint.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    TD__TEAM_DEPTH = 4,
    TD__TEAM_AHEAD = 32,                 /* the same for calls that do not use their slot */
    TD__TEAM_POSTS = 2 * TD__TEAM_AHEAD, /* they are looked at later than slots */
    TD__PHASE_BITS = 24,
    TD__TINY_BYTES = 48,
    TD__SLOT_BYTES = 32 << 10,   /* of data */
    TD__PIECE_BYTES = 256 << 10, /* of a stage, which has three */
    TD__PIECES = 3,
};

/* What a rank announces about one call, in one cache line, so that one who waits for it has it all when
 * the line comes. */
struct td__post_it {
    _Alignas(64) _Atomic uint64_t stage; /* call << 24 | phase */
    uint64_t print;                      /* what was called, in one word: see team.c */
    char tiny[TD__TINY_BYTES];           /* the data of a call that has no more */
};

struct td__cell {
    struct td__post_it posts[TD__TEAM_POSTS];
    _Alignas(64) uint64_t details[TD__TEAM_POSTS]; /* of calls whose print says that there are */
    /* call << 32 | how many pieces of this rank's share are taken */
    _Alignas(64) _Atomic uint64_t claims;
    _Alignas(64) struct td__bell bell;
    _Alignas(64) _Atomic uint32_t writing; /* it may be writing to the memory of others */
    _Atomic uint32_t attached;             /* the rank has mapped the memory */
    uint64_t nonce, nonce_address;         /* what stands where in the rank's own memory */
    _Atomic uint32_t leaving; /* it takes no part any more, and will not ask for other memory */
};

/* What a rank tells about its call, where it is large or has a factor. Offsets are in its arena, plus
 * one; 0 for memory that cannot be shared. */
struct td__notice {
    uint64_t input, output;
    uint64_t largest;                       /* uneven all_to_all: the largest part, in elements */
    double factor;                          /* premul_sum */
    uint64_t input_address, output_address; /* in its own process */
    uint64_t copies;                        /* the kernel may copy between it and all others */
    uint64_t ways; /* of the first rank, in an all_reduce in place: see reduce_way.h */
};

struct td__slot {
    _Alignas(64) struct td__notice notice;
    char data[TD__SLOT_BYTES];
};

struct td__team_head {
    uint32_t size;
    uint32_t crowded;                                   /* as in the team */
    _Alignas(64) _Atomic uint32_t sleepers;             /* how many may sleep */
    _Alignas(64) _Atomic uint64_t done[TD__TEAM_DEPTH]; /* call << 32 | pieces that are done */
    _Alignas(64) _Atomic uint32_t broken; /* 0, 1: somebody is writing `reason`, 2: it is there */
    uint32_t status;
    char reason[TD__REASON_TEXT];
};

struct td__team {
    struct td__endpoint *endpoint;
    uint64_t key;
    int size, index;
    int *world_ranks;
    unsigned crowded; /* with how many others each rank of this host shares a processor */
    unsigned pauses;  /* before the first look at what is waited for; see team.c */

    pthread_mutex_t attach_lock; /* guards attaching */
    atomic_bool attached;
    atomic_bool given_up; /* by td_group_abort(), perhaps before it is attached */
    int fd;               /* of the memory, for those who ask for it; -1: not attached */
    size_t bytes;
    struct td__team_head *head;
    struct td__cell *cells;
    struct td__slot *slots;
    char *stages;
    void *messages;
    /* Asked during long waits whether there is still a point; or NULL. */
    td_status (*outside)(void *arg, const struct td__operation *operation);
    void *outside_arg;
    /* Adds to the last error, that a call was not done in time, where the others are; or NULL. */
    void (*explain)(void *arg, const struct td__operation *operation);
    uint64_t call;         /* the number of the call at hand, from 1 */
    uint64_t sequence;     /* the same in the group, where calls that were refused count, too */
    td__deadline deadline; /* of the call at hand; 0: nobody had to wait yet */
    uint64_t floor;        /* all have begun this call, and the same up to here */
    const void **sources;  /* the buffers of all, for the call at hand */
    void **targets;
    const void **inputs; /* parts of them, for the piece of work at hand */
    void **outputs;
    double *factors;
    uint64_t nonce;
    int copies;        /* whether the kernel copies between all members: 0 not known yet, 1 or -1 */
    bool past_caches;  /* the call at hand writes more than they hold */
    uint32_t ways;     /* in which the call at hand is reduced in place */
    bool fills_host;   /* it has all ranks of this host */
    bool spread;       /* in a crowded one: this rank has gone to its processor once */
    int64_t next_look; /* when to look whether the ranks are still even; see team_spread.c */
    struct td__team *next; /* among those that are left behind */
};

/** `world_ranks` are the members in order, this rank at `index`. The first one makes the memory; nobody
 *  is waited for. */
td_status td__team_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                          int size, int index, struct td__team **team);
void td__team_destroy(struct td__team *team);

/** How many ranks of the world this host has. */
int td__team_neighbours(struct td__endpoint *endpoint);

/** Tells the others that this rank will not take part any more; whoever waits for it fails. */
void td__team_leave(struct td__team *team);

/** Maps the memory, at the latest now, before the first call. */
td_status td__team_attach(struct td__team *team, td__deadline deadline);

/** Whether all have; those who have not may still ask the first one for it. */
bool td__team_all_attached(struct td__team *team);

/** Carries out `operation` among the members; its root is an index in the team. */
td_status td__team_run(struct td__team *team, const struct td__operation *operation);

/** Before this rank leaves: compares its calls with those of the others, as far as that was not done. Waits
 *  until `deadline` at most for members that have not made them yet. TD_ERR_MISMATCH, for everybody,
 *  where one differs. */
td_status td__team_verify(struct td__team *team, const char *group, td__deadline deadline);

/** Announces a call that is carried out elsewhere, so that members who call something else notice. */
td_status td__team_mention(struct td__team *team, const struct td__operation *operation);

/* ---- For the ways to carry out a call -------------------------------------------------------- */

static inline struct td__slot *td__team_slot(const struct td__team *team, int index)
{
    return &team->slots[(size_t)(team->call % TD__TEAM_DEPTH) * (size_t)team->size + (size_t)index];
}

/** Piece `number` of the stage of `index`. */
static inline char *td__team_piece(const struct td__team *team, int index, uint64_t number)
{
    return team->stages +
           ((size_t)index * TD__PIECES + (size_t)(number % TD__PIECES)) * TD__PIECE_BYTES;
}

/** The post-it of `index` for a call, and that for the call at hand. */
static inline struct td__post_it *td__team_post_of(const struct td__team *team, int index,
                                                   uint64_t call)
{
    return &team->cells[index].posts[call % TD__TEAM_POSTS];
}

static inline struct td__post_it *td__team_post(const struct td__team *team, int index)
{
    return td__team_post_of(team, index, team->call);
}

/** What the post-it says of a rank that has reached `phase` of `call`. */
static inline uint64_t td__team_stage(uint64_t call, unsigned phase)
{
    return call << TD__PHASE_BITS | phase;
}

/** Notes in this rank's cell what it calls; on beginning it. */
void td__team_note(struct td__team *team, const struct td__operation *operation);

/** Compares all calls since the last comparison up to `call`, which `index` has begun, with this rank's:
 *  TD_ERR_MISMATCH, for everybody, where one differs. */
td_status td__team_compare(struct td__team *team, const struct td__operation *operation, int index,
                           uint64_t call);

/** A member that has ended or left: `index`, or with -1 any of them. -1 where there is none. */
int td__team_find_lost(struct td__team *team, int index);

/** Begins the next call: waits until this rank's slot for it may be written, and notes what is called. */
td_status td__team_begin(struct td__team *team, const struct td__operation *operation);

/** The same for a call that does not use its slot. */
td_status td__team_begin_tiny(struct td__team *team, const struct td__operation *operation);

/** Announces that this rank has reached `phase` (from 1) of the call. */
void td__team_reach(struct td__team *team, unsigned phase);

/** Waits until `index` has reached it; in phase 1 also checks that it made the same call. What a rank
 *  that was not waited for has called is looked at by later calls. */
td_status td__team_await(struct td__team *team, const struct td__operation *operation, int index,
                         unsigned phase);

/** Waits for all the others. */
td_status td__team_await_all(struct td__team *team, const struct td__operation *operation,
                             unsigned phase);

/** Waits for all the others, and leaves after the first member: the first goes on before the others do. */
td_status td__team_await_release(struct td__team *team, const struct td__operation *operation);

/** Takes the next piece of the share of `owner` in the call at hand: its number, from 0. */
int td__team_claim(struct td__team *team, int owner);

/** Adds `done` to the pieces that are done, and waits until all `total` are. */
td_status td__team_complete(struct td__team *team, const struct td__operation *operation,
                            uint32_t done, uint32_t total);

/** As td__fail(), for everybody: the others fail in the same way. */
td_status td__team_fail(struct td__team *team, td_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Around all use of the buffers of other members, reading too: a failure where the call has failed already, and
 *  then they are the others' again. Whoever fails waits until nobody is in between. */
td_status td__team_write_begin(struct td__team *team);
void td__team_write_end(struct td__team *team);

/** After a failure, which is everybody's by now: waits until nobody writes to this rank's memory any more,
 *  so that it can be given back. A member that is stopped in the middle of it is not waited for
 *  for long. */
void td__team_await_quiet(struct td__team *team);

/** Whether the team, which is attached, has failed. */
static inline bool td__team_is_broken(const struct td__team *team)
{
    return atomic_load_explicit(&team->head->broken, memory_order_acquire) == 2;
}

/** TD_OK, or how the team has failed. */
td_status td__team_state(struct td__team *team);

/** Marks the team as failed, with the last error, where it is not yet: the others fail in the same way. */
void td__team_break(struct td__team *team, td_status status);

/** The operation's reduction over all members' buffers, each with its own factor. */
struct td__reduction td__team_reduction(struct td__team *team,
                                        const struct td__operation *operation);

/** During a wait: moves this rank where the ranks are not even over the processors. */
void td__team_spread(struct td__team *team, int64_t now);

/** Small calls, which need one synchronisation at most: data in the slots. */
size_t td__team_small_limit(const struct td__team *team);
td_status td__team_small(struct td__team *team, const struct td__operation *operation);

/** Tells where this rank's buffers are, and finds those of the others: team->sources and targets. Where
 *  one is not in shareable memory *shared is false; `largest` as for td__team_staged(). */
td_status td__team_meet(struct td__team *team, const struct td__operation *operation, bool *shared,
                        size_t *largest);

/** Large calls: straight from memory to memory where all buffers can be shared, else staged. */
td_status td__team_large(struct td__team *team, const struct td__operation *operation);

/** Whether the kernel may copy between this rank's memory and that of all others. */
bool td__team_can_copy(struct td__team *team);

/** Makes it possible for others to find that out; on attaching. */
void td__team_show_nonce(struct td__team *team);

/** The kernel copies, for calls that only move data. All have reached phase 1. */
td_status td__team_copied(struct td__team *team, const struct td__operation *operation);

/** Fetches the slices of the output that the others have reduced, each from the output of its rank, where
 *  they are by now. */
td_status td__team_fetch_slices(struct td__team *team, const struct td__operation *operation);

/** Everything goes through the stages, piece by piece. All have reached phase 1, `largest` is the largest
 *  part of an uneven all_to_all, and `copies` tells whether the kernel copies between all members. */
td_status td__team_staged(struct td__team *team, const struct td__operation *operation,
                          size_t largest, bool copies);

/** Where the counts of an uneven all_to_all stand in the slot: input counts, then output counts. */
static inline uint64_t *td__team_counts(const struct td__team *team, int index)
{
    return (uint64_t *)(void *)td__team_slot(team, index)->data;
}

/** The first element of part `index` of `parts` of `count` elements; `index` may be `parts`. Parts
 *  begin at whole cache lines where there is enough. */
size_t td__part(size_t count, int parts, int index);

#endif
