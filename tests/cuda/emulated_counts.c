/* Counts of the driver's functions; EMULATED_CUDA_COUNTS=1 prints them when the process ends. */
#include "emulated_counts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct emulated_counter *counters;

void emulated_count(struct emulated_counter *counter)
{
    if (__atomic_fetch_add(&counter->calls, 1, __ATOMIC_SEQ_CST))
        return;
    counter->next = __atomic_load_n(&counters, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(&counters, &counter->next, counter, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
        ;
}

long emulated_calls(const char *function)
{
    long calls = 0;
    for (const struct emulated_counter *at = __atomic_load_n(&counters, __ATOMIC_SEQ_CST); at;
         at = at->next)
        if (!function || !strcmp(at->function, function))
            calls += __atomic_load_n(&at->calls, __ATOMIC_SEQ_CST);
    return calls;
}

__attribute__((destructor)) static void print_counts(void)
{
    const char *wanted = getenv("EMULATED_CUDA_COUNTS");
    for (const struct emulated_counter *at = counters; at && wanted && *wanted == '1';
         at = at->next)
        fprintf(stderr, "calls %8ld %s\n", at->calls, at->function);
}
