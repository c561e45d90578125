/* Memory between guard bytes, which detect writes out of bounds. */
#ifndef TANDEM_TESTS_GUARDED_MEMORY_H
#define TANDEM_TESTS_GUARDED_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

struct guarded {
    char *block; /* guard, data, guard; NULL: none */
    char *data;
    size_t size;
    bool in_arena;
};

/** `size` bytes, filled with a pattern, from td_alloc() or malloc(). They begin `shift` bytes behind a
 *  whole cache line. */
struct guarded guarded_make(size_t size, size_t shift, bool in_arena);

/** Nothing was written beside it. */
bool guarded_is_whole(const struct guarded *memory);

/** Nothing was written to it either. */
bool guarded_is_empty(const struct guarded *memory);

void guarded_free(struct guarded *memory);

#endif
