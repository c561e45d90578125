/* Kernels: losses. */
#include "cuda/class_targets.h"

/* ---- Classification ----------------------------------------------------------------------------------------------- */

template <typename T> __device__ void nll_loss(const class_loss_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.n * args.positions; i += element_step()) {
        int64_t target = target_at(args, i), n = i / args.positions, s = i % args.positions;
        C value = 0;
        if (target >= 0) {
            C weight = args.weight ? load(((const T *)args.weight)[target]) : C(1);
            value = -weight * load(((const T *)args.x)[(n * args.classes + target) * args.positions + s]);
        }
        ((T *)args.out)[i] = store<T>(value);
    }
}

/* 1 over the sum of the weights, by one block. */
template <typename T> __device__ void nll_factor(const class_loss_args &args)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < args.n * args.positions; i += blockDim.x) {
        int64_t target = args.target[i];
        if (target != args.ignore_index && target >= 0 && target < args.classes)
            sum += args.weight ? (double)number_at<T>(args, args.weight, target) : 1.0;
    }
    sum = reduce_block(sum, 0.0, plus_op());
    if (!threadIdx.x)
        *args.factor = 1 / sum;
}

template <typename T> __device__ void nll_loss_grad(const class_loss_args &args)
{
    typedef typename compute<T>::type C;
    int64_t each = args.classes * args.positions;
    for (int64_t i = first_element(); i < args.n * each; i += element_step()) {
        int64_t position = i / each * args.positions + i % args.positions;
        int64_t target = target_at(args, position), c = i / args.positions % args.classes;
        ((T *)args.out)[i] = store<T>(target == c ? -target_grad<T>(args, position, target) : C(0));
    }
}

/* ---- Pairs ----------------------------------------------------------------------------------------------------------- */

enum { MSE, L1, BCE_LOGITS }; /* as td_pair_loss has them */

template <typename C> __device__ inline C pair_value(int loss, C x, C y)
{
    switch (loss) {
    case MSE:
        return (x - y) * (x - y);
    case L1:
        return fabs(x - y);
    default:
        return (x < 0 ? C(0) : x) - x * y + log1p(exp(-fabs(x)));
    }
}

template <typename C> __device__ inline C pair_derivative(int loss, C x, C y)
{
    switch (loss) {
    case MSE:
        return 2 * (x - y);
    case L1:
        return x > y ? C(1) : x < y ? C(-1) : x - y; /* NaN stays */
    default: {
        C e = exp(-fabs(x));
        return (x < 0 ? e : C(1)) / (1 + e) - y;
    }
    }
}

template <typename T> __device__ void pair_loss(const pair_loss_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.count; i += element_step())
        ((T *)args.out)[i] = store<T>(
            pair_value(args.loss, load(((const T *)args.x)[i]), load(((const T *)args.y)[i])) * (C)args.scale);
}

template <typename T> __device__ void pair_loss_sum(const pair_loss_args &args)
{
    typedef typename compute<T>::type C;
    double sum = 0;
    for (int64_t i = first_element(); i < args.count; i += element_step())
        sum += (double)pair_value<C>(args.loss, load(((const T *)args.x)[i]), load(((const T *)args.y)[i]));
    sum = reduce_block(sum, 0.0, plus_op());
    if (!threadIdx.x)
        args.partials[blockIdx.x] = sum;
}

template <typename T> __device__ void pair_loss_finish(const pair_loss_args &args)
{
    typedef typename compute<T>::type C;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < args.blocks; i += blockDim.x)
        sum += args.partials[i];
    sum = reduce_block(sum, 0.0, plus_op());
    if (!threadIdx.x)
        *(T *)args.out = store<T>((C)(sum * args.scale));
}

template <typename T> __device__ void pair_loss_grad(const pair_loss_args &args)
{
    typedef typename compute<T>::type C;
    for (int64_t i = first_element(); i < args.count; i += element_step()) {
        C grad = load(((const T *)args.grad_y)[args.grad_each ? i : 0]) * (C)args.scale;
        C slope = pair_derivative(args.loss, load(((const T *)args.x)[i]), load(((const T *)args.y)[i]));
        ((T *)args.out)[i] = store<T>(grad * slope);
    }
}

/* ---- Kernels ----------------------------------------------------------------------------------------------------------- */

#define PLAIN(kernel, name, T, type)                                                               \
    TD_KERNEL(kernel##_##name, struct type)                                                        \
    {                                                                                              \
        kernel<T>(args);                                                                           \
    }
#define SYNC(kernel, name, T, type)                                                                \
    TD_KERNEL_SYNC(kernel##_##name, struct type)                                                   \
    {                                                                                              \
        kernel<T>(args);                                                                           \
    }
#define LOSS_KERNELS(name, T)                                                                      \
    PLAIN(nll_loss, name, T, class_loss_args)                                                      \
    SYNC(nll_factor, name, T, class_loss_args)                                                     \
    PLAIN(nll_loss_grad, name, T, class_loss_args)                                                 \
    PLAIN(pair_loss, name, T, pair_loss_args)                                                      \
    SYNC(pair_loss_sum, name, T, pair_loss_args)                                                   \
    SYNC(pair_loss_finish, name, T, pair_loss_args)                                                \
    PLAIN(pair_loss_grad, name, T, pair_loss_args)

LOSS_KERNELS(f32, float)
LOSS_KERNELS(f64, double)
LOSS_KERNELS(f16, f16)
LOSS_KERNELS(bf16, bf16)
