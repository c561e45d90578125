/* Copies between devices and the host, streams, and calls that return a number of the device. */
#include "tdcheck_own.h"

#include <math.h>
#include <stdio.h>

static const char *const shapes = ".; 0; 7; 2x3x5; 17x33; 4099";

/* Numbers of the host in the layout of the case. */
static td_tensor *operand_of(struct checker *checker, struct check_case *c)
{
    struct check_random random = check_random_of(checker->seed, c);
    td_tensor *base = check_base(&random, c, 0);
    return base ? check_view(base, c, 0) : NULL;
}

/* Calls `one` for each shape and layout, in a scope, with the operand on the host. It returns what came back, which must
 * be the same bits; NULL on failure. */
static void each(struct checker *checker, const struct check_row *row, td_dtype dtype,
                 td_tensor *(*one)(struct checker *checker, td_tensor *x))
{
    struct check_row plain = *row;
    struct check_case c = {.row = &plain, .dtype = dtype};
    plain.values = "n";
    for (const char *at = shapes; check_next_shapes(&c, &at); c.number_of++)
        for (c.layout = 0; c.layout < CHECK_LAYOUTS; c.layout++) {
            TD_SCOPE;
            char inputs[CHECK_TEXT];
            td_tensor *x = operand_of(checker, &c);
            check_describe(&c, &x, inputs);
            td_tensor *y = one(checker, x), *back = y ? check_fetch(y) : NULL;
            if (!back) {
                checker_refused(checker, dtype, inputs, row->name);
                continue;
            }
            struct check_difference difference = check_compare(x, back, NULL, MEASURE_BITS, 0);
            if (difference.at >= 0)
                checker_failed(checker, dtype, inputs, "%s", difference.text);
            else
                checker_passed(checker, dtype, 0);
        }
}

/* To the device, and into every second column of a tensor there from the host's. */
static td_tensor *transfer(struct checker *checker, td_tensor *x)
{
    td_tensor *there = td_tensor_to(x, checker->device);
    int ndim = td_tensor_ndim(x);
    if (!there || ndim == 0)
        return there;
    int64_t shape[TD_MAX_DIMS];
    for (int d = 0; d < ndim; d++)
        shape[d] = td_tensor_size(x, d) * (d == ndim - 1 ? 2 : 1);
    td_tensor *wide = td_zeros(shape, ndim, td_tensor_dtype(x), checker->device);
    td_tensor *stepped = td_slice(wide, ndim - 1, 0, INT64_MAX, 2);
    if (!stepped || td_tensor_copy(stepped, x))
        return NULL;
    td_tensor *home = td_empty(shape, ndim, td_tensor_dtype(x), td_device_get("cpu"));
    td_tensor *target = td_slice(home, ndim - 1, 1, INT64_MAX, 2);
    return td_tensor_copy(target, stepped) ? NULL : target;
}

CHECK_OWN_ROW(transfers)
{
    each(checker, row, dtype, transfer);
}

/* From pinned memory and back, without waiting until the end. */
static td_tensor *by_pinned_memory(struct checker *checker, td_tensor *x)
{
    td_device *device = checker->device;
    td_tensor *pinned = td_tensor_pin(x, device);
    td_tensor *target = pinned ? td_tensor_pin(td_zeros_like(x), device) : NULL;
    int64_t waits = td_device_waits(device);
    td_tensor *there = target ? td_tensor_to_async(pinned, device) : NULL;
    td_tensor *back = there ? td_tensor_to_async(there, td_device_get("cpu")) : NULL;
    if (!back || td_tensor_copy_async(target, there))
        return NULL;
    if (td_device_waits(device) != waits) {
        td_fail(TD_ERR_STATE, "the host has waited for an asynchronous copy");
        return NULL;
    }
    td_stream *stream = td_current_stream(device);
    if (stream && td_stream_synchronize(stream))
        return NULL;
    if (check_compare(target, back, NULL, MEASURE_BITS, 0).at >= 0) {
        td_fail(TD_ERR_MISMATCH, "td_tensor_to_async() and td_tensor_copy_async() differ");
        return NULL;
    }
    return back;
}

CHECK_OWN_ROW(pinned_copies)
{
    each(checker, row, dtype, by_pinned_memory);
}

static td_tensor *by_another_device(struct checker *checker, td_tensor *x)
{
    td_tensor *there = td_tensor_to(x, checker->device);
    td_tensor *other = there ? td_tensor_to(there, checker->other) : NULL;
    return other ? td_tensor_to(other, checker->device) : NULL;
}

CHECK_OWN_ROW(devices)
{
    if (checker->other)
        each(checker, row, dtype, by_another_device);
}

/* A product on another stream, between two on the default one, whose memory is reused at once. */
CHECK_OWN_ROW(streams)
{
    struct check_row plain = *row;
    plain.values = "nn";
    plain.flags = 0;
    struct check_case c = {.row = &plain, .dtype = dtype};
    const char *at = "33x65 65x17; 5x7 7x3";
    for (; check_next_shapes(&c, &at); c.number_of++) {
        TD_SCOPE;
        struct check_random random = check_random_of(checker->seed, &c);
        td_tensor *a = check_base(&random, &c, 0), *b = check_base(&random, &c, 1);
        td_tensor *x = td_tensor_to(a, checker->device), *w = td_tensor_to(b, checker->device);
        td_stream *side = td_stream_create(checker->device, 0);
        td_stream *main = td_current_stream(checker->device);
        td_tensor *y = NULL;
        if (x && w && side && main && !td_stream_wait_stream(side, main)) {
            TD_STREAM_SCOPE(side);
            TD_SCOPE;
            y = td_tensor_retain(td_matmul(td_add(x, x), w));
        }
        td_tensor *z = y && !td_stream_wait_stream(main, side) ? td_add(y, y) : NULL;
        td_tensor_release(y); /* while both streams may still use it */
        td_tensor *reused = z ? td_zeros_like(z) : NULL, *back = reused ? check_fetch(z) : NULL;
        td_stream_release(side);
        td_tensor *product = td_matmul(td_add(a, a), b);
        struct check_difference difference = {.at = -1};
        if (back)
            difference = check_compare(td_add(product, product), back, NULL, MEASURE_LARGEST, 32);
        if (!back)
            checker_refused(checker, dtype, "", "a product on another stream");
        else if (difference.at >= 0)
            checker_failed(checker, dtype, "", "on another stream %s", difference.text);
        else
            checker_passed(checker, dtype, difference.worst);
    }
}

CHECK_OWN_ROW(item)
{
    TD_SCOPE;
    (void)row;
    td_tensor *x = td_full(TD_SHAPE(1), 1, dtype, checker->device);
    double found = td_item(x);
    if (!x || isnan(found))
        checker_refused(checker, dtype, "[1]", "td_item");
    else if (found != 1)
        checker_failed(checker, dtype, "[1]", "td_item() is %g, not 1", found);
    else
        checker_passed(checker, dtype, 0);
}

/* td_equal(), and td_allclose() for floats, of equal tensors, and of tensors that differ in the last element. */
CHECK_OWN_ROW(equal)
{
    struct check_row plain = *row;
    plain.values = "p";
    struct check_case c = {.row = &plain, .dtype = dtype};
    for (const char *at = shapes; check_next_shapes(&c, &at); c.number_of++) {
        TD_SCOPE;
        td_tensor *x = operand_of(checker, &c), *flat = td_reshape(td_clone(x), TD_SHAPE(-1));
        int64_t count = td_tensor_numel(x);
        td_tensor *a = td_tensor_to(td_reshape(x, TD_SHAPE(-1)), checker->device);
        bool floats = BIT(dtype) & FLOATS;
        if (count && td_zero_(td_narrow(flat, 0, count - 1, 1)))
            return;
        td_tensor *b = td_tensor_to(flat, checker->device);
        bool differ = check_compare(td_reshape(x, TD_SHAPE(-1)), flat, NULL, MEASURE_BITS, 0).at >=
                      0;
        if (!a || !b) {
            checker_refused(checker, dtype, "", "td_equal");
            continue;
        }
        td_fail(TD_ERR_INVALID, "td_equal() is false"); /* false can be a failure, too */
        bool same = td_equal(a, a) && (!floats || td_allclose(a, a, 0, 0));
        if (!same && td_last_status() == TD_ERR_UNSUPPORTED)
            checker_refused(checker, dtype, "", "td_equal");
        else if (!same || td_equal(a, b) == differ ||
                 (floats && td_allclose(a, b, 1e-3, 1e-3) == differ))
            checker_failed(checker, dtype, "",
                           "td_equal() or td_allclose() of %lld elements is wrong",
                           (long long)count);
        else
            checker_passed(checker, dtype, 0);
    }
}
