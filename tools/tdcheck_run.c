/* One case: the operands are made on the host and copied to the device, the operator and its gradient run on both, and
 * all results, gradients and operands are compared.
 *
 * Each operand is a view of a larger memory (check_base()), which is compared too: an operator that writes beside its
 * result, or to an operand, is found. */
#include "tdcheck.h"

#include <math.h>
#include <stdio.h>

/* What one side has computed. All belong to the scope of check_run_once(). */
struct side {
    td_tensor *bases[CHECK_INPUTS], *x[CHECK_INPUTS];
    td_tensor *results[CHECK_RESULTS];
    td_tensor *grads[CHECK_INPUTS];
    bool recorded;
};

td_tensor *check_fetch(td_tensor *tensor)
{
    TD_NO_GRAD;
    return td_tensor_to(td_detach(tensor), td_device_get("cpu"));
}

static td_tensor *in_place(struct check_case *c, td_tensor **x)
{
    const struct check_row *row = c->row;
    /* A leaf cannot be changed: its copy can. Without gradients the view itself is. */
    td_tensor *out = c->with_grad ? td_clone(x[0]) : x[0];
    td_status status = !out             ? TD_ERR_INVALID
                       : row->in_place1 ? row->in_place1(out)
                       : row->in_place2 ? row->in_place2(out, x[1])
                                        : row->in_place_scalar(out, row->number);
    return status ? NULL : out;
}

static td_tensor *call(struct check_case *c, td_tensor **x)
{
    const struct check_row *row = c->row;
    for (int i = 0; i < CHECK_RESULTS - 1; i++)
        c->more[i] = NULL;
    if (row->tensor1)
        return row->tensor1(x[0]);
    if (row->tensor2)
        return row->tensor2(x[0], x[1]);
    if (row->scalar)
        return row->scalar(x[0], row->number);
    return row->call ? row->call(x, c) : in_place(c, x);
}

/* Copies the operands of the host to a device, or takes them as they are. */
static bool place(struct side *side, const struct check_case *c, td_tensor *const *bases,
                  td_device *device)
{
    for (int i = 0; i < c->count; i++) {
        if (c->is_null[i])
            continue;
        td_tensor *base = bases[i];
        side->bases[i] = td_device_index(device) < 0 ? td_clone(base) : td_tensor_to(base, device);
        side->x[i] = side->bases[i] ? check_view(side->bases[i], c, i) : NULL;
        if (!side->x[i])
            return false;
        bool floats = BIT(td_tensor_dtype(side->x[i])) & FLOATS;
        if (c->with_grad && floats && td_tensor_set_requires_grad(side->x[i], true))
            return false;
    }
    return true;
}

/* Runs the operator and, from `grad_y`, its gradient. Nothing here waits for the device. */
static bool compute(struct side *side, struct check_case *c, td_tensor *grad_y)
{
    side->results[0] = call(c, side->x);
    if (!side->results[0])
        return false;
    for (int i = 1; i < CHECK_RESULTS; i++)
        side->results[i] = c->more[i - 1];
    side->recorded = td_tensor_requires_grad(side->results[0]);
    if (!grad_y || !side->recorded)
        return true;
    if (td_backward_from(&side->results[0], &grad_y, 1, NULL))
        return false;
    for (int i = 0; i < c->count; i++)
        side->grads[i] = td_tensor_grad(side->x[i]);
    return true;
}

/* The gradient of the result: as the host's result is, and in another layout for other layouts. */
static td_tensor *gradient_for(struct check_random *random, const struct check_case *c,
                               td_tensor *result)
{
    int ndim = td_tensor_ndim(result);
    td_tensor *grad = check_numbers(random, td_tensor_shape(result), ndim, td_tensor_dtype(result),
                                    'n', 0);
    if (c->layout == CHECK_TRANSPOSED && ndim > 1)
        grad = td_transpose(td_contiguous(td_transpose(grad, 0, ndim - 1)), 0, ndim - 1);
    return grad;
}

/* What may have been added up for the gradients of a row with CHECK_CANCELS. */
static bool bound_gradients(struct side *side, const struct check_case *c, const struct side *host,
                            td_tensor *grad_y)
{
    TD_NO_GRAD;
    int64_t results = td_tensor_numel(grad_y);
    double most = results ? td_item(td_max(td_abs(td_to_dtype(grad_y, TD_F64)))) : 0;
    for (int i = 0; i < c->count; i++) {
        td_tensor *grad = host->grads[i];
        int64_t count = grad ? td_tensor_numel(grad) : 0;
        if (count == 0)
            continue;
        double times = fmax(1, (double)results / (double)count);
        side->grads[i] = td_full(td_tensor_shape(grad), td_tensor_ndim(grad), most * times, TD_F64,
                                 td_device_get("cpu"));
        if (!side->grads[i])
            return false;
    }
    return true;
}

/* The same case over absolute values, in f64: what was added up. */
static bool compute_magnitudes(struct side *side, const struct check_case *c,
                               td_tensor *const *bases, td_tensor *grad_y)
{
    struct check_case wide = *c;
    td_tensor *absolute[CHECK_INPUTS] = {NULL};
    wide.dtype = TD_F64;
    wide.magnitudes = true;
    for (int i = 0; i < c->count; i++) {
        bool floats = !c->is_null[i] && (BIT(td_tensor_dtype(bases[i])) & FLOATS);
        absolute[i] = floats ? td_abs(td_to_dtype(bases[i], TD_F64)) : bases[i];
    }
    td_tensor *grad = grad_y ? td_abs(td_to_dtype(grad_y, TD_F64)) : NULL;
    return place(side, &wide, absolute, td_device_get("cpu")) && compute(side, &wide, grad);
}

/* ---- Comparison -------------------------------------------------------------------------------------- */

static enum check_measure measure_of(const struct check_row *row, bool gradient)
{
    if (row->flags & CHECK_BITS)
        return MEASURE_BITS;
    if (row->flags & CHECK_ABSOLUTE)
        return MEASURE_ABSOLUTE;
    if (row->flags & CHECK_LARGEST || gradient)
        return MEASURE_LARGEST;
    return row->flags & CHECK_EXACT ? MEASURE_EQUAL : MEASURE_ELEMENT;
}

static double units_of(const struct check_row *row, td_dtype dtype)
{
    if (row->tolerance > 0)
        return row->tolerance;
    return dtype == TD_F16 || dtype == TD_BF16 ? 2 : 16;
}

struct comparison {
    struct checker *checker;
    struct check_case *c;
    const char *inputs;
    double worst;
    bool failed;
};

static void compare(struct comparison *to, const char *what, int index, td_tensor *host,
                    td_tensor *device, td_tensor *magnitude, enum check_measure measure)
{
    if (to->failed || (!host && !device))
        return;
    td_dtype dtype = to->c->dtype;
    td_tensor *found = device ? check_fetch(device) : NULL;
    if (!host || !found) {
        checker_failed(to->checker, dtype, to->inputs, "%s %d: %s", what, index,
                       device && host ? td_last_error()
                       : host         ? "the device has none"
                                      : "the host has none");
        to->failed = true;
        return;
    }
    struct check_difference difference = check_compare(host, found, magnitude, measure,
                                                       units_of(to->c->row, td_tensor_dtype(host)));
    to->worst = fmax(to->worst, difference.worst);
    if (difference.at < 0)
        return;
    checker_failed(to->checker, dtype, to->inputs, "%s %d: %s", what, index, difference.text);
    to->failed = true;
}

static void compare_sides(struct comparison *to, const struct side *host, const struct side *device,
                          const struct side *magnitude)
{
    const struct check_row *row = to->c->row;
    for (int i = 0; i < CHECK_RESULTS; i++)
        compare(to, "result", i, host->results[i], device->results[i], magnitude->results[i],
                measure_of(row, false));
    for (int i = 0; i < to->c->count; i++)
        compare(to, "the gradient of operand", i, host->grads[i], device->grads[i],
                magnitude->grads[i], measure_of(row, true));
    /* What was written is as exact as the result; all else has not changed: f32 stands for all dtypes there. */
    bool written = row->flags & CHECK_IN_PLACE;
    for (int i = 0; i < to->c->count && (written || to->c->dtype == TD_F32); i++)
        compare(to, "the memory of operand", i, host->bases[i], device->bases[i],
                written && i == 0 ? magnitude->bases[i] : NULL,
                written && i == 0 ? measure_of(row, true) : MEASURE_BITS);
    if (!to->failed && host->recorded != device->recorded) {
        checker_failed(to->checker, to->c->dtype, to->inputs, "the result %s grad on the device",
                       device->recorded ? "requires" : "does not require");
        to->failed = true;
    }
}

static void run_once(struct checker *checker, struct check_case *c)
{
    TD_SCOPE;
    char inputs[CHECK_TEXT] = "";
    struct side host = {0}, device = {0}, magnitude = {0};
    td_tensor *bases[CHECK_INPUTS] = {NULL};
    struct check_random random = check_random_of(checker->seed, c);
    for (int i = 0; i < c->count; i++)
        bases[i] = c->is_null[i] ? NULL : check_base(&random, c, i);

    /* The host first: its result says what shape the gradient has. */
    td_tensor *grad_y = NULL;
    bool placed = place(&host, c, bases, td_device_get("cpu"));
    if (placed && c->with_grad) {
        td_tensor *first = call(c, host.x);
        placed = first && place(&host, c, bases, td_device_get("cpu"));
        grad_y = placed && td_tensor_requires_grad(first) ? gradient_for(&random, c, first) : NULL;
    }
    if (placed)
        check_describe(c, host.x, inputs);
    if (!placed || !compute(&host, c, grad_y)) {
        checker_failed(checker, c->dtype, inputs, "the host refuses it: %s", td_last_error());
        return;
    }
    if (c->row->flags & CHECK_ABSOLUTE && BIT(c->dtype) & FLOATS &&
        !compute_magnitudes(&magnitude, c, bases, grad_y)) {
        checker_failed(checker, c->dtype, inputs, "in f64 the host refuses it: %s",
                       td_last_error());
        return;
    }

    if (c->row->flags & CHECK_CANCELS && grad_y && !bound_gradients(&magnitude, c, &host, grad_y)) {
        checker_failed(checker, c->dtype, inputs, "%s", td_last_error());
        return;
    }

    td_tensor *device_grad = grad_y ? td_tensor_to(grad_y, checker->device) : NULL;
    if (!place(&device, c, bases, checker->device) || (grad_y && !device_grad)) {
        checker_refused(checker, c->dtype, inputs, "copying the operands");
        return;
    }
    int64_t waits = td_device_waits(checker->device);
    if (!compute(&device, c, device_grad)) {
        checker_refused(checker, c->dtype, inputs, c->row->name);
        return;
    }
    waits = td_device_waits(checker->device) - waits;
    struct comparison to = {.checker = checker, .c = c, .inputs = inputs};
    if (waits && !checker->may_wait) {
        checker_failed(checker, c->dtype, inputs, "the host has waited %lld times for the device",
                       (long long)waits);
        return;
    }
    compare_sides(&to, &host, &device, &magnitude);
    if (!to.failed)
        checker_passed(checker, c->dtype, to.worst);
}

/* Large operands in one layout only. */
static bool is_large(const struct check_case *c)
{
    int64_t most = 0;
    for (int i = 0; i < c->count; i++) {
        int64_t count = 1;
        for (int d = 0; d < c->ndim[i]; d++)
            count *= c->shape[i][d];
        most = count > most ? count : most;
    }
    return most > 500;
}

void check_run(struct checker *checker, struct check_case *c)
{
    int flags = c->row->flags;
    bool floats = BIT(c->dtype) & FLOATS;
    int layouts = flags & CHECK_PLAIN || is_large(c) ? 1 : CHECK_LAYOUTS;
    for (c->layout = 0; c->layout < layouts; c->layout++) {
        /* All of them for f32; for others contiguous ones, and one that changes with the shapes. */
        if (c->dtype != TD_F32 && c->layout && c->layout != 1 + c->number_of % (layouts - 1))
            continue;
        c->special = false;
        c->with_grad = floats && !(flags & CHECK_NO_GRAD);
        run_once(checker, c);
        if (flags & CHECK_IN_PLACE && c->with_grad) {
            c->with_grad = false;
            run_once(checker, c);
        }
        if (flags & CHECK_SPECIAL && floats) {
            c->special = true;
            c->with_grad = false;
            run_once(checker, c);
        }
    }
}
