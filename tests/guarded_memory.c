/* Guarded memory; see guarded_memory.h. */
#include "guarded_memory.h"

#include "runner.h"

#include <string.h>

enum { GUARD = 64, GUARD_BYTE = 0xc5, EMPTY_BYTE = 0xee };

struct guarded guarded_make(size_t size, size_t shift, bool in_arena)
{
    size_t all = size + shift + 2 * GUARD;
    struct guarded memory = {.size = size, .in_arena = in_arena};
    memory.block = in_arena ? td_alloc(all)
                            : aligned_alloc(GUARD, (all + GUARD - 1) / GUARD * GUARD);
    CHECK(memory.block);
    memset(memory.block, GUARD_BYTE, GUARD + shift);
    memory.data = memory.block + GUARD + shift;
    memset(memory.data, EMPTY_BYTE, size);
    memset(memory.data + size, GUARD_BYTE, GUARD);
    return memory;
}

static bool is_filled(const char *bytes, size_t size, int with)
{
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)bytes[i] != with)
            return false;
    return true;
}

bool guarded_is_whole(const struct guarded *memory)
{
    return !memory->block ||
           (is_filled(memory->block, (size_t)(memory->data - memory->block), GUARD_BYTE) &&
            is_filled(memory->data + memory->size, GUARD, GUARD_BYTE));
}

bool guarded_is_empty(const struct guarded *memory)
{
    return !memory->block || is_filled(memory->data, memory->size, EMPTY_BYTE);
}

void guarded_free(struct guarded *memory)
{
    if (memory->in_arena)
        td_free(memory->block);
    else
        free(memory->block);
}
