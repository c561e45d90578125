/* The check of gradients itself: it passes what is right, through all views, and finds what is
 * wrong. */
#include "gradcheck.h"
#include "runner.h"

#include <sys/wait.h>
#include <unistd.h>

/* x^3 with a gradient of factor * x^2, by hand. */
static td_status cube_backward(td_node *node, td_tensor *const *grad_y, td_tensor **grad_x)
{
    const double *factor = td_node_data(node);
    td_tensor *x = td_contiguous(td_node_saved(node, 0)), *g = td_contiguous(grad_y[0]);
    grad_x[0] = td_clone(x);
    CHECK(grad_x[0] && g);
    double *to = td_tensor_data(grad_x[0]), *from = td_tensor_data(g);
    for (int64_t i = 0; i < td_tensor_numel(x); i++)
        to[i] = *factor * to[i] * to[i] * from[i];
    return TD_OK;
}

static const td_function cube_function = {.name = "cube", .backward = cube_backward};

static td_tensor *cube(td_tensor *const *inputs, const void *factor)
{
    td_tensor *y = NULL;
    {
        TD_NO_GRAD;
        y = td_clone(inputs[0]);
    }
    double *data = td_tensor_data(y);
    for (int64_t i = 0; i < td_tensor_numel(y); i++)
        data[i] = data[i] * data[i] * data[i];
    return td_record(&cube_function, y,
                     &(td_node_spec){.inputs = {inputs[0]},
                                     .input_count = 1,
                                     .saved = {inputs[0]},
                                     .saved_count = 1,
                                     .data = factor,
                                     .data_size = sizeof(double)});
}

TEST(what_is_right_passes)
{
    double factor = 3;
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(2, 3, 4), -2, 2);
        gradcheck("cube", cube, &factor, &x, 1);
        x = gradcheck_random(NULL, 0, -2, 2);
        gradcheck("cube", cube, &factor, &x, 1);
        x = gradcheck_random(SHAPE(0, 3), -2, 2);
        gradcheck("cube", cube, &factor, &x, 1);
    }
}

/* Run by the test below. */
TEST(a_wrong_one, .hidden = true)
{
    double factor = 3.001;
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(2, 3), 1, 2);
        gradcheck("cube", cube, &factor, &x, 1);
    }
}

TEST(what_is_wrong_is_found)
{
    struct td_test_child child = td_test_exec(
        (const char *[]){td_test_program(), "a_wrong_one", NULL});
    CHECK(WIFEXITED(child.status) && WEXITSTATUS(child.status) != 0);
    CHECK_CONTAINS(child.output, "cube (plain): the gradient of input 0 at element 0");
    free(child.output);
}
