/* Launches the kernels of random.cu: random numbers and dropout. Words are taken from the generator last, when nothing
 * but the launch can fail. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/random_args.h"

#include <tandem/random.h>

#include <math.h>

#define FLOATS(name)                                                                               \
    [TD_F32] = TD__CUDA_KERNEL(random, #name "_f32"),                                              \
    [TD_F64] = TD__CUDA_KERNEL(random, #name "_f64"),                                              \
    [TD_F16] = TD__CUDA_KERNEL(random, #name "_f16"),                                              \
    [TD_BF16] = TD__CUDA_KERNEL(random, #name "_bf16")
#define REALS(name)                                                                                \
    FLOATS(name), [TD_I8] = TD__CUDA_KERNEL(random, #name "_i8"),                                  \
                  [TD_U8] = TD__CUDA_KERNEL(random, #name "_u8"),                                  \
                  [TD_I16] = TD__CUDA_KERNEL(random, #name "_i16"),                                \
                  [TD_I32] = TD__CUDA_KERNEL(random, #name "_i32"),                                \
                  [TD_I64] = TD__CUDA_KERNEL(random, #name "_i64"),                                \
                  [TD_U32] = TD__CUDA_KERNEL(random, #name "_u32"),                                \
                  [TD_U64] = TD__CUDA_KERNEL(random, #name "_u64"),                                \
                  [TD_BOOL] = TD__CUDA_KERNEL(random, #name "_bool")

enum { FLOAT_KERNELS = TD_BF16 + 1, REAL_KERNELS = TD_BOOL + 1 };

static struct cuda_kernel uniforms[FLOAT_KERNELS] = {FLOATS(uniform)};
static struct cuda_kernel normals[FLOAT_KERNELS] = {FLOATS(normal)};
static struct cuda_kernel bernoullis[REAL_KERNELS] = {REALS(bernoulli)};
static struct cuda_kernel ranges[REAL_KERNELS] = {REALS(range)};
static struct cuda_kernel wide_ranges[REAL_KERNELS] = {REALS(wide_range)};
static struct cuda_kernel dropouts[FLOAT_KERNELS] = {FLOATS(dropout)};
static struct cuda_kernel dropout_grads[FLOAT_KERNELS] = {FLOATS(dropout_grad)};

static bool is_aligned(const void *data, size_t bytes)
{
    return (uintptr_t)data % (bytes < 16 ? bytes : 16) == 0;
}

/* ---- Random numbers ------------------------------------------------------------------------------------------------ */

/* `each` elements come of a block of four words. */
static td_status draw(struct cuda_kernel *kernel, td_tensor *out, struct random_args *args,
                      int each, td_generator *generator)
{
    int64_t count = td_tensor_numel(out);
    if (!count)
        return TD_OK;
    args->space = td__cuda_space((const td_tensor *[]){out}, 1, true);
    args->out = td_tensor_data(out);
    args->grouped = args->space.plain &&
                    is_aligned(args->out, (size_t)each * td_dtype_size(td_tensor_dtype(out)));
    td_status status = td_generator_take_captured(generator, 4 / each * count, &args->words.seed,
                                                  &args->words.offset, &args->words.captured);
    return status ? status
                  : td__cuda_launch(kernel, out, td__cuda_grid_for(out, count, each), args);
}

static double rounded(double x, td_dtype dtype)
{
    return dtype == TD_F64    ? x
           : dtype == TD_F32  ? (double)(float)x
           : dtype == TD_BF16 ? (double)td_bf16_to_f32(td_f32_to_bf16((float)x))
                              : (double)td_f16_to_f32(td_f32_to_f16((float)x));
}

td_status td__cuda_uniform(td_tensor *out, double from, double to, td_generator *generator)
{
    td_dtype dtype = td_tensor_dtype(out);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    struct random_args args = {.from = rounded(from, dtype)};
    args.range = rounded(rounded(to, dtype) - args.from, dtype);
    return draw(&uniforms[dtype], out, &args, dtype == TD_F64 ? 2 : 4, generator);
}

td_status td__cuda_normal(td_tensor *out, double mean, double std, td_generator *generator)
{
    td_dtype dtype = td_tensor_dtype(out);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    struct random_args args = {.from = mean, .range = std};
    return draw(&normals[dtype], out, &args, dtype == TD_F64 ? 2 : 4, generator);
}

/* word 2^-32 < p, for integers: exact, as p 2^32 is. */
static uint64_t threshold_of(double p)
{
    return (uint64_t)ceil(ldexp(p, 32));
}

td_status td__cuda_bernoulli(td_tensor *out, double p, td_generator *generator)
{
    td_dtype dtype = td_tensor_dtype(out);
    if (dtype > TD_BOOL)
        return td__cuda_unsupported();
    struct random_args args = {.threshold = threshold_of(p)};
    return draw(&bernoullis[dtype], out, &args, 4, generator);
}

td_status td__cuda_random_range(td_tensor *out, int64_t from, uint64_t range,
                                td_generator *generator)
{
    td_dtype dtype = td_tensor_dtype(out);
    if (dtype > TD_BOOL)
        return td__cuda_unsupported();
    bool wide = range == 0 || range > UINT64_C(1) << 32;
    struct random_args args = {.base = (uint64_t)from, .modulus = range};
    return draw(wide ? &wide_ranges[dtype] : &ranges[dtype], out, &args, wide ? 2 : 4, generator);
}

/* ---- Dropout ----------------------------------------------------------------------------------------------------------- */

/* 1 - p and the factor are numbers of the dtype, as on the host. */
static struct dropout_args dropout_args(td_tensor *out, const td_tensor *x, const td_tensor *keep,
                                        double p, int64_t block)
{
    td_dtype dtype = td_tensor_dtype(x);
    size_t size = td_dtype_size(dtype), group = DROPOUT_GROUP(size);
    struct dropout_args args = {.out = td_tensor_data(out),
                                .x = td_tensor_data(x),
                                .keep = td_tensor_data(keep),
                                .count = td_tensor_numel(x),
                                .block = block,
                                .threshold = threshold_of(1 - p),
                                .factor = rounded(1 / rounded(1 - p, dtype), dtype)};
    args.grouped = is_aligned(args.out, group * size) && is_aligned(args.x, group * size) &&
                   (block == 1 ? is_aligned(args.keep, group) : block % (int64_t)group == 0);
    return args;
}

td_status td__cuda_dropout_grad(td_tensor *grad_x, const td_tensor *grad_y, const td_tensor *keep,
                                double p, int64_t block)
{
    td_dtype dtype = td_tensor_dtype(grad_y);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    struct dropout_args args = dropout_args(grad_x, grad_y, keep, p, block);
    if (!args.count)
        return TD_OK;
    struct cuda_grid grid = td__cuda_grid_for(grad_x, args.count,
                                              DROPOUT_GROUP(td_dtype_size(dtype)));
    return td__cuda_launch(&dropout_grads[dtype], grad_x, grid, &args);
}

td_status td__cuda_dropout(td_tensor *out, td_tensor *keep, const td_tensor *x, double p,
                           int64_t block, td_generator *generator)
{
    td_dtype dtype = td_tensor_dtype(x);
    if (dtype > TD_BF16)
        return td__cuda_unsupported();
    if (block != 1) {
        td_status status = td__cuda_bernoulli(keep, 1 - p, generator);
        return status ? status : td__cuda_dropout_grad(out, x, keep, p, block);
    }
    struct dropout_args args = dropout_args(out, x, keep, p, block);
    if (!args.count)
        return TD_OK;
    td_status status = td_generator_take_captured(generator, args.count, &args.words.seed,
                                                  &args.words.offset, &args.words.captured);
    struct cuda_grid grid = td__cuda_grid_for(out, args.count, DROPOUT_GROUP(td_dtype_size(dtype)));
    return status ? status : td__cuda_launch(&dropouts[dtype], out, grid, &args);
}
