/* Libraries of CUDA; see cuda_library.h. */
#include "cuda/cuda_library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

void *td__cuda_open(const char *library, const char *variable, const char *const *names,
                    const struct cuda_symbol *symbols, int count)
{
    const char *chosen = getenv(variable);
    bool is_chosen = chosen && *chosen;
    if (is_chosen && !strcmp(chosen, "none"))
        return NULL;
    void *handle = is_chosen ? dlopen(chosen, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (is_chosen && !handle) {
        td_log(TD_LOG_WARN, "cuda: without %s, since %s=%s cannot be loaded: %s", library, variable,
               chosen, dlerror());
        return NULL;
    }
    for (int i = 0; !handle && names[i]; i++)
        handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        td_log(TD_LOG_INFO, "cuda: without %s, which was not found; set %s to its file", library,
               variable);
        return NULL;
    }
    Dl_info info = {0};
    for (int i = 0; i < count; i++) {
        void *function = dlsym(handle, symbols[i].name);
        if (!i)
            dladdr(function, &info);
        if (!function) {
            td_log(TD_LOG_WARN, "cuda: without %s, since %s has no %s()", library,
                   info.dli_fname ? info.dli_fname : names[0], symbols[i].name);
            dlclose(handle);
            return NULL;
        }
        *symbols[i].function = function;
    }
    td_log(TD_LOG_DEBUG, "cuda: %s is %s", library, info.dli_fname ? info.dli_fname : "?");
    return handle;
}
