/* libcuda; see cuda_driver.h. */
#include "cuda/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OLDEST_DRIVER = 12080 }; /* with cuEventElapsedTime_v2() */

struct cuda_driver td__cuda;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static td_status load_status;
static char load_error[1024];

static td_status refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

static td_status refuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(load_error, sizeof load_error, format, arguments);
    va_end(arguments);
    return TD_ERR_UNSUPPORTED;
}

static const struct {
    const char *name;
    size_t offset;
} functions[] = {
#define ENTRY(name) {#name, offsetof(struct cuda_driver, name)},
    TD__CUDA_FUNCTIONS(ENTRY)
#undef ENTRY
};

static void note_path(void *function, const char *name)
{
    Dl_info info;
    snprintf(td__cuda.path, sizeof td__cuda.path, "%s",
             dladdr(function, &info) && info.dli_fname ? info.dli_fname : name);
}

static td_status load(void)
{
    const char *chosen = getenv("TANDEM_CUDA_SO");
    const char *name = chosen && *chosen ? chosen : "libcuda.so.1";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return refuse(
            "cuda: the NVIDIA driver's library is not here (%s); install the driver, or set TANDEM_CUDA_SO "
            "to its libcuda",
            dlerror());
    CUresult (*get_version)(int *) = (CUresult(*)(int *))dlsym(library, "cuDriverGetVersion");
    if (!get_version || get_version(&td__cuda.version))
        return refuse("cuda: %s is not NVIDIA's libcuda", name);
    note_path((void *)get_version, name);
    if (td__cuda.version < OLDEST_DRIVER)
        return refuse(
            "cuda: the driver %s is for CUDA %d.%d, and %d.%d is the oldest that works; update the driver",
            td__cuda.path, td__cuda.version / 1000, td__cuda.version % 1000 / 10,
            OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10);
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *function = dlsym(library, functions[i].name);
        if (!function)
            return refuse("cuda: the driver %s has no %s(); update the driver", td__cuda.path,
                          functions[i].name);
        memcpy((char *)&td__cuda + functions[i].offset, &function, sizeof function);
    }
    CUresult result = td__cuda.cuInit(0);
    if (result == CUDA_ERROR_NO_DEVICE)
        return refuse("cuda: there is no GPU that CUDA can use here%s",
                      getenv("CUDA_VISIBLE_DEVICES") ? ", among those of CUDA_VISIBLE_DEVICES"
                                                     : "");
    if (result) {
        const char *text = NULL;
        td__cuda.cuGetErrorString(result, &text);
        return refuse("cuda: the driver %s cannot be initialised: %s", td__cuda.path,
                      text ? text : "unknown error");
    }
    return TD_OK;
}

static void load_once(void)
{
    load_status = load();
}

td_status td__cuda_load(void)
{
    pthread_once(&once, load_once);
    return load_status ? td_fail(load_status, "%s", load_error) : TD_OK;
}

td_status td__cuda_check(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return TD_OK;
    const char *name = NULL, *text = NULL;
    td__cuda.cuGetErrorName(result, &name);
    td__cuda.cuGetErrorString(result, &text);
    return td_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? TD_ERR_NOMEM : TD_ERR_SYSTEM, "%s: %s (%s)",
                   what, text ? text : "unknown error", name ? name : "?");
}

/* ---- Counting ----------------------------------------------------------------------------------------------- */

struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*get_count)(unsigned *);
    int (*get_handle)(unsigned, void **);
    int (*get_uuid)(void *, char *, unsigned);
};

/* Whether the part of CUDA_VISIBLE_DEVICES at `text` names one of the `count` devices. */
static bool is_visible(const struct nvml *nvml, const char *text, size_t length, unsigned count)
{
    char *end;
    unsigned long index = strtoul(text, &end, 10);
    if (end == text + length && length)
        return *text != '-' && index < count;
    for (unsigned i = 0; i < count; i++) {
        char uuid[96];
        void *handle;
        if (!nvml->get_handle(i, &handle) && !nvml->get_uuid(handle, uuid, sizeof uuid) &&
            length > 4 && !strncmp(uuid, text, length))
            return true;
    }
    return false;
}

static int count_visible(const struct nvml *nvml)
{
    unsigned count;
    if (nvml->get_count(&count))
        return -1;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible)
        return (int)count;
    if (strstr(visible, "MIG"))
        return -1;
    int found = 0;
    for (const char *at = visible; *at;) {
        size_t length = strcspn(at, ",");
        if (!is_visible(nvml, at, length, count))
            break; /* those that follow do not count either */
        found++;
        at += length + (at[length] == ',');
    }
    return found;
}

int td__cuda_count_quietly(void)
{
    const char *chosen = getenv("TANDEM_CUDA_SO");
    void *library = chosen && *chosen ? NULL : dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return -1;
    struct nvml nvml;
    *(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
    *(void **)&nvml.shutdown = dlsym(library, "nvmlShutdown");
    *(void **)&nvml.get_count = dlsym(library, "nvmlDeviceGetCount_v2");
    *(void **)&nvml.get_handle = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&nvml.get_uuid = dlsym(library, "nvmlDeviceGetUUID");
    int count = -1;
    if (nvml.init && nvml.shutdown && nvml.get_count && nvml.get_handle && nvml.get_uuid &&
        !nvml.init()) {
        count = count_visible(&nvml);
        nvml.shutdown();
    }
    dlclose(library);
    return count;
}
