/* The kernels over elements, compared with a slow reference that walks over all indices, in double
 * precision: shapes, strides, dtypes, special values. */
#include "runner.h"

#include "elements.h"

#include <tandem/ops.h>

#include <math.h>
#include <string.h>

static const td_dtype numbers[] = {TD_F32, TD_F64, TD_F16, TD_BF16, TD_I8, TD_U8,
                                   TD_I16, TD_I32, TD_I64, TD_U32,  TD_U64};
enum { NUMBERS = sizeof numbers / sizeof *numbers };

static bool is_float(td_dtype dtype)
{
    return dtype <= TD_BF16;
}

/* ---- Binary ------------------------------------------------------------------------------------ */

static double binary_value(td_binary op, double a, double b, td_dtype dtype)
{
    switch (op) {
    case TD_BINARY_ADD:
        return a + b;
    case TD_BINARY_SUB:
        return a - b;
    case TD_BINARY_MUL:
        return a * b;
    case TD_BINARY_DIV:
        return is_float(dtype) ? a / b : b == 0 ? 0 : trunc(a / b);
    case TD_BINARY_POW:
        return pow(a, b);
    case TD_BINARY_MAXIMUM:
        return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
    case TD_BINARY_MINIMUM:
        return isnan(a) || isnan(b) ? NAN : a < b ? a : b;
    case TD_BINARY_EQ:
        return a == b;
    case TD_BINARY_NE:
        return a != b;
    case TD_BINARY_LT:
        return a < b;
    case TD_BINARY_LE:
        return a <= b;
    case TD_BINARY_GT:
        return a > b;
    case TD_BINARY_GE:
        return a >= b;
    case TD_BINARY_AND:
        return a != 0 && b != 0;
    case TD_BINARY_OR:
        return a != 0 || b != 0;
    case TD_BINARY_XOR:
        return (a != 0) != (b != 0);
    }
    return 0;
}

static bool is_predicate(td_binary op)
{
    return op >= TD_BINARY_EQ;
}

static void check_binary(td_binary op, const struct layout_case *layouts, td_dtype dtype)
{
    td_tensor *a = make_case(layouts, 0, dtype, 1), *b = make_case(layouts, 1, dtype, 2);
    td_tensor *out = make_result(layouts, is_predicate(op) ? TD_BOOL : dtype);
    if (op == TD_BINARY_DIV && !is_float(dtype))
        set_element(b, 0, 0);
    CHECK_OK(td__cpu_kernels.binary(op, out, a, b));
    for (int64_t i = 0; i < td_tensor_numel(out); i++)
        check_close(element(out, i), binary_value(op, element(a, i), element(b, i), dtype), out, i);
    td_tensor_release(a);
    td_tensor_release(b);
    td_tensor_release(out);
}

TEST(binary_over_all_layouts_and_dtypes)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int d = 0; d < NUMBERS; d++)
            for (int op = TD_BINARY_ADD; op <= TD_BINARY_XOR; op++)
                if (op != TD_BINARY_POW || is_float(numbers[d]))
                    check_binary((td_binary)op, &layout_cases[l], numbers[d]);
}

TEST(binary_in_place)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int d = 0; d < NUMBERS; d++) {
            td_tensor *a = make_result(&layout_cases[l], numbers[d]);
            fill_numbers(a, 3);
            td_tensor *before = td_clone(a);
            td_tensor *b = make_case(&layout_cases[l], 1, numbers[d], 4);
            CHECK_OK(td__cpu_kernels.binary(TD_BINARY_ADD, a, a, b));
            for (int64_t i = 0; i < td_tensor_numel(a); i++)
                check_close(element(a, i), element(before, i) + element(b, i), a, i);
            td_tensor_release(a);
            td_tensor_release(b);
            td_tensor_release(before);
        }
}

TEST(binary_scalar_from_both_sides)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int d = 0; d < NUMBERS; d++)
            for (int reversed = 0; reversed < 2; reversed++) {
                td_binary ops[] = {TD_BINARY_SUB, TD_BINARY_DIV, TD_BINARY_GT, TD_BINARY_LE, TD_BINARY_MAXIMUM};
                for (int k = 0; k < 5; k++) {
                    td_tensor *a = make_case(&layout_cases[l], 0, numbers[d], 5);
                    td_dtype dtype = is_predicate(ops[k]) ? TD_BOOL : numbers[d];
                    td_tensor *out = make_result(&layout_cases[l], dtype);
                    CHECK_OK(td__cpu_kernels.binary_scalar(ops[k], out, a, 3, reversed));
                    for (int64_t i = 0; i < td_tensor_numel(out); i++) {
                        double x = element(a, i);
                        double right = reversed ? binary_value(ops[k], 3, x, numbers[d])
                                                : binary_value(ops[k], x, 3, numbers[d]);
                        check_close(element(out, i), right, out, i);
                    }
                    td_tensor_release(a);
                    td_tensor_release(out);
                }
            }
}

TEST(add_scaled)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int d = 0; d < NUMBERS; d++) {
            td_tensor *a = make_case(&layout_cases[l], 0, numbers[d], 6);
            td_tensor *b = make_case(&layout_cases[l], 1, numbers[d], 7);
            td_tensor *out = make_result(&layout_cases[l], numbers[d]);
            double alpha = is_float(numbers[d]) ? -0.5 : 3;
            CHECK_OK(td__cpu_kernels.add_scaled(out, a, b, alpha));
            for (int64_t i = 0; i < td_tensor_numel(out); i++)
                check_close(element(out, i), element(a, i) + alpha * element(b, i), out, i);
            td_tensor_release(a);
            td_tensor_release(b);
            td_tensor_release(out);
        }
}

TEST(special_values_of_binary)
{
    float a[] = {NAN, 1, INFINITY, -INFINITY, 0, -0.0f, 5, NAN};
    float b[] = {1, NAN, 2, INFINITY, -0.0f, 0, 5, NAN};
    td_tensor *x = td_from_blob(a, (int64_t[]){8}, 1, NULL, TD_F32, NULL, NULL, NULL);
    td_tensor *y = td_from_blob(b, (int64_t[]){8}, 1, NULL, TD_F32, NULL, NULL, NULL);
    td_tensor *out = td_empty((int64_t[]){8}, 1, TD_F32, NULL);
    td_tensor *truth = td_empty((int64_t[]){8}, 1, TD_BOOL, NULL);
    for (int op = TD_BINARY_ADD; op <= TD_BINARY_XOR; op++) {
        td_tensor *result = is_predicate((td_binary)op) ? truth : out;
        CHECK_OK(td__cpu_kernels.binary((td_binary)op, result, x, y));
        for (int64_t i = 0; i < 8; i++)
            check_close(element(result, i),
                        binary_value((td_binary)op, a[i], b[i], TD_F32), result, i);
    }
    td_tensor_release(x);
    td_tensor_release(y);
    td_tensor_release(out);
    td_tensor_release(truth);
}

/* ---- Copies ------------------------------------------------------------------------------------ */

TEST(copy_between_all_dtypes)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int from = TD_F32; from <= TD_COMPLEX128; from++)
            for (int to = TD_F32; to <= TD_COMPLEX128; to++) {
                td_tensor *x = make_case(&layout_cases[l], 0, (td_dtype)from, 8);
                td_tensor *out = make_result(&layout_cases[l], (td_dtype)to);
                CHECK_OK(td__cpu_kernels.copy(out, x));
                for (int64_t i = 0; i < td_tensor_numel(out); i++) {
                    double value = element(x, i);
                    bool whole = to >= TD_I8 && to <= TD_U64;
                    double right = to == TD_BOOL ? value != 0 : whole ? trunc(value) : value;
                    check_close(element(out, i), right, out, i);
                }
                td_tensor_release(x);
                td_tensor_release(out);
            }
}

TEST(fill)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++) {
            td_tensor *out = make_result(&layout_cases[l], (td_dtype)dtype);
            CHECK_OK(td__cpu_kernels.fill(out, 7));
            for (int64_t i = 0; i < td_tensor_numel(out); i++)
                CHECK(element(out, i) == (dtype == TD_BOOL ? 1 : 7));
            td_tensor_release(out);
        }
    td_tensor *byte = td_empty(NULL, 0, TD_U8, NULL);
    CHECK_FAILS(td__cpu_kernels.fill(byte, 256), TD_ERR_INVALID, "256 is not in the range of u8");
    td_tensor_release(byte);
}

/* ---- Choices ----------------------------------------------------------------------------------- */

TEST(where)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++) {
            struct layout_case same = layout_cases[l];
            td_tensor *a = make_case(&same, 0, (td_dtype)dtype, 13);
            td_tensor *b = make_case(&same, 1, (td_dtype)dtype, 14);
            td_tensor *condition = make_case(&same, l % 2, TD_BOOL, 15);
            td_tensor *out = make_result(&same, (td_dtype)dtype);
            CHECK_OK(td__cpu_kernels.where(out, condition, a, b));
            for (int64_t i = 0; i < td_tensor_numel(out); i++)
                CHECK(element(out, i) == element(element(condition, i) != 0 ? a : b, i));
            td_tensor_release(a);
            td_tensor_release(b);
            td_tensor_release(condition);
            td_tensor_release(out);
        }
}

static void check_clamp(const struct layout_case *layout, td_dtype dtype, double low, double high)
{
    td_tensor *x = make_case(layout, 0, dtype, 16);
    td_tensor *out = make_result(layout, dtype);
    CHECK_OK(td__cpu_kernels.clamp(out, x, low, high));
    for (int64_t i = 0; i < td_tensor_numel(out); i++) {
        double value = element(x, i);
        value = value < low ? (is_float(dtype) ? low : ceil(low)) : value;
        check_close(element(out, i), value > high ? (is_float(dtype) ? high : floor(high)) : value,
                    out, i);
    }
    td_tensor_release(x);
    td_tensor_release(out);
}

TEST(clamp)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int d = 0; d < NUMBERS; d++) {
            check_clamp(&layout_cases[l], numbers[d], 1.5, 3);
            check_clamp(&layout_cases[l], numbers[d], -INFINITY, 2);
            check_clamp(&layout_cases[l], numbers[d], 2, INFINITY);
        }
    float a[] = {NAN, -INFINITY, INFINITY};
    td_tensor *x = td_from_blob(a, (int64_t[]){3}, 1, NULL, TD_F32, NULL, NULL, NULL);
    CHECK_OK(td__cpu_kernels.clamp(x, x, -1, 1));
    CHECK(isnan(a[0]) && a[1] == -1 && a[2] == 1);
    CHECK_FAILS(td__cpu_kernels.clamp(x, x, NAN, 1), TD_ERR_INVALID, "NaN");
    td_tensor_release(x);
}

TEST(what_a_dtype_does_not_have)
{
    td_tensor *truth = td_zeros(NULL, 0, TD_BOOL, NULL), *pair = td_zeros(NULL, 0, TD_COMPLEX64, NULL);
    const td_kernels *k = &td__cpu_kernels;
    CHECK_FAILS(k->binary(TD_BINARY_SUB, truth, truth, truth), TD_ERR_UNSUPPORTED, "sub");
    CHECK_FAILS(k->binary(TD_BINARY_LT, truth, pair, pair), TD_ERR_UNSUPPORTED, "complex64");
    CHECK_FAILS(k->add_scaled(truth, truth, truth, 1), TD_ERR_UNSUPPORTED, "bool");
    CHECK_FAILS(k->clamp(truth, truth, 0, 1), TD_ERR_UNSUPPORTED, "bool");
    CHECK_FAILS(k->reduce(TD_REDUCE_KIND_MAX, pair, pair, 0), TD_ERR_UNSUPPORTED, "complex64");
    CHECK_FAILS(k->reduce(TD_REDUCE_KIND_MEAN, truth, truth, 0), TD_ERR_UNSUPPORTED, "mean");
    td_tensor *byte = td_zeros(NULL, 0, TD_U8, NULL);
    CHECK_FAILS(k->binary_scalar(TD_BINARY_ADD, byte, byte, 300, false), TD_ERR_INVALID,
                "300 is not in the range of u8");
    td_tensor_release(truth);
    td_tensor_release(pair);
    td_tensor_release(byte);
}

TEST(bool_and_complex)
{
    uint8_t a[] = {0, 1, 2, 0}, b[] = {0, 0, 4, 1}, c[4];
    td_tensor *x = td_from_blob(a, (int64_t[]){4}, 1, NULL, TD_BOOL, NULL, NULL, NULL);
    td_tensor *y = td_from_blob(b, (int64_t[]){4}, 1, NULL, TD_BOOL, NULL, NULL, NULL);
    td_tensor *z = td_from_blob(c, (int64_t[]){4}, 1, NULL, TD_BOOL, NULL, NULL, NULL);
    static const struct {
        td_binary op;
        uint8_t right[4];
    } cases[] = {{TD_BINARY_ADD, {0, 1, 1, 1}}, {TD_BINARY_MUL, {0, 0, 1, 0}},     {TD_BINARY_EQ, {1, 0, 1, 0}},
                 {TD_BINARY_NE, {0, 1, 0, 1}},  {TD_BINARY_LT, {0, 0, 0, 1}},      {TD_BINARY_LE, {1, 0, 1, 1}},
                 {TD_BINARY_GT, {0, 1, 0, 0}},  {TD_BINARY_MAXIMUM, {0, 1, 1, 1}}, {TD_BINARY_XOR, {0, 1, 0, 1}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(td__cpu_kernels.binary(cases[i].op, z, x, y));
        CHECK_MEM(c, cases[i].right, 4);
    }

    double p[] = {3, 4}, q[] = {1, -2}, r[2];
    td_tensor *u = td_from_blob(p, NULL, 0, NULL, TD_COMPLEX128, NULL, NULL, NULL);
    td_tensor *v = td_from_blob(q, NULL, 0, NULL, TD_COMPLEX128, NULL, NULL, NULL);
    td_tensor *w = td_from_blob(r, NULL, 0, NULL, TD_COMPLEX128, NULL, NULL, NULL);
    CHECK_OK(td__cpu_kernels.binary(TD_BINARY_MUL, w, u, v));
    CHECK(r[0] == 11 && r[1] == -2);
    CHECK_OK(td__cpu_kernels.binary(TD_BINARY_DIV, w, u, v));
    CHECK(fabs(r[0] + 1) < 1e-15 && fabs(r[1] - 2) < 1e-15);
    CHECK_OK(td__cpu_kernels.add_scaled(w, u, v, 2));
    CHECK(r[0] == 5 && r[1] == 0);
    CHECK_OK(td__cpu_kernels.unary(TD_UNARY_SQUARE, w, u));
    CHECK(r[0] == -7 && r[1] == 24);
    td_tensor *all[] = {x, y, z, u, v, w};
    for (int i = 0; i < 6; i++)
        td_tensor_release(all[i]);
}
