/* Memory for loops of vectors: aligned to 64 bytes, a line of the cache.
 *
 * aligned_alloc() would do, but glibc's leaves holes behind that it does not find again: after some steps
 * of a training they are tens of megabytes. */
#ifndef TD_TENSOR_ALIGNED_H
#define TD_TENSOR_ALIGNED_H

#include <stdint.h>
#include <stdlib.h>

#define TD__ALIGNMENT 64

struct td__aligned {
    void *data;   /* aligned; NULL: no memory */
    void *memory; /* to free */
};

static inline struct td__aligned td__aligned_alloc(size_t bytes)
{
    struct td__aligned aligned = {.memory = malloc(bytes + TD__ALIGNMENT)};
    if (aligned.memory) {
        uintptr_t at = (uintptr_t)aligned.memory;
        aligned.data = (char *)aligned.memory + (TD__ALIGNMENT - at % TD__ALIGNMENT);
    }
    return aligned;
}

static inline void td__aligned_free(struct td__aligned *aligned)
{
    free(aligned->memory);
    *aligned = (struct td__aligned){0};
}

#endif
