/* The casts of parameters, which a thread keeps to the end of its outermost autocast scope: a hash table by the address
 * of the parameter, which an entry retains, so that the address is not used again.
 *
 * A cast that was made without recording, as in the first run of a checkpointed segment, has no path to the parameter:
 * it is replaced when grad mode is on. */
#include "autograd/autocast.h"
#include "autograd/op.h"
#include "base/fail.h"

#include <stdlib.h>

struct cached {
    td_tensor *source; /* NULL: free */
    td_tensor *cast;
    unsigned version; /* of the source's storage */
};

enum { FIRST_CAPACITY = 64 };

static _Thread_local struct cached *table;
static _Thread_local size_t capacity, used;

/* The entry of a parameter, or the free one where it belongs. There is always a free one. */
static struct cached *find(struct cached *entries, size_t size, const td_tensor *source)
{
    size_t at = (size_t)(((uintptr_t)source >> 6) * UINT64_C(0x9e3779b97f4a7c15) >> 32);
    while (entries[at & (size - 1)].source && entries[at & (size - 1)].source != source)
        at++;
    return &entries[at & (size - 1)];
}

static td_status reserve(void)
{
    if (2 * used < capacity)
        return TD_OK;
    size_t larger = capacity ? 2 * capacity : FIRST_CAPACITY;
    struct cached *entries = calloc(larger, sizeof *entries);
    if (!entries)
        return td__fail_nomem("td_autocast");
    for (size_t i = 0; i < capacity; i++)
        if (table[i].source)
            *find(entries, larger, table[i].source) = table[i];
    free(table);
    table = entries;
    capacity = larger;
    return TD_OK;
}

static bool is_valid(const struct cached *entry, td_dtype dtype)
{
    return entry->cast->layout.dtype == dtype &&
           entry->version == atomic_load(&entry->source->storage->version) &&
           (td_tensor_requires_grad(entry->cast) || !td_grad_enabled());
}

td_tensor *td__cast_cached(td_tensor *source, td_dtype dtype)
{
    if (reserve())
        return NULL;
    struct cached *entry = find(table, capacity, source);
    if (entry->source && is_valid(entry, dtype))
        return td_tensor_retain(entry->cast);
    unsigned version = atomic_load(&source->storage->version);
    td_tensor *cast = NULL;
    {
        TD_SCOPE;
        cast = td_tensor_retain(td_to_dtype(source, dtype));
    }
    if (!cast)
        return NULL;
    if (entry->source)
        td_tensor_release(entry->cast);
    else
        used++;
    *entry = (struct cached){.source = entry->source ? source : td_tensor_retain(source),
                             .cast = cast,
                             .version = version};
    return td_tensor_retain(cast);
}

void td__cast_cache_clear(void)
{
    if (!table)
        return;
    for (size_t i = 0; i < capacity; i++)
        if (table[i].source) {
            td_tensor_release(table[i].cast);
            td_tensor_release(table[i].source);
        }
    free(table);
    table = NULL;
    capacity = used = 0;
}
