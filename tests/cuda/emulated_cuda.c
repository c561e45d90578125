/* A libcuda for machines without a GPU: memory is the host's, streams have run everything when a call returns, and the
 * kernels are those of the plug-in, compiled for the host (emulated.h). For tests: TANDEM_CUDA_SO names this file.
 *
 *     EMULATED_CUDA_DEVICES=2        how many GPUs there are; 1 if not set
 *     EMULATED_CUDA_VERSION=11040    what cuDriverGetVersion() says
 *     EMULATED_CUDA_MEMORY=N         bytes of memory a GPU
 *     EMULATED_CUDA_FAIL=NAME:N      the Nth call of a function fails, as do all that follow
 *     EMULATED_CUDA_CAPTURING=1      streams are said to be captured into a graph
 *     EMULATED_CUDA_REVERSE=1        threads run from the last to the first
 *     EMULATED_CUDA_TRACE=1          what is enqueued, kernels, copies and fills, is listed on standard error
 *     EMULATED_CUDA_COUNTS=1         how often each function was called is listed there when the process ends
 *     EMULATED_CUDA_NULL=1           kernels, copies inside the device and fills do nothing, and return at once: what is
 *                                    left is the cost of the library on the host */
#include "emulated_counts.h"
#include "emulated_graph.h"

#include <cuda.h>

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define EXPORT __attribute__((visibility("default")))

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

/* Whether this call is one that is to fail. */
static bool fails(const char *function)
{
    static long calls;
    const char *text = getenv("EMULATED_CUDA_FAIL");
    size_t length = strlen(function);
    return text && !strncmp(text, function, length) && text[length] == ':' &&
           __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) >= strtol(text + length + 1, NULL, 10);
}

#define MAY_FAIL(error)                                                                            \
    if (fails(__func__))                                                                           \
    return error

/* Lists what is enqueued: a kernel, or the function. */
static void trace(const void *kernel, const char *function)
{
    Dl_info info;
    if (setting("EMULATED_CUDA_TRACE", 0))
        fprintf(stderr, "enqueued %s\n",
                kernel && dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : function);
}

/* ---- Threads of a block ------------------------------------------------------------------------------------ */

struct index {
    unsigned x, y, z;
};

EXPORT struct index emulated_thread, emulated_block, emulated_block_size, emulated_grid_size;

struct kernel {
    void (*run)(const void *args);
    int synchronizes;
    size_t bytes; /* of its argument */
};

enum {
    MOST_THREADS = 1024,
    STACK = 128 << 10,
    SHARED = 256 << 10,
    SHARED_BY_DEFAULT = 48 << 10,
    LANES = 32
};

struct barrier {
    int live, arrived;
    unsigned generation;
};

struct fiber {
    ucontext_t context; /* for its first start */
    jmp_buf place;
    bool started, ended;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* one kernel at a time */
static struct fiber fibers[MOST_THREADS];
static char *stacks;
static jmp_buf scheduler;
static struct barrier block_barrier, warp_barriers[MOST_THREADS / LANES];
static _Alignas(16) char slots[MOST_THREADS][16];
static _Alignas(256) char shared[SHARED];
static const struct kernel *running;
static const void *running_args;

EXPORT void *emulated_shared(void);
EXPORT void *emulated_slot(unsigned lane);
EXPORT void emulated_sync_block(void);
EXPORT void emulated_sync_warp(void);

void *emulated_shared(void)
{
    return shared;
}

void *emulated_slot(unsigned lane)
{
    return slots[emulated_thread.x / LANES * LANES + lane];
}

static void change(void)
{
    unsigned self = emulated_thread.x;
    if (!_setjmp(fibers[self].place))
        _longjmp(scheduler, 1);
}

static void wait_at(struct barrier *barrier)
{
    if (!running->synchronizes) {
        fprintf(stderr, "emulated_cuda: a kernel that is not TD_KERNEL_SYNC synchronizes\n");
        abort();
    }
    unsigned generation = barrier->generation;
    if (++barrier->arrived == barrier->live) {
        barrier->arrived = 0;
        barrier->generation++;
        return;
    }
    while (barrier->generation == generation)
        change();
}

void emulated_sync_block(void)
{
    wait_at(&block_barrier);
}

void emulated_sync_warp(void)
{
    wait_at(&warp_barriers[emulated_thread.x / LANES]);
}

static void leave(struct barrier *barrier)
{
    barrier->live--;
    if (barrier->live && barrier->arrived == barrier->live) {
        barrier->arrived = 0;
        barrier->generation++;
    }
}

static void run_fiber(void)
{
    running->run(running_args);
    unsigned self = emulated_thread.x;
    fibers[self].ended = true;
    leave(&block_barrier);
    leave(&warp_barriers[self / LANES]);
    _longjmp(scheduler, 1);
}

static void resume(unsigned thread)
{
    struct fiber *fiber = &fibers[thread];
    emulated_thread.x = thread;
    if (_setjmp(scheduler))
        return;
    if (fiber->started)
        _longjmp(fiber->place, 1);
    fiber->started = true;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stacks + (size_t)thread * STACK;
    fiber->context.uc_stack.ss_size = STACK;
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, run_fiber, 0);
    setcontext(&fiber->context);
}

static void run_fibers(unsigned threads, bool reverse)
{
    if (!stacks)
        stacks = mmap(NULL, (size_t)MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    block_barrier = (struct barrier){.live = (int)threads};
    for (unsigned w = 0; w * LANES < threads; w++)
        warp_barriers[w] = (struct barrier){
            .live = (int)(threads - w * LANES < LANES ? threads - w * LANES : LANES)};
    for (unsigned t = 0; t < threads; t++)
        fibers[t].started = fibers[t].ended = false;
    while (block_barrier.live)
        for (unsigned i = 0; i < threads; i++) {
            unsigned t = reverse ? threads - 1 - i : i;
            if (!fibers[t].ended)
                resume(t);
        }
}

static void run_block(unsigned threads, bool reverse)
{
    memset(shared, 0xff, 1024); /* what a kernel has not written is not 0 */
    if (running->synchronizes) {
        run_fibers(threads, reverse);
        return;
    }
    for (unsigned i = 0; i < threads; i++) {
        emulated_thread.x = reverse ? threads - 1 - i : i;
        running->run(running_args);
    }
}

struct launch {
    const struct kernel *kernel;
    struct index blocks;
    unsigned threads;
    _Alignas(16) char args[4096];
};

static void run_launch(const struct launch *launch, const void *args)
{
    struct index blocks = launch->blocks;
    pthread_mutex_lock(&lock);
    bool reverse = setting("EMULATED_CUDA_REVERSE", 0);
    running = launch->kernel;
    running_args = args;
    emulated_block_size = (struct index){launch->threads, 1, 1};
    emulated_grid_size = blocks;
    for (unsigned k = 0; k < blocks.z; k++)
        for (unsigned j = 0; j < blocks.y; j++)
            for (unsigned i = 0; i < blocks.x; i++) {
                emulated_block = (struct index){i, j, k};
                run_block(launch->threads, reverse);
            }
    pthread_mutex_unlock(&lock);
}

static void run_recorded(void *payload)
{
    run_launch(payload, ((struct launch *)payload)->args);
}

/* EMULATED_CUDA_NULL, read once: reading it would cost more than the calls that are measured. */
static bool does_nothing;

__attribute__((constructor)) static void read_settings(void)
{
    does_nothing = setting("EMULATED_CUDA_NULL", 0);
}

static _Thread_local CUcontext current;

/* A kernel in a context. */
struct function {
    CUcontext context;
    const struct kernel *kernel;
    unsigned shared; /* what it may ask for beyond the default */
};

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_NOT_FOUND);
    if (!current)
        return CUDA_ERROR_INVALID_CONTEXT;
    struct function *made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->context = current;
    made->kernel = (const struct kernel *)kernel;
    *function = (CUfunction)made;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    COUNTED;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    __atomic_store_n(&((struct function *)function)->shared, (unsigned)value, __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
}

/* Whether the driver would take it. */
static CUresult check_launch(const struct function *called, struct index blocks, unsigned threads,
                             unsigned shared_bytes)
{
    if (called->context != current)
        return CUDA_ERROR_INVALID_CONTEXT;
    bool fits = blocks.x && blocks.y && blocks.z && threads && threads <= MOST_THREADS &&
                (shared_bytes <= SHARED_BY_DEFAULT ||
                 shared_bytes <= __atomic_load_n(&called->shared, __ATOMIC_SEQ_CST)) &&
                blocks.y <= 65535 && blocks.z <= 65535;
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_node(struct launch *launch, const CUDA_KERNEL_NODE_PARAMS *params)
{
    const struct function *called = (const struct function *)params->func;
    struct index blocks = {params->gridDimX, params->gridDimY, params->gridDimZ};
    CUresult result = params->blockDimY != 1 || params->blockDimZ != 1 || params->extra
                          ? CUDA_ERROR_INVALID_VALUE
                          : check_launch(called, blocks, params->blockDimX, params->sharedMemBytes);
    if (result)
        return result;
    launch->kernel = called->kernel;
    launch->blocks = blocks;
    launch->threads = params->blockDimX;
    memcpy(launch->args, params->kernelParams[0], launch->kernel->bytes);
    return CUDA_SUCCESS;
}

static void run_node(void *payload)
{
    if (does_nothing)
        return;
    trace(((struct launch *)payload)->kernel, "cuGraphLaunch");
    run_recorded(payload);
}

EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *before,
                                        size_t count, const CUDA_KERNEL_NODE_PARAMS *params)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_OUT_OF_MEMORY);
    struct launch launch = {0};
    CUresult result = before || count ? CUDA_ERROR_INVALID_VALUE
                      : does_nothing  ? CUDA_SUCCESS
                                      : set_node(&launch, params);
    if (!result)
        *node = emulated_add_node(graph, run_node, &launch, sizeof launch);
    return result;
}

EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                  const CUDA_KERNEL_NODE_PARAMS *params)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_NOT_SUPPORTED);
    (void)exec;
    return does_nothing ? CUDA_SUCCESS : set_node((struct launch *)node, params);
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z,
                               unsigned threads, unsigned threads_y, unsigned threads_z,
                               unsigned shared_bytes, CUstream stream, void **params, void **extra)
{
    COUNTED;
    if (does_nothing)
        return CUDA_SUCCESS;
    MAY_FAIL(CUDA_ERROR_LAUNCH_FAILED);
    const struct function *called = (const struct function *)function;
    CUresult result = threads_y != 1 || threads_z != 1 || extra
                          ? CUDA_ERROR_INVALID_VALUE
                          : check_launch(called, (struct index){x, y, z}, threads, shared_bytes);
    if (result)
        return result;
    trace(called->kernel, __func__);
    struct launch launch;
    launch.kernel = called->kernel;
    launch.blocks = (struct index){x, y, z};
    launch.threads = threads;
    if (!emulated_is_captured(stream)) {
        run_launch(&launch, params[0]);
        return CUDA_SUCCESS;
    }
    memcpy(launch.args, params[0], launch.kernel->bytes);
    emulated_record(stream, run_recorded, &launch,
                    offsetof(struct launch, args) + launch.kernel->bytes);
    return CUDA_SUCCESS;
}

/* ---- Kernels ------------------------------------------------------------------------------------------------ */

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options,
                                  void **values, unsigned count, CUlibraryOption *more,
                                  void **more_values, unsigned more_count)
{
    COUNTED;
    (void)code;
    (void)options;
    (void)values;
    (void)count;
    (void)more;
    (void)more_values;
    (void)more_count;
    MAY_FAIL(CUDA_ERROR_NO_BINARY_FOR_GPU);
    *library = (CUlibrary)1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    COUNTED;
    static void *self;
    Dl_info info;
    (void)library;
    if (!self && dladdr((void *)cuLibraryGetKernel, &info))
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *kernel = self ? dlsym(self, name) : NULL;
    return *kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- Devices ------------------------------------------------------------------------------------------------ */

static int devices(void)
{
    return (int)setting("EMULATED_CUDA_DEVICES", 1);
}

EXPORT CUresult cuInit(unsigned flags)
{
    COUNTED;
    (void)flags;
    MAY_FAIL(CUDA_ERROR_SYSTEM_NOT_READY);
    return devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    COUNTED;
    *version = (int)setting("EMULATED_CUDA_VERSION", 13000);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text)
{
    COUNTED;
    *text = error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                                : "CUDA_ERROR_EMULATED";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    COUNTED;
    *text = error == CUDA_ERROR_OUT_OF_MEMORY   ? "out of memory"
            : error == CUDA_ERROR_LAUNCH_FAILED ? "unspecified launch failure"
                                                : "emulated failure";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    COUNTED;
    *device = ordinal;
    return ordinal < devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    COUNTED;
    *count = devices();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    COUNTED;
    snprintf(name, (size_t)size, "emulated GPU %d", device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    COUNTED;
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT                ? 2
             : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 227 << 10
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR          ? 9
                                                                                  : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_OUT_OF_MEMORY);
    *context = (CUcontext)(intptr_t)(device + 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    COUNTED;
    *context = current;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    COUNTED;
    current = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_LAUNCH_FAILED);
    return emulated_captures() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

/* ---- Memory -------------------------------------------------------------------------------------------------- */

static size_t in_use;

enum { FRONT = 256 };

static size_t memory(void)
{
    return (size_t)setting("EMULATED_CUDA_MEMORY", 8L << 30);
}

EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    COUNTED;
    *total = memory();
    size_t used = __atomic_load_n(&in_use, __ATOMIC_SEQ_CST);
    *available = used < *total ? *total - used : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_OUT_OF_MEMORY);
    size_t whole = (bytes + FRONT - 1) / FRONT * FRONT + FRONT;
    if (!current || __atomic_add_fetch(&in_use, whole, __ATOMIC_SEQ_CST) > memory()) {
        __atomic_sub_fetch(&in_use, whole, __ATOMIC_SEQ_CST);
        return current ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_CONTEXT;
    }
    char *block = aligned_alloc(FRONT, whole);
    if (!block)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(block, &whole, sizeof whole);
    memset(block + FRONT, 0xff, bytes); /* what nobody has written is NaN */
    *address = (CUdeviceptr)(block + FRONT);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    COUNTED;
    char *block = (char *)address - FRONT;
    size_t whole;
    memcpy(&whole, block, sizeof whole);
    __atomic_sub_fetch(&in_use, whole, __ATOMIC_SEQ_CST);
    free(block);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **data, size_t bytes, unsigned flags)
{
    COUNTED;
    (void)flags;
    MAY_FAIL(CUDA_ERROR_OUT_OF_MEMORY);
    *data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *data ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *data, unsigned flags)
{
    COUNTED;
    (void)flags;
    *address = (CUdeviceptr)data;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *data)
{
    COUNTED;
    free(data);
    return CUDA_SUCCESS;
}

/* A copy, or with `from` NULL a fill. */
struct copy {
    void *to;
    const void *from;
    size_t bytes;
    unsigned char value;
};

static void run_copy(void *payload)
{
    const struct copy *copy = payload;
    if (copy->from)
        memcpy(copy->to, copy->from, copy->bytes);
    else
        memset(copy->to, copy->value, copy->bytes);
}

static CUresult enqueue_copy(CUstream stream, struct copy copy)
{
    if (emulated_is_captured(stream))
        emulated_record(stream, run_copy, &copy, sizeof copy);
    else
        run_copy(&copy);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes,
                                     CUstream stream)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_INVALID_VALUE);
    trace(NULL, __func__);
    return enqueue_copy(stream, (struct copy){(void *)to, from, bytes, 0});
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_INVALID_VALUE);
    trace(NULL, __func__);
    return enqueue_copy(stream, (struct copy){to, (const void *)from, bytes, 0});
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                     CUstream stream)
{
    COUNTED;
    if (does_nothing)
        return CUDA_SUCCESS;
    MAY_FAIL(CUDA_ERROR_INVALID_VALUE);
    trace(NULL, __func__);
    return enqueue_copy(stream, (struct copy){(void *)to, (const void *)from, bytes, 0});
}

EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                                  CUcontext from_context, size_t bytes, CUstream stream)
{
    COUNTED;
    (void)to_context;
    (void)from_context;
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream)
{
    COUNTED;
    trace(NULL, __func__);
    return does_nothing ? CUDA_SUCCESS
                        : enqueue_copy(stream, (struct copy){(void *)to, NULL, bytes, value});
}

/* ---- Waiting; streams and events are in emulated_graph.c ---------------------------------------------------------- */

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_LAUNCH_FAILED);
    return cuStreamQuery(stream);
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    COUNTED;
    MAY_FAIL(CUDA_ERROR_LAUNCH_FAILED);
    return cuEventQuery(event);
}
