/* Detects the processor's instruction sets and chooses one; see simd.h. */
#include "base/simd.h"

#include <tandem/base.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Not every compiler's __builtin_cpu_supports() knows F16C and AVX512_BF16, so CPUID is read for them. Whether
 * the kernel saves the registers is part of the answer of the builtin for AVX2 and AVX-512. */
static bool has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_bf16(void)
{
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}
#else
static bool has_avx2(void)
{
    return false;
}

static bool has_avx512(void)
{
    return false;
}

static bool has_bf16(void)
{
    return false;
}
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic td__simd_level in_use;
static atomic_bool processor_has_bf16;

bool td__simd_has(td__simd_level level)
{
    return level == TD__SIMD_AVX512 ? has_avx512() : level == TD__SIMD_AVX2 ? has_avx2() : true;
}

const char *td__simd_name(td__simd_level level)
{
    return level == TD__SIMD_AVX512 ? "avx512" : level == TD__SIMD_AVX2 ? "avx2" : "generic";
}

static void choose(void)
{
    int best = TD__SIMD_AVX512;
    while (!td__simd_has((td__simd_level)best))
        best--;
    const char *wanted = getenv("TANDEM_SIMD");
    int found = best;
    if (wanted && *wanted) {
        while (found >= 0 && strcmp(wanted, td__simd_name((td__simd_level)found)) != 0)
            found--;
        if (found < 0)
            td_log(
                TD_LOG_WARN,
                "TANDEM_SIMD is \"%s\"; it must be generic, avx2 or avx512, and supported by this "
                "processor; using %s",
                wanted, td__simd_name((td__simd_level)best));
    }
    in_use = (td__simd_level)(found < 0 ? best : found);
    processor_has_bf16 = has_bf16();
}

td__simd_level td__simd(void)
{
    pthread_once(&once, choose);
    return in_use;
}

bool td__simd_has_bf16(void)
{
    return td__simd() == TD__SIMD_AVX512 && processor_has_bf16;
}

bool td__simd_use(td__simd_level level)
{
    td__simd(); /* so that the first use does not overwrite it */
    if (!td__simd_has(level))
        return false;
    in_use = level;
    return true;
}
