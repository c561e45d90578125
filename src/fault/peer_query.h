/* What ranks ask each other behind the program's back: where are you, and which news is there. */
#ifndef TD_FAULT_PEER_QUERY_H
#define TD_FAULT_PEER_QUERY_H

#include "fault/group_state.h"

/* Topics of td__endpoint_ask(). */
enum {
    TD__TOPIC_WHERE = 1, /* what do you do on this group? */
    TD__TOPIC_ABORT,     /* this group is given up, see group_state.h */
    TD__TOPIC_SHRINK,    /* see recovery/shrink.c */
    TD__TOPIC_BARRIER,   /* see recovery/monitored_barrier.c */
    TD__TOPIC_CALLS,     /* which calls did you make on this group? See call_history.h. */
    TD__TOPICS,
};

/** Answers `rank`, which asks about the group with this key. On the endpoint's thread. */
typedef void td__topic_fn(struct td__root *root, int rank, uint64_t key, uint64_t value,
                          struct td__buffer *answer);

/** Who answers the topics of the components above this one; NULL for the others. recovery/topics.c */
extern td__topic_fn *const td__topics[TD__TOPICS];

/** TD_ERR_INVALID where TANDEM_STALL_WARN makes no sense. */
td_status td__stall_check(void);

/** Begins to answer, to look after the others, and to warn of what takes long. `first` is made. */
td_status td__peer_query_begin(struct td__root *root);

/** Ends that. */
void td__peer_query_end(struct td__root *root);

enum { TD__PROGRESS_TEXT = 640 };

/** Who has come to call `sequence` of the group, who has not, and what each of those did last: "ranks 0
 *  and 2 have come; rank 1 has not: its last call was …". Asks the others, within about a second. With
 *  0, for a message: what `peer` does, or where that is negative what the others do. */
void td__describe_progress(td_group *group, uint64_t sequence, int peer,
                           char text[TD__PROGRESS_TEXT]);

/** A failure with TD_ERR_TIMEOUT gets the roll call at its end. Returns `status`. */
td_status td__explain_delay(td_group *group, uint64_t sequence, int peer, td_status status);

#endif
