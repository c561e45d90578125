/* Gather and scatter along one dimension of a table.
 *
 *     gather       flat[i, j, k]  = table[i, index[i, j, k], k]
 *     scatter_add  table[i, index[i, j, k], k] += flat[i, j, k]
 *
 * index_select and index_add are the same with an index that is broadcast over the other dimensions, by
 * strides of 0. So there is one loop: over the lines of `flat` along its last dimension, after merging
 * dimensions. If the index is the same along a line, the line is one copy or one addition: a row of an
 * embedding, for example.
 *
 * All indices are checked before anything is written. Threads share the lines of a gather; additions are in
 * the order of the indices. */
#include "tensor/cpu_kernels.h"

#include "base/fail.h"
#include "base/half.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#include <complex.h>
#include <inttypes.h>
#include <string.h>

enum operand { FLAT, INDEX, TABLE, OPERANDS };

struct walk {
    int ndim; /* at least 1 */
    int64_t shape[TD_MAX_DIMS];
    int64_t strides[OPERANDS][TD_MAX_DIMS]; /* in elements; the table's along `dim` is 0 here … */
    int64_t step;                           /* … since indices move it by this */
    td_dtype dtype;
    const td_tensor *tensors[OPERANDS];
};

/* A line of `n` elements; the strides are in elements. */
struct line {
    char *flat, *table;
    const int64_t *index;
    int64_t n, flat_stride, index_stride, table_stride, step;
    td_dtype dtype;
};

/* ---- The walk -------------------------------------------------------------------------------- */

/* Whether dimension d can be merged into the one before it. */
static bool may_merge(const struct walk *walk, int d, const int64_t strides[OPERANDS], int64_t size)
{
    for (int k = 0; k < OPERANDS; k++)
        if (walk->strides[k][d] != strides[k] * size)
            return false;
    return true;
}

/* The index is [n], along `dim` of the flat tensor, or has its shape. */
static struct walk walk_over(const td_tensor *flat, const td_tensor *index, const td_tensor *table,
                             int dim, bool one_dim_index)
{
    const struct td__layout *f = &flat->layout, *i = &index->layout, *t = &table->layout;
    struct walk walk = {.step = t->ndim ? t->strides[dim] : 0,
                        .dtype = f->dtype,
                        .tensors = {[FLAT] = flat, [INDEX] = index, [TABLE] = table}};
    for (int d = 0; d < f->ndim; d++) {
        int64_t size = f->shape[d];
        int64_t along = one_dim_index ? (d == dim ? i->strides[0] : 0) : i->strides[d];
        int64_t strides[OPERANDS] = {f->strides[d], along, d == dim ? 0 : t->strides[d]};
        if (size == 1 && f->ndim > 1)
            continue;
        if (walk.ndim && may_merge(&walk, walk.ndim - 1, strides, size))
            size *= walk.shape[--walk.ndim];
        walk.shape[walk.ndim] = size;
        for (int k = 0; k < OPERANDS; k++)
            walk.strides[k][walk.ndim] = strides[k];
        walk.ndim++;
    }
    if (walk.ndim == 0)
        walk.shape[walk.ndim++] = 1;
    return walk;
}

static int64_t count_lines(const struct walk *walk)
{
    int64_t count = 1;
    for (int d = 0; d < walk->ndim - 1; d++)
        count *= walk->shape[d];
    return count;
}

/* The lines `begin` to `end` - 1. */
static void walk_lines(const struct walk *walk, int64_t begin, int64_t end,
                       void (*visit)(const struct line *line))
{
    int last = walk->ndim - 1;
    int64_t at[TD_MAX_DIMS] = {0}, size = (int64_t)td_dtype_size(walk->dtype);
    struct line line = {
        .flat = td_tensor_data(walk->tensors[FLAT]),
        .table = td_tensor_data(walk->tensors[TABLE]),
        .index = td_tensor_data(walk->tensors[INDEX]),
        .n = walk->shape[last],
        .flat_stride = walk->strides[FLAT][last],
        .index_stride = walk->strides[INDEX][last],
        .table_stride = walk->strides[TABLE][last],
        .step = walk->step,
        .dtype = walk->dtype,
    };
    int64_t rest = begin;
    for (int d = last; d-- > 0; rest /= walk->shape[d]) {
        at[d] = rest % walk->shape[d];
        line.flat += at[d] * walk->strides[FLAT][d] * size;
        line.table += at[d] * walk->strides[TABLE][d] * size;
        line.index += at[d] * walk->strides[INDEX][d];
    }
    for (int64_t number = begin; number < end; number++) {
        visit(&line);
        for (int d = last; d-- > 0;) {
            int64_t steps = ++at[d] < walk->shape[d] ? 1 : 1 - walk->shape[d];
            line.flat += steps * walk->strides[FLAT][d] * size;
            line.table += steps * walk->strides[TABLE][d] * size;
            line.index += steps * walk->strides[INDEX][d];
            if (steps == 1)
                break;
            at[d] = 0;
        }
    }
}

/* ---- Checks ---------------------------------------------------------------------------------- */

static td_status refuse(const char *call, const struct td__layout *index, int64_t number,
                        int64_t value, int dim, int64_t size)
{
    return td_fail(TD_ERR_INVALID,
                   "%s: the index at %s is %" PRId64 ", but dimension %d has %" PRId64
                   " elements: indices go from 0 to %" PRId64,
                   call, td__index_text(index, number), value, dim, size, size - 1);
}

/* Each index is below the size of the table's dimension. */
static td_status check(const char *call, const td_tensor *index, const td_tensor *table, int dim)
{
    const struct td__layout *layout = &index->layout;
    const int64_t *data = td_tensor_data(index);
    int64_t size = table->layout.ndim ? table->layout.shape[dim] : 1;
    int64_t at[TD_MAX_DIMS] = {0}, inner = layout->ndim ? layout->shape[layout->ndim - 1] : 1;
    int64_t stride = layout->ndim ? layout->strides[layout->ndim - 1] : 0;
    for (int64_t number = 0; number < layout->numel; number += inner) {
        for (int64_t i = 0; i < inner; i++)
            if ((uint64_t)data[i * stride] >= (uint64_t)size)
                return refuse(call, layout, number + i, data[i * stride], dim, size);
        for (int d = layout->ndim - 2; d >= 0; d--) {
            data += layout->strides[d];
            if (++at[d] < layout->shape[d])
                break;
            data -= layout->shape[d] * layout->strides[d];
            at[d] = 0;
        }
    }
    return TD_OK;
}

/* ---- Lines ----------------------------------------------------------------------------------- */

#define GATHER(TYPE)                                                                               \
    do {                                                                                           \
        TYPE *to = (TYPE *)(void *)line->flat;                                                     \
        const TYPE *from = (const TYPE *)(const void *)line->table;                                \
        for (int64_t i = 0; i < line->n; i++)                                                      \
            to[i * line->flat_stride] =                                                            \
                from[line->index[i * line->index_stride] * line->step + i * line->table_stride];   \
    } while (0)

static void gather_line(const struct line *line)
{
    int64_t size = (int64_t)td_dtype_size(line->dtype);
    if (line->index_stride == 0 && line->flat_stride == 1 && line->table_stride == 1) {
        memcpy(line->flat, line->table + line->index[0] * line->step * size,
               (size_t)(line->n * size));
        return;
    }
    switch (size) {
    case 1:
        GATHER(uint8_t);
        break;
    case 2:
        GATHER(uint16_t);
        break;
    case 4:
        GATHER(uint32_t);
        break;
    case 8:
        GATHER(uint64_t);
        break;
    default:
        GATHER(complex double);
    }
}

/* ADDED is the sum of *to and *from. */
#define SCATTER(TYPE, ADDED)                                                                       \
    do {                                                                                           \
        for (int64_t i = 0; i < line->n; i++) {                                                    \
            TYPE *to = (TYPE *)(void *)line->table +                                               \
                       line->index[i * line->index_stride] * line->step + i * line->table_stride;  \
            const TYPE *from = (const TYPE *)(const void *)line->flat + i * line->flat_stride;     \
            *to = ADDED;                                                                           \
        }                                                                                          \
    } while (0)

static void scatter_line(const struct line *line)
{
    switch (line->dtype) {
    case TD_F32:
        SCATTER(float, *to + *from);
        break;
    case TD_F64:
        SCATTER(double, *to + *from);
        break;
    case TD_F16:
        SCATTER(uint16_t, td__f32_to_f16(td__f16_to_f32(*to) + td__f16_to_f32(*from)));
        break;
    case TD_BF16:
        SCATTER(uint16_t, td__f32_to_bf16(td__bf16_to_f32(*to) + td__bf16_to_f32(*from)));
        break;
    case TD_BOOL:
        SCATTER(uint8_t, *to || *from);
        break;
    case TD_COMPLEX64:
        SCATTER(complex float, *to + *from);
        break;
    case TD_COMPLEX128:
        SCATTER(complex double, *to + *from);
        break;
    /* Integers wrap around, so signs do not matter. */
    case TD_I8:
    case TD_U8:
        SCATTER(uint8_t, (uint8_t)(*to + *from));
        break;
    case TD_I16:
        SCATTER(uint16_t, (uint16_t)(*to + *from));
        break;
    case TD_I32:
    case TD_U32:
        SCATTER(uint32_t, *to + *from);
        break;
    case TD_I64:
    case TD_U64:
        SCATTER(uint64_t, *to + *from);
        break;
    }
}

TD__VECTOR
static void add_f32(float *restrict to, const float *restrict from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to[i] += from[i];
}

static void add_line(const struct line *line)
{
    if (line->dtype == TD_F32 && line->index_stride == 0 && line->flat_stride == 1 &&
        line->table_stride == 1)
        add_f32((float *)(void *)line->table + line->index[0] * line->step,
                (const float *)(const void *)line->flat, line->n);
    else
        scatter_line(line);
}

/* ---- The kernels ------------------------------------------------------------------------------ */

static void gather_lines(void *arg, int64_t begin, int64_t end)
{
    walk_lines(arg, begin, end, gather_line);
}

/* Indices along `dim`: one list for all lines, or each line with its own. */

static td_status take(const char *name, td_tensor *out, const td_tensor *x, int dim,
                      const td_tensor *index, bool one_list)
{
    TD_TRY(check(name, index, x, dim));
    if (out->layout.numel == 0)
        return TD_OK;
    struct walk walk = walk_over(out, index, x, dim, one_list);
    td__parallel_for(count_lines(&walk), td__grain_of(walk.shape[walk.ndim - 1]), gather_lines,
                     &walk);
    return TD_OK;
}

static td_status add(const char *name, td_tensor *out, int dim, const td_tensor *index,
                     const td_tensor *src, bool one_list)
{
    TD_TRY(check(name, index, out, dim));
    if (src->layout.numel == 0)
        return TD_OK;
    struct walk walk = walk_over(src, index, out, dim, one_list);
    walk_lines(&walk, 0, count_lines(&walk), add_line);
    return TD_OK;
}

td_status td__cpu_index_select(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index)
{
    return take("index_select", out, x, dim, index, true);
}

td_status td__cpu_index_add(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src)
{
    return add("index_add", out, dim, index, src, true);
}

td_status td__cpu_gather(td_tensor *out, const td_tensor *x, int dim, const td_tensor *index)
{
    return take("gather", out, x, dim, index, false);
}

td_status td__cpu_scatter_add(td_tensor *out, int dim, const td_tensor *index, const td_tensor *src)
{
    return add("scatter_add", out, dim, index, src, false);
}
