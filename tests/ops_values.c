#include "ops_values.h"

#include "elements.h"

#include <math.h>

td_tensor *make_tensor(td_dtype dtype, const int64_t *shape, int ndim, const double *numbers)
{
    TD_SCOPE;
    td_tensor *tensor = td_empty(shape, ndim, dtype, td_device_get("cpu"));
    CHECK(tensor);
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++)
        set_element(tensor, i, numbers[i]);
    return td_scope_return(td_tensor_to(tensor, NULL));
}

static double tolerance_of(td_dtype dtype, double value)
{
    double unit = dtype == TD_F64    ? 1e-14
                  : dtype == TD_F32  ? 1e-6
                  : dtype == TD_F16  ? 2e-3
                  : dtype == TD_BF16 ? 2e-2
                                     : 0;
    return unit * (1 + fabs(value));
}

void check_tensor(const char *file, int line, const td_tensor *tensor, td_dtype dtype,
                  const int64_t *shape, int ndim, const double *numbers)
{
    if (!tensor)
        td_test_fail(file, line, "there is no tensor: %s", td_last_error());
    if (td_tensor_dtype(tensor) != dtype)
        td_test_fail(file, line, "it is %s, not %s", td_dtype_name(td_tensor_dtype(tensor)),
                     td_dtype_name(dtype));
    bool same = td_tensor_ndim(tensor) == ndim;
    for (int d = 0; same && d < ndim; d++)
        same = td_tensor_size(tensor, d) == shape[d];
    if (!same)
        td_test_fail(file, line, "its shape is %s, not %s", td__shape_of(tensor),
                     td__shape_text(shape, ndim));
    for (int64_t i = 0; i < td_tensor_numel(tensor); i++) {
        double value = element(tensor, i), right = numbers[i];
        bool fits = isnan(right)   ? isnan(value)
                    : isinf(right) ? value == right
                                   : fabs(value - right) <= tolerance_of(dtype, right);
        if (!fits)
            td_test_fail(file, line, "element %lld is %.17g, not %.17g", (long long)i, value,
                         right);
    }
}
