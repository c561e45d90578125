/* Recorded initial values as bytes: rank 0 of a sharded model sends its own to the others. */
#include "tensor/deferred.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_STEPS = 1 << 20, DEEPEST = 32 };

/* ---- Writing ----------------------------------------------------------------------------------------------- */

static void put_f64(struct td__buffer *buffer, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    td__buffer_put_u64(buffer, bits);
}

static void put_layout(struct td__buffer *buffer, int64_t offset, const struct td__layout *layout)
{
    td__buffer_put_u64(buffer, (uint64_t)offset);
    td__buffer_put_u32(buffer, (uint32_t)layout->dtype);
    td__buffer_put_u32(buffer, (uint32_t)layout->ndim);
    for (int d = 0; d < layout->ndim; d++) {
        td__buffer_put_u64(buffer, (uint64_t)layout->shape[d]);
        td__buffer_put_u64(buffer, (uint64_t)layout->strides[d]);
    }
}

static void put_draws(struct td__buffer *buffer, const struct td__draws *draws)
{
    td__buffer_put_u8(buffer, draws->counts);
    td__buffer_put_u8(buffer, draws->has_normal);
    put_f64(buffer, draws->normal);
    td__buffer_put_u64(buffer, draws->seed);
    td__buffer_put_u64(buffer, draws->offset);
    if (draws->counts)
        return;
    td__buffer_put_u64(buffer, draws->engine.seed);
    td__buffer_put_u32(buffer, (uint32_t)draws->engine.left);
    td__buffer_put_u32(buffer, (uint32_t)draws->engine.next);
    for (int i = 0; i < TD__MT19937_WORDS; i++)
        td__buffer_put_u32(buffer, draws->engine.words[i]);
}

static void put_copy(struct td__buffer *buffer, const struct td__deferred_step *step)
{
    const char *device = td_device_name(step->copy->device);
    td__buffer_put_string(buffer, device, strlen(device));
    td__buffer_put_u64(buffer, step->copy->bytes);
    put_layout(buffer, step->copy_offset, &step->copy_layout);
    td__deferred_put(buffer, step->copy);
}

static void put_step(struct td__buffer *buffer, const struct td__deferred_step *step)
{
    td__buffer_put_u8(buffer, (uint8_t)step->kind);
    put_layout(buffer, step->offset, &step->layout);
    put_f64(buffer, step->a);
    put_f64(buffer, step->b);
    td__buffer_put_u64(buffer, (uint64_t)step->from);
    td__buffer_put_u64(buffer, step->range);
    td__buffer_put_u32(buffer, (uint32_t)step->op);
    td__buffer_put_u8(buffer, step->reversed);
    put_f64(buffer, step->trunc.scale);
    put_f64(buffer, step->trunc.mean);
    put_f64(buffer, step->trunc.low);
    put_f64(buffer, step->trunc.high);
    if (step->draws)
        put_draws(buffer, step->draws);
    if (step->values)
        td__buffer_put(buffer, td_tensor_data(step->values), td_tensor_nbytes(step->values));
    if (step->copy)
        put_copy(buffer, step);
}

void td__deferred_put(struct td__buffer *buffer, const struct td__deferred *deferred)
{
    td__buffer_put_u32(buffer, (uint32_t)deferred->count);
    for (int i = 0; i < deferred->count; i++)
        put_step(buffer, &deferred->steps[i]);
}

/* ---- Reading ----------------------------------------------------------------------------------------------- */

static double get_f64(struct td__reader *reader)
{
    uint64_t bits = td__reader_u64(reader);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A layout that lies in `bytes` bytes. */
static bool get_layout(struct td__reader *reader, size_t bytes, int64_t *offset,
                       struct td__layout *layout)
{
    int64_t shape[TD_MAX_DIMS], strides[TD_MAX_DIMS];
    *offset = (int64_t)td__reader_u64(reader);
    td_dtype dtype = (td_dtype)td__reader_u32(reader);
    uint32_t ndim = td__reader_u32(reader);
    if (ndim > TD_MAX_DIMS)
        return false;
    for (uint32_t d = 0; d < ndim; d++) {
        shape[d] = (int64_t)td__reader_u64(reader);
        strides[d] = (int64_t)td__reader_u64(reader);
    }
    if (reader->failed || !td_dtype_size(dtype) ||
        td__layout_init(layout, "td_fsdp", shape, (int)ndim, strides, dtype))
        return false;
    size_t width = td_dtype_size(dtype), extent = td__layout_extent(layout);
    return extent <= bytes && *offset >= 0 && (uint64_t)*offset <= (bytes - extent) / width;
}

static bool get_draws(struct td__reader *reader, struct td__deferred_step *step)
{
    struct td__draws *draws = step->draws = calloc(1, sizeof *draws);
    if (!draws)
        return false;
    draws->owners = 1;
    draws->counts = td__reader_u8(reader);
    draws->has_normal = td__reader_u8(reader);
    draws->normal = get_f64(reader);
    draws->seed = td__reader_u64(reader);
    draws->offset = td__reader_u64(reader);
    if (draws->counts)
        return !reader->failed;
    draws->engine.seed = td__reader_u64(reader);
    draws->engine.left = (int)td__reader_u32(reader);
    draws->engine.next = (int)td__reader_u32(reader);
    for (int i = 0; i < TD__MT19937_WORDS; i++)
        draws->engine.words[i] = td__reader_u32(reader);
    const struct td__mt19937 *engine = &draws->engine;
    return !reader->failed && engine->left >= 1 && engine->left <= TD__MT19937_WORDS &&
           engine->next >= 0 && engine->next <= TD__MT19937_WORDS - engine->left + 1;
}

static bool get_values(struct td__reader *reader, struct td__deferred_step *step)
{
    uint64_t left = (uint64_t)(reader->end - reader->at);
    if ((uint64_t)step->layout.numel > left / td_dtype_size(step->layout.dtype))
        return false;
    step->values = td__empty("td_fsdp", step->layout.shape, step->layout.ndim, step->layout.dtype,
                             td__host_device());
    size_t bytes = td_tensor_nbytes(step->values);
    if (!step->values)
        return false;
    memcpy(td_tensor_data(step->values), reader->at, bytes);
    reader->at += bytes;
    return true;
}

static struct td__deferred *get(struct td__reader *reader, td_device *target, size_t bytes,
                                int depth);

static bool get_copy(struct td__reader *reader, struct td__deferred_step *step, int depth)
{
    char name[64];
    struct td__span device = td__reader_string(reader, sizeof name - 1);
    uint64_t bytes = td__reader_u64(reader);
    if (reader->failed || depth == DEEPEST || bytes > SIZE_MAX / 2)
        return false;
    memcpy(name, device.data, device.size);
    name[device.size] = '\0';
    if (!get_layout(reader, (size_t)bytes, &step->copy_offset, &step->copy_layout) ||
        !td__same_shape(&(td_tensor){.layout = step->layout},
                        &(td_tensor){.layout = step->copy_layout}))
        return false;
    step->copy = get(reader, td_device_get(name), (size_t)bytes, depth + 1);
    return step->copy != NULL;
}

/* Kernels rely on what the public calls have checked. */
static bool is_defined(enum td__deferred_kind kind, const struct td__layout *layout)
{
    td_dtype dtype = layout->dtype;
    bool is_float = dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
    bool is_complex = dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
    if (kind >= TD__DEFERRED_KINDS || td__layout_repeats(layout))
        return false;
    if (kind == TD__DEFERRED_UNIFORM || kind == TD__DEFERRED_NORMAL ||
        kind == TD__DEFERRED_TRUNC_NORMAL)
        return is_float;
    return !is_complex || (kind != TD__DEFERRED_BERNOULLI && kind != TD__DEFERRED_INTEGERS);
}

static bool draws_numbers(enum td__deferred_kind kind)
{
    return kind >= TD__DEFERRED_UNIFORM && kind <= TD__DEFERRED_INTEGERS;
}

static bool get_step(struct td__reader *reader, size_t bytes, int depth,
                     struct td__deferred_step *step)
{
    *step = (struct td__deferred_step){.kind = td__reader_u8(reader)};
    if (!get_layout(reader, bytes, &step->offset, &step->layout) ||
        !is_defined(step->kind, &step->layout))
        return false;
    step->a = get_f64(reader);
    step->b = get_f64(reader);
    step->from = (int64_t)td__reader_u64(reader);
    step->range = td__reader_u64(reader);
    step->op = (int)td__reader_u32(reader);
    step->reversed = td__reader_u8(reader);
    step->trunc.scale = get_f64(reader);
    step->trunc.mean = get_f64(reader);
    step->trunc.low = get_f64(reader);
    step->trunc.high = get_f64(reader);
    if (reader->failed ||
        (step->kind == TD__DEFERRED_UNARY && (unsigned)step->op > TD_UNARY_ISNAN) ||
        (step->kind == TD__DEFERRED_SCALAR && (unsigned)step->op > TD_BINARY_XOR))
        return false;
    if (draws_numbers(step->kind) && !get_draws(reader, step))
        return false;
    if (step->kind == TD__DEFERRED_VALUES && !get_values(reader, step))
        return false;
    return step->kind != TD__DEFERRED_COPY || get_copy(reader, step, depth);
}

static struct td__deferred *get(struct td__reader *reader, td_device *target, size_t bytes,
                                int depth)
{
    uint32_t count = td__reader_u32(reader);
    struct td__deferred *deferred = td__deferred_create(target, bytes);
    if (!deferred || reader->failed || count > MOST_STEPS)
        goto malformed;
    deferred->steps = calloc((size_t)count + 1, sizeof *deferred->steps);
    deferred->capacity = deferred->steps ? (int)count + 1 : 0;
    for (uint32_t i = 0; i < count; i++)
        if (!deferred->steps ||
            !get_step(reader, bytes, depth, &deferred->steps[deferred->count++]))
            goto malformed;
    return deferred;

malformed:
    td__deferred_destroy(deferred);
    return NULL;
}

struct td__deferred *td__deferred_get(struct td__reader *reader, td_device *target, size_t bytes)
{
    struct td__deferred *deferred = get(reader, target, bytes, 0);
    if (!deferred)
        td_fail(TD_ERR_INVALID, "td_fsdp: the initial values that rank 0 has sent are malformed");
    return deferred;
}
