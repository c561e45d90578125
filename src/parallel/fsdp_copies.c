#include "parallel/fsdp_copies.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

enum { STAGES = 2 };
static const size_t stage_bytes = (size_t)4 << 20;

struct copy {
    char *to;
    struct td__place from;
    size_t bytes;
};

/* Pinned memory, and what it is full of when `full` has passed. */
struct stage {
    void *data, *arg;
    td_event *full;
    size_t bytes; /* 0: it is empty */
};

/* The copies from one device. */
struct source {
    td_device *device;
    struct copy *copies;
    int count, capacity;
    td_stream *stream; /* NULL: the host; or there was no copy yet */
    td_event *ready;
    struct stage stages[STAGES];
};

struct td__copies {
    struct source *sources;
    int count;
};

/* How far the bytes of all copies of a device have come. */
struct cursor {
    int copy;
    size_t at;
};

/* ---- Adding -------------------------------------------------------------------------------------------------------- */

struct td__copies *td__copies_create(void)
{
    struct td__copies *copies = calloc(1, sizeof *copies);
    if (!copies)
        td__fail_nomem("td_fsdp");
    return copies;
}

void td__copies_clear(struct td__copies *copies)
{
    for (int i = 0; i < copies->count; i++)
        copies->sources[i].count = 0;
}

static struct source *source_of(struct td__copies *copies, td_device *device)
{
    for (int i = 0; i < copies->count; i++)
        if (copies->sources[i].device == device)
            return &copies->sources[i];
    struct source *sources = realloc(copies->sources,
                                     (size_t)(copies->count + 1) * sizeof *sources);
    if (!sources)
        return NULL;
    copies->sources = sources;
    sources[copies->count] = (struct source){.device = device};
    return &sources[copies->count++];
}

td_status td__copies_add(struct td__copies *copies, char *to, const struct td__place *from,
                         size_t bytes)
{
    if (!bytes)
        return TD_OK;
    struct source *source = source_of(copies,
                                      from->device->is_host ? td__host_device() : from->device);
    if (!source)
        return td__fail_nomem("td_fsdp");
    if (source->count == source->capacity) {
        int capacity = 2 * source->capacity + 64;
        struct copy *grown = realloc(source->copies, (size_t)capacity * sizeof *grown);
        if (!grown)
            return td__fail_nomem("td_fsdp");
        source->copies = grown;
        source->capacity = capacity;
    }
    struct copy *copy = &source->copies[source->count++];
    *copy = (struct copy){to, *from, bytes};
    copy->from.block = NULL; /* the caller waits before it frees it */
    return TD_OK;
}

static td_status mark(struct source *source)
{
    if (source->device->is_host || !source->count)
        return TD_OK;
    if (!source->stream)
        source->stream = td_stream_create(source->device, 0);
    if (!source->ready && source->stream)
        source->ready = td_event_create(source->device, NULL);
    if (!source->ready)
        return td__error_status();
    return td_event_record(source->ready, td__stream_of(source->device));
}

td_status td__copies_mark(struct td__copies *copies)
{
    for (int i = 0; i < copies->count; i++)
        TD_TRY(mark(&copies->sources[i]));
    return TD_OK;
}

bool td__copies_have_device(const struct td__copies *copies)
{
    bool waits = false;
    for (int i = 0; i < copies->count; i++)
        waits |= copies->sources[i].count && !copies->sources[i].device->is_host;
    return waits;
}

/* ---- Stages -------------------------------------------------------------------------------------------------------- */

/* What is left of the copy at the cursor, `most` bytes at most; moves the cursor behind it. No bytes: there is no more. */
static struct copy advance(const struct source *source, struct cursor *cursor, size_t most)
{
    if (cursor->copy == source->count)
        return (struct copy){0};
    struct copy piece = source->copies[cursor->copy];
    size_t left = piece.bytes - cursor->at;
    piece.to += cursor->at;
    piece.from.data = (char *)piece.from.data + cursor->at;
    piece.bytes = left < most ? left : most;
    cursor->at += piece.bytes;
    if (piece.bytes == left)
        *cursor = (struct cursor){.copy = cursor->copy + 1};
    return piece;
}

static td_status open_stage(const struct source *source, struct stage *stage)
{
    if (!stage->data)
        stage->data = td__pinned_alloc(source->device, stage_bytes, &stage->arg);
    if (stage->data && !stage->full)
        stage->full = td_event_create(source->device, NULL);
    return stage->full ? TD_OK : td__error_status();
}

/* Enqueues the copies of the next bytes to a stage, on the current stream. */
static td_status fill(struct source *source, struct stage *stage, struct cursor *cursor)
{
    if (cursor->copy == source->count)
        return TD_OK;
    TD_TRY(open_stage(source, stage));
    while (stage->bytes < stage_bytes) {
        struct copy piece = advance(source, cursor, stage_bytes - stage->bytes);
        struct td__place to = {.device = td__host_device(),
                               .data = (char *)stage->data + stage->bytes,
                               .pinned = stage->arg};
        if (!piece.bytes)
            break;
        TD_TRY(td__copy_between("td_fsdp", &to, &piece.from, piece.bytes, true));
        stage->bytes += piece.bytes;
    }
    return td_event_record(stage->full, source->stream);
}

static td_status empty(const struct source *source, struct stage *stage, struct cursor *cursor)
{
    TD_TRY(td_event_synchronize(stage->full));
    for (size_t done = 0; done < stage->bytes;) {
        struct copy piece = advance(source, cursor, stage->bytes - done);
        memcpy(piece.to, (char *)stage->data + done, piece.bytes);
        done += piece.bytes;
    }
    stage->bytes = 0;
    return TD_OK;
}

static td_status run_stages(struct source *source)
{
    struct cursor filled = {0}, emptied = {0};
    struct stage *stages = source->stages;
    stages[0].bytes = stages[1].bytes = 0;
    TD_TRY(td_stream_wait_event(source->stream, source->ready));
    int next = 0;
    do {
        if (stages[next].bytes)
            TD_TRY(empty(source, &stages[next], &emptied));
        TD_TRY(fill(source, &stages[next], &filled));
        next = (next + 1) % STAGES;
    } while (stages[0].bytes || stages[1].bytes);
    return TD_OK;
}

static td_status run_device(struct source *source)
{
    TD_STREAM_SCOPE(source->stream);
    td_status status = run_stages(source);
    if (!status)
        return TD_OK;
    struct td__error error;
    td__error_save(&error);
    td_stream_synchronize(source->stream); /* what was enqueued before the failure */
    return td__error_restore(&error);
}

td_status td__copies_run(struct td__copies *copies)
{
    for (int i = 0; i < copies->count; i++) {
        struct source *source = &copies->sources[i];
        if (!source->device->is_host && source->count)
            TD_TRY(run_device(source));
        for (int k = 0; source->device->is_host && k < source->count; k++)
            memcpy(source->copies[k].to, source->copies[k].from.data, source->copies[k].bytes);
    }
    return TD_OK;
}

/* ---- Freeing ------------------------------------------------------------------------------------------------------- */

static void free_source(struct source *source)
{
    for (int i = 0; i < STAGES; i++) {
        if (source->stages[i].data)
            td__pinned_free(source->stages[i].data, source->stages[i].arg);
        if (source->stages[i].full)
            td_event_destroy(source->stages[i].full);
    }
    if (source->ready)
        td_event_destroy(source->ready);
    td_stream_release(source->stream);
    free(source->copies);
}

void td__copies_free(struct td__copies *copies)
{
    for (int i = 0; copies && i < copies->count; i++)
        free_source(&copies->sources[i]);
    if (copies)
        free(copies->sources);
    free(copies);
}
