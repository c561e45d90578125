/* What launches of kernels over channels share. */
#ifndef LAUNCH_CHANNELS_H
#define LAUNCH_CHANNELS_H

#include "cuda/channels_args.h"
#include "cuda/cuda_launch.h"

/** The space of `tensors`, contiguous and of one shape [images, channels, …], NULL where there is none: groups as wide as all of them
 *  allow, and chunks for `per_processor` blocks a multiprocessor. */
struct channel_space td__cuda_channels(const td_tensor *const *tensors, int count,
                                       int per_processor);

#endif
