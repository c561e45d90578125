/* See view_programs.h. */
#include "view_programs.h"

#include "runner.h"

#include <string.h>

#define SHAPE(...) TD_SHAPE(__VA_ARGS__)

/* x = a * 1.5, a result that may be changed. */
static td_tensor *start(td_tensor *a)
{
    return td_mul_scalar(a, 1.5);
}

static td_tensor *slice(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a);
    CHECK_OK(td_mul_(td_narrow(x, 0, 1, 2), b));
    return td_sin(x);
}

static td_tensor *step(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a);
    CHECK_OK(td_div_(td_slice(x, 1, 1, INT64_MAX, 2), td_narrow(b, 0, 1, 2)));
    return td_sin(x);
}

static td_tensor *transposed(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a), *t = td_transpose(x, 0, 1);
    CHECK_OK(td_add_scaled_(td_select(t, 0, 2), td_narrow(b, 0, 0, 3), 2));
    return td_mul(td_sin(x), td_transpose(t, 0, 1));
}

/* One element, through two selections. */
static td_tensor *element(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a), *row = td_select(x, 0, 1);
    CHECK_OK(td_mul_(td_select(row, 0, 2), td_select(b, 0, 3)));
    return td_add(td_exp(x), row);
}

static td_tensor *view_of_view(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a);
    td_tensor *columns = td_transpose(td_narrow(x, 1, 1, 3), 0, 1),
              *two = td_narrow(columns, 0, 0, 2);
    CHECK_OK(td_mul_(two, td_unsqueeze(td_narrow(b, 0, 2, 2), 1)));
    CHECK_OK(td_add_(columns, td_unsqueeze(td_narrow(b, 0, 0, 3), 1)));
    return td_cat((td_tensor *[]){td_sin(x), td_transpose(td_sin(two), 0, 1)}, 2, 1);
}

static td_tensor *two_views(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a), *first = td_select(x, 0, 0), *rows = td_narrow(x, 0, 0, 2);
    CHECK_OK(td_mul_(first, b));
    CHECK_OK(td_add_(rows, td_square(b)));
    return td_add(td_mul(td_sin(first), td_exp(rows)), td_select(x, 0, 2));
}

/* Base and views in turn. */
static td_tensor *chain(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a), *row = td_select(x, 0, 2);
    CHECK_OK(td_mul_(row, b));
    CHECK_OK(td_add_(row, b));
    CHECK_OK(td_mul_scalar_(x, 0.5));
    CHECK_OK(td_div_(row, td_add_scalar(b, 3)));
    CHECK_OK(td_mul_(x, td_exp(b)));
    return td_add(td_sin(x), row);
}

static td_tensor *reshaped(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a), *flat = td_reshape(x, SHAPE(2, 6));
    CHECK_OK(td_tensor_copy(td_narrow(td_select(flat, 0, 1), 0, 1, 4), td_square(b)));
    return td_add(td_sin(x), td_reshape(td_exp(flat), SHAPE(3, 4)));
}

/* A view that repeats its base, which is changed behind it. */
static td_tensor *expanded(td_tensor *a, td_tensor *b)
{
    td_tensor *row = start(b), *wide = td_expand(row, SHAPE(3, 4));
    CHECK_OK(td_mul_(td_narrow(row, 0, 1, 2), td_narrow(td_select(a, 0, 0), 0, 1, 2)));
    return td_mul(td_sin(wide), a);
}

/* A base without a gradient becomes a result. */
static td_tensor *filled(td_tensor *a, td_tensor *b)
{
    td_tensor *x = td_add_scalar(td_zeros_like(td_detach(a)), 0.25);
    td_tensor *last = td_select(x, 0, 2);
    CHECK_OK(td_tensor_copy(td_select(x, 0, 0), td_select(a, 0, 1)));
    CHECK_OK(td_add_(td_select(x, 0, 1), td_mul(td_select(a, 0, 2), b)));
    return td_sin(td_mul(x, td_add_scalar(last, 1)));
}

static td_tensor *constants(td_tensor *a, td_tensor *b)
{
    td_tensor *x = td_sub(start(a), b);
    CHECK_OK(td_fill_(td_select(x, 0, 0), 5));
    CHECK_OK(td_zero_(td_select(td_select(x, 0, 1), 0, 3)));
    CHECK_OK(td_clamp_(td_narrow(x, 1, 2, 2), -0.3, 0.4));
    CHECK_OK(td_f_relu_(td_narrow(x, 1, 0, 2)));
    return td_mul(td_exp(x), b);
}

/* A view that is used before and after its base is changed. */
static td_tensor *before_and_after(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a), *row = td_select(x, 0, 1), *before = td_mul_scalar(row, 3);
    CHECK_OK(td_mul_(x, b));
    return td_add(td_mul(before, td_sin(row)), x);
}

/* The base is the other operand, and so is another view of it. */
static td_tensor *own_operand(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a);
    CHECK_OK(td_add_(td_select(x, 0, 0), td_select(x, 0, 1)));
    CHECK_OK(td_add_(td_narrow(x, 0, 1, 2), td_select(x, 0, 0)));
    return td_mul(td_sin(x), b);
}

/* The base is released before its view is changed. */
static td_tensor *base_gone(td_tensor *a, td_tensor *b)
{
    td_tensor *kept = NULL;
    {
        TD_SCOPE;
        kept = td_tensor_retain(td_permute(start(a), (int[]){1, 0}, 2));
    }
    CHECK_OK(td_mul_(td_narrow(kept, 1, 0, 2), td_unsqueeze(b, 1)));
    td_tensor *y = td_sin(kept);
    td_tensor_release(kept);
    return y;
}

static td_tensor *squeezed(td_tensor *a, td_tensor *b)
{
    td_tensor *x = start(a), *row = td_narrow(x, 0, 1, 1);
    CHECK_OK(td_mul_(td_squeeze(row, 0), b));
    CHECK_OK(td_sub_(td_unsqueeze(x, 1), b));
    return td_mul(td_sin(row), x);
}

static td_tensor *(*const programs[VIEW_PROGRAMS])(td_tensor *, td_tensor *) = {
    slice,    step,   transposed, element,          view_of_view, two_views, chain,   reshaped,
    expanded, filled, constants,  before_and_after, own_operand,  base_gone, squeezed};

const char *const view_program_names[VIEW_PROGRAMS] = {
    "view_slice",       "view_step",      "view_transposed", "view_element",
    "view_of_view",     "view_two_views", "view_chain",      "view_reshaped",
    "view_expanded",    "view_filled",    "view_constants",  "view_before_and_after",
    "view_own_operand", "view_base_gone", "view_squeezed"};

td_tensor *view_program(const char *name, td_tensor *a, td_tensor *b)
{
    for (int i = 0; i < VIEW_PROGRAMS; i++)
        if (!strcmp(name, view_program_names[i]))
            return programs[i](a, b);
    return NULL;
}
