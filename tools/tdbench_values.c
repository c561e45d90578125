/* The values that are sent, and the check for wrong ones; see tdbench.h.
 *
 * They are small integers, so that every sum of them is exact in every type, in any order, and there is one
 * right result. The expected result of a reduction is computed for one period by the library's own
 * reductions: those have their own tests; this checks that the right elements of the right ranks were
 * combined. */
#include "tdbench.h"

#include "reduce/reduction.h"

#include <string.h>

/* log2 of the number up to which a type represents all integers. */
static int exact_bits(td_dtype dtype)
{
    switch (dtype) {
    case TD_BOOL:
        return 1;
    case TD_BF16:
    case TD_I8:
    case TD_U8:
        return 8;
    case TD_F16:
        return 11;
    default:
        return 24;
    }
}

/* A hash of both numbers. */
static uint32_t mix(uint32_t rank, uint32_t i)
{
    uint32_t x = rank * 0x9e3779b9u + i * 0x85ebca6bu + 1;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

/* The integer value of element i of a rank. Sums over all ranks stay exact, and so do products: a few ranks
 * have twos, the others ones. */
static int number_of(const struct bench_world *world, int rank, uint32_t i)
{
    uint32_t bits = mix((uint32_t)rank, i);
    if (world->options->op == TD_PRODUCT)
        return rank < 6 ? 1 + (int)(bits & 1) : 1;
    uint32_t range = (1u << exact_bits(world->options->dtype)) / (uint32_t)world->size;
    return (int)(bits % (range < 2 ? 2 : range > 4096 ? 4096 : range));
}

static void put(void *data, td_dtype dtype, size_t i, int number)
{
    switch (dtype) {
    case TD_F32:
        ((float *)data)[i] = (float)number;
        break;
    case TD_F64:
        ((double *)data)[i] = number;
        break;
    case TD_F16:
        ((uint16_t *)data)[i] = td_f32_to_f16((float)number);
        break;
    case TD_BF16:
        ((uint16_t *)data)[i] = td_f32_to_bf16((float)number);
        break;
    case TD_I8:
    case TD_U8:
    case TD_BOOL:
        ((uint8_t *)data)[i] = (uint8_t)number;
        break;
    case TD_I16:
        ((int16_t *)data)[i] = (int16_t)number;
        break;
    case TD_I32:
    case TD_U32:
        ((uint32_t *)data)[i] = (uint32_t)number;
        break;
    case TD_I64:
    case TD_U64:
        ((uint64_t *)data)[i] = (uint64_t)number;
        break;
    case TD_COMPLEX64:
    case TD_COMPLEX128:
        break; /* two parts: see make_pattern() */
    }
}

/* One period of what `rank` sends. Complex factors have no imaginary part: with one, the sign of a
 * zero would depend on the order of multiplication. */
static void make_pattern(const struct bench_world *world, int rank, void *pattern)
{
    td_dtype dtype = world->options->dtype, part = dtype;
    bool complex = dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
    bool product = world->options->op == TD_PRODUCT;
    if (complex)
        part = dtype == TD_COMPLEX64 ? TD_F32 : TD_F64;
    for (size_t i = 0; i < (complex ? 2 : 1) * (size_t)BENCH_PERIOD; i++)
        put(pattern, part, i,
            complex && product && i % 2 ? 0 : number_of(world, rank, (uint32_t)i));
}

/* Copies a period to `data` over and over, from its element `first` on. */
void bench_fill(struct bench_world *world, int from, size_t first, void *data, size_t count)
{
    size_t size = td_dtype_size(world->options->dtype);
    char *at = data;
    make_pattern(world, from, world->pattern);
    for (size_t skip = first % BENCH_PERIOD; count; skip = 0) {
        size_t run = BENCH_PERIOD - skip < count ? BENCH_PERIOD - skip : count;
        memcpy(at, world->pattern + skip * size, run * size);
        at += run * size;
        count -= run;
    }
}

static void note(struct bench_world *world, size_t element, size_t count)
{
    if (!world->first_wrong[0])
        snprintf(world->first_wrong, sizeof world->first_wrong, "element %zu of %zu on rank %d",
                 element, count, world->rank);
}

/* Counts what differs from world->pattern. */
static int64_t compare(struct bench_world *world, size_t first, const void *data, size_t count)
{
    size_t size = td_dtype_size(world->options->dtype), done = 0;
    int64_t wrong = 0;
    for (size_t skip = first % BENCH_PERIOD; done < count; skip = 0) {
        size_t run = BENCH_PERIOD - skip < count - done ? BENCH_PERIOD - skip : count - done;
        const char *is = (const char *)data + done * size, *should = world->pattern + skip * size;
        bool same = !memcmp(is, should, run * size);
        for (size_t i = 0; !same && i < run; i++) {
            if (memcmp(is + i * size, should + i * size, size) != 0) {
                note(world, done + i, count);
                wrong++;
            }
        }
        done += run;
    }
    return wrong;
}

int64_t bench_check(struct bench_world *world, int from, size_t first, const void *data,
                    size_t count)
{
    make_pattern(world, from, world->pattern);
    return compare(world, first, data, count);
}

int64_t bench_check_reduced(struct bench_world *world, size_t first, const void *data, size_t count)
{
    struct td__reduction reduction = {
        .dtype = world->options->dtype, .op = world->options->op, .factor = 1};
    char *sum = world->scratch, *next = sum + BENCH_PERIOD * sizeof(double) * 2;
    make_pattern(world, 0, world->pattern);
    td__reduce_load(&reduction, sum, world->pattern, BENCH_PERIOD);
    for (int rank = 1; rank < world->size; rank++) {
        make_pattern(world, rank, world->pattern);
        td__reduce_load(&reduction, next, world->pattern, BENCH_PERIOD);
        td__reduce_combine(&reduction, sum, next, BENCH_PERIOD);
    }
    td__reduce_store(&reduction, world->pattern, sum, BENCH_PERIOD, world->size);
    return compare(world, first, data, count);
}
