/* Operations on one operand and their gradients, compared with a slow reference in double precision;
 * the functions of f32 also by units in the last place over the whole range. */
#include "runner.h"

#include "elements.h"

#include <tandem/ops.h>

#include <float.h>
#include <math.h>
#include <string.h>

#define ROOT_HALF 0.70710678118654752440
#define ROOT_2_BY_PI 0.79788456080286535588

static double sigmoid(double x)
{
    return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x));
}

static double gelu_tanh(double x)
{
    return x * sigmoid(2 * ROOT_2_BY_PI * (x + 0.044715 * x * x * x));
}

static double unary_value(td_unary op, double x)
{
    switch (op) {
    case TD_UNARY_NEG:
        return -x;
    case TD_UNARY_ABS:
        return fabs(x);
    case TD_UNARY_SIGN:
        return (x > 0) - (x < 0);
    case TD_UNARY_SQUARE:
        return x * x;
    case TD_UNARY_EXP:
        return exp(x);
    case TD_UNARY_LOG:
        return log(x);
    case TD_UNARY_LOG1P:
        return log1p(x);
    case TD_UNARY_SQRT:
        return sqrt(x);
    case TD_UNARY_RSQRT:
        return 1 / sqrt(x);
    case TD_UNARY_RECIPROCAL:
        return 1 / x;
    case TD_UNARY_SIN:
        return sin(x);
    case TD_UNARY_COS:
        return cos(x);
    case TD_UNARY_TANH:
        return tanh(x);
    case TD_UNARY_SIGMOID:
        return sigmoid(x);
    case TD_UNARY_RELU:
        return isnan(x) || x > 0 ? x : 0;
    case TD_UNARY_GELU:
        return 0.5 * x * erfc(-x * ROOT_HALF);
    case TD_UNARY_GELU_TANH:
        return gelu_tanh(x);
    case TD_UNARY_SILU:
        return x * sigmoid(x);
    case TD_UNARY_FLOOR:
        return floor(x);
    case TD_UNARY_CEIL:
        return ceil(x);
    case TD_UNARY_ROUND:
        return rint(x);
    case TD_UNARY_ERF:
        return erf(x);
    case TD_UNARY_NOT:
        return x == 0;
    case TD_UNARY_ISNAN:
        return isnan(x);
    }
    return 0;
}

static bool has_unary(td_unary op, td_dtype dtype)
{
    if (op == TD_UNARY_NOT || op == TD_UNARY_ISNAN)
        return true;
    if (op == TD_UNARY_NEG || op == TD_UNARY_SQUARE)
        return dtype != TD_BOOL;
    if (op == TD_UNARY_ABS || op == TD_UNARY_SIGN || op == TD_UNARY_RELU)
        return dtype < TD_BOOL;
    return dtype <= TD_BF16;
}

static td_dtype result_dtype(td_unary op, td_dtype dtype)
{
    return op == TD_UNARY_NOT || op == TD_UNARY_ISNAN ? TD_BOOL : dtype;
}

TEST(unary_over_all_layouts_and_dtypes)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int d = TD_F32; d <= TD_COMPLEX128; d++)
            for (int o = TD_UNARY_NEG; o <= TD_UNARY_ISNAN; o++) {
                td_unary op = (td_unary)o;
                td_dtype dtype = (td_dtype)d;
                td_tensor *x = make_case(&layout_cases[l], 0, dtype, 1);
                td_tensor *out = make_result(&layout_cases[l], result_dtype(op, dtype));
                if (has_unary(op, dtype)) {
                    CHECK_OK(td__cpu_kernels.unary(op, out, x));
                    for (int64_t i = 0; i < td_tensor_numel(out); i++)
                        check_units(element(out, i), unary_value(op, element(x, i)),
                                    op == TD_UNARY_GELU_TANH ? 16 : 3, out, i);
                } else {
                    CHECK_FAILS(td__cpu_kernels.unary(op, out, x), TD_ERR_UNSUPPORTED,
                                td_dtype_name(dtype));
                }
                td_tensor_release(x);
                td_tensor_release(out);
            }
}

/* ---- Units in the last place ------------------------------------------------------------------- */

static const float special[] = {0,          -0.0f,     1,         -1,          INFINITY, -INFINITY,
                                NAN,        FLT_MAX,   -FLT_MAX,  FLT_MIN,     -FLT_MIN, 0x1p-149f,
                                -0x1p-149f, 0.5f,      -0.5f,     1.5f,        2.5f,     -2.5f,
                                88.72f,     88.73f,    -87.4f,    -103.9f,     -104.5f,  1e30f,
                                -1e30f,     1048577.f, 0x1p-126f, 0x1.8p-140f, 10.f,     -13.f};
enum { SPECIALS = sizeof special / sizeof *special, SAMPLES = 1 << 16 };

/* The functions whose small results are differences, and lose what is lost in their argument. */
static double allowed_units(td_unary op)
{
    switch (op) {
    case TD_UNARY_GELU_TANH:
    case TD_UNARY_SILU:
        return 200;
    case TD_UNARY_GELU:
        return 16;
    default:
        return 3;
    }
}

static void check_all_units(td_unary op, const float *x, const float *y, int count)
{
    for (int i = 0; i < count; i++) {
        double exact = unary_value(op, x[i]);
        float right = (float)exact;
        if (isnan(right) && isnan(y[i]))
            continue;
        if (right == y[i])
            continue;
        double unit = nextafterf(fabsf(right), INFINITY) - fabsf(right);
        if (!(isfinite(right) && fabs(y[i] - exact) <= allowed_units(op) * unit))
            FAIL("operation %d of %.9g is %.9g, and should be %.9g", (int)op, (double)x[i],
                 (double)y[i], (double)right);
    }
}

TEST(units_in_the_last_place)
{
    td_tensor *x = td_empty((int64_t[]){SAMPLES}, 1, TD_F32, NULL);
    td_tensor *y = td_empty((int64_t[]){SAMPLES}, 1, TD_F32, NULL);
    float *data = td_tensor_data(x);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        uint32_t bits = i * 65537u; /* every sign and exponent */
        memcpy(&data[i], &bits, sizeof bits);
    }
    memcpy(data, special, sizeof special);
    for (int op = TD_UNARY_NEG; op <= TD_UNARY_ERF; op++) {
        CHECK_OK(td__cpu_kernels.unary((td_unary)op, y, x));
        check_all_units((td_unary)op, data, td_tensor_data(y), SAMPLES);
    }
    td_tensor_release(x);
    td_tensor_release(y);
}

/* ---- Gradients --------------------------------------------------------------------------------- */

static bool has_gradient(td_unary op)
{
    return op <= TD_UNARY_ERF && op != TD_UNARY_SIGN && op != TD_UNARY_FLOOR && op != TD_UNARY_CEIL && op != TD_UNARY_ROUND;
}

static bool saves_result(td_unary op)
{
    return op == TD_UNARY_EXP || op == TD_UNARY_SQRT || op == TD_UNARY_RSQRT || op == TD_UNARY_RECIPROCAL ||
           op == TD_UNARY_TANH || op == TD_UNARY_SIGMOID || op == TD_UNARY_RELU;
}

/* By differences, which are good to about 1e-9 in double precision. */
static double slope(td_unary op, double x)
{
    double h = 1e-4;
    double near = unary_value(op, x + h) - unary_value(op, x - h);
    double far = unary_value(op, x + 2 * h) - unary_value(op, x - 2 * h);
    return (8 * near - far) / (12 * h);
}

static void check_gradient(td_unary op, const struct layout_case *layout, td_dtype dtype)
{
    td_tensor *x = make_case(layout, 0, dtype, 2), *g = make_case(layout, 1, dtype, 3);
    bool positive = op == TD_UNARY_LOG || op == TD_UNARY_LOG1P || op == TD_UNARY_SQRT || op == TD_UNARY_RSQRT;
    td_tensor *saved = td_clone(x), *out = make_result(layout, dtype);
    for (int64_t i = 0; i < td_tensor_numel(x); i++) {
        double value = positive ? fabs(element(x, i)) : element(x, i);
        set_element(saved, i, saves_result(op) ? unary_value(op, value) : value);
    }
    CHECK_OK(td__cpu_kernels.unary_grad(op, out, g, op == TD_UNARY_NEG ? NULL : saved));
    double precision = dtype == TD_F64 ? 1e-8 : dtype == TD_F32 ? 1e-5 : 0.05;
    for (int64_t i = 0; i < td_tensor_numel(out); i++) {
        double value = positive ? fabs(element(x, i)) : element(x, i);
        double right = element(g, i) * slope(op, value);
        double error = fabs(element(out, i) - right);
        if (error > precision * fabs(right) + precision * 4)
            FAIL("gradient of operation %d in %s at %g is %.9g, and should be %.9g", (int)op,
                 td_dtype_name(dtype), value, element(out, i), right);
    }
    td_tensor_release(x);
    td_tensor_release(g);
    td_tensor_release(saved);
    td_tensor_release(out);
}

TEST(gradients)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int dtype = TD_F32; dtype <= TD_BF16; dtype++)
            for (int op = TD_UNARY_NEG; op <= TD_UNARY_ERF; op++)
                if (has_gradient((td_unary)op))
                    check_gradient((td_unary)op, &layout_cases[l], (td_dtype)dtype);
}

TEST(gradients_in_place_and_far_away)
{
    float x[] = {100, -100, 1e30f, -1e30f, INFINITY, 0};
    float right[][6] = {{2, 0, 2, 0, 2, 1}, {2, 0, 2, 0, 2, 1}, {2, 0, 2, 0, 2, 1}};
    td_unary ops[] = {TD_UNARY_GELU, TD_UNARY_GELU_TANH, TD_UNARY_SILU};
    for (int k = 0; k < 3; k++) {
        td_tensor *saved = td_from_blob(x, (int64_t[]){6}, 1, NULL, TD_F32, NULL, NULL, NULL);
        td_tensor *g = td_full((int64_t[]){6}, 1, 2, TD_F32, NULL);
        CHECK_OK(td__cpu_kernels.unary_grad(ops[k], g, g, saved));
        for (int i = 0; i < 6; i++)
            CHECK(fabs(element(g, i) - right[k][i]) < 1e-6);
        td_tensor_release(saved);
        td_tensor_release(g);
    }
}

TEST(no_gradient)
{
    td_tensor *x = td_zeros(NULL, 0, TD_F32, NULL), *n = td_zeros(NULL, 0, TD_I32, NULL);
    CHECK_FAILS(td__cpu_kernels.unary_grad(TD_UNARY_FLOOR, x, x, x), TD_ERR_UNSUPPORTED, "floor");
    CHECK_FAILS(td__cpu_kernels.unary_grad(TD_UNARY_EXP, n, n, n), TD_ERR_UNSUPPORTED, "i32");
    td_tensor_release(x);
    td_tensor_release(n);
}
