/* Coordination of a checkpoint over the ranks of a group: each step ends with an exchange of its
 * status, so that no rank waits for one that has failed, and all report the same error. A status is
 * sent as one byte and the error text. */
#include "base/fail.h"
#include "checkpoint/training.h"

#include <stdlib.h>
#include <string.h>

enum { LONGEST_MESSAGE = 1 << 16 };

td_status td__coordinator_of(const char *call, td_group *group, struct td__coordinator *coordinator)
{
    *coordinator = (struct td__coordinator){.group = group, .size = 1};
    coordinator->alone = !group && !td_is_initialized();
    if (coordinator->alone)
        return TD_OK;
    coordinator->rank = td_get_rank(group);
    coordinator->size = td_get_world_size(group);
    coordinator->root = td_get_global_rank(group, 0);
    if (coordinator->rank < 0 || coordinator->size < 1 || coordinator->root < 0)
        return td_fail(TD_ERR_STATE, "%s: this rank is not in the group", call);
    coordinator->alone = coordinator->size == 1;
    return TD_OK;
}

/* ---- Statuses ------------------------------------------------------------------------------------- */

static td_status pack_status(td_status status, struct td__buffer *packed)
{
    const char *message = status ? td__error_text() : "";
    td__buffer_put_u8(packed, (uint8_t)status);
    td__buffer_put_string(packed, message, strlen(message));
    return packed->failed ? td__fail_nomem("a checkpoint") : TD_OK;
}

/* Sets the last error from a status of another rank. */
static td_status fail_with_status(td_bytes packed, int rank)
{
    struct td__reader reader = td__reader_of(packed.data, packed.size);
    td_status status = (td_status)td__reader_u8(&reader);
    struct td__span message = td__reader_string(&reader, LONGEST_MESSAGE);
    if (!td__reader_done(&reader))
        return td_fail(TD_ERR_MISMATCH, "a checkpoint: another rank made another call");
    if (!status)
        return TD_OK;
    if (rank < 0)
        return td_fail(status, "%.*s", (int)message.size, message.data);
    return td_fail(status, "rank %d: %.*s", rank, (int)message.size, message.data);
}

td_status td__coordinator_follow(const struct td__coordinator *coordinator, td_status mine)
{
    if (coordinator->alone)
        return mine;
    struct td__buffer packed = {0};
    td_status status = pack_status(coordinator->rank == 0 ? mine : TD_OK, &packed);
    td_bytes result = {0};
    if (coordinator->rank == 0)
        result = (td_bytes){.data = (char *)packed.data, .size = packed.size};
    if (!status)
        status = td_broadcast_object_list(&result, 1, coordinator->root, coordinator->group);
    if (!status)
        status = fail_with_status(result, -1);
    if (coordinator->rank != 0)
        td_bytes_free(&result);
    td__buffer_free(&packed);
    return status;
}

td_status td__coordinator_agree(const struct td__coordinator *coordinator, td_status mine)
{
    if (coordinator->alone)
        return mine;
    struct td__buffer packed = {0};
    td_bytes *results = calloc((size_t)coordinator->size, sizeof *results);
    td_status status = results ? pack_status(mine, &packed) : td__fail_nomem("a checkpoint");
    if (!status)
        status = td_all_gather_object(results, coordinator->size,
                                      (td_bytes){.data = (char *)packed.data, .size = packed.size},
                                      coordinator->group);
    bool gathered = !status;
    for (int r = 0; r < coordinator->size && !status; r++)
        status = fail_with_status(results[r], r);
    for (int r = 0; r < coordinator->size && gathered; r++)
        td_bytes_free(&results[r]);
    free(results);
    td__buffer_free(&packed);
    return status;
}

/* ---- Data ----------------------------------------------------------------------------------------- */

td_status td__coordinator_gather(const struct td__coordinator *coordinator,
                                 const struct td__buffer *mine, td_bytes **all)
{
    *all = NULL;
    td_bytes own = {.data = (char *)mine->data, .size = mine->size};
    td_bytes *list = coordinator->rank == 0 ? calloc((size_t)coordinator->size, sizeof *list)
                                            : NULL;
    if (coordinator->rank == 0 && !list)
        return td__fail_nomem("a checkpoint");
    if (coordinator->alone) {
        list[0] = (td_bytes){.data = malloc(own.size + 1), .size = own.size};
        if (list[0].data)
            memcpy(list[0].data, own.data, own.size);
    }
    td_status status = TD_OK;
    if (coordinator->alone && !list[0].data)
        status = td__fail_nomem("a checkpoint");
    else if (!coordinator->alone)
        status = td_gather_object(own, list, list ? coordinator->size : 0, coordinator->root,
                                  coordinator->group);
    if (status)
        free(list);
    else
        *all = list;
    return status;
}

void td__coordinator_free(const struct td__coordinator *coordinator, td_bytes *all)
{
    for (int r = 0; all && r < coordinator->size; r++)
        td_bytes_free(&all[r]);
    free(all);
}

/* Broadcasts the names, dtypes and shapes of a state as a file header, whose length field has the
 * size of the data instead. */
static td_status share_header(const char *call, const struct td__coordinator *coordinator,
                              const td_state *state, td_bytes *header)
{
    if (coordinator->rank != 0)
        return td_broadcast_object_list(header, 1, coordinator->root, coordinator->group);
    struct td__file_plan plan;
    /* Rank 0 takes part in the broadcast also if it is out of memory. */
    td_status planned = td__plan_file(call, "the checkpoint", state, NULL, 0, &plan);
    if (!planned)
        memcpy(plan.text.data, &plan.data_size, sizeof plan.data_size);
    td_bytes text = {.data = (char *)plan.text.data, .size = plan.text.size};
    td_status status = td_broadcast_object_list(&text, 1, coordinator->root, coordinator->group);
    td__plan_free(&plan);
    return planned ? planned : status;
}

static td_status make_others(const char *call, td_bytes text, td_state **state)
{
    uint64_t data_size = 0;
    if (text.size < TD__HEADER_AT)
        return td_fail(TD_ERR_MISMATCH, "%s: rank 0 sent no header", call);
    struct td__file_header header;
    memcpy(&data_size, text.data, sizeof data_size);
    TD_TRY(td__header_parse("what rank 0 sends", text.data + TD__HEADER_AT,
                            text.size - TD__HEADER_AT, data_size, &header));
    *state = td__state_of_header(call, &header);
    td__header_free(&header);
    return *state ? TD_OK : TD_ERR_NOMEM;
}

td_status td__coordinator_share(const char *call, const struct td__coordinator *coordinator,
                                td_state *state, td_state **result)
{
    if (coordinator->alone) {
        *result = state;
        return TD_OK;
    }
    td_bytes header = {0};
    td_status status = share_header(call, coordinator, state, &header);
    if (!status && coordinator->rank != 0)
        status = make_others(call, header, &state);
    td_bytes_free(&header);
    status = td__coordinator_agree(coordinator, status);
    for (int i = 0; i < td_state_count(state) && !status; i++)
        if (td_tensor_numel(td_state_tensor(state, i)) > 0)
            status = td_broadcast(td_state_tensor(state, i), coordinator->root, coordinator->group,
                                  NULL);
    if (status)
        td_state_destroy(state);
    else
        *result = state;
    return status;
}
