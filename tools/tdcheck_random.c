/* Random numbers. An accelerator draws those of random.h, which are the same for all of them: the reference are the
 * host's kernels with a generator of the device, which the library uses where a device has no kernel. Numbered devices of
 * the host draw the host's. Beside that, another seed gives other numbers, mean and variance are within 6 standard
 * deviations of what they should be, a second call goes on where the first one ended, and the memory beside a strided
 * result does not change. */
#include "tdcheck_own.h"

#include <tandem/kernels.h>

#include <math.h>
#include <string.h>

/* A distribution: how to draw, and what to expect. */
struct draw {
    td_status (*fill)(td_tensor *out, td_generator *generator);
    /* The host's kernel, with a generator of any device. */
    td_status (*reference)(td_tensor *out, td_generator *generator, double high);
    double low, high; /* inclusive, but for rounding */
    double mean, variance;
    double units; /* by which numbers may differ from the reference; 0: not at all */
};

static bool is_host(const td_device *device)
{
    return !strcmp(td_device_kind(device), "cpu");
}

enum { DRAWN = 5003 };

/* Draws into every second element of memory on `device`, or into its first half; all is zeros before. The first element
 * is drawn by a call of its own. With `reference` by the host's kernel, with a generator of the checked device. */
static td_tensor *drawn(struct checker *checker, const struct draw *draw, bool reference,
                        td_dtype dtype, uint64_t seed, bool strided)
{
    td_device *device = reference ? td_device_get("cpu") : checker->device;
    td_tensor *memory = td_zeros(TD_SHAPE(DRAWN, 2), dtype, device);
    td_tensor *out = strided ? td_select(memory, 1, 0)
                             : td_reshape(td_narrow(memory, 0, 0, DRAWN / 2), TD_SHAPE(-1));
    td_generator *generator = td_generator_create(seed, checker->device);
    td_status status = out && generator ? TD_OK : TD_ERR_NOMEM;
    for (int call = 0; call < 2 && !status; call++) {
        td_tensor *part = call ? td_narrow(out, 0, 1, td_tensor_numel(out) - 1)
                               : td_narrow(out, 0, 0, 1);
        status = !part       ? TD_ERR_NOMEM
                 : reference ? draw->reference(part, generator, draw->high)
                             : draw->fill(part, generator);
    }
    td_generator_destroy(generator);
    return status ? NULL : check_fetch(memory);
}

/* Where the numbers are: of `memory` as drawn() left it. NULL: all is well. */
static const char *judge(const struct draw *draw, td_tensor *memory, td_dtype dtype, bool strided)
{
    td_tensor *wide = td_contiguous(td_to_dtype(memory, TD_F64));
    const double *x = td_tensor_data(wide);
    int64_t all = td_tensor_numel(wide), count = strided ? all / 2 : all / 4 * 2, from = count;
    double sum = 0, squares = 0,
           slack = dtype == TD_BF16  ? 0x1p-7
                   : dtype == TD_F16 ? 0x1p-10
                                     : 0x1p-22;
    double most = fmax(fabs(draw->low), fabs(draw->high));
    for (int64_t i = 0; i < count; i++) {
        double value = x[strided ? 2 * i : i];
        if (!(value >= draw->low - slack * most && value <= draw->high + slack * most))
            return "a number is out of range";
        sum += value - draw->mean;
        squares += (value - draw->mean) * (value - draw->mean);
    }
    for (int64_t i = strided ? 0 : from; i < (strided ? count : all); i++)
        if (x[strided ? 2 * i + 1 : i] != 0)
            return "memory beside the tensor has changed";
    double n = (double)count, deviation = sqrt(draw->variance);
    if (fabs(sum / n) > 6 * deviation / sqrt(n) + slack * most)
        return "the mean is wrong";
    /* The variance of the square of a bounded or normal number is at most twice the square of its variance, and 4 is
     * for sums of halves. */
    if (fabs(squares / n - draw->variance) > (6 * sqrt(2 / n) + 4 * slack) * draw->variance)
        return "the variance is wrong";
    return NULL;
}

static struct check_difference compare_draws(const struct draw *draw, td_tensor *right,
                                             td_tensor *found)
{
    return draw->units > 0 ? check_compare(right, found, NULL, MEASURE_LARGEST, draw->units)
                           : check_compare(right, found, NULL, MEASURE_BITS, 0);
}

static void check_draw(struct checker *checker, const struct draw *draw, td_dtype dtype)
{
    for (int strided = 0; strided < 2; strided++) {
        TD_SCOPE;
        TD_NO_GRAD;
        const char *inputs = strided ? "[5003] strides [2]" : "[5002] strides [1]";
        uint64_t seed = checker->seed + 17;
        int64_t waits = td_device_waits(checker->device);
        td_tensor *first = drawn(checker, draw, false, dtype, seed, strided);
        if (!first) {
            checker_refused(checker, dtype, inputs, checker->row->name);
            continue;
        }
        waits = td_device_waits(checker->device) - waits; /* check_fetch() waits once */
        td_tensor *other = drawn(checker, draw, false, dtype, seed + 1, strided);
        td_tensor *right = drawn(checker, draw, true, dtype, seed, strided);
        struct check_difference difference = {.at = -1};
        const char *wrong = !other || !right ? td_last_error() : NULL;
        if (!wrong)
            difference = compare_draws(draw, right, first);
        if (difference.at >= 0)
            wrong = difference.text;
        if (!wrong)
            wrong = judge(draw, first, dtype, strided);
        if (!wrong && waits > 1 && !checker->may_wait)
            wrong = "the host has waited for the device";
        if (!wrong && check_compare(first, other, NULL, MEASURE_BITS, 0).at < 0)
            wrong = "another seed gives the same numbers";
        if (wrong)
            checker_failed(checker, dtype, inputs, "%s", wrong);
        else
            checker_passed(checker, dtype, difference.worst);
    }
}

/* Each as an operator and as the host's kernel; `high` matters to random_() only, where that of i64 is not exact. */
#define DRAW(name, call, kernel)                                                                   \
    static td_status name(td_tensor *out, td_generator *generator)                                 \
    {                                                                                              \
        return call;                                                                               \
    }                                                                                              \
    static td_status name##_reference(td_tensor *out, td_generator *generator, double high)        \
    {                                                                                              \
        (void)high;                                                                                \
        return td_host_kernels()->kernel;                                                          \
    }

DRAW(uniform, td_uniform_(out, -1, 3, generator), uniform(out, -1, 3, generator))
DRAW(normal, td_normal_(out, 1, 2, generator), normal(out, 1, 2, generator))
DRAW(bernoulli, td_bernoulli_(out, 0.3, generator), bernoulli(out, 0.3, generator))
DRAW(random_all, td_random_(out, generator),
     random_range(out, 0, (uint64_t)high + (high < 0x1p63), generator))
DRAW(random_range, td_random_range_(out, 3, 103, generator), random_range(out, 3, 100, generator))

CHECK_OWN_ROW(uniform_)
{
    (void)row;
    check_draw(checker, &(struct draw){uniform, uniform_reference, -1, 3, 1, 16.0 / 12, 0}, dtype);
}
CHECK_OWN_ROW(normal_)
{
    (void)row;
    /* The roundings of log, sin and cos, of numbers up to the greatest one. Those of halves may round to the next. */
    double units = dtype == TD_F32 || dtype == TD_F64 ? 8 : 1;
    check_draw(checker, &(struct draw){normal, normal_reference, -15, 17, 1, 4, units}, dtype);
}
CHECK_OWN_ROW(bernoulli_)
{
    (void)row;
    check_draw(checker, &(struct draw){bernoulli, bernoulli_reference, 0, 1, 0.3, 0.21, 0}, dtype);
}
CHECK_OWN_ROW(random_)
{
    (void)row;
    /* The greatest integer of each dtype, as random.h has them. */
    double high = dtype == TD_F32    ? 0x1p24
                  : dtype == TD_F64  ? 0x1p53
                  : dtype == TD_F16  ? 0x1p11
                  : dtype == TD_BF16 ? 0x1p8
                  : dtype == TD_I64  ? 0x1p63
                  : dtype == TD_I32  ? 0x1p31 - 1
                  : dtype == TD_U8   ? 255
                                     : 1;
    double width = high + 1, variance = (width * width - 1) / 12;
    check_draw(checker,
               &(struct draw){random_all, random_all_reference, 0, high, high / 2, variance, 0},
               dtype);
}
CHECK_OWN_ROW(random_range_)
{
    (void)row;
    check_draw(checker,
               &(struct draw){random_range, random_range_reference, 3, 102, 52.5, 9999.0 / 12, 0},
               dtype);
}

CHECK_OWN_ROW(randperm)
{
    TD_SCOPE;
    (void)row;
    enum { COUNT = 1009 };
    char seen[COUNT] = {0};
    td_generator *generator = td_generator_create(checker->seed, checker->device);
    td_tensor *x = td_randperm_with(COUNT, dtype, checker->device, generator);
    td_generator_destroy(generator);
    td_tensor *back = x ? check_fetch(x) : NULL, *wide = back ? td_to_dtype(back, TD_I64) : NULL;
    if (!wide) {
        checker_refused(checker, dtype, "", "td_randperm_with");
        return;
    }
    for (int i = 0; i < COUNT; i++) {
        int64_t value = ((int64_t *)td_tensor_data(wide))[i];
        if (value < 0 || value >= COUNT || seen[value]++) {
            checker_failed(checker, dtype, "", "element %d, %lld, is out of range or a second one",
                           i, (long long)value);
            return;
        }
    }
    checker_passed(checker, dtype, 0);
}

/* ---- Dropout ---------------------------------------------------------------------------------------------- */

/* y is 0, or x / (1 - p), for each block of elements alike, and so is the gradient. NULL: all is well. */
static const char *judge_dropout(td_tensor *x, td_tensor *y, td_tensor *grad, int64_t block)
{
    td_tensor *scaled = td_div_scalar(x, 0.75);
    td_tensor *ones = td_div_scalar(td_ones_like(x), 0.75);
    td_tensor *keep = td_ne_scalar(y, 0), *zeros = td_zeros_like(x);
    if (check_compare(td_where(keep, scaled, zeros), y, NULL, MEASURE_ELEMENT, 4).at >= 0)
        return "an element is neither 0 nor x / (1 - p)";
    if (check_compare(td_where(keep, ones, zeros), grad, NULL, MEASURE_ELEMENT, 4).at >= 0)
        return "the gradient does not fit the elements that were kept";
    td_tensor *flags = td_contiguous(keep);
    const unsigned char *kept = td_tensor_data(flags);
    int64_t count = td_tensor_numel(x), total = 0;
    for (int64_t i = 0; i < count; i++) {
        total += kept[i] != 0;
        if (!kept[i] != !kept[i / block * block])
            return "a channel is kept in part";
    }
    double blocks = (double)(count / block), share = (double)total / (double)count;
    return fabs(share - 0.75) > 6 * sqrt(0.75 * 0.25 / blocks) ? "the share of zeros is not p"
                                                               : NULL;
}

/* What is kept of `count` blocks of elements, by the host's kernel with the device's numbers, on the host. */
static td_tensor *kept_of(struct checker *checker, int64_t count)
{
    td_tensor *keep = td_empty(&count, 1, TD_BOOL, td_device_get("cpu"));
    td_generator *generator = td_generator_create(checker->seed + 3, checker->device);
    td_status status = generator && keep ? td_host_kernels()->bernoulli(keep, 0.75, generator)
                                         : TD_ERR_NOMEM;
    td_generator_destroy(generator);
    return status ? NULL : keep;
}

static void check_dropout_of(struct checker *checker, td_dtype dtype,
                             td_tensor *(*call)(td_tensor *, double, bool), int64_t block)
{
    TD_SCOPE;
    const char *inputs = block > 1 ? "[41, 25, 1, 3]" : "[1001, 7]";
    struct check_case c = {.row = checker->row, .dtype = dtype};
    struct check_random random = check_random_of(checker->seed, &c);
    int64_t four[] = {41, 25, 1, 3}, two[] = {1001, 7};
    td_tensor *x = check_numbers(&random, block > 1 ? four : two, block > 1 ? 4 : 2, dtype, 'p', 0);
    td_tensor *there = td_tensor_to(x, checker->device), *results[2] = {NULL}, *grad = NULL;
    for (int turn = 0; turn < 2; turn++) {
        td_tensor *leaf = td_clone(there);
        td_manual_seed(checker->seed + 3);
        td_tensor_set_requires_grad(leaf, true);
        int64_t waits = td_device_waits(checker->device);
        td_tensor *y = leaf ? call(leaf, 0.25, true) : NULL;
        if (!y || td_backward(td_sum(y))) {
            checker_refused(checker, dtype, inputs, checker->row->name);
            return;
        }
        if (td_device_waits(checker->device) != waits && !checker->may_wait) {
            checker_failed(checker, dtype, inputs, "the host has waited for the device");
            return;
        }
        results[turn] = check_fetch(y);
        grad = check_fetch(td_tensor_grad(leaf));
    }
    if (!results[0] || !results[1] || !grad) {
        checker_refused(checker, dtype, inputs, checker->row->name);
        return;
    }
    const char *wrong = judge_dropout(x, results[0], grad, block);
    if (!wrong && check_compare(results[0], results[1], NULL, MEASURE_BITS, 0).at >= 0)
        wrong = "the same seed gives other numbers";
    int64_t blocks = td_tensor_numel(x) / block;
    td_tensor *right = is_host(checker->device) ? NULL : kept_of(checker, blocks);
    td_tensor *kept = td_ne_scalar(td_reshape(results[0], TD_SHAPE(blocks, block)), 0);
    if (!wrong && right &&
        check_compare(right, td_select(kept, 1, 0), NULL, MEASURE_BITS, 0).at >= 0)
        wrong = "what is kept is not what random.h says";
    if (wrong)
        checker_failed(checker, dtype, inputs, "%s", wrong);
    else
        checker_passed(checker, dtype, 0);
}

CHECK_OWN_ROW(dropout)
{
    (void)row;
    check_dropout_of(checker, dtype, td_f_dropout, 1);
}
CHECK_OWN_ROW(dropout2d)
{
    (void)row;
    check_dropout_of(checker, dtype, td_f_dropout2d, 3);
}
