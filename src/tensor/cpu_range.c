/* Ranges; see cpu_range.h. */
#include "tensor/cpu_range.h"

#include "base/half.h"
#include "tensor/vector.h"

#include <math.h>

/* How many of `count` numbers of `size` bytes are in whole pairs of vectors, and where the vector of number i
 * begins. */
TD__INLINE int64_t whole_of(int64_t count, int64_t size)
{
    return count / (64 / size) * (64 / size);
}

TD__INLINE int64_t begin_of(int64_t i, int64_t whole, int64_t size)
{
    return i < whole ? i / (32 / size) * (32 / size) : i;
}

/* ---- From a start, in steps ------------------------------------------------------------------------ */

TD__VECTOR
static void arange_f32(float *out, int64_t count, double start, double step)
{
    int64_t whole = whole_of(count, sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = begin_of(i, whole, sizeof *out);
        float first = (float)fma(step, (double)begin, start);
        out[i] = (float)fma(step, (double)(i - begin), first);
    }
}

TD__VECTOR
static void arange_f64(double *out, int64_t count, double start, double step)
{
    int64_t whole = whole_of(count, sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = begin_of(i, whole, sizeof *out);
        out[i] = fma(step, (double)(i - begin), fma(step, (double)begin, start));
    }
}

TD__VECTOR
static void arange_bf16(uint16_t *out, int64_t count, float start, float step)
{
    int64_t whole = whole_of(count, sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = begin_of(i, whole, sizeof *out);
        float first = td__bf16_to_f32(td__f32_to_bf16(fmaf(step, (float)begin, start)));
        out[i] = td__f32_to_bf16(fmaf(step, (float)(i - begin), first));
    }
}

TD__VECTOR
static void arange_f16(uint16_t *out, int64_t count, float start, float step)
{
    int64_t whole = whole_of(count, sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = begin_of(i, whole, sizeof *out);
        float first = td__f16_to_f32(td__f32_to_f16(fmaf(step, (float)begin, start)));
        out[i] = td__f32_to_f16(fmaf(step, (float)(i - begin), first));
    }
}

void td__cpu_arange(void *out, td_dtype dtype, int64_t count, double start, double step)
{
    switch (dtype) {
    case TD_F32:
        arange_f32(out, count, start, step);
        return;
    case TD_F64:
        arange_f64(out, count, start, step);
        return;
    case TD_BF16:
        arange_bf16(out, count, (float)start, (float)step);
        return;
    case TD_F16:
        arange_f16(out, count, (float)start, (float)step);
        return;
    default:
        break;
    }
    uint64_t *whole = out, at = start < 0 ? (uint64_t)(int64_t)start : (uint64_t)start;
    for (int64_t i = 0; i < count; i++, at += (uint64_t)(int64_t)step)
        whole[i] = at;
}

/* ---- Between two ends ------------------------------------------------------------------------------ */

/* One number alone is the start. */
TD__INLINE int64_t steps_of(int64_t count)
{
    return count > 1 ? count - 1 : 1;
}

TD__INLINE bool is_near(int64_t begin, int64_t count)
{
    return begin < count / 2 || count == 1;
}

/* Number `begin`, from the end that is nearer. */
#define FIRST(FMA, REAL)                                                                           \
    (is_near(begin, count) ? FMA(step, (REAL)begin, start)                                         \
                           : FMA(-step, (REAL)(count - 1 - begin), end))

TD__VECTOR
static void linspace_f32(float *out, int64_t count, float start, float end)
{
    float step = (end - start) / (float)steps_of(count);
    int64_t whole = whole_of(count, sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = begin_of(i, whole, sizeof *out);
        out[i] = FIRST(fmaf, float) + step * (float)(i - begin);
    }
}

TD__VECTOR
static void linspace_f64(double *out, int64_t count, double start, double end)
{
    double step = (end - start) / (double)steps_of(count);
    int64_t whole = whole_of(count, sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = begin_of(i, whole, sizeof *out);
        out[i] = FIRST(fma, double) + step * (double)(i - begin);
    }
}

/* In halves each operation is rounded, and so is a number of steps. */
TD__INLINE float half_of(td_dtype dtype, float value)
{
    return dtype == TD_BF16 ? td__bf16_to_f32(td__f32_to_bf16(value))
                            : td__f16_to_f32(td__f32_to_f16(value));
}

static void linspace_half(uint16_t *out, td_dtype dtype, int64_t count, float start, float end)
{
    float step = half_of(dtype,
                         half_of(dtype, end - start) / half_of(dtype, (float)steps_of(count)));
    int64_t whole = whole_of(count, sizeof *out);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = begin_of(i, whole, sizeof *out);
        bool near = is_near(begin, count);
        float steps = half_of(dtype, (float)(near ? begin : count - 1 - begin));
        float way = half_of(dtype, step * steps);
        float first = half_of(dtype, near ? start + way : end - way);
        float more = half_of(dtype, step * (float)(i - begin));
        out[i] = dtype == TD_BF16 ? td__f32_to_bf16(first + more) : td__f32_to_f16(first + more);
    }
}

/* In f64, without the fraction: of the first number of a vector too. */
static double linspace_integer(int64_t i, int64_t size, int64_t count, double start, double end)
{
    double step = (end - start) / (double)steps_of(count);
    int64_t begin = begin_of(i, whole_of(count, size), size);
    double first = trunc(FIRST(fma, double));
    return first + step * (double)(i - begin);
}

static void linspace_integers(void *out, td_dtype dtype, int64_t count, double start, double end)
{
    int64_t size = (int64_t)td_dtype_size(dtype);
    for (int64_t i = 0; i < count; i++) {
        double value = linspace_integer(i, size, count, start, end);
        uint64_t bits = value < 0 ? (uint64_t)(int64_t)value : (uint64_t)value;
        switch (size) {
        case 1:
            ((uint8_t *)out)[i] = (uint8_t)bits;
            break;
        case 2:
            ((uint16_t *)out)[i] = (uint16_t)bits;
            break;
        case 4:
            ((uint32_t *)out)[i] = (uint32_t)bits;
            break;
        default:
            ((uint64_t *)out)[i] = bits;
        }
    }
}

void td__cpu_linspace(void *out, td_dtype dtype, int64_t count, double start, double end)
{
    switch (dtype) {
    case TD_F32:
        linspace_f32(out, count, (float)start, (float)end);
        break;
    case TD_F64:
        linspace_f64(out, count, start, end);
        break;
    case TD_BF16:
    case TD_F16:
        linspace_half(out, dtype, count, half_of(dtype, (float)start), half_of(dtype, (float)end));
        break;
    default:
        linspace_integers(out, dtype, count, trunc(start), trunc(end));
    }
}
