/* Steps of optimizers: one pass over the memory of each parameter, shared by the threads. The loops round as PyTorch's
 * sequence of operations does, so that results agree bit for bit. Built without contraction of floating-point
 * expressions: fma() is called where PyTorch rounds once.
 *
 * Nothing is allocated, so that nothing can fail after the first change: halves are computed in blocks on the stack, as
 * f32. */
#include "tensor/cpu_kernels.h"

#include "tensor/cpu_convert.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#define REAL float
#define NAME(x) x##_f32
#define FMA __builtin_fmaf
#define SQRT __builtin_sqrtf
#include "tensor/cpu_update_loops.h"
#undef REAL
#undef NAME
#undef FMA
#undef SQRT

#define REAL double
#define NAME(x) x##_f64
#define FMA __builtin_fma
#define SQRT __builtin_sqrt
#include "tensor/cpu_update_loops.h"

enum { GRAD = 1, ARRAYS = 5, HALF_BLOCK = 1024 };

/* One update, for the threads: the elements of the parameter, its gradient and its buffers, in the order of the loop's
 * arguments. */
struct update {
    void (*run)(const struct update *update, void *const arrays[ARRAYS], int64_t count);
    const void *step; /* td_sgd_update, td_adam_update */
    td_dtype dtype;
    void *arrays[ARRAYS];
};

static void run_sgd(const struct update *u, void *const a[ARRAYS], int64_t count)
{
    if (u->dtype == TD_F64)
        sgd_f64(a[0], a[1], a[2], count, u->step);
    else
        sgd_f32(a[0], a[1], a[2], count, u->step);
}

static void run_adam(const struct update *u, void *const a[ARRAYS], int64_t count)
{
    if (u->dtype == TD_F64)
        adam_f64(a[0], a[1], a[2], a[3], a[4], count, u->step);
    else
        adam_f32(a[0], a[1], a[2], a[3], a[4], count, u->step);
}

static void update_halves(const struct update *update, int64_t begin, int64_t end)
{
    _Alignas(64) float wide[ARRAYS][HALF_BLOCK];
    for (int64_t at = begin; at < end; at += HALF_BLOCK) {
        int64_t count = end - at < HALF_BLOCK ? end - at : HALF_BLOCK;
        void *arrays[ARRAYS] = {0};
        for (int i = 0; i < ARRAYS && update->arrays[i]; i++) {
            arrays[i] = wide[i];
            td__convert_half(wide[i], (uint16_t *)update->arrays[i] + at, update->dtype, count);
        }
        update->run(update, arrays, count);
        for (int i = 0; i < ARRAYS && update->arrays[i]; i++)
            if (i != GRAD)
                td__convert_to_half((uint16_t *)update->arrays[i] + at, update->dtype, wide[i],
                                    count);
    }
}

static void update_range(void *arg, int64_t begin, int64_t end)
{
    const struct update *update = arg;
    if (update->dtype == TD_F16 || update->dtype == TD_BF16) {
        update_halves(update, begin, end);
        return;
    }
    void *arrays[ARRAYS] = {0};
    size_t offset = (size_t)begin * td_dtype_size(update->dtype);
    for (int i = 0; i < ARRAYS && update->arrays[i]; i++)
        arrays[i] = (char *)update->arrays[i] + offset;
    update->run(update, arrays, end - begin);
}

td_status td__cpu_sgd(const td_sgd_update *updates, int count)
{
    for (int i = 0; i < count; i++) {
        const td_sgd_update *u = &updates[i];
        struct update update = {.run = run_sgd,
                                .step = u,
                                .dtype = u->parameter->layout.dtype,
                                .arrays = {td_tensor_data(u->parameter), td_tensor_data(u->grad),
                                           u->buffer ? td_tensor_data(u->buffer) : NULL}};
        td__parallel_for(u->parameter->layout.numel, TD__GRAIN, update_range, &update);
    }
    return TD_OK;
}

td_status td__cpu_adam(const td_adam_update *updates, int count)
{
    for (int i = 0; i < count; i++) {
        const td_adam_update *u = &updates[i];
        struct update update = {.run = run_adam,
                                .step = u,
                                .dtype = u->parameter->layout.dtype,
                                .arrays = {td_tensor_data(u->parameter), td_tensor_data(u->grad),
                                           td_tensor_data(u->mean), td_tensor_data(u->square),
                                           u->greatest ? td_tensor_data(u->greatest) : NULL}};
        td__parallel_for(u->parameter->layout.numel, TD__GRAIN, update_range, &update);
    }
    return TD_OK;
}
