/* Packing A and B of bf16 for tiles whose steps are pairs of elements: a pair is what a REAL is elsewhere,
 * its first element the lower half, and k counts pairs. A part of gemm_loops.h, which has the names. */

/* Pair p of elements that are `step` apart; after the end there is 0. */
static inline uint32_t NAMED(pair_at)(const struct td__gemm *gemm, const uint16_t *from,
                                      int64_t step, int64_t p)
{
    const uint32_t second = 2 * p + 1 < gemm->half_k ? from[(2 * p + 1) * step] : 0;
    return from[2 * p * step] | second << 16;
}

/* A vector of pairs, of the elements from `begin` on of two vectors. */
static inline __m512i NAMED(joined)(__m512i first, __m512i second, int begin)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_add_epi32(lanes, _mm512_set1_epi32(begin));
    const __m512i high = _mm512_add_epi32(lanes, _mm512_set1_epi32(begin + 2 * LANES));
    const __m512i from = _mm512_or_si512(low, _mm512_slli_epi32(high, 16)); /* a constant */
    return _mm512_permutex2var_epi16(first, from, second);
}

/* Pairs of two rows of elements that are side by side, as many as `lanes` has bits; 0 in the other lanes. */
static inline void NAMED(join_vector)(const uint16_t *first, const uint16_t *second,
                                      __mmask16 lanes, uint32_t *to)
{
    const __m512i a = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(lanes, first));
    const __m512i b = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(lanes, second));
    _mm512_storeu_si512(to, NAMED(joined)(a, b, 0));
}

static inline void NAMED(join_two_vectors)(const uint16_t *first, const uint16_t *second,
                                           uint32_t *to)
{
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    _mm512_storeu_si512(to, NAMED(joined)(a, b, 0));
    _mm512_storeu_si512(to + LANES, NAMED(joined)(a, b, LANES));
}

/* `many` rows of A or columns of B, `next` apart: pair p of row i goes to to[p * width + i]. Vectors are
 * written whole. */
static void NAMED(pack_pairs)(const struct td__gemm *gemm, const uint16_t *from, int64_t many,
                              int64_t next, int64_t step, int64_t k0, int64_t depth, int64_t width,
                              REAL *packed)
{
    uint32_t *to = (uint32_t *)packed;
    /* A last pair of one element only is not read as one. */
    const int64_t whole = 2 * (k0 + depth) <= gemm->half_k ? depth : depth - 1;
    if (step == 1) {
        /* The last vector first: it may reach into the next step. */
        for (int64_t i = (many - 1) / LANES * LANES; i >= 0; i -= LANES) {
            const int64_t count = many - i < LANES ? many - i : LANES;
            NAMED(transpose)(from + i * next + 2 * k0, next, count, whole, width, packed + i);
        }
    } else if (next == 1) {
        const uint16_t *first = from + 2 * k0 * step;
        int64_t i = 0;
        for (; i + 2 * LANES <= many; i += 2 * LANES)
            for (int64_t p = 0; p < whole; p++)
                NAMED(join_two_vectors)
        (first + 2 * p * step + i, first + (2 * p + 1) * step + i, to + p * width + i);
        for (; i < many; i += LANES) {
            const int64_t count = many - i < LANES ? many - i : LANES;
            const __mmask16 lanes = (__mmask16)((1u << count) - 1);
            for (int64_t p = 0; p < whole; p++)
                NAMED(join_vector)
            (first + 2 * p * step + i, first + (2 * p + 1) * step + i, lanes, to + p * width + i);
        }
    } else {
        for (int64_t p = 0; p < whole; p++)
            for (int64_t i = 0; i < many; i++)
                to[p * width + i] = NAMED(pair_at)(gemm, from + i * next, step, k0 + p);
    }
    for (int64_t i = 0; i < many && whole < depth; i++)
        to[whole * width + i] = NAMED(pair_at)(gemm, from + i * next, step, k0 + whole);
}

/* Rows m0 … of A, `depth` pairs from k0 on: panels of `rows` rows, the last one of what is left. */
static void NAMED(pack_a)(const struct td__gemm *gemm, int64_t m0, int64_t m, int64_t rows,
                          int64_t k0, int64_t depth, REAL *packed)
{
    for (int64_t first = 0; first < m; first += rows) {
        const int64_t height = m - first < rows ? m - first : rows;
        NAMED(pack_pairs)
        (gemm, (const uint16_t *)gemm->a + (m0 + first) * gemm->a_row, height, gemm->a_row,
         gemm->a_col, k0, depth, height, packed);
        packed += depth * height;
    }
}

static void NAMED(pack_b)(const struct td__gemm *gemm, const struct td__gemm_part *part,
                          REAL *packed)
{
    const uint16_t *b = (const uint16_t *)gemm->b + part->item * gemm->b_item +
                        part->n0 * gemm->b_col;
    NAMED(pack_pairs)
    (gemm, b, part->columns, gemm->b_col, gemm->b_row, part->k0, part->rows, STRIP, packed);
}
