/* The names and sizes of data types, and the names of reductions. */
#include "base/half.h"

#include <tandem/dtype.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    [TD_F32] = {"f32", 4},
    [TD_F64] = {"f64", 8},
    [TD_F16] = {"f16", 2},
    [TD_BF16] = {"bf16", 2},
    [TD_I8] = {"i8", 1},
    [TD_U8] = {"u8", 1},
    [TD_I16] = {"i16", 2},
    [TD_I32] = {"i32", 4},
    [TD_I64] = {"i64", 8},
    [TD_U32] = {"u32", 4},
    [TD_U64] = {"u64", 8},
    [TD_BOOL] = {"bool", 1},
    [TD_COMPLEX64] = {"complex64", 8},
    [TD_COMPLEX128] = {"complex128", 16},
};

/* PyTorch's aliases. */
static const struct {
    const char *name;
    td_dtype dtype;
} other_names[] = {
    {"float32", TD_F32},   {"float", TD_F32},
    {"float64", TD_F64},   {"double", TD_F64},
    {"float16", TD_F16},   {"half", TD_F16},
    {"bfloat16", TD_BF16}, {"int8", TD_I8},
    {"uint8", TD_U8},      {"int16", TD_I16},
    {"short", TD_I16},     {"int32", TD_I32},
    {"int", TD_I32},       {"int64", TD_I64},
    {"long", TD_I64},      {"uint32", TD_U32},
    {"uint64", TD_U64},    {"cfloat", TD_COMPLEX64},
    {"char", TD_I8},       {"cdouble", TD_COMPLEX128},
    {"byte", TD_U8},
};

static const char *const op_names[] = {
    [TD_SUM] = "sum", [TD_PRODUCT] = "product", [TD_MIN] = "min",
    [TD_MAX] = "max", [TD_AVG] = "avg",         [TD_BAND] = "band",
    [TD_BOR] = "bor", [TD_BXOR] = "bxor",       [TD_PREMUL_SUM] = "premul_sum",
};

enum {
    DTYPES = sizeof dtypes / sizeof *dtypes,
    OTHER_NAMES = sizeof other_names / sizeof *other_names,
    OPS = sizeof op_names / sizeof *op_names,
};

size_t td_dtype_size(td_dtype dtype)
{
    return (unsigned)dtype < DTYPES ? dtypes[dtype].size : 0;
}

const char *td_dtype_name(td_dtype dtype)
{
    return (unsigned)dtype < DTYPES ? dtypes[dtype].name : "unknown";
}

bool td_dtype_parse(const char *name, td_dtype *dtype)
{
    if (!strncmp(name, "torch.", 6))
        name += 6;
    for (int i = 0; i < DTYPES; i++) {
        if (!strcmp(name, dtypes[i].name)) {
            *dtype = (td_dtype)i;
            return true;
        }
    }
    for (int i = 0; i < OTHER_NAMES; i++) {
        if (!strcmp(name, other_names[i].name)) {
            *dtype = other_names[i].dtype;
            return true;
        }
    }
    return false;
}

const char *td_reduce_op_name(td_reduce_op op)
{
    return (unsigned)op < OPS ? op_names[op] : "unknown";
}

float td_f16_to_f32(uint16_t half)
{
    return td__f16_to_f32(half);
}

uint16_t td_f32_to_f16(float value)
{
    return td__f32_to_f16(value);
}

float td_bf16_to_f32(uint16_t half)
{
    return td__bf16_to_f32(half);
}

uint16_t td_f32_to_bf16(float value)
{
    return td__f32_to_bf16(value);
}
