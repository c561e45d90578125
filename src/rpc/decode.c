/* Msgpack to values; see codec.h. Nothing here trusts the bytes. */
#include "base/fail.h"
#include "base/text.h"
#include "rpc/codec.h"
#include "rpc/rpc_registry.h"

#include <stdlib.h>
#include <string.h>

/* Elements for which there is room at once: lists in lists could promise more than there is in the bytes. */
enum { MAX_RESERVED = 256 };

struct decoder {
    const td__codec_fns *fns;
    void *arg;
    const uint8_t *at, *end;
    int depth;
};

static td_value *get(struct decoder *decoder);

static void *invalid(const char *why)
{
    td_fail(TD_ERR_INVALID, "the bytes of a value are not valid: %s", why);
    return NULL;
}

static size_t left(const struct decoder *decoder)
{
    return (size_t)(decoder->end - decoder->at);
}

/* A number of `size` bytes; false if they are not there. */
static bool get_number(struct decoder *decoder, int size, uint64_t *value)
{
    *value = 0;
    if (left(decoder) < (size_t)size)
        return false;
    for (int i = 0; i < size; i++)
        *value = *value << 8 | *decoder->at++;
    return true;
}

static td_value *make_int(int64_t integer)
{
    td_value *value = td__value_create(TD_VALUE_INT, 0);
    if (value)
        value->integer = integer;
    return value;
}

static td_value *make_float(double number)
{
    td_value *value = td__value_create(TD_VALUE_FLOAT, 0);
    if (value)
        value->number = number;
    return value;
}

static td_value *make_bool(bool boolean)
{
    td_value *value = td__value_create(TD_VALUE_BOOL, 0);
    if (value)
        value->boolean = boolean;
    return value;
}

/* ---- Texts, bytes, lists and maps --------------------------------------------------------------- */

/* `size` bytes in place; NULL if they are not there. */
static const void *get_bytes(struct decoder *decoder, uint64_t size)
{
    if (size > left(decoder))
        return invalid("they are cut off");
    const void *bytes = decoder->at;
    decoder->at += size;
    return bytes;
}

static td_value *get_text(struct decoder *decoder, uint64_t size)
{
    const char *text = get_bytes(decoder, size);
    if (!text)
        return NULL;
    return td__is_utf8(text, size) ? td__value_new_bytes(TD_VALUE_TEXT, text, size)
                                   : invalid("a text is not UTF-8");
}

static td_value *get_list(struct decoder *decoder, uint64_t count)
{
    if (count > left(decoder)) /* each element has a byte at least */
        return invalid("they are cut off");
    td_value *list = td__value_new_list((int64_t)(count < MAX_RESERVED ? count : MAX_RESERVED));
    for (uint64_t i = 0; list && i < count; i++) {
        td_value *item = get(decoder);
        if (!item || !td__value_append(list, NULL, item)) {
            td_value_release(item);
            td_value_release(list);
            return NULL;
        }
    }
    return list;
}

/* A key, for free(). */
static char *get_key(struct decoder *decoder)
{
    uint64_t size;
    if (decoder->at == decoder->end)
        return invalid("they are cut off");
    uint8_t head = *decoder->at++;
    if ((head & 0xe0) == 0xa0)
        size = head & 31;
    else if (head < 0xd9 || head > 0xdb)
        return invalid("a key is not a text");
    else if (!get_number(decoder, 1 << (head - 0xd9), &size))
        return invalid("they are cut off");
    const char *text = get_bytes(decoder, size);
    if (!text)
        return NULL;
    if (!td__is_utf8(text, size))
        return invalid("a key is not UTF-8");
    char *key = td__text_copy(text, size);
    if (!key)
        td__fail_nomem("rpc");
    return key;
}

/* A key and its element; false if they are not valid. */
static bool get_entry(struct decoder *decoder, td_value *map)
{
    char *key = get_key(decoder);
    td_value *item = key ? get(decoder) : NULL;
    if (item && td__value_find(map, key) >= 0)
        invalid("a map has a key twice");
    else if (item && td__value_append(map, key, item))
        return true;
    free(key);
    td_value_release(item);
    return false;
}

static td_value *get_map(struct decoder *decoder, uint64_t count)
{
    if (count > left(decoder) / 2)
        return invalid("they are cut off");
    td_value *map = td__value_new_map();
    for (uint64_t i = 0; map && i < count; i++) {
        if (!get_entry(decoder, map)) {
            td_value_release(map);
            return NULL;
        }
    }
    return map;
}

/* ---- Extensions ------------------------------------------------------------------------------ */

static td_value *get_tensor(struct decoder *decoder, const void *bytes, size_t size)
{
    td_tensor *tensor = size == 4 ? decoder->fns->get_tensor(decoder->arg, td__load_u32(bytes))
                                  : invalid("the number of a tensor has 4 bytes");
    td_value *value = tensor ? td__value_create(TD_VALUE_TENSOR, 0) : NULL;
    if (value)
        value->tensor = tensor;
    else
        td_tensor_release(tensor);
    return value;
}

static td_value *get_rref(struct decoder *decoder, const void *bytes, size_t size)
{
    td_rref *rref = decoder->fns->get_rref(decoder->arg, bytes, size);
    td_value *value = rref ? td__value_create(TD_VALUE_RREF, 0) : NULL;
    if (value)
        value->rref = rref;
    else
        td_rref_release(rref);
    return value;
}

static td_value *make_object(const char *name, td_value *packed)
{
    struct td__rpc_class_entry *entry = td__class_find(name);
    if (!entry) {
        td_fail(TD_ERR_INVALID, "there is no class \"%.100s\"", name);
        return NULL;
    }
    TD_SCOPE;
    void *object = td__class_unpack(entry, packed);
    if (object)
        return td__value_new_object(entry, object);
    td__class_release(entry);
    return NULL;
}

static td_value *make_module(td_value *packed)
{
    td_module *module = td__module_unpack(packed);
    td_value *value = module ? td__value_create(TD_VALUE_MODULE, 0) : NULL;
    if (value)
        value->module = module;
    else
        td_module_destroy(module);
    return value;
}

/* An extension that is msgpack itself: [name, value]. */
static td_value *get_pair(struct decoder *decoder, bool module, const void *bytes, size_t size)
{
    struct decoder inner = *decoder;
    inner.at = bytes;
    inner.end = inner.at + size;
    td_value *pair = get(&inner), *result = NULL;
    if (!pair)
        return NULL;
    if (pair->kind != TD_VALUE_LIST || pair->count != 2 || pair->items[0]->kind != TD_VALUE_TEXT ||
        inner.at != inner.end || (module && pair->items[0]->size))
        invalid("an object is a list of a name and a value");
    else if (module)
        result = make_module(pair->items[1]);
    else
        result = make_object((const char *)(pair->items[0] + 1), pair->items[1]);
    td_value_release(pair);
    return result;
}

static td_value *get_ext(struct decoder *decoder, uint64_t size)
{
    if (decoder->at == decoder->end)
        return invalid("they are cut off");
    uint8_t type = *decoder->at++;
    const void *bytes = get_bytes(decoder, size);
    if (!bytes)
        return NULL;
    switch (type) {
    case TD__EXT_TENSOR:
        return get_tensor(decoder, bytes, size);
    case TD__EXT_RREF:
        return get_rref(decoder, bytes, size);
    case TD__EXT_MODULE:
    case TD__EXT_OBJECT:
        return get_pair(decoder, type == TD__EXT_MODULE, bytes, size);
    }
    return invalid("an unknown extension");
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* A value whose head is followed by a number of `size` bytes. */
static td_value *get_sized(struct decoder *decoder, uint8_t head, int size)
{
    uint64_t number;
    if (!get_number(decoder, size, &number))
        return invalid("they are cut off");
    if (head >= 0xc4 && head <= 0xc6) {
        const void *bytes = get_bytes(decoder, number);
        return bytes ? td__value_new_bytes(TD_VALUE_BYTES, bytes, number) : NULL;
    }
    if (head >= 0xc7 && head <= 0xc9)
        return get_ext(decoder, number);
    if (head == 0xca) {
        uint32_t bits = (uint32_t)number;
        float value;
        memcpy(&value, &bits, sizeof value);
        return make_float((double)value);
    }
    if (head == 0xcb) {
        double value;
        memcpy(&value, &number, sizeof value);
        return make_float(value);
    }
    if (head >= 0xcc && head <= 0xcf)
        return number <= INT64_MAX ? make_int((int64_t)number)
                                   : invalid("an integer is above 2^63 - 1");
    if (head >= 0xd0 && head <= 0xd3) {
        int shift = 64 - 8 * size;
        return make_int((int64_t)(number << shift) >> shift);
    }
    if (head >= 0xd9 && head <= 0xdb)
        return get_text(decoder, number);
    if (head == 0xdc || head == 0xdd)
        return get_list(decoder, number);
    return get_map(decoder, number);
}

static td_value *get_any(struct decoder *decoder)
{
    static const uint8_t sizes[32] = {/* of the numbers behind 0xc0 to 0xdf; 9: other forms */
                                      9, 9, 9, 9, 1, 2, 4, 1, 2, 4, 4, 8, 1, 2, 4, 8,
                                      1, 2, 4, 8, 9, 9, 9, 9, 9, 1, 2, 4, 2, 4, 2, 4};
    if (decoder->at == decoder->end)
        return invalid("they are cut off");
    uint8_t head = *decoder->at++;
    if (head < 0x80 || head >= 0xe0)
        return make_int((int8_t)head);
    if (head < 0x90)
        return get_map(decoder, head & 15);
    if (head < 0xa0)
        return get_list(decoder, head & 15);
    if (head < 0xc0)
        return get_text(decoder, head & 31);
    if (sizes[head - 0xc0] != 9)
        return get_sized(decoder, head, sizes[head - 0xc0]);
    switch (head) {
    case 0xc0:
        return td__value_create(TD_VALUE_NIL, 0);
    case 0xc2:
    case 0xc3:
        return make_bool(head == 0xc3);
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
        return get_ext(decoder, UINT64_C(1) << (head - 0xd4));
    }
    return invalid("an unknown form");
}

static td_value *get(struct decoder *decoder)
{
    if (decoder->depth > TD_VALUE_MAX_DEPTH)
        return invalid("they are nested too deep");
    decoder->depth++;
    td_value *value = get_any(decoder);
    decoder->depth--;
    return value;
}

td_value *td__decode(const void *bytes, size_t size, const td__codec_fns *fns, void *arg)
{
    struct decoder decoder = {.fns = fns, .arg = arg, .at = bytes};
    decoder.end = decoder.at + size;
    td_value *value = get(&decoder);
    if (!value || decoder.at == decoder.end)
        return value;
    td_value_release(value);
    return invalid("there are bytes behind it");
}
