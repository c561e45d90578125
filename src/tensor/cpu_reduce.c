/* Reductions over any dimensions of a tensor with any strides.
 *
 * The axes of the operand are sorted by its strides, the largest first, and merged; each is kept or
 * reduced. The innermost one decides the way:
 *
 *     rows       it is reduced:  x x x x -> y     one result after another, along the rows
 *                                x x x x -> y     that belong to it
 *     columns    it is kept:     x x x x          a block of results at a time, eight rows in
 *                                x x x x          one go
 *                                | | | |
 *                                y y y y
 *
 * Where the innermost axis is reduced but short, the columns along a longer axis are the better
 * rows. What the loops cannot take as it is, for its strides or its dtype, is copied into a buffer
 * block by block. All lives on the stack. */
#include "tensor/cpu_reduce.h"

#include "base/fail.h"
#include "tensor/cpu_convert.h"
#include "tensor/cpu_each.h"

#include <math.h>
#include <string.h>

#define BLOCK TD__REDUCE_COLUMNS /* elements that are copied, too, at a time */
#define STRETCH 4096             /* elements of a row that are reduced at a time */
#define SHORT 16

struct axis {
    int64_t size;
    int64_t x_step; /* in bytes */
    int64_t out_step;
    bool reduced;
};

/* Some axes, and where in them one is. */
struct walk {
    int count;
    struct axis axes[TD_MAX_DIMS];
    int64_t index[TD_MAX_DIMS];
};

struct reduction {
    enum td__reduce_kind kind; /* as the loops see it */
    bool mean;
    const struct td__reducer *reducer;
    td_dtype x_dtype;
    td_dtype out_dtype;
    int64_t x_size; /* of an element */
    bool truth;     /* all and any: elements are 0 or 1 */
    bool flip;      /* the order of u64 in i64: the highest bit is turned over */
    double divisor; /* of the mean */
    struct axis inner;
    struct walk kept;
    struct walk reduced;
    _Alignas(64) char totals[BLOCK * 16];
    _Alignas(64) char rows[TD__REDUCE_ROWS][BLOCK * 16];
};

/* ---- Axes -------------------------------------------------------------------------------------- */

static void add_axis(struct walk *walk, struct axis axis)
{
    int at = walk->count++;
    for (; at > 0 && walk->axes[at - 1].x_step < axis.x_step; at--)
        walk->axes[at] = walk->axes[at - 1];
    walk->axes[at] = axis;
}

static struct walk axes_of(const td_tensor *out, const td_tensor *x, unsigned dims)
{
    int64_t x_size = (int64_t)td_dtype_size(x->layout.dtype);
    int64_t out_size = (int64_t)td_dtype_size(out->layout.dtype);
    struct walk sorted = {.count = 0}, merged = {.count = 0};
    for (int d = 0; d < x->layout.ndim; d++) {
        bool reduced = dims >> d & 1;
        if (x->layout.shape[d] != 1)
            add_axis(&sorted,
                     (struct axis){x->layout.shape[d], x->layout.strides[d] * x_size,
                                   reduced ? 0 : out->layout.strides[d] * out_size, reduced});
    }
    for (int i = 0; i < sorted.count; i++) {
        struct axis inner = sorted.axes[i];
        struct axis *outer = merged.count ? &merged.axes[merged.count - 1] : NULL;
        if (outer && outer->reduced == inner.reduced &&
            outer->x_step == inner.size * inner.x_step &&
            outer->out_step == inner.size * inner.out_step)
            *outer = (struct axis){outer->size * inner.size, inner.x_step, inner.out_step,
                                   inner.reduced};
        else
            merged.axes[merged.count++] = inner;
    }
    return merged;
}

/* Which axis the loops run along. */
static int inner_axis(const struct walk *axes)
{
    int last = axes->count - 1;
    if (last < 0 || !axes->axes[last].reduced || axes->axes[last].size >= SHORT)
        return last;
    for (int i = last; i >= 0; i--)
        if (!axes->axes[i].reduced && axes->axes[i].size > axes->axes[last].size)
            return i;
    return last;
}

static void split_axes(struct reduction *r, const struct walk *axes)
{
    int inner = inner_axis(axes);
    r->kept.count = r->reduced.count = 0;
    r->inner = inner < 0 ? (struct axis){1, r->x_size, 0, true} : axes->axes[inner];
    for (int i = 0; i < axes->count; i++) {
        struct walk *walk = axes->axes[i].reduced ? &r->reduced : &r->kept;
        if (i != inner)
            walk->axes[walk->count++] = axes->axes[i];
    }
    memset(r->kept.index, 0, sizeof r->kept.index);
    memset(r->reduced.index, 0, sizeof r->reduced.index);
}

/* Moves to the next position; false, and back at the first, behind the last one. */
static bool advance(struct walk *walk, const char **x, char **out)
{
    for (int i = walk->count; i-- > 0;) {
        const struct axis *axis = &walk->axes[i];
        *x += axis->x_step;
        *out += axis->out_step;
        if (++walk->index[i] < axis->size)
            return true;
        *x -= axis->size * axis->x_step;
        *out -= axis->size * axis->out_step;
        walk->index[i] = 0;
    }
    return false;
}

static bool is_empty(const struct walk *walk)
{
    for (int i = 0; i < walk->count; i++)
        if (walk->axes[i].size == 0)
            return true;
    return false;
}

/* ---- Elements ---------------------------------------------------------------------------------- */

static void flip(void *elements, int64_t count)
{
    uint64_t *x = elements;
    for (int64_t i = 0; i < count; i++)
        x[i] ^= UINT64_C(1) << 63;
}

/* `count` elements from x on along the inner axis, as the loops want to see them. */
static const void *fetch(const struct reduction *r, const char *x, int64_t count, void *buffer)
{
    bool plain = r->inner.x_step == r->x_size;
    bool same = r->x_dtype == r->reducer->dtype && !r->truth;
    if (plain && same && !r->flip)
        return x;
    _Alignas(64) char strided[BLOCK * 16], truth[BLOCK];
    const void *from = x;
    td_dtype dtype = r->x_dtype;
    if (!plain) {
        td__copy_steps(same ? buffer : strided, r->x_size, x, r->inner.x_step, count,
                       (size_t)r->x_size);
        from = same ? buffer : strided;
    }
    if (r->truth) {
        td__convert(truth, TD_BOOL, from, dtype, count);
        from = truth;
        dtype = TD_BOOL;
    }
    if (from != buffer)
        td__convert(buffer, r->reducer->dtype, from, dtype, count);
    if (r->flip)
        flip(buffer, count);
    return buffer;
}

static void start(const struct reduction *r, int64_t count)
{
    char one[16] = {0};
    double real = r->kind == TD__REDUCE_PROD  ? 1
                  : r->kind == TD__REDUCE_MAX ? -INFINITY
                  : r->kind == TD__REDUCE_MIN ? INFINITY
                                              : 0;
    int64_t whole = (int64_t)(r->kind == TD__REDUCE_PROD);
    if (r->kind == TD__REDUCE_MAX)
        whole = r->truth ? 0 : INT64_MIN;
    if (r->kind == TD__REDUCE_MIN)
        whole = r->truth ? 1 : INT64_MAX;
    memcpy(one, r->reducer->total == TD_I64 ? (void *)&whole : (void *)&real, 8);
    size_t size = td_dtype_size(r->reducer->total);
    td__copy_steps((char *)r->totals, (int64_t)size, one, 0, count, size);
}

/* Puts the totals into their places. */
static void finish(struct reduction *r, char *out, int64_t count, int64_t step)
{
    _Alignas(64) char converted[BLOCK * 16];
    if (r->mean)
        for (int64_t i = 0; i < count; i++)
            ((double *)(void *)r->totals)[i] /= r->divisor;
    if (r->flip)
        flip(r->totals, count);
    size_t size = td_dtype_size(r->out_dtype);
    td__convert(converted, r->out_dtype, r->totals, r->reducer->total, count);
    td__copy_steps(out, step, converted, (int64_t)size, count, size);
}

/* ---- The two ways ------------------------------------------------------------------------------ */

/* One result: all rows that belong to it. */
static void reduce_row(struct reduction *r, const char *x, char *total)
{
    bool direct = r->inner.x_step == r->x_size && r->x_dtype == r->reducer->dtype && !r->truth &&
                  !r->flip;
    int64_t stretch = direct ? STRETCH : BLOCK;
    char *nowhere = NULL;
    do {
        for (int64_t at = 0; at < r->inner.size; at += stretch) {
            int64_t left = r->inner.size - at;
            int64_t count = left < stretch ? left : stretch;
            const void *row = fetch(r, x + at * r->inner.x_step, count, r->rows[0]);
            r->reducer->row(r->kind, total, row, count);
        }
    } while (advance(&r->reduced, &x, &nowhere));
}

/* All results, a run of them along the last axis that is kept at a time. */
static void reduce_rows(struct reduction *r, const char *x, char *out)
{
    struct axis run = {1, 0, 0, false};
    if (r->kept.count)
        run = r->kept.axes[--r->kept.count];
    int64_t size = (int64_t)td_dtype_size(r->reducer->total);
    bool empty = is_empty(&r->reduced);
    do {
        for (int64_t at = 0; at < run.size; at += BLOCK) {
            int64_t count = run.size - at < BLOCK ? run.size - at : BLOCK;
            start(r, count);
            for (int64_t i = 0; i < count && !empty; i++)
                reduce_row(r, x + (at + i) * run.x_step, r->totals + i * size);
            finish(r, out + at * run.out_step, count, run.out_step);
        }
    } while (advance(&r->kept, &x, &out));
}

static void reduce_columns(struct reduction *r, const char *x, char *out, int64_t count)
{
    start(r, count);
    const void *rows[TD__REDUCE_ROWS];
    int n = 0;
    bool more = !is_empty(&r->reduced);
    while (more) {
        rows[n] = fetch(r, x, count, r->rows[n]);
        n++;
        more = advance(&r->reduced, &x, &out);
        if (n == TD__REDUCE_ROWS || !more) {
            r->reducer->columns(r->kind, r->totals, rows, n, count);
            n = 0;
        }
    }
    finish(r, out, count, r->inner.out_step);
}

static void reduce_all_columns(struct reduction *r, const char *x, char *out)
{
    do {
        for (int64_t at = 0; at < r->inner.size; at += BLOCK) {
            int64_t left = r->inner.size - at;
            reduce_columns(r, x + at * r->inner.x_step, out + at * r->inner.out_step,
                           left < BLOCK ? left : BLOCK);
        }
    } while (advance(&r->kept, &x, &out));
}

/* ---- The kernel -------------------------------------------------------------------------------- */

static const char *const names[] = {
    [TD__REDUCE_SUM] = "sum", [TD__REDUCE_MEAN] = "mean",    [TD__REDUCE_PROD] = "prod",
    [TD__REDUCE_MAX] = "max", [TD__REDUCE_MIN] = "min",      [TD__REDUCE_ALL] = "all",
    [TD__REDUCE_ANY] = "any", [TD__REDUCE_SQUARES] = "norm",
};

static bool has_reduction(enum td__reduce_kind kind, td_dtype dtype)
{
    switch (kind) {
    case TD__REDUCE_MEAN:
    case TD__REDUCE_SQUARES:
        return dtype <= TD_BF16;
    case TD__REDUCE_MAX:
    case TD__REDUCE_MIN:
        return dtype < TD_COMPLEX64;
    default:
        return true;
    }
}

static const struct td__reducer *reducer_of(td_dtype dtype, bool truth)
{
    if (truth)
        return &td__reducer_i64;
    switch (td__compute_dtype(dtype)) {
    case TD_F32:
        return &td__reducer_f32;
    case TD_F64:
        return &td__reducer_f64;
    case TD_COMPLEX64:
    case TD_COMPLEX128:
        return &td__reducer_complex128;
    default:
        return &td__reducer_i64;
    }
}

static enum td__reduce_kind kind_of_loop(enum td__reduce_kind kind)
{
    switch (kind) {
    case TD__REDUCE_MEAN:
        return TD__REDUCE_SUM;
    case TD__REDUCE_ALL:
        return TD__REDUCE_MIN;
    case TD__REDUCE_ANY:
        return TD__REDUCE_MAX;
    default:
        return kind;
    }
}

td_status td__cpu_reduce(enum td__reduce_kind kind, td_tensor *out, const td_tensor *x,
                         unsigned dims)
{
    td_dtype dtype = x->layout.dtype;
    if (!has_reduction(kind, dtype))
        return td__fail(TD_ERR_UNSUPPORTED, "%s: there is none for %s", names[kind],
                        td_dtype_name(dtype));
    if (out->layout.numel == 0)
        return TD_OK;
    struct reduction r;
    r.kind = kind_of_loop(kind);
    r.mean = kind == TD__REDUCE_MEAN;
    r.truth = kind == TD__REDUCE_ALL || kind == TD__REDUCE_ANY;
    r.flip = dtype == TD_U64 && (kind == TD__REDUCE_MAX || kind == TD__REDUCE_MIN);
    r.reducer = reducer_of(dtype, r.truth);
    r.x_dtype = dtype;
    r.out_dtype = out->layout.dtype;
    r.x_size = (int64_t)td_dtype_size(dtype);
    r.divisor = (double)x->layout.numel / (double)out->layout.numel;
    struct walk axes = axes_of(out, x, dims);
    split_axes(&r, &axes);
    if (r.inner.reduced)
        reduce_rows(&r, td_tensor_data(x), td_tensor_data(out));
    else
        reduce_all_columns(&r, td_tensor_data(x), td_tensor_data(out));
    return TD_OK;
}
