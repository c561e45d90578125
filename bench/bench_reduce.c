/* How fast one rank reduces: td__reduce_many() over 2, 4 and 8 buffers of f32, the sum written to
 * all of them in place, as in an all-reduce through shared memory.
 *
 *     memcpy    as many buffers copied to as many others, one after another
 *     naive     block by block: the first source copied to a block, the others added to it, the
 *               block copied out; compiled for the same instruction set
 *     tandem    td__reduce_many() with the kernels of that instruction set
 *
 * GB/s are the bytes of all sources over the time. The variants of a row run in turns, and each figure is
 * the best of many windows of a millisecond, since other load only makes them slower. */
#include "measure.h"

#include "base/clock.h"
#include "reduce/reduce_kernels.h"
#include "reduce/reduction.h"

#include <sys/mman.h>

enum { MOST = 8, LEAST_ROUNDS = 5, NAIVE_BLOCK = 1024, WINDOW_NS = 1000000 };

static const char *const instruction_sets[] = {"generic", "avx2", "avx512"};
enum { SETS = sizeof instruction_sets / sizeof *instruction_sets };

struct bench {
    void *buffers[MOST];
    void *copies[MOST];
    bool table;
    bool out_of_place; /* destinations that are not the sources */
    int row_ms;
};

struct job {
    void *const *dst;
    void *const *src;
    int n;
    size_t bytes; /* of one buffer */
};

/* ---- The variants ---------------------------------------------------------------------------- */

static void copy(const struct bench *bench, const struct job *job)
{
    for (int i = 0; i < job->n; i++)
        memcpy(bench->copies[i], job->src[i], job->bytes);
}

/* The naive loop, with a function for the additions. */
static void naive(const struct job *job, void (*add)(float *acc, const float *other, size_t count))
{
    _Alignas(64) float acc[NAIVE_BLOCK];
    size_t count = job->bytes / sizeof(float);
    for (size_t at = 0; at < count; at += NAIVE_BLOCK) {
        size_t part = count - at < NAIVE_BLOCK ? count - at : NAIVE_BLOCK;
        memcpy(acc, (const float *)job->src[0] + at, part * sizeof(float));
        for (int i = 1; i < job->n; i++)
            add(acc, (const float *)job->src[i] + at, part);
        for (int i = 0; i < job->n; i++)
            memcpy((float *)job->dst[i] + at, acc, part * sizeof(float));
    }
}

#define ADD(name, attributes)                                                                      \
    attributes static void name(float *restrict acc, const float *restrict other, size_t count)    \
    {                                                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            acc[i] += other[i];                                                                    \
    }

ADD(add_generic, )
#if defined(__x86_64__)
ADD(add_avx2, __attribute__((target("avx2"))))
ADD(add_avx512, __attribute__((target("avx512f"))))
#else
#define add_avx2 add_generic
#define add_avx512 add_generic
#endif

static void (*const adds[SETS])(float *acc, const float *other,
                                size_t count) = {add_generic, add_avx2, add_avx512};

static void tandem(const struct job *job)
{
    const struct td__reduction sum = {.dtype = TD_F32, .op = TD_SUM};
    td__reduce_many(&sum, job->dst, job->n, (const void *const *)job->src, job->n,
                    job->bytes / sizeof(float));
}

/* ---- Measuring ------------------------------------------------------------------------------- */

/* A variant: memcpy is 0, then naive and tandem for each instruction set. */
enum { VARIANTS = 1 + 2 * SETS };

static bool exists(int variant)
{
    return variant == 0 || td__kernels_use(instruction_sets[(variant - 1) / 2]);
}

static void run_once(const struct bench *bench, const struct job *job, int variant)
{
    if (variant == 0)
        copy(bench, job);
    else if (variant % 2)
        naive(job, adds[(variant - 1) / 2]);
    else
        tandem(job);
}

/* The CPU time of this thread: waiting for a processor does not count. */
static int64_t thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Nanoseconds of one run, over a window of a millisecond. */
static double window(const struct bench *bench, const struct job *job, int variant)
{
    run_once(bench, job, variant);
    int64_t start = thread_ns(), end;
    int64_t runs = 0, batch = 1;
    do {
        for (int64_t i = 0; i < batch; i++)
            run_once(bench, job, variant);
        runs += batch;
        batch *= 2; /* amortises reading the clock */
        end = thread_ns();
    } while (end - start < WINDOW_NS);
    return (double)(end - start) / (double)runs;
}

static void measure(const struct bench *bench, int n, size_t bytes)
{
    struct job job = {.dst = bench->out_of_place ? bench->copies : bench->buffers,
                      .src = bench->buffers,
                      .n = n,
                      .bytes = bytes};
    double best[VARIANTS] = {0};
    int64_t start = td__now_ns(), limit = (int64_t)bench->row_ms * 1000000;
    for (int round = 0; round < LEAST_ROUNDS || td__now_ns() - start < limit; round++) {
        for (int v = 0; v < VARIANTS; v++) {
            if (!exists(v))
                continue;
            double ns = window(bench, &job, v);
            if (round == 0 || ns < best[v])
                best[v] = ns;
        }
    }

    double all = (double)n * (double)bytes;
    if (bench->table)
        printf("%7d %7zu KiB %8.1f", n, bytes / 1024, all / best[0]);
    else
        printf("{\"what\": \"memcpy\", \"sources\": %d, \"bytes\": %zu, \"gb_per_s\": %.2f}\n", n,
               bytes, all / best[0]);
    for (int v = 1; v < VARIANTS; v++) {
        const char *set = instruction_sets[(v - 1) / 2], *what = v % 2 ? "naive" : "tandem";
        bool here = exists(v);
        if (bench->table && here)
            printf(" %8.1f", all / best[v]);
        else if (bench->table)
            printf(" %8s", "-");
        else if (here)
            printf("{\"what\": \"%s\", \"simd\": \"%s\", \"sources\": %d, \"bytes\": %zu, "
                   "\"gb_per_s\": %.2f}\n",
                   what, set, n, bytes, all / best[v]);
    }
    if (bench->table)
        putchar('\n');
    fflush(stdout);
}

static void *allocate(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        bench_die("no memory for %zu bytes", bytes);
    for (size_t i = 0; i < bytes / sizeof(float); i++)
        ((float *)memory)[i] = 1;
    return memory;
}

static const char usage[] =
    "usage: bench_reduce [--table] [--out-of-place] [--ms MILLISECONDS] [KIB…]\n"
    "\n"
    "Sums 2, 4 and 8 buffers of f32 of 16, 256 and 65536 KiB each, or of KIB, into all of them;\n"
    "with --out-of-place into as many others. A row takes --ms (1000) or longer.\n";

int main(int argc, char **argv)
{
    struct bench bench = {.row_ms = 1000};
    size_t sizes[16] = {16, 256, 65536};
    int size_count = 0;
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i];
        if (!strcmp(option, "--help") || !strcmp(option, "-h")) {
            fputs(usage, stdout);
            return 0;
        } else if (!strcmp(option, "--table")) {
            bench.table = true;
        } else if (!strcmp(option, "--out-of-place")) {
            bench.out_of_place = true;
        } else if (!strcmp(option, "--ms")) {
            bench.row_ms = bench_number(option, argv[++i], 1);
        } else if (*option != '-' && size_count < 16) {
            sizes[size_count++] = (size_t)bench_number("KIB", option, 1);
        } else {
            fputs(usage, stderr);
            return 2;
        }
    }
    if (!size_count)
        size_count = 3;

    size_t largest = 0;
    for (int s = 0; s < size_count; s++)
        largest = sizes[s] > largest ? sizes[s] : largest;
    for (int i = 0; i < MOST; i++) {
        bench.buffers[i] = allocate(largest * 1024);
        bench.copies[i] = allocate(largest * 1024);
    }
    if (bench.table)
        printf("%7s %11s %8s %17s %17s %17s\n%28s %8s %8s %8s %8s %8s %8s\n", "sources", "each",
               "memcpy", "generic", "avx2", "avx512", "", "naive", "tandem", "naive", "tandem",
               "naive", "tandem");
    for (int n = 2; n <= MOST; n *= 2)
        for (int s = 0; s < size_count; s++)
            measure(&bench, n, sizes[s] * 1024);
    return 0;
}
