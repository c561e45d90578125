/* Chooses the loops of a matrix product, and gives them their memory.
 *
 * With one thread all products are our own; with several, large ones go to OpenBLAS (blas.h). */
#include "base/fail.h"
#include "base/simd.h"
#include "tensor/aligned.h"
#include "tensor/blas.h"
#include "tensor/direct.h"
#include "tensor/gemm.h"

#include <string.h>

/* Below so many multiplications a product is done before other threads have woken up. */
#define THREADS_FROM (1 << 20)

/* Products that are turned have at most so many columns and rows. */
#define NARROW 12
#define TALL 256

static const struct td__gemm_loops *choose(td_dtype dtype)
{
#if defined(__x86_64__)
    if (td__simd() == TD__SIMD_AVX512)
        return dtype == TD_F32 ? &td__gemm_avx512_f32 : &td__gemm_avx512_f64;
    if (td__simd() == TD__SIMD_AVX2)
        return dtype == TD_F32 ? &td__gemm_avx2_f32 : &td__gemm_avx2_f64;
#endif
    return dtype == TD_F32 ? &td__gemm_generic_f32 : &td__gemm_generic_f64;
}

const struct td__direct_loops *td__direct_loops(td_dtype dtype)
{
#if defined(__x86_64__)
    if (td__simd() == TD__SIMD_AVX512)
        return dtype == TD_F32 ? &td__direct_avx512_f32 : &td__direct_avx512_f64;
    if (td__simd() == TD__SIMD_AVX2)
        return dtype == TD_F32 ? &td__direct_avx2_f32 : &td__direct_avx2_f64;
#endif
    return dtype == TD_F32 ? &td__direct_generic_f32 : &td__direct_generic_f64;
}

/* Without columns of A there is nothing to add up: C is the bias, or 0, or stays. */
static void finish_empty(td_dtype dtype, const struct td__gemm *gemm, int64_t item)
{
    for (int64_t i = 0; i < gemm->m; i++)
        for (int64_t j = 0; j < gemm->n; j++) {
            int64_t at = item * gemm->c_item + i * gemm->c_row + j;
            if (dtype == TD_F32) {
                float bias = (gemm->row_bias ? ((const float *)gemm->row_bias)[i] : 0) +
                             (gemm->column_bias ? ((const float *)gemm->column_bias)[j] : 0);
                float *c = gemm->c;
                c[at] = gemm->accumulate ? c[at] + bias : bias;
            } else {
                double bias = (gemm->row_bias ? ((const double *)gemm->row_bias)[i] : 0) +
                              (gemm->column_bias ? ((const double *)gemm->column_bias)[j] : 0);
                double *c = gemm->c;
                c[at] = gemm->accumulate ? c[at] + bias : bias;
            }
        }
}

static td_status run(td_dtype dtype, const struct td__gemm *gemm)
{
    const struct td__gemm_loops *loops = choose(dtype);
    size_t bytes = loops->work_bytes(gemm);
    struct td__aligned work = td__aligned_alloc(bytes);
    if (!work.data)
        return td__fail(TD_ERR_NOMEM, "matrix product: no memory for %zu bytes to work in", bytes);
    loops->run(gemm, work.data);
    td__aligned_free(&work);
    return TD_OK;
}

/* A result of few columns would leave most of a vector unused. Its transpose has long rows:
 * C^T = B^T A^T, made aside and turned. */
static bool is_narrow(const struct td__gemm *gemm)
{
    return gemm->n <= NARROW && gemm->m >= 2 * gemm->n && gemm->m <= TALL && gemm->batch == 1 &&
           !gemm->pack_b && !gemm->item_done && !gemm->row_bias;
}

static td_status run_turned(td_dtype dtype, const struct td__gemm *gemm)
{
    double turned[NARROW * TALL]; /* of either dtype */
    struct td__gemm other = *gemm;
    other.m = gemm->n;
    other.n = gemm->m;
    other.a = gemm->b;
    other.a_row = gemm->b_col;
    other.a_col = gemm->b_row;
    other.b = gemm->a;
    other.b_row = gemm->a_col;
    other.b_col = gemm->a_row;
    other.c = turned;
    other.c_row = gemm->m;
    other.row_bias = gemm->column_bias;
    other.column_bias = NULL;
    other.accumulate = false;
    TD_TRY(run(dtype, &other));
    for (int64_t i = 0; i < gemm->m; i++)
        for (int64_t j = 0; j < gemm->n; j++) {
            int64_t to = i * gemm->c_row + j, from = j * gemm->m + i;
            if (dtype == TD_F32) {
                float *c = gemm->c;
                c[to] = (gemm->accumulate ? c[to] : 0) + ((float *)turned)[from];
            } else {
                double *c = gemm->c;
                c[to] = (gemm->accumulate ? c[to] : 0) + turned[from];
            }
        }
    return TD_OK;
}

td_status td__gemm(td_dtype dtype, const struct td__gemm *asked)
{
    struct td__gemm gemm = *asked;
    if (gemm.batch == 0)
        gemm.batch = 1;
    if (gemm.m == 0 || gemm.n == 0)
        return TD_OK;
    if (gemm.k == 0) {
        for (int64_t i = 0; i < gemm.batch; i++) {
            finish_empty(dtype, &gemm, i);
            if (gemm.item_done)
                gemm.item_done(&gemm, i);
        }
        return TD_OK;
    }
    if (td_get_num_threads() > 1 &&
        (double)gemm.m * (double)gemm.n * (double)gemm.k >= THREADS_FROM &&
        td__blas_gemm(dtype, &gemm))
        return TD_OK;
    return is_narrow(&gemm) ? run_turned(dtype, &gemm) : run(dtype, &gemm);
}
