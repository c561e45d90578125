/* Devices, by name:
 *
 *     "cpu"               the host; the default
 *     "cpu:0", "cpu:1"…   devices of their own on the host's processor, each with a worker thread.
 *                         Operators do not mix tensors of different devices, so that a program
 *                         for several accelerators can be written and tested without one
 *
 * An operator runs on the thread that calls it, on tensors of any device. A backward pass runs the
 * nodes of a numbered device on its worker, so several devices run at the same time;
 * td_device_submit() runs any function there.
 *
 * Threads. All functions may be called from any thread at any time. */
#ifndef TANDEM_DEVICE_H
#define TANDEM_DEVICE_H

#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Whether there is a device of this name. */
TD_API bool td_device_exists(const char *device);

/** How many numbered devices of a kind ("cpu") there may be; 0 for an unknown kind. */
TD_API int td_device_count(const char *kind);

/**
 * Queues fn(arg) for the worker thread of a numbered device, and returns at once. A device runs its
 * functions in order; different devices run at the same time. On the host ("cpu", or NULL) fn runs
 * in this call.
 */
TD_API td_status td_device_submit(const char *device, void (*fn)(void *arg), void *arg);

/** Waits until a device has run all its functions. Not to be called by its own worker. */
TD_API td_status td_device_synchronize(const char *device);

#ifdef __cplusplus
}
#endif

#endif
