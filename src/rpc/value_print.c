/* Values as text for people. */
#include "base/buffer.h"
#include "base/fail.h"
#include "rpc/rpc_registry.h"
#include "rpc/value_internal.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void put(struct td__buffer *out, const char *text)
{
    td__buffer_put(out, text, strlen(text));
}

static void put_quoted(struct td__buffer *out, const char *text)
{
    put(out, "\"");
    for (; *text; text++) {
        char escape[8];
        if (*text == '"' || *text == '\\')
            snprintf(escape, sizeof escape, "\\%c", *text);
        else if (*text == '\n')
            snprintf(escape, sizeof escape, "\\n");
        else if ((unsigned char)*text < ' ' || *text == 127)
            snprintf(escape, sizeof escape, "\\x%02x", (unsigned)*text);
        else
            snprintf(escape, sizeof escape, "%c", *text);
        put(out, escape);
    }
    put(out, "\"");
}

/* The fewest digits that read back as the same number. */
static void put_float(struct td__buffer *out, double number)
{
    char text[40];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, number);
        if (strtod(text, NULL) == number)
            break;
    }
    put(out, text);
    if (strspn(text, "-0123456789") == strlen(text))
        put(out, ".0");
}

static void print(struct td__buffer *out, const td_value *value)
{
    char text[32];
    switch (value->kind) {
    case TD_VALUE_BOOL:
        put(out, value->boolean ? "true" : "false");
        break;
    case TD_VALUE_INT:
        snprintf(text, sizeof text, "%lld", (long long)value->integer);
        put(out, text);
        break;
    case TD_VALUE_FLOAT:
        put_float(out, value->number);
        break;
    case TD_VALUE_TEXT:
        put_quoted(out, (const char *)(value + 1));
        break;
    case TD_VALUE_BYTES:
        snprintf(text, sizeof text, "%zu bytes", value->size);
        put(out, text);
        break;
    case TD_VALUE_LIST:
    case TD_VALUE_MAP:
        put(out, value->kind == TD_VALUE_MAP ? "{" : "[");
        for (int64_t i = 0; i < value->count; i++) {
            put(out, i ? ", " : "");
            if (value->keys) {
                put_quoted(out, value->keys[i]);
                put(out, ": ");
            }
            print(out, value->items[i]);
        }
        put(out, value->kind == TD_VALUE_MAP ? "}" : "]");
        break;
    case TD_VALUE_TENSOR:
        put(out, "tensor ");
        put(out, td_dtype_name(value->tensor->layout.dtype));
        put(out, " ");
        put(out, td__shape_of(value->tensor));
        break;
    case TD_VALUE_RREF:
        put(out, "reference on ");
        put_quoted(out, td_rref_owner(value->rref));
        break;
    case TD_VALUE_OBJECT:
        put(out, td__class_name(value->object_class));
        break;
    default:
        put(out, td_value_kind_name(value->kind));
    }
}

td_status td_value_print(const td_value *value, td_bytes *text)
{
    struct td__buffer out = {0};
    if (!value || !text)
        return td__fail_null(__func__);
    print(&out, value);
    td_status status = out.failed ? td__fail_nomem(__func__)
                                  : td_bytes_copy(out.data, out.size, text);
    td__buffer_free(&out);
    return status;
}
