/* Halves as f32 for a moment: see the header. A copy takes twice the memory of its tensor; all kernels
 * that use it touch every element, so it costs little beside them. */
#include "tensor/cpu_floats.h"

#include "base/fail.h"
#include "base/half.h"
#include "tensor/vector.h"

#include <stdlib.h>
#include <string.h>

TD__VECTOR
static void widen(float *restrict to, const uint16_t *restrict from, int64_t n, bool f16)
{
    if (f16) {
        for (int64_t i = 0; i < n; i++)
            to[i] = td__f16_to_f32(from[i]);
    } else {
        for (int64_t i = 0; i < n; i++)
            to[i] = td__bf16_to_f32(from[i]);
    }
}

TD__VECTOR
static void narrow(uint16_t *restrict to, const float *restrict from, int64_t n, bool f16)
{
    if (f16) {
        for (int64_t i = 0; i < n; i++)
            to[i] = td__f32_to_f16(from[i]);
    } else {
        for (int64_t i = 0; i < n; i++)
            to[i] = td__f32_to_bf16(from[i]);
    }
}

static bool is_half(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16;
}

struct td__floats td__floats_begin(const td_tensor *x)
{
    struct td__floats floats = {.status = TD_OK, .dtype = x->layout.dtype};
    if (is_half(floats.dtype))
        floats.dtype = TD_F32;
    else if (floats.dtype != TD_F32 && floats.dtype != TD_F64)
        floats.status = td__fail(TD_ERR_UNSUPPORTED,
                                 "kernel: computes with floats (f32, f64, f16, bf16), not with %s",
                                 td_dtype_name(floats.dtype));
    return floats;
}

/* Space for a copy, which goes to `out` in the end. */
static void *hold(struct td__floats *floats, int64_t count, td_tensor *out)
{
    if (floats->status)
        return NULL;
    if (floats->copies == TD__FLOATS_MOST) {
        floats->status = td__fail(TD_ERR_INVALID, "kernel: more than %d operands", TD__FLOATS_MOST);
        return NULL;
    }
    /* For no element one byte, since malloc(0) may be NULL. */
    void *data = malloc((size_t)count * td_dtype_size(floats->dtype) + 1);
    if (!data) {
        floats->status = td__fail_nomem("kernel");
        return NULL;
    }
    floats->copy[floats->copies].data = data;
    floats->copy[floats->copies++].out = out;
    return data;
}

static void *lend(struct td__floats *floats, td_tensor *tensor, bool read, bool write)
{
    if (!tensor || floats->status)
        return NULL;
    td_dtype dtype = tensor->layout.dtype;
    if (dtype == floats->dtype)
        return td_tensor_data(tensor);
    if (!is_half(dtype) || floats->dtype != TD_F32) {
        floats->status = td__fail(TD_ERR_UNSUPPORTED, "kernel: operands of %s and %s in one call",
                                  td_dtype_name(floats->dtype), td_dtype_name(dtype));
        return NULL;
    }
    float *copy = hold(floats, tensor->layout.numel, write ? tensor : NULL);
    if (copy && read)
        widen(copy, td_tensor_data(tensor), tensor->layout.numel, dtype == TD_F16);
    return copy;
}

const void *td__floats_in(struct td__floats *floats, const td_tensor *tensor)
{
    return lend(floats, (td_tensor *)tensor, true, false);
}

void *td__floats_out(struct td__floats *floats, td_tensor *tensor)
{
    return lend(floats, tensor, false, true);
}

void *td__floats_inout(struct td__floats *floats, td_tensor *tensor)
{
    return lend(floats, tensor, true, true);
}

void *td__floats_scratch(struct td__floats *floats, int64_t count)
{
    return hold(floats, count, NULL);
}

td_status td__floats_end(struct td__floats *floats)
{
    for (int i = 0; i < floats->copies; i++) {
        td_tensor *out = floats->copy[i].out;
        if (out && !floats->status)
            narrow(td_tensor_data(out), floats->copy[i].data, out->layout.numel,
                   out->layout.dtype == TD_F16);
        free(floats->copy[i].data);
    }
    return floats->status;
}
