/* Data types: names and sizes, and the conversions of f16 and bf16 over all their values, by the
 * functions and by the kernels of every instruction set. */
#include "reduction_reference.h"
#include "runner.h"

#include "reduce/reduce_kernels.h"

#include <math.h>

TEST(names_and_sizes)
{
    size_t total = 0;
    for (td_dtype dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++) {
        td_dtype found = (td_dtype)-1;
        CHECK(td_dtype_parse(td_dtype_name(dtype), &found));
        CHECK_EQ(found, dtype);
        total += td_dtype_size(dtype);
    }
    CHECK_EQ(total, 4 + 8 + 2 + 2 + 1 + 1 + 2 + 4 + 8 + 4 + 8 + 1 + 8 + 16);
    static const struct {
        const char *name;
        td_dtype dtype;
    } others[] = {{"float32", TD_F32},     {"float", TD_F32},         {"double", TD_F64},
                  {"half", TD_F16},        {"bfloat16", TD_BF16},     {"torch.int64", TD_I64},
                  {"long", TD_I64},        {"int", TD_I32},           {"short", TD_I16},
                  {"uint8", TD_U8},        {"torch.bool", TD_BOOL},   {"cfloat", TD_COMPLEX64},
                  {"torch.bf16", TD_BF16}, {"cdouble", TD_COMPLEX128}};
    for (size_t i = 0; i < LENGTH(others); i++) {
        td_dtype found;
        CHECK(td_dtype_parse(others[i].name, &found));
        CHECK_EQ(found, others[i].dtype);
    }
    td_dtype untouched = TD_U8;
    CHECK(!td_dtype_parse("", &untouched));
    CHECK(!td_dtype_parse("f3", &untouched));
    CHECK(!td_dtype_parse("f32 ", &untouched));
    CHECK(!td_dtype_parse("torch.", &untouched));
    CHECK_EQ(untouched, TD_U8);
    CHECK_STR(td_dtype_name((td_dtype)14), "unknown");
    CHECK_EQ(td_dtype_size((td_dtype)-1), 0);
    CHECK_STR(td_reduce_op_name(TD_PREMUL_SUM), "premul_sum");
    CHECK_STR(td_reduce_op_name(TD_SUM), "sum");
    CHECK_STR(td_reduce_op_name((td_reduce_op)9), "unknown");
}

/* ---- Halves ---------------------------------------------------------------------------------- */

/* Numbers on which rounding hangs: halves, what is half way between two, and the f32 beside those. */
static void check_rounding_near(float value, float next)
{
    float candidates[] = {value, (float)(((double)value + (double)next) / 2)};
    for (int c = 0; c < 2; c++) {
        for (int d = -1; d <= 1; d++) {
            float at = of_bits(bits_of(candidates[c]) + (uint32_t)d);
            CHECK_EQ(td_f32_to_f16(at), reference_to_f16(at));
            CHECK_EQ(td_f32_to_bf16(at), reference_to_bf16(at));
        }
    }
}

TEST(halves_are_converted_as_in_the_book)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t half = (uint16_t)h, next = (uint16_t)(h + 1);
        CHECK_EQ(bits_of(td_f16_to_f32(half)), bits_of(reference_from_f16(half)));
        CHECK_EQ(bits_of(td_bf16_to_f32(half)), bits_of(reference_from_bf16(half)));
        bool signalling = (half & 0x7fff) > 0x7c00 && !(half & 0x200);
        CHECK_EQ(td_f32_to_f16(td_f16_to_f32(half)), signalling ? half | 0x200 : half);
        signalling = (half & 0x7fff) > 0x7f80 && !(half & 0x40);
        CHECK_EQ(td_f32_to_bf16(td_bf16_to_f32(half)), signalling ? half | 0x40 : half);
        check_rounding_near(reference_from_f16(half), reference_from_f16(next));
        check_rounding_near(reference_from_bf16(half), reference_from_bf16(next));
    }
    uint64_t state = 1;
    for (int i = 0; i < 1000000; i++) {
        float value = of_bits((uint32_t)(next_random(&state) >> 32));
        CHECK_EQ(td_f32_to_f16(value), reference_to_f16(value));
        CHECK_EQ(td_f32_to_bf16(value), reference_to_bf16(value));
    }
}

TEST(halves_of_known_values)
{
    CHECK_EQ(td_f32_to_f16(65519.996f), 0x7bff);
    CHECK_EQ(td_f32_to_f16(65520.0f), 0x7c00);
    CHECK_EQ(td_f32_to_f16(-INFINITY), 0xfc00);
    CHECK_EQ(td_f32_to_f16(0x1p-25f), 0);
    CHECK_EQ(td_f32_to_f16(0x1.002p-25f), 1);
    CHECK_EQ(td_f32_to_f16(-0.0f), 0x8000);
    CHECK_EQ(td_f32_to_bf16(1.00390625f), 0x3f80); /* half way, to the even one */
    CHECK_EQ(td_f32_to_bf16(1.01171875f), 0x3f82);
    CHECK_EQ(td_f32_to_bf16(0x1.fffffep127f), 0x7f80);
    CHECK(isnan(td_bf16_to_f32(td_f32_to_bf16(of_bits(0x7f800001)))));
    CHECK(isnan(td_f16_to_f32(td_f32_to_f16(of_bits(0xff800001)))));
}

TEST(kernels_convert_as_the_functions_do)
{
    enum { ALL = 65536 };
    uint16_t *halves = malloc(ALL * sizeof *halves), *back = malloc(ALL * sizeof *back);
    float *floats = malloc(ALL * sizeof *floats);
    CHECK(halves && back && floats);
    for (size_t set = 0; set < LENGTH(instruction_sets); set++) {
        if (!td__kernels_use(instruction_sets[set]))
            continue;
        const struct td__reduce_kernels *kernels = td__kernels();
        for (int i = 0; i < ALL; i++)
            halves[i] = (uint16_t)i;
        kernels->f16_to_f32(floats, halves, ALL);
        for (int i = 0; i < ALL; i++)
            CHECK_EQ(bits_of(floats[i]), bits_of(td_f16_to_f32((uint16_t)i)));
        kernels->bf16_to_f32(floats, halves, ALL);
        for (int i = 0; i < ALL; i++)
            CHECK_EQ(bits_of(floats[i]), (uint32_t)i << 16);

        uint64_t state = 7;
        for (int round = 0; round < 20; round++) {
            for (int i = 0; i < ALL; i++) {
                uint32_t bits = (uint32_t)(next_random(&state) >> 32);
                /* In turns: any f32, one in the range of f16, and one half way between two. */
                if (round % 3)
                    bits = (bits & 0x83ffffff) + 0x36000000;
                floats[i] = of_bits(round % 3 == 2 ? (bits & 0xfffff000) | 0x1000 : bits);
            }
            kernels->f32_to_f16(back, floats, ALL);
            for (int i = 0; i < ALL; i++)
                CHECK_EQ(back[i], reference_to_f16(floats[i]));
            kernels->f32_to_bf16(back, floats, ALL);
            for (int i = 0; i < ALL; i++)
                CHECK_EQ(back[i], reference_to_bf16(floats[i]));
        }
    }
    free(halves);
    free(back);
    free(floats);
}
