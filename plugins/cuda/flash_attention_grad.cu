/* Kernels: gradients of flash_attention.cu. The weights are computed again from lse. grad_q has a block for 128 queries,
 * which reads all keys; grad_k and grad_v have one for 64 or 128 keys, which reads all queries, and has the scores
 * transposed, with a row for each key. So each sum has one warp that adds it up, in the order of the tiles. */
#include "cuda/flash_tiles.h"

/* delta, the sum over grad_y * y: 16 lanes for each row. */
template <typename T> __device__ inline void sum_products(const attention_args &args)
{
    constexpr int each = FLASH_THREADS / 16;
    int64_t rows = args.items * args.queries;
    int column = threadIdx.x % 16 * 8;
    for (int64_t start = (int64_t)blockIdx.x * each; start < rows;
         start += (int64_t)gridDim.x * each) {
        int64_t row = start + threadIdx.x / 16;
        float sum = 0;
        if (row < rows && column < args.value_width) {
            unsigned item = (unsigned)(row / args.queries);
            int64_t query = row % args.queries;
            auto grad_y = matrix_of<T>(args, args.grad_y, item, args.queries, args.value_width);
            auto y = matrix_of<T>(args, args.y, item, args.queries, args.value_width);
            uint4 words[2] = {*(const uint4 *)(grad_y.data + query * grad_y.row + column),
                              *(const uint4 *)(y.data + query * y.row + column)};
            T pairs[2][8];
            memcpy(pairs, words, sizeof pairs);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum += load(pairs[0][i]) * load(pairs[1][i]);
        }
#pragma unroll
        for (int step = 8; step; step /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (row < rows && !column)
            ((float *)args.delta)[row] = sum;
    }
}

/* lse for power_of_2(): a row that sees nothing has weights of 0. */
__device__ inline float base_of(float lse)
{
    return lse == -INFINITY ? INFINITY : lse * LOG2_E;
}

/* ---- grad_q ------------------------------------------------------------------------------------------------ */

template <typename T, int W> __device__ inline void flash_queries(const attention_args &args)
{
    constexpr int MT = FLASH_QUERIES / 16 / (FLASH_THREADS / WARP), NT = FLASH_GRAD_KEYS / 8;
    constexpr int row_size = W + FLASH_PAD, tile_size = FLASH_GRAD_KEYS * row_size;
    TD_SHARED(T, q);
    T *grad_y = q + FLASH_QUERIES * row_size, *k = grad_y + FLASH_QUERIES * row_size,
      *v = k + 2 * tile_size;
    int queries = (int)args.queries, keys = (int)args.keys;
    bool causal = args.causal;
    lane_place lane = place_of(threadIdx.x % WARP);
    block_place place = place_of_block(args.items, (queries + FLASH_QUERIES - 1) / FLASH_QUERIES,
                                       causal);
    int first = place.tile * FLASH_QUERIES, own = (int)threadIdx.x / WARP * MT * 16;
    int seen = causal && first + FLASH_QUERIES < keys ? first + FLASH_QUERIES : keys;
    float scale = (float)args.scale * LOG2_E;

    auto all_k = matrix_of<T>(args, args.k, place.item, keys, args.width);
    auto all_v = matrix_of<T>(args, args.v, place.item, keys, args.value_width);
    copy_tile<W, FLASH_QUERIES>(q, matrix_of<T>(args, args.q, place.item, queries, args.width), first);
    copy_tile<W, FLASH_QUERIES>(
        grad_y, matrix_of<T>(args, args.grad_y, place.item, queries, args.value_width), first);
    copy_tile<W, FLASH_GRAD_KEYS>(k, all_k, 0);
    copy_tile<W, FLASH_GRAD_KEYS>(v, all_v, 0);

    left_rows<T, W, MT, W <= 64> left_q(q + own * row_size), left_grad(grad_y + own * row_size);
    float sums[MT][W / 8][4] = {}, base[MT][2], delta[MT][2], factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int query = first + own + m * 16 + h * 8 + lane.row;
            int64_t at = (int64_t)place.item * queries + query;
            base[m][h] = query < queries ? base_of(((const float *)args.lse)[at]) : INFINITY;
            delta[m][h] = query < queries ? ((const float *)args.delta)[at] : 0;
            factor[m][h] = (float)args.scale;
        }
    for (int key = 0, stage = 0; key < seen; key += FLASH_GRAD_KEYS, stage ^= 1) {
        end_copies();
        __syncthreads(); /* the tile is there, and the other stage has been read */
        if (key == 0) {
            left_q.keep();
            left_grad.keep();
        }
        int next = key + FLASH_GRAD_KEYS;
        if (next < seen) {
            copy_tile<W, FLASH_GRAD_KEYS>(k + (stage ^ 1) * tile_size, all_k, next);
            copy_tile<W, FLASH_GRAD_KEYS>(v + (stage ^ 1) * tile_size, all_v, next);
        }
        if (causal && key > first + own + MT * 16 - 1)
            continue; /* no row of this warp sees it */
        float scores[MT][NT][4], grads[MT][NT][4];
        dot_rows(scores, left_q, k + stage * tile_size);
        if (next > keys || (causal && next > first + own + 1))
            hide_keys(scores, first + own, key, keys, causal);
        dot_rows(grads, left_grad, v + stage * tile_size);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    grads[m][n][i] = power_of_2(scores[m][n][i] * scale - base[m][i / 2]) *
                                     (grads[m][n][i] - delta[m][i / 2]);
        add_weighted<T, W>(sums, grads, k + stage * tile_size);
    }
    end_copies();
    __syncthreads(); /* where there was no tile */
    store_sums<W>(sums, factor, q + own * row_size,
                  matrix_of<T>(args, args.grad_q, place.item, queries, args.width), first + own);
}

/* ---- grad_k and grad_v ------------------------------------------------------------------------------------- */

/* All that flash_keys() reads, of an item, */
template <typename T> struct query_rows {
    matrix<T> q, grad_y;
    const float *lse, *delta;

    __device__ query_rows(const attention_args &args, unsigned item)
        : q(matrix_of<T>(args, args.q, item, args.queries, args.width)),
          grad_y(matrix_of<T>(args, args.grad_y, item, args.queries, args.value_width)),
          lse((const float *)args.lse + item * args.queries),
          delta((const float *)args.delta + item * args.queries)
    {
    }
};

/* and a stage of it. */
template <typename T, int W> struct query_stage {
    T q[FLASH_GRAD_QUERIES(W) * (W + FLASH_PAD)], grad_y[FLASH_GRAD_QUERIES(W) * (W + FLASH_PAD)];
    float lse[FLASH_GRAD_QUERIES(W)], delta[FLASH_GRAD_QUERIES(W)];

    __device__ void copy(const query_rows<T> &rows, int first)
    {
        constexpr int height = FLASH_GRAD_QUERIES(W);
        copy_tile<W, height>(q, rows.q, first);
        copy_tile<W, height>(grad_y, rows.grad_y, first);
        copy_column<height>(lse, rows.lse, first, rows.q.rows);
        copy_column<height>(delta, rows.delta, first, rows.q.rows);
    }
};

template <typename T, int W> __device__ inline void flash_keys(const attention_args &args)
{
    constexpr int own_keys = FLASH_OWN_KEYS(W), height = FLASH_GRAD_QUERIES(W);
    constexpr int MT = own_keys / 16 / (FLASH_THREADS / WARP), NT = height / 8;
    constexpr int row_size = W + FLASH_PAD;
    TD_SHARED(T, k);
    T *v = k + own_keys * row_size;
    query_stage<T, W> *stages = (query_stage<T, W> *)(v + own_keys * row_size);
    int queries = (int)args.queries, keys = (int)args.keys;
    bool causal = args.causal;
    lane_place lane = place_of(threadIdx.x % WARP);
    block_place place = place_of_block(args.items, (keys + own_keys - 1) / own_keys, false);
    int first = place.tile * own_keys, own = (int)threadIdx.x / WARP * MT * 16;
    int start = causal ? first / height * height : 0;
    float scale = (float)args.scale * LOG2_E;

    query_rows<T> all(args, place.item);
    copy_tile<W, own_keys>(k, matrix_of<T>(args, args.k, place.item, keys, args.width), first);
    copy_tile<W, own_keys>(v, matrix_of<T>(args, args.v, place.item, keys, args.value_width), first);
    if (start < queries)
        stages[0].copy(all, start);

    left_rows<T, W, MT, false> left_k(k + own * row_size), left_v(v + own * row_size);
    float k_sums[MT][W / 8][4] = {}, v_sums[MT][W / 8][4] = {}, factor[MT][2];
    for (int query = start, stage = 0; query < queries; query += height, stage ^= 1) {
        end_copies();
        __syncthreads(); /* the tile is there, and the other stage has been read */
        const query_stage<T, W> &tile = stages[stage];
        if (query + height < queries)
            stages[stage ^ 1].copy(all, query + height);
        if (causal && first + own > query + height - 1)
            continue; /* no query sees a key of this warp */
        float weights[MT][NT][4], grads[MT][NT][4];
        dot_rows(weights, left_k, tile.q);
        if (causal && first + own + MT * 16 > query + 1)
            hide_queries(weights, first + own, query);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float base = base_of(tile.lse[n * 8 + lane.column + j]);
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        weights[m][n][2 * h + j] = power_of_2(weights[m][n][2 * h + j] * scale -
                                                              base);
            }
        dot_rows(grads, left_v, tile.grad_y);
        add_weighted<T, W>(v_sums, weights, tile.grad_y);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float delta = tile.delta[n * 8 + lane.column + j];
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        grads[m][n][2 * h + j] = weights[m][n][2 * h + j] *
                                                 (grads[m][n][2 * h + j] - delta);
            }
        add_weighted<T, W>(k_sums, grads, tile.q);
    }
    end_copies();
    __syncthreads(); /* where there was no tile */
#pragma unroll
    for (int m = 0; m < MT; m++)
        factor[m][0] = factor[m][1] = 1;
    if (args.grad_v.data)
        store_sums<W>(v_sums, factor, v + own * row_size,
                      matrix_of<T>(args, args.grad_v, place.item, keys, args.value_width), first + own);
#pragma unroll
    for (int m = 0; m < MT; m++)
        factor[m][0] = factor[m][1] = (float)args.scale;
    if (args.grad_k.data)
        store_sums<W>(k_sums, factor, k + own * row_size,
                      matrix_of<T>(args, args.grad_k, place.item, keys, args.width), first + own);
}

#define KERNELS(T, W)                                                                              \
    TD_KERNEL_SYNC(flash_queries_##T##_##W, struct attention_args)                                 \
    {                                                                                              \
        flash_queries<T, W>(args);                                                                 \
    }                                                                                              \
    TD_KERNEL_SYNC(flash_keys_##T##_##W, struct attention_args)                                    \
    {                                                                                              \
        flash_keys<T, W>(args);                                                                    \
    }

FLASH_KERNELS(KERNELS)

TD_KERNEL_SYNC(flash_delta_f16, struct attention_args)
{
    sum_products<f16>(args);
}
TD_KERNEL_SYNC(flash_delta_bf16, struct attention_args)
{
    sum_products<bf16>(args);
}
