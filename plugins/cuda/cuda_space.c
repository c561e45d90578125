/* Shapes and strides for kernels. */
#include "cuda/cuda_launch.h"

#include <string.h>

static void swap(struct cuda_space *space, int operands, int a, int b)
{
    int64_t size = space->size[a];
    space->size[a] = space->size[b];
    space->size[b] = size;
    for (int t = 0; t < operands; t++) {
        int64_t stride = space->stride[t][a];
        space->stride[t][a] = space->stride[t][b];
        space->stride[t][b] = stride;
    }
}

static int64_t magnitude(int64_t stride)
{
    return stride < 0 ? -stride : stride;
}

/* Whether dimension b follows dimension a in all operands, so that they are one. */
static bool follows(const struct cuda_space *space, int operands, int a, int b)
{
    for (int t = 0; t < operands; t++)
        if (space->stride[t][b] != space->stride[t][a] * space->size[a])
            return false;
    return true;
}

struct cuda_space td__cuda_space(const td_tensor *const *tensors, int count, bool in_order)
{
    struct cuda_space space;
    memset(&space, 0, sizeof space);
    space.count = td_tensor_numel(tensors[0]);
    int ndim = td_tensor_ndim(tensors[0]), kept = 0;
    for (int d = ndim - 1; d >= 0; d--) { /* the last dimension first; without those of size 1 */
        if (td_tensor_size(tensors[0], d) == 1)
            continue;
        space.size[kept] = td_tensor_size(tensors[0], d);
        for (int t = 0; t < count; t++)
            space.stride[t][kept] = td_tensor_stride(tensors[t], d);
        kept++;
    }
    for (int i = 1; i < kept && !in_order;
         i++) /* sorted by the first operand's strides, which is written */
        for (int k = i; k > 0 && magnitude(space.stride[0][k]) < magnitude(space.stride[0][k - 1]);
             k--)
            swap(&space, count, k, k - 1);
    int merged = 0;
    for (int i = 1; i < kept; i++) {
        if (follows(&space, count, merged, i)) {
            space.size[merged] *= space.size[i];
        } else {
            merged++;
            space.size[merged] = space.size[i];
            for (int t = 0; t < count; t++)
                space.stride[t][merged] = space.stride[t][i];
        }
    }
    space.ndim = kept ? merged + 1 : 0;
    space.plain = space.ndim <= 1;
    for (int t = 0; t < count && space.ndim == 1; t++)
        space.plain &= space.stride[t][0] == 1;
    return space;
}

/* Whether groups of `width` elements of dimension 0 are aligned in tensor t, or one element for all. */
static bool groups(const struct cuda_space *space, const td_tensor *tensor, int t, int width)
{
    if (space->stride[t][0] == 0)
        return true;
    size_t bytes = (size_t)width * td_dtype_size(td_tensor_dtype(tensor));
    bool aligned = (uintptr_t)td_tensor_data(tensor) % bytes == 0;
    for (int d = 1; d < space->ndim; d++)
        aligned &= space->stride[t][d] % width == 0;
    return aligned && space->stride[t][0] == 1;
}

struct cuda_each td__cuda_each(const td_tensor *const *tensors, int count, int width)
{
    struct cuda_each each = {.space = td__cuda_space(tensors, count, false), .width = 1};
    struct cuda_space *space = &each.space;
    bool grouped = width > 1 && space->ndim && space->count >= width &&
                   (space->ndim == 1 || space->size[0] % width == 0);
    for (int t = 0; t < count && grouped; t++)
        grouped = groups(space, tensors[t], t, width);
    if (!grouped)
        return each;
    each.width = width;
    each.tail = space->ndim == 1 ? space->count % width : 0;
    space->count /= width;
    space->size[0] /= width;
    space->plain = 0;
    for (int t = 0; t < count; t++) {
        each.repeated |= (uint32_t)(space->stride[t][0] == 0) << t;
        space->stride[t][0] *= width;
    }
    return each;
}
