/* The last calls of this rank on a group of several hosts, and comparing them with those of other ranks.
 *
 * Comparing headers (call_header.h) does not detect all mismatches:
 *
 *   - Ranks in different calls may exchange no data: one waits on a link of its rail, the other on a link of the
 *     comm of all ranks. So a rank that waits for long queries the others, one after another, for their last calls.
 *   - The calls may succeed without waiting, where each rank only sends. So every header has a hash of all earlier
 *     calls; a receiver with another hash queries the sender.
 *   - There may be no further call. So a rank that leaves a group after a call that did not synchronise it with all
 *     others (a broadcast, a gather on a rank that is not the root) queries them before. The root keeps the history
 *     for later queries of other ranks.
 *
 * A successful call costs an entry. */
#ifndef TD_FAULT_CALL_HISTORY_H
#define TD_FAULT_CALL_HISTORY_H

#include "call/call_header.h"
#include "fault/group_state.h"

enum { TD__CALL_HISTORY_CALLS = 256 };

struct td__call_history {
    pthread_mutex_t lock; /* guards the calls; nothing is taken after it */
    struct td__call_header
        calls[TD__CALL_HISTORY_CALLS]; /* indexed by sequence number, modulo the size */
    uint64_t last;                     /* the highest sequence number, 0: none yet */
    uint32_t past;                     /* a hash of all calls so far */
    uint64_t done;                     /* the highest sequence number that succeeded */
    uint64_t verified;                 /* up to here all other ranks have made the same calls */
    uint64_t
        uneven;   /* the last all_to_all with uneven parts: only the receiver detects a mismatch */
    bool submits; /* it has calls of submit(), which no transport compares */

    /* Of a group that is destroyed: */
    uint64_t key;
    uint32_t broken; /* a td_status: its first failure */
    char *reason;
    struct td__call_history *older; /* in root->histories */

    /* Of a rank that waits: */
    uint64_t sequence;   /* of the call */
    int64_t since, next; /* the start of the wait, and the time of the next query */
    int queries;         /* so far */
};

/** NULL if out of memory. */
struct td__call_history *td__call_history_create(void);

/** Its group is destroyed: moves it to root->histories, which has a limit. */
void td__call_history_retire(struct td__call_history *history, td_group *group);

/** Frees root->histories. */
void td__call_history_forget(struct td__root *root);

/** Records that this rank begins `operation`, and sets operation->past. */
void td__call_history_note(struct td__call_history *history, struct td__operation *operation);

/** The same for a call of submit(): it is not part of the hash, since it may overtake queued calls. */
void td__call_history_submit(struct td__call_history *history,
                             const struct td__operation *operation);

/** Records that it has succeeded. `synchronised`: it received data of all other ranks, directly or through
 *  others. */
void td__call_history_end(struct td__call_history *history, const struct td__operation *operation,
                          bool synchronised);

/**
 * Before this rank leaves the group: queries the others for the calls that are not verified yet; for calls that
 * they have not made yet, until the operation's deadline. TD_ERR_MISMATCH with both calls, or with the failure of
 * another rank.
 */
td_status td__call_history_verify(struct td__call_history *history, td_group *group,
                                  const struct td__operation *operation);

/** Answers TD__TOPIC_CALLS, of a rank that waits in call `sequence`: the last calls up to that one, and the
 *  failure of the group. */
void td__call_history_answer(struct td__root *root, int rank, uint64_t key, uint64_t sequence,
                             struct td__buffer *answer);

/** Queries `rank`, a member. TD_ERR_MISMATCH with both calls if it made another one than this rank; if the group
 *  has failed there, that status and text. */
td_status td__call_history_query(struct td__call_history *history, td_group *group, int rank,
                                 const struct td__operation *operation);

/** The same for a call of submit(). TD_ERR_PEER if `rank` has left, and has not made the call as far as this rank knows. */
td_status td__call_history_compare(struct td__call_history *history, td_group *group, int rank,
                                   const struct td__operation *operation);

/** During a long wait in `operation`: queries another member if it is time to. Lowers *next to the time of the next
 *  query. */
td_status td__call_history_check(struct td__call_history *history, td_group *group,
                                 const struct td__operation *operation, td__deadline *next);

#endif
