/* Which kernels to use; see reduce_kernels.h. */
#include "group/reduce_kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* __builtin_cpu_supports() does not know F16C in every compiler. Whether the operating system keeps
 * the registers of AVX it has looked up already. */
static bool has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

static bool always(void)
{
    return true;
}

/* The best one first. */
static const struct {
    const struct td__kernels *kernels;
    bool (*runs_here)(void);
} choices[] = {
#if defined(__x86_64__)
    {&td__kernels_avx512, has_avx512},
    {&td__kernels_avx2, has_avx2},
#endif
    {&td__kernels_generic, always},
};

enum { CHOICES = sizeof choices / sizeof *choices };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic(const struct td__kernels *) in_use;

/* NULL where there is none of that name; any name for NULL. */
static const struct td__kernels *find(const char *name)
{
    for (int i = 0; i < CHOICES; i++)
        if ((!name || !strcmp(name, choices[i].kernels->name)) && choices[i].runs_here())
            return choices[i].kernels;
    return NULL;
}

static void choose(void)
{
    const struct td__kernels *best = find(NULL);
    const char *wanted = getenv("TANDEM_SIMD");
    const struct td__kernels *found = wanted && *wanted ? find(wanted) : best;
    if (!found)
        td_log(TD_LOG_WARN,
               "TANDEM_SIMD is \"%s\", which is none of generic, avx2 and avx512, or which this "
               "processor lacks; using %s",
               wanted, best->name);
    atomic_store(&in_use, found ? found : best);
}

const struct td__kernels *td__kernels(void)
{
    const struct td__kernels *kernels = atomic_load_explicit(&in_use, memory_order_acquire);
    if (__builtin_expect(!kernels, 0)) {
        pthread_once(&once, choose);
        kernels = atomic_load(&in_use);
    }
    return kernels;
}

bool td__kernels_use(const char *name)
{
    td__kernels(); /* so that the first use does not choose again */
    const struct td__kernels *found = find(name);
    if (found)
        atomic_store(&in_use, found);
    return found != NULL;
}
