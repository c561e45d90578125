/* Reductions over any dimensions of a tensor with any strides.
 *
 * The axes of the operand are sorted by its strides, the largest first, and merged; each is kept or reduced.
 * The innermost one determines the order:
 *
 *     rows       it is reduced:  x x x x -> y     one result after another, along the rows
 *                                x x x x -> y     that belong to it
 *     columns    it is kept:     x x x x          a block of results at a time, eight rows in
 *                                x x x x          one go
 *                                | | | |
 *                                y y y y
 *
 * If the innermost axis is reduced but short, the loops run along a longer axis. Elements whose strides or
 * dtype the loops do not support are copied block by block into a buffer on the stack.
 *
 * Threads share blocks of results. With few results the elements of each are divided into chunks as well,
 * each with totals of its own; these are combined in order at the end. Blocks and chunks depend on the shape
 * alone, so the bits do not depend on the threads. */
#include "tensor/cpu_reduce.h"

#include "base/fail.h"
#include "tensor/cpu_convert.h"
#include "tensor/cpu_each.h"
#include "tensor/parallel_for.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK TD__REDUCE_COLUMNS /* elements that are copied, too, at a time */
#define STRETCH 4096             /* elements of a row that are reduced at a time */
#define SHORT 16
#define MANY 64     /* jobs that are enough for all threads */
#define CHUNK 32768 /* elements at least in each of several chunks */

struct axis {
    int64_t size;
    int64_t x_step; /* in bytes */
    int64_t out_step;
    bool reduced;
};

struct walk {
    int count;
    struct axis axes[TD_MAX_DIMS];
};

/* A position in a walk. */
struct position {
    int64_t index[TD_MAX_DIMS];
    const char *x;
    char *out;
};

/* The reduction, the same for all threads. */
struct reduction {
    td_reduce_kind kind; /* in the loops */
    bool mean;
    const struct td__reducer *reducer;
    td_dtype x_dtype;
    td_dtype out_dtype;
    int64_t x_size;     /* of an element */
    int64_t total_size; /* of a total */
    bool truth;         /* all and any: elements are 0 or 1 */
    bool flip;          /* u64 compared as i64: the highest bit is inverted */
    bool direct;        /* the loops read the elements in place */
    double divisor;     /* of the mean */
    const char *x;
    char *out;
    struct axis inner;   /* along which the loops run */
    struct axis along;   /* of the results of a block: it is `inner` for columns */
    struct walk kept;    /* the axes that are neither of the two */
    struct walk reduced; /* the same */
    int64_t stretch;     /* elements of a row that are reduced at a time */
    int64_t stretches;   /* of a row; 1 for columns */
    int64_t items;       /* stretches or, for columns, rows that belong to a result */
    int64_t block;       /* results at a time */
    int64_t blocks;      /* along the axis `along` */
    int64_t chunks;      /* of the items */
    char *partial;       /* the totals of each block and chunk, where there are several chunks */
};

/* A thread's buffers. */
struct scratch {
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

/* The axis that the loops run along. */
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
    r->along = r->inner;
    if (r->inner.reduced)
        r->along = r->kept.count ? r->kept.axes[--r->kept.count] : (struct axis){1, 0, 0, false};
}

static int64_t positions(const struct walk *walk)
{
    int64_t count = 1;
    for (int i = 0; i < walk->count; i++)
        count *= walk->axes[i].size;
    return count;
}

/* Moves from the first position to number `at`. */
static void seek(const struct walk *walk, struct position *position, int64_t at)
{
    for (int i = walk->count; i-- > 0; at /= walk->axes[i].size) {
        position->index[i] = at % walk->axes[i].size;
        position->x += position->index[i] * walk->axes[i].x_step;
        position->out += position->index[i] * walk->axes[i].out_step;
    }
}

/* Moves to the next position, or, from the last one, back to the first. */
static void advance(const struct walk *walk, struct position *position)
{
    for (int i = walk->count; i-- > 0;) {
        const struct axis *axis = &walk->axes[i];
        position->x += axis->x_step;
        if (++position->index[i] < axis->size)
            return;
        position->x -= axis->size * axis->x_step;
        position->index[i] = 0;
    }
}

/* Divides the work into blocks and chunks. */
static void cut(struct reduction *r)
{
    bool rows = r->inner.reduced;
    r->direct = r->inner.x_step == r->x_size && r->x_dtype == r->reducer->dtype && !r->truth &&
                !r->flip;
    r->stretch = r->direct ? STRETCH : BLOCK;
    r->stretches = rows && r->inner.size ? (r->inner.size - 1) / r->stretch + 1 : 1;
    int64_t length = positions(&r->reduced) * (rows ? r->inner.size : 1); /* of each result */
    r->items = length ? positions(&r->reduced) * r->stretches : 0;
    int64_t most = rows ? td__grain_of(length) : BLOCK;
    r->block = most < BLOCK ? most : BLOCK;
    r->blocks = (r->along.size + r->block - 1) / r->block;
    int64_t count = positions(&r->kept) * r->blocks;
    int64_t width = r->along.size < r->block ? r->along.size : r->block;
    r->chunks = count < MANY && width * length >= 2 * CHUNK ? width * length / CHUNK : 1;
    int64_t enough = (MANY - 1) / count + 1;
    r->chunks = r->chunks < enough ? r->chunks : enough;
    r->chunks = r->chunks < r->items ? r->chunks : r->items < 1 ? 1 : r->items;
}

/* ---- Elements ---------------------------------------------------------------------------------- */

static void flip(void *elements, int64_t count)
{
    uint64_t *x = elements;
    for (int64_t i = 0; i < count; i++)
        x[i] ^= UINT64_C(1) << 63;
}

/* `count` elements from x on along the inner axis, in the dtype of the loops. */
static const void *fetch(const struct reduction *r, const char *x, int64_t count, void *buffer)
{
    if (r->direct)
        return x;
    bool plain = r->inner.x_step == r->x_size;
    bool same = r->x_dtype == r->reducer->dtype && !r->truth;
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

static void start(const struct reduction *r, char *totals, int64_t count)
{
    char one[16] = {0};
    double real = r->kind == TD_REDUCE_KIND_PROD  ? 1
                  : r->kind == TD_REDUCE_KIND_MAX ? -INFINITY
                  : r->kind == TD_REDUCE_KIND_MIN ? INFINITY
                                              : 0;
    int64_t whole = (int64_t)(r->kind == TD_REDUCE_KIND_PROD);
    if (r->kind == TD_REDUCE_KIND_MAX)
        whole = r->truth ? 0 : INT64_MIN;
    if (r->kind == TD_REDUCE_KIND_MIN)
        whole = r->truth ? 1 : INT64_MAX;
    memcpy(one, r->reducer->total == TD_I64 ? (void *)&whole : (void *)&real, 8);
    size_t size = td_dtype_size(r->reducer->total);
    td__copy_steps(totals, (int64_t)size, one, 0, count, size);
}

/* Converts the totals and stores them. */
static void finish(const struct reduction *r, char *totals, char *out, int64_t count)
{
    _Alignas(64) char converted[BLOCK * 16];
    if (r->mean)
        for (int64_t i = 0; i < count; i++)
            ((double *)(void *)totals)[i] /= r->divisor;
    if (r->flip)
        flip(totals, count);
    size_t size = td_dtype_size(r->out_dtype);
    td__convert(converted, r->out_dtype, totals, r->reducer->total, count);
    td__copy_steps(out, r->along.out_step, converted, (int64_t)size, count, size);
}

/* ---- Rows, and columns ------------------------------------------------------------------------- */

/* One result: the items `from` to `to` - 1 of its rows, which begin at x. */
static void reduce_row(const struct reduction *r, struct scratch *scratch, const char *x,
                       char *total, int64_t from, int64_t to)
{
    struct position position = {.x = x};
    seek(&r->reduced, &position, from / r->stretches);
    int64_t at = from % r->stretches * r->stretch;
    for (int64_t item = from; item < to; item++) {
        int64_t left = r->inner.size - at;
        int64_t count = left < r->stretch ? left : r->stretch;
        const void *row = fetch(r, position.x + at * r->inner.x_step, count, scratch->rows[0]);
        r->reducer->row(r->kind, total, row, count);
        at += r->stretch;
        if (at >= r->inner.size) {
            at = 0;
            advance(&r->reduced, &position);
        }
    }
}

/* A block of results side by side: the items `from` to `to` - 1, rows of `count` elements. */
static void reduce_columns(const struct reduction *r, struct scratch *scratch, const char *x,
                           int64_t count, int64_t from, int64_t to)
{
    struct position position = {.x = x};
    seek(&r->reduced, &position, from);
    const void *rows[TD__REDUCE_ROWS];
    int n = 0;
    for (int64_t item = from; item < to; item++) {
        rows[n] = fetch(r, position.x, count, scratch->rows[n]);
        n++;
        advance(&r->reduced, &position);
        if (n == TD__REDUCE_ROWS || item == to - 1) {
            r->reducer->columns(r->kind, scratch->totals, rows, n, count);
            n = 0;
        }
    }
}

static void reduce_block(const struct reduction *r, struct scratch *scratch, const char *x,
                         int64_t count, int64_t from, int64_t to)
{
    if (r->inner.reduced && r->direct && r->items == 1) /* a result is one stretch */
        for (int64_t i = 0; i < count; i++)
            r->reducer->row(r->kind, scratch->totals + i * r->total_size, x + i * r->along.x_step,
                            r->inner.size);
    else if (r->inner.reduced)
        for (int64_t i = 0; i < count; i++)
            reduce_row(r, scratch, x + i * r->along.x_step, scratch->totals + i * r->total_size,
                       from, to);
    else
        reduce_columns(r, scratch, x, count, from, to);
}

/* ---- Jobs: a block of results and a chunk of what is reduced to them ---------------------------- */

/* Where block `number` of the results begins; *count gets their number. */
static struct position position_of_block(const struct reduction *r, int64_t number, int64_t *count)
{
    struct position position = {.x = r->x, .out = r->out};
    seek(&r->kept, &position, number / r->blocks);
    int64_t at = number % r->blocks * r->block, left = r->along.size - at;
    position.x += at * r->along.x_step;
    position.out += at * r->along.out_step;
    *count = left < r->block ? left : r->block;
    return position;
}

static char *partial_of(const struct reduction *r, int64_t job)
{
    return r->partial + job * r->block * r->total_size;
}

static void run_jobs(void *arg, int64_t begin, int64_t end)
{
    const struct reduction *r = arg;
    struct scratch scratch;
    for (int64_t job = begin; job < end; job++) {
        int64_t count, chunk = job % r->chunks;
        int64_t from = r->items * chunk / r->chunks, to = r->items * (chunk + 1) / r->chunks;
        struct position position = position_of_block(r, job / r->chunks, &count);
        start(r, scratch.totals, count);
        if (from < to) /* otherwise the neutral totals stay */
            reduce_block(r, &scratch, position.x, count, from, to);
        if (r->chunks > 1)
            memcpy(partial_of(r, job), scratch.totals, (size_t)(count * r->total_size));
        else
            finish(r, scratch.totals, position.out, count);
    }
}

/* Combines the totals of all chunks of a block. */
static void join_chunks(const struct reduction *r, int64_t number)
{
    const struct td__reducer *reducer = r->reducer == &td__reducer_f32 ? &td__reducer_f64
                                                                       : r->reducer;
    td_reduce_kind kind = r->kind == TD_REDUCE_KIND_SQUARES ? TD_REDUCE_KIND_SUM : r->kind;
    _Alignas(64) char totals[BLOCK * 16];
    int64_t count;
    struct position position = position_of_block(r, number, &count);
    start(r, totals, count);
    for (int64_t chunk = 0; chunk < r->chunks; chunk += TD__REDUCE_ROWS) {
        const void *rows[TD__REDUCE_ROWS];
        int n = 0;
        for (; n < TD__REDUCE_ROWS && chunk + n < r->chunks; n++)
            rows[n] = partial_of(r, number * r->chunks + chunk + n);
        reducer->columns(kind, totals, rows, n, count);
    }
    finish(r, totals, position.out, count);
}

static td_status run(struct reduction *r)
{
    int64_t blocks = positions(&r->kept) * r->blocks, jobs = blocks * r->chunks;
    if (r->chunks > 1) {
        r->partial = malloc((size_t)(jobs * r->block * r->total_size));
        if (!r->partial)
            return td__fail_nomem("reduce");
    }
    int64_t width = r->along.size < r->block ? r->along.size : r->block;
    int64_t elements = r->items * width * (r->inner.reduced ? r->stretch : 1) / r->chunks;
    td__parallel_for(jobs, td__grain_of(elements), run_jobs, r);
    for (int64_t number = 0; number < blocks && r->chunks > 1; number++)
        join_chunks(r, number);
    free(r->partial);
    return TD_OK;
}

/* ---- The kernel -------------------------------------------------------------------------------- */

static const char *const names[] = {
    [TD_REDUCE_KIND_SUM] = "sum", [TD_REDUCE_KIND_MEAN] = "mean",    [TD_REDUCE_KIND_PROD] = "prod",
    [TD_REDUCE_KIND_MAX] = "max", [TD_REDUCE_KIND_MIN] = "min",      [TD_REDUCE_KIND_ALL] = "all",
    [TD_REDUCE_KIND_ANY] = "any", [TD_REDUCE_KIND_SQUARES] = "norm",
};

static bool has_reduction(td_reduce_kind kind, td_dtype dtype)
{
    switch (kind) {
    case TD_REDUCE_KIND_MEAN:
    case TD_REDUCE_KIND_SQUARES:
        return dtype <= TD_BF16;
    case TD_REDUCE_KIND_MAX:
    case TD_REDUCE_KIND_MIN:
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

static td_reduce_kind kind_of_loop(td_reduce_kind kind)
{
    switch (kind) {
    case TD_REDUCE_KIND_MEAN:
        return TD_REDUCE_KIND_SUM;
    case TD_REDUCE_KIND_ALL:
        return TD_REDUCE_KIND_MIN;
    case TD_REDUCE_KIND_ANY:
        return TD_REDUCE_KIND_MAX;
    default:
        return kind;
    }
}

td_status td__cpu_reduce(td_reduce_kind kind, td_tensor *out, const td_tensor *x,
                         unsigned dims)
{
    td_dtype dtype = x->layout.dtype;
    if (!has_reduction(kind, dtype))
        return td_fail(TD_ERR_UNSUPPORTED, "%s: not supported for %s", names[kind],
                       td_dtype_name(dtype));
    if (out->layout.numel == 0)
        return TD_OK;
    struct reduction r = {
        .kind = kind_of_loop(kind),
        .mean = kind == TD_REDUCE_KIND_MEAN,
        .truth = kind == TD_REDUCE_KIND_ALL || kind == TD_REDUCE_KIND_ANY,
        .flip = dtype == TD_U64 && (kind == TD_REDUCE_KIND_MAX || kind == TD_REDUCE_KIND_MIN),
        .x_dtype = dtype,
        .out_dtype = out->layout.dtype,
        .x_size = (int64_t)td_dtype_size(dtype),
        .divisor = (double)x->layout.numel / (double)out->layout.numel,
        .x = td_tensor_data(x),
        .out = td_tensor_data(out),
    };
    r.reducer = reducer_of(dtype, r.truth);
    r.total_size = (int64_t)td_dtype_size(r.reducer->total);
    struct walk axes = axes_of(out, x, dims);
    split_axes(&r, &axes);
    cut(&r);
    return run(&r);
}
