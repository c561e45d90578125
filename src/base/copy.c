/* Copies; see copy.h. An ordinary store reads the line first. memcpy() avoids that only for single copies of
 * many megabytes; a collective moves as much in smaller ones. */
#include "base/copy.h"

#include "base/text.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { MOST_CACHES = 8 }; /* of a processor, in sysfs */

/* A number from sysfs about cache `index` of the first processor; 0 without one. */
static long read_number(int index, const char *name)
{
    char path[96], text[32];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
    return td__text_read(path, text, sizeof text) ? strtol(text, NULL, 10) : 0;
}

/* The size of one cache. sysconf() has the sum of a socket's L3 caches on AMD. */
static long find_cache(int level)
{
    for (int index = 0; index < MOST_CACHES; index++)
        if (read_number(index, "level") == level)
            return read_number(index, "size") * 1024; /* "32768K" */
    return sysconf(level == 3 ? _SC_LEVEL3_CACHE_SIZE : _SC_LEVEL2_CACHE_SIZE);
}

size_t td__cache_bytes(int level)
{
    static _Atomic long known[2]; /* every thread computes the same */
    _Atomic long *bytes = &known[level == 3];
    if (!*bytes) {
        long found = find_cache(level);
        *bytes = found > 0 ? found : level == 3 ? 32 << 20 : 1 << 20;
    }
    return (size_t)*bytes;
}

enum { LINE = 64, LEAST = 4096, AHEAD = 2048, LONG = 512 * 1024 };

/* Whole cache lines; `to` is aligned to one. The processor's own prefetching ends with a page, so a long copy prefetches
 * what is AHEAD; a collective's chunks of some pages end before that pays. The prefetched lines go to all caches: with the
 * hint for non-temporal data, a Xeon (Emerald Rapids) copies a third as fast, or less than a half without any prefetch. */
static inline void stream(char *to, const char *from, size_t size, bool prefetch)
{
#if defined(__SSE2__)
    for (size_t at = 0; at < size; at += LINE) {
        const __m128i *source = (const __m128i *)(const void *)(from + at);
        if (prefetch)
            _mm_prefetch(from + at + AHEAD, _MM_HINT_T0);
        __m128i *target = (__m128i *)(void *)(to + at);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
#else
    (void)prefetch;
    memcpy(to, from, size);
#endif
}

/* The same with twice as wide stores, which a Xeon (Emerald Rapids) carries out a fifth faster. */
#if defined(__x86_64__)
__attribute__((target("avx"))) static void stream_wide(char *to, const char *from, size_t size)
{
    for (size_t at = 0; at < size; at += LINE) {
        const __m256i *source = (const __m256i *)(const void *)(from + at);
        __m256i *target = (__m256i *)(void *)(to + at);
        _mm_prefetch(from + at + AHEAD, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
        _mm256_stream_si256(target, a);
        _mm256_stream_si256(target + 1, b);
    }
    _mm_sfence();
}

static bool streams_wide(void)
{
    return __builtin_cpu_supports("avx");
}
#else
static void stream_wide(char *to, const char *from, size_t size)
{
    stream(to, from, size, true);
}

static bool streams_wide(void)
{
    return false;
}
#endif

void td__copy_bytes(void *to, const void *from, size_t size, bool nontemporal)
{
    if (to == from || !size)
        return;
    if (!nontemporal || size < LEAST) {
        memcpy(to, from, size);
        return;
    }
    size_t head = -(uintptr_t)to % LINE, lines = (size - head) / LINE * LINE;
    memcpy(to, from, head);
    if (size < LONG)
        stream((char *)to + head, (const char *)from + head, lines, false);
    else if (streams_wide())
        stream_wide((char *)to + head, (const char *)from + head, lines);
    else
        stream((char *)to + head, (const char *)from + head, lines, true);
    memcpy((char *)to + head + lines, (const char *)from + head + lines, size - head - lines);
}
