/* OpenBLAS by dlopen(); see blas.h. */
#include "tensor/blas.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 }; /* as in cblas.h */

typedef void sgemm_fn(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                      const float *a, int lda, const float *b, int ldb, float beta, float *c,
                      int ldc);
typedef void dgemm_fn(int order, int transpose_a, int transpose_b, int m, int n, int k,
                      double alpha, const double *a, int lda, const double *b, int ldb, double beta,
                      double *c, int ldc);

static struct {
    sgemm_fn *sgemm;
    dgemm_fn *dgemm;
    void (*set_num_threads)(int);
} library;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int told_threads;

static void open_library(void)
{
    void *handle = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return;
    sgemm_fn *sgemm = (sgemm_fn *)dlsym(handle, "cblas_sgemm");
    dgemm_fn *dgemm = (dgemm_fn *)dlsym(handle, "cblas_dgemm");
    void (*set)(int) = (void (*)(int))dlsym(handle, "openblas_set_num_threads");
    if (!sgemm || !dgemm || !set) {
        dlclose(handle);
        return;
    }
    library.dgemm = dgemm;
    library.set_num_threads = set;
    library.sgemm = sgemm;
}

/* Whether BLAS can take a matrix with these strides: one of them is 1, and the other one, the
 * leading dimension, is at least as long as a row. */
static bool fits(int64_t rows, int64_t columns, int64_t row, int64_t column, int *transpose,
                 int *leading)
{
    bool plain = (column == 1 || columns == 1) && row >= columns;
    bool turned = (row == 1 || rows == 1) && column >= rows;
    int64_t stride = plain ? row : column;
    if ((!plain && !turned) || stride > INT_MAX || rows > INT_MAX || columns > INT_MAX)
        return false;
    *transpose = plain ? PLAIN : TRANSPOSED;
    *leading = (int)stride;
    return true;
}

/* What the bias adds to C, so that the product can be added to it. */
static void set_bias(td_dtype dtype, const struct td__gemm *gemm)
{
    size_t row_bytes = (size_t)gemm->n * td_dtype_size(dtype);
    for (int64_t i = 0; i < gemm->m; i++)
        memcpy((char *)gemm->c + (size_t)(i * gemm->c_row) * td_dtype_size(dtype),
               gemm->column_bias, row_bytes);
}

bool td__blas_gemm(td_dtype dtype, const struct td__gemm *gemm)
{
    int transpose_a, transpose_b, lda, ldb;
    if (gemm->pack_b || gemm->batch > 1 || gemm->item_done || gemm->row_bias ||
        (gemm->column_bias && gemm->accumulate) || gemm->c_row < gemm->n || gemm->c_row > INT_MAX ||
        !fits(gemm->m, gemm->k, gemm->a_row, gemm->a_col, &transpose_a, &lda) ||
        !fits(gemm->k, gemm->n, gemm->b_row, gemm->b_col, &transpose_b, &ldb))
        return false;
    pthread_once(&once, open_library);
    if (!library.sgemm)
        return false;

    int threads = td_get_num_threads();
    if (atomic_exchange(&told_threads, threads) != threads)
        library.set_num_threads(threads);
    if (gemm->column_bias)
        set_bias(dtype, gemm);
    bool add = gemm->accumulate || gemm->column_bias;
    int m = (int)gemm->m, n = (int)gemm->n, k = (int)gemm->k;
    if (dtype == TD_F32)
        library.sgemm(ROW_MAJOR, transpose_a, transpose_b, m, n, k, (float)gemm->alpha, gemm->a,
                      lda, gemm->b, ldb, add ? 1 : 0, gemm->c, (int)gemm->c_row);
    else
        library.dgemm(ROW_MAJOR, transpose_a, transpose_b, m, n, k, gemm->alpha, gemm->a, lda,
                      gemm->b, ldb, add ? 1 : 0, gemm->c, (int)gemm->c_row);
    return true;
}
