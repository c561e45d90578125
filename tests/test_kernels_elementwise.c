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

static double binary_value(enum td__binary_op op, double a, double b, td_dtype dtype)
{
    switch (op) {
    case TD__ADD:
        return a + b;
    case TD__SUB:
        return a - b;
    case TD__MUL:
        return a * b;
    case TD__DIV:
        return is_float(dtype) ? a / b : b == 0 ? 0 : trunc(a / b);
    case TD__POW:
        return pow(a, b);
    case TD__MAXIMUM:
        return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
    case TD__MINIMUM:
        return isnan(a) || isnan(b) ? NAN : a < b ? a : b;
    case TD__EQ:
        return a == b;
    case TD__NE:
        return a != b;
    case TD__LT:
        return a < b;
    case TD__LE:
        return a <= b;
    case TD__GT:
        return a > b;
    case TD__GE:
        return a >= b;
    case TD__AND:
        return a != 0 && b != 0;
    case TD__OR:
        return a != 0 || b != 0;
    case TD__XOR:
        return (a != 0) != (b != 0);
    }
    return 0;
}

static bool is_predicate(enum td__binary_op op)
{
    return op >= TD__EQ;
}

static void check_binary(enum td__binary_op op, const struct layout_case *layouts, td_dtype dtype)
{
    td_tensor *a = make_case(layouts, 0, dtype, 1), *b = make_case(layouts, 1, dtype, 2);
    td_tensor *out = make_result(layouts, is_predicate(op) ? TD_BOOL : dtype);
    if (op == TD__DIV && !is_float(dtype))
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
            for (int op = TD__ADD; op <= TD__XOR; op++)
                if (op != TD__POW || is_float(numbers[d]))
                    check_binary((enum td__binary_op)op, &layout_cases[l], numbers[d]);
}

TEST(binary_in_place)
{
    for (int l = 0; l < layout_cases_count; l++)
        for (int d = 0; d < NUMBERS; d++) {
            td_tensor *a = make_result(&layout_cases[l], numbers[d]);
            fill_numbers(a, 3);
            td_tensor *before = td_clone(a);
            td_tensor *b = make_case(&layout_cases[l], 1, numbers[d], 4);
            CHECK_OK(td__cpu_kernels.binary(TD__ADD, a, a, b));
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
                enum td__binary_op ops[] = {TD__SUB, TD__DIV, TD__GT, TD__LE, TD__MAXIMUM};
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
    td_tensor *x = td_from_blob(a, (int64_t[]){8}, 1, NULL, TD_F32, NULL, NULL);
    td_tensor *y = td_from_blob(b, (int64_t[]){8}, 1, NULL, TD_F32, NULL, NULL);
    td_tensor *out = td_empty((int64_t[]){8}, 1, TD_F32);
    td_tensor *truth = td_empty((int64_t[]){8}, 1, TD_BOOL);
    for (int op = TD__ADD; op <= TD__XOR; op++) {
        td_tensor *result = is_predicate((enum td__binary_op)op) ? truth : out;
        CHECK_OK(td__cpu_kernels.binary((enum td__binary_op)op, result, x, y));
        for (int64_t i = 0; i < 8; i++)
            check_close(element(result, i),
                        binary_value((enum td__binary_op)op, a[i], b[i], TD_F32), result, i);
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
    td_tensor *byte = td_empty(NULL, 0, TD_U8);
    CHECK_FAILS(td__cpu_kernels.fill(byte, 256), TD_ERR_INVALID, "256 is not in the range of u8");
    td_tensor_release(byte);
}
