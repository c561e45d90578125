/* Maps DATA, INPUT and SCRATCH of a schedule (the table in schedule.h) to the buffers of a call, and runs it.
 *
 * Reductions run on accumulators. If these have the dtype of the elements, they are in the output buffer;
 * otherwise, and on ranks without an output buffer, in scratch memory. That is done in chunks, so that the scratch
 * memory is small and stays in the cache. All ranks must choose the same chunks: their sizes depend only on
 * arguments that are equal on all ranks, never on whether a rank works in place.
 *
 *     scratch memory   | converted or copied inputs | DATA | SCRATCH |  */
#include "tcp/tcp_layout.h"

#include "base/fail.h"
#include "collective/tree.h"

#include <stdlib.h>
#include <string.h>

enum {
    CHUNK_BYTES = 2 << 20,        /* of a vector; of each part of an all_gather of two ranks */
    CHUNK_LEAST_BYTES = 16 << 10, /* of each part, at least */

    /* The chain cuts this into 32 pieces: longer ones would leave the cache before they are forwarded. */
    BROADCAST_BYTES = 16 << 20,
    GATHER_BYTES = 256 << 10, /* of each part, in one pass of the ring */
};

/* A running call. */
struct task {
    struct td__tcp_comm *comm;
    const struct td__operation *operation;
    struct td__run run;
    size_t element; /* bytes of an element, or of an accumulator */
    char *scratch;
};

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t aligned(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

static struct td__blocks vector_of(const struct task *task, const void *base, size_t count)
{
    return (struct td__blocks){.base = (char *)base,
                               .element = task->element,
                               .count = count,
                               .pieces = task->run.compiled->schedule.blocks};
}

/* Parts of `count` elements. */
static struct td__blocks parts_of(const struct task *task, const void *base, size_t count)
{
    return (struct td__blocks){.base = (char *)base, .element = task->element, .count = count};
}

/* Parts of any sizes, in a buffer with the whole vector. */
static struct td__blocks bounded_parts(const struct task *task, const void *base,
                                       const size_t *starts, const size_t *ends)
{
    return (struct td__blocks){
        .base = (char *)base, .element = task->element, .starts = starts, .ends = ends};
}

/* Parts of which the schedule uses only this rank's, which is at `own`. */
static struct td__blocks own_part(const struct task *task, const void *own, size_t count)
{
    uintptr_t before = (uintptr_t)task->comm->index * count * task->element;
    return parts_of(task, (const void *)((uintptr_t)own - before), count);
}

static size_t scratch_bytes(const struct task *task, size_t block)
{
    return (size_t)task->run.compiled->schedule.scratch_blocks * block * task->element;
}

static td_status execute(struct task *task)
{
    return td__executor_run(&task->comm->executor, &task->run);
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes && to != from)
        memcpy(to, from, bytes);
}

/* `count` is that of the whole vector, in elements of `element` bytes. */
static td_status begin(struct task *task, struct td__tcp_comm *comm,
                       const struct td__operation *operation, size_t element, size_t count)
{
    *task = (struct task){.comm = comm, .operation = operation, .element = element};
    return td__tcp_comm_begin(comm, operation, count * element, &task->run);
}

/* Sets task->scratch to at least `bytes` bytes, aligned to 64. */
static td_status take_scratch(struct task *task, size_t bytes)
{
    struct td__tcp_comm *comm = task->comm;
    if (bytes > comm->scratch_size) {
        free(comm->scratch);
        comm->scratch = aligned(bytes) >= bytes ? aligned_alloc(64, aligned(bytes)) : NULL;
        comm->scratch_size = comm->scratch ? aligned(bytes) : 0;
        if (!comm->scratch)
            return td__fail_nomem(td__operation_describe(task->operation));
    }
    task->scratch = comm->scratch;
    return TD_OK;
}

/* ---- Vectors --------------------------------------------------------------------------------- */

/* The largest piece of a vector of `count` elements. */
static size_t largest_piece(const struct task *task, size_t count)
{
    size_t pieces = (size_t)task->run.compiled->schedule.blocks;
    return (count + pieces - 1) / pieces;
}

/* Runs the schedule on `count` elements at `data`; SCRATCH is at `scratch`. */
static td_status run_vector(struct task *task, void *data, size_t count, char *scratch)
{
    size_t piece = largest_piece(task, count);
    task->run.buffers[TD__DATA] = vector_of(task, data, count);
    task->run.buffers[TD__SCRATCH] = parts_of(task, scratch, piece);
    return execute(task);
}

/* Runs the schedule on the output, in chunks of at most `most` bytes, in elements of `element` bytes. */
static td_status run_in_place(struct td__tcp_comm *comm, const struct td__operation *operation,
                              size_t element, size_t most)
{
    struct task task;
    size_t count = operation->call.count, chunk = min_size(count, most / element), at = 0;
    TD_TRY(begin(&task, comm, operation, element, count));
    TD_TRY(take_scratch(&task, scratch_bytes(&task, largest_piece(&task, chunk))));
    do {
        size_t part = min_size(chunk, count - at);
        char *data = td__add_offset(operation->call.output, at * element);
        TD_TRY(run_vector(&task, data, part, task.scratch));
        at += part;
    } while (at < count);
    return TD_OK;
}

/* Whether elements need no conversion to be accumulators. */
static bool is_plain(const struct td__reduction *reduction)
{
    return reduction->user || (td__reduction_accumulator(reduction) == reduction->dtype &&
                               reduction->op != TD_PREMUL_SUM && reduction->dtype != TD_BOOL);
}

/* Of a long all_reduce: what has been received is sent again from the cache. Each chunk takes two rounds a level, whose
 * latency is to be small beside the time of its bytes. */
static size_t all_reduce_chunk(const struct td__tcp_comm *comm)
{
    int levels = td__tree_levels(comm->size);
    return (size_t)CHUNK_BYTES * (size_t)(levels > 1 ? levels : 1);
}

/* reduce and all_reduce. */
static td_status run_reduction(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    const struct td__reduction *reduction = &operation->reduction;
    td_dtype accumulator = td__reduction_accumulator(reduction);
    bool same = accumulator == reduction->dtype, all = operation->call.kind == TD_OP_ALL_REDUCE;
    bool gets = all || comm->index == operation->call.root;
    size_t count = operation->call.count, size = td__operation_element(operation);
    struct task task;
    TD_TRY(begin(&task, comm, operation, td_dtype_size(accumulator), count));

    size_t chunk = min_size(count,
                            (all && same ? all_reduce_chunk(comm) : CHUNK_BYTES) / task.element);
    bool borrows = !gets && is_plain(reduction) && !task.run.compiled->writes_data;
    size_t staged = (gets && same) || borrows ? 0 : aligned(chunk * task.element);
    TD_TRY(take_scratch(&task, staged + scratch_bytes(&task, largest_piece(&task, chunk))));
    size_t at = 0;
    do {
        size_t part = min_size(chunk, count - at);
        const char *input = td__add_offset(operation->call.input, at * size);
        char *output = gets ? td__add_offset(operation->call.output, at * size) : NULL;
        char *data = staged ? task.scratch : borrows ? (char *)input : output;
        if (!borrows)
            td__reduce_load(reduction, data, input, part);
        TD_TRY(run_vector(&task, data, part, td__add_offset(task.scratch, staged)));
        if (gets)
            td__reduce_store(reduction, output, data, part, comm->size);
        at += part;
    } while (at < count);
    return TD_OK;
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* all_gather and reduce_scatter work on the parts of all ranks, which may have any sizes. Each part is cut into
 * `pieces`; the schedule runs once for each piece, on that piece of all parts. */
struct parts {
    struct task task;
    size_t pieces;
    size_t *starts, *ends; /* of the current piece of each part, in elements of the whole vector */
    size_t *scratch;       /* starts of the blocks of SCRATCH, and the end of the last one */
};

enum { LINE = 16 }; /* pieces begin at multiples of so many elements */

static td_status begin_parts(struct parts *parts, struct td__tcp_comm *comm,
                             const struct td__operation *operation, size_t element)
{
    size_t n = (size_t)comm->size;
    parts->starts = comm->bounds;
    parts->ends = comm->bounds + n;
    parts->scratch = comm->bounds + 2 * n;
    return begin(&parts->task, comm, operation, element,
                 td__operation_part_start(operation, comm->size));
}

/* Cuts parts of `bytes` bytes into pieces of about `piece` bytes. */
static void cut_parts(struct parts *parts, size_t bytes, size_t piece)
{
    parts->pieces = bytes ? (bytes + piece - 1) / piece : 1;
}

/* The offset of piece `piece` in a part of `count` elements. */
static size_t piece_start(const struct parts *parts, size_t count, size_t piece)
{
    size_t start = count / parts->pieces * piece + count % parts->pieces * piece / parts->pieces;
    return piece == parts->pieces ? count : start - start % LINE;
}

/* An upper bound of the elements of a piece of part `part`. */
static size_t piece_most(const struct parts *parts, int part)
{
    size_t count = td__operation_part(parts->task.operation, part);
    return min_size(count, count / parts->pieces + 1 + LINE);
}

static size_t scratch_most(const struct parts *parts)
{
    const struct td__schedule *schedule = &parts->task.run.compiled->schedule;
    size_t sum = 0;
    for (int32_t i = 0; i < schedule->scratch_blocks; i++)
        sum += piece_most(parts, schedule->scratch_like[i]);
    return sum * parts->task.element;
}

/* Makes piece `piece` the current one. SCRATCH is at `scratch`. */
static void select_piece(struct parts *parts, size_t piece, char *scratch)
{
    struct task *task = &parts->task;
    const struct td__schedule *schedule = &task->run.compiled->schedule;
    size_t part_start = 0;
    for (int i = 0; i < task->comm->size; i++) {
        size_t count = td__operation_part(task->operation, i);
        parts->starts[i] = part_start + piece_start(parts, count, piece);
        parts->ends[i] = part_start + piece_start(parts, count, piece + 1);
        part_start += count;
    }
    parts->scratch[0] = 0;
    for (int32_t i = 0; i < schedule->scratch_blocks; i++) {
        int32_t like = schedule->scratch_like[i];
        parts->scratch[i + 1] = parts->scratch[i] + parts->ends[like] - parts->starts[like];
    }
    task->run.buffers[TD__SCRATCH] = bounded_parts(task, scratch, parts->scratch,
                                                   parts->scratch + 1);
}

static td_status run_all_gather(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct parts parts;
    struct task *task = &parts.task;
    const size_t *counts = operation->call.input_counts;
    size_t element = td__operation_element(operation);
    size_t largest = counts ? td__largest_count(counts, comm->size) : operation->call.count;
    TD_TRY(begin_parts(&parts, comm, operation, element));
    const struct td__compiled_schedule *compiled = task->run.compiled;
    bool one_by_one = compiled->one_by_one ||
                      (comm->size == 2 && !compiled->schedule.scratch_blocks);
    cut_parts(&parts, one_by_one ? largest * element : 0,
              comm->size == 2 ? CHUNK_BYTES : GATHER_BYTES);
    TD_TRY(take_scratch(task, scratch_most(&parts)));
    struct td__blocks *data = &task->run.buffers[TD__DATA];
    const char *input = operation->call.input;
    for (size_t piece = 0; piece < parts.pieces; piece++) {
        select_piece(&parts, piece, task->scratch);
        *data = bounded_parts(task, operation->call.output, parts.starts, parts.ends);
        size_t bytes = td__block_bytes(data, comm->index, 1);
        copy(td__block_at(data, comm->index), input, bytes);
        input = td__add_offset(input, bytes);
        TD_TRY(execute(task));
    }
    return TD_OK;
}

/* gather and scatter. An inner rank of the tree has the parts of its subtree in scratch memory. */
static td_status run_rooted(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    size_t count = operation->call.count, part = count * td__operation_element(operation);
    bool gathers = operation->call.kind == TD_OP_GATHER;
    TD_TRY(begin(&task, comm, operation, td__operation_element(operation),
                 count * (size_t)comm->size));
    const void *data = gathers ? operation->call.output : operation->call.input;
    if (comm->index != operation->call.root) {
        if (!(gathers ? task.run.compiled->writes_data : task.run.compiled->sends)) {
            task.run.buffers[TD__DATA] = own_part(
                &task, gathers ? operation->call.input : operation->call.output, count);
            return execute(&task);
        }
        TD_TRY(take_scratch(&task, (size_t)comm->size * part));
        data = task.scratch;
    }
    char *own = td__add_offset(data, (size_t)comm->index * part);
    if (gathers)
        copy(own, operation->call.input, part);
    task.run.buffers[TD__DATA] = parts_of(&task, data, count);
    TD_TRY(execute(&task));
    if (!gathers)
        copy(operation->call.output, own, part);
    return TD_OK;
}

/* Converts the current piece of all parts to accumulators at `to`, without gaps, and makes that INPUT. */
static void load_parts(struct parts *parts, char *to)
{
    struct task *task = &parts->task;
    const struct td__operation *operation = task->operation;
    size_t size = td__operation_element(operation), loaded = 0;
    for (int i = 0; i < task->comm->size; i++) {
        size_t count = parts->ends[i] - parts->starts[i];
        td__reduce_load(&operation->reduction, td__add_offset(to, loaded * task->element),
                        td__add_offset(operation->call.input, parts->starts[i] * size), count);
        parts->starts[i] = loaded;
        parts->ends[i] = loaded += count;
    }
}

/* With `combine`, input and output have accumulators, which are neither loaded nor stored. */
static td_status run_reduce_scatter(struct td__tcp_comm *comm,
                                    const struct td__operation *operation, bool combine)
{
    const struct td__reduction *reduction = &operation->reduction;
    td_dtype accumulator = td__reduction_accumulator(reduction);
    bool same = combine || accumulator == reduction->dtype;
    bool plain = combine || is_plain(reduction);
    size_t n = (size_t)comm->size, most = 0;
    struct parts parts;
    struct task *task = &parts.task;
    TD_TRY(begin_parts(&parts, comm, operation, td_dtype_size(accumulator)));

    cut_parts(&parts, td__operation_part_start(operation, comm->size) * task->element,
              n * CHUNK_LEAST_BYTES > CHUNK_BYTES ? n * CHUNK_LEAST_BYTES : CHUNK_BYTES);
    for (int i = 0; i < comm->size; i++)
        most += piece_most(&parts, i);
    size_t input_bytes = plain ? 0 : aligned(most * task->element);
    size_t data_bytes = same ? 0 : aligned(piece_most(&parts, comm->index) * task->element);
    TD_TRY(take_scratch(task, input_bytes + data_bytes + scratch_most(&parts)));
    char *data_scratch = td__add_offset(task->scratch, input_bytes);
    char *output = operation->call.output;
    for (size_t piece = 0; piece < parts.pieces; piece++) {
        select_piece(&parts, piece, td__add_offset(data_scratch, data_bytes));
        size_t own = parts.ends[comm->index] - parts.starts[comm->index];
        char *data = same ? output : data_scratch;
        if (!plain)
            load_parts(&parts, task->scratch);
        task->run.buffers[TD__INPUT] = bounded_parts(
            task, plain ? operation->call.input : task->scratch, parts.starts, parts.ends);
        task->run.buffers[TD__DATA] = parts_of(task, data, own);
        TD_TRY(execute(task));
        if (!combine)
            td__reduce_store(reduction, output, data, own, comm->size);
        output = td__add_offset(output,
                                own * (combine ? task->element : td__operation_element(operation)));
    }
    return TD_OK;
}

/* ---- All to all ------------------------------------------------------------------------------ */

/* The parts of `counts`, or if that is NULL, of the count of the call. `starts` has space for one more than there
 * are parts. */
static struct td__blocks counted_parts(const struct task *task, const void *base,
                                       const size_t *counts, size_t *starts)
{
    starts[0] = 0;
    for (int i = 0; i < task->comm->size; i++)
        starts[i + 1] = starts[i] + (counts ? counts[i] : task->operation->call.count);
    return bounded_parts(task, base, starts, starts + 1);
}

static td_status run_all_to_all(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    size_t n = (size_t)comm->size, count = operation->call.count;
    bool uneven = operation->call.input_counts;
    /* In place: sends from a copy, since received blocks overwrite blocks that are not sent yet. */
    bool in_place = operation->call.input == operation->call.output && !uneven;
    TD_TRY(begin(&task, comm, operation, td__operation_element(operation),
                 uneven ? 0 : n * n * count));
    size_t bytes = n * count * task.element, kept = in_place ? aligned(bytes) : 0;
    TD_TRY(take_scratch(&task, kept + (uneven ? 0 : scratch_bytes(&task, count))));
    if (in_place)
        copy(task.scratch, operation->call.input, bytes);
    task.run.buffers[TD__INPUT] = counted_parts(&task,
                                                in_place ? task.scratch : operation->call.input,
                                                operation->call.input_counts, comm->bounds);
    task.run.buffers[TD__DATA] = counted_parts(&task, operation->call.output,
                                               operation->call.output_counts, comm->bounds + n + 1);
    task.run.buffers[TD__SCRATCH] = parts_of(&task, td__add_offset(task.scratch, kept), count);
    return execute(&task);
}

td_status td__tcp_layout_combine(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    if (operation->call.kind == TD_OP_REDUCE_SCATTER)
        return run_reduce_scatter(comm, operation, true);
    td_dtype accumulator = td__reduction_accumulator(&operation->reduction);
    return run_in_place(comm, operation, td_dtype_size(accumulator), all_reduce_chunk(comm));
}

td_status td__tcp_layout_run(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    switch (operation->call.kind) {
    case TD_OP_BROADCAST:
        return run_in_place(comm, operation, td__operation_element(operation), BROADCAST_BYTES);
    case TD_OP_REDUCE:
    case TD_OP_ALL_REDUCE:
        return run_reduction(comm, operation);
    case TD_OP_SCATTER:
    case TD_OP_GATHER:
        return run_rooted(comm, operation);
    case TD_OP_ALL_GATHER:
        return run_all_gather(comm, operation);
    case TD_OP_REDUCE_SCATTER:
        return run_reduce_scatter(comm, operation, false);
    case TD_OP_ALL_TO_ALL:
        return run_all_to_all(comm, operation);
    default: /* a barrier */
        TD_TRY(begin(&task, comm, operation, 1, 0));
        return execute(&task);
    }
}
