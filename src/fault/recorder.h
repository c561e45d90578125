/* The recorder: the finished, running and queued calls of this rank, in the log of os/flight.h.
 *
 * Each collective and each message is an entry of the root's log from the moment it is called or queued. Readers
 * are the launcher after a failure, `tdrun status`, and this process when another rank queries its progress.
 * Recording never fails and never waits. */
#ifndef TD_FAULT_RECORDER_H
#define TD_FAULT_RECORDER_H

#include "os/flight.h"

#include <tandem/backend.h>

struct td__root;

/** The progress of a group's collectives; valid after their entries are overwritten, too. */
struct td__trace {
    struct td__flight_log *log;
    const struct td__root *root;
    uint64_t key;
    int name_index; /* of its name in the log */
    bool quick;     /* the backend increments td__waits whenever a collective waits */
    /* For a small collective: the td__waits of its thread, and its value at the start. The address of a
     * thread-local variable costs a call, so it is kept. */
    const unsigned *waits_here;
    unsigned waits;
    _Atomic uint64_t started; /* the highest sequence number begun, 0: none */
    _Atomic uint64_t done;    /* the highest that succeeded */
    _Atomic uint64_t last;    /* the entry of the collective begun last */
    bool broken;              /* a collective has failed: all further ones fail */
    struct td__trace *next;
};

/* ---- Life ------------------------------------------------------------------------------------ */

/** The root has left, or with a `status` failed to join, with td_last_error(). */
void td__recorder_left(struct td__root *root, td_status status);

/** Adds the group's name to the log; removes it. */
void td__recorder_add_group(td_group *group);
void td__recorder_remove_group(td_group *group);

/* ---- Recording ------------------------------------------------------------------------------- */

/** Adds an entry for a queued call. Returns its number. */
uint64_t td__record_queued(td_group *group, const td_call *call);

/** A collective begins. `entry` is that of td__record_queued(), or 0. Returns the number of its entry. */
uint64_t td__record_start(td_group *group, const td_call *call, uint64_t entry);

/** It has ended; on failure td_last_error() is recorded. */
void td__record_end(td_group *group, uint64_t entry, td_status status);

/** A collective is submitted to a backend that completes it by itself, while others may run; it ends. */
uint64_t td__record_submit(td_group *group, const td_call *call);
void td__record_submit_end(td_group *group, uint64_t entry, uint64_t sequence, td_status status);

/** A message begins, which ends with td__record_message_end(). `posted`: the caller does not wait for
 *  it now. Returns 0 for the library's own messages, which are not recorded. */
uint64_t td__record_message(td_group *group, const td_call *call, bool posted);
void td__record_message_end(td_group *group, uint64_t entry, td_status status);

/** A thread waits for this entry now, which was queued or posted. */
void td__record_waited(td_group *group, uint64_t entry);

/** A monitored barrier begins: the number of its entry, for td__record_message_end(). */
uint64_t td__record_monitored_barrier(td_group *group, uint64_t number);

/* ---- Reading, from any thread, while others record -------------------------------------------- */

struct td__flight_last {
    uint64_t started; /* the highest sequence number begun on the group, 0: none */
    uint64_t done;    /* the highest that succeeded */
    bool running;     /* the last one begun still runs */
    char text[160];   /* the last operation on this group: "all_reduce #17 of 4 f32"; "": none */
    char now[160];    /* the call that the rank is in, on any group; "": none */
    int64_t age_ms;   /* since the operation of `text` ended, or began if it still runs */
    uint64_t
        blocking; /* on this rank: the collective of this group that blocks a thread; 0: none … */
    td_op_kind kind; /* … and its kind */
};

/** The progress of this rank on the group with this key; zeros if it has no such group. */
void td__recorder_last(struct td__root *root, uint64_t group_key, struct td__flight_last *last);

/** The collective, or message that a thread waits for, that has been running longest; false if there is none.
 *  *group_key is 0 if the group is not known (there are more than 31). */
bool td__recorder_oldest_running(struct td__root *root, uint64_t *group_key, uint64_t *sequence,
                                 int64_t *age_ms, char text[160]);

#endif
