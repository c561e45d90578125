/* Values to msgpack; see codec.h. */
#include "base/fail.h"
#include "rpc/codec.h"
#include "rpc/rpc_registry.h"

#include <stdio.h>
#include <string.h>

struct encoder {
    const td__codec_fns *fns;
    void *arg;
    struct td__buffer *bytes;
    int depth; /* as the decoder counts it */
};

/* ---- Numbers in the byte order of msgpack ------------------------------------------------------ */

static void put_head(struct td__buffer *bytes, uint8_t head, uint64_t value, int size)
{
    uint8_t at[9] = {head};
    for (int i = 0; i < size; i++)
        at[1 + i] = (uint8_t)(value >> 8 * (size - 1 - i));
    td__buffer_put(bytes, at, (size_t)size + 1);
}

static void put_int(struct td__buffer *bytes, int64_t value)
{
    if (value >= -32 && value < 128)
        td__buffer_put_u8(bytes, (uint8_t)value);
    else if (value >= 0 && value <= UINT8_MAX)
        put_head(bytes, 0xcc, (uint64_t)value, 1);
    else if (value >= 0 && value <= UINT16_MAX)
        put_head(bytes, 0xcd, (uint64_t)value, 2);
    else if (value >= 0 && value <= UINT32_MAX)
        put_head(bytes, 0xce, (uint64_t)value, 4);
    else if (value >= 0)
        put_head(bytes, 0xcf, (uint64_t)value, 8);
    else if (value >= INT8_MIN)
        put_head(bytes, 0xd0, (uint64_t)value, 1);
    else if (value >= INT16_MIN)
        put_head(bytes, 0xd1, (uint64_t)value, 2);
    else if (value >= INT32_MIN)
        put_head(bytes, 0xd2, (uint64_t)value, 4);
    else
        put_head(bytes, 0xd3, (uint64_t)value, 8);
}

static void put_float(struct td__buffer *bytes, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_head(bytes, 0xcb, bits, 8);
}

/* The head of something with a size: `few` with less than `limit` in it, or `head`, head + 1 or head + 2 and a size of
 * 8 (if there is such a form), 16 or 32 bits. */
static void put_size(struct td__buffer *bytes, uint8_t few, uint64_t limit, uint8_t head,
                     bool has_8, uint64_t size)
{
    if (size < limit)
        td__buffer_put_u8(bytes, (uint8_t)(few | size));
    else if (has_8 && size <= UINT8_MAX)
        put_head(bytes, head, size, 1);
    else if (size <= UINT16_MAX)
        put_head(bytes, (uint8_t)(head + has_8), size, 2);
    else
        put_head(bytes, (uint8_t)(head + has_8 + 1), size, 4);
}

static void put_text(struct td__buffer *bytes, const char *text, size_t size)
{
    put_size(bytes, 0xa0, 32, 0xd9, true, size);
    td__buffer_put(bytes, text, size);
}

static td_status check_size(size_t size)
{
    return size <= UINT32_MAX ? TD_OK
                              : td_fail(TD_ERR_INVALID,
                                        "%zu bytes are too many for one value; use a tensor", size);
}

static td_status put_ext(struct td__buffer *bytes, uint8_t type, const struct td__buffer *data)
{
    if (data->failed)
        return td__fail_nomem("rpc");
    TD_TRY(check_size(data->size));
    put_size(bytes, 0, 0, 0xc7, true, data->size);
    td__buffer_put_u8(bytes, type);
    td__buffer_put(bytes, data->data, data->size);
    return TD_OK;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static td_status put(struct encoder *encoder, const td_value *value);

static td_status put_tensor(struct encoder *encoder, td_tensor *tensor)
{
    uint32_t number;
    TD_TRY(encoder->fns->put_tensor(encoder->arg, tensor, &number));
    td__buffer_put_u8(encoder->bytes, 0xd6);
    td__buffer_put_u8(encoder->bytes, TD__EXT_TENSOR);
    td__buffer_put_u32(encoder->bytes, number);
    return TD_OK;
}

static td_status put_rref(struct encoder *encoder, td_rref *rref)
{
    struct td__buffer bytes = {0};
    td_status status = encoder->fns->put_rref(encoder->arg, rref, &bytes);
    if (!status)
        status = put_ext(encoder->bytes, TD__EXT_RREF, &bytes);
    td__buffer_free(&bytes);
    return status;
}

/* An extension whose data is msgpack itself: [name, value]. */
static td_status put_pair(struct encoder *encoder, uint8_t type, const char *name,
                          const td_value *value)
{
    struct td__buffer bytes = {0};
    struct encoder inner = *encoder;
    inner.bytes = &bytes;
    inner.depth++; /* the list */
    put_size(&bytes, 0x90, 16, 0xdc, false, 2);
    put_text(&bytes, name, strlen(name));
    td_status status = put(&inner, value);
    if (!status)
        status = put_ext(encoder->bytes, type, &bytes);
    td__buffer_free(&bytes);
    return status;
}

static td_status put_object(struct encoder *encoder, const td_value *value)
{
    TD_SCOPE;
    td_value *packed = td__class_pack(value->object_class, value->object);
    if (!packed)
        return td__error_status();
    return put_pair(encoder, TD__EXT_OBJECT, td__class_name(value->object_class), packed);
}

/* Names the element whose encoding has failed. */
static td_status at_element(td_status status, const td_value *parent, int64_t index)
{
    if (!status)
        return TD_OK;
    if (parent->kind == TD_VALUE_MAP)
        return td_fail(status, "[\"%.60s\"]%s%s", parent->keys[index],
                       td__error_text()[0] == '[' ? "" : ": ", td__error_text());
    return td_fail(status, "[%lld]%s%s", (long long)index, td__error_text()[0] == '[' ? "" : ": ",
                   td__error_text());
}

static td_status put_items(struct encoder *encoder, const td_value *value)
{
    bool map = value->kind == TD_VALUE_MAP;
    if (value->count > UINT32_MAX)
        return td_fail(TD_ERR_INVALID, "a %s has more than 2^32 elements", map ? "map" : "list");
    put_size(encoder->bytes, map ? 0x80 : 0x90, 16, map ? 0xde : 0xdc, false,
             (uint64_t)value->count);
    for (int64_t i = 0; i < value->count; i++) {
        if (map) {
            size_t size = strlen(value->keys[i]);
            TD_TRY(check_size(size));
            put_text(encoder->bytes, value->keys[i], size);
        }
        TD_TRY(at_element(put(encoder, value->items[i]), value, i));
    }
    return TD_OK;
}

static td_status put_any(struct encoder *encoder, const td_value *value)
{
    struct td__buffer *bytes = encoder->bytes;
    switch (value->kind) {
    case TD_VALUE_NIL:
        td__buffer_put_u8(bytes, 0xc0);
        return TD_OK;
    case TD_VALUE_BOOL:
        td__buffer_put_u8(bytes, value->boolean ? 0xc3 : 0xc2);
        return TD_OK;
    case TD_VALUE_INT:
        put_int(bytes, value->integer);
        return TD_OK;
    case TD_VALUE_FLOAT:
        put_float(bytes, value->number);
        return TD_OK;
    case TD_VALUE_TEXT:
    case TD_VALUE_BYTES:
        TD_TRY(check_size(value->size));
        if (value->kind == TD_VALUE_TEXT) {
            put_text(bytes, (const char *)(value + 1), value->size);
        } else {
            put_size(bytes, 0, 0, 0xc4, true, value->size);
            td__buffer_put(bytes, value + 1, value->size);
        }
        return TD_OK;
    case TD_VALUE_LIST:
    case TD_VALUE_MAP:
        return put_items(encoder, value);
    case TD_VALUE_TENSOR:
        return put_tensor(encoder, value->tensor);
    case TD_VALUE_RREF:
        return put_rref(encoder, value->rref);
    case TD_VALUE_MODULE: {
        TD_SCOPE;
        td_value *packed = td__module_pack(value->module);
        return packed ? put_pair(encoder, TD__EXT_MODULE, "", packed) : td__error_status();
    }
    case TD_VALUE_OBJECT:
        return put_object(encoder, value);
    case TD_VALUE_FUTURE:
        break;
    }
    return td_fail(TD_ERR_INVALID, "a %s cannot be sent", td_value_kind_name(value->kind));
}

/* Lists and maps are bounded when they are made; objects that pack themselves as objects are not. */
static td_status put(struct encoder *encoder, const td_value *value)
{
    if (encoder->depth > TD_VALUE_MAX_DEPTH)
        return td_fail(TD_ERR_INVALID, "the values are nested deeper than %d", TD_VALUE_MAX_DEPTH);
    encoder->depth++;
    td_status status = put_any(encoder, value);
    encoder->depth--;
    return status;
}

td_status td__encode(const td_value *value, const td__codec_fns *fns, void *arg,
                     struct td__buffer *bytes)
{
    struct encoder encoder = {.fns = fns, .arg = arg, .bytes = bytes};
    TD_TRY(put(&encoder, value));
    return bytes->failed ? td__fail_nomem("rpc") : TD_OK;
}
