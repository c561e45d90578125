/* Tensors as text, compared with what PyTorch prints. */
#include "runner.h"

#include "elements.h"

#include <tandem/ops.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Element i is values[i % count] + i * step; a complex number has minus half of it as its imaginary
 * part. */
struct print_case {
    td_dtype dtype;
    int ndim;
    int64_t shape[TD_MAX_DIMS];
    int count;
    double values[8];
    double step;
    const char *text;
};

#include "reference/print_texts.h"

static void set_imaginary(td_tensor *tensor, int64_t i, double value)
{
    if (td_tensor_dtype(tensor) == TD_COMPLEX64)
        ((float *)td_tensor_data(tensor))[2 * i + 1] = (float)value;
    else
        ((double *)td_tensor_data(tensor))[2 * i + 1] = value;
}

static td_tensor *tensor_of(const struct print_case *c)
{
    td_tensor *tensor = td_zeros(c->shape, c->ndim, c->dtype, NULL);
    CHECK(tensor);
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++) {
        double value = c->values[i % c->count] + (double)i * c->step;
        set_element(tensor, i, value);
        if (c->dtype >= TD_COMPLEX64)
            set_imaginary(tensor, i, -value / 2);
    }
    return tensor;
}

TEST(as_pytorch_prints)
{
    for (size_t i = 0; i < sizeof print_cases / sizeof *print_cases; i++) {
        td_tensor *tensor = tensor_of(&print_cases[i]);
        td_bytes text = td_tensor_text(tensor);
        CHECK(text.data);
        CHECK_STR(text.data, print_cases[i].text);
        CHECK_EQ(text.size, strlen(text.data));
        td_bytes_free(&text);
        td_tensor_release(tensor);
    }
}

TEST(views)
{
    float data[] = {1, 2, 3, 4, 5, 6};
    td_tensor *x = td_from_blob(data, (int64_t[]){2, 3}, 2, NULL, TD_F32, NULL, NULL, NULL);
    td_tensor *turned = td_transpose(x, 0, 1);
    td_bytes text = td_tensor_text(turned);
    CHECK_STR(text.data, "tensor([[1., 4.],\n        [2., 5.],\n        [3., 6.]])");
    td_bytes_free(&text);
    td_tensor_release(turned);
    td_tensor_release(x);
}

TEST(integers_that_pytorch_has_not)
{
    uint64_t data[] = {UINT64_MAX, 1};
    td_tensor *x = td_from_blob(data, (int64_t[]){2}, 1, NULL, TD_U64, NULL, NULL, NULL);
    td_bytes text = td_tensor_text(x);
    CHECK_STR(text.data, "tensor([18446744073709551615,                    1], dtype=u64)");
    td_bytes_free(&text);
    td_tensor_release(x);
}

TEST(print_to_a_stream)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&text, &size);
    CHECK(stream);
    td_tensor *x = td_full((int64_t[]){2}, 1, 1, TD_I32, NULL);
    CHECK_OK(td_tensor_print(x, stream));
    fclose(stream);
    CHECK_STR(text, "tensor([1, 1], dtype=i32)\n");
    free(text);

    FILE *full = fopen("/dev/full", "w");
    if (full) {
        setvbuf(full, NULL, _IONBF, 0);
        CHECK_FAILS(td_tensor_print(x, full), TD_ERR_SYSTEM, "td_tensor_print");
        fclose(full);
    }
    CHECK_EQ(td_tensor_print(NULL, stdout), TD_ERR_INVALID);
    CHECK(!td_tensor_text(NULL).data);
    td_tensor_release(x);
}
