/* Small calls on one host: each rank writes its data to its slot and announces the call; a rank that needs data
 * waits for the announcements of the ranks that have them. That is one synchronisation, and none for a rank that
 * only sends (the root of a broadcast, the other ranks of a reduce): it may be several calls ahead.
 *
 * Each call uses the next of a rank's slots (shm_comm.h), so no slot is overwritten while a rank reads it. */
#include "shm/shm_comm.h"

#include "base/fail.h"

#include <string.h>

/* Up to this size every rank reads the data of all. Above it, dividing the work is worth a second
 * synchronisation, which costs more if ranks share a processor. */
enum { DEDICATED_LIMIT = 8 << 10, OVERSUBSCRIBED_LIMIT = 32 << 10 };

size_t td__shm_small_limit(const struct td__shm_comm *comm)
{
    return comm->oversubscribed ? OVERSUBSCRIBED_LIMIT : DEDICATED_LIMIT;
}

static void copy(void *to, const void *from, size_t size)
{
    if (size && to != from)
        memcpy(to, from, size);
}

/* The data of `index` in the current call, `bytes` of them. */
static char *data_of(struct td__shm_comm *comm, int index, size_t bytes)
{
    return bytes <= TD__INLINE_BYTES ? td__shm_announcement(comm, index)->data
                                     : td__shm_slot(comm, index)->data;
}

/* Reduces `count` elements from `offset` on of all slots. */
static td_status reduce_slots(struct td__shm_comm *comm, const struct td__operation *operation,
                              size_t slot_bytes, size_t offset, size_t count)
{
    void *output = operation->call.output;
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = data_of(comm, i, slot_bytes) + offset;
    struct td__reduction reduction = td__shm_reduction(comm, operation);
    if (count)
        td__reduce_many(&reduction, &output, 1, comm->sources, comm->size, count);
    return TD_OK;
}

/* Concatenates the `bytes` from `part` on of all slots. */
static void gather_slots(struct td__shm_comm *comm, const struct td__operation *operation,
                         size_t slot_bytes, size_t part, size_t bytes)
{
    char *output = operation->call.output;
    for (int i = 0; i < comm->size; i++)
        copy(output + (size_t)i * bytes, data_of(comm, i, slot_bytes) + part, bytes);
}

static void gather_uneven_slots(struct td__shm_comm *comm, const struct td__operation *operation,
                                size_t slot_bytes)
{
    char *output = operation->call.output;
    for (int i = 0; i < comm->size; i++) {
        size_t bytes = operation->call.input_counts[i] * td__operation_element(operation);
        if (bytes)
            copy(output, data_of(comm, i, slot_bytes), bytes);
        output += bytes;
    }
}

/* all_gather and reduce_scatter with uneven parts. */
static td_status small_uneven(struct td__shm_comm *comm, const struct td__operation *operation,
                              size_t slot_bytes)
{
    size_t element = td__operation_element(operation);
    size_t own = operation->call.input_counts[comm->index];
    bool gathers = operation->call.kind == TD_OP_ALL_GATHER;
    copy(data_of(comm, comm->index, slot_bytes), operation->call.input,
         (gathers ? own : operation->call.count) * element);
    td__shm_reach(comm, 1);
    TD_TRY(td__shm_await_all(comm, operation, 1));
    if (!gathers)
        return reduce_slots(comm, operation, slot_bytes,
                            td__operation_part_start(operation, comm->index) * element, own);
    gather_uneven_slots(comm, operation, slot_bytes);
    return TD_OK;
}

td_status td__shm_small(struct td__shm_comm *comm, const struct td__operation *operation,
                        size_t slot_bytes)
{
    size_t count = operation->call.count, bytes = count * td__operation_element(operation);
    size_t part = bytes * (size_t)comm->index;
    bool is_root = operation->call.root == comm->index;
    td_op_kind kind = operation->call.kind;

    bool has_input = kind == TD_OP_BROADCAST || kind == TD_OP_SCATTER ? is_root
                                                                      : kind != TD_OP_BARRIER;
    bool tiny = slot_bytes <= TD__INLINE_BYTES && operation->reduction.op != TD_PREMUL_SUM;
    TD_TRY(tiny ? td__shm_begin_inline(comm, operation) : td__shm_begin(comm, operation));
    if (operation->call.input_counts)
        return small_uneven(comm, operation, slot_bytes);
    if (has_input)
        copy(data_of(comm, comm->index, slot_bytes), operation->call.input, slot_bytes);
    td__shm_reach(comm, 1);

    switch (kind) {
    case TD_OP_BROADCAST:
    case TD_OP_SCATTER:
        if (!is_root) {
            TD_TRY(td__shm_await(comm, operation, operation->call.root, 1));
            copy(operation->call.output,
                 data_of(comm, operation->call.root, slot_bytes) +
                     (kind == TD_OP_SCATTER ? part : 0),
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
            return reduce_slots(comm, operation, slot_bytes, 0, count);
        gather_slots(comm, operation, slot_bytes, 0, bytes);
        return TD_OK;
    default:
        break;
    }

    if (kind == TD_OP_BARRIER && comm->oversubscribed)
        return td__shm_await_release(comm, operation);
    TD_TRY(td__shm_await_all(comm, operation, 1));
    switch (kind) {
    case TD_OP_ALL_REDUCE:
        return reduce_slots(comm, operation, slot_bytes, 0, count);
    case TD_OP_REDUCE_SCATTER:
        return reduce_slots(comm, operation, slot_bytes, part, count);
    case TD_OP_ALL_GATHER:
        gather_slots(comm, operation, slot_bytes, 0, bytes);
        return TD_OK;
    case TD_OP_ALL_TO_ALL:
        gather_slots(comm, operation, slot_bytes, part, bytes);
        return TD_OK;
    default: /* a barrier */
        return TD_OK;
    }
}
