/* Devices: where a tensor's memory is and who computes with it. They have names:
 *
 *     "cpu"               the host; where tensors are made
 *     "cpu:0", "cpu:1"…   devices of their own on the host's processor, each with a worker thread.
 *                         Tensors of different devices do not mix in an operator, so that a program
 *                         for several accelerators can be written and tested without one
 *
 * An operator runs on the thread that calls it, on tensors of any device. A backward pass computes
 * the gradients that belong to a numbered device on its worker, so those of several devices run at
 * the same time; td_device_submit() does the same for whatever the program wants.
 *
 * Threads. All functions may be called from any thread at any time. */
#ifndef TANDEM_DEVICE_H
#define TANDEM_DEVICE_H

#include <tandem/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/** True where there is a device of this name. */
TD_API bool td_device_exists(const char *device);

/** How many numbered devices of a kind ("cpu") there may be; 0 for a kind that is not there. */
TD_API int td_device_count(const char *kind);

/**
 * Runs fn(arg) on the worker thread of a numbered device, and returns at once. What one device is
 * given runs in that order; different devices run at the same time. On the host ("cpu", or NULL)
 * fn runs here and now. What fn has to report, it puts into arg.
 */
TD_API td_status td_device_submit(const char *device, void (*fn)(void *arg), void *arg);

/** Waits until a device has done all that it was given. Not to be called by its own worker. */
TD_API td_status td_device_synchronize(const char *device);

#ifdef __cplusplus
}
#endif

#endif
