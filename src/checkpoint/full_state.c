/* The whole of a state that is divided among ranks, on rank 0: in memory, or in a file. The plan of a sharded checkpoint
 * says which rank sends what; rank 0 takes one tensor after another, chunk by chunk, so that no other rank holds more than
 * its shards, and rank 0 not more than a chunk where it writes a file.
 *
 * A failure of one rank does not end the messages, which the others wait for: it is told at the end. */
#include "base/fail.h"
#include "checkpoint/sharded.h"

#include <stdlib.h>
#include <string.h>

enum { TAG = 0 };

/* Where the bytes go on rank 0. */
struct sink {
    td_status (*put)(struct sink *sink, size_t tensor, const void *data, size_t size);
    struct td__stream_file stream;
    td_state *state;
    size_t tensor; /* that `done` bytes were put of */
    size_t done;
};

struct gathering {
    const char *call;
    struct td__coordinator coordinator;
    td_group *group; /* for the messages */
    struct td__shard_plan plan;
    const td_state *state;
    struct sink *sink;
    void *room;
    td_status status; /* the first failure of this rank */
    struct td__error error;
};

static void note(struct gathering *gathering, td_status status)
{
    if (status && !gathering->status) {
        gathering->status = status;
        td__error_save(&gathering->error);
    }
}

/* ---- Sinks ---------------------------------------------------------------------------------------------- */

static td_status put_file(struct sink *sink, size_t tensor, const void *data, size_t size)
{
    (void)tensor;
    return td__stream_put(&sink->stream, data, size);
}

static td_status put_state(struct sink *sink, size_t tensor, const void *data, size_t size)
{
    if (tensor != sink->tensor)
        sink->done = 0;
    sink->tensor = tensor;
    memcpy((char *)td_tensor_data(td_state_tensor(sink->state, (int)tensor)) + sink->done, data,
           size);
    sink->done += size;
    return TD_OK;
}

/* ---- Messages -------------------------------------------------------------------------------------------- */

/* Sends a part, or puts it. Every chunk goes out also after a failure. */
static td_status emit(struct gathering *gathering, const struct td__shard_part *part, size_t tensor)
{
    struct td__elements elements;
    uint64_t left = td__part_bytes(part);
    td_status broken = td__elements_begin(&elements, gathering->call, part);
    td_status status = TD_OK;
    note(gathering, broken);
    while (left > 0 && !status) {
        const void *data = gathering->room;
        size_t size = left < TD__SHARD_CHUNK ? (size_t)left : TD__SHARD_CHUNK;
        if (!broken)
            note(gathering, broken = td__elements_next(&elements, &data, &size));
        if (gathering->coordinator.rank != 0)
            status = td_group_send(broken ? gathering->room : data, size, TD_U8,
                                   gathering->coordinator.root, TAG, gathering->group, NULL);
        else if (!gathering->status)
            note(gathering, gathering->sink->put(gathering->sink, tensor, data, size));
        left -= size;
    }
    td__elements_end(&elements);
    return status;
}

static td_status receive(struct gathering *gathering, const struct td__claim *claim, size_t tensor)
{
    uint64_t left = (uint64_t)claim->count * td_dtype_size(claim->tensor->dtype);
    int source = td_get_global_rank(gathering->coordinator.group, claim->rank);
    while (left > 0) {
        size_t size = left < TD__SHARD_CHUNK ? (size_t)left : TD__SHARD_CHUNK;
        TD_TRY(td_group_recv(gathering->room, size, TD_U8, source, TAG, gathering->group, NULL));
        if (!gathering->status)
            note(gathering, gathering->sink->put(gathering->sink, tensor, gathering->room, size));
        left -= size;
    }
    return TD_OK;
}

/* The claims in the order in which they are put: wide elements first, tensor by tensor, in the order of the elements. Each
 * rank sends in this order, too (sharded_claims.c). */
static int compare_claims(const void *a, const void *b)
{
    const struct td__claim *x = a, *y = b;
    size_t p = td_dtype_size(x->tensor->dtype), q = td_dtype_size(y->tensor->dtype);
    if (p != q)
        return p > q ? -1 : 1;
    if (x->tensor != y->tensor)
        return x->tensor->number < y->tensor->number ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

static td_status take_all(struct gathering *gathering)
{
    struct td__shard_plan *plan = &gathering->plan;
    if (plan->chosen_count)
        qsort(plan->chosen, plan->chosen_count, sizeof plan->chosen[0], compare_claims);
    for (size_t i = 0; i < plan->chosen_count; i++) {
        const struct td__claim *claim = &plan->chosen[i];
        if (claim->rank != 0) {
            TD_TRY(receive(gathering, claim, claim->tensor->number));
            continue;
        }
        struct td__shard_part part;
        td__part_of(gathering->state, claim->number, &part);
        TD_TRY(emit(gathering, &part, claim->tensor->number));
    }
    return TD_OK;
}

static td_status send_all(struct gathering *gathering)
{
    for (int i = 0; i < gathering->plan.count; i++)
        TD_TRY(emit(gathering, &gathering->plan.mine[i], 0));
    return TD_OK;
}

/* ---- The whole --------------------------------------------------------------------------------------- */

/* A group of the same ranks, whose messages are not the program's. */
static td_status begin(struct gathering *gathering, const td_state *state, td_status mine)
{
    const struct td__coordinator *coordinator = &gathering->coordinator;
    if (!mine && !(gathering->room = calloc(1, TD__SHARD_CHUNK)))
        mine = td__fail_nomem(gathering->call);
    if (!mine)
        mine = td__same_ranks(gathering->call, coordinator, &gathering->group);
    gathering->state = state;
    return td__plan_shards(gathering->call, coordinator, state, mine, true, &gathering->plan);
}

static void end(struct gathering *gathering)
{
    td_group_destroy(gathering->group);
    td__plan_shards_free(&gathering->plan);
    free(gathering->room);
}

/* After rank 0 has opened the sink, with `status`. */
static td_status run(struct gathering *gathering, td_status status)
{
    const struct td__coordinator *coordinator = &gathering->coordinator;
    TD_TRY(td__coordinator_follow(coordinator, status));
    TD_TRY(coordinator->rank == 0 ? take_all(gathering) : send_all(gathering));
    if (gathering->status)
        td__error_restore(&gathering->error);
    return td__coordinator_agree(coordinator, gathering->status);
}

static td_status open_file(struct gathering *gathering, struct sink *sink, const char *path)
{
    const struct td__index *index = &gathering->plan.index;
    struct td__file_entry *entries = calloc(index->count + 1, sizeof *entries);
    size_t used = 0;
    if (!entries)
        return td__fail_nomem(gathering->call);
    for (size_t width = 16; width > 0; width /= 2)
        for (size_t i = 0; i < index->count; i++) {
            const struct td__sharded_tensor *tensor = index->tensors[i];
            if (td_dtype_size(tensor->dtype) != width)
                continue;
            entries[used] = (struct td__file_entry){.name = tensor->name,
                                                    .dtype = tensor->dtype,
                                                    .ndim = tensor->ndim,
                                                    .bytes = (uint64_t)tensor->numel *
                                                             td_dtype_size(tensor->dtype)};
            memcpy(entries[used++].shape, tensor->shape, sizeof tensor->shape);
        }
    td_status status = td__stream_open(&sink->stream, gathering->call, path, entries, used, NULL,
                                       0);
    free(entries);
    return status;
}

td_status td_save_full(const char *path, const td_state *state, td_group *group)
{
    struct sink sink = {.put = put_file};
    struct gathering gathering = {.call = "td_save_full", .sink = &sink};
    TD_TRY(td__coordinator_of(gathering.call, group, &gathering.coordinator));
    bool root = gathering.coordinator.rank == 0, is_open = false;
    td_status mine = TD_OK;
    if (!state || (root && !path))
        mine = td_fail(TD_ERR_INVALID, "%s: the %s is NULL", gathering.call,
                       state ? "path" : "state");
    td_status status = begin(&gathering, state, mine);
    if (!status) {
        td_status opened = root ? open_file(&gathering, &sink, path) : TD_OK;
        is_open = root && !opened;
        status = run(&gathering, opened);
    }
    struct td__error error;
    td__error_save(&error);
    if (is_open && status)
        td__stream_drop(&sink.stream);
    end(&gathering);
    if (status)
        return td__error_restore(&error);
    return td__coordinator_follow(&gathering.coordinator,
                                  is_open ? td__stream_commit(&sink.stream) : TD_OK);
}

static td_status make_state(struct gathering *gathering, struct sink *sink)
{
    const struct td__index *index = &gathering->plan.index;
    sink->state = td_state_create();
    sink->tensor = SIZE_MAX;
    if (!sink->state)
        return td__error_status();
    for (size_t i = 0; i < index->count; i++) {
        const struct td__sharded_tensor *from = index->tensors[i];
        td_tensor *tensor = td__empty(gathering->call, from->shape, from->ndim, from->dtype,
                                      td__host_device());
        td_status status = td_state_add(sink->state, from->name, tensor);
        td_tensor_release(tensor);
        TD_TRY(status);
    }
    return TD_OK;
}

td_status td_gather_state(const td_state *state, td_group *group, td_state **full)
{
    struct sink sink = {.put = put_state};
    struct gathering gathering = {.call = "td_gather_state", .sink = &sink};
    TD_TRY(td__coordinator_of(gathering.call, group, &gathering.coordinator));
    td_status mine = TD_OK;
    if (!state || !full)
        mine = td_fail(TD_ERR_INVALID, "%s: the %s is NULL", gathering.call,
                       state ? "result" : "state");
    td_status status = begin(&gathering, state, mine);
    if (!status)
        status = run(&gathering,
                     gathering.coordinator.rank == 0 ? make_state(&gathering, &sink) : TD_OK);
    struct td__error error;
    td__error_save(&error);
    end(&gathering);
    if (status) {
        td_state_destroy(sink.state);
        return td__error_restore(&error);
    }
    *full = sink.state;
    return TD_OK;
}
