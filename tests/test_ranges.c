/* td_arange() and td_linspace() against PyTorch, bit for bit: recorded by reference/record_ranges.py. */
#include "ops_values.h"

#include <zlib.h>

struct recorded_range {
    td_dtype dtype;
    double start, other; /* the end, or the step */
    int64_t count;
    uint32_t checksum;
};

#include "reference/range_vectors.h"

static void check(const char *name, td_tensor *got, const struct recorded_range *recorded)
{
    CHECK(got);
    CHECK_EQ(td_tensor_numel(got), recorded->count);
    if (crc32(0, td_tensor_data(got), (unsigned)td_tensor_nbytes(got)) != recorded->checksum)
        FAIL("%s of %lld %s from %g, %g has other bits than PyTorch's", name,
             (long long)recorded->count, td_dtype_name(recorded->dtype), recorded->start,
             recorded->other);
}

TEST(linspace_has_the_bits_of_pytorch)
{
    for (size_t i = 0; i < sizeof recorded_linspaces / sizeof recorded_linspaces[0]; i++) {
        const struct recorded_range *recorded = &recorded_linspaces[i];
        {
            TD_SCOPE;
            check("td_linspace",
                  td_linspace(recorded->start, recorded->other, recorded->count, recorded->dtype, NULL),
                  recorded);
        }
    }
}

TEST(arange_has_the_bits_of_pytorch)
{
    for (size_t i = 0; i < sizeof recorded_aranges / sizeof recorded_aranges[0]; i++) {
        const struct recorded_range *recorded = &recorded_aranges[i];
        bool is_float = recorded->dtype == TD_F32 || recorded->dtype == TD_F64 ||
                        recorded->dtype == TD_F16 || recorded->dtype == TD_BF16;
        double steps = is_float ? (double)recorded->count - 0.5 : (double)recorded->count;
        {
            TD_SCOPE;
            check("td_arange",
                  td_arange(recorded->start, recorded->start + recorded->other * steps,
                            recorded->other, recorded->dtype, NULL),
                  recorded);
        }
    }
}

/* Fractions in ranges of integers, as PyTorch counts them. */
TEST(integers_are_made_of_whole_numbers)
{
    {
        TD_SCOPE;
        CHECK_TENSOR(td_arange(0.5, 3.9, 1, TD_I64, NULL), TD_I64, SHAPE(3), 0, 1, 2);
        CHECK_TENSOR(td_arange(0.5, 3.9, 1, TD_I32, NULL), TD_I32, SHAPE(4), 0, 1, 2, 3);
        CHECK_TENSOR(td_arange(0.5, 4.2, 1.5, TD_I64, NULL), TD_I64, SHAPE(4), 0, 1, 2, 3);
        CHECK_TENSOR(td_arange(0.5, 4.2, 1.5, TD_I32, NULL), TD_I32, SHAPE(3), 0, 1, 2);
        CHECK_TENSOR(td_arange(5, 0.5, -1.9, TD_I64, NULL), TD_I64, SHAPE(5), 5, 4, 3, 2, 1);
        CHECK_TENSOR(td_arange(5, 0.5, -1.9, TD_I32, NULL), TD_I32, SHAPE(3), 5, 4, 3);
        CHECK_EQ(td_tensor_numel(td_arange(3, 3, 1, TD_I64, NULL)), 0);
        CHECK_NULL(td_arange(0, 3, 0.5, TD_I64, NULL), "a step of 0 does not lead from 0 to 3");
        CHECK_NULL(td_arange(0, 3, 0.5, TD_U8, NULL), "in whole numbers");
        CHECK_NULL(td_arange(0, -1, 1, TD_F32, NULL), "a step of 1 does not lead from 0 to -1");
        CHECK_NULL(td_arange(0, 300, 1, TD_U8, NULL), "td_arange: ");
        CHECK_TENSOR(td_arange(0x1p63, 0x1p63 + 4096, 2048, TD_U64, NULL), TD_U64, SHAPE(2), 0x1p63,
                     0x1p63 + 2048);
        CHECK_TENSOR(td_linspace(0.9, 10.9, 4, TD_I32, NULL), TD_I32, SHAPE(4), 0, 3, 6, 10);
        CHECK_TENSOR(td_linspace(3, 8, 1, TD_F16, NULL), TD_F16, SHAPE(1), 3);
        CHECK_EQ(td_tensor_numel(td_linspace(0, 1, 0, TD_F32, NULL)), 0);
    }
}
