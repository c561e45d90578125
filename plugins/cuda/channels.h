/* For CUDA sources: loops over the elements of a channel of [images, channels, pixels].
 *
 * A channel is not contiguous: each image has a run of `pixels` of it. Groups of neighbours, up to 16 bytes, are read at once where
 * runs are aligned, and finding a group costs a multiplication instead of divisions. */
#ifndef CUDA_CHANNELS_H
#define CUDA_CHANNELS_H

#include "cuda/channels_args.h"
#include "cuda/each_element.h"

/* Group i of a channel: the offset of its first element. */
__device__ inline int64_t channel_offset(const channel_space &space, int64_t channel, int64_t i)
{
    int64_t image, at;
    if (space.large) {
        int64_t plane = space.pixels / space.width;
        image = i / plane;
        at = i - image * plane;
    } else {
        uint32_t rest;
        image = divide((uint32_t)i, space.plane, rest);
        at = rest;
    }
    return (image * space.channels + channel) * space.pixels + at * space.width;
}

/* How many groups a thread loads before it uses the first. */
enum { CHANNEL_LOADS = 2 };

/* Calls body(offsets, count) for the groups of a chunk that belong to this thread, up to CHANNEL_LOADS at a time. */
template <typename Body>
__device__ inline void for_chunk(const channel_space &space, int64_t channel, int64_t chunk, Body body)
{
    int64_t end = (chunk + 1) * space.each < space.groups ? (chunk + 1) * space.each : space.groups;
    for (int64_t i = chunk * space.each + threadIdx.x; i < end; i += (int64_t)CHANNEL_LOADS * blockDim.x) {
        int64_t at[CHANNEL_LOADS];
        int count = 0;
#pragma unroll
        for (int k = 0; k < CHANNEL_LOADS; k++)
            if (i + (int64_t)k * blockDim.x < end) {
                at[k] = channel_offset(space, channel, i + (int64_t)k * blockDim.x);
                count = k + 1;
            }
        body(at, count);
    }
}

/* Calls body(number<N>()) with the width of the groups: at most `most`, which is 16 bytes. */
template <int most, typename Body> __device__ inline void with_width(const channel_space &space, Body body)
{
    if (space.width == most)
        body(number<most>());
    else if (most > 2 && space.width == most / 2)
        body(number<(most > 2 ? most / 2 : 1)>());
    else
        body(number<1>());
}

#endif
