/* Copies of buffers: through the caches, or past them. */
#ifndef TD_REDUCE_COPY_H
#define TD_REDUCE_COPY_H

#include <stdbool.h>
#include <stddef.h>

/** As memcpy(); the same address twice is fine. With `past` the target is not brought into the caches:
 *  half as much traffic again is saved where it would not stay there anyway. */
void td__copy_bytes(void *to, const void *from, size_t size, bool past);

/** How much a cache holds: level 2, a processor's own, or 3, the one that they share. */
size_t td__cache_bytes(int level);

#endif
