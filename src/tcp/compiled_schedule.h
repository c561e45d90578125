/* A schedule made ready to be run over sockets: for every round what goes to and comes from each
 * partner, put together to one message for each of them. */
#ifndef TD_TCP_COMPILED_SCHEDULE_H
#define TD_TCP_COMPILED_SCHEDULE_H

#include "collective/schedule.h"

/* A range of blocks that is sent, received or, where `reduces`, received and reduced. */
struct td__segment {
    uint8_t place;
    bool reduces;
    int32_t block;
    int32_t count;
};

struct td__message {
    int32_t peer;
    uint32_t first, count; /* of the compiled segments */
};

/* Indices of the compiled messages, and of the schedule's steps. */
struct td__compiled_round {
    uint32_t first_send, first_recv, end; /* messages */
    uint32_t first_local, end_local; /* steps: copies and reductions, and others between them */
};

struct td__compiled_schedule {
    struct td__schedule schedule;
    struct td__compiled_round *rounds; /* those in which this rank has something to do */
    uint32_t round_count;
    struct td__message *messages;
    struct td__segment *segments;
    uint32_t most_messages; /* in one round, both ways */
    bool sends;             /* anything at all */
    bool one_by_one;        /* all ranks alike: every message carries one block */
    bool writes_data;       /* something is received, reduced or copied into DATA */
};

/** Compiles the schedule of `plan`; NULL without memory. */
struct td__compiled_schedule *td__compiled_schedule_create(const struct td__algorithm *algorithm,
                                                           const struct td__plan *plan);

void td__compiled_schedule_destroy(struct td__compiled_schedule *compiled);

#endif
