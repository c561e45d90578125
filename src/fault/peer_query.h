/* Queries between ranks, which their endpoints answer: progress, calls, aborts. */
#ifndef TD_FAULT_PEER_QUERY_H
#define TD_FAULT_PEER_QUERY_H

#include "fault/group_state.h"

/* Topics of td__endpoint_query(). */
enum {
    TD__TOPIC_PROGRESS = 1, /* the progress of the rank on this group */
    TD__TOPIC_ABORT,        /* this group is aborted, see group_state.h */
    TD__TOPIC_SHRINK,       /* see recovery/shrink.c */
    TD__TOPIC_BARRIER,      /* see barrier_progress.c */
    TD__TOPIC_CALLS,        /* the calls of the rank on this group, see call_history.h */
    TD__TOPIC_ADMIT,        /* see recovery/admit.c */
    TD__TOPICS,
};

/** Answers a query of `rank` about the group with this key. On the endpoint's thread. */
typedef void td__topic_fn(struct td__root *root, int rank, uint64_t key, uint64_t value,
                          struct td__buffer *answer);

/** The answers to the topics of other files: recovery/shrink.c and admit.c, barrier_progress.c. */
td__topic_fn td__shrink_answer, td__admit_answer, td__barrier_answer;

/** TANDEM_STALL_WARN in milliseconds; TD_ERR_INVALID if it is not a number of seconds. */
td_status td__stall_limit(int64_t *limit_ms);

/** Starts answering queries, the failure detector, and the warnings about calls that take long. root->first
 *  exists. */
td_status td__peer_query_begin(struct td__root *root);

/** Stops all of these. */
void td__peer_query_end(struct td__root *root);

/** Copies text of another process: at most `room` bytes, control characters replaced. */
void td__read_text(struct td__reader *reader, char *text, size_t room);

enum { TD__PROGRESS_TEXT = 640 };

/** Queries the other ranks, within about a second, and writes which have joined call `sequence` of the group, and
 *  the last call of each rank that has not: "ranks 0, 2 have joined; rank 1 finished barrier #2 …". With
 *  `sequence` 0, for a message: the last call of `peer`, or of all others if that is negative. */
void td__describe_progress(td_group *group, uint64_t sequence, int peer,
                           char text[TD__PROGRESS_TEXT]);

/** Appends td__describe_progress() to the last error where `status` is TD_ERR_TIMEOUT. Returns `status`. */
td_status td__explain_delay(td_group *group, uint64_t sequence, int peer, td_status status);

/* ---- Monitored barriers ---------------------------------------------------------------------- */

struct td__barrier_progress {
    uint64_t sequence; /* of the collective that the rank is in; 0: in none … */
    td_op_kind kind;   /* … and its kind */
    uint64_t begun;    /* monitored barriers */
    uint64_t over;     /* … that have ended there, or are settled there where it is rank 0 */
    uint64_t doubt;    /* … the last one in which it was about to give up */
    uint64_t arrived;  /* … the last one of which it has this rank's arrival, or verdict */
};

/** Queries the rank with this index in the group; false where it does not answer. With `withdraw`, the number of a
 *  barrier, this rank withdraws from that one, unless it is settled there. */
bool td__barrier_query(const td_group *group, int index, uint64_t withdraw,
                       struct td__barrier_progress *progress);

/** On rank 0: calls `fn` for each index that has withdrawn from this barrier. From then on no rank can. */
void td__barrier_settle(td_group *group, uint64_t number, void (*fn)(void *arg, int index),
                        void *arg);

/** Frees the withdrawals of a root that no rank queries any more. */
void td__barrier_forget(struct td__root *root);

#endif
