/* Tiles of C: the innermost loop of a matrix product. A part of gemm_loops.h, which has the diagram and the
 * names. */

/* Where a tile of C goes, and how it is stored. */
struct NAMED(target) {
    REAL *c;
    int64_t c_row;
    const REAL *row_bias;
    const REAL *column_bias;
    uint16_t
        *halves; /* NULL, or where the tile goes instead, rounded; its rows are half_row apart */
    int64_t half_row;
    td_dtype half;
    int columns;
    bool add;
};

/* Copies `count` elements, at most 2 LANES, faster than a call of memcpy(). The last piece overlaps the one
 * before. */
static inline void NAMED(copy_few)(REAL *to, const REAL *from, int count)
{
    if (count >= LANES) {
        const VECTOR first = *(const UNALIGNED *)from;
        const VECTOR last = *(const UNALIGNED *)(from + count - LANES);
        *(UNALIGNED *)to = first;
        *(UNALIGNED *)(to + count - LANES) = last;
        return;
    }
    int i = 0;
    for (; i + 4 <= count; i += 4)
        memcpy(to + i, from + i, 4 * sizeof *to);
    for (; i < count; i++)
        to[i] = from[i];
}

#if REAL_BYTES == 4
static inline void NAMED(narrow_row)(td_dtype half, const REAL *restrict from, int64_t count,
                                     uint16_t *restrict to)
{
    if (half == TD_BF16)
        for (int64_t j = 0; j < count; j++)
            to[j] = td__f32_to_bf16(from[j]);
    else
        for (int64_t j = 0; j < count; j++)
            to[j] = td__f32_to_f16(from[j]);
}
#endif

/* The initial sums of a tile at the right edge of C, and their target. */
static __attribute__((noinline)) void NAMED(begin_part)(const struct NAMED(target) * to, int rows,
                                                        REAL *sums)
{
    REAL bias[STRIP] = {0};
    if (to->column_bias)
        NAMED(copy_few)(bias, to->column_bias, to->columns);
    for (int i = 0; i < rows; i++, sums += STRIP) {
        for (int j = 0; j < STRIP; j++)
            sums[j] = 0;
        if (to->add)
            NAMED(copy_few)(sums, to->c + i * to->c_row, to->columns);
        for (int j = 0; j < STRIP && to->row_bias; j++)
            sums[j] += to->row_bias[i];
        for (int j = 0; j < STRIP && to->column_bias; j++)
            sums[j] += bias[j];
    }
}

static __attribute__((noinline)) void NAMED(store_part)(const struct NAMED(target) * to, int rows,
                                                        const REAL *sums)
{
#if REAL_BYTES == 4
    if (to->halves) {
        for (int i = 0; i < rows; i++)
            NAMED(narrow_row)
        (to->half, sums + i * STRIP, to->columns, to->halves + i * to->half_row);
        return;
    }
#endif
    for (int i = 0; i < rows; i++)
        NAMED(copy_few)(to->c + i * to->c_row, sums + i * STRIP, to->columns);
}

/* The initial sums of a whole tile: what is added to the product. */
static inline __attribute__((always_inline)) void
NAMED(begin)(const int rows, const int vectors, const struct NAMED(target) * to, VECTOR sums[][2])
{
    if (to->add) {
        UNROLLED
        for (int i = 0; i < rows; i++) {
            sums[i][0] = *(const UNALIGNED *)(to->c + i * to->c_row);
            if (vectors == 2)
                sums[i][1] = *(const UNALIGNED *)(to->c + i * to->c_row + LANES);
        }
    }
    if (to->row_bias) {
        UNROLLED
        for (int i = 0; i < rows; i++) {
            sums[i][0] += to->row_bias[i];
            sums[i][1] += to->row_bias[i];
        }
    }
    if (to->column_bias) {
        VECTOR bias0 = *(const UNALIGNED *)to->column_bias, bias1 = {0};
        if (vectors == 2)
            bias1 = *(const UNALIGNED *)(to->column_bias + LANES);
        UNROLLED
        for (int i = 0; i < rows; i++) {
            sums[i][0] += bias0;
            sums[i][1] += bias1;
        }
    }
}

/* The initial sums of a tile of any width: what is added to the product. `spread` is for the edge of C. */
static inline __attribute__((always_inline)) void NAMED(begin_tile)(const int rows,
                                                                    const int vectors,
                                                                    const struct NAMED(target) * to,
                                                                    REAL *spread, VECTOR sums[][2])
{
    UNROLLED
    for (int i = 0; i < rows; i++)
        sums[i][0] = sums[i][1] = (VECTOR){0};
    if (to->columns == vectors * LANES) {
        NAMED(begin)(rows, vectors, to, sums);
    } else if (to->add || to->row_bias || to->column_bias) {
        NAMED(begin_part)(to, rows, spread);
        UNROLLED
        for (int i = 0; i < rows; i++) {
            sums[i][0] = *(const UNALIGNED *)(spread + i * STRIP);
            if (vectors == 2)
                sums[i][1] = *(const UNALIGNED *)(spread + i * STRIP + LANES);
        }
    }
}

static inline __attribute__((always_inline)) void NAMED(store_tile)(const int rows,
                                                                    const int vectors,
                                                                    const struct NAMED(target) * to,
                                                                    REAL *spread, VECTOR sums[][2])
{
#if PAIRS
    if (to->halves && to->columns == STRIP) {
        UNROLLED
        for (int i = 0; i < rows; i++)
            STORE_HALVES(to->halves + i * to->half_row, sums[i][0], sums[i][1]);
        return;
    }
#endif
    const bool whole = to->columns == vectors * LANES && !to->halves;
    REAL *const result = whole ? to->c : spread;
    const int64_t row = whole ? to->c_row : STRIP;
    UNROLLED
    for (int i = 0; i < rows; i++) {
        *(UNALIGNED *)(result + i * row) = sums[i][0];
        if (vectors == 2)
            *(UNALIGNED *)(result + i * row + LANES) = sums[i][1];
    }
    if (!whole)
        NAMED(store_part)(to, rows, spread);
}

/* One tile. `rows` and `vectors` are constants where this is inlined, so that the sums are
 * registers. An element is what is added to the product, then the sum along k, in this order at the edge
 * too: so it has the same bits in tiles of all sizes. */
static inline __attribute__((always_inline)) void NAMED(tile)(const int rows, const int vectors,
                                                              int64_t k, const REAL *a,
                                                              const REAL *b, int64_t b_row,
                                                              const struct NAMED(target) * to)
{
    REAL spread[MAX_ROWS * STRIP];
    VECTOR sums[MAX_ROWS][2];
    NAMED(begin_tile)(rows, vectors, to, spread, sums);
    for (int64_t p = 0; p < k; p++, a += rows, b += b_row) {
        VECTOR b0 = *(const UNALIGNED *)b, b1 = {0};
        if (vectors == 2)
            b1 = *(const UNALIGNED *)(b + LANES);
        UNROLLED
        for (int i = 0; i < rows; i++) {
            MULTIPLY_ADD(sums[i][0], a[i], b0);
            if (vectors == 2)
                MULTIPLY_ADD(sums[i][1], a[i], b1);
        }
    }
    NAMED(store_tile)(rows, vectors, to, spread, sums);
}

#define TILE(rows)                                                                                 \
    static void NAMED(tile##rows)(int64_t k, const REAL *a, const REAL *b, int64_t b_row,          \
                                  const struct NAMED(target) * to)                                 \
    {                                                                                              \
        if (to->columns > LANES)                                                                   \
            NAMED(tile)(rows, 2, k, a, b, b_row, to);                                              \
        else                                                                                       \
            NAMED(tile)(rows, 1, k, a, b, b_row, to);                                              \
    }
FOR_EACH_HEIGHT(TILE)
#undef TILE

#define TILE(rows) NAMED(tile##rows),
static void (*const NAMED(tiles)[])(int64_t k, const REAL *a, const REAL *b, int64_t b_row,
                                    const struct NAMED(target) * to) = {FOR_EACH_HEIGHT(TILE)};
#undef TILE

#if PAIRS
/* The same with rows of A in place, `a_row` elements apart. The offsets of the first NEAR_ROWS are in
 * registers; compilers would keep the others in vector registers. */
static inline __attribute__((always_inline)) void
NAMED(tile_in_place)(const int rows, const int vectors, int64_t k, const uint16_t *a, int64_t a_row,
                     const REAL *b, const struct NAMED(target) * to)
{
    struct {
        int64_t offsets[MAX_ROWS];
    } far;
    int64_t near[NEAR_ROWS];
    REAL spread[MAX_ROWS * STRIP];
    VECTOR sums[MAX_ROWS][2];
    UNROLLED
    for (int i = 0; i < rows; i++) {
        if (i < NEAR_ROWS)
            near[i % NEAR_ROWS] = i * a_row;
        far.offsets[i] = i * a_row;
    }
    NAMED(begin_tile)(rows, vectors, to, spread, sums);
    for (int64_t p = 0; p < k; p++, a += 2, b += STRIP) {
        if (rows > NEAR_ROWS)
            __asm__("" : "+m"(far));
        VECTOR b0 = *(const UNALIGNED *)b, b1 = {0};
        if (vectors == 2)
            b1 = *(const UNALIGNED *)(b + LANES);
        UNROLLED
        for (int i = 0; i < rows; i++) {
            REAL pair;
            memcpy(&pair, a + (i < NEAR_ROWS ? near[i % NEAR_ROWS] : far.offsets[i]), sizeof pair);
            MULTIPLY_ADD(sums[i][0], pair, b0);
            if (vectors == 2)
                MULTIPLY_ADD(sums[i][1], pair, b1);
        }
    }
    NAMED(store_tile)(rows, vectors, to, spread, sums);
}

#define TILE(rows)                                                                                 \
    static void NAMED(tile_in_place##rows)(int64_t k, const uint16_t *a, int64_t a_row,            \
                                           const REAL *b, const struct NAMED(target) * to)         \
    {                                                                                              \
        if (to->columns > LANES)                                                                   \
            NAMED(tile_in_place)(rows, 2, k, a, a_row, b, to);                                     \
        else                                                                                       \
            NAMED(tile_in_place)(rows, 1, k, a, a_row, b, to);                                     \
    }
FOR_EACH_HEIGHT(TILE)
#undef TILE

#define TILE(rows) NAMED(tile_in_place##rows),
static void (*const NAMED(tiles_in_place)[])(int64_t k, const uint16_t *a, int64_t a_row,
                                             const REAL *b, const struct NAMED(target) * to) = {
    FOR_EACH_HEIGHT(TILE)};
#undef TILE
#endif
