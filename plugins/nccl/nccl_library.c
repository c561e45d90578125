/* Finding libnccl: TANDEM_NCCL_SO, then the one that the process has loaded, then the loader's. */
#include "nccl_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SONAME "libnccl.so.2"

enum { OLDEST = 21400 };

struct nccl_library nccl;

static void set_version_text(int version, char *text, size_t size)
{
    snprintf(text, size, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    if (version < 10000) /* up to 2.8 */
        snprintf(text, size, "%d.%d.%d", version / 1000, version / 100 % 10, version % 100);
}

static td_status open_file(void **handle, const char **asked)
{
    const char *chosen = secure_getenv("TANDEM_NCCL_SO");
    *asked = chosen && *chosen ? chosen : SONAME;
    *handle = NULL;
    if (*asked != chosen)
        *handle = dlopen(SONAME, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!*handle)
        *handle = dlopen(*asked, RTLD_NOW | RTLD_LOCAL);
    if (*handle)
        return TD_OK;
    if (*asked == chosen)
        return td_fail(TD_ERR_UNSUPPORTED, "backend nccl: TANDEM_NCCL_SO=%s cannot be loaded: %s",
                       chosen, dlerror());
    return td_fail(TD_ERR_UNSUPPORTED,
                   "backend nccl: NCCL is not found: %s; install it, or set TANDEM_NCCL_SO to the "
                   "path of libnccl.so.2",
                   dlerror());
}

/* The file of a function, for texts. */
static const char *file_of(void *function, const char *asked)
{
    Dl_info info;
    return dladdr(function, &info) && info.dli_fname ? info.dli_fname : asked;
}

static td_status check_version(void *handle, const char *asked)
{
    int (*get_version)(int *) = (int (*)(int *))dlsym(handle, "ncclGetVersion");
    char text[32];
    int version = 0;
    if (!get_version)
        return td_fail(TD_ERR_INVALID, "backend nccl: %s is not NCCL: it has no ncclGetVersion()",
                       asked);
    const char *path = file_of((void *)get_version, asked);
    if (get_version(&version))
        return td_fail(TD_ERR_INVALID, "backend nccl: %s does not return its version", path);
    set_version_text(version, text, sizeof text);
    snprintf(nccl.name, sizeof nccl.name, "NCCL %s (%s)", text, path);
    if (version < OLDEST)
        return td_fail(TD_ERR_UNSUPPORTED,
                       "backend nccl: %s is too old; it needs NCCL 2.14 or newer", nccl.name);
    return TD_OK;
}

static td_status find_all(void *handle)
{
    const char *missing = NULL;
#define FIND(name, arguments)                                                                      \
    nccl.name = (int(*) arguments)dlsym(handle, #name);                                            \
    if (!nccl.name && !missing)                                                                    \
        missing = #name;
    NCCL_FUNCTIONS(FIND)
#undef FIND
#define FIND(name, arguments) nccl.name = (int(*) arguments)dlsym(handle, #name);
    NCCL_NEWER_FUNCTIONS(FIND)
#undef FIND
    nccl.ncclGetErrorString = (const char *(*)(int))dlsym(handle, "ncclGetErrorString");
    nccl.ncclGetLastError = (const char *(*)(struct nccl_comm *))dlsym(handle, "ncclGetLastError");
    if (!missing)
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "backend nccl: %s has no %s(); is the file complete?", nccl.name,
                   missing);
}

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;

/* The driver is there where a device of CUDA is. */
static void find_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!driver)
        return;
    nccl.cuStreamGetCtx = (int (*)(void *, void **))dlsym(driver, "cuStreamGetCtx");
    nccl.cuCtxSetCurrent = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
}

/* init() of a plug-in is called by one thread at a time, and not again once it has succeeded. */
td_status nccl_library_load(void)
{
    const char *asked;
    void *handle;
    td_status status = open_file(&handle, &asked);
    if (status)
        return status;
    status = check_version(handle, asked);
    if (!status)
        status = find_all(handle);
    if (status)
        dlclose(handle);
    return status;
}

void nccl_use_device_of(void *stream)
{
    void *context = NULL;
    pthread_once(&driver_once, find_driver);
    if (nccl.cuCtxSetCurrent && nccl.cuStreamGetCtx && !nccl.cuStreamGetCtx(stream, &context))
        nccl.cuCtxSetCurrent(context);
}

const char *nccl_result_text(int result, struct nccl_comm *comm, char *text, size_t size)
{
    const char *what = nccl.ncclGetErrorString ? nccl.ncclGetErrorString(result) : NULL;
    const char *more = nccl.ncclGetLastError ? nccl.ncclGetLastError(comm) : NULL;
    bool has_more = more && *more;
    snprintf(text, size, "%s (%d)%s%.400s", what ? what : "error", result, has_more ? ": " : "",
             has_more ? more : "");
    size_t length = strlen(text);
    while (length && text[length - 1] == '\n')
        text[--length] = 0;
    return text;
}
