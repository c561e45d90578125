/* Products of few rows with a B whose columns are contiguous along k: a linear layer with few samples, and,
 * transposed, one with few outputs. A part of gemm_loops.h, which has the names.
 *
 * Each element of B is used by one panel of A only, so a strip is not packed: squares of LANES columns by
 * LANES steps are transposed in registers, overlapping the multiplications of the square before. A is packed
 * in blocks of LANES steps, [blocks, m, LANES]: rows are not transposed, and no two of them map to one cache
 * set. */

#define THIN 12 /* rows at most: their sums and a square fill the registers */
#if MAX_ROWS == 14
#define FOR_EACH_THIN(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define FOR_EACH_THIN(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
#define THIN_MOST (MAX_ROWS < THIN ? MAX_ROWS : THIN)

static bool NAMED(is_thin)(const struct td__gemm *gemm)
{
    return gemm->m <= THIN_MOST && gemm->b_row == 1 && gemm->batch == 1 && !gemm->pack_b &&
           !gemm->half_k && !gemm->packed_a;
}

/* Row by row, which the hardware prefetches. */
static void NAMED(pack_thin)(const struct td__gemm *gemm, REAL *packed)
{
    const REAL alpha = (REAL)gemm->alpha;
    for (int64_t i = 0; i < gemm->m; i++, packed += LANES) {
        const REAL *a = (const REAL *)gemm->a + i * gemm->a_row;
        int64_t p = 0;
        for (; p + LANES <= gemm->k && gemm->a_col == 1; p += LANES)
            *(UNALIGNED *)(packed + p * gemm->m) = alpha * *(const UNALIGNED *)(a + p);
        for (; p < gemm->k; p++)
            packed[p / LANES * LANES * gemm->m + p % LANES] = alpha * a[p * gemm->a_col];
    }
}

/* Adds `count` steps to a tile of one vector: `square` has them transposed. */
static inline __attribute__((always_inline)) void NAMED(add_square)(const int rows, const int count,
                                                                    const REAL *a,
                                                                    const VECTOR *square,
                                                                    VECTOR sums[][2])
{
    UNROLLED
    for (int p = 0; p < count; p++) {
        UNROLLED
        for (int i = 0; i < rows; i++)
            sums[i][0] += a[i * LANES + p] * square[p];
    }
}

/* A tile of one vector, all steps: column i of B begins at columns[i]. */
static inline __attribute__((always_inline)) void
NAMED(thin_tile)(const int rows, int64_t k, const REAL *a, const REAL *const columns[LANES_ARE],
                 const struct NAMED(target) * to)
{
    REAL spread[MAX_ROWS * STRIP];
    VECTOR sums[MAX_ROWS][2], square[LANES_ARE];
    NAMED(begin_tile)(rows, 1, to, spread, sums);
    int64_t p = 0;
    for (; p + LANES <= k; p += LANES, a += rows * LANES) {
        UNROLLED
        for (int i = 0; i < LANES_ARE; i++) /* volatile: compilers would load it twice */
            square[i] = *(const volatile UNALIGNED *)(columns[i] + p);
        NAMED(exchange_all)(square);
        NAMED(add_square)(rows, LANES, a, square, sums);
    }
    for (; p < k; p++, a++) {
        VECTOR step = {0};
        for (int i = 0; i < LANES_ARE; i++)
            step[i] = columns[i][p];
        NAMED(add_square)(rows, 1, a, &step, sums);
    }
    NAMED(store_tile)(rows, 1, to, spread, sums);
}

#define TILE(rows)                                                                                 \
    static void NAMED(thin_tile##rows)(int64_t k, const REAL *a, const REAL *const *columns,       \
                                       const struct NAMED(target) * to)                            \
    {                                                                                              \
        NAMED(thin_tile)(rows, k, a, columns, to);                                                 \
    }
FOR_EACH_THIN(TILE)
#undef TILE

#define TILE(rows) NAMED(thin_tile##rows),
static void (*const NAMED(thin_tiles)[])(int64_t k, const REAL *a, const REAL *const *columns,
                                         const struct NAMED(target) * to) = {FOR_EACH_THIN(TILE)};
#undef TILE

static void NAMED(run_thin)(const struct td__gemm *gemm, REAL *packed)
{
    NAMED(pack_thin)(gemm, packed);
    struct td__gemm_part part = {.rows = gemm->k};
    for (; part.n0 < gemm->n; part.n0 += LANES) {
        part.columns = gemm->n - part.n0 < LANES ? gemm->n - part.n0 : LANES;
        const REAL *b = (const REAL *)gemm->b + part.n0 * gemm->b_col, *columns[LANES_ARE];
        for (int i = 0; i < LANES_ARE; i++)
            columns[i] = b + (i < part.columns ? i : part.columns - 1) * gemm->b_col;
        const struct NAMED(target) to = NAMED(target_at)(gemm, &part, 0);
        NAMED(thin_tiles)[gemm->m - 1](gemm->k, packed, columns, &to);
    }
    if (gemm->item_done)
        gemm->item_done(gemm, 0);
}
