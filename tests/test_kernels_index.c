/* Kernels of indices on the processor: each dtype, strides and dimensions, against a walk over all
 * elements, and what bad indices get. */
#include "kernel_numbers.h"

#include <tandem/ops.h>

#include <string.h>

static const td_kernels *const cpu = &td__cpu_kernels;

static const td_dtype all_dtypes[] = {TD_F32, TD_F64,  TD_F16,       TD_BF16,      TD_I8,
                                      TD_U8,  TD_I16,  TD_I32,       TD_I64,       TD_U32,
                                      TD_U64, TD_BOOL, TD_COMPLEX64, TD_COMPLEX128};
enum { ALL_DTYPES = sizeof all_dtypes / sizeof *all_dtypes };

/* The address of the element at these indices. */
static char *element(const td_tensor *tensor, const int64_t *at)
{
    int64_t offset = 0;
    for (int d = 0; d < td_tensor_ndim(tensor); d++)
        offset += at[d] * td_tensor_stride(tensor, d);
    return (char *)td_tensor_data(tensor) +
           offset * (int64_t)td_dtype_size(td_tensor_dtype(tensor));
}

/* Small whole numbers, which all dtypes can add up exactly. */
static void put_small(void *element, td_dtype dtype, int value)
{
    td_tensor *one = td_full(NULL, 0, value, dtype, NULL);
    CHECK(one);
    memcpy(element, td_tensor_data(one), td_dtype_size(dtype));
    td_tensor_release(one);
}

static int small_of(const void *element, td_dtype dtype)
{
    for (int value = 0; value < 128; value++) {
        td_tensor *one = td_full(NULL, 0, value, dtype, NULL);
        bool same = !memcmp(element, td_tensor_data(one), td_dtype_size(dtype));
        td_tensor_release(one);
        if (same)
            return value;
    }
    FAIL("no small number of %s", td_dtype_name(dtype));
}

/* Three dimensions in the memory layout `layout`: in order, the first and the last swapped, or every second
 * element of each line. */
static td_tensor *make(const int64_t shape[3], td_dtype dtype, int layout)
{
    int64_t turned[] = {shape[2], shape[1], shape[0]};
    int64_t wide[] = {shape[0], shape[1], shape[2] * 2};
    td_tensor *base = layout == 0   ? td_empty(shape, 3, dtype, NULL)
                      : layout == 1 ? td_empty(turned, 3, dtype, NULL)
                                    : td_empty(wide, 3, dtype, NULL);
    td_tensor *view = layout == 0   ? td_tensor_retain(base)
                      : layout == 1 ? td_transpose(base, 0, 2)
                                    : td_slice(base, 2, 0, shape[2] * 2, 2);
    CHECK(view);
    td_tensor_release(base);
    int64_t at[3];
    for (at[0] = 0; at[0] < shape[0]; at[0]++)
        for (at[1] = 0; at[1] < shape[1]; at[1]++)
            for (at[2] = 0; at[2] < shape[2]; at[2]++)
                put_small(element(view, at), dtype, (int)any_integer(dtype == TD_BOOL ? 2 : 4));
    return view;
}

/* Indices below `below`, in the shape given, laid out in some way. */
static td_tensor *make_index(const int64_t shape[3], int64_t below, int layout)
{
    td_tensor *index = make(shape, TD_I64, layout);
    int64_t at[3];
    for (at[0] = 0; at[0] < shape[0]; at[0]++)
        for (at[1] = 0; at[1] < shape[1]; at[1]++)
            for (at[2] = 0; at[2] < shape[2]; at[2]++)
                *(int64_t *)(void *)element(index, at) = any_integer(below);
    return index;
}

/* The sum of two small numbers in the dtype. */
static int sum_of(int a, int b, td_dtype dtype)
{
    return dtype == TD_BOOL ? a || b : a + b;
}

/* table at the indices += flat, or the other way round, as the loop of the definition. `index` has
 * three dimensions, or is along `dim`. */
static void check_walk(td_dtype dtype, int dim, int layout, bool one_dim, const int64_t shape[3],
                       int64_t size)
{
    int64_t table_shape[] = {shape[0], shape[1], shape[2]}, line[] = {1, 1, shape[dim]};
    table_shape[dim] = size;
    td_tensor *table = make(table_shape, dtype, layout),
              *flat = make(shape, dtype, (layout + 1) % 3);
    td_tensor *index3 = one_dim ? make_index(line, size, 0)
                                : make_index(shape, size, (layout + 2) % 3);
    td_tensor *index = one_dim ? td_reshape(index3, &shape[dim], 1) : td_tensor_retain(index3);
    td_tensor *got = make(shape, dtype, layout), *expected = td_clone(table);
    td_tensor *sums = make(table_shape, dtype, layout);
    CHECK_OK(td_tensor_copy(sums, table));
    CHECK_OK(one_dim ? cpu->index_select(got, table, dim, index)
                     : cpu->gather(got, table, dim, index));
    CHECK_OK(one_dim ? cpu->index_add(sums, dim, index, flat)
                     : cpu->scatter_add(sums, dim, index, flat));
    int64_t at[3];
    for (at[0] = 0; at[0] < shape[0]; at[0]++)
        for (at[1] = 0; at[1] < shape[1]; at[1]++)
            for (at[2] = 0; at[2] < shape[2]; at[2]++) {
                int64_t there[] = {at[0], at[1], at[2]};
                there[dim] = *(int64_t *)(void *)element(index, one_dim ? &at[dim] : at);
                CHECK_MEM(element(got, at), element(table, there), td_dtype_size(dtype));
                int sum = sum_of(small_of(element(expected, there), dtype),
                                 small_of(element(flat, at), dtype), dtype);
                put_small(element(expected, there), dtype, sum);
            }
    for (at[0] = 0; at[0] < table_shape[0]; at[0]++)
        for (at[1] = 0; at[1] < table_shape[1]; at[1]++)
            for (at[2] = 0; at[2] < table_shape[2]; at[2]++)
                CHECK_MEM(element(sums, at), element(expected, at), td_dtype_size(dtype));
    release_all(table, flat, index3, index, got, expected, sums, NULL);
}

TEST(indices_of_each_dtype_and_layout)
{
    for (int t = 0; t < ALL_DTYPES; t++)
        for (int way = 0; way < 18; way++)
            check_walk(all_dtypes[t], way % 3, way / 3 % 3, way / 9, (const int64_t[]){2, 3, 4}, 5);
}

TEST(indices_of_other_sizes)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {1, 5, 1}, {3, 1, 20}, {0, 2, 3},
                                        {2, 0, 3}, {2, 3, 0}, {1, 1, 7},  {4, 2, 1}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int way = 0; way < 18; way++)
            check_walk(TD_F32, way % 3, way / 3 % 3, way / 9, shapes[s], 3);
}

/* An embedding, and its gradient with words that occur twice. */
TEST(rows_of_a_matrix)
{
    enum { WORDS = 50, WIDTH = 37, COUNT = 200 };
    td_tensor *table = any_tensor(SHAPE(WORDS, WIDTH), TD_F32, 1);
    td_tensor *index = td_empty(SHAPE(COUNT), TD_I64, NULL), *out = td_empty(SHAPE(COUNT, WIDTH), TD_F32, NULL);
    int64_t *at = td_tensor_data(index);
    for (int i = 0; i < COUNT; i++)
        at[i] = any_integer(WORDS);
    CHECK_OK(cpu->index_select(out, table, 0, index));
    td_tensor *grad = td_zeros(SHAPE(WORDS, WIDTH), TD_F32, NULL);
    CHECK_OK(cpu->index_add(grad, 0, index, out));
    for (int64_t w = 0; w < WORDS; w++)
        for (int64_t c = 0; c < WIDTH; c++) {
            float sum = 0; /* in the order of the indices */
            for (int64_t i = 0; i < COUNT; i++)
                if (at[i] == w)
                    sum += (float)number_at(table, w * WIDTH + c);
            CHECK((float)number_at(grad, w * WIDTH + c) == sum);
        }
    for (int64_t i = 0; i < COUNT * WIDTH; i++)
        CHECK(number_at(out, i) == number_at(table, at[i / WIDTH] * WIDTH + i % WIDTH));
    release_all(table, index, out, grad, NULL);
}

TEST(bad_indices_are_named)
{
    td_tensor *table = any_tensor(SHAPE(4, 6), TD_F32, 1), *before = td_clone(table);
    td_tensor *index = td_zeros(SHAPE(3), TD_I64, NULL), *rows = td_zeros(SHAPE(3, 6), TD_F32, NULL);
    ((int64_t *)td_tensor_data(index))[2] = 4;
    CHECK_FAILS(cpu->index_select(rows, table, 0, index), TD_ERR_INVALID,
                "index_select: the index at [2] is 4, but dimension 0 has 4 elements: indices go "
                "from 0 to 3");
    ((int64_t *)td_tensor_data(index))[1] = -1;
    CHECK_FAILS(cpu->index_add(table, 0, index, rows), TD_ERR_INVALID,
                "index_add: the index at [1] is -1");

    td_tensor *base = td_zeros(SHAPE(2, 3), TD_I64, NULL), *places = td_transpose(base, 0, 1);
    td_tensor *picked = td_zeros(SHAPE(3, 2), TD_F32, NULL);
    ((int64_t *)td_tensor_data(base))[1] = INT64_MIN; /* [0, 1] of the base */
    CHECK_FAILS(cpu->gather(picked, table, 1, places), TD_ERR_INVALID,
                "gather: the index at [1, 0] is -9223372036854775808, but dimension 1 has 6");
    CHECK_FAILS(cpu->scatter_add(table, 1, places, picked), TD_ERR_INVALID,
                "scatter_add: the index at [1, 0]");
    /* Nothing was written. */
    CHECK_MEM(td_tensor_data(table), td_tensor_data(before), td_tensor_nbytes(table));

    td_tensor *none = td_zeros(SHAPE(0, 6), TD_F32, NULL);
    memset(td_tensor_data(index), 0, td_tensor_nbytes(index));
    CHECK_FAILS(cpu->index_select(rows, none, 0, index), TD_ERR_INVALID, "has 0 elements");
    release_all(table, before, index, rows, base, places, picked, none, NULL);
}
