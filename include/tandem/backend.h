/* Backends carry out the operations of a group. For authors of one; docs/adding-a-backend.md
 * walks through an example.
 *
 * The group layer checks the arguments, puts calls in order and runs each in the caller's thread or
 * in the group's own; a backend only has to do the work. It may leave any slot NULL: the operation is
 * then TD_ERR_UNSUPPORTED with a sentence that names a backend which has it.
 *
 * A backend has either the slots that block, one for each collective and post() for messages, or submit(), which starts
 * any call and does not block.
 *
 * Devices. A backend that names kinds of devices in `devices` gets calls on their memory, too. Such a call has a device
 * and a stream: a backend enqueues on the stream, or waits for it before it reads memory of the device. The call is over
 * when its result is ordered in that stream; the group layer makes the caller's stream wait for it.
 *
 * Threads. td_register_backend(), td_work_complete() and the td_reduce_ functions may be called from any thread at any
 * time. On one `self` the library calls the collectives one at a time, from changing threads, and submit() with a
 * collective likewise; post(), submit() with a message, batch_begin(), batch_end(), run_message(), progress(), abort(),
 * has_left() and fills_host() at any time between create() and destroy(), also several at once and during a collective;
 * verify() and destroy() when no other call is under way. Different groups are independent.
 *
 * Growth. td_call and td_backend_context are made by the library and grow at their end: a backend reads the members
 * that its header has, and passes the td_call that it got, not a copy, to the td_reduce_ functions. */
#ifndef TANDEM_BACKEND_H
#define TANDEM_BACKEND_H

#include <tandem/collective.h>
#include <tandem/device.h>
#include <tandem/group.h>

#ifdef __cplusplus
extern "C" {
#endif

/** One call, checked: ranks are ranks in the group, pointers are not NULL where there are elements. */
typedef struct td_call {
    td_op_kind kind;
    const void *input;
    void *output; /* the same as input, or part of it, in place; see group.h */
    size_t count; /* elements, of one rank's part where there are parts; of the whole where parts of
                           all_gather and reduce_scatter are uneven, 0 for those of all_to_all */

    /* Uneven parts, in elements; NULL where they are even, and for other kinds.
     *
     *     all_to_all       input_counts[r] go to rank r, output_counts[s] come from rank s
     *     all_gather       both lists are the same: part r of the output is the input of rank r
     *     reduce_scatter   likewise: part r of the inputs, reduced, is the output of rank r */
    const size_t *input_counts;
    const size_t *output_counts;
    td_dtype dtype;
    td_reduce_op op; /* reduce, all_reduce, reduce_scatter */
    int root;        /* broadcast, reduce, scatter, gather */
    int peer;        /* send, recv: rank in the group, or TD_ANY_SOURCE */
    int tag;         /* send, recv: 0 and above; TD_ANY_TAG of a recv matches these. Below that: the
                           library's own, which only the same tag matches */
    int64_t timeout_ms; /* how long it may take; above 0 */
    uint64_t sequence;  /* of the collective in its group, from 1; 0 for messages */
    uint32_t detail; /* must be the same on all ranks as well: the purpose of the call; 0: none */

    /* Where the buffers are: NULL for host memory. Otherwise `stream` is one of the group's own on that device, which
     * runs after all that the caller has enqueued; what the backend enqueues there is the result of the call. For
     * submit(), the messages to each rank have a stream of their own, and those from each rank. */
    td_device *device;
    td_stream *stream;
} td_call;

/** The group that a backend is to serve. */
typedef struct td_backend_context {
    td_store *store; /* of this backend of this group alone: no other key has its prefix. Open as
                        long as the group */
    const char *name;
    int rank;
    int size;
    const int *global_ranks; /* `size` ranks of the world */
    int64_t timeout_ms;
    const char *options; /* td_group_options.backend_options; may be NULL */
} td_backend_context;

typedef td_status (*td_collective_fn)(void *self, const td_call *call);

typedef struct td_backend_ops {
    /** Makes what serves one group: *self is handed to all others. It must not wait for other ranks
     *  longer than the timeout, and may well not wait at all. `context` lives as long as the group.
     *  Never NULL. */
    td_status (*create)(const td_backend_context *context, void *arg, void **self);

    /** Frees it. No call is under way; works of post() that are not complete are completed with TD_ERR_STATE, before
     *  this returns. Never NULL. */
    void (*destroy)(void *self);

    /** Each carries out a collective and returns when this rank's part is complete. Calls come one at a
     *  time, in order, from changing threads. A failure is returned with td_fail(); the
     *  group is then broken, and gets no further collective. */
    td_collective_fn broadcast;
    td_collective_fn reduce;
    td_collective_fn all_reduce;
    td_collective_fn scatter;
    td_collective_fn gather;
    td_collective_fn all_gather;
    td_collective_fn reduce_scatter;
    td_collective_fn all_to_all;
    td_collective_fn barrier;

    /** Starts a send or a recv, without waiting for the other side. `work` is completed by
     *  td_work_complete(), here or later, from any thread; failing here completes nothing. Calls may
     *  come from several threads at once, also during a collective. */
    td_status (*post)(void *self, const td_call *call, td_work *work);

    /** Makes progress on what was posted, until `work` is complete or `timeout_ms` has passed, which is above 0 or
     *  TD_NOW: without waiting. NULL where threads of the backend's own do it. Called from any thread that waits. */
    void (*progress)(void *self, td_work *work, int64_t timeout_ms);

    /** The group is aborted (td_group_abort(), td_group_shrink()): makes the calls under way fail soon, with the
     *  td_last_error() of this thread. From any thread, also during other calls, several times, and it must not
     *  block. NULL: they go on until their end. A backend with submit() is aborted whenever its group breaks, also since
     *  the process of a member has ended: it ends what it has enqueued on devices. */
    void (*abort)(void *self);

    /* What follows makes a backend faster, or its error texts clearer. All of it may be left out. */

    /** Carries out a send or a recv and returns when it is complete: a post() and its wait in one, without
     *  a work. Calls come like those of post(). */
    td_status (*run_message)(void *self, const td_call *call);

    /** This rank is about to leave the group, which has not failed; no call is under way. Compares the calls
     *  of this rank with those of the others, where the collectives themselves have not done so, and waits up
     *  to `timeout_ms`, which is above 0 or TD_NOW, for ranks that have made fewer. Returns TD_OK or
     *  TD_ERR_MISMATCH. */
    td_status (*verify)(void *self, int64_t timeout_ms);

    /** 1 where `rank` of the group has left it in order, so that the end of its process is no failure; 0 where
     *  it has not; negative where this backend cannot tell for this rank. Must not block. Called for the
     *  world's group, from the thread of the failure detector. */
    int (*has_left)(void *self, int rank);

    /** Whether the ranks of this group keep all processors of this host busy. Queued collectives are then
     *  left for some milliseconds to a thread that waits for them, before the group's own thread begins. */
    bool (*fills_host)(void *self);

    /** The TD_ERR_TIMEOUT of a collective names the late ranks already. Else the group queries them, and
     *  appends what they do. */
    bool explains_timeouts;

    /** all_gather and reduce_scatter take calls with uneven parts. Else the group layer pads the parts to the
     *  longest one, in memory of its own, and makes an even call of it. */
    bool has_uneven;

    /* For backends that do not block, and for devices. */

    /** Starts any call, a collective or a message, without waiting for other ranks; the slots above, from broadcast()
     *  to post(), and run_message() are not used then. Collectives come in the order in which they were called. `work`
     *  is completed by td_work_complete(), here or later, from any thread: on host memory when the result is there, on
     *  a device's when it is ordered in call->stream. A collective is completed at the latest after its timeout, and
     *  without progress(). Failing here completes nothing; TD_ERR_UNSUPPORTED and TD_ERR_INVALID leave the group in
     *  order. The call, with its lists of counts, stays until the work is complete. Parts of all_gather and
     *  reduce_scatter may be uneven, whatever `has_uneven` is. */
    td_status (*submit)(void *self, const td_call *call, td_work *work);

    /** Around the messages of one td_batch_isend_irecv(), by one thread: those in between may be started together, and
     *  need not be started before batch_end(). What a failing batch_end() has not started it completes with that
     *  failure. NULL: each message starts by itself. */
    td_status (*batch_begin)(void *self);
    td_status (*batch_end)(void *self);

    /** The kinds of devices whose memory it takes, with a NULL at the end: {"cpu", "cuda", NULL}. "*" is any kind.
     *  NULL: host memory, "cpu", only. A group whose backend was not chosen uses, for a kind of device, the backend
     *  that was registered last and names it. */
    const char *const *devices;

    /** For a backend with the slots that block: memory of devices is the library's business. It copies by way of pinned
     *  host memory, in pieces, and each piece is a call on host memory. `devices` has the kinds, such as "*". */
    bool stage_devices;

    /** For a backend whose calls do not notice by themselves that the process of a member has ended: the group breaks
     *  then, and abort() is called whenever it breaks, as it is with submit(). */
    bool breaks_with_members;

    /** For submit() on devices: a call may be enqueued after submit() has returned, also by another thread. The backend
     *  calls td_work_begin() and td_work_end() then; otherwise the library does it before submit(), and in
     *  td_work_complete(). */
    bool enqueues_later;

    void *reserved[3]; /* must be zero */
} td_backend_ops;

/** Registers a backend under `name`: letters, digits, '_' and '-'. TD_ERR_STATE where the name is
 *  taken. `ops` and `arg`, which create() gets, must stay. NULL for `ops` unregisters it; groups that
 *  use it go on. */
TD_API td_status td_register_backend(const char *name, const td_backend_ops *ops, void *arg);

/** For threads of a backend with submit(), from create() to destroy(), and not with a lock that abort() locks.
 *
 *  td_backend_fail(): a call has failed after its work was complete. Breaks the group with `status` and the
 *  td_last_error() of this thread, which calls abort(): later calls fail with that, and so do td_work_wait() and
 *  td_work_synchronize() for works on devices.
 *
 *  td_backend_compare(): a collective does not end. Queries `rank` of the group for its calls up to `sequence`, for up to
 *  250 ms. TD_ERR_MISMATCH, with both calls: it has made another one; TD_ERR_PEER: it has left, and has not made the call
 *  as far as this rank knows; if the group has failed there: that. TD_OK else, also where it does not answer. */
TD_API void td_backend_fail(const td_backend_context *context, td_status status);
TD_API td_status td_backend_compare(const td_backend_context *context, uint64_t sequence, int rank);

/** Completes a work of post() or submit(): once, with the td_last_error() of this thread where `status` is not
 *  TD_OK. `source` and `received` are those of a recv (a rank in the group, and bytes). */
TD_API void td_work_complete(td_work *work, td_status status, int source, size_t received);

/** For `enqueues_later`, around what is enqueued for a call on a device. td_work_begin() orders call->stream behind what
 *  the caller had enqueued when it made the call; td_work_end() takes what the stream has then as the result, which the
 *  caller's stream waits for. In between, nothing of another call may be enqueued on that stream, nor be ordered by
 *  td_work_begin(), unless the two are enqueued together: the first call would wait for what the second one waits for. */
TD_API void td_work_begin(td_work *work);
TD_API void td_work_end(td_work *work);

/** On host memory: acc[i] = acc[i] op other[i], rounding each time to the dtype. TD_AVG adds, TD_PREMUL_SUM too:
 *  td_reduce_begin() multiplies an input in place, and td_reduce_end() divides a result over `size`
 *  ranks; for other operations those two do nothing. */
TD_API void td_reduce_begin(const td_call *call, void *data, size_t count);
TD_API void td_reduce_combine(const td_call *call, void *acc, const void *other, size_t count);
TD_API void td_reduce_end(const td_call *call, void *acc, size_t count, int size);

/** Whether the operation of a call is TD_PREMUL_SUM, also by td_reduce_op_create_premul_sum(), and its factor. */
TD_API bool td_reduce_factor(const td_call *call, double *factor);

#ifdef __cplusplus
}
#endif

#endif
