/* Reductions, compared with a slow reference in double precision: over every subset of the
 * dimensions, with all strides and dtypes. */
#include "runner.h"

#include "elements.h"

#include <tandem/ops.h>

#include <math.h>
#include <string.h>

static double neutral(td_reduce_kind kind)
{
    switch (kind) {
    case TD_REDUCE_KIND_PROD:
    case TD_REDUCE_KIND_ALL:
        return 1;
    case TD_REDUCE_KIND_MAX:
        return -INFINITY;
    case TD_REDUCE_KIND_MIN:
        return INFINITY;
    default:
        return 0;
    }
}

static double step(td_reduce_kind kind, double total, double x)
{
    switch (kind) {
    case TD_REDUCE_KIND_PROD:
        return total * x;
    case TD_REDUCE_KIND_MAX:
        return isnan(total) || isnan(x) ? NAN : x > total ? x : total;
    case TD_REDUCE_KIND_MIN:
        return isnan(total) || isnan(x) ? NAN : x < total ? x : total;
    case TD_REDUCE_KIND_ALL:
        return total != 0 && x != 0;
    case TD_REDUCE_KIND_ANY:
        return total != 0 || x != 0;
    case TD_REDUCE_KIND_SQUARES:
        return total + x * x;
    default:
        return total + x;
    }
}

/* Which element of the result element `number` of x belongs to. */
static int64_t target_of(const td_tensor *x, unsigned dims, int64_t number)
{
    int64_t target = 0, factor = 1;
    for (int d = td_tensor_ndim(x); d-- > 0;) {
        int64_t size = td_tensor_size(x, d);
        if (!(dims >> d & 1)) {
            target += number % size * factor;
            factor *= size;
        }
        number /= size;
    }
    return target;
}

static td_dtype result_dtype(td_reduce_kind kind, td_dtype dtype)
{
    if (kind == TD_REDUCE_KIND_ALL || kind == TD_REDUCE_KIND_ANY)
        return TD_BOOL;
    return dtype;
}

static void check_reduction(td_reduce_kind kind, const td_tensor *x, unsigned dims,
                            char result, td_dtype dtype)
{
    struct layout_case layout = {.ndim = td_tensor_ndim(x), .result = result};
    for (int d = 0; d < layout.ndim; d++)
        layout.shape[d] = dims >> d & 1 ? 1 : td_tensor_size(x, d);
    td_tensor *out = make_result(&layout, dtype);
    int64_t count = td_tensor_numel(out);
    double *right = malloc((size_t)(count ? count : 1) * sizeof *right);
    CHECK(right);
    for (int64_t i = 0; i < count; i++)
        right[i] = neutral(kind);
    for (int64_t i = 0; i < td_tensor_numel(x); i++) {
        int64_t target = target_of(x, dims, i);
        right[target] = step(kind, right[target], element(x, i));
    }
    double each = (double)td_tensor_numel(x) / (double)(count ? count : 1);
    CHECK_OK(td__cpu_kernels.reduce(kind, out, x, dims));
    for (int64_t i = 0; i < count; i++)
        check_close(element(out, i), kind == TD_REDUCE_KIND_MEAN ? right[i] / each : right[i], out, i);
    free(right);
    td_tensor_release(out);
}

static bool has(td_reduce_kind kind, td_dtype dtype)
{
    bool is_float = dtype <= TD_BF16;
    if (kind == TD_REDUCE_KIND_MEAN || kind == TD_REDUCE_KIND_SQUARES)
        return is_float;
    return dtype != TD_BOOL || kind == TD_REDUCE_KIND_ALL || kind == TD_REDUCE_KIND_ANY ||
           kind == TD_REDUCE_KIND_MAX || kind == TD_REDUCE_KIND_MIN;
}

/* Products of more than a few numbers do not fit. */
static bool is_sensible(td_reduce_kind kind, const td_tensor *x, unsigned dims)
{
    int64_t each = 1;
    for (int d = 0; d < td_tensor_ndim(x); d++)
        each *= dims >> d & 1 ? td_tensor_size(x, d) : 1;
    if ((kind == TD_REDUCE_KIND_MAX || kind == TD_REDUCE_KIND_MIN) && each == 0)
        return false;
    return kind != TD_REDUCE_KIND_PROD || each <= 4;
}

TEST(every_subset_of_dimensions)
{
    static const int64_t shapes[][4] = {{3, 4, 2, 5},   {2, 70, 3, 20}, {1, 9, 1, 30},
                                        {17, 1, 40, 2}, {2, 0, 3, 4},   {20, 3, 2, 17}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int letter = 0; letter < 4; letter++)
            for (unsigned dims = 0; dims < 16; dims++)
                for (int kind = TD_REDUCE_KIND_SUM; kind <= TD_REDUCE_KIND_SQUARES; kind++) {
                    const char *layouts[] = {"c", "t", "s", "cb1"};
                    struct layout_case layout = {.ndim = 4, .operands = {layouts[letter]}};
                    memcpy(layout.shape, shapes[s], sizeof shapes[s]);
                    td_dtype dtype = letter % 2 ? TD_F64 : TD_F32;
                    td_tensor *x = make_case(&layout, 0, dtype, 9);
                    if (is_sensible((td_reduce_kind)kind, x, dims))
                        check_reduction((td_reduce_kind)kind, x, dims, "cts"[letter % 3],
                                        result_dtype((td_reduce_kind)kind, dtype));
                    td_tensor_release(x);
                }
}

TEST(every_dtype)
{
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
        for (unsigned dims = 0; dims < 4; dims++)
            for (int kind = TD_REDUCE_KIND_SUM; kind <= TD_REDUCE_KIND_SQUARES; kind++) {
                struct layout_case layout = {.ndim = 2, .shape = {4, 37}, .operands = {"t"}};
                td_tensor *x = make_case(&layout, 0, (td_dtype)dtype, 10);
                bool complex = dtype >= TD_COMPLEX64;
                if (has((td_reduce_kind)kind, (td_dtype)dtype) &&
                    is_sensible((td_reduce_kind)kind, x, dims) &&
                    !(complex && (kind == TD_REDUCE_KIND_MAX || kind == TD_REDUCE_KIND_MIN)))
                    check_reduction((td_reduce_kind)kind, x, dims, 'c',
                                    result_dtype((td_reduce_kind)kind, (td_dtype)dtype));
                td_tensor_release(x);
            }
}

TEST(nan_wins)
{
    for (int rows = 1; rows < 200; rows += 13)
        for (unsigned dims = 1; dims < 4; dims++) {
            struct layout_case layout = {.ndim = 2, .shape = {rows, 90}, .operands = {"c"}};
            td_tensor *x = make_case(&layout, 0, TD_F32, 11);
            set_element(x, (rows - 1) * 90 + 45, NAN);
            check_reduction(TD_REDUCE_KIND_MAX, x, dims, 'c', TD_F32);
            check_reduction(TD_REDUCE_KIND_MIN, x, dims, 'c', TD_F32);
            td_tensor_release(x);
        }
}

/* 0.1 is not exact in f32: adding it up one by one in f32 would be wrong by more than a percent. */
TEST(sums_of_many_elements_are_exact)
{
    int64_t shape[] = {2048, 2048};
    td_tensor *x = td_full(shape, 2, 0.1f, TD_F32, NULL);
    td_tensor *all = td_empty((int64_t[]){1, 1}, 2, TD_F32, NULL);
    td_tensor *columns = td_empty((int64_t[]){1, 2048}, 2, TD_F32, NULL);
    CHECK_OK(td__cpu_kernels.reduce(TD_REDUCE_KIND_SUM, all, x, 3));
    double right = (double)0.1f * 2048 * 2048;
    CHECK(fabs(element(all, 0) - right) <= 1e-6 * right);
    CHECK_OK(td__cpu_kernels.reduce(TD_REDUCE_KIND_SUM, columns, x, 1));
    for (int64_t i = 0; i < 2048; i++)
        CHECK(fabs(element(columns, i) - right / 2048) <= 1e-6 * right / 2048);
    td_tensor_release(x);
    td_tensor_release(all);
    td_tensor_release(columns);
}

/* ---- Places ------------------------------------------------------------------------------------ */

static bool comes_before(double x, double best, bool least)
{
    if (isnan(best))
        return false;
    return isnan(x) || (least ? x < best : x > best);
}

static void check_places(const td_tensor *x, int dim, bool least, char result)
{
    struct layout_case layout = {.ndim = td_tensor_ndim(x), .result = result};
    for (int d = 0; d < layout.ndim; d++)
        layout.shape[d] = d == dim ? 1 : td_tensor_size(x, d);
    td_tensor *out = make_result(&layout, TD_I64);
    CHECK_OK(td__cpu_kernels.arg_reduce(least, out, x, dim));
    int64_t count = td_tensor_numel(out), size = td_tensor_size(x, dim);
    int64_t inner = 1;
    for (int d = dim + 1; d < layout.ndim; d++)
        inner *= layout.shape[d];
    for (int64_t i = 0; i < count; i++) {
        int64_t first = i / inner * inner * size + i % inner, right = 0;
        for (int64_t k = 1; k < size; k++)
            if (comes_before(element(x, first + k * inner), element(x, first + right * inner),
                             least))
                right = k;
        CHECK_EQ((int64_t)element(out, i), right);
    }
    td_tensor_release(out);
}

TEST(indices_of_extremes)
{
    static const int64_t shapes[][3] = {
        {3, 4, 5}, {2, 300, 3}, {40, 2, 700}, {1, 1, 1}, {17, 18, 1}};
    for (int dtype = TD_F32; dtype <= TD_BOOL; dtype++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int dim = 0; dim < 3; dim++) {
                struct layout_case layout = {.ndim = 3, .operands = {dim == 1 ? "s" : "t"}};
                memcpy(layout.shape, shapes[s], sizeof shapes[s]);
                td_tensor *x = make_case(&layout, 0, (td_dtype)dtype, 12);
                check_places(x, dim, false, 'c');
                check_places(x, dim, true, 't');
                if (dtype <= TD_BF16) {
                    set_element(x, td_tensor_numel(x) / 2, NAN);
                    set_element(x, td_tensor_numel(x) - 1, NAN);
                    check_places(x, dim, false, 's');
                    check_places(x, dim, true, 'c');
                }
                td_tensor_release(x);
            }
}

TEST(extremes_of_integers)
{
    uint64_t a[] = {5, UINT64_MAX, 0, UINT64_C(1) << 63, UINT64_MAX};
    int64_t b[] = {INT64_MAX, INT64_MIN, 0, INT64_MIN, INT64_MAX};
    td_tensor *x = td_from_blob(a, (int64_t[]){5}, 1, NULL, TD_U64, NULL, NULL, NULL);
    td_tensor *y = td_from_blob(b, (int64_t[]){5}, 1, NULL, TD_I64, NULL, NULL, NULL);
    td_tensor *place = td_empty((int64_t[]){1}, 1, TD_I64, NULL);
    td_tensor *u = td_empty((int64_t[]){1}, 1, TD_U64, NULL);
    int64_t *found = td_tensor_data(place);
    CHECK_OK(td__cpu_kernels.arg_reduce(false, place, x, 0));
    CHECK_EQ(*found, 1);
    CHECK_OK(td__cpu_kernels.arg_reduce(true, place, x, 0));
    CHECK_EQ(*found, 2);
    CHECK_OK(td__cpu_kernels.arg_reduce(true, place, y, 0));
    CHECK_EQ(*found, 1);
    CHECK_OK(td__cpu_kernels.arg_reduce(false, place, y, 0));
    CHECK_EQ(*found, 0);
    CHECK_OK(td__cpu_kernels.reduce(TD_REDUCE_KIND_MAX, u, x, 1));
    CHECK(*(uint64_t *)td_tensor_data(u) == UINT64_MAX);
    CHECK_OK(td__cpu_kernels.reduce(TD_REDUCE_KIND_MIN, u, x, 1));
    CHECK(*(uint64_t *)td_tensor_data(u) == 0);
    td_tensor_release(x);
    td_tensor_release(y);
    td_tensor_release(place);
    td_tensor_release(u);
}
