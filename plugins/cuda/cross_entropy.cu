/* Kernels: cross entropy of logits, and its gradient.
 *
 * Rows of logits are moved 16 bytes at a time, and once: a thread keeps the greatest logit that it has met and the sum of
 * the exponentials relative to it, and scales the sum when it meets a greater one. Which elements a thread adds up, and in
 * which order, depends on the number of classes alone, not on how the row is aligned: 16 bytes of a row that begins
 * between two multiples of 16 are cut out of two words, of which the second is in L1 by then. */
#include "cuda/class_targets.h"
#include "cuda/tensor_cores.h"

/* exp(x) of halves by ex2.approx: 3 instructions an element in place of 9, as many as a memory of 4 TB/s leaves time for.
 * The rounding of x log2(e) makes the error |x| 2^-24 of the result. In the sum, where x is at most 0, that is at most
 * 2^-25 of the sum an element; in a gradient it is far below the rounding to 16 bits. */
template <typename T> __device__ inline typename compute<T>::type exponential(typename compute<T>::type x)
{
    if constexpr (sizeof(T) == 2)
        return power_of_2(x * 1.44269504f);
    else
        return exp(x);
}

/* The greatest logit, and the sum of exp(x - greatest). */
template <typename C> struct logit_sum {
    C greatest, sum;
};

/* What exponentials are relative to: -infinity has no difference from itself. */
template <typename C> __device__ inline C origin_of(C greatest)
{
    return greatest > -(C)INFINITY ? greatest : C(0);
}

template <typename C> struct join_logit_sums {
    __device__ logit_sum<C> operator()(logit_sum<C> a, logit_sum<C> b) const
    {
        C greatest = fmax(a.greatest, b.greatest), from = origin_of(greatest);
        return logit_sum<C>{greatest, a.sum * exp(a.greatest - from) + b.sum * exp(b.greatest - from)};
    }
};

template <typename T> struct in_16_bytes {
    static constexpr int count = 16 / sizeof(T);
};

/* Adds elements to the sum. A NaN is not the greatest, but makes the sum NaN. */
template <typename T, int count>
__device__ inline void add_logits(logit_sum<typename compute<T>::type> &to, const T (&x)[count])
{
    typedef typename compute<T>::type C;
    C greatest = to.greatest;
    for (int i = 0; i < count; i++)
        greatest = fmax(greatest, load(x[i]));
    C from = origin_of(greatest), sum = to.sum * exponential<T>(to.greatest - from);
    for (int i = 0; i < count; i++)
        sum += exponential<T>(load(x[i]) - from);
    to = {greatest, sum};
}

/* The 16 bytes that begin `bytes` after the first of two neighbouring words; `bytes` is less than 16. */
__device__ inline uint4 cut_out(uint4 low, uint4 high, int bytes)
{
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int bits = bytes % 4 * 8;
    for (int i = 0; i < 6; i++)
        words[i] = bytes & 8 ? words[i + 2] : words[i];
    for (int i = 0; i < 5; i++)
        words[i] = bytes & 4 ? words[i + 1] : words[i];
    for (int i = 0; i < 4; i++)
        words[i] = (uint32_t)(((uint64_t)words[i + 1] << 32 | words[i]) >> bits);
    return uint4{words[0], words[1], words[2], words[3]};
}

/* Elements of a row that begins `offset` bytes after a multiple of 16: `vectors` times 16 bytes, all of the row, from
 * `first` on and `step` apart. */
template <typename T, bool shifted, int vectors>
__device__ inline void read_logits(T (&to)[vectors * in_16_bytes<T>::count], const T *row, int offset, int64_t first,
                                   int step)
{
    const uint4 *from = (const uint4 *)((const char *)row - offset) + first;
    uint4 words[vectors];
    for (int i = 0; i < vectors; i++)
        words[i] = shifted ? cut_out(from[i * step], from[i * step + 1], offset) : from[i * step];
    memcpy((void *)to, words, sizeof words);
}

/* The part of thread `member` of a row's sum. */
template <typename T, bool shifted>
__device__ inline logit_sum<typename compute<T>::type> sum_row(const T *row, int64_t classes, int member, int group)
{
    typedef typename compute<T>::type C;
    constexpr int count = in_16_bytes<T>::count;
    logit_sum<C> sum = {-(C)INFINITY, 0};
    int offset = (int)((uintptr_t)row % 16);
    int64_t i = member, vectors = classes / count;
    for (; i + (ROW_VECTORS - 1) * group < vectors; i += ROW_VECTORS * group) {
        T x[ROW_VECTORS * count];
        read_logits<T, shifted, ROW_VECTORS>(x, row, offset, i, group);
        add_logits(sum, x);
    }
    for (; i < vectors; i += group) {
        T x[count];
        read_logits<T, shifted, 1>(x, row, offset, i, group);
        add_logits(sum, x);
    }
    if (member < classes % count) {
        T x[1] = {row[vectors * count + member]};
        add_logits(sum, x);
    }
    return sum;
}

/* The loss at a position, and its statistics; 0 where there is no target. `x` is the logit of the target. */
template <typename T>
__device__ inline void put_loss(const class_loss_args &args, int64_t i, int64_t target, const T *x,
                                logit_sum<typename compute<T>::type> of_row)
{
    typedef typename compute<T>::type C;
    C greatest = 0, log_sum = 0, loss = 0;
    if (target >= 0) {
        greatest = of_row.greatest;
        log_sum = log(of_row.sum);
        C weight = args.weight ? number_at<T>(args, args.weight, target) : C(1);
        loss = -weight * (load(*x) - greatest - log_sum);
    }
    ((C *)args.statistics)[2 * i] = greatest;
    ((C *)args.statistics)[2 * i + 1] = log_sum;
    if (args.wide)
        ((C *)args.out)[i] = loss;
    else
        ((T *)args.out)[i] = store<T>(loss);
}

/* Rows whose classes follow one another: by a warp each, or by a block. */
template <typename T> __device__ void cross_entropy_rows(const class_loss_args &args)
{
    typedef typename compute<T>::type C;
    int rows = blockDim.x / args.group, member = threadIdx.x % args.group;
    for (int64_t base = (int64_t)blockIdx.x * rows; base < args.n; base += (int64_t)gridDim.x * rows) {
        int64_t n = base + threadIdx.x / args.group, target = n < args.n ? target_at(args, n) : -1;
        const T *row = (const T *)args.x + n * args.classes;
        logit_sum<C> none = {-(C)INFINITY, 0}, sum = none;
        if (target >= 0)
            sum = (uintptr_t)row % 16 ? sum_row<T, true>(row, args.classes, member, args.group)
                                      : sum_row<T, false>(row, args.classes, member, args.group);
        sum = args.group == WARP ? reduce_warp(sum, join_logit_sums<C>())
                                 : reduce_block(sum, none, join_logit_sums<C>());
        if (n < args.n && !member)
            put_loss(args, n, target, row + target, sum);
    }
}

/* A thread for each target, where the logits of neighbouring targets are neighbours. */
template <typename T> __device__ void cross_entropy_columns(const class_loss_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.n * args.positions; i += element_step()) {
        int64_t target = target_at(args, i), step = args.positions;
        const T *x = (const T *)args.x + i / step * args.classes * step + i % step;
        logit_sum<C> sum = {-(C)INFINITY, 0};
        for (int64_t c = 0; c < args.classes && target >= 0; c++)
            sum.greatest = fmax(sum.greatest, load(x[c * step]));
        for (int64_t c = 0; c < args.classes && target >= 0; c++)
            sum.sum += exponential<T>(load(x[c * step]) - origin_of(sum.greatest));
        put_loss(args, i, target, x + target * step, sum);
    }
}

/* Products that no sum is contracted with: the gradient of an element has the same bits wherever it is computed. */
__device__ inline float product(float a, float b)
{
    return __fmul_rn(a, b);
}
__device__ inline double product(double a, double b)
{
    return __dmul_rn(a, b);
}

/* What the gradients of a row are made of. */
template <typename C> struct row_grad {
    C greatest, log_sum, grad;
};

template <typename T>
__device__ inline row_grad<typename compute<T>::type> row_grad_at(const class_loss_args &args, int64_t i, int64_t target)
{
    typedef typename compute<T>::type C;
    const C *statistics = (const C *)args.statistics + 2 * i;
    return {statistics[0], statistics[1], target_grad<T>(args, i, target)};
}

template <typename T, typename C> __device__ inline C logit_grad(const row_grad<C> &of, T x, bool hit)
{
    C value = product(exponential<T>(load(x) - of.greatest - of.log_sum), of.grad);
    return hit ? value - of.grad : value;
}

/* The gradients of `count` neighbours; `hit` is where the target is among them, if it is. */
template <typename T, typename C, int count>
__device__ inline uint4 logit_grads(const row_grad<C> &of, const T *x, int64_t hit)
{
    C values[count];
    for (int i = 0; i < count; i++)
        values[i] = logit_grad(of, x[i], false);
    if (hit >= 0 && hit < count)
        for (int i = 0; i < count; i++)
            values[i] = i == hit ? values[i] - of.grad : values[i];
    uint4 words;
    if constexpr (sizeof(T) == 2) {
        uint32_t pairs[4];
        for (int i = 0; i < 4; i++)
            pairs[i] = pack<T>(values[2 * i], values[2 * i + 1]);
        memcpy(&words, pairs, sizeof words);
    } else {
        memcpy(&words, values, sizeof words);
    }
    return words;
}

/* The elements from `begin` on of a row, one at a time. */
template <typename T, typename C>
__device__ inline void grads_one_by_one(const row_grad<C> &of, T *out, const T *x, int64_t target, int64_t begin,
                                        int64_t end)
{
    for (int64_t c = begin + threadIdx.x; c < end; c += blockDim.x)
        out[c] = store<T>(logit_grad(of, x[c], c == target));
}

/* `vectors` times 16 bytes of a row, from `first` on; the addresses are multiples of 16, and `hit` is the target's place. */
template <typename T, int vectors, typename C>
__device__ inline void grads_of_vectors(const row_grad<C> &of, T *out, const T *x, int64_t hit, int64_t first)
{
    constexpr int count = in_16_bytes<T>::count;
    T elements[vectors * count];
    read_logits<T, false, vectors>(elements, x, 0, first, (int)blockDim.x);
    for (int i = 0; i < vectors; i++) {
        int64_t at = first + i * (int)blockDim.x;
        ((uint4 *)out)[at] = logit_grads<T, C, count>(of, elements + i * count, hit - at * count);
    }
}

template <typename T, typename C>
__device__ inline void grads_of_row(const row_grad<C> &of, T *out, const T *x, int64_t target, int64_t classes)
{
    constexpr int count = in_16_bytes<T>::count;
    int64_t head = (int64_t)(-(uintptr_t)x % 16 / sizeof(T));
    if (head > classes || ((uintptr_t)x - (uintptr_t)out) % 16)
        head = classes; /* nothing, or never both, at a multiple of 16 */
    int64_t vectors = (classes - head) / count, i = threadIdx.x;
    grads_one_by_one(of, out, x, target, 0, head);
    for (; i + (ROW_VECTORS - 1) * (int)blockDim.x < vectors; i += ROW_VECTORS * (int)blockDim.x)
        grads_of_vectors<T, ROW_VECTORS>(of, out + head, x + head, target - head, i);
    for (; i < vectors; i += blockDim.x)
        grads_of_vectors<T, 1>(of, out + head, x + head, target - head, i);
    grads_one_by_one(of, out, x, target, head + vectors * count, classes);
}

/* A block for each target where its classes follow one another. */
template <typename T> __device__ void cross_entropy_grad_rows(const class_loss_args &args)
{
    for (int64_t n = blockIdx.x; n < args.n; n += gridDim.x) {
        int64_t target = target_at(args, n), at = n * args.classes;
        T *out = (T *)args.out + at;
        if (target >= 0)
            grads_of_row(row_grad_at<T>(args, n, target), out, (const T *)args.x + at, target, args.classes);
        for (int64_t c = threadIdx.x; c < args.classes && target < 0; c += blockDim.x)
            out[c] = store<T>(0);
    }
}

template <typename T> __device__ void cross_entropy_grad(const class_loss_args &args)
{
    typedef typename compute<T>::type C;
    int64_t each = args.classes * args.positions;
    for (int64_t i = first_element(); i < args.n * each; i += element_step()) {
        int64_t position = i / each * args.positions + i % args.positions;
        int64_t target = target_at(args, position), c = i / args.positions % args.classes;
        C value = 0;
        if (target >= 0)
            value = logit_grad(row_grad_at<T>(args, position, target), ((const T *)args.x)[i], c == target);
        ((T *)args.out)[i] = store<T>(value);
    }
}

/* ---- Kernels ----------------------------------------------------------------------------------------------------- */

#define PLAIN(kernel, name, T)                                                                     \
    TD_KERNEL(kernel##_##name, struct class_loss_args)                                             \
    {                                                                                              \
        kernel<T>(args);                                                                           \
    }
#define SYNC(kernel, name, T)                                                                      \
    TD_KERNEL_SYNC(kernel##_##name, struct class_loss_args)                                        \
    {                                                                                              \
        kernel<T>(args);                                                                           \
    }
#define CROSS_ENTROPY_KERNELS(name, T)                                                             \
    SYNC(cross_entropy_rows, name, T)                                                              \
    PLAIN(cross_entropy_columns, name, T)                                                          \
    PLAIN(cross_entropy_grad_rows, name, T)                                                        \
    PLAIN(cross_entropy_grad, name, T)

CROSS_ENTROPY_KERNELS(f32, float)
CROSS_ENTROPY_KERNELS(f64, double)
CROSS_ENTROPY_KERNELS(f16, f16)
CROSS_ENTROPY_KERNELS(bf16, bf16)
