/* The bytes of a value, as they come from another worker.
 *
 * Whatever they are, they are a value or are refused with a reason. A value can be printed and encoded, and is
 * the same after that. */
#include "fuzz.h"

#include "base/fail.h"
#include "rpc/codec.h"

#include <tandem/ops.h>
#include <tandem/rpc.h>

#include <stdlib.h>
#include <string.h>

enum { TENSORS = 3 };

static td_tensor *tensors[TENSORS];

static void check(bool condition)
{
    if (!condition)
        abort();
}

static td_status put_tensor(void *arg, td_tensor *tensor, uint32_t *number)
{
    (void)arg;
    for (*number = 0; tensors[*number] != tensor; ++*number)
        check(*number < TENSORS - 1);
    return TD_OK;
}

static td_tensor *get_tensor(void *arg, uint32_t number)
{
    (void)arg;
    if (number < TENSORS)
        return td_tensor_retain(tensors[number]);
    td_fail(TD_ERR_INVALID, "there is no tensor %u", number);
    return NULL;
}

/* A reference would need a worker. */
static td_rref *get_rref(void *arg, const void *bytes, size_t size)
{
    (void)arg;
    (void)bytes;
    td_fail(TD_ERR_INVALID, "a reference of %zu bytes", size);
    return NULL;
}

static const td__codec_fns fns = {
    .put_tensor = put_tensor, .get_tensor = get_tensor, .get_rref = get_rref};

/* Objects of the class "Box" are the values that they are packed as. */
static td_value *pack(void *object)
{
    return object;
}

static void *unpack(td_value *packed)
{
    return td_value_retain(packed);
}

static void destroy(void *object)
{
    td_value_release(object);
}

static void set_up(void)
{
    td_rpc_class box = {.signature = "Box()", .pack = pack, .unpack = unpack, .destroy = destroy};
    check(!td_rpc_register_class(&box));
    for (int i = 0; i < TENSORS; i++)
        tensors[i] = td_zeros((const int64_t[]){i + 1}, 1, TD_F32, NULL);
}

static void encode(const td_value *value, struct td__buffer *bytes)
{
    check(!td__encode(value, &fns, NULL, bytes));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_bytes text = {0};
    struct td__buffer once = {0}, twice = {0};
    if (!tensors[0])
        set_up();
    td_value *value = td__decode(data, size, &fns, NULL);
    if (!value) {
        check(td_last_status() && *td_last_error());
        return 0;
    }
    check(!td_value_print(value, &text) && text.size);
    encode(value, &once);
    td_value *again = td__decode(once.data, once.size, &fns, NULL);
    check(again);
    encode(again, &twice);
    check(once.size == twice.size && !memcmp(once.data, twice.data, once.size));
    td__buffer_free(&once);
    td__buffer_free(&twice);
    td_bytes_free(&text);
    td_value_release(again);
    td_value_release(value);
    return 0;
}
