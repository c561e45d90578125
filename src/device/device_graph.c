/* Graphs: what a function enqueues on a stream, captured once and launched many times; see device.h.
 *
 * A graph has a stream of its own, on which nothing ever runs: the function enqueues there while it is captured. The
 * cache gives memory by stream (device_memory.c), so that all memory of the function is in a pool of its own, which
 * nobody else allocates from until the stream ends with the graph.
 *
 *     capture    step(arg)  ──►  kernels with addresses, and values: numbers that change from launch to launch
 *     launch     refresh    ──►  values on the host  ──copy──►  values on the device  ──►  the graph
 *
 * The copy is of ordinary memory, which has been read when the call returns: the next launch may change it at once. It
 * is in the order of the stream, before the launch and behind the one before. */
#include "device/device_graph.h"

#include "base/fail.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 4096, ALIGNMENT = 16 };

/* Values on the host and on the device. */
struct values {
    struct values *next;
    char *address; /* of the device */
    void *block;
    size_t used;
    _Alignas(ALIGNMENT) char bytes[CHUNK];
};

struct refresh {
    struct refresh *next;
    td__refresh_fn *fn;
    void *arg;
    void *values; /* on the host */
};

struct joined {
    struct joined *next;
    td_stream *stream; /* retained */
};

struct td_graph {
    td_device *device;
    td_status (*step)(void *); /* on the host: what a launch calls */
    void *arg;
    void *self;
    td_stream *stream; /* its own */
    td_stream *last;   /* of the last launch, retained; NULL: there was none */
    td_stream *aside;  /* of td__constants_stream(); or NULL */
    pthread_mutex_t lock;
    struct values *values; /* the last one first */
    struct refresh *refreshes, **end;
    struct td__held_block *held;
    struct joined *joined; /* streams, until the end of the capture */
};

td_graph *td__capturing(td_device *device)
{
    return td__is_captured(td__stream_of(device)) ? device->capturing : NULL;
}

struct td__held_block **td__graph_held(td_graph *graph)
{
    return &graph->held;
}

td_stream *td__pool_stream(td_stream *stream)
{
    return td__is_captured(stream) ? stream->device->capturing->stream : stream;
}

td_stream *td__constants_stream(td_device *device)
{
    td_graph *graph = device->is_host ? NULL : td__capturing(device);
    if (graph && !graph->aside)
        graph->aside = td_stream_create(device, 0);
    return graph ? graph->aside : NULL;
}

td_status td__graph_join(td_graph *graph, td_stream *stream)
{
    struct joined *joined = malloc(sizeof *joined);
    if (!joined)
        return td__fail_nomem("td_graph_capture");
    *joined = (struct joined){.next = graph->joined, .stream = td_stream_retain(stream)};
    graph->joined = joined;
    atomic_store(&stream->capture, atomic_load(&graph->device->capture));
    return TD_OK;
}

td_status td__fail_captured(const char *call, const char *what, const td_device *device)
{
    return td_fail(
        TD_ERR_STATE,
        "%s %s while td_graph_capture() records a function for %s: do it before or after "
        "that",
        call, what, device->name);
}

/* ---- Values ---------------------------------------------------------------------------------------------- */

/* Not in the graph's pool: what is free there, earlier kernels of the graph may write to. */
static td_status add_chunk(td_graph *graph)
{
    td_stream *aside = td__constants_stream(graph->device);
    if (!aside)
        return td__error_status();
    TD_STREAM_SCOPE(aside);
    struct values *chunk = calloc(1, sizeof *chunk);
    if (!chunk)
        return td__fail_nomem("td_graph_capture");
    chunk->address = td__block_alloc(graph->device, "td_graph_capture", CHUNK, &chunk->block);
    if (!chunk->address) {
        free(chunk);
        return td__error_status();
    }
    chunk->next = graph->values;
    graph->values = chunk;
    return TD_OK;
}

td_status td__graph_values(td_graph *graph, const void *values, size_t bytes,
                           td__refresh_fn *refresh, void *arg, const void **address)
{
    struct refresh *entry = malloc(sizeof *entry);
    td_status status = entry ? TD_OK : td__fail_nomem("td_graph_capture");
    if (!status && bytes && (!graph->values || graph->values->used + bytes > CHUNK))
        status = add_chunk(graph);
    if (status) {
        free(entry);
        free(arg);
        return status;
    }
    *entry = (struct refresh){.fn = refresh, .arg = arg};
    if (bytes) {
        struct values *chunk = graph->values;
        entry->values = chunk->bytes + chunk->used;
        memcpy(entry->values, values, bytes);
        *address = chunk->address + chunk->used;
        chunk->used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    *graph->end = entry;
    graph->end = &entry->next;
    return TD_OK;
}

void *td__graph_find(const td_graph *graph, td__refresh_fn *refresh,
                     bool (*is_it)(const void *arg, const void *key), const void *key)
{
    void *found = NULL;
    for (const struct refresh *entry = graph->refreshes; entry; entry = entry->next)
        if (entry->fn == refresh && is_it(entry->arg, key))
            found = entry->arg;
    return found;
}

/* ---- Launching -------------------------------------------------------------------------------------------- */

static td_status refresh_all(td_graph *graph)
{
    for (struct refresh *entry = graph->refreshes; entry; entry = entry->next)
        TD_TRY(entry->fn(entry->arg, entry->values));
    return TD_OK;
}

/* Enqueues the values, and the graph. */
static td_status launch_on(td_graph *graph, td_stream *stream)
{
    td_device *device = graph->device;
    if (graph->last != stream) {
        if (graph->last)
            TD_TRY(td_stream_wait_stream(stream, graph->last));
        td_stream_release(graph->last);
        graph->last = td_stream_retain(stream);
    }
    for (const struct values *chunk = graph->values; chunk; chunk = chunk->next)
        TD_TRY(td__ops_of(device)->copy_in(device->self, stream->self, chunk->address, chunk->bytes,
                                           chunk->used, false));
    return td__ops_of(device)->graph_launch(device->self, graph->self, stream->self);
}

td_status td_graph_launch(td_graph *graph)
{
    if (!graph)
        return td__fail_null("td_graph_launch");
    if (graph->step)
        return graph->step(graph->arg);
    td_stream *stream = td__stream_of(graph->device);
    if (td__is_captured(stream))
        return td__fail_captured("td_graph_launch", "launches a graph", graph->device);
    pthread_mutex_lock(&graph->lock);
    td_status status = refresh_all(graph);
    if (!status)
        status = launch_on(graph, stream);
    pthread_mutex_unlock(&graph->lock);
    return status;
}

/* ---- Capturing -------------------------------------------------------------------------------------------- */

static _Atomic(uint64_t) captures;

/* One capture a device at a time. */
static td_status begin(td_graph *graph)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    td_device *device = graph->device;
    pthread_mutex_lock(&lock);
    td_status status = TD_OK;
    if (atomic_load(&device->capture))
        status = td_fail(
            TD_ERR_STATE,
            "td_graph_capture: a function is being captured on %s already; captures do "
            "not nest",
            device->name);
    else /* the memory of the steps before serves the graph, which cannot take it from their pools */
        status = td_device_empty_cache(device);
    if (!status)
        status = td__ops_of(device)->capture_begin(device->self, graph->stream->self);
    if (!status) {
        uint64_t number = atomic_fetch_add(&captures, 1) + 1;
        device->capturing = graph;
        atomic_store(&graph->stream->capture, number);
        atomic_store(&device->capture, number);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static td_status run_captured(td_graph *graph, td_status (*step)(void *), void *arg)
{
    TD_STREAM_SCOPE(graph->stream);
    return step(arg);
}

/* Ends the capture in any case. */
static td_status finish(td_graph *graph, td_status status)
{
    td_device *device = graph->device;
    struct td__error cause;
    td__error_save(&cause);
    td_status ended = td__ops_of(device)->capture_end(device->self, graph->stream->self,
                                                      status ? NULL : &graph->self);
    atomic_store(&device->capture, 0);
    device->capturing = NULL;
    for (struct joined *next; graph->joined; graph->joined = next) {
        next = graph->joined->next;
        td_stream_release(graph->joined->stream);
        free(graph->joined);
    }
    if (status)
        td__error_restore(&cause);
    return status ? status : ended;
}

static td_status create(td_device *device, td_graph **out)
{
    td_graph *graph = calloc(1, sizeof *graph);
    if (!graph)
        return td__fail_nomem("td_graph_capture");
    pthread_mutex_init(&graph->lock, NULL);
    graph->device = device;
    graph->end = &graph->refreshes;
    if (!device->is_host) {
        graph->stream = td_stream_create(device, 0);
        if (!graph->stream) {
            td_graph_destroy(graph);
            return td__error_status();
        }
        graph->stream->is_graph = true;
    }
    *out = graph;
    return TD_OK;
}

static td_status capture(td_graph *graph, td_status (*step)(void *), void *arg)
{
    td_stream *stream = td__stream_of(graph->device);
    TD_TRY(begin(graph));
    td_status status = run_captured(graph, step, arg);
    TD_TRY(finish(graph, status));
    if (graph->aside)
        TD_TRY(td_stream_wait_stream(stream, graph->aside));
    return launch_on(graph, stream);
}

td_status td_graph_capture(td_device *device, td_status (*step)(void *), void *arg, td_graph **out)
{
    device = td__use_device("td_graph_capture", device);
    if (!device)
        return td__error_status();
    if (!step || !out)
        return td__fail_null("td_graph_capture");
    if (!device->is_host && !td__ops_of(device)->capture_begin)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "td_graph_capture: %s has no graphs; call the function each time",
                       device->name);
    td_graph *graph = NULL;
    TD_TRY(create(device, &graph));
    td_status status;
    if (device->is_host) {
        graph->step = step;
        graph->arg = arg;
        status = step(arg);
    } else {
        status = capture(graph, step, arg);
    }
    if (status)
        td_graph_destroy(graph);
    else
        *out = graph;
    return status;
}

void td_graph_destroy(td_graph *graph)
{
    if (!graph)
        return;
    struct td__error before;
    td__error_save(&before);
    if (graph->last) /* its memory is free after the last launch */
        td_stream_wait_stream(graph->stream, graph->last);
    if (graph->last && graph->aside)
        td_stream_wait_stream(graph->aside, graph->last);
    if (graph->self)
        td__ops_of(graph->device)->graph_destroy(graph->device->self, graph->self);
    for (struct refresh *next; graph->refreshes; graph->refreshes = next) {
        next = graph->refreshes->next;
        free(graph->refreshes->arg);
        free(graph->refreshes);
    }
    for (struct values *next; graph->values; graph->values = next) {
        next = graph->values->next;
        td__block_free(graph->values->address, graph->values->block);
        free(graph->values);
    }
    td__blocks_let_go(graph->held, graph->last);
    td_stream_release(graph->aside);
    td_stream_release(graph->stream);
    td_stream_release(graph->last);
    pthread_mutex_destroy(&graph->lock);
    free(graph);
    td__error_undo(&before);
}
