/* Memory for loops of vectors to work in: aligned to 64 bytes, a line of the cache.
 *
 * A thread keeps what it has freed, up to some megabytes, for the next time: malloc() would give blocks
 * of this size back to the system each time, and new pages cost as much as the work that is done in
 * them. aligned_alloc() moreover leaves holes behind that it does not find again. */
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

/** Takes it back, from any thread; nothing where there is none. */
void td__aligned_free(struct td__aligned *aligned);

#endif
