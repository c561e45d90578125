/* Copies; see copy.h. A store through the caches reads the line first, which memcpy() avoids only for
 * single copies of many megabytes; a collective moves as much in smaller ones. */
#include "group/copy.h"

#include <stdint.h>
#include <string.h>
#include <unistd.h>

size_t td__cache_bytes(int level)
{
    static _Atomic long known[2]; /* the same for every thread that finds it out */
    _Atomic long *bytes = &known[level == 3];
    if (!*bytes) {
        long found = sysconf(level == 3 ? _SC_LEVEL3_CACHE_SIZE : _SC_LEVEL2_CACHE_SIZE);
        *bytes = found > 0 ? found : level == 3 ? 32 << 20 : 1 << 20;
    }
    return (size_t)*bytes;
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
