/* Chooses the loops of a matrix product, allocates their workspace, and divides large products among
 * threads. */
#include "base/fail.h"
#include "base/half.h"
#include "base/simd.h"
#include "tensor/aligned.h"
#include "tensor/direct.h"
#include "tensor/gemm.h"
#include "tensor/parallel_for.h"

#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* Multiplications that pay for a thread; twice as many with so few steps that writing C takes most of the
 * time. */
#define ENOUGH (1 << 18)
#define SHALLOW 32

/* A thread's share of a product: columns that fill the strips of every instruction set, and panels to pack. */
#define STRIP_COLUMNS 32
#define PANELS 4

/* The columns and rows of a product that is computed transposed, at most. */
#define NARROW 12
#define TALL 256

static const struct td__gemm_loops *choose(td_dtype dtype)
{
#if defined(__x86_64__)
    if (dtype == TD_BF16 && td__simd_has_bf16())
        return &td__gemm_avx512_bf16;
    if (td__simd() == TD__SIMD_AVX512)
        return dtype == TD_F64 ? &td__gemm_avx512_f64 : &td__gemm_avx512_f32;
    if (td__simd() == TD__SIMD_AVX2)
        return dtype == TD_F64 ? &td__gemm_avx2_f64 : &td__gemm_avx2_f32;
#endif
    return dtype == TD_F64 ? &td__gemm_generic_f64 : &td__gemm_generic_f32;
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

/* Bytes of an element of the compute type, and of C. */
static int64_t size_of_wide(td_dtype dtype)
{
    return dtype == TD_F64 ? sizeof(double) : sizeof(float);
}

static int64_t size_of_c(td_dtype dtype, const struct td__gemm *gemm)
{
    return gemm->c_half ? (int64_t)sizeof(uint16_t) : size_of_wide(dtype);
}

/* Single elements of the compute type, and of C. */
static double wide_at(td_dtype dtype, const void *data, int64_t at)
{
    return dtype == TD_F64 ? ((const double *)data)[at] : (double)((const float *)data)[at];
}

static double get_c(td_dtype dtype, const struct td__gemm *gemm, int64_t at)
{
    if (!gemm->c_half)
        return wide_at(dtype, gemm->c, at);
    const uint16_t half = ((const uint16_t *)gemm->c)[at];
    return dtype == TD_F16 ? td__f16_to_f32(half) : td__bf16_to_f32(half);
}

static void set_c(td_dtype dtype, const struct td__gemm *gemm, int64_t at, double value)
{
    if (dtype == TD_F64)
        ((double *)gemm->c)[at] = value;
    else if (!gemm->c_half)
        ((float *)gemm->c)[at] = (float)value;
    else
        ((uint16_t *)gemm->c)[at] = dtype == TD_F16 ? td__f32_to_f16((float)value)
                                                    : td__f32_to_bf16((float)value);
}

/* For k = 0: C is the bias, or 0, or unchanged. */
static void finish_empty(td_dtype dtype, const struct td__gemm *gemm, int64_t item)
{
    for (int64_t i = 0; i < gemm->m; i++)
        for (int64_t j = 0; j < gemm->n; j++) {
            const int64_t at = item * gemm->c_item + i * gemm->c_row + j;
            double value = gemm->accumulate ? get_c(dtype, gemm, at) : 0;
            if (gemm->row_bias)
                value += wide_at(dtype, gemm->row_bias, i);
            if (gemm->column_bias)
                value += wide_at(dtype, gemm->column_bias, j);
            set_c(dtype, gemm, at, value);
        }
}

/* Switches flush-to-zero of subnormal numbers in this thread. Returns the former state. */
static unsigned flush_subnormals(unsigned state)
{
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(state);
    return before;
#else
    return state;
#endif
}

static unsigned flushing_state(void)
{
#if defined(__x86_64__)
    return _mm_getcsr() | 0x8040;
#else
    return 0;
#endif
}

/* ---- Parts for threads ------------------------------------------------------------------------- */

struct gemm_job {
    td_dtype dtype;
    const struct td__gemm *gemm;
    const struct td__gemm_loops *loops;
    int64_t parts;
    bool by_rows;
    void *packed_a;
    atomic_int failed;
};

static bool run_part(const struct gemm_job *job, const struct td__gemm *gemm)
{
    struct td__aligned work = td__aligned_alloc(job->loops->work_bytes(gemm));
    if (!work.data)
        return false;
    const bool flush = job->dtype == TD_BF16;
    const unsigned before = flush ? flush_subnormals(flushing_state()) : 0;
    job->loops->run(gemm, work.data);
    if (flush)
        flush_subnormals(before);
    td__aligned_free(&work);
    return true;
}

/* Where part `i` of `size` rows or columns begins: at a multiple of the tile size. */
static int64_t begin_of(const struct gemm_job *job, int64_t size, int64_t i)
{
    const int64_t step = job->by_rows ? 14 : 32;
    const int64_t tiles = (size + step - 1) / step, at = tiles * i / job->parts * step;
    return at < size ? at : size;
}

static void run_parts(void *arg, int64_t begin, int64_t end)
{
    struct gemm_job *job = arg;
    const struct td__gemm *whole = job->gemm;
    const int64_t in = (int64_t)td_dtype_size(job->dtype);
    const int64_t out = size_of_c(job->dtype, whole), wide = size_of_wide(job->dtype);
    struct td__gemm gemm = *whole;
    if (job->by_rows) {
        const int64_t first = begin_of(job, whole->m, begin);
        gemm.m = begin_of(job, whole->m, end) - first;
        gemm.a = (const char *)whole->a + first * whole->a_row * in;
        gemm.c = (char *)whole->c + first * whole->c_row * out;
        if (whole->row_bias)
            gemm.row_bias = (const char *)whole->row_bias + first * wide;
    } else {
        const int64_t first = begin_of(job, whole->n, begin);
        gemm.n = begin_of(job, whole->n, end) - first;
        gemm.b = (const char *)whole->b + first * whole->b_col * in;
        gemm.c = (char *)whole->c + first * out;
        if (whole->column_bias)
            gemm.column_bias = (const char *)whole->column_bias + first * wide;
    }
    if (gemm.m > 0 && gemm.n > 0 && !run_part(job, &gemm))
        job->failed = 1;
}

/* ---- A shared A -------------------------------------------------------------------------------- */

static void pack_panels(void *arg, int64_t begin, int64_t end)
{
    struct gemm_job *job = arg;
    job->loops->pack_a(job->gemm, begin, end, job->packed_a);
}

static void run_strips(void *arg, int64_t begin, int64_t end)
{
    struct gemm_job *job = arg;
    const struct td__gemm *whole = job->gemm;
    const int64_t in = (int64_t)td_dtype_size(job->dtype);
    const int64_t out = size_of_c(job->dtype, whole), wide = size_of_wide(job->dtype);
    const int64_t first = begin * STRIP_COLUMNS, last = end * STRIP_COLUMNS;
    struct td__gemm gemm = *whole;
    gemm.packed_a = job->packed_a;
    gemm.n = (last < whole->n ? last : whole->n) - first;
    gemm.b = (const char *)whole->b + first * whole->b_col * in;
    gemm.c = (char *)whole->c + first * out;
    if (whole->column_bias)
        gemm.column_bias = (const char *)whole->column_bias + first * wide;
    if (!run_part(job, &gemm))
        job->failed = 1;
}

/* Threads pack A together, then take strips of B. */
static td_status run_shared(struct gemm_job *job)
{
    struct td__aligned packed = td__aligned_alloc(job->loops->a_bytes(job->gemm));
    if (!packed.data)
        return td__fail_nomem("matrix product");
    job->packed_a = packed.data;
    td__parallel_for(job->loops->a_panels(job->gemm), PANELS, pack_panels, job);
    td__parallel_for((job->gemm->n + STRIP_COLUMNS - 1) / STRIP_COLUMNS, 1, run_strips, job);
    td__aligned_free(&packed);
    return job->failed ? td__fail_nomem("matrix product") : TD_OK;
}

/* If A is too large for that, or B has too few strips, or there are few steps, each thread packs its own
 * part of the larger side, and all of the smaller one. */
static td_status run(td_dtype dtype, const struct td__gemm *gemm)
{
    struct gemm_job job = {.dtype = dtype,
                           .gemm = gemm,
                           .loops = choose(dtype),
                           .by_rows = gemm->m >= gemm->n,
                           .parts = td_get_num_threads()};
    const double work = (double)gemm->m * (double)gemm->n * (double)gemm->k;
    const double enough = gemm->k < SHALLOW ? 2 * ENOUGH : ENOUGH;
    if (job.parts > work / enough)
        job.parts = (int64_t)(work / enough);
    if (job.parts < 2 || gemm->batch > 1 || gemm->pack_b || gemm->item_done)
        job.failed = !run_part(&job, gemm);
    else if (td__gemm_keeps_a(gemm->m, gemm->k) && gemm->n >= 4 * STRIP_COLUMNS * job.parts &&
             !job.loops->is_flat(gemm))
        return run_shared(&job);
    else
        td__parallel_for(job.parts, 1, run_parts, &job);
    return job.failed ? td__fail_nomem("matrix product") : TD_OK;
}

/* A C of few columns would leave most of a vector unused. Its transpose has long rows: C^T = B^T A^T,
 * computed in a buffer and transposed. alpha scales A, which must not become B. */
static bool is_narrow(const struct td__gemm *gemm)
{
    return gemm->n <= NARROW && gemm->m >= 2 * gemm->n && gemm->m <= TALL && gemm->batch == 1 &&
           gemm->alpha == 1 && !gemm->pack_b && !gemm->item_done && !gemm->row_bias;
}

/* Transposes C^T, rows of m elements of the compute type, into C of `gemm`, or the other way round. */
static void transpose_c(td_dtype dtype, const struct td__gemm *gemm, void *transposed, bool back)
{
    const struct td__gemm aside = {.c = transposed};
    for (int64_t i = 0; i < gemm->m; i++)
        for (int64_t j = 0; j < gemm->n; j++) {
            const int64_t at = i * gemm->c_row + j, there = j * gemm->m + i;
            if (!back)
                set_c(dtype, &aside, there, get_c(dtype, gemm, at));
            else if (dtype == TD_F32)
                ((float *)gemm->c)[at] = ((const float *)transposed)[there];
            else
                set_c(dtype, gemm, at, wide_at(dtype, transposed, there));
        }
}

static td_status run_transposed(td_dtype dtype, const struct td__gemm *gemm)
{
    double transposed[NARROW * TALL]; /* of either dtype */
    struct td__gemm other = *gemm;
    other.m = gemm->n;
    other.n = gemm->m;
    other.a = gemm->b;
    other.a_row = gemm->b_col;
    other.a_col = gemm->b_row;
    other.b = gemm->a;
    other.b_row = gemm->a_col;
    other.b_col = gemm->a_row;
    other.c = transposed;
    other.c_row = gemm->m;
    other.row_bias = gemm->column_bias;
    other.column_bias = NULL;
    other.c_half = false;
    if (gemm->accumulate)
        transpose_c(dtype, gemm, transposed, false);
    TD_TRY(run(dtype, &other));
    transpose_c(dtype, gemm, transposed, true);
    return TD_OK;
}

/* A C of halves is rounded once: it is computed in blocks of rows whose part of A fits the packed A. */
static td_status run_blocks(td_dtype dtype, const struct td__gemm *whole)
{
    struct td__gemm gemm = *whole;
    int64_t rows = TD__GEMM_KEPT / whole->k;
    for (int64_t first = 0; first < whole->m; first += rows) {
        rows = rows < 1 ? 1 : rows;
        gemm.m = whole->m - first < rows ? whole->m - first : rows;
        gemm.a = (const char *)whole->a + first * whole->a_row * (int64_t)td_dtype_size(dtype);
        gemm.c = (char *)whole->c + first * whole->c_row * size_of_c(dtype, whole);
        if (whole->row_bias)
            gemm.row_bias = (const char *)whole->row_bias + first * size_of_wide(dtype);
        TD_TRY(run(dtype, &gemm));
    }
    return TD_OK;
}

/* The steps of halves: bf16 is multiplied in pairs, the last one padded with 0. */
static void count_steps(td_dtype dtype, struct td__gemm *gemm)
{
    if (dtype != TD_F16 && dtype != TD_BF16)
        return;
    gemm->half = dtype;
    gemm->half_k = gemm->k;
    if (dtype == TD_BF16)
        gemm->k = (gemm->k + 1) / 2 * (td__simd_has_bf16() ? 1 : 2);
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
    count_steps(dtype, &gemm);
    if (is_narrow(&gemm))
        return run_transposed(dtype, &gemm);
    return gemm.c_half ? run_blocks(dtype, &gemm) : run(dtype, &gemm);
}
