/* A schedule compiled for sockets: for each round, one transfer to each rank that this rank sends to, and one
 * from each rank that it receives from. A transfer is sent as one frame: a header (call_header.h) and a payload. */
#ifndef TD_TCP_COMPILED_SCHEDULE_H
#define TD_TCP_COMPILED_SCHEDULE_H

#include "collective/schedule.h"

/* A range of blocks that is sent or received. */
struct td__segment {
    uint8_t buffer; /* enum td__schedule_buffer */
    bool reduces;   /* received and reduced into the blocks */
    int32_t block;
    int32_t count;
};

struct td__transfer {
    int32_t peer;
    uint32_t first, count; /* segments */
};

struct td__compiled_round {
    uint32_t first_send, first_recv, end; /* indices of transfers */
    uint32_t first_local, end_local; /* indices of steps, the copies and reductions among them */
};

struct td__compiled_schedule {
    struct td__schedule schedule;
    struct td__compiled_round *rounds; /* that have steps of this rank */
    uint32_t round_count;
    struct td__transfer *transfers;
    struct td__segment *segments;
    uint32_t most_transfers; /* of a round, in both directions */
    bool sends;              /* some step is a send */
    bool one_by_one;         /* on all ranks, every transfer has one block */
    bool writes_data;        /* some step receives, reduces or copies into DATA */
};

/** Compiles the schedule of `plan`; NULL if out of memory. */
struct td__compiled_schedule *td__compiled_schedule_create(const struct td__algorithm *algorithm,
                                                           const struct td__plan *plan);

void td__compiled_schedule_destroy(struct td__compiled_schedule *compiled);

#endif
