/* What the benchmarks share: failing with a reason, and medians. */
#ifndef TD_BENCH_MEASURE_H
#define TD_BENCH_MEASURE_H

#include <tandem/base.h>

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** Prints "<program>: <reason>" and ends with code 1. */
__attribute__((noreturn, format(printf, 1, 2))) static inline void bench_die(const char *format,
                                                                             ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static inline void bench_check(td_status status)
{
    if (status)
        bench_die("%s", td_last_error());
}

/** A whole number of at least `low` from the command line. */
static inline int bench_number(const char *option, const char *text, int low)
{
    char *end;
    long number = text ? strtol(text, &end, 10) : 0;
    if (!text || end == text || *end || number < low || number > 1000000)
        bench_die("%s needs a number of at least %d", option, low);
    return (int)number;
}

static inline int bench_compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/** Sorts `values`, for bench_at(). */
static inline void bench_sort(int64_t *values, size_t count)
{
    qsort(values, count, sizeof *values, bench_compare);
}

/** The value at `fraction` (0.5 for the median) of sorted `values`. */
static inline int64_t bench_at(const int64_t *values, size_t count, double fraction)
{
    return values[(size_t)(fraction * (double)(count - 1))];
}

#endif
