/* Blocks of memory that threads keep; see block_cache.h. */
#include "rpc/block_cache.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

/* The most that a thread keeps: 88 KiB. An agent's thread reads up to a ring of calls before it runs and frees them. */
enum { SMALL_BLOCKS = 256, LARGE_BLOCKS = 128 };

struct block {
    struct block *next;
};

struct kept {
    struct block *first;
    int room; /* for more of them */
};

static _Thread_local struct {
    struct kept small, large;
    bool keeps; /* they are freed when the thread ends */
} blocks;

/* A key's destructor is called when a thread ends. */
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool has_key;

static void drop(struct kept *kept)
{
    for (struct block *next; kept->first; kept->first = next) {
        next = kept->first->next;
        free(kept->first);
    }
    kept->room = 0;
}

static void drop_all(void *unused)
{
    (void)unused;
    drop(&blocks.small);
    drop(&blocks.large);
    blocks.keeps = false;
}

static void make_key(void)
{
    has_key = pthread_key_create(&key, drop_all) == 0;
}

/* AddressSanitizer is to see what uses an object after its end. */
#ifdef __SANITIZE_ADDRESS__
static const bool may_keep = false;
#else
static const bool may_keep = true;
#endif

static bool begin_keeping(void)
{
    if (!may_keep)
        return false;
    pthread_once(&once, make_key);
    blocks.keeps = has_key && pthread_setspecific(key, &blocks) == 0;
    if (blocks.keeps) {
        blocks.small.room = SMALL_BLOCKS;
        blocks.large.room = LARGE_BLOCKS;
    }
    return blocks.keeps;
}

static struct kept *kept_of(size_t size)
{
    return size == TD__BLOCK ? &blocks.small : &blocks.large;
}

void *td__rpc_block_alloc(size_t size)
{
    struct kept *kept = kept_of(size);
    struct block *block = kept->first;
    if (!block)
        return malloc(size);
    kept->first = block->next;
    kept->room++;
    return block;
}

void td__rpc_block_free(void *memory, size_t size)
{
    struct kept *kept = kept_of(size);
    struct block *block = memory;
    if (!kept->room && (blocks.keeps || !begin_keeping())) {
        free(block);
        return;
    }
    block->next = kept->first;
    kept->first = block;
    kept->room--;
}
