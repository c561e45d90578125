/* Turning squares of elements, which packing and direct products need. A part of gemm_loops.h, which has
 * the names. */

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

#if PAIRS
#define SOURCE uint16_t /* two of which are a REAL */
#define TURN_ALPHA
#define SCALED(x) (x)
#else
#define SOURCE REAL
#define TURN_ALPHA REAL alpha,
#define SCALED(x) (alpha * (x))
#endif

/* `count` rows, at most LANES, `row` apart, of `depth` steps side by side, times alpha: step p of row i
 * goes to to[p * width + i]. Also writes the rest of the vector there. */
static void NAMED(turn)(const SOURCE *from, int64_t row, int64_t count, int64_t depth,
                        TURN_ALPHA int64_t width, REAL *to)
{
    const SOURCE *rows[LANES_ARE];
    const int elements = sizeof(REAL) / sizeof(SOURCE);
    for (int i = 0; i < LANES_ARE; i++)
        rows[i] = from + (i < count ? i : count - 1) * row;
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
#undef TURN_ALPHA
#undef SCALED
