/* argmax and argmin along a dimension: the first of equal elements, and a NaN before all others.
 *
 * Elements are converted to f32, f64 or i64, which keep their order. Along a contiguous dimension a reduction
 * finds the greatest element first, then its index is searched; along another dimension the columns of a block
 * are compared side by side. Threads share the results. */
#include "tensor/cpu_reduce.h"

#include "base/fail.h"
#include "tensor/cpu_convert.h"
#include "tensor/cpu_each.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#include <string.h>

#define BLOCK 256

struct axis {
    int64_t size;
    int64_t x_step; /* in bytes */
    int64_t out_step;
};

struct search {
    bool least;
    td_dtype dtype;  /* of x */
    td_dtype loop;   /* in the loops */
    int64_t element; /* bytes of x's */
    struct axis along;
    int count; /* of the other axes */
    struct axis axes[TD_MAX_DIMS];
    const char *x;
    char *out;
    int64_t blocks; /* of columns, along the last of the other axes */
};

/* ---- The loops --------------------------------------------------------------------------------- */

/* Whether x replaces the best so far: it is better, or the first NaN. */
#define BETTER(x, best) (((x) > (best)) | (((x) != (x)) & ((best) == (best))))

/* Compares one row of columns: a better element replaces the best and its index. */
#define COMPARE(T, sign)                                                                           \
    do {                                                                                           \
        T *restrict b = best;                                                                      \
        const T *restrict a = x;                                                                   \
        for (int64_t i = 0; i < count; i++) {                                                      \
            bool better = first | BETTER(sign a[i], sign b[i]);                                    \
            b[i] = better ? a[i] : b[i];                                                           \
            indices[i] = better ? at : indices[i];                                                 \
        }                                                                                          \
    } while (0)

/* For integers the least is the greatest of their complements, which does not overflow. */
static TD__VECTOR void compare(const struct search *search, void *best, int64_t *restrict indices,
                               const void *x, int64_t at, int64_t count)
{
    bool first = at == 0;
    switch (search->loop) {
    case TD_F32:
        if (search->least)
            COMPARE(float, -);
        else
            COMPARE(float, +);
        break;
    case TD_F64:
        if (search->least)
            COMPARE(double, -);
        else
            COMPARE(double, +);
        break;
    default:
        if (search->least)
            COMPARE(int64_t, ~);
        else
            COMPARE(int64_t, +);
    }
}

/* The first index of `value`, or -1; a NaN finds a NaN. A first loop checks whether it occurs at all, since
 * a loop that may end early is not vectorised. */
#define FIND(T)                                                                                    \
    do {                                                                                           \
        const T *a = x;                                                                            \
        T wanted = *(const T *)value;                                                              \
        int is_nan = wanted != wanted, found = 0;                                                  \
        for (int64_t i = 0; i < count; i++)                                                        \
            found |= (a[i] == wanted) | (is_nan & (a[i] != a[i]));                                 \
        for (int64_t i = 0; found && i < count; i++)                                               \
            if (a[i] == wanted || (is_nan && a[i] != a[i]))                                        \
                return i;                                                                          \
        return -1;                                                                                 \
    } while (0)

static TD__VECTOR int64_t find(td_dtype dtype, const void *x, const void *value, int64_t count)
{
    if (dtype == TD_F32)
        FIND(float);
    if (dtype == TD_F64)
        FIND(double);
    FIND(int64_t);
}

/* ---- Elements ---------------------------------------------------------------------------------- */

/* `count` elements, `step` bytes apart, in the dtype of the loops. */
static const void *fetch(const struct search *search, const char *x, int64_t step, int64_t count,
                         void *buffer)
{
    if (step == search->element && search->dtype == search->loop)
        return x;
    _Alignas(64) char strided[BLOCK * 8];
    const void *from = x;
    if (step != search->element) {
        td__copy_steps(strided, search->element, x, step, count, (size_t)search->element);
        from = strided;
    }
    td__convert(buffer, search->loop, from, search->dtype, count);
    if (search->dtype == TD_U64)
        for (int64_t i = 0; i < count; i++)
            ((uint64_t *)buffer)[i] ^= UINT64_C(1) << 63;
    return buffer;
}

/* ---- Along rows, and along columns ------------------------------------------------------------- */

static int64_t place_in_row(const struct search *search, const char *x)
{
    _Alignas(64) char buffer[BLOCK * 8];
    int64_t step = search->along.x_step, size = search->along.size;
    const struct td__reducer *reducer = search->loop == TD_F32   ? &td__reducer_f32
                                        : search->loop == TD_F64 ? &td__reducer_f64
                                                                 : &td__reducer_i64;
    td_reduce_kind kind = search->least ? TD_REDUCE_KIND_MIN : TD_REDUCE_KIND_MAX;
    union {
        double f64;
        int64_t i64;
        char bytes[8];
    } total;
    td__convert(&total, reducer->total, fetch(search, x, step, 1, buffer), search->loop, 1);
    for (int64_t at = 0; at < size; at += BLOCK) {
        int64_t count = size - at < BLOCK ? size - at : BLOCK;
        reducer->row(kind, &total, fetch(search, x + at * step, step, count, buffer), count);
    }

    char value[8];
    td__convert(value, search->loop, &total, reducer->total, 1);
    for (int64_t at = 0; at < size; at += BLOCK) {
        int64_t count = size - at < BLOCK ? size - at : BLOCK;
        const void *row = fetch(search, x + at * step, step, count, buffer);
        int64_t found = find(search->loop, row, value, count);
        if (found >= 0)
            return at + found;
    }
    return 0;
}

static void places_in_columns(const struct search *search, const struct axis *columns,
                              const char *x, char *out, int64_t count)
{
    _Alignas(64) char best[BLOCK * 8], buffer[BLOCK * 8];
    int64_t indices[BLOCK];
    memset(best, 0, sizeof best);
    for (int64_t at = 0; at < search->along.size; at++) {
        const char *row = x + at * search->along.x_step;
        compare(search, best, indices, fetch(search, row, columns->x_step, count, buffer), at,
                count);
    }
    td__copy_steps(out, columns->out_step, indices, sizeof *indices, count, sizeof *indices);
}

/* Moves both to position `at` of the first `count` axes. */
static void seek(const struct search *search, int count, int64_t at, const char **x, char **out)
{
    for (int i = count; i-- > 0; at /= search->axes[i].size) {
        int64_t index = at % search->axes[i].size;
        *x += index * search->axes[i].x_step;
        *out += index * search->axes[i].out_step;
    }
}

static void search_rows(void *arg, int64_t begin, int64_t end)
{
    const struct search *search = arg;
    for (int64_t row = begin; row < end; row++) {
        const char *x = search->x;
        char *out = search->out;
        seek(search, search->count, row, &x, &out);
        *(int64_t *)(void *)out = place_in_row(search, x);
    }
}

static void search_columns(void *arg, int64_t begin, int64_t end)
{
    const struct search *search = arg;
    const struct axis *columns = &search->axes[search->count - 1];
    for (int64_t block = begin; block < end; block++) {
        const char *x = search->x;
        char *out = search->out;
        seek(search, search->count - 1, block / search->blocks, &x, &out);
        int64_t at = block % search->blocks * BLOCK, left = columns->size - at;
        places_in_columns(search, columns, x + at * columns->x_step, out + at * columns->out_step,
                          left < BLOCK ? left : BLOCK);
    }
}

/* ---- The kernel -------------------------------------------------------------------------------- */

/* The other axes, by x's strides, the largest first. */
static void add_axis(struct search *search, struct axis axis)
{
    int at = search->count++;
    for (; at > 0 && search->axes[at - 1].x_step < axis.x_step; at--)
        search->axes[at] = search->axes[at - 1];
    search->axes[at] = axis;
}

static td_dtype loop_dtype(td_dtype dtype)
{
    td_dtype compute = td__compute_dtype(dtype);
    return compute == TD_F32 || compute == TD_F64 ? compute : TD_I64;
}

td_status td__cpu_arg_reduce(bool least, td_tensor *out, const td_tensor *x, int dim)
{
    td_dtype dtype = x->layout.dtype;
    if (dtype >= TD_COMPLEX64)
        return td_fail(TD_ERR_UNSUPPORTED, "%s: not supported for %s", least ? "argmin" : "argmax",
                       td_dtype_name(dtype));
    if (out->layout.numel == 0)
        return TD_OK;
    struct search search = {.least = least, .dtype = dtype, .loop = loop_dtype(dtype)};
    search.element = (int64_t)td_dtype_size(dtype);
    search.along.size = 1; /* of a tensor without dimensions */
    int64_t index = sizeof(int64_t);
    for (int d = 0; d < x->layout.ndim; d++) {
        struct axis axis = {x->layout.shape[d], x->layout.strides[d] * search.element,
                            out->layout.strides[d] * index};
        if (d == dim)
            search.along = axis;
        else if (axis.size > 1)
            add_axis(&search, axis);
    }
    /* Short rows are faster side by side, although their elements are then gathered. */
    const struct axis *last = search.count ? &search.axes[search.count - 1] : NULL;
    bool by_columns = last && (last->x_step < search.along.x_step || search.along.size < 16);
    search.x = td_tensor_data(x);
    search.out = td_tensor_data(out);
    search.blocks = by_columns ? (last->size + BLOCK - 1) / BLOCK : 0;
    int64_t size = search.along.size, results = out->layout.numel;
    if (by_columns)
        td__parallel_for(results / last->size * search.blocks,
                         td__grain_of(size * (last->size < BLOCK ? last->size : BLOCK)),
                         search_columns, &search);
    else
        td__parallel_for(results, td__grain_of(size), search_rows, &search);
    return TD_OK;
}
