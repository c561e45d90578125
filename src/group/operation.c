/* A collective in words; see operation.h. */
#include "group/operation.h"

#include <inttypes.h>
#include <stdio.h>

const char *td__operation_describe(const struct td__operation *operation)
{
    static _Thread_local char text[256];
    snprintf(text, sizeof text, "%s #%" PRIu64 " on group \"%.180s\"",
             td__collective_name(operation->kind), operation->sequence,
             operation->group ? operation->group : "");
    return text;
}
