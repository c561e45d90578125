/* Reductions: every operation on every dtype, for every instruction set of this processor, bit for
 * bit the same as the scalar reference; special values; a user's own function; errors; and which
 * instruction set is chosen. */
#include "reduction_reference.h"
#include "runner.h"

#include "reduce/reduce_kernels.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>

/* ---- Data ------------------------------------------------------------------------------------ */

/* ThreadSanitizer looks at every access of one thread, for minutes, and can find nothing here. */
#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#define UNDER_TSAN __has_feature(thread_sanitizer)
#else
#define UNDER_TSAN 0
#endif

enum { MOST_SOURCES = UNDER_TSAN ? 9 : 33, MOST_COUNT = UNDER_TSAN ? 1000 : 4097, GUARD = 64 };
enum { BUFFER = GUARD + (MOST_COUNT + 1) * 16 + GUARD };

static const int source_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33};
static const size_t counts[] = {0, 1, 7, 64, 1000, 4097};

struct data {
    char given[MOST_SOURCES][BUFFER];
    char work[MOST_SOURCES][BUFFER];
    char apart[MOST_SOURCES][BUFFER];
    char expected[BUFFER];
    char acc[MOST_SOURCES][BUFFER];
};

/* A float of moderate size; once in a while among the elements that `i` chooses an extreme one. */
static double any_real(uint64_t *state, size_t i, bool is_half)
{
    static const double extremes[] = {NAN,     -NAN,     INFINITY,  -INFINITY, 0,
                                      -0.0,    0x1p-140, -1e-310,   3e38,      -65504,
                                      0x1p-24, 1e308,    -0x1p-149, 1};
    uint64_t random = next_random(state);
    if (i % 8 == 3 && random % 4 == 0)
        return extremes[(random >> 8) % LENGTH(extremes)];
    int exponent = (int)((random >> 8) % 12) - 6;
    return ldexp((double)(int64_t)(random >> 11) * 0x1p-52 - 1, is_half ? exponent / 3 : exponent);
}

static void fill(td_dtype dtype, void *to, uint64_t seed)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    size_t size = td_dtype_size(dtype);
    for (size_t i = 0; i < MOST_COUNT; i++) {
        char *at = (char *)to + i * size;
        double re = any_real(&state, i, size == 2), im = any_real(&state, i + 1, false);
        float f32[] = {(float)re, (float)im};
        double f64[] = {re, im};
        uint64_t random = next_random(&state);
        uint16_t half = dtype == TD_F16 ? reference_to_f16(f32[0]) : reference_to_bf16(f32[0]);
        if (i % 8 == 5) { /* any bits at all, NaN with payloads among them */
            half = (uint16_t)(random >> 40);
            f32[0] = of_bits((uint32_t)(random >> 32));
            memcpy(&f64[0], &random, sizeof f64[0]);
        }
        uint8_t truth = random % 3 ? 0 : (uint8_t)(random >> 8);
        const void *from = dtype == TD_F32 || dtype == TD_COMPLEX64    ? (void *)f32
                           : dtype == TD_F64 || dtype == TD_COMPLEX128 ? (void *)f64
                           : dtype == TD_F16 || dtype == TD_BF16       ? (void *)&half
                           : dtype == TD_BOOL                          ? (void *)&truth
                                                                       : (void *)&random;
        memcpy(at, from, size);
    }
}

/* ---- Comparing ------------------------------------------------------------------------------- */

static struct td__reduction trial;
static struct data *data;

static void expect(const char *what, const void *buffer, const void *wanted, size_t count, int n,
                   size_t offset)
{
    size_t size = td_dtype_size(trial.dtype);
    for (size_t i = 0; memcmp(buffer, wanted, count * size) && i < count; i++) {
        const uint8_t *got = (const uint8_t *)buffer + i * size;
        const uint8_t *want = (const uint8_t *)wanted + i * size;
        char text[80] = "";
        for (size_t b = 0; b < size; b++)
            sprintf(text + 2 * b, "%02x", got[size - 1 - b]);
        strcat(text, " for ");
        for (size_t b = 0; b < size; b++)
            sprintf(text + strlen(text), "%02x", want[size - 1 - b]);
        if (memcmp(got, want, size) != 0)
            FAIL("%s of %s, %d sources, %zu elements at %zu, %s, %s: element %zu is %s",
                 td_reduce_op_name(trial.op), td_dtype_name(trial.dtype), n, count, offset,
                 td__kernels()->name, what, i, text);
    }
}

static void expect_guards(const char *buffer, size_t bytes)
{
    for (size_t i = 0; i < GUARD; i++)
        if ((buffer - GUARD)[i] != 0x5a || buffer[bytes + i] != 0x5a)
            FAIL("%s of %s, %s: written beside the buffer", td_reduce_op_name(trial.op),
                 td_dtype_name(trial.dtype), td__kernels()->name);
}

/* `offset` bytes into a buffer, behind its guard. */
static char *place(char *buffer, size_t offset, size_t bytes)
{
    memset(buffer + offset, 0x5a, GUARD);
    memset(buffer + offset + GUARD + bytes, 0x5a, GUARD);
    return buffer + offset + GUARD;
}

enum mode { IN_PLACE, APART, MIXED, ONE };

static void try_many(enum mode mode, int n, size_t count, size_t offset)
{
    static const char *const names[] = {"in place", "apart", "mixed", "one destination"};
    size_t bytes = count * td_dtype_size(trial.dtype);
    const void *src[MOST_SOURCES];
    void *dst[MOST_SOURCES];
    for (int i = 0; i < n; i++) {
        char *work = place(data->work[i], offset, bytes);
        memcpy(work, data->given[i] + GUARD, bytes);
        src[i] = work;
        dst[i] = mode == APART || (mode == MIXED && i % 2) ? place(data->apart[i], offset, bytes)
                                                           : work;
    }
    int dst_count = mode == ONE ? 1 : n;
    if (mode == ONE || mode == MIXED) { /* a destination that is another source */
        void *first = dst[0];
        dst[0] = dst[n - 1];
        dst[n - 1] = first;
    }
    td__reduce_many(&trial, dst, dst_count, src, n, count);
    for (int i = 0; i < dst_count; i++) {
        expect(names[mode], dst[i], data->expected + GUARD, count, n, offset);
        expect_guards(dst[i], bytes);
    }
    for (int i = 0; i < n; i++) {
        bool written = false;
        for (int d = 0; d < dst_count; d++)
            written = written || dst[d] == src[i];
        if (!written)
            expect("a source", src[i], data->given[i] + GUARD, count, n, offset);
    }
}

/* Combines the accumulators of n sources from `low` on into the first of them. */
static void combine_tree(int low, int n, size_t count, size_t offset)
{
    if (n == 1)
        return;
    int left = reference_left(n);
    combine_tree(low, left, count, offset);
    combine_tree(low + left, n - left, count, offset);
    td__reduce_combine(&trial, data->acc[low] + GUARD + offset,
                       data->acc[low + left] + GUARD + offset, count);
}

static void try_steps(bool in_place, int n, size_t count, size_t offset)
{
    td_dtype acc_type = td__reduction_accumulator(&trial);
    size_t bytes = count * td_dtype_size(trial.dtype);
    size_t acc_offset = offset ? td_dtype_size(acc_type) : 0;
    in_place = in_place && acc_type == trial.dtype;
    for (int i = 0; i < n; i++) {
        char *acc = place(data->acc[i], acc_offset, count * td_dtype_size(acc_type));
        char *from = in_place ? acc : place(data->work[i], offset, bytes);
        memcpy(from, data->given[i] + GUARD, bytes);
        td__reduce_load(&trial, acc, from, count);
    }
    combine_tree(0, n, count, acc_offset);
    char *acc = data->acc[0] + acc_offset + GUARD;
    expect_guards(acc, count * td_dtype_size(acc_type));
    char *to = in_place ? acc : place(data->apart[0], offset, bytes);
    td__reduce_store(&trial, to, acc, count, n);
    expect("step by step", to, data->expected + GUARD, count, n, offset);
    expect_guards(to, bytes);
}

static void try_all(int n)
{
    size_t size = td_dtype_size(trial.dtype);
    for (size_t e = 0; e < MOST_COUNT; e++) {
        const void *elements[MOST_SOURCES];
        for (int i = 0; i < n; i++)
            elements[i] = data->given[i] + GUARD + e * size;
        reference_reduce(&trial, elements, n, data->expected + GUARD + e * size);
    }
    for (size_t set = 0; set < LENGTH(instruction_sets); set++) {
        if (!td__kernels_use(instruction_sets[set]))
            continue;
        for (size_t c = 0; c < LENGTH(counts) && counts[c] <= MOST_COUNT; c++) {
            for (size_t offset = 0; offset <= size; offset += size) {
                for (enum mode mode = IN_PLACE; mode <= ONE; mode++)
                    try_many(mode, n, counts[c], offset);
                try_steps(offset == 0, n, counts[c], offset);
            }
        }
    }
}

static void check_dtype(td_dtype dtype)
{
    data = calloc(1, sizeof *data);
    CHECK(data != NULL);
    for (int i = 0; i < MOST_SOURCES; i++)
        fill(dtype, data->given[i] + GUARD, (uint64_t)dtype * 100 + (uint64_t)i + 1);
    for (td_reduce_op op = TD_SUM; op <= TD_PREMUL_SUM; op++) {
        trial = (struct td__reduction){.dtype = dtype, .op = op, .factor = 0.3};
        if (td__reduction_check(&trial))
            continue;
        for (size_t s = 0; s < LENGTH(source_counts) && source_counts[s] <= MOST_SOURCES; s++)
            try_all(source_counts[s]);
    }
    free(data);
}

/* One test for each, so that a failure of one does not hide the others. */
#define DTYPE(name, dtype)                                                                         \
    TEST(name, .deadline_s = 60)                                                                   \
    {                                                                                              \
        check_dtype(dtype);                                                                        \
    }

DTYPE(f32_is_reduced, TD_F32)
DTYPE(f64_is_reduced, TD_F64)
DTYPE(f16_is_reduced, TD_F16)
DTYPE(bf16_is_reduced, TD_BF16)
DTYPE(i8_is_reduced, TD_I8)
DTYPE(u8_is_reduced, TD_U8)
DTYPE(i16_is_reduced, TD_I16)
DTYPE(i32_is_reduced, TD_I32)
DTYPE(i64_is_reduced, TD_I64)
DTYPE(u32_is_reduced, TD_U32)
DTYPE(u64_is_reduced, TD_U64)
DTYPE(bool_is_reduced, TD_BOOL)
DTYPE(complex64_is_reduced, TD_COMPLEX64)
DTYPE(complex128_is_reduced, TD_COMPLEX128)

/* ---- Known values ---------------------------------------------------------------------------- */

/* The bits of a op b, with every instruction set, and in either order. */
static void expect_f32(td_reduce_op op, uint32_t a, uint32_t b, uint32_t wanted)
{
    const struct td__reduction r = {.dtype = TD_F32, .op = op};
    for (size_t set = 0; set < LENGTH(instruction_sets); set++) {
        for (int order = 0; order < 2 && td__kernels_use(instruction_sets[set]); order++) {
            uint32_t x[37], y[37]; /* some of it in vectors, the rest after them */
            for (int i = 0; i < 37; i++) {
                x[i] = order ? b : a;
                y[i] = order ? a : b;
            }
            td__reduce_combine(&r, x, y, 37);
            for (int i = 0; i < 37; i++)
                CHECK_EQ(x[i], wanted);
        }
    }
}

TEST(nan_infinity_and_zeros)
{
    const uint32_t nan = 0x7fc00000, infinity = 0x7f800000, zero = 0, minus_zero = 0x80000000;
    const uint32_t one = bits_of(1), minus_one = bits_of(-1);
    expect_f32(TD_MIN, zero, minus_zero, minus_zero);
    expect_f32(TD_MAX, zero, minus_zero, zero);
    expect_f32(TD_MIN, minus_zero, minus_zero, minus_zero);
    expect_f32(TD_MAX, minus_zero, minus_zero, minus_zero);
    expect_f32(TD_MIN, one, minus_one, minus_one);
    expect_f32(TD_MAX, one, minus_one, one);
    expect_f32(TD_MIN, infinity, one, one);
    expect_f32(TD_MAX, infinity | minus_zero, one, one);
    for (td_reduce_op op = TD_SUM; op <= TD_MAX; op++) {
        expect_f32(op, 0x7f800001, 0xffc12345, nan); /* signalling, and negative with a payload */
        expect_f32(op, 0xffffffff, one, nan);
        expect_f32(op, 0x7fffffff, infinity, nan);
        expect_f32(op, 0xff800001, minus_zero, nan);
    }
    expect_f32(TD_SUM, infinity, infinity | minus_zero, nan);
    expect_f32(TD_PRODUCT, infinity, zero, nan);
    expect_f32(TD_SUM, minus_zero, minus_zero, minus_zero);
    expect_f32(TD_SUM, 1, 1, 2); /* subnormals */
}

static uint16_t reduce_halves(td_dtype dtype, td_reduce_op op, const uint16_t *values, int n)
{
    const struct td__reduction r = {.dtype = dtype, .op = op};
    const void *src[16];
    uint16_t result;
    void *dst = &result;
    for (int i = 0; i < n; i++)
        src[i] = &values[i];
    td__reduce_many(&r, &dst, 1, src, n, 1);
    return result;
}

TEST(halves_are_rounded_once)
{
    /* In bf16 the next number after 256 is 258: one at a time, the ones would be lost. */
    uint16_t ones[9];
    for (int i = 0; i < 9; i++)
        ones[i] = td_f32_to_bf16(i ? 1 : 256);
    CHECK_EQ(reduce_halves(TD_BF16, TD_SUM, ones, 9), td_f32_to_bf16(264));
    /* The sum is beyond f16, the average is not. */
    const uint16_t large[] = {0x7bff, 0x7bff, 0x7bff, 0x7bff};
    CHECK_EQ(reduce_halves(TD_F16, TD_AVG, large, 4), 0x7bff);
    CHECK_EQ(reduce_halves(TD_F16, TD_SUM, large, 4), 0x7c00);
    /* Small ones survive a product that passes through smaller ones. */
    const uint16_t factors[] = {td_f32_to_f16(0x1p-14f), td_f32_to_f16(0x1p-14f),
                                td_f32_to_f16(0x1p14f), td_f32_to_f16(0x1p14f)};
    CHECK_EQ(reduce_halves(TD_F16, TD_PRODUCT, factors, 4), td_f32_to_f16(1));
}

TEST(premultiplied_sums)
{
    double x[] = {1, -2}, y[] = {10, 0.5};
    const void *src[] = {x, y};
    void *dst[] = {y, x};
    struct td__reduction r = {.dtype = TD_F64, .op = TD_PREMUL_SUM, .factor = 0.25};
    td__reduce_many(&r, dst, 2, src, 2, 2);
    CHECK(x[0] == 2.75 && x[1] == -0.375 && y[0] == 2.75 && y[1] == -0.375);
    r.factor = NAN;
    td__reduce_load(&r, x, y, 2);
    uint64_t bits;
    memcpy(&bits, x, sizeof bits);
    CHECK(bits == 0x7ff8000000000000);
}

/* ---- A user's own ---------------------------------------------------------------------------- */

/* Records the order: each element is a bit mask of sources, and a sum of node sizes squared. */
static void join(void *acc, const void *other, size_t count, td_dtype dtype, void *arg)
{
    CHECK_EQ(dtype, TD_U64);
    *(size_t *)arg += count;
    uint64_t *a = acc;
    const uint64_t *b = other;
    for (size_t i = 0; i < count; i++) {
        CHECK_EQ(a[i] >> 40 & b[i] >> 40, 0);
        uint64_t size = (uint64_t)__builtin_popcountll(a[i] >> 40 | b[i] >> 40);
        a[i] = (a[i] + b[i]) + size * size * (size & 1 ? 3 : 1);
    }
}

static uint64_t join_tree(int low, int n, size_t element)
{
    if (n == 1)
        return (uint64_t)1 << (40 + low) | element % 7;
    int left = reference_left(n);
    uint64_t size = (uint64_t)n;
    return join_tree(low, left, element) + join_tree(low + left, n - left, element) +
           size * size * (size & 1 ? 3 : 1);
}

TEST(a_user_defined_reduction)
{
    enum { COUNT = 1300, MOST = 23 };
    static uint64_t buffers[MOST][COUNT];
    for (int n = 1; n <= MOST; n++) {
        size_t combined = 0;
        struct td__reduction r = {
            .dtype = TD_U64, .op = TD_AVG, .user = join, .user_arg = &combined};
        CHECK_OK(td__reduction_check(&r));
        CHECK_EQ(td__reduction_accumulator(&r), TD_U64);
        void *dst[MOST];
        for (int i = 0; i < n; i++) {
            dst[i] = buffers[i];
            for (size_t e = 0; e < COUNT; e++)
                buffers[i][e] = (uint64_t)1 << (40 + i) | e % 7;
        }
        td__reduce_many(&r, dst, n, (const void *const *)dst, n, COUNT);
        for (int i = 0; i < n; i++)
            for (size_t e = 0; e < COUNT; e++)
                CHECK(buffers[i][e] == join_tree(0, n, e));
        CHECK_EQ(combined, (size_t)(n - 1) * COUNT);
    }
    struct td__reduction half = {.dtype = TD_BF16, .op = TD_SUM, .user = join};
    CHECK_EQ(td__reduction_accumulator(&half), TD_BF16);
}

/* ---- What there is, and what there is not ---------------------------------------------------- */

/* As the table in dtype.h has it. */
static bool should_exist(td_dtype dtype, td_reduce_op op)
{
    bool floating = dtype <= TD_BF16, complex = dtype >= TD_COMPLEX64;
    switch (op) {
    case TD_MIN:
    case TD_MAX:
        return !complex;
    case TD_AVG:
    case TD_PREMUL_SUM:
        return floating || complex;
    case TD_BAND:
    case TD_BOR:
    case TD_BXOR:
        return !floating && !complex;
    default:
        return true;
    }
}

TEST(what_there_is_not_is_an_error_that_names_it)
{
    for (td_dtype dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++) {
        for (td_reduce_op op = TD_SUM; op <= TD_PREMUL_SUM; op++) {
            const struct td__reduction r = {.dtype = dtype, .op = op};
            bool exists = should_exist(dtype, op);
            CHECK_EQ(td__kernels_generic.fold[dtype][op] != NULL, exists);
            if (exists) {
                CHECK_OK(td__reduction_check(&r));
                continue;
            }
            CHECK_FAILS(td__reduction_check(&r), TD_ERR_INVALID, td_dtype_name(dtype));
            CHECK_CONTAINS(td_last_error(), td_reduce_op_name(op));
        }
    }
    struct td__reduction r = {.dtype = TD_F32, .op = TD_BXOR};
    CHECK_FAILS(td__reduction_check(&r), TD_ERR_INVALID,
                "there is no bxor of f32: bitwise operations take integers and bool");
    r.op = (td_reduce_op)99;
    CHECK_FAILS(td__reduction_check(&r), TD_ERR_INVALID,
                "reduction of f32: 99 is not an operation (see td_reduce_op)");
    r.dtype = (td_dtype)-1;
    CHECK_FAILS(td__reduction_check(&r), TD_ERR_INVALID, "-1 is not a dtype (see td_dtype)");
}

/* ---- Choosing an instruction set ------------------------------------------------------------- */

static void print_choice(void *simd)
{
    setenv("TANDEM_SIMD", simd, 1);
    printf("uses %s\n", td__kernels()->name);
    fflush(stdout);
}

static void expect_choice(const char *simd, const char *says, const char *warns)
{
    struct td_test_child child = td_test_fork(print_choice, (void *)simd);
    CHECK_EQ(child.status, 0);
    CHECK_CONTAINS(child.output, says);
    if (warns)
        CHECK_CONTAINS(child.output, warns);
    else
        CHECK(!strstr(child.output, "TANDEM_SIMD"));
    free(child.output);
}

TEST(the_environment_chooses)
{
    expect_choice("generic", "uses generic\n", NULL);
    expect_choice("", "uses ", NULL);
    expect_choice("avx9", "uses ", "TANDEM_SIMD is \"avx9\"");
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        expect_choice("avx2", "uses avx2\n", NULL);
    else
        expect_choice("avx2", "uses generic\n", "TANDEM_SIMD is \"avx2\"");
#endif
    CHECK(!td__kernels_use("avx9"));
    CHECK(td__kernels_use("generic"));
    CHECK_STR(td__kernels()->name, "generic");
}

static void *sum_in_thread(void *arg)
{
    float *values = arg;
    const struct td__reduction r = {.dtype = TD_F32, .op = TD_SUM};
    td__reduce_combine(&r, values, values + 100, 100);
    return NULL;
}

TEST(threads_choose_together)
{
    pthread_t threads[4];
    static float values[4][200];
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i < 200; i++)
            values[t][i] = (float)(i % 100 + t);
        CHECK_EQ(pthread_create(&threads[t], NULL, sum_in_thread, values[t]), 0);
    }
    for (int t = 0; t < 4; t++) {
        CHECK_EQ(pthread_join(threads[t], NULL), 0);
        for (int i = 0; i < 100; i++)
            CHECK(values[t][i] == (float)(2 * (i + t)));
    }
}
