/* torch.nn.init: bounds are computed in f64 in the same order of operations, so that they are the
 * same bits. */
#include "nn/module.h"

#include "base/fail.h"
#include "base/option_rules.h"
#include "tensor/deferred.h"

#include <math.h>

td_status td_init_uniform(td_tensor *tensor, double from, double to)
{
    return td_uniform_(tensor, from, to, NULL);
}

td_status td_init_normal(td_tensor *tensor, double mean, double std)
{
    return td_normal_(tensor, mean, std, NULL);
}

td_status td_init_constant(td_tensor *tensor, double value)
{
    td_status status = TD_OK;
    {
        TD_NO_GRAD;
        status = td_fill_(tensor, value);
    }
    return status;
}

/* ---- Fans --------------------------------------------------------------------------------------- */

/* fan_in and fan_out. */
struct fans {
    double in, out;
};

static td_status find_fans(const char *call, const td_tensor *tensor, struct fans *fans)
{
    if (!tensor)
        return td__fail_null(call);
    if (tensor->layout.ndim < 2)
        return td_fail(TD_ERR_INVALID,
                       "%s: the tensor has the shape %s; it must have two dimensions or more", call,
                       td__shape_of(tensor));
    double field = 1; /* in f64: the sizes of an empty tensor may have any product */
    for (int d = 2; d < tensor->layout.ndim; d++)
        field *= (double)tensor->layout.shape[d];
    fans->in = (double)tensor->layout.shape[1] * field;
    fans->out = (double)tensor->layout.shape[0] * field;
    return TD_OK;
}

double td_init_gain(td_nonlinearity nonlinearity, double a)
{
    switch (nonlinearity) {
    case TD_LEAKY_RELU:
        return sqrt(2.0 / (1 + a * a));
    case TD_RELU:
        return sqrt(2.0);
    case TD_TANH:
        return 5.0 / 3;
    case TD_SELU:
        return 3.0 / 4;
    case TD_LINEAR:
        break;
    }
    return 1;
}

/* Empty tensors are skipped: their fans may be 0. */

td_status td_init_xavier_uniform(td_tensor *tensor, double gain)
{
    struct fans fans = {0};
    TD_TRY(find_fans("td_init_xavier_uniform", tensor, &fans));
    if (tensor->layout.numel == 0)
        return TD_OK;
    double std = gain * sqrt(2.0 / (fans.in + fans.out));
    double limit = sqrt(3.0) * std;
    return td_init_uniform(tensor, -limit, limit);
}

td_status td_init_xavier_normal(td_tensor *tensor, double gain)
{
    struct fans fans = {0};
    TD_TRY(find_fans("td_init_xavier_normal", tensor, &fans));
    if (tensor->layout.numel == 0)
        return TD_OK;
    return td_init_normal(tensor, 0, gain * sqrt(2.0 / (fans.in + fans.out)));
}

static td_status kaiming_std(const char *call, const td_tensor *tensor,
                             const td_kaiming_options *options, double *std)
{
    td_kaiming_options given = options ? *options : (td_kaiming_options){0};
    struct fans fans = {0};
    TD_TRY(find_fans(call, tensor, &fans));
    double fan = given.fan_out ? fans.out : fans.in;
    *std = td_init_gain(given.nonlinearity, given.a) / sqrt(fan);
    return TD_OK;
}

td_status td_init_kaiming_uniform(td_tensor *tensor, const td_kaiming_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    double std = 0;
    TD_TRY(kaiming_std("td_init_kaiming_uniform", tensor, options, &std));
    if (tensor->layout.numel == 0)
        return TD_OK;
    double limit = sqrt(3.0) * std;
    return td_init_uniform(tensor, -limit, limit);
}

td_status td_init_kaiming_normal(td_tensor *tensor, const td_kaiming_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return TD_ERR_INVALID;
    double std = 0;
    TD_TRY(kaiming_std("td_init_kaiming_normal", tensor, options, &std));
    return tensor->layout.numel == 0 ? TD_OK : td_init_normal(tensor, 0, std);
}

/* ---- Truncated normal numbers ------------------------------------------------------------------- */

td_status td_init_trunc_normal(td_tensor *tensor, double mean, double std, double low, double high)
{
    if (!tensor)
        return td__fail_null(__func__);
    if (!(std > 0) || !(low < high))
        return td_fail(
            TD_ERR_INVALID,
            "td_init_trunc_normal: the standard deviation is %g and the limits are %g and "
            "%g; the first must be above 0, and the limits in order",
            std, low, high);
    double from = (1 + erf((low - mean) / std / sqrt(2))) / 2;
    double to = (1 + erf((high - mean) / std / sqrt(2))) / 2;
    TD_TRY(td_init_uniform(tensor, 2 * from - 1, 2 * to - 1));
    struct td__trunc_normal normal = {std * sqrt(2), mean, low, high};
    return td_tensor_is_meta(tensor) ? td__deferred_add_trunc_normal(tensor, &normal)
                                     : td__trunc_normal_from_uniform(tensor, &normal);
}
