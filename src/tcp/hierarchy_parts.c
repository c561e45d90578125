/* all_gather and reduce_scatter of a hierarchy (tcp_comm.h).
 *
 *     the parts of host A, one after the other   | part 0 | part 1 | part 2 |
 *     slices of the rails                        |   rail 0   |   rail 1    |
 *
 * The parts of the members of a host are one vector, which is cut into a slice for each rail, so that rails have equal
 * shares whatever the sizes of parts, the numbers of ranks and their order.
 *
 *     all_gather       a rail collects its slice of its host's parts; all_gather in the rail, whose parts are these
 *                      slices; each of its ranks writes all slices to all outputs of its host
 *     reduce_scatter   a rail reduces its slice of every host's parts over the inputs of its host; reduce_scatter in the
 *                      rail; each of its ranks writes the result, a slice of its host's parts, to the outputs there
 *
 * So each byte crosses the network once for a host, not once for a rank. Slices are processed in pieces that stay in
 * the cache. A reduction combines as that of an all_reduce does: the ranks of a host along the tree, then the hosts. */
#include "base/fail.h"
#include "tcp/hierarchy.h"

#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 4 << 20 }; /* of all hosts together, in a rail */

/* Elements of the parts of a host, from its first part on. */
struct range {
    size_t first, count;
};

/* Consecutive elements of one part. */
struct run {
    int rank;     /* whose part */
    size_t first; /* in the part */
    size_t at;    /* in the range */
    size_t count;
};

struct parts_call {
    struct td__hierarchy *hierarchy;
    const struct td__host_buffers *local;
    const struct td__operation *operation;
    struct range *ranges; /* of each host: its current piece */
    size_t *counts;       /* of these ranges */
    size_t element;
    char *data; /* elements, or accumulators, of all ranges */
    size_t data_element;
};

static size_t host_count(const struct parts_call *call, int host)
{
    const struct td__hierarchy *hierarchy = call->hierarchy;
    size_t sum = 0;
    for (int i = hierarchy->host_start[host]; i < hierarchy->host_start[host + 1]; i++)
        sum += td__operation_part(call->operation, hierarchy->by_host[i]);
    return sum;
}

/* A place among the parts of a host, between two runs. */
struct cursor {
    int index;    /* in by_host */
    size_t start; /* of that part, in the parts of the host */
};

static struct cursor begin_runs(const struct parts_call *call, int host)
{
    return (struct cursor){.index = call->hierarchy->host_start[host]};
}

static bool next_run(const struct parts_call *call, int host, struct cursor *cursor,
                     struct run *run)
{
    const struct td__hierarchy *hierarchy = call->hierarchy;
    const struct range *range = &call->ranges[host];
    while (cursor->index < hierarchy->host_start[host + 1]) {
        int rank = hierarchy->by_host[cursor->index++];
        size_t start = cursor->start, end = start + td__operation_part(call->operation, rank);
        size_t first = start > range->first ? start : range->first;
        size_t last = range->first + range->count < end ? range->first + range->count : end;
        cursor->start = end;
        if (first >= last)
            continue;
        *run = (struct run){.rank = rank,
                            .first = first - start,
                            .at = first - range->first,
                            .count = last - first};
        return true;
    }
    return false;
}

/* Where the range of a host begins in `data`. */
static char *data_of(const struct parts_call *call, int host)
{
    return call->data + td__sum_counts(call->counts, host) * call->data_element;
}

/* The offset of a run in a buffer with the parts of all ranks, in bytes. */
static size_t offset_in_all(const struct parts_call *call, const struct run *run)
{
    return (td__operation_part_start(call->operation, run->rank) + run->first) * call->element;
}

/* The call of the rail on the current piece. */
static struct td__operation between_of(const struct parts_call *call)
{
    const struct td__hierarchy *hierarchy = call->hierarchy;
    struct td__operation between = td__between_hosts(call->operation);
    between.parts = hierarchy->hosts;
    between.call.input_counts = between.call.output_counts = call->counts;
    between.call.count = td__sum_counts(call->counts, hierarchy->hosts);
    return between;
}

static td_status gather_piece(const struct parts_call *call)
{
    struct td__hierarchy *hierarchy = call->hierarchy;
    const struct td__host_buffers *local = call->local;
    struct run run;
    char *own = data_of(call, hierarchy->host);
    TD_TRY(td__hierarchy_access(hierarchy));
    for (struct cursor at = begin_runs(call, hierarchy->host);
         next_run(call, hierarchy->host, &at, &run);)
        memcpy(own + run.at * call->element,
               (const char *)local->sources[hierarchy->index_of[run.rank]] +
                   run.first * call->element,
               run.count * call->element);
    td__hierarchy_end_access(hierarchy);

    struct td__operation between = between_of(call);
    between.call.input = own;
    between.call.output = call->data;
    TD_TRY(td__tcp_comm_run(hierarchy->rail, &between));

    TD_TRY(td__hierarchy_access(hierarchy));
    for (int host = 0; host < hierarchy->hosts; host++)
        for (struct cursor at = begin_runs(call, host); next_run(call, host, &at, &run);)
            for (int i = 0; i < local->size; i++)
                memcpy((char *)local->targets[i] + offset_in_all(call, &run),
                       data_of(call, host) + run.at * call->element, run.count * call->element);
    td__hierarchy_end_access(hierarchy);
    return TD_OK;
}

/* Reduces the current piece over the inputs of this host. `sources` has room for them. */
static td_status accumulate_piece(const struct parts_call *call, const void **sources)
{
    struct td__hierarchy *hierarchy = call->hierarchy;
    const struct td__host_buffers *local = call->local;
    struct run run;
    TD_TRY(td__hierarchy_access(
        hierarchy)); /* not after a failure: inputs are no longer borrowed then */
    struct td__reduction inside = hierarchy->comm
                                      ? td__shm_reduction(hierarchy->comm, call->operation)
                                      : call->operation->reduction;
    for (int host = 0; host < hierarchy->hosts; host++)
        for (struct cursor at = begin_runs(call, host); next_run(call, host, &at, &run);) {
            for (int i = 0; i < local->size; i++)
                sources[i] = (const char *)local->sources[i] + offset_in_all(call, &run);
            td__reduce_accumulate(&inside, data_of(call, host) + run.at * call->data_element,
                                  sources, local->size, run.count);
        }
    td__hierarchy_end_access(hierarchy);
    return TD_OK;
}

static td_status scatter_piece(const struct parts_call *call, const void **sources, char *result)
{
    struct td__hierarchy *hierarchy = call->hierarchy;
    struct run run;
    TD_TRY(accumulate_piece(call, sources));
    struct td__operation between = between_of(call);
    between.call.input = call->data;
    between.call.output = result;
    TD_TRY(td__tcp_comm_combine(hierarchy->rail, &between));

    TD_TRY(td__hierarchy_access(hierarchy));
    for (struct cursor at = begin_runs(call, hierarchy->host);
         next_run(call, hierarchy->host, &at, &run);)
        td__reduce_store(&call->operation->reduction,
                         (char *)call->local->targets[hierarchy->index_of[run.rank]] +
                             run.first * call->element,
                         result + run.at * call->data_element, run.count, hierarchy->size);
    td__hierarchy_end_access(hierarchy);
    return TD_OK;
}

/* Piece `piece` of `pieces` of the slice of this rail, of every host. */
static void select_piece(struct parts_call *call, size_t pieces, size_t piece)
{
    const struct td__hierarchy *hierarchy = call->hierarchy;
    for (int host = 0; host < hierarchy->hosts; host++) {
        size_t whole = host_count(call, host);
        size_t first = td__part(whole, hierarchy->rails, hierarchy->index);
        size_t slice = td__part(whole, hierarchy->rails, hierarchy->index + 1) - first;
        size_t begin = td__part(slice, (int)pieces, (int)piece);
        call->ranges[host] = (struct range){
            .first = first + begin, .count = td__part(slice, (int)pieces, (int)piece + 1) - begin};
        call->counts[host] = call->ranges[host].count;
    }
}

/* Elements of all hosts. */
static size_t largest_piece(struct parts_call *call, size_t pieces)
{
    size_t most = 0;
    for (size_t piece = 0; piece < pieces; piece++) {
        select_piece(call, pieces, piece);
        size_t count = td__sum_counts(call->counts, call->hierarchy->hosts);
        most = count > most ? count : most;
    }
    return most;
}

static td_status run_pieces(struct parts_call *call, size_t pieces, size_t most,
                            const void **sources)
{
    bool gathers = call->operation->call.kind == TD_OP_ALL_GATHER;
    /* Behind the data: the result of a reduce_scatter, which is no longer than they are. */
    char *result = call->data + most * call->data_element;
    for (size_t piece = 0; piece < pieces; piece++) {
        select_piece(call, pieces, piece);
        TD_TRY(gathers ? gather_piece(call) : scatter_piece(call, sources, result));
    }
    return TD_OK;
}

void td__hierarchy_extents(const struct td__hierarchy *hierarchy,
                           const struct td__operation *operation, size_t *extents)
{
    bool gathers = operation->call.kind == TD_OP_ALL_GATHER;
    size_t all = td__operation_part_start(operation, hierarchy->size);
    for (int i = hierarchy->host_start[hierarchy->host];
         i < hierarchy->host_start[hierarchy->host + 1]; i++) {
        size_t part = td__operation_part(operation, hierarchy->by_host[i]);
        *extents++ = gathers ? part : all;
        *extents++ = gathers ? all : part;
    }
}

td_status td__hierarchy_run_parts(struct td__hierarchy *hierarchy,
                                  const struct td__host_buffers *local,
                                  const struct td__operation *operation)
{
    size_t hosts = (size_t)hierarchy->hosts, element = td__operation_element(operation);
    bool gathers = operation->call.kind == TD_OP_ALL_GATHER;
    struct parts_call call = {
        .hierarchy = hierarchy,
        .local = local,
        .operation = operation,
        .ranges = calloc(hosts, sizeof *call.ranges),
        .counts = calloc(hosts, sizeof *call.counts),
        .element = element,
        .data_element = gathers ? element
                                : td_dtype_size(td__reduction_accumulator(&operation->reduction)),
    };
    /* All ranks of a rail, and all rails, must choose the same number of pieces: it depends on the call alone. */
    size_t whole = td__operation_part_start(operation, hierarchy->size);
    size_t share = whole / (size_t)hierarchy->rails + 1;
    size_t pieces = share * call.data_element / PIECE_BYTES + 1;
    size_t most = call.ranges && call.counts ? largest_piece(&call, pieces) : 0;
    const void **sources = calloc((size_t)local->size, sizeof *sources);
    call.data = malloc((gathers ? 1 : 2) * most * call.data_element + 1);
    td_status status = call.ranges && call.counts && sources && call.data ? TD_OK
                                                                          : td__fail_nomem("group");
    if (!status)
        status = run_pieces(&call, pieces, most, sources);
    free(call.ranges);
    free(call.counts);
    free(sources);
    free(call.data);
    return status;
}
