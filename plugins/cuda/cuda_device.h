/* A GPU as a device: its context, and where its kernels report faults. */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include "cuda/cuda_args.h"
#include "cuda/cuda_driver.h"

#include <tandem/device_ops.h>

struct cuda_device {
    char name[16]; /* "cuda:0" */
    CUdevice device;
    CUcontext context;
    int processors;           /* multiprocessors */
    int shared_memory;        /* bytes of shared memory that a block may ask for */
    struct cuda_fault *fault; /* pinned: the host and the device both see it */
    CUdeviceptr fault_address;
};

/** The stream of a device; its first member is the driver's, as other plug-ins expect. */
struct cuda_stream {
    CUstream handle;
    struct cuda_relaunches *relaunches; /* NULL: none */
};

extern const td_device_ops td__cuda_ops;
extern const struct td_kernels td__cuda_kernels;

/** Makes the context of a device that of the calling thread; TD_ERR_… with what a kernel has reported earlier. */
td_status td__cuda_enter(const struct cuda_device *device);

#endif
