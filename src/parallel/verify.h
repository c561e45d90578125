/* Checks that all ranks have the same gradients. */
#ifndef TD_PARALLEL_VERIFY_H
#define TD_PARALLEL_VERIFY_H

#include "parallel/buckets.h"

/** TD_ERR_MISMATCH on every rank if number, dtypes or shapes differ from those of the group's
 *  first rank; the error names both ranks and the parameter. `names` may be NULL. Collective. */
td_status td__verify_gradients(const char *call, const struct td__gradient *gradients,
                               const char *const *names, int count, td_group *group);

#endif
