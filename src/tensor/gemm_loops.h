/* The loops of a matrix product, for one instruction set and one type of elements.
 *
 * The file that includes this defines REAL, VECTOR_BYTES, MAX_ROWS and LOOPS, the name of the table
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

static inline __attribute__((always_inline)) void
NAMED(store)(const struct NAMED(target) * to, int rows, int vectors, const VECTOR sums[][2])
{
    for (int i = 0; i < rows; i++) {
        REAL *c = to->c + i * to->c_row;
        for (int v = 0; v < vectors; v++) {
            VECTOR sum = sums[i][v];
            if (to->row_bias)
                sum += to->row_bias[i];
            if (to->column_bias)
                sum += *(const UNALIGNED *)(to->column_bias + v * LANES);
            if (to->add)
                sum += *(const UNALIGNED *)(c + v * LANES);
            *(UNALIGNED *)(c + v * LANES) = sum;
        }
    }
}

/* The same for a tile at the right edge of C, one element at a time. */
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

/* One tile. `rows` and `vectors` are constants where this is inlined, so that the sums are
 * registers. */
static inline __attribute__((always_inline)) void NAMED(tile)(const int rows, const int vectors,
                                                              int64_t k, const REAL *a,
                                                              const REAL *b, int64_t b_row,
                                                              const struct NAMED(target) * to)
{
    VECTOR sums[MAX_ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
        sums[i][0] = sums[i][1] = (VECTOR){0};
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
    if (to->columns == vectors * LANES) {
        NAMED(store)(to, rows, vectors, (const VECTOR(*)[2])sums);
    } else {
        REAL spread[MAX_ROWS * STRIP];
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            *(UNALIGNED *)(spread + i * STRIP) = sums[i][0];
            *(UNALIGNED *)(spread + i * STRIP + LANES) = sums[i][1];
        }
        NAMED(store_part)(to, rows, spread);
    }
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

/* Rows m0 … of A, `depth` columns from k0 on: panels of `rows` rows, the last one of what is left. */
static void NAMED(pack_a)(const struct td__gemm *gemm, int64_t m0, int64_t m, int64_t rows,
                          int64_t k0, int64_t depth, REAL *packed)
{
    const REAL *a = (const REAL *)gemm->a + m0 * gemm->a_row + k0 * gemm->a_col;
    const REAL alpha = (REAL)gemm->alpha;
    for (int64_t first = 0; first < m; first += rows) {
        int64_t height = m - first < rows ? m - first : rows;
        for (int64_t p = 0; p < depth; p++)
            for (int64_t i = 0; i < height; i++)
                packed[p * height + i] = alpha * a[(first + i) * gemm->a_row + p * gemm->a_col];
        packed += depth * height;
    }
}

static void NAMED(pack_b)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                          int64_t width, void *to)
{
    const REAL *b = (const REAL *)gemm->b + part->item * gemm->b_item + part->k0 * gemm->b_row +
                    part->n0 * gemm->b_col;
    REAL *packed = to;
    for (int64_t p = 0; p < part->rows; p++) {
        for (int64_t j = 0; j < part->columns; j++)
            packed[p * width + j] = b[p * gemm->b_row + j * gemm->b_col];
        for (int64_t j = part->columns; j < width; j++)
            packed[p * width + j] = 0;
    }
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
        NAMED(pack_b)(gemm, part, STRIP, strip);
    }
    bool first = part->k0 == 0;
    struct NAMED(target) to = {
        .c = (REAL *)gemm->c + part->item * gemm->c_item + m0 * gemm->c_row + part->n0,
        .c_row = gemm->c_row,
        .columns = (int)part->columns,
        .add = gemm->accumulate || !first,
        .row_bias = gemm->row_bias && first ? (const REAL *)gemm->row_bias + m0 : NULL,
        .column_bias = gemm->column_bias && first ? (const REAL *)gemm->column_bias + part->n0
                                                  : NULL,
    };
    for (int64_t done = 0; done < m; done += rows) {
        int64_t height = m - done < rows ? m - done : rows;
        NAMED(tiles)[height - 1](part->rows, panels, b, b_row, &to);
        panels += height * part->rows;
        to.c += height * to.c_row;
        if (to.row_bias)
            to.row_bias += height;
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

static void NAMED(run)(const struct td__gemm *gemm, void *work)
{
    int64_t depth = NAMED(piece)(gemm->k, DEPTH);
    REAL *strip = work;
    REAL *panels = strip + STRIP * depth;
    if (td__gemm_keeps_a(gemm->m, gemm->k))
        NAMED(run_kept)(gemm, depth, strip, panels);
    else
        NAMED(run_blocks)(gemm, depth, strip, panels);
}

static size_t NAMED(work_bytes)(const struct td__gemm *gemm)
{
    int64_t depth = NAMED(piece)(gemm->k, DEPTH);
    int64_t panels = td__gemm_keeps_a(gemm->m, gemm->k) ? gemm->m * gemm->k
                                                        : depth * NAMED(piece)(gemm->m, BLOCK);
    return (size_t)(panels + depth * STRIP) * sizeof(REAL);
}

const struct td__gemm_loops LOOPS = {.work_bytes = NAMED(work_bytes), .run = NAMED(run)};

#undef VECTOR
#undef UNALIGNED
#undef LANES
#undef STRIP
#undef DEPTH
#undef BLOCK
#undef REAL
#undef LOOPS
#undef NAMED
