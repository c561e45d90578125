/* A collective is a schedule: a list of steps for one rank, built by a pure function of (operation, rank, size,
 * root). A schedule is data, so one executor runs it over any transport, check.c verifies it, and simulate.c
 * estimates its cost.
 *
 * A schedule is in units of blocks, not bytes: the vector of an operation is cut into `blocks` pieces of about the
 * same size, or consists of the parts of the ranks, which may have any sizes. The executor knows the offset of
 * each block. So one schedule serves every count, even one smaller than the number of ranks.
 *
 * Steps are grouped in rounds. The sends and receives of a round start together; when all of them are done, the
 * copies and reductions of the round run in order, and the next round begins. If a rank sends to another one
 * several times in a round, the receives match in the same order.
 *
 * The buffers of a schedule:
 *
 *                      DATA                                      INPUT           result
 *     broadcast        `blocks` pieces of the vector             -               DATA
 *     reduce           `blocks` pieces; own values at first      -               DATA of the root
 *     all_reduce       `blocks` pieces; own values at first      -               DATA
 *     scatter          size blocks, the root's filled            -               DATA[rank]
 *     gather           size blocks, own one filled               -               DATA of the root
 *     all_gather       size blocks, own one filled               -               DATA
 *     reduce_scatter   one block                                 size blocks     DATA[0]
 *     all_to_all       size blocks                               size blocks     DATA
 *     barrier          none                                      -               -
 *
 * INPUT is read-only. In reduce, scatter and gather, DATA of a rank other than the root may be overwritten
 * anywhere. SCRATCH has scratch_blocks blocks. In all_gather and reduce_scatter, whose blocks may have different
 * sizes, each has the size of a given block of the vector (scratch_like); in the others each has the size of the
 * largest block of DATA or INPUT. */
#ifndef TD_COLLECTIVE_SCHEDULE_H
#define TD_COLLECTIVE_SCHEDULE_H

#include <tandem/collective.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A schedule is for one of the first operations of td_op_kind, the collectives. */
enum { TD__COLLECTIVES = TD_OP_BARRIER + 1 };

enum td__schedule_buffer { TD__DATA, TD__INPUT, TD__SCRATCH };

enum td__step_kind {
    TD__STEP_SEND,        /* sends blocks of `buffer` to `peer` */
    TD__STEP_RECV,        /* receives blocks from `peer` into `buffer` */
    TD__STEP_RECV_REDUCE, /* receives blocks from `peer` and reduces them into `buffer` */
    TD__STEP_COPY,        /* copies blocks of `from` to `buffer` */
    TD__STEP_REDUCE,      /* reduces blocks of `from` into `buffer` */
};

struct td__step {
    uint8_t kind;
    uint8_t buffer;
    uint8_t from; /* COPY, REDUCE */
    int32_t round;
    int32_t peer; /* SEND, RECV, RECV_REDUCE */
    int32_t block;
    int32_t count; /* blocks; 0: a send or receive without payload */
    int32_t from_block;
};

/* Out of memory sets `failed`, so that builders need no checks; td__schedule_build() checks it at the end. */
struct td__schedule {
    struct td__step *steps;
    size_t count;
    size_t capacity;
    int32_t rounds;
    int32_t blocks; /* of the vector; see the table */
    int32_t scratch_blocks;
    int32_t
        *scratch_like; /* of each: the block of the same size; NULL: all have the largest size */
    bool failed;
};

/** What a schedule depends on, apart from the algorithm. */
struct td__plan {
    int32_t rank;
    int32_t size;
    int32_t root; /* broadcast, reduce, scatter, gather */
};

/* An algorithm for one operation. */
struct td__algorithm {
    const char *name; /* "ring" */
    td_op_kind op;
    void (*build)(const struct td__plan *plan, struct td__schedule *schedule);
    bool symmetric; /* every rank has the same number of steps of the same sizes in each round */
    bool ordered;   /* reduces in the order of tree.h: the same bits as every other ordered one */

    /** An upper bound of the blocks that a rank sends; for check.c and docs/algorithms.md. */
    int64_t (*sent_bound)(int32_t size, int32_t blocks);
};

/** All algorithms; the last entry has no name. */
extern const struct td__algorithm td__algorithms[];

/** The algorithm of that name for `op`, or NULL. */
const struct td__algorithm *td__algorithm_find(td_op_kind op, const char *name);

/**
 * The name of the default algorithm for `op` over sockets among `size` ranks. `bytes` are those of the vector, of
 * all ranks' parts together where each has its own. All ranks must pass the same numbers. For reductions it is an
 * algorithm that is ordered along the tree, so that the result's bits do not depend on `bytes`.
 */
const char *td__select(td_op_kind op, int32_t size, size_t bytes);

/** The same for uneven parts; `largest` are the bytes of the largest part. For all_to_all both are ignored, since
 *  no rank knows them. */
const char *td__select_uneven(td_op_kind op, int32_t size, size_t bytes, size_t largest);

/** Builds the schedule of `plan`; false if out of memory. The caller frees it. */
bool td__schedule_build(const struct td__algorithm *algorithm, const struct td__plan *plan,
                        struct td__schedule *schedule);

void td__schedule_free(struct td__schedule *schedule);

/* For the algorithms: each adds a step to the current round; td__end_round() ends the round. */
void td__send(struct td__schedule *schedule, int32_t peer, enum td__schedule_buffer buffer,
              int32_t block, int32_t count);
void td__recv(struct td__schedule *schedule, int32_t peer, enum td__schedule_buffer buffer,
              int32_t block, int32_t count);
void td__recv_reduce(struct td__schedule *schedule, int32_t peer, enum td__schedule_buffer buffer,
                     int32_t block, int32_t count);
void td__copy(struct td__schedule *schedule, enum td__schedule_buffer buffer, int32_t block,
              enum td__schedule_buffer from, int32_t from_block, int32_t count);
void td__reduce(struct td__schedule *schedule, enum td__schedule_buffer buffer, int32_t block,
                enum td__schedule_buffer from, int32_t from_block, int32_t count);
void td__end_round(struct td__schedule *schedule);

/** Adds a block to SCRATCH, of the size of block `like` of the vector. */
void td__scratch_block(struct td__schedule *schedule, int32_t like);

/**
 * Verifies an algorithm: runs its schedules symbolically, all `size` (at most 64) ranks in one process, and
 * checks that
 *   - every rank ends with the result of the operation, and INPUT is unchanged;
 *   - each value is reduced exactly once, and along the tree if the algorithm is ordered;
 *   - no block is read before it is written, and no step of a round accesses a block that another one writes;
 *   - the schedules do not deadlock if a send blocks until its receive is posted;
 *   - with parts of different sizes, each block is written only to blocks of its size;
 *   - no rank sends more blocks than the algorithm's bound.
 * On failure `why` gets the reason.
 */
bool td__schedule_check(const struct td__algorithm *algorithm, int32_t size, int32_t root,
                        char *why, size_t room);

#endif
