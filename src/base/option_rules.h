/* What all options have in common: 0 is the default, and space for later ones stands at the end. */
#ifndef TD_BASE_OPTION_RULES_H
#define TD_BASE_OPTION_RULES_H

#include "base/fail.h"

#include <math.h>

/** A number of an option: `usual` where it is 0, and 0 where it is TD_ZERO, which is a negative 0. */
static inline double td__option(double value, double usual)
{
    if (value != 0)
        return value;
    return signbit(value) ? 0 : usual;
}

/** TD_ERR_INVALID where the reserved members of options are set: the program was compiled with a later
 *  header, or has not set its options to 0. */
static inline td_status td__check_reserved(const char *call, void *const reserved[4])
{
    for (int i = 0; i < 4; i++)
        if (reserved[i])
            return td_fail(TD_ERR_INVALID,
                           "%s: reserved[%d] of the options is set; set options to 0 first, as in "
                           "{.lr = 0.1} or = {0}, or use the header of this version of the library",
                           call, i);
    return TD_OK;
}

#endif
