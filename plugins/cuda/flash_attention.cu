/* Kernels: attention of halves by tensor cores, without a mask or causal. A block has 128 queries and reads all keys and
 * values once; the softmax is corrected as greater scores come. */
#include "cuda/flash_tiles.h"

enum { MT = FLASH_QUERIES / 16 / (FLASH_THREADS / WARP), NT = FLASH_KEYS / 8 };

/* The softmax of a warp's rows, so far. A lane has 2 * MT of them, in part. */
struct softmax_state {
    float greatest[MT][2], total[MT][2]; /* total: of this lane's columns */
};

/* Scores become weights, relative to the greatest score; `sums` are corrected to it. */
template <int W>
__device__ inline void weigh(float (&scores)[MT][NT][4], float (&sums)[MT][W / 8][4],
                             softmax_state &state, float scale)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = state.greatest[m][h];
#pragma unroll
            for (int n = 0; n < NT; n++)
                most = fmaxf(most, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            float base = most == -INFINITY ? 0.0f : most * scale;
            float factor = power_of_2(state.greatest[m][h] * scale - base), total = 0;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    scores[m][n][i] = power_of_2(scores[m][n][i] * scale - base);
                    total += scores[m][n][i];
                }
            state.greatest[m][h] = most;
            state.total[m][h] = state.total[m][h] * factor + total;
#pragma unroll
            for (int n = 0; n < W / 8; n++) {
                sums[m][n][2 * h] *= factor;
                sums[m][n][2 * h + 1] *= factor;
            }
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
                    total == 0 ? -INFINITY : state.greatest[m][h] * (float)args.scale + logf(total);
        }
}

template <typename T, int W> __device__ inline void flash(const attention_args &args)
{
    constexpr int row_size = W + FLASH_PAD, tile_size = FLASH_KEYS * row_size;
    TD_SHARED(T, q);
    T *k = q + FLASH_QUERIES * row_size, *v = k + 2 * tile_size;
    int queries = (int)args.queries, keys = (int)args.keys, lane = threadIdx.x % WARP;
    bool causal = args.causal;
    block_place place = place_of_block(args.items, (queries + FLASH_QUERIES - 1) / FLASH_QUERIES,
                                       causal);
    int first = place.tile * FLASH_QUERIES, own = (int)threadIdx.x / WARP * MT * 16;
    int seen = causal && first + FLASH_QUERIES < keys ? first + FLASH_QUERIES : keys;
    float scale = (float)args.scale * LOG2_E;

    auto all_k = matrix_of<T>(args, args.k, place.item, keys, args.width);
    auto all_v = matrix_of<T>(args, args.v, place.item, keys, args.value_width);
    copy_tile<W, FLASH_QUERIES>(q, matrix_of<T>(args, args.q, place.item, queries, args.width), first);
    copy_tile<W, FLASH_KEYS>(k, all_k, 0);
    copy_tile<W, FLASH_KEYS>(v, all_v, 0);

    left_rows<T, W, MT, W <= 64> left(q + own * row_size);
    softmax_state state;
    float sums[MT][W / 8][4] = {}, factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            state.greatest[m][h] = -INFINITY;
            state.total[m][h] = 0;
        }
    for (int key = 0, stage = 0; key < seen; key += FLASH_KEYS, stage ^= 1) {
        end_copies();
        __syncthreads(); /* the tile is there, and the other stage has been read */
        if (key == 0)
            left.keep();
        int next = key + FLASH_KEYS;
        if (next < seen) {
            copy_tile<W, FLASH_KEYS>(k + (stage ^ 1) * tile_size, all_k, next);
            copy_tile<W, FLASH_KEYS>(v + (stage ^ 1) * tile_size, all_v, next);
        }
        if (causal && key > first + own + MT * 16 - 1)
            continue; /* no row of this warp sees it */
        float scores[MT][NT][4];
        clear_sums(scores);
        dot_rows(scores, left, k + stage * tile_size);
        if (next > keys || (causal && next > first + own + 1))
            hide_keys(scores, first + own, key, keys, causal);
        weigh<W>(scores, sums, state, scale);
        add_weighted<T, W>(sums, scores, v + stage * tile_size);
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
