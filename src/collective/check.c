/* Verifying schedules; see td__schedule_check() in schedule.h.
 *
 * A cell is the symbolic contents of a block: the number of the block, the ranks whose values are reduced in it,
 * and a hash of the expression that produced it. Two cells can be reduced if they have the same block and
 * disjoint ranks; the hash is commutative. */
#include "collective/schedule.h"

#include "collective/tree.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

struct cell {
    uint64_t ranks; /* 0: never written */
    uint64_t hash;
    int32_t block;
};

struct member {
    struct td__schedule schedule;
    struct cell *buffers[3]; /* DATA, INPUT, SCRATCH */
    int32_t sizes[3];
    size_t at;  /* the first step of its round */
    size_t end; /* the first step after its round */
    bool *done; /* by step: a send or receive that was matched */
    int64_t sent;
};

struct trial {
    const struct td__algorithm *algorithm;
    int32_t size, root;
    struct member *members;
    char *why;
    size_t room;
};

static bool fail(struct trial *trial, const char *format, ...)
{
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(trial->why, trial->room, "%s %s, %d ranks, root %d: %s",
             td_op_kind_name(trial->algorithm->op), trial->algorithm->name, (int)trial->size,
             (int)trial->root, text);
    return false;
}

/* ---- Symbols --------------------------------------------------------------------------------- */

static uint64_t scramble(uint64_t value)
{
    value ^= value >> 31;
    value *= 0x9e3779b97f4a7c15u;
    value ^= value >> 29;
    value *= 0xd6e8feb86659fd93u;
    return value ^ value >> 32;
}

/* The value of `rank` in `block`. */
static struct cell leaf(int32_t rank, int32_t block)
{
    return (struct cell){.ranks = (uint64_t)1 << rank,
                         .hash = scramble((uint64_t)rank << 32 | (uint32_t)block) | 1,
                         .block = block};
}

static struct cell combined(struct cell a, struct cell b)
{
    uint64_t low = a.hash < b.hash ? a.hash : b.hash, high = a.hash ^ b.hash ^ low;
    return (struct cell){.ranks = a.ranks | b.ranks,
                         .hash = scramble(low) * 3 + scramble(high ^ 7),
                         .block = a.block};
}

/* `block` reduced along the tree, over the ranks of the node at `level` that begins at `low`. */
static struct cell tree_value(int32_t low, int level, int32_t size, int32_t block)
{
    if (level == 0)
        return leaf(low, block);
    struct cell left = tree_value(low, level - 1, size, block);
    int32_t right = low + (1 << (level - 1));
    return right < size ? combined(left, tree_value(right, level - 1, size, block)) : left;
}

static bool same(struct cell a, struct cell b)
{
    return a.ranks == b.ranks && a.hash == b.hash && a.block == b.block;
}

/* ---- Setting up ------------------------------------------------------------------------------ */

/* The number of blocks of each buffer; schedule.h has the table. */
static void buffer_sizes(td_op_kind op, const struct td__schedule *schedule, int32_t size,
                         int32_t sizes[3])
{
    bool takes_input = op == TD_OP_REDUCE_SCATTER || op == TD_OP_ALL_TO_ALL;
    bool by_rank = op == TD_OP_SCATTER || op == TD_OP_GATHER || op == TD_OP_ALL_GATHER ||
                   op == TD_OP_ALL_TO_ALL;
    sizes[TD__DATA] = op == TD_OP_REDUCE_SCATTER ? 1 : by_rank ? size : schedule->blocks;
    sizes[TD__INPUT] = takes_input ? size : 0;
    sizes[TD__SCRATCH] = schedule->scratch_blocks;
}

static void fill(struct trial *trial, int32_t rank)
{
    struct member *member = &trial->members[rank];
    struct cell *data = member->buffers[TD__DATA];
    for (int32_t block = 0; block < member->sizes[TD__INPUT]; block++)
        member->buffers[TD__INPUT][block] = leaf(rank, block);
    switch (trial->algorithm->op) {
    case TD_OP_REDUCE:
    case TD_OP_ALL_REDUCE:
        for (int32_t block = 0; block < member->sizes[TD__DATA]; block++)
            data[block] = leaf(rank, block);
        break;
    case TD_OP_BROADCAST:
    case TD_OP_SCATTER:
        for (int32_t block = 0; rank == trial->root && block < member->sizes[TD__DATA]; block++)
            data[block] = leaf(rank, block);
        break;
    case TD_OP_GATHER:
    case TD_OP_ALL_GATHER:
        data[rank] = leaf(rank, rank);
        break;
    default:
        break;
    }
}

static void set_round(struct member *member)
{
    const struct td__schedule *schedule = &member->schedule;
    member->end = member->at;
    while (member->end < schedule->count &&
           schedule->steps[member->end].round == schedule->steps[member->at].round)
        member->end++;
}

static bool set_up(struct trial *trial)
{
    for (int32_t rank = 0; rank < trial->size; rank++) {
        struct member *member = &trial->members[rank];
        struct td__plan plan = {.rank = rank, .size = trial->size, .root = trial->root};
        if (!td__schedule_build(trial->algorithm, &plan, &member->schedule))
            return fail(trial, "out of memory");
        buffer_sizes(trial->algorithm->op, &member->schedule, trial->size, member->sizes);
        for (int buffer = 0; buffer < 3; buffer++)
            member->buffers[buffer] = calloc((size_t)member->sizes[buffer] + 1,
                                             sizeof(struct cell));
        member->done = calloc(member->schedule.count + 1, sizeof *member->done);
        if (!member->buffers[0] || !member->buffers[1] || !member->buffers[2] || !member->done)
            return fail(trial, "out of memory");
        fill(trial, rank);
        set_round(member);
        if (member->schedule.blocks != trial->members[0].schedule.blocks)
            return fail(trial, "rank %d cuts the vector otherwise than rank 0", (int)rank);
    }
    return true;
}

static void tear_down(struct trial *trial)
{
    for (int32_t rank = 0; rank < trial->size; rank++) {
        struct member *member = &trial->members[rank];
        td__schedule_free(&member->schedule);
        for (int buffer = 0; buffer < 3; buffer++)
            free(member->buffers[buffer]);
        free(member->done);
    }
    free(trial->members);
}

/* ---- Running --------------------------------------------------------------------------------- */

static bool in_range(const struct member *member, int buffer, int32_t block, int32_t count)
{
    return block >= 0 && count >= 0 && block + count <= member->sizes[buffer];
}

static bool is_transfer(const struct td__step *step)
{
    return step->kind == TD__STEP_SEND || step->kind == TD__STEP_RECV ||
           step->kind == TD__STEP_RECV_REDUCE;
}

/* The transfers of a round run concurrently: none may write a block that another one accesses. */
static bool check_overlap(struct trial *trial, int32_t rank)
{
    const struct member *member = &trial->members[rank];
    for (size_t i = member->at; i < member->end; i++) {
        const struct td__step *a = &member->schedule.steps[i];
        if (!is_transfer(a))
            continue;
        if (!in_range(member, a->buffer, a->block, a->count) || a->peer < 0 ||
            a->peer >= trial->size || a->peer == rank)
            return fail(trial, "rank %d, step %zu is out of range", (int)rank, i);
        for (size_t j = i + 1; j < member->end; j++) {
            const struct td__step *b = &member->schedule.steps[j];
            bool writes = a->kind != TD__STEP_SEND || b->kind != TD__STEP_SEND;
            if (is_transfer(b) && writes && a->buffer == b->buffer &&
                a->block < b->block + b->count && b->block < a->block + a->count)
                return fail(trial, "rank %d, steps %zu and %zu overlap in one round", (int)rank, i,
                            j);
        }
    }
    return true;
}

/* Whether block `block` has the size of block `index` of `buffer`; parts may be uneven. */
static bool fits(const struct trial *trial, int32_t rank, int buffer, int32_t index, int32_t block)
{
    const struct member *member = &trial->members[rank];
    if (buffer == TD__SCRATCH && member->schedule.scratch_like)
        return member->schedule.scratch_like[index] == block;
    if (trial->algorithm->op == TD_OP_REDUCE_SCATTER)
        return buffer == TD__DATA && block == rank;
    return trial->algorithm->op != TD_OP_ALL_GATHER || (buffer == TD__DATA && block == index);
}

static bool write_cell(struct trial *trial, int32_t rank, int buffer, int32_t index,
                       struct cell value, bool reduce)
{
    struct cell *to = &trial->members[rank].buffers[buffer][index];
    if (!value.ranks)
        return fail(trial, "rank %d uses a block that was never written", (int)rank);
    if (!fits(trial, rank, buffer, index, value.block))
        return fail(trial, "rank %d puts block %d where another size is expected", (int)rank,
                    (int)value.block);
    if (!reduce) {
        *to = value;
        return true;
    }
    if (!to->ranks || to->block != value.block)
        return fail(trial, "rank %d reduces a block into another one", (int)rank);
    if (to->ranks & value.ranks)
        return fail(trial, "rank %d reduces a value a second time", (int)rank);
    *to = combined(*to, value);
    return true;
}

static bool run_transfer(struct trial *trial, int32_t from, const struct td__step *send, int32_t to,
                         const struct td__step *recv)
{
    struct member *sender = &trial->members[from];
    if (send->count != recv->count)
        return fail(trial, "rank %d sends %d blocks, rank %d expects %d", (int)from,
                    (int)send->count, (int)to, (int)recv->count);
    if (recv->buffer == TD__INPUT)
        return fail(trial, "rank %d writes to its input", (int)to);
    sender->sent += send->count;
    for (int32_t i = 0; i < send->count; i++)
        if (!write_cell(trial, to, recv->buffer, recv->block + i,
                        sender->buffers[send->buffer][send->block + i],
                        recv->kind == TD__STEP_RECV_REDUCE))
            return false;
    return true;
}

/* The first receive of rank `to`'s round, not done yet, that is from `from`; -1 when there is none. */
static ssize_t find_recv(const struct trial *trial, int32_t to, int32_t from)
{
    const struct member *member = &trial->members[to];
    for (size_t i = member->at; i < member->end; i++) {
        const struct td__step *step = &member->schedule.steps[i];
        if (!member->done[i] && is_transfer(step) && step->kind != TD__STEP_SEND &&
            step->peer == from)
            return (ssize_t)i;
    }
    return -1;
}

/* Matches the sends of `rank` with the receives that are posted. */
static bool match_sends(struct trial *trial, int32_t rank, bool *progress)
{
    struct member *member = &trial->members[rank];
    for (size_t i = member->at; i < member->end; i++) {
        const struct td__step *step = &member->schedule.steps[i];
        if (member->done[i] || step->kind != TD__STEP_SEND)
            continue;
        ssize_t other = find_recv(trial, step->peer, rank);
        if (other < 0)
            continue;
        struct member *peer = &trial->members[step->peer];
        if (!run_transfer(trial, rank, step, step->peer, &peer->schedule.steps[other]))
            return false;
        member->done[i] = peer->done[other] = *progress = true;
    }
    return true;
}

/* Runs the copies and reductions of a round whose transfers are all done. */
static bool finish_round(struct trial *trial, int32_t rank)
{
    struct member *member = &trial->members[rank];
    for (size_t i = member->at; i < member->end; i++) {
        const struct td__step *step = &member->schedule.steps[i];
        if (is_transfer(step))
            continue;
        if (!in_range(member, step->buffer, step->block, step->count) ||
            !in_range(member, step->from, step->from_block, step->count) ||
            step->buffer == TD__INPUT)
            return fail(trial, "rank %d, step %zu is out of range", (int)rank, i);
        for (int32_t k = 0; k < step->count; k++)
            if (!write_cell(trial, rank, step->buffer, step->block + k,
                            member->buffers[step->from][step->from_block + k],
                            step->kind == TD__STEP_REDUCE))
                return false;
    }
    member->at = member->end;
    set_round(member);
    return true;
}

static bool round_is_done(const struct member *member)
{
    for (size_t i = member->at; i < member->end; i++)
        if (is_transfer(&member->schedule.steps[i]) && !member->done[i])
            return false;
    return true;
}

static bool run_schedules(struct trial *trial)
{
    for (int32_t rank = 0; rank < trial->size; rank++)
        if (!check_overlap(trial, rank))
            return false;
    for (bool progress = true; progress;) {
        progress = false;
        for (int32_t rank = 0; rank < trial->size; rank++) {
            struct member *member = &trial->members[rank];
            if (!match_sends(trial, rank, &progress))
                return false;
            while (member->at < member->schedule.count && round_is_done(member)) {
                progress = true;
                if (!finish_round(trial, rank) || !check_overlap(trial, rank))
                    return false;
            }
        }
    }
    for (int32_t rank = 0; rank < trial->size; rank++)
        if (trial->members[rank].at < trial->members[rank].schedule.count)
            return fail(trial, "rank %d is stuck in round %d", (int)rank,
                        (int)trial->members[rank].schedule.steps[trial->members[rank].at].round);
    return true;
}

/* ---- Results --------------------------------------------------------------------------------- */

/* The expected block `index` of DATA on `rank`; a cell without ranks if it is undefined. */
static struct cell expected(const struct trial *trial, int32_t rank, int32_t index)
{
    int levels = td__tree_levels(trial->size);
    switch (trial->algorithm->op) {
    case TD_OP_BROADCAST:
        return leaf(trial->root, index);
    case TD_OP_REDUCE:
        return rank == trial->root ? tree_value(0, levels, trial->size, index) : (struct cell){0};
    case TD_OP_ALL_REDUCE:
        return tree_value(0, levels, trial->size, index);
    case TD_OP_SCATTER:
        return index == rank ? leaf(trial->root, rank) : (struct cell){0};
    case TD_OP_GATHER:
        return rank == trial->root ? leaf(index, index) : (struct cell){0};
    case TD_OP_ALL_GATHER:
        return leaf(index, index);
    case TD_OP_REDUCE_SCATTER:
        return tree_value(0, levels, trial->size, rank);
    case TD_OP_ALL_TO_ALL:
        return leaf(index, rank);
    default:
        return (struct cell){0};
    }
}

static bool check_result(struct trial *trial, int32_t rank)
{
    const struct member *member = &trial->members[rank], *first = &trial->members[0];
    for (int32_t index = 0; index < member->sizes[TD__DATA]; index++) {
        struct cell wanted = expected(trial, rank, index), got = member->buffers[TD__DATA][index];
        if (!wanted.ranks)
            continue;
        if (got.ranks != wanted.ranks || got.block != wanted.block)
            return fail(trial, "rank %d ends with the wrong block %d", (int)rank, (int)index);
        bool reduced = wanted.ranks & (wanted.ranks - 1);
        if ((!reduced || trial->algorithm->ordered) && !same(got, wanted))
            return fail(trial, "rank %d reduced block %d in another order", (int)rank, (int)index);
        if (trial->algorithm->op == TD_OP_ALL_REDUCE && !same(got, first->buffers[TD__DATA][index]))
            return fail(trial, "ranks 0 and %d differ in block %d", (int)rank, (int)index);
    }
    for (int32_t index = 0; index < member->sizes[TD__INPUT]; index++)
        if (!same(member->buffers[TD__INPUT][index], leaf(rank, index)))
            return fail(trial, "rank %d changed its input", (int)rank);
    int64_t bound = trial->algorithm->sent_bound(trial->size, member->schedule.blocks);
    if (member->sent > bound)
        return fail(trial, "rank %d sends %lld blocks, more than %lld", (int)rank,
                    (long long)member->sent, (long long)bound);
    return true;
}

bool td__schedule_check(const struct td__algorithm *algorithm, int32_t size, int32_t root,
                        char *why, size_t room)
{
    struct trial trial = {
        .algorithm = algorithm, .size = size, .root = root, .why = why, .room = room};
    trial.members = calloc((size_t)size, sizeof *trial.members);
    if (!trial.members)
        return fail(&trial, "out of memory");
    bool right = set_up(&trial) && run_schedules(&trial);
    for (int32_t rank = 0; right && rank < size; rank++)
        right = check_result(&trial, rank);
    tear_down(&trial);
    return right;
}
