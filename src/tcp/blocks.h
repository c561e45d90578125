/* The memory layout of the blocks of a schedule. */
#ifndef TD_TCP_BLOCKS_H
#define TD_TCP_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

/* One of three layouts: a vector of `count` elements, cut into `pieces` of about the same size; parts of
 * `count` elements each, `stride` bytes apart (`pieces` is 0); or parts of any sizes (`starts`, `ends`). A range
 * of several blocks must be contiguous. */
struct td__blocks {
    char *base;
    size_t element; /* bytes */
    size_t count;
    int32_t pieces;
    size_t stride;
    const size_t *starts, *ends; /* of each part, in elements */
};

static inline size_t td__block_start(const struct td__blocks *blocks, int32_t block)
{
    size_t i = (size_t)block;
    if (blocks->starts)
        return blocks->starts[i] * blocks->element;
    if (!blocks->pieces)
        return i * blocks->stride;
    size_t pieces = (size_t)blocks->pieces;
    return (blocks->count / pieces * i + blocks->count % pieces * i / pieces) * blocks->element;
}

/** The bytes of the `count` contiguous blocks from `block` on. */
static inline size_t td__block_bytes(const struct td__blocks *blocks, int32_t block, int32_t count)
{
    if (blocks->starts)
        return count ? (blocks->ends[block + count - 1] - blocks->starts[block]) * blocks->element
                     : 0;
    if (blocks->pieces)
        return td__block_start(blocks, block + count) - td__block_start(blocks, block);
    return (size_t)count * blocks->count * blocks->element;
}

/** `base` + `bytes`; `base` may be NULL if `bytes` is 0. */
static inline char *td__behind(const void *base, size_t bytes)
{
    return bytes ? (char *)base + bytes : (char *)base;
}

static inline char *td__block_at(const struct td__blocks *blocks, int32_t block)
{
    return td__behind(blocks->base, td__block_start(blocks, block));
}

#endif
