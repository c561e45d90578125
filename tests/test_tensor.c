/* Tensors: making them, views, copies, and what is refused. Copies of random views are compared
 * with a walk over all indices. */
#include "runner.h"

#include "base/arena.h"
#include "tensor/tensor_internal.h"

#include <tandem/ops.h>

#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

/* The call yields no tensor, and the message contains `part`. */
#define CHECK_NULL(call, part)                                                                     \
    do {                                                                                           \
        CHECK(!(call));                                                                            \
        CHECK_CONTAINS(td_last_error(), part);                                                     \
    } while (0)

/* 0, 1, 2, … in the order of the indices. */
static td_tensor *counting(const int64_t *shape, int ndim)
{
    td_tensor *tensor = td_empty(shape, ndim, TD_I32, NULL);
    CHECK(tensor);
    int32_t *data = td_tensor_data(tensor);
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        data[i] = (int32_t)i;
    return tensor;
}

/* The address of the element with this number, in the order of the indices. */
static char *element_at(const td_tensor *tensor, int64_t number)
{
    int64_t at = 0;
    for (int d = td_tensor_ndim(tensor); d-- > 0;) {
        at += number % td_tensor_size(tensor, d) * td_tensor_stride(tensor, d);
        number /= td_tensor_size(tensor, d);
    }
    return (char *)td_tensor_data(tensor) + at * (int64_t)td_dtype_size(td_tensor_dtype(tensor));
}

static void check_same(const td_tensor *a, const td_tensor *b)
{
    CHECK_EQ(td_tensor_dtype(a), td_tensor_dtype(b));
    CHECK_EQ(td_tensor_numel(a), td_tensor_numel(b));
    for (int64_t i = 0; i < td_tensor_numel(a); i++)
        CHECK(!memcmp(element_at(a, i), element_at(b, i), td_dtype_size(td_tensor_dtype(a))));
}

static int32_t at(const td_tensor *tensor, int64_t number)
{
    return *(int32_t *)(void *)element_at(tensor, number);
}

/* Releases `old` and returns `new`, so that a variable can be replaced by a view of it. */
static td_tensor *swap(td_tensor *old, td_tensor *new)
{
    td_tensor_release(old);
    return new;
}

/* ---- Making one ------------------------------------------------------------------------------ */

TEST(shape_and_strides)
{
    td_tensor *t = td_empty(SHAPE(2, 3, 4), TD_F64, NULL);
    CHECK_EQ(td_tensor_ndim(t), 3);
    CHECK_EQ(td_tensor_size(t, 1), 3);
    CHECK_EQ(td_tensor_size(t, -1), 4);
    CHECK_EQ(td_tensor_stride(t, 0), 12);
    CHECK_EQ(td_tensor_stride(t, -2), 4);
    CHECK_EQ(td_tensor_numel(t), 24);
    CHECK_EQ(td_tensor_nbytes(t), 192);
    CHECK_EQ(td_tensor_dtype(t), TD_F64);
    CHECK(td_tensor_is_contiguous(t));
    CHECK_EQ((uintptr_t)td_tensor_data(t) % 64, 0);
    CHECK_EQ(td_tensor_size(t, 3), -1);
    CHECK_CONTAINS(td_last_error(), "no dimension 3 in a tensor of shape [2, 3, 4]");
    td_tensor_release(t);
}

TEST(no_dimensions_and_no_elements)
{
    td_tensor *scalar = td_full(NULL, 0, 7, TD_I64, NULL);
    CHECK_EQ(td_tensor_numel(scalar), 1);
    CHECK_EQ(*(int64_t *)td_tensor_data(scalar), 7);
    td_tensor *copy = td_clone(scalar);
    CHECK_EQ(*(int64_t *)td_tensor_data(copy), 7);
    td_tensor *line = td_reshape(scalar, SHAPE(1, 1));
    CHECK_EQ(td_tensor_ndim(line), 2);
    line = swap(line, td_reshape(line, NULL, 0));
    CHECK_EQ(td_tensor_ndim(line), 0);

    td_tensor *none = td_zeros(SHAPE(3, 0, 2), TD_F32, NULL);
    CHECK(none);
    CHECK_EQ(td_tensor_numel(none), 0);
    CHECK(td_tensor_is_contiguous(none));
    td_tensor *turned = td_transpose(none, 0, 1);
    CHECK_EQ(td_tensor_size(turned, 0), 0);
    CHECK_OK(td_tensor_copy(turned, turned));
    td_tensor *flat = td_reshape(turned, SHAPE(0));
    CHECK_EQ(td_tensor_ndim(flat), 1);
    td_tensor *part = td_select(none, 0, 2);
    CHECK_EQ(td_tensor_ndim(part), 2);
    CHECK_NULL(td_reshape(none, SHAPE(-1, 0)), "which do not fit the shape [-1, 0]");
    CHECK_NULL(td_select(none, 1, 0), "no index 0 in dimension 1");
    for (int i = 0; i < 7; i++)
        td_tensor_release((td_tensor *[]){scalar, copy, line, none, turned, flat, part}[i]);
}

/* Large memory can be mapped by other processes, small memory need not be. */
TEST(storage_is_shareable_when_large)
{
    struct td__arena *arena;
    size_t offset;
    td_tensor *small = td_zeros(SHAPE(8), TD_F32, NULL), *large = td_zeros(SHAPE(2048), TD_F32, NULL);
    CHECK(!td__arena_resolve(td_tensor_data(small), &arena, &offset));
    CHECK(td__arena_resolve(td_tensor_data(large), &arena, &offset));
    td_tensor_release(small);
    td_tensor_release(large);
}

TEST(memory_of_the_host_is_counted)
{
    td_device *host = td_device_get("cpu");
    td_memory_stats before, after;
    CHECK_OK(td_device_memory_stats(host, &before));
    {
        TD_SCOPE;
        CHECK(td_zeros(TD_SHAPE(3), TD_F32, NULL) && td_zeros(TD_SHAPE(100, 1000), TD_F32, NULL));
        CHECK_OK(td_device_memory_stats(host, &after));
        CHECK_EQ(after.allocated, before.allocated + 400012);
        CHECK(after.allocated_peak >= after.allocated);
    }
    CHECK_OK(td_device_memory_stats(host, &after));
    CHECK_EQ(after.allocated, before.allocated);
    CHECK(after.allocated_peak >= after.allocated + 400012);
    CHECK_OK(td_device_reset_peak(host));
    CHECK_OK(td_device_memory_stats(host, &after));
    CHECK_EQ(after.allocated_peak, before.allocated);
}

TEST(zeros_are_zero_also_in_used_memory)
{
    td_tensor *used = td_full(SHAPE(5000), 1, TD_I32, NULL);
    td_tensor_release(used);
    td_tensor *zeros = td_zeros(SHAPE(5000), TD_I32, NULL);
    for (int i = 0; i < 5000; i++)
        CHECK_EQ(((int32_t *)td_tensor_data(zeros))[i], 0);
    td_tensor_release(zeros);
}

static void check_full(td_dtype dtype, double value, const void *expected)
{
    td_tensor *t = td_full(SHAPE(3, 5), value, dtype, NULL);
    CHECK(t);
    size_t size = td_dtype_size(dtype);
    for (int i = 0; i < 15; i++)
        CHECK_MEM((char *)td_tensor_data(t) + (size_t)i * size, expected, size);
    td_tensor_release(t);
}

TEST(full_of_each_dtype)
{
    check_full(TD_F32, 1.5, &(float){1.5f});
    check_full(TD_F64, -0.1, &(double){-0.1});
    check_full(TD_F16, 1, &(uint16_t){0x3c00});
    check_full(TD_BF16, 1, &(uint16_t){0x3f80});
    check_full(TD_I8, -128.9, &(int8_t){-128});
    check_full(TD_U8, 255.5, &(uint8_t){255});
    check_full(TD_I16, -300, &(int16_t){-300});
    check_full(TD_I32, 2147483647, &(int32_t){2147483647});
    check_full(TD_I64, -9223372036854775808.0, &(int64_t){INT64_MIN});
    check_full(TD_U32, 4294967295.0, &(uint32_t){UINT32_MAX});
    check_full(TD_U64, 9223372036854775808.0, &(uint64_t){(uint64_t)1 << 63});
    check_full(TD_BOOL, 0.5, &(uint8_t){1});
    check_full(TD_COMPLEX64, 2, (float[]){2, 0});
    check_full(TD_COMPLEX128, 2, (double[]){2, 0});
    CHECK_NULL(td_full(SHAPE(1), 128, TD_I8, NULL), "128 is not in the range of i8");
    CHECK_NULL(td_full(SHAPE(1), -1, TD_U64, NULL), "-1 is not in the range of u64");
    CHECK_NULL(td_full(SHAPE(1), 9223372036854775808.0, TD_I64, NULL), "not in the range of i64");
    CHECK_NULL(td_full(SHAPE(1), __builtin_nan(""), TD_I32, NULL), "nan is not in the range of i32");
}

TEST(too_large_or_wrong_is_refused)
{
    CHECK_NULL(td_empty(SHAPE(1LL << 32, 1LL << 32), TD_F32, NULL),
               "td_empty: a tensor of shape [4294967296, 4294967296] and dtype f32 is too large");
    CHECK_NULL(td_empty(SHAPE(1LL << 62), TD_F32, NULL), "is too large");
    CHECK_NULL(td_empty(SHAPE(1LL << 40, 0, 1LL << 40), TD_U8, NULL), "is too large");
    CHECK_NULL(td_empty(SHAPE(2, -1), TD_F32, NULL), "the size of dimension 1 is negative in [2, -1]");
    CHECK_NULL(td_empty(SHAPE(1, 1, 1, 1, 1, 1, 1, 1, 1), TD_F32, NULL), "0 to 8 dimensions, not 9");
    CHECK_NULL(td_empty(NULL, 1, TD_F32, NULL), "shape is NULL");
    CHECK_NULL(td_empty(NULL, -1, TD_F32, NULL), "not -1");
    CHECK_NULL(td_empty(SHAPE(1), (td_dtype)99, NULL), "99 is not a dtype (see td_dtype)");
    CHECK_NULL(td_empty(SHAPE(1LL << 45), TD_F32, NULL), "memory");
    int32_t data[4];
    CHECK_NULL(td_from_blob(NULL, SHAPE(2), NULL, TD_I32, NULL, NULL, NULL), "data is NULL");
    CHECK_NULL(td_from_blob(data, SHAPE(2), (int64_t[]){-1}, TD_I32, NULL, NULL, NULL),
               "the stride of dimension 0 is negative");
    CHECK_NULL(td_from_blob(data, SHAPE(3), (int64_t[]){1LL << 61}, TD_I32, NULL, NULL, NULL),
               "is too large");
}

static void count_frees(void *data, void *arg)
{
    CHECK(data);
    ++*(int *)arg;
}

TEST(memory_of_the_user)
{
    int frees = 0;
    int32_t data[12];
    for (int i = 0; i < 12; i++)
        data[i] = i;
    td_tensor *t = td_from_blob(data, SHAPE(3, 2), (int64_t[]){4, 2}, TD_I32, NULL, count_frees, &frees);
    CHECK(!td_tensor_is_contiguous(t));
    CHECK_EQ(at(t, 3), 6);
    td_tensor *view = td_select(t, 0, 2);
    td_tensor_release(t);
    CHECK_EQ(frees, 0);
    CHECK_EQ(at(view, 1), 10);
    td_tensor_release(view);
    CHECK_EQ(frees, 1);
    CHECK_NULL(td_from_blob(data, SHAPE(-3), NULL, TD_I32, NULL, count_frees, &frees), "negative");
    CHECK_EQ(frees, 1);
}

TEST(null_is_handed_on)
{
    td_tensor *t = td_transpose(td_narrow(td_empty(SHAPE(-7), TD_F32, NULL), 0, 0, 1), 0, 1);
    CHECK_NULL(t, "td_empty: the size of dimension 0 is negative");
    CHECK(!td_clone(NULL) && !td_contiguous(NULL) && !td_select(NULL, 0, 0));
    CHECK(!td_slice(NULL, 0, 0, 1, 1) && !td_reshape(NULL, SHAPE(1)) && !td_tensor_retain(NULL));
    CHECK(!td_tensor_data(NULL) && !td_tensor_numel(NULL) && !td_tensor_nbytes(NULL));
    CHECK_EQ(td_tensor_ndim(NULL), -1);
    td_tensor_release(NULL);
    CHECK_FAILS(td_tensor_copy(NULL, NULL), TD_ERR_INVALID, "dst is NULL");
}

/* ---- Views ----------------------------------------------------------------------------------- */

TEST(views_share_memory)
{
    td_tensor *t = counting(SHAPE(3, 4)), *turned = td_transpose(t, 0, -1);
    CHECK_EQ(td_tensor_size(turned, 0), 4);
    CHECK_EQ(at(turned, 1), 4);
    CHECK(!td_tensor_is_contiguous(turned));
    td_tensor *rows = td_narrow(t, 0, 1, 2), *columns = td_narrow(t, 1, -2, 2);
    CHECK(td_tensor_is_contiguous(rows));
    CHECK(!td_tensor_is_contiguous(columns));
    CHECK_EQ(at(rows, 0), 4);
    CHECK_EQ(at(columns, 2), 6);
    ((int32_t *)td_tensor_data(t))[6] = -1;
    CHECK_EQ(at(columns, 2), -1);
    CHECK_EQ(at(turned, 7), -1);
    td_tensor *row = td_select(t, -2, -1);
    CHECK_EQ(td_tensor_ndim(row), 1);
    CHECK_EQ(at(row, 0), 8);
    CHECK_NULL(td_transpose(t, 0, 2), "td_transpose: there is no dimension 2");
    CHECK_NULL(td_narrow(t, 0, 2, 2), "2 indices from 2 on are not inside dimension 0");
    CHECK_NULL(td_narrow(t, 0, 1, INT64_MAX), "are not inside");
    CHECK_NULL(td_select(t, 0, 3), "no index 3");
    for (int i = 0; i < 5; i++)
        td_tensor_release((td_tensor *[]){t, turned, rows, columns, row}[i]);
}

static void check_slice(int64_t start, int64_t end, int64_t step, int64_t length, int32_t first)
{
    td_tensor *t = counting(SHAPE(10)), *part = td_slice(t, 0, start, end, step);
    CHECK_EQ(td_tensor_numel(part), length);
    for (int64_t i = 0; i < length; i++)
        CHECK_EQ(at(part, i), first + i * step);
    td_tensor_release(t);
    td_tensor_release(part);
}

TEST(slices_are_those_of_python)
{
    check_slice(0, INT64_MAX, 1, 10, 0);
    check_slice(1, 9, 3, 3, 1);
    check_slice(1, 8, 3, 3, 1);
    check_slice(1, 7, 3, 2, 1);
    check_slice(-3, INT64_MAX, 2, 2, 7);
    check_slice(-100, -8, 1, 2, 0);
    check_slice(5, 5, 1, 0, 0);
    check_slice(8, 2, 1, 0, 0);
    check_slice(INT64_MIN, INT64_MAX, INT64_MAX, 1, 0);
    td_tensor *t = counting(SHAPE(10));
    CHECK_NULL(td_slice(t, 0, 0, 1, 0), "the step is 0");
    td_tensor_release(t);
}

/* Whether the reshaped tensor looks at the same memory, and that its elements are the same. */
static bool reshapes_as_view(td_tensor *t, const int64_t *shape, int ndim)
{
    td_tensor *reshaped = td_reshape(t, shape, ndim);
    CHECK(reshaped);
    check_same(t, reshaped);
    bool view = reshaped->storage == t->storage;
    td_tensor_release(reshaped);
    return view;
}

TEST(reshape_copies_only_where_it_must)
{
    td_tensor *t = counting(SHAPE(4, 6)), *turned = td_transpose(t, 0, 1);
    td_tensor *columns = td_narrow(t, 1, 0, 4), *steps = td_slice(t, 1, 0, 6, 2);
    CHECK(reshapes_as_view(t, SHAPE(2, 12)));
    CHECK(reshapes_as_view(t, SHAPE(-1)));
    CHECK(reshapes_as_view(turned, SHAPE(6, 2, 2)));
    CHECK(reshapes_as_view(turned, SHAPE(3, 2, 1, 4)));
    CHECK(reshapes_as_view(columns, SHAPE(2, 2, 2, 2)));
    CHECK(reshapes_as_view(columns, SHAPE(4, 1, 4, 1)));
    CHECK(reshapes_as_view(steps, SHAPE(12)));
    CHECK(!reshapes_as_view(turned, SHAPE(24)));
    CHECK(!reshapes_as_view(turned, SHAPE(4, 6)));
    CHECK(!reshapes_as_view(columns, SHAPE(16)));
    CHECK_NULL(td_reshape(t, SHAPE(5, -1)), "24 elements, which do not fit the shape [5, -1]");
    CHECK_NULL(td_reshape(t, SHAPE(5, 5)), "do not fit");
    CHECK_NULL(td_reshape(t, SHAPE(-1, -1)), "only one size of [-1, -1] may be -1");
    CHECK_NULL(td_reshape(t, SHAPE(1LL << 40, 1LL << 40)), "do not fit");
    for (int i = 0; i < 4; i++)
        td_tensor_release((td_tensor *[]){t, turned, columns, steps}[i]);
}

/* ---- Copies ---------------------------------------------------------------------------------- */

static unsigned random_state = 1;

static int random_below(int limit)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (unsigned)limit);
}

/* A tensor of the given shape that is a view of a larger one, its dimensions in any order. */
static td_tensor *random_view(const int64_t *shape, int ndim, td_dtype dtype)
{
    int64_t whole[TD_MAX_DIMS];
    int order[TD_MAX_DIMS], steps[TD_MAX_DIMS];
    for (int d = 0; d < ndim; d++) {
        int other = random_below(d + 1);
        order[d] = order[other];
        order[other] = d;
        steps[d] = 1 + random_below(2);
    }
    for (int d = 0; d < ndim; d++)
        whole[d] = shape[order[d]] * steps[d] + random_below(2);
    td_tensor *t = td_empty(whole, ndim, dtype, NULL);
    for (size_t i = 0; i < td_tensor_nbytes(t); i++)
        ((uint8_t *)td_tensor_data(t))[i] = (uint8_t)random_below(256);
    for (int d = 0; d < ndim; d++) {
        int64_t first = random_below(2) ? whole[d] - shape[order[d]] * steps[d] : 0;
        t = swap(t, td_slice(t, d, first, first + shape[order[d]] * steps[d], steps[d]));
    }
    for (int d = 0; d < ndim; d++) {
        while (order[d] != d) {
            int to = order[d];
            t = swap(t, td_transpose(t, d, to));
            order[d] = order[to];
            order[to] = to;
        }
    }
    for (int d = 0; d < ndim; d++)
        CHECK_EQ(td_tensor_size(t, d), shape[d]);
    return t;
}

TEST(copies_between_any_strides)
{
    static const td_dtype dtypes[] = {TD_U8, TD_F16, TD_F32, TD_F64, TD_COMPLEX128};
    for (int round = 0; round < 400; round++) {
        int ndim = random_below(6);
        int64_t shape[TD_MAX_DIMS];
        for (int d = 0; d < ndim; d++)
            shape[d] = 1 + random_below(ndim < 3 ? 70 : 6);
        td_dtype dtype = dtypes[random_below(5)];
        td_tensor *from = random_view(shape, ndim, dtype), *to = random_view(shape, ndim, dtype);
        td_tensor *copy = td_clone(from), *same = td_contiguous(from);
        CHECK(td_tensor_is_contiguous(copy) && td_tensor_is_contiguous(same));
        check_same(copy, from);
        check_same(same, from);
        CHECK_OK(td_tensor_copy(to, from));
        check_same(to, copy);
        for (int i = 0; i < 4; i++)
            td_tensor_release((td_tensor *[]){from, to, copy, same}[i]);
    }
}

/* Only the elements of the view change. */
TEST(a_copy_leaves_the_rest_alone)
{
    td_tensor *t = counting(SHAPE(6, 6)), *part = td_narrow(t, 1, 2, 2);
    td_tensor *minus = td_full(SHAPE(6, 2), -1, TD_I32, NULL);
    CHECK_OK(td_tensor_copy(part, minus));
    for (int i = 0; i < 36; i++)
        CHECK_EQ(at(t, i), i % 6 == 2 || i % 6 == 3 ? -1 : i);
    for (int i = 0; i < 3; i++)
        td_tensor_release((td_tensor *[]){t, part, minus}[i]);
}

TEST(copies_may_overlap)
{
    td_tensor *t = counting(SHAPE(5, 5)), *turned = td_transpose(t, 0, 1),
              *before = td_clone(turned);
    CHECK_OK(td_tensor_copy(t, turned));
    check_same(t, before);
    td_tensor *line = counting(SHAPE(10));
    td_tensor *low = td_narrow(line, 0, 0, 9), *high = td_narrow(line, 0, 1, 9);
    CHECK_OK(td_tensor_copy(high, low));
    for (int i = 0; i < 10; i++)
        CHECK_EQ(at(line, i), i ? i - 1 : 0);
    for (int i = 0; i < 6; i++)
        td_tensor_release((td_tensor *[]){t, turned, before, line, low, high}[i]);
}

TEST(lists_have_their_length_and_arrays_are_copied)
{
    TD_SCOPE;
    float numbers[] = {1, 2, 3, 4, 5, 6};
    td_tensor *x = td_from_array(numbers, TD_SHAPE(2, 3), TD_F32, NULL);
    numbers[5] = 0; /* it has a copy */
    CHECK_EQ(td_tensor_ndim(x), 2);
    CHECK_EQ(td_tensor_shape(x)[0], 2);
    CHECK_EQ(td_tensor_shape(x)[1], 3);
    CHECK_EQ(((float *)td_tensor_data(x))[5], 6);
    CHECK_EQ(td_tensor_numel(td_zeros(td_tensor_shape(x), td_tensor_ndim(x), TD_I32, NULL)), 6);
    CHECK_EQ(td_tensor_ndim(td_from_array(numbers, TD_SHAPE(), TD_F32, NULL)), 0);
    CHECK_EQ(td_tensor_numel(td_from_array(NULL, TD_SHAPE(0, 3), TD_F32, NULL)), 0);
    CHECK(td_tensor_shape(NULL) == NULL);
    CHECK(td_from_array(NULL, TD_SHAPE(2), TD_F32, NULL) == NULL);
    CHECK(strstr(td_last_error(), "td_from_array: the array is NULL for a tensor of shape [2]"));
    CHECK(td_from_array(numbers, TD_SHAPE(-1), TD_F32, NULL) == NULL);
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK(td_zeros(TD_SHAPE(1, 1, 1, 1, 1, 1, 1, 1, 1), TD_F32, NULL) ==
          NULL); /* more than TD_MAX_DIMS */
}

TEST(a_null_passes_a_failure_on_and_is_one_by_itself)
{
    TD_SCOPE;
    td_tensor *x = td_zeros(TD_SHAPE(2, 3), TD_F32, NULL), *y = td_zeros(TD_SHAPE(4), TD_F32, NULL);
    CHECK(td_add(NULL, x) == NULL); /* nothing has failed before */
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "td_add: an argument is NULL"));

    CHECK(td_neg(td_add(td_matmul(x, y), x)) == NULL); /* the inner failure is reported */
    CHECK(strstr(td_last_error(), "td_matmul: "));
    CHECK(td_sub(x, NULL) == NULL); /* that one was read: it is not reported again */
    CHECK(strstr(td_last_error(), "td_sub: an argument is NULL"));

    CHECK(td_backward(td_mean(td_matmul(x, y))) == TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "td_matmul: "));
    CHECK(td_backward(NULL) == TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "td_backward: an argument is NULL"));
    CHECK(td_cat(TD_TENSORS(x, NULL), 0) == NULL);
    CHECK(strstr(td_last_error(), "td_cat: an argument is NULL"));
    CHECK(td_transpose(NULL, 0, 1) == NULL);
    CHECK(strstr(td_last_error(), "td_transpose: an argument is NULL"));
    CHECK(td_add_(x, NULL) == TD_ERR_INVALID);
    CHECK(strstr(td_last_error(), "td_add_: an argument is NULL"));
}

TEST(unfit_copies_are_refused)
{
    int32_t one = 3;
    td_tensor *a = td_zeros(SHAPE(2, 3), TD_I32, NULL), *b = td_zeros(SHAPE(3, 2), TD_I32, NULL);
    td_tensor *c = td_zeros(SHAPE(2, 3), TD_F32, NULL);
    td_tensor *wide = td_from_blob(&one, SHAPE(2, 3), (int64_t[]){0, 0}, TD_I32, NULL, NULL, NULL);
    CHECK_FAILS(td_tensor_copy(a, b), TD_ERR_INVALID, "dst has the shape [2, 3], src has [3, 2]");
    CHECK_FAILS(td_tensor_copy(a, c), TD_ERR_INVALID, "dst has dtype i32, src has f32");
    CHECK_FAILS(td_tensor_copy(wide, a), TD_ERR_INVALID, "elements of dst share memory");
    CHECK_OK(td_tensor_copy(a, wide));
    CHECK_EQ(at(a, 5), 3);
    for (int i = 0; i < 4; i++)
        td_tensor_release((td_tensor *[]){a, b, c, wide}[i]);
}

TEST(a_tensor_can_be_marked_as_a_shard)
{
    td_shard shard = {.ndim = 2, .shape = {10, 3}, .offset = 24};
    td_tensor *x = td_zeros(SHAPE(6), TD_F32, NULL), *square = td_zeros(SHAPE(2, 3), TD_F32, NULL);
    CHECK(td_tensor_shard(x) == NULL);
    CHECK(td_tensor_shard(NULL) == NULL);
    CHECK_OK(td_tensor_set_shard(x, &shard));
    CHECK_EQ(td_tensor_shard(x)->offset, 24);
    CHECK_EQ(td_tensor_shard(x)->shape[0], 10);
    shard.offset = 25;
    CHECK_FAILS(td_tensor_set_shard(x, &shard), TD_ERR_INVALID,
                "6 elements from number 25 on do not fit a whole of the shape [10, 3]");
    CHECK_EQ(td_tensor_shard(x)->offset, 24);
    shard.offset = -1;
    CHECK_FAILS(td_tensor_set_shard(x, &shard), TD_ERR_INVALID, "do not fit");
    shard.offset = 0;
    CHECK_FAILS(td_tensor_set_shard(square, &shard), TD_ERR_INVALID, "a shard has one dimension");
    td_tensor *copy = td_clone(x);
    CHECK(td_tensor_shard(copy) == NULL);
    CHECK_OK(td_tensor_set_shard(x, NULL));
    CHECK(td_tensor_shard(x) == NULL);
    CHECK_FAILS(td_tensor_set_shard(NULL, NULL), TD_ERR_INVALID, "NULL");
    for (int i = 0; i < 3; i++)
        td_tensor_release((td_tensor *[]){x, square, copy}[i]);
}
