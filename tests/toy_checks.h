/* What the tests of the toy accelerator by its table of functions share. */
#ifndef TANDEM_TESTS_TOY_CHECKS_H
#define TANDEM_TESTS_TOY_CHECKS_H

#include "runner.h"
#include "toy_device.h"

#include <string.h>

/* Both devices, with a stream each. */
struct toys {
    const td_device_ops *ops;
    void *device[TOY_DEVICES], *stream[TOY_DEVICES];
};

static inline struct toys begin(void)
{
    struct toys toys = {.ops = toy_ops()};
    for (int i = 0; i < TOY_DEVICES; i++) {
        CHECK_OK(toys.ops->open(NULL, i, &toys.device[i]));
        CHECK_OK(toys.ops->stream_create(toys.device[i], 0, &toys.stream[i]));
    }
    return toys;
}

static inline void *allocate(const struct toys *toys, int device, size_t bytes)
{
    void *data = NULL;
    CHECK_OK(toys->ops->alloc(toys->device[device], bytes, &data));
    return data;
}

static inline void *allocate_pinned(const struct toys *toys, size_t bytes)
{
    void *data = NULL;
    CHECK_OK(toys->ops->alloc_pinned(toys->device[0], bytes, &data));
    return data;
}

static inline void *create_event(const struct toys *toys, int device, bool timing)
{
    void *event = NULL;
    CHECK_OK(toys->ops->event_create(toys->device[device], timing, &event));
    return event;
}

static inline void fill(const struct toys *toys, int device, void *data, int value, size_t bytes)
{
    CHECK_OK(toys->ops->fill(toys->device[device], toys->stream[device], data, (unsigned char)value,
                             bytes));
}

/* Each of the bytes at a device's address is `value`, once the device's stream has run. */
static inline void check_bytes(const struct toys *toys, int device, const void *data, int value,
                               size_t bytes)
{
    unsigned char *host = malloc(bytes);
    CHECK_OK(
        toys->ops->copy_out(toys->device[device], toys->stream[device], host, data, bytes, false));
    CHECK_OK(toys->ops->stream_synchronize(toys->device[device], toys->stream[device]));
    for (size_t i = 0; i < bytes; i++)
        CHECK_EQ(host[i], value);
    free(host);
}

static inline bool is_done(const struct toys *toys, int device)
{
    bool done = false;
    CHECK_OK(toys->ops->stream_query(toys->device[device], toys->stream[device], &done));
    return done;
}

#endif
