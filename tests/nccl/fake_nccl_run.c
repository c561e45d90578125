/* What the fake NCCL does on a stream: collectives in order, and all messages of a group call at once. */
#include "fake_nccl_internal.h"

#include <tandem/dtype.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Elements ------------------------------------------------------------------------------------ */

size_t fake_type_size(int type)
{
    static const size_t sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

#define COMBINE(TYPE, SUM_TYPE)                                                                    \
    do {                                                                                           \
        TYPE *a = acc;                                                                             \
        const TYPE *b = other;                                                                     \
        for (size_t i = 0; i < count; i++)                                                         \
            a[i] = op == PRODUCT ? (TYPE)((SUM_TYPE)a[i] * (SUM_TYPE)b[i])                         \
                   : op == MAX   ? (a[i] > b[i] ? a[i] : b[i])                                     \
                   : op == MIN   ? (a[i] < b[i] ? a[i] : b[i])                                     \
                                 : (TYPE)((SUM_TYPE)a[i] + (SUM_TYPE)b[i]);                          \
    } while (0)

static float widen(uint16_t half, int type)
{
    return type == F16 ? td_f16_to_f32(half) : td_bf16_to_f32(half);
}

static uint16_t narrow(float value, int type)
{
    return type == F16 ? td_f32_to_f16(value) : td_f32_to_bf16(value);
}

static void combine_halves(uint16_t *acc, const uint16_t *other, size_t count, int type, int op)
{
    for (size_t i = 0; i < count; i++) {
        float a = widen(acc[i], type), b = widen(other[i], type);
        acc[i] = narrow(op == PRODUCT ? a * b
                        : op == MAX   ? (a > b ? a : b)
                        : op == MIN   ? (a < b ? a : b)
                                      : a + b,
                        type);
    }
}

void fake_combine(void *acc, const void *other, size_t count, int type, int op)
{
    switch (type) {
    case I8:
        COMBINE(int8_t, uint32_t);
        break;
    case U8:
        COMBINE(uint8_t, uint32_t);
        break;
    case I32:
        COMBINE(int32_t, uint32_t);
        break;
    case U32:
        COMBINE(uint32_t, uint32_t);
        break;
    case I64:
        COMBINE(int64_t, uint64_t);
        break;
    case U64:
        COMBINE(uint64_t, uint64_t);
        break;
    case F32:
        COMBINE(float, float);
        break;
    case F64:
        COMBINE(double, double);
        break;
    default:
        combine_halves(acc, other, count, type, op);
    }
}

void fake_scale(void *data, size_t count, int type, double factor)
{
    for (size_t i = 0; i < count; i++)
        if (type == F32)
            ((float *)data)[i] *= (float)factor;
        else if (type == F64)
            ((double *)data)[i] *= factor;
        else if (type == F16 || type == BF16)
            ((uint16_t *)data)[i] = narrow(widen(((uint16_t *)data)[i], type) * (float)factor,
                                           type);
}

/* ---- Collectives ---------------------------------------------------------------------------------- */

static void pause_shortly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 30000}, NULL);
}

/* Until all ranks have got to `number`; false: aborted. */
static bool await_all(struct fake_comm *comm, _Atomic uint64_t *numbers, uint64_t number)
{
    for (int r = 0; r < comm->size; r++)
        while (atomic_load(&numbers[r]) < number) {
            if (atomic_load(&comm->aborted))
                return false;
            pause_shortly();
        }
    return true;
}

/* Different operations wait for ever; of different counts the smallest is the result. */
static bool agree(struct fake_comm *comm, uint64_t *count)
{
    const struct fake_label *mine = &comm->shared->labels[comm->rank];
    for (int r = 0; r < comm->size; r++) {
        const struct fake_label *other = &comm->shared->labels[r];
        while (other->kind != mine->kind || other->root != mine->root) {
            if (atomic_load(&comm->aborted))
                return false;
            pause_shortly();
        }
        *count = other->count < *count ? other->count : *count;
    }
    return true;
}

static void reduce(const struct fake_comm *comm, const struct fake_op *op, char *out, size_t from,
                   size_t count)
{
    size_t size = fake_type_size(op->label.type);
    memcpy(out, comm->shared->areas[0] + from * size, count * size);
    for (int r = 1; r < comm->size; r++)
        fake_combine(out, comm->shared->areas[r] + from * size, count, op->label.type,
                     op->label.op);
    if (op->label.op == AVG)
        fake_scale(out, count, op->label.type, 1.0 / comm->size);
}

static void compute(const struct fake_comm *comm, const struct fake_op *op, char *out,
                    uint64_t count)
{
    const struct fake_shared *shared = comm->shared;
    size_t size = fake_type_size(op->label.type), bytes = count * size, rank = (size_t)comm->rank;
    bool root = comm->rank == op->label.root;
    switch (op->label.kind) {
    case BROADCAST:
        memcpy(out, shared->areas[op->label.root], bytes);
        break;
    case REDUCE:
        if (root)
            reduce(comm, op, out, 0, count);
        break;
    case ALL_REDUCE:
        reduce(comm, op, out, 0, count);
        break;
    case REDUCE_SCATTER:
        reduce(comm, op, out, rank * count, count);
        break;
    case SCATTER:
        memcpy(out, shared->areas[op->label.root] + rank * bytes, bytes);
        break;
    default:
        if (op->label.kind == GATHER && !root)
            break;
        for (int r = 0; r < comm->size; r++)
            memcpy(out + (size_t)r * bytes,
                   shared->areas[r] + (op->label.kind == ALL_TO_ALL ? rank * bytes : 0), bytes);
    }
}

static void run_collective(struct fake_comm *comm, struct fake_op *op)
{
    struct fake_shared *shared = comm->shared;
    uint64_t count = op->label.count;
    char *area = shared->areas[comm->rank];
    if (!await_all(comm, shared->finished, op->number - 1))
        return;
    shared->labels[comm->rank] = op->label;
    if (op->in)
        memcpy(area, fake_device->reach(op->in), op->in_bytes);
    if (op->factor != 1)
        fake_scale(area, op->in_bytes / fake_type_size(op->label.type), op->label.type, op->factor);
    atomic_store(&shared->arrived[comm->rank], op->number);
    if (!await_all(comm, shared->arrived, op->number) || !agree(comm, &count))
        return;
    compute(comm, op, op->out ? fake_device->reach(op->out) : NULL, count);
    atomic_store(&shared->finished[comm->rank], op->number);
}

/* ---- Messages --------------------------------------------------------------------------------------- */

/* Moves what can be moved now. Returns whether the operation is over. */
static bool advance(struct fake_comm *comm, struct fake_op *op)
{
    bool sends = op->label.kind == SEND;
    int from = sends ? comm->rank : op->peer, to = sends ? op->peer : comm->rank;
    struct fake_box *box = &comm->shared->boxes[from][to];
    uint64_t sent = atomic_load(&box->sent), taken = atomic_load(&box->taken);
    size_t left = (sends ? op->in_bytes : op->out_bytes) - op->moved;
    if (sends && sent == taken) {
        if (!left)
            return true; /* the last chunk is taken */
        box->bytes = left < BOX_BYTES ? left : BOX_BYTES;
        memcpy(box->data, (char *)fake_device->reach(op->in) + op->moved, box->bytes);
        op->moved += box->bytes;
        atomic_store(&box->sent, sent + 1);
    } else if (!sends && sent > taken) {
        size_t bytes = box->bytes < left ? box->bytes : left;
        memcpy((char *)fake_device->reach(op->out) + op->moved, box->data, bytes);
        op->moved += bytes;
        atomic_store(&box->taken, taken + 1);
        return op->moved == op->out_bytes;
    }
    return false;
}

/* An earlier message of the same box goes first. */
static bool is_behind(const struct fake_job *job, const struct fake_op *op)
{
    for (const struct fake_op *at = job->ops; at != op; at = at->next)
        if (!at->is_over && at->label.kind == op->label.kind && at->peer == op->peer)
            return true;
    return false;
}

static void run_messages(struct fake_job *job)
{
    for (bool goes_on = true; goes_on && !atomic_load(&job->comm->aborted);) {
        goes_on = false;
        for (struct fake_op *op = job->ops; op; op = op->next) {
            if (!op->is_over && !is_behind(job, op))
                op->is_over = advance(job->comm, op);
            goes_on = goes_on || !op->is_over;
        }
        if (goes_on)
            pause_shortly();
    }
}

td_status fake_run_job(void *arg)
{
    struct fake_job *job = *(struct fake_job **)arg;
    fake_jitter();
    for (struct fake_op *op = job->ops; op; op = op->next) {
        if (op->label.kind >= SEND)
            continue;
        if (!atomic_load(&job->comm->aborted))
            run_collective(job->comm, op);
        op->is_over = true;
    }
    run_messages(job);
    return TD_OK;
}
