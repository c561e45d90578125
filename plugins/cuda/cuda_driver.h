/* libcuda, CUDA's driver, reached when the plug-in runs: a process without a GPU does not need it. */
#ifndef CUDA_DRIVER_H
#define CUDA_DRIVER_H

#include <tandem/base.h>

#include <cuda.h>

/* The functions that are used, with the names that the driver exports. */
#define TD__CUDA_FUNCTIONS(F)                                                                      \
    F(cuInit)                                                                                      \
    F(cuDriverGetVersion)                                                                          \
    F(cuGetErrorName)                                                                              \
    F(cuGetErrorString)                                                                            \
    F(cuDeviceGet)                                                                                 \
    F(cuDeviceGetCount)                                                                            \
    F(cuDeviceGetName)                                                                             \
    F(cuDeviceGetAttribute)                                                                        \
    F(cuDevicePrimaryCtxRetain)                                                                    \
    F(cuCtxGetCurrent)                                                                             \
    F(cuCtxSetCurrent)                                                                             \
    F(cuCtxSynchronize)                                                                            \
    F(cuMemGetInfo_v2)                                                                             \
    F(cuMemAlloc_v2)                                                                               \
    F(cuMemFree_v2)                                                                                \
    F(cuMemHostAlloc)                                                                              \
    F(cuMemHostGetDevicePointer_v2)                                                                \
    F(cuMemFreeHost)                                                                               \
    F(cuMemcpyHtoDAsync_v2)                                                                        \
    F(cuMemcpyDtoHAsync_v2)                                                                        \
    F(cuMemcpyDtoDAsync_v2)                                                                        \
    F(cuMemcpyPeerAsync)                                                                           \
    F(cuMemsetD8Async)                                                                             \
    F(cuStreamCreateWithPriority)                                                                  \
    F(cuStreamDestroy_v2)                                                                          \
    F(cuStreamSynchronize)                                                                         \
    F(cuStreamQuery)                                                                               \
    F(cuStreamWaitEvent)                                                                           \
    F(cuStreamIsCapturing)                                                                         \
    F(cuEventCreate)                                                                               \
    F(cuEventDestroy_v2)                                                                           \
    F(cuEventRecord)                                                                               \
    F(cuEventSynchronize)                                                                          \
    F(cuEventQuery)                                                                                \
    F(cuEventElapsedTime_v2)                                                                       \
    F(cuLibraryLoadData)                                                                           \
    F(cuLibraryGetKernel)                                                                          \
    F(cuKernelGetFunction)                                                                         \
    F(cuFuncSetAttribute)                                                                          \
    F(cuLaunchKernel)                                                                              \
    F(cuStreamBeginCapture_v2)                                                                     \
    F(cuStreamEndCapture)                                                                          \
    F(cuGraphCreate)                                                                               \
    F(cuGraphAddKernelNode_v2)                                                                     \
    F(cuGraphExecKernelNodeSetParams_v2)                                                           \
    F(cuGraphInstantiateWithFlags)                                                                 \
    F(cuGraphLaunch)                                                                               \
    F(cuGraphExecDestroy)                                                                          \
    F(cuGraphDestroy)

struct cuda_driver {
#define TD__CUDA_MEMBER(name) __typeof__(&name) name;
    TD__CUDA_FUNCTIONS(TD__CUDA_MEMBER)
#undef TD__CUDA_MEMBER
    char path[512]; /* of the file that was loaded */
    int version;    /* 12080 is CUDA 12.8 */
};

/** Loads the driver and initialises it, once: TANDEM_CUDA_SO if set, else libcuda.so.1. Later calls return the same,
 *  with the same error. */
td_status td__cuda_load(void);

/** After td__cuda_load() has returned TD_OK. */
extern struct cuda_driver td__cuda;

/** TD_OK, or the failure of a call of the driver: `what` failed, such as "cuda:0: copying to the device". */
td_status td__cuda_check(CUresult result, const char *what);

/** The number of devices without initialising the driver, from libnvidia-ml and CUDA_VISIBLE_DEVICES; -1: it cannot
 *  tell. */
int td__cuda_count_quietly(void);

#endif
