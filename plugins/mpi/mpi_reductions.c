/* Reductions: MPI's own operations where they give the same results as the library's, and else an operation of ours, which
 * calls td_reduce_combine().
 *
 *     MPI's      sums and products of f32, f64 and integers; minimum, maximum and bits of integers
 *     ours       all others: f16 and bf16, which are rounded as everywhere in the library, complex numbers, bool, operations
 *                of td_reduce_op_create(), minimum and maximum of f32 and f64, where MPI says nothing about NaN
 *
 * A function of MPI_Op_create() gets no context but the datatype of the elements. So each call that needs ours has a
 * datatype of its own, from a list of them, and the list leads from the datatype to the call. */
#include "mpi_backend.h"

#include <stdlib.h>

struct mpi_typed_call {
    struct mpi_typed_call *next;
    MPI_Datatype type;
    size_t element;
    _Atomic(const td_call *) call;
    atomic_bool taken;
};

/* Grows at its front; entries are used again. */
static _Atomic(struct mpi_typed_call *) typed_calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards adding, and the operation */
static MPI_Op own_op;
static bool has_op;

/* ---- Ours --------------------------------------------------------------------------------------------- */

static void combine(void *in, void *in_out, int *count, MPI_Datatype *type)
{
    struct mpi_typed_call *typed = atomic_load(&typed_calls);
    while (typed && typed->type != *type)
        typed = typed->next;
    if (typed)
        td_reduce_combine(atomic_load(&typed->call), in_out, in, (size_t)*count);
}

static struct mpi_typed_call *add_typed(size_t element)
{
    struct mpi_typed_call *typed = calloc(1, sizeof *typed);
    if (!typed)
        return NULL;
    typed->element = element;
    atomic_store(&typed->taken, true);
    mpi_enter();
    int result = MPI_Type_contiguous((int)element, MPI_BYTE, &typed->type);
    if (result == MPI_SUCCESS)
        result = MPI_Type_commit(&typed->type);
    if (result == MPI_SUCCESS && !has_op) {
        result = MPI_Op_create(combine, 1, &own_op);
        has_op = result == MPI_SUCCESS;
    }
    mpi_leave();
    if (result != MPI_SUCCESS) {
        free(typed);
        return NULL;
    }
    typed->next = atomic_load(&typed_calls);
    atomic_store(&typed_calls, typed);
    return typed;
}

static struct mpi_typed_call *take_typed(const td_call *call)
{
    size_t element = td_dtype_size(call->dtype);
    struct mpi_typed_call *typed = atomic_load(&typed_calls);
    for (; typed; typed = typed->next)
        if (typed->element == element && !atomic_exchange(&typed->taken, true))
            break;
    if (!typed) {
        pthread_mutex_lock(&lock);
        typed = add_typed(element);
        pthread_mutex_unlock(&lock);
    }
    if (typed)
        atomic_store(&typed->call, call);
    return typed;
}

/* ---- MPI's ---------------------------------------------------------------------------------------------- */

static MPI_Datatype type_of(td_dtype dtype)
{
    switch (dtype) {
    case TD_F32:
        return MPI_FLOAT;
    case TD_F64:
        return MPI_DOUBLE;
    case TD_I8:
        return MPI_INT8_T;
    case TD_U8:
        return MPI_UINT8_T;
    case TD_I16:
        return MPI_INT16_T;
    case TD_I32:
        return MPI_INT32_T;
    case TD_U32:
        return MPI_UINT32_T;
    case TD_I64:
        return MPI_INT64_T;
    case TD_U64:
        return MPI_UINT64_T;
    default:
        return MPI_DATATYPE_NULL;
    }
}

static MPI_Op op_of(td_reduce_op op, bool is_float)
{
    switch (op) {
    case TD_SUM:
    case TD_AVG:
    case TD_PREMUL_SUM:
        return MPI_SUM;
    case TD_PRODUCT:
        return MPI_PROD;
    case TD_MIN:
        return is_float ? MPI_OP_NULL : MPI_MIN;
    case TD_MAX:
        return is_float ? MPI_OP_NULL : MPI_MAX;
    case TD_BAND:
        return is_float ? MPI_OP_NULL : MPI_BAND;
    case TD_BOR:
        return is_float ? MPI_OP_NULL : MPI_BOR;
    case TD_BXOR:
        return is_float ? MPI_OP_NULL : MPI_BXOR;
    default:
        return MPI_OP_NULL;
    }
}

td_status mpi_reduction_open(const td_call *call, struct mpi_reduction *reduction)
{
    double factor;
    bool is_float = call->dtype == TD_F32 || call->dtype == TD_F64;
    bool premultiplies = call->op != TD_SUM && td_reduce_factor(call, &factor);
    reduction->typed = NULL;
    reduction->begins = premultiplies;
    reduction->ends = call->op == TD_AVG || premultiplies;
    reduction->type = type_of(call->dtype);
    reduction->op = premultiplies ? MPI_SUM : op_of(call->op, is_float);
    if (reduction->type != MPI_DATATYPE_NULL && reduction->op != MPI_OP_NULL)
        return TD_OK;
    reduction->typed = take_typed(call);
    if (!reduction->typed)
        return td_fail(TD_ERR_NOMEM, "backend mpi: no datatype for a reduction");
    reduction->type = reduction->typed->type;
    reduction->op = own_op;
    return TD_OK;
}

void mpi_reduction_close(struct mpi_reduction *reduction)
{
    if (reduction->typed)
        atomic_store(&reduction->typed->taken, false);
    reduction->typed = NULL;
}
