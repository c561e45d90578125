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

/* What a warp has of its queries: lse and delta of the rows of a lane. */
template <int MT> struct query_numbers {
    float base[MT][2], delta[MT][2];

    __device__ query_numbers(const attention_args &args, unsigned item, int first)
    {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int query = first + m * 16 + h * 8 + place_of(threadIdx.x % WARP).row;
                int64_t at = item * args.queries + query;
                bool inside = query < args.queries;
                base[m][h] = inside ? base_of(((const float *)args.lse)[at]) : INFINITY;
                delta[m][h] = inside ? ((const float *)args.delta)[at] : 0;
            }
    }

    /* Scores become weights; with the products of grad_y and v, from which delta was subtracted, they become the
     * gradients of the scores. */
    template <int NT>
    __device__ void weigh(float (&scores)[MT][NT][4], const float (&products)[MT][NT][4],
                          float scale) const
    {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    scores[m][n][i] = power_of_2(scores[m][n][i] * scale - base[m][i / 2]) *
                                      products[m][n][i];
    }

    /* Sums that begin with -delta of their row. */
    template <int NT> __device__ void begin(float (&products)[MT][NT][4]) const
    {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    products[m][n][i] = -delta[m][i / 2];
    }
};

template <typename T, int W> __device__ inline void flash_queries(const attention_args &args)
{
    /* A tile is read in parts of `part` keys, whose scores have registers. */
    constexpr int part = 32, height = FLASH_GRAD_KEYS(W), NT = part / 8;
    constexpr int MT = FLASH_QUERIES / 16 / (FLASH_THREADS / WARP);
    constexpr int row_size = W + FLASH_PAD, tile_size = height * row_size;
    TD_SHARED(T, q);
    T *grad_y = q + FLASH_QUERIES * row_size, *k = grad_y + FLASH_QUERIES * row_size,
      *v = k + 2 * tile_size;
    int queries = (int)args.queries, keys = (int)args.keys;
    bool causal = args.causal;
    block_place place = place_of_block(args.items, (queries + FLASH_QUERIES - 1) / FLASH_QUERIES,
                                       causal);
    int first = place.tile * FLASH_QUERIES, own = (int)threadIdx.x / WARP * MT * 16;
    int seen = causal && first + FLASH_QUERIES < keys ? first + FLASH_QUERIES : keys;
    int own_seen = causal && first + own + MT * 16 < keys ? first + own + MT * 16 : keys;
    float scale = (float)args.scale * LOG2_E;

    auto all_k = matrix_of<T>(args, args.k, place.item, keys, args.width);
    auto all_v = matrix_of<T>(args, args.v, place.item, keys, args.value_width);
    copy_tile<W, FLASH_QUERIES>(q, matrix_of<T>(args, args.q, place.item, queries, args.width), first);
    copy_tile<W, FLASH_QUERIES>(
        grad_y, matrix_of<T>(args, args.grad_y, place.item, queries, args.value_width), first);
    copy_tile<W, height>(k, all_k, 0);
    copy_tile<W, height>(v, all_v, 0);

    left_rows<T, W, MT, W <= 64> left_q(q + own * row_size), left_grad(grad_y + own * row_size);
    query_numbers<MT> numbers(args, place.item, first + own);
    float sums[MT][W / 8][4] = {}, factor[MT][2];
    for (int tile = 0, stage = 0; tile < seen; tile += height, stage ^= 1) {
        end_copies();
        __syncthreads(); /* the tile is there, and the other stage has been read */
        if (tile == 0) {
            left_q.keep();
            left_grad.keep();
        }
        if (tile + height < seen) {
            copy_tile<W, height>(k + (stage ^ 1) * tile_size, all_k, tile + height);
            copy_tile<W, height>(v + (stage ^ 1) * tile_size, all_v, tile + height);
        }
#pragma unroll 1
        for (int key = tile; key < tile + height && key < own_seen; key += part) {
            const T *k_rows = k + stage * tile_size + (key - tile) * row_size;
            const T *v_rows = v + stage * tile_size + (key - tile) * row_size;
            float scores[MT][NT][4], products[MT][NT][4];
            clear_sums(scores);
            dot_rows(scores, left_q, k_rows);
            numbers.begin(products);
            dot_rows(products, left_grad, v_rows);
            if (key + part > keys || (causal && key + part > first + own + 1))
                hide_keys(scores, first + own, key, keys, causal);
            numbers.weigh(scores, products, scale);
            add_weighted<T, W>(sums, scores, k_rows);
        }
    }
    end_copies();
    __syncthreads(); /* where there was no tile */
#pragma unroll
    for (int m = 0; m < MT; m++)
        factor[m][0] = factor[m][1] = (float)args.scale;
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
    T q[FLASH_GRAD_QUERIES * (W + FLASH_PAD)], grad_y[FLASH_GRAD_QUERIES * (W + FLASH_PAD)];
    float lse[FLASH_GRAD_QUERIES], delta[FLASH_GRAD_QUERIES];

    __device__ void copy(const query_rows<T> &rows, int first)
    {
        constexpr int height = FLASH_GRAD_QUERIES;
        copy_tile<W, height>(q, rows.q, first);
        copy_tile<W, height>(grad_y, rows.grad_y, first);
        copy_column<height>(lse, rows.lse, first, rows.q.rows);
        copy_column<height>(delta, rows.delta, first, rows.q.rows);
    }
};

/* Adds what `part` queries of a tile, NT * 8 of them, give to the sums of a warp's keys. `hidden`: some do not see some
 * of the keys, of which `key` is the first. */
template <int NT, typename T, int W, int MT, bool kept>
__device__ inline void add_queries(float (&k_sums)[MT][W / 8][4], float (&v_sums)[MT][W / 8][4],
                                   const left_rows<T, W, MT, kept> &left_k,
                                   const left_rows<T, W, MT, kept> &left_v,
                                   const query_stage<T, W> &tile, int part, float scale, bool hidden,
                                   int key, int query)
{
    lane_place lane = place_of(threadIdx.x % WARP);
    const T *q = tile.q + part * (W + FLASH_PAD), *grad_y = tile.grad_y + part * (W + FLASH_PAD);
    float weights[MT][NT][4], grads[MT][NT][4];
    clear_sums(weights);
    dot_rows(weights, left_k, q);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float delta = tile.delta[part + n * 8 + lane.column + i % 2];
#pragma unroll
            for (int m = 0; m < MT; m++)
                grads[m][n][i] = -delta;
        }
    dot_rows(grads, left_v, grad_y);
    if (hidden)
        hide_queries(weights, key, query);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float base = base_of(tile.lse[part + n * 8 + lane.column + i % 2]);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                weights[m][n][i] = power_of_2(weights[m][n][i] * scale - base);
                grads[m][n][i] *= weights[m][n][i];
            }
        }
    add_weighted<T, W>(v_sums, weights, grad_y);
    add_weighted<T, W>(k_sums, grads, q);
}

template <typename T, int W> __device__ inline void flash_keys(const attention_args &args)
{
    /* Where k and v fit into registers, they are read from shared memory once, and the scores of fewer queries are
     * held: otherwise reading would take as long as the products. */
    constexpr bool kept = W <= 64;
    constexpr int own_keys = FLASH_OWN_KEYS(W), height = FLASH_GRAD_QUERIES;
    constexpr int MT = own_keys / 16 / (FLASH_THREADS / WARP), NT = kept ? 2 : height / 8;
    constexpr int row_size = W + FLASH_PAD;
    TD_SHARED(T, k);
    T *v = k + own_keys * row_size;
    query_stage<T, W> *stages = (query_stage<T, W> *)(v + own_keys * row_size);
    int queries = (int)args.queries, keys = (int)args.keys;
    bool causal = args.causal;
    block_place place = place_of_block(args.items, (keys + own_keys - 1) / own_keys, false);
    int first = place.tile * own_keys, own = first + (int)threadIdx.x / WARP * MT * 16;
    int start = causal ? first / height * height : 0;
    float scale = (float)args.scale * LOG2_E;

    query_rows<T> all(args, place.item);
    copy_tile<W, own_keys>(k, matrix_of<T>(args, args.k, place.item, keys, args.width), first);
    copy_tile<W, own_keys>(v, matrix_of<T>(args, args.v, place.item, keys, args.value_width), first);
    if (start < queries)
        stages[0].copy(all, start);

    T *own_k = k + (own - first) * row_size, *own_v = v + (own - first) * row_size;
    left_rows<T, W, MT, kept> left_k(own_k), left_v(own_v);
    float k_sums[MT][W / 8][4] = {}, v_sums[MT][W / 8][4] = {}, factor[MT][2];
    for (int tile = start, stage = 0; tile < queries; tile += height, stage ^= 1) {
        end_copies();
        __syncthreads(); /* the tile is there, and the other stage has been read */
        if (tile == start) {
            left_k.keep();
            left_v.keep();
        }
        if (tile + height < queries)
            stages[stage ^ 1].copy(all, tile + height);
#pragma unroll 1
        for (int part = 0; part < height; part += NT * 8) {
            int query = tile + part;
            if (query >= queries || (causal && own > query + NT * 8 - 1))
                continue; /* none of them sees a key of this warp */
            add_queries<NT>(k_sums, v_sums, left_k, left_v, stages[stage], part, scale,
                            causal && own + MT * 16 > query + 1, own, query);
        }
    }
    end_copies();
    __syncthreads(); /* where there was no tile */
#pragma unroll
    for (int m = 0; m < MT; m++)
        factor[m][0] = factor[m][1] = 1;
    if (args.grad_v.data)
        store_sums<W>(v_sums, factor, own_v,
                      matrix_of<T>(args, args.grad_v, place.item, keys, args.value_width), own);
#pragma unroll
    for (int m = 0; m < MT; m++)
        factor[m][0] = factor[m][1] = (float)args.scale;
    if (args.grad_k.data)
        store_sums<W>(k_sums, factor, own_k,
                      matrix_of<T>(args, args.grad_k, place.item, keys, args.width), own);
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
