/* Conversions between dtypes, and the kernels fill and copy.
 *
 * 14 dtypes would need 182 loops. Instead each dtype converts to and from f64 or, for integers, i64, and a
 * conversion is two passes over a block that stays in the cache. Only f64 to f16 or bf16, through f32, rounds
 * twice. The conversions between f32 and the halves, for mixed precision, and from bytes to f32 are direct. */
#include "tensor/cpu_convert.h"

#include "base/fail.h"
#include "base/half.h"
#include "tensor/cpu_each.h"
#include "tensor/vector.h"

#include <string.h>

#define BLOCK 512

/* ---- Halves ------------------------------------------------------------------------------------ */

TD__VECTOR void td__convert_half(float *to, const void *from, td_dtype dtype, int64_t count)
{
    float *restrict out = to;
    const uint16_t *restrict x = from;
    if (dtype == TD_BF16)
        for (int64_t i = 0; i < count; i++)
            out[i] = td__bf16_to_f32(x[i]);
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = td__f16_to_f32(x[i]);
}

TD__VECTOR void td__convert_to_half(void *to, td_dtype dtype, const float *from, int64_t count)
{
    uint16_t *restrict out = to;
    const float *restrict x = from;
    if (dtype == TD_BF16)
        for (int64_t i = 0; i < count; i++)
            out[i] = td__f32_to_bf16(x[i]);
    else
        for (int64_t i = 0; i < count; i++)
            out[i] = td__f32_to_f16(x[i]);
}

/* ---- To f64 and i64, and from there ------------------------------------------------------------ */

/* Elements of type T at every `step`-th place. */
#define READ(T, step, expression)                                                                  \
    do {                                                                                           \
        const T *restrict x = from;                                                                \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T value = x[(step)*i];                                                                 \
            to[i] = (expression);                                                                  \
        }                                                                                          \
    } while (0)

#define WRITE(T, expression)                                                                       \
    do {                                                                                           \
        T *restrict out = to;                                                                      \
        for (int64_t i = 0; i < count; i++)                                                        \
            out[i] = (T)(expression);                                                              \
    } while (0)

#define WRITE_COMPLEX(T)                                                                           \
    do {                                                                                           \
        T *restrict out = to;                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                      \
            out[2 * i] = (T)x[i];                                                                  \
            out[2 * i + 1] = 0;                                                                    \
        }                                                                                          \
    } while (0)

/* Floats and the real parts of complex numbers. */
static TD__VECTOR void read_f64(double *restrict to, const void *from, td_dtype dtype,
                                int64_t count)
{
    switch (dtype) {
    case TD_F32:
        READ(float, 1, value);
        break;
    case TD_F16:
        READ(uint16_t, 1, td__f16_to_f32(value));
        break;
    case TD_BF16:
        READ(uint16_t, 1, td__bf16_to_f32(value));
        break;
    case TD_COMPLEX64:
        READ(float, 2, value);
        break;
    case TD_COMPLEX128:
        READ(double, 2, value);
        break;
    default:
        READ(double, 1, value);
    }
}

/* Integers and bool; a u64 keeps its bits. */
static TD__VECTOR void read_i64(int64_t *restrict to, const void *from, td_dtype dtype,
                                int64_t count)
{
    switch (dtype) {
    case TD_I8:
        READ(int8_t, 1, value);
        break;
    case TD_U8:
        READ(uint8_t, 1, value);
        break;
    case TD_BOOL:
        READ(uint8_t, 1, value != 0);
        break;
    case TD_I16:
        READ(int16_t, 1, value);
        break;
    case TD_I32:
        READ(int32_t, 1, value);
        break;
    case TD_U32:
        READ(uint32_t, 1, value);
        break;
    default:
        READ(int64_t, 1, value);
    }
}

/* Truncates to a u64 or an i64. What fits neither becomes the minimum i64, so that every compiled version
 * agrees, and nothing is undefined. */
static inline uint64_t integer_of(double value)
{
    bool is_signed = value >= -0x1p63 && value < 0x1p63;
    bool is_large = value >= 0x1p63 && value < 0x1p64;
    int64_t low = (int64_t)(is_signed ? value : is_large ? value - 0x1p63 : -0x1p63);
    return (uint64_t)low + (is_large ? UINT64_C(1) << 63 : 0);
}

static TD__VECTOR void write_f64(void *to, td_dtype dtype, const double *restrict x, int64_t count)
{
    switch (dtype) {
    case TD_F32:
        WRITE(float, x[i]);
        break;
    case TD_F16:
        WRITE(uint16_t, td__f32_to_f16((float)x[i]));
        break;
    case TD_BF16:
        WRITE(uint16_t, td__f32_to_bf16((float)x[i]));
        break;
    case TD_COMPLEX64:
        WRITE_COMPLEX(float);
        break;
    case TD_COMPLEX128:
        WRITE_COMPLEX(double);
        break;
    case TD_BOOL:
        WRITE(uint8_t, x[i] != 0);
        break;
    case TD_I8:
    case TD_U8:
        WRITE(uint8_t, integer_of(x[i]));
        break;
    case TD_I16:
        WRITE(uint16_t, integer_of(x[i]));
        break;
    case TD_I32:
    case TD_U32:
        WRITE(uint32_t, integer_of(x[i]));
        break;
    case TD_I64:
    case TD_U64:
        WRITE(uint64_t, integer_of(x[i]));
        break;
    default:
        WRITE(double, x[i]);
    }
}

static TD__VECTOR void write_i64(void *to, td_dtype dtype, const int64_t *restrict x, int64_t count)
{
    switch (dtype) {
    case TD_F32:
        WRITE(float, x[i]);
        break;
    case TD_F64:
        WRITE(double, x[i]);
        break;
    case TD_F16:
        WRITE(uint16_t, td__f32_to_f16((float)x[i]));
        break;
    case TD_BF16:
        WRITE(uint16_t, td__f32_to_bf16((float)x[i]));
        break;
    case TD_COMPLEX64:
        WRITE_COMPLEX(float);
        break;
    case TD_COMPLEX128:
        WRITE_COMPLEX(double);
        break;
    case TD_BOOL:
        WRITE(uint8_t, x[i] != 0);
        break;
    case TD_I8:
    case TD_U8:
        WRITE(uint8_t, x[i]);
        break;
    case TD_I16:
        WRITE(uint16_t, x[i]);
        break;
    case TD_I32:
    case TD_U32:
        WRITE(uint32_t, x[i]);
        break;
    default:
        WRITE(uint64_t, x[i]);
    }
}

static bool is_integer(td_dtype dtype)
{
    return (dtype >= TD_I8 && dtype <= TD_U64) || dtype == TD_BOOL;
}

/* For u64 beyond the range of i64: directly to f32, which would otherwise be rounded twice, and to f64 for
 * other dtypes. */
static void read_u64(double *restrict to, const void *from, int64_t count)
{
    READ(uint64_t, 1, (double)value);
}

static void u64_to_f32(float *restrict to, const void *from, int64_t count)
{
    READ(uint64_t, 1, (float)value);
}

/* Where either part is not 0. */
static void complex_to_bool(void *to, const void *from, td_dtype from_dtype, int64_t count)
{
    uint8_t *restrict out = to;
    double parts[2];
    size_t size = td_dtype_size(from_dtype);
    for (int64_t i = 0; i < count; i++) {
        read_f64(parts, (const char *)from + (size_t)i * size,
                 from_dtype == TD_COMPLEX64 ? TD_F32 : TD_F64, 2);
        out[i] = parts[0] != 0 || parts[1] != 0;
    }
}

/* Small integers, which f32 represents exactly: images and masks. */
static TD__VECTOR void small_to_f32(float *restrict to, const void *from, td_dtype dtype,
                                    int64_t count)
{
    if (dtype == TD_U8)
        READ(uint8_t, 1, value);
    else if (dtype == TD_BOOL)
        READ(uint8_t, 1, value != 0);
    else
        READ(int8_t, 1, value);
}

static void convert_block(void *to, td_dtype to_dtype, const void *from, td_dtype from_dtype,
                          int64_t count)
{
    union {
        double f64[BLOCK];
        int64_t i64[BLOCK];
    } wide;
    if (from_dtype >= TD_COMPLEX64 && to_dtype == TD_BOOL) {
        complex_to_bool(to, from, from_dtype, count);
    } else if (from_dtype == TD_U64 && to_dtype == TD_F32) {
        u64_to_f32(to, from, count);
    } else if (from_dtype == TD_U64 && !is_integer(to_dtype)) {
        read_u64(wide.f64, from, count);
        write_f64(to, to_dtype, wide.f64, count);
    } else if (is_integer(from_dtype)) {
        read_i64(wide.i64, from, from_dtype, count);
        write_i64(to, to_dtype, wide.i64, count);
    } else {
        read_f64(wide.f64, from, from_dtype, count);
        write_f64(to, to_dtype, wide.f64, count);
    }
}

static void convert_complex(void *to, td_dtype to_dtype, const void *from, int64_t count)
{
    td_dtype part = to_dtype == TD_COMPLEX64 ? TD_F32 : TD_F64;
    td__convert(to, part, from, part == TD_F32 ? TD_F64 : TD_F32, 2 * count);
}

void td__convert(void *to, td_dtype to_dtype, const void *from, td_dtype from_dtype, int64_t count)
{
    bool complex = to_dtype >= TD_COMPLEX64 && from_dtype >= TD_COMPLEX64;
    if (to_dtype == from_dtype && to_dtype != TD_BOOL) {
        memcpy(to, from, (size_t)count * td_dtype_size(to_dtype));
    } else if (complex) {
        convert_complex(to, to_dtype, from, count);
    } else if (to_dtype == TD_F32 && td__is_half(from_dtype)) {
        td__convert_half(to, from, from_dtype, count);
    } else if (to_dtype == TD_F32 && td_dtype_size(from_dtype) == 1) {
        small_to_f32(to, from, from_dtype, count);
    } else if (from_dtype == TD_F32 && td__is_half(to_dtype)) {
        td__convert_to_half(to, to_dtype, from, count);
    } else {
        int64_t to_size = (int64_t)td_dtype_size(to_dtype);
        int64_t from_size = (int64_t)td_dtype_size(from_dtype);
        for (int64_t at = 0; at < count; at += BLOCK)
            convert_block((char *)to + at * to_size, to_dtype, (const char *)from + at * from_size,
                          from_dtype, count - at < BLOCK ? count - at : BLOCK);
    }
}

/* ---- The kernels ------------------------------------------------------------------------------- */

/* The largest integer of the dtype, plus one; the least is 0 where there is no sign, else -limit. */
static bool fits(td_dtype dtype, double value)
{
    bool is_signed = dtype == TD_I8 || dtype == TD_I16 || dtype == TD_I32 || dtype == TD_I64;
    int bits = (int)td_dtype_size(dtype) * 8 - is_signed;
    double limit = bits == 64 ? 0x1p64 : (double)(UINT64_C(1) << bits);
    double least = is_signed ? -limit : 0;
    /* Above least - 1: the fraction is cut off. For i64 there is no double between the two. */
    return value < limit && (value >= least || value > least - 1);
}

bool td__element_of(void *element, td_dtype dtype, double value)
{
    if (is_integer(dtype) && dtype != TD_BOOL && !fits(dtype, value))
        return false;
    td__convert(element, dtype, &value, TD_F64, 1);
    return true;
}

static void fill_row(void *const arrays[], int64_t count, const void *arg)
{
    int64_t size = *(const int64_t *)arg;
    memcpy(arrays[0], arrays[1], (size_t)(count * size));
}

td_status td__cpu_fill(td_tensor *out, double value)
{
    _Alignas(16) char element[16] = {0};
    td_dtype dtype = out->layout.dtype;
    if (!td__element_of(element, dtype, value))
        return td_fail(TD_ERR_INVALID, "fill: %g is not in the range of %s", value,
                       td_dtype_name(dtype));
    struct td__each_array arrays[] = {td__each_array(out), td__each_scalar(element, dtype)};
    int64_t size = (int64_t)td_dtype_size(dtype);
    td__each_run(&out->layout, arrays, 2, true, fill_row, &size);
    return TD_OK;
}

static void convert_row(void *const arrays[], int64_t count, const void *arg)
{
    const td_dtype *dtypes = arg;
    td__convert(arrays[0], dtypes[0], arrays[1], dtypes[1], count);
}

td_status td__cpu_copy(td_tensor *out, const td_tensor *x)
{
    if (td_tensor_data(out) == td_tensor_data(x) && out->layout.dtype == x->layout.dtype)
        return TD_OK;
    if (out->layout.dtype == x->layout.dtype) {
        td__layout_copy(&out->layout, td_tensor_data(out), &x->layout, td_tensor_data(x));
        return TD_OK;
    }
    struct td__each_array arrays[] = {td__each_array(out), td__each_array(x)};
    td_dtype dtypes[] = {out->layout.dtype, x->layout.dtype};
    td__each_run(&out->layout, arrays, 2, true, convert_row, dtypes);
    return TD_OK;
}
