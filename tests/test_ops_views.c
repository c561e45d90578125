/* Changes through views: the gradients of all that shares the memory, by differences; and what is
 * refused. test_ops_reference.c compares the same programs with PyTorch. */
#include "ops_values.h"
#include "view_programs.h"

#include <pthread.h>

static td_tensor *leaf(td_tensor *x)
{
    CHECK_OK(td_tensor_set_requires_grad(x, true));
    return x;
}

static td_tensor *run_program(td_tensor *const *x, const void *name)
{
    return view_program(name, x[0], x[1]);
}

TEST(gradients_through_changed_views)
{
    {
        TD_SCOPE;
        td_tensor *a = gradcheck_random(SHAPE(3, 4), 0.5, 2);
        td_tensor *b = gradcheck_random(SHAPE(4), 0.5, 2);
        for (int i = 0; i < VIEW_PROGRAMS; i++)
            gradcheck(view_program_names[i], run_program, view_program_names[i],
                      (td_tensor *[]){a, b}, 2);
    }
}

/* Memory of the caller's with gaps between its rows. */
static td_tensor *with_gaps(td_tensor *const *x, const void *memory)
{
    td_tensor *base = td_from_blob((void *)memory, (int64_t[]){3, 2}, 2, (int64_t[]){5, 2}, TD_F64,
                                   NULL, NULL, NULL);
    CHECK_OK(td_zero_(base));
    CHECK_OK(td_add_(td_select(base, 1, 1), td_square(x[0])));
    CHECK_OK(td_mul_(base, td_unsqueeze(x[0], 1)));
    return td_sin(td_add_scalar(base, 1));
}

TEST(gradients_of_a_base_with_gaps, .host_only = "its tensors are over memory of the host")
{
    double memory[15] = {0};
    {
        TD_SCOPE;
        td_tensor *x = gradcheck_random(SHAPE(3), 0.5, 2);
        gradcheck("base with gaps", with_gaps, memory, &x, 1);
    }
    CHECK(memory[1] == 0 && memory[4] == 0);
}

TEST(a_graph_can_be_used_twice)
{
    {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(3), 1, 2, 3)), *y = td_mul_scalar(w, 2);
        CHECK_OK(td_mul_(td_narrow(y, 0, 1, 2), td_narrow(w, 0, 0, 2)));
        td_tensor *loss = td_sum(y); /* 2 w0 + 2 w1 w0 + 2 w2 w1 */
        for (int i = 0; i < 2; i++) {
            CHECK_OK(
                td_backward_from(&loss, NULL, 1, &(td_backward_options){.retain_graph = i == 0}));
            CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(3), 6. * (i + 1), 8. * (i + 1),
                         4. * (i + 1));
        }
        CHECK_FAILS(td_backward(loss), TD_ERR_STATE, "freed the saved tensors of td_mul_");
    }
}

/* ---- Hooks and gradients of results ----------------------------------------------------------------- */

static td_tensor *count_and_double(td_tensor *grad, void *arg, td_status *status)
{
    (void)status;
    ++*(int *)arg;
    return td_mul_scalar(grad, 2);
}

/* A hook belongs to the value that the tensor had when it was added, as in PyTorch. */
TEST(hooks_before_and_after_a_change)
{
    {
        TD_SCOPE;
        int base_before = 0, view_before = 0, base_after = 0, view_after = 0;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(2), 1, 2)), *y = td_mul_scalar(w, 3);
        td_tensor *v = td_select(y, 0, 0);
        CHECK_OK(td_tensor_add_grad_hook(y, count_and_double, &base_before, NULL));
        CHECK_OK(td_tensor_add_grad_hook(v, count_and_double, &view_before, NULL));
        CHECK_OK(td_mul_scalar_(v, 5));
        CHECK_OK(td_tensor_add_grad_hook(y, count_and_double, &base_after, NULL));
        CHECK_OK(td_tensor_add_grad_hook(v, count_and_double, &view_after, NULL));
        CHECK_OK(td_tensor_retain_grad(y));
        CHECK_OK(td_backward(td_add(td_sum(y), v)));
        CHECK_EQ(base_before, 1);
        CHECK_EQ(view_before, 0); /* nothing was computed of it as it was then */
        CHECK_EQ(base_after, 1);
        CHECK_EQ(view_after, 1);
        /* d/dy after: (1 + 2, 1) times 2; before: (15 * 2, 2) times 2 */
        CHECK_TENSOR(td_tensor_grad(y), TD_F64, SHAPE(2), 6, 2);
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2), 180, 12);
    }
}

TEST(gradients_for_a_changed_view)
{
    {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(3), 1, 2, 3)), *y = td_mul_scalar(w, 2);
        td_tensor *v = td_narrow(y, 0, 0, 2), *grads[2];
        CHECK_OK(td_mul_(v, v));
        td_tensor *loss = td_add(td_sum(td_square(v)), td_sum(y));
        CHECK_OK(td_gradients(&loss, NULL, 1, (td_tensor *[]){v, y}, 2, grads, NULL));
        CHECK_TENSOR(grads[0], TD_F64, SHAPE(2), 8, 32);
        CHECK_TENSOR(grads[1], TD_F64, SHAPE(3), 9, 33, 1);
        CHECK(!td_tensor_is_leaf(y) && !td_tensor_is_leaf(v));
    }
}

/* ---- What is refused, and what is not -------------------------------------------------------------- */

TEST(what_was_saved_must_not_change)
{
    {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(3), 1, 2, 3)), *y = td_mul_scalar(w, 1);
        td_tensor *saved = td_square(y), *other = td_narrow(y, 0, 2, 1);
        CHECK_OK(td_mul_scalar_(other, 2));
        CHECK_FAILS(td_backward(td_sum(saved)), TD_ERR_STATE, "td_square saved for backward");
        y = td_mul_scalar(w, 1);
        td_tensor *squares = td_square(td_narrow(y, 0, 0, 1));
        CHECK_OK(td_add_scalar_(td_narrow(y, 0, 1, 1), 1)); /* other elements, one version */
        CHECK_FAILS(td_backward(squares), TD_ERR_STATE, "td_square saved for backward");
    }
}

TEST(views_of_leaves_do_not_change_while_recording)
{
    {
        TD_SCOPE;
        td_tensor *w = td_ones(SHAPE(2, 2), TD_F64, NULL), *early = td_select(w, 0, 0);
        leaf(w);
        td_tensor *view = td_transpose(td_narrow(w, 0, 0, 1), 0, 1);
        CHECK_FAILS(td_add_scalar_(view, 1), TD_ERR_STATE,
                    "td_add_scalar_: the tensor of shape [2, 1] is a view of a leaf");
        CHECK_FAILS(td_zero_(early), TD_ERR_STATE, "is a view of a leaf");
        CHECK_FAILS(td_mul_(td_expand(td_narrow(w, 0, 0, 1), SHAPE(3, 2)), w), TD_ERR_STATE,
                    "is a view of a leaf");
        {
            TD_NO_GRAD;
            CHECK_OK(td_mul_scalar_(view, 3));
        }
        CHECK_OK(td_backward(td_sum(td_square(w))));
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2, 2), 6, 6, 2, 2);
        CHECK_OK(td_tensor_set_requires_grad(w, false));
        CHECK_OK(td_zero_(early)); /* a view of a leaf no more */
        CHECK_TENSOR(w, TD_F64, SHAPE(2, 2), 0, 0, 1, 1);
    }
}

/* A view may be a leaf of its own; then its base is none of its concern. */
TEST(a_view_as_a_leaf)
{
    {
        TD_SCOPE;
        td_tensor *x = td_ones(SHAPE(3), TD_F64, NULL), *v = leaf(td_narrow(x, 0, 0, 2));
        CHECK_FAILS(td_mul_scalar_(v, 2), TD_ERR_STATE, "a leaf of shape [2]");
        CHECK_FAILS(td_mul_scalar_(td_select(v, 0, 0), 2), TD_ERR_STATE, "is a view of a leaf");
        CHECK_OK(td_mul_scalar_(x, 2)); /* not recorded: no gradient is asked for */
        CHECK_OK(td_backward(td_sum(td_square(v))));
        CHECK_TENSOR(td_tensor_grad(v), TD_F64, SHAPE(2), 4, 4);
    }
}

TEST(what_is_expanded_is_refused)
{
    {
        TD_SCOPE;
        td_tensor *y = td_mul_scalar(leaf(MAKE(TD_F64, SHAPE(2), 1, 2)), 2);
        td_tensor *wide = td_expand(y, SHAPE(3, 2));
        CHECK_FAILS(td_mul_scalar_(wide, 2), TD_ERR_INVALID, "share memory");
        CHECK_FAILS(td_tensor_copy(wide, td_ones(SHAPE(3, 2), TD_F64, NULL)), TD_ERR_INVALID,
                    "share memory");
        CHECK_OK(td_mul_scalar_(td_select(wide, 0, 1), 2)); /* one of the rows is each of them */
        CHECK_TENSOR(wide, TD_F64, SHAPE(3, 2), 4, 8, 4, 8, 4, 8);
    }
}

/* What is not a view for gradients cannot take its base along: an error, never a wrong number. */
TEST(detached_tensors_go_their_own_way)
{
    {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(3), 1, 2, 3)), *y = td_mul_scalar(w, 1);
        td_tensor *apart = td_detach(y), *silent = NULL;
        CHECK_OK(td_mul_scalar_(apart, 2)); /* not recorded */
        CHECK_TENSOR(y, TD_F64, SHAPE(3), 2, 4, 6);
        CHECK_OK(td_backward(td_sum(td_square(y))));
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(3), 4, 8, 12);
        CHECK_OK(td_add_(apart, w)); /* recorded */
        CHECK_NULL(
            td_sum(y),
            "td_sum: the memory of its input of shape [3] was changed in place through a td_detach()");
        CHECK_NULL(td_sum(td_narrow(y, 0, 0, 2)), "td_narrow: the memory");
        CHECK_FAILS(td_add_scalar_(y, 1), TD_ERR_STATE, "td_add_scalar_: the memory");
        CHECK_FAILS(td_mul_(td_ones(SHAPE(3), TD_F64, NULL), y), TD_ERR_STATE,
                    "td_mul_: the memory");

        y = td_mul_scalar(w, 1);
        {
            TD_NO_GRAD;
            silent = td_narrow(y, 0, 0, 2);
        }
        CHECK_OK(td_mul_(silent, td_narrow(w, 0, 0, 2)));
        CHECK_NULL(td_sum(y), "or a view made under TD_NO_GRAD");
        {
            TD_NO_GRAD;
            CHECK_TENSOR(td_sum(y), TD_F64, NO_DIMS, 8);
        }
    }
}

/* ---- Threads --------------------------------------------------------------------------------------- */

static void *use(void *tensor)
{
    {
        TD_SCOPE;
        CHECK_OK(td_backward(td_sum(td_square(tensor))));
    }
    return NULL;
}

/* Several threads use one view that is out of date. */
TEST(threads_use_a_changed_base)
{
    enum { THREADS = 4, ROUNDS = 20 };
    for (int round = 0; round < ROUNDS; round++) {
        TD_SCOPE;
        td_tensor *w = leaf(MAKE(TD_F64, SHAPE(2), 1, 2));
        pthread_t threads[THREADS];
        td_tensor *y = td_mul_scalar(w, 1), *v = td_select(y, 0, 0);
        CHECK_OK(td_mul_scalar_(td_select(y, 0, 1), 3));
        for (int i = 0; i < THREADS; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, use, i % 2 ? y : v), 0);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        CHECK_TENSOR(td_tensor_grad(w), TD_F64, SHAPE(2), 8, 72);
    }
}
