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

/* The bytes that a rank writes to its slot in a small call; the largest of all ranks. No rank knows them if counts
 * are exchanged: SIZE_MAX. */
static size_t bytes_in_slot(const struct td__shm_comm *comm, const struct td__operation *operation)
{
    size_t element = td__operation_element(operation), one = operation->call.count * element, all;
    if (td__shm_exchanges_counts(operation))
        return SIZE_MAX;
    switch (operation->call.kind) {
    case TD_OP_ALL_GATHER:
        return td__shm_largest_part(comm, operation) * element;
    case TD_OP_REDUCE_SCATTER:
        if (operation->call.input_counts)
            return one;
        __attribute__((fallthrough));
    case TD_OP_SCATTER:
    case TD_OP_ALL_TO_ALL:
        return __builtin_mul_overflow(one, (size_t)comm->size, &all) ? SIZE_MAX : all;
    default:
        return one;
    }
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
static void reduce_slots(struct td__shm_comm *comm, const struct td__operation *operation,
                         size_t slot_bytes, size_t offset, size_t count)
{
    void *output = operation->call.output;
    for (int i = 0; i < comm->size; i++)
        comm->sources[i] = data_of(comm, i, slot_bytes) + offset;
    struct td__reduction reduction = td__shm_reduction(comm, operation);
    if (count)
        td__reduce_many(&reduction, &output, 1, comm->sources, comm->size, count);
}

/* Concatenates the parts of all slots, from `offset` on. */
static void gather_slots(struct td__shm_comm *comm, const struct td__operation *operation,
                         size_t slot_bytes, size_t offset)
{
    size_t element = td__operation_element(operation);
    char *output = operation->call.output;
    for (int i = 0; i < comm->size; i++) {
        size_t bytes = td__operation_part(operation, i) * element;
        copy(output, data_of(comm, i, slot_bytes) + offset, bytes);
        output += bytes;
    }
}

static td_status run_small(struct td__shm_comm *comm, const struct td__operation *operation,
                           size_t slot_bytes)
{
    td_op_kind kind = operation->call.kind;
    size_t count = operation->call.count, element = td__operation_element(operation);
    size_t own = td__operation_part(operation, comm->index);
    size_t part = td__operation_part_start(operation, comm->index) * element;
    bool from_root = kind == TD_OP_BROADCAST || kind == TD_OP_SCATTER;
    bool to_root = kind == TD_OP_REDUCE || kind == TD_OP_GATHER;
    bool is_root = operation->call.root == comm->index;

    bool tiny = slot_bytes <= TD__INLINE_BYTES && operation->reduction.op != TD_PREMUL_SUM;
    TD_TRY(td__shm_begin(comm, operation, tiny ? TD__SHM_INLINE_DEPTH : TD__SHM_DEPTH));
    if (kind != TD_OP_BARRIER && (!from_root || is_root))
        copy(data_of(comm, comm->index, slot_bytes), operation->call.input,
             kind == TD_OP_ALL_GATHER ? own * element : slot_bytes);
    td__shm_reach(comm, 1);

    if (from_root) {
        const char *data = operation->call.input;
        if (!is_root) {
            TD_TRY(td__shm_await(comm, operation, operation->call.root, 1));
            data = data_of(comm, operation->call.root, slot_bytes);
        }
        if (count)
            copy(operation->call.output, data + (kind == TD_OP_SCATTER ? part : 0),
                 count * element);
        return TD_OK;
    }
    if (to_root && !is_root)
        return TD_OK;
    if (kind == TD_OP_BARRIER && comm->oversubscribed)
        return td__shm_await_release(comm, operation);
    TD_TRY(td__shm_await_all(comm, operation, 1));
    switch (kind) {
    case TD_OP_ALL_REDUCE:
    case TD_OP_REDUCE:
        reduce_slots(comm, operation, slot_bytes, 0, count);
        break;
    case TD_OP_REDUCE_SCATTER:
        reduce_slots(comm, operation, slot_bytes, part, own);
        break;
    case TD_OP_GATHER:
    case TD_OP_ALL_GATHER:
        gather_slots(comm, operation, slot_bytes, 0);
        break;
    case TD_OP_ALL_TO_ALL:
        gather_slots(comm, operation, slot_bytes, part);
        break;
    default: /* a barrier */
        break;
    }
    return TD_OK;
}

td_status td__shm_run(struct td__shm_comm *comm, const struct td__operation *operation)
{
    if (td__shm_is_broken(comm))
        return td__shm_state(comm);
    size_t bytes = bytes_in_slot(comm, operation);
    return bytes <= (comm->oversubscribed ? OVERSUBSCRIBED_LIMIT : DEDICATED_LIMIT)
               ? run_small(comm, operation, bytes)
               : td__shm_large(comm, operation);
}
