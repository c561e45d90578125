/* Copies of buffers, with ordinary or non-temporal stores. */
#ifndef TD_BASE_COPY_H
#define TD_BASE_COPY_H

#include <stdbool.h>
#include <stddef.h>

/** As memcpy(); `to` may equal `from`. With `nontemporal` the stores are non-temporal: a third of the memory
 *  traffic is saved if the target would not stay in the caches anyway. */
void td__copy_bytes(void *to, const void *from, size_t size, bool nontemporal);

/** The size of the L2 cache, a core's own, or of the L3 cache, which cores share. */
size_t td__cache_bytes(int level);

#endif
