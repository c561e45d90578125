/* Checkpoints of training in one file.
 *
 *     saving     each rank packs its own part; rank 0 gathers these, adds the rest and writes the file;
 *                rank 0 broadcasts its status
 *     loading    rank 0 reads the file, and broadcasts its status and the tensors, which go to the devices
 *                of each rank's parts; each rank loads its parts; all exchange their status, and restore
 *                the former values if one has failed
 */
#include "base/fail.h"
#include "checkpoint/training.h"

#include <stdlib.h>
#include <string.h>

td_status td__training_write(const char *call, const char *path, const td_training *training,
                             const td_bytes *all, int size)
{
    td_state *state = NULL;
    if (!training)
        return td_fail(TD_ERR_INVALID, "%s: the training is NULL", call);
    TD_TRY(td__training_collect(call, training, all, size, &state));
    td_status status = td__save_state(
        call, path, state, &(td_file_note){.key = "tandem.kind", .value = "training"}, 1);
    td_state_destroy(state);
    return status;
}

td_status td__training_gather(const char *call, const td_training *training,
                              struct td__coordinator *coordinator, td_bytes **all)
{
    struct td__buffer own = {0};
    td_status status = td__training_pack(call, training, &own);
    if (!status)
        status = td__coordinator_gather(coordinator, &own, all);
    td__buffer_free(&own);
    return status;
}

td_status td_training_save(const char *path, const td_training *training, td_group *group)
{
    static const char call[] = "td_training_save";
    struct td__coordinator coordinator;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    td_bytes *all = NULL;
    td_status status = TD_OK;
    TD_TRY(td__training_gather(call, training, &coordinator, &all));
    if (coordinator.rank == 0) {
        status = path ? td__training_write(call, path, training, all, coordinator.size)
                      : td_fail(TD_ERR_INVALID, "%s: the path is NULL", call);
        td__coordinator_free(&coordinator, all);
    }
    return td__coordinator_follow(&coordinator, status);
}

void td__checkpoint_free(struct td__checkpoint *read)
{
    td_state_destroy(read->state);
    td_bytes_free(&read->text);
    read->state = NULL;
}

td_status td__training_read(const char *call, const char *path, struct td__training_target *target,
                            struct td__checkpoint *read)
{
    struct td__file_header header;
    TD_TRY(td__load_state(call, path, &target->load, &read->state, &header));
    read->text = header.text;
    read->parts = target->parts;
    header.text = (td_bytes){0};
    const struct td__file_note *kind = td__header_note(&header, "tandem.kind");
    td_status status = TD_OK;
    if (!kind || strcmp(kind->value, "training") != 0)
        status = td_fail(TD_ERR_INVALID,
                         "%s: %s holds tensors, but is no checkpoint of a training; read it with "
                         "td_load_safetensors() or td_load_module()",
                         call, path);
    td__header_free(&header);
    if (status)
        td__checkpoint_free(read);
    return status;
}

td_status td__training_finish(const char *call, const struct td__coordinator *coordinator,
                              td_status status, td_state *state, td_training *training)
{
    struct td__undo *undo = NULL;
    if (!status)
        status = td__training_apply(call, training, state, coordinator, &undo);
    td_state_destroy(state);
    status = td__coordinator_agree(coordinator, status);
    if (status && undo) {
        /* Another rank has failed. */
        struct td__error error;
        td__error_save(&error);
        td__training_undo(training, undo);
        td__error_restore(&error);
    }
    td__undo_free(undo);
    return status;
}

td_status td__training_receive(const char *call, const struct td__coordinator *coordinator,
                               td_status status, struct td__checkpoint *read, td_training *training)
{
    td_state *state = NULL;
    status = td__coordinator_follow(coordinator, status);
    if (status) {
        td__checkpoint_free(read);
        return status;
    }
    TD_TRY(td__coordinator_share(call, coordinator, read, training, &state));
    return td__training_finish(call, coordinator, TD_OK, state, training);
}

td_status td_training_load(const char *path, td_training *training, td_group *group)
{
    static const char call[] = "td_training_load";
    struct td__coordinator coordinator;
    TD_TRY(td__coordinator_of(call, group, &coordinator));
    struct td__checkpoint read = {0};
    struct td__training_target target;
    int parts;
    TD_TRY(td__gather_parts(&coordinator, training, &parts));
    td_status status = TD_OK;
    if (coordinator.rank == 0) {
        status = td__training_target(training, parts, &target);
        if (!status)
            status = path ? td__training_read(call, path, &target, &read)
                          : td_fail(TD_ERR_INVALID, "%s: the path is NULL", call);
        td__training_target_free(&target);
    }
    return td__training_receive(call, &coordinator, status, &read, training);
}
