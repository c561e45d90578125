/* Packing A and B for the tiles of a matrix product. A part of gemm_loops.h, which has the diagram and the
 * names.
 *
 * Whole vectors are written: the next ones overwrite the excess, and SLACK follows the last one. */

#if REAL_BYTES == 4
/* Where step p of a product is in operands that are halves. Those of bf16 are multiplied in pairs, the
 * second one of a pair first: this is what the processors' own products of bf16 do. */
static inline int64_t NAMED(step_at)(const struct td__gemm *gemm, int64_t p)
{
    return gemm->half == TD_BF16 ? p ^ 1 : p;
}

/* One element, as f32; 0 after the end of a last pair. */
static inline REAL NAMED(half_at)(const struct td__gemm *gemm, const uint16_t *from, int64_t stride,
                                  int64_t p)
{
    const int64_t at = NAMED(step_at)(gemm, p);
    if (at >= gemm->half_k)
        return 0;
    return gemm->half == TD_BF16 ? td__bf16_to_f32(from[at * stride])
                                 : td__f16_to_f32(from[at * stride]);
}

/* `depth` steps from k0 on of one row of A or column of B, whose elements are side by side. */
static void NAMED(widen_steps)(const struct td__gemm *gemm, const uint16_t *from, int64_t k0,
                               int64_t depth, REAL *restrict to)
{
    int64_t p = 0;
    if (gemm->half == TD_BF16) {
        const uint16_t *restrict pairs = from + k0; /* which is even */
        for (; p + 2 <= depth && k0 + p + 2 <= gemm->half_k; p += 2) {
            to[p] = td__bf16_to_f32(pairs[p + 1]);
            to[p + 1] = td__bf16_to_f32(pairs[p]);
        }
    } else {
        NAMED(widen_row)(gemm->half, from + k0, depth, to);
        return;
    }
    for (; p < depth; p++)
        to[p] = NAMED(half_at)(gemm, from, 1, k0 + p);
}

/* `many` rows of A or columns of B, `next` elements apart, with steps that are `step` elements apart, as
 * f32 in `to`: steps side by side where they are so in memory, otherwise rows. */
static void NAMED(widen_block)(const struct td__gemm *gemm, const uint16_t *from, int64_t many,
                               int64_t next, int64_t step, int64_t k0, int64_t depth, REAL *to)
{
    if (step == 1) {
        for (int64_t i = 0; i < many; i++)
            NAMED(widen_steps)(gemm, from + i * next, k0, depth, to + i * depth);
        return;
    }
    for (int64_t p = 0; p < depth; p++, to += many) {
        const int64_t at = NAMED(step_at)(gemm, k0 + p);
        if (next == 1 && at < gemm->half_k)
            NAMED(widen_row)(gemm->half, from + at * step, many, to);
        else
            for (int64_t i = 0; i < many; i++)
                to[i] = NAMED(half_at)(gemm, from + i * next, step, k0 + p);
    }
}
#endif

/* A panel of A: `height` rows from m0 on, `depth` columns from k0 on. */
static void NAMED(pack_panel)(const struct td__gemm *gemm, int64_t m0, int64_t height, int64_t k0,
                              int64_t depth, REAL *packed)
{
    const REAL alpha = (REAL)gemm->alpha;
    const REAL *a = (const REAL *)gemm->a + m0 * gemm->a_row + k0 * gemm->a_col;
    const int64_t vectors = (height + LANES - 1) / LANES * LANES;
    if (gemm->a_col == 1) {
        /* The last vector first: it reaches into the next column. */
        for (int64_t i = vectors - LANES; i >= 0; i -= LANES)
            NAMED(transpose)
        (a + i * gemm->a_row, gemm->a_row, height - i < LANES ? height - i : LANES, depth, alpha,
         height, packed + i);
    } else if (gemm->a_row == 1 && m0 + vectors <= gemm->m) {
        for (int64_t p = 0; p < depth; p++)
            for (int64_t i = 0; i < vectors; i += LANES)
                *(UNALIGNED *)(packed + p * height +
                               i) = alpha * *(const UNALIGNED *)(a + p * gemm->a_col + i);
    } else {
        for (int64_t p = 0; p < depth; p++)
            for (int64_t i = 0; i < height; i++)
                packed[p * height + i] = alpha * a[i * gemm->a_row + p * gemm->a_col];
    }
}

/* Rows m0 … of A, `depth` columns from k0 on: panels of `rows` rows, the last one of what is left. */
static void NAMED(pack_a)(const struct td__gemm *gemm, int64_t m0, int64_t m, int64_t rows,
                          int64_t k0, int64_t depth, REAL *packed)
{
    for (int64_t first = 0; first < m; first += rows) {
        const int64_t height = m - first < rows ? m - first : rows;
#if REAL_BYTES == 4
        if (gemm->half_k) {
            REAL wide[MAX_ROWS * DEPTH + LANES_ARE];
            const struct td__gemm part = {.m = height + LANES, /* which may be read */
                                          .a = wide,
                                          .a_row = gemm->a_col == 1 ? depth : 1,
                                          .a_col = gemm->a_col == 1 ? 1 : height,
                                          .alpha = gemm->alpha};
            NAMED(widen_block)
            (gemm, (const uint16_t *)gemm->a + (m0 + first) * gemm->a_row, height, gemm->a_row,
             gemm->a_col, k0, depth, wide);
            NAMED(pack_panel)(&part, 0, height, 0, depth, packed);
            packed += depth * height;
            continue;
        }
#endif
        NAMED(pack_panel)(gemm, m0 + first, height, k0, depth, packed);
        packed += depth * height;
    }
}

static void NAMED(pack_strip)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                              REAL *packed)
{
    const REAL *b = (const REAL *)gemm->b + part->item * gemm->b_item + part->k0 * gemm->b_row +
                    part->n0 * gemm->b_col;
    const int64_t columns = part->columns;
    if (gemm->b_row == 1) {
        for (int64_t j = 0; j < columns; j += LANES)
            NAMED(transpose)
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

static void NAMED(pack_b)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                          REAL *packed)
{
#if REAL_BYTES == 4
    if (gemm->half_k) {
        REAL wide[STRIP * DEPTH];
        const uint16_t *b = (const uint16_t *)gemm->b + part->item * gemm->b_item +
                            part->n0 * gemm->b_col;
        const struct td__gemm strip = {.b = wide,
                                       .b_row = gemm->b_row == 1 ? 1 : part->columns,
                                       .b_col = gemm->b_row == 1 ? part->rows : 1};
        NAMED(widen_block)
        (gemm, b, part->columns, gemm->b_col, gemm->b_row, part->k0, part->rows, wide);
        NAMED(pack_strip)
        (&strip, &(struct td__gemm_part){.rows = part->rows, .columns = part->columns}, packed);
        return;
    }
#endif
    NAMED(pack_strip)(gemm, part, packed);
}
