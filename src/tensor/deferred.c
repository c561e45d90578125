/* Records of initial values; see deferred.h. The kernels of meta devices add to them. */
#include "tensor/deferred.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

/* ---- Records ----------------------------------------------------------------------------------------------- */

struct td__deferred *td__deferred_create(td_device *target, size_t bytes)
{
    struct td__deferred *deferred = malloc(sizeof *deferred);
    if (!deferred) {
        td__fail_nomem("tensor");
        return NULL;
    }
    *deferred = (struct td__deferred){.device = target, .bytes = bytes};
    return deferred;
}

static void free_step(struct td__deferred_step *step)
{
    if (step->draws && atomic_fetch_sub(&step->draws->owners, 1) == 1)
        free(step->draws);
    td_tensor_release(step->values);
    td__deferred_destroy(step->copy);
}

static void free_steps(struct td__deferred *deferred)
{
    for (int i = 0; i < deferred->count; i++)
        free_step(&deferred->steps[i]);
    deferred->count = 0;
}

void td__deferred_destroy(struct td__deferred *deferred)
{
    if (!deferred)
        return;
    free_steps(deferred);
    free(deferred->steps);
    free(deferred);
}

/* Takes what the step refers to. */
static td_status append(struct td__deferred *deferred, struct td__deferred_step *step)
{
    if (deferred->count == deferred->capacity) {
        int capacity = 2 * deferred->capacity + 1;
        struct td__deferred_step *steps = realloc(deferred->steps,
                                                  (size_t)capacity * sizeof *steps);
        if (!steps) {
            free_step(step);
            return td__fail_nomem("tensor");
        }
        deferred->steps = steps;
        deferred->capacity = capacity;
    }
    deferred->steps[deferred->count++] = *step;
    return TD_OK;
}

struct td__deferred *td__deferred_copy(const struct td__deferred *deferred)
{
    struct td__deferred *copy = td__deferred_create(deferred->device, deferred->bytes);
    for (int i = 0; copy && i < deferred->count; i++) {
        struct td__deferred_step step = deferred->steps[i];
        if (step.draws)
            atomic_fetch_add(&step.draws->owners, 1);
        td_tensor_retain(step.values);
        bool copied = !step.copy || (step.copy = td__deferred_copy(step.copy));
        if (!append(copy, &step) && copied)
            continue;
        td__deferred_destroy(copy);
        return NULL;
    }
    return copy;
}

struct td__deferred *td__deferred_of(const struct td__storage *storage)
{
    return td__is_meta(storage->device) && storage->bytes ? storage->arg : NULL;
}

/* ---- Steps ------------------------------------------------------------------------------------------------- */

static bool covers(const struct td__deferred *deferred, int64_t offset,
                   const struct td__layout *layout)
{
    return offset == 0 && td__layout_is_contiguous(layout) &&
           td__layout_extent(layout) == deferred->bytes;
}

/* Whether what was there before does not matter. */
static bool replaces(const struct td__deferred_step *step)
{
    return step->kind <= TD__DEFERRED_COPY || step->kind == TD__DEFERRED_LOST;
}

td_status td__deferred_add(td_tensor *tensor, struct td__deferred_step *step)
{
    struct td__deferred *deferred = td__deferred_of(tensor->storage);
    step->offset = tensor->offset;
    step->layout = tensor->layout;
    if (!deferred || !tensor->layout.numel) {
        free_step(step);
        return TD_OK;
    }
    if (replaces(step) && covers(deferred, step->offset, &step->layout))
        free_steps(deferred);
    return append(deferred, step);
}

/* The whole storage gets the steps of another one. */
static td_status take_steps(struct td__deferred *to, const struct td__deferred *from)
{
    struct td__deferred *copy = td__deferred_copy(from);
    if (!copy)
        return TD_ERR_NOMEM;
    struct td__deferred former = *to;
    to->steps = copy->steps;
    to->count = copy->count;
    to->capacity = copy->capacity;
    copy->steps = former.steps;
    copy->count = former.count;
    copy->capacity = former.capacity;
    td__deferred_destroy(copy);
    return TD_OK;
}

static td_status add_values(td_tensor *to, const td_tensor *from)
{
    struct td__deferred_step step = {.kind = TD__DEFERRED_VALUES};
    step.values = td__on_host(from) ? td__clone((td_tensor *)from)
                                    : td__to_host("tensor", (td_tensor *)from);
    return step.values ? td__deferred_add(to, &step) : td__error_status();
}

td_status td__deferred_add_copy(const td_tensor *to, const td_tensor *from)
{
    td_tensor *target = (td_tensor *)to;
    struct td__deferred *deferred = td__deferred_of(to->storage);
    if (!deferred || !to->layout.numel)
        return TD_OK;
    if (!td__is_meta(from->storage->device))
        return add_values(target, from);
    const struct td__deferred *other = td__deferred_of(from->storage);
    if (other->device == deferred->device && to->layout.dtype == from->layout.dtype &&
        covers(deferred, to->offset, &to->layout) && covers(other, from->offset, &from->layout))
        return take_steps(deferred, other);
    struct td__deferred_step step = {.kind = TD__DEFERRED_COPY,
                                     .copy = td__deferred_copy(other),
                                     .copy_offset = from->offset,
                                     .copy_layout = from->layout};
    return step.copy ? td__deferred_add(target, &step) : TD_ERR_NOMEM;
}

td_status td__deferred_add_trunc_normal(td_tensor *tensor, const struct td__trunc_normal *normal)
{
    return td__deferred_add(
        tensor, &(struct td__deferred_step){.kind = TD__DEFERRED_TRUNC_NORMAL, .trunc = *normal});
}

td_status td__deferred_add_lost(td_tensor *tensor)
{
    return td__deferred_add(tensor, &(struct td__deferred_step){.kind = TD__DEFERRED_LOST});
}

/* ---- Kernels ----------------------------------------------------------------------------------------------- */

static td_status meta_fill(td_tensor *out, double value)
{
    return td__deferred_add(out,
                            &(struct td__deferred_step){.kind = TD__DEFERRED_FILL, .a = value});
}

static td_status meta_copy(td_tensor *out, const td_tensor *x)
{
    return td__deferred_add_copy(out, x);
}

/* Notes the state of the generator, which skips the numbers. */
static td_status add_draw(td_tensor *out, struct td__deferred_step *step, td_generator *generator)
{
    step->layout = out->layout;
    if (!out->layout.numel)
        return TD_OK;
    step->draws = malloc(sizeof *step->draws);
    if (!step->draws)
        return td__fail_nomem("tensor");
    generator = td__generator_lock(generator);
    *step->draws = (struct td__draws){.owners = 1,
                                      .counts = generator->counts,
                                      .engine = generator->engine,
                                      .has_normal = generator->has_normal,
                                      .normal = generator->normal,
                                      .seed = generator->seed,
                                      .offset = generator->offset};
    td__skip_draws(step, generator);
    td__generator_unlock(generator);
    return td__deferred_add(out, step);
}

static td_status meta_uniform(td_tensor *out, double from, double to, td_generator *generator)
{
    return add_draw(out,
                    &(struct td__deferred_step){.kind = TD__DEFERRED_UNIFORM, .a = from, .b = to},
                    generator);
}

static td_status meta_normal(td_tensor *out, double mean, double std, td_generator *generator)
{
    return add_draw(out,
                    &(struct td__deferred_step){.kind = TD__DEFERRED_NORMAL, .a = mean, .b = std},
                    generator);
}

static td_status meta_bernoulli(td_tensor *out, double p, td_generator *generator)
{
    return add_draw(out, &(struct td__deferred_step){.kind = TD__DEFERRED_BERNOULLI, .a = p},
                    generator);
}

static td_status meta_random_range(td_tensor *out, int64_t from, uint64_t range,
                                   td_generator *generator)
{
    return add_draw(
        out,
        &(struct td__deferred_step){.kind = TD__DEFERRED_INTEGERS, .from = from, .range = range},
        generator);
}

/* These are recorded where they change one tensor in place. */
static bool is_in_place(const td_tensor *out, const td_tensor *x)
{
    return out->storage == x->storage && out->offset == x->offset &&
           out->layout.dtype == x->layout.dtype && td__same_shape(out, x) &&
           !memcmp(out->layout.strides, x->layout.strides,
                   (size_t)x->layout.ndim * sizeof x->layout.strides[0]);
}

static td_status meta_binary_scalar(td_binary op, td_tensor *out, const td_tensor *a, double b,
                                    bool reversed)
{
    if (!is_in_place(out, a))
        return TD_ERR_UNSUPPORTED;
    return td__deferred_add(
        out, &(struct td__deferred_step){
                 .kind = TD__DEFERRED_SCALAR, .op = (int)op, .a = b, .reversed = reversed});
}

static td_status meta_clamp(td_tensor *out, const td_tensor *x, double low, double high)
{
    if (!is_in_place(out, x))
        return TD_ERR_UNSUPPORTED;
    return td__deferred_add(
        out, &(struct td__deferred_step){.kind = TD__DEFERRED_CLAMP, .a = low, .b = high});
}

static td_status meta_unary(td_unary op, td_tensor *out, const td_tensor *x)
{
    if (!is_in_place(out, x))
        return TD_ERR_UNSUPPORTED;
    return td__deferred_add(out,
                            &(struct td__deferred_step){.kind = TD__DEFERRED_UNARY, .op = (int)op});
}

const td_kernels td__meta_kernels = {
    .version = TD_KERNELS_VERSION,
    .size = sizeof(td_kernels),
    .fill = meta_fill,
    .copy = meta_copy,
    .unary = meta_unary,
    .binary_scalar = meta_binary_scalar,
    .clamp = meta_clamp,
    .uniform = meta_uniform,
    .normal = meta_normal,
    .bernoulli = meta_bernoulli,
    .random_range = meta_random_range,
};
