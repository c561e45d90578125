/* Hierarchical collectives; see tcp_comm.h.
 *
 *     all_reduce   each rank of a rail reduces its slice over the inputs of its host; the rail combines the
 *                  results; each of its ranks writes the combined slice to all outputs of its host
 *     reduce       likewise, but the rails combine on the root's host, and write to the root only
 *     all_gather, reduce_scatter: hierarchy_parts.c
 *     broadcast    on the root's host each rank of a rail copies its slice from the root's buffer; the rail
 *                  broadcasts it; each of its ranks writes the slice to the other ranks of its host
 *
 * A reduction combines the ranks of a host along the tree, then the hosts along the tree. If each host has the
 * same power of two of consecutive ranks, that is the tree over all ranks.
 *
 * The ranks of a host access each other's buffers, so a buffer that cannot be shared is replaced by a copy that
 * can. */
#include "tcp/hierarchy.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

static td_status locate_members(struct td__hierarchy *hierarchy, struct td__endpoint *endpoint,
                                const int *world_ranks, int rank)
{
    int size = hierarchy->size, *numbers = malloc(sizeof *numbers * (size_t)size);
    int *members = calloc((size_t)size, sizeof *members);
    hierarchy->host_of = malloc(sizeof *numbers * (size_t)size);
    hierarchy->index_of = malloc(sizeof *numbers * (size_t)size);
    hierarchy->by_host = malloc(sizeof *numbers * (size_t)size);
    hierarchy->host_start = calloc((size_t)size + 1, sizeof *numbers);
    td_status status = TD_OK;
    if (!numbers || !members || !hierarchy->host_of || !hierarchy->index_of ||
        !hierarchy->by_host || !hierarchy->host_start) {
        status = td__fail_nomem("group");
        goto done;
    }
    for (int i = 0; i < size; i++) {
        int number = td__endpoint_host(endpoint, world_ranks[i]), h = 0;
        while (h < hierarchy->hosts && numbers[h] != number)
            h++;
        if (h == hierarchy->hosts)
            numbers[hierarchy->hosts++] = number;
        hierarchy->host_of[i] = h;
        hierarchy->index_of[i] = members[h]++;
    }
    hierarchy->rank = rank;
    hierarchy->host = hierarchy->host_of[rank];
    hierarchy->index = hierarchy->index_of[rank];
    hierarchy->rails = members[0];
    for (int h = 1; h < hierarchy->hosts; h++)
        if (members[h] < hierarchy->rails)
            hierarchy->rails = members[h];
    for (int h = 0; h < hierarchy->hosts; h++)
        hierarchy->host_start[h + 1] = hierarchy->host_start[h] + members[h];
    for (int i = 0; i < size; i++)
        hierarchy->by_host[hierarchy->host_start[hierarchy->host_of[i]] + hierarchy->index_of[i]] =
            i;
done:
    free(numbers);
    free(members);
    return status;
}

struct td__tcp_comm *td__hierarchy_rail(const struct td__hierarchy *hierarchy)
{
    return hierarchy->rail;
}

td_status td__hierarchy_create(struct td__endpoint *endpoint, uint64_t key, const int *world_ranks,
                               int size, int rank, struct td__shm_comm *comm, const char *algorithm,
                               struct td__hierarchy **hierarchy_out)
{
    struct td__hierarchy *hierarchy = calloc(1, sizeof *hierarchy);
    if (!hierarchy)
        return td__fail_nomem("group");
    hierarchy->comm = comm;
    hierarchy->size = size;
    int *members = NULL;
    td_status status = locate_members(hierarchy, endpoint, world_ranks, rank);
    if (status)
        goto destroy;
    if (hierarchy->index < hierarchy->rails) {
        members = malloc(sizeof *members * (size_t)hierarchy->hosts);
        status = members ? TD_OK : td__fail_nomem("group");
        for (int i = 0; i < size && !status; i++)
            if (hierarchy->index_of[i] == hierarchy->index)
                members[hierarchy->host_of[i]] = world_ranks[i];
        if (!status)
            status = td__tcp_comm_create(
                endpoint, key ^ ((uint64_t)hierarchy->index + 1) * 0x9e3779b97f4a7c15u, members,
                hierarchy->hosts, hierarchy->host, algorithm, &hierarchy->rail);
    }
    free(members);
    if (status)
        goto destroy;
    *hierarchy_out = hierarchy;
    return TD_OK;

destroy:
    td__hierarchy_destroy(hierarchy);
    return status;
}

void td__hierarchy_destroy(struct td__hierarchy *hierarchy)
{
    td__tcp_comm_destroy(hierarchy->rail);
    free(hierarchy->host_of);
    free(hierarchy->index_of);
    free(hierarchy->by_host);
    free(hierarchy->host_start);
    free(hierarchy);
}

static bool has_parts(td_op_kind kind)
{
    return kind == TD_OP_ALL_GATHER || kind == TD_OP_REDUCE_SCATTER;
}

bool td__hierarchy_has(td_op_kind kind)
{
    return kind == TD_OP_ALL_REDUCE || kind == TD_OP_REDUCE || kind == TD_OP_BROADCAST ||
           kind == TD_OP_BARRIER || has_parts(kind);
}

/* ---- Inside a host --------------------------------------------------------------------------- */

/* `operation` has as its root an index on this host, or -1 if the root is on another one. */
static td_status exchange_local(struct td__hierarchy *hierarchy,
                                const struct td__operation *operation,
                                struct td__host_buffers *local)
{
    struct td__shm_comm *comm = hierarchy->comm;
    bool shared, parts = has_parts(operation->call.kind);
    size_t *extents = parts ? malloc(2 * sizeof *extents * (size_t)comm->size) : NULL;
    if (parts && !extents)
        return td__fail_nomem("group");
    if (parts)
        td__hierarchy_extents(hierarchy, operation, extents);
    td_status status = td__shm_exchange_buffers(comm, operation, extents, &shared);
    free(extents);
    if (status)
        return status;
    *local = (struct td__host_buffers){comm->sources, comm->targets, comm->size};
    if (!shared) /* cannot be: td__hierarchy_run() copies */
        return td__shm_fail(comm, TD_ERR_NOMEM, "%s: no shareable memory on some rank",
                            td__operation_describe(operation));
    return TD_OK;
}

/* ---- The operations -------------------------------------------------------------------------- */

struct slice {
    size_t first, count; /* elements */
};

static struct slice own_slice(const struct td__hierarchy *hierarchy, size_t count)
{
    size_t first = td__part(count, hierarchy->rails, hierarchy->index);
    return (struct slice){first, td__part(count, hierarchy->rails, hierarchy->index + 1) - first};
}

/* Reduces the slice of this rail inside the host, combines it between hosts, and stores it. */
static td_status reduce_with(struct td__hierarchy *hierarchy, const struct td__host_buffers *local,
                             const struct td__operation *operation, struct slice slice, void *acc)
{
    size_t offset = slice.first * td__operation_element(operation);
    size_t bytes = slice.count * td__operation_element(operation);
    bool to_all = operation->call.kind == TD_OP_ALL_REDUCE;
    int root_host = to_all ? -1 : hierarchy->host_of[operation->call.root];
    struct td__operation between = td__between_hosts(operation);
    between.call.root = root_host;
    between.call.count = slice.count;
    between.call.output = acc;

    TD_TRY(td__hierarchy_access(
        hierarchy)); /* not after a failure: inputs are no longer borrowed then */
    struct td__reduction inside = hierarchy->comm ? td__shm_reduction(hierarchy->comm, operation)
                                                  : operation->reduction;
    for (int i = 0; i < local->size; i++)
        local->sources[i] = (const char *)local->sources[i] + offset;
    td__reduce_accumulate(&inside, acc, local->sources, local->size, slice.count);
    td__hierarchy_end_access(hierarchy);

    TD_TRY(td__tcp_comm_combine(hierarchy->rail, &between));
    if (!to_all && root_host != hierarchy->host)
        return TD_OK;
    TD_TRY(td__hierarchy_access(hierarchy));
    int first = to_all ? 0 : hierarchy->index_of[operation->call.root];
    char *result = (char *)local->targets[first] + offset;
    td__reduce_store(&operation->reduction, result, acc, slice.count, hierarchy->size);
    for (int i = 1; to_all && i < local->size; i++)
        memcpy((char *)local->targets[i] + offset, result, bytes);
    td__hierarchy_end_access(hierarchy);
    return TD_OK;
}

static td_status reduce_slice(struct td__hierarchy *hierarchy, const struct td__host_buffers *local,
                              const struct td__operation *operation)
{
    struct slice slice = own_slice(hierarchy, operation->call.count);
    size_t size = td_dtype_size(td__reduction_accumulator(&operation->reduction));
    if (!slice.count)
        return TD_OK;
    void *acc = malloc(slice.count * size);
    td_status status = acc ? reduce_with(hierarchy, local, operation, slice, acc)
                           : td__fail_nomem("group");
    free(acc);
    return status;
}

static td_status broadcast_slice(struct td__hierarchy *hierarchy,
                                 const struct td__host_buffers *local,
                                 const struct td__operation *operation)
{
    struct slice slice = own_slice(hierarchy, operation->call.count);
    size_t offset = slice.first * td__operation_element(operation);
    size_t bytes = slice.count * td__operation_element(operation);
    int root_host = hierarchy->host_of[operation->call.root];
    int holder = hierarchy->host == root_host ? hierarchy->index_of[operation->call.root]
                                              : hierarchy->index;
    struct td__operation between = td__between_hosts(operation);
    char *data = (char *)local->targets[hierarchy->index] + offset;
    if (!slice.count)
        return TD_OK;
    if (holder != hierarchy->index) {
        /* The rail sends a copy, not the root's buffer: once the root's call has failed, the root may change its
         * buffer, while other hosts may not have received the failure and still use the data. */
        TD_TRY(td__shm_write_begin(hierarchy->comm));
        memcpy(data, (const char *)local->sources[holder] + offset, bytes);
        td__shm_write_end(hierarchy->comm);
    }
    between.call.root = root_host;
    between.call.count = slice.count;
    between.call.input = between.call.output = data;
    TD_TRY(td__tcp_comm_run(hierarchy->rail, &between));
    if (local->size == 1)
        return TD_OK;
    TD_TRY(td__shm_write_begin(hierarchy->comm));
    for (int i = 0; i < local->size; i++)
        if (i != holder && i != hierarchy->index)
            memcpy((char *)local->targets[i] + offset, data, bytes);
    td__shm_write_end(hierarchy->comm);
    return TD_OK;
}

static td_status barrier(struct td__hierarchy *hierarchy, const struct td__operation *operation)
{
    struct td__shm_comm *comm = hierarchy->comm;
    if (comm) {
        TD_TRY(td__shm_begin(comm, operation, TD__SHM_DEPTH));
        td__shm_reach(comm, 1);
        TD_TRY(td__shm_await_all(comm, operation, 1));
    }
    struct td__operation between = td__between_hosts(operation);
    if (hierarchy->index == 0)
        TD_TRY(td__tcp_comm_run(hierarchy->rail, &between));
    if (!comm)
        return TD_OK;
    td__shm_reach(comm, 2);
    return hierarchy->index ? td__shm_await(comm, operation, 0, 2) : TD_OK;
}

static td_status run_shared(struct td__hierarchy *hierarchy, const struct td__operation *operation)
{
    const void *source = operation->call.input;
    void *target = operation->call.output;
    struct td__host_buffers local = {&source, &target, 1};
    struct td__operation inside = *operation;
    if (td__has_root(operation->call.kind))
        inside.call.root = hierarchy->host_of[operation->call.root] == hierarchy->host
                               ? hierarchy->index_of[operation->call.root]
                               : -1;
    if (hierarchy->comm)
        TD_TRY(exchange_local(hierarchy, &inside, &local));
    if (hierarchy->rail && operation->call.kind == TD_OP_BROADCAST)
        TD_TRY(broadcast_slice(hierarchy, &local, operation));
    else if (hierarchy->rail && has_parts(operation->call.kind))
        TD_TRY(td__hierarchy_run_parts(hierarchy, &local, operation));
    else if (hierarchy->rail)
        TD_TRY(reduce_slice(hierarchy, &local, operation));
    if (!hierarchy->comm)
        return TD_OK;
    td__shm_reach(hierarchy->comm, 2);
    return td__shm_await_all(hierarchy->comm, &inside, 2);
}

/* Bytes of the buffers of this rank. */
static void own_bytes(const struct td__hierarchy *hierarchy, const struct td__operation *operation,
                      size_t *input, size_t *output)
{
    size_t element = td__operation_element(operation);
    *input = *output = operation->call.count * element;
    if (!has_parts(operation->call.kind))
        return;
    bool gathers = operation->call.kind == TD_OP_ALL_GATHER;
    size_t whole = td__operation_part_start(operation, hierarchy->size) * element;
    size_t part = td__operation_part(operation, hierarchy->rank) * element;
    *input = gathers ? part : whole;
    *output = gathers ? whole : part;
}

/* Runs a call on copies of its buffers, which the ranks of this host can map. A buffer that is input and output is one
 * copy. */
static td_status run_copied(struct td__hierarchy *hierarchy, struct td__operation *operation,
                            size_t input, size_t output)
{
    bool reads = operation->call.input != NULL, writes = operation->call.output != NULL;
    bool parts = has_parts(operation->call.kind);
    size_t room = (input + 63) & ~(size_t)63;
    operation->copy = td_alloc(parts ? room + output : input);
    struct td__operation copied = *operation;
    if (!operation->copy)
        return TD_ERR_NOMEM;
    if (reads && input)
        memcpy(operation->copy, operation->call.input, input);
    copied.call.input = operation->copy;
    copied.call.output = parts ? (char *)operation->copy + room : writes ? operation->copy : NULL;
    TD_TRY(run_shared(hierarchy, &copied));
    if (writes && output)
        memcpy(operation->call.output, copied.call.output, output);
    return TD_OK;
}

td_status td__hierarchy_run(struct td__hierarchy *hierarchy, struct td__operation *operation)
{
    if (operation->call.kind == TD_OP_BARRIER)
        return barrier(hierarchy, operation);
    size_t input, output;
    own_bytes(hierarchy, operation, &input, &output);
    bool reads = operation->call.input != NULL && input;
    bool writes = operation->call.output != NULL && output;
    bool shareable = td__shm_arena_offset(operation->call.input, reads) &&
                     td__shm_arena_offset(operation->call.output, writes);
    if ((!input && !output) || !hierarchy->comm || shareable)
        return run_shared(hierarchy, operation);
    return run_copied(hierarchy, operation, input, output);
}
