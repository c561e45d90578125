/* The loops of a matrix product, for one instruction set and one type of elements.
 *
 * The file that includes this defines REAL, REAL_BYTES, VECTOR_BYTES, MAX_ROWS, and LOOPS and DIRECT, the
 * names of the two tables; it may include this twice, for f32 and f64.
 *
 *            n ->          strip of B: k x STRIP, packed, stays in L1
 *           +--+--+--+
 *         k |  |  |  |     panel of A: up to MAX_ROWS x k, packed; read once for each strip
 *           +--+--+--+
 *     +---+ +--+--+--+
 *     |   | |  |##|  |     tile of C: rows x STRIP, held in registers while k runs
 *   m +---+ +--+--+--+
 *     |   | |  |  |  |
 *     +---+ +--+--+--+
 *
 * A step along k loads two vectors of the strip, and multiplies them with each of the panel's elements. k
 * and m are divided into pieces of nearly equal size: a remainder of one row would be slow. Each element of
 * C is summed along k in one fixed order, for all m and n. */
#include "base/half.h"
#include "tensor/direct.h"
#include "tensor/gemm.h"

#include <string.h>

/* Products of pairs of bf16 (PAIRS) define their own MULTIPLY_ADD, and STORE_HALVES, which rounds and stores
 * a row of a tile. */
#ifndef MULTIPLY_ADD
#define PAIRS 0
#define ALIGNED_TO sizeof(REAL)
#define MULTIPLY_ADD(sum, a, b) ((sum) += (a) * (b))
#else
#define PAIRS 1
#define ALIGNED_TO 2 /* a pair begins at any element */
#endif

/* Before a loop with a constant count: fully unrolled. Only then are arrays in registers. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

typedef REAL NAMED(vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL NAMED(unaligned)
    __attribute__((vector_size(VECTOR_BYTES), aligned(ALIGNED_TO), may_alias));

#define VECTOR NAMED(vector)
#define UNALIGNED NAMED(unaligned)
#define LANES ((int)(VECTOR_BYTES / sizeof(REAL)))
#define LANES_ARE (VECTOR_BYTES / REAL_BYTES) /* the same for the preprocessor */
#define STRIP (2 * LANES)
#define DEPTH 256                     /* along k */
#define BLOCK (TD__GEMM_KEPT / DEPTH) /* along m, if A is not kept as a whole */
#define FLAT_MOST (128 * 1024)        /* elements of B that stay in L2 */
/* With so few steps, tiles of few rows are faster: rows of C that are a power of two apart map to the same
 * L1 set, which has 8 ways. */
#define SHALLOW 64
#define FEW_ROWS 6
#define NEAR_ROWS 8 /* of a tile that is read in place: their offsets are in registers */

/* Calls a macro for each number of rows that a tile may have. */
#if MAX_ROWS == 14
#define FOR_EACH_HEIGHT(X)                                                                         \
    X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define FOR_EACH_HEIGHT(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

#include "tensor/gemm_tiles.h"

/* The size of the pieces when `size` is divided into nearly equal pieces of at most `most`. */
static int64_t NAMED(piece)(int64_t size, int64_t most)
{
    int64_t pieces = (size + most - 1) / most;
    return (size + pieces - 1) / pieces;
}

/* Pieces of k are even, so that no pair of halves is split. */
static int64_t NAMED(depth_of)(const struct td__gemm *gemm)
{
    return (NAMED(piece)(gemm->k, DEPTH) + 1) / 2 * 2;
}

#if REAL_BYTES == 4
/* `count` halves that are side by side. */
static void NAMED(widen_row)(td_dtype half, const uint16_t *restrict from, int64_t count,
                             REAL *restrict to)
{
    if (half == TD_BF16)
        for (int64_t i = 0; i < count; i++)
            to[i] = td__bf16_to_f32(from[i]);
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = td__f16_to_f32(from[i]);
}
#endif

#define SLACK 64 /* elements after what is packed: the last vectors may reach beyond its end */

#include "tensor/gemm_transpose.h"
#if PAIRS
#include "tensor/gemm_pack_pairs.h"
#else
#include "tensor/gemm_pack.h"
#endif

/* Where a strip of B meets rows m0 … of A. */
static inline struct NAMED(target)
    NAMED(target_at)(const struct td__gemm *gemm, const struct td__gemm_part *part, int64_t m0)
{
    const bool first = part->k0 == 0;
    return (struct NAMED(target)){
        .c = gemm->c_half
                 ? NULL
                 : (REAL *)gemm->c + part->item * gemm->c_item + m0 * gemm->c_row + part->n0,
        .c_row = gemm->c_row,
        .columns = (int)part->columns,
        .add = gemm->accumulate || !first,
        .row_bias = gemm->row_bias && first ? (const REAL *)gemm->row_bias + m0 : NULL,
        .column_bias = gemm->column_bias && first ? (const REAL *)gemm->column_bias + part->n0
                                                  : NULL,
    };
}

/* Prefetches the next tile of C, `next` rows at most, while this one of `height` rows is computed. */
static inline void NAMED(prefetch)(const struct NAMED(target) * to, int64_t height, int64_t next)
{
    const int64_t row = to->halves ? to->half_row * (int64_t)sizeof *to->halves
                                   : to->c_row * (int64_t)sizeof *to->c;
    const char *c = (to->halves ? (const char *)to->halves : (const char *)to->c) + height * row;
    for (int64_t i = 0; i < (next < height ? next : height); i++, c += row) {
        __builtin_prefetch(c, 1);
        if (!to->halves)
            __builtin_prefetch(c + VECTOR_BYTES, 1);
    }
}

#if PAIRS
/* Whether rows of A are read in place: packing panels does not pay for few strips. Rows that are 2 KiB apart
 * would map to the same few cache sets. */
static bool NAMED(is_in_place)(const struct td__gemm *gemm)
{
    return gemm->a_col == 1 && gemm->n <= 4 * STRIP && gemm->half_k % 2 == 0 && !gemm->packed_a &&
           gemm->a_row % 1024 != 0 && td__gemm_keeps_a(gemm->m, gemm->k);
}
#endif

/* Multiplies the panels of A, of `m` rows, by a strip of B, which is packed unless it is used too rarely to
 * pay. `to` is the target of the first panel's tile. */
static void NAMED(multiply)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                            const REAL *panels, int64_t m, int64_t rows, REAL *strip,
                            struct NAMED(target) to)
{
    const REAL *b = strip;
    int64_t b_row = STRIP;
    if (gemm->pack_b) {
        gemm->pack_b(gemm, part, STRIP, strip);
    } else if (!gemm->half_k && gemm->b_col == 1 && gemm->m <= 2 * MAX_ROWS &&
               part->columns % LANES == 0) {
        b = (const REAL *)gemm->b + part->item * gemm->b_item + part->k0 * gemm->b_row + part->n0;
        b_row = gemm->b_row;
    } else {
        NAMED(pack_b)(gemm, part, strip);
    }
    for (int64_t done = 0; done < m; done += rows) {
        int64_t height = m - done < rows ? m - done : rows;
        NAMED(prefetch)(&to, height, m - done - height);
#if PAIRS
        if (NAMED(is_in_place)(gemm))
            NAMED(tiles_in_place)
        [height - 1](part->rows, (const uint16_t *)gemm->a + done * gemm->a_row + 2 * part->k0,
                     gemm->a_row, b, &to);
        else
#endif
            NAMED(tiles)[height - 1](part->rows, panels, b, b_row, &to);
        panels += height * part->rows;
        to.c += height * to.c_row;
        if (to.halves)
            to.halves += height * to.half_row;
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

/* Panels of A `begin` to `end` - 1: all rows of a piece of k, then of the next one. */
static void NAMED(pack_panels)(const struct td__gemm *gemm, int64_t begin, int64_t end,
                               void *packed)
{
    const int64_t depth = NAMED(depth_of)(gemm), rows = NAMED(piece)(gemm->m, MAX_ROWS);
    const int64_t each = (gemm->m + rows - 1) / rows;
    for (int64_t i = begin; i < end; i++) {
        const int64_t k0 = i / each * depth, m0 = i % each * rows;
        const int64_t deep = gemm->k - k0 < depth ? gemm->k - k0 : depth;
        const int64_t height = gemm->m - m0 < rows ? gemm->m - m0 : rows;
        REAL *to = (REAL *)packed + k0 * gemm->m + m0 * deep;
        if (i + 1 < end) {
            NAMED(pack_a)(gemm, m0, height, rows, k0, deep, to);
        } else {
            /* Writes beyond its end must not overwrite what another thread has packed there. */
            REAL panel[MAX_ROWS * DEPTH + SLACK];
            NAMED(pack_a)(gemm, m0, height, rows, k0, deep, panel);
            memcpy(to, panel, (size_t)(height * deep) * sizeof *to);
        }
    }
}

static int64_t NAMED(count_panels)(const struct td__gemm *gemm)
{
    const int64_t depth = NAMED(depth_of)(gemm), rows = NAMED(piece)(gemm->m, MAX_ROWS);
    return (gemm->k + depth - 1) / depth * ((gemm->m + rows - 1) / rows);
}

static size_t NAMED(panel_bytes)(const struct td__gemm *gemm)
{
    return (size_t)(gemm->m * gemm->k + SLACK) * sizeof(REAL);
}

#if REAL_BYTES == 4
/* Columns n0 … of a C of halves to `sums`, rows of STRIP. */
static void NAMED(load_halves)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                               REAL *sums)
{
    for (int64_t i = 0; i < gemm->m; i++) {
        const uint16_t *restrict c = (const uint16_t *)gemm->c + part->item * gemm->c_item +
                                     i * gemm->c_row + part->n0;
        NAMED(widen_row)(gemm->half, c, part->columns, sums + i * STRIP);
    }
}
#endif

/* One strip of C, all steps along k. A C of halves is in `sums`, in f32, until the last step. */
static void NAMED(make_strip)(const struct td__gemm *gemm, int64_t item, int64_t n0,
                              const REAL *panels, REAL *strip, REAL *sums)
{
    const int64_t depth = NAMED(depth_of)(gemm), rows = NAMED(piece)(gemm->m, MAX_ROWS);
    for (int64_t k0 = 0; k0 < gemm->k; k0 += depth) {
        const struct td__gemm_part part = NAMED(part_at)(gemm, item, k0, depth, n0);
        struct NAMED(target) to = NAMED(target_at)(gemm, &part, 0);
#if REAL_BYTES == 4
        if (gemm->c_half) {
            to.c = sums;
            to.c_row = STRIP;
            if (k0 == 0 && gemm->accumulate)
                NAMED(load_halves)(gemm, &part, sums);
            if (k0 + depth >= gemm->k)
                to.halves = (uint16_t *)gemm->c + item * gemm->c_item + n0;
            to.half_row = gemm->c_row;
            to.half = gemm->half;
        }
#endif
        NAMED(multiply)(gemm, &part, panels + k0 * gemm->m, gemm->m, rows, strip, to);
    }
    (void)sums;
}

/* All of A is packed first: the tiles of a strip are then complete before the next strip. */
static void NAMED(run_kept)(const struct td__gemm *gemm, REAL *strip, REAL *sums, REAL *panels)
{
    const REAL *kept = gemm->packed_a;
#if PAIRS
    if (NAMED(is_in_place)(gemm))
        kept = panels; /* not used */
#endif
    if (!kept) {
        NAMED(pack_panels)(gemm, 0, NAMED(count_panels)(gemm), panels);
        kept = panels;
    }
    for (int64_t item = 0; item < gemm->batch; item++) {
        for (int64_t n0 = 0; n0 < gemm->n; n0 += STRIP)
            NAMED(make_strip)(gemm, item, n0, kept, strip, sums);
        if (gemm->item_done)
            gemm->item_done(gemm, item);
    }
}

/* A block of A is packed, and multiplied by all of B. */
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
                    NAMED(multiply)
                    (gemm, &part, panels, m, rows, strip, NAMED(target_at)(gemm, &part, m0));
                }
        }
}

/* With few steps along k writing C takes most of the time, and is faster row by row: all of B is packed, and
 * each panel of A is multiplied by it. */
static bool NAMED(is_flat)(const struct td__gemm *gemm)
{
    return gemm->batch == 1 && !gemm->pack_b && !gemm->item_done && gemm->k <= DEPTH &&
           gemm->m >= 2 * MAX_ROWS && gemm->n <= FLAT_MOST &&
           (gemm->n + STRIP) * gemm->k <= FLAT_MOST && !gemm->packed_a && !gemm->c_half;
}

static void NAMED(run_flat)(const struct td__gemm *gemm, REAL *panel, REAL *strips)
{
    int64_t rows = NAMED(piece)(gemm->m, gemm->k <= SHALLOW ? FEW_ROWS : MAX_ROWS);
    for (int64_t n0 = 0; n0 < gemm->n; n0 += STRIP) {
        struct td__gemm_part part = NAMED(part_at)(gemm, 0, 0, gemm->k, n0);
        NAMED(pack_b)(gemm, &part, strips + n0 * gemm->k);
    }
    for (int64_t m0 = 0; m0 < gemm->m; m0 += rows) {
        int64_t height = gemm->m - m0 < rows ? gemm->m - m0 : rows;
        NAMED(pack_a)(gemm, m0, height, rows, 0, gemm->k, panel);
        /* Tiles of few steps are so short that computing each one's address anew is measurable. */
        const struct td__gemm_part first = NAMED(part_at)(gemm, 0, 0, gemm->k, 0);
        struct NAMED(target) to = NAMED(target_at)(gemm, &first, m0);
        for (int64_t n0 = 0; n0 < gemm->n; n0 += STRIP, to.c += STRIP) {
            to.columns = gemm->n - n0 < STRIP ? (int)(gemm->n - n0) : STRIP;
            to.column_bias = gemm->column_bias ? (const REAL *)gemm->column_bias + n0 : NULL;
            NAMED(tiles)[height - 1](gemm->k, panel, strips + n0 * gemm->k, STRIP, &to);
        }
    }
}

#if !PAIRS
#include "tensor/gemm_thin.h"
#endif

/* The first part of the workspace has a strip, or a panel. */
#define FIRST_PART (STRIP > MAX_ROWS ? STRIP : MAX_ROWS)

static void NAMED(run)(const struct td__gemm *gemm, void *work)
{
    int64_t depth = NAMED(depth_of)(gemm);
    REAL *strip = work;
    REAL *sums = strip + FIRST_PART * depth + SLACK;
    REAL *panels = sums + (gemm->c_half ? gemm->m * STRIP : 0);
#if !PAIRS
    if (NAMED(is_thin)(gemm)) {
        NAMED(run_thin)(gemm, panels);
        return;
    }
#endif
    if (NAMED(is_flat)(gemm))
        NAMED(run_flat)(gemm, strip, panels);
    else if (td__gemm_keeps_a(gemm->m, gemm->k))
        NAMED(run_kept)(gemm, strip, sums, panels);
    else
        NAMED(run_blocks)(gemm, depth, strip, panels);
}

static size_t NAMED(work_bytes)(const struct td__gemm *gemm)
{
    int64_t depth = NAMED(depth_of)(gemm);
    int64_t panels = depth * NAMED(piece)(gemm->m, BLOCK);
    if (NAMED(is_flat)(gemm))
        panels = (gemm->n + STRIP) * gemm->k;
    else if (gemm->packed_a)
        panels = 0;
    else if (td__gemm_keeps_a(gemm->m, gemm->k))
        panels = gemm->m * gemm->k;
#if !PAIRS
    if (NAMED(is_thin)(gemm))
        panels = gemm->m * (gemm->k + LANES);
#endif
    if (gemm->c_half)
        panels += gemm->m * STRIP;
    return (size_t)(panels + depth * FIRST_PART + 2 * SLACK) * sizeof(REAL);
}

const struct td__gemm_loops LOOPS = {.work_bytes = NAMED(work_bytes),
                                     .run = NAMED(run),
                                     .is_flat = NAMED(is_flat),
                                     .a_panels = NAMED(count_panels),
                                     .a_bytes = NAMED(panel_bytes),
                                     .pack_a = NAMED(pack_panels)};

#if !PAIRS
#include "tensor/direct_loops.h"
#endif

#undef UNROLLED
#undef PAIRS
#undef ALIGNED_TO
#undef MULTIPLY_ADD
#undef STORE_HALVES
#undef VECTOR
#undef UNALIGNED
#undef LANES
#undef LANES_ARE
#undef SLACK
#undef FIRST_PART
#undef THIN
#undef THIN_MOST
#undef FOR_EACH_THIN
#undef SHUFFLE
#undef FIRST
#undef SECOND
#undef EXCHANGE
#undef REAL_BYTES
#undef STRIP
#undef DEPTH
#undef BLOCK
#undef FLAT_MOST
#undef SHALLOW
#undef FEW_ROWS
#undef NEAR_ROWS
#undef REAL
#undef LOOPS
#undef DIRECT
#undef FOR_EACH_HEIGHT
#undef NAMED
