/* Checks of option structs, where 0 is the default and `reserved` must be zero, of timeouts and of dtypes. */
#ifndef TD_BASE_OPTION_RULES_H
#define TD_BASE_OPTION_RULES_H

#include "base/fail.h"

#include <tandem/dtype.h>

#include <math.h>

/** The value of an option: `default_value` where it is 0, and 0 where it is TD_ZERO, a negative 0. */
static inline double td__option(double value, double default_value)
{
    if (value != 0)
        return value;
    return signbit(value) ? 0 : default_value;
}

/** TD_ERR_INVALID unless `timeout_ms` is 0, positive, or TD_NOW. */
static inline td_status td__check_timeout(const char *call, int64_t timeout_ms)
{
    if (timeout_ms >= 0 || timeout_ms == TD_NOW)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "%s: the timeout is %lld ms; it must not be negative, except for TD_NOW", call,
                   (long long)timeout_ms);
}

/** The same for a timeout that an object stores, named `what`: it cannot be TD_NOW. */
static inline td_status td__check_kept_timeout(const char *call, const char *what,
                                               int64_t timeout_ms)
{
    if (timeout_ms >= 0)
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "%s: %s is %lld ms; it must not be negative, and TD_NOW is for calls that wait",
                   call, what, (long long)timeout_ms);
}

/** TD_ERR_INVALID unless `dtype` is one. */
static inline td_status td__check_dtype(const char *call, td_dtype dtype)
{
    if (td_dtype_size(dtype))
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s: %d is not a dtype (see td_dtype)", call, (int)dtype);
}

/** TD_ERR_INVALID if one of `count` reserved members of a struct is not zero: the program was compiled with newer
 *  headers, or did not zero the struct. */
static inline td_status td__check_reserved_of(const char *call, void *const *reserved, int count)
{
    for (int i = 0; i < count; i++)
        if (reserved[i])
            return td_fail(
                TD_ERR_INVALID,
                "%s: reserved[%d] is not zero; zero the struct first, as in = {.lr = 0.1} "
                "or = {0}, or use the headers of this version of the library",
                call, i);
    return TD_OK;
}

/** The same for the usual number of them. */
static inline td_status td__check_reserved(const char *call, void *const reserved[4])
{
    return td__check_reserved_of(call, reserved, 4);
}

#endif
