/* Devices: where the memory of tensors is, and which thread and kernels compute with it.
 *
 * A device belongs to a kind ("cpu", later others). `cpu` without a number is the host itself. cpu:0, cpu:1,
 * … are separate devices: their memory is the host's too, but tensors of different devices do not mix, and
 * each has a worker thread, so that a program for several accelerators can be written and tested without
 * one. Devices are created on first use and never destroyed. */
#ifndef TD_TENSOR_DEVICE_INTERNAL_H
#define TD_TENSOR_DEVICE_INTERNAL_H

#include <tandem/device.h>

struct td__kernels;
struct td__device;

/** The operations of a kind of device; one table for all devices of a kind. */
struct td__device_kind {
    const char *name; /* as in "cpu:1", without the number */
    const struct td__kernels *kernels;

    /** Allocates `bytes` bytes, more than 0, aligned to 64; NULL, with the last error set, without memory.
     *  Called by any thread. *free_fn gets the function that frees it. */
    void *(*alloc)(struct td__device *device, size_t bytes,
                   void (**free_fn)(void *data, void *arg));
    /** Copy bytes between memory of this kind and the host; return when done. */
    td_status (*to_host)(struct td__device *device, void *host, const void *data, size_t bytes);
    td_status (*from_host)(struct td__device *device, void *data, const void *host, size_t bytes);
    /** True where the host can read and write the memory itself. */
    bool is_host_memory;
};

struct td__device_worker;

struct td__device {
    char name[24];
    int index; /* -1: without a number */
    const struct td__device_kind *kind;
    const struct td__kernels *kernels;
    struct td__device_worker *worker; /* NULL for the host, and until the first use */
};

/** The host, `cpu`. */
struct td__device *td__host_device(void);

/** The device of a name ("cpu", "cpu:1"; NULL is the host). NULL, with an error text that begins with
 *  `call`, if there is none. */
struct td__device *td__find_device(const char *call, const char *name);

/** Enqueues fn(arg) for the device's worker. Only for devices with a worker (not the host). */
td_status td__device_submit(struct td__device *device, void (*fn)(void *), void *arg);

/** Whether the calling thread is the worker of the device. */
bool td__device_is_here(const struct td__device *device);

#endif
