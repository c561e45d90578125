/* The loops of cpu_conv_planes.c, for one type of elements: REAL, INTEGER, LANES and NAMED() are the
 * includer's. Vectors have 64 bytes for every instruction set, so that sums have the same order. */

typedef REAL NAMED(lanes) __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
typedef INTEGER NAMED(mask) __attribute__((vector_size(64)));

#define VECTOR NAMED(lanes)

/* `rows` rows of up to two vectors: rows is a constant where this is inlined. */
TD__INLINE void NAMED(plane_rows)(const struct plane *p, const int rows, const REAL *frame,
                                  const REAL *w, REAL first, int64_t columns, REAL *out)
{
    VECTOR sums[4][2];
    for (int i = 0; i < rows; i++)
        sums[i][0] = sums[i][1] = first - (VECTOR){0};
    for (int64_t t = 0; t < p->taps; t++) {
        const REAL *from = frame + p->offsets[t];
        const REAL weight = w[t];
        for (int i = 0; i < rows; i++) {
            sums[i][0] += weight * *(const VECTOR *)(from + i * p->row);
            sums[i][1] += weight * *(const VECTOR *)(from + i * p->row + LANES);
        }
    }
    for (int i = 0; i < rows; i++) {
        if (columns >= 2 * LANES) {
            *(VECTOR *)(out + i * p->width) = sums[i][0];
            *(VECTOR *)(out + i * p->width + LANES) = sums[i][1];
        } else {
            memcpy(out + i * p->width, sums[i], (size_t)columns * sizeof *out);
        }
    }
}

/* A plane of the result: sums over all taps, beginning with `first`. */
TD__VECTOR static void NAMED(make_plane)(const struct plane *p, const void *frame, const void *w,
                                         double first, void *out)
{
    for (int64_t x = 0; x < p->width; x += 2 * LANES) {
        const REAL *from = (const REAL *)frame + x;
        REAL *to = (REAL *)out + x;
        int64_t y = 0;
        for (; y + 4 <= p->height; y += 4)
            NAMED(plane_rows)
        (p, 4, from + y * p->row, w, (REAL)first, p->width - x, to + y * p->width);
        for (; y < p->height; y++)
            NAMED(plane_rows)
        (p, 1, from + y * p->row, w, (REAL)first, p->width - x, to + y * p->width);
    }
}

/* The sum of the lanes, in a fixed order. */
TD__INLINE REAL NAMED(sum_of)(VECTOR sums)
{
    REAL part[LANES];
    memcpy(part, &sums, sizeof part);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++)
            part[i] += part[i + step];
    return part[0];
}

/* Adds sum over pixels of the plane `grad_y` times what lies under each of up to 4 taps to `grad_w`.
 * After the end of a row lanes of the frame are masked, as they may be infinite. */
TD__INLINE void NAMED(dot_taps)(const struct plane *p, const int taps, const REAL *frame,
                                const int64_t *offsets, const REAL *grad_y, REAL *grad_w)
{
    VECTOR sums[4] = {{0}};
    NAMED(mask) mask;
    const int64_t whole = p->width / LANES * LANES;
    for (int j = 0; j < LANES; j++)
        mask[j] = j < p->width - whole ? -1 : 0;
    for (int64_t y = 0; y < p->height; y++, frame += p->row, grad_y += p->padded_width) {
        for (int64_t x = 0; x < whole; x += LANES) {
            VECTOR g = *(const VECTOR *)(grad_y + x);
            for (int t = 0; t < taps; t++)
                sums[t] += g * *(const VECTOR *)(frame + offsets[t] + x);
        }
        if (whole == p->width)
            continue;
        VECTOR g = *(const VECTOR *)(grad_y + whole);
        for (int t = 0; t < taps; t++) {
            VECTOR f = *(const VECTOR *)(frame + offsets[t] + whole);
            sums[t] += g * (VECTOR)((NAMED(mask))f & mask);
        }
    }
    for (int t = 0; t < taps; t++)
        grad_w[t] += NAMED(sum_of)(sums[t]);
}

TD__VECTOR static void NAMED(dot_plane)(const struct plane *p, const void *frame,
                                        const void *grad_y, void *grad_w)
{
    int64_t t = 0;
    for (; t + 4 <= p->taps; t += 4)
        NAMED(dot_taps)(p, 4, frame, p->offsets + t, grad_y, (REAL *)grad_w + t);
    for (; t < p->taps; t++)
        NAMED(dot_taps)(p, 1, frame, p->offsets + t, grad_y, (REAL *)grad_w + t);
}

/* One row of `count` elements into a row of a frame: elements that are `step` apart there; or with
 * `phases`, every phases-th element goes to the next part of the row, `part` elements further. */
TD__VECTOR static void NAMED(fill_row)(const void *row, int64_t count, int64_t first, int64_t step,
                                       int64_t phases, int64_t part, void *frame)
{
    const REAL *restrict from = row;
    REAL *restrict to = frame;
    if (phases == 1 && step == 1) {
        for (int64_t i = 0; i < count; i++)
            to[first + i] = from[i];
    } else if (phases == 1) {
        for (int64_t i = 0; i < count; i++)
            to[first + i * step] = from[i];
    } else {
        for (int64_t i = 0; i < count; i++)
            to[(first + i) % phases * part + (first + i) / phases] = from[i];
    }
}

#undef VECTOR
#undef REAL
#undef INTEGER
#undef LANES
#undef NAMED
