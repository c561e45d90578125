/* How an in-place reduction, as of all_reduce, writes its result back to the buffers that it reads.
 *
 *     fused     a loop that reads a line of every buffer and writes the result to all of them at once
 *     staged    a block at a time: the result goes to the first buffer, and from there to the others
 *
 * Fused is up to 1.7 times as fast while the L1 cache holds a line of every buffer. Staged is about three
 * times as fast when it does not: with more buffers than ways in a cache set, if a line takes several
 * iterations, or if the buffers' lines alias in the cache (AMD; see td__reduce_clash()). The first rank of a
 * comm that needs it measures, in a few milliseconds, which is faster for how many buffers; the others adopt
 * its result. The bits of the result are the same.
 *
 * TANDEM_SHM_REDUCE=fused or =staged overrides it. It is read when a world is created. */
#ifndef TD_REDUCE_REDUCE_METHOD_H
#define TD_REDUCE_REDUCE_METHOD_H

#include <tandem/base.h>

/* Methods as one word: bit 0: known; bits 1 to 3: staged for 2, 4 and 8 buffers; bits 5 to 7: staged for 2, 4
 * and 8 buffers that clash. Otherwise fused. */
enum { TD__METHODS_KNOWN = 1, TD__METHODS_FUSED = TD__METHODS_KNOWN, TD__METHODS_STAGED = 0xef };

/** Reads TANDEM_SHM_REDUCE and TANDEM_SIMD; TD_ERR_INVALID if the first is neither of the two. */
td_status td__reduce_methods_read(void);

/** The methods on this host: from TANDEM_SHM_REDUCE, from td__reduce_methods_adopt(), or measured now. */
uint32_t td__reduce_methods(void);

/** Adopts what another rank of the host has measured, unless this one has measured, too. */
void td__reduce_methods_adopt(uint32_t methods);

/** Whether to use staged for `n` (2, 4 or 8) buffers. */
static inline bool td__reduce_is_staged(uint32_t methods, int n, bool clash)
{
    return methods >> (__builtin_ctz((unsigned)n) + (clash ? 4 : 0)) & 1;
}

/** Whether two of these addresses alias in the L1 cache of an AMD processor: the same offset in a page, and the
 *  same hash of the bits above. */
bool td__reduce_clash(void *const *addresses, int n);

#endif
