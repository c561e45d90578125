/* The limits of the machine, as JSON lines, to compare the collectives with.
 *
 *     limits RANKS SIZE[,SIZE…] [SECONDS]
 *
 * "memcpy": RANKS processes copy SIZE bytes each at the same time. An all_reduce on one host moves about as
 * many bytes. Measured as the peers are: a barrier before each iteration, the median over iterations. An
 * iteration lasts from the first start to the last end, so that processes that share a processor do not look
 * too fast.
 *
 * "spin": a round trip of two processes that spin on a shared cache line. On a virtual machine it
 * depends on where the host has put the processors: runs in which it differs are not comparable. */
#include "measure.h"

#include "base/clock.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WARMUP = 3, MIN_ITERATIONS = 5, MAX_ITERATIONS = 1000, SPINS = 200 };
enum { SPIN_NS = 20000000, SPIN_BATCH = 50 };

#define OVER UINT_MAX /* instead of a turn */

struct span {
    int64_t start, end;
};

/* What the processes share. */
struct shared {
    _Alignas(128) atomic_uint arrived; /* at barriers, all together */
    _Alignas(128) atomic_uint turn;
    int iterations;
    struct span spans[][MAX_ITERATIONS]; /* by process */
};

static struct shared *shared;
static int ranks;
static double seconds = 0.8;

static void *map(size_t bytes, int kind)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        bench_die("out of memory for %zu bytes", bytes);
    return memory;
}

/* The n-th barrier ends when all processes have arrived n times. */
static void barrier(void)
{
    unsigned all = (unsigned)ranks, mine = atomic_fetch_add(&shared->arrived, 1);
    unsigned until = (mine / all + 1) * all;
    for (int spins = 0; (int)(atomic_load(&shared->arrived) - until) < 0; spins++)
        if (spins >= SPINS)
            sched_yield();
}

static struct span copy_once(char *to, const char *from, size_t bytes)
{
    barrier();
    int64_t start = td__now_ns();
    memcpy(to, from, bytes);
    __asm__ volatile("" ::: "memory");
    return (struct span){start, td__now_ns()};
}

static void copy_rank(int rank, size_t bytes)
{
    char *to = map(bytes, MAP_PRIVATE), *from = map(bytes, MAP_PRIVATE);
    int64_t fastest = INT64_MAX;
    memset(to, 1, bytes);
    memset(from, 2, bytes);
    for (int i = 0; i < WARMUP; i++) {
        struct span span = copy_once(to, from, bytes);
        fastest = span.end - span.start < fastest ? span.end - span.start : fastest;
    }
    double wanted = seconds * 1e9 / (double)(fastest + 1);
    if (rank == 0)
        shared->iterations = wanted > MAX_ITERATIONS   ? MAX_ITERATIONS
                             : wanted < MIN_ITERATIONS ? MIN_ITERATIONS
                                                       : (int)wanted;
    barrier();
    for (int i = 0; i < shared->iterations; i++)
        shared->spans[rank][i] = copy_once(to, from, bytes);
    munmap(to, bytes);
    munmap(from, bytes);
    barrier();
}

static void print_copy(size_t bytes)
{
    size_t n = (size_t)shared->iterations;
    int64_t times[MAX_ITERATIONS];
    for (size_t i = 0; i < n; i++) {
        struct span all = shared->spans[0][i];
        for (int rank = 1; rank < ranks; rank++) {
            struct span span = shared->spans[rank][i];
            all.start = span.start < all.start ? span.start : all.start;
            all.end = span.end > all.end ? span.end : all.end;
        }
        times[i] = all.end - all.start;
    }
    bench_sort(times, n);
    double median = (double)times[n / 2];
    printf("{\"peer\":\"memcpy\",\"op\":\"memcpy\",\"ranks\":%d,\"bytes\":%zu,\"iters\":%zu,"
           "\"median_us\":%.3f,\"min_us\":%.3f,\"busbw_GBps\":%.4f}\n",
           ranks, bytes, n, median / 1e3, (double)times[0] / 1e3, (double)bytes / median);
    fflush(stdout);
}

static void measure_copies(char *sizes)
{
    for (char *end, *at = sizes; *at; at = *end ? end + 1 : end) {
        size_t bytes = strtoull(at, &end, 10);
        if (end == at || (*end && *end != ',') || !bytes)
            bench_die("\"%s\" is not a list of sizes in bytes", sizes);
        for (int rank = 0; rank < ranks; rank++) {
            if (fork() == 0) {
                copy_rank(rank, bytes);
                _exit(0);
            }
        }
        while (wait(NULL) > 0)
            ;
        print_copy(bytes);
        atomic_store(&shared->arrived, 0);
    }
}

/* Replies until OVER: the parent's turns are even, the child's are odd. */
static void answer(void)
{
    for (;;) {
        unsigned turn = atomic_load_explicit(&shared->turn, memory_order_acquire);
        if (turn == OVER)
            _exit(0);
        if (turn % 2)
            atomic_store_explicit(&shared->turn, turn + 1, memory_order_release);
    }
}

static void measure_spin(void)
{
    if (fork() == 0)
        answer();
    unsigned trips = 0;
    int64_t start = td__now_ns(), now = start;
    while (now - start < SPIN_NS) {
        for (int i = 0; i < SPIN_BATCH; i++, trips++) {
            atomic_store_explicit(&shared->turn, 2 * trips + 1, memory_order_release);
            while (atomic_load_explicit(&shared->turn, memory_order_acquire) != 2 * trips + 2)
                ;
        }
        now = td__now_ns();
    }
    atomic_store(&shared->turn, OVER);
    wait(NULL);
    double us = (double)(now - start) / 1e3 / trips;
    printf("{\"peer\":\"spin\",\"op\":\"spin\",\"ranks\":2,\"bytes\":0,\"iters\":%u,"
           "\"median_us\":%.3f,\"min_us\":%.3f,\"busbw_GBps\":0}\n",
           trips, us, us);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        bench_die("usage: limits RANKS SIZE[,SIZE...] [SECONDS]");
    ranks = bench_number("RANKS", argv[1], 1);
    if (argc > 3 && (seconds = atof(argv[3])) <= 0)
        bench_die("\"%s\" is not a number of seconds", argv[3]);
    shared = map(sizeof *shared + (size_t)ranks * sizeof shared->spans[0], MAP_SHARED);
    if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
        measure_spin();
    measure_copies(argv[2]);
    return 0;
}
