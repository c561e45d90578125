/* The recorder: what this rank has called, is in, and has waiting, in the log of os/flight.h.
 *
 * Each collective and each message is an entry of the root's log from the moment it is called or
 * queued. Others read it: the launcher when something went wrong, `tdrun status` meanwhile, and this
 * process itself when another rank asks what keeps it. Recording never fails and never waits. */
#ifndef TD_FAULT_RECORDER_H
#define TD_FAULT_RECORDER_H

#include "os/flight.h"

#include <tandem/backend.h>

struct td__root;

/** What a group remembers of its own collectives, also when their entries were overwritten. */
struct td__trace {
    struct td__flight_log *log;
    const struct td__root *root;
    uint64_t key;
    int slot;   /* of its name in the log */
    bool quick; /* the backend's promise: a collective that has to wait shows in td__waits */
    /* Where a small one may turn out to be quick: the td__waits of its thread, and how many there were at
     * the start. Finding a thread local costs a call, so it is found once. */
    const unsigned *waits_here;
    unsigned waits;
    _Atomic uint64_t started; /* highest sequence that was begun, 0: none */
    _Atomic uint64_t done;    /* highest one that went well */
    _Atomic uint64_t last;    /* the entry of the collective that was begun last */
    bool broken;              /* a collective has failed: all that follow do */
    struct td__trace *next;
};

/* ---- Life ------------------------------------------------------------------------------------ */

/** Before the rendezvous, by which a process learns its rank: it is recorded as waiting. `rank` is -1
 *  where it is not known yet. Afterwards the `status` of it, with td_last_error(). */
void td__recorder_expect(int rank, int size);
void td__recorder_expect_end(td_status status);

/** Opens the root's log, before the exchange of addresses. Falls back to private memory. */
td_status td__recorder_open(struct td__root *root);

/** The root has joined the others; it begins to leave; it is gone. With a `status`, it could not join
 *  them, and td_last_error() says why. */
void td__recorder_joined(struct td__root *root);
void td__recorder_leaving(struct td__root *root);
void td__recorder_left(struct td__root *root, td_status status);

/** Closes the log, when no rank can query it any more. */
void td__recorder_close(struct td__root *root);

/** Puts the group's name into the log; takes it out. */
void td__recorder_add_group(td_group *group);
void td__recorder_remove_group(td_group *group);

/* ---- Recording ------------------------------------------------------------------------------- */

/** An entry for a call that waits for its turn; its number. */
uint64_t td__record_queued(td_group *group, const td_call *call);

/** A collective begins: `entry` is its own when it was queued, 0 otherwise. Returns its number. */
uint64_t td__record_start(td_group *group, const td_call *call, uint64_t entry);

/** It has ended. With a failure td_last_error() is kept. */
void td__record_end(td_group *group, uint64_t entry, td_status status);

/** A message begins, which ends with td__record_message_end(). `posted`: the caller does not wait for
 *  it now. 0 for the library's own, which are not recorded. */
uint64_t td__record_message(td_group *group, const td_call *call, bool posted);
void td__record_message_end(td_group *group, uint64_t entry, td_status status);

/** A thread waits for this entry now, which was queued or posted. */
void td__record_waited(td_group *group, uint64_t entry);

/** A monitored barrier begins: the number of its entry, for td__record_message_end(). */
uint64_t td__record_monitored_barrier(td_group *group, uint64_t number);

/* ---- Asking, from any thread, while others record --------------------------------------------- */

struct td__flight_last {
    uint64_t started; /* highest sequence begun on the group, 0 none */
    uint64_t done;    /* highest sequence that went well */
    bool running;     /* the last one begun is under way */
    char text[160];   /* the last operation on this group: "all_reduce #17 of 4 f32"; "" none */
    char now[160];    /* what the rank does now on any group, "" if it is in no call */
    int64_t age_ms;   /* since that of `text` began, or ended where it has */
};

/** What this rank last did on the group with this key, which it need not have (made yet). */
void td__recorder_last(struct td__root *root, uint64_t group_key, struct td__flight_last *last);

/** The collective of this group that a thread of the program stands in; false where there is none. */
bool td__recorder_stands_in(struct td__root *root, uint64_t group_key, uint64_t *sequence,
                            td_op_kind *kind);

/** The collective that has been under way longest, or the message, where a thread waits for it; false
 *  where there is none. *group_key is 0 where the group is not known (there are more than 31). */
bool td__recorder_oldest_running(struct td__root *root, uint64_t *group_key, uint64_t *sequence,
                                 int64_t *age_ms, char text[160]);

#endif
