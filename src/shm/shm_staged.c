/* Large calls on memory that other ranks cannot map: everything is copied through the stages, in pieces that stay
 * in the cache, while the ranks work on different pieces:
 *
 *     rank   in(0) | in(1) red(0) | in(2) out(0) red(1) | in(3) out(1) red(2) | …
 *
 *     in     copies the next piece of the input to this rank's stage
 *     red    reduces this rank's slice of the piece of all stages into its own stage (reductions only)
 *     out    copies the results from all stages to the output
 *
 * Each bar is a synchronisation. A rank's own contribution to its result does not go through the stage. A stage
 * has three pieces: one is filled while two are read. The last read of what in(c) overwrites is before the bar
 * before in(c). */
#include "shm/shm_comm.h"

#include "base/fail.h"
#include "reduce/copy.h"

#include <string.h>

/* If every rank has a processor, a synchronisation is cheap, and small pieces overlap better. */
enum { DEDICATED_PIECE = 64 << 10 };

/* From this size on, if the kernel copies and ranks do not share processors, process_vm_readv() does the last step
 * of an all_reduce: each rank reduces its slice of the whole to its output, and reads the other slices from the
 * outputs of the others while they are in a cache. So results do not go through a stage. */
enum { KERNEL_MIN_BYTES = 48 << 10, MAX_SLICE_CACHES = 2 };

struct staging {
    struct td__shm_comm *comm;
    const struct td__operation *operation;
    struct td__reduction reduction;
    size_t element;
    size_t step;  /* elements of each part in one piece; if `proportional`, of all parts together */
    size_t count; /* elements of the largest part */
    uint64_t pieces;
    bool reduces;      /* has a reduce phase: all_reduce and reduce */
    bool sliced;       /* an all_reduce whose parts are slices: see KERNEL_MIN_BYTES */
    bool proportional; /* uneven reduce_scatter: a piece has the same fraction of each part */
    bool is_root;
};

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t whole_lines(size_t count)
{
    return count > 64 ? (count + 63) / 64 * 64 : count;
}

/* The elements of part `part` in a piece. Those of all parts fit into a stage. */
static size_t step_of(const struct staging *staging, int part)
{
    if (!staging->proportional)
        return staging->step;
    uint64_t count = staging->operation->call.input_counts[part];
    return whole_lines((count + staging->pieces - 1) / staging->pieces);
}

/* The offset of part `part` in a piece of a stage, in elements. */
static size_t stage_offset(const struct staging *staging, int part)
{
    size_t offset = (size_t)part * staging->step;
    if (staging->proportional) {
        offset = 0;
        for (int i = 0; i < part; i++)
            offset += step_of(staging, i);
    }
    return offset;
}

/* The elements of a buffer of `count` that are in piece `c`. */
static size_t count_in_piece(const struct staging *staging, uint64_t c, size_t count)
{
    size_t first = (size_t)c * staging->step;
    return first < count ? smaller(staging->step, count - first) : 0;
}

/* The byte offset of piece `c` in a buffer whose data begin at element `start`. */
static size_t buffer_offset(const struct staging *staging, uint64_t c, size_t start)
{
    return (start + (size_t)c * staging->step) * staging->element;
}

/* The same two for part `part` of a call whose input has parts. */
static size_t part_in_piece(const struct staging *staging, uint64_t c, int part, size_t count)
{
    size_t step = step_of(staging, part), first = (size_t)c * step;
    return first < count ? smaller(step, count - first) : 0;
}

static size_t part_buffer_offset(const struct staging *staging, uint64_t c, int part, size_t start)
{
    return (start + (size_t)c * step_of(staging, part)) * staging->element;
}

/* The elements of part `i` of the input. */
static size_t part_count(const struct staging *staging, int i)
{
    const struct td__operation *operation = staging->operation;
    int n = staging->comm->size;
    if (staging->sliced)
        return td__part(operation->call.count, n, i + 1) - td__part(operation->call.count, n, i);
    return operation->call.input_counts ? operation->call.input_counts[i] : operation->call.count;
}

/* Copies piece c of each part of the input to the stage, except this rank's own part. */
static void stage_parts(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    char *piece = td__shm_piece(staging->comm, staging->comm->index, c);
    size_t start = 0;
    for (int i = 0; i < staging->comm->size; i++) {
        size_t count = part_count(staging, i);
        size_t now = part_in_piece(staging, c, i, count);
        if (now && i != staging->comm->index)
            memcpy(piece,
                   (const char *)operation->call.input + part_buffer_offset(staging, c, i, start),
                   now * staging->element);
        piece += step_of(staging, i) * staging->element;
        start += count;
    }
}

/* The slice of piece c that `i` reduces, in elements. In a reduce of two ranks the root reduces all of it: it reads
 * as much data of the other rank as with half of it, and no result is copied to it. Tried and dropped: the other
 * ranks write their results to the root's output by process_vm_writev(), which took 1.5 times as long if the
 * ranks share a cache. */
static void slice_of(const struct staging *staging, size_t now, int i, size_t *first, size_t *end)
{
    const struct td__shm_comm *comm = staging->comm;
    bool to_root = staging->operation->call.kind == TD_OP_REDUCE && comm->size == 2;
    *first = to_root ? 0 : td__part(now, comm->size, i);
    *end = to_root ? (i == staging->operation->call.root ? now : 0)
                   : td__part(now, comm->size, i + 1);
}

/* Copies to the stage what other ranks reduce: piece c except this rank's slice. */
static void stage_slices(const struct staging *staging, uint64_t c)
{
    const char *from = (const char *)staging->operation->call.input + buffer_offset(staging, c, 0);
    char *to = td__shm_piece(staging->comm, staging->comm->index, c);
    size_t now = count_in_piece(staging, c, staging->operation->call.count), first, end;
    slice_of(staging, now, staging->comm->index, &first, &end);
    memcpy(to, from, first * staging->element);
    memcpy(to + end * staging->element, from + end * staging->element,
           (now - end) * staging->element);
}

static void stage_in(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    size_t now = count_in_piece(staging, c, part_count(staging, staging->comm->index));
    switch (operation->call.kind) {
    case TD_OP_SCATTER:
        if (staging->is_root)
            stage_parts(staging, c);
        return;
    case TD_OP_REDUCE_SCATTER:
    case TD_OP_ALL_TO_ALL:
        stage_parts(staging, c);
        return;
    case TD_OP_ALL_REDUCE:
    case TD_OP_REDUCE:
        if (staging->sliced)
            stage_parts(staging, c);
        else
            stage_slices(staging, c);
        return;
    default: /* broadcast, gather, all_gather */
        if (operation->call.kind != TD_OP_ALL_GATHER &&
            staging->is_root != (operation->call.kind == TD_OP_BROADCAST))
            return;
        if (now)
            memcpy(td__shm_piece(staging->comm, staging->comm->index, c),
                   (const char *)operation->call.input + buffer_offset(staging, c, 0),
                   now * staging->element);
        return;
    }
}

/* Reduces this rank's slice of piece c to the output, and to its stage if other ranks need it. */
static void reduce_slice(const struct staging *staging, uint64_t c)
{
    struct td__shm_comm *comm = staging->comm;
    const struct td__operation *operation = staging->operation;
    size_t first, end, offset = buffer_offset(staging, c, 0);
    slice_of(staging, count_in_piece(staging, c, operation->call.count), comm->index, &first, &end);
    if (first == end)
        return;
    size_t skip = first * staging->element;
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = td__shm_piece(comm, i, c) + skip;
    comm->sources[comm->index] = (const char *)operation->call.input + offset + skip;
    void *targets[2];
    int count = 0;
    if (operation->call.output)
        targets[count++] = (char *)operation->call.output + offset + skip;
    if (operation->call.kind == TD_OP_ALL_REDUCE || !staging->is_root)
        targets[count++] = td__shm_piece(comm, comm->index, c) + skip;
    td__reduce_many(&staging->reduction, targets, count, comm->sources, comm->size, end - first);
}

/* Copies the slices that other ranks have reduced to the output. */
static void copy_reduced(const struct staging *staging, uint64_t c)
{
    struct td__shm_comm *comm = staging->comm;
    size_t now = count_in_piece(staging, c, staging->operation->call.count);
    char *output = (char *)staging->operation->call.output + buffer_offset(staging, c, 0);
    for (int k = 1; k < comm->size; k++) {
        int i = (comm->index + k) % comm->size;
        size_t first, end;
        slice_of(staging, now, i, &first, &end);
        memcpy(output + first * staging->element,
               td__shm_piece(comm, i, c) + first * staging->element,
               (end - first) * staging->element);
    }
}

/* Copies the parts for this rank to the output: from the other stages, where they are part `part`; its own from
 * its input, from element `own` on. */
static void copy_parts(const struct staging *staging, uint64_t c, size_t part, size_t own)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    size_t start = 0;
    for (int i = 0; i < comm->size; i++) {
        size_t count = operation->call.output_counts ? operation->call.output_counts[i]
                                                     : operation->call.count;
        size_t now = count_in_piece(staging, c, count);
        char *to = (char *)operation->call.output + buffer_offset(staging, c, start);
        const char *from = i == comm->index ? (const char *)operation->call.input +
                                                  buffer_offset(staging, c, own)
                                            : td__shm_piece(comm, i, c) +
                                                  part * staging->step * staging->element;
        if (now && to != from)
            memcpy(to, from, now * staging->element);
        start += count;
    }
}

/* Reduces this rank's part of piece c to the output. */
static void reduce_parts(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    int mine = comm->index;
    size_t now = part_in_piece(staging, c, mine, part_count(staging, mine));
    size_t start = staging->sliced ? td__part(operation->call.count, comm->size, mine)
                                   : td__operation_part_start(operation, mine);
    if (!now)
        return;
    void *target = (char *)operation->call.output +
                   part_buffer_offset(staging, c, mine, staging->sliced ? start : 0);
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = td__shm_piece(comm, i, c) +
                           stage_offset(staging, mine) * staging->element;
    comm->sources[mine] = (const char *)operation->call.input +
                          part_buffer_offset(staging, c, mine, start);
    td__reduce_many(&staging->reduction, &target, 1, comm->sources, comm->size, now);
}

static void stage_out(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    size_t mine = (size_t)comm->index, own = 0;
    size_t bytes = count_in_piece(staging, c, operation->call.count) * staging->element;
    char *to = (char *)operation->call.output + buffer_offset(staging, c, 0);
    const char *from = td__shm_piece(comm, operation->call.root < 0 ? 0 : operation->call.root, c);
    switch (operation->call.kind) {
    case TD_OP_ALL_GATHER:
        copy_parts(staging, c, 0, 0);
        return;
    case TD_OP_ALL_TO_ALL:
        for (int i = 0; i < comm->index; i++)
            own += operation->call.input_counts ? operation->call.input_counts[i]
                                                : operation->call.count;
        copy_parts(staging, c, mine, own);
        return;
    case TD_OP_GATHER:
        if (staging->is_root)
            copy_parts(staging, c, 0, 0);
        return;
    case TD_OP_REDUCE_SCATTER:
        reduce_parts(staging, c);
        return;
    case TD_OP_BROADCAST:
        if (!staging->is_root)
            memcpy(to, from, bytes);
        return;
    case TD_OP_SCATTER:
        from += mine * staging->step * staging->element;
        if (staging->is_root)
            from = (const char *)operation->call.input +
                   buffer_offset(staging, c, mine * operation->call.count);
        if (to != from)
            memcpy(to, from, bytes);
        return;
    default: /* all_reduce and reduce */
        if (staging->sliced)
            reduce_parts(staging, c);
        else if (operation->call.kind == TD_OP_ALL_REDUCE || staging->is_root)
            copy_reduced(staging, c);
        return;
    }
}

static struct staging staging_of(struct td__shm_comm *comm, const struct td__operation *operation,
                                 size_t largest, bool can_copy)
{
    td_op_kind kind = operation->call.kind;
    struct staging staging = {
        .comm = comm,
        .operation = operation,
        .reduction = td__shm_reduction(comm, operation),
        .element = td__operation_element(operation),
        .count = operation->call.input_counts ? largest : operation->call.count,
        .is_root = operation->call.root == comm->index,
    };
    size_t bytes = operation->call.count * staging.element;
    staging.sliced = kind == TD_OP_ALL_REDUCE && can_copy && !comm->oversubscribed &&
                     bytes >= KERNEL_MIN_BYTES &&
                     bytes / (size_t)comm->size <= MAX_SLICE_CACHES * td__cache_bytes(2);
    staging.reduces = (kind == TD_OP_ALL_REDUCE && !staging.sliced) || kind == TD_OP_REDUCE;
    for (int i = 0; staging.sliced && i < comm->size; i++) {
        size_t count = part_count(&staging, i);
        staging.count = i && staging.count > count ? staging.count : count;
    }
    bool by_parts = kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER ||
                    kind == TD_OP_ALL_TO_ALL;
    staging.proportional = kind == TD_OP_REDUCE_SCATTER && operation->call.input_counts;
    staging.step = (comm->oversubscribed ? TD__PIECE_BYTES : DEDICATED_PIECE) / staging.element;
    if ((by_parts && !staging.proportional) || staging.sliced)
        staging.step /= (size_t)comm->size;
    /* Whole cache lines, if a piece has enough. */
    if (staging.step > 64)
        staging.step -= staging.step % 64;
    return staging;
}

/* The number of pieces. If `proportional`, about the least for which the elements of all parts in a piece fit into a
 * stage: that is step_of() rounded up for each part. */
static void count_pieces(struct staging *staging)
{
    size_t total = staging->proportional ? staging->operation->call.count : staging->count;
    staging->pieces = (total + staging->step - 1) / staging->step;
    while (staging->proportional && staging->pieces) {
        size_t used = stage_offset(staging, staging->comm->size);
        if (used <= staging->step)
            return;
        staging->pieces += 1 + staging->pieces * (used - staging->step) / (2 * staging->step);
    }
}

/* This rank has reached `phase`. */
static td_status fetch_slices(const struct staging *staging, unsigned phase)
{
    struct td__shm_comm *comm = staging->comm;
    TD_TRY(td__shm_await_all(comm, staging->operation, phase));
    TD_TRY(td__shm_fetch_slices(comm, staging->operation));
    td__shm_reach(comm, phase + 1);
    return td__shm_await_all(comm, staging->operation, phase + 1);
}

td_status td__shm_staged(struct td__shm_comm *comm, const struct td__operation *operation,
                         size_t largest, bool can_copy)
{
    struct staging staging = staging_of(comm, operation, largest, can_copy);
    if (!staging.step || (staging.proportional && staging.step < 2 * (size_t)comm->size))
        return td__shm_fail(comm, TD_ERR_UNSUPPORTED,
                            "%s: too many ranks on one host for buffers of this kind; allocate "
                            "them with td_alloc()",
                            td__operation_describe(operation));
    count_pieces(&staging);
    uint64_t pieces = staging.pieces;
    unsigned phase = 2;
    if (!pieces)
        return TD_OK;

    stage_in(&staging, 0);
    td__shm_reach(comm, phase);
    for (uint64_t c = 0; c < pieces + staging.reduces; c++) {
        TD_TRY(td__shm_await_all(comm, operation, phase++));
        if (c + 1 < pieces)
            stage_in(&staging, c + 1);
        if (!staging.reduces) {
            stage_out(&staging, c);
        } else {
            if (c)
                stage_out(&staging, c - 1);
            if (c < pieces)
                reduce_slice(&staging, c);
        }
        td__shm_reach(comm, phase);
    }
    return staging.sliced ? fetch_slices(&staging, phase) : TD_OK;
}
