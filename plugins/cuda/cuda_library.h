/* Libraries of CUDA that make the plug-in faster, and are found when it runs. */
#ifndef CUDA_LIBRARY_H
#define CUDA_LIBRARY_H

#include <tandem/base.h>

struct cuda_symbol {
    const char *name;
    void **function;
};

/** Loads a library, once a process, so the caller keeps the result: the file that `variable` names in the environment ("none":
 *  without it), or the first of `names` that is found, and its functions. NULL: without it, with a line in the log that says why where
 *  the variable was set or the file lacks a function. */
void *td__cuda_open(const char *library, const char *variable, const char *const *names,
                    const struct cuda_symbol *symbols, int count);

#endif
