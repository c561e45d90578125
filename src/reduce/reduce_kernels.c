/* Chooses the kernels; see reduce_kernels.h. */
#include "reduce/reduce_kernels.h"

#include "base/simd.h"

#include <stdatomic.h>
#include <string.h>

/* Best first. */
static const struct {
    const struct td__reduce_kernels *kernels;
    td__simd_level level;
} choices[] = {
#if defined(__x86_64__)
    {&td__kernels_avx512, TD__SIMD_AVX512},
    {&td__kernels_avx2, TD__SIMD_AVX2},
#endif
    {&td__kernels_generic, TD__SIMD_GENERIC},
};

enum { CHOICES = sizeof choices / sizeof *choices };

static _Atomic(const struct td__reduce_kernels *) in_use;

/* NULL if the name is unknown, or the processor does not support it. */
static const struct td__reduce_kernels *find(const char *name)
{
    for (int i = 0; i < CHOICES; i++)
        if (!strcmp(name, choices[i].kernels->name) && td__simd_has(choices[i].level))
            return choices[i].kernels;
    return NULL;
}

const struct td__reduce_kernels *td__kernels(void)
{
    const struct td__reduce_kernels *kernels = atomic_load_explicit(&in_use, memory_order_acquire);
    if (__builtin_expect(!kernels, 0)) /* every thread finds the same */
        atomic_store(&in_use, kernels = find(td__simd_name(td__simd())));
    return kernels;
}

bool td__kernels_use(const char *name)
{
    td__kernels(); /* so that the first use does not overwrite it */
    const struct td__reduce_kernels *found = find(name);
    if (found)
        atomic_store(&in_use, found);
    return found != NULL;
}
