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

#include <string.h>

enum {
    CHUNK_BYTES = 2 << 20,        /* of a vector */
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

/* Parts of `count` elements; each begins `stride` elements after the previous one. */
static struct td__blocks parts_of(const struct task *task, const void *base, size_t count,
                                  size_t stride)
{
    return (struct td__blocks){.base = (char *)base,
                               .element = task->element,
                               .count = count,
                               .stride = stride * task->element};
}

/* Parts of which the schedule uses only this rank's, which is at `own`. */
static struct td__blocks own_part(const struct task *task, const void *own, size_t count)
{
    uintptr_t before = (uintptr_t)task->comm->index * count * task->element;
    return parts_of(task, (const void *)((uintptr_t)own - before), count, count);
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

static td_status begin(struct task *task, struct td__tcp_comm *comm,
                       const struct td__operation *operation, td_op_kind kind, size_t element,
                       size_t count, size_t parts)
{
    *task = (struct task){.comm = comm, .operation = operation, .element = element};
    return td__tcp_comm_begin(comm, operation, kind, count, count * parts * element, &task->run);
}

static td_status take_scratch(struct task *task, size_t bytes)
{
    return td__tcp_comm_scratch(task->comm, task->operation, bytes, &task->scratch);
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
    task->run.buffers[TD__SCRATCH] = parts_of(task, scratch, piece, piece);
    return execute(task);
}

static td_status run_broadcast(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    size_t count = operation->call.count;
    TD_TRY(
        begin(&task, comm, operation, TD_OP_BROADCAST, td__operation_element(operation), count, 1));
    size_t chunk = min_size(count, BROADCAST_BYTES / task.element), at = 0;
    TD_TRY(take_scratch(&task, scratch_bytes(&task, largest_piece(&task, chunk))));
    do {
        size_t part = min_size(chunk, count - at);
        char *data = td__add_offset(operation->call.output, at * task.element);
        TD_TRY(run_vector(&task, data, part, task.scratch));
        at += part;
    } while (at < count);
    return TD_OK;
}

static td_status run_barrier(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    TD_TRY(begin(&task, comm, operation, TD_OP_BARRIER, 1, 0, 0));
    return execute(&task);
}

/* Whether elements need no conversion to be accumulators. */
static bool is_plain(const struct td__reduction *reduction)
{
    return reduction->user || (td__reduction_accumulator(reduction) == reduction->dtype &&
                               reduction->op != TD_PREMUL_SUM && reduction->dtype != TD_BOOL);
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
    TD_TRY(
        begin(&task, comm, operation, operation->call.kind, td_dtype_size(accumulator), count, 1));

    size_t chunk = all && same ? count : min_size(count, CHUNK_BYTES / task.element);
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

td_status td__tcp_layout_combine(struct td__tcp_comm *comm, const struct td__operation *operation,
                                 void *data, size_t count)
{
    td_op_kind kind = operation->call.kind == TD_OP_REDUCE ? TD_OP_REDUCE : TD_OP_ALL_REDUCE;
    size_t element = td_dtype_size(td__reduction_accumulator(&operation->reduction));
    struct task task;
    TD_TRY(begin(&task, comm, operation, kind, element, count, 1));
    TD_TRY(take_scratch(&task, scratch_bytes(&task, largest_piece(&task, count))));
    return run_vector(&task, data, count, task.scratch);
}

/* ---- Parts ----------------------------------------------------------------------------------- */

/* all_gather and reduce_scatter work on the parts of all ranks, which may have any sizes. Each part is cut into
 * `pieces`; the schedule runs once for each piece, on that piece of all parts. */
struct parts {
    struct task *task;
    size_t pieces;
    size_t *starts, *ends; /* of the current piece of each part, in elements of the whole vector */
    size_t *scratch;       /* starts of the blocks of SCRATCH, and the end of the last one */
};

enum { LINE = 16 }; /* pieces begin at multiples of so many elements */

static struct parts cut_parts(struct task *task, size_t pieces)
{
    size_t *bounds = task->comm->bounds, n = (size_t)task->comm->size;
    return (struct parts){.task = task,
                          .pieces = pieces ? pieces : 1,
                          .starts = bounds,
                          .ends = bounds + n,
                          .scratch = bounds + 2 * n};
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
    size_t count = td__operation_part(parts->task->operation, part);
    return min_size(count, count / parts->pieces + 1 + LINE);
}

static size_t scratch_most(const struct parts *parts)
{
    const struct td__schedule *schedule = &parts->task->run.compiled->schedule;
    size_t sum = 0;
    for (int32_t i = 0; i < schedule->scratch_blocks; i++)
        sum += piece_most(parts, schedule->scratch_like[i]);
    return sum * parts->task->element;
}

/* Makes piece `piece` the current one. SCRATCH is at `scratch`. */
static void select_piece(const struct parts *parts, size_t piece, char *scratch)
{
    struct task *task = parts->task;
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
    task->run.buffers[TD__SCRATCH] = (struct td__blocks){.base = scratch,
                                                         .element = task->element,
                                                         .starts = parts->scratch,
                                                         .ends = parts->scratch + 1};
}

/* The current piece of all parts, in a buffer with the whole vector. */
static struct td__blocks blocks_of(const struct parts *parts, const void *whole)
{
    return (struct td__blocks){.base = (char *)whole,
                               .element = parts->task->element,
                               .starts = parts->starts,
                               .ends = parts->ends};
}

static td_status begin_parts(struct task *task, struct td__tcp_comm *comm,
                             const struct td__operation *operation, size_t element)
{
    size_t whole = td__operation_part_start(operation, comm->size);
    *task = (struct task){.comm = comm, .operation = operation, .element = element};
    return td__tcp_comm_begin(comm, operation, operation->call.kind, operation->call.count,
                              whole * element, &task->run);
}

static td_status run_all_gather(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    const size_t *counts = operation->call.input_counts;
    size_t element = td__operation_element(operation);
    size_t largest = counts ? td__largest_count(counts, comm->size) : operation->call.count;
    TD_TRY(begin_parts(&task, comm, operation, element));
    bool in_pieces = task.run.compiled->one_by_one;
    struct parts parts = cut_parts(
        &task, in_pieces ? (largest * element + GATHER_BYTES - 1) / GATHER_BYTES : 1);
    TD_TRY(take_scratch(&task, scratch_most(&parts)));
    const char *input = operation->call.input;
    for (size_t piece = 0; piece < parts.pieces; piece++) {
        select_piece(&parts, piece, task.scratch);
        task.run.buffers[TD__DATA] = blocks_of(&parts, operation->call.output);
        size_t bytes = td__block_bytes(&task.run.buffers[TD__DATA], comm->index, 1);
        copy(td__block_at(&task.run.buffers[TD__DATA], comm->index), input, bytes);
        input = td__add_offset(input, bytes);
        TD_TRY(execute(&task));
    }
    return TD_OK;
}

/* An inner rank of the tree gathers the parts of its subtree in scratch memory. */
static td_status run_gather(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    size_t count = operation->call.count, element = td__operation_element(operation);
    size_t part = count * element, own = (size_t)comm->index * part;
    TD_TRY(begin(&task, comm, operation, TD_OP_GATHER, element, count, (size_t)comm->size));
    if (comm->index != operation->call.root && !task.run.compiled->writes_data) {
        task.run.buffers[TD__DATA] = own_part(&task, operation->call.input, count);
        return execute(&task);
    }
    char *data = operation->call.output;
    if (comm->index != operation->call.root) {
        TD_TRY(take_scratch(&task, (size_t)comm->size * part));
        data = task.scratch;
    }
    copy(td__add_offset(data, own), operation->call.input, part);
    task.run.buffers[TD__DATA] = parts_of(&task, data, count, count);
    return execute(&task);
}

static td_status run_scatter(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    size_t count = operation->call.count, element = td__operation_element(operation);
    size_t part = count * element, own = (size_t)comm->index * part;
    TD_TRY(begin(&task, comm, operation, TD_OP_SCATTER, element, count, (size_t)comm->size));
    if (comm->index != operation->call.root && !task.run.compiled->sends) {
        task.run.buffers[TD__DATA] = own_part(&task, operation->call.output, count);
        return execute(&task);
    }
    const char *data = operation->call.input;
    if (comm->index != operation->call.root) {
        TD_TRY(take_scratch(&task, (size_t)comm->size * part));
        data = task.scratch;
    }
    task.run.buffers[TD__DATA] = parts_of(&task, data, count, count);
    TD_TRY(execute(&task));
    copy(operation->call.output, td__add_offset(data, own), part);
    return TD_OK;
}

/* Converts the current piece of all parts to accumulators at `to`, without gaps, and makes that INPUT. */
static void load_parts(const struct parts *parts, char *to)
{
    struct task *task = parts->task;
    const struct td__operation *operation = task->operation;
    size_t size = td__operation_element(operation), loaded = 0;
    for (int i = 0; i < task->comm->size; i++) {
        size_t count = parts->ends[i] - parts->starts[i];
        td__reduce_load(&operation->reduction, td__add_offset(to, loaded * task->element),
                        td__add_offset(operation->call.input, parts->starts[i] * size), count);
        parts->starts[i] = loaded;
        parts->ends[i] = loaded += count;
    }
    task->run.buffers[TD__INPUT] = blocks_of(parts, to);
}

static td_status run_reduce_scatter(struct td__tcp_comm *comm,
                                    const struct td__operation *operation)
{
    const struct td__reduction *reduction = &operation->reduction;
    td_dtype accumulator = td__reduction_accumulator(reduction);
    bool same = accumulator == reduction->dtype, plain = is_plain(reduction);
    size_t n = (size_t)comm->size, whole = td__operation_part_start(operation, comm->size),
           most = 0;
    struct task task;
    TD_TRY(begin_parts(&task, comm, operation, td_dtype_size(accumulator)));

    size_t bytes = n * CHUNK_LEAST_BYTES > CHUNK_BYTES ? n * CHUNK_LEAST_BYTES : CHUNK_BYTES;
    struct parts parts = cut_parts(&task, (whole * task.element + bytes - 1) / bytes);
    for (int i = 0; i < comm->size; i++)
        most += piece_most(&parts, i);
    size_t input_bytes = plain ? 0 : aligned(most * task.element);
    size_t data_bytes = same ? 0 : aligned(piece_most(&parts, comm->index) * task.element);
    TD_TRY(take_scratch(&task, input_bytes + data_bytes + scratch_most(&parts)));
    char *data_scratch = td__add_offset(task.scratch, input_bytes),
         *output = operation->call.output;
    for (size_t piece = 0; piece < parts.pieces; piece++) {
        select_piece(&parts, piece, td__add_offset(data_scratch, data_bytes));
        size_t own = parts.ends[comm->index] - parts.starts[comm->index];
        char *data = same ? output : data_scratch;
        if (plain)
            task.run.buffers[TD__INPUT] = blocks_of(&parts, operation->call.input);
        else
            load_parts(&parts, task.scratch);
        task.run.buffers[TD__DATA] = parts_of(&task, data, own, own);
        TD_TRY(execute(&task));
        td__reduce_store(reduction, output, data, own, comm->size);
        output = td__add_offset(output, own * td__operation_element(operation));
    }
    return TD_OK;
}

/* ---- All to all ------------------------------------------------------------------------------ */

/* Sets starts[0] … starts[parts]: the offset of each part, and the end of the last one. */
static void sum_counts(const size_t *counts, int parts, size_t *starts)
{
    starts[0] = 0;
    for (int i = 0; i < parts; i++)
        starts[i + 1] = starts[i] + counts[i];
}

static td_status run_all_to_all(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    struct task task;
    size_t parts = (size_t)comm->size, count = operation->call.count;
    bool uneven = operation->call.input_counts;
    TD_TRY(begin(&task, comm, operation, TD_OP_ALL_TO_ALL, td__operation_element(operation), count,
                 uneven ? 0 : parts * parts));
    struct td__blocks input = parts_of(&task, operation->call.input, count, count);
    struct td__blocks output = parts_of(&task, operation->call.output, count, count);
    if (uneven) {
        input.starts = comm->bounds;
        output.starts = comm->bounds + parts + 1;
        input.ends = input.starts + 1;
        output.ends = output.starts + 1;
        sum_counts(operation->call.input_counts, comm->size, comm->bounds);
        sum_counts(operation->call.output_counts, comm->size, comm->bounds + parts + 1);
    }
    /* In place: sends from a copy, since received blocks overwrite blocks that are not sent yet. */
    bool in_place = operation->call.input == operation->call.output && !uneven;
    size_t kept = in_place ? aligned(parts * count * task.element) : 0;
    TD_TRY(take_scratch(&task, kept + (uneven ? 0 : scratch_bytes(&task, count))));
    if (in_place) {
        copy(task.scratch, operation->call.input, parts * count * task.element);
        input.base = task.scratch;
    }
    task.run.buffers[TD__INPUT] = input;
    task.run.buffers[TD__DATA] = output;
    task.run.buffers[TD__SCRATCH] = parts_of(&task, td__add_offset(task.scratch, kept), count,
                                             count);
    return execute(&task);
}

td_status td__tcp_layout_run(struct td__tcp_comm *comm, const struct td__operation *operation)
{
    switch (operation->call.kind) {
    case TD_OP_BROADCAST:
        return run_broadcast(comm, operation);
    case TD_OP_REDUCE:
    case TD_OP_ALL_REDUCE:
        return run_reduction(comm, operation);
    case TD_OP_SCATTER:
        return run_scatter(comm, operation);
    case TD_OP_GATHER:
        return run_gather(comm, operation);
    case TD_OP_ALL_GATHER:
        return run_all_gather(comm, operation);
    case TD_OP_REDUCE_SCATTER:
        return run_reduce_scatter(comm, operation);
    case TD_OP_ALL_TO_ALL:
        return run_all_to_all(comm, operation);
    default:
        return run_barrier(comm, operation);
    }
}
