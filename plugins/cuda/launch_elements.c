/* Launches the kernels of elements.cu: fills, copies and conversions, choices, and sums with a factor. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/elements_args.h"

#include <math.h>
#include <string.h>

_Static_assert((int)CUDA_F32 == (int)TD_F32 && (int)CUDA_BF16 == (int)TD_BF16 &&
                   (int)CUDA_I8 == (int)TD_I8 && (int)CUDA_U64 == (int)TD_U64 &&
                   (int)CUDA_BOOL == (int)TD_BOOL && (int)CUDA_COMPLEX128 == (int)TD_COMPLEX128,
               "the numbers of td_dtype");

#define SIZES(name)                                                                                \
    {                                                                                              \
        TD__CUDA_KERNEL(elements, #name "_1"), TD__CUDA_KERNEL(elements, #name "_2"),              \
            TD__CUDA_KERNEL(elements, #name "_4"), TD__CUDA_KERNEL(elements, #name "_8"),          \
            TD__CUDA_KERNEL(elements, #name "_16"),                                                \
    }

static struct cuda_kernel fills[] = SIZES(fill), copies[] = SIZES(copy), choices[] = SIZES(where),
                          transposes[] = SIZES(transpose);

#define NUMBERS(name)                                                                              \
    [TD_F32] = TD__CUDA_KERNEL(elements, #name "_f32"),                                            \
    [TD_F64] = TD__CUDA_KERNEL(elements, #name "_f64"),                                            \
    [TD_F16] = TD__CUDA_KERNEL(elements, #name "_f16"),                                            \
    [TD_BF16] = TD__CUDA_KERNEL(elements, #name "_bf16"),                                          \
    [TD_I8] = TD__CUDA_KERNEL(elements, #name "_i8"),                                              \
    [TD_U8] = TD__CUDA_KERNEL(elements, #name "_u8"),                                              \
    [TD_I16] = TD__CUDA_KERNEL(elements, #name "_i16"),                                            \
    [TD_I32] = TD__CUDA_KERNEL(elements, #name "_i32"),                                            \
    [TD_I64] = TD__CUDA_KERNEL(elements, #name "_i64"),                                            \
    [TD_U32] = TD__CUDA_KERNEL(elements, #name "_u32"),                                            \
    [TD_U64] = TD__CUDA_KERNEL(elements, #name "_u64")
#define COMPLEX(name)                                                                              \
    [TD_COMPLEX64] = TD__CUDA_KERNEL(elements, #name "_complex64"), [TD_COMPLEX128] =              \
                                                                        TD__CUDA_KERNEL(           \
                                                                            elements,              \
                                                                            #name "_complex128")

static struct cuda_kernel conversions[CUDA_DTYPES] = {
    NUMBERS(convert), [TD_BOOL] = TD__CUDA_KERNEL(elements, "convert_bool"), COMPLEX(convert)};
static struct cuda_kernel clamps[CUDA_DTYPES] = {NUMBERS(clamp)};
static struct cuda_kernel scaled_sums[CUDA_DTYPES] = {NUMBERS(add_scaled), COMPLEX(add_scaled)};

/* The kernel for elements of a size: 1, 2, 4, 8 or 16 bytes. */
static struct cuda_kernel *of_size(struct cuda_kernel *kernels, td_dtype dtype)
{
    return &kernels[__builtin_ctz((unsigned)td_dtype_size(dtype))];
}

static int width_of(td_dtype dtype)
{
    size_t size = td_dtype_size(dtype);
    return (int)(dtype >= TD_I8 && dtype <= TD_U64 ? CUDA_INTEGER_WIDTH(size) : CUDA_WIDTH(size));
}

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

static bool is_integer(td_dtype dtype)
{
    return dtype >= TD_I8 && dtype <= TD_U64;
}

static bool is_signed(td_dtype dtype)
{
    return dtype == TD_I8 || dtype == TD_I16 || dtype == TD_I32 || dtype == TD_I64;
}

/* A fraction is cut off first. */
static bool fits(td_dtype dtype, double value)
{
    int bits = (int)td_dtype_size(dtype) * 8 - is_signed(dtype);
    double limit = ldexp(1, bits), least = is_signed(dtype) ? -limit : 0;
    return value < limit && (value >= least || value > least - 1);
}

td_status td__cuda_element(void *element, td_dtype dtype, double value, const char *name)
{
    float single = (float)value;
    if (is_integer(dtype)) {
        if (!fits(dtype, value))
            return td_fail(TD_ERR_INVALID, "%s: the number %g is not in the range of %s", name,
                           value, td_dtype_name(dtype));
        /* The lower bytes of a number are the first. */
        uint64_t bits = is_signed(dtype) ? (uint64_t)(int64_t)value : (uint64_t)value;
        memcpy(element, &bits, td_dtype_size(dtype));
        return TD_OK;
    }
    switch (dtype) {
    case TD_F16:
    case TD_BF16:
        memcpy(element,
               &(uint16_t){dtype == TD_F16 ? td_f32_to_f16(single) : td_f32_to_bf16(single)}, 2);
        break;
    case TD_BOOL:
        memcpy(element, &(uint8_t){value != 0}, 1);
        break;
    case TD_F32:
        memcpy(element, &single, 4);
        break;
    case TD_COMPLEX64:
        memcpy(element, (float[]){single, 0}, 8);
        break;
    case TD_COMPLEX128:
        memcpy(element, (double[]){value, 0}, 16);
        break;
    default:
        memcpy(element, &value, 8);
    }
    return TD_OK;
}

/* ---- Fills ----------------------------------------------------------------------------------------------------- */

td_status td__cuda_fill(td_tensor *out, double value)
{
    td_dtype dtype = td_tensor_dtype(out);
    struct fill_args args = {
        .each = td__cuda_each((const td_tensor *[]){out}, 1, CUDA_WIDTH((int)td_dtype_size(dtype))),
        .out = td_tensor_data(out)};
    td_status status = td__cuda_element(args.value, dtype, value, "fill");
    return status ? status : td__cuda_launch_each(of_size(fills, dtype), out, &args.each, &args);
}

/* ---- Copies ---------------------------------------------------------------------------------------------------- */

#define USUAL(to, from)                                                                            \
    [TD_##to][TD_##from] = TD__CUDA_KERNEL(elements, "convert_" NAME_##to "_" NAME_##from)
#define NAME_F32 "f32"
#define NAME_F64 "f64"
#define NAME_F16 "f16"
#define NAME_BF16 "bf16"
#define NAME_U8 "u8"
#define NAME_I32 "i32"
#define NAME_I64 "i64"
#define NAME_BOOL "bool"

/* Conversions with kernels of their own; elements.cu has the same list. */
static struct cuda_kernel usual[CUDA_DTYPES][CUDA_DTYPES] = {
    USUAL(F16, F32),  USUAL(BF16, F32), USUAL(F32, F16),  USUAL(F32, BF16),
    USUAL(BF16, F16), USUAL(F16, BF16), USUAL(F32, F64),  USUAL(F64, F32),
    USUAL(F32, U8),   USUAL(F32, BOOL), USUAL(F16, BOOL), USUAL(BF16, BOOL),
    USUAL(F32, I32),  USUAL(F32, I64),  USUAL(I64, I32),  USUAL(I64, BOOL),
};

static td_status convert(td_tensor *out, const td_tensor *x)
{
    td_dtype to = td_tensor_dtype(out), from = td_tensor_dtype(x);
    size_t to_size = td_dtype_size(to), from_size = td_dtype_size(from);
    struct cuda_kernel *kernel = &usual[to][from];
    int width = CUDA_WIDTH((int)(to_size > from_size ? to_size : from_size));
    if (!kernel->name) {
        kernel = &conversions[to];
        width = 1;
    }
    struct map_args args = {.each = td__cuda_each((const td_tensor *[]){out, x}, 2, width),
                            .out = td_tensor_data(out),
                            .x = td_tensor_data(x),
                            .op = (int32_t)from};
    return td__cuda_launch_each(kernel, out, &args.each, &args);
}

/* Takes dimension d out of the space. */
static void drop_dimension(struct cuda_space *space, int d)
{
    for (; d + 1 < space->ndim; d++) {
        space->size[d] = space->size[d + 1];
        for (int t = 0; t < 2; t++)
            space->stride[t][d] = space->stride[t][d + 1];
    }
    space->ndim--;
}

/* Whether a copy is a transposition that gains by tiles: neighbours of x are elsewhere than those of out. */
static bool is_transposition(const struct cuda_space *space, int *other)
{
    if (space->ndim < 2 || space->stride[0][0] != 1 || space->stride[1][0] <= 1 ||
        space->count / (TRANSPOSE_ROWS * TRANSPOSE_ROWS) > INT32_MAX) /* blocks of a grid */
        return false;
    for (*other = 1; *other < space->ndim; ++*other)
        if (space->stride[1][*other] == 1)
            return space->size[0] >= TRANSPOSE_ROWS && space->size[*other] >= TRANSPOSE_ROWS;
    return false;
}

static td_status transpose(td_tensor *out, const td_tensor *x, const struct cuda_space *space,
                           int other)
{
    struct transpose_args args = {.batch = *space,
                                  .out = td_tensor_data(out),
                                  .x = td_tensor_data(x),
                                  .rows = space->size[other],
                                  .columns = space->size[0],
                                  .out_stride = space->stride[0][other],
                                  .x_stride = space->stride[1][0]};
    drop_dimension(&args.batch, other);
    drop_dimension(&args.batch, 0);
    args.batch.count = space->count / args.rows / args.columns;
    args.batch.plain = 0;
    args.row_tiles = (args.rows + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
    args.column_tiles = (args.columns + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
    struct cuda_grid grid = {
        .blocks = {(unsigned)(args.batch.count * args.row_tiles * args.column_tiles)},
        .threads = TRANSPOSE_TILE * TRANSPOSE_ROWS};
    return td__cuda_launch(of_size(transposes, td_tensor_dtype(out)), out, grid, &args);
}

td_status td__cuda_copy(td_tensor *out, const td_tensor *x)
{
    td_dtype dtype = td_tensor_dtype(out);
    if (dtype != td_tensor_dtype(x))
        return convert(out, x);
    if (td_tensor_data(out) == td_tensor_data(x) || td_tensor_numel(out) == 0)
        return TD_OK;
    struct map_args args = {.each = td__cuda_each((const td_tensor *[]){out, x}, 2,
                                                  CUDA_WIDTH((int)td_dtype_size(dtype))),
                            .out = td_tensor_data(out),
                            .x = td_tensor_data(x)};
    int other;
    if (args.each.width == 1 && is_transposition(&args.each.space, &other))
        return transpose(out, x, &args.each.space, other);
    return td__cuda_launch_each(of_size(copies, dtype), out, &args.each, &args);
}

/* ---- Choices ---------------------------------------------------------------------------------------------------- */

td_status td__cuda_where(td_tensor *out, const td_tensor *condition, const td_tensor *a,
                         const td_tensor *b)
{
    td_dtype dtype = td_tensor_dtype(out);
    struct where_args args = {.each = td__cuda_each((const td_tensor *[]){out, condition, a, b}, 4,
                                                    CUDA_WIDTH((int)td_dtype_size(dtype))),
                              .out = td_tensor_data(out),
                              .condition = td_tensor_data(condition),
                              .a = td_tensor_data(a),
                              .b = td_tensor_data(b)};
    return td__cuda_launch_each(of_size(choices, dtype), out, &args.each, &args);
}

/* The bounds of an integer are rounded inwards, and limited to the range of its dtype. `from` is its least number, and
 * `to` 1 more than its greatest one, which may have no number of its own in f64. */
static int64_t bound_of(double bound, double from, double to, bool is_unsigned)
{
    if (bound <= from)
        return is_unsigned ? 0 : (int64_t)from;
    if (bound >= to)
        return to >= 0x1p64 ? -1 : (int64_t)((uint64_t)to - 1);
    return is_unsigned ? (int64_t)(uint64_t)bound : (int64_t)bound;
}

td_status td__cuda_clamp(td_tensor *out, const td_tensor *x, double low, double high)
{
    td_dtype dtype = td_tensor_dtype(x);
    if (dtype >= TD_BOOL)
        return td__cuda_unsupported();
    if (isnan(low) || isnan(high))
        return td_fail(TD_ERR_INVALID, "clamp: a bound is NaN");
    struct map_args args = {
        .each = td__cuda_each((const td_tensor *[]){out, x}, 2, width_of(dtype)),
        .out = td_tensor_data(out),
        .x = td_tensor_data(x),
        .low = low,
        .high = high};
    if (is_integer(dtype)) {
        bool no_sign = !is_signed(dtype);
        double to = ldexp(1, (int)td_dtype_size(dtype) * 8 - !no_sign), from = no_sign ? 0 : -to;
        args.least = bound_of(ceil(low), from, to, no_sign);
        args.most = bound_of(floor(high), from, to, no_sign);
    }
    return td__cuda_launch_each(&clamps[dtype], out, &args.each, &args);
}

/* ---- Sums with a factor ------------------------------------------------------------------------------------------ */

td_status td__cuda_add_scaled(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha)
{
    td_dtype dtype = td_tensor_dtype(a);
    struct cuda_kernel *kernel = &scaled_sums[dtype];
    if (!kernel->name)
        return td__cuda_unsupported();
    struct pair_args args = {
        .each = td__cuda_each((const td_tensor *[]){out, a, b}, 3, width_of(dtype)),
        .out = td_tensor_data(out),
        .a = td_tensor_data(a),
        .b = td_tensor_data(b),
        .alpha = alpha};
    td_status status = is_integer(dtype)
                           ? td__cuda_element(&args.whole_alpha, TD_I64, alpha, "add_scaled")
                           : TD_OK;
    return status ? status : td__cuda_launch_each(kernel, out, &args.each, &args);
}
