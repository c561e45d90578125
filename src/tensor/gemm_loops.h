/* The loops of a matrix product, for one instruction set and one type of elements.
 *
 * The file that includes this defines REAL, REAL_BYTES, VECTOR_BYTES, MAX_ROWS and LOOPS, the name of the table
 * that comes out of it; it may do so twice, for f32 and f64.
 *
 *            n ->          strip of B: k x STRIP, packed, stays in the first cache
 *           +--+--+--+
 *         k |  |  |  |     panel of A: up to MAX_ROWS x k, packed; a block of panels stays in the
 *           +--+--+--+                 second cache
 *     +---+ +--+--+--+
 *     |   | |  |##|  |     tile of C: rows x STRIP, held in registers while k runs
 *   m +---+ +--+--+--+
 *     |   | |  |  |  |
 *     +---+ +--+--+--+
 *
 * A step along k loads two vectors of the strip, and multiplies them with each of the panel's
 * elements. k is cut into pieces, and so is m, of sizes as equal as can be: a rest of one row would
 * use the processor badly. Each element of C is summed up along k in one fixed order, whatever m
 * and n are. */
#include "tensor/gemm.h"

#include <string.h>

typedef REAL NAMED(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL NAMED(unaligned)
    __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

#define VECTOR NAMED(vector)
#define UNALIGNED NAMED(unaligned)
#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define LANES_ARE (VECTOR_BYTES / REAL_BYTES) /* the same for the preprocessor */
#define STRIP (2 * LANES)
#define DEPTH 256                     /* along k */
#define BLOCK (TD__GEMM_KEPT / DEPTH) /* along m, where A is not kept as a whole */

/* Where a tile of C goes, and what happens to it on the way. */
struct NAMED(target) {
    REAL *c;
    int64_t c_row;
    const REAL *row_bias;
    const REAL *column_bias;
    int columns;
    bool add;
};

/* Stores a tile at the right edge of C, one element at a time. */
static void NAMED(store_part)(const struct NAMED(target) * to, int rows, const REAL *sums)
{
    for (int i = 0; i < rows; i++) {
        REAL *c = to->c + i * to->c_row;
        for (int j = 0; j < to->columns; j++) {
            REAL sum = sums[i * STRIP + j];
            if (to->row_bias)
                sum += to->row_bias[i];
            if (to->column_bias)
                sum += to->column_bias[j];
            c[j] = to->add ? c[j] + sum : sum;
        }
    }
}

/* What a whole tile begins with: what is added to the product. */
static inline __attribute__((always_inline)) void
NAMED(begin)(const int rows, const int vectors, const struct NAMED(target) * to, VECTOR sums[][2])
{
    if (to->add) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            sums[i][0] = *(const UNALIGNED *)(to->c + i * to->c_row);
            if (vectors == 2)
                sums[i][1] = *(const UNALIGNED *)(to->c + i * to->c_row + LANES);
        }
    }
    if (to->row_bias) {
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            sums[i][0] += to->row_bias[i];
            sums[i][1] += to->row_bias[i];
        }
    }
    if (to->column_bias) {
        VECTOR bias0 = *(const UNALIGNED *)to->column_bias, bias1 = {0};
        if (vectors == 2)
            bias1 = *(const UNALIGNED *)(to->column_bias + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            sums[i][0] += bias0;
            sums[i][1] += bias1;
        }
    }
}

/* One tile. `rows` and `vectors` are constants where this is inlined, so that the sums are
 * registers. At the edge what is added to the product comes last: it cannot be loaded as vectors. */
static inline __attribute__((always_inline)) void NAMED(tile)(const int rows, const int vectors,
                                                              int64_t k, const REAL *a,
                                                              const REAL *b, int64_t b_row,
                                                              const struct NAMED(target) * to)
{
    const bool whole = to->columns == vectors * LANES;
    VECTOR sums[MAX_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        sums[i][0] = sums[i][1] = (VECTOR){0};
    if (whole)
        NAMED(begin)(rows, vectors, to, sums);
    for (int64_t p = 0; p < k; p++, a += rows, b += b_row) {
        VECTOR b0 = *(const UNALIGNED *)b, b1 = {0};
        if (vectors == 2)
            b1 = *(const UNALIGNED *)(b + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            sums[i][0] += a[i] * b0;
            if (vectors == 2)
                sums[i][1] += a[i] * b1;
        }
    }
    REAL spread[MAX_ROWS * STRIP];
    REAL *const result = whole ? to->c : spread;
    const int64_t row = whole ? to->c_row : STRIP;
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
        *(UNALIGNED *)(result + i * row) = sums[i][0];
        if (vectors == 2)
            *(UNALIGNED *)(result + i * row + LANES) = sums[i][1];
    }
    if (!whole)
        NAMED(store_part)(to, rows, spread);
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
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)
#if MAX_ROWS == 14
TILE(7)
TILE(8)
TILE(9)
TILE(10)
TILE(11)
TILE(12)
TILE(13)
TILE(14)
#endif
#undef TILE

static void (*const NAMED(tiles)[])(int64_t k, const REAL *a, const REAL *b, int64_t b_row,
                                    const struct NAMED(target) * to) = {
    NAMED(tile1),  NAMED(tile2),  NAMED(tile3), NAMED(tile4),  NAMED(tile5),  NAMED(tile6),
#if MAX_ROWS == 14
    NAMED(tile7),  NAMED(tile8),  NAMED(tile9), NAMED(tile10), NAMED(tile11), NAMED(tile12),
    NAMED(tile13), NAMED(tile14),
#endif
};

/* The size of the pieces when `size` is cut into pieces of at most `most`, as equal as can be. */
static int64_t NAMED(piece)(int64_t size, int64_t most)
{
    int64_t pieces = (size + most - 1) / most;
    return (size + pieces - 1) / pieces;
}

/* ---- Packing ---------------------------------------------------------------------------------
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
#pragma GCC unroll 16
        for (int i = 0; i < LANES_ARE; i++)
            v[i] = alpha * *(const UNALIGNED *)(rows[i] + p);
#pragma GCC unroll 16
        EXCHANGE(1)
#pragma GCC unroll 16
        EXCHANGE(2)
#pragma GCC unroll 16
        EXCHANGE(4)
#pragma GCC unroll 16
        EXCHANGE(8)
#pragma GCC unroll 16
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

/* ---- The whole product ----------------------------------------------------------------------- */

/* Where a strip of B meets rows m0 … of A. */
static inline struct NAMED(target)
    NAMED(target_at)(const struct td__gemm *gemm, const struct td__gemm_part *part, int64_t m0)
{
    const bool first = part->k0 == 0;
    return (struct NAMED(target)){
        .c = (REAL *)gemm->c + part->item * gemm->c_item + m0 * gemm->c_row + part->n0,
        .c_row = gemm->c_row,
        .columns = (int)part->columns,
        .add = gemm->accumulate || !first,
        .row_bias = gemm->row_bias && first ? (const REAL *)gemm->row_bias + m0 : NULL,
        .column_bias = gemm->column_bias && first ? (const REAL *)gemm->column_bias + part->n0
                                                  : NULL,
    };
}

/* The panels of A, `m` rows from m0 on, times a strip of B, which is packed unless it is used so
 * rarely that this would not pay. */
static void NAMED(multiply)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                            const REAL *panels, int64_t m0, int64_t m, int64_t rows, REAL *strip)
{
    const REAL *b = strip;
    int64_t b_row = STRIP;
    if (gemm->pack_b) {
        gemm->pack_b(gemm, part, STRIP, strip);
    } else if (gemm->b_col == 1 && gemm->m <= 2 * MAX_ROWS && part->columns % LANES == 0) {
        b = (const REAL *)gemm->b + part->item * gemm->b_item + part->k0 * gemm->b_row + part->n0;
        b_row = gemm->b_row;
    } else {
        NAMED(pack_b)(gemm, part, strip);
    }
    for (int64_t done = 0; done < m; done += rows) {
        int64_t height = m - done < rows ? m - done : rows;
        struct NAMED(target) to = NAMED(target_at)(gemm, part, m0 + done);
        NAMED(tiles)[height - 1](part->rows, panels, b, b_row, &to);
        panels += height * part->rows;
    }
}

static inline struct td__gemm_part NAMED(part_at)(const struct td__gemm *gemm, int64_t item,
                                                  int64_t k0, int64_t depth, int64_t n0)
{
    return (struct td__gemm_part){
        .item = item,
        .k0 = k0,
        .rows = gemm->k - k0 < depth ? gemm->k - k0 : depth,
        .n0 = n0,
        .columns = gemm->n - n0 < STRIP ? gemm->n - n0 : STRIP,
    };
}

/* All of A is packed first: a tile of C is then finished before the next one. */
static void NAMED(run_kept)(const struct td__gemm *gemm, int64_t depth, REAL *strip, REAL *panels)
{
    int64_t rows = NAMED(piece)(gemm->m, MAX_ROWS);
    for (int64_t k0 = 0; k0 < gemm->k; k0 += depth) {
        int64_t deep = gemm->k - k0 < depth ? gemm->k - k0 : depth;
        NAMED(pack_a)(gemm, 0, gemm->m, rows, k0, deep, panels + k0 * gemm->m);
    }
    for (int64_t item = 0; item < gemm->batch; item++) {
        for (int64_t n0 = 0; n0 < gemm->n; n0 += STRIP)
            for (int64_t k0 = 0; k0 < gemm->k; k0 += depth) {
                struct td__gemm_part part = NAMED(part_at)(gemm, item, k0, depth, n0);
                NAMED(multiply)(gemm, &part, panels + k0 * gemm->m, 0, gemm->m, rows, strip);
            }
        if (gemm->item_done)
            gemm->item_done(gemm, item);
    }
}

/* A block of A is packed, and goes past all of B. */
static void NAMED(run_blocks)(const struct td__gemm *gemm, int64_t depth, REAL *strip, REAL *panels)
{
    int64_t block = NAMED(piece)(gemm->m, BLOCK);
    int64_t rows = NAMED(piece)(block, MAX_ROWS);
    for (int64_t k0 = 0; k0 < gemm->k; k0 += depth)
        for (int64_t m0 = 0; m0 < gemm->m; m0 += block) {
            int64_t deep = gemm->k - k0 < depth ? gemm->k - k0 : depth;
            int64_t m = gemm->m - m0 < block ? gemm->m - m0 : block;
            NAMED(pack_a)(gemm, m0, m, rows, k0, deep, panels);
            for (int64_t item = 0; item < gemm->batch; item++)
                for (int64_t n0 = 0; n0 < gemm->n; n0 += STRIP) {
                    struct td__gemm_part part = NAMED(part_at)(gemm, item, k0, depth, n0);
                    NAMED(multiply)(gemm, &part, panels, m0, m, rows, strip);
                }
        }
}

/* With few steps along k most of the time goes to C, which should then be written row by row: all of
 * B is packed, and each panel of A goes past it. */
static bool NAMED(is_flat)(const struct td__gemm *gemm)
{
    return gemm->batch == 1 && !gemm->pack_b && !gemm->item_done && gemm->k <= DEPTH &&
           gemm->m >= 2 * MAX_ROWS && td__gemm_keeps_a(gemm->n + STRIP, gemm->k);
}

static void NAMED(run_flat)(const struct td__gemm *gemm, REAL *panel, REAL *strips)
{
    int64_t rows = NAMED(piece)(gemm->m, MAX_ROWS);
    for (int64_t n0 = 0; n0 < gemm->n; n0 += STRIP) {
        struct td__gemm_part part = NAMED(part_at)(gemm, 0, 0, gemm->k, n0);
        NAMED(pack_b)(gemm, &part, strips + n0 * gemm->k);
    }
    for (int64_t m0 = 0; m0 < gemm->m; m0 += rows) {
        int64_t height = gemm->m - m0 < rows ? gemm->m - m0 : rows;
        NAMED(pack_a)(gemm, m0, height, rows, 0, gemm->k, panel);
        for (int64_t n0 = 0; n0 < gemm->n; n0 += STRIP) {
            struct td__gemm_part part = NAMED(part_at)(gemm, 0, 0, gemm->k, n0);
            struct NAMED(target) to = NAMED(target_at)(gemm, &part, m0);
            NAMED(tiles)[height - 1](gemm->k, panel, strips + n0 * gemm->k, STRIP, &to);
        }
    }
}

/* The first part of the memory to work in has a strip, or a panel. */
#define FIRST_PART (STRIP > MAX_ROWS ? STRIP : MAX_ROWS)

static void NAMED(run)(const struct td__gemm *gemm, void *work)
{
    int64_t depth = NAMED(piece)(gemm->k, DEPTH);
    REAL *strip = work;
    REAL *panels = strip + FIRST_PART * depth + SLACK;
    if (NAMED(is_flat)(gemm))
        NAMED(run_flat)(gemm, strip, panels);
    else if (td__gemm_keeps_a(gemm->m, gemm->k))
        NAMED(run_kept)(gemm, depth, strip, panels);
    else
        NAMED(run_blocks)(gemm, depth, strip, panels);
}

static size_t NAMED(work_bytes)(const struct td__gemm *gemm)
{
    int64_t depth = NAMED(piece)(gemm->k, DEPTH);
    int64_t panels = depth * NAMED(piece)(gemm->m, BLOCK);
    if (NAMED(is_flat)(gemm))
        panels = (gemm->n + STRIP) * gemm->k;
    else if (td__gemm_keeps_a(gemm->m, gemm->k))
        panels = gemm->m * gemm->k;
    return (size_t)(panels + depth * FIRST_PART + 2 * SLACK) * sizeof(REAL);
}

const struct td__gemm_loops LOOPS = {.work_bytes = NAMED(work_bytes), .run = NAMED(run)};

#undef VECTOR
#undef UNALIGNED
#undef LANES
#undef LANES_ARE
#undef SLACK
#undef FIRST_PART
#undef SHUFFLE
#undef FIRST
#undef SECOND
#undef EXCHANGE
#undef REAL_BYTES
#undef STRIP
#undef DEPTH
#undef BLOCK
#undef REAL
#undef LOOPS
#undef NAMED
