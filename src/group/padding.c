/* Uneven all_gather and reduce_scatter on a backend that has only even ones: copies the parts to temporary memory,
 * padded with zeros to the longest one. */
#include "base/fail.h"
#include "group/process_group.h"

#include <string.h>

/* Copies the parts between `whole`, where they are contiguous, and `padded`, where each has `part` bytes. */
static void copy_parts(const td_group *group, const td_call *call, char *padded, size_t part,
                       char *whole, bool pad)
{
    size_t element = td_dtype_size(call->dtype);
    for (int i = 0; i < group->size; i++) {
        size_t bytes = call->input_counts[i] * element;
        if (bytes && pad)
            memcpy(padded + (size_t)i * part, whole, bytes);
        else if (bytes)
            memcpy(whole, padded + (size_t)i * part, bytes);
        whole += bytes;
    }
}

td_status td__call_padded(const td_group *group, const td_call *call, td_collective_fn slot)
{
    size_t element = td_dtype_size(call->dtype), whole, both;
    size_t longest = td__largest_count(call->input_counts, group->size), part = longest * element;
    size_t own = call->input_counts[group->rank] * element;
    bool gathers = call->kind == TD_OP_ALL_GATHER;
    if (__builtin_mul_overflow(part, (size_t)group->size, &whole) ||
        __builtin_add_overflow(part, whole, &both))
        return td_fail(TD_ERR_NOMEM, "%s: no memory for %d parts of %zu elements",
                       td_op_kind_name(call->kind), group->size, longest);
    char *memory = td_alloc(both), *parts = memory + part;
    if (!memory)
        return TD_ERR_NOMEM;
    memset(memory, 0, both);
    td_call even = *call;
    even.count = longest;
    even.input_counts = even.output_counts = NULL;
    even.input = gathers ? memory : parts;
    even.output = gathers ? parts : memory;
    if (gathers && own)
        memcpy(memory, call->input, own);
    else if (!gathers)
        copy_parts(group, call, parts, part, (char *)call->input, true);
    td_status status = slot(group->self, &even);
    if (!status && gathers)
        copy_parts(group, call, parts, part, call->output, false);
    else if (!status && own)
        memcpy(call->output, memory, own);
    td_free(memory);
    return status;
}
