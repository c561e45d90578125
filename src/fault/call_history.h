/* What this rank called last on a group of several hosts, and how it is compared with what others called.
 *
 * Ranks that make different calls need not exchange a message: one waits for a link of its lane, the other for one of
 * all ranks, and neither receives anything. So a rank that waits for long queries the others, one after the
 * other, for their last calls.
 *
 * Nor need they wait: where each only gives, all go on. So every message between hosts has all calls
 * before it in one word, and a receiver that differs in that queries the sender, too.
 *
 * Nor need another message follow. So a rank that leaves a group after a call that did not synchronise it with
 * all the others (a broadcast, the givers of a gather) asks them before. Its own history stays with the root,
 * for later queries.
 *
 * A call that goes well pays for an entry. */
#ifndef TD_FAULT_CALL_HISTORY_H
#define TD_FAULT_CALL_HISTORY_H

#include "call/call_header.h"
#include "fault/group_state.h"

enum { TD__CALL_HISTORY_CALLS = 256 };

struct td__call_history {
    pthread_mutex_t lock; /* guards the calls; nothing is taken after it */
    struct td__call_header
        calls[TD__CALL_HISTORY_CALLS]; /* each in the place of its sequence number */
    uint64_t last;                     /* the highest of these, 0: none yet */
    uint32_t past;                     /* all of them, and those before, in one word */
    uint64_t done;                     /* the highest that went well */
    uint64_t verified; /* up to here all others are known to have made the same calls */
    uint64_t
        uneven; /* the last all_to_all with uneven parts: only the receiver sees what is wrong */

    /* Of a group that is destroyed: */
    uint64_t key;
    uint32_t broken; /* how it had failed, a td_status */
    char *reason;
    struct td__call_history *older; /* of the root's */

    /* Of a rank that waits: */
    uint64_t sequence;   /* in which call */
    int64_t since, next; /* from when on, and when to ask again */
    int asked;           /* how many were */
};

/** NULL without memory. */
struct td__call_history *td__call_history_create(void);

/** Its group is destroyed: the root keeps it, as one of the last ones. */
void td__call_history_retire(struct td__call_history *history, td_group *group);

/** Frees all that the root has kept. */
void td__call_history_forget(struct td__root *root);

/** This rank begins `operation`, as it was called; its `past` is filled in. */
void td__call_history_note(struct td__call_history *history, struct td__operation *operation);

/** It has succeeded. `met`: with data of all others, see native.c. */
void td__call_history_end(struct td__call_history *history, const struct td__operation *operation,
                          bool met);

/**
 * Before this rank leaves the group: asks the others for the calls that it has not seen them make, until the
 * operation's deadline where they have not made them yet. TD_ERR_MISMATCH with both calls, or with what
 * another rank has found.
 */
td_status td__call_history_verify(struct td__call_history *history, td_group *group,
                                  const struct td__operation *operation);

/** Answers TD__TOPIC_CALLS, of one that waits in call `sequence`: the last calls up to that one, and how the
 *  group failed. */
void td__call_history_answer(struct td__root *root, int rank, uint64_t key, uint64_t sequence,
                             struct td__buffer *answer);

/** Asks `rank`, a member. TD_ERR_MISMATCH where it made another call than this rank, with both of them;
 *  fails like it where the group has failed there. */
td_status td__call_history_ask(struct td__call_history *history, td_group *group, int rank,
                               const struct td__operation *operation);

/** During a long wait in `operation`: from time to time asks another member. *next becomes the time at which
 *  to call this again, where that is earlier. */
td_status td__call_history_look(struct td__call_history *history, td_group *group,
                                const struct td__operation *operation, td__deadline *next);

#endif
