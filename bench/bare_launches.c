/* Launches without the library; see bare_launches.h. The driver's types are pointers here, so that its header is not needed. */
#include "bare_launches.h"

#include <dlfcn.h>
#include <stdlib.h>

enum { THREADS = 256, BLOCKS = 4, ARGS = 416, NON_BLOCKING = 1 };

/* The driver compiles it for its GPU; ARGS stands in it. */
static const char code[] = ".version 7.0\n"
                           ".target sm_80\n"
                           ".address_size 64\n"
                           ".visible .entry empty() { ret; }\n"
                           ".visible .entry with_args(.param .align 8 .b8 args[416]) { ret; }\n";

struct bare_driver {
    int (*cuInit)(unsigned);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxSetCurrent)(void *);
    int (*cuModuleLoadData)(void **, const void *);
    int (*cuModuleGetFunction)(void **, void *, const char *);
    int (*cuLibraryLoadData)(void **, const void *, void *, void *, unsigned, void *, void *,
                             unsigned);
    int (*cuLibraryGetKernel)(void **, void *, const char *);
    int (*cuStreamCreate)(void **, unsigned);
    int (*cuLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, void *, void **, void **);
    void *context, *stream, *empty, *with_args, *handle;
};

static const char *find_functions(struct bare_driver *driver)
{
    const char *chosen = getenv("TANDEM_CUDA_SO");
    void *library = dlopen(chosen && *chosen ? chosen : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const struct {
        const char *name;
        void **function;
    } functions[] = {
        {"cuInit", (void **)&driver->cuInit},
        {"cuDevicePrimaryCtxRetain", (void **)&driver->cuDevicePrimaryCtxRetain},
        {"cuCtxGetCurrent", (void **)&driver->cuCtxGetCurrent},
        {"cuCtxSetCurrent", (void **)&driver->cuCtxSetCurrent},
        {"cuModuleLoadData", (void **)&driver->cuModuleLoadData},
        {"cuModuleGetFunction", (void **)&driver->cuModuleGetFunction},
        {"cuLibraryLoadData", (void **)&driver->cuLibraryLoadData},
        {"cuLibraryGetKernel", (void **)&driver->cuLibraryGetKernel},
        {"cuStreamCreate", (void **)&driver->cuStreamCreate},
        {"cuLaunchKernel", (void **)&driver->cuLaunchKernel},
    };
    if (!library)
        return "there is no libcuda";
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        *functions[i].function = dlsym(library, functions[i].name);
        if (!*functions[i].function)
            return "the driver lacks a function";
    }
    return NULL;
}

static const char *prepare(struct bare_driver *driver)
{
    void *module, *library;
    if (driver->cuInit(0) || driver->cuDevicePrimaryCtxRetain(&driver->context, 0) ||
        driver->cuCtxSetCurrent(driver->context) ||
        driver->cuStreamCreate(&driver->stream, NON_BLOCKING))
        return "the first GPU cannot be opened";
    if (driver->cuModuleLoadData(&module, code) ||
        driver->cuModuleGetFunction(&driver->empty, module, "empty") ||
        driver->cuModuleGetFunction(&driver->with_args, module, "with_args") ||
        driver->cuLibraryLoadData(&library, code, NULL, NULL, 0, NULL, NULL, 0) ||
        driver->cuLibraryGetKernel(&driver->handle, library, "with_args"))
        return "the driver does not compile a kernel";
    return NULL;
}

struct bare_driver *bare_open(const char **why)
{
    static struct bare_driver driver;
    *why = find_functions(&driver);
    if (!*why)
        *why = prepare(&driver);
    return *why ? NULL : &driver;
}

static td_status launch(const struct bare_driver *driver, void *kernel)
{
    static char args[ARGS];
    void *params[] = {args};
    return driver->cuLaunchKernel(kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, driver->stream, params,
                                  NULL)
               ? td_fail(TD_ERR_SYSTEM, "an empty kernel cannot be launched")
               : TD_OK;
}

td_status bare_launch(void *arg)
{
    const struct bare_driver *driver = arg;
    return launch(driver, driver->empty);
}

td_status bare_launch_args(void *arg)
{
    const struct bare_driver *driver = arg;
    return launch(driver, driver->with_args);
}

td_status bare_launch_handle(void *arg)
{
    const struct bare_driver *driver = arg;
    return launch(driver, driver->handle);
}

td_status bare_get_context(void *arg)
{
    const struct bare_driver *driver = arg;
    void *context;
    return driver->cuCtxGetCurrent(&context) ? td_fail(TD_ERR_SYSTEM, "no context") : TD_OK;
}

td_status bare_set_context(void *arg)
{
    const struct bare_driver *driver = arg;
    return driver->cuCtxSetCurrent(driver->context) ? td_fail(TD_ERR_SYSTEM, "no context") : TD_OK;
}
