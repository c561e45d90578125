/* Launches the kernels of binary.cu: operations on two operands, or on one and a number. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/elements_args.h"

static const char *const names[] = {
    [TD_BINARY_ADD] = "add",         [TD_BINARY_SUB] = "sub",
    [TD_BINARY_MUL] = "mul",         [TD_BINARY_DIV] = "div",
    [TD_BINARY_POW] = "pow",         [TD_BINARY_MAXIMUM] = "maximum",
    [TD_BINARY_MINIMUM] = "minimum", [TD_BINARY_EQ] = "eq",
    [TD_BINARY_NE] = "ne",           [TD_BINARY_LT] = "lt",
    [TD_BINARY_LE] = "le",           [TD_BINARY_GT] = "gt",
    [TD_BINARY_GE] = "ge",           [TD_BINARY_AND] = "logical_and",
    [TD_BINARY_OR] = "logical_or",   [TD_BINARY_XOR] = "logical_xor",
};

#define FLOATS(name)                                                                               \
    [TD_F32] = TD__CUDA_KERNEL(binary, #name "_f32"),                                              \
    [TD_F64] = TD__CUDA_KERNEL(binary, #name "_f64"),                                              \
    [TD_F16] = TD__CUDA_KERNEL(binary, #name "_f16"),                                              \
    [TD_BF16] = TD__CUDA_KERNEL(binary, #name "_bf16")

#define FLOAT_DTYPES 4 /* f32, f64, f16, bf16 */

static struct cuda_kernel floats[][FLOAT_DTYPES] = {
    [TD_BINARY_ADD] = {FLOATS(binary_add)},         [TD_BINARY_SUB] = {FLOATS(binary_sub)},
    [TD_BINARY_MUL] = {FLOATS(binary_mul)},         [TD_BINARY_DIV] = {FLOATS(binary_div)},
    [TD_BINARY_POW] = {FLOATS(binary_pow)},         [TD_BINARY_MAXIMUM] = {FLOATS(binary_maximum)},
    [TD_BINARY_MINIMUM] = {FLOATS(binary_minimum)},
};

/* One kernel for all operations of a dtype. */
#define OTHERS(name)                                                                               \
    [TD_I8] = TD__CUDA_KERNEL(binary, #name "_i8"),                                                \
    [TD_U8] = TD__CUDA_KERNEL(binary, #name "_u8"),                                                \
    [TD_I16] = TD__CUDA_KERNEL(binary, #name "_i16"),                                              \
    [TD_I32] = TD__CUDA_KERNEL(binary, #name "_i32"),                                              \
    [TD_I64] = TD__CUDA_KERNEL(binary, #name "_i64"),                                              \
    [TD_U32] = TD__CUDA_KERNEL(binary, #name "_u32"),                                              \
    [TD_U64] = TD__CUDA_KERNEL(binary, #name "_u64"),                                              \
    [TD_BOOL] = TD__CUDA_KERNEL(binary, #name "_bool"),                                            \
    [TD_COMPLEX64] = TD__CUDA_KERNEL(binary, #name "_complex64"),                                  \
    [TD_COMPLEX128] = TD__CUDA_KERNEL(binary, #name "_complex128")

static struct cuda_kernel others[CUDA_DTYPES] = {OTHERS(binary)};
static struct cuda_kernel comparisons[CUDA_DTYPES] = {FLOATS(compare), OTHERS(compare)};

static bool has_binary(td_binary op, td_dtype dtype)
{
    bool is_complex = dtype >= TD_COMPLEX64;
    switch (op) {
    case TD_BINARY_SUB:
    case TD_BINARY_DIV:
        return dtype != TD_BOOL;
    case TD_BINARY_POW:
        return dtype != TD_BOOL && !is_complex;
    case TD_BINARY_MAXIMUM:
    case TD_BINARY_MINIMUM:
    case TD_BINARY_LT:
    case TD_BINARY_LE:
    case TD_BINARY_GT:
    case TD_BINARY_GE:
        return !is_complex;
    default:
        return true;
    }
}

static struct cuda_kernel *kernel_of(td_binary op, td_dtype dtype, int *width)
{
    int size = (int)td_dtype_size(dtype);
    *width = CUDA_WIDTH(size);
    if (op >= TD_BINARY_EQ)
        return &comparisons[dtype];
    if (dtype <= TD_BF16)
        return &floats[op][dtype];
    if (dtype < TD_BOOL)
        *width = CUDA_INTEGER_WIDTH(size);
    return &others[dtype];
}

td_status td__cuda_binary(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b)
{
    int width;
    td_dtype dtype = td_tensor_dtype(a);
    struct cuda_kernel *kernel = kernel_of(op, dtype, &width);
    if (!has_binary(op, dtype))
        return td__cuda_unsupported();
    struct pair_args args = {.each = td__cuda_each((const td_tensor *[]){out, a, b}, 3, width),
                             .out = td_tensor_data(out),
                             .a = td_tensor_data(a),
                             .b = td_tensor_data(b),
                             .op = (int32_t)op};
    return td__cuda_launch_each(kernel, out, &args.each, &args);
}

/* Powers of floats by another operation; false if there is none. */
static bool simple_power(td_tensor *out, const td_tensor *a, double exponent, td_status *status)
{
    if (exponent == 0)
        *status = td__cuda_fill(out, 1);
    else if (exponent == 1)
        *status = td__cuda_copy(out, a);
    else if (exponent == 2)
        *status = td__cuda_unary(TD_UNARY_SQUARE, out, a);
    else if (exponent == 0.5)
        *status = td__cuda_unary(TD_UNARY_SQRT, out, a);
    else if (exponent == -0.5)
        *status = td__cuda_unary(TD_UNARY_RSQRT, out, a);
    else if (exponent == -1)
        *status = td__cuda_unary(TD_UNARY_RECIPROCAL, out, a);
    else
        return false;
    return true;
}

/* f32 with halves. */
td_status td__cuda_binary_mixed(td_binary op, td_tensor *out, const td_tensor *a,
                                const td_tensor *b)
{
    static struct cuda_kernel kernels[][2] = {
        [TD_BINARY_ADD] = {TD__CUDA_KERNEL(binary, "mixed_add_f16"),
                           TD__CUDA_KERNEL(binary, "mixed_add_bf16")},
        [TD_BINARY_SUB] = {TD__CUDA_KERNEL(binary, "mixed_sub_f16"),
                           TD__CUDA_KERNEL(binary, "mixed_sub_bf16")},
        [TD_BINARY_MUL] = {TD__CUDA_KERNEL(binary, "mixed_mul_f16"),
                           TD__CUDA_KERNEL(binary, "mixed_mul_bf16")},
    };
    bool reversed = td_tensor_dtype(a) != TD_F32;
    const td_tensor *single = reversed ? b : a, *half = reversed ? a : b;
    td_dtype dtype = td_tensor_dtype(half);
    if (op > TD_BINARY_MUL || td_tensor_dtype(single) != TD_F32 || td_tensor_dtype(out) != TD_F32 ||
        (dtype != TD_F16 && dtype != TD_BF16))
        return td__cuda_unsupported();
    struct pair_args args = {.each = td__cuda_each((const td_tensor *[]){out, single, half}, 3,
                                                   CUDA_WIDTH((int)sizeof(float))),
                             .out = td_tensor_data(out),
                             .a = td_tensor_data(single),
                             .b = td_tensor_data(half),
                             .op = reversed};
    return td__cuda_launch_each(&kernels[op][dtype == TD_BF16], out, &args.each, &args);
}

td_status td__cuda_binary_scalar(td_binary op, td_tensor *out, const td_tensor *a, double b,
                                 bool reversed)
{
    int width;
    td_dtype dtype = td_tensor_dtype(a);
    struct cuda_kernel *kernel = kernel_of(op, dtype, &width);
    td_status status;
    if (!has_binary(op, dtype))
        return td__cuda_unsupported();
    if (op == TD_BINARY_POW && !reversed && dtype <= TD_BF16 && simple_power(out, a, b, &status))
        return status;
    /* The tensor stands for the number's strides, too, which are not used. */
    struct pair_args args = {.each = td__cuda_each((const td_tensor *[]){out, a, a}, 3, width),
                             .out = td_tensor_data(out),
                             .a = reversed ? NULL : td_tensor_data(a),
                             .b = reversed ? td_tensor_data(a) : NULL,
                             .op = (int32_t)op};
    status = td__cuda_element(args.scalar, dtype, b, names[op]);
    return status ? status : td__cuda_launch_each(kernel, out, &args.each, &args);
}
