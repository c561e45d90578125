/* Random numbers of the toy accelerator, by the rules of random.h. td_generator_take() reserves words of the generator
 * when the kernel is launched, so that the numbers do not depend on when it runs. */
#include "toy_machine.h"

#include <math.h>

/* ---- Philox ------------------------------------------------------------------------------------------------ */

struct philox {
    uint64_t seed, offset;
};

/* Word number `number` of those that were reserved. */
static uint32_t word_of(const struct philox *philox, int64_t number)
{
    uint64_t block = philox->offset + (uint64_t)number / 4;
    uint32_t key[2] = {(uint32_t)philox->seed, (uint32_t)(philox->seed >> 32)};
    uint32_t c[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0, 0};
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53 * c[0];
        uint64_t product1 = (uint64_t)0xCD9E8D57 * c[2];
        c[0] = (uint32_t)(product1 >> 32) ^ c[1] ^ key[0];
        c[1] = (uint32_t)product1;
        c[2] = (uint32_t)(product0 >> 32) ^ c[3] ^ key[1];
        c[3] = (uint32_t)product0;
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return c[number % 4];
}

static uint64_t bits_of(const struct philox *philox, int64_t element)
{
    return (uint64_t)word_of(philox, 2 * element) << 32 | word_of(philox, 2 * element + 1);
}

/* ---- Fills -------------------------------------------------------------------------------------------------- */

struct fill {
    td_tensor *out;
    double (*number)(const struct fill *fill, int64_t element); /* NULL: integers */
    double a, b;
    int64_t from;
    uint64_t range;
    struct philox philox;
};

/* In [0, 1), with as many bits as the dtype has. */
static double fraction(const struct fill *fill, int64_t element, td_dtype dtype)
{
    if (dtype == TD_F64)
        return (double)(bits_of(&fill->philox, element) >> 11) * 0x1p-53;
    int bits = dtype == TD_F16 ? 11 : dtype == TD_BF16 ? 8 : 24;
    return ldexp(word_of(&fill->philox, element) >> (32 - bits), -bits);
}

/* Rounded to the dtype. */
static double rounded(double x, td_dtype dtype)
{
    return dtype == TD_F64    ? x
           : dtype == TD_F32  ? (double)(float)x
           : dtype == TD_BF16 ? (double)td_bf16_to_f32(td_f32_to_bf16((float)x))
                              : (double)td_f16_to_f32(td_f32_to_f16((float)x));
}

static double uniform(const struct fill *fill, int64_t element)
{
    td_dtype dtype = td_tensor_dtype(fill->out);
    double from = rounded(fill->a, dtype), range = rounded(rounded(fill->b, dtype) - from, dtype);
    double part = fraction(fill, element, dtype);
    return dtype == TD_F64 ? fma(part, range, from)
                           : (double)fmaf((float)part, (float)range, (float)from);
}

/* Two neighbours are a point of two normal coordinates (Box and Muller). */
static double normal(const struct fill *fill, int64_t element)
{
    td_dtype dtype = td_tensor_dtype(fill->out) == TD_F64 ? TD_F64 : TD_F32;
    double radius = sqrt(-2 * log(1 - fraction(fill, element & ~(int64_t)1, dtype)));
    double angle = 2 * 3.14159265358979323846 * fraction(fill, element | 1, dtype);
    double number = fma(radius * (element % 2 ? sin(angle) : cos(angle)), fill->b, fill->a);
    return dtype == TD_F64 ? number : (double)(float)number;
}

static double bernoulli(const struct fill *fill, int64_t element)
{
    return word_of(&fill->philox, element) * 0x1p-32 < fill->a;
}

static bool is_wide_range(uint64_t range)
{
    return range == 0 || range > UINT64_C(1) << 32;
}

static int64_t integer(const struct fill *fill, int64_t element)
{
    uint64_t number;
    if (!is_wide_range(fill->range))
        number = (word_of(&fill->philox, element) * fill->range) >> 32;
    else if (fill->range)
        number = (uint64_t)(((unsigned __int128)bits_of(&fill->philox, element) * fill->range) >>
                            64);
    else
        number = bits_of(&fill->philox, element);
    return (int64_t)((uint64_t)fill->from + number);
}

/* Makes the numbers in the order of the indices, and copies them to the strides and the dtype of `out`. */
static td_status run_fill(void *arguments)
{
    struct fill *fill = arguments;
    td_tensor *out = fill->out;
    td_tensor *numbers = td_empty(td_tensor_shape(out), td_tensor_ndim(out),
                                  fill->number ? TD_F64 : TD_I64, td_device_get("cpu"));
    if (!numbers)
        return td_last_status();
    for (int64_t i = 0; i < td_tensor_numel(out); i++) {
        if (fill->number)
            ((double *)td_tensor_data(numbers))[i] = fill->number(fill, i);
        else
            ((int64_t *)td_tensor_data(numbers))[i] = integer(fill, i);
    }
    return td_host_kernels()->copy(out, numbers);
}

static td_status launch_fill(const char *slot, struct fill *fill, td_generator *generator)
{
    if (toy_is_missing(slot)) /* before numbers are taken */
        return toy_unsupported(slot, "any tensor");
    bool wide = fill->number ? fill->number != bernoulli && td_tensor_dtype(fill->out) == TD_F64
                             : is_wide_range(fill->range);
    td_status status = td_generator_take(generator, td_tensor_numel(fill->out) * (wide ? 2 : 1),
                                         &fill->philox.seed, &fill->philox.offset);
    const void *tensors[] = {&fill->out};
    return status ? status : toy_launch(slot, run_fill, fill, sizeof *fill, tensors, 1);
}

td_status toy_kernel_uniform(td_tensor *out, double from, double to, td_generator *generator)
{
    struct fill fill = {.out = out, .number = uniform, .a = from, .b = to};
    return launch_fill("uniform", &fill, generator);
}

td_status toy_kernel_normal(td_tensor *out, double mean, double std, td_generator *generator)
{
    struct fill fill = {.out = out, .number = normal, .a = mean, .b = std};
    return launch_fill("normal", &fill, generator);
}

td_status toy_kernel_bernoulli(td_tensor *out, double p, td_generator *generator)
{
    struct fill fill = {.out = out, .number = bernoulli, .a = p};
    return launch_fill("bernoulli", &fill, generator);
}

td_status toy_kernel_random_range(td_tensor *out, int64_t from, uint64_t range,
                                  td_generator *generator)
{
    struct fill fill = {.out = out, .from = from, .range = range};
    return launch_fill("random_range", &fill, generator);
}

/* ---- Dropout -------------------------------------------------------------------------------------------------- */

struct dropout {
    struct fill keep; /* its `out` */
    td_tensor *out;
    const td_tensor *x;
    double p;
    int64_t block;
};

/* What is kept is scaled by the same kernel that scales its gradient. */
static td_status run_dropout(void *arguments)
{
    struct dropout *dropout = arguments;
    td_status status = run_fill(&dropout->keep);
    return status ? status
                  : td_host_kernels()->dropout_grad(dropout->out, dropout->x, dropout->keep.out,
                                                    dropout->p, dropout->block);
}

td_status toy_kernel_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                             int64_t block, td_generator *generator)
{
    if (toy_is_missing("dropout"))
        return toy_unsupported("dropout", "any tensor");
    struct dropout dropout = {.keep = {.out = keep, .number = bernoulli, .a = 1 - p},
                              .out = out,
                              .x = x,
                              .p = p,
                              .block = block};
    td_status status = td_generator_take(generator, td_tensor_numel(keep),
                                         &dropout.keep.philox.seed, &dropout.keep.philox.offset);
    const void *tensors[] = {&dropout.keep.out, &dropout.out, &dropout.x};
    return status ? status
                  : toy_launch("dropout", run_dropout, &dropout, sizeof dropout, tensors, 3);
}
