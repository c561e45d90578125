/* GPUs as devices: the table of functions, over CUDA's driver.
 *
 * TANDEM_CUDA_VIRTUAL=N shows each GPU as N devices, so that programs for several can be tested on one; they share its
 * memory and its context. */
#include "cuda/cuda_device.h"

#include "cuda/relaunch.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Calls of the driver: the text of an error begins with the device and what was being done. */
#define TRY(device_, call, ...)                                                                    \
    do {                                                                                           \
        CUresult result_ = (call);                                                                 \
        if (result_ != CUDA_SUCCESS)                                                               \
            return fail(device_, result_, __VA_ARGS__);                                            \
    } while (0)

static td_status fail(const struct cuda_device *device, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static td_status fail(const struct cuda_device *device, CUresult result, const char *format, ...)
{
    char what[256];
    int length = snprintf(what, sizeof what, "%s: ", device->name);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what + length, sizeof what - (size_t)length, format, arguments);
    va_end(arguments);
    return td__cuda_check(result, what);
}

static const char *const fault_names[] = {
    [CUDA_FAULT_INDEX_SELECT] = "index_select",
    [CUDA_FAULT_INDEX_ADD] = "index_add",
    [CUDA_FAULT_GATHER] = "gather",
    [CUDA_FAULT_SCATTER_ADD] = "scatter_add",
    [CUDA_FAULT_NLL_LOSS] = "nll_loss",
    [CUDA_FAULT_CROSS_ENTROPY] = "cross_entropy",
};

/* Other libraries of the process may have changed it, so it is asked for each time: that reads a variable of the thread, which
 * costs a fraction of setting it. */
static CUresult make_current(const struct cuda_device *device)
{
    CUcontext current = NULL;
    CUresult result = td__cuda.cuCtxGetCurrent(&current);
    return !result && current == device->context ? CUDA_SUCCESS
                                                 : td__cuda.cuCtxSetCurrent(device->context);
}

td_status td__cuda_enter(const struct cuda_device *device)
{
    if (__atomic_load_n(&device->fault->code, __ATOMIC_ACQUIRE) > 0) {
        const struct cuda_fault *fault = device->fault;
        return td_fail(TD_ERR_INVALID,
                       "%s on %s: index %lld at position %lld is not in the range 0 to %lld",
                       fault_names[fault->kernel], device->name, (long long)fault->index,
                       (long long)fault->position, (long long)fault->limit - 1);
    }
    TRY(device, make_current(device), "choosing the context");
    return TD_OK;
}

/* ---- Finding and opening ---------------------------------------------------------------------------------- */

static int virtual_devices(void)
{
    const char *text = getenv("TANDEM_CUDA_VIRTUAL");
    char *end;
    if (!text || !*text)
        return 1;
    long number = strtol(text, &end, 10);
    if (*end || number < 1 || number > 64) {
        td_fail(TD_ERR_INVALID, "TANDEM_CUDA_VIRTUAL=%s is not a number from 1 to 64", text);
        return -1;
    }
    return (int)number;
}

static int count_devices(void *arg)
{
    (void)arg;
    int each = virtual_devices(), count = td__cuda_count_quietly();
    if (each < 0)
        return -1;
    if (count < 0 && (td__cuda_load() || td__cuda_check(td__cuda.cuDeviceGetCount(&count),
                                                        "cuda: counting the devices")))
        return -1;
    return count * each;
}

static td_status describe(void *arg, char *text, size_t size)
{
    (void)arg;
    int count = td__cuda_count_quietly();
    if (count < 0)
        snprintf(text, size, "GPUs of NVIDIA, by CUDA's driver");
    else
        snprintf(text, size, "%d GPU%s of NVIDIA, by CUDA's driver", count, count == 1 ? "" : "s");
    return TD_OK;
}

static td_status attribute(const struct cuda_device *device, CUdevice_attribute which, int *value)
{
    TRY(device, td__cuda.cuDeviceGetAttribute(value, which, device->device), "attribute %d",
        (int)which);
    return TD_OK;
}

static td_status open_context(struct cuda_device *device)
{
    TRY(device, td__cuda.cuDevicePrimaryCtxRetain(&device->context, device->device),
        "opening the device");
    TRY(device, td__cuda.cuCtxSetCurrent(device->context), "choosing the context");
    td_status status = attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                 &device->processors);
    if (!status)
        status = attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                           &device->shared_memory);
    if (status)
        return status;
    TRY(device,
        td__cuda.cuMemHostAlloc((void **)&device->fault, sizeof *device->fault,
                                CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "pinning memory");
    memset(device->fault, 0, sizeof *device->fault);
    TRY(device, td__cuda.cuMemHostGetDevicePointer_v2(&device->fault_address, device->fault, 0),
        "mapping memory");
    return TD_OK;
}

static td_status open_device(void *arg, int index, void **self)
{
    (void)arg;
    int each = virtual_devices();
    if (each < 0)
        return TD_ERR_INVALID;
    td_status status = td__cuda_load();
    if (status)
        return status;
    struct cuda_device *device = calloc(1, sizeof *device);
    if (!device)
        return td_fail(TD_ERR_NOMEM, "cuda:%d: out of memory", index);
    snprintf(device->name, sizeof device->name, "cuda:%d", index);
    CUresult result = td__cuda.cuDeviceGet(&device->device, index / each);
    status = result ? fail(device, result, "finding the device") : open_context(device);
    if (status) {
        free(device);
        return status;
    }
    *self = device;
    return TD_OK;
}

/* ---- Memory ------------------------------------------------------------------------------------------------ */

static td_status alloc(void *self, size_t bytes, void **data)
{
    const struct cuda_device *device = self;
    CUdeviceptr address;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device, td__cuda.cuMemAlloc_v2(&address, bytes), "allocating %zu bytes", bytes);
    *data = (void *)address; /* NOLINT: addresses of the device are numbers for the driver */
    return TD_OK;
}

static void free_memory(void *self, void *data)
{
    const struct cuda_device *device = self;
    make_current(device);
    td__cuda.cuMemFree_v2((CUdeviceptr)data);
}

static td_status memory_info(void *self, size_t *available, size_t *total)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device, td__cuda.cuMemGetInfo_v2(available, total), "memory");
    return TD_OK;
}

static td_status alloc_pinned(void *self, size_t bytes, void **data)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device, td__cuda.cuMemHostAlloc(data, bytes, CU_MEMHOSTALLOC_PORTABLE),
        "pinning %zu bytes of the host", bytes);
    return TD_OK;
}

static void free_pinned(void *self, void *data)
{
    const struct cuda_device *device = self;
    make_current(device);
    td__cuda.cuMemFreeHost(data);
}

/* ---- Streams and events ------------------------------------------------------------------------------------ */

static td_status stream_create(void *self, int priority, void **stream)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    struct cuda_stream *made = calloc(1, sizeof *made);
    if (!made)
        return td_fail(TD_ERR_NOMEM, "%s: out of memory", device->name);
    /* The driver's smaller numbers run first, and it limits them to what the device has. */
    CUresult result = td__cuda.cuStreamCreateWithPriority(
        &made->handle, CU_STREAM_NON_BLOCKING, priority == INT_MIN ? INT_MAX : -priority);
    if (result) {
        free(made);
        return fail(device, result, "creating a stream");
    }
    if (!priority)
        made->relaunches = td__cuda_relaunches_create();
    *stream = made;
    return TD_OK;
}

static void stream_destroy(void *self, void *stream)
{
    const struct cuda_device *device = self;
    struct cuda_stream *old = stream;
    make_current(device);
    td__cuda_relaunches_free(old->relaunches);
    td__cuda.cuStreamDestroy_v2(old->handle);
    free(old);
}

static td_status done_or(const struct cuda_device *device, CUresult result, bool *done)
{
    *done = result == CUDA_SUCCESS;
    return result == CUDA_ERROR_NOT_READY || !result ? td__cuda_enter(device)
                                                     : fail(device, result, "what was enqueued");
}

static td_status waited(const struct cuda_device *device, CUresult result)
{
    return result ? fail(device, result, "what was enqueued") : td__cuda_enter(device);
}

static td_status stream_synchronize(void *self, void *stream)
{
    const struct cuda_device *device = self;
    make_current(device);
    return waited(device, td__cuda.cuStreamSynchronize(((struct cuda_stream *)stream)->handle));
}

static td_status stream_query(void *self, void *stream, bool *done)
{
    const struct cuda_device *device = self;
    make_current(device);
    return done_or(device, td__cuda.cuStreamQuery(((struct cuda_stream *)stream)->handle), done);
}

static td_status event_create(void *self, bool timing, void **event)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device,
        td__cuda.cuEventCreate((CUevent *)event,
                               timing ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING),
        "creating an event");
    return TD_OK;
}

static void event_destroy(void *self, void *event)
{
    const struct cuda_device *device = self;
    make_current(device);
    td__cuda.cuEventDestroy_v2(event);
}

static td_status event_record(void *self, void *event, void *stream)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device, td__cuda.cuEventRecord(event, ((struct cuda_stream *)stream)->handle),
        "recording an event");
    return TD_OK;
}

static td_status event_wait(void *self, void *stream, void *event)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device, td__cuda.cuStreamWaitEvent(((struct cuda_stream *)stream)->handle, event, 0),
        "waiting for an event");
    return TD_OK;
}

static td_status event_synchronize(void *self, void *event)
{
    const struct cuda_device *device = self;
    make_current(device);
    return waited(device, td__cuda.cuEventSynchronize(event));
}

static td_status event_query(void *self, void *event, bool *done)
{
    const struct cuda_device *device = self;
    make_current(device);
    return done_or(device, td__cuda.cuEventQuery(event), done);
}

static td_status event_elapsed(void *self, void *start, void *end, double *milliseconds)
{
    const struct cuda_device *device = self;
    float elapsed;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device, td__cuda.cuEventElapsedTime_v2(&elapsed, start, end), "timing two events");
    *milliseconds = (double)elapsed;
    return TD_OK;
}

static td_status synchronize(void *self)
{
    const struct cuda_device *device = self;
    make_current(device);
    return waited(device, td__cuda.cuCtxSynchronize());
}

/* ---- Copies ------------------------------------------------------------------------------------------------ */

static td_status copy_in(void *self, void *stream, void *data, const void *host, size_t bytes,
                         bool pinned)
{
    const struct cuda_device *device = self;
    (void)pinned; /* the driver knows; it has read other memory when it returns */
    td_status status = td__cuda_enter(device);
    if (status || !bytes)
        return status;
    TRY(device,
        td__cuda.cuMemcpyHtoDAsync_v2((CUdeviceptr)data, host, bytes,
                                      ((struct cuda_stream *)stream)->handle),
        "copying %zu bytes to the device", bytes);
    return TD_OK;
}

static td_status copy_out(void *self, void *stream, void *host, const void *data, size_t bytes,
                          bool pinned)
{
    const struct cuda_device *device = self;
    (void)pinned;
    td_status status = td__cuda_enter(device);
    if (status || !bytes)
        return status;
    TRY(device,
        td__cuda.cuMemcpyDtoHAsync_v2(host, (CUdeviceptr)data, bytes,
                                      ((struct cuda_stream *)stream)->handle),
        "copying %zu bytes to the host", bytes);
    return TD_OK;
}

static td_status copy(void *self, void *stream, void *to, const void *from, size_t bytes)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status || !bytes)
        return status;
    TRY(device,
        td__cuda.cuMemcpyDtoDAsync_v2((CUdeviceptr)to, (CUdeviceptr)from, bytes,
                                      ((struct cuda_stream *)stream)->handle),
        "copying %zu bytes", bytes);
    return TD_OK;
}

static td_status copy_from(void *self, void *stream, void *to, void *other, const void *from,
                           size_t bytes)
{
    const struct cuda_device *device = self, *source = other;
    if (source->context == device->context)
        return copy(self, stream, to, from, bytes);
    td_status status = td__cuda_enter(device);
    if (status || !bytes)
        return status;
    TRY(device,
        td__cuda.cuMemcpyPeerAsync((CUdeviceptr)to, device->context, (CUdeviceptr)from,
                                   source->context, bytes, ((struct cuda_stream *)stream)->handle),
        "copying %zu bytes from %s", bytes, source->name);
    return TD_OK;
}

static td_status fill(void *self, void *stream, void *data, unsigned char value, size_t bytes)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status || !bytes)
        return status;
    TRY(device,
        td__cuda.cuMemsetD8Async((CUdeviceptr)data, value, bytes,
                                 ((struct cuda_stream *)stream)->handle),
        "filling %zu bytes", bytes);
    return TD_OK;
}

/* ---- Graphs ------------------------------------------------------------------------------------------------ */

/* Relaxed: other threads, and the cache of memory, call the driver as ever meanwhile. */
static td_status capture_begin(void *self, void *stream)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device,
        td__cuda.cuStreamBeginCapture_v2(((struct cuda_stream *)stream)->handle,
                                         CU_STREAM_CAPTURE_MODE_RELAXED),
        "beginning to capture a graph");
    td__cuda_relaunch_pause();
    return TD_OK;
}

static td_status capture_end(void *self, void *stream, void **graph)
{
    const struct cuda_device *device = self;
    CUgraph recorded = NULL;
    CUgraphExec ready = NULL;
    make_current(device);
    CUresult result = td__cuda.cuStreamEndCapture(((struct cuda_stream *)stream)->handle,
                                                  &recorded);
    td__cuda_relaunch_resume();
    td_status status = result ? fail(device, result, "capturing a graph") : TD_OK;
    if (!status && graph) {
        result = td__cuda.cuGraphInstantiateWithFlags(&ready, recorded, 0);
        status = result ? fail(device, result, "preparing a graph") : TD_OK;
    }
    if (recorded)
        td__cuda.cuGraphDestroy(recorded);
    if (!status && graph)
        *graph = ready;
    return status;
}

static td_status graph_launch(void *self, void *graph, void *stream)
{
    const struct cuda_device *device = self;
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    TRY(device, td__cuda.cuGraphLaunch(graph, ((struct cuda_stream *)stream)->handle),
        "launching a graph");
    return TD_OK;
}

static void graph_destroy(void *self, void *graph)
{
    const struct cuda_device *device = self;
    make_current(device);
    td__cuda.cuGraphExecDestroy(graph);
}

const td_device_ops td__cuda_ops = {
    .version = TD_DEVICE_OPS_VERSION,
    .size = sizeof(td_device_ops),
    .kind = "cuda",
    .describe = describe,
    .count = count_devices,
    .open = open_device,
    .alloc = alloc,
    .free = free_memory,
    .memory_info = memory_info,
    .alloc_pinned = alloc_pinned,
    .free_pinned = free_pinned,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_synchronize = stream_synchronize,
    .stream_query = stream_query,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_synchronize = event_synchronize,
    .event_query = event_query,
    .event_elapsed = event_elapsed,
    .synchronize = synchronize,
    .copy_in = copy_in,
    .copy_out = copy_out,
    .copy = copy,
    .copy_from = copy_from,
    .fill = fill,
    .kernels = &td__cuda_kernels,
    .breaks_fork = true,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .graph_launch = graph_launch,
    .graph_destroy = graph_destroy,
};
