/* Transposing squares of elements, for packing and direct products. A part of gemm_loops.h, which has the
 * names. */

#if LANES_ARE == 8
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

#if LANES_ARE == 16
/* The same in steps that are single instructions: those within 16 bytes first, then whole 16 bytes. */
#define QUADS(a, b, i, j, k, l)                                                                    \
    __builtin_shufflevector(a, b, i, j, k, l, (i) + 4, (j) + 4, (k) + 4, (l) + 4, (i) + 8,         \
                            (j) + 8, (k) + 8, (l) + 8, (i) + 12, (j) + 12, (k) + 12, (l) + 12)
#define EVEN_QUADS(a, b)                                                                           \
    __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_QUADS(a, b)                                                                            \
    __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)

static inline __attribute__((always_inline)) void NAMED(exchange_all)(VECTOR v[LANES_ARE])
{
    UNROLLED
    for (int i = 0; i < 16; i += 4) {
        const VECTOR low0 = QUADS(v[i], v[i + 1], 0, 16, 1, 17);
        const VECTOR high0 = QUADS(v[i], v[i + 1], 2, 18, 3, 19);
        const VECTOR low1 = QUADS(v[i + 2], v[i + 3], 0, 16, 1, 17);
        const VECTOR high1 = QUADS(v[i + 2], v[i + 3], 2, 18, 3, 19);
        v[i] = QUADS(low0, low1, 0, 1, 16, 17);
        v[i + 1] = QUADS(low0, low1, 2, 3, 18, 19);
        v[i + 2] = QUADS(high0, high1, 0, 1, 16, 17);
        v[i + 3] = QUADS(high0, high1, 2, 3, 18, 19);
    }
    UNROLLED
    for (int i = 0; i < 4; i++) {
        const VECTOR even0 = EVEN_QUADS(v[i], v[i + 4]), odd0 = ODD_QUADS(v[i], v[i + 4]);
        const VECTOR even1 = EVEN_QUADS(v[i + 8], v[i + 12]), odd1 = ODD_QUADS(v[i + 8], v[i + 12]);
        v[i] = EVEN_QUADS(even0, even1);
        v[i + 4] = EVEN_QUADS(odd0, odd1);
        v[i + 8] = ODD_QUADS(even0, even1);
        v[i + 12] = ODD_QUADS(odd0, odd1);
    }
}

#undef QUADS
#undef EVEN_QUADS
#undef ODD_QUADS
#else
static inline __attribute__((always_inline)) void NAMED(exchange_all)(VECTOR v[LANES_ARE])
{
    UNROLLED
    EXCHANGE(1)
    UNROLLED
    EXCHANGE(2)
    UNROLLED
    EXCHANGE(4)
}
#endif

#if PAIRS
#define SOURCE uint16_t /* two of which are a REAL */
#define TRANSPOSE_ALPHA
#define SCALED(x) (x)
#else
#define SOURCE REAL
#define TRANSPOSE_ALPHA REAL alpha,
#define SCALED(x) (alpha * (x))
#endif

/* `count` rows, at most LANES, `row` apart, of `depth` steps side by side, times alpha: step p of row i
 * goes to to[p * width + i]. Also writes the rest of the vector there. */
static void NAMED(transpose)(const SOURCE *from, int64_t row, int64_t count, int64_t depth,
                             TRANSPOSE_ALPHA int64_t width, REAL *to)
{
    const SOURCE *rows[LANES_ARE];
    const int elements = sizeof(REAL) / sizeof(SOURCE);
    for (int i = 0; i < LANES_ARE; i++) {
        rows[i] = from;
        from += i + 1 < count ? row : 0;
    }
    int64_t p = 0;
    for (; p + LANES_ARE <= depth; p += LANES_ARE) {
        VECTOR v[LANES_ARE];
        UNROLLED
        for (int i = 0; i < LANES_ARE; i++)
            v[i] = SCALED(*(const UNALIGNED *)(rows[i] + p * elements));
        NAMED(exchange_all)(v);
        UNROLLED
        for (int i = 0; i < LANES_ARE; i++)
            *(UNALIGNED *)(to + (p + i) * width) = v[i];
    }
    for (; p < depth; p++)
        for (int64_t i = 0; i < count; i++) {
            REAL step;
            memcpy(&step, rows[i] + p * elements, sizeof step);
            to[p * width + i] = SCALED(step);
        }
}

#undef SOURCE
#undef TRANSPOSE_ALPHA
#undef SCALED
