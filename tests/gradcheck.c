/* How it works: each input becomes a leaf, contiguous and with data of its own, and a view of that,
 * which has the input's shape. The function sees the views; the differences are taken at the leaves,
 * so what the gradient of a view does is checked along with that of the function. */
#include "gradcheck.h"

#include "host_data.h"
#include "runner.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum way { PLAIN, TRANSPOSED, SLICED, EXPANDED, WAYS };
static const char *const way_names[] = {"plain", "transposed", "sliced", "expanded"};

struct check {
    const char *name;
    gradcheck_fn fn;
    const void *arg;
    td_tensor *const *inputs;
    int count;
    enum way ways[GRADCHECK_MOST];
    td_tensor *leaves[GRADCHECK_MOST]; /* the inputs themselves where they are not f64 */
};

/* ---- Numbers ----------------------------------------------------------------------------------- */

static double draw(void)
{
    static uint64_t state = UINT64_C(0x853c49e6748fea9b);
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) * 0x1p-53;
}

td_tensor *gradcheck_random(const int64_t *shape, int ndim, double low, double high)
{
    TD_SCOPE;
    td_tensor *tensor = td_empty(shape, ndim, TD_F64, td_device_get("cpu"));
    CHECK(tensor);
    double *data = td_tensor_data(tensor);
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        data[i] = low + (high - low) * draw();
    return td_scope_return(td_tensor_to(tensor, NULL));
}

static void shape_of(const td_tensor *tensor, int64_t *shape)
{
    for (int d = 0; d < td_tensor_ndim(tensor); d++)
        shape[d] = td_tensor_size(tensor, d);
}

/* ---- Leaves and views of them ------------------------------------------------------------------ */

/* The first dimension that can be shrunk to one index; -1 where there is none. */
static int widest(const td_tensor *tensor)
{
    for (int d = 0; d < td_tensor_ndim(tensor); d++)
        if (td_tensor_size(tensor, d) > 1)
            return d;
    return -1;
}

static td_tensor *view_of(const struct check *check, int input)
{
    td_tensor *leaf = check->leaves[input];
    int last = td_tensor_ndim(leaf) - 1;
    int64_t shape[TD_MAX_DIMS];
    shape_of(check->inputs[input], shape);
    switch (check->ways[input]) {
    case TRANSPOSED:
        return td_transpose(leaf, 0, last);
    case SLICED:
        return td_slice(leaf, last, 1, INT64_MAX, 2);
    case EXPANDED:
        return td_expand(leaf, shape, last + 1);
    default:
        return leaf;
    }
}

/* Where a shape does not allow the way, the leaf is plain. */
static void make_leaf(struct check *check, int input)
{
    td_tensor *from = check->inputs[input];
    int64_t shape[TD_MAX_DIMS];
    int ndim = td_tensor_ndim(from), wide = widest(from);
    if (td_tensor_dtype(from) != TD_F64) {
        check->ways[input] = PLAIN;
        check->leaves[input] = from;
        return;
    }
    shape_of(from, shape);
    enum way way = check->ways[input];
    if ((way == TRANSPOSED && ndim < 2) || (way == SLICED && ndim < 1) ||
        (way == EXPANDED && wide < 0))
        way = check->ways[input] = PLAIN;
    td_tensor *some = from;
    if (way == TRANSPOSED) {
        int64_t first = shape[0];
        shape[0] = shape[ndim - 1];
        shape[ndim - 1] = first;
    } else if (way == SLICED) {
        shape[ndim - 1] *= 2;
    } else if (way == EXPANDED) {
        shape[wide] = 1;
        some = td_narrow(from, wide, 0, 1);
    }
    /* What is not part of the view must not be looked at. */
    check->leaves[input] = td_full(shape, ndim, NAN, TD_F64, NULL);
    CHECK(check->leaves[input]);
    set_host_data(way == EXPANDED ? check->leaves[input] : view_of(check, input), host_data(some));
}

static td_tensor *run(const struct check *check)
{
    td_tensor *views[GRADCHECK_MOST];
    for (int i = 0; i < check->count; i++) {
        views[i] = view_of(check, i);
        CHECK(views[i]);
    }
    td_tensor *result = check->fn(views, check->arg);
    if (!result)
        FAIL("%s: %s", check->name, td_last_error());
    CHECK_EQ(td_tensor_dtype(result), TD_F64);
    return result;
}

/* ---- Two ways to a gradient -------------------------------------------------------------------- */

/* The sum of all elements of the result, times `weights`. */
static double weighed(const struct check *check, const double *weights)
{
    double sum = 0;
    {
        TD_SCOPE;
        td_tensor *result = run(check);
        const double *y = host_data(result);
        for (int64_t i = 0; i < td_tensor_numel(result); i++)
            sum += y[i] * weights[i];
    }
    return sum;
}

static void describe(const struct check *check, char *text, size_t size)
{
    int at = snprintf(text, size, "%s (", check->name);
    for (int i = 0; i < check->count; i++)
        at += snprintf(text + at, size - (size_t)at, "%s%s", i ? ", " : "",
                       way_names[check->ways[i]]);
    snprintf(text + at, size - (size_t)at, ")");
}

static void compare(const struct check *check, int input, int64_t number, double right,
                    double given)
{
    char text[200];
    if (fabs(right - given) <= 2e-6 + 2e-5 * fabs(right))
        return;
    describe(check, text, sizeof text);
    FAIL("%s: the gradient of input %d at element %lld is %.12g, by differences %.12g", text, input,
         (long long)number, given, right);
}

/* A copy of the elements, for free(). */
static double *copied(const td_tensor *tensor)
{
    double *data = malloc(td_tensor_nbytes(tensor) + 1);
    CHECK(data);
    if (td_tensor_nbytes(tensor))
        memcpy(data, host_data(tensor), td_tensor_nbytes(tensor));
    return data;
}

static void compare_with_differences(struct check *check, int input, const td_tensor *weight,
                                     const td_tensor *grad)
{
    const double h = 1e-5;
    td_tensor *leaf = check->leaves[input];
    double *data = copied(leaf), *weights = copied(weight), *grads = grad ? copied(grad) : NULL;
    /* On accelerators, where each evaluation is several launches and a wait, a few of the elements. */
    int64_t step = td_test_on_host() ? 1 : 1 + td_tensor_numel(leaf) / 4;
    for (int64_t i = 0; i < td_tensor_numel(leaf); i += step) {
        double before = data[i];
        double given = grads ? grads[i] : 0;
        if (isnan(before)) { /* not part of the view */
            compare(check, input, i, 0, given);
            continue;
        }
        data[i] = before + h;
        set_host_data(leaf, data);
        double above = weighed(check, weights);
        data[i] = before - h;
        set_host_data(leaf, data);
        double below = weighed(check, weights);
        data[i] = before;
        compare(check, input, i, (above - below) / (2 * h), given);
    }
    set_host_data(leaf, data);
    free(data);
    free(weights);
    free(grads);
}

/* The gradients of all f64 inputs whose bit is set in `asking`. */
static void go_back(struct check *check, unsigned asking, td_tensor *weights, bool twice,
                    td_tensor **grads)
{
    td_tensor *leaves[GRADCHECK_MOST], *found[GRADCHECK_MOST];
    int count = 0;
    for (int i = 0; i < check->count; i++) {
        bool asks = (asking & 1u << i) && td_tensor_dtype(check->leaves[i]) == TD_F64;
        if (td_tensor_dtype(check->leaves[i]) == TD_F64)
            CHECK_OK(td_tensor_set_requires_grad(check->leaves[i], asks));
        if (asks)
            leaves[count++] = check->leaves[i];
    }
    td_tensor *result = run(check);
    for (int pass = 0; pass <= twice; pass++) {
        td_backward_options options = {.retain_graph = pass < twice};
        td_status status = td_gradients(&result, &weights, 1, leaves, count, found, &options);
        if (status)
            FAIL("%s: %s", check->name, td_last_error());
    }
    for (int i = 0, k = 0; i < check->count; i++) {
        bool asks = (asking & 1u << i) && td_tensor_dtype(check->leaves[i]) == TD_F64;
        grads[i] = asks ? found[k++] : NULL;
    }
}

static void compare_tensors(const struct check *check, int input, const td_tensor *right,
                            const td_tensor *given)
{
    CHECK(!right == !given);
    const double *x = right ? host_data(right) : NULL, *y = given ? host_data(given) : NULL;
    for (int64_t i = 0; right && i < td_tensor_numel(right); i++)
        compare(check, input, i, x[i], y[i]);
}

/* ---- One check --------------------------------------------------------------------------------- */

static td_tensor *random_like(const td_tensor *tensor, bool strided)
{
    int64_t shape[TD_MAX_DIMS];
    int ndim = td_tensor_ndim(tensor);
    shape_of(tensor, shape);
    td_tensor *numbers = gradcheck_random(shape, ndim, -1, 1);
    if (!strided || ndim == 0)
        return numbers;
    shape[ndim - 1] *= 3;
    td_tensor *wide = gradcheck_random(shape, ndim, -1, 1);
    td_tensor *view = td_slice(wide, ndim - 1, 1, INT64_MAX, 3);
    set_host_data(view, host_data(numbers));
    return view;
}

static void check_ways(struct check *check)
{
    td_tensor *grads[GRADCHECK_MOST], *others[GRADCHECK_MOST], *weights = NULL;
    for (int i = 0; i < check->count; i++)
        make_leaf(check, i);
    {
        TD_NO_GRAD;
        weights = random_like(run(check), check->ways[0] == TRANSPOSED);
    }
    go_back(check, ~0u, weights, false, grads);
    for (int i = 0; i < check->count; i++)
        if (td_tensor_dtype(check->leaves[i]) == TD_F64)
            CHECK_OK(td_tensor_set_requires_grad(check->leaves[i], false));
    for (int i = 0; i < check->count; i++)
        if (td_tensor_dtype(check->leaves[i]) == TD_F64)
            compare_with_differences(check, i, weights, grads[i]);

    for (int i = 0; i < check->count && check->ways[0] == PLAIN; i++) {
        if (td_tensor_dtype(check->leaves[i]) != TD_F64)
            continue;
        go_back(check, 1u << i, weights, true, others);
        compare_tensors(check, i, grads[i], others[i]);
    }
}

static void check_all(const char *name, gradcheck_fn fn, const void *arg, td_tensor *const *inputs,
                      int count, int ways)
{
    CHECK(count >= 1 && count <= GRADCHECK_MOST);
    for (int turn = 0; turn < 2 * ways; turn++) {
        struct check check = {.name = name, .fn = fn, .arg = arg, .inputs = inputs, .count = count};
        /* First all inputs in the same way, then in different ones. */
        for (int i = 0; i < count; i++)
            check.ways[i] = turn < ways ? (enum way)turn : (enum way)((turn + i) % ways);
        {
            TD_SCOPE;
            check_ways(&check);
        }
        if (count == 1 && turn + 1 == ways)
            break;
    }
}

void gradcheck(const char *name, gradcheck_fn fn, const void *arg, td_tensor *const *inputs,
               int count)
{
    check_all(name, fn, arg, inputs, count, WAYS);
}

void gradcheck_distinct(const char *name, gradcheck_fn fn, const void *arg,
                        td_tensor *const *inputs, int count)
{
    check_all(name, fn, arg, inputs, count, EXPANDED);
}
