/* Large calls that only move data, on memory that other ranks cannot map: process_vm_readv() and
 * process_vm_writev() copy it once, if the kernel allows them between all members.
 *
 *     broadcast, scatter    each rank reads its data from the root; the root writes the last piece of each
 *     gather                each rank writes its data to the root; the root reads the first piece of each
 *     all_gather            each rank reads the data of all
 *     all_to_all            each rank reads its part of the data of all
 *                           (if parts are uneven: except a piece of each part, which its owner writes)
 *
 * So all processors work, and nothing is copied twice. Reductions would need a second pass over the data that
 * was read: they are staged (shm_staged.c), and only the results of an all_reduce are read here. */
#include "shm/shm_comm.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/copy.h"

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
    int written; /* see choose_written() */
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

static struct td__shm_span span_of(const struct transfer *transfer, int from, int to)
{
    return td__shm_span(transfer->comm, transfer->operation, from, to);
}

/* Whether the part that `index` has for itself is where it belongs. */
static bool is_in_place(const struct transfer *transfer, int index)
{
    struct td__shm_span own = span_of(transfer, index, index);
    return args_of(transfer, index)->output_address + own.output ==
           args_of(transfer, index)->input_address + own.input;
}

/* Which fraction of each part its owner writes, in FRACTIONS. If parts are uneven, some ranks have more to read than
 * others, and those that have less write: of two ranks, one of which has everything, that one writes half of it, as
 * in a broadcast. All ranks compute the same result. */
static int choose_written(const struct transfer *transfer)
{
    int best = 0;
    size_t longest[FRACTIONS] = {0}, element = td__operation_element(transfer->operation);
    for (int k = 0; k < transfer->comm->size; k++) {
        size_t input, output, own = span_of(transfer, k, k).size;
        td__shm_extents(transfer->comm, transfer->operation, k, &input, &output);
        size_t reads = output * element - own, writes = input * element - own;
        if (transfer->operation->call.kind == TD_OP_ALL_GATHER)
            writes = own * (size_t)(transfer->comm->size - 1);
        size_t copies = is_in_place(transfer, k) ? 0 : own / OWN_COST;
        for (int c = 0; c < FRACTIONS; c++) {
            size_t load = copies + reads / FRACTIONS * (size_t)(FRACTIONS - c) +
                          writes / FRACTIONS * (size_t)c;
            longest[c] = load > longest[c] ? load : longest[c];
        }
    }
    for (int c = 1; c < FRACTIONS; c++)
        if (longest[c] < longest[best])
            best = c;
    return longest[best] < longest[0] - longest[0] / 8 ? best : 0;
}

/* The bytes at the end of a part of `size` bytes that its owner writes; the other rank reads the rest. Of a part from
 * or to the root, the rank that is not the root moves all, or an equal share if the root has no part of its own to
 * copy. */
static size_t written_bytes(const struct transfer *transfer, size_t size)
{
    const td_call *call = &transfer->operation->call;
    int n = transfer->comm->size;
    size_t written = size / FRACTIONS * (size_t)transfer->written;
    if (call->kind == TD_OP_ALL_GATHER || call->kind == TD_OP_ALL_TO_ALL)
        return written - written % LEAST_WRITTEN;
    size_t most = is_in_place(transfer, call->root) ? td__part(size, n, n - 1) : size;
    return call->kind == TD_OP_GATHER ? most : size - most;
}

static td_status exchange(const struct transfer *transfer)
{
    const td_call *call = &transfer->operation->call;
    int n = transfer->comm->size, mine = transfer->comm->index;
    for (int k = 0; k < n; k++) {
        int i = (mine + k) % n;
        struct td__shm_span in = span_of(transfer, i, mine), out = span_of(transfer, mine, i);
        size_t read = in.size - (k ? written_bytes(transfer, in.size) : 0);
        size_t written = k ? written_bytes(transfer, out.size) : 0, first = out.size - written;
        if (read)
            TD_TRY(read_from(transfer, i, (char *)call->output + in.output,
                             args_of(transfer, i)->input_address + in.input, read));
        if (written)
            TD_TRY(copy(transfer, i, (char *)call->input + out.input + first,
                        args_of(transfer, i)->output_address + out.output + first, written, false));
    }
    return TD_OK;
}

/* The end of a call: this rank has accessed the buffers of the others. */
static td_status finish(struct td__shm_comm *comm, const struct td__operation *operation,
                        unsigned phase, td_status status)
{
    td__shm_write_end(comm);
    TD_TRY(status);
    td__shm_reach(comm, phase);
    return td__shm_await_all(comm, operation, phase);
}

td_status td__shm_kernel_copy(struct td__shm_comm *comm, const struct td__operation *operation)
{
    struct transfer transfer = {.comm = comm, .operation = operation};
    transfer.written = operation->call.input_counts ? choose_written(&transfer) : 0;
    TD_TRY(td__shm_write_begin(comm));
    return finish(comm, operation, 2, exchange(&transfer));
}

td_status td__shm_fetch_slices(struct td__shm_comm *comm, const struct td__operation *operation,
                               unsigned phase)
{
    struct transfer transfer = {.comm = comm, .operation = operation};
    size_t element = td__operation_element(operation);
    td_status status = TD_OK;
    TD_TRY(td__shm_await_all(comm, operation, phase));
    TD_TRY(td__shm_write_begin(comm));
    for (int k = 1; k < comm->size && !status; k++) {
        int i = (comm->index + k) % comm->size;
        size_t first = td__part(operation->call.count, comm->size, i) * element;
        size_t end = td__part(operation->call.count, comm->size, i + 1) * element;
        status = read_from(&transfer, i, (char *)operation->call.output + first,
                           args_of(&transfer, i)->output_address + first, end - first);
    }
    return finish(comm, operation, phase + 1, status);
}
