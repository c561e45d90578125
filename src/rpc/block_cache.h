/* Memory of the small objects that each call makes and frees: values, futures, messages. Each thread keeps some blocks of
 * two sizes for the next objects, of any kind. It is for what malloc() costs: its own cache of a thread has seven blocks of
 * a size, and 100 calls in flight complete, and are answered, in batches. */
#ifndef TD_RPC_BLOCK_CACHE_H
#define TD_RPC_BLOCK_CACHE_H

#include <stddef.h>

enum { TD__BLOCK = 96, TD__LARGE_BLOCK = 512 };

/** A block of one of these sizes. NULL without memory, without an error. */
void *td__rpc_block_alloc(size_t size);

/** Frees it, on any thread; `size` is that of td__rpc_block_alloc(). */
void td__rpc_block_free(void *block, size_t size);

#endif
