/* cuDNN; see dnn_library.h. */
#include "cuda/dnn_library.h"

#include "cuda/cuda_device.h"
#include "cuda/cuda_library.h"

#include <dlfcn.h>

enum { OLDEST = 90000, TOO_NEW = 100000, MOST_GPUS = 64 };

struct dnn_functions td__dnn;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool is_open;
static struct dnn_handle handles[MOST_GPUS]; /* by CUdevice */

static const char *path_of(void *function)
{
    Dl_info info;
    return dladdr(function, &info) && info.dli_fname ? info.dli_fname : "?";
}

static void open_library(void)
{
    /* By its soname first: one that the process has loaded already is the one that is found. */
    static const char *const names[] = {"libcudnn.so.9", "/usr/local/cuda/lib64/libcudnn.so.9",
                                        "/usr/local/cuda/lib/libcudnn.so.9", NULL};
    const struct cuda_symbol symbols[] = {
        {"cudnnGetVersion", (void **)&td__dnn.get_version},
        {"cudnnGetErrorString", (void **)&td__dnn.explain},
        {"cudnnCreate", (void **)&td__dnn.create},
        {"cudnnSetStream", (void **)&td__dnn.set_stream},
        {"cudnnBackendCreateDescriptor", (void **)&td__dnn.create_descriptor},
        {"cudnnBackendDestroyDescriptor", (void **)&td__dnn.destroy_descriptor},
        {"cudnnBackendFinalize", (void **)&td__dnn.finalize},
        {"cudnnBackendSetAttribute", (void **)&td__dnn.set},
        {"cudnnBackendGetAttribute", (void **)&td__dnn.get},
        {"cudnnBackendExecute", (void **)&td__dnn.execute},
    };
    for (int i = 0; i < MOST_GPUS; i++)
        pthread_mutex_init(&handles[i].lock, NULL);
    if (!td__cuda_open("cuDNN", "TANDEM_CUDNN_SO", names, symbols,
                       (int)(sizeof symbols / sizeof symbols[0])))
        return;
    td__dnn.version = td__dnn.get_version();
    is_open = td__dnn.version >= OLDEST && td__dnn.version < TOO_NEW;
    if (is_open)
        return;
    /* Version 8 and older have a digit less: 8907 is 8.9.7. */
    size_t unit = td__dnn.version < OLDEST ? 1000 : 10000;
    td_log(TD_LOG_WARN,
           "cuda: without cuDNN, since %s is version %zu.%zu, and 9 is the one that works; set "
           "TANDEM_CUDNN_SO to its file",
           path_of((void *)td__dnn.get_version), td__dnn.version / unit,
           td__dnn.version % unit / 100);
}

struct dnn_handle *td__dnn_handle_of(const struct cuda_device *device)
{
    pthread_once(&once, open_library);
    if (!is_open || device->device < 0 || device->device >= MOST_GPUS)
        return NULL;
    static bool failed[MOST_GPUS];
    struct dnn_handle *handle = &handles[device->device];
    pthread_mutex_lock(&handle->lock);
    if (!handle->handle && !failed[device->device]) {
        int status = td__dnn.create(&handle->handle);
        if (status) {
            td_log(TD_LOG_WARN, "%s: without cuDNN, since %s fails to start: %s", device->name,
                   path_of((void *)td__dnn.create), td__dnn.explain(status));
            failed[device->device] = true;
            handle->handle = NULL;
        }
    }
    bool works = handle->handle;
    pthread_mutex_unlock(&handle->lock);
    return works ? handle : NULL;
}
