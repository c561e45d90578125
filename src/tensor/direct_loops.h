/* The loops of direct.h. A part of gemm_loops.h, which defines the names.
 *
 * A tile is up to MAX_ROWS rows by two vectors of columns, held in registers while p runs. A step loads
 * the two vectors of a strip of B, and multiplies them with one element of each row, which is read from
 * memory in place. The tile is then transposed, so that each column is stored contiguously. */

/* Where a tile goes. */
struct NAMED(direct_target) {
    REAL *c; /* of the tile's first column */
    int64_t c_column;
    const REAL *bias;
    int columns;
    bool add;
    bool
        more; /* LANES elements of a column belong to the result, the first of which are the tile's */
};

/* Stores columns of `rows` elements; `rows` is a constant. Where the next tile's elements follow (`more`),
 * whole vectors are stored: those after the last row are overwritten by that tile, or have -0 added. */
static inline __attribute__((always_inline)) void
NAMED(store_columns)(const int rows, const REAL *transposed, const struct NAMED(direct_target) * to,
                     int columns, REAL *c)
{
    for (int j = 0; j < columns; j++, transposed += LANES, c += to->c_column) {
        if (to->more && to->add)
            *(UNALIGNED *)c += *(const UNALIGNED *)transposed;
        else if (to->more)
            *(UNALIGNED *)c = *(const UNALIGNED *)transposed;
        else if (to->add)
            for (int i = 0; i < rows; i++)
                c[i] += transposed[i];
        else
            memcpy(c, transposed, (size_t)rows * sizeof *c);
    }
}

/* Squares of LANES rows are turned and stored; those after the last row are -0. */
static inline __attribute__((always_inline)) void
NAMED(store_transposed)(const int rows, const int vectors, const struct NAMED(direct_target) * to,
                 VECTOR sums[][2])
{
    UNROLLED
    for (int v = 0; v < vectors; v++) {
        const int left = to->columns - v * LANES;
        UNROLLED
        for (int i0 = 0; i0 < rows; i0 += LANES) {
            VECTOR square[LANES_ARE];
            REAL turned[LANES_ARE * LANES_ARE];
            UNROLLED
            for (int i = 0; i < LANES_ARE; i++) {
                square[i] = -(VECTOR){0}; /* what added changes nothing */
                if (i0 + i < rows)
                    square[i] = sums[(i0 + i) % MAX_ROWS][v];
            }
            NAMED(exchange_all)(square);
            REAL *c = to->c + v * LANES * to->c_column + i0;
            if (to->more && left >= LANES) {
                UNROLLED
                for (int j = 0; j < LANES_ARE; j++, c += to->c_column) {
                    if (to->add)
                        square[j] += *(UNALIGNED *)c;
                    *(UNALIGNED *)c = square[j];
                }
                continue;
            }
            UNROLLED
            for (int i = 0; i < LANES_ARE; i++)
                *(UNALIGNED *)(turned + i * LANES) = square[i];
            NAMED(store_columns)
            (rows - i0 < LANES ? rows - i0 : LANES, turned, to, left < LANES ? left : LANES, c);
        }
    }
}

/* One tile. `rows` and `vectors` are constants where this is inlined, so that the sums are registers. */
static inline __attribute__((always_inline)) void
NAMED(direct_tile)(const int rows, const int vectors, const struct td__direct *direct,
                   const int64_t *offsets, const REAL *b, const struct NAMED(direct_target) * to)
{
    /* Offsets of the first rows are in registers; the others in memory, not in vector registers. */
    struct {
        int64_t offsets[MAX_ROWS];
    } far;
    int64_t near[NEAR_ROWS];
    VECTOR sums[MAX_ROWS][2];
    VECTOR first0 = {0}, first1 = {0};
    if (to->bias) {
        first0 = *(const UNALIGNED *)to->bias;
        if (vectors == 2)
            first1 = *(const UNALIGNED *)(to->bias + LANES);
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        if (i < NEAR_ROWS)
            near[i % NEAR_ROWS] = offsets[i];
        far.offsets[i] = offsets[i];
        sums[i][0] = first0;
        sums[i][1] = first1;
    }
    const REAL *const a = direct->a;
    const int64_t period = direct->period, left_out = period - direct->end + direct->begin;
    const int64_t *step = direct->steps + direct->begin;
    b += direct->begin * STRIP;
    for (int64_t rest = direct->k; rest > 0; rest -= period) {
        for (const int64_t *end = step + period - left_out; step < end; step++, b += STRIP) {
            const REAL *at = a + *step;
            if (rows > NEAR_ROWS)
                __asm__("" : "+m"(far));
            VECTOR b0 = *(const UNALIGNED *)b, b1 = {0};
            if (vectors == 2)
                b1 = *(const UNALIGNED *)(b + LANES);
            UNROLLED
            for (int i = 0; i < rows; i++) {
                REAL element = at[i < NEAR_ROWS ? near[i % NEAR_ROWS] : far.offsets[i]];
                sums[i][0] += element * b0;
                if (vectors == 2)
                    sums[i][1] += element * b1;
            }
        }
        step += left_out;
        b += left_out * STRIP;
    }
    NAMED(store_transposed)(rows, vectors, to, sums);
}

#define TILE(rows)                                                                                 \
    static void NAMED(direct_tile##rows)(const struct td__direct *direct, const int64_t *offsets,  \
                                         const REAL *b, const struct NAMED(direct_target) * to)    \
    {                                                                                              \
        if (to->columns > LANES)                                                                   \
            NAMED(direct_tile)(rows, 2, direct, offsets, b, to);                                   \
        else                                                                                       \
            NAMED(direct_tile)(rows, 1, direct, offsets, b, to);                                   \
    }
FOR_EACH_HEIGHT(TILE)
#undef TILE

#define TILE(rows) NAMED(direct_tile##rows),
static void (*const NAMED(direct_tiles)[])(const struct td__direct *direct, const int64_t *offsets,
                                           const REAL *b,
                                           const struct NAMED(direct_target) *
                                               to) = {FOR_EACH_HEIGHT(TILE)};
#undef TILE

/* A tile's rows of A stay in L1 for all strips of B. */
static void NAMED(run_direct)(const struct td__direct *direct)
{
    const int64_t height = NAMED(piece)(direct->m, MAX_ROWS);
    for (int64_t i = 0; i < direct->m; i += height)
        for (int64_t j = 0; j < direct->n; j += STRIP) {
            const int64_t left = direct->n - j;
            struct NAMED(direct_target) to = {
                .c = (REAL *)direct->c + j * direct->c_column + i,
                .c_column = direct->c_column,
                .bias = direct->bias ? (const REAL *)direct->bias + j : NULL,
                .columns = left < STRIP ? (int)left : STRIP,
                .add = direct->add,
                .more = direct->m - i >= (height + LANES - 1) / LANES * LANES,
            };
            const int64_t rows = direct->m - i < height ? direct->m - i : height;
            NAMED(direct_tiles)
            [rows - 1](direct, direct->rows + i, (const REAL *)direct->b + j * direct->k, &to);
        }
}

static int64_t NAMED(direct_size)(int64_t k, int64_t n)
{
    return (n + STRIP - 1) / STRIP * STRIP * k + SLACK;
}

static void NAMED(pack_direct)(const void *b, int64_t column, int64_t k, int64_t n, void *packed)
{
    struct td__gemm gemm = {.b = b, .b_row = 1, .b_col = column, .k = k, .n = n};
    for (int64_t j = 0; j < n; j += STRIP) {
        struct td__gemm_part part = {.rows = k, .n0 = j, .columns = n - j < STRIP ? n - j : STRIP};
        NAMED(pack_b)(&gemm, &part, (REAL *)packed + j * k);
    }
}

const struct td__direct_loops DIRECT = {.strip = STRIP,
                                        .packed_size = NAMED(direct_size),
                                        .pack = NAMED(pack_direct),
                                        .run = NAMED(run_direct)};
