/* Spaces of channels; see launch_channels.h. */
#include "cuda/launch_channels.h"

enum { LEAST_GROUPS = 512, MOST_BYTES = 16 };

/* The widest group: 16 bytes, half of it, or one element. */
static int32_t width_of(const td_tensor *const *tensors, int count, int64_t pixels)
{
    int64_t size = (int64_t)td_dtype_size(td_tensor_dtype(tensors[0]));
    for (int64_t width = MOST_BYTES / size; width >= 2 && width >= MOST_BYTES / size / 2;
         width /= 2) {
        bool fits = pixels % width == 0;
        for (int t = 0; t < count && fits; t++)
            fits = !tensors[t] ||
                   (uintptr_t)td_tensor_data(tensors[t]) % (uint64_t)(width * size) == 0;
        if (fits)
            return (int32_t)width;
    }
    return 1;
}

struct channel_space td__cuda_channels(const td_tensor *const *tensors, int count,
                                       int per_processor)
{
    struct channel_space space = {.images = td_tensor_size(tensors[0], 0),
                                  .channels = td_tensor_size(tensors[0], 1),
                                  .pixels = 1};
    for (int d = 2; d < td_tensor_ndim(tensors[0]); d++)
        space.pixels *= td_tensor_size(tensors[0], d);
    space.width = width_of(tensors, count, space.pixels);
    int64_t plane = space.pixels / space.width;
    space.groups = space.images * plane;
    space.large = space.groups > INT32_MAX;
    space.plane = cuda_divisor_of(plane < 1 ? 1 : plane > INT32_MAX ? INT32_MAX : plane);
    if (!space.channels || !space.groups)
        return space;
    int64_t wanted = (int64_t)td__cuda_device_of(tensors[0])->processors * per_processor /
                     space.channels;
    int64_t most = (space.groups + LEAST_GROUPS - 1) / LEAST_GROUPS;
    wanted = wanted < 1 ? 1 : wanted > most ? most : wanted;
    space.each = (space.groups + wanted - 1) / wanted;
    space.chunks = (space.groups + space.each - 1) / space.each;
    return space;
}
