/* Launches the kernels of unary.cu: operations on one operand, and their gradients. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/elements_args.h"

#define FLOATS(name)                                                                               \
    {                                                                                              \
        [TD_F32] = TD__CUDA_KERNEL(unary, #name "_f32"),                                           \
        [TD_F64] = TD__CUDA_KERNEL(unary, #name "_f64"),                                           \
        [TD_F16] = TD__CUDA_KERNEL(unary, #name "_f16"),                                           \
        [TD_BF16] = TD__CUDA_KERNEL(unary, #name "_bf16"),                                         \
    }

#define FLOAT_DTYPES 4 /* f32, f64, f16, bf16 */

static struct cuda_kernel floats[][FLOAT_DTYPES] = {
    [TD_UNARY_NEG] = FLOATS(unary_neg),
    [TD_UNARY_ABS] = FLOATS(unary_abs),
    [TD_UNARY_SIGN] = FLOATS(unary_sign),
    [TD_UNARY_SQUARE] = FLOATS(unary_square),
    [TD_UNARY_EXP] = FLOATS(unary_exp),
    [TD_UNARY_LOG] = FLOATS(unary_log),
    [TD_UNARY_LOG1P] = FLOATS(unary_log1p),
    [TD_UNARY_SQRT] = FLOATS(unary_sqrt),
    [TD_UNARY_RSQRT] = FLOATS(unary_rsqrt),
    [TD_UNARY_RECIPROCAL] = FLOATS(unary_reciprocal),
    [TD_UNARY_SIN] = FLOATS(unary_sin),
    [TD_UNARY_COS] = FLOATS(unary_cos),
    [TD_UNARY_TANH] = FLOATS(unary_tanh),
    [TD_UNARY_SIGMOID] = FLOATS(unary_sigmoid),
    [TD_UNARY_RELU] = FLOATS(unary_relu),
    [TD_UNARY_GELU] = FLOATS(unary_gelu),
    [TD_UNARY_GELU_TANH] = FLOATS(unary_gelu_tanh),
    [TD_UNARY_SILU] = FLOATS(unary_silu),
    [TD_UNARY_FLOOR] = FLOATS(unary_floor),
    [TD_UNARY_CEIL] = FLOATS(unary_ceil),
    [TD_UNARY_ROUND] = FLOATS(unary_round),
    [TD_UNARY_ERF] = FLOATS(unary_erf),
};

static struct cuda_kernel gradients[TD_UNARY_ISNAN + 1][FLOAT_DTYPES] = {
    [TD_UNARY_ABS] = FLOATS(unary_grad_abs),
    [TD_UNARY_SQUARE] = FLOATS(unary_grad_square),
    [TD_UNARY_EXP] = FLOATS(unary_grad_exp),
    [TD_UNARY_LOG] = FLOATS(unary_grad_log),
    [TD_UNARY_LOG1P] = FLOATS(unary_grad_log1p),
    [TD_UNARY_SQRT] = FLOATS(unary_grad_sqrt),
    [TD_UNARY_RSQRT] = FLOATS(unary_grad_rsqrt),
    [TD_UNARY_RECIPROCAL] = FLOATS(unary_grad_reciprocal),
    [TD_UNARY_SIN] = FLOATS(unary_grad_sin),
    [TD_UNARY_COS] = FLOATS(unary_grad_cos),
    [TD_UNARY_TANH] = FLOATS(unary_grad_tanh),
    [TD_UNARY_SIGMOID] = FLOATS(unary_grad_sigmoid),
    [TD_UNARY_RELU] = FLOATS(unary_grad_relu),
    [TD_UNARY_GELU] = FLOATS(unary_grad_gelu),
    [TD_UNARY_GELU_TANH] = FLOATS(unary_grad_gelu_tanh),
    [TD_UNARY_SILU] = FLOATS(unary_grad_silu),
    [TD_UNARY_ERF] = FLOATS(unary_grad_erf),
};

/* One kernel for all operations of a dtype. */
#define NUMBERS(name)                                                                              \
    [TD_I8] = TD__CUDA_KERNEL(unary, #name "_i8"), [TD_U8] = TD__CUDA_KERNEL(unary, #name "_u8"),  \
    [TD_I16] = TD__CUDA_KERNEL(unary, #name "_i16"),                                               \
    [TD_I32] = TD__CUDA_KERNEL(unary, #name "_i32"),                                               \
    [TD_I64] = TD__CUDA_KERNEL(unary, #name "_i64"),                                               \
    [TD_U32] = TD__CUDA_KERNEL(unary, #name "_u32"),                                               \
    [TD_U64] = TD__CUDA_KERNEL(unary, #name "_u64"),                                               \
    [TD_COMPLEX64] = TD__CUDA_KERNEL(unary, #name "_complex64"),                                   \
    [TD_COMPLEX128] = TD__CUDA_KERNEL(unary, #name "_complex128")

static struct cuda_kernel others[CUDA_DTYPES] = {NUMBERS(unary)};
static struct cuda_kernel questions[CUDA_DTYPES] = {
    [TD_F32] = TD__CUDA_KERNEL(unary, "question_f32"),
    [TD_F64] = TD__CUDA_KERNEL(unary, "question_f64"),
    [TD_F16] = TD__CUDA_KERNEL(unary, "question_f16"),
    [TD_BF16] = TD__CUDA_KERNEL(unary, "question_bf16"),
    [TD_BOOL] = TD__CUDA_KERNEL(unary, "question_bool"),
    NUMBERS(question),
};

static bool has_other(td_unary op, td_dtype dtype)
{
    bool is_complex = dtype >= TD_COMPLEX64;
    return op == TD_UNARY_NEG || op == TD_UNARY_SQUARE ||
           (!is_complex && (op == TD_UNARY_ABS || op == TD_UNARY_SIGN || op == TD_UNARY_RELU));
}

/* NULL: there is none. */
static struct cuda_kernel *kernel_of(td_unary op, td_dtype dtype, int *width)
{
    int size = (int)td_dtype_size(dtype);
    *width = CUDA_WIDTH(size);
    if (op == TD_UNARY_NOT || op == TD_UNARY_ISNAN)
        return &questions[dtype];
    if (dtype <= TD_BF16)
        return &floats[op][dtype];
    if (dtype == TD_BOOL || !has_other(op, dtype))
        return NULL;
    if (dtype < TD_BOOL)
        *width = CUDA_INTEGER_WIDTH(size);
    return &others[dtype];
}

td_status td__cuda_unary(td_unary op, td_tensor *out, const td_tensor *x)
{
    int width;
    struct cuda_kernel *kernel = kernel_of(op, td_tensor_dtype(x), &width);
    if (!kernel)
        return td__cuda_unsupported();
    struct map_args args = {.each = td__cuda_each((const td_tensor *[]){out, x}, 2, width),
                            .out = td_tensor_data(out),
                            .x = td_tensor_data(x),
                            .op = (int32_t)op};
    return td__cuda_launch_each(kernel, out, &args.each, &args);
}

td_status td__cuda_unary_grad(td_unary op, td_tensor *grad_x, const td_tensor *grad_y,
                              const td_tensor *saved)
{
    td_dtype dtype = td_tensor_dtype(grad_x);
    if (op == TD_UNARY_NEG && dtype <= TD_BF16)
        return td__cuda_unary(op, grad_x, grad_y);
    if (dtype > TD_BF16 || !gradients[op][dtype].name)
        return td__cuda_unsupported();
    struct pair_args args = {.each = td__cuda_each((const td_tensor *[]){grad_x, grad_y, saved}, 3,
                                                   CUDA_WIDTH((int)td_dtype_size(dtype))),
                             .out = td_tensor_data(grad_x),
                             .a = td_tensor_data(grad_y),
                             .b = td_tensor_data(saved)};
    return td__cuda_launch_each(&gradients[op][dtype], grad_x, &args.each, &args);
}
