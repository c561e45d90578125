/* What the kernels of flash attention are made of. A block has a tile of its own rows in shared memory, a few of them for
 * each warp, and reads tiles of the other side's rows in turn, two stages of them: one is read while the other is
 * filled. Scores are in registers, and become the left operand of the next product there. */
#ifndef FLASH_TILES_H
#define FLASH_TILES_H

#include "cuda/flash_attention_args.h"
#include "cuda/tensor_cores.h"

#define LOG2_E 1.4426950408889634f

/* The place of a lane in a fragment of sums [16, 8]: rows `row` and row + 8, columns `column` and column + 1. */
struct lane_place {
    int row, column;
};

__device__ inline lane_place place_of(int lane)
{
    return {lane / 4, lane % 4 * 2};
}

/* Which tile and item a block has. Items go in groups that have their rows in the L2 cache together; in a group the
 * tiles with the most work come first. */
struct block_place {
    unsigned item;
    int tile;
};

__device__ inline block_place place_of_block(int64_t items, int tiles, bool last_first)
{
    const unsigned group = 32;
    unsigned whole = group * (unsigned)tiles, first = blockIdx.x / whole * group;
    unsigned size = items - first < group ? (unsigned)(items - first) : group;
    unsigned i = blockIdx.x % whole;
    int tile = (int)(i / size);
    return {first + i % size, last_first ? tiles - 1 - tile : tile};
}

/* ---- Tiles ------------------------------------------------------------------------------------------------- */

/* The rows of an item. */
template <typename T> struct matrix {
    T *data;
    int64_t row; /* stride */
    int rows, width;
};

template <typename T>
__device__ inline matrix<T> matrix_of(const attention_args &args, const attention_rows &rows,
                                      unsigned item, int64_t count, int64_t width)
{
    unsigned heads = (unsigned)args.heads;
    return {(T *)rows.data + item / heads * rows.batch + item % heads * rows.head, rows.row,
            (int)count, (int)width};
}

/* Starts the copy of `height` rows of a matrix; the tile is 0 outside of it. */
template <int W, int height, typename T>
__device__ inline void copy_tile(T *tile, const matrix<T> &rows, int first)
{
    /* 16 bytes a thread: `across` threads side by side, `down` rows at a time */
    constexpr int across = W % 64 ? 4 : W / 8, down = FLASH_THREADS / across;
    int row = (int)threadIdx.x / across, left = (int)threadIdx.x % across * 8;
    int rows_left = rows.rows - first - row, columns_left = rows.width - left;
    const T *from = rows.data + (first + row) * rows.row + left;
    tile += row * (W + FLASH_PAD) + left;
#pragma unroll
    for (int i = 0; i < height; i += down) {
#pragma unroll
        for (int column = 0; column < W; column += across * 8)
            copy_async<16>(tile + i * (W + FLASH_PAD) + column, from + column,
                           i < rows_left && column < columns_left);
        from += down * rows.row;
    }
}

/* Starts the copy of `height` numbers. */
template <int height>
__device__ inline void copy_column(float *to, const float *from, int first, int count)
{
    int row = first + (int)threadIdx.x;
    if (threadIdx.x < height)
        copy_async<4>(to + threadIdx.x, from + row, row < count);
}

/* Writes a warp's sums, times `factor`, to its rows of a matrix, by way of its rows of a tile. */
template <int W, int MT, typename T>
__device__ inline void store_sums(const float (&sums)[MT][W / 8][4], const float (&factor)[MT][2],
                                  T *tile, const matrix<T> &to, int first)
{
    constexpr int chunks = W / 8;
    int lane = threadIdx.x % WARP;
    lane_place at = place_of(lane);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < W / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                T *pair = tile + (m * 16 + h * 8 + at.row) * (W + FLASH_PAD) + n * 8 + at.column;
                *(uint32_t *)pair = pack<T>(sums[m][n][2 * h] * factor[m][h],
                                            sums[m][n][2 * h + 1] * factor[m][h]);
            }
    __syncwarp();
    for (int i = lane; i < MT * 16 * chunks; i += WARP) {
        int row = i / chunks, column = i % chunks * 8;
        if (first + row < to.rows && column < to.width)
            *(uint4 *)(to.data + (first + row) * to.row +
                       column) = *(const uint4 *)(tile + row * (W + FLASH_PAD) + column);
    }
}

/* ---- Products ---------------------------------------------------------------------------------------------- */

/* The left operand of a product: MT * 16 rows of a tile, kept in registers if `kept`. */
template <typename T, int W, int MT, bool kept> struct left_rows {
    const T *tile; /* with the row and column of this lane */
    uint32_t registers[kept ? W / 16 : 1][MT][4];

    __device__ void load(uint32_t (&to)[MT][4], int k) const
    {
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_fragments<false>(to[m], tile + m * 16 * (W + FLASH_PAD) + k * 16);
    }

    __device__ explicit left_rows(const T *rows)
    {
        int lane = threadIdx.x % WARP;
        tile = rows + lane % 16 * (W + FLASH_PAD) + lane / 16 * 8;
    }

    /* The tile is there. */
    __device__ void keep(void)
    {
        if constexpr (kept)
#pragma unroll
            for (int k = 0; k < W / 16; k++)
                load(registers[k], k);
    }

    __device__ void get(uint32_t (&to)[MT][4], int k) const
    {
        if constexpr (kept) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    to[m][i] = registers[k][m][i];
        } else {
            load(to, k);
        }
    }
};

template <int MT, int NT> __device__ inline void clear_sums(float (&sums)[MT][NT][4])
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[m][n][i] = 0;
}

/* sums [MT * 16, NT * 8] += left rows times the rows of a tile: the dot products of rows. */
template <int NT, typename T, int W, int MT, bool kept>
__device__ inline void dot_rows(float (&sums)[MT][NT][4], const left_rows<T, W, MT, kept> &left,
                                const T *right)
{
    int lane = threadIdx.x % WARP;
    right += (lane / 16 * 8 + lane % 8) * (W + FLASH_PAD) + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < W / 16; k++) {
        uint32_t a[MT][4];
        left.get(a, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            load_fragments<false>(b, right + n * 8 * (W + FLASH_PAD) + k * 16);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                multiply<T>(sums[m][n], a[m], b[0], b[1]);
                multiply<T>(sums[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* sums [MT * 16, W] += weights [MT * 16, 16] times 16 rows of a tile. */
template <typename T, int W, int MT>
__device__ inline void add_16_rows(float (&sums)[MT][W / 8][4], const uint32_t (&weights)[MT][4],
                                   const T *right)
{
    int lane = threadIdx.x % WARP;
    right += lane % 16 * (W + FLASH_PAD) + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < W / 8; n += 2) {
        uint32_t b[4];
        load_fragments<true>(b, right + n * 8);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            multiply<T>(sums[m][n], weights[m], b[0], b[1]);
            multiply<T>(sums[m][n + 1], weights[m], b[2], b[3]);
        }
    }
}

/* sums [MT * 16, W] += weights [MT * 16, NT * 8] times the rows of a tile. */
template <typename T, int W, int MT, int NT>
__device__ inline void add_weighted(float (&sums)[MT][W / 8][4], const float (&weights)[MT][NT][4],
                                    const T *right)
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = pack<T>(weights[m][2 * k + i / 2][i % 2 * 2],
                                  weights[m][2 * k + i / 2][i % 2 * 2 + 1]);
        add_16_rows<T, W>(sums, a, right + k * 16 * (W + FLASH_PAD));
    }
}

/* ---- What is not seen ---------------------------------------------------------------------------------------- */

/* Scores of keys (columns) that a query (row) does not see become -infinity. `query` and `key` are the first ones. */
template <int MT, int NT>
__device__ inline void hide_keys(float (&scores)[MT][NT][4], int query, int key, int keys,
                                 bool causal)
{
    lane_place lane = place_of(threadIdx.x % WARP);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = query + m * 16 + i / 2 * 8 + lane.row;
                int column = key + n * 8 + i % 2 + lane.column;
                if (column >= keys || (causal && column > row))
                    scores[m][n][i] = -INFINITY;
            }
}

/* The same with a row for each key and a column for each query, if causal. */
template <int MT, int NT>
__device__ inline void hide_queries(float (&scores)[MT][NT][4], int key, int query)
{
    lane_place lane = place_of(threadIdx.x % WARP);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (key + m * 16 + i / 2 * 8 + lane.row > query + n * 8 + i % 2 + lane.column)
                    scores[m][n][i] = -INFINITY;
}

/* The kernels of a file for each dtype and width. */
#define FLASH_KERNELS(F)                                                                           \
    F(f16, 32)                                                                                     \
    F(f16, 64)                                                                                     \
    F(f16, 96)                                                                                     \
    F(f16, 128)                                                                                    \
    F(bf16, 32)                                                                                    \
    F(bf16, 64)                                                                                    \
    F(bf16, 96)                                                                                    \
    F(bf16, 128)

#endif
