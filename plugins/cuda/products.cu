/* Kernels: matrix products of any strides. Small ones; and others that cuBLASLt does not compute (lt_products.c).
 *
 * A block computes a tile of 64 by 64 elements, each thread 4 by 4 of them, over steps of 16 of the inner dimension. The
 * sum over the inner dimension is compensated by blocks: the sums of 256 steps are added to a second accumulator. */
#include "cuda/device_code.h"
#include "cuda/products_args.h"

enum {
    TILE = PRODUCT_TILE,
    DEPTH = PRODUCT_DEPTH,
    EACH = 4,
    ACROSS = TILE / EACH,
    CHUNK = 256
};

template <typename T>
__device__ inline typename compute<T>::type element(const T *x, int64_t row, int64_t column, int64_t rows,
                                                    int64_t columns, int64_t row_stride, int64_t column_stride)
{
    typedef typename compute<T>::type C;
    return row < rows && column < columns ? load(x[row * row_stride + column * column_stride]) : C(0);
}

/* The matrices of a batch's element. */
template <typename T> struct matrices {
    const T *a, *b;
    T *out;

    __device__ inline matrices(const product_args &args, int64_t batch)
        : a((const T *)args.a), b((const T *)args.b), out((T *)args.out)
    {
        for (int d = 0; d < args.batch_dims; d++) {
            int64_t at = batch % args.size[d];
            batch /= args.size[d];
            out += at * args.stride[0][d];
            a += at * args.stride[1][d];
            b += at * args.stride[2][d];
        }
    }
};

template <typename T>
__device__ inline void put(const product_args &args, T *out, int64_t row, int64_t column, typename compute<T>::type sum)
{
    typedef typename compute<T>::type C;
    if (row >= args.m || column >= args.n)
        return;
    T *at = out + row * args.out_row + column;
    C value = (C)args.alpha * sum;
    if (args.bias)
        value += load(((const T *)args.bias)[column]);
    if (args.accumulate)
        value += load(*at);
    *at = store<T>(value);
}

template <typename T> __device__ void multiply(const product_args &args)
{
    typedef typename compute<T>::type C;
    __shared__ C a_tile[DEPTH][TILE + 1], b_tile[DEPTH][TILE + 1];
    int64_t columns = (args.n + TILE - 1) / TILE;
    int64_t row = blockIdx.x / columns * TILE, column = blockIdx.x % columns * TILE;
    int thread = threadIdx.x, my_row = thread / ACROSS * EACH, my_column = thread % ACROSS * EACH;
    for (int64_t batch = blockIdx.z; batch < args.batches; batch += gridDim.z) {
        matrices<T> of(args, batch);
        C total[EACH][EACH] = {}, sum[EACH][EACH] = {};
        for (int64_t k = 0; k < args.k; k += DEPTH) {
            for (int i = thread; i < TILE * DEPTH; i += PRODUCT_THREADS) {
                /* Neighbouring threads read neighbouring elements, whichever dimension those are in. */
                bool a_by_k = args.a_column == 1, b_by_k = args.b_row == 1;
                int ak = a_by_k ? i % DEPTH : i / TILE, am = a_by_k ? i / DEPTH : i % TILE;
                int bk = b_by_k ? i % DEPTH : i / TILE, bn = b_by_k ? i / DEPTH : i % TILE;
                a_tile[ak][am] = element(of.a, row + am, k + ak, args.m, args.k, args.a_row, args.a_column);
                b_tile[bk][bn] = element(of.b, k + bk, column + bn, args.k, args.n, args.b_row, args.b_column);
            }
            __syncthreads();
            for (int d = 0; d < DEPTH; d++)
                for (int i = 0; i < EACH; i++)
                    for (int j = 0; j < EACH; j++)
                        sum[i][j] += a_tile[d][my_row + i] * b_tile[d][my_column + j];
            __syncthreads();
            if (k % CHUNK == CHUNK - DEPTH)
                for (int i = 0; i < EACH; i++)
                    for (int j = 0; j < EACH; j++) {
                        total[i][j] += sum[i][j];
                        sum[i][j] = 0;
                    }
        }
        for (int i = 0; i < EACH; i++)
            for (int j = 0; j < EACH; j++)
                put(args, of.out, row + my_row + i, column + my_column + j, total[i][j] + sum[i][j]);
    }
}

/* Small products: what counts is how long one block takes, since there are few. Tiles of 32 by 32 give four times as many
 * blocks, and 64 steps of k are loaded at once, 16 loads a thread, while the 64 before are multiplied. A thread has 2 by 2
 * elements, 16 apart, so that a warp reads neighbours in shared memory. */
template <typename T> struct small_step {
    enum { EACH = SMALL_TILE * SMALL_DEPTH / SMALL_THREADS };
    typedef typename compute<T>::type C;
    C a[EACH], b[EACH];

    /* Where element i of this thread is in a tile: neighbouring threads have neighbours in memory. */
    static __device__ inline void place(int i, bool by_k, int *k, int *other)
    {
        int at = threadIdx.x + i * SMALL_THREADS;
        *k = by_k ? at % SMALL_DEPTH : at / SMALL_TILE;
        *other = by_k ? at / SMALL_DEPTH : at % SMALL_TILE;
    }

    __device__ inline void read(const product_args &args, const matrices<T> &of, int64_t row, int64_t column, int64_t from)
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int k, m, n;
            place(i, args.a_column == 1, &k, &m);
            a[i] = element(of.a, row + m, from + k, args.m, args.k, args.a_row, args.a_column);
            place(i, args.b_row == 1, &k, &n);
            b[i] = element(of.b, from + k, column + n, args.k, args.n, args.b_row, args.b_column);
        }
    }

    __device__ inline void write(const product_args &args, C (*a_tile)[SMALL_TILE + 1], C (*b_tile)[SMALL_TILE + 1]) const
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int k, other;
            place(i, args.a_column == 1, &k, &other);
            a_tile[k][other] = a[i];
            place(i, args.b_row == 1, &k, &other);
            b_tile[k][other] = b[i];
        }
    }
};

template <typename T> __device__ void multiply_small(const product_args &args)
{
    typedef typename compute<T>::type C;
    enum { HALF = SMALL_TILE / 2 };
    __shared__ C a_tile[SMALL_DEPTH][SMALL_TILE + 1], b_tile[SMALL_DEPTH][SMALL_TILE + 1];
    unsigned columns = (unsigned)((args.n + SMALL_TILE - 1) / SMALL_TILE);
    int64_t row = (int64_t)(blockIdx.x / columns) * SMALL_TILE, column = (int64_t)(blockIdx.x % columns) * SMALL_TILE;
    int my_row = threadIdx.x / HALF, my_column = threadIdx.x % HALF;
    for (int64_t batch = blockIdx.z; batch < args.batches; batch += gridDim.z) {
        matrices<T> of(args, batch);
        small_step<T> step;
        C sum[2][2] = {};
        step.read(args, of, row, column, 0);
        for (int64_t k = 0; k < args.k; k += SMALL_DEPTH) {
            __syncthreads(); /* the tiles before have been read */
            step.write(args, a_tile, b_tile);
            __syncthreads();
            if (k + SMALL_DEPTH < args.k)
                step.read(args, of, row, column, k + SMALL_DEPTH);
            int depth = args.k - k < SMALL_DEPTH ? (int)(args.k - k) : SMALL_DEPTH;
#pragma unroll 8
            for (int d = 0; d < depth; d++)
                for (int i = 0; i < 2; i++)
                    for (int j = 0; j < 2; j++)
                        sum[i][j] += a_tile[d][my_row + i * HALF] * b_tile[d][my_column + j * HALF];
        }
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++)
                put(args, of.out, row + my_row + i * HALF, column + my_column + j * HALF, sum[i][j]);
    }
}

#define PRODUCT_KERNELS(name, T)                                                                   \
    TD_KERNEL_SYNC(multiply_##name, struct product_args)                                           \
    {                                                                                              \
        multiply<T>(args);                                                                         \
    }                                                                                              \
    TD_KERNEL_SYNC(multiply_small_##name, struct product_args)                                     \
    {                                                                                              \
        multiply_small<T>(args);                                                                   \
    }

PRODUCT_KERNELS(f32, float)
PRODUCT_KERNELS(f64, double)
PRODUCT_KERNELS(f16, f16)
PRODUCT_KERNELS(bf16, bf16)

/* Neighbouring threads copy neighbouring elements, since either side may begin at any of them; each thread has several loads
 * under way. */
TD_KERNEL(copy_padded_2, struct padded_args)
{
    int64_t first = (int64_t)blockIdx.x * (PADDED_THREADS * PADDED_EACH) + threadIdx.x;
    for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
        const uint16_t *from = (const uint16_t *)args.from + row * args.from_ld;
        uint16_t *to = (uint16_t *)args.to + row * args.to_ld;
        int64_t columns = row < args.from_rows ? args.from_columns : 0;
        uint16_t values[PADDED_EACH];
#pragma unroll
        for (int i = 0; i < PADDED_EACH; i++) {
            int64_t column = first + i * PADDED_THREADS;
            values[i] = column < columns ? from[column] : (uint16_t)0;
        }
#pragma unroll
        for (int i = 0; i < PADDED_EACH; i++) {
            int64_t column = first + i * PADDED_THREADS;
            if (column < args.columns)
                to[column] = values[i];
        }
    }
}
