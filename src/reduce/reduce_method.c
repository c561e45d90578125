/* Which way a reduction in place goes; see reduce_method.h.
 *
 * One thread measures, on memory of its own that is in its second cache: what the two ways differ in is
 * what stays in the first. A partner on another processor that writes the inputs would have to be waited for
 * where ranks share processors. It would decide otherwise at most for 8 buffers without AVX-512: a loop by
 * hand preferred staged there with a partner, where one thread finds no clear difference.
 *
 * The least time of a few short turns counts, so that being interrupted does not. */
#include "reduce/reduce_method.h"

#include "base/clock.h"
#include "base/fail.h"
#include "reduce/reduction.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    BUFFERS = 8,
    PAGE = 4096,
    BYTES = 32 << 10, /* of each: two do not fit the first cache, all of them fit the second */
    TURNS = 9,
};

#define DISTANCE                                                                                   \
    ((size_t)1 << 28) /* between buffers that clash on any processor that has clashes */
#define CLEARLY 0.95  /* fused is given up for what is as much faster */

static _Atomic uint32_t forced; /* by TANDEM_SHM_REDUCE, 0: it is not set */
static _Atomic uint32_t known;
static pthread_mutex_t measuring = PTHREAD_MUTEX_INITIALIZER;

td_status td__reduce_methods_read(void)
{
    const char *value = getenv("TANDEM_SHM_REDUCE");
    bool set = value && *value, fused = set && !strcmp(value, "fused");
    if (set && !fused && strcmp(value, "staged") != 0)
        return td_fail(TD_ERR_INVALID,
                       "TANDEM_SHM_REDUCE is \"%s\"; it can be fused or staged, and is measured "
                       "where it is not set",
                       value);
    atomic_store(&forced, fused ? TD__WAYS_FUSED : set ? TD__WAYS_STAGED : 0);
    return TD_OK;
}

/* The hash is that of bits 12^27, 13^26, 14^25, 15^20, 16^21, 17^22, 18^23 and 19^24. */
static unsigned hash_of(uintptr_t address)
{
    uintptr_t low = address >> 12, five = address >> 20 & 31, three = address >> 25;
    uintptr_t turned = (three & 1) << 2 | (three & 2) | (three >> 2 & 1);
    return (unsigned)((low ^ five << 3 ^ turned) & 255);
}

bool td__reduce_clash(void *const *addresses, int n)
{
    unsigned keys[BUFFERS];
    for (int i = 0; i < n && i < BUFFERS; i++) {
        uintptr_t address = (uintptr_t)addresses[i];
        keys[i] = hash_of(address) << 6 | (address >> 6 & 63);
        for (int k = 0; k < i; k++)
            if (keys[k] == keys[i])
                return true;
    }
    return false;
}

/* ---- Measuring ------------------------------------------------------------------------------- */

static int64_t time_once(uint32_t ways, void **buffers, int n)
{
    struct td__reduction sum = {.dtype = TD_F32, .op = TD_SUM, .ways = ways};
    int64_t start = td__now_ns();
    td__reduce_many(&sum, buffers, n, (const void *const *)buffers, n, BYTES / sizeof(float));
    return td__now_ns() - start;
}

static bool is_staged_faster(char *memory, int n, bool clash)
{
    void *buffers[BUFFERS];
    int64_t fused = INT64_MAX, staged = INT64_MAX;
    for (int i = 0; i < n; i++)
        buffers[i] = memory + (size_t)i * (DISTANCE + (clash ? 0 : PAGE));
    for (int turn = 0; turn < TURNS; turn++) {
        int64_t one = time_once(TD__WAYS_FUSED, buffers, n);
        int64_t other = time_once(TD__WAYS_STAGED, buffers, n);
        fused = one < fused ? one : fused;
        staged = other < staged ? other : staged;
    }
    return (double)staged < CLEARLY * (double)fused;
}

/* Address space with a few pages at every DISTANCE; NULL where there is not so much. */
static char *open_memory(void)
{
    char *memory = mmap(NULL, BUFFERS * DISTANCE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    for (int i = 0; i < BUFFERS; i++) {
        char *buffer = memory + (size_t)i * DISTANCE;
        if (mprotect(buffer, BYTES + BUFFERS * PAGE, PROT_READ | PROT_WRITE)) {
            munmap(memory, BUFFERS * DISTANCE);
            return NULL;
        }
        memset(buffer, 0, BYTES + BUFFERS * PAGE);
    }
    return memory;
}

uint32_t td__reduce_methods_measure(void)
{
    uint32_t ways = TD__WAYS_KNOWN;
    char *memory = open_memory();
    for (int n = 2; memory && n <= BUFFERS; n *= 2)
        for (int clash = 0; clash < 2; clash++)
            if (is_staged_faster(memory, n, clash))
                ways |= TD__WAYS_STAGED & (uint32_t)n << (clash ? 4 : 0);
    if (memory)
        munmap(memory, BUFFERS * DISTANCE);
    return ways;
}

uint32_t td__reduce_methods(void)
{
    uint32_t ways = atomic_load_explicit(&forced, memory_order_relaxed);
    if (!ways)
        ways = atomic_load_explicit(&known, memory_order_relaxed);
    if (ways)
        return ways;
    pthread_mutex_lock(&measuring);
    ways = atomic_load(&known);
    if (!ways)
        atomic_store(&known, ways = td__reduce_methods_measure());
    pthread_mutex_unlock(&measuring);
    return ways;
}

void td__reduce_methods_adopt(uint32_t ways)
{
    uint32_t none = 0;
    if ((ways & TD__WAYS_KNOWN) && !atomic_load_explicit(&known, memory_order_relaxed))
        atomic_compare_exchange_strong(&known, &none, ways & TD__WAYS_STAGED);
}
