/* Small calls on one host: each rank puts its data into its slot and announces that; whoever needs
 * data waits for the slots of those who have them. One synchronisation, and none for a rank that only
 * gives (the root of a broadcast, the others of a reduce), which runs ahead.
 *
 * Slots are used in turn (shm_comm.h), so a slot is never written while somebody still reads it. */
#include "shm/shm_comm.h"

#include "base/fail.h"

#include <string.h>

/* Up to here every rank reads everybody's data. Beyond that sharing the work pays for the second
 * synchronisation; where ranks have to take turns on a processor, that one is dearer. */
enum { SPACIOUS_LIMIT = 8 << 10, CROWDED_LIMIT = 32 << 10 };

size_t td__shm_small_limit(const struct td__shm_comm *comm)
{
    return comm->oversubscribed ? CROWDED_LIMIT : SPACIOUS_LIMIT;
}

static void copy(void *to, const void *from, size_t size)
{
    if (size && to != from)
        memcpy(to, from, size);
}

/* Where `index` has its data of the call at hand, `bytes` in all. */
static char *data_of(struct td__shm_comm *comm, int index, size_t bytes)
{
    return bytes <= TD__TINY_BYTES ? td__shm_announcement(comm, index)->tiny
                                   : td__shm_slot(comm, index)->data;
}

/* `given` is what each has in its slot, of which the part from `offset` on is reduced. */
static td_status reduce_slots(struct td__shm_comm *comm, const struct td__operation *operation,
                              size_t given, size_t offset, size_t count)
{
    void *output = operation->call.output;
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = data_of(comm, i, given) + offset;
    struct td__reduction reduction = td__shm_reduction(comm, operation);
    if (count)
        td__reduce_many(&reduction, &output, 1, comm->sources, comm->size, count);
    return TD_OK;
}

/* The part of everybody's slot from `part` on, one after another. */
static void collect(struct td__shm_comm *comm, const struct td__operation *operation, size_t given,
                    size_t part, size_t bytes)
{
    char *output = operation->call.output;
    for (int i = 0; i < comm->size; i++)
        copy(output + (size_t)i * bytes, data_of(comm, i, given) + part, bytes);
}

static void collect_uneven(struct td__shm_comm *comm, const struct td__operation *operation,
                           size_t given)
{
    char *output = operation->call.output;
    for (int i = 0; i < comm->size; i++) {
        size_t bytes = operation->call.input_counts[i] * td__operation_element(operation);
        if (bytes)
            copy(output, data_of(comm, i, given), bytes);
        output += bytes;
    }
}

/* all_gather and reduce_scatter with uneven parts. */
static td_status small_uneven(struct td__shm_comm *comm, const struct td__operation *operation,
                              size_t given)
{
    size_t element = td__operation_element(operation);
    size_t own = operation->call.input_counts[comm->index];
    bool gathers = operation->call.kind == TD_OP_ALL_GATHER;
    copy(data_of(comm, comm->index, given), operation->call.input,
         (gathers ? own : operation->call.count) * element);
    td__shm_reach(comm, 1);
    TD_TRY(td__shm_await_all(comm, operation, 1));
    if (!gathers)
        return reduce_slots(comm, operation, given,
                            td__operation_part_start(operation, comm->index) * element, own);
    collect_uneven(comm, operation, given);
    return TD_OK;
}

td_status td__shm_small(struct td__shm_comm *comm, const struct td__operation *operation,
                        size_t given)
{
    size_t count = operation->call.count, bytes = count * td__operation_element(operation);
    size_t part = bytes * (size_t)comm->index;
    bool is_root = operation->call.root == comm->index;
    td_op_kind kind = operation->call.kind;

    bool gives = kind == TD_OP_BROADCAST || kind == TD_OP_SCATTER ? is_root : kind != TD_OP_BARRIER;
    bool tiny = given <= TD__TINY_BYTES && operation->reduction.op != TD_PREMUL_SUM;
    TD_TRY(tiny ? td__shm_begin_tiny(comm, operation) : td__shm_begin(comm, operation));
    if (operation->call.input_counts)
        return small_uneven(comm, operation, given);
    if (gives)
        copy(data_of(comm, comm->index, given), operation->call.input, given);
    td__shm_reach(comm, 1);

    switch (kind) {
    case TD_OP_BROADCAST:
    case TD_OP_SCATTER:
        if (!is_root) {
            TD_TRY(td__shm_await(comm, operation, operation->call.root, 1));
            copy(operation->call.output,
                 data_of(comm, operation->call.root, given) + (kind == TD_OP_SCATTER ? part : 0),
                 bytes);
        } else if (kind == TD_OP_SCATTER && bytes) {
            copy(operation->call.output, (const char *)operation->call.input + part, bytes);
        }
        return TD_OK;
    case TD_OP_REDUCE:
    case TD_OP_GATHER:
        if (!is_root)
            return TD_OK;
        TD_TRY(td__shm_await_all(comm, operation, 1));
        if (kind == TD_OP_REDUCE)
            return reduce_slots(comm, operation, given, 0, count);
        collect(comm, operation, given, 0, bytes);
        return TD_OK;
    default:
        break;
    }

    if (kind == TD_OP_BARRIER && comm->oversubscribed)
        return td__shm_await_release(comm, operation);
    TD_TRY(td__shm_await_all(comm, operation, 1));
    switch (kind) {
    case TD_OP_ALL_REDUCE:
        return reduce_slots(comm, operation, given, 0, count);
    case TD_OP_REDUCE_SCATTER:
        return reduce_slots(comm, operation, given, part, count);
    case TD_OP_ALL_GATHER:
        collect(comm, operation, given, 0, bytes);
        return TD_OK;
    case TD_OP_ALL_TO_ALL:
        collect(comm, operation, given, part, bytes);
        return TD_OK;
    default: /* a barrier */
        return TD_OK;
    }
}
