/* For authors of devices: the table of functions behind a kind of device. docs/adding-a-device.md walks through one.
 *
 * The library does what is alike for all devices: names, handles, the cache of memory, the order of streams where
 * memory is freed, copies between devices, missing kernels. A device offers raw memory, streams, events, copies, and a
 * table of kernels (kernels.h). `self` is what open() returned, `stream` and `event` what their create functions did.
 *
 * Functions return TD_OK, or a status with td_fail(). What is enqueued on a stream may fail later: then each later call
 * on the device returns that failure, and nothing that was enqueued after it in the same stream changes memory.
 *
 * Threads. All functions may be called from any thread at any time, also several at once.
 *
 * Growth. The table grows at its end. A device fills in `version` and `size`; members that its header did not have
 * count as NULL. */
#ifndef TANDEM_DEVICE_OPS_H
#define TANDEM_DEVICE_OPS_H

#include <tandem/device.h>

#ifdef __cplusplus
extern "C" {
#endif

struct td_kernels; /* kernels.h */

#define TD_DEVICE_OPS_VERSION 1

typedef struct td_device_ops {
    uint32_t version; /* TD_DEVICE_OPS_VERSION */
    uint32_t size;    /* sizeof(td_device_ops) */
    const char *kind; /* letters, digits and '_', with a letter first; up to 15 */

    /** One line about what is there, such as versions and the name of the first device; for lists of devices. May be
     *  NULL. Initialises nothing. */
    td_status (*describe)(void *arg, char *text, size_t size);

    /** How many devices there are. Initialises nothing. A negative number: it cannot tell, with td_fail(). */
    int (*count)(void *arg);

    /** Initialises device number `index`, on its first use; *self is handed to all others. */
    td_status (*open)(void *arg, int index, void **self);

    /* ---- Memory ------------------------------------------------------------------------------- */

    /** `bytes` bytes, more than 0, aligned to 256. TD_ERR_NOMEM without memory. */
    td_status (*alloc)(void *self, size_t bytes, void **data);
    /** Frees it. Nothing that is enqueued uses it. */
    void (*free)(void *self, void *data);
    /** May be NULL. */
    td_status (*memory_info)(void *self, size_t *available, size_t *total);

    /** Host memory that the device can copy from and to while the host goes on; both NULL: ordinary memory is used. */
    td_status (*alloc_pinned)(void *self, size_t bytes, void **data);
    void (*free_pinned)(void *self, void *data);

    /* ---- Streams and events ------------------------------------------------------------------- */

    td_status (*stream_create)(void *self, int priority, void **stream);
    void (*stream_destroy)(void *self, void *stream); /* what is enqueued still runs */
    td_status (*stream_synchronize)(void *self, void *stream);
    /** *done: whether all that was enqueued has run. */
    td_status (*stream_query)(void *self, void *stream, bool *done);

    td_status (*event_create)(void *self, bool timing, void **event);
    void (*event_destroy)(void *self, void *event);
    td_status (*event_record)(void *self, void *event, void *stream);
    /** `stream` is of this device, `event` of any device of the kind, and was recorded: what is enqueued later waits for
     *  that point, also where the event is recorded again or destroyed meanwhile. */
    td_status (*event_wait)(void *self, void *stream, void *event);
    td_status (*event_synchronize)(void *self, void *event);
    td_status (*event_query)(void *self, void *event, bool *done);
    td_status (*event_elapsed)(void *self, void *start, void *end, double *milliseconds);

    /** Waits for all streams. */
    td_status (*synchronize)(void *self);

    /* ---- Copies and fills, enqueued ------------------------------------------------------------ */

    /** From host memory. Where it is not `pinned`, `host` has been read when this returns; else it stays until the
     *  stream has run the copy. */
    td_status (*copy_in)(void *self, void *stream, void *data, const void *host, size_t bytes,
                         bool pinned);
    /** To host memory; the caller waits for the stream before it reads `host`. */
    td_status (*copy_out)(void *self, void *stream, void *host, const void *data, size_t bytes,
                          bool pinned);
    /** Inside the device; the two do not overlap. */
    td_status (*copy)(void *self, void *stream, void *to, const void *from, size_t bytes);
    /** From another device of the kind, enqueued on `stream` of this one. NULL: the library copies by way of the host. */
    td_status (*copy_from)(void *self, void *stream, void *to, void *other, const void *from,
                           size_t bytes);
    /** Sets each byte. */
    td_status (*fill)(void *self, void *stream, void *data, unsigned char value, size_t bytes);

    /** Kernels; see kernels.h. */
    const struct td_kernels *kernels;

    /** Threads of the device run in this process, so that a fork of it could not use the device: td_spawn() starts
     *  programs afresh instead, once a device of this kind was opened. */
    bool breaks_fork;

    /** Its DLDeviceType in DLPack (dlpack.h): kDLExtDev, 12, for one that DLPack has no number for. 0: that of the kind's
     *  name ("cuda" 2, "rocm" 10), or none, and tensors on it cannot be exported or imported. */
    int dlpack_type;

    /* ---- Graphs (td_graph_capture()); all four NULL: the device has none ------------------------- */

    /** From now on, what any thread enqueues on `stream`, and on streams of the device that wait for its events, is
     *  recorded instead of being run. Allocation, and other streams, go on as ever. Until the end the library neither
     *  waits for these streams and events nor copies from or to the host on them. */
    td_status (*capture_begin)(void *self, void *stream);
    /** Ends that, also where it fails. *graph gets what was recorded, ready to be launched; with `graph` NULL it is
     *  discarded. Every stream that has joined the capture must have been waited for by `stream`. */
    td_status (*capture_end)(void *self, void *stream, void **graph);
    td_status (*graph_launch)(void *self, void *graph, void *stream);
    void (*graph_destroy)(void *self, void *graph); /* what is enqueued still runs */

    void *reserved[4]; /* must be zero */
} td_device_ops;

/** Registers a kind of device. `ops` and `arg` stay until the end of the process.
 *
 *  Errors: TD_ERR_STATE, the kind is taken; TD_ERR_INVALID, a function is missing or the name is malformed;
 *  TD_ERR_MISMATCH, the version of the table is too old or too new for this library: the text has both. */
TD_API td_status td_register_device(const td_device_ops *ops, void *arg);

/** What open() returned for a device, and the stream's own object; for kernels. Neither fails for the device of a
 *  tensor that exists. */
TD_API void *td_device_self(td_device *device);
TD_API void *td_stream_self(td_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
