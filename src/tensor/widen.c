/* Halves by way of f32; see widen.h. */
#include "tensor/widen.h"

#include "base/fail.h"
#include "base/half.h"
#include "tensor/cpu_convert.h"
#include "tensor/parallel_for.h"

#include <stdlib.h>

static bool is_half(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16;
}

/* One row of `count` elements, `stride` apart in the tensor and side by side in the copy. */
static void load_row(td_dtype dtype, float *to, const uint16_t *from, int64_t stride, int64_t count)
{
    if (dtype == TD_F16)
        for (int64_t i = 0; i < count; i++)
            to[i] = td__f16_to_f32(from[i * stride]);
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = td__bf16_to_f32(from[i * stride]);
}

static void store_row(td_dtype dtype, uint16_t *to, int64_t stride, const float *from,
                      int64_t count)
{
    if (dtype == TD_F16)
        for (int64_t i = 0; i < count; i++)
            to[i * stride] = td__f32_to_f16(from[i]);
    else
        for (int64_t i = 0; i < count; i++)
            to[i * stride] = td__f32_to_bf16(from[i]);
}

/* A tensor without gaps and its copy. */
struct conversion {
    td_dtype dtype;
    uint16_t *data;
    float *copy;
};

static void load_range(void *arg, int64_t begin, int64_t end)
{
    const struct conversion *c = arg;
    td__convert_half(c->copy + begin, c->data + begin, c->dtype, end - begin);
}

static void store_range(void *arg, int64_t begin, int64_t end)
{
    const struct conversion *c = arg;
    td__convert_to_half(c->data + begin, c->dtype, c->copy + begin, end - begin);
}

/* All rows of a tensor, between it and its copy. */
static void convert(const td_tensor *tensor, float *copy, bool widen)
{
    const struct td__layout *layout = &tensor->layout;
    if (td__layout_is_contiguous(layout)) {
        struct conversion conversion = {layout->dtype, td_tensor_data(tensor), copy};
        td__parallel_for(layout->numel, TD__GRAIN, widen ? load_range : store_range, &conversion);
        return;
    }
    uint16_t *data = td_tensor_data(tensor);
    const int last = layout->ndim - 1;
    const int64_t row = layout->shape[last], stride = layout->strides[last];
    for (int64_t at = 0; at < layout->numel; at += row) {
        int64_t rest = at / row, offset = 0;
        for (int d = last; d-- > 0;) {
            offset += rest % layout->shape[d] * layout->strides[d];
            rest /= layout->shape[d];
        }
        if (widen)
            load_row(layout->dtype, copy + at, data + offset, stride, row);
        else
            store_row(layout->dtype, data + offset, stride, copy + at, row);
    }
}

static void *add_copy(struct td__wide *wide, const td_tensor *tensor, td_tensor *result)
{
    size_t bytes = (size_t)tensor->layout.numel * sizeof(float);
    float *copy = malloc(bytes ? bytes : 1);
    if (!copy) {
        wide->status = td__fail(TD_ERR_NOMEM, "no memory for %zu bytes of %s as f32", bytes,
                                td_dtype_name(tensor->layout.dtype));
        return NULL;
    }
    wide->parts[wide->count].copy = copy;
    wide->parts[wide->count++].result = result;
    return copy;
}

/* Whether the tensor can be used at all; a failure is noted. */
static bool is_float(struct td__wide *wide, const td_tensor *tensor)
{
    td_dtype dtype = tensor->layout.dtype;
    if (wide->status == TD_OK && dtype != TD_F32 && dtype != TD_F64 && !is_half(dtype))
        wide->status = td__fail(
            TD_ERR_UNSUPPORTED,
            "there is no such kernel for %s, for floats (f32, f64, f16, bf16) only",
            td_dtype_name(dtype));
    return wide->status == TD_OK;
}

const void *td__widen(struct td__wide *wide, const td_tensor *tensor)
{
    if (!tensor || !is_float(wide, tensor))
        return NULL;
    if (!is_half(tensor->layout.dtype))
        return td_tensor_data(tensor);
    float *copy = add_copy(wide, tensor, NULL);
    if (copy)
        convert(tensor, copy, true);
    return copy;
}

void *td__widen_out(struct td__wide *wide, td_tensor *tensor, bool keep)
{
    if (!tensor || !is_float(wide, tensor))
        return NULL;
    if (!is_half(tensor->layout.dtype))
        return td_tensor_data(tensor);
    float *copy = add_copy(wide, tensor, tensor);
    if (copy && keep)
        convert(tensor, copy, true);
    return copy;
}

td_status td__widen_end(struct td__wide *wide)
{
    for (int i = 0; i < wide->count; i++) {
        if (wide->status == TD_OK && wide->parts[i].result)
            convert(wide->parts[i].result, wide->parts[i].copy, false);
        free(wide->parts[i].copy);
    }
    return wide->status;
}
