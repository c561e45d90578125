/* Powers of f32: exact where C's pow() is, and otherwise within a unit in the last place; exponents that are
 * numbers as PyTorch computes them. */
#include "runner.h"

#include <tandem/ops.h>

#include <float.h>
#include <math.h>
#include <string.h>

#define SHAPE(...) (const int64_t[]){__VA_ARGS__}, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8)

enum { COUNT = 1 << 16 };

/* Whether both are the same number, a NaN, or zeros of one sign. */
static bool is_same(float a, float b)
{
    return (isnan(a) && isnan(b)) || (a == b && !signbit(a) == !signbit(b));
}

static void check_powers(const float *x, const float *y, int64_t count, double units)
{
    {
        TD_SCOPE;
        td_tensor *base = td_from_blob((void *)x, SHAPE(count), NULL, TD_F32, NULL, NULL, NULL);
        td_tensor *exponent = td_from_blob((void *)y, SHAPE(count), NULL, TD_F32, NULL, NULL, NULL);
        td_tensor *result = td_pow(base, exponent);
        CHECK(result);
        const float *power = td_tensor_data(result);
        for (int64_t i = 0; i < count; i++) {
            double exact = pow((double)x[i], (double)y[i]);
            float right = (float)exact;
            double unit = nextafterf(fabsf(right), INFINITY) - fabsf(right);
            if (!is_same(power[i], right) &&
                !(isfinite(right) && fabs((double)power[i] - exact) <= units * unit))
                td_test_fail(__FILE__, __LINE__, "%a to the power of %a is %a and should be %a",
                             (double)x[i], (double)y[i], (double)power[i], (double)right);
        }
    }
}

TEST(powers_of_special_numbers)
{
    static const float special[] = {
        0,          -0.0f,      1,          -1,          2,          -2,          3,
        -3,         0.5f,       -0.5f,      2.5f,        -2.5f,      0.1f,        -0.1f,
        INFINITY,   -INFINITY,  NAN,        FLT_MAX,     -FLT_MAX,   FLT_MIN,     0x1p-149f,
        -0x1p-149f, 16777215.f, 16777216.f, -16777217.f, 33554433.f, 0.99999994f, 1.0000001f};
    enum { SPECIAL = sizeof special / sizeof *special };
    static float x[SPECIAL * SPECIAL], y[SPECIAL * SPECIAL];
    for (int i = 0; i < SPECIAL * SPECIAL; i++) {
        x[i] = special[i / SPECIAL];
        y[i] = special[i % SPECIAL];
    }
    check_powers(x, y, SPECIAL * SPECIAL, 0.55);
}

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525 + 1013904223;
    return *state >> 8;
}

TEST(powers_are_within_a_unit)
{
    static float x[COUNT], y[COUNT];
    uint32_t state = 5;
    for (int kind = 0; kind < 4; kind++) {
        for (int i = 0; i < COUNT; i++) {
            float unit = (float)next(&state) / 0x1p24f, other = (float)next(&state) / 0x1p24f;
            x[i] = kind == 0   ? 4 * unit
                   : kind == 1 ? ldexpf(1 + unit, (int)(next(&state) % 250) - 125)
                   : kind == 2 ? 1 + (unit - 0.5f) / 100
                               : -20 * unit;
            double logarithm = log2(fabs((double)x[i]));
            y[i] = kind == 0   ? 10 * other - 5
                   : kind == 3 ? (float)(next(&state) % 41) - 20
                   : logarithm == 0
                       ? other
                       : (float)((310 * other - 155) / logarithm); /* up to the ends of the range */
        }
        check_powers(x, y, COUNT, 0.55);
    }
}

TEST(simple_exponents_are_products_and_roots)
{
    static const double exponents[] = {-2, -1, -0.5, 0, 0.5, 1, 2, 3};
    static const float numbers[] = {0,      -0.0f, 1,        -1,        1.1f, -1.1f,
                                    1e-30f, 1e30f, INFINITY, -INFINITY, NAN};
    enum { NUMBERS = sizeof numbers / sizeof *numbers };
    for (int e = 0; e < 8; e++)
        {
            TD_SCOPE;
            td_tensor *x = td_from_blob((void *)numbers, SHAPE(NUMBERS), NULL, TD_F32, NULL, NULL, NULL);
            const float *power = td_tensor_data(td_pow_scalar(x, exponents[e]));
            for (int i = 0; i < NUMBERS; i++) {
                float v = numbers[i];
                float right[] = {1 / (v * v), 1 / v, 1 / sqrtf(v), 1,
                                 sqrtf(v),    v,     v * v,        v * v * v};
                CHECK(is_same(power[i], right[e]));
            }
        }
}
