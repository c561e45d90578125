/* The default algorithm of an operation over sockets. */
#ifndef TD_COLLECTIVE_SELECT_H
#define TD_COLLECTIVE_SELECT_H

#include "collective/schedule.h"

/**
 * The name of the algorithm for `op` among `size` ranks. `bytes` are those of the vector, of all
 * ranks' parts together where each has its own. All ranks must pass the same numbers. For reductions
 * it is an algorithm that is ordered along the tree, so that the result's bits do not depend on `bytes`.
 */
const char *td__select(td_op_kind op, int32_t size, size_t bytes);

/** The same for uneven parts; `largest` are the bytes of the largest part. For all_to_all both are ignored, since
 *  no rank knows them. */
const char *td__select_uneven(td_op_kind op, int32_t size, size_t bytes, size_t largest);

#endif
