/* Kernels: pooling. A thread computes one pixel: of the output forward, of the input backward, so that no two threads
 * add to one pixel and the order of each sum is fixed. */
#include "cuda/device_code.h"
#include "cuda/pooling_args.h"

/* Input indices from `start` on, below `end`, every `step`-th. */
struct range {
    int64_t start, end, step, divisor;
};

/* The input range of output index i of a dimension. */
__device__ inline range window_of(const pool_args &args, int dim, int64_t i)
{
    int64_t size = args.in[dim], outputs = args.out[dim];
    range found;
    if (args.adaptive) {
        found.step = 1;
        found.start = i * size / outputs;
        found.end = ((i + 1) * size + outputs - 1) / outputs;
        found.divisor = found.end - found.start;
        return found;
    }
    found.step = args.dilation[dim];
    found.start = i * args.stride[dim] - args.padding[dim];
    found.end = found.start + (args.kernel[dim] - 1) * found.step + 1;
    int64_t limit = size + args.padding[dim]; /* the padding counts, but not what is beyond it */
    found.divisor = (found.end < limit ? found.end : limit) - found.start;
    if (found.start < 0)
        found.start += (-found.start + found.step - 1) / found.step * found.step;
    if (found.end > size)
        found.end = size;
    if (!args.count_include_pad)
        found.divisor = found.end - found.start;
    return found;
}

/* The outputs from `start` to `end` - 1 whose windows, without dilation, have the input index i. */
__device__ inline range outputs_of(const pool_args &args, int dim, int64_t i)
{
    int64_t size = args.in[dim], outputs = args.out[dim];
    range found = {0, 0, 1, 0};
    if (args.adaptive) {
        found.start = i * outputs / size;
        found.end = ((i + 1) * outputs + size - 1) / size;
    } else {
        int64_t last = i + args.padding[dim], first = last - args.kernel[dim] + 1;
        found.start = first > 0 ? (first + args.stride[dim] - 1) / args.stride[dim] : 0;
        found.end = last / args.stride[dim] + 1;
    }
    if (found.end > outputs)
        found.end = outputs;
    return found;
}

template <typename T> __device__ void find_max(const pool_args &args)
{
    typedef typename compute<T>::type C;
    int64_t each = args.out[0] * args.out[1], count = args.planes * each;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        int64_t plane = i / each, at = i % each;
        const T *x = (const T *)args.from + plane * args.in[0] * args.in[1];
        range rows = window_of(args, 0, at / args.out[1]), columns = window_of(args, 1, at % args.out[1]);
        C greatest = -(C)INFINITY;
        int64_t where = -1;
        for (int64_t y = rows.start; y < rows.end; y += rows.step)
            for (int64_t c = columns.start; c < columns.end; c += columns.step) {
                C value = load(x[y * args.in[1] + c]);
                if (where < 0 || value > greatest || (value != value && greatest == greatest)) {
                    greatest = value;
                    where = y * args.in[1] + c;
                }
            }
        ((T *)args.to)[i] = store<T>(greatest);
        if (args.indices)
            args.indices[i] = (int32_t)where;
    }
}

template <typename T> __device__ void average(const pool_args &args)
{
    typedef typename compute<T>::type C;
    int64_t each = args.out[0] * args.out[1], count = args.planes * each;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        int64_t plane = i / each, at = i % each;
        const T *x = (const T *)args.from + plane * args.in[0] * args.in[1];
        range rows = window_of(args, 0, at / args.out[1]), columns = window_of(args, 1, at % args.out[1]);
        C sum = 0;
        for (int64_t y = rows.start; y < rows.end; y++)
            for (int64_t c = columns.start; c < columns.end; c++)
                sum += load(x[y * args.in[1] + c]);
        bool empty = rows.start >= rows.end || columns.start >= columns.end;
        ((T *)args.to)[i] = store<T>(empty ? C(0) : sum / (C)(rows.divisor * columns.divisor));
    }
}

template <typename T> __device__ void average_grad(const pool_args &args)
{
    typedef typename compute<T>::type C;
    int64_t each = args.in[0] * args.in[1], count = args.planes * each;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        int64_t plane = i / each, at = i % each;
        const T *grad_y = (const T *)args.from + plane * args.out[0] * args.out[1];
        range rows = outputs_of(args, 0, at / args.in[1]), columns = outputs_of(args, 1, at % args.in[1]);
        C sum = 0;
        for (int64_t y = rows.start; y < rows.end; y++)
            for (int64_t c = columns.start; c < columns.end; c++) {
                int64_t divisor = window_of(args, 0, y).divisor * window_of(args, 1, c).divisor;
                sum += load(grad_y[y * args.out[1] + c]) / (C)divisor;
            }
        ((T *)args.to)[i] = store<T>(sum);
    }
}

/* Links the outputs of which an input pixel is the maximum, in any order. */
TD_KERNEL(pool_link, struct pool_args)
{
    int64_t each = args.out[0] * args.out[1], count = args.planes * each;
    for (int64_t i = first_element(); i < count; i += element_step()) {
        int32_t index = args.indices[i];
        if (index >= 0)
            args.links[i] = atomicExch(&args.heads[i / each * args.in[0] * args.in[1] + index], (int32_t)(i % each));
    }
}

/* Sums the gradients of these outputs from the first to the last, whatever the order of their list. */
template <typename T> __device__ void max_grad(const pool_args &args)
{
    typedef typename compute<T>::type C;
    int64_t each = args.in[0] * args.in[1], outputs = args.out[0] * args.out[1];
    for (int64_t i = first_element(); i < args.planes * each; i += element_step()) {
        const T *grad_y = (const T *)args.from + i / each * outputs;
        const int32_t *links = args.links + i / each * outputs;
        C sum = 0;
        for (int32_t last = -1;;) {
            int32_t next = INT32_MAX;
            for (int32_t at = args.heads[i]; at >= 0; at = links[at])
                if (at > last && at < next)
                    next = at;
            if (next == INT32_MAX)
                break;
            sum += load(grad_y[next]);
            last = next;
        }
        ((T *)args.to)[i] = store<T>(sum);
    }
}

#define POOL_KERNELS(name, T)                                                                      \
    TD_KERNEL(pool_max_##name, struct pool_args)                                                   \
    {                                                                                              \
        find_max<T>(args);                                                                         \
    }                                                                                              \
    TD_KERNEL(pool_max_grad_##name, struct pool_args)                                              \
    {                                                                                              \
        max_grad<T>(args);                                                                         \
    }                                                                                              \
    TD_KERNEL(pool_average_##name, struct pool_args)                                               \
    {                                                                                              \
        average<T>(args);                                                                          \
    }                                                                                              \
    TD_KERNEL(pool_average_grad_##name, struct pool_args)                                          \
    {                                                                                              \
        average_grad<T>(args);                                                                     \
    }

POOL_KERNELS(f32, float)
POOL_KERNELS(f64, double)
POOL_KERNELS(f16, f16)
POOL_KERNELS(bf16, bf16)
