/* Calls that succeed: all give the bits of the backend native. */
#include "../dist_suite.h"
#include "mpi_cases.h"
#include "runner.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { SIZES = 3 };

static const size_t sizes[SIZES] = {1, 37, 5000};

void mpi_begin(int64_t timeout_ms)
{
    const char *backend = getenv("MPI_TEST_BACKEND");
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = backend ? backend : "mpi",
                                                      .backend_options = getenv("MPI_TEST_OPTIONS"),
                                                      .timeout_ms = timeout_ms}));
}

void mpi_end(void)
{
    CHECK_OK(td_destroy_process_group());
}

void mpi_case_suite(void)
{
    mpi_begin(60000);
    CHECK_STR(td_get_backend(NULL), "mpi");
    dist_suite_run();
    mpi_end();
}

/* The whole program on the backend native, started by the same launcher. */
void mpi_case_native(void)
{
    CHECK_OK(td_init_process_group(NULL));
    CHECK_STR(td_get_backend(NULL), "native");
    dist_suite_run();
    mpi_end();
}

void mpi_case_alone(void)
{
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "mpi", .timeout_ms = 20000}));
    CHECK_EQ(td_get_world_size(NULL), 1);
    float x = 3;
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, TD_AVG, NULL, NULL));
    CHECK(x == 3);
    mpi_end();
}

/* ---- Reductions ------------------------------------------------------------------------------------------ */

/* Small whole numbers: sums and products of them are exact in every dtype, so that the order does not matter. */
static void fill(void *data, size_t count, td_dtype dtype, int salt)
{
    TD_SCOPE;
    td_tensor *plain = td_empty((int64_t[]){(int64_t)count}, 1, TD_F32, NULL);
    float *numbers = td_tensor_data(plain);
    for (size_t i = 0; i < count; i++)
        numbers[i] = (float)((i * 7 + (size_t)salt * 5) % 3) - (dtype == TD_U8 ? 0 : 1);
    bool is_unsigned = dtype == TD_U8 || dtype == TD_U32 || dtype == TD_U64 || dtype == TD_BOOL;
    for (size_t i = 0; is_unsigned && i < count; i++)
        numbers[i] = (float)((i + (size_t)salt) % 3);
    td_tensor *typed = td_to_dtype(plain, dtype);
    CHECK(typed);
    if (count)
        memcpy(data, td_tensor_data(typed), count * td_dtype_size(dtype));
}

static void add_twice(void *acc, const void *other, size_t count, td_dtype dtype, void *arg)
{
    (void)arg;
    CHECK_EQ(dtype, TD_I32);
    for (size_t i = 0; i < count; i++)
        ((int32_t *)acc)[i] = ((int32_t *)acc)[i] ^ ((const int32_t *)other)[i] ^ 21;
}

struct both {
    td_group *native;
    void *in, *out, *expected;
    size_t bytes;
};

static bool is_valid(td_reduce_op op, td_dtype dtype)
{
    bool is_complex = dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
    bool is_float = dtype <= TD_BF16 || is_complex;
    if (op == TD_BAND || op == TD_BOR || op == TD_BXOR)
        return !is_float;
    if (op == TD_AVG || op == TD_PREMUL_SUM)
        return is_float;
    return !((op == TD_MIN || op == TD_MAX) && is_complex);
}

/* The sign of a zero in a product of complex numbers depends on the order. */
static void drop_signs_of_zeros(struct both *both, size_t bytes, td_dtype dtype)
{
    for (size_t i = 0; dtype == TD_COMPLEX128 && i < bytes / 8; i++) {
        ((double *)both->out)[i] += 0.0;
        ((double *)both->expected)[i] += 0.0;
    }
    for (size_t i = 0; dtype == TD_COMPLEX64 && i < bytes / 4; i++) {
        ((float *)both->out)[i] += 0.0F;
        ((float *)both->expected)[i] += 0.0F;
    }
}

static void reduce_one(struct both *both, size_t count, td_dtype dtype, td_reduce_op op, int way)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL), root = size - 1;
    size_t element = td_dtype_size(dtype), all = count * (size_t)size;
    td_work *work = NULL, **async = way & 1 ? &work : NULL;
    for (int turn = 0; turn < 2; turn++) {
        td_group *group = turn ? both->native : NULL;
        char *out = turn ? both->expected : both->out;
        fill(both->in, all, dtype, rank);
        memset(out, 7, all * element);
        td_work **start = turn ? NULL : async;
        if (way & 2) /* in place */
            memcpy(out, both->in, all * element);
        const void *in = way & 2 ? out : both->in;
        CHECK_OK(td_group_all_reduce(out, in, count, dtype, op, group, start));
        if (start)
            CHECK_OK(td_work_wait(work, 0));
        td_work_release(start ? work : NULL);
        char *second = out + count * element;
        in = way & 2 ? second : both->in;
        CHECK_OK(td_group_reduce(second, in, size > 1 ? count : 0, dtype, root, op, group, start));
        if (start)
            CHECK_OK(td_work_wait(work, 0));
        td_work_release(start ? work : NULL);
    }
    drop_signs_of_zeros(both, all * element, dtype);
    CHECK_MEM(both->out, both->expected, count * element * (size > 1 ? 2 : 1));
    for (int turn = 0; turn < 2; turn++) {
        td_group *group = turn ? both->native : NULL;
        char *out = turn ? both->expected : both->out;
        fill(both->in, all, dtype, rank + 1);
        memcpy(out, both->in, all * element);
        char *own = way & 2 ? out + (size_t)rank * count * element : both->in;
        CHECK_OK(td_group_reduce_scatter(own, out, count, dtype, op, group, NULL));
        if (!(way & 2))
            memcpy(out, both->in, count * element);
    }
    size_t at = way & 2 ? (size_t)rank * count * element : 0;
    drop_signs_of_zeros(both, all * element, dtype);
    CHECK_MEM((char *)both->out + at, (char *)both->expected + at, count * element);
}

void mpi_case_reductions(void)
{
    mpi_begin(60000);
    int size = td_get_world_size(NULL);
    struct both both = {.bytes = (size_t)(size + 2) * 5000 * 16};
    both.in = td_alloc(both.bytes);
    both.out = td_alloc(both.bytes);
    both.expected = td_alloc(both.bytes);
    CHECK_OK(td_new_group(
        NULL, 0, &(td_group_options){.backend = "native", .backend_options = "transport=auto"},
        &both.native));
    td_reduce_op premul, own;
    CHECK_OK(td_reduce_op_create_premul_sum(0.5 * (td_get_rank(NULL) + 1), &premul));
    CHECK_OK(td_reduce_op_create(add_twice, NULL, &own));
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
        for (int op = TD_SUM; op <= TD_PREMUL_SUM; op++)
            for (int way = 0; is_valid((td_reduce_op)op, (td_dtype)dtype) && way < 4; way++)
                reduce_one(&both, sizes[(dtype + op + way) % SIZES], (td_dtype)dtype,
                           op == TD_PREMUL_SUM ? premul : (td_reduce_op)op, way);
    for (int i = 0; i < SIZES; i++)
        reduce_one(&both, sizes[i], TD_I32, own, 2 * (i % 2));
    td_reduce_op_destroy(premul);
    td_reduce_op_destroy(own);
    td_free(both.in);
    td_free(both.out);
    td_free(both.expected);
    CHECK_OK(td_group_destroy(both.native));
    mpi_end();
}

/* ---- Moves ----------------------------------------------------------------------------------------------- */

static size_t uneven(int rank)
{
    return (size_t)(rank * 5 % 7) * 3;
}

static void uneven_parts(bool async)
{
    enum { MOST = 16 };
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    size_t counts[MOST], in_counts[MOST], out_counts[MOST], all = 0, start = 0;
    td_work *work = NULL;
    for (int r = 0; r < size; r++) {
        if (r == rank)
            start = all;
        all += counts[r] = uneven(r) + 1;
        in_counts[r] = uneven(rank + 2 * r);
        out_counts[r] = uneven(r + 2 * rank);
    }
    int32_t *whole = malloc(all * 4 + 4), *part = malloc(all * 4 + 4);
    for (size_t i = 0; i < counts[rank]; i++)
        part[i] = (int32_t)(1000 * (size_t)rank + i);
    CHECK_OK(td_group_all_gather_v(whole, part, counts, TD_I32, NULL, async ? &work : NULL));
    if (async)
        CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    for (size_t r = 0, at = 0; r < (size_t)size; at += counts[r++])
        for (size_t i = 0; i < counts[r]; i++)
            CHECK_EQ(whole[at + i], 1000 * r + i);
    for (size_t i = 0; i < all; i++)
        whole[i] = (int32_t)(i + (size_t)rank);
    CHECK_OK(td_group_reduce_scatter_v(whole + start, whole, counts, TD_I32, TD_SUM, NULL, NULL));
    for (size_t i = 0; i < counts[rank]; i++)
        CHECK_EQ(whole[start + i], (int)(start + i) * size + size * (size - 1) / 2);
    free(whole);
    free(part);
    size_t ins = 0, outs = 0;
    for (int r = 0; r < size; r++) {
        ins += in_counts[r];
        outs += out_counts[r];
    }
    int32_t *in = malloc(ins * 4 + 4), *out = malloc(outs * 4 + 4);
    for (int r = 0, at = 0; r < size; r++)
        for (size_t i = 0; i < in_counts[r]; i++)
            in[at++] = rank * 10000 + r * 100 + (int)i;
    CHECK_OK(td_group_all_to_all_v(out, in, out_counts, in_counts, TD_I32, NULL, NULL));
    for (int r = 0, at = 0; r < size; r++)
        for (size_t i = 0; i < out_counts[r]; i++)
            CHECK_EQ(out[at++], r * 10000 + rank * 100 + (int)i);
    free(in);
    free(out);
}

static void even_parts(size_t count, bool in_place)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    size_t all = count * (size_t)size;
    int64_t *a = calloc(all + 1, 8), *b = calloc(all + 1, 8);
    for (int root = 0; root < size; root++) {
        int64_t *own = in_place && rank == root ? a + (size_t)rank * count : b;
        for (size_t i = 0; i < count; i++)
            own[i] = (int64_t)(1000000 * rank) + (int64_t)i;
        CHECK_OK(td_group_gather(rank == root ? a : NULL, own, count, TD_I64, root, NULL, NULL));
        for (size_t i = 0; rank == root && i < all; i++)
            CHECK_EQ(a[i], 1000000 * (int64_t)(i / count) + (int64_t)(i % count));
        memset(own == b ? b : a + all, 0, 8);
        CHECK_OK(td_group_scatter(own, rank == root ? a : NULL, count, TD_I64, root, NULL, NULL));
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(own[i], 1000000 * (int64_t)rank + (int64_t)i);
        CHECK_OK(td_group_broadcast(own, count, TD_I64, root, NULL, NULL));
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(own[i], 1000000 * (int64_t)root + (int64_t)i);
    }
    for (size_t i = 0; i < all; i++)
        a[i] = rank * 1000 + (int64_t)(i / count);
    CHECK_OK(td_group_all_to_all(in_place ? a : b, a, count, TD_I64, NULL, NULL));
    for (size_t i = 0; i < all; i++)
        CHECK_EQ((in_place ? a : b)[i], 1000 * (int64_t)(i / count) + rank);
    int64_t *own = in_place ? a + (size_t)rank * count : b;
    for (size_t i = 0; i < count; i++)
        own[i] = rank * 7 + (int64_t)i;
    CHECK_OK(td_group_all_gather(a, own, count, TD_I64, NULL, NULL));
    for (size_t i = 0; i < all; i++)
        CHECK_EQ(a[i], 7 * (int64_t)(i / count) + (int64_t)(i % count));
    free(a);
    free(b);
}

void mpi_case_moves(void)
{
    mpi_begin(60000);
    for (int i = 0; i < SIZES; i++) {
        even_parts(sizes[i], false);
        even_parts(sizes[i], true);
    }
    uneven_parts(false);
    uneven_parts(true);
    mpi_end();
}

/* ---- Messages ----------------------------------------------------------------------------------------------- */

static void any_source(void)
{
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    int seen = 0, value;
    if (rank) {
        value = 100 + rank;
        CHECK_OK(td_group_send(&value, 1, TD_I32, 0, rank, NULL, NULL));
        return;
    }
    for (int i = 1; i < size; i++) {
        td_work *work;
        CHECK_OK(td_group_recv(&value, 1, TD_I32, TD_ANY_SOURCE, TD_ANY_TAG, NULL, &work));
        CHECK_OK(td_work_wait(work, 0));
        CHECK_EQ(value, 100 + td_work_source(work));
        CHECK_EQ(td_work_received(work), 4);
        seen += td_work_source(work);
        td_work_release(work);
    }
    CHECK_EQ(seen, size * (size - 1) / 2);
}

/* Messages match by their tags, in any order; a shorter one than the buffer is complete. */
static void tags(void)
{
    enum { TAGS = 20 };
    int rank = td_get_rank(NULL), values[TAGS][4];
    td_work *works[TAGS];
    if (rank > 1)
        return;
    for (int tag = 0; tag < TAGS && rank == 0; tag++) {
        values[tag][0] = values[tag][1] = tag * 3;
        CHECK_OK(td_group_send(values[tag], 2, TD_I32, 1, tag, NULL, tag % 2 ? &works[tag] : NULL));
    }
    for (int tag = 1; tag < TAGS && rank == 0; tag += 2) {
        CHECK_OK(td_work_wait(works[tag], 0));
        td_work_release(works[tag]);
    }
    for (int tag = TAGS; rank == 1 && tag-- > 0;)
        CHECK_OK(td_group_recv(values[tag], 4, TD_I32, 0, tag, NULL, &works[tag]));
    for (int tag = 0; rank == 1 && tag < TAGS; tag++) {
        CHECK_OK(td_work_wait(works[tag], 0));
        CHECK_EQ(td_work_received(works[tag]), 8);
        CHECK_EQ(values[tag][1], tag * 3);
        td_work_release(works[tag]);
    }
}

static void large_message(void)
{
    enum { COUNT = 300000 };
    int rank = td_get_rank(NULL);
    double *data = calloc(COUNT, sizeof *data);
    for (int i = 0; i < COUNT && rank == 0; i++)
        data[i] = i;
    if (rank == 0)
        CHECK_OK(td_group_send(data, COUNT, TD_F64, 1, 5, NULL, NULL));
    if (rank == 1)
        CHECK_OK(td_group_recv(data, COUNT, TD_F64, 0, 5, NULL, NULL));
    for (int i = 0; i < COUNT && rank == 1; i++)
        CHECK(data[i] == i);
    free(data);
}

static void longer_than_the_buffer(void)
{
    int rank = td_get_rank(NULL), values[4] = {0};
    if (rank == 0)
        CHECK_OK(td_group_send(values, 4, TD_I32, 1, 5, NULL, NULL));
    if (rank == 1)
        CHECK_FAILS(td_group_recv(values, 2, TD_I32, 0, 5, NULL, NULL), TD_ERR_MISMATCH, "rank 0");
}

static void late_message(void)
{
    int value, rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    td_work *work;
    CHECK_OK(td_set_call_timeout(200));
    CHECK_FAILS(td_group_recv(&value, 1, TD_I32, (rank + 1) % size, 77, NULL, NULL), TD_ERR_TIMEOUT,
                "rank");
    CHECK_OK(td_group_recv(&value, 1, TD_I32, TD_ANY_SOURCE, 77, NULL, &work));
    CHECK_FAILS(td_work_wait(work, 20000), TD_ERR_TIMEOUT, "tag 77");
    td_work_release(work);
    CHECK_OK(td_set_call_timeout(0));
}

void mpi_case_messages(void)
{
    mpi_begin(60000);
    any_source();
    CHECK_OK(td_barrier(NULL, NULL));
    tags();
    CHECK_OK(td_barrier(NULL, NULL));
    large_message();
    longer_than_the_buffer();
    CHECK_OK(td_barrier(NULL, NULL));
    late_message();
    CHECK_OK(td_barrier(NULL, NULL));
    /* A receive that never comes ends with the group. */
    int value;
    td_work *work;
    CHECK_OK(td_group_recv(&value, 1, TD_I32, TD_ANY_SOURCE, 99, NULL, &work));
    mpi_end();
    CHECK_FAILS(td_work_status(work), TD_ERR_STATE, "destroyed");
    td_work_release(work);
}

/* ---- Groups, threads, devices ----------------------------------------------------------------------------------- */

static void sum_in(td_group *group)
{
    int ranks = td_get_world_size(group);
    float x = (float)(td_get_rank(group) + 1);
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, group, NULL));
    CHECK(x == (float)(ranks * (ranks + 1)) / 2);
}

void mpi_case_groups(void)
{
    mpi_begin(60000);
    int rank = td_get_rank(NULL);
    td_group *half = NULL, *turned = NULL;
    CHECK_OK(td_group_split(NULL, rank % 2, -rank, NULL, &half));
    sum_in(half);
    CHECK_STR(td_get_backend(half), "mpi");
    CHECK_OK(td_group_split(NULL, 0, -rank, NULL, &turned));
    sum_in(turned);
    for (int i = 0; i < 20; i++) {
        td_group *again;
        CHECK_OK(td_new_group(NULL, 0, NULL, &again));
        sum_in(again);
        CHECK_OK(td_group_destroy(again));
    }
    CHECK_OK(td_group_destroy(half));
    CHECK_OK(td_group_destroy(turned));
    mpi_end();
    mpi_begin(60000); /* a second world of the same process */
    sum_in(NULL);
    mpi_end();
}

struct thread {
    pthread_t id;
    td_group *group;
    int number;
};

static void *run_thread(void *arg)
{
    const struct thread *thread = arg;
    int rank = td_get_rank(NULL), size = td_get_world_size(NULL);
    for (int i = 0; i < 100; i++) {
        int x = rank + i, got = -1, next = (rank + 1) % size, before = (rank + size - 1) % size;
        td_work *works[2], *sum;
        CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_I32, TD_SUM, thread->group, &sum));
        CHECK_OK(td_group_send(&i, 1, TD_I32, next, thread->number, NULL, &works[0]));
        CHECK_OK(td_group_recv(&got, 1, TD_I32, before, thread->number, NULL, &works[1]));
        CHECK_OK(td_work_wait_all(works, 2, 0));
        CHECK_OK(td_work_wait(sum, 0));
        CHECK_EQ(got, i);
        CHECK_EQ(x, size * i + size * (size - 1) / 2);
        td_work_release(sum);
        td_work_release(works[0]);
        td_work_release(works[1]);
    }
    return NULL;
}

/* Works of several groups at once, from several threads. */
void mpi_case_threads(void)
{
    enum { THREADS = 3 };
    struct thread threads[THREADS];
    mpi_begin(60000);
    for (int i = 0; i < THREADS; i++) {
        threads[i].number = i;
        CHECK_OK(td_new_group(NULL, 0, NULL, &threads[i].group));
    }
    if (td_get_world_size(NULL) > 1) {
        for (int i = 0; i < THREADS; i++)
            CHECK_EQ(pthread_create(&threads[i].id, NULL, run_thread, &threads[i]), 0);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i].id, NULL);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK_OK(td_group_destroy(threads[i].group));
    mpi_end();
}
