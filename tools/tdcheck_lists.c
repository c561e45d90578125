/* Kernels over lists of tensors, which operators reach by clipping and by the scaler of gradients only: norm, power_sums,
 * scale and unscale, of several shapes and strides at once, also of nothing, and of what is not finite. */
#include "tdcheck_own.h"

#include "tensor/tensor_internal.h"

#include <math.h>
#include <stdio.h>

enum { LIST = 5 };

/* A view of item `index`: contiguous, transposed, every second element, nothing, and one element. */
static td_tensor *view_of(td_tensor *base, int index)
{
    return index == 1   ? td_transpose(base, 0, 1)
           : index == 2 ? td_slice(base, 1, 1, INT64_MAX, 2)
                        : base;
}

/* The same list on the host and on the device; where `bad` is not 0, it takes the place of an element. */
static bool make_lists(struct checker *checker, td_dtype dtype, double bad, td_tensor **host,
                       td_tensor **device)
{
    static const int64_t shapes[LIST][2] = {{233, 165}, {19, 7}, {9, 14}, {0, 3}, {1, 1}};
    struct check_case c = {.row = checker->row, .dtype = dtype};
    struct check_random random = check_random_of(checker->seed, &c);
    for (int i = 0; i < LIST; i++) {
        td_tensor *base = check_numbers(&random, shapes[i], 2, dtype, 'n', 0);
        if (i == 2 && bad != 0 && td_fill_(td_select(td_select(base, 0, 8), 0, 13), bad))
            return false;
        td_tensor *there = td_tensor_to(base, checker->device);
        host[i] = view_of(there == base ? td_clone(base) : base, i);
        device[i] = there ? view_of(there, i) : NULL;
        if (!host[i] || !device[i])
            return false;
    }
    return true;
}

static bool judge(struct checker *checker, td_dtype dtype, const char *what, td_tensor *host,
                  td_tensor *device, enum check_measure measure, double units, double *worst)
{
    td_tensor *found = check_fetch(device);
    if (!found) {
        checker_refused(checker, dtype, what, checker->row->name);
        return false;
    }
    struct check_difference difference = check_compare(host, found, NULL, measure, units);
    *worst = fmax(*worst, difference.worst);
    if (difference.at >= 0)
        checker_failed(checker, dtype, what, "%s", difference.text);
    return difference.at < 0;
}

/* Both have returned: neither may have waited, or failed. */
static bool both(struct checker *checker, td_dtype dtype, const char *what, td_status host,
                 td_status device, int64_t waits)
{
    if (host)
        checker_failed(checker, dtype, what, "the host refuses it: %s", td_last_error());
    else if (device)
        checker_refused(checker, dtype, what, checker->row->name);
    else if (td_device_waits(checker->device) != waits && !checker->may_wait)
        checker_failed(checker, dtype, what, "the host has waited for the device");
    else
        return true;
    return false;
}

CHECK_OWN_ROW(norm_list)
{
    (void)row;
    static const double powers[] = {2, 1, 3, INFINITY}, bads[] = {0, NAN, INFINITY};
    for (int n = 0; n < 4 * 3 * 2; n++) {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *x[LIST], *y[LIST];
        td_dtype wide = n % 2 ? TD_F64 : TD_F32;
        double power = powers[n / 2 % 4], bad = bads[n / 8], worst = 0;
        char what[64];
        snprintf(what, sizeof what, "power %g, into %s, with %g", power, td_dtype_name(wide), bad);
        td_tensor *a = td_zeros(NULL, 0, wide, td_device_get("cpu"));
        td_tensor *b = td_zeros(NULL, 0, wide, checker->device);
        if (!b || !make_lists(checker, dtype, bad, x, y)) {
            checker_refused(checker, dtype, what, "making the list");
            continue;
        }
        int64_t waits = td_device_waits(checker->device);
        td_status host = td_host_kernels()->norm(a, x, LIST, power);
        td_status device = host ? host : td__kernels_of(b)->norm(b, y, LIST, power);
        /* The order is prescribed, and only powers and roots other than these are rounded as the device likes. */
        double units = power != 3 ? 0 : n % 2 ? 256 : 2;
        if (both(checker, dtype, what, host, device, waits) &&
            judge(checker, dtype, what, a, b, MEASURE_ELEMENT, units, &worst))
            checker_passed(checker, dtype, worst);
    }
}

CHECK_OWN_ROW(power_sums_list)
{
    (void)row;
    static const double powers[] = {2, 1, 3, INFINITY}, bads[] = {0, NAN, INFINITY};
    for (int n = 0; n < 4 * 3; n++) {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *x[LIST], *y[LIST];
        double power = powers[n % 4], worst = 0;
        char what[64];
        snprintf(what, sizeof what, "power %g, with %g", power, bads[n / 4]);
        td_tensor *a = td_zeros(TD_SHAPE(LIST), TD_F64, td_device_get("cpu"));
        td_tensor *b = td_zeros(TD_SHAPE(LIST), TD_F64, checker->device);
        if (!b || !make_lists(checker, dtype, bads[n / 4], x, y)) {
            checker_refused(checker, dtype, what, "making the list");
            continue;
        }
        int64_t waits = td_device_waits(checker->device);
        td_status host = td_host_kernels()->power_sums(a, x, LIST, power);
        td_status device = host ? host : td__kernels_of(b)->power_sums(b, y, LIST, power);
        if (both(checker, dtype, what, host, device, waits) &&
            judge(checker, dtype, what, a, b, MEASURE_ELEMENT, power == 3 ? 256 : 0, &worst))
            checker_passed(checker, dtype, worst);
    }
}

static void check_scaling(struct checker *checker, td_dtype dtype, bool unscale)
{
    static const double bads[] = {0, NAN, INFINITY, 1e38}, factors[] = {0.37, 1024, 0};
    for (int n = 0; n < 4 * 3 * 2; n++) {
        TD_SCOPE;
        TD_NO_GRAD;
        td_tensor *x[LIST], *y[LIST];
        td_dtype wide = !unscale && n % 2 ? TD_F64 : TD_F32;
        double bad = bads[n / 2 % 4], factor = factors[n / 8], worst = 0;
        char what[64];
        snprintf(what, sizeof what, "factor %g of %s, with %g", factor, td_dtype_name(wide), bad);
        /* Of unscale: what was found before, which stays. */
        double number = unscale ? n % 2 : factor;
        td_tensor *a = td_full(NULL, 0, number, wide, td_device_get("cpu"));
        td_tensor *b = td_full(NULL, 0, number, wide, checker->device);
        if (!b || !make_lists(checker, dtype, bad, x, y)) {
            checker_refused(checker, dtype, what, "making the list");
            continue;
        }
        int64_t waits = td_device_waits(checker->device);
        const td_kernels *own = td__kernels_of(b), *right = td_host_kernels();
        td_status host = unscale ? right->unscale(x, LIST, factor, a) : right->scale(x, LIST, a);
        td_status device = host      ? host
                           : unscale ? own->unscale(y, LIST, factor, b)
                                     : own->scale(y, LIST, b);
        bool passed = both(checker, dtype, what, host, device, waits) &&
                      judge(checker, dtype, what, a, b, MEASURE_EQUAL, 0, &worst);
        for (int i = 0; i < LIST && passed; i++)
            passed = judge(checker, dtype, what, x[i], y[i], MEASURE_ELEMENT, 1, &worst);
        if (passed)
            checker_passed(checker, dtype, worst);
    }
}

CHECK_OWN_ROW(scale_list)
{
    (void)row;
    check_scaling(checker, dtype, false);
}
CHECK_OWN_ROW(unscale_list)
{
    (void)row;
    check_scaling(checker, dtype, true);
}
