/* A hash of memory that is as fast as reading it.
 *
 * 16 lanes of 32 bits: each word is xored into its lane, which is rotated and multiplied by an odd number. Both can be undone,
 * so a lane in which one bit differs differs to the end; the rotation brings bits at the top, which a multiplication does not
 * spread, down to where it does. At the end the lanes are mixed into 64 bits. */
#include "elastic/elastic_internal.h"
#include "tensor/vector.h"

#include <string.h>

enum { LANES = 16, WIDE = LANES * 4 };

static uint64_t finalize(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Two sets of lanes, so that one multiplication does not wait for the other. */
TD__VECTOR_256 static void hash_blocks(const unsigned char *from, size_t blocks, uint32_t *lanes)
{
    uint32_t state[2 * LANES];
    memcpy(state, lanes, sizeof state);
    for (size_t b = 0; b < blocks; b++) {
        uint32_t words[2 * LANES];
        memcpy(words, from + b * sizeof words, sizeof words);
        for (int i = 0; i < 2 * LANES; i++) {
            uint32_t x = state[i] ^ words[i];
            state[i] = (x << 13 | x >> 19) * UINT32_C(0x9e3779b1);
        }
    }
    memcpy(lanes, state, sizeof state);
}

uint64_t td__bit_hash(const void *data, size_t bytes, uint64_t seed)
{
    uint32_t lanes[2 * LANES];
    const unsigned char *from = data;
    size_t blocks = bytes / (2 * WIDE);
    for (int i = 0; i < 2 * LANES; i++)
        lanes[i] = (uint32_t)finalize(seed + (uint64_t)i + 1);
    if (blocks)
        hash_blocks(from, blocks, lanes);
    unsigned char rest[2 * WIDE] = {0};
    size_t left = bytes - blocks * 2 * WIDE;
    if (left)
        memcpy(rest, from + bytes - left, left);
    hash_blocks(rest, 1, lanes);
    uint64_t hash = finalize(bytes + seed);
    for (int i = 0; i < 2 * LANES; i += 2)
        hash = finalize(hash ^ ((uint64_t)lanes[i] << 32 | lanes[i + 1])) +
               UINT64_C(0x9e3779b97f4a7c15);
    return hash;
}
