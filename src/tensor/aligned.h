/* Workspaces for vectorised loops, aligned to cache lines of 64 bytes.
 *
 * A thread caches what it has freed, up to some megabytes: malloc() would return blocks of this size to the
 * kernel each time, and new pages cost as much as the work done in them. aligned_alloc() moreover leaves holes
 * that it does not reuse. */
#ifndef TD_TENSOR_ALIGNED_H
#define TD_TENSOR_ALIGNED_H

#include <stddef.h>

struct td__aligned {
    void *data;   /* aligned; NULL: no memory */
    void *memory; /* to free */
    size_t bytes; /* of `memory` */
};

/** Memory that is not initialised. */
struct td__aligned td__aligned_alloc(size_t bytes);

/** Frees it, from any thread; does nothing without memory. */
void td__aligned_free(struct td__aligned *aligned);

#endif
