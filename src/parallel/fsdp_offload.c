#include "parallel/fsdp_offload.h"

#include "base/clock.h"
#include "base/fail.h"
#include "device/device_internal.h"
#include "parallel/fsdp_lane.h"

#include <stdlib.h>

enum {
    MOST_STAGED = 3,  /* fills whose copies have not run: a host that is ahead waits */
    MOST_TAKEN = 2,   /* flats whose gradients wait for the thread, or are stepped */
    MOST_FILLED = 64, /* gathers that wait for the thread; memory bounds them before */
    CHUNK = 4 << 20,  /* elements that are copied while the next ones are converted */
    INTERVALS = 4
};

/* Time on a stream, between two events. */
enum interval {
    FILL,       /* copies to the device */
    FILL_STALL, /* the stream of passes has waited for them */
    SEND,       /* copies to the host */
    SEND_STALL,
};

struct interval_events {
    td_event *begin, *end;
    bool was_recorded; /* and is not counted yet */
};

struct td__flat_offload {
    td_stream *up, *down;
    td_event *ready; /* the whole has memory that may be written */
    struct interval_events intervals[INTERVALS];
    struct td__lane_job fill, take;
    td_tensor *part;     /* of the whole, while it is filled; NULL: it is not */
    td_tensor *incoming; /* gradients in staging; NULL: none */
    bool is_sent;        /* they were given to the thread */
};

/* Of the thread that runs passes, but for the lanes. */
struct td__offloader {
    struct td__lane *up, *down;
    int64_t largest;               /* elements of a shard */
    td_event *staged[MOST_STAGED]; /* the ends of the last fills, of the thread; NULL: none */
    int next_staged;
    int64_t bytes;
    int64_t wait_ns;
    double milliseconds[INTERVALS];
};

static td_status run_fill(void *flat);
static td_status run_take(void *flat);

/* ---- The threads ------------------------------------------------------------------------------------------------ */

static int64_t largest_shard(const struct td__fsdp *fsdp)
{
    int64_t largest = 0;
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            const struct td__fsdp_flat *flat = &fsdp->units[u]->flats[f];
            int64_t count = flat->home != flat->device ? td__flat_shard_count(flat) : 0;
            largest = count > largest ? count : largest;
        }
    return largest;
}

static struct td__offloader *offloader_of(struct td__fsdp *fsdp)
{
    if (fsdp->offloader)
        return fsdp->offloader;
    struct td__offloader *offloader = calloc(1, sizeof *offloader);
    if (!offloader) {
        td__fail_nomem("td_fsdp");
        return NULL;
    }
    offloader->largest = largest_shard(fsdp);
    offloader->up = td__lane_create("td-offload-up", MOST_FILLED);
    offloader->down = offloader->up ? td__lane_create("td-offload-down", MOST_TAKEN) : NULL;
    if (offloader->down)
        return fsdp->offloader = offloader;
    td__offloader_free(offloader);
    return NULL;
}

void td__offloader_free(struct td__offloader *offloader)
{
    if (!offloader)
        return;
    td__lane_destroy(offloader->up);
    td__lane_destroy(offloader->down);
    for (int i = 0; i < MOST_STAGED; i++)
        td__event_give_back(offloader->staged[i]);
    free(offloader);
}

/* The thread ends with a module that becomes a unit of another one, after its jobs. */
static td_status wait_for(struct td__fsdp_flat *flat, struct td__lane_job *job)
{
    struct td__offloader *offloader = offloader_of(flat->unit->all);
    if (!offloader)
        return td__error_status();
    int64_t start = td__now_ns();
    td_status status = td__lane_wait(job == &flat->offload->fill ? offloader->up : offloader->down,
                                     job);
    offloader->wait_ns += td__now_ns() - start;
    return status;
}

static td_status submit(struct td__fsdp_flat *flat, struct td__lane_job *job,
                        td_status (*run)(void *flat))
{
    struct td__offloader *offloader = offloader_of(flat->unit->all);
    if (!offloader)
        return td__error_status();
    int64_t start = td__now_ns();
    job->run = run;
    job->arg = flat;
    td__lane_submit(run == run_fill ? offloader->up : offloader->down, job);
    offloader->wait_ns += td__now_ns() - start;
    return TD_OK;
}

/* ---- Streams, events and their times ---------------------------------------------------------------------------- */

/* Those of another flat on the same device, or new ones. */
static td_status take_streams(struct td__fsdp_flat *flat, struct td__flat_offload *offload)
{
    const struct td__fsdp *fsdp = flat->unit->all;
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            const struct td__fsdp_flat *other = &fsdp->units[u]->flats[f];
            if (!other->offload || other->device != flat->device)
                continue;
            offload->up = td_stream_retain(other->offload->up);
            offload->down = td_stream_retain(other->offload->down);
            return TD_OK;
        }
    offload->up = td_stream_create(flat->device, 0);
    offload->down = td_stream_create(flat->device, 0);
    return offload->up && offload->down ? TD_OK : td__error_status();
}

static td_status make_events(struct td__flat_offload *offload, td_device *device)
{
    const td_event_options timed = {.timing = true};
    for (int i = 0; i < INTERVALS; i++) {
        struct interval_events *events = &offload->intervals[i];
        events->begin = td_event_create(device, &timed);
        events->end = events->begin ? td_event_create(device, &timed) : NULL;
        if (!events->end)
            return td__error_status();
    }
    offload->ready = td_event_create(device, NULL);
    return offload->ready ? TD_OK : td__error_status();
}

/* Adds the time of an interval that has passed. A device that measures no times has none. */
static void count_interval(struct td__fsdp_flat *flat, enum interval which)
{
    struct interval_events *events = &flat->offload->intervals[which];
    double milliseconds = 0;
    struct td__error before;
    struct td__offloader *offloader = flat->unit->all->offloader;
    if (!offloader || !events->was_recorded || !td_event_is_done(events->end))
        return;
    events->was_recorded = false;
    td__error_save(&before);
    if (td_event_elapsed_ms(events->begin, events->end, &milliseconds))
        td__error_undo(&before);
    else
        offloader->milliseconds[which] += milliseconds;
}

/* The stream of passes waits for the end of `copies`. */
static td_status stall(struct td__fsdp_flat *flat, enum interval copies, enum interval which)
{
    struct td__flat_offload *offload = flat->offload;
    struct interval_events *events = &offload->intervals[which];
    td_stream *stream = td__stream_of(flat->device);
    count_interval(flat, which);
    td_status status = td_event_record(events->begin, stream);
    td_status waits = td_stream_wait_event(stream, offload->intervals[copies].end);
    if (!status && !waits)
        status = td_event_record(events->end, stream);
    events->was_recorded = !status && !waits;
    return waits ? waits : status;
}

/* ---- Begin and end ---------------------------------------------------------------------------------------------- */

td_status td__offload_begin(struct td__fsdp_flat *flat)
{
    struct td__flat_offload *offload = calloc(1, sizeof *offload);
    if (!offload)
        return td__fail_nomem("td_fsdp");
    td_status status = offloader_of(flat->unit->all) ? TD_OK : td__error_status();
    if (!status)
        status = take_streams(flat, offload);
    flat->offload = offload;
    if (!status)
        status = make_events(offload, flat->device);
    return td__fsdp_fail(flat->unit, "offloading", status);
}

static void destroy_event(td_event *event)
{
    if (event)
        td_event_destroy(event);
}

void td__offload_end(struct td__fsdp_flat *flat)
{
    struct td__flat_offload *offload = flat->offload;
    if (!offload)
        return;
    td__offload_filled(flat);
    td__offload_wait(flat);
    for (int i = 0; i < INTERVALS; i++) {
        destroy_event(offload->intervals[i].begin);
        destroy_event(offload->intervals[i].end);
    }
    destroy_event(offload->ready);
    td_stream_release(offload->up);
    td_stream_release(offload->down);
    td_tensor_release(offload->incoming);
    free(offload);
    flat->offload = NULL;
}

/* ---- Copies ----------------------------------------------------------------------------------------------------- */

/* All of it has the size of the largest shard, so that freed staging serves any flat. */
static td_tensor *make_staging(struct td__fsdp_flat *flat, td_dtype dtype)
{
    size_t bytes = (size_t)flat->unit->all->offloader->largest * td_dtype_size(dtype);
    struct td__storage *storage = td__storage_create_pinned(flat->device, bytes);
    td_tensor *staging = storage ? td__flat_view(storage, dtype, 0, td__flat_shard_count(flat))
                                 : NULL;
    if (storage)
        td__storage_release(storage);
    return staging;
}

/* Of `count` elements. The order of the streams is ours: memory that is freed on the stream of passes is not kept for
 * another one. */
static td_status copy(const td_tensor *to, const td_tensor *from, int64_t first, int64_t count,
                      td_stream *stream)
{
    TD_STREAM_SCOPE(stream);
    struct td__place target = td__place_of(to), source = td__place_of(from);
    size_t width = td_dtype_size(to->layout.dtype), skip = (size_t)first * width;
    target.block = source.block = NULL;
    target.data = (char *)target.data + skip;
    source.data = (char *)source.data + skip;
    return td__copy_between("td_fsdp", &target, &source, (size_t)count * width, true);
}

static void count_copy(struct td__fsdp_flat *flat, const td_tensor *copied)
{
    if (flat->unit->all->offloader)
        flat->unit->all->offloader->bytes += copied->layout.numel *
                                             (int64_t)td_dtype_size(copied->layout.dtype);
}

/* ---- To the device ---------------------------------------------------------------------------------------------- */

static td_status convert(td_tensor *staging, struct td__fsdp_flat *flat, int64_t first,
                         int64_t count)
{
    td_tensor *from = td__flat_view(flat->shard, flat->dtype, first, count);
    td_tensor *to = td__flat_view(staging->storage, flat->compute, first, count);
    td_status status = from && to ? td__kernels_of(to)->copy(to, from) : td__error_status();
    td_tensor_release(from);
    td_tensor_release(to);
    return status;
}

/* In turns of the conversion and the copy of what was converted before. */
static td_status convert_and_copy(struct td__fsdp_flat *flat, td_tensor *staging)
{
    struct td__flat_offload *offload = flat->offload;
    int64_t numel = offload->part->layout.numel;
    for (int64_t at = 0; at < numel; at += CHUNK) {
        int64_t count = numel - at < CHUNK ? numel - at : CHUNK;
        TD_TRY(convert(staging, flat, at, count));
        TD_TRY(copy(offload->part, staging, at, count, offload->up));
    }
    return TD_OK;
}

static td_status end_fill(struct td__offloader *offloader, struct td__flat_offload *offload,
                          td_device *device)
{
    td_event **staged = &offloader->staged[offloader->next_staged];
    offloader->next_staged = (offloader->next_staged + 1) % MOST_STAGED;
    if (!*staged)
        *staged = td__event_take(device);
    return *staged ? td_event_record(*staged, offload->up) : td__error_status();
}

/* Waits for the copies of an earlier one: the host does not run ahead of the device by more staging. */
static td_status begin_fill(struct td__offloader *offloader)
{
    td_event **staged = &offloader->staged[offloader->next_staged];
    if (!*staged)
        return TD_OK;
    td_status status = td_event_synchronize(*staged);
    td__event_give_back(*staged);
    *staged = NULL;
    return status;
}

/* By the thread. What was enqueued ends at `end` of FILL, also after a failure. */
static td_status run_fill(void *arg)
{
    struct td__fsdp_flat *flat = arg;
    struct td__flat_offload *offload = flat->offload;
    struct td__offloader *offloader = flat->unit->all->offloader;
    struct interval_events *events = &offload->intervals[FILL];
    TD_TRY(begin_fill(offloader));
    td_tensor *staging = make_staging(flat, flat->compute);
    if (!staging)
        return td__error_status();
    td_status status = td_stream_wait_event(offload->up, offload->ready);
    if (!status)
        status = td_event_record(events->begin, offload->up);
    if (!status)
        status = convert_and_copy(flat, staging);
    td_status recorded = td_event_record(events->end, offload->up);
    td_status ended = end_fill(offloader, offload, flat->device);
    td_tensor_release(staging); /* it is given out again when the copies have run */
    return status ? status : recorded ? recorded : ended;
}

td_status td__offload_fill(struct td__fsdp_flat *flat, td_tensor *part)
{
    struct td__flat_offload *offload = flat->offload;
    TD_TRY(td__offload_wait(flat));
    if (!part->layout.numel)
        return TD_OK;
    count_interval(flat, FILL);
    TD_TRY(td_event_record(offload->ready, td__stream_of(flat->device)));
    offload->part = td_tensor_retain(part);
    td_status status = submit(flat, &offload->fill, run_fill);
    if (status) {
        td_tensor_release(offload->part);
        offload->part = NULL;
    }
    count_copy(flat, part);
    return status;
}

td_status td__offload_filled(struct td__fsdp_flat *flat)
{
    struct td__flat_offload *offload = flat->offload;
    if (!offload || !offload->part)
        return TD_OK;
    td_status status = wait_for(flat, &offload->fill);
    offload->intervals[FILL].was_recorded = !status;
    td_tensor_release(offload->part);
    offload->part = NULL;
    td_status stalled = stall(flat, FILL, FILL_STALL);
    return status ? status : stalled;
}

/* ---- To the host ------------------------------------------------------------------------------------------------ */

td_status td__offload_send(struct td__fsdp_flat *flat, td_tensor *reduced)
{
    struct td__flat_offload *offload = flat->offload;
    struct interval_events *events = &offload->intervals[SEND];
    offload->incoming = make_staging(flat, reduced->layout.dtype);
    if (!offload->incoming)
        return td__error_status();
    count_interval(flat, SEND);
    count_copy(flat, reduced);
    TD_TRY(td_stream_wait_stream(offload->down, td__stream_of(flat->device)));
    td_status status = td_event_record(events->begin, offload->down);
    if (!status)
        status = copy(offload->incoming, reduced, 0, reduced->layout.numel, offload->down);
    td_status recorded = td_event_record(events->end, offload->down);
    events->was_recorded = !status && !recorded;
    return status ? status : recorded;
}

td_status td__offload_sent(struct td__fsdp_flat *flat)
{
    TD_TRY(stall(flat, SEND, SEND_STALL));
    td_tensor_release(flat->reduced); /* the device's; the thread sets its own */
    flat->reduced = NULL;
    td_status status = submit(flat, &flat->offload->take, run_take);
    flat->offload->is_sent = !status;
    return status;
}

void td__offload_drop(struct td__fsdp_flat *flat)
{
    struct td__error before;
    td__error_save(&before);
    if (flat->offload->incoming && stall(flat, SEND, SEND_STALL))
        td__error_undo(&before);
    td_tensor_release(flat->offload->incoming);
    flat->offload->incoming = NULL;
}

/* By the thread. */
static td_status run_take(void *arg)
{
    struct td__fsdp_flat *flat = arg;
    struct td__flat_offload *offload = flat->offload;
    td_status status = td_event_synchronize(offload->intervals[SEND].end);
    flat->reduced = offload->incoming;
    offload->incoming = NULL;
    return td__flat_take_grads(flat, status);
}

td_status td__offload_wait(struct td__fsdp_flat *flat)
{
    struct td__flat_offload *offload = flat->offload;
    if (!offload || !offload->is_sent)
        return TD_OK;
    offload->is_sent = false;
    td_status status = wait_for(flat, &offload->take);
    return td__fsdp_fail(flat->unit, "the gradients on the host", status);
}

td_status td__offload_wait_all(struct td__fsdp *fsdp)
{
    td_status status = TD_OK;
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++) {
            td_status waited = td__offload_wait(&fsdp->units[u]->flats[f]);
            status = status ? status : waited;
        }
    return status;
}

/* ---- Statistics ------------------------------------------------------------------------------------------------- */

static void add_flat(struct td__fsdp_flat *flat, td_fsdp_stats *stats)
{
    int64_t count = flat->is_whole ? flat->numel : td__flat_shard_count(flat);
    if (flat->in_file)
        stats->file_elements += count;
    else if (flat->home != flat->device)
        stats->host_elements += count;
    for (int i = 0; flat->offload && !flat->offload->part && i < INTERVALS; i++)
        count_interval(flat, i);
}

void td__offload_add_stats(const struct td__fsdp *fsdp, td_fsdp_stats *stats)
{
    for (int u = 0; u < fsdp->count; u++)
        for (int f = 0; f < fsdp->units[u]->flat_count; f++)
            add_flat(&fsdp->units[u]->flats[f], stats);
    struct td__offloader *offloader = fsdp->offloader;
    if (!offloader)
        return;
    const double *ms = offloader->milliseconds;
    stats->offload_bytes = offloader->bytes;
    stats->offload_copy_ns = (int64_t)(1e6 * (ms[FILL] + ms[SEND]));
    stats->offload_stall_ns = (int64_t)(1e6 * (ms[FILL_STALL] + ms[SEND_STALL]));
    stats->offload_convert_ns = td__lane_busy_ns(offloader->up);
    stats->offload_step_ns = td__lane_busy_ns(offloader->down);
    stats->offload_wait_ns = offloader->wait_ns;
}
