/* Tensors of the toy accelerator by the public functions: results are those of the host, and what the device lacks,
 * has not enough of, or fails at, is an error that names it. */
#include "runner.h"
#include "toy_device.h"

#include <tandem/autograd.h>
#include <tandem/ops.h>

#include <string.h>

static td_device *begin(void)
{
    CHECK_OK(toy_register());
    return td_device_get("toy:0");
}

static td_tensor *numbers(const int64_t *shape, int ndim, td_device *device)
{
    float data[256];
    for (int i = 0; i < 256; i++)
        data[i] = (float)((i * 37 + 11) % 64) / 32 - 1;
    td_tensor *tensor = td_from_array(data, shape, ndim, TD_F32, device);
    CHECK(tensor);
    return tensor;
}

static void check_same(td_tensor *here, td_tensor *there)
{
    td_tensor *back = td_tensor_to(there, td_device_get("cpu"));
    if (!here || !back)
        FAIL("%s", td_last_error());
    CHECK_EQ(td_tensor_nbytes(here), td_tensor_nbytes(back));
    CHECK_MEM(td_tensor_data(here), td_tensor_data(back), td_tensor_nbytes(here));
}

/* A loss of two layers, and the gradients of both weights. */
static td_tensor *train_step(td_device *device, td_tensor **grads)
{
    td_tensor *x = numbers(TD_SHAPE(8, 6), device);
    td_tensor *w1 = numbers(TD_SHAPE(6, 5), device);
    td_tensor *w2 = numbers(TD_SHAPE(5, 3), device);
    CHECK_OK(td_tensor_set_requires_grad(w1, true));
    CHECK_OK(td_tensor_set_requires_grad(w2, true));
    td_tensor *y = td_matmul(td_f_relu(td_matmul(x, w1)), w2);
    td_tensor *loss = td_mean(td_square(td_sub(y, numbers(TD_SHAPE(8, 3), device))));
    CHECK(loss);
    CHECK_OK(td_backward(loss));
    grads[0] = td_tensor_grad(w1);
    grads[1] = td_tensor_grad(w2);
    return loss;
}

TEST(gradients_are_those_of_the_host)
{
    td_device *toy = begin();
    for (int round = 0; round < 10; round++) { /* with memory that was used before */
        TD_SCOPE;
        td_tensor *here[2], *there[2];
        td_tensor *loss = train_step(td_device_get("cpu"), here);
        check_same(loss, train_step(toy, there));
        check_same(here[0], there[0]);
        check_same(here[1], there[1]);
    }
}

TEST(views_and_operators_in_place)
{
    td_device *toy = begin();
    td_device *devices[] = {td_device_get("cpu"), toy};
    td_tensor *results[2];
    TD_SCOPE;
    for (int i = 0; i < 2; i++) {
        td_tensor *x = numbers(TD_SHAPE(7, 5), devices[i]);
        td_tensor *t = td_transpose(x, 0, 1);
        CHECK_OK(td_add_(t, td_exp(t)));
        CHECK_OK(td_mul_scalar_(td_narrow(x, 1, 1, 3), 2));
        results[i] = td_contiguous(t);
    }
    check_same(results[0], results[1]);
}

TEST(streams_and_pinned_memory)
{
    td_device *toy = begin(), *cpu = td_device_get("cpu");
    TD_SCOPE;
    td_tensor *x = td_tensor_pin(numbers(TD_SHAPE(16, 16), cpu), toy);
    CHECK(td_tensor_is_pinned(x));
    td_stream *side = td_stream_create(toy, 0);
    CHECK(side);
    for (int round = 0; round < 20; round++) {
        TD_SCOPE;
        td_tensor *there = td_tensor_to_async(x, toy), *product;
        CHECK_OK(td_stream_wait_stream(side, td_current_stream(toy)));
        {
            TD_STREAM_SCOPE(side);
            product = td_matmul(there, there);
        }
        CHECK_OK(td_stream_wait_stream(td_current_stream(toy), side));
        check_same(td_matmul(x, x), product);
    }
    td_stream_release(side);
}

TEST(what_the_device_lacks_is_named)
{
    td_device *toy = begin();
    TD_SCOPE;
    td_tensor *x = numbers(TD_SHAPE(4, 4), toy);
    CHECK(!td_erf(x));
    CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), "toy");
    CHECK(!td_argmax(x, 1, false));
    CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), "arg_reduce (max) of f32: toy:0 has no such kernel");
    CHECK(!td_exp(td_ones(TD_SHAPE(3), TD_I64, toy))); /* at the call, and not later */
    CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), "toy:0");
    CHECK_OK(td_device_synchronize(toy));
    toy_set_missing("matmul", true);
    CHECK(!td_matmul(x, x));
    CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
    toy_set_missing("matmul", false);
    CHECK(td_matmul(x, x));
}

TEST(memory_that_is_short_is_an_error)
{
    toy_set_memory(8 << 20);
    td_device *toy = begin();
    TD_SCOPE;
    CHECK(!td_empty(TD_SHAPE(16 << 20), TD_U8, toy));
    CHECK_EQ(td_last_status(), TD_ERR_NOMEM);
    CHECK_CONTAINS(td_last_error(), "toy:0");
    CHECK(numbers(TD_SHAPE(4), toy));
}

TEST(a_failure_of_the_device_is_reported_by_the_next_wait)
{
    td_device *toy = begin();
    TD_SCOPE;
    td_tensor *x = numbers(TD_SHAPE(4), toy);
    td_tensor *index = td_full(TD_SHAPE(2), 9, TD_I64, toy);
    td_tensor *picked = td_index_select(x, 0, index);
    CHECK(picked);
    CHECK(!td_tensor_to(picked, td_device_get("cpu")));
    CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "toy:0: index_select");
    CHECK(!td_exp(x));
    CHECK_CONTAINS(td_last_error(), "toy:0: index_select");
    toy_clear_failure(0);
    check_same(numbers(TD_SHAPE(4), td_device_get("cpu")), x);
}
