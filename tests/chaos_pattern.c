/* The data of operations.
 *
 * The elements of one rank's part are small whole numbers that repeat after PERIOD elements, a prime, so that a
 * misplaced block is detected. Small whole numbers and their sums are exact in every dtype, whatever the order
 * in which they are added. A result repeats after PERIOD elements too: the first ones are compared with what
 * they should be, and the others with the first. */
#include "chaos.h"

#include <string.h>

enum { PERIOD = 61, LARGEST = 16, POISON = 0xa5 };

/* 1 to 3, or less where the numbers are multiplied or are truth values. */
static int64_t value_of(const struct operation *operation, int rank, int part, size_t at)
{
    uint64_t h = mix(mix(operation->key, (uint64_t)(rank << 16 | part)), at % PERIOD) >> 8;
    if (operation->dtype == TD_BOOL)
        return (int64_t)(h % 2);
    return 1 + (int64_t)(h % (operation->op == TD_PRODUCT ? 2 : 3));
}

static void put_element(char *to, td_dtype dtype, double value)
{
    int64_t whole = (int64_t)value;
    float single = (float)value, pair[2] = {single, -single};
    double both[2] = {value, -value};
    uint16_t half = dtype == TD_F16 ? td_f32_to_f16(single) : td_f32_to_bf16(single);
    switch (dtype) {
    case TD_F32:
        memcpy(to, &single, sizeof single);
        break;
    case TD_F64:
        memcpy(to, &value, sizeof value);
        break;
    case TD_F16:
    case TD_BF16:
        memcpy(to, &half, sizeof half);
        break;
    case TD_COMPLEX64:
        memcpy(to, pair, sizeof pair);
        break;
    case TD_COMPLEX128:
        memcpy(to, both, sizeof both);
        break;
    default: /* the low bytes of an integer */
        memcpy(to, &whole, td_dtype_size(dtype));
        break;
    }
}

/* Goes on as it began. */
static void repeat(char *data, size_t begun, size_t bytes)
{
    while (begun < bytes) {
        size_t more = begun < bytes - begun ? begun : bytes - begun;
        memcpy(data + begun, data, more);
        begun += more;
    }
}

static size_t first_elements(size_t count)
{
    return count < PERIOD ? count : PERIOD;
}

void pattern_fill(void *data, const struct operation *operation, size_t count, int rank, int part)
{
    size_t element = td_dtype_size(operation->dtype), first = first_elements(count);
    for (size_t i = 0; i < first; i++)
        put_element((char *)data + i * element, operation->dtype,
                    (double)value_of(operation, rank, part, i));
    if (count)
        repeat(data, first * element, count * element);
}

static bool is_repeated(const void *data, const char *expected, size_t element, size_t count)
{
    size_t first = first_elements(count) * element, bytes = count * element;
    return !count || (!memcmp(data, expected, first) &&
                      !memcmp(data, (const char *)data + first, bytes - first));
}

bool pattern_is(const void *data, const struct operation *operation, size_t count, int rank,
                int part)
{
    char expected[PERIOD * LARGEST];
    pattern_fill(expected, operation, first_elements(count), rank, part);
    return is_repeated(data, expected, td_dtype_size(operation->dtype), count);
}

static double combine(const struct operation *operation, double a, double b)
{
    bool truth = operation->dtype == TD_BOOL;
    int64_t x = (int64_t)a, y = (int64_t)b;
    switch (operation->op) {
    case TD_PRODUCT:
        return a * b;
    case TD_MIN:
        return a < b ? a : b;
    case TD_MAX:
        return a > b ? a : b;
    case TD_BAND:
        return (double)(x & y);
    case TD_BOR:
        return (double)(x | y);
    case TD_BXOR:
        return (double)(x ^ y);
    default:
        return truth ? (double)(x | y) : a + b;
    }
}

bool pattern_is_reduced(const void *data, const struct operation *operation, size_t count,
                        const struct members *members, int part)
{
    char expected[PERIOD * LARGEST];
    size_t element = td_dtype_size(operation->dtype);
    for (size_t i = 0; i < first_elements(count); i++) {
        double sum = (double)value_of(operation, members->ranks[0], part, i);
        for (int m = 1; m < members->size; m++)
            sum = combine(operation, sum, (double)value_of(operation, members->ranks[m], part, i));
        if (operation->op == TD_AVG)
            sum /= members->size;
        put_element(expected + i * element, operation->dtype, sum);
    }
    return is_repeated(data, expected, element, count);
}

void pattern_poison(void *data, size_t bytes)
{
    if (bytes)
        memset(data, POISON, bytes);
}

bool pattern_is_poison(const void *data, size_t bytes)
{
    const unsigned char *at = data;
    return !bytes || (at[0] == POISON && !memcmp(at, at + 1, bytes - 1));
}

size_t uneven_count(const struct operation *operation, int from, int to)
{
    uint64_t h = mix(operation->key, (uint64_t)(from << 8 | to)) >> 8;
    return h % 4 ? h / 4 % (operation->count + 1) : 0;
}
