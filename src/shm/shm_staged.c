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
#include "base/copy.h"

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
    size_t step; /* elements of each part in one piece; if `proportional`, of all parts together */
    uint64_t pieces;
    bool reduces;      /* has a reduce phase: all_reduce and reduce */
    bool sliced;       /* an all_reduce whose parts are slices: see KERNEL_MIN_BYTES */
    bool by_parts;     /* a piece has a part for each rank; otherwise all ranks read the same */
    bool proportional; /* uneven reduce_scatter: a piece has the same fraction of each part */
    bool is_root;
};

/* The elements of part `part` in a piece. Those of all parts fit into a stage. */
static size_t step_of(const struct staging *staging, int part)
{
    if (!staging->proportional)
        return staging->step;
    uint64_t count = staging->operation->call.input_counts[part];
    size_t step = (count + staging->pieces - 1) / staging->pieces;
    return step > 64 ? (step + 63) / 64 * 64 : step; /* whole cache lines */
}

/* The offset of part `part` in a piece of a stage, in elements. */
static size_t stage_offset(const struct staging *staging, int part)
{
    size_t offset = 0;
    for (int i = 0; staging->by_parts && i < part; i++)
        offset += step_of(staging, i);
    return offset;
}

/* What rank `from` has for rank `to`. */
static struct td__shm_span span_of(const struct staging *staging, int from, int to)
{
    size_t count = staging->operation->call.count;
    if (!staging->sliced)
        return td__shm_span(staging->comm, staging->operation, from, to);
    size_t first = td__part(count, staging->comm->size, to) * staging->element;
    size_t end = td__part(count, staging->comm->size, to + 1) * staging->element;
    return (struct td__shm_span){end - first, first, first};
}

/* The bytes of piece `c` of a part for rank `part` of `size` bytes: *first, and their number. */
static size_t cut(const struct staging *staging, uint64_t c, int part, size_t size, size_t *first)
{
    size_t step = step_of(staging, part) * staging->element;
    *first = (size_t)c * step;
    return *first >= size ? 0 : size - *first < step ? size - *first : step;
}

/* Copies piece c of what this rank has for the others to its stage. */
static void stage_parts(const struct staging *staging, uint64_t c)
{
    int mine = staging->comm->index;
    char *piece = td__shm_piece(staging->comm, mine, c);
    for (int i = 0; i < staging->comm->size; i++) {
        struct td__shm_span span = span_of(staging, mine, i);
        size_t first, size = cut(staging, c, i, span.size, &first);
        if (size && i != mine)
            memcpy(piece, (const char *)staging->operation->call.input + span.input + first, size);
        if (staging->by_parts)
            piece += step_of(staging, i) * staging->element;
        else if (span.size && i != mine)
            return;
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
    const struct td__operation *operation = staging->operation;
    size_t at, first, end, element = staging->element;
    size_t size = cut(staging, c, 0, operation->call.count * element, &at);
    const char *from = (const char *)operation->call.input + at;
    char *to = td__shm_piece(staging->comm, staging->comm->index, c);
    slice_of(staging, size / element, staging->comm->index, &first, &end);
    memcpy(to, from, first * element);
    memcpy(to + end * element, from + end * element, size - end * element);
}

/* Reduces this rank's slice of piece c to the output, and to its stage if other ranks need it. */
static void reduce_slice(const struct staging *staging, uint64_t c)
{
    struct td__shm_comm *comm = staging->comm;
    const struct td__operation *operation = staging->operation;
    size_t at, first, end;
    size_t size = cut(staging, c, 0, operation->call.count * staging->element, &at);
    slice_of(staging, size / staging->element, comm->index, &first, &end);
    if (first == end)
        return;
    size_t skip = first * staging->element;
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = td__shm_piece(comm, i, c) + skip;
    comm->sources[comm->index] = (const char *)operation->call.input + at + skip;
    void *targets[2];
    int count = 0;
    if (operation->call.output)
        targets[count++] = (char *)operation->call.output + at + skip;
    if (operation->call.kind == TD_OP_ALL_REDUCE || !staging->is_root)
        targets[count++] = td__shm_piece(comm, comm->index, c) + skip;
    td__reduce_many(&staging->reduction, targets, count, comm->sources, comm->size, end - first);
}

/* Copies the slices that other ranks have reduced to the output. */
static void copy_reduced(const struct staging *staging, uint64_t c)
{
    struct td__shm_comm *comm = staging->comm;
    const struct td__operation *operation = staging->operation;
    size_t at, first, end, element = staging->element;
    size_t size = cut(staging, c, 0, operation->call.count * element, &at);
    if (operation->call.kind == TD_OP_REDUCE && !staging->is_root)
        return;
    for (int k = 1; k < comm->size; k++) {
        int i = (comm->index + k) % comm->size;
        slice_of(staging, size / element, i, &first, &end);
        memcpy((char *)operation->call.output + at + first * element,
               td__shm_piece(comm, i, c) + first * element, (end - first) * element);
    }
}

/* Copies piece c of what all ranks have for this one to the output. */
static void copy_parts(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    size_t offset = stage_offset(staging, comm->index) * staging->element;
    for (int i = 0; i < comm->size; i++) {
        struct td__shm_span span = span_of(staging, i, comm->index);
        size_t first, size = cut(staging, c, comm->index, span.size, &first);
        if (!size)
            continue;
        char *to = (char *)operation->call.output + span.output + first;
        const char *from = i == comm->index
                               ? (const char *)operation->call.input + span.input + first
                               : td__shm_piece(comm, i, c) + offset;
        if (to != from)
            memcpy(to, from, size);
    }
}

/* Reduces this rank's part of piece c to the output. */
static void reduce_parts(const struct staging *staging, uint64_t c)
{
    const struct td__operation *operation = staging->operation;
    struct td__shm_comm *comm = staging->comm;
    int mine = comm->index;
    struct td__shm_span span = span_of(staging, mine, mine);
    size_t first, size = cut(staging, c, mine, span.size, &first);
    if (!size)
        return;
    void *target = (char *)operation->call.output + span.output + first;
    size_t offset = stage_offset(staging, mine) * staging->element;
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = td__shm_piece(comm, i, c) + offset;
    comm->sources[mine] = (const char *)operation->call.input + span.input + first;
    td__reduce_many(&staging->reduction, &target, 1, comm->sources, comm->size,
                    size / staging->element);
}

static struct staging staging_of(struct td__shm_comm *comm, const struct td__operation *operation,
                                 bool can_copy)
{
    td_op_kind kind = operation->call.kind;
    struct staging staging = {
        .comm = comm,
        .operation = operation,
        .reduction = td__shm_reduction(comm, operation),
        .element = td__operation_element(operation),
        .is_root = operation->call.root == comm->index,
    };
    size_t bytes = operation->call.count * staging.element;
    staging.sliced = kind == TD_OP_ALL_REDUCE && can_copy && !comm->oversubscribed &&
                     bytes >= KERNEL_MIN_BYTES &&
                     bytes / (size_t)comm->size <= MAX_SLICE_CACHES * td__cache_bytes(2);
    staging.reduces = (kind == TD_OP_ALL_REDUCE && !staging.sliced) || kind == TD_OP_REDUCE;
    staging.by_parts = kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER ||
                       kind == TD_OP_ALL_TO_ALL || staging.sliced;
    staging.proportional = kind == TD_OP_REDUCE_SCATTER && operation->call.input_counts;
    staging.step = (comm->oversubscribed ? TD__PIECE_BYTES : DEDICATED_PIECE) / staging.element;
    if (staging.by_parts && !staging.proportional)
        staging.step /= (size_t)comm->size;
    /* Whole cache lines, if a piece has enough. */
    if (staging.step > 64)
        staging.step -= staging.step % 64;
    return staging;
}

/* The number of pieces of the largest part. If `proportional`, about the least for which the elements of all parts in
 * a piece fit into a stage: that is step_of() rounded up for each part. */
static void count_pieces(struct staging *staging)
{
    size_t total = staging->proportional ? staging->operation->call.count
                                         : td__shm_largest_part(staging->comm, staging->operation);
    if (staging->sliced) {
        total = 0;
        for (int i = 0; i < staging->comm->size; i++) {
            size_t slice = span_of(staging, 0, i).size / staging->element;
            total = slice > total ? slice : total;
        }
    }
    staging->pieces = (total + staging->step - 1) / staging->step;
    while (staging->proportional && staging->pieces) {
        size_t used = stage_offset(staging, staging->comm->size);
        if (used <= staging->step)
            return;
        staging->pieces += 1 + staging->pieces * (used - staging->step) / (2 * staging->step);
    }
}

td_status td__shm_staged(struct td__shm_comm *comm, const struct td__operation *operation,
                         bool can_copy)
{
    struct staging staging = staging_of(comm, operation, can_copy);
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

    void (*stage_in)(const struct staging *, uint64_t) = staging.reduces ? stage_slices
                                                                         : stage_parts;
    bool reduces_parts = operation->call.kind == TD_OP_REDUCE_SCATTER || staging.sliced;
    stage_in(&staging, 0);
    td__shm_reach(comm, phase);
    for (uint64_t c = 0; c < pieces + staging.reduces; c++) {
        TD_TRY(td__shm_await_all(comm, operation, phase++));
        if (c + 1 < pieces)
            stage_in(&staging, c + 1);
        if (staging.reduces && c)
            copy_reduced(&staging, c - 1);
        if (staging.reduces && c < pieces)
            reduce_slice(&staging, c);
        if (!staging.reduces)
            (reduces_parts ? reduce_parts : copy_parts)(&staging, c);
        td__shm_reach(comm, phase);
    }
    return staging.sliced ? td__shm_fetch_slices(comm, operation, phase) : TD_OK;
}
