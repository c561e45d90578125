/* Collectives on one host, for 1 to 8 ranks: every type and operation, sizes around every change of
 * method, in place and not, in any memory, every root. Each matrix is one test for each number of
 * ranks, which makes a world once. */
#include "collective_cases.h"

#include "base/copy.h"
#include "shm/shm_comm.h"
#include "reduction_reference.h"
#include "runner.h"

static const struct setup here;

static const td_op_kind kinds[] = {
    TD_OP_BROADCAST, TD_OP_REDUCE,     TD_OP_ALL_REDUCE,     TD_OP_SCATTER,
    TD_OP_GATHER,    TD_OP_ALL_GATHER, TD_OP_REDUCE_SCATTER, TD_OP_ALL_TO_ALL,
};

/* A matrix as a test for each number of ranks from 1 to 8. */
#define FOR_1_TO_8_RANKS(id)                                                                       \
    static void id(void);                                                                          \
    static struct td_test id##_tests[] = {                                                         \
        {.name = #id "_1", .ranks = 1, .deadline_s = 60},                                          \
        {.name = #id "_2", .ranks = 2, .deadline_s = 60},                                          \
        {.name = #id "_3", .ranks = 3, .deadline_s = 60},                                          \
        {.name = #id "_4", .ranks = 4, .deadline_s = 60},                                          \
        {.name = #id "_5", .ranks = 5, .deadline_s = 60},                                          \
        {.name = #id "_6", .ranks = 6, .deadline_s = 60},                                          \
        {.name = #id "_7", .ranks = 7, .deadline_s = 60},                                          \
        {.name = #id "_8", .ranks = 8, .deadline_s = 60},                                          \
    };                                                                                             \
    __attribute__((constructor)) static void register_##id(void)                                   \
    {                                                                                              \
        for (int i = 0; i < 8; i++) {                                                              \
            id##_tests[i].run = id;                                                                \
            td_test_register(&id##_tests[i]);                                                      \
        }                                                                                          \
    }                                                                                              \
    static void id(void)

/* ---- Types and operations -------------------------------------------------------------------- */

FOR_1_TO_8_RANKS(types_and_operations)
{
    static const td_op_kind reductions[] = {TD_OP_ALL_REDUCE, TD_OP_REDUCE, TD_OP_REDUCE_SCATTER};
    static const struct {
        size_t bytes; /* of the whole */
        enum memory memory;
    } ways[] = {{16, IN_ARENA}, {6000, IN_HEAP}, {40000, IN_ARENA}, {40000, IN_HEAP}};
    struct scene scene = scene_open(&here);
    size_t n = (size_t)scene.size;
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
        for (int op = (int)SCALED_SUM; op <= TD_PREMUL_SUM; op++) {
            if (!is_supported((td_dtype)dtype, (td_reduce_op)op))
                continue;
            for (size_t w = 0; w < LENGTH(ways); w++)
                for (size_t k = 0; k < LENGTH(reductions); k++) {
                    size_t count = ways[w].bytes / td_dtype_size((td_dtype)dtype) + w;
                    run_case(&scene, &(struct collective_case){
                                         .kind = reductions[k],
                                         .dtype = (td_dtype)dtype,
                                         .op = (td_reduce_op)op,
                                         .count = k == 2 ? count / n + 1 : count,
                                         .root = (int)(scene.number % n),
                                         .in_place = (w + k + (size_t)op) % 2,
                                         .memory = ways[w].memory,
                                     });
                }
        }
    scene_close(&scene);
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

/* Counts around the places where the method changes, in elements of `element` bytes; `n` ranks. */
static size_t list_counts(size_t element, size_t n, size_t *counts)
{
    static const size_t edges[] = {2048,
                                   8 << 10,
                                   TD__SLOT_BYTES,
                                   TD__PIECE_BYTES,
                                   TD__PIECES * TD__PIECE_BYTES,
                                   TD__PIECE_BYTES * 2};
    size_t listed = 0;
    for (size_t i = 0; i <= 9; i++)
        counts[listed++] = i;
    for (size_t i = 0; i < LENGTH(edges); i++)
        for (int d = -1; d <= 1; d++)
            counts[listed++] = edges[i] / element + (size_t)d;
    counts[listed++] = 64 * n - 1;
    counts[listed++] = 64 * n + 1;
    counts[listed++] = 4096 * n - 1; /* where parts become whole pages */
    counts[listed++] = 2048 + 1;
    counts[listed++] = (TD__SLOT_BYTES + 500) / element;
    counts[listed++] = (1 << 20) / element + 5;
    return listed;
}

/* A part of the whole where the whole has the size in question. */
static size_t part_of(td_op_kind kind, size_t count, size_t n)
{
    bool by_parts = kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER ||
                    kind == TD_OP_ALL_TO_ALL;
    return by_parts ? (count + n - 1) / n : count;
}

static void run_sizes(struct scene *scene, td_op_kind kind, enum memory memory, bool in_place)
{
    static const td_dtype dtypes[] = {TD_F32, TD_I64, TD_U8};
    size_t counts[64], n = (size_t)scene->size;
    td_dtype dtype = dtypes[scene->number % LENGTH(dtypes)];
    size_t listed = list_counts(td_dtype_size(dtype), n, counts);
    for (size_t i = 0; i < listed; i++) {
        bool gathers = kind == TD_OP_GATHER || kind == TD_OP_ALL_GATHER;
        bool large = counts[i] * td_dtype_size(dtype) > 300000;
        /* Each large one in some of the ways only; gathering is as many times as large. */
        if (large && (scene->number + i) % (gathers ? 2 * n : n))
            continue;
        run_case(scene, &(struct collective_case){
                            .kind = kind,
                            .dtype = dtype,
                            .op = TD_SUM,
                            .count = part_of(kind, counts[i], n),
                            .root = (int)(scene->number % n),
                            .in_place = in_place,
                            .memory = memory,
                        });
    }
}

static void run_all_sizes(const struct setup *setup)
{
    struct scene scene = scene_open(setup);
    for (size_t k = 0; k < LENGTH(kinds); k++)
        for (int memory = 0; memory < MEMORIES; memory++)
            for (int in_place = 0; in_place < 2; in_place++)
                run_sizes(&scene, kinds[k], (enum memory)memory, in_place);
    scene_close(&scene);
}

FOR_1_TO_8_RANKS(sizes)
{
    run_all_sizes(&here);
}

RANKS(sizes_with_a_processor_each_4, .ranks = 4, .deadline_s = 60)
{
    run_all_sizes(&(struct setup){.processors = 4});
}

RANKS(sizes_with_a_processor_each_7, .ranks = 7, .deadline_s = 60)
{
    run_all_sizes(&(struct setup){.processors = 16});
}

/* More than the caches hold is written past them. */
RANKS(beyond_the_caches, .ranks = 3, .deadline_s = 60)
{
    size_t written = td__cache_bytes(3) / 2 * 3;
    if (written > (size_t)128 << 20)
        td_test_skip("a cache of %zu MiB", td__cache_bytes(3) >> 20);
    struct scene scene = scene_open(&here);
    size_t n = (size_t)scene.size;
    for (size_t k = 0; k < LENGTH(kinds); k++) {
        bool n_times_n = kinds[k] == TD_OP_ALL_GATHER || kinds[k] == TD_OP_ALL_TO_ALL;
        run_case(&scene, &(struct collective_case){
                             .kind = kinds[k],
                             .dtype = TD_U8,
                             .op = TD_BXOR,
                             .count = written / n / (n_times_n ? n : 1) + 13,
                             .root = 1,
                             .in_place = k % 2,
                             .memory = IN_ARENA,
                         });
    }
    scene_close(&scene);
}

FOR_1_TO_8_RANKS(uneven_parts)
{
    static const size_t most[] = {0, 1, 3, 100, 5000, 40000, 100001};
    static const td_dtype dtypes[] = {TD_F32, TD_I64, TD_U8, TD_COMPLEX128};
    struct scene scene = scene_open(&here);
    for (size_t i = 0; i < LENGTH(most); i++)
        for (int memory = 0; memory < MEMORIES; memory++)
            for (int async = 0; async < 2; async++)
                run_uneven(&scene, dtypes[scene.number % LENGTH(dtypes)], most[i],
                           (enum memory)memory, async);
    scene_close(&scene);
}

/* ---- Roots ----------------------------------------------------------------------------------- */

FOR_1_TO_8_RANKS(every_root)
{
    static const size_t counts[] = {0, 1, 3, 1000, 3000, 70001};
    struct scene scene = scene_open(&here);
    for (size_t k = 0; k < LENGTH(kinds); k++)
        for (int root = 0; root < scene.size && is_rooted(kinds[k]); root++)
            for (size_t c = 0; c < LENGTH(counts); c++)
                for (int way = 0; way < 2 * MEMORIES; way++) {
                    if (counts[c] > 10000 && (way + root) % 3)
                        continue;
                    run_case(&scene, &(struct collective_case){
                                         .kind = kinds[k],
                                         .dtype = way % 2 ? TD_F32 : TD_I16,
                                         .op = TD_MAX,
                                         .count = part_of(kinds[k], counts[c], (size_t)scene.size),
                                         .root = root,
                                         .in_place = way % 2,
                                         .memory = (enum memory)(way / 2),
                                     });
                }
    scene_close(&scene);
}

/* ---- Sequences ------------------------------------------------------------------------------- */

/* Small and large calls of all kinds in a random order, some ranks late. */
static void run_sequence(const struct setup *setup)
{
    struct scene scene = scene_open(setup);
    uint64_t state = 88172645463325252u;
    for (int i = 0; i < 1500; i++) {
        uint64_t random = next_random(&state);
        td_op_kind kind = (td_op_kind)(random % (TD_OP_BARRIER + 1));
        size_t count = random >> 8 & 0xff ? random >> 16 & 0xfff : random >> 16 & 0x1ffff;
        struct collective_case what = {
            .kind = kind,
            .dtype = random >> 40 & 1 ? TD_F32 : TD_BF16,
            .op = random >> 41 & 1 ? TD_SUM : TD_AVG,
            .count = part_of(kind, count, (size_t)scene.size),
            .root = (int)((random >> 44) % (uint64_t)scene.size),
            .in_place = random >> 48 & 1,
            .memory = (enum memory)((random >> 50) % MEMORIES),
        };
        if ((random >> 54) % 64 == (uint64_t)scene.rank)
            td_test_pause(__FILE__, __LINE__, "", 1);
        run_case(&scene, &what);
    }
    scene_close(&scene);
}

FOR_1_TO_8_RANKS(any_sequence)
{
    run_sequence(&here);
}

RANKS(any_sequence_with_a_processor_each, .ranks = 4, .deadline_s = 60)
{
    run_sequence(&(struct setup){.processors = 8});
}

/* A root that only sends does not wait for ranks that have not called yet. */
RANKS(root_runs_ahead, .ranks = 3)
{
    enum { AHEAD = 24 };
    struct scene scene = scene_open(&here);
    if (scene.rank == 0)
        for (int i = 0; i < AHEAD; i++)
            CHECK_OK(td_group_broadcast(&i, 1, TD_I32, 0, scene.group, NULL));
    td_test_barrier();
    for (int i = 0; i < AHEAD && scene.rank; i++) {
        int value = -1;
        CHECK_OK(td_group_broadcast(&value, 1, TD_I32, 0, scene.group, NULL));
        CHECK_EQ(value, i);
    }
    scene_close(&scene);
}
