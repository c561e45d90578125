/* Texts about calls; see operation.h. */
#include "call/operation.h"

#include "base/text.h"

#include <inttypes.h>
#include <stdio.h>

const char *td__detail_text(uint32_t detail, char text[64])
{
    text[0] = 0;
    if (detail & TD__DETAIL_LIST)
        snprintf(text, 64, " in a list of tensors (checksum of their sizes %08" PRIx32 ")", detail);
    else if (detail & TD__DETAIL_UNEVEN)
        snprintf(text, 64, " in uneven parts (checksum of their counts %08" PRIx32 ")", detail);
    else if (detail & TD__DETAIL_STAGED)
        snprintf(text, 64, " as a piece of a call on a device (checksum %08" PRIx32 ")", detail);
    else if (detail)
        snprintf(text, 64, " for %s",
                 detail == TD__DETAIL_SPLIT ? "td_group_split()" : "another purpose");
    return text;
}

static bool is_staged(uint32_t detail)
{
    return (detail & (TD__DETAIL_LIST | TD__DETAIL_UNEVEN | TD__DETAIL_STAGED)) ==
           TD__DETAIL_STAGED;
}

const char *td__place_text(uint32_t detail, uint32_t other)
{
    return !is_staged(detail) && is_staged(other) ? " in host memory" : "";
}

const char *td__remedy_text(uint32_t detail, uint32_t other, const char *otherwise)
{
    return is_staged(detail) != is_staged(other)
               ? "every rank must pass host memory, or every rank that of a device"
               : otherwise;
}

const char *td__counts_text(const size_t *counts, int size, char text[TD__COUNTS_TEXT])
{
    text[0] = 0;
    for (int i = 0; i < size && i < TD__NAMED_COUNTS; i++)
        td__text_add(text, TD__COUNTS_TEXT, "%s%zu", i ? ", " : "(", counts[i]);
    td__text_add(text, TD__COUNTS_TEXT, size > TD__NAMED_COUNTS ? ", …)" : ")");
    return text;
}

const char *td__operation_describe(const struct td__operation *operation)
{
    static _Thread_local char text[256];
    snprintf(text, sizeof text, "%s #%" PRIu64 " on group \"%.180s\"",
             td_op_kind_name(operation->call.kind), operation->call.sequence,
             operation->group ? operation->group : "");
    return text;
}
