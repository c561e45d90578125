/* Saving a sharded checkpoint.
 *
 *     all ranks     describe their tensors; rank 0 decides who writes what, and makes a temporary directory
 *     each rank     writes and syncs its file there
 *     rank 0        gathers sizes and checksums, writes the index, syncs and renames the directory
 *     all ranks     get the status of rank 0
 *
 * An asynchronous one copies the tensors after the first step; the others are another thread's, on a group of its own. */
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/sharded.h"

#include <stdlib.h>
#include <string.h>

static void free_save(struct td__sharded_save *save)
{
    td__sharded_directory_drop(&save->directory);
    td__plan_shards_free(&save->plan);
    td__snapshot_free(&save->snapshot);
    free(save->temporary);
    free(save->path);
    free(save->after.directory);
    td_state_destroy(save->state);
}

/* ---- The beginning -------------------------------------------------------------------------------------- */

static td_status add_notes(const struct td__save_request *request, struct td__index *index)
{
    for (int i = 0; i < request->note_count; i++) {
        const td_file_note *given = &request->notes[i];
        if (!given->key || !given->value)
            return td_fail(TD_ERR_INVALID, "%s: note %d has a key or a value that is NULL",
                           request->call, i);
        struct td__shard_note *note = td__list_grow((void **)&index->notes, &index->note_count,
                                                    &index->note_capacity, sizeof *note);
        if (!note)
            return td__fail_nomem(request->call);
        note->key = strdup(given->key);
        note->value = strdup(given->value);
        if (!note->key || !note->value)
            return td__fail_nomem(request->call);
    }
    return TD_OK;
}

/* Rank 0's part. */
static td_status prepare(struct td__save_request *request, struct td__sharded_save *save)
{
    if (!request->path || !*request->path)
        return td_fail(TD_ERR_INVALID, "%s: the directory is NULL or empty", request->call);
    save->plan.index.is_training = request->is_training;
    TD_TRY(add_notes(request, &save->plan.index));
    if (request->after.directory) {
        TD_TRY(td__atomic_file_directory(request->call, request->after.directory));
        td__sharded_directory_sweep(request->after.directory);
    }
    return td__sharded_directory_open(&save->directory, request->call, request->path);
}

/* Rank 0 tells its status, and the directory. */
static td_status share_directory(struct td__sharded_save *save, td_status status)
{
    const struct td__coordinator *coordinator = &save->coordinator;
    struct td__buffer packed = {0};
    td_bytes bytes = {0};
    bool root = coordinator->rank == 0;
    if (root) {
        const char *temporary = status ? "" : save->directory.temporary;
        const char *path = status ? "" : save->directory.path;
        td__pack_status(&packed, status);
        td__buffer_put_string(&packed, temporary, strlen(temporary));
        td__buffer_put_string(&packed, path, strlen(path));
        bytes = (td_bytes){.data = (char *)packed.data, .size = packed.failed ? 0 : packed.size};
    }
    status = TD_OK;
    if (!coordinator->alone)
        status = td_broadcast_object_list(&bytes, 1, coordinator->root, coordinator->group);
    struct td__reader reader = td__reader_of(bytes.data, bytes.size);
    if (!status)
        status = td__unpack_status(save->call, &reader, -1);
    if (!status) {
        struct td__span temporary = td__reader_string(&reader, 1 << 16);
        struct td__span path = td__reader_string(&reader, 1 << 16);
        save->temporary = td__text_copy(temporary.data ? temporary.data : "", temporary.size);
        save->path = td__text_copy(path.data ? path.data : "", path.size);
        if (!save->temporary || !save->path)
            status = td__fail_nomem(save->call);
    }
    if (!root)
        td_bytes_free(&bytes);
    td__buffer_free(&packed);
    return status;
}

static td_status begin(struct td__save_request *request, td_status mine,
                       struct td__sharded_save *save)
{
    save->after = request->after;
    request->after.directory = NULL;
    td_status status = td__plan_shards(request->call, &save->coordinator, request->state, mine,
                                       false, &save->plan);
    if (status)
        return status;
    if (save->coordinator.rank == 0) {
        request->after = save->after;
        status = prepare(request, save);
        request->after.directory = NULL;
    }
    return share_directory(save, status);
}

/* ---- The end --------------------------------------------------------------------------------------------- */

static td_status read_piece(const char *call, struct td__reader *reader,
                            const struct td__claim *claim)
{
    uint64_t bytes = (uint64_t)claim->count * td_dtype_size(claim->tensor->dtype);
    struct td__shard_piece *piece = td__index_add_piece(claim->tensor);
    if (!piece)
        return td__fail_nomem(call);
    *piece = (struct td__shard_piece){.file = claim->rank,
                                      .first = claim->first,
                                      .count = claim->count,
                                      .offset = td__reader_u64(reader),
                                      .sum_count = td__sum_blocks(bytes)};
    piece->sums = malloc((piece->sum_count + 1) * sizeof piece->sums[0]);
    if (!piece->sums)
        return td__fail_nomem(call);
    for (size_t i = 0; i < piece->sum_count; i++)
        piece->sums[i] = td__reader_u32(reader);
    return TD_OK;
}

static int compare_pieces(const void *a, const void *b)
{
    const struct td__shard_piece *x = a, *y = b;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Completes the index by what the ranks report. */
static td_status read_reports(struct td__sharded_save *save, const td_bytes *reports)
{
    struct td__shard_plan *plan = &save->plan;
    struct td__index *index = &plan->index;
    size_t at = 0;
    for (int r = 0; r < save->coordinator.size; r++) {
        struct td__reader reader = td__reader_of(reports[r].data, reports[r].size);
        TD_TRY(td__unpack_status(save->call, &reader, save->coordinator.alone ? -1 : r));
        uint64_t *size = td__list_grow((void **)&index->sizes, &index->file_count,
                                       &index->file_capacity, sizeof *size);
        if (!size)
            return td__fail_nomem(save->call);
        *size = td__reader_u64(&reader);
        for (; at < plan->chosen_count && plan->chosen[at].rank == r; at++)
            TD_TRY(read_piece(save->call, &reader, &plan->chosen[at]));
        if (!td__reader_done(&reader))
            return td_fail(TD_ERR_MISMATCH, "%s: rank %d made another call", save->call, r);
    }
    for (size_t i = 0; i < index->count; i++)
        if (index->tensors[i]->count)
            qsort(index->tensors[i]->pieces, index->tensors[i]->count,
                  sizeof(struct td__shard_piece), compare_pieces);
    return TD_OK;
}

/* Rank 0's part. */
static td_status commit(struct td__sharded_save *save, const td_bytes *reports)
{
    struct td__buffer text = {0};
    td_status status = read_reports(save, reports);
    if (!status)
        status = td__index_write(save->call, save->path, &save->plan.index, &text);
    if (!status)
        status = td__sharded_directory_commit(&save->directory, &text);
    td__buffer_free(&text);
    if (!status && save->after.directory)
        td__numbered_prune(save->call, save->after.directory, save->after.step, save->after.keep);
    return status;
}

td_status td__sharded_finish(struct td__sharded_save *save)
{
    const struct td__coordinator *coordinator = &save->coordinator;
    struct td__buffer written = {0}, report = {0};
    td_bytes *reports = NULL;
    td_status status = td__shard_write(save->call, save->temporary, save->path, coordinator->rank,
                                       save->plan.mine, save->plan.count, &written);
    td__pack_status(&report, status);
    if (!status)
        td__buffer_put(&report, written.data, written.size);
    status = report.failed ? td__fail_nomem(save->call)
                           : td__coordinator_gather(coordinator, &report, &reports);
    td__buffer_free(&written);
    td__buffer_free(&report);
    if (!status) {
        if (coordinator->rank == 0)
            status = commit(save, reports);
        td__coordinator_free(coordinator, reports);
        if (coordinator->rank == 0 && status) {
            /* Before the others know, so that nothing is left when they return. */
            struct td__error error;
            td__error_save(&error);
            td__sharded_directory_drop(&save->directory);
            td__error_restore(&error);
        }
        status = td__coordinator_follow(coordinator, status);
    }
    struct td__error error;
    td__error_save(&error);
    free_save(save);
    return status ? td__error_restore(&error) : TD_OK;
}

/* ---- Calls ----------------------------------------------------------------------------------------------- */

/* Copies what this rank is to write, and starts a thread. */
static td_status go_on_async(struct td__sharded_save *save, td_async_save **handle)
{
    td_async_save *async = NULL;
    td_status status = td__snapshot_take(save->call, save->plan.mine, save->plan.count,
                                         &save->snapshot);
    if (!status)
        status = td__async_create(save->call, &save->coordinator, &async);
    status = td__coordinator_agree(&save->coordinator, status);
    if (!status) {
        td__async_start(async, save);
        *handle = async;
        return TD_OK;
    }
    struct td__error error;
    td__error_save(&error);
    if (async)
        td__async_cancel(async);
    free_save(save);
    return td__error_restore(&error);
}

td_status td__save_sharded(struct td__save_request *request, td_group *group, td_status mine,
                           td_async_save **async)
{
    struct td__sharded_save save = {.call = request->call, .directory = {.lock = -1}};
    if (async)
        *async = NULL;
    td_status status = td__coordinator_of(request->call, group, &save.coordinator);
    if (status) {
        free(request->after.directory);
        return status;
    }
    td__async_await_turn();
    if (async && !mine) {
        /* The names must outlive the caller's state. */
        request->state = save.state = td_state_part(request->state, "");
        mine = save.state ? TD_OK : td__error_status();
    }
    status = begin(request, mine, &save);
    if (!status)
        return async ? go_on_async(&save, async) : td__sharded_finish(&save);
    struct td__error error;
    td__error_save(&error);
    free_save(&save);
    return td__error_restore(&error);
}

td_status td_save_sharded(const char *directory, const td_state *state, const td_file_note *notes,
                          int count, td_group *group, td_async_save **save)
{
    static const char call[] = "td_save_sharded";
    struct td__save_request request = {
        .call = call, .path = directory, .state = state, .notes = notes, .note_count = count};
    td_status status = TD_OK;
    if (!state || count < 0 || (count && !notes)) {
        status = td_fail(TD_ERR_INVALID, "%s: the %s", call,
                         !state ? "state is NULL" : "notes are NULL, or their count is negative");
        request.note_count = 0;
    }
    return td__save_sharded(&request, group, status, save);
}
