/* The Mersenne Twister mt19937 of Matsumoto and Nishimura: 624 words of state, which are replaced
 * all at once, and a tempering of each word on its way out.
 *
 * Both loops are vectorised: word i of the next state needs words i, i + 1 and i + 397 of the last one, or word
 * i - 227 of the new one, never a neighbour of the same vector. */
#include "tensor/random_internal.h"

enum { N = TD__MT19937_WORDS, M = 397 };

static inline uint32_t twist(uint32_t word, uint32_t next)
{
    uint32_t mixed = (word & 0x80000000u) | (next & 0x7fffffffu);
    return (mixed >> 1) ^ (-(next & 1u) & 0x9908b0dfu);
}

static inline uint32_t temper(uint32_t y)
{
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

static void make_words(struct td__mt19937 *engine)
{
    uint32_t *words = engine->words;
    for (int i = 0; i < N - M; i++)
        words[i] = words[i + M] ^ twist(words[i], words[i + 1]);
    for (int i = N - M; i < N - 1; i++)
        words[i] = words[i + M - N] ^ twist(words[i], words[i + 1]);
    words[N - 1] = words[M - 1] ^ twist(words[N - 1], words[0]);
    engine->left = N;
    engine->next = 0;
}

void td__mt19937_seed(struct td__mt19937 *engine, uint64_t seed)
{
    engine->seed = seed;
    engine->words[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < N; i++) {
        uint32_t last = engine->words[i - 1];
        engine->words[i] = 1812433253u * (last ^ (last >> 30)) + i;
    }
    engine->left = 1;
    engine->next = 0;
}

void td__mt19937_seed_array(struct td__mt19937 *engine, const uint32_t *keys, int count)
{
    td__mt19937_seed(engine, 19650218u);
    uint32_t *words = engine->words;
    uint32_t i = 1;
    int key = 0;
    for (int round = count > N ? count : N; round > 0; round--) {
        words[i] = (words[i] ^ ((words[i - 1] ^ (words[i - 1] >> 30)) * 1664525u)) + keys[key] +
                   (uint32_t)key;
        key = key + 1 < count ? key + 1 : 0;
        if (++i == N) {
            words[0] = words[N - 1];
            i = 1;
        }
    }
    for (int round = N - 1; round > 0; round--) {
        words[i] = (words[i] ^ ((words[i - 1] ^ (words[i - 1] >> 30)) * 1566083941u)) - i;
        if (++i == N) {
            words[0] = words[N - 1];
            i = 1;
        }
    }
    words[0] = 0x80000000u;
}

uint32_t td__mt19937_u32(struct td__mt19937 *engine)
{
    if (--engine->left == 0)
        make_words(engine);
    return temper(engine->words[engine->next++]);
}

void td__mt19937_fill(struct td__mt19937 *engine, uint32_t *numbers, int64_t count)
{
    while (count > 0) {
        if (engine->left == 1) {
            *numbers++ = td__mt19937_u32(engine);
            count--;
            continue;
        }
        int64_t here = engine->left - 1 < count ? engine->left - 1 : count;
        const uint32_t *words = engine->words + engine->next;
        for (int64_t i = 0; i < here; i++)
            numbers[i] = temper(words[i]);
        engine->left -= (int)here;
        engine->next += (int)here;
        numbers += here;
        count -= here;
    }
}

void td__mt19937_skip(struct td__mt19937 *engine, int64_t count)
{
    while (count > 0) {
        if (engine->left == 1) {
            make_words(engine);
            engine->next = 1; /* the first one is taken */
            count--;
            continue;
        }
        int64_t here = engine->left - 1 < count ? engine->left - 1 : count;
        engine->left -= (int)here;
        engine->next += (int)here;
        count -= here;
    }
}
