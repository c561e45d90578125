/* Packing A and B for the tiles of a matrix product. A part of gemm_loops.h, which has the picture and
 * the names.
 *
 * Whole vectors are written where that is not exact: what is too much lands where the next ones go,
 * and after the last one there is room for it (SLACK). */

#define SLACK 64

#if LANES_ARE == 16
#define SHUFFLE(a, b, from, s)                                                                     \
    __builtin_shufflevector(a, b, from(0, s), from(1, s), from(2, s), from(3, s), from(4, s),      \
                            from(5, s), from(6, s), from(7, s), from(8, s), from(9, s),            \
                            from(10, s), from(11, s), from(12, s), from(13, s), from(14, s),       \
                            from(15, s))
#elif LANES_ARE == 8
#define SHUFFLE(a, b, from, s)                                                                     \
    __builtin_shufflevector(a, b, from(0, s), from(1, s), from(2, s), from(3, s), from(4, s),      \
                            from(5, s), from(6, s), from(7, s))
#elif LANES_ARE == 4
#define SHUFFLE(a, b, from, s)                                                                     \
    __builtin_shufflevector(a, b, from(0, s), from(1, s), from(2, s), from(3, s))
#else
#define SHUFFLE(a, b, from, s) __builtin_shufflevector(a, b, from(0, s), from(1, s))
#endif

/* Vectors i and i + s exchange the lanes that have bit s in the one and not in the other. Done for
 * every bit, this transposes. */
#define FIRST(lane, s) ((lane) & (s) ? LANES_ARE + (lane) - (s) : (lane))
#define SECOND(lane, s) ((lane) & (s) ? LANES_ARE + (lane) : (lane) + (s))
#define EXCHANGE(s)                                                                                \
    for (int i = 0; i < LANES_ARE && (s) < LANES_ARE; i++)                                         \
        if (!(i & (s))) {                                                                          \
            VECTOR upper = v[i], lower = v[(i + (s)) % LANES_ARE];                                 \
            v[i] = SHUFFLE(upper, lower, FIRST, (s) % LANES_ARE);                                  \
            v[(i + (s)) % LANES_ARE] = SHUFFLE(upper, lower, SECOND, (s) % LANES_ARE);             \
        }

static inline __attribute__((always_inline)) void NAMED(exchange_all)(VECTOR v[LANES_ARE])
{
    UNROLLED
    EXCHANGE(1)
    UNROLLED
    EXCHANGE(2)
    UNROLLED
    EXCHANGE(4)
    UNROLLED
    EXCHANGE(8)
}

/* `count` rows, at most LANES, `row` apart, of `depth` elements side by side, times alpha: element p
 * of row i goes to to[p * width + i]. Also writes the rest of the vector there. */
static void NAMED(turn)(const REAL *from, int64_t row, int64_t count, int64_t depth, REAL alpha,
                        int64_t width, REAL *to)
{
    const REAL *rows[LANES_ARE];
    for (int i = 0; i < LANES_ARE; i++)
        rows[i] = from + (i < count ? i : count - 1) * row;
    int64_t p = 0;
    for (; p + LANES_ARE <= depth; p += LANES_ARE) {
        VECTOR v[LANES_ARE];
        UNROLLED
        for (int i = 0; i < LANES_ARE; i++)
            v[i] = alpha * *(const UNALIGNED *)(rows[i] + p);
        NAMED(exchange_all)(v);
        UNROLLED
        for (int i = 0; i < LANES_ARE; i++)
            *(UNALIGNED *)(to + (p + i) * width) = v[i];
    }
    for (; p < depth; p++)
        for (int64_t i = 0; i < count; i++)
            to[p * width + i] = alpha * rows[i][p];
}

/* Rows m0 … of A, `depth` columns from k0 on: panels of `rows` rows, the last one of what is left. */
static void NAMED(pack_a)(const struct td__gemm *gemm, int64_t m0, int64_t m, int64_t rows,
                          int64_t k0, int64_t depth, REAL *packed)
{
    const REAL alpha = (REAL)gemm->alpha;
    for (int64_t first = 0; first < m; first += rows) {
        const REAL *a = (const REAL *)gemm->a + (m0 + first) * gemm->a_row + k0 * gemm->a_col;
        const int64_t height = m - first < rows ? m - first : rows;
        const int64_t vectors = (height + LANES - 1) / LANES * LANES;
        if (gemm->a_col == 1) {
            /* The last vector first: it reaches into the next column. */
            for (int64_t i = vectors - LANES; i >= 0; i -= LANES)
                NAMED(turn)
            (a + i * gemm->a_row, gemm->a_row, height - i < LANES ? height - i : LANES, depth,
             alpha, height, packed + i);
        } else if (gemm->a_row == 1 && m0 + first + vectors <= gemm->m) {
            for (int64_t p = 0; p < depth; p++)
                for (int64_t i = 0; i < vectors; i += LANES)
                    *(UNALIGNED *)(packed + p * height +
                                   i) = alpha * *(const UNALIGNED *)(a + p * gemm->a_col + i);
        } else {
            for (int64_t p = 0; p < depth; p++)
                for (int64_t i = 0; i < height; i++)
                    packed[p * height + i] = alpha * a[i * gemm->a_row + p * gemm->a_col];
        }
        packed += depth * height;
    }
}

static void NAMED(pack_b)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                          REAL *packed)
{
    const REAL *b = (const REAL *)gemm->b + part->item * gemm->b_item + part->k0 * gemm->b_row +
                    part->n0 * gemm->b_col;
    const int64_t columns = part->columns;
    if (gemm->b_row == 1) {
        for (int64_t j = 0; j < columns; j += LANES)
            NAMED(turn)
        (b + j * gemm->b_col, gemm->b_col, columns - j < LANES ? columns - j : LANES, part->rows, 1,
         STRIP, packed + j);
    } else if (gemm->b_col == 1 && columns == STRIP) {
        for (int64_t p = 0; p < part->rows; p++)
            for (int v = 0; v < STRIP; v += LANES)
                *(UNALIGNED *)(packed + p * STRIP + v) = *(const UNALIGNED *)(b + p * gemm->b_row +
                                                                              v);
    } else {
        for (int64_t p = 0; p < part->rows; p++) {
            for (int64_t j = 0; j < columns; j++)
                packed[p * STRIP + j] = b[p * gemm->b_row + j * gemm->b_col];
            for (int64_t j = columns; j < STRIP; j++)
                packed[p * STRIP + j] = 0;
        }
    }
}
