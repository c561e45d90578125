/* Kernels: steps of optimizers, and lists of tensors. The arithmetic of the steps is that of the host's, rounded at the
 * same places: fma() where the host fuses, and rounded_product() where the compiler would. */
#include "cuda/each_element.h"
#include "cuda/list_entries.h"

enum { THREADS = 256 };

__device__ inline float rounded_product(float a, float b)
{
    return __fmul_rn(a, b);
}
__device__ inline double rounded_product(double a, double b)
{
    return __dmul_rn(a, b);
}

/* ---- Blocks and chunks --------------------------------------------------------------------------------------------- */

/* Calls body(number<N>(), i) for the elements i to i + N - 1 of this block's chunk of `count` elements. */
template <int width, int chunk, typename Body>
__device__ inline void for_chunk(int64_t count, int first_block, bool aligned, Body body)
{
    int64_t begin = (int64_t)((int32_t)blockIdx.x - first_block) * chunk;
    int left = (int)(count - begin < chunk ? count - begin : chunk);
    int whole = aligned ? left / width * width : 0;
#pragma unroll 2
    for (int i = threadIdx.x * width; i < whole; i += THREADS * width)
        body(number<width>(), begin + i);
    for (int i = whole + threadIdx.x; i < left; i += THREADS)
        body(number<1>(), begin + i);
}

TD_KERNEL(note_stopped, struct stopped_args)
{
    *args.stopped = *(const volatile int32_t *)&args.fault->code != 0;
}

/* ---- Optimizers -------------------------------------------------------------------------------------------------------- */

/* The numbers of a step: arguments, or, in a graph, what the host has copied to the device for this launch. */
struct sgd_numbers {
    double rate, momentum, share, weight_decay;
};
__device__ inline sgd_numbers numbers_of(const sgd_args &args)
{
    const double *n = args.numbers;
    if (n)
        return {-n[0], n[1], 1 - n[2], n[3]};
    return {args.rate, args.momentum, args.share, args.weight_decay};
}

struct adam_numbers {
    double beta1, rest1, beta2, rest2, eps, weight_decay, shrink, size, root_correction;
};
__device__ inline adam_numbers numbers_of(const adam_args &args)
{
    const double *n = args.numbers;
    if (n)
        return {n[0], 1 - n[0], n[1], 1 - n[1], n[2], n[3], n[4], -n[5], n[6]};
    return {args.beta1,        args.rest1,  args.beta2, args.rest2,          args.eps,
            args.weight_decay, args.shrink, args.size,  args.root_correction};
}

template <typename T> __device__ void sgd(const sgd_args &args)
{
    typedef typename compute<T>::type C;
    if (*args.stopped)
        return;
    const sgd_entry &entry = entry_of(args.entry, args.entries);
    const sgd_numbers now = numbers_of(args);
    const C rate = (C)now.rate, momentum = (C)now.momentum, share = (C)now.share;
    const C weight_decay = (C)now.weight_decay, sign = (C)args.sign;
    const bool decay = now.weight_decay != 0;
    for_chunk<CUDA_WIDTH(sizeof(T)), UPDATE_CHUNK>(
        entry.count, entry.first_block, entry.aligned, [&](auto n, int64_t at) {
            T parameter[n.value], grad[n.value], buffer[n.value];
            read_group(parameter, entry.parameter, at, false);
            read_group(grad, entry.grad, at, false);
            if (entry.buffer) /* its first numbers are not used */
                read_group(buffer, entry.buffer, at, false);
            for (int k = 0; k < n.value; k++) {
                C p = load(parameter[k]), change = sign * load(grad[k]);
                if (decay)
                    change = fma(p, weight_decay, change);
                if (entry.buffer) {
                    C average = args.first ? change
                                           : fma(change, share,
                                                 rounded_product(load(buffer[k]), momentum));
                    buffer[k] = store<T>(average);
                    change = args.nesterov ? fma(average, momentum, change) : average;
                }
                parameter[k] = store<T>(fma(change, rate, p));
            }
            write_group(entry.parameter, at, parameter);
            if (entry.buffer)
                write_group(entry.buffer, at, buffer);
        });
}

template <typename T> __device__ void adam(const adam_args &args)
{
    typedef typename compute<T>::type C;
    if (*args.stopped)
        return;
    const adam_entry &entry = entry_of(args.entry, args.entries);
    const adam_numbers now = numbers_of(args);
    const C beta1 = (C)now.beta1, rest1 = (C)now.rest1, beta2 = (C)now.beta2;
    const C rest2 = (C)now.rest2, eps = (C)now.eps, weight_decay = (C)now.weight_decay;
    const C shrink = (C)now.shrink, size = (C)now.size, sign = (C)args.sign;
    const C correction = (C)now.root_correction;
    const bool decay = now.weight_decay != 0;
    for_chunk<CUDA_WIDTH(sizeof(T)), UPDATE_CHUNK>(
        entry.count, entry.first_block, entry.aligned, [&](auto n, int64_t at) {
            T parameter[n.value], grad[n.value], mean[n.value], square[n.value], greatest[n.value];
            read_group(parameter, entry.parameter, at, false);
            read_group(grad, entry.grad, at, false);
            read_group(mean, entry.mean, at, false);
            read_group(square, entry.square, at, false);
            if (entry.greatest)
                read_group(greatest, entry.greatest, at, false);
            for (int k = 0; k < n.value; k++) {
                C p = rounded_product(load(parameter[k]), shrink), change = sign * load(grad[k]);
                if (decay)
                    change = fma(p, weight_decay, change);
                C average = fma(change, rest1, rounded_product(load(mean[k]), beta1));
                C spread = fma(rounded_product(rest2, change), change,
                               rounded_product(load(square[k]), beta2));
                mean[k] = store<T>(average);
                square[k] = store<T>(spread);
                if (entry.greatest) { /* a NaN stays, whichever of the two it is */
                    C before = load(greatest[k]);
                    spread = before > spread || before != before ? before : spread;
                    greatest[k] = store<T>(spread);
                }
                parameter[k] = store<T>(p + rounded_product(size, average) /
                                                (sqrt(spread) / correction + eps));
            }
            write_group(entry.parameter, at, parameter);
            write_group(entry.mean, at, mean);
            write_group(entry.square, at, square);
            if (entry.greatest)
                write_group(entry.greatest, at, greatest);
        });
}

#define OPTIMIZERS(name, T)                                                                        \
    TD_KERNEL(sgd_##name, struct sgd_args)                                                         \
    {                                                                                              \
        sgd<T>(args);                                                                              \
    }                                                                                              \
    TD_KERNEL(adam_##name, struct adam_args)                                                       \
    {                                                                                              \
        adam<T>(args);                                                                             \
    }
EACH_FLOAT(OPTIMIZERS)

/* ---- Lists of tensors: by dtype, contiguous or not --------------------------------------------------------------------- */

/* x = function(x), for the chunk of this block of a contiguous tensor, or of one with strides. */
template <typename T, typename Function>
__device__ inline void visit(const list_entry &entry, const cuda_space *space, Function function)
{
    T *x = (T *)entry.x;
    int width = space ? 1 : CUDA_WIDTH(sizeof(T));
    for_chunk<CUDA_WIDTH(sizeof(T)), LIST_CHUNK>(
        entry.count, entry.first_block, entry.aligned && width > 1, [&](auto n, int64_t at) {
            T group[n.value];
            int64_t offset[1] = {at};
            if (space)
                find_offsets(*space, at, offset);
            read_group(group, x, offset[0], false);
            for (int k = 0; k < n.value; k++)
                group[k] = function(group[k]);
            write_group(x, offset[0], group);
        });
}

template <typename T>
__device__ inline void multiply(const list_args &args, const list_entry &entry,
                                const cuda_space *space)
{
    typedef typename compute<T>::type C;
    double value = args.wide ? *(const double *)args.multiple : *(const float *)args.multiple;
    C factor = load(store<T>((C)value)); /* a number of the tensor's dtype */
    visit<T>(entry, space, [&](T x) { return store<T>(load(x) * factor); });
}

template <typename T>
__device__ inline void unscale(const list_args &args, const list_entry &entry,
                               const cuda_space *space)
{
    typedef typename compute<T>::type C;
    C factor = (C)args.factor;
    bool infinite = false;
    visit<T>(entry, space, [&](T x) {
        T product = store<T>(load(x) * factor);
        infinite |= !isfinite(load(product));
        return product;
    });
    if (infinite)
        *args.found = 1; /* by several threads, all of which write the same */
}

TD_KERNEL(scale_list, struct list_args)
{
    const list_entry &entry = entry_of(args.entry, args.entries);
    BY_DTYPE(multiply, args, entry, nullptr)
}
TD_KERNEL(scale_strided, struct strided_args)
{
    const list_entry &entry = args.list.entry[0];
    BY_DTYPE(multiply, args.list, entry, &args.space)
}

TD_KERNEL(unscale_list, struct list_args)
{
    const list_entry &entry = entry_of(args.entry, args.entries);
    BY_DTYPE(unscale, args, entry, nullptr)
}
TD_KERNEL(unscale_strided, struct strided_args)
{
    const list_entry &entry = args.list.entry[0];
    BY_DTYPE(unscale, args.list, entry, &args.space)
}
