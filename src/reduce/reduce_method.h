/* How a reduction gets back to the buffers that it came from: an all_reduce in place.
 *
 *     fused     a loop that reads a line of every buffer and writes the result to all of them at once
 *     staged    a block at a time: the result goes to the first buffer, and from there to the others
 *
 * Fused is up to 1.7 times as fast while the first cache holds a line of every buffer. Staged is about three
 * times as fast where it does not: with more buffers than a set has room for lines, when a line takes several
 * turns of the loop, or where a processor cannot tell the buffers' lines apart by their addresses (AMD; see
 * td__reduce_clash()). Which of the two holds for how many buffers is measured, in a few milliseconds, by the
 * first rank of a comm that needs it; the others take its word. The bits of the result are the same.
 *
 * TANDEM_SHM_REDUCE says instead: "fused" or "staged". It is read when a world is made. */
#ifndef TD_REDUCE_REDUCE_METHOD_H
#define TD_REDUCE_REDUCE_METHOD_H

#include <tandem/base.h>

/* Ways as one word: bit 0: they are known; bits 1 to 3: staged for 2, 4 and 8 buffers; bits 5 to 7: staged
 * for 2, 4 and 8 buffers that clash. 0 is fused, like all others that are not known. */
enum { TD__WAYS_KNOWN = 1, TD__WAYS_FUSED = TD__WAYS_KNOWN, TD__WAYS_STAGED = 0xef };

/** Reads TANDEM_SHM_REDUCE; TD_ERR_INVALID where it is neither of the two. */
td_status td__reduce_methods_read(void);

/** The ways of this host, by TANDEM_SHM_REDUCE, by td__reduce_methods_adopt(), or measured now. */
uint32_t td__reduce_methods(void);

/** Takes over what another rank of the host has found, unless this one has found them itself. */
void td__reduce_methods_adopt(uint32_t ways);

/** Measures them. */
uint32_t td__reduce_methods_measure(void);

/** Whether `n` (2, 4 or 8) buffers shall be staged. */
static inline bool td__reduce_is_staged(uint32_t ways, int n, bool clash)
{
    return ways >> (__builtin_ctz((unsigned)n) + (clash ? 4 : 0)) & 1;
}

/** Whether two of these addresses are those of lines that the first cache of an AMD processor takes for
 *  one another: the same place in a page, and the same hash of the bits above. */
bool td__reduce_clash(void *const *addresses, int n);

#endif
