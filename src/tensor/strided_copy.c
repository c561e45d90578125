/* Copies between two layouts of one shape.
 *
 * The dimensions are sorted by the destination's strides, and neighbours without a gap on both sides are
 * merged. Usually few are left: a contiguous tensor is one run, a narrowed one is a run for each row, a
 * transposed one is
 *
 *     destination   a0 a1 a2 a3 ...      fastest: one dimension
 *     source        a0 .. b0 .. c0 ..    fastest: another
 *
 * Runs are memcpy(). In the last case the two dimensions are walked in square tiles, so that the cache lines
 * of both sides are used completely before they are evicted; if both are dense, cpu_transpose.h does it in
 * registers.
 *
 * Runs and planes are cut into pieces, which threads share. */
#include "tensor/cpu_transpose.h"
#include "tensor/parallel_for.h"
#include "tensor/tensor_internal.h"

#include <string.h>

#define TILE 16

struct axis {
    int64_t size;
    int64_t to; /* strides in bytes */
    int64_t from;
};

struct axes {
    struct axis at[TD_MAX_DIMS];
    int count;
};

/* Leaves out sizes of 1, and sorts by the destination's strides, the largest first. */
static struct axes sorted_axes(const struct td__layout *to, const struct td__layout *from)
{
    int64_t element = (int64_t)td_dtype_size(to->dtype);
    struct axes axes = {.count = 0};
    for (int d = 0; d < to->ndim; d++) {
        if (to->shape[d] == 1)
            continue;
        struct axis axis = {to->shape[d], to->strides[d] * element, from->strides[d] * element};
        int i = axes.count++;
        for (; i > 0 && axes.at[i - 1].to < axis.to; i--)
            axes.at[i] = axes.at[i - 1];
        axes.at[i] = axis;
    }
    return axes;
}

static struct axes merged_axes(struct axes axes)
{
    struct axes merged = {.count = 0};
    for (int i = 0; i < axes.count; i++) {
        struct axis inner = axes.at[i];
        struct axis *outer = merged.count ? &merged.at[merged.count - 1] : NULL;
        if (outer && outer->to == inner.size * inner.to && outer->from == inner.size * inner.from)
            *outer = (struct axis){outer->size * inner.size, inner.to, inner.from};
        else
            merged.at[merged.count++] = inner;
    }
    return merged;
}

/* Two axes in tiles. The size of an element is a constant where this is inlined. */
static inline __attribute__((always_inline)) void
copy_tiles(char *dst, const char *src, struct axis outer, struct axis inner, size_t element)
{
    for (int64_t o = 0; o < outer.size; o += TILE) {
        int64_t o_end = o + TILE < outer.size ? o + TILE : outer.size;
        for (int64_t i = 0; i < inner.size; i += TILE) {
            int64_t i_end = i + TILE < inner.size ? i + TILE : inner.size;
            for (int64_t a = o; a < o_end; a++) {
                char *to = dst + a * outer.to;
                const char *from = src + a * outer.from;
                for (int64_t b = i; b < i_end; b++)
                    memcpy(to + b * inner.to, from + b * inner.from, element);
            }
        }
    }
}

static void copy_plane(char *dst, const char *src, struct axis outer, struct axis inner,
                       size_t element)
{
    if (inner.to == (int64_t)element && outer.from == (int64_t)element &&
        (element == 2 || element == 4 || element == 8)) {
        td__transpose_plane(dst, outer.to, src, inner.from, outer.size, inner.size, element);
        return;
    }
    switch (element) {
    case 1:
        copy_tiles(dst, src, outer, inner, 1);
        break;
    case 2:
        copy_tiles(dst, src, outer, inner, 2);
        break;
    case 4:
        copy_tiles(dst, src, outer, inner, 4);
        break;
    case 8:
        copy_tiles(dst, src, outer, inner, 8);
        break;
    default:
        copy_tiles(dst, src, outer, inner, 16);
    }
}

/* Removes the axis along which the source is densest from `axes`; returns one of size 1 if that is the
 * innermost one, which is last. */
static struct axis take_dense(struct axes *axes)
{
    int found = axes->count - 1;
    for (int i = 0; i < axes->count; i++)
        if (axes->at[i].from < axes->at[found].from)
            found = i;
    if (found == axes->count - 1)
        return (struct axis){1, 0, 0};
    struct axis dense = axes->at[found];
    axes->count--;
    memmove(&axes->at[found], &axes->at[found + 1],
            (size_t)(axes->count - found) * sizeof axes->at[0]);
    return dense;
}

/* Moves both pointers to the next position of the first `count` axes, or, from the last one, back to the
 * first. */
static void advance(const struct axes *axes, int count, int64_t *index, char **dst,
                    const char **src)
{
    for (int i = count; i-- > 0;) {
        const struct axis *axis = &axes->at[i];
        *dst += axis->to;
        *src += axis->from;
        if (++index[i] < axis->size)
            return;
        *dst -= axis->size * axis->to;
        *src -= axis->size * axis->from;
        index[i] = 0;
    }
}

/* A copy. The last axis of `axes` is the inner one; a plane is `dense` by inner. Pieces are numbered
 * plane by plane; they are cut out of the inner axis for runs, otherwise of the dense one. */
struct copy {
    struct axes axes;
    struct axis dense;
    bool runs;
    size_t element;
    char *to;
    const char *from;
    int64_t piece;  /* of the axis that is cut */
    int64_t pieces; /* of a plane */
};

/* Piece `number` of the plane at `to`. */
static void copy_piece(const struct copy *copy, char *to, const char *from, int64_t number)
{
    struct axis inner = copy->axes.at[copy->axes.count - 1], dense = copy->dense;
    struct axis *cut = copy->runs ? &inner : &dense;
    int64_t start = number * copy->piece;
    to += start * cut->to;
    from += start * cut->from;
    cut->size = cut->size - start < copy->piece ? cut->size - start : copy->piece;
    if (copy->runs)
        memcpy(to, from, (size_t)inner.size * copy->element);
    else
        copy_plane(to, from, dense, inner, copy->element);
}

static void copy_pieces(void *arg, int64_t begin, int64_t end)
{
    const struct copy *copy = arg;
    char *to = copy->to;
    const char *from = copy->from;
    int64_t index[TD_MAX_DIMS] = {0}, plane = begin / copy->pieces;
    int outer = copy->axes.count - 1;
    for (int i = outer; i-- > 0; plane /= copy->axes.at[i].size) {
        index[i] = plane % copy->axes.at[i].size;
        to += index[i] * copy->axes.at[i].to;
        from += index[i] * copy->axes.at[i].from;
    }
    int64_t number = begin % copy->pieces;
    for (int64_t i = begin; i < end; i++) {
        copy_piece(copy, to, from, number);
        if (++number == copy->pieces) {
            number = 0;
            advance(&copy->axes, outer, index, &to, &from);
        }
    }
}

void td__layout_copy(const struct td__layout *dst_layout, void *dst,
                     const struct td__layout *src_layout, const void *src)
{
    if (dst_layout->numel == 0)
        return;
    struct copy copy = {.axes = merged_axes(sorted_axes(dst_layout, src_layout)),
                        .dense = {1, 0, 0},
                        .element = td_dtype_size(dst_layout->dtype),
                        .to = dst,
                        .from = src};
    if (copy.axes.count == 0) {
        memcpy(dst, src, copy.element);
        return;
    }
    struct axis inner = copy.axes.at[copy.axes.count - 1];
    copy.runs = inner.to == (int64_t)copy.element && inner.from == (int64_t)copy.element;
    if (!copy.runs)
        copy.dense = take_dense(&copy.axes);

    int64_t length = copy.runs ? inner.size : copy.dense.size;
    copy.piece = copy.runs ? TD__GRAIN : td__grain_of(inner.size * TILE) * TILE;
    copy.pieces = (length - 1) / copy.piece + 1;
    int64_t planes = dst_layout->numel / (inner.size * copy.dense.size);
    int64_t elements = inner.size * copy.dense.size / copy.pieces;
    td__parallel_for(planes * copy.pieces, td__grain_of(elements), copy_pieces, &copy);
}
