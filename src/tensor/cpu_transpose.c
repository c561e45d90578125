/* Transposes in tiles that fit the registers. Rows of large matrices are often a power of two apart, so that
 * the lines of a tile would evict each other from the cache; here each is read and written once, as a whole.
 *
 * A tile is transposed recursively: its off-diagonal quarters are swapped, then those of each quarter, down
 * to single elements. In vectors, rows i and i + s exchange the elements whose index has the bit s set or
 * not. */
#include "tensor/cpu_transpose.h"

#include "tensor/vector.h"

#include <string.h>

#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31

/* The same for eight elements in a row. */
#define LOW_4_OF_8 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_4_OF_8 4, 5, 6, 7, 12, 13, 14, 15
#define LOW_2_OF_8 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_2_OF_8 2, 3, 10, 11, 6, 7, 14, 15
#define LOW_1_OF_8 0, 8, 2, 10, 4, 12, 6, 14
#define HIGH_1_OF_8 1, 9, 3, 11, 5, 13, 7, 15

/* One step: `low` and `high` say which elements of two rows become the new rows. */
#define EXCHANGE(V, lanes, s, low, high)                                                           \
    _Pragma("GCC unroll 16") for (int i = 0; i < (lanes); i++)                                     \
    {                                                                                              \
        if (i & (s))                                                                               \
            continue;                                                                              \
        V upper = __builtin_shufflevector(row[i], row[i + (s)], low);                              \
        row[i + (s)] = __builtin_shufflevector(row[i], row[i + (s)], high);                        \
        row[i] = upper;                                                                            \
    }

typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint64_t u64x8 __attribute__((vector_size(64)));

#define TILE_OF_16(V)                                                                              \
    TD__INLINE void tile_##V(char *to, int64_t to_pitch, const char *from, int64_t from_pitch)     \
    {                                                                                              \
        V row[16];                                                                                 \
        for (int i = 0; i < 16; i++)                                                               \
            memcpy(&row[i], from + i * from_pitch, sizeof row[i]);                                 \
        EXCHANGE(V, 16, 8, LOW_8, HIGH_8)                                                          \
        EXCHANGE(V, 16, 4, LOW_4, HIGH_4)                                                          \
        EXCHANGE(V, 16, 2, LOW_2, HIGH_2)                                                          \
        EXCHANGE(V, 16, 1, LOW_1, HIGH_1)                                                          \
        for (int i = 0; i < 16; i++)                                                               \
            memcpy(to + i * to_pitch, &row[i], sizeof row[i]);                                     \
    }

TILE_OF_16(u16x16)
TILE_OF_16(u32x16)

TD__INLINE void tile_u64x8(char *to, int64_t to_pitch, const char *from, int64_t from_pitch)
{
    u64x8 row[8];
    for (int i = 0; i < 8; i++)
        memcpy(&row[i], from + i * from_pitch, sizeof row[i]);
    EXCHANGE(u64x8, 8, 4, LOW_4_OF_8, HIGH_4_OF_8)
    EXCHANGE(u64x8, 8, 2, LOW_2_OF_8, HIGH_2_OF_8)
    EXCHANGE(u64x8, 8, 1, LOW_1_OF_8, HIGH_1_OF_8)
    for (int i = 0; i < 8; i++)
        memcpy(to + i * to_pitch, &row[i], sizeof row[i]);
}

/* The remainder at the edges. */
TD__INLINE void transpose_edge(char *to, int64_t to_pitch, const char *from, int64_t from_pitch,
                               int64_t rows, int64_t columns, size_t element)
{
    for (int64_t a = 0; a < rows; a++)
        for (int64_t b = 0; b < columns; b++)
            memcpy(to + a * to_pitch + b * (int64_t)element,
                   from + b * from_pitch + a * (int64_t)element, element);
}

#define TRANSPOSE(V, lanes, T)                                                                     \
    do {                                                                                           \
        const int64_t size = sizeof(T);                                                            \
        for (int64_t a = 0; a < rows; a += (lanes))                                                \
            for (int64_t b = 0; b < columns; b += (lanes)) {                                       \
                char *tile = to + a * to_pitch + b * size;                                         \
                const char *source = from + b * from_pitch + a * size;                             \
                if (rows - a >= (lanes) && columns - b >= (lanes))                                 \
                    tile_##V(tile, to_pitch, source, from_pitch);                                  \
                else                                                                               \
                    transpose_edge(tile, to_pitch, source, from_pitch,                             \
                                   rows - a < (lanes) ? rows - a : (lanes),                        \
                                   columns - b < (lanes) ? columns - b : (lanes), sizeof(T));      \
            }                                                                                      \
    } while (0)

TD__VECTOR void td__transpose_plane(char *to, int64_t to_pitch, const char *from,
                                    int64_t from_pitch, int64_t rows, int64_t columns,
                                    size_t element)
{
    switch (element) {
    case 2:
        TRANSPOSE(u16x16, 16, uint16_t);
        break;
    case 4:
        TRANSPOSE(u32x16, 16, uint32_t);
        break;
    default:
        TRANSPOSE(u64x8, 8, uint64_t);
    }
}
