/* The collectives, each as a call of MPI.
 *
 * MPI 3 counts in int. Longer broadcasts and reductions are cut into pieces; a part of another call that is longer than
 * that is one element of a larger type. */
#include "mpi_backend.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* MPICH 4.0.2 reads at MPI_IN_PLACE in a reduce whose root is not rank 0. */
#ifdef MPICH_NUMVERSION
static const bool bad_reduce_in_place = true;
#else
static const bool bad_reduce_in_place = false;
#endif

/* A call of MPI on its way. */
struct job {
    struct mpi_group *group;
    const td_call *call;
    const void *send;
    void *receive;
    int count; /* elements of `type` */
    size_t at; /* of a call that is cut: the elements before this piece */
    MPI_Datatype type;
    struct mpi_reduction reduction;
    int *counts, *starts, *other_counts, *other_starts; /* of uneven parts */
    void *scaled, *result;                              /* temporary memory */
    bool owns_type;
    MPI_Request *request; /* NULL: MPI's call may block */
};

/* ---- MPI's calls -------------------------------------------------------------------------------------- */

static int run_reduction(const struct job *job)
{
    const td_call *call = job->call;
    MPI_Datatype type = job->reduction.type;
    MPI_Op op = job->reduction.op;
    MPI_Comm comm = job->group->comm;
    MPI_Request *request = job->request;
    size_t skip = job->at * td_dtype_size(call->dtype);
    const void *send = job->send == MPI_IN_PLACE ? MPI_IN_PLACE : (const char *)job->send + skip;
    void *receive = job->receive ? (char *)job->receive + skip : NULL;
    if (call->kind == TD_OP_ALL_REDUCE)
        return request ? MPI_Iallreduce(send, receive, job->count, type, op, comm, request)
                       : MPI_Allreduce(send, receive, job->count, type, op, comm);
    if (call->kind == TD_OP_REDUCE)
        return request ? MPI_Ireduce(send, receive, job->count, type, op, call->root, comm, request)
                       : MPI_Reduce(send, receive, job->count, type, op, call->root, comm);
    if (job->counts)
        return request ? MPI_Ireduce_scatter(send, receive, job->counts, type, op, comm, request)
                       : MPI_Reduce_scatter(send, receive, job->counts, type, op, comm);
    return request ? MPI_Ireduce_scatter_block(send, receive, job->count, type, op, comm, request)
                   : MPI_Reduce_scatter_block(send, receive, job->count, type, op, comm);
}

static int run_gather(const struct job *job)
{
    MPI_Datatype type = job->type;
    MPI_Comm comm = job->group->comm;
    MPI_Request *request = job->request;
    if (job->call->kind == TD_OP_GATHER)
        return request ? MPI_Igather(job->send, job->count, type, job->receive, job->count, type,
                                     job->call->root, comm, request)
                       : MPI_Gather(job->send, job->count, type, job->receive, job->count, type,
                                    job->call->root, comm);
    if (job->counts)
        return request ? MPI_Iallgatherv(job->send, job->count, type, job->receive, job->counts,
                                         job->starts, type, comm, request)
                       : MPI_Allgatherv(job->send, job->count, type, job->receive, job->counts,
                                        job->starts, type, comm);
    return request
               ? MPI_Iallgather(job->send, job->count, type, job->receive, job->count, type, comm,
                                request)
               : MPI_Allgather(job->send, job->count, type, job->receive, job->count, type, comm);
}

static int run_all_to_all(const struct job *job)
{
    MPI_Datatype type = job->type;
    MPI_Comm comm = job->group->comm;
    MPI_Request *request = job->request;
    if (job->counts)
        return request ? MPI_Ialltoallv(job->send, job->counts, job->starts, type, job->receive,
                                        job->other_counts, job->other_starts, type, comm, request)
                       : MPI_Alltoallv(job->send, job->counts, job->starts, type, job->receive,
                                       job->other_counts, job->other_starts, type, comm);
    return request
               ? MPI_Ialltoall(job->send, job->count, type, job->receive, job->count, type, comm,
                               request)
               : MPI_Alltoall(job->send, job->count, type, job->receive, job->count, type, comm);
}

static int run_broadcast(const struct job *job)
{
    char *data = (char *)job->receive + job->at * td_dtype_size(job->call->dtype);
    return job->request ? MPI_Ibcast(data, job->count, job->type, job->call->root, job->group->comm,
                                     job->request)
                        : MPI_Bcast(data, job->count, job->type, job->call->root, job->group->comm);
}

static int run_scatter(const struct job *job)
{
    return job->request ? MPI_Iscatter(job->send, job->count, job->type, job->receive, job->count,
                                       job->type, job->call->root, job->group->comm, job->request)
                        : MPI_Scatter(job->send, job->count, job->type, job->receive, job->count,
                                      job->type, job->call->root, job->group->comm);
}

static int run_mpi(void *arg)
{
    const struct job *job = arg;
    switch (job->call->kind) {
    case TD_OP_BROADCAST:
        return run_broadcast(job);
    case TD_OP_SCATTER:
        return run_scatter(job);
    case TD_OP_GATHER:
    case TD_OP_ALL_GATHER:
        return run_gather(job);
    case TD_OP_ALL_TO_ALL:
        return run_all_to_all(job);
    default:
        return run_reduction(job);
    }
}

/* Runs fn(arg), which starts a request where *place is not NULL. */
static td_status run_once(struct mpi_group *group, const td_call *call, int (*fn)(void *arg),
                          void *arg, MPI_Request **place)
{
    MPI_Request request;
    int result = MPI_SUCCESS;
    td_status status;
    if (!group->polls) {
        *place = NULL;
        status = mpi_run_blocking(group, fn, arg, &result);
    } else {
        *place = &request;
        mpi_enter();
        result = fn(arg);
        mpi_leave();
        status = result == MPI_SUCCESS ? mpi_await_request(group, call, &request, INT64_MAX)
                                       : TD_OK;
    }
    return status ? status : mpi_check(result, td_op_kind_name(call->kind), group->context->name);
}

/* ---- The counts of an uneven all_to_all ------------------------------------------------------------------- */

struct exchange {
    struct mpi_group *group;
    const uint64_t *send;
    uint64_t *receive;
    int root; /* -2: all to all; -1: the maximum; else a broadcast of two numbers */
    MPI_Request *request;
};

static int run_exchange(void *arg)
{
    const struct exchange *e = arg;
    MPI_Comm comm = e->group->comm;
    if (e->root == -2)
        return e->request
                   ? MPI_Ialltoall(e->send, 1, MPI_UINT64_T, e->receive, 1, MPI_UINT64_T, comm,
                                   e->request)
                   : MPI_Alltoall(e->send, 1, MPI_UINT64_T, e->receive, 1, MPI_UINT64_T, comm);
    if (e->root == -1)
        return e->request
                   ? MPI_Iallreduce(e->send, e->receive, 1, MPI_UINT64_T, MPI_MAX, comm, e->request)
                   : MPI_Allreduce(e->send, e->receive, 1, MPI_UINT64_T, MPI_MAX, comm);
    return e->request ? MPI_Ibcast(e->receive, 2, MPI_UINT64_T, e->root, comm, e->request)
                      : MPI_Bcast(e->receive, 2, MPI_UINT64_T, e->root, comm);
}

/* Only the receiver of a part knows what it expects; all ranks return the same error. */
static td_status compare_counts(struct mpi_group *group, const td_call *call, uint64_t *sent,
                                uint64_t *coming)
{
    const td_backend_context *context = group->context;
    uint64_t size = (uint64_t)context->size, mine = 0, worst = 0, pair[2] = {0, 0};
    struct exchange exchange = {.group = group, .send = sent, .receive = coming, .root = -2};
    for (uint64_t r = 0; r < size; r++)
        sent[r] = call->input_counts[r];
    td_status status = run_once(group, call, run_exchange, &exchange, &exchange.request);
    if (status)
        return status;
    for (uint64_t r = 0; r < size; r++)
        if (coming[r] != call->output_counts[r])
            mine = 1 + (uint64_t)context->rank * size + r;
    exchange = (struct exchange){.group = group, .send = &mine, .receive = &worst, .root = -1};
    status = run_once(group, call, run_exchange, &exchange, &exchange.request);
    if (status || !worst)
        return status;
    int to = (int)((worst - 1) / size), from = (int)((worst - 1) % size);
    if (to == context->rank) {
        pair[0] = coming[from];
        pair[1] = call->output_counts[from];
    }
    exchange = (struct exchange){.group = group, .receive = pair, .root = to};
    status = run_once(group, call, run_exchange, &exchange, &exchange.request);
    return status ? status
                  : td_fail(TD_ERR_MISMATCH,
                            "all_to_all #%llu on group \"%s\": rank %d sends %llu elements, but "
                            "rank %d expects %llu; each rank's output_counts must be what the "
                            "others send to it",
                            (unsigned long long)call->sequence, context->name,
                            context->global_ranks[from], (unsigned long long)pair[0],
                            context->global_ranks[to], (unsigned long long)pair[1]);
}

static td_status check_counts(struct mpi_group *group, const td_call *call)
{
    uint64_t *memory = calloc(2 * (size_t)group->context->size, sizeof *memory);
    if (!memory)
        return td_fail(TD_ERR_NOMEM, "backend mpi: out of memory");
    td_status status = compare_counts(group, call, memory, memory + group->context->size);
    free(memory);
    return status;
}

/* ---- Preparing ------------------------------------------------------------------------------------------- */

static MPI_Datatype plain_type(size_t element)
{
    return element == 1   ? MPI_UINT8_T
           : element == 2 ? MPI_UINT16_T
           : element == 4 ? MPI_UINT32_T
           : element == 8 ? MPI_UINT64_T
                          : MPI_C_DOUBLE_COMPLEX;
}

static td_status fail_memory(const td_call *call)
{
    return td_fail(TD_ERR_NOMEM, "%s: out of memory", td_op_kind_name(call->kind));
}

/* One element that is as long as `count` of them. */
static td_status set_long_type(struct job *job, size_t count)
{
    size_t element = td_dtype_size(job->call->dtype), most = job->group->most;
    MPI_Datatype base = plain_type(element), piece, pieces;
    int whole = (int)(count / most), rest = (int)(count % most), one[2] = {1, rest};
    MPI_Aint at[2] = {0, (MPI_Aint)((size_t)whole * most * element)};
    mpi_enter();
    MPI_Type_contiguous((int)most, base, &piece);
    MPI_Type_contiguous(whole, piece, &pieces);
    int result = MPI_Type_create_struct(2, one, at, (MPI_Datatype[]){pieces, base}, &job->type);
    if (result == MPI_SUCCESS)
        result = MPI_Type_commit(&job->type);
    MPI_Type_free(&piece);
    MPI_Type_free(&pieces);
    mpi_leave();
    job->owns_type = result == MPI_SUCCESS;
    job->count = 1;
    return mpi_check(result, td_op_kind_name(job->call->kind), job->group->context->name);
}

static td_status set_part(struct job *job, size_t count)
{
    job->type = plain_type(td_dtype_size(job->call->dtype));
    job->count = (int)count;
    return count > job->group->most ? set_long_type(job, count) : TD_OK;
}

/* Counts of ranks, and where their parts start, as MPI has them. */
static td_status set_lists(struct job *job, const size_t *counts, int **list, int **starts)
{
    int size = job->group->context->size;
    size_t at = 0;
    *list = malloc(2 * (size_t)size * sizeof **list);
    if (!*list)
        return fail_memory(job->call);
    *starts = *list + size;
    for (int r = 0; r < size; r++) {
        if (counts[r] > INT_MAX || at > INT_MAX)
            return td_fail(TD_ERR_UNSUPPORTED,
                           "%s: uneven parts of more than %d elements in all are not in %s; the "
                           "backend native has them",
                           td_op_kind_name(job->call->kind), INT_MAX, mpi.name);
        (*list)[r] = (int)counts[r];
        (*starts)[r] = (int)at;
        at += counts[r];
    }
    return TD_OK;
}

/* The input, multiplied by the factor of a premul_sum: in the output if it has room for it, else in memory of its own. */
static td_status scale(struct job *job, size_t count, void *room)
{
    const td_call *call = job->call;
    size_t bytes = count * td_dtype_size(call->dtype);
    if (!room && !(room = job->scaled = malloc(bytes ? bytes : 1)))
        return fail_memory(call);
    if (room != call->input)
        memcpy(room, call->input, bytes);
    td_reduce_begin(call, room, count);
    job->send = room;
    return TD_OK;
}

static size_t own_count(const struct job *job)
{
    return job->call->input_counts ? job->call->input_counts[job->group->context->rank]
                                   : job->call->count;
}

/* In place, the output is this rank's part of the input, which MPI does not take. */
static td_status prepare_reduce_scatter(struct job *job)
{
    const td_call *call = job->call;
    size_t size = (size_t)job->group->context->size, element = td_dtype_size(call->dtype);
    size_t all = call->input_counts ? call->count : call->count * size;
    uintptr_t from = (uintptr_t)call->input, to = (uintptr_t)call->output;
    td_status status = TD_OK;
    if (call->input_counts)
        status = set_lists(job, call->input_counts, &job->counts, &job->starts);
    else if (call->count > job->group->most && call->count > INT_MAX)
        status = td_fail(TD_ERR_UNSUPPORTED,
                         "reduce_scatter: parts of more than %d elements are not in %s; the "
                         "backend native has them",
                         INT_MAX, mpi.name);
    if (!status && job->reduction.begins)
        status = scale(job, all, NULL);
    bool overlaps = all && to >= from && to < from + all * element;
    if (!status && overlaps && job->send == call->input) {
        job->receive = job->result = malloc(own_count(job) * element + 1);
        status = job->result ? TD_OK : fail_memory(call);
    }
    job->count = (int)call->count;
    return status;
}

static td_status prepare_reduction(struct job *job)
{
    const td_call *call = job->call;
    bool is_root = call->kind != TD_OP_REDUCE || call->root == job->group->context->rank;
    td_status status = mpi_reduction_open(call, &job->reduction);
    if (status)
        return status;
    if (call->kind == TD_OP_REDUCE_SCATTER)
        return prepare_reduce_scatter(job);
    if (job->reduction.begins)
        status = scale(job, call->count, is_root ? call->output : NULL);
    if (status || !is_root || job->send != call->output)
        return status;
    if (!bad_reduce_in_place || call->kind == TD_OP_ALL_REDUCE || call->root == 0) {
        job->send = MPI_IN_PLACE;
        return TD_OK;
    }
    job->receive = job->result = malloc(call->count * td_dtype_size(call->dtype) + 1);
    return job->result ? TD_OK : fail_memory(call);
}

static td_status prepare_moves(struct job *job)
{
    const td_call *call = job->call;
    size_t part = own_count(job) * td_dtype_size(call->dtype);
    size_t before = call->count * (size_t)job->group->context->rank * td_dtype_size(call->dtype);
    bool is_root = call->root == job->group->context->rank;
    td_status status = TD_OK;
    if (call->kind == TD_OP_ALL_TO_ALL && call->input_counts) {
        job->type = plain_type(td_dtype_size(call->dtype));
        status = set_lists(job, call->input_counts, &job->counts, &job->starts);
        return status ? status
                      : set_lists(job, call->output_counts, &job->other_counts, &job->other_starts);
    }
    if (call->input_counts) {
        job->type = plain_type(td_dtype_size(call->dtype));
        job->count = (int)own_count(job);
        status = set_lists(job, call->input_counts, &job->counts, &job->starts);
        before = status
                     ? 0
                     : (size_t)job->starts[job->group->context->rank] * td_dtype_size(call->dtype);
    } else {
        status = set_part(job, call->count);
    }
    bool gathers = call->kind == TD_OP_ALL_GATHER || (call->kind == TD_OP_GATHER && is_root);
    if (gathers && part && call->input == (char *)call->output + before)
        job->send = MPI_IN_PLACE;
    if (call->kind == TD_OP_SCATTER && is_root && part &&
        call->output == (char *)call->input + before)
        job->receive = MPI_IN_PLACE;
    if (call->kind == TD_OP_ALL_TO_ALL && part && call->input == call->output)
        job->send = MPI_IN_PLACE;
    return status;
}

/* ---- Running ---------------------------------------------------------------------------------------------- */

/* Broadcasts and reductions, which may have more elements than a call of MPI takes. */
static td_status run_in_pieces(struct job *job)
{
    size_t most = job->group->most, count = job->call->count;
    td_status status = TD_OK;
    for (job->at = 0; !status && job->at < count; job->at += (size_t)job->count) {
        job->count = (int)(count - job->at < most ? count - job->at : most);
        status = run_once(job->group, job->call, run_mpi, job, &job->request);
    }
    return status;
}

static td_status run_reducing(struct job *job)
{
    const td_call *call = job->call;
    int rank = job->group->context->rank;
    bool scatters = call->kind == TD_OP_REDUCE_SCATTER;
    td_status status = prepare_reduction(job);
    if (!status)
        status = scatters ? run_once(job->group, call, run_mpi, job, &job->request)
                          : run_in_pieces(job);
    mpi_reduction_close(&job->reduction);
    if (status || (call->kind == TD_OP_REDUCE && call->root != rank))
        return status;
    size_t count = scatters ? own_count(job) : call->count;
    if (job->result && count)
        memcpy(call->output, job->result, count * td_dtype_size(call->dtype));
    if (job->reduction.ends && count)
        td_reduce_end(call, call->output, count, job->group->context->size);
    return TD_OK;
}

static td_status run_moving(struct job *job)
{
    td_status status = TD_OK;
    if (job->call->kind == TD_OP_BROADCAST) {
        job->type = plain_type(td_dtype_size(job->call->dtype));
        return run_in_pieces(job);
    }
    if (job->call->kind == TD_OP_ALL_TO_ALL && job->call->input_counts)
        status = check_counts(job->group, job->call);
    if (!status)
        status = prepare_moves(job);
    return status ? status : run_once(job->group, job->call, run_mpi, job, &job->request);
}

/* After a failure the memory that MPI has stays: a rank that is late may still send to it. */
static void free_job(struct job *job, td_status status)
{
    if (job->owns_type) {
        mpi_enter();
        MPI_Type_free(&job->type);
        mpi_leave();
    }
    if (status)
        return;
    free(job->scaled);
    free(job->result);
    free(job->counts);
    free(job->other_counts);
}

static bool has_nothing(const td_call *call)
{
    return call->kind == TD_OP_BARRIER ||
           (!call->count && !(call->kind == TD_OP_ALL_TO_ALL && call->input_counts));
}

td_status mpi_collective(void *self, const td_call *call)
{
    struct mpi_group *group = self;
    struct job job = {.group = group, .call = call, .send = call->input, .receive = call->output};
    td_status status = mpi_failure(group);
    if (!status && atomic_load(&mpi.lost))
        status = td_fail(TD_ERR_STATE,
                         "%s on group \"%s\": %s cannot be used any more in this process, since a "
                         "call of it was abandoned when a rank was lost",
                         td_op_kind_name(call->kind), group->context->name, mpi.name);
    if (!status)
        status = mpi_meet(group, call);
    if (status || has_nothing(call))
        return status;
    bool reduces = call->kind == TD_OP_REDUCE || call->kind == TD_OP_ALL_REDUCE ||
                   call->kind == TD_OP_REDUCE_SCATTER;
    status = reduces ? run_reducing(&job) : run_moving(&job);
    free_job(&job, status);
    return status;
}
