/* Inputs and references; see collective_reference.h.
 *
 * An input is a sequence of 64-bit words, each a function of case, rank and index, of which some bits are
 * kept and some set, so that every element is an ordinary number of its type. */
#include "collective_reference.h"

#include "reduction_reference.h"
#include "runner.h"

#include <math.h>

uint64_t hash_word(uint64_t word)
{
    word = (word + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    word = (word ^ word >> 29) * 0x94d049bb133111ebu;
    return word ^ word >> 32;
}

uint64_t hash_bytes(const void *data, size_t size)
{
    const unsigned char *bytes = data;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}

/* ---- Inputs ---------------------------------------------------------------------------------- */

struct pattern {
    uint64_t keep, set;
};

/* The sign, the mantissa and a few bits of the exponent are kept; the others make it about 1. */
static struct pattern pattern_of(td_dtype dtype)
{
    switch (dtype) {
    case TD_F32:
    case TD_COMPLEX64:
        return (struct pattern){0x83ffffff83ffffffu, 0x3c0000003c000000u};
    case TD_F64:
    case TD_COMPLEX128:
        return (struct pattern){0x807fffffffffffffu, 0x3f80000000000000u};
    case TD_F16:
        return (struct pattern){0x8fff8fff8fff8fffu, 0x3000300030003000u};
    case TD_BF16:
        return (struct pattern){0x83ff83ff83ff83ffu, 0x3c003c003c003c00u};
    case TD_BOOL:
        return (struct pattern){0x0303030303030303u, 0};
    default:
        return (struct pattern){UINT64_MAX, 0};
    }
}

void fill_input(td_dtype dtype, uint64_t number, int rank, size_t first, size_t size, void *to)
{
    struct pattern pattern = pattern_of(dtype);
    uint64_t base = hash_word(number * 64 + (uint64_t)rank), at = first / 8, word;
    size_t skip = first % 8, done = 0;
    char *bytes = to;
    while (done < size) {
        word = (hash_word(base + at++) & pattern.keep) | pattern.set;
        size_t now = 8 - skip < size - done ? 8 - skip : size - done;
        memcpy(bytes + done, (char *)&word + skip, now);
        done += now;
        skip = 0;
    }
}

bool is_input(td_dtype dtype, uint64_t number, int rank, size_t first, size_t size,
              const void *there, size_t *wrong)
{
    enum { PIECE = 4096 };
    char piece[PIECE];
    const char *bytes = there;
    for (size_t done = 0; done < size; done += PIECE) {
        size_t now = size - done < PIECE ? size - done : PIECE;
        fill_input(dtype, number, rank, first + done, now, piece);
        if (memcmp(piece, bytes + done, now) != 0) {
            for (*wrong = done; bytes[*wrong] == piece[*wrong - done];)
                ++*wrong;
            return false;
        }
    }
    return true;
}

double factor_of(int rank)
{
    return 1.0 / (rank + 3);
}

/* ---- Reductions ------------------------------------------------------------------------------ */

void own_combine(void *acc, const void *other, size_t count, td_dtype dtype)
{
    for (size_t i = 0; i < count; i++) {
        if (dtype == TD_F32) {
            float *a = acc;
            const float *b = other;
            a[i] = (a[i] + b[i]) * 0.75f;
        } else if (dtype == TD_F16) {
            uint16_t *a = acc;
            const uint16_t *b = other;
            a[i] = td_f32_to_f16((td_f16_to_f32(a[i]) + td_f16_to_f32(b[i])) * 0.75f);
        } else if (dtype == TD_I64) {
            uint64_t *a = acc;
            const uint64_t *b = other;
            a[i] = (a[i] ^ b[i]) * 3 + 1;
        } else {
            uint8_t *a = acc;
            const uint8_t *b = other;
            a[i] = (uint8_t)((a[i] + b[i]) * 3 + 1);
        }
    }
}

/* The accumulators of one rank. */
static void *load(const struct reference *reference, int rank)
{
    struct td__reduction own = reference->reduction;
    size_t element = td_dtype_size(own.dtype);
    char *input = malloc(reference->count * element + 1);
    void *acc = malloc(reference->count * td_dtype_size(td__reduction_accumulator(&own)) + 1);
    if (reference->scaled)
        own.factor = factor_of(td_get_global_rank(reference->group, rank));
    fill_input(own.dtype, reference->number, rank, reference->first * element,
               reference->count * element, input);
    td__reduce_load(&own, acc, input, reference->count);
    free(input);
    return acc;
}

/* The value of the tree's node over `n` of the ranks in `ranks`. */
static void *combine_ranks(const struct reference *reference, const int *ranks, int n)
{
    if (n == 1)
        return load(reference, ranks[0]);
    int left = reference_left(n);
    void *a = combine_ranks(reference, ranks, left);
    void *b = combine_ranks(reference, ranks + left, n - left);
    td__reduce_combine(&reference->reduction, a, b, reference->count);
    free(b);
    return a;
}

/* The same over hosts, each of which has the ranks from starts[h] to starts[h + 1]. */
static void *combine_hosts(const struct reference *reference, const int *ranks, const int *starts,
                           int n)
{
    if (n == 1)
        return combine_ranks(reference, ranks + starts[0], starts[1] - starts[0]);
    int left = reference_left(n);
    void *a = combine_hosts(reference, ranks, starts, left);
    void *b = combine_hosts(reference, ranks, starts + left, n - left);
    td__reduce_combine(&reference->reduction, a, b, reference->count);
    free(b);
    return a;
}

static char host_of(const struct reference *reference, int rank)
{
    return reference->hosts ? reference->hosts[td_get_global_rank(reference->group, rank)] : 0;
}

void reference_expect(const struct reference *reference, void *result)
{
    int ranks[64], starts[65], hosts = 0, placed = 0;
    for (int i = 0; i < reference->size; i++) {
        bool known = false;
        for (int k = 0; k < i && !known; k++)
            known = host_of(reference, k) == host_of(reference, i);
        if (known)
            continue;
        starts[hosts++] = placed;
        for (int k = i; k < reference->size; k++)
            if (host_of(reference, k) == host_of(reference, i))
                ranks[placed++] = k;
    }
    starts[hosts] = placed;
    void *acc = combine_hosts(reference, ranks, starts, hosts);
    td__reduce_store(&reference->reduction, result, acc, reference->count, reference->size);
    free(acc);
}

bool is_exact(const struct td__reduction *reduction)
{
    if (reduction->user)
        return false;
    bool integer = reduction->dtype >= TD_I8 && reduction->dtype <= TD_BOOL;
    return integer || reduction->op == TD_MIN || reduction->op == TD_MAX;
}

static double value_at(td_dtype dtype, const void *data, size_t i)
{
    switch (dtype) {
    case TD_F32:
    case TD_COMPLEX64:
        return ((const float *)data)[i];
    case TD_F64:
    case TD_COMPLEX128:
        return ((const double *)data)[i];
    case TD_F16:
        return td_f16_to_f32(((const uint16_t *)data)[i]);
    default:
        return td_bf16_to_f32(((const uint16_t *)data)[i]);
    }
}

bool is_close(td_dtype dtype, const void *a, const void *b, size_t count)
{
    bool half = dtype == TD_F16 || dtype == TD_BF16;
    bool complex = dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
    for (size_t i = 0; i < count * (complex ? 2 : 1); i++) {
        double x = value_at(dtype, a, i), y = value_at(dtype, b, i);
        if (!(fabs(x - y) <= (half ? 0.05 : 1e-4) * (1 + fabs(y))))
            return false;
    }
    return true;
}
