/* Large calls on one host: nothing is sent, since every rank can map the buffers of the others.
 *
 *     phase 1   a rank has published its buffers; when all have, they read the inputs of all and write to the
 *               outputs of all
 *     phase 2   a rank has done its share; when all have, the buffers belong to their owners again
 *
 * Each rank has an equal share of the work, whatever the operation, so that a broadcast keeps all processors
 * busy, too. The share of rank r:
 *
 *     all_reduce, reduce    reduces slice r of all inputs, and writes it to all outputs
 *     broadcast             copies slice r of the root's buffer to all others
 *     all_gather            copies input r to all outputs
 *     reduce_scatter        reduces part r of all inputs
 *                           (if parts are uneven: slice r of the whole, whichever parts that belongs to)
 *     all_to_all            copies part r of all inputs
 *     gather, scatter       copies part r; the root copies its own part, or if the call is in place, the end of
 *                           each other part
 *
 * That is the least memory traffic: every byte is read once and written once to each output. If every rank has a
 * processor, it does its own share, which stays in that processor's cache from call to call. If ranks share
 * processors, shares are divided into pieces, which running ranks claim, those of their own share first: waiting
 * for the other ranks to be scheduled takes longer than the work. If a buffer is not in shareable memory, the
 * kernel copies (shm_kernel_copy.c), or the call is staged (shm_staged.c). */
#include "shm/shm_comm.h"

#include "base/arena.h"
#include "base/fail.h"
#include "base/copy.h"
#include "reduce/reduce_method.h"

#include <string.h>

enum {
    CHUNK = 16 << 10,        /* stays in the L1 cache while it is written to several outputs */
    CLAIM_BYTES = 256 << 10, /* of a piece that a rank claims */
    MOST_PIECES = 1024,
};

#define NOT_NEEDED UINT64_MAX

/* ---- Publishing buffers ---------------------------------------------------------------------- */

uint64_t td__shm_arena_offset(const void *memory, bool needed)
{
    struct td__arena *arena;
    size_t offset;
    if (!needed)
        return NOT_NEEDED;
    if (!td__arena_resolve(memory, &arena, &offset) || arena != td__arena_default())
        return 0;
    return (uint64_t)offset + 1;
}

void td__shm_extents(const struct td__shm_comm *comm, const struct td__operation *operation,
                     int index, size_t *input, size_t *output)
{
    td_op_kind kind = operation->call.kind;
    bool whole_in = kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER ||
                    kind == TD_OP_ALL_TO_ALL;
    bool whole_out = kind == TD_OP_GATHER || kind == TD_OP_ALL_GATHER || kind == TD_OP_ALL_TO_ALL;
    size_t one = td__operation_part(operation, index);
    size_t all = td__operation_part_start(operation, comm->size);
    *input = whole_in ? all : one;
    *output = whole_out ? all : one;
    if (td__shm_exchanges_counts(operation)) {
        *input = td__sum_counts(td__shm_counts(comm, index), comm->size);
        *output = td__sum_counts(td__shm_counts(comm, index) + comm->size, comm->size);
    }
}

/* The same from a list of the caller's, if there is one. */
static void find_extents(const struct td__shm_comm *comm, const struct td__operation *operation,
                         const size_t *extents, int index, size_t *input, size_t *output)
{
    if (!extents) {
        td__shm_extents(comm, operation, index, input, output);
        return;
    }
    *input = extents[2 * index];
    *output = extents[2 * index + 1];
}

/* Maps the buffers of another rank. Programs use the same buffers in many calls, so those of the last call are
 * kept: the endpoint maps others under its lock. Input and output are mapped together: after the arena has grown,
 * an old and a new address of the same memory may differ, and in-place would not be detected. */
static td_status find_views(struct td__shm_comm *comm, const struct td__operation *operation,
                            int index, size_t input_bytes, size_t output_bytes)
{
    const struct td__shm_args *args = &td__shm_slot(comm, index)->args;
    struct td__shm_views *views = &comm->views[index];
    int rank = comm->world_ranks[index];
    if (views->input == args->input && views->output == args->output &&
        views->input_bytes >= input_bytes && views->output_bytes >= output_bytes)
        return TD_OK;
    *views = (struct td__shm_views){0};
    td_status status = TD_OK;
    if (args->input != NOT_NEEDED)
        status = td__endpoint_map(comm->endpoint, rank, args->input - 1, input_bytes,
                                  td__operation_deadline(operation), &views->source);
    if (!status && args->output != NOT_NEEDED)
        status = td__endpoint_map(comm->endpoint, rank, args->output - 1, output_bytes,
                                  td__operation_deadline(operation), &views->target);
    if (status)
        return td_fail(status, "%s: %s", td__operation_describe(operation), td__error_text());
    views->input = args->input;
    views->output = args->output;
    views->input_bytes = input_bytes;
    views->output_bytes = output_bytes;
    return TD_OK;
}

/* Finds the addresses of all buffers. *shared is false if one cannot be shared; that is no failure. */
static td_status find_buffers(struct td__shm_comm *comm, const struct td__operation *operation,
                              const size_t *extents, bool *shared)
{
    size_t element = td__operation_element(operation);
    *shared = true;
    for (int i = 0; i < comm->size; i++)
        *shared = *shared && td__shm_slot(comm, i)->args.input &&
                  td__shm_slot(comm, i)->args.output;
    for (int i = 0; i < comm->size && *shared; i++) {
        size_t input, output;
        if (i != comm->index) {
            find_extents(comm, operation, extents, i, &input, &output);
            TD_TRY(find_views(comm, operation, i, input * element, output * element));
        }
        comm->sources[i] = i == comm->index ? operation->call.input : comm->views[i].source;
        comm->targets[i] = i == comm->index ? operation->call.output : comm->views[i].target;
    }
    return TD_OK;
}

/* ---- The shares ------------------------------------------------------------------------------ */

/* Piece `piece` of `pieces` of the share of rank `owner`. */
struct task {
    int owner, piece, pieces;
};

/* The elements of `task` if its owner's share is `count` elements: *first, and their number. */
static size_t cut(struct task task, size_t count, size_t *first)
{
    *first = td__part(count, task.pieces, task.piece);
    return td__part(count, task.pieces, task.piece + 1) - *first;
}

/* Whether shares are equal slices of the whole, and not parts of it. */
static bool has_slices(const struct td__operation *operation)
{
    td_op_kind kind = operation->call.kind;
    return kind == TD_OP_ALL_REDUCE || kind == TD_OP_REDUCE || kind == TD_OP_BROADCAST ||
           td__operation_uneven(operation);
}

/* The elements of `task` in the whole of all ranks' data. */
static size_t cut_whole(struct task task, const struct td__shm_comm *comm,
                        const struct td__operation *operation, size_t *first)
{
    size_t share = operation->call.count, start = share * (size_t)task.owner;
    if (has_slices(operation)) {
        start = td__part(operation->call.count, comm->size, task.owner);
        share = td__part(operation->call.count, comm->size, task.owner + 1) - start;
    }
    size_t count = cut(task, share, first);
    *first += start;
    return count;
}

/* Consecutive elements of one part: they begin at `first` in the part and at `whole` in the whole. */
struct run {
    int part;
    size_t first, whole, count;
};

/* The first run of the `count` elements from `first` on in the whole. `start` is the start of part run->part;
 * both advance to the part that is found. If the call has no parts, the whole is one, and the root's. */
static void find_run(const struct td__operation *operation, size_t first, size_t count,
                     size_t *start, struct run *run)
{
    if (operation->call.kind != TD_OP_ALL_GATHER && operation->call.kind != TD_OP_REDUCE_SCATTER) {
        *run = (struct run){operation->call.root, first, first, count};
        return;
    }
    size_t size = td__operation_part(operation, run->part);
    while (first >= *start + size) {
        *start += size;
        size = td__operation_part(operation, ++run->part);
    }
    run->first = first - *start;
    run->whole = first;
    run->count = size - run->first < count ? size - run->first : count;
}

/* all_reduce, reduce and reduce_scatter. */
static void reduce_task(struct td__shm_comm *comm, const struct td__operation *operation,
                        struct task task)
{
    size_t element = td__operation_element(operation), first, start = 0;
    size_t count = cut_whole(task, comm, operation, &first);
    struct td__reduction reduction = td__shm_reduction(comm, operation);
    struct run run = {0};
    reduction.methods = comm->methods;
    for (; count; first += run.count, count -= run.count) {
        int targets = 0;
        find_run(operation, first, count, &start, &run);
        for (int i = 0; i < comm->size; i++) {
            comm->inputs[i] = (const char *)comm->sources[i] + run.whole * element;
            if (operation->call.kind == TD_OP_ALL_REDUCE || i == run.part)
                comm->outputs[targets++] = (char *)comm->targets[i] + run.first * element;
        }
        td__reduce_many(&reduction, comm->outputs, targets, comm->inputs, comm->size, run.count);
    }
}

/* Copies `size` bytes to all targets, a chunk at a time. */
static void copy_to_all(struct td__shm_comm *comm, size_t offset, int first_target,
                        const char *source, size_t size)
{
    for (size_t at = 0; at < size; at += CHUNK)
        for (int i = 0; i < comm->size; i++) {
            char *target = comm->targets[(first_target + i) % comm->size];
            if (target)
                td__copy_bytes(target + offset + at, source + at,
                               size - at < CHUNK ? size - at : CHUNK, comm->streaming);
        }
}

/* broadcast and all_gather. */
static void copy_task(struct td__shm_comm *comm, const struct td__operation *operation,
                      struct task task)
{
    size_t element = td__operation_element(operation), first, start = 0;
    size_t count = cut_whole(task, comm, operation, &first);
    struct run run = {0};
    for (; count; first += run.count, count -= run.count) {
        find_run(operation, first, count, &start, &run);
        copy_to_all(comm, run.whole * element, run.part,
                    (const char *)comm->sources[run.part] + run.first * element,
                    run.count * element);
    }
}

/* Copies the piece of `task` of the bytes from `start` to `end` that `from` has for `to`. */
static void move(struct td__shm_comm *comm, struct task task, struct td__shm_span span, int from,
                 int to, size_t start, size_t end)
{
    size_t first, size = cut(task, end - start, &first);
    if (size)
        td__copy_bytes((char *)comm->targets[to] + span.output + start + first,
                       (const char *)comm->sources[from] + span.input + start + first, size,
                       comm->streaming);
}

static void all_to_all_task(struct td__shm_comm *comm, const struct td__operation *operation,
                            struct task task)
{
    for (int i = 0; i < comm->size; i++) {
        struct td__shm_span span = td__shm_span(comm, operation, i, task.owner);
        move(comm, task, span, i, task.owner, 0, span.size);
    }
}

/* gather and scatter: of the part of another rank, that rank copies the first `most` bytes, and the root the rest. */
static void rooted_task(struct td__shm_comm *comm, const struct td__operation *operation,
                        struct task task)
{
    int root = operation->call.root;
    bool gathers = operation->call.kind == TD_OP_GATHER;
    struct td__shm_span own = td__shm_span(comm, operation, root, root);
    bool in_place = (const char *)comm->sources[root] + own.input ==
                    (char *)comm->targets[root] + own.output;
    size_t most = in_place ? td__part(own.size, comm->size, comm->size - 1) : own.size;
    for (int i = 0; i < comm->size; i++) {
        int from = gathers ? i : root, to = gathers ? root : i;
        struct td__shm_span span = td__shm_span(comm, operation, from, to);
        if (task.owner == root)
            move(comm, task, span, from, to, i == root ? 0 : most, span.size);
        else if (task.owner == i)
            move(comm, task, span, from, to, 0, most);
    }
}

static void run_task(struct td__shm_comm *comm, const struct td__operation *operation,
                     struct task task)
{
    switch (operation->call.kind) {
    case TD_OP_ALL_REDUCE:
    case TD_OP_REDUCE:
    case TD_OP_REDUCE_SCATTER:
        reduce_task(comm, operation, task);
        break;
    case TD_OP_BROADCAST:
    case TD_OP_ALL_GATHER:
        copy_task(comm, operation, task);
        break;
    case TD_OP_ALL_TO_ALL:
        all_to_all_task(comm, operation, task);
        break;
    default:
        rooted_task(comm, operation, task);
        break;
    }
}

/* ---- Distributing the shares ----------------------------------------------------------------- */

static td_status run_claimed(struct td__shm_comm *comm, const struct td__operation *operation)
{
    size_t share = td__shm_exchanges_counts(operation) ? td__shm_largest_part(comm, operation)
                   : has_slices(operation)             ? operation->call.count / (size_t)comm->size
                                                       : operation->call.count;
    size_t pieces = share * td__operation_element(operation) / CLAIM_BYTES;
    struct task task = {.pieces = pieces < 1             ? 1
                                  : pieces > MOST_PIECES ? MOST_PIECES
                                                         : (int)pieces};
    uint32_t done = 0;
    for (int i = 0; i < comm->size; i++) {
        task.owner = (comm->index + i) % comm->size;
        while ((task.piece = td__shm_claim(comm, task.owner)) < task.pieces) {
            TD_TRY(td__shm_write_begin(comm));
            run_task(comm, operation, task);
            td__shm_write_end(comm);
            done++;
        }
    }
    return td__shm_complete(comm, operation, done, (uint32_t)(comm->size * task.pieces));
}

static td_status publish_counts(struct td__shm_comm *comm, const struct td__operation *operation)
{
    size_t *counts = td__shm_counts(comm, comm->index), n = (size_t)comm->size;
    if (2 * n * sizeof *counts > TD__SLOT_BYTES)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s: all_to_all with uneven parts supports at most %zu ranks on a host",
                       td__operation_describe(operation), TD__SLOT_BYTES / 2 / sizeof *counts);
    memcpy(counts, operation->call.input_counts, n * sizeof *counts);
    memcpy(counts + n, operation->call.output_counts, n * sizeof *counts);
    return TD_OK;
}

/* What rank i sends to rank k must be what rank k expects from rank i. Every rank checks all counts, since it may
 * claim pieces of any share. */
static td_status check_counts(struct td__shm_comm *comm, const struct td__operation *operation)
{
    for (int i = 0; i < comm->size; i++)
        for (int k = 0; k < comm->size; k++) {
            size_t sent = td__shm_counts(comm, i)[k];
            size_t expected = td__shm_counts(comm, k)[comm->size + i];
            if (sent != expected)
                return td__shm_fail(
                    comm, TD_ERR_MISMATCH,
                    "%s: rank %d sends %zu elements to rank %d, which expects %zu from it",
                    td__operation_describe(operation), comm->world_ranks[i], sent,
                    comm->world_ranks[k], expected);
        }
    return TD_OK;
}

td_status td__shm_exchange_buffers(struct td__shm_comm *comm, const struct td__operation *operation,
                                   const size_t *extents, bool *shared)
{
    const td_call *call = &operation->call;
    bool is_root = call->root == comm->index, exchange = td__shm_exchanges_counts(operation);
    size_t input, output;
    TD_TRY(td__shm_begin(comm, operation, TD__SHM_DEPTH));
    if (exchange)
        TD_TRY(publish_counts(comm, operation));
    find_extents(comm, operation, extents, comm->index, &input, &output);
    struct td__shm_args *args = &td__shm_slot(comm, comm->index)->args;
    args->input_address = (uintptr_t)call->input;
    args->output_address = (uintptr_t)call->output;
    args->can_copy = td__shm_can_copy(comm);
    args->methods = comm->methods;
    bool reads = is_root || (call->kind != TD_OP_BROADCAST && call->kind != TD_OP_SCATTER);
    bool writes = is_root || (call->kind != TD_OP_REDUCE && call->kind != TD_OP_GATHER);
    args->input = td__shm_arena_offset(call->input, reads && (input || exchange));
    args->output = td__shm_arena_offset(call->output, writes && (output || exchange));
    td__shm_reach(comm, 1);
    TD_TRY(td__shm_await_all(comm, operation, 1));
    if (exchange)
        TD_TRY(check_counts(comm, operation));
    return find_buffers(comm, operation, extents, shared);
}

/* Where process_vm_readv() was measured to be faster than the stages. If ranks share processors, broadcast and
 * all_gather are faster through a stage, whose data all ranks read from the cache. */
static bool prefers_kernel_copy(const struct td__shm_comm *comm, td_op_kind kind)
{
    if (kind == TD_OP_BROADCAST || kind == TD_OP_ALL_GATHER)
        return !comm->oversubscribed;
    return kind == TD_OP_SCATTER || kind == TD_OP_GATHER || kind == TD_OP_ALL_TO_ALL;
}

static bool all_can_copy(struct td__shm_comm *comm)
{
    for (int i = 0; i < comm->size; i++)
        if (!td__shm_slot(comm, i)->args.can_copy)
            return false;
    return true;
}

/* Whether the call writes more than the caches hold: the L3 cache, which all ranks share; for an all_to_all, where
 * every byte is read once and written once, the rank's own L2 cache. */
static bool exceeds_caches(const struct td__shm_comm *comm, const struct td__operation *operation)
{
    size_t bytes = operation->call.count * td__operation_element(operation), n = (size_t)comm->size;
    if (operation->call.kind == TD_OP_ALL_TO_ALL)
        return 2 * n * bytes > td__cache_bytes(2) / 2 * 3;
    bool parts = operation->call.kind == TD_OP_ALL_GATHER && !operation->call.input_counts;
    size_t written = parts ? bytes * n * n : bytes * n;
    return written > td__cache_bytes(3) / 4 * 5;
}

td_status td__shm_large(struct td__shm_comm *comm, const struct td__operation *operation)
{
    bool shared;
    bool in_place = operation->call.kind == TD_OP_ALL_REDUCE &&
                    operation->call.input == operation->call.output;
    comm->methods = in_place && comm->index == 0 ? td__reduce_methods() : 0;
    TD_TRY(td__shm_exchange_buffers(comm, operation, NULL, &shared));
    /* Rank 0 of the comm chooses the methods for all. */
    comm->methods = (uint32_t)td__shm_slot(comm, 0)->args.methods;
    td__reduce_methods_adopt(comm->methods);
    bool can_copy = !shared && all_can_copy(comm);
    if (can_copy && prefers_kernel_copy(comm, operation->call.kind))
        return td__shm_kernel_copy(comm, operation);
    if (!shared)
        return td__shm_staged(comm, operation, can_copy);
    comm->streaming = exceeds_caches(comm, operation);
    if (comm->oversubscribed)
        return run_claimed(comm, operation);
    TD_TRY(td__shm_write_begin(comm));
    run_task(comm, operation, (struct task){comm->index, 0, 1});
    td__shm_write_end(comm);
    td__shm_reach(comm, 2);
    return td__shm_await_all(comm, operation, 2);
}
