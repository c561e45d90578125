/* Devices inside the library: their structs, and what every other component needs of them.
 *
 * A device belongs to a kind. `cpu` without a number is the host; cpu:0, cpu:1, … are separate devices over the host's
 * memory, each with a worker thread. Devices of other kinds (accelerators) have a table of functions, memory of their
 * own and streams. Devices are interned by name and never destroyed; an accelerator is opened on first use. */
#ifndef TD_DEVICE_DEVICE_INTERNAL_H
#define TD_DEVICE_DEVICE_INTERNAL_H

#include <tandem/device.h>
#include <tandem/device_ops.h>
#include <tandem/kernels.h>

#include <stdatomic.h>

enum { TD__KINDS_MOST = 16, TD__KIND_NAME = 16, TD__ACCELERATORS_MOST = 64 };

struct td__device_kind {
    char name[TD__KIND_NAME];
    int slot; /* index in the table of kinds */
    td_device_ops
        ops; /* complete: members that the device's header did not have are NULL; unused for cpu */
    td_kernels kernels;
    void *arg;
};

struct td_stream {
    atomic_int owners; /* of a default stream: not counted */
    td_device *device;
    void *self; /* NULL on the host */
    uint64_t
        id; /* of no other stream of the process; 0: a default stream, which its device tells apart */
    _Atomic(uint64_t) capture; /* the capture that it has joined last (device_graph.c) */
    bool is_graph;             /* the memory of its pool belongs to a graph */
};

struct td__device_worker; /* device_worker.c */
struct td__device_memory; /* device_memory.c */

struct td_device {
    char name[32];
    char kind_name[TD__KIND_NAME];
    int index;           /* -1: the host */
    bool is_host;        /* its memory is the host's */
    bool is_malformed;   /* the name is none of a device */
    atomic_bool is_open; /* what follows is there; always on the host */
    const td_kernels
        *kernels; /* what operators call: those of the host, or wrappers of the kind's */
    struct td__device_kind *kind;
    void *self;
    int slot;        /* among open accelerators */
    bool falls_back; /* TANDEM_FALLBACK=cpu when it was opened */
    unsigned fork_generation;
    td_stream stream; /* the default one */
    struct td__device_memory *memory;
    _Atomic(uint64_t) capture; /* the number of the capture under way; 0: none */
    td_graph *capturing;       /* its graph */
    atomic_llong waits;
    td_device
        *target; /* of a meta device: where its tensors get their memory; NULL: this is none */
    _Atomic(td_device *) meta;        /* the meta device of this one; NULL: not asked for yet */
    struct td__device_worker *worker; /* NULL until the first job */
    td_device *next;                  /* in the table of names */
};

/** The host, `cpu`. */
td_device *td__host_device(void);

/** Opens an accelerator for `call`; NULL, with an error that begins with `call`, where there is no such device. */
td_device *td__open_device(const char *call, td_device *device);

/** The device of an argument, ready for use: the current one for NULL. NULL on failure, as td__open_device(). */
static inline td_device *td__use_device(const char *call, td_device *device)
{
    if (!device)
        device = td_current_device();
    return device->is_host ? device : td__open_device(call, device);
}

/** The kernels that operators call on accelerators, and on the host; and those of meta devices, which record initial
 *  values. Defined by the component tensor. */
extern const td_kernels td__wrapped_kernels;
extern const td_kernels td__cpu_kernels;
extern const td_kernels td__meta_kernels;

/** The functions of an accelerator. */
static inline const td_device_ops *td__ops_of(const td_device *device)
{
    return &device->kind->ops;
}

/** The kind of a name, registered or found as a plug-in; NULL, with the last error set, where there is none. */
struct td__device_kind *td__find_kind(const char *name);

/** The registered kinds from number 0, "cpu", on; NULL behind the last. */
const struct td__device_kind *td__kind_number(int number);

/** Writes the names of all kinds, "cpu, cuda". */
void td__kind_names(char *text, size_t size);

/* ---- Meta devices (meta_device.c) --------------------------------------------------------------------- */

static inline bool td__is_meta(const td_device *device)
{
    return device->target != NULL;
}

/** Where tensors of a device have their memory, or will have it. */
static inline td_device *td__target_of(td_device *device)
{
    return device->target ? device->target : device;
}

/** TD_ERR_STATE: `call` needs the elements of a tensor of a meta device. */
td_status td__fail_meta(const char *call, const td_device *device);

/** The meta device of a name that begins with "meta"; NULL: it is no such name. */
td_device *td__meta_of_name(const char *name);

/* ---- Workers (device_worker.c) ---------------------------------------------------------------------- */

/** Enqueues fn(arg) for the worker of a numbered device. */
td_status td__device_submit(td_device *device, void (*fn)(void *), void *arg);

/** Whether the calling thread is the worker of the device. */
bool td__device_is_here(const td_device *device);

/** Waits until the worker has run all jobs; TD_ERR_STATE from the worker itself. */
td_status td__worker_drain(td_device *device);

/* ---- Streams (device_stream.c) ----------------------------------------------------------------------- */

/** The current stream of an open accelerator. */
td_stream *td__stream_of(td_device *device);

/** Makes the host wait for a stream, on behalf of `call`; counts it. Every wait of the library is one of these. */
td_status td__wait_for_stream(const char *call, td_stream *stream);
td_status td__wait_for_event(const char *call, td_event *event);
td_status td__wait_for_device(const char *call, td_device *device);

/** Events that the library uses itself; those of a device are kept for the next use. */
td_event *td__event_take(td_device *device);
void td__event_give_back(td_event *event);

/* ---- Graphs (device_graph.c) --------------------------------------------------------------------------- */

/** Whether what is enqueued on a stream is being captured. */
static inline bool td__is_captured(const td_stream *stream)
{
    uint64_t capture = atomic_load_explicit(&stream->device->capture, memory_order_acquire);
    return capture && atomic_load_explicit(&stream->capture, memory_order_relaxed) == capture;
}

/** The graph for which the thread's current stream of an open device is being captured, or NULL. */
td_graph *td__capturing(td_device *device);

/** Makes a stream a part of the capture, which keeps it until its end. */
td_status td__graph_join(td_graph *graph, td_stream *stream);

/** The stream on which memory for `stream` is allocated: while that is captured, that of the graph. */
td_stream *td__pool_stream(td_stream *stream);

/** TD_ERR_STATE: `call` does `what`, which no captured function may do. */
td_status td__fail_captured(const char *call, const char *what, const td_device *device);

/** What is to be done before each launch but the first: `values` is what the device will find, as it was before.
 *  A failure is that of the launch. */
typedef td_status td__refresh_fn(void *arg, void *values);

/** Numbers that change from launch to launch: *address is where kernels find them. `values`, `bytes` of them (0: there
 *  are none), are those of the first launch, and refresh(arg, …) changes them for the others, in the order of these
 *  calls. `arg` is for free(), at the end of the graph, or at once on failure. */
td_status td__graph_values(td_graph *graph, const void *values, size_t bytes,
                           td__refresh_fn *refresh, void *arg, const void **address);

/** The `arg` of the latest one with this function for which is_it(arg, key); NULL: there is none. */
void *td__graph_find(const td_graph *graph, td__refresh_fn *refresh,
                     bool (*is_it)(const void *arg, const void *key), const void *key);

/* ---- Memory of accelerators (device_memory.c) -------------------------------------------------- */

struct td__block;

/** Allocates on the current stream of an open accelerator; *arg goes to td__block_free(). `call` is who holds it, unless
 *  the thread has a label; a static string. NULL, with the last error set, without memory. */
void *td__block_alloc(td_device *device, const char *call, size_t bytes, void **arg);

/** A td_blob_free_fn: frees memory of td__block_alloc(). */
void td__block_free(void *data, void *arg);

/** Tensors of the host have so many bytes more, or less (host_memory.c). */
void td__count_host_memory(int64_t bytes);
td_status td__host_memory_stats(td_memory_stats *stats);
td_status td__host_memory_reset_peak(void);
/** Returns the pages of tensors that were freed to the system. */
td_status td__host_memory_trim(void);

/** The memory is used on `stream`: it stays until what is enqueued there now has run. */
void td__block_use(void *arg, td_stream *stream);

/** A stream ends: its memory goes to the default stream, which waits for it. */
void td__memory_forget(td_stream *stream);

/** The blocks that a graph uses and that are not of its own pool: nobody else gets their memory while it is there. */
struct td__held_block;
struct td__held_block **td__graph_held(td_graph *graph);

/** The graph ends; its last launch was on `stream`, or NULL. */
void td__blocks_let_go(struct td__held_block *held, td_stream *stream);

/** What td__block_alloc() notes as the holder on this thread, instead of the call; returns the former one. A static
 *  string, or NULL: the call. */
const char *td__set_memory_label(const char *label);

/* ---- Pinned host memory (pinned_memory.c) ------------------------------------------------------- */

/** The same for host memory that an open accelerator copies from and to. On the host, and where a device has no such
 *  memory, it is ordinary memory. */
void *td__pinned_alloc(td_device *device, size_t bytes, void **arg);
void td__pinned_free(void *data, void *arg);
void td__pinned_use(void *arg, td_stream *stream);
int64_t td__pinned_bytes(const struct td__device_kind *kind);

/* ---- Copies (device_copy.c) ---------------------------------------------------------------------- */

/** Memory of a device, or of the host (pinned: what td__pinned_alloc() gave, or NULL; block: that of td__block_alloc(),
 *  or NULL). */
struct td__place {
    td_device *device;
    void *data;
    void *block;
    void *pinned;
};

/** Copies bytes between any two devices, in the order of their current streams. Where the host's memory takes part, it is
 *  complete on return, unless `async` is set and that memory is pinned: then it is complete when the accelerator's
 *  current stream has run it. */
td_status td__copy_between(const char *call, const struct td__place *to,
                           const struct td__place *from, size_t bytes, bool async);

/** Sets each byte of memory of an open accelerator, on its current stream. */
td_status td__fill_bytes(const struct td__place *place, unsigned char value, size_t bytes);

#endif
