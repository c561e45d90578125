/* Deferred initialisation of sharded modules: a parameter without memory becomes shards without ever being whole on a rank
 * for longer than it takes to fill its shard.
 *
 * Rank 0 decides: where its parameter has no memory, all ranks get its record (tensor/deferred.h), and compute what their
 * shards need; where it has, it broadcasts the elements, to one parameter's memory on ranks where it has none. */
#include "base/fail.h"
#include "group/process_group.h"
#include "parallel/fsdp_internal.h"
#include "tensor/deferred.h"

#include <stdlib.h>
#include <string.h>

static td_status broadcast_now(struct td__fsdp_flat *flat, td_group *group)
{
    td_tensor **tensors = calloc((size_t)flat->count, sizeof(td_tensor *));
    if (!tensors)
        return td__fail_nomem("td_fsdp");
    for (int i = 0; i < flat->count; i++)
        tensors[i] = flat->params[i].tensor;
    td_status status = td_broadcast_coalesced(tensors, flat->count, td_get_global_rank(group, 0),
                                              group, NULL);
    free(tensors);
    return status;
}

/* ---- Records ----------------------------------------------------------------------------------------------- */

/* What makes the parameter contiguous, as it will be in the flat. */
static struct td__deferred *record_of(const struct td__fsdp_param *param)
{
    const td_tensor *tensor = param->tensor;
    td_tensor *dense = td__empty_like(tensor);
    td_status status = dense ? td__deferred_add_copy(dense, tensor) : td__error_status();
    struct td__deferred *record = NULL;
    if (!status && tensor->layout.numel)
        record = td__deferred_copy(td__deferred_of(dense->storage));
    else if (!status)
        record = td__deferred_create(param->flat->device, 0);
    td_tensor_release(dense);
    return record;
}

static td_status make_records(struct td__fsdp_flat *flat)
{
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        if (td_tensor_is_meta(param->tensor) && !(param->deferred = record_of(param)))
            return td__error_status();
    }
    return TD_OK;
}

/* For each parameter whether rank 0 has a record, and that. */
static td_status pack(const struct td__fsdp_flat *flat, struct td__buffer *packed)
{
    for (int i = 0; i < flat->count; i++) {
        td__buffer_put_u8(packed, flat->params[i].deferred != NULL);
        if (flat->params[i].deferred)
            td__deferred_put(packed, flat->params[i].deferred);
    }
    return packed->failed ? td__fail_nomem("td_fsdp") : TD_OK;
}

static td_status unpack(struct td__fsdp_flat *flat, td_bytes packed)
{
    struct td__reader reader = td__reader_of(packed.data, packed.size);
    for (int i = 0; i < flat->count; i++) {
        struct td__fsdp_param *param = &flat->params[i];
        td__deferred_destroy(param->deferred);
        param->deferred = NULL;
        size_t bytes = (size_t)param->whole.numel * td_dtype_size(flat->dtype);
        if (td__reader_u8(&reader) &&
            !(param->deferred = td__deferred_get(&reader, flat->device, bytes)))
            return td__error_status();
    }
    return reader.failed ? td_fail(TD_ERR_INVALID, "td_fsdp: rank 0 has sent too little") : TD_OK;
}

static td_status share_records(struct td__fsdp_flat *flat, td_group *group)
{
    struct td__buffer mine = {0};
    td_bytes packed = {0};
    td_status status = TD_OK;
    if (group->rank == 0) {
        status = pack(flat, &mine);
        packed = (td_bytes){.data = (char *)mine.data, .size = status ? 0 : mine.size};
    }
    td_status sent = td_broadcast_object_list(&packed, 1, td_get_global_rank(group, 0), group);
    status = status ? status : sent;
    if (group->rank == 0) {
        td__buffer_free(&mine);
        return status;
    }
    if (!status)
        status = unpack(flat, packed);
    td_bytes_free(&packed);
    return status;
}

td_status td__flat_share_values(struct td__fsdp_flat *flat, bool has_values)
{
    td_group *group = flat->unit->ranks->group;
    int32_t deferred = 0;
    for (int i = 0; i < flat->count; i++)
        deferred |= td_tensor_is_meta(flat->params[i].tensor);
    if (group->size > 1)
        TD_TRY(td_group_all_reduce(&deferred, &deferred, 1, TD_I32, TD_MAX, group, NULL));
    flat->is_deferred = deferred;
    flat->has_values = has_values;
    if (!deferred)
        return group->size > 1 ? broadcast_now(flat, group) : TD_OK;
    TD_TRY(make_records(flat));
    return group->size > 1 ? share_records(flat, group) : TD_OK;
}

/* ---- Values ------------------------------------------------------------------------------------------------ */

/* Of rank 0's record; only where they are wanted. */
static td_status compute(struct td__fsdp_param *param, td_tensor **whole)
{
    struct td__deferred *record = param->deferred;
    param->deferred = NULL;
    if (!param->flat->has_values || !param->count) {
        td__deferred_destroy(record);
        return TD_OK;
    }
    struct td__storage *storage = td__deferred_make(record);
    td__deferred_destroy(record);
    if (!storage) {
        td_status status = td__error_status();
        char *reason = strdup(td__error_text());
        td_fail(status, "td_fsdp: the initial values of the parameter \"%s\": %s", param->name,
                reason ? reason : "");
        free(reason);
        return status;
    }
    struct td__layout layout = param->whole;
    layout.dtype = param->flat->dtype;
    *whole = td__tensor_over(storage, 0, &layout);
    td__storage_release(storage);
    return *whole ? TD_OK : TD_ERR_NOMEM;
}

td_status td__fsdp_initial(struct td__fsdp_param *param, td_tensor **whole)
{
    const struct td__fsdp_flat *flat = param->flat;
    td_group *group = flat->unit->ranks->group;
    if (param->deferred)
        return compute(param, whole);
    td_tensor *all = td_tensor_is_meta(param->tensor)
                         ? td__empty("td_fsdp", param->whole.shape, param->whole.ndim, flat->dtype,
                                     flat->device)
                         : td__contiguous(param->tensor);
    if (!all)
        return td__error_status();
    td_status status = TD_OK;
    if (group->size > 1)
        status = td_broadcast(all, td_get_global_rank(group, 0), group, NULL);
    if (status)
        td_tensor_release(all);
    else
        *whole = all;
    return status;
}
