/* Arithmetic of two operands: binary, binary_scalar, add_scaled. Each kernel checks its dtypes; cpu_each.h
 * handles strides. */
#include "tensor/cpu_elementwise.h"

#include "base/fail.h"
#include "tensor/cpu_convert.h"
#include "tensor/cpu_each.h"
#include "tensor/vector.h"

static bool is_complex(td_dtype dtype)
{
    return dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
}

static bool is_float(td_dtype dtype)
{
    return dtype <= TD_BF16;
}

static td_status refuse(const char *kernel, td_dtype dtype)
{
    return td_fail(TD_ERR_UNSUPPORTED, "%s: not supported for %s", kernel, td_dtype_name(dtype));
}

/* ---- Binary ------------------------------------------------------------------------------------ */

static const char *const binary_names[] = {
    [TD_BINARY_ADD] = "add",         [TD_BINARY_SUB] = "sub",
    [TD_BINARY_MUL] = "mul",         [TD_BINARY_DIV] = "div",
    [TD_BINARY_POW] = "pow",         [TD_BINARY_EQ] = "eq",
    [TD_BINARY_NE] = "ne",           [TD_BINARY_LT] = "lt",
    [TD_BINARY_LE] = "le",           [TD_BINARY_GT] = "gt",
    [TD_BINARY_GE] = "ge",           [TD_BINARY_AND] = "logical_and",
    [TD_BINARY_OR] = "logical_or",   [TD_BINARY_XOR] = "logical_xor",
    [TD_BINARY_MAXIMUM] = "maximum", [TD_BINARY_MINIMUM] = "minimum",
};

static bool has_binary(td_binary op, td_dtype dtype)
{
    switch (op) {
    case TD_BINARY_SUB:
    case TD_BINARY_DIV:
        return dtype != TD_BOOL;
    case TD_BINARY_POW:
        return dtype != TD_BOOL && !is_complex(dtype);
    case TD_BINARY_MAXIMUM:
    case TD_BINARY_MINIMUM:
    case TD_BINARY_LT:
    case TD_BINARY_LE:
    case TD_BINARY_GT:
    case TD_BINARY_GE:
        return !is_complex(dtype);
    default:
        return true;
    }
}

struct binary {
    td_binary op;
    td_dtype dtype; /* in which it is computed */
    bool swapped;   /* b op a */
};

static void run_floats(const struct td__pairs *given, const void *arg)
{
    const struct binary *binary = arg;
    struct td__pairs pairs = *given;
    if (binary->swapped) {
        pairs.a = given->b;
        pairs.b = given->a;
        pairs.a_step = given->b_step;
        pairs.b_step = given->a_step;
        pairs.a_row = given->b_row;
        pairs.b_row = given->a_row;
    }
    if (binary->dtype == TD_BF16)
        td__binary_bf16(binary->op, &pairs);
    else
        (binary->dtype == TD_F32 ? td__binary_f32 : td__binary_f64)(binary->op, &pairs);
}

static void run_binary(void *const arrays[], int64_t count, const void *arg)
{
    const struct binary *binary = arg;
    const void *a = arrays[binary->swapped ? 2 : 1], *b = arrays[binary->swapped ? 1 : 2];
    switch (binary->dtype) {
    case TD_F32:
    case TD_F64:
        run_floats(&(struct td__pairs){.out = arrays[0],
                                       .a = arrays[1],
                                       .b = arrays[2],
                                       .a_step = 1,
                                       .b_step = 1,
                                       .count = count,
                                       .rows = 1},
                   arg);
        break;
    case TD_COMPLEX64:
    case TD_COMPLEX128:
        td__binary_complex(binary->op, binary->dtype, arrays[0], a, b, count);
        break;
    case TD_BOOL:
        td__binary_bool(binary->op, arrays[0], a, b, count);
        break;
    default:
        td__binary_integer(binary->op, binary->dtype, arrays[0], a, b, count);
    }
}

static td_status binary_loop(td_binary op, td_tensor *out, const td_tensor *a,
                             struct td__each_array b, bool swapped)
{
    td_dtype dtype = a->layout.dtype;
    if (!has_binary(op, dtype))
        return refuse(binary_names[op], dtype);
    struct binary binary = {op, td__compute_dtype(dtype), swapped};
    if (op == TD_BINARY_GT || op == TD_BINARY_GE) {
        binary.op = op == TD_BINARY_GT ? TD_BINARY_LT : TD_BINARY_LE;
        binary.swapped = !swapped;
    }
    struct td__each_array arrays[] = {td__each_array(out), td__each_array(a), b};
    bool raw = dtype == TD_BF16 && op <= TD_BINARY_DIV;
    if (raw)
        binary.dtype = dtype;
    if (is_float(dtype) && op != TD_BINARY_POW)
        td__each_pair(&out->layout, arrays, raw, run_floats, &binary);
    else
        td__each_run(&out->layout, arrays, 3, false, run_binary, &binary);
    return TD_OK;
}

td_status td__cpu_binary(td_binary op, td_tensor *out, const td_tensor *a, const td_tensor *b)
{
    return binary_loop(op, out, a, td__each_array(b), false);
}

/* Converts the scalar to an element of `dtype`; fails if it does not fit. */
static td_status scalar_of(void *element, td_dtype dtype, double value, const char *kernel)
{
    if (td__element_of(element, dtype, value))
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: the number %g is not in the range of %s", kernel, value,
                   td_dtype_name(dtype));
}

/* ---- Powers with a scalar exponent ---------------------------------------------------------------
 *
 * Some are computed by a few multiplications or a root, as in PyTorch. */

#define POWER(T, expression)                                                                       \
    do {                                                                                           \
        T *o = out;                                                                                \
        const T *x = a;                                                                            \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++) {                                                      \
            T v = x[i];                                                                            \
            o[i] = (expression);                                                                   \
        }                                                                                          \
    } while (0)

static TD__VECTOR void cube(bool is_f64, void *out, const void *a, int64_t count)
{
    if (is_f64)
        POWER(double, v *v *v);
    else
        POWER(float, v *v *v);
}

static TD__VECTOR void inverse_square(bool is_f64, void *out, const void *a, int64_t count)
{
    if (is_f64)
        POWER(double, 1 / (v * v));
    else
        POWER(float, 1 / (v * v));
}

struct power {
    void (*loop)(bool is_f64, void *out, const void *a, int64_t count);
    bool is_f64;
};

static void run_power(void *const arrays[], int64_t count, const void *arg)
{
    const struct power *power = arg;
    power->loop(power->is_f64, arrays[0], arrays[1], count);
}

static td_status power_of(td_tensor *out, const td_tensor *a, double exponent)
{
    struct power power = {.is_f64 = a->layout.dtype == TD_F64};
    if (exponent == 0)
        return td__cpu_fill(out, 1);
    if (exponent == 1)
        return td__cpu_copy(out, a);
    if (exponent == 2)
        return td__cpu_unary(TD_UNARY_SQUARE, out, a);
    if (exponent == 0.5)
        return td__cpu_unary(TD_UNARY_SQRT, out, a);
    if (exponent == -0.5)
        return td__cpu_unary(TD_UNARY_RSQRT, out, a);
    if (exponent == -1)
        return td__cpu_unary(TD_UNARY_RECIPROCAL, out, a);
    power.loop = exponent == 3 ? cube : inverse_square;
    td__each_tensors(out, a, NULL, NULL, run_power, &power);
    return TD_OK;
}

static bool is_simple_power(double exponent)
{
    static const double simple[] = {-2, -1, -0.5, 0, 0.5, 1, 2, 3};
    for (size_t i = 0; i < sizeof simple / sizeof *simple; i++)
        if (exponent == simple[i])
            return true;
    return false;
}

/* ---- A tensor and a number ----------------------------------------------------------------------- */

td_status td__cpu_binary_scalar(td_binary op, td_tensor *out, const td_tensor *a, double b,
                                bool reversed)
{
    _Alignas(16) char element[16];
    td_dtype dtype = a->layout.dtype;
    if (op == TD_BINARY_POW && !reversed && is_float(dtype) && is_simple_power(b))
        return power_of(out, a, b);
    TD_TRY(scalar_of(element, dtype, b, binary_names[op]));
    return binary_loop(op, out, a, td__each_scalar(element, dtype), reversed);
}

td_status td__cpu_scale(td_tensor *const *x, int count, const td_tensor *factor)
{
    const void *data = td_tensor_data(factor);
    double value = factor->layout.dtype == TD_F64 ? *(const double *)data : *(const float *)data;
    for (int i = 0; i < count; i++)
        TD_TRY(td__cpu_binary_scalar(TD_BINARY_MUL, x[i], x[i], value, false));
    return TD_OK;
}

/* ---- add_scaled -------------------------------------------------------------------------------- */

struct scaled {
    td_dtype dtype;
    double alpha;
    int64_t whole_alpha; /* for integers */
};

#define ADD_SCALED(T, factor)                                                                      \
    do {                                                                                           \
        T *o = out;                                                                                \
        const T *x = a, *y = b;                                                                    \
        T scale = (T)(factor);                                                                     \
        TD__INDEPENDENT                                                                            \
        for (int64_t i = 0; i < count; i++)                                                        \
            o[i] = (T)(x[i] + scale * y[i]);                                                       \
    } while (0)

static TD__VECTOR void add_scaled(const struct scaled *scaled, void *out, const void *a,
                                  const void *b, int64_t count)
{
    switch (scaled->dtype) {
    case TD_F32:
        ADD_SCALED(float, scaled->alpha);
        break;
    case TD_F64:
        ADD_SCALED(double, scaled->alpha);
        break;
    case TD_I8:
    case TD_U8:
        ADD_SCALED(uint8_t, scaled->whole_alpha);
        break;
    case TD_I16:
        ADD_SCALED(uint16_t, scaled->whole_alpha);
        break;
    case TD_I32:
    case TD_U32:
        ADD_SCALED(uint32_t, scaled->whole_alpha);
        break;
    default:
        ADD_SCALED(uint64_t, scaled->whole_alpha);
    }
}

static void run_scaled(void *const arrays[], int64_t count, const void *arg)
{
    struct scaled scaled = *(const struct scaled *)arg;
    if (is_complex(scaled.dtype)) { /* a real factor: the parts are numbers of their own */
        scaled.dtype = scaled.dtype == TD_COMPLEX64 ? TD_F32 : TD_F64;
        count *= 2;
    }
    add_scaled(&scaled, arrays[0], arrays[1], arrays[2], count);
}

td_status td__cpu_add_scaled(td_tensor *out, const td_tensor *a, const td_tensor *b, double alpha)
{
    td_dtype dtype = a->layout.dtype;
    if (dtype == TD_BOOL)
        return refuse("add_scaled", dtype);
    struct scaled scaled = {td__compute_dtype(dtype), alpha, 0};
    if (!is_float(dtype) && !is_complex(dtype))
        TD_TRY(scalar_of(&scaled.whole_alpha, TD_I64, alpha, "add_scaled"));
    td__each_tensors(out, a, b, NULL, run_scaled, &scaled);
    return TD_OK;
}
