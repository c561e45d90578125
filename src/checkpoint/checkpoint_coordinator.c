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

td_status td__same_ranks(const char *call, const struct td__coordinator *coordinator,
                         td_group **group)
{
    *group = NULL;
    if (coordinator->alone)
        return TD_OK;
    int *ranks = malloc((size_t)coordinator->size * sizeof *ranks);
    td_status status = ranks ? td_get_process_group_ranks(coordinator->group, ranks)
                             : td__fail_nomem(call);
    td_group_options options = {.world = coordinator->group};
    if (!status)
        status = td_new_group(ranks, coordinator->size, &options, group);
    free(ranks);
    return status;
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

/* Broadcasts the parts, in one byte, and the header of the file. */
static td_status share_text(const struct td__coordinator *coordinator,
                            const struct td__checkpoint *read, td_bytes *text)
{
    if (coordinator->rank != 0)
        return td_broadcast_object_list(text, 1, coordinator->root, coordinator->group);
    struct td__buffer packed = {0};
    td__buffer_put_u8(&packed, (uint8_t)read->parts);
    td__buffer_put(&packed, read->text.data, read->text.size);
    /* Rank 0 takes part in the broadcast also if it is out of memory. */
    td_bytes sent = {.data = (char *)packed.data, .size = packed.failed ? 0 : packed.size};
    td_status status = td_broadcast_object_list(&sent, 1, coordinator->root, coordinator->group);
    if (packed.failed)
        status = td__fail_nomem("a checkpoint");
    td__buffer_free(&packed);
    return status;
}

/* On ranks other than 0: tensors for what rank 0 sends. */
static td_status make_others(const char *call, td_bytes text, const td_training *training,
                             td_state **state)
{
    uint64_t data_size = 0;
    if (text.size < 1 + TD__HEADER_AT)
        return td_fail(TD_ERR_MISMATCH, "%s: rank 0 sent no header", call);
    int parts = (uint8_t)text.data[0];
    memcpy(&data_size, text.data + 1, sizeof data_size);
    struct td__file_header header;
    TD_TRY(td__header_parse("what rank 0 sends", text.data + 1 + TD__HEADER_AT,
                            text.size - 1 - TD__HEADER_AT, data_size, &header));
    struct td__training_target target;
    td_status status = td__training_target(training, parts, &target);
    if (!status)
        *state = td__state_of_header(call, "the checkpoint", &header, &target.load);
    if (!*state)
        status = td__error_status();
    td__training_target_free(&target);
    td__header_free(&header);
    return status;
}

/* Memory of the host for the largest tensor of an accelerator; NULL if there is none. */
static td_status make_room(const td_state *state, void **room)
{
    size_t largest = 0;
    for (int i = 0; i < td_state_count(state); i++) {
        const td_tensor *tensor = td_state_tensor(state, i);
        if (!td__on_host(tensor) && td_tensor_nbytes(tensor) > largest)
            largest = td_tensor_nbytes(tensor);
    }
    *room = largest ? malloc(largest) : NULL;
    return largest && !*room ? td__fail_nomem("a checkpoint") : TD_OK;
}

/* Broadcasts one tensor, by way of `room` if it is not the host's. Where a copy fails, which sets *copied, the broadcast
 * takes place all the same, since the other ranks wait for it. */
static td_status share_tensor(const char *call, const struct td__coordinator *coordinator,
                              td_tensor *tensor, void *room, td_status *copied)
{
    size_t bytes = td_tensor_nbytes(tensor);
    bool root = coordinator->rank == 0, here = td__on_host(tensor);
    struct td__place there = td__place_of(tensor);
    struct td__place host = {.device = td__host_device(), .data = here ? there.data : room};
    if (bytes == 0)
        return TD_OK;
    if (!here && root && !*copied)
        *copied = td__copy_between(call, &host, &there, bytes, false);
    TD_TRY(
        td_group_broadcast(host.data, bytes, TD_U8, coordinator->root, coordinator->group, NULL));
    if (!here && !root && !*copied)
        *copied = td__copy_between(call, &there, &host, bytes, false);
    return TD_OK;
}

static td_status share_tensors(const char *call, const struct td__coordinator *coordinator,
                               td_state *state, void *room)
{
    td_status status = TD_OK, copied = TD_OK;
    for (int i = 0; i < td_state_count(state) && !status; i++)
        status = share_tensor(call, coordinator, td_state_tensor(state, i), room, &copied);
    return status ? status : td__coordinator_agree(coordinator, copied);
}

td_status td__coordinator_share(const char *call, const struct td__coordinator *coordinator,
                                struct td__checkpoint *read, const td_training *training,
                                td_state **result)
{
    td_state *state = read->state;
    td_bytes text = {0};
    void *room = NULL;
    td_status status = TD_OK;
    read->state = NULL;
    if (!coordinator->alone) {
        status = share_text(coordinator, read, &text);
        if (!status && coordinator->rank != 0)
            status = make_others(call, text, training, &state);
        if (!status)
            status = make_room(state, &room);
        status = td__coordinator_agree(coordinator, status);
        if (!status)
            status = share_tensors(call, coordinator, state, room);
    }
    free(room);
    td_bytes_free(&text);
    td__checkpoint_free(read);
    if (status)
        td_state_destroy(state);
    else
        *result = state;
    return status;
}
