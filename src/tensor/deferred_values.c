/* Recorded initial values become elements: the steps of a storage, with the kernels of its device; see deferred.h. */
#include "tensor/deferred.h"

#include "base/fail.h"
#include "tensor/erfinv.h"

/* ---- Truncated normal numbers ---------------------------------------------------------------------------------- */

/* The inverse of erf() maps uniform to normal numbers, which are scaled, shifted and clamped; as in
 * PyTorch, each of these four steps rounds to the dtype. */
static void shape_f64(double *data, int64_t count, const struct td__trunc_normal *normal)
{
    for (int64_t i = 0; i < count; i++) {
        double x = td__erfinv_f64(data[i]) * normal->scale;
        x += normal->mean;
        data[i] = x < normal->low ? normal->low : x > normal->high ? normal->high : x;
    }
}

static float rounded(float x, td_dtype dtype)
{
    return dtype == TD_BF16  ? td_bf16_to_f32(td_f32_to_bf16(x))
           : dtype == TD_F16 ? td_f16_to_f32(td_f32_to_f16(x))
                             : x;
}

static void shape_f32(float *data, int64_t count, const struct td__trunc_normal *normal,
                      td_dtype dtype)
{
    float scale = rounded((float)normal->scale, dtype), mean = rounded((float)normal->mean, dtype);
    float low = rounded((float)normal->low, dtype), high = rounded((float)normal->high, dtype);
    for (int64_t i = 0; i < count; i++) {
        float x = rounded(rounded(td__erfinv_f32(data[i]), dtype) * scale, dtype);
        x = rounded(x + mean, dtype);
        data[i] = x < low ? low : x > high ? high : x;
    }
}

td_status td__trunc_normal_from_uniform(td_tensor *tensor, const struct td__trunc_normal *normal)
{
    td_dtype dtype = tensor->layout.dtype;
    td_tensor *here = td__to_host("td_init_trunc_normal", tensor);
    td_tensor *wide = td__empty_like_as(here, dtype == TD_F64 ? TD_F64 : TD_F32);
    td_status status = wide ? td__cpu_kernels.copy(wide, here) : td__error_status();
    td_tensor *narrow = status ? NULL : td__empty_like_as(wide, dtype);
    if (!status && dtype == TD_F64)
        shape_f64(td_tensor_data(wide), td_tensor_numel(wide), normal);
    else if (!status)
        shape_f32(td_tensor_data(wide), td_tensor_numel(wide), normal, dtype);
    if (!status)
        status = narrow ? td__cpu_kernels.copy(narrow, wide) : td__error_status();
    if (!status)
        status = td__prepare_write(tensor);
    if (!status)
        status = td__transfer("td_init_trunc_normal", tensor, narrow, false);
    if (!status)
        td__tensor_bump_version(tensor);
    td_tensor_release(narrow);
    td_tensor_release(wide);
    td_tensor_release(here);
    return status;
}

/* ---- Steps ------------------------------------------------------------------------------------------------------ */

/* A generator in the state that it had. */
static td_generator *restored(const struct td__draws *draws, td_device *device)
{
    td_generator *generator = td_generator_create(0, device);
    if (!generator)
        return NULL;
    generator->counts = draws->counts;
    generator->engine = draws->engine;
    generator->has_normal = draws->has_normal;
    generator->normal = draws->normal;
    generator->seed = draws->seed;
    generator->offset = draws->offset;
    return generator;
}

static td_status draw(const struct td__deferred_step *step, td_tensor *out)
{
    const td_kernels *kernels = td__kernels_of(out);
    td_generator *generator = restored(step->draws, out->storage->device);
    if (!generator)
        return td__error_status();
    td_status status = step->kind == TD__DEFERRED_UNIFORM
                           ? kernels->uniform(out, step->a, step->b, generator)
                       : step->kind == TD__DEFERRED_NORMAL
                           ? kernels->normal(out, step->a, step->b, generator)
                       : step->kind == TD__DEFERRED_BERNOULLI
                           ? kernels->bernoulli(out, step->a, generator)
                           : kernels->random_range(out, step->from, step->range, generator);
    td_generator_destroy(generator);
    return status;
}

static td_status copy(const struct td__deferred_step *step, td_tensor *out)
{
    struct td__storage *storage = td__deferred_make(step->copy);
    td_tensor *from = storage ? td__tensor_over(storage, step->copy_offset, &step->copy_layout)
                              : NULL;
    if (storage)
        td__storage_release(storage);
    if (!from)
        return td__error_status();
    td_status status = from->layout.dtype == out->layout.dtype
                           ? td__transfer("td_module_materialize", out, from, false)
                           : td__kernels_of(out)->copy(out, from);
    td_tensor_release(from);
    return status;
}

static td_status run(const struct td__deferred_step *step, td_tensor *out)
{
    const td_kernels *kernels = td__kernels_of(out);
    switch (step->kind) {
    case TD__DEFERRED_FILL:
        return kernels->fill(out, step->a);
    case TD__DEFERRED_UNIFORM:
    case TD__DEFERRED_NORMAL:
    case TD__DEFERRED_BERNOULLI:
    case TD__DEFERRED_INTEGERS:
        return draw(step, out);
    case TD__DEFERRED_VALUES:
        return td__transfer("td_module_materialize", out, step->values, false);
    case TD__DEFERRED_COPY:
        return copy(step, out);
    case TD__DEFERRED_TRUNC_NORMAL:
        return td__trunc_normal_from_uniform(out, &step->trunc);
    case TD__DEFERRED_SCALAR:
        return kernels->binary_scalar((td_binary)step->op, out, out, step->a, step->reversed);
    case TD__DEFERRED_CLAMP:
        return kernels->clamp(out, out, step->a, step->b);
    case TD__DEFERRED_UNARY:
        return kernels->unary((td_unary)step->op, out, out);
    case TD__DEFERRED_LOST:
    case TD__DEFERRED_KINDS:
        break;
    }
    return td_fail(TD_ERR_STATE,
                   "a tensor of shape %s was moved to a meta device, which dropped its values; "
                   "load them, or initialise it again",
                   td__shape_of(out));
}

/* ---- Storages and tensors ---------------------------------------------------------------------------------------- */

struct td__storage *td__deferred_make(const struct td__deferred *deferred)
{
    td_device *device = td__use_device("td_module_materialize", deferred->device);
    struct td__storage *storage = device ? td__storage_create(device, "td_module_materialize",
                                                              deferred->bytes)
                                         : NULL;
    for (int i = 0; storage && i < deferred->count; i++) {
        const struct td__deferred_step *step = &deferred->steps[i];
        td_tensor *out = td__tensor_over(storage, step->offset, &step->layout);
        td_status status = out ? run(step, out) : TD_ERR_NOMEM;
        td_tensor_release(out);
        if (!status)
            continue;
        td__storage_release(storage);
        return NULL;
    }
    return storage;
}

static struct td__storage *make_memory(const struct td__storage *storage, bool values)
{
    const struct td__deferred *deferred = td__deferred_of(storage);
    if (deferred && values)
        return td__deferred_make(deferred);
    td_device *device = td__use_device("td_module_materialize", storage->device->target);
    return device ? td__storage_create(device, "td_module_materialize", storage->bytes) : NULL;
}

td_tensor *td__deferred_tensor(const td_tensor *tensor)
{
    struct td__storage *storage = make_memory(tensor->storage, true);
    td_tensor *made = storage ? td__tensor_over(storage, tensor->offset, &tensor->layout) : NULL;
    if (storage)
        td__storage_release(storage);
    return made;
}

td_status td__deferred_end(const td_tensor *tensor, bool values)
{
    struct td__storage *storage = tensor->storage;
    if (!td__is_meta(storage->device))
        return TD_OK;
    values |= td_tensor_nbytes(tensor) < storage->bytes; /* other tensors have a part of it */
    struct td__storage *made = make_memory(storage, values);
    if (!made)
        return td__error_status();
    td_device *device = made->device;
    td__storage_swap_memory(storage, made);
    made->device = storage->device;
    storage->device = device;
    td__storage_release(made);
    return TD_OK;
}
