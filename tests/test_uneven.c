/* all_gather and reduce_scatter with uneven parts: every type and operation, lists of counts of every shape, in
 * any memory, in place and not, in every kind of world; lists that differ between ranks; and the tensors of
 * dist.h. What a reduction gives is the same bits as that of the even calls. */
#include "collective_cases.h"

#include "base/clock.h"
#include "collective_reference.h"
#include "reduction_reference.h"
#include "runner.h"
#include "toy_backend.h"
#include "ways.h"

#include <tandem/dist.h>
#include <tandem/ops.h>

#include <pthread.h>
#include <string.h>

/* ---- Lists of counts ------------------------------------------------------------------------- */

enum shape {
    RANDOM,
    WITH_ZEROS,
    ONE_HAS_ALL,
    LAST_HAS_ALL,
    STAIRS,
    EQUAL,
    NEARLY_EQUAL,
    NONE,
    SHAPES
};

/* A list that sums up to about `total`. */
static void make_counts(const struct scene *scene, enum shape shape, size_t total, size_t *counts)
{
    size_t n = (size_t)scene->size, average = total / n;
    for (size_t i = 0; i < n; i++) {
        uint64_t random = hash_word(scene->number * 64 + i);
        size_t any = (size_t)(random % (2 * average + 2));
        size_t by_shape[SHAPES] = {
            [RANDOM] = any,
            [WITH_ZEROS] = random >> 32 & 1 ? any : 0,
            [ONE_HAS_ALL] = i == scene->number % n ? total : 0,
            [LAST_HAS_ALL] = i == n - 1 ? total : 0,
            [STAIRS] = 2 * average * (i + 1) / (n + 1),
            [EQUAL] = average,
            [NEARLY_EQUAL] = average + (i == 0),
        };
        counts[i] = by_shape[shape];
    }
}

/* ---- Every kind of world --------------------------------------------------------------------- */

static const td_op_kind kinds[] = {TD_OP_ALL_GATHER, TD_OP_REDUCE_SCATTER};

/* Sizes of the whole in bytes, around the changes of method and of algorithm. */
static const size_t sizes[] = {
    1, 40, 100, 3000, 8 << 10, 9000, 33000, 70000, 300000, 700001,
};

static void run_sizes(struct scene *scene)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_U8};
    size_t counts[64];
    for (size_t s = 0; s < LENGTH(sizes); s++)
        for (int shape = 0; shape < SHAPES; shape++)
            for (int way = 0; way < 2 * MEMORIES; way++) {
                if (sizes[s] > 20000 && way != (int)(s + (size_t)shape) % (2 * MEMORIES))
                    continue;
                td_dtype dtype = dtypes[(s + (size_t)(shape + way)) % LENGTH(dtypes)];
                make_counts(scene, (enum shape)shape, sizes[s] / td_dtype_size(dtype), counts);
                run_case(scene, &(struct collective_case){
                                    .kind = kinds[(s + (size_t)way) % 2],
                                    .dtype = dtype,
                                    .op = TD_SUM,
                                    .counts = counts,
                                    .in_place = way / 2 % 2,
                                    .memory = (enum memory)(scene->number % MEMORIES),
                                });
            }
}

static void run_operations(struct scene *scene)
{
    static const size_t totals[] = {7, 400, 9001};
    size_t counts[64];
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
        for (int op = (int)SCALED_SUM; op <= TD_PREMUL_SUM; op++)
            for (size_t t = 0; t < LENGTH(totals) && scene_supports(scene, dtype, op); t++) {
                make_counts(scene, (enum shape)(scene->number % NONE), totals[t], counts);
                run_case(scene, &(struct collective_case){
                                    .kind = TD_OP_REDUCE_SCATTER,
                                    .dtype = (td_dtype)dtype,
                                    .op = (td_reduce_op)op,
                                    .counts = counts,
                                    .in_place = ((int)t + op) % 2,
                                    .memory = (enum memory)(scene->number / 3 % MEMORIES),
                                });
            }
}

/* Longer than what a method carries out at a time. */
static void run_long(struct scene *scene)
{
    static const enum shape shapes[] = {RANDOM, ONE_HAS_ALL, WITH_ZEROS};
    size_t counts[64];
    for (size_t i = 0; i < 2 * LENGTH(shapes) * MEMORIES; i++) {
        make_counts(scene, shapes[i / 2 % LENGTH(shapes)], (5 << 20) / sizeof(float) + i, counts);
        run_case(scene, &(struct collective_case){
                            .kind = kinds[i % 2],
                            .dtype = TD_F32,
                            .op = TD_SUM,
                            .counts = counts,
                            .in_place = i / 4 % 2,
                            .memory = (enum memory)(i / 6),
                        });
    }
}

/* With works among other calls, waited for from the last to the first. */
static void run_together(struct scene *scene)
{
    enum { CALLS = 40 };
    struct flight *flights[CALLS];
    size_t counts[64];
    for (size_t i = 0; i < CALLS; i++) {
        bool even = i % 4 == 3;
        make_counts(scene, (enum shape)(i % SHAPES), i * i * i, counts);
        flights[i] = case_start(scene,
                                &(struct collective_case){
                                    .kind = even ? TD_OP_ALL_REDUCE : kinds[i % 2],
                                    .dtype = TD_BF16,
                                    .op = TD_AVG,
                                    .count = i,
                                    .counts = even ? NULL : counts,
                                    .in_place = i / 2 % 2,
                                    .memory = (enum memory)(i % MEMORIES),
                                },
                                true);
    }
    flights_finish(flights, CALLS);
}

static void run_all(struct scene *scene)
{
    run_sizes(scene);
    run_operations(scene);
    run_long(scene);
    run_together(scene);
}

static void run_world(void)
{
    struct scene scene = scene_open(td_test_arg());
    run_all(&scene);
    struct scene reversed = scene_reversed(&scene);
    run_together(&reversed);
    scene_close(&scene);
}

WORLD(alone, 1, .transport = "shm")
WORLD(shm_2, 2, .transport = "shm")
WORLD(shm_3, 3, .transport = "shm")
WORLD(shm_4, 4, .transport = "shm")
WORLD(shm_5, 5, .transport = "shm")
WORLD(shm_8, 8, .transport = "shm")
WORLD(processors_enough_2, 2, .processors = 64)
WORLD(processors_enough_5, 5, .processors = 64)
WORLD(tcp_2, 2, .transport = "tcp")
WORLD(tcp_3, 3, .transport = "tcp")
WORLD(tcp_4, 4, .transport = "tcp")
WORLD(tcp_5, 5, .transport = "tcp")
WORLD(tcp_8, 8, .transport = "tcp")
WORLD(hosts_2_2, 4, .hosts = "0011")
WORLD(hosts_2_2_1, 5, .hosts = "00112")
WORLD(hosts_4_4, 8, .hosts = "00001111")
WORLD(ring, 5, .options = "transport=tcp algorithm=ring", .any_order = true)
WORLD(doubling, 5, .options = "transport=tcp algorithm=doubling")
WORLD(bruck, 5, .options = "transport=tcp algorithm=bruck")
WORLD(halving_7, 7, .options = "transport=tcp algorithm=halving")
WORLD(pairwise_6, 6, .options = "transport=tcp algorithm=pairwise")

/* Equal lists give the same bits as the even calls, and so do parts that are cut elsewhere. */
static void compare_with_even(void)
{
    enum { COUNT = 30011 };
    open_world(td_test_arg(), 0);
    int size = td_get_world_size(NULL);
    size_t bytes = (size_t)size * COUNT * sizeof(float), counts[8];
    float *in = td_alloc(bytes), *even = td_alloc(bytes), *uneven = td_alloc(bytes);
    fill_input(TD_F32, 1, td_get_rank(NULL), 0, bytes, in);
    for (int i = 0; i < size; i++)
        counts[i] = COUNT;
    CHECK_OK(td_group_reduce_scatter(even, in, COUNT, TD_F32, TD_SUM, NULL, NULL));
    CHECK_OK(td_group_reduce_scatter_v(uneven, in, counts, TD_F32, TD_SUM, NULL, NULL));
    CHECK_MEM(even, uneven, COUNT * sizeof(float));
    CHECK_OK(td_group_all_gather(even, in, COUNT, TD_F32, NULL, NULL));
    CHECK_OK(td_group_all_gather_v(uneven, in, counts, TD_F32, NULL, NULL));
    CHECK_MEM(even, uneven, bytes);
    /* The parts cut elsewhere: the elements are the same. */
    CHECK_OK(td_group_reduce_scatter(uneven, in, COUNT, TD_F32, TD_SUM, NULL, NULL));
    CHECK_OK(td_group_all_gather(even, uneven, COUNT, TD_F32, NULL, NULL));
    counts[0] -= 1001;
    counts[size - 1] += 1001;
    CHECK_OK(td_group_reduce_scatter_v(uneven, in, counts, TD_F32, TD_SUM, NULL, NULL));
    CHECK_OK(td_group_all_gather_v(in, uneven, counts, TD_F32, NULL, NULL));
    CHECK_MEM(even, in, bytes);
    td_free(in);
    td_free(even);
    td_free(uneven);
    CHECK_OK(td_destroy_process_group());
}

RANKS(same_bits_as_even_shm, .ranks = 3, .arg = &shm)
{
    compare_with_even();
}
RANKS(same_bits_as_even_tcp, .ranks = 3, .arg = &tcp)
{
    compare_with_even();
}
RANKS(same_bits_as_even_mixed, .ranks = 5, .arg = &mixed)
{
    compare_with_even();
}

/* A backend that takes even calls only. */
RANKS(padded, .ranks = 3, .deadline_s = 60)
{
    size_t counts[64];
    CHECK_OK(toy_backend_register());
    struct scene scene = scene_open(&(struct setup){.backend = "toy", .any_order = true});
    for (int i = 0; i < 2 * SHAPES * MEMORIES; i++) {
        make_counts(&scene, (enum shape)(i / 2 % SHAPES), 500, counts);
        run_case(&scene, &(struct collective_case){
                             .kind = kinds[i % 2],
                             .dtype = i % 3 ? TD_F32 : TD_I64,
                             .op = TD_SUM,
                             .counts = counts,
                             .in_place = i / 4 % 2,
                             .memory = (enum memory)(i / 2 / SHAPES),
                         });
    }
    scene_close(&scene);
    toy_backend_unregister();
}

/* ---- Lists that differ ----------------------------------------------------------------------- */

static td_status call_with(td_op_kind kind, const size_t *counts, float *out, float *in,
                           td_group *group)
{
    return kind == TD_OP_ALL_GATHER
               ? td_group_all_gather_v(out, in, counts, TD_F32, group, NULL)
               : td_group_reduce_scatter_v(out, in, counts, TD_F32, TD_SUM, group, NULL);
}

/* Rank `odd` passes another list than the others; each pair of lists in a group of its own. */
static void run_mismatches(void)
{
    static const size_t lists[][2][4] = {
        {{3, 5, 2, 1}, {3, 5, 2, 2}},         /* another sum */
        {{3, 5, 2, 1}, {5, 3, 2, 1}},         /* the same sum */
        {{0, 0, 0, 9000}, {0, 0, 9000, 0}},   /* large enough for another method */
        {{40000, 1, 1, 1}, {40000, 1, 0, 2}}, /* the first parts are the same */
        {{70000, 2, 1, 1}, {7, 7, 7, 7}},     /* uneven and even */
        {{1, 2, 3, 4}, {100000, 2, 3, 4}},    /* small and large */
    };
    int odd = td_test_size() - 1;
    float *in = td_alloc(1 << 20), *out = td_alloc(1 << 20);
    open_world(td_test_arg(), 120000);
    memset(in, 0, 1 << 20);
    for (size_t i = 0; i < 2 * LENGTH(lists); i++) {
        td_group *group;
        int64_t since = td__now_ns();
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        td_status status = call_with(kinds[i % 2], lists[i / 2][td_test_rank() == odd], out, in,
                                     group);
        for (int more = 0; more < 3 && !status; more++)
            status = td_group_barrier(group, NULL);
        if (status != TD_ERR_MISMATCH)
            FAIL("list %zu: %s (%s)", i / 2, td_status_name(status), status ? td_last_error() : "");
        CHECK_CONTAINS(td_last_error(), td_op_kind_name(kinds[i % 2]));
        CHECK_CONTAINS(td_last_error(), "uneven parts");
        CHECK_CONTAINS(td_last_error(), "rank ");
        CHECK_PROMPT(since);
        td_test_barrier();
        td_group_destroy(group);
    }
    td_free(in);
    td_free(out);
    td_destroy_process_group();
}

RANKS(lists_differ_shm, .ranks = 4, .arg = &shm, .deadline_s = 60)
{
    run_mismatches();
}
RANKS(lists_differ_tcp, .ranks = 4, .arg = &tcp, .deadline_s = 60)
{
    run_mismatches();
}
RANKS(lists_differ_mixed, .ranks = 4, .arg = &mixed, .deadline_s = 60)
{
    run_mismatches();
}

/* Both lists are in the sentence. */
RANKS(both_lists_are_named, .ranks = 2)
{
    float in[16] = {0}, out[16];
    CHECK_OK(td_init_process_group(NULL));
    size_t first[] = {3, 5}, second[] = {5, 3};
    CHECK_FAILS(td_group_all_gather_v(out, in, td_test_rank() ? second : first, TD_F32, NULL, NULL),
                TD_ERR_MISMATCH, "all_gather of 8 f32 in uneven parts");
    CHECK_CONTAINS(td_last_error(), " with counts (3, 5)");
    CHECK_CONTAINS(td_last_error(), " with counts (5, 3)");
    td_test_barrier();
    td_destroy_process_group();
}

/* ---- Wrong arguments ------------------------------------------------------------------------- */

RANKS(wrong_arguments, .ranks = 2)
{
    float x[16] = {0}, y[16];
    size_t counts[] = {4, 3}, far[] = {SIZE_MAX / 8, SIZE_MAX / 8 - 1}, wraps[] = {SIZE_MAX, 2};
    int rank = td_test_rank();
    CHECK_FAILS(td_group_all_gather_v(y, x, counts, TD_F32, NULL, NULL), TD_ERR_STATE,
                "all_gather");
    CHECK_OK(td_init_process_group(NULL));
    CHECK_FAILS(td_group_all_gather_v(y, x, NULL, TD_F32, NULL, NULL), TD_ERR_INVALID,
                "all_gather: the list of counts is NULL");
    CHECK_FAILS(td_group_reduce_scatter_v(y, x, NULL, TD_F32, TD_SUM, NULL, NULL), TD_ERR_INVALID,
                "reduce_scatter: the list of counts is NULL");
    CHECK_FAILS(td_group_all_gather_v(y, x, far, TD_F64, NULL, NULL), TD_ERR_INVALID,
                "all_gather: the counts are more than memory can hold");
    CHECK_FAILS(td_group_all_gather_v(y, x, wraps, TD_U8, NULL, NULL), TD_ERR_INVALID,
                "more than memory can hold");
    CHECK_FAILS(td_group_reduce_scatter_v(y, x, counts, (td_dtype)99, TD_SUM, NULL, NULL),
                TD_ERR_INVALID, "99");
    CHECK_FAILS(td_group_reduce_scatter_v(y, x, counts, TD_F32, TD_BAND, NULL, NULL),
                TD_ERR_INVALID, "f32");
    CHECK_FAILS(td_group_all_gather_v(NULL, x, counts, TD_F32, NULL, NULL), TD_ERR_INVALID,
                "the output is NULL, and should have 7 elements");
    CHECK_FAILS(td_group_reduce_scatter_v(NULL, x, counts, TD_F32, TD_SUM, NULL, NULL),
                TD_ERR_INVALID, rank ? "should have 3 elements" : "should have 4 elements");
    CHECK_FAILS(td_group_all_gather_v((char *)y + 1, x, counts, TD_F32, NULL, NULL), TD_ERR_INVALID,
                "not aligned");
    CHECK_FAILS(td_group_all_gather_v(y, y + (rank ? 5 : 1), counts, TD_F32, NULL, NULL),
                TD_ERR_INVALID, "overlap");
    CHECK_FAILS(
        td_group_reduce_scatter_v(y + (rank ? 3 : 1), y, counts, TD_F32, TD_SUM, NULL, NULL),
        TD_ERR_INVALID, "overlap");
    CHECK_OK(td_group_all_gather_v(y, y + (rank ? 4 : 0), counts, TD_F32, NULL, NULL));
    CHECK_OK(td_destroy_process_group());
}

/* ---- A group that is aborted ----------------------------------------------------------------- */

static void *give_up(void *group)
{
    td__sleep_ns(3000000);
    CHECK_OK(td_group_abort(group));
    return NULL;
}

/* What failed is the owner's again at once: others must not write there any more. */
static void run_abort(void)
{
    enum { CALLS = 2000, BYTES = 4 << 20 };
    open_world(td_test_arg(), 120000);
    float *in = td_alloc(BYTES), *out = td_alloc(BYTES);
    size_t counts[] = {100000, 0, 300001, 7};
    for (int round = 0; round < 6; round++) {
        td_group *group;
        pthread_t thread;
        td_status status = TD_OK;
        CHECK_OK(td_new_group(NULL, 0, NULL, &group));
        memset(in, 0, BYTES);
        td_test_barrier();
        if (td_test_rank() == 0)
            CHECK(!pthread_create(&thread, NULL, give_up, group));
        for (int call = 0; call < CALLS && !status; call++)
            status = call_with(kinds[(call + round) % 2], counts, out, in, group);
        CHECK_FAILS(status, TD_ERR_ABORTED, "was aborted by rank 0");
        memset(out, 0x5a, BYTES);
        memset(in, 0x5a, BYTES);
        if (td_test_rank() == 0)
            pthread_join(thread, NULL);
        td_test_barrier();
        for (int i = 0; i < BYTES; i++)
            CHECK(((char *)in)[i] == 0x5a && ((char *)out)[i] == 0x5a);
        td_test_barrier();
        td_group_destroy(group);
    }
    td_free(in);
    td_free(out);
    td_destroy_process_group();
}

RANKS(aborted_shm, .ranks = 4, .arg = &shm, .deadline_s = 60)
{
    run_abort();
}
RANKS(aborted_tcp, .ranks = 4, .arg = &tcp, .deadline_s = 60)
{
    run_abort();
}

/* ---- Tensors --------------------------------------------------------------------------------- */

/* Rank r has r * r + `more` elements; the list is views of one tensor, or separate ones. */
static void run_tensors(int64_t more, bool one_storage, bool async)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int64_t total = 0, start = 0;
    td_tensor *list[8], *own;
    td_work *work = NULL;
    for (int r = 0; r < size; r++)
        total += r * r + more;
    td_tensor *whole = td_zeros((int64_t[]){total}, 1, TD_F32, NULL);
    for (int r = 0; r < size; r++) {
        int64_t count = r * r + more;
        list[r] = one_storage ? td_narrow(whole, 0, start, count)
                              : td_zeros((int64_t[]){count}, 1, TD_F32, NULL);
        start += count;
    }
    own = one_storage ? td_tensor_retain(list[rank])
                      : td_zeros((int64_t[]){rank * rank + more}, 1, TD_F32, NULL);
    for (int64_t i = 0; i < td_tensor_numel(own); i++)
        ((float *)td_tensor_data(own))[i] = (float)(100 * rank + i);
    CHECK_OK(td_all_gather(list, size, own, NULL, async ? &work : NULL));
    if (async)
        CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    work = NULL;
    for (int r = 0; r < size; r++)
        for (int64_t i = 0; i < td_tensor_numel(list[r]); i++)
            CHECK(((float *)td_tensor_data(list[r]))[i] == (float)(100 * r + i));
    CHECK_OK(td_reduce_scatter(own, list, size, TD_SUM, NULL, async ? &work : NULL));
    if (async)
        CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    for (int64_t i = 0; i < td_tensor_numel(own); i++)
        CHECK(((float *)td_tensor_data(own))[i] == (float)(size * (100 * rank + i)));
    for (int r = 0; r < size; r++)
        td_tensor_release(list[r]);
    td_tensor_release(own);
    td_tensor_release(whole);
}

static void run_dist(void)
{
    open_world(td_test_arg(), 0);
    for (int way = 0; way < 4; way++)
        for (int more = 0; more < 20000; more = more * 20 + 1)
            run_tensors(more, way % 2, way / 2);
    CHECK_OK(td_destroy_process_group());
}

RANKS(tensors_shm, .ranks = 3, .arg = &shm)
{
    run_dist();
}
RANKS(tensors_tcp, .ranks = 4, .arg = &tcp)
{
    run_dist();
}
RANKS(tensors_mixed, .ranks = 4, .arg = &mixed)
{
    run_dist();
}

/* The lists of two ranks differ. */
RANKS(tensors_differ, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    bool second = td_test_rank();
    td_tensor *list[] = {td_zeros((int64_t[]){second ? 3 : 2}, 1, TD_F32, NULL),
                         td_zeros((int64_t[]){4}, 1, TD_F32, NULL)};
    CHECK_FAILS(td_all_gather(list, 2, list[second], NULL, NULL), TD_ERR_MISMATCH,
                "in uneven parts");
    td_test_barrier();
    td_tensor_release(list[0]);
    td_tensor_release(list[1]);
    td_destroy_process_group();
}
