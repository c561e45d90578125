/* Random numbers: compared with those of PyTorch, which reference/record_random.py has recorded. */
#include "runner.h"

#include "tensor/random_internal.h"
#include "tensor/tensor_internal.h"

#include <tandem/tandem.h>

#include <math.h>
#include <pthread.h>
#include <string.h>

enum kind { UNIFORM, NORMAL, BERNOULLI, RANDOM, RANGE, RANDPERM, DROPOUT, DROPOUT2D };
enum layout { CONTIGUOUS, TRANSPOSED, STEPPED, MIXED };

struct recorded_case {
    enum kind kind;
    td_dtype dtype;
    int64_t shape[4];
    enum layout layout;
    uint64_t seed;
    double a, b;
    uint32_t checksum;
    uint64_t first[3];
    uint64_t following;
};

struct recorded_state {
    int64_t draws, normals;
    uint32_t checksum;
    uint64_t following;
};

#include "reference/random_vectors.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static uint32_t crc32_of(const void *data, size_t size)
{
    uint32_t crc = ~0u;
    for (const unsigned char *at = data, *end = at + size; at < end; at++) {
        crc ^= *at;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (-(crc & 1u) & 0xedb88320u);
    }
    return ~crc;
}

/* ---- Against the recording ------------------------------------------------------------------- */

static td_tensor *make(const struct recorded_case *recorded, const int64_t *shape)
{
    td_tensor *whole = td_zeros(shape, 3, recorded->dtype, NULL), *part = NULL, *view = NULL;
    switch (recorded->layout) {
    case CONTIGUOUS:
        return whole;
    case TRANSPOSED:
        view = td_transpose(whole, 0, 2);
        break;
    case STEPPED:
        view = td_slice(whole, 2, 0, INT64_MAX, 2);
        break;
    case MIXED:
        part = td_slice(whole, 1, 1, INT64_MAX, 1);
        view = td_transpose(part, 0, 1);
    }
    td_tensor_release(part);
    td_tensor_release(whole);
    return view;
}

static td_tensor *draw(const struct recorded_case *recorded)
{
    const int64_t *shape = recorded->shape;
    if (recorded->kind == RANDPERM)
        return td_randperm(shape[0], recorded->dtype, NULL);
    if (recorded->kind == DROPOUT || recorded->kind == DROPOUT2D) {
        int64_t n = shape[0] * shape[1];
        td_tensor *mask = td_empty(&n, 1, TD_BOOL, NULL);
        td__dropout_mask(NULL, td_tensor_data(mask), n, recorded->a);
        return mask;
    }
    td_tensor *tensor = make(recorded, shape);
    CHECK(tensor);
    switch (recorded->kind) {
    case UNIFORM:
        CHECK_OK(td_uniform_(tensor, recorded->a, recorded->b, NULL));
        break;
    case NORMAL:
        CHECK_OK(td_normal_(tensor, recorded->a, recorded->b, NULL));
        break;
    case BERNOULLI:
        CHECK_OK(td_bernoulli_(tensor, recorded->a, NULL));
        break;
    case RANDOM:
        CHECK_OK(td_random_(tensor, NULL));
        break;
    default:
        CHECK_OK(td_random_range_(tensor, (int64_t)recorded->a, (int64_t)recorded->b, NULL));
    }
    return tensor;
}

static void compare(size_t index)
{
    const struct recorded_case *recorded = &recorded_cases[index];
    td_manual_seed(recorded->seed);
    td_tensor *drawn = draw(recorded);
    CHECK(drawn);
    td_tensor *flat = td_contiguous(drawn);
    size_t size = td_dtype_size(recorded->dtype);
    for (int64_t i = 0; i < 3 && i < td_tensor_numel(flat); i++) {
        uint64_t bits = 0;
        memcpy(&bits, (char *)td_tensor_data(flat) + (size_t)i * size, size);
        if (bits != recorded->first[i])
            FAIL("case %zu: element %lld is 0x%llx, recorded is 0x%llx", index, (long long)i,
                 (unsigned long long)bits, (unsigned long long)recorded->first[i]);
    }
    uint32_t checksum = crc32_of(td_tensor_data(flat), td_tensor_nbytes(flat));
    if (checksum != recorded->checksum)
        FAIL("case %zu: the checksum is 0x%x, recorded is 0x%x", index, checksum,
             recorded->checksum);
    uint64_t following = td__generator_seed(NULL);
    if (following != recorded->following)
        FAIL("case %zu: the generator goes on with 0x%llx, recorded is 0x%llx", index,
             (unsigned long long)following, (unsigned long long)recorded->following);
    td_tensor_release(flat);
    td_tensor_release(drawn);
}

TEST(recorded_numbers)
{
    CHECK(COUNT(recorded_cases) > 200);
    for (size_t i = 0; i < COUNT(recorded_cases); i++)
        compare(i);
}

TEST(recorded_states)
{
    for (size_t i = 0; i < COUNT(recorded_states); i++) {
        const struct recorded_state *recorded = &recorded_states[i];
        unsigned char state[TD_GENERATOR_STATE_SIZE];
        td_generator *generator = td_generator_create(99, NULL), *other = td_generator_create(1, NULL);
        CHECK_EQ(td_generator_initial_seed(generator), 99);
        td_tensor *uniform = td_empty(&recorded->draws, 1, TD_F32, NULL);
        td_tensor *normal = td_empty(&recorded->normals, 1, TD_F32, NULL);
        CHECK_OK(td_uniform_(uniform, 0, 1, generator));
        CHECK_OK(td_normal_(normal, 0, 1, generator));

        td_generator_get_state(generator, state, sizeof state);
        CHECK_EQ(crc32_of(state, sizeof state), recorded->checksum);
        CHECK_OK(td_generator_set_state(other, state, sizeof state));
        CHECK_EQ(td_generator_initial_seed(other), 99);
        CHECK_EQ(td__generator_seed(generator), recorded->following);
        CHECK_EQ(td__generator_seed(other), recorded->following);

        /* The number that waits is a part of the state. */
        double a, b;
        td_tensor *one = td_from_blob(&a, NULL, 0, NULL, TD_F64, NULL, NULL, NULL);
        td_tensor *two = td_from_blob(&b, NULL, 0, NULL, TD_F64, NULL, NULL, NULL);
        CHECK_OK(td_normal_(one, 0, 1, generator));
        CHECK_OK(td_normal_(two, 0, 1, other));
        CHECK_MEM(&a, &b, sizeof a);
        td_tensor_release(one);
        td_tensor_release(two);
        td_tensor_release(uniform);
        td_tensor_release(normal);
        td_generator_destroy(generator);
        td_generator_destroy(other);
    }
}

TEST(python_words_from_a_seed)
{
    struct td__mt19937 engine;
    td__mt19937_seed_array(&engine, (uint32_t[]){1234}, 1);
    for (size_t i = 0; i < COUNT(python_words); i++)
        CHECK_EQ(td__mt19937_u32(&engine), python_words[i]);
}

/* ---- What is promised ------------------------------------------------------------------------ */

TEST(a_block_is_the_same_as_single_words)
{
    struct td__mt19937 one, many;
    uint32_t words[2000];
    for (int before = 0; before < 700; before += 77) {
        td__mt19937_seed(&one, 5);
        td__mt19937_seed(&many, 5);
        td__mt19937_fill(&many, words, before);
        td__mt19937_fill(&many, words, 2000);
        for (int i = 0; i < before; i++)
            td__mt19937_u32(&one);
        for (int i = 0; i < 2000; i++)
            CHECK_EQ(td__mt19937_u32(&one), words[i]);
    }
}

TEST(seeds_count_in_their_lower_half_only)
{
    td_generator *a = td_generator_create(7, NULL), *b = td_generator_create(UINT64_C(1) << 32 | 7, NULL);
    CHECK(a && b);
    CHECK_EQ(td__generator_u32(a), td__generator_u32(b));
    td_generator_manual_seed(a, 8);
    CHECK(td__generator_u32(a) != td__generator_u32(b));
    td_generator_destroy(a);
    td_generator_destroy(b);
    td_generator_destroy(NULL);
    td_generator_destroy(td_default_generator(NULL));
    td_manual_seed(7);
    CHECK_EQ(td_generator_initial_seed(NULL), 7);
    CHECK_EQ(td_generator_initial_seed(td_default_generator(NULL)), 7);
}

TEST(wrong_states)
{
    unsigned char state[TD_GENERATOR_STATE_SIZE], before[TD_GENERATOR_STATE_SIZE];
    CHECK_OK(td_generator_get_state(NULL, before, sizeof before));
    CHECK_FAILS(td_generator_set_state(NULL, before, 12), TD_ERR_INVALID, "5056 bytes, not 12");
    CHECK_FAILS(td_generator_set_state(NULL, NULL, sizeof state), TD_ERR_INVALID, "not 0");
    memset(state, 0xff, sizeof state);
    CHECK_FAILS(td_generator_set_state(NULL, state, sizeof state), TD_ERR_INVALID, "not the state");
    memset(state, 0, sizeof state);
    CHECK_FAILS(td_generator_set_state(NULL, state, sizeof state), TD_ERR_INVALID, "not the state");
    /* More calls left than words. */
    memcpy(state, before, sizeof state);
    state[8] = 100;
    state[9] = 2;
    state[16] = 200;
    CHECK_FAILS(td_generator_set_state(NULL, state, sizeof state), TD_ERR_INVALID, "not the state");
    CHECK_OK(td_generator_get_state(NULL, state, sizeof state));
    CHECK_MEM(state, before, sizeof state);
}

/* The halves are the numbers of f32, rounded. */
static void check_half_normals(td_dtype dtype, int64_t n)
{
    td_tensor *half = td_empty(&n, 1, dtype, NULL), *full = td_empty(&n, 1, TD_F32, NULL);
    td_manual_seed(3);
    CHECK_OK(td_normal_(half, 1, 2, NULL));
    td_manual_seed(3);
    CHECK_OK(td_normal_(full, 1, 2, NULL));
    uint16_t *bits = td_tensor_data(half);
    float *numbers = td_tensor_data(full);
    for (int64_t i = 0; i < n; i++)
        CHECK_EQ(bits[i], dtype == TD_F16 ? td_f32_to_f16(numbers[i]) : td_f32_to_bf16(numbers[i]));
    td_tensor_release(half);
    td_tensor_release(full);
}

TEST(normal_halves)
{
    int64_t sizes[] = {3, 16, 100, 1500};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        check_half_normals(TD_F16, sizes[i]);
        check_half_normals(TD_BF16, sizes[i]);
    }
}

TEST(moments)
{
    int64_t n = 200000;
    td_tensor *x = td_randn(&n, 1, TD_F32, NULL);
    const float *data = td_tensor_data(x);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += data[i];
        squares += (double)data[i] * data[i];
    }
    CHECK(fabs(sum / (double)n) < 0.01);
    CHECK(fabs(squares / (double)n - 1) < 0.02);
    td_tensor_release(x);

    x = td_rand(&n, 1, TD_F64, NULL);
    const double *numbers = td_tensor_data(x);
    sum = 0;
    for (int64_t i = 0; i < n; i++) {
        CHECK(numbers[i] >= 0 && numbers[i] < 1);
        sum += numbers[i];
    }
    CHECK(fabs(sum / (double)n - 0.5) < 0.01);
    td_tensor_release(x);

    x = td_randint(-3, 4, &n, 1, TD_I8, NULL);
    int64_t counts[7] = {0};
    for (int64_t i = 0; i < n; i++)
        counts[((int8_t *)td_tensor_data(x))[i] + 3]++;
    for (int i = 0; i < 7; i++)
        CHECK(llabs(counts[i] - n / 7) < n / 70);
    td_tensor_release(x);
}

TEST(unsigned_integers_of_all_bits)
{
    uint64_t wide[500], all = 0, any = UINT64_MAX;
    td_tensor *x = td_from_blob(wide, (int64_t[]){500}, 1, NULL, TD_U64, NULL, NULL, NULL);
    CHECK_OK(td_random_(x, NULL));
    for (int i = 0; i < 500; i++) {
        all |= wide[i];
        any &= wide[i];
    }
    CHECK(all == UINT64_MAX && any == 0);
    CHECK_OK(td_random_range_(x, 5, 6, NULL));
    CHECK_EQ(wide[499], 5);
    td_tensor_release(x);
}

TEST(no_elements_draw_nothing)
{
    int64_t none[] = {3, 0};
    td_manual_seed(1);
    uint64_t first = td__generator_seed(NULL);
    td_manual_seed(1);
    td_tensor *x = td_rand(none, 2, TD_F32, NULL), *y = td_randn(none, 2, TD_F64, NULL);
    td_tensor *z = td_randint(0, 2, none, 2, TD_BOOL, NULL), *p = td_randperm(0, TD_F32, NULL);
    CHECK(x && y && z && p && td_tensor_numel(p) == 0);
    CHECK_EQ(td__generator_seed(NULL), first);
    td_tensor_release(x);
    td_tensor_release(y);
    td_tensor_release(z);
    td_tensor_release(p);
}

TEST(refusals)
{
    int64_t n = 4;
    float numbers[4];
    td_tensor *f32 = td_zeros(&n, 1, TD_F32, NULL), *i32 = td_zeros(&n, 1, TD_I32, NULL);
    td_tensor *c64 = td_zeros(&n, 1, TD_COMPLEX64, NULL), *u8 = td_zeros(&n, 1, TD_U8, NULL);
    td_tensor *same = td_from_blob(numbers, &n, 1, (int64_t[]){0}, TD_F32, NULL, NULL, NULL);
    td_manual_seed(1);
    uint64_t first = td__generator_seed(NULL);
    td_manual_seed(1);

    CHECK_FAILS(td_uniform_(NULL, 0, 1, NULL), TD_ERR_INVALID, "td_uniform_: an argument is NULL");
    CHECK_FAILS(td_uniform_(i32, 0, 1, NULL), TD_ERR_INVALID, "the dtype is i32");
    CHECK_FAILS(td_normal_(c64, 0, 1, NULL), TD_ERR_INVALID, "the dtype is complex64");
    CHECK_FAILS(td_bernoulli_(c64, 0.5, NULL), TD_ERR_INVALID, "dtype complex64");
    CHECK_FAILS(td_uniform_(f32, 1, 0, NULL), TD_ERR_INVALID, "from 1 to 0");
    CHECK_FAILS(td_uniform_(f32, 0, 1e300, NULL), TD_ERR_INVALID, "finite");
    CHECK_FAILS(td_uniform_(f32, -3e38, 3e38, NULL), TD_ERR_INVALID, "finite");
    CHECK_FAILS(td_uniform_(f32, NAN, 1, NULL), TD_ERR_INVALID, "finite");
    CHECK_FAILS(td_normal_(f32, 0, -1, NULL), TD_ERR_INVALID, "is -1; it must be 0 or above");
    CHECK_FAILS(td_normal_(f32, 0, NAN, NULL), TD_ERR_INVALID, "must be 0 or above");
    CHECK_FAILS(td_bernoulli_(f32, 1.5, NULL), TD_ERR_INVALID, "is 1.5; it must be from 0 to 1");
    CHECK_FAILS(td_bernoulli_(f32, NAN, NULL), TD_ERR_INVALID, "from 0 to 1");
    CHECK_FAILS(td_random_range_(f32, 5, 5, NULL), TD_ERR_INVALID, "there is no integer");
    CHECK_FAILS(td_random_range_(u8, 0, 257, NULL), TD_ERR_INVALID, "from 0 to 255");
    CHECK_FAILS(td_random_range_(u8, -1, 5, NULL), TD_ERR_INVALID, "include -1 to 4");
    CHECK_FAILS(td_random_range_(f32, 0, 1 << 26, NULL), TD_ERR_INVALID, "f32 holds");
    CHECK_FAILS(td_uniform_(same, 0, 1, NULL), TD_ERR_INVALID, "share memory");
    CHECK_FAILS(td_random_(same, NULL), TD_ERR_INVALID, "share memory");
    CHECK(!td_rand(&n, 1, TD_I64, NULL));
    CHECK_CONTAINS(td_last_error(), "td_rand: the dtype is i64");
    CHECK(!td_randn(&n, 1, (td_dtype)99, NULL));
    CHECK(!td_randint(0, 300, &n, 1, TD_U8, NULL));
    CHECK_CONTAINS(td_last_error(), "td_randint: u8 holds");
    CHECK(!td_randint(0, 300, &n, 1, (td_dtype)99, NULL));
    CHECK(!td_randperm(-1, TD_I64, NULL));
    CHECK_CONTAINS(td_last_error(), "n is -1");
    CHECK(!td_randperm(300, TD_U8, NULL));
    CHECK(!td_randperm(INT64_MAX, TD_I64, NULL));
    CHECK_OK(td_random_range_(u8, 0, 256, NULL));
    td_manual_seed(1);
    CHECK_EQ(td__generator_seed(NULL), first);
    td_tensor_release(f32);
    td_tensor_release(i32);
    td_tensor_release(c64);
    td_tensor_release(u8);
    td_tensor_release(same);
}

/* What was saved for a gradient before is known to have changed. */
TEST(filling_counts_as_a_change)
{
    {
        TD_SCOPE;
        td_tensor *x = td_rand((int64_t[]){4, 8}, 2, TD_F32, NULL), *view = td_transpose(x, 0, 1);
        unsigned before = x->storage->version;
        CHECK_OK(td_uniform_(x, 0, 1, NULL));
        CHECK(x->storage->version > before);
        before = x->storage->version;
        CHECK_OK(td_normal_(x, 0, 1, NULL));
        CHECK(x->storage->version > before);
        before = x->storage->version;
        CHECK_OK(td_bernoulli_(view, 0.5, NULL));
        CHECK(x->storage->version > before);
        before = x->storage->version;
        CHECK(td_uniform_(x, 1, 0, NULL) != TD_OK && x->storage->version == before);
        CHECK(td_randn(NULL, 0, TD_F64, NULL) && td_randperm(5, TD_I32, NULL));
    }
}

/* ---- Threads --------------------------------------------------------------------------------- */

enum { DRAWERS = 4, DRAWS = 1000 };

static void *draw_many(void *arg)
{
    uint32_t *numbers = arg;
    for (int i = 0; i < DRAWS; i++)
        numbers[i] = td__generator_u32(NULL);
    return NULL;
}

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Whatever the order, each number of the generator is drawn once. */
TEST(threads_share_a_generator)
{
    static uint32_t drawn[DRAWERS * DRAWS], expected[DRAWERS * DRAWS];
    pthread_t threads[DRAWERS];
    td_manual_seed(11);
    draw_many(expected);
    for (int i = DRAWS; i < DRAWERS * DRAWS; i++)
        expected[i] = td__generator_u32(NULL);
    td_manual_seed(11);
    for (int i = 0; i < DRAWERS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, draw_many, drawn + (size_t)i * DRAWS), 0);
    for (int i = 0; i < DRAWERS; i++)
        pthread_join(threads[i], NULL);
    qsort(drawn, DRAWERS * DRAWS, sizeof *drawn, by_value);
    qsort(expected, DRAWERS * DRAWS, sizeof *expected, by_value);
    CHECK_MEM(drawn, expected, sizeof drawn);
}
