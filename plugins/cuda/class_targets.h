/* For CUDA sources: the targets of classification losses, and what they weigh. */
#ifndef CUDA_CLASS_TARGETS_H
#define CUDA_CLASS_TARGETS_H

#include "cuda/device_code.h"
#include "cuda/losses_args.h"

/* The target at a position; -1 where it is ignored, or not a class, which is reported. */
__device__ inline int64_t target_at(const class_loss_args &args, int64_t i)
{
    int64_t target = args.target[i];
    if (target == args.ignore_index)
        return -1;
    if (target >= 0 && target < args.classes)
        return target;
    report_index(args.fault, args.slot, i, target, args.classes);
    return -1;
}

/* A number of grad_y or weight. */
template <typename T>
__device__ inline typename compute<T>::type number_at(const class_loss_args &args, const void *data,
                                                      int64_t i)
{
    return args.wide ? ((const typename compute<T>::type *)data)[i] : load(((const T *)data)[i]);
}

/* The gradient of the loss at a position, times the weight of its target. */
template <typename T>
__device__ inline typename compute<T>::type target_grad(const class_loss_args &args, int64_t i,
                                                        int64_t target)
{
    typedef typename compute<T>::type C;
    C grad = number_at<T>(args, args.grad_y, args.grad_each ? i : 0) *
             (args.factor ? (C)*args.factor : C(1));
    return args.weight ? grad * number_at<T>(args, args.weight, target) : grad;
}

#endif
