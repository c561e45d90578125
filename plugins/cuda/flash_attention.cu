/* Kernels: attention of halves by tensor cores, without a mask or causal. A block has 128 queries and reads all keys and
 * values once; the softmax is corrected as greater scores come. */
#include "cuda/flash_tiles.h"

enum { MT = FLASH_QUERIES / 16 / (FLASH_THREADS / WARP) };

/* How far scores, as powers of 2, may be above the base of a row before its sums are corrected: weights are up to 256
 * then, and few tiles but the first need a correction. */
#define MOST_ABOVE 8.0f

/* The softmax of a warp's rows, so far. A lane has 2 * MT of them, in part. */
struct softmax_state {
    float base[MT][2];  /* a score that weights are relative to, at most MOST_ABOVE below the greatest */
    float total[MT][2]; /* of this lane's columns */
};

/* Raises the bases of rows whose scores are far above, and corrects their sums. */
template <int W, int NT>
__device__ inline void raise_bases(const float (&scores)[MT][NT][4], float (&sums)[MT][W / 8][4],
                                   softmax_state &state, float scale)
{
    float most[MT][2];
    bool raised = false;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            most[m][h] = fmaxf(scores[m][0][2 * h], scores[m][0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < NT; n++)
                most[m][h] = fmaxf(most[m][h],
                                   fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
            most[m][h] = fmaxf(most[m][h], __shfl_xor_sync(0xffffffffu, most[m][h], 1));
            most[m][h] = fmaxf(most[m][h], __shfl_xor_sync(0xffffffffu, most[m][h], 2));
            if (!((most[m][h] - state.base[m][h]) * scale > MOST_ABOVE))
                most[m][h] = state.base[m][h]; /* also where both are -infinity */
            raised |= most[m][h] != state.base[m][h];
        }
    if (!__any_sync(0xffffffffu, raised))
        return;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor = most[m][h] == state.base[m][h]
                               ? 1.0f
                               : power_of_2((state.base[m][h] - most[m][h]) * scale);
            state.base[m][h] = most[m][h];
            state.total[m][h] *= factor;
#pragma unroll
            for (int n = 0; n < W / 8; n++) {
                sums[m][n][2 * h] *= factor;
                sums[m][n][2 * h + 1] *= factor;
            }
        }
}

/* Adds the rows of a tile of values, weighted by the softmax of their scores: 16 keys at a time, so that the powers of
 * some are computed while the tensor cores multiply those before. */
template <typename T, int W, int NT>
__device__ inline void add_values(float (&scores)[MT][NT][4], float (&sums)[MT][W / 8][4],
                                  softmax_state &state, float scale, const T *values)
{
    raise_bases<W>(scores, sums, state, scale);
    float base[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            base[m][h] = state.base[m][h] == -INFINITY ? 0.0f : state.base[m][h] * scale;
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t weights[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&pair)[4] = scores[m][2 * k + i / 2];
                int h = i % 2;
                float low = power_of_2(pair[2 * h] * scale - base[m][h]);
                float high = power_of_2(pair[2 * h + 1] * scale - base[m][h]);
                state.total[m][h] += low + high;
                weights[m][i] = pack<T>(low, high);
            }
        add_16_rows<T, W>(sums, weights, values + k * 16 * (W + FLASH_PAD));
    }
}

/* Writes lse, and makes `factor` of the sums the reciprocal of the totals. */
__device__ inline void finish(const attention_args &args, softmax_state &state,
                              float (&factor)[MT][2], int64_t item, int first)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = state.total[m][h];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            factor[m][h] = total == 0 ? 0.0f : 1.0f / total;
            int query = first + m * 16 + h * 8;
            if (args.lse && threadIdx.x % 4 == 0 && query < args.queries)
                ((float *)args.lse)[item * args.queries + query] =
                    total == 0 ? -INFINITY : state.base[m][h] * (float)args.scale + logf(total);
        }
}

template <typename T, int W> __device__ inline void flash(const attention_args &args)
{
    /* A tile is read in parts of `part` keys, whose scores have registers beside the sums and q. */
    constexpr int part = W <= 64 ? 64 : 32;
    constexpr int row_size = W + FLASH_PAD, tile_size = FLASH_KEYS * row_size;
    TD_SHARED(T, q);
    T *k = q + FLASH_QUERIES * row_size, *v = k + 2 * tile_size;
    int queries = (int)args.queries, keys = (int)args.keys, lane = threadIdx.x % WARP;
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
    copy_tile<W, FLASH_KEYS>(k, all_k, 0);
    copy_tile<W, FLASH_KEYS>(v, all_v, 0);

    left_rows<T, W, MT, true> left(q + own * row_size);
    softmax_state state;
    float sums[MT][W / 8][4] = {}, factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            state.base[m][h] = -INFINITY;
            state.total[m][h] = 0;
        }
    for (int tile = 0, stage = 0; tile < seen; tile += FLASH_KEYS, stage ^= 1) {
        end_copies();
        __syncthreads(); /* the tile is there, and the other stage has been read */
        if (tile == 0)
            left.keep();
        int next = tile + FLASH_KEYS;
        if (next < seen) {
            copy_tile<W, FLASH_KEYS>(k + (stage ^ 1) * tile_size, all_k, next);
            copy_tile<W, FLASH_KEYS>(v + (stage ^ 1) * tile_size, all_v, next);
        }
#pragma unroll 1
        for (int key = tile; key < next && key < own_seen; key += part) {
            int offset = stage * tile_size + (key - tile) * row_size;
            float scores[MT][part / 8][4];
            clear_sums(scores);
            dot_rows(scores, left, k + offset);
            if (key + part > keys || (causal && key + part > first + own + 1))
                hide_keys(scores, first + own, key, keys, causal);
            add_values<T, W>(scores, sums, state, scale, v + offset);
        }
    }
    end_copies();
    __syncthreads(); /* where there was no tile */
    finish(args, state, factor, place.item, first + own + place_of(lane).row);
    store_sums<W>(sums, factor, q + own * row_size,
                  matrix_of<T>(args, args.y, place.item, queries, args.value_width), first + own);
}

#define KERNEL(T, W)                                                                               \
    TD_KERNEL_SYNC(flash_##T##_##W, struct attention_args)                                         \
    {                                                                                              \
        flash<T, W>(args);                                                                         \
    }

FLASH_KERNELS(KERNEL)
