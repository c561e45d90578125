/* Large calls on one host: nothing is sent, since every rank can map the others' buffers.
 *
 *     phase 1   every rank tells where its buffers are; when all have, the work is done, reading from
 *               the inputs and writing to the outputs of all
 *     phase 2   when all of it is done, the buffers are their owners' again
 *
 * The work has one share for each rank, all equal, whatever the operation, so that a broadcast keeps
 * all processors busy, too:
 *
 *     all_reduce, reduce    slice r of all inputs is reduced, and written to all outputs
 *     broadcast             slice r of the root's buffer is copied to all others
 *     all_gather            input r is copied to all outputs
 *     reduce_scatter        part r of all inputs is reduced
 *                           (of uneven parts: slice r of the whole, whichever parts it belongs to)
 *     all_to_all            part r of all inputs is copied
 *     gather, scatter       part r is copied; the root's share is its own part, or where that is in
 *                           place already, the end of all others
 *
 * That is the least traffic that memory can have: every byte is read once, and written where it
 * belongs. Where each rank has a processor it does its own share, which stays in that processor's
 * cache from call to call. Where ranks have to take turns, shares are cut into pieces, and whoever runs
 * does whatever is left, its own share first: waiting for others to run costs more than the work. Where
 * a buffer is not in shareable memory the kernel copies (shm_kernel_copy.c), or the call is staged
 * (shm_staged.c). */
#include "shm/shm_comm.h"

#include "base/arena.h"
#include "base/fail.h"
#include "reduce/copy.h"
#include "reduce/reduce_method.h"

#include <string.h>

enum {
    CHUNK = 16 << 10,       /* stays in the first cache while it is written to several places */
    TURN_BYTES = 256 << 10, /* of a share that somebody else may take over */
    MOST_PIECES = 1024,
};

#define NOT_NEEDED UINT64_MAX

/* ---- Telling where buffers are --------------------------------------------------------------- */

static uint64_t place_of(const void *memory, bool needed)
{
    struct td__arena *arena;
    size_t offset;
    if (!needed)
        return NOT_NEEDED;
    if (!td__arena_resolve(memory, &arena, &offset) || arena != td__arena_default())
        return 0;
    return (uint64_t)offset + 1;
}

static bool gives(const struct td__operation *operation, bool is_root)
{
    return is_root ||
           (operation->call.kind != TD_OP_BROADCAST && operation->call.kind != TD_OP_SCATTER);
}

static bool takes(const struct td__operation *operation, bool is_root)
{
    return is_root ||
           (operation->call.kind != TD_OP_REDUCE && operation->call.kind != TD_OP_GATHER);
}

static uint64_t sum(const uint64_t *counts, int size)
{
    uint64_t total = 0;
    for (int i = 0; i < size; i++)
        total += counts[i];
    return total;
}

/* How many elements the input and the output of `index` have. */
static void extents(struct td__shm_comm *comm, const struct td__operation *operation, int index,
                    size_t *input, size_t *output)
{
    size_t one = operation->call.count, all = one * (size_t)comm->size;
    td_op_kind kind = operation->call.kind;
    bool whole_in = kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER ||
                    kind == TD_OP_ALL_TO_ALL;
    bool whole_out = kind == TD_OP_GATHER || kind == TD_OP_ALL_GATHER || kind == TD_OP_ALL_TO_ALL;
    if (td__operation_uneven(operation)) {
        all = one;
        one = operation->call.input_counts[index];
    }
    *input = whole_in ? all : one;
    *output = whole_out ? all : one;
    if (operation->call.input_counts && kind == TD_OP_ALL_TO_ALL) {
        const uint64_t *counts = td__shm_counts(comm, index);
        *input = sum(counts, comm->size);
        *output = sum(counts + comm->size, comm->size);
    }
}

/* The buffers of another rank. Programs use the same ones again and again: those of the last call are kept, and
 * asking the endpoint, under its lock, is left to calls with other ones. Always both together: after its view
 * has grown an old address and a new one of the same memory differ, and what is in place would not be seen. */
static td_status find_views(struct td__shm_comm *comm, const struct td__operation *operation,
                            int index, size_t input_bytes, size_t output_bytes)
{
    const struct td__shm_notice *notice = &td__shm_slot(comm, index)->notice;
    struct td__shm_views *views = &comm->views[index];
    int rank = comm->world_ranks[index];
    if (views->input == notice->input && views->output == notice->output &&
        views->input_bytes >= input_bytes && views->output_bytes >= output_bytes)
        return TD_OK;
    *views = (struct td__shm_views){0};
    td_status status = TD_OK;
    if (notice->input != NOT_NEEDED)
        status = td__endpoint_map(comm->endpoint, rank, notice->input - 1, input_bytes,
                                  td__operation_deadline(operation), &views->source);
    if (!status && notice->output != NOT_NEEDED)
        status = td__endpoint_map(comm->endpoint, rank, notice->output - 1, output_bytes,
                                  td__operation_deadline(operation), &views->target);
    if (status)
        return td_fail(status, "%s: %s", td__operation_describe(operation), td_last_error());
    views->input = notice->input;
    views->output = notice->output;
    views->input_bytes = input_bytes;
    views->output_bytes = output_bytes;
    return TD_OK;
}

/* Finds the addresses of all buffers. False, without a failure, where one cannot be shared. */
static td_status find_buffers(struct td__shm_comm *comm, const struct td__operation *operation,
                              bool *shared, size_t *largest)
{
    size_t element = td__operation_element(operation);
    *shared = true;
    *largest = 0;
    for (int i = 0; i < comm->size; i++) {
        const struct td__shm_notice *notice = &td__shm_slot(comm, i)->notice;
        *shared = *shared && notice->input && notice->output;
        if (notice->largest > *largest)
            *largest = notice->largest;
    }
    for (int i = 0; i < comm->size && *shared; i++) {
        size_t input, output;
        if (i != comm->index) {
            extents(comm, operation, i, &input, &output);
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

/* The part of `count` elements that belongs to a task that has all of them. */
static size_t cut(struct task task, size_t count, size_t *first)
{
    *first = td__part(count, task.pieces, task.piece);
    return td__part(count, task.pieces, task.piece + 1) - *first;
}

/* The same of the slice that belongs to its owner. */
static size_t cut_slice(struct task task, const struct td__shm_comm *comm, size_t count,
                        size_t *first)
{
    size_t start = td__part(count, comm->size, task.owner);
    size_t size = cut(task, td__part(count, comm->size, task.owner + 1) - start, first);
    *first += start;
    return size;
}

/* The same of the slice of the whole that belongs to its owner: its part, or where parts are uneven, as much of
 * the whole as the others have, which may be ends of several parts. */
static size_t cut_whole(struct task task, const struct td__shm_comm *comm,
                        const struct td__operation *operation, size_t *first)
{
    if (operation->call.input_counts)
        return cut_slice(task, comm, operation->call.count, first);
    size_t size = cut(task, operation->call.count, first);
    *first += operation->call.count * (size_t)task.owner;
    return size;
}

/* Elements of one part, from `first` on in the part and from `whole` on in the whole. */
struct run {
    int part;
    size_t first, whole, count;
};

/* The run at the beginning of the `count` elements from `first` on in the whole. `start` is where part
 * run->part begins, and goes on to the part that is found. */
static void find_run(const struct td__operation *operation, size_t first, size_t count,
                     size_t *start, struct run *run)
{
    size_t size = td__operation_part(operation, run->part);
    while (first >= *start + size) {
        *start += size;
        size = td__operation_part(operation, ++run->part);
    }
    run->first = first - *start;
    run->whole = first;
    run->count = size - run->first < count ? size - run->first : count;
}

/* `size` bytes from one place to several, a chunk at a time. */
static void spread(struct td__shm_comm *comm, size_t offset, int first_target, const char *source,
                   size_t size)
{
    for (size_t at = 0; at < size; at += CHUNK)
        for (int i = 0; i < comm->size; i++) {
            char *target = comm->targets[(first_target + i) % comm->size];
            if (target)
                td__copy_bytes(target + offset + at, source + at,
                               size - at < CHUNK ? size - at : CHUNK, comm->past_caches);
        }
}

static void reduce_task(struct td__shm_comm *comm, const struct td__operation *operation,
                        struct task task)
{
    size_t element = td__operation_element(operation), first;
    size_t count = cut_slice(task, comm, operation->call.count, &first);
    int targets = 0;
    if (!count)
        return;
    for (int i = 0; i < comm->size; i++) {
        comm->inputs[i] = (const char *)comm->sources[i] + first * element;
        if (operation->call.kind == TD_OP_ALL_REDUCE || i == operation->call.root)
            comm->outputs[targets++] = (char *)comm->targets[i] + first * element;
    }
    struct td__reduction reduction = td__shm_reduction(comm, operation);
    reduction.methods = comm->ways;
    td__reduce_many(&reduction, comm->outputs, targets, comm->inputs, comm->size, count);
}

static void reduce_scatter_task(struct td__shm_comm *comm, const struct td__operation *operation,
                                struct task task)
{
    size_t element = td__operation_element(operation), first, start = 0;
    size_t count = cut_whole(task, comm, operation, &first);
    struct td__reduction reduction = td__shm_reduction(comm, operation);
    struct run run = {0};
    for (; count; first += run.count, count -= run.count) {
        find_run(operation, first, count, &start, &run);
        void *output = (char *)comm->targets[run.part] + run.first * element;
        for (int i = 0; i < comm->size; i++)
            comm->inputs[i] = (const char *)comm->sources[i] + run.whole * element;
        td__reduce_many(&reduction, &output, 1, comm->inputs, comm->size, run.count);
    }
}

static void broadcast_task(struct td__shm_comm *comm, const struct td__operation *operation,
                           struct task task)
{
    size_t first;
    size_t size = cut_slice(task, comm, operation->call.count * td__operation_element(operation),
                            &first);
    spread(comm, first, operation->call.root,
           (const char *)comm->sources[operation->call.root] + first, size);
}

static void all_gather_task(struct td__shm_comm *comm, const struct td__operation *operation,
                            struct task task)
{
    size_t element = td__operation_element(operation), first, start = 0;
    size_t count = cut_whole(task, comm, operation, &first);
    struct run run = {0};
    for (; count; first += run.count, count -= run.count) {
        find_run(operation, first, count, &start, &run);
        spread(comm, run.whole * element, task.owner,
               (const char *)comm->sources[run.part] + run.first * element, run.count * element);
    }
}

static void all_to_all_task(struct td__shm_comm *comm, const struct td__operation *operation,
                            struct task task)
{
    size_t element = td__operation_element(operation), bytes = operation->call.count * element;
    char *output = comm->targets[task.owner];
    for (int i = 0; i < comm->size; i++) {
        size_t from = bytes * (size_t)task.owner, size = bytes, first;
        if (operation->call.input_counts) {
            from = sum(td__shm_counts(comm, i), task.owner) * element;
            size = td__shm_counts(comm, i)[task.owner] * element;
        }
        size_t now = cut(task, size, &first);
        td__copy_bytes(output + first, (const char *)comm->sources[i] + from + first, now,
                       comm->past_caches);
        output += size;
    }
}

/* One part of gather or scatter, `size` bytes from `first` on. */
static void rooted_part(struct td__shm_comm *comm, const struct td__operation *operation, int part,
                        size_t first, size_t size)
{
    size_t bytes = operation->call.count * td__operation_element(operation);
    size_t whole = bytes * (size_t)part + first;
    if (operation->call.kind == TD_OP_GATHER)
        td__copy_bytes((char *)comm->targets[operation->call.root] + whole,
                       (const char *)comm->sources[part] + first, size, comm->past_caches);
    else
        td__copy_bytes((char *)comm->targets[part] + first,
                       (const char *)comm->sources[operation->call.root] + whole, size,
                       comm->past_caches);
}

static void rooted_task(struct td__shm_comm *comm, const struct td__operation *operation,
                        struct task task)
{
    size_t bytes = operation->call.count * td__operation_element(operation), first;
    const char *root_part = (const char *)comm->sources[operation->call.root];
    char *root_target = comm->targets[operation->call.root];
    size_t own = bytes * (size_t)operation->call.root;
    bool in_place = operation->call.kind == TD_OP_GATHER ? root_target + own == root_part
                                                         : root_part + own == root_target;
    size_t most = in_place ? td__part(bytes, comm->size, comm->size - 1) : bytes;
    if (task.owner != operation->call.root) {
        size_t size = cut(task, most, &first);
        rooted_part(comm, operation, task.owner, first, size);
        return;
    }
    for (int i = 0; i < comm->size; i++) {
        size_t start = i == operation->call.root ? 0 : most;
        size_t size = cut(task, bytes - start, &first);
        rooted_part(comm, operation, i, start + first, size);
    }
}

static void do_task(struct td__shm_comm *comm, const struct td__operation *operation,
                    struct task task)
{
    switch (operation->call.kind) {
    case TD_OP_ALL_REDUCE:
    case TD_OP_REDUCE:
        reduce_task(comm, operation, task);
        break;
    case TD_OP_REDUCE_SCATTER:
        reduce_scatter_task(comm, operation, task);
        break;
    case TD_OP_BROADCAST:
        broadcast_task(comm, operation, task);
        break;
    case TD_OP_ALL_GATHER:
        all_gather_task(comm, operation, task);
        break;
    case TD_OP_ALL_TO_ALL:
        all_to_all_task(comm, operation, task);
        break;
    default:
        rooted_task(comm, operation, task);
        break;
    }
}

/* ---- Who does which -------------------------------------------------------------------------- */

/* How many bytes a share moves, about. */
static size_t share_bytes(const struct td__shm_comm *comm, const struct td__operation *operation)
{
    size_t bytes = operation->call.count * td__operation_element(operation);
    bool slices = operation->call.kind == TD_OP_ALL_REDUCE ||
                  operation->call.kind == TD_OP_REDUCE || operation->call.kind == TD_OP_BROADCAST ||
                  td__operation_uneven(operation);
    return slices ? bytes / (size_t)comm->size : bytes;
}

static td_status take_turns(struct td__shm_comm *comm, const struct td__operation *operation,
                            size_t largest)
{
    bool exchange = operation->call.input_counts && operation->call.kind == TD_OP_ALL_TO_ALL;
    size_t bytes = exchange ? largest * td__operation_element(operation)
                            : share_bytes(comm, operation);
    size_t pieces = bytes / TURN_BYTES;
    struct task task = {.pieces = pieces < 1             ? 1
                                  : pieces > MOST_PIECES ? MOST_PIECES
                                                         : (int)pieces};
    uint32_t done = 0;
    for (int i = 0; i < comm->size; i++) {
        task.owner = (comm->index + i) % comm->size;
        while ((task.piece = td__shm_claim(comm, task.owner)) < task.pieces) {
            TD_TRY(td__shm_write_begin(comm));
            do_task(comm, operation, task);
            td__shm_write_end(comm);
            done++;
        }
    }
    return td__shm_complete(comm, operation, done, (uint32_t)(comm->size * task.pieces));
}

static td_status tell_counts(struct td__shm_comm *comm, const struct td__operation *operation,
                             struct td__shm_slot *slot)
{
    uint64_t *counts = td__shm_counts(comm, comm->index);
    if ((size_t)comm->size * 2 * sizeof *counts > TD__SLOT_BYTES)
        return td_fail(TD_ERR_UNSUPPORTED, "%s: uneven parts work for up to %zu ranks on a host",
                       td__operation_describe(operation), TD__SLOT_BYTES / 2 / sizeof *counts);
    for (int i = 0; i < comm->size; i++) {
        counts[i] = operation->call.input_counts[i];
        counts[comm->size + i] = operation->call.output_counts[i];
        if (counts[i] > slot->notice.largest)
            slot->notice.largest = counts[i];
    }
    return TD_OK;
}

/* What rank i sends to rank k must be what that expects from it. Everybody checks all of them, since
 * anybody may do the work. */
static td_status check_counts(struct td__shm_comm *comm, const struct td__operation *operation)
{
    for (int i = 0; i < comm->size; i++)
        for (int k = 0; k < comm->size; k++) {
            uint64_t sent = td__shm_counts(comm, i)[k];
            uint64_t expected = td__shm_counts(comm, k)[comm->size + i];
            if (sent != expected)
                return td__shm_fail(
                    comm, TD_ERR_MISMATCH,
                    "%s: rank %d sends %llu elements to rank %d, which expects %llu from it",
                    td__operation_describe(operation), comm->world_ranks[i],
                    (unsigned long long)sent, comm->world_ranks[k], (unsigned long long)expected);
        }
    return TD_OK;
}

td_status td__shm_exchange_buffers(struct td__shm_comm *comm, const struct td__operation *operation,
                                   bool *shared, size_t *largest)
{
    bool is_root = operation->call.root == comm->index;
    TD_TRY(td__shm_begin(comm, operation));
    struct td__shm_slot *slot = td__shm_slot(comm, comm->index);
    bool exchange = operation->call.input_counts && operation->call.kind == TD_OP_ALL_TO_ALL;
    slot->notice.largest = 0;
    slot->notice.input_address = (uintptr_t)operation->call.input;
    slot->notice.output_address = (uintptr_t)operation->call.output;
    slot->notice.copies = td__shm_can_copy(comm);
    slot->notice.ways = comm->ways;
    bool input = operation->call.count || exchange, output = input;
    if (td__operation_uneven(operation)) {
        bool own = operation->call.input_counts[comm->index];
        *(operation->call.kind == TD_OP_ALL_GATHER ? &input : &output) = own;
        slot->notice.largest = td__largest_count(operation->call.input_counts, comm->size);
    }
    slot->notice.input = place_of(operation->call.input, input && gives(operation, is_root));
    slot->notice.output = place_of(operation->call.output, output && takes(operation, is_root));
    if (exchange)
        TD_TRY(tell_counts(comm, operation, slot));
    td__shm_reach(comm, 1);
    TD_TRY(td__shm_await_all(comm, operation, 1));
    if (exchange)
        TD_TRY(check_counts(comm, operation));
    return find_buffers(comm, operation, shared, largest);
}

/* Where the kernel's copy was measured to be faster than the stages. With more ranks than processors
 * what everybody gets is better taken out of a stage, where it is in the cache. */
static bool suits_the_kernel(const struct td__shm_comm *comm, const struct td__operation *operation)
{
    switch (operation->call.kind) {
    case TD_OP_BROADCAST:
    case TD_OP_ALL_GATHER:
        return !comm->oversubscribed;
    case TD_OP_SCATTER:
    case TD_OP_GATHER:
    case TD_OP_ALL_TO_ALL:
        return true;
    default:
        return false;
    }
}

static bool all_copy(struct td__shm_comm *comm)
{
    for (int i = 0; i < comm->size; i++)
        if (!td__shm_slot(comm, i)->notice.copies)
            return false;
    return true;
}

/* Whether what the call writes would not stay in the caches anyway: the common one, which all ranks
 * share, or for an exchange, where every byte is read once and written once, each rank's own. */
static bool goes_past_caches(const struct td__shm_comm *comm, const struct td__operation *operation)
{
    size_t bytes = operation->call.count * td__operation_element(operation), n = (size_t)comm->size;
    if (operation->call.kind == TD_OP_ALL_TO_ALL)
        return 2 * n * bytes > td__cache_bytes(2) / 2 * 3;
    bool parts = operation->call.kind == TD_OP_ALL_GATHER && !operation->call.input_counts;
    size_t written = parts ? bytes * n * n : bytes * n;
    return written > td__cache_bytes(3) / 4 * 5;
}

/* The first rank says which ways are taken; what the others have said before does not count. */
static void take_methods(struct td__shm_comm *comm)
{
    comm->ways = (uint32_t)td__shm_slot(comm, 0)->notice.ways;
    td__reduce_methods_adopt(comm->ways);
}

td_status td__shm_large(struct td__shm_comm *comm, const struct td__operation *operation)
{
    bool shared;
    size_t largest;
    bool in_place = operation->call.kind == TD_OP_ALL_REDUCE &&
                    operation->call.input == operation->call.output;
    comm->ways = in_place && comm->index == 0 ? td__reduce_methods() : 0;
    TD_TRY(td__shm_exchange_buffers(comm, operation, &shared, &largest));
    take_methods(comm);
    bool copies = !shared && all_copy(comm);
    if (copies && suits_the_kernel(comm, operation))
        return td__shm_copied(comm, operation);
    if (!shared)
        return td__shm_staged(comm, operation, largest, copies);
    comm->past_caches = goes_past_caches(comm, operation);
    if (comm->oversubscribed)
        return take_turns(comm, operation, largest);
    TD_TRY(td__shm_write_begin(comm));
    do_task(comm, operation, (struct task){comm->index, 0, 1});
    td__shm_write_end(comm);
    td__shm_reach(comm, 2);
    return td__shm_await_all(comm, operation, 2);
}
