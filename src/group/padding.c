/* Uneven all_gather and reduce_scatter on a backend that has only even ones: copies the parts to temporary memory of
 * the device, padded with zeros to the longest one. */
#include "base/fail.h"
#include "device/device_internal.h"
#include "group/process_group.h"

#include <string.h>

static td_status copy(const td_call *call, void *to, const void *from, size_t bytes)
{
    td_device *device = call->device ? call->device : td__host_device();
    return td__copy_between("td_group", &(struct td__place){.device = device, .data = to},
                            &(struct td__place){.device = device, .data = (void *)from}, bytes,
                            true);
}

/* Copies the parts between `whole`, where they are contiguous, and `padded`, where each has `part` bytes. */
static td_status copy_parts(const td_group *group, const td_call *call, char *padded, size_t part,
                            char *whole, bool pad)
{
    size_t element = td_dtype_size(call->dtype);
    for (int i = 0; i < group->size; i++, padded += part) {
        size_t bytes = call->input_counts[i] * element;
        TD_TRY(copy(call, pad ? padded : whole, pad ? whole : padded, bytes));
        whole += bytes;
    }
    return TD_OK;
}

static void *take_memory(const td_call *call, size_t bytes, void **arg)
{
    struct td__place place = {.device = call->device};
    if (!call->device) {
        place.data = td_alloc(bytes);
        if (place.data)
            memset(place.data, 0, bytes);
        return place.data;
    }
    place.data = td__block_alloc(call->device, td_op_kind_name(call->kind), bytes, arg);
    if (place.data && td__fill_bytes(&place, 0, bytes)) {
        td__block_free(place.data, *arg);
        return NULL;
    }
    return place.data;
}

/* With the stream of the call as the current one. */
static td_status run_padded(const struct td__part *backend, const td_call *call,
                            td_collective_fn slot, size_t part, size_t both)
{
    const td_group *group = backend->group;
    size_t own = call->input_counts[group->rank] * td_dtype_size(call->dtype);
    bool gathers = call->kind == TD_OP_ALL_GATHER;
    void *arg = NULL;
    char *memory = take_memory(call, both, &arg), *parts = memory + part;
    if (!memory)
        return td__error_status();
    td_call even = *call;
    even.count = part / td_dtype_size(call->dtype);
    even.input_counts = even.output_counts = NULL;
    even.input = gathers ? memory : parts;
    even.output = gathers ? parts : memory;
    td_status status = gathers ? copy(call, memory, call->input, own)
                               : copy_parts(group, call, parts, part, (char *)call->input, true);
    if (!status)
        status = slot(backend->self, &even);
    if (!status)
        status = gathers ? copy_parts(group, call, parts, part, call->output, false)
                         : copy(call, call->output, memory, own);
    if (call->device)
        td__block_free(memory, arg);
    else
        td_free(memory);
    return status;
}

td_status td__call_padded(const struct td__part *backend, const td_call *call,
                          td_collective_fn slot)
{
    int size = backend->group->size;
    size_t longest = td__largest_count(call->input_counts, size), whole, both;
    size_t part = longest * td_dtype_size(call->dtype);
    if (__builtin_mul_overflow(part, (size_t)size, &whole) ||
        __builtin_add_overflow(part, whole, &both))
        return td_fail(TD_ERR_NOMEM, "%s: no memory for %d parts of %zu elements",
                       td_op_kind_name(call->kind), size, longest);
    TD_STREAM_SCOPE(call->stream);
    return run_padded(backend, call, slot, part, both ? both : 1);
}
