/* Arguments of the kernels in convolution.cu. */
#ifndef CONVOLUTION_ARGS_H
#define CONVOLUTION_ARGS_H

#include "cuda/channels_args.h"

/** x [images, channels, in], w [filters, channels / groups, kernel], y [images, filters, out]. */
struct convolution_args {
    int64_t images, channels, filters, groups;
    int64_t in[2], out[2], kernel[2], stride[2], padding[2], dilation[2];
    const void *x, *w, *y,
        *bias; /* which of them are read depends on the kernel; bias may be NULL */
    void *to;  /* the result */
    int32_t accumulate;
    struct channel_space space; /* of y, for the bias */
};

enum { CONVOLUTION_THREADS = 128, CONVOLUTION_BIAS_THREADS = 256, CONVOLUTION_SUM_THREADS = 1024 };

#endif
