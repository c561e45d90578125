/* The kernels of products and pooling, against plain loops in double over many shapes. */
#include "kernel_values.h"
#include "thread_sanitizer.h"

#include "tensor/gemm.h"

#include <sys/wait.h>
#include <unistd.h>

/* ---- matmul ----------------------------------------------------------------------------------- */

/* A view of shape [batch, rows, columns] in one of several layouts. */
static td_tensor *view(int kind, int64_t batch, int64_t rows, int64_t columns, td_dtype dtype)
{
    td_tensor *made, *seen;
    switch (kind) {
    case 0:
        return filled(SHAPE(batch, rows, columns), dtype);
    case 1: /* transposed */
        made = filled(SHAPE(batch, columns, rows), dtype);
        seen = td_transpose(made, 1, 2);
        break;
    case 2: /* the batch in the middle, as of heads */
        made = filled(SHAPE(rows, batch, columns), dtype);
        seen = td_transpose(made, 0, 1);
        break;
    case 3: /* neither rows nor columns side by side */
        made = filled(SHAPE(batch, rows, columns * 2 + 1), dtype);
        seen = td_slice(made, 2, 1, INT64_MAX, 2);
        break;
    default: /* rows with something between them */
        made = filled(SHAPE(batch, rows, columns + 3), dtype);
        seen = td_narrow(made, 2, 2, columns);
    }
    CHECK(seen);
    td_tensor_release(made);
    return seen;
}

static void check_matmul(const td_tensor *a, const td_tensor *b, td_tensor *out, double alpha,
                         bool accumulate)
{
    int64_t batch = td_tensor_size(out, 0), m = td_tensor_size(out, 1), n = td_tensor_size(out, 2);
    int64_t k = td_tensor_size(a, 2);
    double *expected = doubles(batch * m * n), *x = values_of(a), *y = values_of(b);
    for (int64_t i = 0; i < batch * m * n; i++) {
        double sum = 0;
        for (int64_t p = 0; p < k; p++)
            sum += x[i / n * k + p] * y[(i / (m * n) * k + p) * n + i % n];
        expected[i] = alpha * sum + (accumulate ? get(out, i) : 0);
    }
    CHECK_OK(KERNELS->matmul(out, a, b, alpha, accumulate));
    check_close("matmul", out, expected);
    free(x);
    free(y);
    free(expected);
}

TEST(matmul_of_all_layouts, .deadline_s = 60)
{
    static const int64_t sizes[][4] = {
        {1, 1, 1, 1},    {2, 3, 4, 5},    {1, 64, 33, 17}, {3, 15, 31, 16}, {1, 14, 32, 64},
        {2, 29, 65, 48}, {1, 5, 0, 7},    {0, 3, 3, 3},    {2, 0, 4, 4},    {2, 4, 4, 0},
        {1, 1, 300, 70}, {1, 70, 300, 1}, {1, 3, 520, 40}, {5, 1, 7, 1},    {1, 40, 600, 40},
    };
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int kind = 0; kind < 25 * 4; kind++) {
            td_dtype dtype = floats[kind / 25];
            int64_t batch = sizes[s][0], m = sizes[s][1], k = sizes[s][2], n = sizes[s][3];
            td_tensor *a = view(kind % 5, batch, m, k, dtype);
            td_tensor *b = view(kind / 5 % 5, batch, k, n, dtype);
            td_tensor *out = view(kind % 3 * 2, batch, m, n, dtype);
            bool accumulate = kind % 2;
            check_matmul(a, b, out, kind % 7 == 0 ? 0.5 : 1, accumulate);
            RELEASE(out, b, a);
        }
}

/* The gap between the columns of the result and the next row is not written. */
TEST(matmul_stays_inside)
{
    td_tensor *whole = filled(SHAPE(20, 50), TD_F32);
    td_tensor *before = td_clone(whole), *out = td_narrow(whole, 1, 3, 37);
    td_tensor *a = filled(SHAPE(20, 9), TD_F32), *b = filled(SHAPE(9, 37), TD_F32);
    CHECK_OK(KERNELS->matmul(out, a, b, 1, false));
    for (int64_t i = 0; i < 20 * 50; i++)
        if (i % 50 < 3 || i % 50 >= 40)
            CHECK(get(whole, i) == get(before, i));
    RELEASE(whole, before, out, a, b);
}

/* A batch of A against one B, of which the batch has a stride of 0, and the other way round. */
TEST(matmul_of_a_broadcast_operand)
{
    for (int i = 0; i < 8; i++) {
        td_dtype dtype = floats[i / 2];
        td_tensor *one = filled(SHAPE(6, 4), dtype);
        td_tensor *many = filled(SHAPE(3, 4, 6), dtype);
        td_tensor *wide = td_from_blob(td_tensor_data(one), SHAPE(3, 6, 4),
                                       (const int64_t[]){0, 4, 1}, dtype, NULL, NULL, NULL);
        CHECK(wide);
        bool right = i % 2;
        td_tensor *out = right ? filled(SHAPE(3, 4, 4), dtype) : filled(SHAPE(3, 6, 6), dtype);
        check_matmul(right ? many : wide, right ? wide : many, out, 1, false);
        RELEASE(one, many, wide, out);
    }
}

TEST(matmul_of_more_dimensions)
{
    td_tensor *a = filled(SHAPE(2, 3, 2, 5, 4), TD_F32), *b = filled(SHAPE(2, 3, 2, 4, 6), TD_F32);
    td_tensor *out = filled(SHAPE(2, 3, 2, 5, 6), TD_F32);
    /* Two of the dimensions of the batch in another order, in memory only. */
    td_tensor *turned = td_transpose(a, 0, 2);
    td_tensor *turned_b = td_transpose(b, 0, 2), *turned_out = td_transpose(out, 0, 2);
    CHECK_OK(KERNELS->matmul(turned_out, turned, turned_b, 1, false));
    for (int64_t i = 0; i < td_tensor_numel(out); i++) {
        double sum = 0;
        for (int64_t p = 0; p < 4; p++)
            sum += get(a, i / 6 * 4 + p) * get(b, (i / 30 * 4 + p) * 6 + i % 6);
        CHECK(fabs(get(out, i) - sum) < 1e-5);
    }
    RELEASE(a, b, out, turned, turned_b, turned_out);
}

/* Each set of loops that this processor can run, on sizes around those of its tiles. */
static void check_loops(const struct td__gemm_loops *loops, bool is_f32)
{
    static const int64_t sizes[] = {1, 2, 6, 7, 13, 14, 15, 16, 17, 31, 32, 33, 65};
    enum { MANY = sizeof sizes / sizeof *sizes, MOST = 700 };
    td_dtype dtype = is_f32 ? TD_F32 : TD_F64;
    for (int i = 0; i < MANY * MANY; i++) {
        int64_t m = sizes[i / MANY], n = sizes[i % MANY], k = i % 5 == 0 ? MOST : 1 + below(40);
        const bool along_k = i / 2 %
                             2; /* columns of B are side by side, which few rows need not pack */
        td_tensor *a = filled(SHAPE(m, k), dtype);
        td_tensor *b = along_k ? filled(SHAPE(n, k), dtype) : filled(SHAPE(k, n), dtype);
        td_tensor *c = filled(SHAPE(m, n), dtype);
        td_tensor *rows = filled(SHAPE(m), dtype), *columns = filled(SHAPE(n), dtype);
        struct td__gemm gemm = {
            .m = m,
            .n = n,
            .k = k,
            .a = td_tensor_data(a),
            .a_row = k,
            .a_col = 1,
            .b = td_tensor_data(b),
            .b_row = along_k ? 1 : n,
            .b_col = along_k ? k : 1,
            .c = td_tensor_data(c),
            .c_row = n,
            .row_bias = i % 2 ? td_tensor_data(rows) : NULL,
            .column_bias = i % 3 ? td_tensor_data(columns) : NULL,
            .batch = 1,
            .alpha = -2,
            .accumulate = i % 4 == 0,
        };
        double *expected = doubles(m * n), *x = values_of(a), *y = values_of(b);
        for (int64_t j = 0; j < m * n; j++) {
            for (int64_t p = 0; p < k; p++)
                expected[j] += -2 * x[j / n * k + p] * y[along_k ? j % n * k + p : p * n + j % n];
            expected[j] += (i % 2 ? get(rows, j / n) : 0) + (i % 3 ? get(columns, j % n) : 0) +
                           (i % 4 == 0 ? get(c, j) : 0);
        }
        void *work = aligned_alloc(64, (loops->work_bytes(&gemm) + 63) / 64 * 64);
        CHECK(work);
        loops->run(&gemm, work);
        check_close("loops", c, expected);
        free(work);
        free(x);
        free(y);
        free(expected);
        RELEASE(a, b, c, rows, columns);
    }
}

TEST(every_instruction_set, .deadline_s = 60)
{
    check_loops(&td__gemm_generic_f32, true);
    check_loops(&td__gemm_generic_f64, false);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        check_loops(&td__gemm_avx2_f32, true);
        check_loops(&td__gemm_avx2_f64, false);
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
        check_loops(&td__gemm_avx512_f32, true);
        check_loops(&td__gemm_avx512_f64, false);
    }
#endif
}

TEST(matmul_of_large_matrices, .deadline_s = 60)
{
    for (int threads = 1; threads <= 2; threads++) {
        CHECK_OK(td_set_num_threads(threads));
        CHECK_EQ(td_get_num_threads(), threads);
        for (int kind = 0; kind < 4; kind++) {
            td_tensor *a = view(kind % 2, 1, 600, 300, TD_F32);
            td_tensor *b = view(kind / 2, 1, 300, 70, TD_F32);
            td_tensor *out = filled(SHAPE(1, 600, 70), TD_F32);
            check_matmul(a, b, out, 1, kind == 3);
            RELEASE(out, b, a);
        }
    }
}

TEST(a_fork_multiplies_too)
{
    if (UNDER_TSAN)
        td_test_skip("ThreadSanitizer ends a fork that starts threads");
    CHECK_OK(td_set_num_threads(2));
    td_tensor *a = filled(SHAPE(1, 200, 200), TD_F32), *b = filled(SHAPE(1, 200, 200), TD_F32);
    td_tensor *out = filled(SHAPE(1, 200, 200), TD_F32);
    check_matmul(a, b, out, 1, false);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        check_matmul(a, b, out, 1, false);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    check_matmul(a, b, out, 1, true);
    RELEASE(a, b, out);
}

TEST(malformed_numbers_of_threads)
{
    CHECK_FAILS(td_set_num_threads(0), TD_ERR_INVALID, "at least 1");
}

TEST(nan_and_infinity_pass_through_products)
{
    td_tensor *a = filled(SHAPE(1, 20, 30), TD_F32), *b = filled(SHAPE(1, 30, 40), TD_F32);
    td_tensor *out = filled(SHAPE(1, 20, 40), TD_F32);
    set(a, 7 * 30 + 3, NAN);
    set(a, 9 * 30 + 4, INFINITY);
    for (int64_t j = 0; j < 40; j++)
        set(b, 4 * 40 + j, 1);
    CHECK_OK(KERNELS->matmul(out, a, b, 1, false));
    for (int64_t i = 0; i < 20 * 40; i++) {
        CHECK_EQ(isnan(get(out, i)), i / 40 == 7);
        CHECK_EQ(isinf(get(out, i)), i / 40 == 9);
    }
    RELEASE(a, b, out);
}

TEST(products_of_integers_are_refused)
{
    td_tensor *a = td_zeros(SHAPE(2, 2), TD_I32, NULL), *out = td_zeros(SHAPE(2, 2), TD_I32, NULL);
    CHECK_FAILS(KERNELS->matmul(out, a, a, 1, false), TD_ERR_UNSUPPORTED, "i32");
    CHECK_FAILS(KERNELS->linear(out, a, a, NULL), TD_ERR_UNSUPPORTED, "i32");
    RELEASE(a, out);
}

TEST(linear)
{
    static const int64_t sizes[][3] = {{1, 1, 1}, {64, 320, 50}, {3, 50, 10}, {0, 4, 4},
                                       {2, 0, 5}, {5, 7, 0},     {1, 300, 9}, {17, 40, 33}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes * 8; i++) {
        const int64_t *size = sizes[i / 8], n = size[0], in = size[1], out_size = size[2];
        td_dtype dtype = floats[i % 4];
        td_tensor *x = filled(SHAPE(n, in), dtype), *w = filled(SHAPE(out_size, in), dtype);
        td_tensor *bias = i % 8 < 4 ? filled(SHAPE(out_size), dtype) : NULL;
        td_tensor *out = filled(SHAPE(n, out_size), dtype);
        double *expected = doubles(n * out_size);
        for (int64_t j = 0; j < n * out_size; j++) {
            expected[j] = bias ? get(bias, j % out_size) : 0;
            for (int64_t p = 0; p < in; p++)
                expected[j] += get(x, j / out_size * in + p) * get(w, j % out_size * in + p);
        }
        CHECK_OK(KERNELS->linear(out, x, w, bias));
        check_close("linear", out, expected);
        free(expected);
        RELEASE(x, w, bias, out);
    }
}
