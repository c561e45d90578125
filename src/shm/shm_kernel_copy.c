/* Large calls that only move data, on memory that other ranks cannot map: process_vm_readv() and
 * process_vm_writev() copy it once, if the kernel allows them between all members.
 *
 *     broadcast, scatter    each rank reads its data from the root; the root writes the last piece of each
 *     gather                each rank writes its data to the root; the root reads the last piece of each
 *     all_gather            each rank reads the data of all
 *     all_to_all            each rank reads its part of the data of all
 *                           (if parts are uneven: except a piece of each part, which its owner writes)
 *
 * So all processors work, and nothing is copied twice. Reductions would need a second pass over the data that
 * was read: they are staged (shm_staged.c), and only the results of an all_reduce are read here. */
#include "shm/shm_comm.h"

#include "base/auth.h"
#include "base/fail.h"
#include "reduce/copy.h"

#include <errno.h>
#include <sys/uio.h>

enum {
    LEAST_WRITTEN = 8192, /* what a second system call is worth */
    FRACTIONS = 16,       /* choose_written() counts in sixteenths */
    OWN_COST = 3,         /* process_vm_readv() takes about three times as long as memcpy() */
};

/* ---- Whether the kernel allows it ------------------------------------------------------------ */

void td__shm_publish_nonce(struct td__shm_comm *comm)
{
    struct td__shm_cell *cell = &comm->cells[comm->index];
    if (td__random(&comm->nonce, sizeof comm->nonce))
        comm->nonce = 0;
    cell->nonce = comm->nonce;
    cell->nonce_address = (uintptr_t)&comm->nonce;
}

/* Reads the nonce of `index` from its memory. That it is the one in its cell proves that its pid is the same in
 * this pid namespace, too. */
static bool can_read(struct td__shm_comm *comm, int index)
{
    const struct td__shm_cell *cell = &comm->cells[index];
    uint64_t found = 0;
    struct iovec here = {&found, sizeof found};
    struct iovec there = {(void *)(uintptr_t)cell->nonce_address, sizeof found};
    int pid = td__endpoint_pid(comm->endpoint, comm->world_ranks[index]);
    return cell->nonce && process_vm_readv(pid, &here, 1, &there, 1, 0) == sizeof found &&
           found == cell->nonce;
}

bool td__shm_can_copy(struct td__shm_comm *comm)
{
    if (comm->can_copy)
        return comm->can_copy > 0;
    bool all = true;
    for (int i = 0; i < comm->size && all; i++) {
        if (!atomic_load(&comm->cells[i].attached))
            return false; /* not known yet */
        all = i == comm->index || can_read(comm, i);
    }
    comm->can_copy = all ? 1 : -1;
    return all;
}

/* ---- Copying --------------------------------------------------------------------------------- */

struct transfer {
    struct td__shm_comm *comm;
    const struct td__operation *operation;
    size_t bytes; /* of one part */
    int written;  /* see choose_written() */
};

static const struct td__shm_args *args_of(const struct transfer *transfer, int index)
{
    return &td__shm_slot(transfer->comm, index)->args;
}

/* Copies `size` bytes between `here` and the address `there` in the process of `index`. */
static td_status copy(const struct transfer *transfer, int index, void *here, uint64_t there,
                      size_t size, bool reads)
{
    struct td__shm_comm *comm = transfer->comm;
    int pid = td__endpoint_pid(comm->endpoint, comm->world_ranks[index]);
    for (size_t done = 0; done < size;) {
        struct iovec own = {(char *)here + done, size - done};
        struct iovec other = {(void *)(uintptr_t)(there + done), size - done};
        ssize_t moved = reads ? process_vm_readv(pid, &own, 1, &other, 1, 0)
                              : process_vm_writev(pid, &own, 1, &other, 1, 0);
        if (moved <= 0)
            return td__shm_fail(comm, TD_ERR_PEER, "%s: cannot access the memory of %s: %s",
                                td__operation_describe(transfer->operation),
                                td__endpoint_describe(comm->endpoint, comm->world_ranks[index]),
                                td__errno_text(moved ? errno : EFAULT));
        done += (size_t)moved;
    }
    return TD_OK;
}

static td_status read_from(const struct transfer *transfer, int index, void *here, uint64_t there,
                           size_t size)
{
    if (index != transfer->comm->index)
        return copy(transfer, index, here, there, size, true);
    td__copy_bytes(here, (const void *)(uintptr_t)there, size, size > td__cache_bytes(2));
    return TD_OK;
}

static td_status write_to(const struct transfer *transfer, int index, const void *here,
                          uint64_t there, size_t size)
{
    if (index != transfer->comm->index)
        return copy(transfer, index, (void *)here, there, size, false);
    return read_from(transfer, index, (void *)(uintptr_t)there, (uintptr_t)here, size);
}

/* ---- all_gather and all_to_all --------------------------------------------------------------- */

/* The bytes that rank `from` has for rank `to`. */
static size_t part_bytes(const struct transfer *transfer, int from, int to)
{
    const td_call *call = &transfer->operation->call;
    size_t element = td__operation_element(transfer->operation);
    if (!call->input_counts)
        return transfer->bytes;
    return call->kind == TD_OP_ALL_TO_ALL ? td__shm_counts(transfer->comm, from)[to] * element
                                          : call->input_counts[from] * element;
}

/* The offset of that part in the input of `from`, and in the output of `to`. */
static size_t input_offset(const struct transfer *transfer, int from, int to)
{
    size_t offset = 0;
    for (int i = 0; transfer->operation->call.kind == TD_OP_ALL_TO_ALL && i < to; i++)
        offset += part_bytes(transfer, from, i);
    return offset;
}

static size_t output_offset(const struct transfer *transfer, int from, int to)
{
    size_t offset = 0;
    for (int i = 0; i < from; i++)
        offset += part_bytes(transfer, i, to);
    return offset;
}

/* The bytes at the end of a part that its owner writes. */
static size_t written_bytes(const struct transfer *transfer, size_t bytes)
{
    size_t written = bytes / FRACTIONS * (size_t)transfer->written;
    return written - written % LEAST_WRITTEN;
}

/* Which fraction of each part its owner writes, in FRACTIONS. If parts are uneven, some ranks have more to read than
 * others, and those that have less write: of two ranks, one of which has everything, that one writes half of it, as
 * in a broadcast. All ranks compute the same result. */
static int choose_written(const struct transfer *transfer)
{
    int n = transfer->comm->size, best = 0;
    size_t longest[FRACTIONS] = {0};
    for (int k = 0; k < n; k++) {
        size_t reads = 0, writes = 0;
        for (int i = 0; i < n; i++) {
            reads += i == k ? 0 : part_bytes(transfer, i, k);
            writes += i == k ? 0 : part_bytes(transfer, k, i);
        }
        bool in_place = args_of(transfer, k)->output_address + output_offset(transfer, k, k) ==
                        args_of(transfer, k)->input_address + input_offset(transfer, k, k);
        size_t own = in_place ? 0 : part_bytes(transfer, k, k) / OWN_COST;
        for (int c = 0; c < FRACTIONS; c++) {
            size_t load = own + reads / FRACTIONS * (size_t)(FRACTIONS - c) +
                          writes / FRACTIONS * (size_t)c;
            longest[c] = load > longest[c] ? load : longest[c];
        }
    }
    for (int c = 1; c < FRACTIONS; c++)
        if (longest[c] < longest[best])
            best = c;
    return longest[best] < longest[0] - longest[0] / 8 ? best : 0;
}

static td_status exchange(struct transfer *transfer)
{
    const td_call *call = &transfer->operation->call;
    int mine = transfer->comm->index;
    transfer->written = call->input_counts ? choose_written(transfer) : 0;
    for (int k = 0; k < transfer->comm->size; k++) {
        int i = (mine + k) % transfer->comm->size;
        size_t bytes = part_bytes(transfer, i, mine);
        size_t read = k ? bytes - written_bytes(transfer, bytes) : bytes;
        TD_TRY(read_from(transfer, i, (char *)call->output + output_offset(transfer, i, mine),
                         args_of(transfer, i)->input_address + input_offset(transfer, i, mine),
                         read));
        bytes = part_bytes(transfer, mine, i);
        size_t written = k ? written_bytes(transfer, bytes) : 0, first = bytes - written;
        if (written)
            TD_TRY(write_to(
                transfer, i, (const char *)call->input + input_offset(transfer, mine, i) + first,
                args_of(transfer, i)->output_address + output_offset(transfer, mine, i) + first,
                written));
    }
    return TD_OK;
}

/* ---- broadcast, scatter and gather ----------------------------------------------------------- */

/* Of each other rank's part, the rank itself moves the first `most` bytes and the
 * root the rest. If the root also has to copy its own part, each rank moves all of its part. */
static td_status move_rooted(const struct transfer *transfer)
{
    const struct td__operation *operation = transfer->operation;
    struct td__shm_comm *comm = transfer->comm;
    const struct td__shm_args *root = args_of(transfer, operation->call.root);
    bool gather = operation->call.kind == TD_OP_GATHER,
         parts = operation->call.kind != TD_OP_BROADCAST;
    size_t bytes = transfer->bytes, own = parts ? bytes * (size_t)operation->call.root : 0;
    uint64_t whole = gather ? root->output_address : root->input_address;
    uint64_t part = gather ? root->input_address : root->output_address;
    size_t most = whole + own == part ? td__part(bytes, comm->size, comm->size - 1) : bytes;
    size_t offset = parts ? bytes * (size_t)comm->index : 0;
    if (comm->index != operation->call.root)
        return gather ? write_to(transfer, operation->call.root, operation->call.input,
                                 whole + offset, most)
                      : read_from(transfer, operation->call.root, operation->call.output,
                                  whole + offset, most);
    for (int i = 0; i < comm->size; i++) {
        size_t first = i == comm->index ? 0 : most, at = (parts ? bytes * (size_t)i : 0) + first;
        char *here = (char *)(uintptr_t)whole + at;
        uint64_t there = gather ? args_of(transfer, i)->input_address
                                : args_of(transfer, i)->output_address;
        if (gather)
            TD_TRY(read_from(transfer, i, here, there + first, bytes - first));
        else
            TD_TRY(write_to(transfer, i, here, there + first, bytes - first));
    }
    return TD_OK;
}

td_status td__shm_kernel_copy(struct td__shm_comm *comm, const struct td__operation *operation)
{
    struct transfer transfer = {
        .comm = comm,
        .operation = operation,
        .bytes = operation->call.count * td__operation_element(operation),
    };
    bool from_all = operation->call.kind == TD_OP_ALL_GATHER ||
                    operation->call.kind == TD_OP_ALL_TO_ALL;
    TD_TRY(td__shm_write_begin(comm));
    td_status status = from_all ? exchange(&transfer) : move_rooted(&transfer);
    td__shm_write_end(comm);
    TD_TRY(status);
    td__shm_reach(comm, 2);
    return td__shm_await_all(comm, operation, 2);
}

td_status td__shm_fetch_slices(struct td__shm_comm *comm, const struct td__operation *operation)
{
    struct transfer transfer = {.comm = comm, .operation = operation};
    size_t element = td__operation_element(operation);
    td_status status = td__shm_write_begin(comm);
    if (status)
        return status;
    for (int k = 1; k < comm->size && !status; k++) {
        int i = (comm->index + k) % comm->size;
        size_t first = td__part(operation->call.count, comm->size, i) * element;
        size_t end = td__part(operation->call.count, comm->size, i + 1) * element;
        status = read_from(&transfer, i, (char *)operation->call.output + first,
                           args_of(&transfer, i)->output_address + first, end - first);
    }
    td__shm_write_end(comm);
    return status;
}
