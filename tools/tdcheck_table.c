/* The table: one row an operator. A new operator is one row here, and a few lines in tdcheck_calls.c if it takes more than
 * tensors and a number. */
#include "tdcheck_calls.h"
#include "tdcheck_own.h"

/* Elementwise: no dimension, no element, one, primes, more than a vector, 8 dimensions, more than a tile. */
#define ONE ".; 0; 1; 7; 3x0x2; 2x3x5; 17x33; 2x1x3x1x2x1x2x3; 4099"
#define TWO                                                                                        \
    ". .; 7 7; 0 1; 3x1 1x5; 2x3x5 5; 5 2x3x5; . 4x3; 17x33 17x33; "                               \
    "2x1x3x1x2x1x2x3 1x2x1x1x2x1x1x1; 4099 4099; 4099 1"
#define INTO ". .; 7 7; 0x3 3; 3x5 5; 3x5 3x1; 2x3x5 .; 17x33 33; 2x1x3x1x2x1x2x3 2x3; 4099 4099"
#define IMAGE                                                                                      \
    "2x3x7x5 : 3 3 1 1 1 1 1 0; 1x1x4x4 : 2 2 0 0 0 0 1 0; 3x8x9 : 3 2 2 2 1 1 1 1; "              \
    "0x2x6x6 : 2 2 0 0 0 0 1 0; 2x17x13x11 : 2 3 2 1 0 1 1 1; 3x7x9 : 3 3 1 1 1 1 1 0"
#define LOSS                                                                                       \
    "7x3 7x3 : 0 0; 7x3 7x3 : 0 1; 7x3 7x3 : 0 2; 4099 4099 : 0 0; 2x3x5 2x3x5 : 0 2; 1 1 : 0 0"
#define CLASSES                                                                                    \
    "7x5 7 - : 5 0; 7x5 7 5 : 5 0; 7x5 7 5 : 5 1; 7x5 7 - : 5 2; 2x3x4x5 2x4x5 3 : 3 0 1; "        \
    "33x17 33 17 : 17 0 4; 1x1 1 - : 1 0"
#define SOFTMAX                                                                                    \
    "7 : 0; 3x5 : 1; 3x5 : 0; 2x3x5 : 1; 1x1 : 0; 17x133 : 1; 0x3 : 1; 5x12 : 1; 3x516 : 1; "      \
    "2x900 : 1; 2x1284 : 1"

/* Rows by a warp and by a block, of odd lengths, with a part of a vector at both ends; many positions. */
#define LOGITS                                                                                      \
    "5x300 5 300 : 300 0 7; 3x2501 3 2501 : 2501 2 7; 3x2504 3 - : 2504 0; 2x40003 2 - : 40003 1; " \
    "2x33x7x19 2x7x19 33 : 33 0 3"

#define UNARY(op, dtypes_, flags_, values_)                                                        \
    {                                                                                              \
        .name = #op, .tensor1 = td_##op, .dtypes = (dtypes_), .flags = (flags_),                   \
        .values = values_, .shapes = ONE                                                           \
    }
#define BINARY(op, dtypes_, flags_, values_)                                                       \
    {                                                                                              \
        .name = #op, .tensor2 = td_##op, .dtypes = (dtypes_), .flags = (flags_),                   \
        .values = values_, .shapes = TWO                                                           \
    }
#define SCALAR(op, dtypes_, flags_, values_, number_)                                              \
    {                                                                                              \
        .name = #op, .scalar = td_##op, .dtypes = (dtypes_), .flags = (flags_), .values = values_, \
        .shapes = ONE, .number = (number_)                                                         \
    }
#define CALLS(op, dtypes_, flags_, values_, shapes_)                                               \
    {                                                                                              \
        .name = #op, .call = check_##op, .dtypes = (dtypes_), .flags = (flags_),                   \
        .values = values_, .shapes = shapes_                                                       \
    }
#define OWN(op, dtypes_)                                                                           \
    {                                                                                              \
        .name = #op, .own = check_##op, .dtypes = (dtypes_)                                        \
    }

#define ALL ALL_DTYPES
#define REAL (NUMBERS | BIT(TD_BOOL))
#define ARITHMETIC (NUMBERS | COMPLEX)
#define COMPARES (CHECK_EXACT | CHECK_NO_GRAD | CHECK_SPECIAL)
#define VIEW CHECK_BITS
#define IN_PLACE (CHECK_IN_PLACE | CHECK_SPECIAL)

const struct check_row check_rows[] = {
    /* Copies and views. */
    UNARY(clone, ALL, VIEW | CHECK_SPECIAL, "n"),
    UNARY(contiguous, ALL, VIEW, "n"),
    CALLS(
        to_dtype, ALL, CHECK_EXACT, "n",
        "2x3x5 : 0; 2x3x5 : 1; 2x3x5 : 2; 2x3x5 : 3; 2x3x5 : 4; 2x3x5 : 5; 2x3x5 : 6; 4099 : 0; 4099 : 3; 0 : 1"),
    CALLS(transpose, ALL, VIEW, "n",
          "2x3 : 0 1; 2x3x5 : 0 2; 17x33x1 : 0 1; 0x3 : 0 1; 65x63 : 0 1"),
    CALLS(permute, ALL, VIEW, "n", "2x3x5 : 2 0 1; 3x5 : 1 0; 2x1x3x1x2x1x2x3 : 7 3 1 5 0 2 6 4"),
    CALLS(narrow, ALL, VIEW, "n", "7 : 0 2 3; 3x5 : 1 1 3; 3x5 : 0 -2 2; 4 : 0 4 0"),
    CALLS(select, ALL, VIEW, "n", "7 : 0 3; 3x5 : 1 2; 2x3x5 : 0 -1"),
    CALLS(slice, ALL, VIEW, "n", "7 : 0 1 6 2; 3x5 : 1 0 5 3; 2x3x5 : 2 -3 5 1; 5 : 0 4 2 1"),
    CALLS(reshape, ALL, VIEW, "n",
          "2x6 : 3 4; 2x3x5 : 30; 2x3x5 : 5 -1; 7 : 7 1; 1 : 1 1 1; 0x3 : 3 0"),
    CALLS(flatten, ALL, VIEW, "n", "2x3x5 : 1 2; 2x3x5 : 0 -1; 7 : 0 0"),
    CALLS(expand, ALL, CHECK_BITS | CHECK_NO_GRAD, "n", "3x1 : 3 5; 1x5 : 2 7 5; . : 3; 1x0 : 4 0"),
    {.name = "expand_grad",
     .call = check_expand,
     .dtypes = FLOATS,
     .flags = CHECK_ABSOLUTE,
     .values = "n",
     .shapes = "3x1 : 3 5; 1x5 : 2 7 5; . : 3; 1x0 : 4 0; 1 : 4099"},
    CALLS(squeeze, ALL, VIEW, "n", "2x3 : 0; 2x3 : 2; 7 : 1"),
    CALLS(split, ALL, VIEW, "n", "7x3 : 0 2; 7x3 : 1 5; 2x9 : 1 3"),
    CALLS(split_heads, FLOATS, VIEW, "n",
          "2x5x12 : 3 2; 1x7x8 : 1 4; 3x4x10 : 2 1; 3x5x9 : 3 3; 1x33x9 : 1 3"),
    CALLS(cat, ALL, VIEW, "nnn",
          "2x3 4x3 1x3 : 0; 2x3 2x1 2x5 : 1; 2x3 0x3 1x3 : 0; 2x3x5 2x3x5 2x3x1 : -1"),
    CALLS(stack, ALL, VIEW, "nnn", "3x5 3x5 3x5 : 0; 3x5 3x5 3x5 : 2; . . . : 0"),
    CALLS(tril, ALL, VIEW, "n", "5x5 : 0; 3x7 : -1; 2x4x3 : 1; 0x3 : 0"),
    CALLS(triu, ALL, VIEW, "n", "5x5 : 0; 3x7 : 2; 2x4x3 : -1"),
    CALLS(full, ALL, CHECK_BITS | CHECK_NO_GRAD, "n", ". : 1; 7 : 3; 2x3x5 : 1; 0 : 2; 4099 : 5"),
    CALLS(arange, NUMBERS, CHECK_EXACT | CHECK_NO_GRAD | CHECK_PLAIN, "n",
          "1 : 0 7 1; 1 : 3 90 4; 1 : 0 0 1"),
    CALLS(linspace, FLOATS, CHECK_EXACT | CHECK_NO_GRAD | CHECK_PLAIN, "n",
          "1 : -1 1 33; 1 : 0 5 1; 1 : 2 3 0"),
    OWN(transfers, ALL),
    OWN(pinned_copies, ALL),
    OWN(devices, ALL),
    OWN(streams, FLOATS),
    OWN(item, ALL & ~COMPLEX),

    /* Arithmetic. */
    CALLS(
        mixed, BIT(TD_F32), CHECK_EXACT, "nn",
        "7 7 : 0 0 0; 7 7 : 0 1 1; 4099 4099 : 1 0 0; 17x33 17x33 : 1 1 1; 4099 4099 : 2 1 0; 3x8 3x8 : 2 0 1"),
    BINARY(add, ALL, CHECK_ABSOLUTE | CHECK_SPECIAL, "nn"),
    BINARY(sub, ARITHMETIC, CHECK_ABSOLUTE | CHECK_SPECIAL, "nn"),
    BINARY(mul, ALL, CHECK_ABSOLUTE | CHECK_SPECIAL, "nn"),
    BINARY(div, ARITHMETIC, CHECK_ABSOLUTE | CHECK_SPECIAL, "np"),
    BINARY(pow, FLOATS, CHECK_ABSOLUTE, "pn"),
    {.name = "pow_integers",
     .tensor2 = td_pow,
     .dtypes = INTEGERS,
     .flags = CHECK_EXACT,
     .values = "ni",
     .shapes = TWO},
    BINARY(maximum, REAL, CHECK_EXACT | CHECK_SPECIAL | CHECK_CANCELS, "nn"),
    BINARY(minimum, REAL, CHECK_EXACT | CHECK_SPECIAL | CHECK_CANCELS, "ii"),
    CALLS(add_scaled, ARITHMETIC, CHECK_ABSOLUTE | CHECK_SPECIAL, "nn",
          "7 7 : 3; 3x1 1x5 : -2; 4099 4099 : 2; 2x3x5 5 : 1"),
    SCALAR(add_scalar, ARITHMETIC, CHECK_SPECIAL, "n", 3),
    SCALAR(sub_scalar, ARITHMETIC, CHECK_SPECIAL, "n", 2),
    SCALAR(mul_scalar, ARITHMETIC, CHECK_SPECIAL, "n", 3),
    SCALAR(div_scalar, ARITHMETIC, CHECK_SPECIAL, "n", 3),
    SCALAR(pow_scalar, NUMBERS, 0, "p", 3),
    SCALAR(rsub_scalar, ARITHMETIC & ~BIT(TD_U8), CHECK_SPECIAL, "n", 2),
    SCALAR(rdiv_scalar, ARITHMETIC, CHECK_SPECIAL, "p", 2),
    UNARY(neg, ARITHMETIC, CHECK_EXACT | CHECK_SPECIAL, "n"),
    UNARY(abs, NUMBERS, CHECK_EXACT | CHECK_SPECIAL, "n"),
    UNARY(square, ARITHMETIC, CHECK_SPECIAL, "n"),
    UNARY(exp, FLOATS, CHECK_SPECIAL, "n"),
    UNARY(ln, FLOATS, CHECK_SPECIAL, "p"),
    UNARY(log1p, FLOATS, CHECK_SPECIAL, "p"),
    UNARY(sqrt, FLOATS, CHECK_SPECIAL, "p"),
    UNARY(rsqrt, FLOATS, CHECK_SPECIAL, "p"),
    UNARY(reciprocal, FLOATS, CHECK_SPECIAL, "p"),
    UNARY(sin, FLOATS, CHECK_LARGEST, "n"),
    UNARY(cos, FLOATS, CHECK_LARGEST, "n"),
    UNARY(erf, FLOATS, CHECK_SPECIAL, "n"),
    CALLS(clamp, NUMBERS, CHECK_EXACT | CHECK_SPECIAL, "n",
          "7 : 0 1; 2x3x5 : 0 1; . : 0 0; 4099 : 0 1"),
    UNARY(sign, NUMBERS, CHECK_EXACT | CHECK_SPECIAL, "n"),
    UNARY(floor, FLOATS, CHECK_EXACT | CHECK_SPECIAL, "n"),
    UNARY(ceil, FLOATS, CHECK_EXACT | CHECK_SPECIAL, "n"),
    UNARY(round, FLOATS, CHECK_EXACT | CHECK_SPECIAL, "n"),

    /* Comparison. */
    BINARY(eq, ALL, COMPARES, "ii"),
    BINARY(ne, ALL, COMPARES, "ii"),
    BINARY(lt, REAL, COMPARES, "ii"),
    BINARY(le, REAL, COMPARES, "ii"),
    BINARY(gt, REAL, COMPARES, "ii"),
    BINARY(ge, REAL, COMPARES, "ii"),
    SCALAR(eq_scalar, NUMBERS, COMPARES, "i", 1),
    SCALAR(ne_scalar, NUMBERS, COMPARES, "i", 1),
    SCALAR(lt_scalar, NUMBERS, COMPARES, "i", 1),
    SCALAR(le_scalar, NUMBERS, COMPARES, "i", 1),
    SCALAR(gt_scalar, NUMBERS, COMPARES, "i", 1),
    SCALAR(ge_scalar, NUMBERS, COMPARES, "i", 1),
    BINARY(logical_and, ALL, COMPARES, "ii"),
    BINARY(logical_or, ALL, COMPARES, "ii"),
    BINARY(logical_xor, ALL, COMPARES, "ii"),
    UNARY(logical_not, ALL, COMPARES, "i"),
    UNARY(isnan, ALL, COMPARES, "n"),
    OWN(equal, ALL),
    CALLS(where, ALL, CHECK_EXACT | CHECK_SPECIAL, "bnn",
          "7 7 7; 3x1 1x5 3x5; . 2x3x5 5; 4099 4099 1; 0 0 1"),
    CALLS(masked_fill, NUMBERS, CHECK_EXACT | CHECK_SPECIAL, "nb",
          "7 7 : 3; 3x5 5 : 2; 2x3x5 3x1 : 0; 4099 4099 : 1"),

    /* Reductions. The gradient of td_prod() counts the zeros on the host, and waits for that. */
    UNARY(sum, ALL, CHECK_ABSOLUTE, "n"),
    UNARY(mean, FLOATS, CHECK_ABSOLUTE, "n"),
    {.name = "prod",
     .tensor1 = td_prod,
     .dtypes = FLOATS | INTEGERS,
     .flags = CHECK_ABSOLUTE,
     .values = "p",
     .shapes = ".; 0; 1; 7; 2x3x5",
     .tolerance = 64},
    {.name = "max",
     .tensor1 = td_max,
     .dtypes = NUMBERS,
     .flags = CHECK_EXACT | CHECK_SPECIAL,
     .values = "i",
     .shapes = ".; 1; 7; 2x3x5; 4099"},
    {.name = "min",
     .tensor1 = td_min,
     .dtypes = NUMBERS,
     .flags = CHECK_EXACT | CHECK_SPECIAL,
     .values = "i",
     .shapes = ".; 1; 7; 2x3x5; 4099"},
    CALLS(
        sum_dims, ALL, CHECK_ABSOLUTE, "n",
        "2x3x5 : 0 1; 2x3x5 : 1 0 2; 17x33 : 1 0; 3x0x2 : 0 1; 65x129 : 0 1; 7 : 0; 2x1x3x1x2x1x2x3 : 1 0 2 4 7"),
    CALLS(mean_dims, FLOATS, CHECK_ABSOLUTE, "n",
          "2x3x5 : 0 1; 2x3x5 : 1 0 2; 17x33 : 1 0; 65x129 : 0 1; 3x1032 : 0 1; 2x16392 : 0 1; "
          "1x40003 : 0 0 1; 250x264 : 0 0"),
    {.name = "var_dims",
     .call = check_var_dims,
     .dtypes = FLOATS,
     .flags = CHECK_LARGEST,
     .values = "n",
     .shapes = "2x3x5 : 1 1; 2x3x5 : 0 0 2; 17x33 : 1 0; 65x129 : 1 1",
     .tolerance = 32},
    CALLS(max_dim, NUMBERS, CHECK_EXACT | CHECK_SPECIAL, "i",
          "7 : 0 0; 3x5 : 0 1; 3x5 : 1 0; 2x3x5 : 1 0; 17x33 : -1 0"),
    CALLS(min_dim, NUMBERS, CHECK_EXACT | CHECK_SPECIAL, "i",
          "7 : 0 0; 3x5 : 0 1; 3x5 : 1 0; 2x3x5 : 1 0; 17x33 : -1 0"),
    CALLS(argmax, NUMBERS, COMPARES, "i", "7 : 0 0; 3x5 : 0 1; 2x3x5 : 1 0; 17x33 : -1 0"),
    CALLS(argmin, NUMBERS, COMPARES, "i", "7 : 0 0; 3x5 : 0 1; 2x3x5 : 1 0; 17x33 : -1 0"),
    UNARY(norm, FLOATS, CHECK_LARGEST, "n"),
    UNARY(all, ALL, COMPARES, "i"),
    UNARY(any, ALL, COMPARES, "i"),

    /* Products. */
    {.name = "matmul",
     .tensor2 = td_matmul,
     .dtypes = FLOATS,
     .flags = CHECK_ABSOLUTE,
     .values = "nn",
     .shapes =
         "2x3 3x4; 1x1 1x1; 7 7; 7 7x3; 3x7 7; 0x3 3x2; 3x0 0x2; 17x33 33x7; 5x2x3 5x3x4; 2x1x2x3 3x3x2; "
         "65x129 129x67"},
    {.name = "bmm",
     .tensor2 = td_bmm,
     .dtypes = FLOATS,
     .flags = CHECK_ABSOLUTE,
     .values = "nn",
     .shapes = "5x2x3 5x3x4; 1x7x1 1x1x7; 0x2x3 0x3x2; 3x17x5 3x5x33"},
    CALLS(linear, FLOATS, CHECK_ABSOLUTE, "nnn",
          "5x3 4x3 4; 5x3 4x3 -; 2x3x7 5x7 5; 7 3x7 3; 0x3 4x3 4; 33x65 17x65 17"),
    {.name = "linear_autocast",
     .call = check_linear_autocast,
     .dtypes = BIT(TD_F32),
     .flags = CHECK_ABSOLUTE,
     .values = "nnn",
     .tolerance = 4 * 65536, /* units of f32: 4 of bf16 */
     .shapes =
         "5x3 4x3 4; 16x8 24x8 24; 2x8x40 16x40 -; 33x65 17x65 17; 0x8 8x8 8; 48x64 64x64 64"},
    CALLS(
        mlp, FLOATS, CHECK_ABSOLUTE, "nnnnn",
        "5x3 4x3 4 2x4 2; 2x3x7 8x7 8 5x8 5; 0x3 8x3 8 4x8 4; 33x17 40x17 40 24x40 24; 16x8 16x8 16 8x16 8"),
    CALLS(
        conv2d, FLOATS, CHECK_ABSOLUTE, "nnn",
        "2x3x7x5 4x3x3x3 4 : 1 1 1 1 1 1 1; 1x2x5x5 2x2x1x1 - : 1 1 0 0 1 1 1; 2x4x9x8 6x2x3x2 6 : 2 1 1 0 1 2 2; "
        "3x6x6 3x3x2x2 3 : 2 2 0 0 1 1 1; 2x4x5x5 4x1x3x3 4 : 1 1 1 1 1 1 4; 0x3x5x5 2x3x3x3 2 : 1 1 0 0 1 1 1; "
        "2x17x13x11 19x17x3x3 19 : 1 1 1 1 1 1 1"),

    /* Pooling. */
    CALLS(max_pool2d, FLOATS, CHECK_EXACT, "n", IMAGE),
    CALLS(avg_pool2d, FLOATS, CHECK_ABSOLUTE, "n", IMAGE),
    CALLS(adaptive_avg_pool2d, FLOATS, CHECK_ABSOLUTE, "n",
          "2x3x7x5 : 3 2; 1x1x4x4 : 1 1; 3x5x5 : 7 3; 0x2x4x4 : 2 2"),
    CALLS(adaptive_max_pool2d, FLOATS, CHECK_EXACT, "n",
          "2x3x7x5 : 3 2; 1x1x4x4 : 1 1; 3x5x5 : 7 3; 0x2x4x4 : 2 2"),

    /* Activations. */
    UNARY(f_relu, NUMBERS, CHECK_EXACT | CHECK_SPECIAL, "n"),
    UNARY(f_gelu, FLOATS, CHECK_LARGEST | CHECK_SPECIAL, "n"),
    UNARY(f_gelu_tanh, FLOATS, CHECK_LARGEST, "n"),
    UNARY(f_silu, FLOATS, CHECK_LARGEST, "n"),
    UNARY(f_tanh, FLOATS, CHECK_SPECIAL, "n"),
    UNARY(f_sigmoid, FLOATS, CHECK_SPECIAL, "n"),
    CALLS(softmax, FLOATS, CHECK_LARGEST, "n", SOFTMAX),
    CALLS(log_softmax, FLOATS, CHECK_LARGEST, "n", SOFTMAX),
    OWN(dropout, FLOATS),
    OWN(dropout2d, FLOATS),

    /* Normalisation. */
    {.name = "batch_norm",
     .call = check_batch_norm,
     .dtypes = BIT(TD_F32) | BIT(TD_F64),
     .flags = CHECK_LARGEST,
     .values = "nnppn",
     .tolerance = 64,
     .shapes =
         "7x3 3 3 3 3 : 1; 7x3 3 3 3 3 : 0; 2x3x4x5 3 3 3 3 : 1; 2x3x4x5 - - - - : 1; 5x17 17 17 - - : 0; "
         "4x33x7 33 33 33 33 : 1"},
    {.name = "batch_norm_relu",
     .call = check_batch_norm_relu,
     .dtypes = BIT(TD_F32) | BIT(TD_F64),
     .flags = CHECK_LARGEST,
     .values = "nnppnn",
     .tolerance = 64,
     .shapes = "7x3 3 3 3 3 7x3 : 1 0; 7x3 3 3 3 3 7x3 : 1 1; 7x3 3 3 3 3 7x3 : 0 0; "
               "2x3x4x5 3 3 3 3 2x3x4x5 : 1 1; 2x3x4x5 3 3 3 3 2x3x4x5 : 0 1; "
               "2x3x4x5 3 3 - - 2x3x4x5 : 1 0; 4x33x7 33 33 33 33 4x33x7 : 1 1; "
               "4x33x8 33 33 33 33 4x33x8 : 1 0; 0x3x2 3 3 3 3 0x3x2 : 0 1"},
    {.name = "layer_norm",
     .call = check_layer_norm,
     .dtypes = FLOATS,
     .flags = CHECK_LARGEST,
     .values = "npn",
     .tolerance = 64,
     .shapes =
         "3x5 5 5 : 1; 3x5 - - : 1; 2x3x5 3x5 3x5 : 2; 7 7 7 : 1; 17x133 133 133 : 1; 0x5 5 5 : 1; "
         "9x64 64 64 : 1; 5x516 516 - : 1; 3x1028 1028 1028 : 1; 1700x8 8 8 : 1; 2x8200 8200 8200 : 1"},
    {.name = "add_layer_norm",
     .call = check_add_layer_norm,
     .dtypes = FLOATS,
     .flags = CHECK_LARGEST,
     .values = "nnpn",
     .tolerance = 64,
     .shapes = "3x5 3x5 5 5 : 1 0; 3x5 - 5 5 : 1 0; 3x5 3x5 - - : 1 0; 2x3x5 2x3x5 3x5 3x5 : 2 0; "
               "0x5 0x5 5 5 : 1 0; 9x64 9x64 64 64 : 1 0; 5x516 5x516 516 - : 1 0; "
               "3x1028 3x1028 1028 1028 : 1 0; 1700x8 1700x8 8 8 : 1 0; 3x5 3x5 5 5 : 1 0 1; "
               "3x5 - 5 5 : 1 0 1; 9x64 - 64 64 : 1 0 1; 3x1028 - 1028 - : 1 0 1"},
    {.name = "add_layer_norm of f32 with bf16",
     .call = check_add_layer_norm,
     .dtypes = BIT(TD_F32),
     .flags = CHECK_LARGEST,
     .values = "nnpn",
     .tolerance = 64,
     .shapes = "3x5 3x5 5 5 : 1 2; 3x5 - 5 5 : 1 1; 9x64 9x64 64 64 : 1 2; 9x64 - 64 64 : 1 1; "
               "3x1028 3x1028 1028 1028 : 1 2; 5x768 5x768 768 768 : 1 1; "
               "9x64 9x64 64 64 : 1 2 1; 9x64 - 64 64 : 1 1 1; 3x5 - 5 5 : 1 1 1"},

    /* Attention. With a mask that is added the host looks for rows without any column, and waits for that. */
    {.name = "attention",
     .call = check_attention,
     .dtypes = FLOATS,
     .flags = CHECK_LARGEST | CHECK_CANCELS,
     .values = "nnnn",
     .tolerance = 64,
     .shapes =
         "2x5x4 2x7x4 2x7x3 - : 0 0; 2x3x5x4 2x3x5x4 2x3x5x4 - : 1 0; 5x4 7x4 7x3 5x7 : 0 0.5; "
         "2x3x5x4 2x3x6x4 2x3x6x4 5x6 : 0 0; 1x1x1x1 1x1x1x1 1x1x1x1 - : 0 0; 2x33x16 2x65x16 2x65x16 - : 0 0; "
         "2x70x64 2x150x64 2x150x64 - : 1 0; 1x150x128 1x70x128 1x70x128 - : 0 0; "
         "2x150x40 2x70x40 2x70x24 - : 1 0.25; 2x2x3x33x16 1x2x3x65x16 2x1x3x65x16 - : 1 0; "
         "2x2x130x64 2x2x130x64 2x2x130x64 - : 1 0; 1x33x64 1x200x64 1x200x64 - : 0 1; "
         "2x70x32 2x150x32 2x150x32 - : 1 0.7"},
    {.name = "attention_mask",
     .call = check_attention,
     .dtypes = FLOATS,
     .flags = CHECK_LARGEST | CHECK_CANCELS,
     .values = "nnnb",
     .tolerance = 64,
     .shapes = "2x5x4 2x7x4 2x7x3 5x7 : 0 0; 2x3x5x4 2x3x6x4 2x3x6x4 2x1x5x6 : 0 0"},

    /* Indices. */
    CALLS(embedding, FLOATS, CHECK_LARGEST, "cn",
          "7 5x3 : 5 -1; 2x3 5x4 : 5 2; 33 17x9 : 17 -1; 0 5x3 : 5 -1; . 5x3 : 5 -1"),
    CALLS(index_select, ALL, CHECK_LARGEST, "nc",
          "5x3 4 : 5 0; 3x7x2 9 : 7 1; 4x3 0 : 3 1; 5 1 : 5 0"),
    CALLS(take_along_dim, ALL, CHECK_LARGEST, "nc",
          "3x5 3x2 : 5 1; 5x3 4x3 : 5 0; 2x3x7 2x3x4 : 7 2"),
    CALLS(one_hot, BIT(TD_I64), CHECK_EXACT | CHECK_NO_GRAD, "c", "7 : 5; 2x3 : 4; 0 : 3; . : 3"),

    /* Losses. */
    CALLS(nll_loss, FLOATS, CHECK_LARGEST, "ncp", CLASSES),
    {.name = "cross_entropy",
     .call = check_cross_entropy,
     .dtypes = FLOATS,
     .flags = CHECK_LARGEST,
     .values = "ncp",
     .tolerance = 32,
     .shapes = CLASSES "; " LOGITS "; 7x5 7 - : 5 0 -1 0.1; 7x5 7 5 : 5 2 1 0.2"},
    {.name = "cross_entropy_autocast",
     .call = check_cross_entropy_autocast,
     .dtypes = BIT(TD_F16) | BIT(TD_BF16),
     .flags = CHECK_LARGEST,
     .values = "ncp",
     .tolerance = 32,
     .shapes = CLASSES "; " LOGITS "; 7x5 7 5 : 5 2 1 0.2"},
    {.name = "cross_entropy_rows",
     .call = check_cross_entropy_rows,
     .dtypes = FLOATS,
     .flags = CHECK_LARGEST | CHECK_PLAIN,
     .values = "nc",
     .tolerance = 32,
     .shapes = "4x5 4 : 5; 3x301 3 : 301; 9x1030 9 : 1030; 3x4001 3 : 4001"},
    CALLS(mse_loss, FLOATS, CHECK_LARGEST, "nn", LOSS),
    CALLS(l1_loss, FLOATS, CHECK_LARGEST, "nn", LOSS),
    CALLS(bce_with_logits, FLOATS, CHECK_LARGEST, "nu", LOSS),

    /* In place. */
    {.name = "fill_",
     .in_place_scalar = td_fill_,
     .number = 3,
     .dtypes = ALL,
     .flags = IN_PLACE | CHECK_BITS,
     .values = "n",
     .shapes = ONE},
    {.name = "zero_",
     .in_place1 = td_zero_,
     .dtypes = ALL,
     .flags = IN_PLACE | CHECK_BITS,
     .values = "n",
     .shapes = ONE},
    {.name = "add_",
     .in_place2 = td_add_,
     .dtypes = ALL,
     .flags = IN_PLACE | CHECK_ABSOLUTE,
     .values = "nn",
     .shapes = INTO},
    {.name = "sub_",
     .in_place2 = td_sub_,
     .dtypes = ARITHMETIC,
     .flags = IN_PLACE | CHECK_ABSOLUTE,
     .values = "nn",
     .shapes = INTO},
    {.name = "mul_",
     .in_place2 = td_mul_,
     .dtypes = ALL,
     .flags = IN_PLACE | CHECK_ABSOLUTE,
     .values = "nn",
     .shapes = INTO},
    {.name = "div_",
     .in_place2 = td_div_,
     .dtypes = ARITHMETIC,
     .flags = IN_PLACE | CHECK_ABSOLUTE,
     .values = "np",
     .shapes = INTO},
    {.name = "add_scaled_",
     .call = check_add_scaled_,
     .dtypes = ARITHMETIC,
     .flags = IN_PLACE | CHECK_ABSOLUTE,
     .values = "nn",
     .shapes = "7 7 : 3; 3x5 5 : -2; 4099 4099 : 2; 2x3x5 3x1 : 1"},
    {.name = "add_scalar_",
     .in_place_scalar = td_add_scalar_,
     .number = 3,
     .dtypes = ARITHMETIC,
     .flags = IN_PLACE,
     .values = "n",
     .shapes = ONE},
    {.name = "mul_scalar_",
     .in_place_scalar = td_mul_scalar_,
     .number = 3,
     .dtypes = ARITHMETIC,
     .flags = IN_PLACE,
     .values = "n",
     .shapes = ONE},
    {.name = "f_relu_",
     .in_place1 = td_f_relu_,
     .dtypes = NUMBERS,
     .flags = IN_PLACE | CHECK_EXACT,
     .values = "n",
     .shapes = ONE},
    {.name = "clamp_",
     .call = check_clamp_,
     .dtypes = NUMBERS,
     .flags = IN_PLACE | CHECK_EXACT,
     .values = "n",
     .shapes = "7 : 0 1; 2x3x5 : 0 1; . : 0 0; 4099 : 0 1"},
    {.name = "tensor_copy",
     .call = check_tensor_copy,
     .dtypes = ALL,
     .flags = CHECK_IN_PLACE | CHECK_BITS | CHECK_NO_GRAD,
     .values = "nn",
     .shapes =
         ". .; 7 7; 0x3 0x3; 2x3x5 2x3x5; 17x33 17x33; 2x1x3x1x2x1x2x3 2x1x3x1x2x1x2x3; 4099 4099"},
    {.name = "copy_overlapping",
     .call = check_copy_overlapping,
     .dtypes = ALL,
     .flags = CHECK_IN_PLACE | CHECK_BITS | CHECK_NO_GRAD,
     .values = "n",
     .shapes = "7; 5x3; 4x3x2"},
    CALLS(view_in_place, FLOATS, CHECK_LARGEST, "n", "2x3; 5x7; 4x1"),

    /* Random numbers and optimizers. */
    OWN(uniform_, FLOATS),
    OWN(normal_, FLOATS),
    OWN(bernoulli_, REAL),
    OWN(random_, REAL),
    OWN(random_range_, NUMBERS),
    OWN(randperm, BIT(TD_I64) | BIT(TD_I32)),
    OWN(sgd, FLOATS),
    OWN(adam, FLOATS),
    OWN(adamw, FLOATS),
    OWN(clip_grad_norm_, FLOATS),
    OWN(clip_grad_value_, FLOATS),
    OWN(norm_list, FLOATS),
    OWN(power_sums_list, FLOATS),
    OWN(scale_list, FLOATS),
    OWN(unscale_list, FLOATS),
    {.name = NULL},
};
