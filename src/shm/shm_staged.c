/* Large calls on memory that cannot be shared: everything goes through the stages in pieces that stay
 * in the cache, while the ranks work on different pieces at the same time:
 *
 *     rank   in(0) | in(1) red(0) | in(2) out(0) red(1) | in(3) out(1) red(2) | …
 *
 *     in     the next piece of the input is copied to this rank's stage
 *     red    this rank's slice of everybody's piece is reduced, into its own stage (reductions only)
 *     out    the results are copied from everybody's stages to the output
 *
 * Each bar is a synchronisation. What a rank needs of its own never goes through the stage. A stage holds
 * three pieces, so that one may be filled while two are read: what in(c) overwrites was read for the last
 * time before the bar before it. */
#include "shm/shm_comm.h"

#include "base/fail.h"
#include "reduce/copy.h"

#include <string.h>

/* Where everybody has a processor a synchronisation costs little, and small pieces overlap better. */
enum { DEDICATED_PIECE = 64 << 10 };

/* From here on the last step of an all_reduce is the kernel's, where it copies and ranks need not take turns:
 * each rank reduces its slice of the whole straight to its output, and fetches those of the others from
 * theirs, as long as these are still in a cache. So what is reduced does not go through a stage again. */
enum { KERNEL_LEAST = 48 << 10, CACHES_A_SLICE = 2 };

struct staging {
    struct td__shm_comm *comm;
    const struct td__operation *operation;
    struct td__reduction reduction;
    size_t element;
    size_t step;  /* elements of each part in one piece; of all parts, where they are shared */
    size_t count; /* elements of the largest part */
    bool reduces; /* with a phase of its own: all_reduce and reduce */
    bool sliced;  /* an all_reduce whose parts are slices: see KERNEL_LEAST */
    bool
        shared; /* an uneven reduce_scatter: a piece has of each part as much as its share of the whole */
    bool is_root;
};

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Elements of part `part` that a piece has. All of them together fit into a stage. */
static size_t step_of(const struct staging *staging, int part)
{
    const td_call *call = &staging->operation->call;
    size_t n = (size_t)staging->comm->size;
    if (!staging->shared)
        return staging->step;
    size_t step = 1 + (size_t)((double)(staging->step - n) *
                               ((double)call->input_counts[part] / (double)call->count));
    return step > 64 ? step - step % 64 : step;
}

/* Where part `part` of a piece begins in the stage, in elements. */
static size_t place_of(const struct staging *staging, int part)
{
    size_t place = (size_t)part * staging->step;
    if (staging->shared) {
        place = 0;
        for (int i = 0; i < part; i++)
            place += step_of(staging, i);
    }
    return place;
}

/* Elements of a part of `count` that are in piece `c`. */
static size_t in_piece(const struct staging *staging, uint64_t c, size_t count)
{
    size_t first = (size_t)c * staging->step;
    return first < count ? smaller(staging->step, count - first) : 0;
}

/* The start of piece `c` in a buffer whose parts begin at `start`. */
static size_t offset_of(const struct staging *staging, uint64_t c, size_t start)
{
    return (start + (size_t)c * staging->step) * staging->element;
}

/* The same for part `part` of a call by parts. */
static size_t in_piece_of(const struct staging *staging, uint64_t c, int part, size_t count)
{
    size_t step = step_of(staging, part), first = (size_t)c * step;
    return first < count ? smaller(step, count - first) : 0;
}

static size_t part_offset(const struct staging *staging, uint64_t c, int part, size_t start)
{
    return (start + (size_t)c * step_of(staging, part)) * staging->element;
}

/* Part `i` of the input of a call by parts, in elements. */
static size_t part_count(const struct staging *staging, int i)
{
    const struct td__operation *operation = staging->operation;
    int n = staging->comm->size;
    if (staging->sliced)
        return td__part(operation->call.count, n, i + 1) - td__part(operation->call.count, n, i);
    return operation->call.input_counts ? operation->call.input_counts[i] : operation->call.count;
}

/* Copies piece c of each part of the input but our own, part i to place i of the stage. */
static void put_parts(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    char *piece = td__shm_piece(staging->comm, staging->comm->index, c);
    size_t start = 0;
    for (int i = 0; i < staging->comm->size; i++) {
        size_t count = part_count(staging, i);
        size_t now = in_piece_of(staging, c, i, count);
        if (now && i != staging->comm->index)
            memcpy(piece, (const char *)operation->call.input + part_offset(staging, c, i, start),
                   now * staging->element);
        piece += step_of(staging, i) * staging->element;
        start += count;
    }
}

/* The slice of piece c that `i` reduces, in elements. Of two ranks the root reduces all of it: it reads as
 * much of what the other has written as otherwise, and nothing is written for it a second time. Tried and
 * dropped: the kernel writes to the root's output what the others have reduced, half as slow again where the
 * ranks share a cache. */
static void slice_of(const struct staging *staging, size_t now, int i, size_t *first, size_t *end)
{
    const struct td__shm_comm *comm = staging->comm;
    bool to_root = staging->operation->call.kind == TD_OP_REDUCE && comm->size == 2;
    *first = to_root ? 0 : td__part(now, comm->size, i);
    *end = to_root ? (i == staging->operation->call.root ? now : 0)
                   : td__part(now, comm->size, i + 1);
}

/* What others reduce: all of piece c but our own slice. */
static void put_slices(const struct staging *staging, uint64_t c)
{
    const char *from = (const char *)staging->operation->call.input + offset_of(staging, c, 0);
    char *to = td__shm_piece(staging->comm, staging->comm->index, c);
    size_t now = in_piece(staging, c, staging->operation->call.count), first, end;
    slice_of(staging, now, staging->comm->index, &first, &end);
    memcpy(to, from, first * staging->element);
    memcpy(to + end * staging->element, from + end * staging->element,
           (now - end) * staging->element);
}

static void put(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    size_t now = in_piece(staging, c, part_count(staging, staging->comm->index));
    switch (operation->call.kind) {
    case TD_OP_SCATTER:
        if (staging->is_root)
            put_parts(staging, c);
        return;
    case TD_OP_REDUCE_SCATTER:
    case TD_OP_ALL_TO_ALL:
        put_parts(staging, c);
        return;
    case TD_OP_ALL_REDUCE:
    case TD_OP_REDUCE:
        if (staging->sliced)
            put_parts(staging, c);
        else
            put_slices(staging, c);
        return;
    default: /* broadcast, gather, all_gather */
        if (operation->call.kind != TD_OP_ALL_GATHER &&
            staging->is_root != (operation->call.kind == TD_OP_BROADCAST))
            return;
        if (now)
            memcpy(td__shm_piece(staging->comm, staging->comm->index, c),
                   (const char *)operation->call.input + offset_of(staging, c, 0),
                   now * staging->element);
        return;
    }
}

/* Our slice of piece c of everybody: into our own stage where others need it, and to the output. */
static void reduce_slice(const struct staging *staging, uint64_t c)
{
    struct td__shm_comm *comm = staging->comm;
    const struct td__operation *operation = staging->operation;
    size_t first, end, offset = offset_of(staging, c, 0);
    slice_of(staging, in_piece(staging, c, operation->call.count), comm->index, &first, &end);
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

/* The slices that others have reduced. */
static void take_reduced(const struct staging *staging, uint64_t c)
{
    struct td__shm_comm *comm = staging->comm;
    size_t now = in_piece(staging, c, staging->operation->call.count);
    char *output = (char *)staging->operation->call.output + offset_of(staging, c, 0);
    for (int k = 1; k < comm->size; k++) {
        int i = (comm->index + k) % comm->size;
        size_t first, end;
        slice_of(staging, now, i, &first, &end);
        memcpy(output + first * staging->element,
               td__shm_piece(comm, i, c) + first * staging->element,
               (end - first) * staging->element);
    }
}

/* Everybody's part for us; `part` is the place of our part in their stages. Our own is still in the
 * input, `own` elements from its start. */
static void take_parts(const struct staging *staging, uint64_t c, size_t part, size_t own)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    size_t start = 0;
    for (int i = 0; i < comm->size; i++) {
        size_t count = operation->call.output_counts ? operation->call.output_counts[i]
                                                     : operation->call.count;
        size_t now = in_piece(staging, c, count);
        char *to = (char *)operation->call.output + offset_of(staging, c, start);
        const char *from = i == comm->index
                               ? (const char *)operation->call.input + offset_of(staging, c, own)
                               : td__shm_piece(comm, i, c) +
                                     part * staging->step * staging->element;
        if (now && to != from)
            memcpy(to, from, now * staging->element);
        start += count;
    }
}

/* Our part of everybody's piece, straight to the output. */
static void reduce_parts(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    int mine = comm->index;
    size_t now = in_piece_of(staging, c, mine, part_count(staging, mine));
    size_t start = staging->sliced ? td__part(operation->call.count, comm->size, mine)
                                   : td__operation_part_start(operation, mine);
    if (!now)
        return;
    void *target = (char *)operation->call.output +
                   part_offset(staging, c, mine, staging->sliced ? start : 0);
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = td__shm_piece(comm, i, c) + place_of(staging, mine) * staging->element;
    comm->sources[mine] = (const char *)operation->call.input +
                          part_offset(staging, c, mine, start);
    td__reduce_many(&staging->reduction, &target, 1, comm->sources, comm->size, now);
}

static void take(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    size_t mine = (size_t)comm->index, own = 0;
    size_t bytes = in_piece(staging, c, operation->call.count) * staging->element;
    char *to = (char *)operation->call.output + offset_of(staging, c, 0);
    const char *from = td__shm_piece(comm, operation->call.root < 0 ? 0 : operation->call.root, c);
    switch (operation->call.kind) {
    case TD_OP_ALL_GATHER:
        take_parts(staging, c, 0, 0);
        return;
    case TD_OP_ALL_TO_ALL:
        for (int i = 0; i < comm->index; i++)
            own += operation->call.input_counts ? operation->call.input_counts[i]
                                                : operation->call.count;
        take_parts(staging, c, mine, own);
        return;
    case TD_OP_GATHER:
        if (staging->is_root)
            take_parts(staging, c, 0, 0);
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
                   offset_of(staging, c, mine * operation->call.count);
        if (to != from)
            memcpy(to, from, bytes);
        return;
    default: /* all_reduce and reduce */
        if (staging->sliced)
            reduce_parts(staging, c);
        else if (operation->call.kind == TD_OP_ALL_REDUCE || staging->is_root)
            take_reduced(staging, c);
        return;
    }
}

static struct staging staging_of(struct td__shm_comm *comm, const struct td__operation *operation,
                                 size_t largest, bool copies)
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
    staging.sliced = kind == TD_OP_ALL_REDUCE && copies && !comm->oversubscribed &&
                     bytes >= KERNEL_LEAST &&
                     bytes / (size_t)comm->size <= CACHES_A_SLICE * td__cache_bytes(2);
    staging.reduces = (kind == TD_OP_ALL_REDUCE && !staging.sliced) || kind == TD_OP_REDUCE;
    for (int i = 0; staging.sliced && i < comm->size; i++) {
        size_t count = part_count(&staging, i);
        staging.count = i && staging.count > count ? staging.count : count;
    }
    bool by_parts = kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER ||
                    kind == TD_OP_ALL_TO_ALL;
    staging.shared = kind == TD_OP_REDUCE_SCATTER && operation->call.input_counts;
    staging.step = (comm->oversubscribed ? TD__PIECE_BYTES : DEDICATED_PIECE) / staging.element;
    if ((by_parts && !staging.shared) || staging.sliced)
        staging.step /= (size_t)comm->size;
    /* Whole cache lines, where there is room. */
    if (staging.step > 64)
        staging.step -= staging.step % 64;
    return staging;
}

static uint64_t count_pieces(const struct staging *staging)
{
    uint64_t most = (staging->count + staging->step - 1) / staging->step;
    for (int i = 0; staging->shared && i < staging->comm->size; i++) {
        size_t step = step_of(staging, i);
        uint64_t pieces = (part_count(staging, i) + step - 1) / step;
        most = i && most > pieces ? most : pieces;
    }
    return most;
}

/* All have reached `phase`, or will. */
static td_status fetch_slices(const struct staging *staging, unsigned phase)
{
    struct td__shm_comm *comm = staging->comm;
    TD_TRY(td__shm_await_all(comm, staging->operation, phase));
    TD_TRY(td__shm_fetch_slices(comm, staging->operation));
    td__shm_reach(comm, phase + 1);
    return td__shm_await_all(comm, staging->operation, phase + 1);
}

td_status td__shm_staged(struct td__shm_comm *comm, const struct td__operation *operation,
                         size_t largest, bool copies)
{
    struct staging staging = staging_of(comm, operation, largest, copies);
    if (!staging.step || (staging.shared && staging.step < 2 * (size_t)comm->size))
        return td__shm_fail(comm, TD_ERR_UNSUPPORTED, "%s: too many ranks on one host",
                            td__operation_describe(operation));
    uint64_t pieces = count_pieces(&staging);
    unsigned phase = 2;
    if (!pieces)
        return TD_OK;

    put(&staging, 0);
    td__shm_reach(comm, phase);
    for (uint64_t c = 0; c < pieces + staging.reduces; c++) {
        TD_TRY(td__shm_await_all(comm, operation, phase++));
        if (c + 1 < pieces)
            put(&staging, c + 1);
        if (!staging.reduces) {
            take(&staging, c);
        } else {
            if (c)
                take(&staging, c - 1);
            if (c < pieces)
                reduce_slice(&staging, c);
        }
        td__shm_reach(comm, phase);
    }
    return staging.sliced ? fetch_slices(&staging, phase) : TD_OK;
}
