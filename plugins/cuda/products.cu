/* Kernels: matrix products of any strides. cuBLASLt computes what it can (lt_products.c); this does the rest.
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

template <typename T> __device__ void multiply(const product_args &args)
{
    typedef typename compute<T>::type C;
    __shared__ C a_tile[DEPTH][TILE + 1], b_tile[DEPTH][TILE + 1];
    int64_t columns = (args.n + TILE - 1) / TILE;
    int64_t row = blockIdx.x / columns * TILE, column = blockIdx.x % columns * TILE;
    int thread = threadIdx.x, my_row = thread / ACROSS * EACH, my_column = thread % ACROSS * EACH;
    for (int64_t batch = blockIdx.z; batch < args.batches; batch += gridDim.z) {
        const T *a = (const T *)args.a, *b = (const T *)args.b;
        T *out = (T *)args.out;
        int64_t rest = batch;
        for (int d = 0; d < args.batch_dims; d++) {
            int64_t at = rest % args.size[d];
            rest /= args.size[d];
            out += at * args.stride[0][d];
            a += at * args.stride[1][d];
            b += at * args.stride[2][d];
        }
        C total[EACH][EACH] = {}, sum[EACH][EACH] = {};
        for (int64_t k = 0; k < args.k; k += DEPTH) {
            for (int i = thread; i < TILE * DEPTH; i += PRODUCT_THREADS) {
                /* Neighbouring threads read neighbouring elements, whichever dimension those are in. */
                bool a_by_k = args.a_column == 1, b_by_k = args.b_row == 1;
                int ak = a_by_k ? i % DEPTH : i / TILE, am = a_by_k ? i / DEPTH : i % TILE;
                int bk = b_by_k ? i % DEPTH : i / TILE, bn = b_by_k ? i / DEPTH : i % TILE;
                a_tile[ak][am] = element(a, row + am, k + ak, args.m, args.k, args.a_row, args.a_column);
                b_tile[bk][bn] = element(b, k + bk, column + bn, args.k, args.n, args.b_row, args.b_column);
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
            for (int j = 0; j < EACH; j++) {
                int64_t r = row + my_row + i, c = column + my_column + j;
                if (r >= args.m || c >= args.n)
                    continue;
                T *at = out + r * args.out_row + c;
                C value = (C)args.alpha * (total[i][j] + sum[i][j]);
                if (args.bias)
                    value += load(((const T *)args.bias)[c]);
                if (args.accumulate)
                    value += load(*at);
                *at = store<T>(value);
            }
    }
}

TD_KERNEL_SYNC(multiply_f32, struct product_args)
{
    multiply<float>(args);
}
TD_KERNEL_SYNC(multiply_f64, struct product_args)
{
    multiply<double>(args);
}
TD_KERNEL_SYNC(multiply_f16, struct product_args)
{
    multiply<f16>(args);
}
TD_KERNEL_SYNC(multiply_bf16, struct product_args)
{
    multiply<bf16>(args);
}

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
