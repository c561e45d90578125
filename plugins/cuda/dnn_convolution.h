/* Convolutions by cuDNN. */
#ifndef DNN_CONVOLUTION_H
#define DNN_CONVOLUTION_H

#include "cuda/convolution_args.h"
#include "cuda/dnn_plan.h"

#include <tandem/tensor.h>

/** Enqueues a convolution on the current stream of `to`: to = args->to, the operand that `direction` computes. *done is false
 *  where cuDNN is not there or does not compute it; then nothing was enqueued, and the caller's kernels do. */
td_status td__dnn_convolve(enum dnn_direction direction, const struct convolution_args *args,
                           td_tensor *to, bool *done);

#endif
