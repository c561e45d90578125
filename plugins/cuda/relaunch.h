/* Launches that a stream has made before.
 *
 * cuLaunchKernel() takes 3 to 4 µs of the host's time. A graph of one kernel, whose arguments are replaced before each launch, takes
 * half of that, provided that the kernel and its grid stay: with another kernel or grid the driver does the work of a launch again.
 * So a stream keeps such a graph for each kernel and grid that it has launched often enough:
 *
 *     launch 1 … 15     cuLaunchKernel(), and counted
 *     launch 16         cuGraphInstantiate(), 25 to 45 µs, and about 120 KiB of the device's memory
 *     launch 17 …       cuGraphExecKernelNodeSetParams(), cuGraphLaunch()
 *
 * On the device a kernel of a graph begins 0.1 to 0.2 µs later. So graphs are used while the device waits for the host, and not
 * while the host is ahead: every 32 launches an event shows whether the device has run what was launched 32 launches before.
 *
 * The order on the stream is the same, and so are the results. TANDEM_CUDA_RELAUNCH is another number than 16; 0: never. */
#ifndef CUDA_RELAUNCH_H
#define CUDA_RELAUNCH_H

#include "cuda/cuda_driver.h"

#include <stdbool.h>

/** A launch without its argument. */
struct cuda_launch {
    CUfunction function;
    unsigned blocks[3], threads, shared;
};

struct cuda_relaunches;

/** Those of a new stream of the default priority: graphs do not take that of the stream. NULL: it launches as ever, since
 *  that is set so, or without memory. */
struct cuda_relaunches *td__cuda_relaunches_create(void);
/** The context is current. NULL is ignored. */
void td__cuda_relaunches_free(struct cuda_relaunches *relaunches);

/** Launches a kernel on the stream, whose relaunches these are (NULL: none); false: the caller has to. By any thread, in the
 *  context of the device. */
bool td__cuda_relaunch(struct cuda_relaunches *relaunches, CUstream stream,
                       const struct cuda_launch *launch, void *args);

/** Between these a stream is captured, which others may join: nothing is launched by graphs. */
void td__cuda_relaunch_pause(void);
void td__cuda_relaunch_resume(void);

#endif
