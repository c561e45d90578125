/* Launching kernels; see cuda_launch.h. */
#include "cuda/cuda_launch.h"

#include <pthread.h>
#include <stdio.h>

enum { THREADS = 256, WAVES = 8, MOST_BLOCKS = 1 << 24, SHARED_BY_DEFAULT = 48 << 10 };

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

/* The kernel of a name, loaded if it was not. The loading of its image is the costly part, and happens once. */
static td_status find(struct cuda_kernel *kernel, CUkernel *handle)
{
    *handle = atomic_load_explicit(&kernel->handle, memory_order_acquire);
    if (*handle)
        return TD_OK;
    struct cuda_image *image = &td__cuda_images[kernel->image];
    char what[160];
    td_status status = TD_OK;
    pthread_mutex_lock(&loading);
    CUlibrary library = atomic_load(&image->library);
    if (!library) {
        snprintf(what, sizeof what, "cuda: loading the kernels \"%s\"", image->name);
        status = td__cuda_check(
            td__cuda.cuLibraryLoadData(&library, image->data, NULL, NULL, 0, NULL, NULL, 0), what);
        if (!status)
            atomic_store(&image->library, library);
    }
    if (!status) {
        snprintf(what, sizeof what, "cuda: finding the kernel %s", kernel->name);
        status = td__cuda_check(td__cuda.cuLibraryGetKernel(handle, library, kernel->name), what);
    }
    if (!status)
        atomic_store_explicit(&kernel->handle, *handle, memory_order_release);
    pthread_mutex_unlock(&loading);
    return status;
}

struct cuda_device *td__cuda_device_of(const td_tensor *tensor)
{
    return td_device_self(td_tensor_device(tensor));
}

CUstream td__cuda_stream_of(const td_tensor *tensor)
{
    struct cuda_stream *stream = td_stream_self(td_current_stream(td_tensor_device(tensor)));
    return stream->handle;
}

struct cuda_fault *td__cuda_fault_of(const td_tensor *tensor)
{
    return (struct cuda_fault *)td__cuda_device_of(tensor)
        ->fault_address; /* NOLINT: the device's address */
}

td_status td__cuda_prepare(struct cuda_kernel *kernel, const td_tensor *tensor, size_t shared)
{
    struct cuda_device *device = td__cuda_device_of(tensor);
    CUkernel handle;
    td_status status = td__cuda_enter(device);
    if (!status)
        status = find(kernel, &handle);
    if (!status && shared > SHARED_BY_DEFAULT)
        status = td__cuda_check(
            td__cuda.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                          (int)shared, handle, device->device),
            kernel->name);
    return status;
}

td_status td__cuda_enqueue(struct cuda_kernel *kernel, const td_tensor *tensor,
                           struct cuda_grid grid, const void *args)
{
    void *params[] = {(void *)args};
    unsigned x = grid.blocks[0], y = grid.blocks[1], z = grid.blocks[2];
    CUkernel handle = atomic_load_explicit(&kernel->handle, memory_order_relaxed);
    CUresult result = td__cuda.cuLaunchKernel((CUfunction)handle, x ? x : 1, y ? y : 1, z ? z : 1,
                                              grid.threads, 1, 1, (unsigned)grid.shared,
                                              td__cuda_stream_of(tensor), params, NULL);
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
