/* Chooses the method of an in-place reduction; see reduce_method.h.
 *
 * One thread measures, on its own memory in its L2 cache: the two methods differ in what stays in L1. With a
 * second thread that writes the inputs, the measurement would have to wait for it where ranks share
 * processors. It could change the result only for 8 buffers without AVX-512: there a manual test with two
 * threads preferred staged, where one thread finds no clear difference.
 *
 * The minimum of a few short rounds counts, so that interruptions do not. */
#include "reduce/reduce_method.h"

#include "base/clock.h"
#include "base/fail.h"
#include "base/simd.h"
#include "reduce/reduction.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    BUFFERS = 8,
    PAGE = 4096,
    BYTES = 32 << 10, /* of each: two do not fit into L1, all of them fit into L2 */
    ROUNDS = 9,
};

#define DISTANCE ((size_t)1 << 28) /* between buffers that alias on any processor with aliasing */
#define THRESHOLD 0.95             /* staged must take less than this share of fused's time */

static _Atomic uint32_t forced; /* by TANDEM_SHM_REDUCE; 0: not set */
static _Atomic uint32_t known;
static pthread_mutex_t measuring = PTHREAD_MUTEX_INITIALIZER;

td_status td__reduce_methods_read(void)
{
    const char *value = getenv("TANDEM_SHM_REDUCE");
    bool set = value && *value, fused = set && !strcmp(value, "fused");
    if (set && !fused && strcmp(value, "staged") != 0)
        return td_fail(TD_ERR_INVALID,
                       "TANDEM_SHM_REDUCE is \"%s\"; it must be fused or staged, or not set, "
                       "which measures both",
                       value);
    atomic_store(&forced, fused ? TD__METHODS_FUSED : set ? TD__METHODS_STAGED : 0);
    td__simd(); /* reads TANDEM_SIMD: the first reduction may be on a thread of the library */
    return TD_OK;
}

/* The hash of bits 12^27, 13^26, 14^25, 15^20, 16^21, 17^22, 18^23 and 19^24. */
static unsigned hash_of(uintptr_t address)
{
    uintptr_t low = address >> 12, five = address >> 20 & 31, three = address >> 25;
    uintptr_t reversed = (three & 1) << 2 | (three & 2) | (three >> 2 & 1);
    return (unsigned)((low ^ five << 3 ^ reversed) & 255);
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

static int64_t time_once(uint32_t methods, void **buffers, int n)
{
    struct td__reduction sum = {.dtype = TD_F32, .op = TD_SUM, .methods = methods};
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
    for (int round = 0; round < ROUNDS; round++) {
        int64_t one = time_once(TD__METHODS_FUSED, buffers, n);
        int64_t other = time_once(TD__METHODS_STAGED, buffers, n);
        fused = one < fused ? one : fused;
        staged = other < staged ? other : staged;
    }
    return (double)staged < THRESHOLD * (double)fused;
}

/* Reserves address space with a few pages at every DISTANCE; NULL without enough. */
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

static uint32_t measure(void)
{
    uint32_t methods = TD__METHODS_KNOWN;
    char *memory = open_memory();
    for (int n = 2; memory && n <= BUFFERS; n *= 2)
        for (int clash = 0; clash < 2; clash++)
            if (is_staged_faster(memory, n, clash))
                methods |= TD__METHODS_STAGED & (uint32_t)n << (clash ? 4 : 0);
    if (memory)
        munmap(memory, BUFFERS * DISTANCE);
    return methods;
}

uint32_t td__reduce_methods(void)
{
    uint32_t methods = atomic_load_explicit(&forced, memory_order_relaxed);
    if (!methods)
        methods = atomic_load_explicit(&known, memory_order_relaxed);
    if (methods)
        return methods;
    pthread_mutex_lock(&measuring);
    methods = atomic_load(&known);
    if (!methods)
        atomic_store(&known, methods = measure());
    pthread_mutex_unlock(&measuring);
    return methods;
}

void td__reduce_methods_adopt(uint32_t methods)
{
    uint32_t none = 0;
    if ((methods & TD__METHODS_KNOWN) && !atomic_load_explicit(&known, memory_order_relaxed))
        atomic_compare_exchange_strong(&known, &none, methods & TD__METHODS_STAGED);
}
