/* Launching kernels; see cuda_launch.h. */
#include "cuda/cuda_launch.h"

#include "cuda/relaunch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 256, WAVES = 8, MOST_BLOCKS = 1 << 24, SHARED_BY_DEFAULT = 48 << 10 };

/* A kernel in the context of a GPU. The driver launches a CUkernel, too, but looks for its function then. */
struct function {
    _Atomic(CUfunction) handle; /* NULL: not asked for yet */
    _Atomic(size_t) shared;     /* what it may ask for beyond SHARED_BY_DEFAULT */
};

struct cuda_functions {
    CUkernel kernel;
    struct function of[]; /* by the number of the GPU */
};

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static td_status load_image(struct cuda_image *image, CUlibrary *library)
{
    char what[160];
    *library = atomic_load(&image->library);
    if (*library)
        return TD_OK;
    snprintf(what, sizeof what, "cuda: loading the kernels \"%s\"", image->name);
    td_status status = td__cuda_check(
        td__cuda.cuLibraryLoadData(library, image->data, NULL, NULL, 0, NULL, NULL, 0), what);
    if (!status)
        atomic_store(&image->library, *library);
    return status;
}

/* Loads the image of a kernel if it was not, which is the costly part, and finds the kernel in it. */
static td_status load_kernel(struct cuda_kernel *kernel, struct cuda_functions **functions)
{
    CUlibrary library;
    CUkernel handle;
    char what[160];
    int devices;
    *functions = atomic_load(&kernel->functions);
    if (*functions)
        return TD_OK;
    td_status status = load_image(&td__cuda_images[kernel->image], &library);
    snprintf(what, sizeof what, "cuda: finding the kernel %s", kernel->name);
    if (!status)
        status = td__cuda_check(td__cuda.cuLibraryGetKernel(&handle, library, kernel->name), what);
    if (!status)
        status = td__cuda_check(td__cuda.cuDeviceGetCount(&devices), what);
    if (status)
        return status;
    *functions = calloc(1, sizeof **functions + (size_t)devices * sizeof(struct function));
    if (!*functions)
        return td_fail(TD_ERR_NOMEM, "%s: out of memory", what);
    (*functions)->kernel = handle;
    atomic_store_explicit(&kernel->functions, *functions, memory_order_release);
    return TD_OK;
}

/* What the launches of a kernel on a GPU need and did not have yet. The context is current. */
static td_status complete(struct cuda_kernel *kernel, const struct cuda_device *device,
                          size_t shared)
{
    struct cuda_functions *functions;
    char what[160];
    pthread_mutex_lock(&loading);
    td_status status = load_kernel(kernel, &functions);
    struct function *function = status ? NULL : &functions->of[device->device];
    CUfunction handle = status ? NULL : atomic_load(&function->handle);
    snprintf(what, sizeof what, "%s: preparing the kernel %s", device->name, kernel->name);
    if (!status && !handle)
        status = td__cuda_check(td__cuda.cuKernelGetFunction(&handle, functions->kernel), what);
    if (!status && shared > SHARED_BY_DEFAULT && shared > atomic_load(&function->shared)) {
        status = td__cuda_check(
            td__cuda.cuFuncSetAttribute(handle, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        (int)shared),
            what);
        if (!status)
            atomic_store(&function->shared, shared);
    }
    if (!status)
        atomic_store_explicit(&function->handle, handle, memory_order_release);
    pthread_mutex_unlock(&loading);
    return status;
}

struct cuda_device *td__cuda_device_of(const td_tensor *tensor)
{
    return td_device_self(td_tensor_device(tensor));
}

static struct cuda_stream *current_stream(const td_tensor *tensor)
{
    return td_stream_self(td_current_stream(td_tensor_device(tensor)));
}

CUstream td__cuda_stream_of(const td_tensor *tensor)
{
    return current_stream(tensor)->handle;
}

struct cuda_fault *td__cuda_fault_of(const td_tensor *tensor)
{
    return (struct cuda_fault *)td__cuda_device_of(tensor)
        ->fault_address; /* NOLINT: the device's address */
}

td_status td__cuda_prepare(struct cuda_kernel *kernel, const td_tensor *tensor, size_t shared)
{
    const struct cuda_device *device = td__cuda_device_of(tensor);
    td_status status = td__cuda_enter(device);
    if (status)
        return status;
    struct cuda_functions *functions = atomic_load_explicit(&kernel->functions,
                                                            memory_order_acquire);
    struct function *function = functions ? &functions->of[device->device] : NULL;
    bool ready = function && atomic_load_explicit(&function->handle, memory_order_acquire) &&
                 (shared <= SHARED_BY_DEFAULT || shared <= atomic_load(&function->shared));
    return ready ? TD_OK : complete(kernel, device, shared);
}

td_status td__cuda_enqueue(struct cuda_kernel *kernel, const td_tensor *tensor,
                           struct cuda_grid grid, const void *args)
{
    void *params[] = {(void *)args};
    unsigned x = grid.blocks[0], y = grid.blocks[1], z = grid.blocks[2];
    const struct cuda_stream *stream = current_stream(tensor);
    struct cuda_functions *functions = atomic_load_explicit(&kernel->functions,
                                                            memory_order_acquire);
    const struct cuda_launch launch = {
        .function = atomic_load_explicit(&functions->of[td__cuda_device_of(tensor)->device].handle,
                                         memory_order_acquire),
        .blocks = {x ? x : 1, y ? y : 1, z ? z : 1},
        .threads = grid.threads,
        .shared = (unsigned)grid.shared};
    if (td__cuda_relaunch(stream->relaunches, stream->handle, &launch, params[0]))
        return TD_OK;
    CUresult result = td__cuda.cuLaunchKernel(launch.function, launch.blocks[0], launch.blocks[1],
                                              launch.blocks[2], launch.threads, 1, 1, launch.shared,
                                              stream->handle, params, NULL);
    if (result == CUDA_SUCCESS)
        return TD_OK;
    char what[160];
    snprintf(what, sizeof what, "%s: launching %s", td__cuda_device_of(tensor)->name, kernel->name);
    return td__cuda_check(result, what);
}

td_status td__cuda_launch(struct cuda_kernel *kernel, const td_tensor *tensor,
                          struct cuda_grid grid, const void *args)
{
    td_status status = td__cuda_prepare(kernel, tensor, grid.shared);
    return status ? status : td__cuda_enqueue(kernel, tensor, grid, args);
}

struct cuda_grid td__cuda_grid_for(const td_tensor *tensor, int64_t count, int each)
{
    int64_t blocks = (count + (int64_t)THREADS * each - 1) / ((int64_t)THREADS * each);
    int64_t most = (int64_t)td__cuda_device_of(tensor)->processors * WAVES;
    blocks = blocks < 1 ? 1 : blocks > most ? most : blocks;
    return (struct cuda_grid){.blocks = {(unsigned)blocks}, .threads = THREADS};
}

td_status td__cuda_launch_each(struct cuda_kernel *kernel, const td_tensor *tensor,
                               const struct cuda_each *each, const void *args)
{
    int64_t groups = each->space.count, blocks = (groups + THREADS - 1) / THREADS;
    if (!groups)
        return TD_OK;
    struct cuda_grid grid = {.threads = THREADS,
                             .blocks = {blocks < MOST_BLOCKS ? (unsigned)blocks : MOST_BLOCKS}};
    return td__cuda_launch(kernel, tensor, grid, args);
}

td_tensor *td__cuda_workspace(const td_tensor *tensor, size_t bytes)
{
    return td_empty(&(int64_t){(int64_t)(bytes ? bytes : 1)}, 1, TD_U8, td_tensor_device(tensor));
}

td_status td__cuda_unsupported(void)
{
    return td_fail(TD_ERR_UNSUPPORTED, "cuda has no kernel for this");
}
