/* Workspace memory, and each thread's cache of it; see aligned.h. */
#include "tensor/aligned.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

enum {
    ALIGNMENT = 64,
    BLOCKS = 8,                    /* that a thread keeps */
    MOST_BYTES = 16 * 1024 * 1024, /* of all of them */
    LEAST_BYTES = 32 * 1024,       /* of one: malloc() does smaller ones well */
};

struct block {
    void *memory;
    size_t bytes;
};

static _Thread_local struct {
    struct block blocks[BLOCKS];
    int count;
    size_t bytes;
} kept;

/* A key's destructor is called when a thread ends. */
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int has_key;

static void drop_all(void *unused)
{
    (void)unused;
    while (kept.count > 0)
        free(kept.blocks[--kept.count].memory);
    kept.bytes = 0;
}

static void make_key(void)
{
    has_key = pthread_key_create(&key, drop_all) == 0;
}

/* With a priority, so that it runs after the destructor that ends the threads of the pool. */
__attribute__((destructor(200))) static void drop_key(void)
{
    if (has_key)
        pthread_key_delete(key);
    has_key = 0;
    drop_all(NULL);
}

static struct block take(int i)
{
    struct block block = kept.blocks[i];
    kept.blocks[i] = kept.blocks[--kept.count];
    kept.bytes -= block.bytes;
    return block;
}

/* Best fit, but no block that is much larger. */
static struct block find(size_t bytes)
{
    int best = -1;
    for (int i = 0; i < kept.count; i++)
        if (kept.blocks[i].bytes >= bytes && kept.blocks[i].bytes / 4 <= bytes &&
            (best < 0 || kept.blocks[i].bytes < kept.blocks[best].bytes))
            best = i;
    return best < 0 ? (struct block){0} : take(best);
}

struct td__aligned td__aligned_alloc(size_t bytes)
{
    struct block block = find(bytes + ALIGNMENT);
    if (!block.memory)
        block = (struct block){malloc(bytes + ALIGNMENT), bytes + ALIGNMENT};
    if (!block.memory)
        return (struct td__aligned){0};
    return (struct td__aligned){
        .data = (char *)block.memory + (ALIGNMENT - (uintptr_t)block.memory % ALIGNMENT),
        .memory = block.memory,
        .bytes = block.bytes,
    };
}

void td__aligned_free(struct td__aligned *aligned)
{
    struct block block = {aligned->memory, aligned->bytes};
    *aligned = (struct td__aligned){0};
    if (block.bytes < LEAST_BYTES || block.bytes > MOST_BYTES) {
        free(block.memory);
        return;
    }
    pthread_once(&once, make_key);
    if (!has_key || pthread_setspecific(key, &kept) != 0) {
        free(block.memory);
        return;
    }
    while (kept.count == BLOCKS || kept.bytes + block.bytes > MOST_BYTES)
        free(take(0).memory);
    kept.blocks[kept.count++] = block;
    kept.bytes += block.bytes;
}
