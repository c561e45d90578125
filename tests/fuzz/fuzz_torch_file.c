/* Files of torch.save().
 *
 *     byte 0   bit 0   what follows is a whole file
 *              else    … is its data.pkl: a fuzzer seldom finds a checksum
 *
 * Whatever is in a file, it is read or refused with its name. A tensor of a pickle is inside of its storage. */
#include "checkpoint/unpickle.h"
#include "fuzz.h"

#include <tandem/checkpoint.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void read_whole(const void *data, size_t size)
{
    const char *path = fuzz_file(data, size);
    td_state *state = td_load_torch(path, NULL);
    check(state || strstr(td_last_error(), path));
    td_state_destroy(state);
}

static void check_tensor(const struct td__pickle_tensor *tensor)
{
    int64_t last = tensor->offset;
    int64_t element = tensor->storage->is_typed ? 1 : (int64_t)td_dtype_size(tensor->dtype);
    for (int d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] == 0)
            return;
        last += (tensor->shape[d] - 1) * tensor->strides[d];
    }
    check(last >= 0 && last < tensor->storage->count / element);
}

static void read_pickle(const void *data, size_t size)
{
    struct td__pickle pickle;
    if (td__unpickle("x.pt", data, size, &pickle)) {
        check(strstr(td_last_error(), "x.pt"));
        return;
    }
    for (const struct td__pickle_value *value = pickle.all; value; value = value->next)
        if (value->kind == TD__PICKLE_TENSOR)
            check_tensor(&value->as.tensor);
    td__pickle_free(&pickle);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0 || size > 1 << 16)
        return 0;
    if (data[0] & 1)
        read_whole(data + 1, size - 1);
    else
        read_pickle(data + 1, size - 1);
    return 0;
}
