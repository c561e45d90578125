/* f16 and bf16 through f32; see widen.h. */
#include "tensor/widen.h"

#include "base/fail.h"
#include "base/half.h"
#include "tensor/cpu_convert.h"
#include "tensor/parallel_for.h"

static bool is_half(td_dtype dtype)
{
    return dtype == TD_F16 || dtype == TD_BF16;
}

/* A tensor and its copy, which threads convert. */
struct conversion {
    const struct td__layout *layout;
    uint16_t *data;
    float *copy;
    bool widen;
};

/* Elements of a tensor without gaps. */
static void convert_elements(void *arg, int64_t begin, int64_t end)
{
    const struct conversion *c = arg;
    if (c->widen)
        td__convert_half(c->copy + begin, c->data + begin, c->layout->dtype, end - begin);
    else
        td__convert_to_half(c->data + begin, c->layout->dtype, c->copy + begin, end - begin);
}

/* Rows: contiguous in the copy, strided in the tensor. */
static void convert_rows(void *arg, int64_t begin, int64_t end)
{
    const struct conversion *c = arg;
    const struct td__layout *layout = c->layout;
    const int last = layout->ndim - 1;
    const int64_t count = layout->shape[last], stride = layout->strides[last];
    for (int64_t row = begin; row < end; row++) {
        int64_t rest = row, offset = 0;
        for (int d = last; d-- > 0;) {
            offset += rest % layout->shape[d] * layout->strides[d];
            rest /= layout->shape[d];
        }
        float *copy = c->copy + row * count;
        uint16_t *data = c->data + offset;
        for (int64_t i = 0; i < count; i++) {
            if (c->widen)
                copy[i] = layout->dtype == TD_F16 ? td__f16_to_f32(data[i * stride])
                                                  : td__bf16_to_f32(data[i * stride]);
            else
                data[i * stride] = layout->dtype == TD_F16 ? td__f32_to_f16(copy[i])
                                                           : td__f32_to_bf16(copy[i]);
        }
    }
}

/* All elements of a tensor, between it and its copy. */
static void convert(const td_tensor *tensor, float *copy, bool widen)
{
    const struct td__layout *layout = &tensor->layout;
    struct conversion c = {
        .layout = layout, .data = td_tensor_data(tensor), .copy = copy, .widen = widen};
    if (layout->numel == 0)
        return;
    if (td__layout_is_contiguous(layout)) {
        td__parallel_for(layout->numel, 4 * TD__GRAIN, convert_elements, &c);
        return;
    }
    const int64_t count = layout->shape[layout->ndim - 1];
    td__parallel_for(layout->numel / count, TD__GRAIN / count + 1, convert_rows, &c);
}

static void *add_copy(struct td__wide *wide, const td_tensor *tensor, td_tensor *result)
{
    size_t bytes = (size_t)tensor->layout.numel * sizeof(float);
    struct td__aligned copy = td__aligned_alloc(bytes);
    if (!copy.data) {
        wide->status = td_fail(TD_ERR_NOMEM, "no memory for %zu bytes of %s as f32", bytes,
                               td_dtype_name(tensor->layout.dtype));
        return NULL;
    }
    wide->parts[wide->count].copy = copy;
    wide->parts[wide->count++].result = result;
    return copy.data;
}

/* Whether the dtype is supported; otherwise sets wide->status. */
static bool is_float(struct td__wide *wide, const td_tensor *tensor)
{
    td_dtype dtype = tensor->layout.dtype;
    if (wide->status == TD_OK && dtype != TD_F32 && dtype != TD_F64 && !is_half(dtype))
        wide->status = td_fail(TD_ERR_UNSUPPORTED,
                               "not supported for %s, only for f32, f64, f16 and bf16",
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
            convert(wide->parts[i].result, wide->parts[i].copy.data, false);
        td__aligned_free(&wide->parts[i].copy);
    }
    return wide->status;
}
