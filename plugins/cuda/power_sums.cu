/* Kernels: the sums and norms of lists of tensors, in the order that kernels.h defines for power_sums.
 *
 *     a warp      adds the 1024 elements of a block: 256 sums, 8 a thread, which are added by halves
 *     a block     adds the pairs of 16 of these, a node of the tree
 *     sum_tree    adds these nodes, one block for each tensor
 *     norm_end    adds the sums of the tensors
 *
 * The products of f32 and halves are exact in f64; those of f64 are rounded, as the host does. */
#include "cuda/each_element.h"
#include "cuda/list_entries.h"
#include "cuda/power_sums_args.h"

enum { LANES = 256, LANES_EACH = LANES / WARP };

struct greatest_op {
    __device__ double operator()(double a, double b) const
    {
        return a > b || a != a ? a : b;
    }
};

/* ---- What is added ------------------------------------------------------------------------------------------------- */

struct squares {
    plus_op join;
    __device__ double operator()(double x) const
    {
        return __dmul_rn(x, x);
    }
};

struct sizes {
    plus_op join;
    __device__ double operator()(double x) const
    {
        return fabs(x);
    }
};

struct powers {
    plus_op join;
    double power;
    __device__ double operator()(double x) const
    {
        return pow(fabs(x), power);
    }
};

struct greatest {
    greatest_op join;
    __device__ double operator()(double x) const
    {
        return fabs(x);
    }
};

/* ---- A block of elements ------------------------------------------------------------------------------------------- */

/* The sum of up to 1024 elements from `begin` on, in all threads of the warp. A thread has groups of `width` neighbours,
 * WARP * width apart. */
template <typename T, int width, typename Term>
__device__ inline double sum_block(const T *x, const cuda_space *space, int64_t begin, int count,
                                   const Term &term)
{
    enum { GROUPS = LANES_EACH / width };
    double sums[GROUPS][width] = {};
    for (int row = 0; row < SUM_BLOCK; row += LANES)
        for (int g = 0; g < GROUPS; g++) {
            int at = row + (g * WARP + (int)(threadIdx.x % WARP)) * width;
            T group[width] = {};
            if (at + width <= count) {
                int64_t offset[1] = {begin + at};
                if (space)
                    find_offsets(*space, begin + at, offset);
                read_group(group, x, offset[0], false);
            } else {
                for (int k = 0; k < width; k++)
                    if (at + k < count)
                        group[k] = x[begin + at + k];
            }
            for (int k = 0; k < width; k++)
                sums[g][k] = term.join(sums[g][k], term((double)load(group[k])));
        }
    for (int half = GROUPS / 2; half; half /= 2)
        for (int g = 0; g < half; g++)
            for (int k = 0; k < width; k++)
                sums[g][k] = term.join(sums[g][k], sums[g + half][k]);
    for (int k = 0; k < width; k++)
        sums[0][k] = reduce_warp(sums[0][k], term.join);
    for (int half = width / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            sums[0][k] = term.join(sums[0][k], sums[0][k + half]);
    return sums[0][0];
}

/* ---- A chunk ------------------------------------------------------------------------------------------------------- */

/* The pairs of the first `count` of 32 lanes, then those of the pairs, and so on; in lane 0. */
template <typename Op> __device__ inline double join_pairs(double x, int count, Op join)
{
    int lane = threadIdx.x % WARP;
    for (int step = 1; step < WARP; step *= 2) {
        double other = shuffle_down(x, step);
        if (lane % (2 * step) == 0 && lane + step < count)
            x = join(x, other);
    }
    return x;
}

template <typename T, int width, typename Term>
__device__ inline void sum_chunk(const power_sums_args &args, const list_entry &entry,
                                 const cuda_space *space, const Term &term)
{
    enum { BLOCKS = SUM_CHUNK / SUM_BLOCK, WARPS = SUM_THREADS / WARP };
    __shared__ double sums[BLOCKS];
    int64_t chunk = (int64_t)((int32_t)blockIdx.x - entry.first_block) * SUM_CHUNK;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int b = warp; b < BLOCKS; b += WARPS) {
        int64_t begin = chunk + b * SUM_BLOCK, left = entry.count - begin;
        if (left <= 0)
            break;
        double sum = sum_block<T, width>((const T *)entry.x, space, begin,
                                         (int)(left < SUM_BLOCK ? left : SUM_BLOCK), term);
        if (!lane)
            sums[b] = sum;
    }
    __syncthreads();
    if (warp)
        return;
    int64_t left = entry.count - chunk;
    int blocks = left < SUM_CHUNK ? (int)((left + SUM_BLOCK - 1) / SUM_BLOCK) : BLOCKS;
    double sum = join_pairs(lane < blocks ? sums[lane] : 0.0, blocks, term.join);
    if (!lane)
        args.chunks[blockIdx.x] = sum;
}

template <typename T, typename Term>
__device__ inline void sum_of(const power_sums_args &args, const list_entry &entry,
                              const cuda_space *space, const Term &term)
{
    if (entry.aligned && !space)
        sum_chunk<T, sizeof(T) == 8 ? 2 : 4>(args, entry, space, term);
    else
        sum_chunk<T, 1>(args, entry, space, term);
}

template <typename T>
__device__ inline void sum_by_power(const power_sums_args &args, const list_entry &entry,
                                    const cuda_space *space)
{
    if (isinf(args.power))
        sum_of<T>(args, entry, space, greatest());
    else if (args.power == 2)
        sum_of<T>(args, entry, space, squares());
    else if (args.power == 1)
        sum_of<T>(args, entry, space, sizes());
    else
        sum_of<T>(args, entry, space, powers{plus_op(), args.power});
}

TD_KERNEL_SYNC(sum_list, struct power_sums_args)
{
    const list_entry &entry = entry_of(args.entry, args.entries);
    BY_DTYPE(sum_by_power, args, entry, nullptr)
}
TD_KERNEL_SYNC(sum_strided, struct strided_sums_args)
{
    const list_entry &entry = args.list.entry[0];
    BY_DTYPE(sum_by_power, args.list, entry, &args.space)
}

/* ---- A tensor, and all of them ---------------------------------------------------------------------------------------- */

/* The pairs of up to TREE_THREADS sums, and so on; in thread 0. */
template <typename Op> __device__ inline double join_tile(double x, int count, Op join)
{
    __shared__ double parts[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int mine = count - warp * WARP;
    x = join_pairs(x, mine < WARP ? mine : WARP, join);
    if (!lane)
        parts[warp] = x;
    __syncthreads();
    if (!warp)
        x = join_pairs(parts[lane], (count + WARP - 1) / WARP, join);
    return x;
}

/* Tile by tile, until one sum is left; the sums of the tiles take the place of chunks that have been read. */
template <typename Op>
__device__ inline void join_chunks(const power_sums_args &args, const list_entry &entry, Op join)
{
    double *chunks = args.chunks + entry.first_block;
    int64_t count = (entry.count + SUM_CHUNK - 1) / SUM_CHUNK;
    do {
        int64_t tiles = (count + TREE_THREADS - 1) / TREE_THREADS;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t at = tile * TREE_THREADS + threadIdx.x, left = count - tile * TREE_THREADS;
            double x = at < count ? chunks[at] : 0.0;
            x = join_tile(x, (int)(left < TREE_THREADS ? left : TREE_THREADS), join);
            if (!threadIdx.x)
                chunks[tile] = x;
            __syncthreads();
        }
        count = tiles;
    } while (count > 1);
    if (!threadIdx.x)
        args.sums[blockIdx.x] = entry.count ? chunks[0] : 0.0;
}

TD_KERNEL_SYNC(sum_tree, struct power_sums_args)
{
    const list_entry &entry = args.entry[blockIdx.x];
    if (isinf(args.power))
        join_chunks(args, entry, greatest_op());
    else
        join_chunks(args, entry, plus_op());
}

/* One warp: the sums of the tensors in order. */
TD_KERNEL_SYNC(norm_end, struct norm_args)
{
    enum { TILE = 1024 };
    __shared__ double tile[TILE];
    bool greatest = isinf(args.power);
    double sum = 0;
    for (int64_t begin = 0; begin < args.count; begin += TILE) {
        int count = (int)(args.count - begin < TILE ? args.count - begin : TILE);
        __syncthreads(); /* the last tile has been read */
        for (int i = threadIdx.x; i < count; i += blockDim.x)
            tile[i] = args.sums[begin + i];
        __syncthreads();
        for (int i = 0; i < count && !threadIdx.x; i++)
            sum = greatest ? greatest_op()(sum, tile[i]) : sum + tile[i];
    }
    if (threadIdx.x)
        return;
    double norm = greatest || args.power == 1 ? sum : args.power == 2 ? sqrt(sum) : pow(sum, 1 / args.power);
    if (isnan(norm))
        norm = nan("");
    if (args.wide)
        *(double *)args.out = norm;
    else
        *(float *)args.out = (float)norm;
}
