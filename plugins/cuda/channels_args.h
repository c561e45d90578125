/* Arguments for kernels that work channel by channel; channels.h has their loops. */
#ifndef CHANNELS_ARGS_H
#define CHANNELS_ARGS_H

#include "cuda/cuda_args.h"
#include "cuda/divisor.h"

/** Tensors [images, channels, pixels]. A channel is cut into chunks of `each` groups of `width` neighbours, the last one shorter; a
 *  block works on one chunk. */
struct channel_space {
    int64_t images, channels, pixels;
    int64_t groups; /* of a channel */
    int64_t chunks, each;
    struct cuda_divisor plane; /* groups of an image of a channel */
    int32_t width;
    int32_t large; /* too many groups for the divisor */
};

#endif
