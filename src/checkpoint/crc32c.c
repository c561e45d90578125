/* CRC-32C by the processor's instruction, or by tables, 8 bytes a step.
 *
 * The instruction has a latency of three cycles, and a new one can begin in each. So long data are cut into three lanes
 * whose checksums are computed side by side, and joined: a checksum is linear, and that of a lane followed by LANE zero
 * bytes is a table lookup for each of its bytes. */
#include "checkpoint/crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

enum { LANE = 4096 };

static const uint32_t polynomial = 0x82f63b78; /* with its bits reversed */
static uint32_t tables[8][256];
static uint32_t lane_tables[4][256]; /* of byte k of a checksum, followed by LANE zero bytes */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t step_table(uint32_t crc, const uint8_t *at, size_t size)
{
    while (size--)
        crc = crc >> 8 ^ tables[0][(crc ^ *at++) & 255];
    return crc;
}

static void fill_tables(void)
{
    static const uint8_t zeros[LANE];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
        tables[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 255];
    for (int k = 0; k < 4; k++)
        for (uint32_t i = 0; i < 256; i++)
            lane_tables[k][i] = step_table(i << 8 * k, zeros, LANE);
}

uint32_t td__crc32c_generic(uint32_t crc, const void *data, size_t size)
{
    const uint8_t *at = data;
    pthread_once(&once, fill_tables);
    crc = ~crc;
    for (; size >= 8; size -= 8, at += 8) {
        uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
                              (uint32_t)at[3] << 24);
        crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^
              tables[4][low >> 24] ^ tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^
              tables[0][at[7]];
    }
    return ~step_table(crc, at, size);
}

#if defined __x86_64__

__attribute__((target("sse4.2"))) static inline uint64_t add8(uint64_t crc, const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return __builtin_ia32_crc32di(crc, word);
}

/* The checksum of a lane, followed by LANE zero bytes. */
static uint64_t shift_lane(uint64_t crc)
{
    return lane_tables[0][crc & 255] ^ lane_tables[1][crc >> 8 & 255] ^
           lane_tables[2][crc >> 16 & 255] ^ lane_tables[3][crc >> 24 & 255];
}

__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t start, const uint8_t *at,
                                                                 size_t size)
{
    uint64_t crc = (uint32_t)~start;
    for (; size >= 3 * LANE; size -= 3 * LANE, at += 3 * LANE) {
        uint64_t second = 0, third = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            crc = add8(crc, at + i);
            second = add8(second, at + LANE + i);
            third = add8(third, at + 2 * LANE + i);
        }
        crc = shift_lane(shift_lane(crc) ^ second) ^ third;
    }
    for (; size >= 8; size -= 8, at += 8)
        crc = add8(crc, at);
    return ~step_table((uint32_t)crc, at, size);
}

uint32_t td__crc32c(uint32_t crc, const void *data, size_t size)
{
    pthread_once(&once, fill_tables);
    if (!__builtin_cpu_supports("sse4.2"))
        return td__crc32c_generic(crc, data, size);
    return by_instruction(crc, data, size);
}

#else

uint32_t td__crc32c(uint32_t crc, const void *data, size_t size)
{
    return td__crc32c_generic(crc, data, size);
}

#endif
