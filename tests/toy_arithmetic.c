/* How the toy accelerator computes: with the host's kernels as they are, with other but legal roundings, or with an error
 * of a kind that is easily made, for tests of what compares devices (tdcheck).
 *
 * Arguments of a launch hold tensors of the host over the device's memory; the first one is a result, or, of norm and
 * power_sums, the last one. */
#include "toy_machine.h"

#include <tandem/ops.h>

#include <stdlib.h>
#include <string.h>

static td_tensor **tensor_at(void *arguments, const size_t *places, int index)
{
    return (td_tensor **)((char *)arguments + places[index]);
}

static td_tensor *result_of(const struct toy_call *call)
{
    bool last = !strcmp(call->slot, "norm") || !strcmp(call->slot, "power_sums");
    int index = last ? call->count - 1 : 0;
    return *tensor_at(call->arguments, call->places, index);
}

static bool is_any(const char *slot, const char *const *names)
{
    for (; *names; names++)
        if (!strcmp(slot, *names))
            return true;
    return false;
}

/* ---- Other roundings: f32 and halves are computed in f64, and rounded once ----------------------------------- */

static bool is_narrow(const td_tensor *tensor)
{
    td_dtype dtype = td_tensor_dtype(tensor);
    return dtype == TD_F32 || dtype == TD_F16 || dtype == TD_BF16;
}

static td_tensor *like(const td_tensor *tensor, td_dtype dtype)
{
    return td_empty(td_tensor_shape(tensor), td_tensor_ndim(tensor), dtype, td_device_get("cpu"));
}

struct widened {
    td_tensor *narrow, *wide, *before;
};

static td_status widen(struct widened *widened, td_tensor *narrow)
{
    *widened = (struct widened){narrow, like(narrow, TD_F64), like(narrow, TD_F64)};
    if (!widened->wide || !widened->before)
        return td_last_status();
    td_status status = td_host_kernels()->copy(widened->wide, narrow);
    return status ? status : td_host_kernels()->copy(widened->before, narrow);
}

/* What the kernel has written is back in its own dtype; operands, which may share its memory, are not touched. */
static td_status narrow_again(const struct widened *widened)
{
    if (!widened->wide || !td_tensor_nbytes(widened->wide) ||
        !memcmp(td_tensor_data(widened->wide), td_tensor_data(widened->before),
                td_tensor_nbytes(widened->wide)))
        return TD_OK;
    return td_host_kernels()->copy(widened->narrow, widened->wide);
}

static td_status run_wide(const struct toy_call *call)
{
    /* Prescribed to the bit; or the dtype is an argument of its own; or random numbers, which are the toy's own. */
    static const char *const exact[] = {"copy",      "fill",         "sgd",     "adam",
                                        "scale",     "unscale",      "uniform", "normal",
                                        "bernoulli", "random_range", "dropout", NULL};
    if (is_any(call->slot, exact))
        return call->run(call->arguments);
    struct widened *list = calloc((size_t)call->count, sizeof *list);
    td_status status = list ? TD_OK : td_fail(TD_ERR_NOMEM, "toy: out of host memory");
    for (int i = 0; i < call->count && !status; i++) {
        td_tensor **at = tensor_at(call->arguments, call->places, i);
        if (!is_narrow(*at))
            continue;
        status = widen(&list[i], *at);
        *at = list[i].wide;
    }
    if (!status)
        status = call->run(call->arguments);
    for (int i = 0; i < call->count && !status; i++)
        status = narrow_again(&list[i]);
    free(list);
    return status;
}

/* ---- Errors --------------------------------------------------------------------------------------------------- */

/* The first result has fewer bits: those of f32 where it is f64, else about 13. */
static td_status run_with_few_bits(const struct toy_call *call)
{
    td_status status = call->run(call->arguments);
    td_tensor *out = result_of(call);
    td_tensor *few = like(out, TD_F32);
    if (status || !few)
        return status ? status : td_last_status();
    if (td_tensor_dtype(out) == TD_F64) {
        status = td_host_kernels()->copy(few, out);
    } else if (td_tensor_dtype(out) == TD_F32) {
        status = td_host_kernels()->copy(few, out);
        for (int64_t i = 0; i < td_tensor_numel(few); i++) {
            uint32_t *bits = (uint32_t *)td_tensor_data(few) + i;
            if ((*bits & 0x7f800000) != 0x7f800000)
                *bits &= ~UINT32_C(0x3ff);
        }
    } else {
        return TD_OK;
    }
    return status ? status : td_host_kernels()->copy(out, few);
}

/* The last `row`, or element, of the first result is not written. */
static td_status run_without_end(const struct toy_call *call, bool row)
{
    td_tensor *out = result_of(call);
    int64_t count = td_tensor_numel(out);
    if (count < 2 || (!row && count % 2 == 0) || td_tensor_ndim(out) == 0)
        return call->run(call->arguments);
    td_tensor *end = td_narrow(out, 0, td_tensor_size(out, 0) - 1, 1);
    for (int d = 1; end && !row && d < td_tensor_ndim(out); d++)
        end = td_narrow(end, d, td_tensor_size(out, d) - 1, 1);
    td_tensor *before = end ? like(end, td_tensor_dtype(end)) : NULL;
    if (!before)
        return td_last_status();
    td_status status = td_host_kernels()->copy(before, end);
    if (!status)
        status = call->run(call->arguments);
    return status ? status : td_host_kernels()->copy(end, before);
}

/* Operands are read as if they were contiguous, where that stays in their memory. */
static td_status run_without_strides(const struct toy_call *call)
{
    for (int i = 1; i < call->count; i++) {
        td_tensor **at = tensor_at(call->arguments, call->places, i), *x = *at;
        bool inside = td_tensor_numel(x) > 0;
        int64_t last = 0;
        for (int d = 0; d < td_tensor_ndim(x); d++)
            last += (td_tensor_size(x, d) - 1) * td_tensor_stride(x, d);
        if (!inside || last < td_tensor_numel(x) - 1 || td_tensor_is_contiguous(x))
            continue;
        *at = td_from_blob(td_tensor_data(x), td_tensor_shape(x), td_tensor_ndim(x), NULL,
                           td_tensor_dtype(x), td_device_get("cpu"), NULL, NULL);
        if (!*at)
            return td_last_status();
    }
    return call->run(call->arguments);
}

td_status toy_run_call(const struct toy_call *call)
{
    toy_lock();
    enum toy_arithmetic arithmetic = toy_machine.arithmetic;
    toy_unlock();
    if (call->count == 0)
        return TD_OK;
    switch (arithmetic) {
    case TOY_WIDE:
        return run_wide(call);
    case TOY_FEW_BITS:
        return run_with_few_bits(call);
    case TOY_LAST_ROW:
        return run_without_end(call, true);
    case TOY_ODD_SIZES:
        return run_without_end(call, false);
    case TOY_NO_STRIDES:
        return run_without_strides(call);
    default:
        return call->run(call->arguments);
    }
}
