/* Records of initial values, as rank 0 of a sharded model sends them.
 *
 *     bytes 0, 1   the size of the storage that they are for
 *
 * A record is refused, or is the same after it was written and read again, and its values lie in the storage. */
#include "fuzz.h"

#include "tensor/deferred.h"

#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static struct td__deferred *get(const void *data, size_t size, size_t bytes)
{
    struct td__reader reader = td__reader_of(data, size);
    return td__deferred_get(&reader, td__host_device(), bytes);
}

/* Nothing that needs much memory, or another device. */
static bool is_small(const struct td__deferred *record)
{
    if (record->bytes > 1 << 16 || record->device != td__host_device())
        return false;
    for (int i = 0; i < record->count; i++)
        if (record->steps[i].copy && !is_small(record->steps[i].copy))
            return false;
    return record->count < 64;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    size_t bytes = data[0] | (size_t)data[1] << 8;
    struct td__deferred *record = get(data + 2, size - 2, bytes);
    if (!record) {
        check(strstr(td_last_error(), "malformed"));
        return 0;
    }
    struct td__buffer written = {0}, again = {0};
    td__deferred_put(&written, record);
    struct td__deferred *copy = get(written.data, written.size, bytes);
    check(copy != NULL);
    td__deferred_put(&again, copy);
    check(written.size == again.size && !memcmp(written.data, again.data, written.size));
    if (bytes && is_small(record)) {
        struct td__storage *storage = td__deferred_make(copy);
        if (storage)
            td__storage_release(storage);
    }
    td__buffer_free(&written);
    td__buffer_free(&again);
    td__deferred_destroy(copy);
    td__deferred_destroy(record);
    return 0;
}
