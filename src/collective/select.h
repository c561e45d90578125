/* Which algorithm an operation takes over a network, where none was asked for by its name. */
#ifndef TD_COLLECTIVE_SELECT_H
#define TD_COLLECTIVE_SELECT_H

#include "collective/schedule.h"

/**
 * The name of the algorithm for `op` among `size` ranks. `bytes` are those of the vector, of all
 * ranks' parts together where each has its own. All ranks must ask with the same numbers. Reductions
 * get only what is ordered along the tree, so that their bits do not depend on `bytes`.
 */
const char *td__select(td_op_kind op, int32_t size, size_t bytes);

/** The same for uneven parts; `largest` are the bytes of the largest. Of all_to_all no rank knows these numbers,
 *  and they are not used. */
const char *td__select_uneven(td_op_kind op, int32_t size, size_t bytes, size_t largest);

#endif
