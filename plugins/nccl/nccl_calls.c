/* A td_call as calls of NCCL.
 *
 * What only moves elements moves bytes. What reduces needs a type and an operation of NCCL:
 *
 *     f32 f64 f16 bf16         sum product min max avg premul_sum
 *     i8 u8 i32 u32 i64 u64    sum product min max
 *     bool, as u8              sum and max: or; product and min: and
 *     complex, as two floats   sum avg premul_sum
 *
 * Operations that this version of NCCL does not have, and uneven ones, are several in one group call:
 *
 *     scatter, gather, all_to_all     sends and receives
 *     all_gather, uneven              a broadcast of each part
 *     reduce_scatter, uneven          a reduce of each part */
#include "nccl_backend.h"

#include <tandem/ops.h>

#include <stdio.h>
#include <string.h>

void *nccl_stream(const struct nccl_group *group, td_stream *stream)
{
    void *self = td_stream_self(stream);
    bool is_cuda = !strcmp(td_device_kind(group->device), "cuda");
    return is_cuda ? *(void **)self : self; /* the first member of a stream of plugins/cuda */
}

/* ---- Types and operations -------------------------------------------------------------------------- */

struct reduction {
    int type, op;
    size_t scale; /* elements of NCCL in one of ours */
    bool is_premul;
    double factor;
};

static bool reduces(td_op_kind kind)
{
    return kind == TD_OP_REDUCE || kind == TD_OP_ALL_REDUCE || kind == TD_OP_REDUCE_SCATTER;
}

static int type_of(td_dtype dtype)
{
    switch (dtype) {
    case TD_F32:
    case TD_COMPLEX64:
        return NCCL_F32;
    case TD_F64:
    case TD_COMPLEX128:
        return NCCL_F64;
    case TD_F16:
        return NCCL_F16;
    case TD_BF16:
        return NCCL_BF16;
    case TD_I8:
        return NCCL_I8;
    case TD_U8:
    case TD_BOOL:
        return NCCL_U8;
    case TD_I32:
        return NCCL_I32;
    case TD_I64:
        return NCCL_I64;
    case TD_U32:
        return NCCL_U32;
    case TD_U64:
        return NCCL_U64;
    default:
        return -1;
    }
}

static int op_of(td_reduce_op op, td_dtype dtype)
{
    bool is_complex = dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
    bool is_bool = dtype == TD_BOOL;
    switch (op) {
    case TD_SUM:
        return is_bool ? NCCL_MAX : NCCL_SUM;
    case TD_PRODUCT:
        return is_bool ? NCCL_MIN : is_complex ? -1 : NCCL_PRODUCT;
    case TD_MIN:
        return NCCL_MIN;
    case TD_MAX:
        return NCCL_MAX;
    case TD_AVG:
        return NCCL_AVG;
    case TD_BAND:
        return is_bool ? NCCL_MIN : -1;
    case TD_BOR:
        return is_bool ? NCCL_MAX : -1;
    default:
        return -1;
    }
}

/* False: NCCL does not have it. */
static bool find_reduction(const td_call *call, struct reduction *out)
{
    bool is_complex = call->dtype == TD_COMPLEX64 || call->dtype == TD_COMPLEX128;
    *out = (struct reduction){.type = type_of(call->dtype), .scale = is_complex ? 2 : 1};
    out->is_premul = td_reduce_factor(call, &out->factor);
    out->op = out->is_premul ? NCCL_SUM : op_of(call->op, call->dtype);
    return out->type >= 0 && out->op >= 0;
}

/* ---- Checks ---------------------------------------------------------------------------------------- */

static td_status fail_unsupported(const struct nccl_group *group, const td_call *call,
                                  const char *what)
{
    const char *kind = td_device_kind(call->device);
    return td_fail(
        TD_ERR_UNSUPPORTED,
        "%s on group \"%s\": backend nccl has no %s; a group with \"cpu:native,%s:native\" "
        "has it",
        td_op_kind_name(call->kind), group->context->name, what, kind);
}

td_status nccl_check_call(const struct nccl_group *group, const td_call *call)
{
    struct reduction reduction;
    char what[96] = "";
    if (!call->device || call->kind == TD_OP_BARRIER)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s on group \"%s\": backend nccl has none; the backend of the host has it",
                       td_op_kind_name(call->kind), group->context->name);
    if (call->kind == TD_OP_RECV && call->peer == TD_ANY_SOURCE)
        return fail_unsupported(group, call, "TD_ANY_SOURCE");
    if (!reduces(call->kind) || find_reduction(call, &reduction))
        return TD_OK;
    const char *dtype = td_dtype_name(call->dtype);
    if (call->op >= TD_REDUCE_OP_OWN)
        strcpy(what, "operations of td_reduce_op_create()");
    else if (reduction.type < 0)
        snprintf(what, sizeof what, "%s of %s", td_reduce_op_name(call->op), dtype);
    else
        snprintf(what, sizeof what, "%s for %s", td_reduce_op_name(call->op), dtype);
    return fail_unsupported(group, call, what);
}

/* ---- Calling ---------------------------------------------------------------------------------------- */

/* A call while it is made. */
struct making {
    struct nccl_channel *channel;
    const td_call *call;
    struct nccl_comm *comm;
    void *stream;
    size_t element; /* bytes */
    struct reduction reduction;
    int result; /* the first that is an error */
};

static void note(struct making *m, int result)
{
    if (result != NCCL_OK && result != NCCL_IN_PROGRESS && m->result == NCCL_OK)
        m->result = result;
}

static const char *in_at(const struct making *m, size_t element)
{
    return (const char *)m->call->input + element * m->element;
}

static char *out_at(const struct making *m, size_t element)
{
    return (char *)m->call->output + element * m->element;
}

static void send_part(struct making *m, const void *data, size_t count, int to)
{
    if (count)
        note(m, nccl.ncclSend(data, count * m->element, NCCL_I8, to, m->comm, m->stream));
}

static void recv_part(struct making *m, void *data, size_t count, int from)
{
    if (count)
        note(m, nccl.ncclRecv(data, count * m->element, NCCL_I8, from, m->comm, m->stream));
}

static void make_scatter(struct making *m)
{
    const td_call *call = m->call;
    int rank = m->channel->rank, size = m->channel->size;
    size_t bytes = call->count * m->element;
    if (nccl.ncclScatter) {
        note(m, nccl.ncclScatter(call->input, call->output, bytes, NCCL_I8, call->root, m->comm,
                                 m->stream));
        return;
    }
    bool in_place = rank == call->root && call->output == in_at(m, call->count * (size_t)rank);
    for (int r = 0; rank == call->root && r < size; r++)
        if (r != rank || !in_place)
            send_part(m, in_at(m, call->count * (size_t)r), call->count, r);
    if (!in_place)
        recv_part(m, call->output, call->count, call->root);
}

static void make_gather(struct making *m)
{
    const td_call *call = m->call;
    int rank = m->channel->rank, size = m->channel->size;
    size_t bytes = call->count * m->element;
    if (nccl.ncclGather) {
        note(m, nccl.ncclGather(call->input, call->output, bytes, NCCL_I8, call->root, m->comm,
                                m->stream));
        return;
    }
    bool in_place = rank == call->root && call->input == out_at(m, call->count * (size_t)rank);
    if (!in_place)
        send_part(m, call->input, call->count, call->root);
    for (int r = 0; rank == call->root && r < size; r++)
        if (r != rank || !in_place)
            recv_part(m, out_at(m, call->count * (size_t)r), call->count, r);
}

static void make_all_gather(struct making *m)
{
    const td_call *call = m->call;
    size_t start = 0;
    if (!call->input_counts) {
        note(m, nccl.ncclAllGather(call->input, call->output, call->count * m->element, NCCL_I8,
                                   m->comm, m->stream));
        return;
    }
    for (int r = 0; r < m->channel->size; r++) {
        size_t count = call->input_counts[r];
        char *out = out_at(m, start);
        if (count)
            note(m, nccl.ncclBroadcast(r == m->channel->rank ? call->input : out, out,
                                       count * m->element, NCCL_I8, r, m->comm, m->stream));
        start += count;
    }
}

static void make_reduce_scatter(struct making *m)
{
    const td_call *call = m->call;
    const struct reduction *reduction = &m->reduction;
    size_t start = 0;
    if (!call->input_counts) {
        note(m, nccl.ncclReduceScatter(call->input, call->output, call->count * reduction->scale,
                                       reduction->type, reduction->op, m->comm, m->stream));
        return;
    }
    for (int r = 0; r < m->channel->size; r++) {
        size_t count = call->input_counts[r];
        void *out = r == m->channel->rank ? call->output : NULL;
        if (count)
            note(m, nccl.ncclReduce(in_at(m, start), out, count * reduction->scale, reduction->type,
                                    reduction->op, r, m->comm, m->stream));
        start += count;
    }
}

/* In place, the input is copied first, on the same stream. */
static td_tensor *copy_input(struct making *m)
{
    TD_SCOPE;
    TD_STREAM_SCOPE(m->call->stream);
    int64_t bytes = (int64_t)(m->call->count * m->element * (size_t)m->channel->size);
    td_device *device = m->call->device;
    td_tensor *copy = td_empty(&bytes, 1, TD_U8, device);
    td_tensor *input = td_from_blob((void *)m->call->input, &bytes, 1, NULL, TD_U8, device, NULL,
                                    NULL);
    if (copy && input && !td_tensor_copy(copy, input))
        return td_tensor_retain(copy);
    m->result = -1;
    return NULL;
}

static void make_all_to_all(struct making *m)
{
    const td_call *call = m->call;
    size_t from = 0, to = 0;
    td_tensor *copy = NULL;
    const char *input = call->input;
    if (call->input == call->output && !call->input_counts) {
        if (!(copy = copy_input(m)))
            return;
        input = td_tensor_data(copy);
    }
    if (nccl.ncclAlltoAll && !call->input_counts) {
        note(m, nccl.ncclAlltoAll(input, call->output, call->count * m->element, NCCL_I8, m->comm,
                                  m->stream));
    } else {
        for (int r = 0; r < m->channel->size; r++) {
            size_t sent = call->input_counts ? call->input_counts[r] : call->count;
            size_t got = call->output_counts ? call->output_counts[r] : call->count;
            send_part(m, input + from * m->element, sent, r);
            recv_part(m, out_at(m, to), got, r);
            from += sent;
            to += got;
        }
    }
    td_tensor_release(copy); /* its memory is reused behind what is on this stream */
}

/* The factor, in the type of the elements. */
static void make_factor(struct making *m, struct nccl_call *call)
{
    union {
        float f32;
        double f64;
        uint16_t half;
    } factor;
    switch (m->reduction.type) {
    case NCCL_F64:
        factor.f64 = m->reduction.factor;
        break;
    case NCCL_F16:
        factor.half = td_f32_to_f16((float)m->reduction.factor);
        break;
    case NCCL_BF16:
        factor.half = td_f32_to_bf16((float)m->reduction.factor);
        break;
    default:
        factor.f32 = (float)m->reduction.factor;
    }
    note(m, nccl.ncclRedOpCreatePreMulSum(&call->op, &factor, m->reduction.type,
                                          NCCL_SCALAR_ON_HOST, m->comm));
    call->has_op = m->result == NCCL_OK;
    m->reduction.op = call->op;
}

static void make_reduce(struct making *m)
{
    const td_call *call = m->call;
    const struct reduction *reduction = &m->reduction;
    size_t count = call->count * reduction->scale;
    if (call->kind == TD_OP_REDUCE)
        note(m, nccl.ncclReduce(call->input, call->output, count, reduction->type, reduction->op,
                                call->root, m->comm, m->stream));
    else
        note(m, nccl.ncclAllReduce(call->input, call->output, count, reduction->type, reduction->op,
                                   m->comm, m->stream));
}

static void make(struct making *m)
{
    const td_call *call = m->call;
    switch (call->kind) {
    case TD_OP_BROADCAST:
        note(m,
             nccl.ncclBroadcast(call->input, call->output ? call->output : (void *)call->input,
                                call->count * m->element, NCCL_I8, call->root, m->comm, m->stream));
        break;
    case TD_OP_REDUCE:
    case TD_OP_ALL_REDUCE:
        make_reduce(m);
        break;
    case TD_OP_SCATTER:
        make_scatter(m);
        break;
    case TD_OP_GATHER:
        make_gather(m);
        break;
    case TD_OP_ALL_GATHER:
        make_all_gather(m);
        break;
    case TD_OP_REDUCE_SCATTER:
        make_reduce_scatter(m);
        break;
    case TD_OP_ALL_TO_ALL:
        make_all_to_all(m);
        break;
    case TD_OP_SEND:
        send_part(m, call->input, call->count, 1);
        break;
    case TD_OP_RECV:
        recv_part(m, call->output, call->count, 0);
        break;
    default:
        break;
    }
}

int nccl_run_call(struct nccl_channel *channel, struct nccl_call *pending)
{
    const td_call *call = pending->call;
    struct making m = {.channel = channel,
                       .call = call,
                       .comm = channel->comm,
                       .stream = nccl_stream(channel->group, call->stream),
                       .element = td_dtype_size(call->dtype)};
    if (!call->count && !call->input_counts)
        return NCCL_OK;
    if (reduces(call->kind) && find_reduction(call, &m.reduction) && m.reduction.is_premul)
        make_factor(&m, pending);
    if (m.result == NCCL_OK)
        make(&m);
    return m.result;
}
