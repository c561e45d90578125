/* A collective is a schedule: a list of steps for one rank, made by a pure function of (operation,
 * rank, size, root). Because it is data, one executor runs it over any transport, check.c proves it,
 * and simulate.c prices it.
 *
 * A schedule speaks of blocks, not of bytes: the vector of an operation is cut into `blocks` pieces
 * of about the same size, or is the parts of the ranks, which may have any sizes; the executor knows where
 * each begins. So it holds for every count, also for one smaller than the number of ranks, and is made once.
 *
 * Steps are grouped in rounds. The sends and receives of a round are started together; when all of them
 * are done, its copies and reductions are carried out in their order, and the next round begins. Of
 * two messages between the same two ranks in one round, the first sent is the first received.
 *
 * Where the data are:
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
 * INPUT is never written to. For reduce, scatter and gather, DATA of a rank that is not the root may
 * be changed anywhere. SCRATCH has scratch_blocks blocks. For all_gather and reduce_scatter, whose blocks may
 * have different sizes, each stands for one block of the vector, and is as large (scratch_like); for the
 * others each is as large as the largest of DATA or INPUT. */
#ifndef TD_COLLECTIVE_SCHEDULE_H
#define TD_COLLECTIVE_SCHEDULE_H

#include <tandem/collective.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A schedule is for one of the first operations of td_op_kind, the collectives. */
enum { TD__COLLECTIVES = TD_OP_BARRIER + 1 };

enum td__place { TD__DATA, TD__INPUT, TD__SCRATCH };

enum td__step_kind {
    TD__STEP_SEND,        /* blocks at `place` go to `peer` */
    TD__STEP_RECV,        /* blocks come from `peer` to `place` */
    TD__STEP_RECV_REDUCE, /* blocks come from `peer` and are reduced into `place` */
    TD__STEP_COPY,        /* blocks of `from` replace those at `place` */
    TD__STEP_REDUCE,      /* blocks of `from` are reduced into those at `place` */
};

struct td__step {
    uint8_t kind;
    uint8_t place;
    uint8_t from; /* COPY, REDUCE */
    int32_t round;
    int32_t peer; /* SEND, RECV, RECV_REDUCE */
    int32_t block;
    int32_t count; /* blocks; 0 for a message without payload */
    int32_t from_block;
};

/* Without memory `failed` is set and stays, so that a schedule is checked once, at its end. */
struct td__schedule {
    struct td__step *steps;
    size_t count;
    size_t capacity;
    int32_t rounds;
    int32_t blocks; /* into which the vector is cut (see the table) */
    int32_t scratch_blocks;
    int32_t *scratch_like; /* for each of them; NULL: as large as the largest */
    bool failed;
};

/** The rank that a schedule is for, in which group. */
struct td__plan {
    int32_t rank;
    int32_t size;
    int32_t root; /* broadcast, reduce, scatter, gather */
};

/* One way to carry out an operation. */
struct td__algorithm {
    const char *name; /* "ring" */
    td_op_kind op;
    void (*build)(const struct td__plan *plan, struct td__schedule *schedule);
    bool symmetric; /* every rank has the same number of steps of the same sizes in each round */
    bool ordered;   /* reduces in the order of tree.h: the same bits as every other ordered one */

    /** The most blocks, of `blocks`, that a rank sends; for check.c, and for docs/algorithms.md. */
    int64_t (*sent_bound)(int32_t size, int32_t blocks);
};

/** All algorithms, ended by one without a name. */
extern const struct td__algorithm td__algorithms[];

/** The algorithm of that name for `op`, or NULL. */
const struct td__algorithm *td__algorithm_find(td_op_kind op, const char *name);

/** Makes the schedule of `plan`; false without memory. The caller frees it. */
bool td__schedule_build(const struct td__algorithm *algorithm, const struct td__plan *plan,
                        struct td__schedule *schedule);

void td__schedule_free(struct td__schedule *schedule);

/* For the builders: each adds a step to the round schedule->rounds, which td__end_round() ends. */
void td__send(struct td__schedule *schedule, int32_t peer, enum td__place place, int32_t block,
              int32_t count);
void td__recv(struct td__schedule *schedule, int32_t peer, enum td__place place, int32_t block,
              int32_t count);
void td__recv_reduce(struct td__schedule *schedule, int32_t peer, enum td__place place,
                     int32_t block, int32_t count);
void td__copy(struct td__schedule *schedule, enum td__place place, int32_t block,
              enum td__place from, int32_t from_block, int32_t count);
void td__reduce(struct td__schedule *schedule, enum td__place place, int32_t block,
                enum td__place from, int32_t from_block, int32_t count);
void td__end_round(struct td__schedule *schedule);

/** Adds a block of scratch that is as large as block `like` of the vector. */
void td__scratch_block(struct td__schedule *schedule, int32_t like);

/* Proves a schedule by carrying it out on symbols, all ranks in one process. */

/**
 * Carries out `algorithm` for `size` (at most 64) ranks and checks that
 *   - every rank ends with exactly what the operation promises, and INPUT is as it was;
 *   - each value is reduced exactly once, and where the algorithm is ordered along the tree;
 *   - nothing is read before it is written, and no step of a round touches what another one writes;
 *   - it ends also when a send waits until its receive is there;
 *   - with parts of different sizes, each block is only ever put where its size is expected;
 *   - no rank sends more blocks than the algorithm's bound.
 * On failure `why` says what went wrong, where.
 */
bool td__schedule_check(const struct td__algorithm *algorithm, int32_t size, int32_t root,
                        char *why, size_t room);

#endif
