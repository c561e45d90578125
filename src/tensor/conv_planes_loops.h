/* The loops of cpu_conv_planes.c, for one type of elements: the includer defines REAL, INTEGER, LANES and
 * NAMED(). Vectors have 64 bytes for every instruction set, so that sums have the same order. */

typedef REAL NAMED(lanes) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef REAL NAMED(half) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAMED(mask) __attribute__((vector_size(64)));

#define VECTOR NAMED(lanes)

/* Before a loop with a constant count: only when it is fully unrolled are the sums in registers. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* `count` elements, at most 2 LANES, to a row of the result. The last piece overlaps the one before. */
TD__INLINE void NAMED(copy_few)(REAL *to, const REAL *from, int64_t count)
{
    if (count >= LANES) {
        const VECTOR last = *(const VECTOR *)(from + count - LANES);
        *(VECTOR *)to = *(const VECTOR *)from;
        *(VECTOR *)(to + count - LANES) = last;
    } else if (count >= LANES / 2) {
        const NAMED(half) last = *(const NAMED(half) *)(from + count - LANES / 2);
        *(NAMED(half) *)to = *(const NAMED(half) *)from;
        *(NAMED(half) *)(to + count - LANES / 2) = last;
    } else {
        for (int64_t i = 0; i < count; i++)
            to[i] = from[i];
    }
}

/* All taps, one after the other. */
TD__INLINE void NAMED(add_taps)(const struct plane *p, const int rows, const int vectors,
                                const REAL *frame, const REAL *w, VECTOR sums[][2])
{
    for (int64_t t = 0; t < p->taps; t++) {
        const REAL *from = frame + p->offsets[t];
        const REAL weight = w[t];
        UNROLLED
        for (int i = 0; i < rows; i++, from += p->row) {
            sums[i][0] += weight * *(const VECTOR *)from;
            if (vectors == 2)
                sums[i][1] += weight * *(const VECTOR *)(from + LANES);
        }
    }
}

/* Column by column of a kernel of `height` rows: a row of the frame is loaded once for all result rows that use
 * it. */
TD__INLINE void NAMED(add_columns)(const struct plane *p, const int rows, const int vectors,
                                   const int height, const REAL *frame, const REAL *w,
                                   VECTOR sums[][2])
{
    const int64_t next = p->row;
    for (int64_t t = 0; t < p->columns; t++) {
        const REAL *from = frame + p->column_offsets[t];
        const REAL *first = w + p->column_weights[t];
        REAL weights[5];
        UNROLLED
        for (int i = 0; i < height; i++, first += p->weight_row)
            weights[i] = *first;
        UNROLLED
        for (int y = 0; y < rows + height - 1; y++, from += next) {
            const VECTOR row0 = *(const VECTOR *)from;
            VECTOR row1 = {0};
            if (vectors == 2)
                row1 = *(const VECTOR *)(from + LANES);
            __asm__ volatile("" ::: "memory"); /* otherwise compilers reload it for each row */
            UNROLLED
            for (int i = 0; i < rows; i++) {
                if (y < i || y - i >= height)
                    continue;
                sums[i][0] += weights[y - i] * row0;
                if (vectors == 2)
                    sums[i][1] += weights[y - i] * row1;
            }
        }
    }
}

/* `rows` rows of one or two vectors, of which `columns` columns are stored. The first three arguments are
 * constants after inlining; a `height` of 0 is any. */
TD__INLINE void NAMED(plane_rows)(const int rows, const int vectors, const int height,
                                  const struct plane *p, const REAL *frame, const REAL *w,
                                  REAL first, int64_t columns, REAL *out)
{
    const VECTOR begin = first - (VECTOR){0};
    VECTOR sums[8][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        sums[i][0] = begin;
        sums[i][1] = begin;
    }
    if (height)
        NAMED(add_columns)(p, rows, vectors, height, frame, w, sums);
    else
        NAMED(add_taps)(p, rows, vectors, frame, w, sums);
    if (columns >= vectors * LANES) {
        UNROLLED
        for (int i = 0; i < rows; i++, out += p->width) {
            *(VECTOR *)out = sums[i][0];
            if (vectors == 2)
                *(VECTOR *)(out + LANES) = sums[i][1];
        }
    } else {
        VECTOR spread[8 * 2];
        UNROLLED
        for (int i = 0; i < rows * vectors; i++)
            spread[i] = sums[i / vectors][i % vectors];
        for (int i = 0; i < rows; i++, out += p->width)
            NAMED(copy_few)(out, (const REAL *)(spread + i * vectors), columns);
    }
}

/* The columns from `x` on, as many as `vectors` have. Some of the last rows are computed twice if `rows`
 * does not divide the height. */
TD__INLINE void NAMED(plane_columns)(const int vectors, const int height, const struct plane *p,
                                     const REAL *frame, const REAL *w, REAL first, int64_t x,
                                     REAL *out)
{
    const int rows = 8 / vectors;
    const int64_t columns = p->width - x;
    int64_t y = 0;
    frame += x;
    out += x;
    for (; y < p->height && p->height >= rows; y += rows) {
        const int64_t at = y + rows <= p->height ? y : p->height - rows;
        NAMED(plane_rows)
        (rows, vectors, height, p, frame + at * p->row, w, first, columns, out + at * p->width);
    }
    for (; y < p->height; y++)
        NAMED(plane_rows)
    (1, vectors, height, p, frame + y * p->row, w, first, columns, out + y * p->width);
}

/* A plane of the result: sums over all taps, beginning with `first`. */
TD__VECTOR static void NAMED(make_plane)(const struct plane *p, const void *frame, const void *w,
                                         double first, void *out)
{
    const int height = p->kernel_height;
    for (int64_t x = 0; x < p->width; x += 2 * LANES) {
        const bool wide = p->width - x > LANES;
        if (height == 3 && wide)
            NAMED(plane_columns)(2, 3, p, frame, w, (REAL)first, x, out);
        else if (height == 3)
            NAMED(plane_columns)(1, 3, p, frame, w, (REAL)first, x, out);
        else if (height == 5 && wide)
            NAMED(plane_columns)(2, 5, p, frame, w, (REAL)first, x, out);
        else if (height == 5)
            NAMED(plane_columns)(1, 5, p, frame, w, (REAL)first, x, out);
        else if (wide)
            NAMED(plane_columns)(2, 0, p, frame, w, (REAL)first, x, out);
        else
            NAMED(plane_columns)(1, 0, p, frame, w, (REAL)first, x, out);
    }
}

/* The sum of the lanes, in a fixed order: halves are added, then halves of the half. */
TD__INLINE REAL NAMED(sum_of)(VECTOR sums)
{
    REAL part[LANES];
    memcpy(part, &sums, sizeof part);
    UNROLLED
    for (int i = 0; i < LANES / 2; i++)
        part[i] += part[i + LANES / 2];
    UNROLLED
    for (int i = 0; i < LANES / 4; i++)
        part[i] += part[i + LANES / 4];
    return LANES == 16 ? (part[0] + part[2]) + (part[1] + part[3]) : part[0] + part[1];
}

/* Adds the dot product of the plane `grad_y` and the input under each of up to 9 taps to `grad_w`; `taps` is a
 * constant. Lanes of the frame after the end of a row are masked, as they may be infinite. */
TD__INLINE void NAMED(dot_taps)(const struct plane *p, const int taps, const REAL *frame,
                                const int64_t *offsets, const REAL *grad_y, REAL *grad_w)
{
    VECTOR sums[9] = {{0}};
    NAMED(mask) mask;
    const int64_t whole = p->width / LANES * LANES;
    for (int j = 0; j < LANES; j++)
        mask[j] = j < p->width - whole ? -1 : 0;
    for (int64_t y = 0; y < p->height; y++, frame += p->row, grad_y += p->padded_width) {
        for (int64_t x = 0; x < whole; x += LANES) {
            VECTOR g = *(const VECTOR *)(grad_y + x);
            UNROLLED
            for (int t = 0; t < taps; t++)
                sums[t] += g * *(const VECTOR *)(frame + offsets[t] + x);
        }
        if (whole == p->width)
            continue;
        VECTOR g = *(const VECTOR *)(grad_y + whole);
        UNROLLED
        for (int t = 0; t < taps; t++) {
            VECTOR f = *(const VECTOR *)(frame + offsets[t] + whole);
            sums[t] += g * (VECTOR)((NAMED(mask))f & mask);
        }
    }
    UNROLLED
    for (int t = 0; t < taps; t++)
        grad_w[t] += NAMED(sum_of)(sums[t]);
}

/* With 9 and 25 taps none is left over alone, whose sum would be a dependency chain. */
TD__VECTOR static void NAMED(dot_plane)(const struct plane *p, const void *frame,
                                        const void *grad_y, void *grad_w)
{
    int64_t t = 0;
    if (p->taps % 8 == 1 && p->taps > 1) {
        NAMED(dot_taps)(p, 9, frame, p->offsets, grad_y, grad_w);
        t = 9;
    }
    for (; t + 8 <= p->taps; t += 8)
        NAMED(dot_taps)(p, 8, frame, p->offsets + t, grad_y, (REAL *)grad_w + t);
    for (; t + 4 <= p->taps; t += 4)
        NAMED(dot_taps)(p, 4, frame, p->offsets + t, grad_y, (REAL *)grad_w + t);
    for (; t < p->taps; t++)
        NAMED(dot_taps)(p, 1, frame, p->offsets + t, grad_y, (REAL *)grad_w + t);
}

/* Copies a row into a row of a frame, with elements `right` apart; with phases, every phases-th element goes to
 * the same part of the row. */
TD__INLINE void NAMED(fill_row)(const struct plane_frame *f, const REAL *restrict from,
                                REAL *restrict to)
{
    if (f->phases == 1 && f->right == 1) {
        to += f->left;
        int64_t i = 0;
        for (; i + 2 * LANES <= f->width; i += LANES) {
            *(VECTOR *)(to + i) = *(const VECTOR *)(from + i);
            __asm__ volatile(
                "" ::
                    : "memory"); /* otherwise compilers call memcpy(), for one vector */
        }
        NAMED(copy_few)(to + i, from + i, f->width - i);
    } else if (f->phases == 1) {
        for (int64_t i = 0; i < f->width; i++)
            to[f->left + i * f->right] = from[i];
    } else if (f->phases == 2) {
        REAL *even = to + f->left % 2 * f->part + f->left / 2;
        REAL *odd = to + (f->left + 1) % 2 * f->part + (f->left + 1) / 2;
        TD__INDEPENDENT
        for (int64_t i = 0; i < f->width / 2; i++) {
            even[i] = from[2 * i];
            odd[i] = from[2 * i + 1];
        }
        if (f->width % 2)
            even[f->width / 2] = from[f->width - 1];
    } else {
        for (int64_t phase = 0; phase < f->phases; phase++) {
            const int64_t first = (phase - f->left % f->phases + f->phases) % f->phases;
            REAL *part = to + phase * f->part + (f->left + first) / f->phases;
            for (int64_t i = first, j = 0; i < f->width; i += f->phases, j++)
                part[j] = from[i];
        }
    }
}

/* The channels of a group; other elements stay 0. */
TD__VECTOR static void NAMED(fill_frame)(const struct plane_frame *frame, const void *source,
                                         void *data)
{
    const struct plane_frame f = *frame; /* a copy that no store can alias */
    const REAL *from = source;
    for (int64_t c = 0; c < f.channels; c++) {
        REAL *to = (REAL *)data + (c * f.rows + f.top) * f.row;
        for (int64_t y = 0; y < f.height; y++, from += f.width, to += f.down * f.row)
            NAMED(fill_row)(&f, from, to);
    }
}

#undef VECTOR
#undef UNROLLED
#undef REAL
#undef INTEGER
#undef LANES
#undef NAMED
