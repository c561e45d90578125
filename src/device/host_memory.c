/* How much memory of the host tensors have: two counters, since small tensors are made and freed in less than a microsecond. */
#include "base/arena.h"
#include "base/fail.h"
#include "device/device_internal.h"

#include <stdatomic.h>

static atomic_llong allocated, peak;

void td__count_host_memory(int64_t bytes)
{
    long long now = atomic_fetch_add_explicit(&allocated, bytes, memory_order_relaxed) + bytes;
    long long most = atomic_load_explicit(&peak, memory_order_relaxed);
    while (now > most && !atomic_compare_exchange_weak_explicit(
                             &peak, &most, now, memory_order_relaxed, memory_order_relaxed))
        continue;
}

td_status td__host_memory_stats(td_memory_stats *stats)
{
    stats->allocated = atomic_load_explicit(&allocated, memory_order_relaxed);
    stats->allocated_peak = atomic_load_explicit(&peak, memory_order_relaxed);
    return TD_OK;
}

td_status td__host_memory_reset_peak(void)
{
    atomic_store_explicit(&peak, atomic_load_explicit(&allocated, memory_order_relaxed),
                          memory_order_relaxed);
    return TD_OK;
}

td_status td__host_memory_trim(void)
{
    struct td__arena *arena = td__arena_default();
    if (!arena)
        return td__error_status();
    td__arena_trim(arena);
    return TD_OK;
}
