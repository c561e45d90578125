/* Copies; see copy.h. A store through the caches reads the line first, which memcpy() avoids only for
 * single copies of many megabytes; a collective moves as much in smaller ones. */
#include "group/copy.h"

#include <stdint.h>
#include <string.h>
#include <unistd.h>

size_t td__cache_bytes(void)
{
    static size_t known; /* the same for every thread that finds it out */
    size_t bytes = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!bytes) {
        long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
        bytes = found > 0 ? (size_t)found : (size_t)32 << 20;
        __atomic_store_n(&known, bytes, __ATOMIC_RELAXED);
    }
    return bytes;
}

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, LEAST = 4096 };

/* Whole lines, `to` at the beginning of one. */
static void stream(char *to, const char *from, size_t size)
{
    for (size_t at = 0; at < size; at += LINE) {
        const __m128i *source = (const __m128i *)(const void *)(from + at);
        __m128i *target = (__m128i *)(void *)(to + at);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
}

void td__copy_bytes(void *to, const void *from, size_t size, bool past)
{
    if (to == from || !size)
        return;
    if (!past || size < LEAST) {
        memcpy(to, from, size);
        return;
    }
    size_t head = -(uintptr_t)to % LINE, lines = (size - head) / LINE * LINE;
    memcpy(to, from, head);
    stream((char *)to + head, (const char *)from + head, lines);
    memcpy((char *)to + head + lines, (const char *)from + head + lines, size - head - lines);
}

#else

void td__copy_bytes(void *to, const void *from, size_t size, bool past)
{
    (void)past;
    if (to != from && size)
        memcpy(to, from, size);
}

#endif
