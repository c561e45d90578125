/* Reductions in place, fused and staged: the same bits, whichever way and wherever the buffers are; which
 * addresses clash; what is measured, and what TANDEM_SHM_REDUCE says. On one host, for 1 to 8 ranks, every
 * type and operation goes both ways. */
#include "collective_cases.h"
#include "reduction_reference.h"
#include "runner.h"

#include "reduce/reduce_kernels.h"
#include "reduce/reduce_method.h"

#include <sys/mman.h>

/* ---- Addresses ------------------------------------------------------------------------------- */

static bool clash(uintptr_t a, uintptr_t b)
{
    void *addresses[] = {(void *)a, (void *)b};
    return td__reduce_clash(addresses, 2);
}

TEST(addresses_that_clash)
{
    const uintptr_t base = (uintptr_t)1 << 44, page = 4096;
    CHECK(clash(base, base + ((uintptr_t)1 << 28)));
    CHECK(clash(base + 192, base + ((uintptr_t)1 << 35) + 255)); /* in the same line of a page */
    CHECK(!clash(base, base + ((uintptr_t)1 << 28) + 64));
    CHECK(!clash(base, base + ((uintptr_t)1 << 28) + page));
    static const int pairs[][2] = {{12, 27}, {13, 26}, {14, 25}, {15, 20},
                                   {16, 21}, {17, 22}, {18, 23}, {19, 24}};
    for (size_t i = 0; i < LENGTH(pairs); i++) {
        uintptr_t low = (uintptr_t)1 << pairs[i][0], high = (uintptr_t)1 << pairs[i][1];
        CHECK(clash(base, base + low + high));
        CHECK(!clash(base, base + low));
        CHECK(!clash(base, base + high));
    }
    void *eight[8];
    for (uintptr_t i = 0; i < 8; i++)
        eight[i] = (void *)(base + i * (((uintptr_t)1 << 30) + page));
    CHECK(!td__reduce_clash(eight, 8));
    eight[7] = (void *)(base + 3 * page);
    CHECK(td__reduce_clash(eight, 8));
}

/* ---- The same bits --------------------------------------------------------------------------- */

enum { MOST = 8, ROOM = 20 * 4096 };

/* Buffers at a distance that clashes in some pages and not in others. */
#define DISTANCE (((size_t)1 << 28) + ((size_t)1 << 20) + ((size_t)1 << 15))

static char *map_buffers(void)
{
    size_t all = MOST * DISTANCE + ROOM;
    char *memory = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    for (size_t i = 0; i < MOST; i++)
        CHECK_EQ(mprotect(memory + i * DISTANCE, ROOM, PROT_READ | PROT_WRITE), 0);
    return memory;
}

static void fill(td_dtype dtype, char *buffer, uint64_t seed, size_t bytes)
{
    size_t size = td_dtype_size(dtype);
    uint64_t state = seed;
    for (size_t at = 0; at + size <= bytes; at += size) {
        int number = (int)(next_random(&state) >> 60);
        float f32[] = {(float)number + 0.25f, 1};
        double f64[] = {(double)number + 0.25, 1};
        uint16_t half = dtype == TD_F16 ? td_f32_to_f16(f32[0]) : td_f32_to_bf16(f32[0]);
        int64_t integer = number;
        const void *from = dtype == TD_F32 || dtype == TD_COMPLEX64    ? (void *)f32
                           : dtype == TD_F64 || dtype == TD_COMPLEX128 ? (void *)f64
                           : dtype == TD_F16 || dtype == TD_BF16       ? (void *)&half
                                                                       : (void *)&integer;
        memcpy(buffer + at, from, size);
    }
}

static char given[MOST][ROOM], expected[ROOM];

/* All methods, of buffers that begin `start` bytes after the beginning of a page. */
static void try_ways(char *memory, const struct td__reduction *reduction, int n, size_t start,
                     size_t count)
{
    static const uint32_t methods[] = {0, TD__METHODS_FUSED, TD__METHODS_STAGED, 0x0f, 0xe1};
    size_t bytes = count * td_dtype_size(reduction->dtype);
    const void *sources[MOST];
    void *buffers[MOST], *apart = expected;
    for (int i = 0; i < n; i++)
        sources[i] = given[i];
    td__reduce_many(reduction, &apart, 1, sources, n, count);
    for (size_t w = 0; w < LENGTH(methods); w++) {
        struct td__reduction trial = *reduction;
        trial.methods = methods[w];
        for (int i = 0; i < n; i++) {
            char *buffer = memory + (size_t)i * DISTANCE + start;
            memcpy(buffer, given[i], bytes);
            buffer[-1] = buffer[bytes] = 0x5a;
            buffers[i] = buffer;
        }
        td__reduce_many(&trial, buffers, n, (const void *const *)buffers, n, count);
        for (int i = 0; i < n; i++) {
            const char *buffer = buffers[i];
            CHECK(!memcmp(buffer, expected, bytes));
            CHECK(buffer[-1] == 0x5a && buffer[bytes] == 0x5a);
        }
    }
}

TEST(all_ways_give_the_same_bits, .deadline_s = 60)
{
    static const size_t sizes[] = {16, 4096 - 16, 4096, 4096 + 16, 3 * 4096 + 48, 17 * 4096};
    static const size_t starts[] = {64, 4096 - 8, 4096 + 24};
    char *memory = map_buffers();
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++) {
        for (int i = 0; i < MOST; i++)
            fill((td_dtype)dtype, given[i], (uint64_t)i + 1, ROOM);
        for (td_reduce_op op = TD_SUM; op <= TD_PREMUL_SUM; op++) {
            struct td__reduction r = {.dtype = (td_dtype)dtype, .op = op, .factor = 0.5};
            if (td__reduction_check(&r))
                continue;
            for (int n = 1; n <= MOST; n++)
                for (size_t s = 0; s < LENGTH(sizes); s++)
                    try_ways(memory, &r, n, starts[(s + (size_t)n) % LENGTH(starts)],
                             sizes[s] / td_dtype_size(r.dtype));
        }
    }
    munmap(memory, MOST * DISTANCE + ROOM);
}

/* ---- Choosing -------------------------------------------------------------------------------- */

TEST(the_environment_decides)
{
    setenv("TANDEM_SHM_REDUCE", "fused", 1);
    CHECK_OK(td__reduce_methods_read());
    CHECK_EQ(td__reduce_methods(), TD__METHODS_FUSED);
    setenv("TANDEM_SHM_REDUCE", "staged", 1);
    CHECK_OK(td__reduce_methods_read());
    CHECK_EQ(td__reduce_methods(), TD__METHODS_STAGED);
    for (int n = 2; n <= MOST; n *= 2)
        for (int clashes = 0; clashes < 2; clashes++) {
            CHECK(td__reduce_is_staged(TD__METHODS_STAGED, n, clashes));
            CHECK(!td__reduce_is_staged(TD__METHODS_FUSED, n, clashes));
        }
    static const char *const wrong[] = {"Fused", "auto", "fused ", "1"};
    for (size_t i = 0; i < LENGTH(wrong); i++) {
        setenv("TANDEM_SHM_REDUCE", wrong[i], 1);
        CHECK_FAILS(td__reduce_methods_read(), TD_ERR_INVALID, wrong[i]);
        CHECK_FAILS(td_init_process_group(&(td_init_options){.world_size = 1}), TD_ERR_INVALID,
                    "it must be fused or staged");
    }
    unsetenv("TANDEM_SHM_REDUCE");
    CHECK_OK(td__reduce_methods_read());
    td__reduce_methods_adopt(0); /* nothing was measured */
    td__reduce_methods_adopt(0x25);
    CHECK_EQ(td__reduce_methods(), 0x25);
    td__reduce_methods_adopt(TD__METHODS_STAGED);
    CHECK_EQ(td__reduce_methods(), 0x25);
}

TEST(ways_are_measured)
{
    uint32_t methods = td__reduce_methods();
    CHECK(methods & TD__METHODS_KNOWN);
    CHECK_EQ(methods & ~(uint32_t)TD__METHODS_STAGED, 0);
    CHECK_EQ(td__reduce_methods(), methods);
}

/* ---- Among ranks ----------------------------------------------------------------------------- */

/* Slices around a block, a page and several of them, for each of `n` ranks; uneven ones. */
static size_t list_counts(size_t element, size_t n, size_t *counts)
{
    static const size_t slices[] = {4096, 2 * 4096, 4 * 4096};
    size_t listed = 0;
    for (size_t i = 0; i < LENGTH(slices); i++)
        for (int d = -1; d <= 1; d++)
            counts[listed++] = n * (slices[i] / element) + (size_t)d;
    counts[listed++] = (8 << 10) / element + 1;
    counts[listed++] = 40000 / element;
    counts[listed++] = n * (4096 / element) + n / 2 + 1;
    return listed;
}

static void run_way(const char *way, int processors)
{
    size_t counts[16];
    if (way)
        setenv("TANDEM_SHM_REDUCE", way, 1);
    struct scene scene = scene_open(&(struct setup){.processors = processors});
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
        for (int op = (int)SCALED_SUM; op <= TD_PREMUL_SUM; op++) {
            if (!is_supported((td_dtype)dtype, (td_reduce_op)op))
                continue;
            size_t listed = list_counts(td_dtype_size((td_dtype)dtype), (size_t)scene.size, counts);
            /* Every operation and type at some of the sizes, and all sizes with each type. */
            for (size_t c = (size_t)(op + 2) % 4; c < listed; c += 4)
                run_case(&scene, &(struct collective_case){
                                     .kind = TD_OP_ALL_REDUCE,
                                     .dtype = (td_dtype)dtype,
                                     .op = (td_reduce_op)op,
                                     .count = counts[c],
                                     .in_place = (c + (size_t)dtype) % 4 != 0,
                                     .memory = IN_ARENA,
                                 });
            /* On other memory each reduces a slice, and the kernel copies the rest. */
            if (!way)
                run_case(&scene, &(struct collective_case){
                                     .kind = op % 2 ? TD_OP_ALL_REDUCE : TD_OP_REDUCE,
                                     .dtype = (td_dtype)dtype,
                                     .op = (td_reduce_op)op,
                                     .count = 60000 / td_dtype_size((td_dtype)dtype) + 1,
                                     .root = scene.size - 1,
                                     .in_place = dtype % 2,
                                     .memory = IN_HEAP,
                                 });
        }
    scene_close(&scene);
    unsetenv("TANDEM_SHM_REDUCE");
}

/* As many processors as ranks, so that each does its own share; then fewer. */
static void run_ways(void)
{
    run_way("fused", 8);
    run_way("staged", 8);
    run_way("staged", 1);
    run_way(NULL, 8);
}

RANKS(both_ways_among_1, .ranks = 1, .deadline_s = 60)
{
    run_ways();
}

RANKS(both_ways_among_2, .ranks = 2, .deadline_s = 60)
{
    run_ways();
}

RANKS(both_ways_among_3, .ranks = 3, .deadline_s = 60)
{
    run_ways();
}

RANKS(both_ways_among_4, .ranks = 4, .deadline_s = 60)
{
    run_ways();
}

RANKS(both_ways_among_5, .ranks = 5, .deadline_s = 60)
{
    run_ways();
}

RANKS(both_ways_among_8, .ranks = 8, .deadline_s = 60)
{
    run_ways();
}
