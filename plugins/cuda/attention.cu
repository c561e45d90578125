/* Kernels: attention of any size, dtype and mask. A warp computes one row of the result: each lane has one of 32 keys (or
 * queries) at a time for the scores, and then every 32nd element of the row for the sums. Rows that a warp reads often
 * are in shared memory, in the type of the computation. */
#include "cuda/attention_args.h"
#include "cuda/device_code.h"

template <typename C> struct greater {
    __device__ C operator()(C a, C b) const
    {
        return a > b ? a : b;
    }
};

template <typename T>
__device__ inline const T *row_of(const attention_args &args, const attention_rows &rows, int64_t item, int64_t row)
{
    return (const T *)rows.data + item / args.heads * rows.batch + item % args.heads * rows.head + row * rows.row;
}

/* Copies a row to shared memory. */
template <typename T, typename C> __device__ inline void keep(C *to, const T *from, int64_t count, int lane)
{
    for (int64_t i = lane; i < count; i += WARP)
        to[i] = load(from[i]);
}

template <typename C> __device__ inline void clear(C *to, int64_t count, int lane)
{
    for (int64_t i = lane; i < count; i += WARP)
        to[i] = 0;
}

template <typename T, typename C> __device__ inline C dot(const C *a, const T *b, int64_t count)
{
    C sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += a[i] * load(b[i]);
    return sum;
}

/* to[i] += weight of a lane * its row, over all lanes of the warp in turn; `rows` is the row of lane 0. */
template <typename T, typename C>
__device__ inline void add_rows(C *to, C weight, const T *rows, int64_t stride, int64_t count, int lanes, int lane)
{
    for (int from = 0; from < lanes; from++) {
        C w = __shfl_sync(0xffffffffu, weight, from);
        for (int64_t i = lane; i < count; i += WARP)
            to[i] += w * load(rows[from * stride + i]);
    }
}

/* The score of a query and a key, of which one is in shared memory; -infinity where it is masked. */
template <typename T, typename C>
__device__ inline C score(const attention_args &args, const C *kept, const T *other, int64_t item, int64_t query,
                          int64_t key)
{
    if (args.causal && key > query)
        return -(C)INFINITY;
    C value = (C)args.scale * dot(kept, other, args.width);
    if (args.mask)
        value += load(((const T *)args.mask)[item / args.heads * args.mask_batch + item % args.heads * args.mask_head +
                                             query * args.mask_row + key * args.mask_column]);
    return value;
}

template <typename T> __device__ void attend(const attention_args &args)
{
    typedef typename compute<T>::type C;
    TD_SHARED(C, memory);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    C *q = memory + warp * (args.width + args.value_width), *sum = q + args.width;
    for (int64_t i = (int64_t)blockIdx.x * warps + warp; i < args.items * args.queries;
         i += (int64_t)gridDim.x * warps) {
        int64_t item = i / args.queries, query = i % args.queries;
        keep(q, row_of<T>(args, args.q, item, query), args.width, lane);
        clear(sum, args.value_width, lane);
        __syncwarp();
        C greatest = -(C)INFINITY, total = 0;
        int64_t keys = args.causal && query + 1 < args.keys ? query + 1 : args.keys;
        for (int64_t first = 0; first < keys; first += WARP) {
            int lanes = keys - first < WARP ? (int)(keys - first) : WARP;
            C s = lane < lanes ? score(args, q, row_of<T>(args, args.k, item, first + lane), item, query, first + lane)
                               : -(C)INFINITY;
            C most = reduce_warp(s, greater<C>());
            if (!(most > greatest))
                most = greatest;
            bool none = most == -(C)INFINITY;
            C factor = none ? C(1) : exp(greatest - most), p = none ? C(0) : exp(s - most);
            total = total * factor + reduce_warp(p, plus_op());
            greatest = most;
            if (factor != C(1))
                for (int64_t e = lane; e < args.value_width; e += WARP)
                    sum[e] *= factor;
            add_rows(sum, p, row_of<T>(args, args.v, item, first), args.v.row, args.value_width, lanes, lane);
        }
        T *out = (T *)row_of<T>(args, args.y, item, query);
        for (int64_t e = lane; e < args.value_width; e += WARP)
            out[e] = store<T>(total == C(0) ? C(0) : sum[e] / total);
        if (args.lse && !lane)
            ((C *)args.lse)[i] = total == C(0) ? -(C)INFINITY : greatest + log(total);
        __syncwarp();
    }
}

/* The sum over grad_y * y, a warp for each row. */
template <typename T> __device__ void prepare(const attention_args &args)
{
    typedef typename compute<T>::type C;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int64_t i = (int64_t)blockIdx.x * warps + warp; i < args.items * args.queries;
         i += (int64_t)gridDim.x * warps) {
        const T *grad_y = row_of<T>(args, args.grad_y, i / args.queries, i % args.queries);
        const T *y = row_of<T>(args, args.y, i / args.queries, i % args.queries);
        C sum = 0;
        for (int64_t e = lane; e < args.value_width; e += WARP)
            sum += load(grad_y[e]) * load(y[e]);
        sum = reduce_warp(sum, plus_op());
        if (!lane)
            ((C *)args.delta)[i] = sum;
    }
}

template <typename C> __device__ inline C probability(C s, C lse)
{
    return lse == -(C)INFINITY ? C(0) : exp(s - lse);
}

template <typename T> __device__ void grad_query(const attention_args &args)
{
    typedef typename compute<T>::type C;
    TD_SHARED(C, memory);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    C *q = memory + warp * (2 * args.width + args.value_width), *sum = q + args.width, *grad_y = sum + args.width;
    for (int64_t i = (int64_t)blockIdx.x * warps + warp; i < args.items * args.queries;
         i += (int64_t)gridDim.x * warps) {
        int64_t item = i / args.queries, query = i % args.queries;
        keep(q, row_of<T>(args, args.q, item, query), args.width, lane);
        keep(grad_y, row_of<T>(args, args.grad_y, item, query), args.value_width, lane);
        clear(sum, args.width, lane);
        __syncwarp();
        C lse = ((const C *)args.lse)[i], delta = ((const C *)args.delta)[i];
        int64_t keys = args.causal && query + 1 < args.keys ? query + 1 : args.keys;
        for (int64_t first = 0; first < keys; first += WARP) {
            int lanes = keys - first < WARP ? (int)(keys - first) : WARP;
            C grad = 0;
            if (lane < lanes) {
                int64_t key = first + lane;
                C p = probability(score(args, q, row_of<T>(args, args.k, item, key), item, query, key), lse);
                grad = p == C(0) ? C(0)
                                 : p * (dot(grad_y, row_of<T>(args, args.v, item, key), args.value_width) - delta) *
                                       (C)args.scale;
            }
            add_rows(sum, grad, row_of<T>(args, args.k, item, first), args.k.row, args.width, lanes, lane);
        }
        T *out = (T *)row_of<T>(args, args.grad_q, item, query);
        for (int64_t d = lane; d < args.width; d += WARP)
            out[d] = store<T>(sum[d]);
        __syncwarp();
    }
}

template <typename T> __device__ void grad_key(const attention_args &args)
{
    typedef typename compute<T>::type C;
    TD_SHARED(C, memory);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    C *k = memory + warp * 2 * (args.width + args.value_width), *v = k + args.width;
    C *k_sum = v + args.value_width, *v_sum = k_sum + args.width;
    for (int64_t i = (int64_t)blockIdx.x * warps + warp; i < args.items * args.keys; i += (int64_t)gridDim.x * warps) {
        int64_t item = i / args.keys, key = i % args.keys;
        keep(k, row_of<T>(args, args.k, item, key), args.width, lane);
        keep(v, row_of<T>(args, args.v, item, key), args.value_width, lane);
        clear(k_sum, args.width + args.value_width, lane);
        __syncwarp();
        int64_t start = args.causal ? key / WARP * WARP : 0;
        for (int64_t first = start; first < args.queries; first += WARP) {
            int lanes = args.queries - first < WARP ? (int)(args.queries - first) : WARP;
            C p = 0, grad = 0;
            if (lane < lanes) {
                int64_t query = first + lane, at = item * args.queries + query;
                p = probability(score(args, k, row_of<T>(args, args.q, item, query), item, query, key),
                                ((const C *)args.lse)[at]);
                if (p != C(0))
                    grad = p *
                           (dot(v, row_of<T>(args, args.grad_y, item, query), args.value_width) -
                            ((const C *)args.delta)[at]) *
                           (C)args.scale;
            }
            add_rows(k_sum, grad, row_of<T>(args, args.q, item, first), args.q.row, args.width, lanes, lane);
            add_rows(v_sum, p, row_of<T>(args, args.grad_y, item, first), args.grad_y.row, args.value_width, lanes,
                     lane);
        }
        if (args.grad_k.data)
            for (int64_t d = lane; d < args.width; d += WARP)
                ((T *)row_of<T>(args, args.grad_k, item, key))[d] = store<T>(k_sum[d]);
        if (args.grad_v.data)
            for (int64_t e = lane; e < args.value_width; e += WARP)
                ((T *)row_of<T>(args, args.grad_v, item, key))[e] = store<T>(v_sum[e]);
        __syncwarp();
    }
}

#define ATTENTION_KERNELS(name, T)                                                                 \
    TD_KERNEL_SYNC(attend_##name, struct attention_args)                                           \
    {                                                                                              \
        attend<T>(args);                                                                           \
    }                                                                                              \
    TD_KERNEL_SYNC(attend_prepare_##name, struct attention_args)                                   \
    {                                                                                              \
        prepare<T>(args);                                                                          \
    }                                                                                              \
    TD_KERNEL_SYNC(attend_grad_query_##name, struct attention_args)                                \
    {                                                                                              \
        grad_query<T>(args);                                                                       \
    }                                                                                              \
    TD_KERNEL_SYNC(attend_grad_key_##name, struct attention_args)                                  \
    {                                                                                              \
        grad_key<T>(args);                                                                         \
    }

ATTENTION_KERNELS(f32, float)
ATTENTION_KERNELS(f64, double)
ATTENTION_KERNELS(f16, f16)
ATTENTION_KERNELS(bf16, bf16)
