/* Capture and graphs of the emulated libcuda: calls on a stream that is being captured are recorded with copies of their
 * arguments, and run in the same order by each launch. As with the real driver, host memory of a copy is read when the
 * graph runs; waiting for what is being captured is an error that ends the capture; and so is a wait for an event from
 * outside of it, and a stream that joined the capture and that nobody waited for. */
#include "emulated_graph.h"
#include "emulated_counts.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_STREAMS = 16 };

struct node {
    struct node *next;
    void (*run)(void *payload);
    _Alignas(16) char payload[];
};

struct recording {
    int owners; /* the graph, and what was instantiated from it */
    long number;
    CUresult failure;
    struct node *nodes, **end;
    struct stream *streams[MOST_STREAMS];
    int stream_count;
};

struct stream {
    struct recording *recording; /* NULL: it is not captured */
    long calls, joined;          /* recorded on it; and how many of them others have waited for */
};

struct event {
    struct timespec time;
    long recording; /* its number; 0: it was not captured */
    struct stream *stream;
    long calls;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long recordings, open_recordings;

bool emulated_is_captured(CUstream stream)
{
    return stream && ((struct stream *)stream)->recording;
}

bool emulated_captures(void)
{
    return __atomic_load_n(&open_recordings, __ATOMIC_SEQ_CST) > 0;
}

static struct node *append(struct recording *recording, void (*run)(void *payload),
                           const void *payload, size_t bytes)
{
    struct node *node = malloc(sizeof *node + bytes);
    if (!node)
        abort();
    *node = (struct node){.run = run};
    memcpy(node->payload, payload, bytes);
    *recording->end = node;
    recording->end = &node->next;
    return node;
}

void emulated_record(CUstream handle, void (*run)(void *payload), const void *payload, size_t bytes)
{
    struct stream *stream = (struct stream *)handle;
    pthread_mutex_lock(&lock);
    append(stream->recording, run, payload, bytes);
    stream->calls++;
    pthread_mutex_unlock(&lock);
}

void *emulated_add_node(CUgraph graph, void (*run)(void *payload), const void *payload,
                        size_t bytes)
{
    return append((struct recording *)graph, run, payload, bytes)->payload;
}

CUresult emulated_invalidate(CUstream stream, CUresult result)
{
    ((struct stream *)stream)->recording->failure = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return result;
}

static void join(struct stream *stream, struct recording *recording)
{
    if (recording->stream_count == MOST_STREAMS)
        abort();
    recording->streams[recording->stream_count++] = stream;
    stream->recording = recording;
    stream->calls = stream->joined = 0;
}

static void drop(struct recording *recording)
{
    if (--recording->owners > 0)
        return;
    for (struct node *next; recording->nodes; recording->nodes = next) {
        next = recording->nodes->next;
        free(recording->nodes);
    }
    free(recording);
}

/* ---- Capture ------------------------------------------------------------------------------------------------- */

static struct recording *new_recording(void)
{
    struct recording *recording = calloc(1, sizeof *recording);
    if (!recording)
        abort();
    recording->owners = 1;
    recording->end = &recording->nodes;
    return recording;
}

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
    COUNTED;
    const char *fails = getenv("EMULATED_CUDA_FAIL");
    if (fails && !strcmp(fails, "cuGraphCreate"))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = (CUgraph)new_recording();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode)
{
    COUNTED;
    struct stream *stream = (struct stream *)handle;
    if (stream->recording || mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct recording *recording = new_recording();
    recording->number = ++recordings;
    join(stream, recording);
    __atomic_add_fetch(&open_recordings, 1, __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph)
{
    COUNTED;
    struct recording *recording = ((struct stream *)handle)->recording;
    *graph = NULL;
    if (!recording || recording->streams[0] != (struct stream *)handle)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    CUresult result = recording->failure;
    for (int i = 0; i < recording->stream_count; i++) {
        struct stream *stream = recording->streams[i];
        if (!result && i && stream->joined < stream->calls)
            result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        stream->recording = NULL;
    }
    __atomic_sub_fetch(&open_recordings, 1, __ATOMIC_SEQ_CST);
    if (result)
        drop(recording);
    else
        *graph = (CUgraph)recording;
    return result;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph,
                                            unsigned long long flags)
{
    COUNTED;
    const char *fails = getenv("EMULATED_CUDA_FAIL");
    if (flags || (fails && !strcmp(fails, "cuGraphInstantiate")))
        return CUDA_ERROR_NOT_SUPPORTED;
    ((struct recording *)graph)->owners++;
    *exec = (CUgraphExec)graph;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    COUNTED;
    if (emulated_is_captured(stream))
        return emulated_invalidate(stream, CUDA_ERROR_NOT_SUPPORTED);
    for (struct node *node = ((struct recording *)exec)->nodes; node; node = node->next)
        node->run(node->payload);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    COUNTED;
    drop((struct recording *)exec);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    COUNTED;
    drop((struct recording *)graph);
    return CUDA_SUCCESS;
}

/* ---- Streams --------------------------------------------------------------------------------------------------- */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    COUNTED;
    (void)flags;
    (void)priority;
    *stream = calloc(1, sizeof(struct stream));
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    COUNTED;
    if (emulated_is_captured(stream))
        abort();
    free(stream);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    COUNTED;
    bool captured = emulated_is_captured(stream) || getenv("EMULATED_CUDA_CAPTURING");
    *status = captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
    COUNTED;
    return emulated_is_captured(stream)
               ? emulated_invalidate(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
               : CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent waited, unsigned flags)
{
    COUNTED;
    (void)flags;
    struct stream *stream = (struct stream *)handle;
    const struct event *event = (const struct event *)waited;
    if (!event->recording)
        return stream->recording ? emulated_invalidate(handle, CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
                                 : CUDA_SUCCESS;
    struct recording *recording = event->stream->recording;
    if (!recording || recording->number != event->recording)
        return CUDA_ERROR_INVALID_VALUE;
    if (!stream->recording)
        join(stream, recording);
    if (stream->recording != recording)
        return emulated_invalidate(handle, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (stream != event->stream && event->stream->joined < event->calls)
        event->stream->joined = event->calls;
    return CUDA_SUCCESS;
}

/* ---- Events ----------------------------------------------------------------------------------------------------- */

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    COUNTED;
    (void)flags;
    *event = calloc(1, sizeof(struct event));
    return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    COUNTED;
    free(event);
    return CUDA_SUCCESS;
}

/* Time that events see in addition to the clock's, for libraries that pretend to take long. */
static long passed_s;

EXPORT void emulated_pass(long seconds)
{
    __atomic_add_fetch(&passed_s, seconds, __ATOMIC_SEQ_CST);
}

EXPORT CUresult cuEventRecord(CUevent handle, CUstream recorded)
{
    COUNTED;
    struct event *event = (struct event *)handle;
    struct stream *stream = (struct stream *)recorded;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    event->time.tv_sec += __atomic_load_n(&passed_s, __ATOMIC_SEQ_CST);
    event->stream = stream;
    event->recording = stream->recording ? stream->recording->number : 0;
    event->calls = stream->calls;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    COUNTED;
    return ((const struct event *)event)->recording ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    COUNTED;
    const struct timespec *a = &((const struct event *)start)->time,
                          *b = &((const struct event *)end)->time;
    *milliseconds = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 +
                            (double)(b->tv_nsec - a->tv_nsec) / 1e6);
    return CUDA_SUCCESS;
}
