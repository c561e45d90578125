/* Kernels: layer norm by rows, of x or of x + residual, and its gradients.
 *
 * Rows that fit stay in registers (norm_rows.h), and are read once. Backward, a row's threads take several rows, and keep
 * the sums of their columns for the gradients of weight and bias in registers, too. A block adds those of its warps and
 * writes them; a second kernel adds the blocks, in their order. Any other row, and f64, is read more than once. */
#include "cuda/layer_norm_args.h"
#include "cuda/norm_rows.h"

/* ---- Rows in registers ------------------------------------------------------------------------------------------- */

struct statistics {
    float mean, rest, rstd; /* the mean is mean + rest, rest its rounding error */
};

template <int V>
__device__ inline statistics statistics_of(const float (&x)[V][ROW_WIDTH], const layer_norm_args &args,
                                           const row_share &share)
{
    float sum = 0, size = (float)args.size;
#pragma unroll
    for (int v = 0; v < V; v++)
        sum += (x[v][0] + x[v][1]) + (x[v][2] + x[v][3]);
    float mean = reduce_row(sum, 0.0f, share.threads, plus_op()) / size;
    two_sums<float> sums = {0, 0};
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++) {
            float value = share.has(v) ? x[v][k] - mean : 0;
            sums.first += value;
            sums.second += value * value;
        }
    sums = reduce_row(sums, two_sums<float>{0, 0}, share.threads, plus_op());
    float rest = sums.first / size, variance = sums.second / size - rest * rest;
    variance = variance > 0 || variance != variance ? variance : 0;
    return statistics{mean, rest, 1 / sqrtf(variance + (float)args.eps)};
}

template <int V>
__device__ inline void normalise(float (&x)[V][ROW_WIDTH], const statistics &found, const layer_norm_args &args,
                                 const row_share &share)
{
    float factor[V][ROW_WIDTH];
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            x[v][k] = (x[v][k] - found.mean - found.rest) * found.rstd;
    if (args.weight.data) {
        load_row(factor, args.weight, 0, share);
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < ROW_WIDTH; k++)
                x[v][k] *= factor[v][k];
    }
    if (args.bias.data) {
        load_row(factor, args.bias, 0, share);
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < ROW_WIDTH; k++)
                x[v][k] += factor[v][k];
    }
}

template <int V> __device__ inline void layer_norm_rows(const layer_norm_args &args)
{
    row_share share = share_of(args.threads, args.size);
    int64_t each = blockDim.x / args.threads;
    for (int64_t row = blockIdx.x * each + threadIdx.x / args.threads; row < args.rows; row += gridDim.x * each) {
        int64_t start = row * args.size;
        float x[V][ROW_WIDTH];
        load_row(x, args.x, start, share);
        if (args.residual.data) {
            float more[V][ROW_WIDTH];
            load_row(more, args.residual, start, share);
#pragma unroll
            for (int v = 0; v < V; v++)
#pragma unroll
                for (int k = 0; k < ROW_WIDTH; k++)
                    x[v][k] += more[v][k];
            store_row(args.sum, start, x, share);
            round_row(x, args.sum.dtype);
        }
        statistics found = statistics_of(x, args, share);
        if (!share.member && args.mean)
            ((float *)args.mean)[row] = found.mean + found.rest;
        if (!share.member && args.rstd)
            ((float *)args.rstd)[row] = found.rstd;
        normalise(x, found, args, share);
        store_row(args.out, start, x, share);
    }
}

/* The sums of columns of a thread. */
template <int V> struct column_sums {
    float weight[V][ROW_WIDTH], bias[V][ROW_WIDTH];
};

/* One row's gradient; its terms are added to the sums. */
template <int V>
__device__ inline void layer_norm_grad_row(const layer_norm_args &args, int64_t row, const row_share &share,
                                           column_sums<V> &columns)
{
    int64_t start = row * args.size;
    float z[V][ROW_WIDTH], grad[V][ROW_WIDTH];
    load_row(z, args.x, start, share);
    load_row(grad, args.grad_y, start, share);
    float mean = ((const float *)args.mean)[row], rstd = ((const float *)args.rstd)[row];
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++) {
            z[v][k] = (z[v][k] - mean) * rstd;
            columns.weight[v][k] += grad[v][k] * z[v][k];
            columns.bias[v][k] += grad[v][k];
        }
    if (!args.grad_x.data && !args.grad_residual.data)
        return;
    if (args.weight.data) {
        float factor[V][ROW_WIDTH];
        load_row(factor, args.weight, 0, share);
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < ROW_WIDTH; k++)
                grad[v][k] *= factor[v][k];
    }
    two_sums<float> sums = {0, 0};
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++) {
            sums.first += grad[v][k];
            sums.second += grad[v][k] * z[v][k];
        }
    sums = reduce_row(sums, two_sums<float>{0, 0}, share.threads, plus_op());
    float shift = sums.first / (float)args.size, slope = sums.second / (float)args.size;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            grad[v][k] = rstd * (grad[v][k] - shift - z[v][k] * slope);
    if (args.grad_sum.data) {
        load_row(z, args.grad_sum, start, share);
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < ROW_WIDTH; k++)
                grad[v][k] += z[v][k];
    }
    if (args.grad_x.data)
        store_row(args.grad_x, start, grad, share);
    if (args.grad_residual.data)
        store_row(args.grad_residual, start, grad, share);
}

/* Adds the warps of a block, one after the other, in shared memory; then the block writes the sums. */
template <int V>
__device__ inline void add_warps(const layer_norm_args &args, const row_share &share, const column_sums<V> &columns)
{
    __shared__ float total[2][V * WARP * ROW_WIDTH];
    int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int w = 0; w < warps; w++) {
#pragma unroll
        for (int v = 0; v < V; v++)
#pragma unroll
            for (int k = 0; k < ROW_WIDTH; k++) {
                int at = (v * ROW_WIDTH + k) * WARP + share.member; /* in banks of their own */
                if (w == warp) {
                    total[0][at] = columns.weight[v][k] + (w ? total[0][at] : 0);
                    total[1][at] = columns.bias[v][k] + (w ? total[1][at] : 0);
                }
            }
        __syncthreads();
    }
    float *partials = (float *)args.partials + blockIdx.x * 2 * args.size;
    for (int64_t i = threadIdx.x; i < args.size; i += blockDim.x) {
        int group = (int)(i / ROW_WIDTH), at = (group / WARP * ROW_WIDTH + (int)(i % ROW_WIDTH)) * WARP + group % WARP;
        partials[i] = total[0][at];
        partials[args.size + i] = total[1][at];
    }
}

template <int V> __device__ inline void layer_norm_grad_rows(const layer_norm_args &args)
{
    row_share share = share_of(args.threads, args.size);
    int at_once = blockDim.x / args.threads;
    int64_t begin = blockIdx.x * args.each * at_once + threadIdx.x / args.threads;
    column_sums<V> columns;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
        for (int k = 0; k < ROW_WIDTH; k++)
            columns.weight[v][k] = columns.bias[v][k] = 0;
    for (int64_t i = 0, row = begin; i < args.each && row < args.rows; i++, row += at_once)
        layer_norm_grad_row(args, row, share, columns);
    if (!args.partials)
        return;
    if (share.threads == WARP) {
        add_warps(args, share, columns);
        return;
    }
    norm_vector partials = {(float *)args.partials + blockIdx.x * 2 * args.size, CUDA_F32};
    store_row(partials, 0, columns.weight, share);
    store_row(partials, args.size, columns.bias, share);
}

#define ROW_KERNELS(V)                                                                             \
    TD_KERNEL_SYNC(layer_norm_##V, struct layer_norm_args)                                         \
    {                                                                                              \
        layer_norm_rows<V>(args);                                                                  \
    }                                                                                              \
    TD_KERNEL_SYNC(layer_norm_grad_##V, struct layer_norm_args)                                    \
    {                                                                                              \
        layer_norm_grad_rows<V>(args);                                                             \
    }
ROW_KERNELS(2)
ROW_KERNELS(4)
ROW_KERNELS(6)
ROW_KERNELS(8)

/* ---- Any rows ------------------------------------------------------------------------------------------------------- */

/* What is normalised: x, or the sum, which the same thread has written. */
template <typename C> __device__ inline C normalised(const layer_norm_args &args, int64_t i)
{
    return read_number<C>(args.residual.data ? args.sum : args.x, i);
}

template <typename C> __device__ void layer_norm_any(const layer_norm_args &args)
{
    int groups = blockDim.x / args.threads, member = threadIdx.x % args.threads;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.rows; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.threads, start = row * args.size;
        bool there = row < args.rows;
        C sum = 0;
        two_sums<C> sums = {0, 0};
        for (int64_t i = member; i < args.size && there; i += args.threads) {
            if (args.residual.data)
                write_number(args.sum, start + i,
                             read_number<C>(args.x, start + i) + read_number<C>(args.residual, start + i));
            sum += normalised<C>(args, start + i);
        }
        C mean = reduce_row(sum, C(0), args.threads, plus_op()) / (C)args.size;
        for (int64_t i = member; i < args.size && there; i += args.threads) {
            C value = normalised<C>(args, start + i) - mean;
            sums.first += value;
            sums.second += value * value;
        }
        sums = reduce_row(sums, two_sums<C>{0, 0}, args.threads, plus_op());
        C rest = sums.first / (C)args.size, variance = sums.second / (C)args.size - rest * rest;
        C rstd = 1 / sqrt((variance > 0 || variance != variance ? variance : C(0)) + (C)args.eps);
        if (there && !member && args.mean)
            ((C *)args.mean)[row] = mean + rest;
        if (there && !member && args.rstd)
            ((C *)args.rstd)[row] = rstd;
        for (int64_t i = member; i < args.size && there; i += args.threads) {
            C value = (normalised<C>(args, start + i) - mean - rest) * rstd;
            if (args.weight.data)
                value *= read_number<C>(args.weight, i);
            if (args.bias.data)
                value += read_number<C>(args.bias, i);
            write_number(args.out, start + i, value);
        }
    }
}

template <typename C> __device__ void layer_norm_grad_any(const layer_norm_args &args)
{
    int groups = blockDim.x / args.threads, member = threadIdx.x % args.threads;
    for (int64_t base = (int64_t)blockIdx.x * groups; base < args.rows; base += (int64_t)gridDim.x * groups) {
        int64_t row = base + threadIdx.x / args.threads, start = row * args.size;
        bool there = row < args.rows;
        C mean = there ? ((const C *)args.mean)[row] : C(0), rstd = there ? ((const C *)args.rstd)[row] : C(0);
        two_sums<C> sums = {0, 0};
        for (int64_t i = member; i < args.size && there; i += args.threads) {
            C grad = read_number<C>(args.grad_y, start + i) * (args.weight.data ? read_number<C>(args.weight, i) : C(1));
            sums.first += grad;
            sums.second += grad * (read_number<C>(args.x, start + i) - mean) * rstd;
        }
        sums = reduce_row(sums, two_sums<C>{0, 0}, args.threads, plus_op());
        C shift = sums.first / (C)args.size, slope = sums.second / (C)args.size;
        for (int64_t i = member; i < args.size && there; i += args.threads) {
            C grad = read_number<C>(args.grad_y, start + i) * (args.weight.data ? read_number<C>(args.weight, i) : C(1));
            grad = rstd * (grad - shift - (read_number<C>(args.x, start + i) - mean) * rstd * slope);
            if (args.grad_sum.data)
                grad += read_number<C>(args.grad_sum, start + i);
            if (args.grad_x.data)
                write_number(args.grad_x, start + i, grad);
            if (args.grad_residual.data)
                write_number(args.grad_residual, start + i, grad);
        }
    }
}

/* The gradients of weight and bias over a slice of rows: a block has 32 columns, and its 8 warps every 8th row. */
template <typename C> __device__ void layer_norm_columns(const layer_norm_args &args)
{
    enum { WARPS = NORM_THREADS / LAYER_NORM_COLUMNS };
    __shared__ C sums[2][WARPS][LAYER_NORM_COLUMNS];
    int lane = threadIdx.x % LAYER_NORM_COLUMNS, warp = threadIdx.x / LAYER_NORM_COLUMNS;
    int64_t columns = (args.size + LAYER_NORM_COLUMNS - 1) / LAYER_NORM_COLUMNS;
    for (int64_t job = blockIdx.x; job < columns * args.slices; job += gridDim.x) {
        int64_t slice = job / columns, column = job % columns * LAYER_NORM_COLUMNS + lane;
        int64_t end = (slice + 1) * args.each < args.rows ? (slice + 1) * args.each : args.rows;
        C weight = 0, bias = 0;
        for (int64_t row = slice * args.each + warp; row < end && column < args.size; row += WARPS) {
            C grad = read_number<C>(args.grad_y, row * args.size + column);
            weight += grad * ((read_number<C>(args.x, row * args.size + column) - ((const C *)args.mean)[row]) *
                              ((const C *)args.rstd)[row]);
            bias += grad;
        }
        __syncthreads(); /* the sums of the job before have been read */
        sums[0][warp][lane] = weight;
        sums[1][warp][lane] = bias;
        __syncthreads();
        if (warp < 2 && column < args.size) {
            C total = 0;
            for (int w = 0; w < WARPS; w++)
                total += sums[warp][w][lane];
            ((C *)args.partials)[(slice * 2 + warp) * args.size + column] = total;
        }
    }
}

/* Adds the slices: a block has 32 columns, of the weight's and then the bias's, and its 32 warps every 32nd slice. */
template <typename C> __device__ void layer_norm_finish(const layer_norm_args &args)
{
    enum { WARPS = LAYER_NORM_FINISH_THREADS / LAYER_NORM_COLUMNS };
    __shared__ C sums[WARPS][LAYER_NORM_COLUMNS];
    int lane = threadIdx.x % LAYER_NORM_COLUMNS, warp = threadIdx.x / LAYER_NORM_COLUMNS;
    int64_t column = (int64_t)blockIdx.x * LAYER_NORM_COLUMNS + lane, width = 2 * args.size;
    C sum = 0;
#pragma unroll 4
    for (int64_t slice = warp; slice < args.slices; slice += WARPS)
        sum += column < width ? ((const C *)args.partials)[slice * width + column] : C(0);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= width)
        return;
    C total = 0;
    for (int w = 0; w < WARPS; w++)
        total += sums[w][lane];
    if (column < args.size && args.grad_weight.data)
        write_number(args.grad_weight, column, total);
    if (column >= args.size && args.grad_bias.data)
        write_number(args.grad_bias, column - args.size, total);
}

#define ANY_KERNELS(name, C)                                                                       \
    TD_KERNEL_SYNC(layer_norm_any_##name, struct layer_norm_args)                                  \
    {                                                                                              \
        layer_norm_any<C>(args);                                                                   \
    }                                                                                              \
    TD_KERNEL_SYNC(layer_norm_grad_any_##name, struct layer_norm_args)                             \
    {                                                                                              \
        layer_norm_grad_any<C>(args);                                                              \
    }                                                                                              \
    TD_KERNEL_SYNC(layer_norm_columns_##name, struct layer_norm_args)                              \
    {                                                                                              \
        layer_norm_columns<C>(args);                                                               \
    }                                                                                              \
    TD_KERNEL_SYNC(layer_norm_finish_##name, struct layer_norm_args)                               \
    {                                                                                              \
        layer_norm_finish<C>(args);                                                                \
    }
ANY_KERNELS(f32, float)
ANY_KERNELS(f64, double)
