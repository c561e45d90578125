/* Who writes what of a state: each rank describes its tensors to rank 0, which merges the descriptions
 * (sharded_claims.c) and tells each rank the numbers of those that it is to write. */
#include "base/fail.h"
#include "checkpoint/sharded.h"

#include <stdlib.h>
#include <string.h>

enum { LONGEST_MESSAGE = 1 << 16 };

void td__pack_status(struct td__buffer *packed, td_status status)
{
    const char *message = status ? td__error_text() : "";
    td__buffer_put_u8(packed, (uint8_t)status);
    td__buffer_put_string(packed, message, strlen(message));
}

td_status td__unpack_status(const char *call, struct td__reader *reader, int rank)
{
    td_status status = (td_status)td__reader_u8(reader);
    struct td__span message = td__reader_string(reader, LONGEST_MESSAGE);
    if (reader->failed)
        return td_fail(TD_ERR_MISMATCH, "%s: another rank made another call", call);
    if (!status)
        return TD_OK;
    if (rank < 0)
        return td_fail(status, "%.*s", (int)message.size, message.data);
    return td_fail(status, "rank %d: %.*s", rank, (int)message.size, message.data);
}

/* ---- Describing --------------------------------------------------------------------------------------- */

void td__part_of(const td_state *state, int number, struct td__shard_part *part)
{
    td_tensor *tensor = td_state_tensor(state, number);
    const td_shard *shard = td_tensor_shard(tensor);
    const int64_t *shape = shard ? shard->shape : td_tensor_shape(tensor);
    *part = (struct td__shard_part){.name = td_state_name(state, number),
                                    .tensor = tensor,
                                    .dtype = td_tensor_dtype(tensor),
                                    .ndim = shard ? shard->ndim : td_tensor_ndim(tensor),
                                    .first = shard ? shard->offset : 0,
                                    .count = td_tensor_numel(tensor),
                                    .is_whole = !shard};
    for (int d = 0; d < part->ndim; d++)
        part->shape[d] = shape[d];
}

static td_status check_part(const char *call, const struct td__shard_part *part)
{
    if (!strcmp(part->name, "__metadata__"))
        return td_fail(TD_ERR_INVALID,
                       "%s: no tensor can have the name \"__metadata__\" in this format", call);
    if (!td__file_dtype(part->dtype))
        return td_fail(TD_ERR_UNSUPPORTED,
                       "%s: \"%.200s\" is %s, which the safetensors format does not have; save its "
                       "real and imaginary parts",
                       call, part->name, td_dtype_name(part->dtype));
    return TD_OK;
}

static void pack_part(struct td__buffer *packed, const struct td__shard_part *part)
{
    td__buffer_put_string(packed, part->name, strlen(part->name));
    td__buffer_put_u8(packed, (uint8_t)part->dtype);
    td__buffer_put_u8(packed, (uint8_t)part->ndim);
    for (int d = 0; d < part->ndim; d++)
        td__buffer_put_u64(packed, (uint64_t)part->shape[d]);
    td__buffer_put_u64(packed, (uint64_t)part->first);
    td__buffer_put_u64(packed, (uint64_t)part->count);
    td__buffer_put_u8(packed, part->is_whole);
}

static td_status describe(const char *call, const td_state *state, td_status mine,
                          struct td__buffer *packed)
{
    struct td__shard_part part;
    int count = mine ? 0 : td_state_count(state);
    for (int i = 0; i < count && !mine; i++) {
        td__part_of(state, i, &part);
        mine = check_part(call, &part);
    }
    td__pack_status(packed, mine);
    td__buffer_put_u32(packed, mine ? 0 : (uint32_t)count);
    for (int i = 0; i < count && !mine; i++) {
        td__part_of(state, i, &part);
        pack_part(packed, &part);
    }
    return packed->failed ? td__fail_nomem(call) : TD_OK;
}

/* ---- Orders ------------------------------------------------------------------------------------------- */

void td__plan_shards_free(struct td__shard_plan *plan)
{
    td__index_free(&plan->index);
    free(plan->chosen);
    free(plan->mine);
    *plan = (struct td__shard_plan){0};
}

/* On rank 0: what each rank is to write, behind the status. */
static td_status pack_orders(const char *call, const struct td__shard_plan *plan, td_status status,
                             int ranks, struct td__buffer *orders)
{
    size_t at = 0;
    for (int r = 0; r < ranks; r++) {
        size_t begin = at;
        while (!status && at < plan->chosen_count && plan->chosen[at].rank == r)
            at++;
        td__pack_status(&orders[r], status);
        td__buffer_put_u32(&orders[r], (uint32_t)(at - begin));
        for (size_t i = begin; i < at; i++)
            td__buffer_put_u32(&orders[r], (uint32_t)plan->chosen[i].number);
        if (orders[r].failed)
            return td__fail_nomem(call);
    }
    return TD_OK;
}

static td_status unpack_orders(const char *call, td_bytes packed, const td_state *state,
                               struct td__shard_plan *plan)
{
    struct td__reader reader = td__reader_of(packed.data, packed.size);
    TD_TRY(td__unpack_status(call, &reader, -1));
    uint32_t count = td__reader_u32(&reader);
    if (reader.failed || (uint64_t)count > packed.size)
        return td_fail(TD_ERR_MISMATCH, "%s: rank 0 made another call", call);
    plan->mine = calloc((size_t)count + 1, sizeof plan->mine[0]);
    if (!plan->mine)
        return td__fail_nomem(call);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = td__reader_u32(&reader);
        if (reader.failed || number >= (uint32_t)td_state_count(state))
            return td_fail(TD_ERR_MISMATCH, "%s: rank 0 made another call", call);
        td__part_of(state, (int)number, &plan->mine[plan->count++]);
    }
    return TD_OK;
}

/* Sends each rank its orders. */
static td_status share_orders(const char *call, const struct td__coordinator *coordinator,
                              const td_state *state, td_status status, struct td__shard_plan *plan)
{
    int ranks = coordinator->rank == 0 ? coordinator->size : 0;
    struct td__buffer *orders = calloc((size_t)ranks + 1, sizeof *orders);
    td_bytes *list = calloc((size_t)ranks + 1, sizeof *list), own = {0};
    td_status result = orders && list ? TD_OK : td__fail_nomem(call);
    if (!result && ranks)
        result = pack_orders(call, plan, status, ranks, orders);
    for (int r = 0; r < ranks && !result; r++)
        list[r] = (td_bytes){.data = (char *)orders[r].data, .size = orders[r].size};
    if (!result && coordinator->alone)
        result = unpack_orders(call, list[0], state, plan);
    else if (!result) {
        result = td_scatter_object_list(&own, ranks ? list : NULL, ranks, coordinator->root,
                                        coordinator->group);
        if (!result)
            result = unpack_orders(call, own, state, plan);
        td_bytes_free(&own);
    }
    for (int r = 0; r < ranks && orders; r++)
        td__buffer_free(&orders[r]);
    free(orders);
    free(list);
    return result;
}

td_status td__plan_shards(const char *call, const struct td__coordinator *coordinator,
                          const td_state *state, td_status mine, bool to_root,
                          struct td__shard_plan *plan)
{
    struct td__buffer packed = {0};
    td_bytes *all = NULL;
    *plan = (struct td__shard_plan){0};
    td_status status = describe(call, state, mine, &packed);
    if (!status)
        status = td__coordinator_gather(coordinator, &packed, &all);
    td__buffer_free(&packed);
    if (status)
        return status;
    if (coordinator->rank == 0)
        status = td__plan_merge(call, all, coordinator->size, to_root, plan);
    td__coordinator_free(coordinator, all);
    status = share_orders(call, coordinator, state, status, plan);
    if (status)
        td__plan_shards_free(plan);
    return status;
}
