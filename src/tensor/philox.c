/* Philox 4x32-10 of Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as easy as 1, 2, 3"): ten rounds of
 * multiplications over a counter of four words, with a key that is raised by a constant after each round. And the numbers
 * that become of its words; random.h has the rules. */
#include "tensor/philox.h"

#include <math.h>

void td__philox(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4])
{
    uint32_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
    uint32_t key0 = key[0], key1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xd2511f53u * a, product1 = (uint64_t)0xcd9e8d57u * c;
        a = (uint32_t)(product1 >> 32) ^ b ^ key0;
        b = (uint32_t)product1;
        c = (uint32_t)(product0 >> 32) ^ d ^ key1;
        d = (uint32_t)product0;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
}

void td__philox_words(uint64_t seed, uint64_t offset, int64_t first, uint32_t *words, int64_t count)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int64_t at = first; at < first + count;) {
        uint64_t block = offset + (uint64_t)at / 4;
        uint32_t four[4];
        td__philox((const uint32_t[4]){(uint32_t)block, (uint32_t)(block >> 32), 0, 0}, key, four);
        do
            words[at - first] = four[at % 4];
        while (++at % 4 && at < first + count);
    }
}

/* ---- Numbers ------------------------------------------------------------------------------------ */

/* In [0, 1): as many of the word's upper bits as the dtype holds. More could be rounded to 1. */
static double unit_of_word(uint32_t word, td_dtype dtype)
{
    int digits = td__float_digits(dtype);
    return ldexp((double)(word >> (32 - digits)), -digits);
}

static uint64_t join(const uint32_t words[2])
{
    return (uint64_t)words[0] << 32 | words[1];
}

static double unit_of_pair(const uint32_t words[2])
{
    return (double)(join(words) >> 11) * 0x1p-53;
}

static void put_float(void *out, td_dtype dtype, int64_t i, double value)
{
    if (dtype == TD_F64)
        ((double *)out)[i] = value;
    else if (dtype == TD_F32)
        ((float *)out)[i] = (float)value;
    else
        ((uint16_t *)out)[i] = td__to_half(dtype, (float)value);
}

static void put_uniform(const struct td__distribution *d, const uint32_t *words, void *out,
                        int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (d->dtype == TD_F64)
            put_float(out, d->dtype, i, fma(unit_of_pair(words + 2 * i), d->range, d->from));
        else
            put_float(out, d->dtype, i,
                      (double)fmaf((float)unit_of_word(words[i], d->dtype), (float)d->range,
                                   (float)d->from));
    }
}

/* Box and Muller: two elements are one point. `words` has those of the last point in full. */
static void put_normal(const struct td__distribution *d, const uint32_t *words, void *out,
                       int64_t count)
{
    for (int64_t i = 0; i < count; i += 2) {
        bool wide = d->dtype == TD_F64;
        double u = wide ? unit_of_pair(words + 2 * i) : unit_of_word(words[i], TD_F32);
        double v = wide ? unit_of_pair(words + 2 * i + 2) : unit_of_word(words[i + 1], TD_F32);
        double radius = sqrt(-2 * log(1 - u)), angle = 2 * M_PI * v;
        put_float(out, d->dtype, i, fma(radius * cos(angle), d->range, d->from));
        if (i + 1 < count)
            put_float(out, d->dtype, i + 1, fma(radius * sin(angle), d->range, d->from));
    }
}

static void put_bernoulli(const struct td__distribution *d, const uint32_t *words, void *out,
                          int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        td__put_integer(out, d->dtype, i, (double)words[i] * 0x1p-32 < d->p);
}

static void put_integers(const struct td__distribution *d, const uint32_t *words, void *out,
                         int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t number;
        if (!td__takes_two_words(d))
            number = (uint64_t)words[i] * d->modulus >> 32;
        else if (d->modulus)
            number = (uint64_t)((unsigned __int128)join(words + 2 * i) * d->modulus >> 64);
        else
            number = join(words + 2 * i);
        td__put_integer(out, d->dtype, i, d->base + number);
    }
}

bool td__takes_two_words(const struct td__distribution *d)
{
    switch (d->kind) {
    case TD__UNIFORM:
    case TD__NORMAL:
        return d->dtype == TD_F64;
    case TD__INTEGERS:
        return d->modulus == 0 || d->modulus > UINT64_C(1) << 32;
    case TD__BERNOULLI:
        break;
    }
    return false;
}

void td__philox_numbers(const struct td__distribution *distribution, uint64_t seed, uint64_t offset,
                        int64_t first, void *out, int64_t count)
{
    static void (*const put[])(const struct td__distribution *, const uint32_t *, void *,
                               int64_t) = {[TD__UNIFORM] = put_uniform,
                                           [TD__NORMAL] = put_normal,
                                           [TD__BERNOULLI] = put_bernoulli,
                                           [TD__INTEGERS] = put_integers};
    uint32_t words[2 * (TD__RANDOM_BLOCK + 1)];
    int each = td__takes_two_words(distribution) ? 2 : 1;
    td__philox_words(seed, offset, each * first, words, each * (count + count % 2));
    put[distribution->kind](distribution, words, out, count);
}
