/* How often the functions of the emulated libcuda are called. */
#ifndef EMULATED_COUNTS_H
#define EMULATED_COUNTS_H

struct emulated_counter {
    const char *function;
    long calls;
    struct emulated_counter *next; /* among those that were called */
};

void emulated_count(struct emulated_counter *counter);

/** First in each function that the driver exports. */
#define COUNTED                                                                                    \
    static struct emulated_counter counter_ = {.function = __func__};                              \
    emulated_count(&counter_)

/** The calls of a function so far; all of them for NULL. Tests find it by dlsym(). */
__attribute__((visibility("default"))) long emulated_calls(const char *function);

#endif
