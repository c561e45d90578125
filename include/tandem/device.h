/* Devices: where the memory of tensors is, and what computes with it.
 *
 *     "cpu"                 the host
 *     "cpu:0", "cpu:1"…     devices of their own on the host's processor, each with a worker thread.
 *                           Operators do not mix tensors of different devices, so that a program
 *                           for several accelerators can be written and tested without one
 *     "cuda:0", "cuda:1"…   devices of a kind that a plug-in, or the program itself, has registered
 *                           (plugin.h, device_ops.h)
 *     "meta", "meta:cuda:1" tensors without memory: what a module has before td_module_materialize() (nn.h)
 *
 *     td_device *gpu = td_device_get("cuda:1");
 *     td_tensor *x = td_zeros(TD_SHAPE(2, 3), TD_F32, gpu);
 *
 * A device has memory, streams and events. What computes or copies on an accelerator is enqueued on the thread's
 * current stream of the device, and the call returns before it has run; one stream runs in order. On the host a stream
 * is the calling thread: every call has run when it returns, and streams and events of the host do nothing.
 *
 * A failure on the device that is noticed after its call was enqueued is reported by the next call that waits for the
 * device, or enqueues on it.
 *
 * Threads. All functions may be called from any thread at any time; one stream, and one event, may be used by several
 * threads. The current device and the current streams belong to a thread; a new thread has the defaults. */
#ifndef TANDEM_DEVICE_H
#define TANDEM_DEVICE_H

#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A device. Handles are never freed, and each device has one: they can be compared. NULL, as an argument, is the
 *  thread's current device. */
typedef struct td_device td_device;

/* ---- Finding one -------------------------------------------------------------------------------- */

/** The device of a name. A kind without a number, "cuda", is the thread's current device of that kind. NULL as a name:
 *  the thread's current device.
 *
 *  Finding a device initialises nothing and never fails: that there is no such device is the error of the first call
 *  that uses it, which names it. */
TD_API td_device *td_device_get(const char *name);

/** "cuda:1"; its kind, "cuda"; its number, which is -1 for "cpu". */
TD_API const char *td_device_name(const td_device *device);
TD_API const char *td_device_kind(const td_device *device);
TD_API int td_device_index(const td_device *device);

/**
 * The meta device of `device`, "meta" for "cpu" and "meta:cuda:1" for "cuda:1": tensors on it have a shape and a dtype, and
 * no memory (td_tensor_data() is NULL). Their initial values are recorded, with the random numbers that `device` would have
 * drawn, and its generator advances as if it had: td_module_materialize(), td_fsdp() and td_tensor_to() compute them later,
 * bit by bit the same. Views of such tensors can be made, and they can be cloned, converted, and moved to other meta
 * devices; what else needs elements is TD_ERR_STATE. A tensor that is moved to a meta device loses its values.
 *
 * Recorded are td_zeros() and its like, td_rand() and its like, td_arange(), td_from_array() (which keeps the array),
 * td_tensor_copy(), td_fill_(), td_uniform_() and its like, td_init_*(), and td_add_scalar_(), td_mul_scalar_(), td_clamp_(),
 * td_f_relu_() of such a tensor.
 *
 * The meta device of a meta device is itself. `device` is not initialised.
 */
TD_API td_device *td_device_meta(td_device *device);

/** Whether it is one. */
TD_API bool td_device_is_meta(const td_device *device);

/** Whether there is a device of this name. Initialises nothing, but looks for the plug-in of an unknown kind. */
TD_API bool td_device_exists(const char *name);

/** How many devices of a kind there are ("cpu": numbered ones); 0 for an unknown kind. Initialises nothing, as above. */
TD_API int td_device_count(const char *kind);

/* ---- The current device -------------------------------------------------------------------------
 *
 * Constructors of tensors and modules create on the current device, unless they are given another one. It is "cpu" at
 * the start of each thread. */

/** Makes `device` the current one of the thread, and that of its kind. TD_ERR_INVALID: there is none. */
TD_API td_status td_set_device(td_device *device);
TD_API td_device *td_current_device(void);

/** Until the end of the block, `device` is the current one:
 *
 *     TD_DEVICE_SCOPE(td_device_get("cuda:1"));
 *     td_module *net = td_linear(10, 10);
 *
 *  Where there is no such device, the calls in the block that use it fail. */
#define TD_DEVICE_SCOPE(device) TD_DEVICE_SCOPE_NAMED(TD_UNIQUE(td_device_scope_), device)
#define TD_DEVICE_SCOPE_NAMED(name, device)                                                        \
    td_device_scope name                                                                           \
        __attribute__((cleanup(td_device_scope_end), unused)) = td_device_scope_begin(device)

/** State of TD_DEVICE_SCOPE; its members are private. */
typedef struct td_device_scope {
    td_device *before;
} td_device_scope;
TD_API td_device_scope td_device_scope_begin(td_device *device);
TD_API void td_device_scope_end(td_device_scope *scope);

/* ---- Workers ------------------------------------------------------------------------------------
 *
 * A numbered device has a worker thread, which runs functions in order; different devices run at the same time. A
 * backward pass runs the nodes of a numbered device there. */

/** Queues fn(arg) for the worker thread of a numbered device, and returns at once. The device is the worker's current
 *  one. On the host ("cpu") fn runs in this call. */
TD_API td_status td_device_submit(td_device *device, void (*fn)(void *arg), void *arg);

/** Waits until the worker of a device has run all its functions, and then until all its streams have run what was
 *  enqueued. Not to be called by its own worker. Returns the device's failure, if there was one. */
TD_API td_status td_device_synchronize(td_device *device);

/* ---- Streams ------------------------------------------------------------------------------------ */

/** A queue of a device. Counted; the default stream of a device is never freed. */
typedef struct td_stream td_stream;

/** A new stream; NULL on failure. A higher `priority` runs first where the device can choose; 0 is the default. */
TD_API td_stream *td_stream_create(td_device *device, int priority);
TD_API td_stream *td_stream_retain(td_stream *stream);
TD_API void td_stream_release(td_stream *stream); /* does not wait: what is enqueued still runs */

/** The stream on which the thread enqueues for a device; NULL, with the last error set, where there is no such device.
 *  It is the device's default stream, which all threads share, unless the thread has set another one. */
TD_API td_stream *td_current_stream(td_device *device);
TD_API td_stream *td_default_stream(td_device *device);

/** Makes it the thread's current stream of its device. The thread holds a reference. */
TD_API td_status td_set_stream(td_stream *stream);

/** The device of a stream; NULL for NULL. */
TD_API td_device *td_stream_device(const td_stream *stream);

/** Waits until the stream has run all that was enqueued before this call. Returns its failure, if there was one. */
TD_API td_status td_stream_synchronize(td_stream *stream);

/** Whether it has run all that was enqueued. */
TD_API bool td_stream_is_done(td_stream *stream);

/** What is enqueued on `stream` after this call runs after what is on `other` now. The streams may be of different
 *  devices. The host does not wait, except between different kinds of devices. */
TD_API td_status td_stream_wait_stream(td_stream *stream, td_stream *other);

/** Until the end of the block, the thread's current stream of its device is `stream`. */
#define TD_STREAM_SCOPE(stream) TD_STREAM_SCOPE_NAMED(TD_UNIQUE(td_stream_scope_), stream)
#define TD_STREAM_SCOPE_NAMED(name, stream)                                                        \
    td_stream_scope name                                                                           \
        __attribute__((cleanup(td_stream_scope_end), unused)) = td_stream_scope_begin(stream)

/** State of TD_STREAM_SCOPE; its members are private. */
typedef struct td_stream_scope {
    td_stream *before;
} td_stream_scope;
TD_API td_stream_scope td_stream_scope_begin(td_stream *stream);
TD_API void td_stream_scope_end(td_stream_scope *scope);

/* ---- Events ------------------------------------------------------------------------------------- */

/** A point in a stream. */
typedef struct td_event td_event;

typedef struct td_event_options {
    bool timing; /* for td_event_elapsed_ms() */
    void *reserved[2];
} td_event_options;

/** NULL on failure; `options` may be NULL. An event that was not recorded has passed. */
TD_API td_event *td_event_create(td_device *device, const td_event_options *options);
TD_API void td_event_destroy(td_event *event);

/** Records the stream's present end; again, and the former point is forgotten. NULL: the current stream. */
TD_API td_status td_event_record(td_event *event, td_stream *stream);

/** What is enqueued on `stream` (NULL: the current one of the event's device) after this call runs after the event. */
TD_API td_status td_stream_wait_event(td_stream *stream, td_event *event);

/** Waits on the host. */
TD_API td_status td_event_synchronize(td_event *event);

/** Whether its point has passed. */
TD_API bool td_event_is_done(td_event *event);

/** Milliseconds from one event to another, both with `timing` and passed. */
TD_API td_status td_event_elapsed_ms(td_event *start, td_event *end, double *milliseconds);

/* ---- Memory -------------------------------------------------------------------------------------
 *
 * Memory of accelerators comes from a cache: what a tensor gives back serves the next one on the same stream at once,
 * and on others when the device has finished with it. A tensor that an operator uses on another stream than its own
 * stays allocated until that stream has run the operator. */

typedef struct td_memory_stats {
    int64_t allocated;      /* bytes of tensors */
    int64_t allocated_peak; /* the most since the start, or td_device_reset_peak() */
    int64_t reserved;       /* bytes that were taken from the device, with the cache */
    int64_t reserved_peak;
    int64_t tensors;     /* allocations that are in use */
    int64_t allocations; /* made since the start */
    int64_t taken;       /* how many of those the cache could not serve */
    int64_t flushes;     /* how often the cache was emptied since memory was short */
    int64_t failures;    /* allocations that failed for want of memory */
    int64_t total;       /* memory of the device, and how much of it is free; 0: unknown */
    int64_t available;
    int64_t pinned; /* host memory that was pinned for this kind of device, with its cache */
    void *reserved_fields[4];
} td_memory_stats;

/** Statistics of a device that was used; zeros before. For the host only `allocated` and `allocated_peak`: bytes that the
 *  library has allocated for tensors of this process. */
TD_API td_status td_device_memory_stats(td_device *device, td_memory_stats *stats);

/** Sets the peaks to the present values. */
TD_API td_status td_device_reset_peak(td_device *device);

/** Gives the cache's free memory back to the device; of the host, memory of tensors that were freed to the system. */
TD_API td_status td_device_empty_cache(td_device *device);

/** Which calls hold how much memory, the greatest first, one a line: what the error of an allocation says, in full. */
TD_API td_bytes td_device_memory_text(td_device *device);

/* ---- Waiting ------------------------------------------------------------------------------------
 *
 * The host waits for an accelerator only in calls that return its numbers to the program (td_item(), td_tensor_text(),
 * td_tensor_to() of "cpu", td_equal(), saving a checkpoint …) and in those whose name has "synchronize". Each wait is
 * counted. With TANDEM_LOG=debug each is a line of the log with the name of the call. */

/** How often the host has waited for a device since the start; 0 for the host. */
TD_API int64_t td_device_waits(td_device *device);

/* ---- Graphs -------------------------------------------------------------------------------------
 *
 * What a function enqueues on a device, such as a step of training, can be captured as a graph and run again with one
 * call, which costs the host a few microseconds however many operators there are:
 *
 *     static td_status step(void *arg)
 *     {
 *         struct training *t = arg;
 *         TD_SCOPE;
 *         td_optimizer_zero_grad(t->optimizer);
 *         td_tensor *loss = td_cross_entropy(td_forward(t->net, t->x), t->labels);
 *         if (td_backward(loss) || td_tensor_copy(t->loss, td_detach(loss)) ||
 *             td_clip_grad_norm_(t->net, 1.0, NULL, NULL))
 *             return td_last_status();
 *         return td_optimizer_step(t->optimizer);
 *     }
 *
 *     for (int i = 0; i < steps; i++) {
 *         td_tensor_copy(t->x, inputs of the batch);
 *         td_tensor_copy(t->labels, its labels);
 *         status = i == 0   ? step(t)
 *                  : i == 1 ? td_graph_capture(gpu, step, t, &graph)
 *                           : td_graph_launch(graph);
 *         td_schedule_step(t->schedule);
 *     }
 *
 * A launch does on the device what calling the function again would do, with the same numbers: steps of optimizers use
 * the learning rates of the time of the launch and count on, and random numbers go on where the generator is. Nothing
 * else that the function does on the host happens again: prints, counters, and schedules belong outside of it. It always
 * takes the same way, with the same shapes.
 *
 * Inputs are tensors that exist before; the program copies the next numbers into them before a launch. Results that the
 * function keeps (gradients, a loss) stay where they are, and each launch writes them anew.
 *
 * In a function that is being captured, calls that wait for the device (td_item()), or copy between the host and the
 * device, are TD_ERR_STATE with the name of the call. Make a step without capture first: it makes what outlives a step,
 * such as the state of an optimizer, and loads kernels.
 *
 * The memory that the function allocated belongs to the graph until it is destroyed, and tensors that existed before
 * and that it used are not given to others meanwhile, even if the program has released them. Modules, optimizers and
 * generators that it used must outlive the last launch; memory of td_from_blob() too. After td_optimizer_load_state()
 * a launch is TD_ERR_STATE: capture anew.
 *
 * On the host ("cpu", "cpu:0") a graph is the function itself, and each launch calls it, so that a program is the same
 * on all devices. */

typedef struct td_graph td_graph;

/** Calls step(arg), captures what it enqueues on the current stream of `device`, and on streams that wait for that one
 *  inside the function, and launches it once: after the call, the device and the host are as after step(arg).
 *
 *  Errors: that of `step`: nothing that it enqueued runs, but counts of optimizers and generators may have advanced.
 *  TD_ERR_UNSUPPORTED with the device's name, if it has no graphs; TD_ERR_STATE, if a capture is under way on it, or for
 *  what the function may not do; TD_ERR_INVALID. */
TD_API td_status td_graph_capture(td_device *device, td_status (*step)(void *arg), void *arg,
                                  td_graph **graph);

/** Enqueues it on the thread's current stream of its device. One graph runs once at a time: a launch on another stream
 *  waits there for the one before. Returns without waiting; fails as what the function had enqueued would. */
TD_API td_status td_graph_launch(td_graph *graph);

/** Ends it: launches that were enqueued still run, and its memory is used again after them. NULL is ignored. */
TD_API void td_graph_destroy(td_graph *graph);

#ifdef __cplusplus
}
#endif

#endif
