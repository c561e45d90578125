/* Filling tensors of the host with random numbers: the kernels behind random.c.
 *
 * A distribution (random_distributions.h) draws the next numbers into an array. fill() draws into the
 * tensor's memory if that is contiguous, and otherwise into a buffer that it then scatters. Which element
 * gets which number follows PyTorch's iteration: dimensions are sorted by their strides first, so that a
 * transposed tensor gets the numbers in the order of its memory. With a generator of an accelerator, whose numbers are
 * computed here where the accelerator lacks the kernel, it is the order of indices. */
#include "tensor/cpu_kernels.h"
#include "tensor/deferred.h"
#include "tensor/philox.h"

#include <string.h>

/* ---- Where the numbers go -------------------------------------------------------------------- */

/* Whether dimension `a`, which runs faster, should be behind `b`: 1 yes, 0 does not matter, -1 no. */
static int should_swap(const struct td__layout *layout, int a, int b)
{
    int64_t stride_a = layout->strides[a], stride_b = layout->strides[b];
    if (stride_a == 0 || stride_b == 0)
        return 0;
    if (stride_a != stride_b)
        return stride_a < stride_b ? -1 : 1;
    return layout->shape[a] > layout->shape[b];
}

/* The layout with its dimensions in the order of iteration, the first one running fastest, and
 * joined where two are one run; `sorted` by strides, or in the order of indices. */
static struct td__layout iteration_of(const struct td__layout *layout, bool sorted)
{
    int order[TD_MAX_DIMS];
    for (int d = 0; d < layout->ndim; d++)
        order[d] = layout->ndim - 1 - d;
    for (int d = 1; d < layout->ndim && sorted; d++)
        for (int at = d, before = d - 1; before >= 0; before--) {
            int swap = should_swap(layout, order[before], order[at]);
            if (swap < 0)
                break;
            if (swap > 0) {
                int other = order[before];
                order[before] = order[at];
                order[at] = other;
                at = before;
            }
        }

    struct td__layout joined = {.dtype = layout->dtype, .numel = layout->numel};
    for (int d = 0; d < layout->ndim; d++) {
        int64_t size = layout->shape[order[d]], stride = layout->strides[order[d]];
        int last = joined.ndim - 1;
        if (size == 1)
            continue;
        if (last >= 0 && joined.strides[last] * joined.shape[last] == stride) {
            joined.shape[last] *= size;
            continue;
        }
        joined.shape[joined.ndim] = size;
        joined.strides[joined.ndim++] = stride;
    }
    return joined;
}

/* The offset of element `index` in the order of iteration. */
static int64_t offset_of(const struct td__layout *iteration, int64_t index)
{
    int64_t offset = 0;
    for (int d = 0; d < iteration->ndim; d++) {
        offset += index % iteration->shape[d] * iteration->strides[d];
        index /= iteration->shape[d];
    }
    return offset;
}

static void scatter(const struct td__layout *iteration, char *data, int64_t first, const char *from,
                    int64_t count)
{
    size_t size = td_dtype_size(iteration->dtype);
    for (int64_t i = 0; i < count;) {
        int64_t run = iteration->shape[0] - (first + i) % iteration->shape[0];
        run = run < count - i ? run : count - i;
        char *to = data + offset_of(iteration, first + i) * (int64_t)size;
        for (int64_t k = 0; k < run; k++, i++, to += iteration->strides[0] * (int64_t)size)
            memcpy(to, from + (size_t)i * size, size);
    }
}

static void draw(td_generator *generator, const struct td__distribution *distribution, void *out,
                 int64_t count)
{
    static void (*const draws[])(td_generator *, const struct td__distribution *, void *,
                                 int64_t) = {[TD__UNIFORM] = td__draw_uniform,
                                             [TD__NORMAL] = td__draw_normal,
                                             [TD__BERNOULLI] = td__draw_bernoulli,
                                             [TD__INTEGERS] = td__draw_integers};
    draws[distribution->kind](generator, distribution, out, count);
}

/* Fills memory of this layout. */
static void fill(const struct td__layout *layout, char *data,
                 const struct td__distribution *distribution, td_generator *generator)
{
    _Alignas(64) char block[TD__RANDOM_BLOCK * sizeof(double)];
    bool counts = generator && generator->counts;
    struct td__layout iteration = iteration_of(layout, !counts);
    size_t size = td_dtype_size(iteration.dtype);
    bool one_run = iteration.ndim == 0 || (iteration.ndim == 1 && iteration.strides[0] == 1);
    uint64_t seed = 0, offset = 0;
    generator = td__generator_lock(generator);
    if (counts)
        td__generator_advance(
            generator, layout->numel * (td__takes_two_words(distribution) ? 2 : 1), &seed, &offset);
    for (int64_t at = 0; at < iteration.numel; at += TD__RANDOM_BLOCK) {
        int64_t count = iteration.numel - at < TD__RANDOM_BLOCK ? iteration.numel - at
                                                                : TD__RANDOM_BLOCK;
        char *to = one_run ? data + (size_t)at * size : block;
        if (counts)
            td__philox_numbers(distribution, seed, offset, at, to, count);
        else
            draw(generator, distribution, to, count);
        if (!one_run)
            scatter(&iteration, data, at, block, count);
    }
    td__generator_unlock(generator);
}

static td_status fill_tensor(td_tensor *out, const struct td__distribution *distribution,
                             td_generator *generator)
{
    fill(&out->layout, td_tensor_data(out), distribution, generator);
    return TD_OK;
}

/* ---- Contiguous tensors ---------------------------------------------------------------------------- */

/* A contiguous tensor of 16 elements and more. If their number is not a multiple of 16, the last 16 are drawn
 * again. */
static void fill_normal_groups(td_tensor *tensor, const struct td__distribution *distribution,
                               td_generator *generator)
{
    char *data = td_tensor_data(tensor);
    size_t size = td_dtype_size(distribution->dtype);
    int64_t whole = tensor->layout.numel / TD__NORMAL_GROUP * TD__NORMAL_GROUP,
            rest = tensor->layout.numel - whole;
    generator = td__generator_lock(generator);
    for (int64_t at = 0; at < whole; at += TD__RANDOM_BLOCK)
        td__draw_normal_groups(generator, distribution, data + (size_t)at * size,
                               whole - at < TD__RANDOM_BLOCK ? whole - at : TD__RANDOM_BLOCK);
    if (rest) {
        uint32_t unused[2 * TD__NORMAL_GROUP];
        td__mt19937_fill(&generator->engine, unused,
                         distribution->dtype == TD_F64 ? 2 * rest : rest);
        td__draw_normal_groups(generator, distribution,
                               data + (size_t)(whole + rest - TD__NORMAL_GROUP) * size,
                               TD__NORMAL_GROUP);
    }
    td__generator_unlock(generator);
}

void td__dropout_mask(td_generator *generator, unsigned char *mask, int64_t n, double p)
{
    bool counts = generator && generator->counts;
    if (!counts && (p <= 0 || p >= 1)) {
        if (n > 0)
            memset(mask, p <= 0, (size_t)n);
        return;
    }
    struct td__distribution distribution = {.kind = TD__BERNOULLI, .dtype = TD_BOOL, .p = 1 - p};
    struct td__layout layout = {
        .dtype = TD_BOOL, .ndim = 1, .numel = n, .shape = {n}, .strides = {1}};
    fill(&layout, (char *)mask, &distribution, generator);
}

/* ---- Kernels ------------------------------------------------------------------------------------ */

static bool is_grouped(const struct td__layout *layout)
{
    return layout->numel >= TD__NORMAL_GROUP && td__layout_is_contiguous(layout);
}

static struct td__distribution integers(td_dtype dtype, int64_t from, uint64_t range)
{
    /* PyTorch takes two words from 2^32 on; u32, which it does not have, needs only one. */
    uint64_t words = UINT64_C(1) << 32;
    bool wide = range == 0 || range > words || (range == words && dtype != TD_U32);
    return (struct td__distribution){.kind = TD__INTEGERS,
                                     .dtype = dtype,
                                     .modulus = range,
                                     .base = (uint64_t)from,
                                     .wide = wide};
}

td_status td__cpu_uniform(td_tensor *out, double from, double to, td_generator *generator)
{
    td_dtype dtype = out->layout.dtype;
    double low = td__as_dtype(dtype, from);
    double range = td__as_dtype(dtype, td__as_dtype(dtype, to) - low);
    return fill_tensor(out,
                       &(struct td__distribution){
                           .kind = TD__UNIFORM, .dtype = dtype, .from = low, .range = range},
                       generator);
}

td_status td__cpu_normal(td_tensor *out, double mean, double std, td_generator *generator)
{
    struct td__distribution distribution = {
        .kind = TD__NORMAL, .dtype = out->layout.dtype, .from = mean, .range = std};
    bool counts = generator && generator->counts;
    if (counts || !is_grouped(&out->layout))
        return fill_tensor(out, &distribution, generator);
    fill_normal_groups(out, &distribution, generator);
    return TD_OK;
}

td_status td__cpu_bernoulli(td_tensor *out, double p, td_generator *generator)
{
    return fill_tensor(
        out, &(struct td__distribution){.kind = TD__BERNOULLI, .dtype = out->layout.dtype, .p = p},
        generator);
}

td_status td__cpu_random_range(td_tensor *out, int64_t from, uint64_t range,
                               td_generator *generator)
{
    struct td__distribution distribution = integers(out->layout.dtype, from, range);
    return fill_tensor(out, &distribution, generator);
}

/* ---- Skipping ------------------------------------------------------------------------------------- */

static struct td__distribution distribution_of(const struct td__deferred_step *step)
{
    td_dtype dtype = step->layout.dtype;
    if (step->kind == TD__DEFERRED_INTEGERS)
        return integers(dtype, step->from, step->range);
    return (struct td__distribution){.kind = step->kind == TD__DEFERRED_UNIFORM  ? TD__UNIFORM
                                             : step->kind == TD__DEFERRED_NORMAL ? TD__NORMAL
                                                                                 : TD__BERNOULLI,
                                     .dtype = dtype};
}

void td__skip_draws(const struct td__deferred_step *step, td_generator *generator)
{
    struct td__distribution distribution = distribution_of(step);
    int64_t numel = step->layout.numel;
    bool is_f64 = distribution.dtype == TD_F64;
    if (generator->counts) {
        uint64_t seed, offset;
        td__generator_advance(generator, numel * (td__takes_two_words(&distribution) ? 2 : 1),
                              &seed, &offset);
    } else if (distribution.kind == TD__BERNOULLI) {
        td__mt19937_skip(&generator->engine, 2 * numel);
    } else if (distribution.kind == TD__INTEGERS) {
        td__mt19937_skip(&generator->engine, distribution.wide ? 2 * numel : numel);
    } else if (distribution.kind == TD__UNIFORM) {
        td__mt19937_skip(&generator->engine, is_f64 ? 2 * numel : numel);
    } else if (is_grouped(&step->layout)) { /* and the last group once more: fill_normal_groups() */
        numel += numel % TD__NORMAL_GROUP ? TD__NORMAL_GROUP : 0;
        td__mt19937_skip(&generator->engine, is_f64 ? 2 * numel : numel);
    } else { /* the generator keeps every second number */
        double unused[TD__RANDOM_BLOCK];
        for (int64_t at = 0; at < numel; at += TD__RANDOM_BLOCK)
            td__draw_normal(generator, &distribution, unused,
                            numel - at < TD__RANDOM_BLOCK ? numel - at : TD__RANDOM_BLOCK);
    }
}
